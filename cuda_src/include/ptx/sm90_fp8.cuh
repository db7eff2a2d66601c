// Matrix products of a warp group of sm_90a in e4m3.
#pragma once

#include "ptx/sm90.cuh"

// As `wgmma`, of e4m3 in rows of 128 bytes along k: sums[64xN] = a[64x32] b[Nx32]^T, + sums where `add`. The
// tensor cores add with fewer bits than a float has, so `sums` are to be of a short k.
template <int N>
__device__ __forceinline__ void wgmma_e4m3(float (&sums)[N / 2], unsigned long long a, unsigned long long b,
                                           bool add);

// clang-format off
#define DEFINE_WGMMA_E4M3(N, FLOATS, NAMES, A, B, ADD)                                                    \
  template <>                                                                                             \
  __device__ __forceinline__ void wgmma_e4m3<N>(float (&sums)[N / 2], unsigned long long a,               \
                                                unsigned long long b, bool add) {                         \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" NAMES "}, " A ", "          \
                 B ", add, 1, 1;\n}"                                                                      \
                 : FLOATS                                                                                 \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                           \
  }
DEFINE_WGMMA_E4M3(16, WGMMA_FLOATS_8(0), "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "%10")
DEFINE_WGMMA_E4M3(32, WGMMA_FLOATS_16(0), WGMMA_NAMES_16, "%16", "%17", "%18")
DEFINE_WGMMA_E4M3(64, WGMMA_FLOATS_32, WGMMA_NAMES_32, "%32", "%33", "%34")
DEFINE_WGMMA_E4M3(96, WGMMA_FLOATS_48, WGMMA_NAMES_48, "%48", "%49", "%50")
DEFINE_WGMMA_E4M3(128, WGMMA_FLOATS_64, WGMMA_NAMES_64, "%64", "%65", "%66")
DEFINE_WGMMA_E4M3(160, WGMMA_FLOATS_80, WGMMA_NAMES_80, "%80", "%81", "%82")
DEFINE_WGMMA_E4M3(192, WGMMA_FLOATS_96, WGMMA_NAMES_96, "%96", "%97", "%98")
// clang-format on
