// Activations as e4m3: scales and codes, as `Fp8Format.input_of` has them in engine/formats/fp8.py.
#pragma once

#include "common.cuh"
#include "pairs.cuh"
#include "ptx/fp8.cuh"

constexpr float E4M3_MAX = 448.0f;
constexpr float LEAST_SCALE = 1.17549435e-38f;  // a normal float, as its reciprocal is

// Of eight elements. NaN is passed over: its code says that it is there.
template <typename T>
__device__ __forceinline__ float largest_of_vector(const uint4& raw) {
  using Pair = typename pair_of<T>::type;
  const auto magnitudes = [](const unsigned& word) { return __habs2(reinterpret_cast<const Pair&>(word)); };
  const Pair largest =
      __hmax2(__hmax2(magnitudes(raw.x), magnitudes(raw.y)), __hmax2(magnitudes(raw.z), magnitudes(raw.w)));
  return fmaxf(fmaxf(to_float(largest.x), to_float(largest.y)), 0.0f);
}

// Makes `largest` 448, and zeros zeros.
__device__ __forceinline__ float scale_for(float largest) {
  return largest > 0.0f ? fmaxf(__fdiv_rn(largest, E4M3_MAX), LEAST_SCALE) : 1.0f;
}

// x / scale rounded to nearest, `inverse` being 1 / scale rounded to nearest: one step of Newton's method on
// the product (Markstein 1990).
__device__ __forceinline__ float quotient(float x, float scale, float inverse) {
  const float product = x * inverse;
  return fmaf(fmaf(-product, scale, x), inverse, product);
}

// Eight codes, the first in the lowest byte; `inverse` as in `quotient`. Where the scale is not theirs but
// `given`, a product that is far beyond e4m3 stays as it is: the remainder might overflow.
template <typename T>
__device__ __forceinline__ uint2 e4m3_codes(const uint4& raw, float scale, float inverse, bool given) {
  const Vec<T, 8> values = __builtin_bit_cast(Vec<T, 8>, raw);
  float scaled[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) scaled[i] = quotient(to_float(values.data[i]), scale, inverse);
  if (given) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float product = to_float(values.data[i]) * inverse;
      if (fabsf(product) > 2 * E4M3_MAX) scaled[i] = product;
    }
  }
  return make_uint2(pack_four_e4m3(scaled), pack_four_e4m3(scaled + 4));
}
