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

// The elements of a pair as floats, and floats rounded to one.
template <typename Pair>
__device__ __forceinline__ float2 floats_of_pair(unsigned a);
template <>
__device__ __forceinline__ float2 floats_of_pair<__half2>(unsigned a) {
  const __half2 pair = reinterpret_cast<const __half2&>(a);
  return make_float2(to_float(pair.x), to_float(pair.y));
}
template <>
__device__ __forceinline__ float2 floats_of_pair<__nv_bfloat162>(unsigned a) {
  return make_float2(__uint_as_float(a << 16), __uint_as_float(a & 0xffff0000u));
}
template <typename Pair>
__device__ __forceinline__ unsigned pair_of_floats(float low, float high);
template <>
__device__ __forceinline__ unsigned pair_of_floats<__half2>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}
template <>
__device__ __forceinline__ unsigned pair_of_floats<__nv_bfloat162>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}

// (word & mask) | base in one instruction, for which the compiler takes two where both are constants.
__device__ __forceinline__ unsigned mask_into(unsigned word, unsigned mask, unsigned base) {
  unsigned result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(base));
  return result;
}
