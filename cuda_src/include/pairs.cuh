// Two 16-bit elements in a register.
#pragma once

#include "common.cuh"

template <typename T>
struct pair_of {
  using type = __half2;
};
template <>
struct pair_of<__nv_bfloat16> {
  using type = __nv_bfloat162;
};

template <typename Pair>
__device__ __forceinline__ unsigned multiply_pair(unsigned a, unsigned b) {
  const Pair product = __hmul2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const unsigned&>(product);
}
template <typename Pair>
__device__ __forceinline__ unsigned subtract_pair(unsigned a, unsigned b) {
  const Pair difference = __hsub2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const unsigned&>(difference);
}
// a * b + c, rounded once.
template <typename Pair>
__device__ __forceinline__ unsigned multiply_add_pair(unsigned a, unsigned b, unsigned c) {
  const Pair sum = __hfma2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b),
                           reinterpret_cast<const Pair&>(c));
  return reinterpret_cast<const unsigned&>(sum);
}

// (word & mask) | base in one instruction, for which the compiler takes two where both are constants.
__device__ __forceinline__ unsigned mask_into(unsigned word, unsigned mask, unsigned base) {
  unsigned result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(base));
  return result;
}
