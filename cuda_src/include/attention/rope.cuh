// What becomes of one head before attention: norm, then rotary embedding.
#pragma once

#include "common.cuh"

// y[i] = x[i] / sqrt(mean(x^2) + eps) * norm[i], or x[i] without a norm; then, with half = rotary_dim / 2 and
// i < half:
//   z[i] = y[i] * cos[i] - y[i + half] * sin[i],  z[i + half] = y[i + half] * cos[i] + y[i] * sin[i];
// elements from rotary_dim on stay as they are.
//
// By one warp, whose lanes hold norm and angles from the construction on. Every kernel that does this rounds
// alike, whatever its MAX_HEAD_DIM.
template <int MAX_HEAD_DIM, int VECTOR, typename T>
class HeadTransform {
  using Floats = Vec<float, VECTOR>;
  static constexpr int STRIDE = WARP_SIZE * VECTOR;
  static constexpr int MAX_PAIRS = ceil_div(MAX_HEAD_DIM / 2, STRIDE);
  static constexpr int MAX_OTHERS = ceil_div(MAX_HEAD_DIM, STRIDE);

 public:
  using Elements = Vec<T, VECTOR>;

  // norm [head_dim] T or null; cos_sin [rotary_dim] float, cosines, then sines, or null if rotary_dim is 0.
  // head_dim <= MAX_HEAD_DIM. VECTOR = 2 needs all pointers aligned to two elements, head_dim and rotary_dim
  // / 2 even.
  __device__ __forceinline__ HeadTransform(const T* norm, const float* cos_sin, int head_dim, int rotary_dim,
                                           float eps)
      : has_norm_(norm != nullptr), head_dim_(head_dim), rotary_dim_(rotary_dim), eps_(eps) {
    const int half = rotary_dim / 2;
#pragma unroll
    for (int p = 0; p < MAX_PAIRS; ++p) {
      if (pair_at(p) >= half) continue;
      cosines_[p] = Floats::load(cos_sin + pair_at(p));
      sines_[p] = Floats::load(cos_sin + half + pair_at(p));
      if (!has_norm_) continue;
      low_norm_[p] = Elements::load(norm + pair_at(p));
      high_norm_[p] = Elements::load(norm + half + pair_at(p));
    }
#pragma unroll
    for (int p = 0; p < MAX_OTHERS; ++p) {
      if (has_norm_ && other_at(p) < head_dim) other_norm_[p] = Elements::load(norm + other_at(p));
    }
  }

  // A lane's part of a head, as it is in memory.
  struct Head {
    Elements low[MAX_PAIRS], high[MAX_PAIRS], others[MAX_OTHERS];
  };

  // x [head_dim] T.
  __device__ __forceinline__ Head load(const T* x) const {
    const int half = rotary_dim_ / 2;
    Head head;
#pragma unroll
    for (int p = 0; p < MAX_PAIRS; ++p) {
      if (pair_at(p) >= half) continue;
      head.low[p] = Elements::load(x + pair_at(p));
      head.high[p] = Elements::load(x + half + pair_at(p));
    }
#pragma unroll
    for (int p = 0; p < MAX_OTHERS; ++p) {
      if (other_at(p) < head_dim_) head.others[p] = Elements::load(x + other_at(p));
    }
    return head;
  }

  // store(i, VECTOR elements z[i], ... rounded to T) is called for each i.
  template <typename Store>
  __device__ __forceinline__ void operator()(const Head& head, Store store) const {
    const int half = rotary_dim_ / 2;
    Floats low[MAX_PAIRS], high[MAX_PAIRS], others[MAX_OTHERS];
#pragma unroll
    for (int p = 0; p < MAX_PAIRS; ++p) {
      if (pair_at(p) >= half) continue;
      low[p] = floats(head.low[p]);
      high[p] = floats(head.high[p]);
    }
#pragma unroll
    for (int p = 0; p < MAX_OTHERS; ++p) {
      if (other_at(p) < head_dim_) others[p] = floats(head.others[p]);
    }

    if (has_norm_) {
      float squares = 0.0f;
#pragma unroll
      for (int p = 0; p < MAX_PAIRS; ++p) {
        if (pair_at(p) < half) squares = add_squares(add_squares(squares, low[p]), high[p]);
      }
#pragma unroll
      for (int p = 0; p < MAX_OTHERS; ++p) {
        if (other_at(p) < head_dim_) squares = add_squares(squares, others[p]);
      }
      const float inverse_rms = rsqrtf(warp_sum(squares) / head_dim_ + eps_);
#pragma unroll
      for (int p = 0; p < MAX_PAIRS; ++p) {
        if (pair_at(p) >= half) continue;
        scale(low[p], inverse_rms, low_norm_[p]);
        scale(high[p], inverse_rms, high_norm_[p]);
      }
#pragma unroll
      for (int p = 0; p < MAX_OTHERS; ++p) {
        if (other_at(p) < head_dim_) scale(others[p], inverse_rms, other_norm_[p]);
      }
    }

#pragma unroll
    for (int p = 0; p < MAX_PAIRS; ++p) {
      if (pair_at(p) >= half) continue;
      Elements front, back;
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) {  // spelled out, so that no kernel fuses another product
        front[e] = from_float<T>(fmaf(low[p][e], cosines_[p][e], -__fmul_rn(high[p][e], sines_[p][e])));
        back[e] = from_float<T>(fmaf(high[p][e], cosines_[p][e], __fmul_rn(low[p][e], sines_[p][e])));
      }
      store(pair_at(p), front);
      store(half + pair_at(p), back);
    }
#pragma unroll
    for (int p = 0; p < MAX_OTHERS; ++p) {
      if (other_at(p) >= head_dim_) continue;
      Elements rounded;
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) rounded[e] = from_float<T>(others[p][e]);
      store(other_at(p), rounded);
    }
  }

 private:
  // A lane's places in a head: pairs at pair_at(p) and half a rotation after it, others at other_at(p).
  __device__ __forceinline__ int pair_at(int p) const {
    return threadIdx.x % WARP_SIZE * VECTOR + p * STRIDE;
  }
  __device__ __forceinline__ int other_at(int p) const { return rotary_dim_ + pair_at(p); }

  static __device__ __forceinline__ Floats floats(const Elements& elements) {
    Floats result;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) result[e] = to_float(elements[e]);
    return result;
  }
  static __device__ __forceinline__ float add_squares(float sum, const Floats& y) {
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) sum = fmaf(y[e], y[e], sum);
    return sum;
  }
  static __device__ __forceinline__ void scale(Floats& y, float inverse_rms, const Elements& norm) {
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) y[e] = y[e] * inverse_rms * to_float(norm[e]);
  }

  bool has_norm_;
  int head_dim_;
  int rotary_dim_;
  float eps_;
  Floats cosines_[MAX_PAIRS];
  Floats sines_[MAX_PAIRS];
  Elements low_norm_[MAX_PAIRS];
  Elements high_norm_[MAX_PAIRS];
  Elements other_norm_[MAX_OTHERS];
};
