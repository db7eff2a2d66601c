// What becomes of one head before attention: norm, then rotary embedding.
#pragma once

#include "common.cuh"

// y[i] = x[i] / sqrt(mean(x^2) + eps) * norm[i], or x[i] without a norm; then, with half = rotary_dim / 2 and
// i < half:
//   z[i] = y[i] * cos[i] - y[i + half] * sin[i],  z[i + half] = y[i + half] * cos[i] + y[i] * sin[i];
// elements from rotary_dim on stay as they are. `store` gets each z as (index, VECTOR elements rounded to T).
//
// x [head_dim] T; norm [head_dim] T or null; cos_sin [rotary_dim] float, cosines, then sines, or null if
// rotary_dim is 0. head_dim <= MAX_HEAD_DIM. VECTOR = 2 needs pointers aligned to two elements, head_dim and
// rotary_dim / 2 even. By one warp. Every kernel that calls it rounds alike, whatever its MAX_HEAD_DIM.
template <int MAX_HEAD_DIM, int VECTOR, typename T, typename Store>
__device__ __forceinline__ void norm_and_rotate(const T* x, const T* norm, const float* cos_sin, int head_dim,
                                                int rotary_dim, float eps, Store store) {
  constexpr int STRIDE = WARP_SIZE * VECTOR;
  constexpr int MAX_PAIRS = ceil_div(MAX_HEAD_DIM / 2, STRIDE);
  constexpr int MAX_OTHERS = ceil_div(MAX_HEAD_DIM, STRIDE);
  using Elements = Vec<T, VECTOR>;
  using Floats = Vec<float, VECTOR>;
  const int half = rotary_dim / 2;
  const int first = threadIdx.x % WARP_SIZE * VECTOR;

  // A lane's places in a head: pairs at `pair_at(p)` and half a rotation after it, others at `other_at(p)`.
  auto pair_at = [&](int p) { return first + p * STRIDE; };
  auto other_at = [&](int p) { return rotary_dim + first + p * STRIDE; };
  Floats low[MAX_PAIRS], high[MAX_PAIRS], others[MAX_OTHERS];
  auto load = [](const T* from) {
    const Elements elements = Elements::load(from);
    Floats floats;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) floats[e] = to_float(elements[e]);
    return floats;
  };
#pragma unroll
  for (int p = 0; p < MAX_PAIRS; ++p) {
    if (pair_at(p) >= half) continue;
    low[p] = load(x + pair_at(p));
    high[p] = load(x + half + pair_at(p));
  }
#pragma unroll
  for (int p = 0; p < MAX_OTHERS; ++p) {
    if (other_at(p) < head_dim) others[p] = load(x + other_at(p));
  }

  if (norm != nullptr) {
    float squares = 0.0f;
    auto square = [&](const Floats& y) {
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) squares = fmaf(y[e], y[e], squares);
    };
#pragma unroll
    for (int p = 0; p < MAX_PAIRS; ++p) {
      if (pair_at(p) >= half) continue;
      square(low[p]);
      square(high[p]);
    }
#pragma unroll
    for (int p = 0; p < MAX_OTHERS; ++p) {
      if (other_at(p) < head_dim) square(others[p]);
    }
    const float inverse_rms = rsqrtf(warp_sum(squares) / head_dim + eps);
    auto scale = [&](Floats& y, int i) {
      const Floats weight = load(norm + i);
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) y[e] = y[e] * inverse_rms * weight[e];
    };
#pragma unroll
    for (int p = 0; p < MAX_PAIRS; ++p) {
      if (pair_at(p) >= half) continue;
      scale(low[p], pair_at(p));
      scale(high[p], half + pair_at(p));
    }
#pragma unroll
    for (int p = 0; p < MAX_OTHERS; ++p) {
      if (other_at(p) < head_dim) scale(others[p], other_at(p));
    }
  }

#pragma unroll
  for (int p = 0; p < MAX_PAIRS; ++p) {
    if (pair_at(p) >= half) continue;
    const Floats cosines = Floats::load(cos_sin + pair_at(p));
    const Floats sines = Floats::load(cos_sin + half + pair_at(p));
    Elements front, back;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {  // spelled out, so that no kernel fuses another product
      front[e] = from_float<T>(fmaf(low[p][e], cosines[e], -__fmul_rn(high[p][e], sines[e])));
      back[e] = from_float<T>(fmaf(high[p][e], cosines[e], __fmul_rn(low[p][e], sines[e])));
    }
    store(pair_at(p), front);
    store(half + pair_at(p), back);
  }
#pragma unroll
  for (int p = 0; p < MAX_OTHERS; ++p) {
    if (other_at(p) >= head_dim) continue;
    Elements rounded;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) rounded[e] = from_float<T>(others[p][e]);
    store(other_at(p), rounded);
  }
}
