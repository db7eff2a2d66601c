// Numbers as integers from -127 to 127 times a scale.
#pragma once

#include "common.cuh"
#include "pairs.cuh"

constexpr float LARGEST_CODE = 127.0f;
constexpr float LEAST_INT8_SCALE = 1.17549435e-38f;  // a normal float, as its reciprocal is

struct Int8Scale {
  float scale, inverse;

  // That makes `largest` 127, and zeros zeros. NaN and infinity stay, and so reach what is multiplied by
  // them.
  static __device__ __forceinline__ Int8Scale of(float largest) {
    float scale = __fdiv_rn(largest, LARGEST_CODE);
    if (scale < LEAST_INT8_SCALE) scale = largest > 0.0f ? LEAST_INT8_SCALE : 1.0f;
    return {scale, __frcp_rn(scale)};
  }
  // Of the magnitude whose bits, as a 16-bit T, these are.
  template <typename T>
  static __device__ __forceinline__ Int8Scale of_bits(unsigned bits) {
    return of(to_float(__builtin_bit_cast(T, static_cast<unsigned short>(bits))));
  }
};

// The bits of the largest magnitude of eight 16-bit floats: as integers they are in the order of the
// magnitudes, and NaN is above all.
__device__ __forceinline__ unsigned largest_magnitude(const uint4& raw) {
  constexpr unsigned MAGNITUDES = 0x7fff7fff;
  const unsigned largest = __vmaxu2(__vmaxu2(raw.x & MAGNITUDES, raw.y & MAGNITUDES),
                                    __vmaxu2(raw.z & MAGNITUDES, raw.w & MAGNITUDES));
  return max(largest & 0xffff, largest >> 16);
}

// Eight numbers times `inverse` to nearest, the first in the lowest byte.
__device__ __forceinline__ uint2 int8_codes(const float (&numbers)[8], float inverse) {
  unsigned words[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    words[i / 4] |= (static_cast<unsigned>(__float2int_rn(numbers[i] * inverse)) & 0xff) << i % 4 * 8;
  }
  return make_uint2(words[0], words[1]);
}

template <typename T>
__device__ __forceinline__ uint2 int8_codes(const uint4& raw, float inverse) {
  const Vec<T, 8> values = __builtin_bit_cast(Vec<T, 8>, raw);
  float numbers[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) numbers[i] = to_float(values.data[i]);
  return int8_codes(numbers, inverse);
}

// Eight halves of at most 127 in magnitude: in 1536 more, the last bits are the integer that is nearest.
__device__ __forceinline__ uint2 int8_codes_of_halves(const uint4& pairs) {
  constexpr unsigned MINUS_1536 = 0xe600e600, EVEN_BYTES = 0x6420;
  const auto moved = [](unsigned pair) { return subtract_pair<__half2>(pair, MINUS_1536); };
  return make_uint2(__byte_perm(moved(pairs.x), moved(pairs.y), EVEN_BYTES),
                    __byte_perm(moved(pairs.z), moved(pairs.w), EVEN_BYTES));
}

__device__ __forceinline__ void swap_vectors(uint2& a, uint2& b) {
  const uint2 other = a;
  a = b;
  b = other;
}
