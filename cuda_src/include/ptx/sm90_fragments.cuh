// Products of sm_90a with rows that lie in registers.
#pragma once

#include "ptx/sm90.cuh"

// Start sums[64xN] = a[64x16] b[Nx16]^T, + sums where `add`: as `wgmma`, with a in registers like
// mma.m16n8k16's, of each warp its 16 rows. They must stay as they are until the product is waited for.
template <typename T, int N>
__device__ __forceinline__ void wgmma_fragment(float (&sums)[N / 2], const unsigned (&a)[4],
                                               unsigned long long b, bool add);

// clang-format off
#define DEFINE_WGMMA_FRAGMENT(T, TYPE, N, FLOATS, NAMES, A, B, ADD)                                          \
  template <>                                                                                               \
  __device__ __forceinline__ void wgmma_fragment<T, N>(float (&sums)[N / 2], const unsigned (&a)[4],        \
                                                       unsigned long long b, bool add) {                    \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES "}, {" A "}, "   \
                 B ", add, 1, 1, 0;\n}"                                                                     \
                 : FLOATS                                                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));         \
  }
#define DEFINE_WGMMA_FRAGMENT_SIZES(T, TYPE)                                                                 \
  DEFINE_WGMMA_FRAGMENT(T, TYPE, 32, WGMMA_FLOATS_16(0), WGMMA_NAMES_16, "%16, %17, %18, %19", "%20", "%21")     \
  DEFINE_WGMMA_FRAGMENT(T, TYPE, 64, WGMMA_FLOATS_32, WGMMA_NAMES_32, "%32, %33, %34, %35", "%36", "%37")     \
  DEFINE_WGMMA_FRAGMENT(T, TYPE, 128, WGMMA_FLOATS_64, WGMMA_NAMES_64, "%64, %65, %66, %67", "%68", "%69")    \
  DEFINE_WGMMA_FRAGMENT(T, TYPE, 256, WGMMA_FLOATS_128, WGMMA_NAMES_128, "%128, %129, %130, %131", "%132", "%133")
// clang-format on

DEFINE_WGMMA_FRAGMENT_SIZES(__nv_bfloat16, "bf16")
DEFINE_WGMMA_FRAGMENT_SIZES(__half, "f16")
