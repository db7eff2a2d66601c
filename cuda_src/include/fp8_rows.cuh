// Activations as e4m3: scales and codes, as `Fp8Format.input_of` has them in engine/formats/fp8.py.
#pragma once

#include "common.cuh"
#include "ptx/fp8.cuh"

constexpr float E4M3_MAX = 448.0f;
constexpr float LEAST_SCALE = 1.17549435e-38f;  // a normal float, as its reciprocal is

// NaN is passed over: its code says that it is there.
template <int COUNT>
__device__ __forceinline__ float largest_of(const float (&values)[COUNT]) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) largest = fmaxf(largest, fabsf(values[i]));
  return largest;
}

// Makes `largest` 448, and zeros zeros.
__device__ __forceinline__ float scale_for(float largest) {
  return largest > 0.0f ? fmaxf(__fdiv_rn(largest, E4M3_MAX), LEAST_SCALE) : 1.0f;
}

// x / scale rounded to nearest, `inverse` being 1 / scale rounded to nearest: one step of Newton's method on
// the product (Markstein 1990). What is far beyond e4m3 stays as it is: the remainder might overflow.
__device__ __forceinline__ float quotient(float x, float scale, float inverse) {
  const float product = x * inverse;
  return fabsf(product) > 2 * E4M3_MAX ? product : fmaf(fmaf(-product, scale, x), inverse, product);
}

// Eight codes, the first in the lowest byte.
__device__ __forceinline__ uint2 e4m3_codes(const float (&values)[8], float scale) {
  const float inverse = __fdiv_rn(1.0f, scale);
  unsigned words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float scaled[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) scaled[j] = quotient(values[i * 4 + j], scale, inverse);
    words[i] = pack_e4m3(scaled[0], scaled[1]) | static_cast<unsigned>(pack_e4m3(scaled[2], scaled[3])) << 16;
  }
  return make_uint2(words[0], words[1]);
}
