// Products of sm_90a whose operands lie with rows or columns, not k, along their lines: M- and N-major in the
// PTX ISA, "Shared Memory Matrix Layout" of wgmma.
#pragma once

#include "ptx/sm90.cuh"

// Where a turned operand lies: lines of 64 2-byte elements along its rows or columns (128 bytes), one after
// another along k, 16-byte segments XORed with the line modulo 8 (what a map with 128-byte swizzle writes);
// behind LINES of them the next 64 rows or columns. `shared` is a multiple of 1024. In a descriptor the
// leading offset leads from 64 rows or columns to the next 64, the stride from 8 lines to the next 8. The
// operand 16 lines further on is at descriptor + TURNED_STEP_K.
template <int LINES>
__device__ __forceinline__ unsigned long long turned_descriptor(const void* shared) {
  static_assert(LINES % 8 == 0, "boxes end where the swizzle repeats");
  constexpr unsigned long long SWIZZLE_128 = 1ull << 62;
  constexpr unsigned long long STRIDE = static_cast<unsigned long long>(SWIZZLE_REPEAT >> 4) << 32;
  constexpr unsigned long long LEAD = static_cast<unsigned long long>(LINES * SWIZZLE_BYTES >> 4) << 16;
  return SWIZZLE_128 | STRIDE | LEAD | ((shared_address(shared) & 0x3ffff) >> 4);
}
constexpr unsigned long long TURNED_STEP_K = 16 * SWIZZLE_BYTES >> 4;

// Start sums[64xN] = a[64x16] b[16xN], + sums where `add`, with b turned, and a as well if TURNED_A; sums as
// in `wgmma`.
template <typename T, bool TURNED_A>
__device__ __forceinline__ void wgmma_turned(float (&sums)[32], unsigned long long a, unsigned long long b,
                                             bool add);
template <typename T, bool TURNED_A>
__device__ __forceinline__ void wgmma_turned(float (&sums)[64], unsigned long long a, unsigned long long b,
                                             bool add);
template <typename T, bool TURNED_A>
__device__ __forceinline__ void wgmma_turned(float (&sums)[128], unsigned long long a, unsigned long long b,
                                             bool add);

// clang-format off
#define DEFINE_WGMMA_TURNED(T, TYPE, TURNED_A, TRANSPOSE_A, N, FLOATS, NAMES, A, B, ADD)                     \
  template <>                                                                                               \
  __device__ __forceinline__ void wgmma_turned<T, TURNED_A>(float (&sums)[N / 2], unsigned long long a,      \
                                                            unsigned long long b, bool add) {               \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES "}, " A ", "    \
                 B ", add, 1, 1, " TRANSPOSE_A ", 1;\n}"                                                    \
                 : FLOATS                                                                                   \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                             \
  }
#define DEFINE_WGMMA_TURNED_SIZES(T, TYPE, TURNED_A, TRANSPOSE_A)                                             \
  DEFINE_WGMMA_TURNED(T, TYPE, TURNED_A, TRANSPOSE_A, 64, WGMMA_FLOATS_32, WGMMA_NAMES_32, "%32", "%33", "%34") \
  DEFINE_WGMMA_TURNED(T, TYPE, TURNED_A, TRANSPOSE_A, 128, WGMMA_FLOATS_64, WGMMA_NAMES_64, "%64", "%65", "%66") \
  DEFINE_WGMMA_TURNED(T, TYPE, TURNED_A, TRANSPOSE_A, 256, WGMMA_FLOATS_128, WGMMA_NAMES_128, "%128", "%129", "%130")
// clang-format on

DEFINE_WGMMA_TURNED_SIZES(__nv_bfloat16, "bf16", false, "0")
DEFINE_WGMMA_TURNED_SIZES(__nv_bfloat16, "bf16", true, "1")
DEFINE_WGMMA_TURNED_SIZES(__half, "f16", false, "0")
DEFINE_WGMMA_TURNED_SIZES(__half, "f16", true, "1")
