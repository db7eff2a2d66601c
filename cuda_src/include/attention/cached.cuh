// Elements of the KV cache: those of the activations, or e4m3 as `unsigned char`, each head with a scale.
#pragma once

#include "common.cuh"
#include "ptx/fp8.cuh"
#include "ptx/mma.cuh"

template <typename Cached>
constexpr bool IS_E4M3 = sizeof(Cached) == 1;

template <typename A, typename B>
constexpr bool IS_SAME = false;
template <typename A>
constexpr bool IS_SAME<A, A> = true;

// What products on tensor cores take, where codes of e4m3 are not multiplied by their scales.
template <typename T, typename Cached>
struct operand_of {
  using type = T;
};
template <typename T>
struct operand_of<T, unsigned char> {
  using type = __half;
};
template <typename T, typename Cached>
using OperandOf = typename operand_of<T, Cached>::type;

// What a head's keys (0) or values (1) are to be multiplied by; scales [2, num_kv_heads] or null: 1.
__device__ __forceinline__ float cache_scale(const float* scales, int kind, int num_kv_heads, int kv_head) {
  return scales == nullptr ? 1.0f : scales[kind * num_kv_heads + kv_head];
}

// One or two elements as e4m3. Most caches have no scales, and a division takes longer than all else.
template <int VECTOR, typename T>
__device__ __forceinline__ void store_e4m3(unsigned char* to, const Vec<T, VECTOR>& elements, float scale) {
  float low = to_float(elements[0]);
  float high = VECTOR == 2 ? to_float(elements[VECTOR - 1]) : 0.0f;
  if (scale != 1.0f) {
    low = __fdiv_rn(low, scale);
    high = __fdiv_rn(high, scale);
  }
  const unsigned short codes = pack_e4m3(low, high);
  if constexpr (VECTOR == 2) {
    *reinterpret_cast<unsigned short*>(to) = codes;
  } else {
    *to = static_cast<unsigned char>(codes);
  }
}

// Two floats that two codes are.
__device__ __forceinline__ float2 floats_of_e4m3(unsigned short codes) {
  const Vec<__half, 2> pair = __builtin_bit_cast(Vec<__half, 2>, unpack_e4m3(codes));
  return make_float2(to_float(pair[0]), to_float(pair[1]));
}

// Eight codes as __half, exactly.
__device__ __forceinline__ uint4 halves_of_e4m3(unsigned first, unsigned second) {
  const uint2 begin = unpack_four_e4m3(first), end = unpack_four_e4m3(second);
  return make_uint4(begin.x, begin.y, end.x, end.y);
}

// What of queries meets codes that have become __half: beyond its range its largest.
template <typename T>
__device__ __forceinline__ unsigned half_pair(T low, T high) {
  constexpr float LARGEST = 65504.0f;
  auto in_range = [](float x) { return x > LARGEST ? LARGEST : x < -LARGEST ? -LARGEST : x; };
  return pack<__half>(in_range(to_float(low)), in_range(to_float(high)));
}

// Sixteen codes times their scale to `to`, 16-byte aligned.
template <typename T>
__device__ __forceinline__ void widen_e4m3(T* to, const uint4& codes, float scale) {
  const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
  unsigned pairs[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 values = floats_of_e4m3(static_cast<unsigned short>(words[i / 2] >> i % 2 * 16));
    pairs[i] = pack<T>(values.x * scale, values.y * scale);
  }
  reinterpret_cast<uint4*>(to)[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  reinterpret_cast<uint4*>(to)[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}
