// Tensor-core instructions of sm_80 and later, one function an instruction. Lane numbers below: g = lane / 4,
// t = lane % 4 (PTX ISA, "Matrix Fragments for mma.m16n8k16").
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "generated/tensor_cores.cuh"

// c[16x8] += a[16x16] b[16x8]. c: {(g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)}. a, in pairs of columns:
// {(g, 2t), (g+8, 2t), (g, 2t+8), (g+8, 2t+8)}. b, in pairs of rows: {(2t, g), (2t+8, g)}.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]);

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&c)[4], const unsigned (&a)[4],
                                                            const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&c)[4], const unsigned (&a)[4],
                                                     const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c[16x8] += a[16x32] b[32x8] of bytes; a is signed if A_SIGNED, b is. c as above. a, in fours of columns:
// {(g, 4t), (g+8, 4t), (g, 4t+16), (g+8, 4t+16)}. b, in fours of rows: {(4t, g), (4t+16, g)}.
template <bool A_SIGNED>
__device__ __forceinline__ void mma_bytes(int (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]);

template <>
__device__ __forceinline__ void mma_bytes<false>(int (&c)[4], const unsigned (&a)[4],
                                                 const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void mma_bytes<true>(int (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8x8 matrices of 2-byte elements from shared memory. Lane l passes the 16-byte aligned address of row
// l % 8 of matrix l / 8 and gets of every matrix the elements (g, 2t) and (g, 2t+1).
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row) {
  ldmatrix_x4(r, static_cast<unsigned>(__cvta_generic_to_shared(row)));
}

// The same with every matrix transposed: a lane gets the elements (2t, g) and (2t+1, g).
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Two floats rounded to T as one register of a fragment, `low` first in memory order.
template <typename T>
__device__ __forceinline__ unsigned pack(float low, float high);

template <>
__device__ __forceinline__ unsigned pack<__nv_bfloat16>(float low, float high) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ unsigned pack<__half>(float low, float high) {
  unsigned packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
