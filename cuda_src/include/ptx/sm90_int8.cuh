// Matrix products of a warp group of sm_90a in integers of 8 bits.
#pragma once

#include "ptx/sm90.cuh"

// As `wgmma`, of integers in rows of 128 bytes along k: sums[64xN] = a[64x32] b[Nx32]^T, + sums where `add`.
template <int N>
__device__ __forceinline__ void wgmma_int8(int (&sums)[N / 2], unsigned long long a, unsigned long long b,
                                           bool add);

// clang-format off
#define WGMMA_INTS_16(i) WGMMA_INTS_8(i), WGMMA_INTS_8(i + 8)
#define WGMMA_INTS_8(i) "+r"(sums[i]), "+r"(sums[i + 1]), "+r"(sums[i + 2]), "+r"(sums[i + 3]), \
    "+r"(sums[i + 4]), "+r"(sums[i + 5]), "+r"(sums[i + 6]), "+r"(sums[i + 7])
#define WGMMA_INTS_32 WGMMA_INTS_16(0), WGMMA_INTS_16(16)
#define WGMMA_INTS_48 WGMMA_INTS_32, WGMMA_INTS_16(32)
#define WGMMA_INTS_64 WGMMA_INTS_48, WGMMA_INTS_16(48)
#define WGMMA_INTS_80 WGMMA_INTS_64, WGMMA_INTS_16(64)
#define WGMMA_INTS_96 WGMMA_INTS_80, WGMMA_INTS_16(80)
#define DEFINE_WGMMA_INT8(N, INTS, NAMES, A, B, ADD)                                                      \
  template <>                                                                                             \
  __device__ __forceinline__ void wgmma_int8<N>(int (&sums)[N / 2], unsigned long long a,                 \
                                                unsigned long long b, bool add) {                         \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" NAMES "}, " A ", "              \
                 B ", add;\n}"                                                                            \
                 : INTS                                                                                   \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                           \
  }
DEFINE_WGMMA_INT8(32, WGMMA_INTS_16(0), WGMMA_NAMES_16, "%16", "%17", "%18")
DEFINE_WGMMA_INT8(64, WGMMA_INTS_32, WGMMA_NAMES_32, "%32", "%33", "%34")
DEFINE_WGMMA_INT8(96, WGMMA_INTS_48, WGMMA_NAMES_48, "%48", "%49", "%50")
DEFINE_WGMMA_INT8(128, WGMMA_INTS_64, WGMMA_NAMES_64, "%64", "%65", "%66")
DEFINE_WGMMA_INT8(160, WGMMA_INTS_80, WGMMA_NAMES_80, "%80", "%81", "%82")
DEFINE_WGMMA_INT8(192, WGMMA_INTS_96, WGMMA_NAMES_96, "%96", "%97", "%98")
// clang-format on
