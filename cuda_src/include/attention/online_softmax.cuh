// The softmax over keys that come in tiles, in one pass: running maximum and sum of weights as in "Online
// normalizer calculation for softmax" (Milakov and Gimelshein 2018).
#pragma once

#include "attention/attention.cuh"
#include "ptx/mma.cuh"

// By how much a maximum may grow, in powers of two, before weights are made relative to it.
constexpr float LARGEST_GROWTH = 8.0f;

// A row of scores of which the four lanes 4 g to 4 g + 3 hold some columns each, as of sums of ptx/mma.cuh.
// Weights are 2^((score - maximum) * scale_log2); scale_log2 is positive.
struct RowSoftmax {
  float maximum = MINUS_INFINITY;  // of the scores so far
  float sum = 0.0f;                // of this lane's weights
  float factor;                    // takes what was summed before the last `renew` to the new maximum

  // `lane_maximum`: of this lane's new scores, and `maximum` itself. Returns the new offset of `weight`.
  // EXACT: `factor` is 1 where the maximum stays as it is, so that tiles without a visible key change
  // nothing.
  template <bool EXACT = false>
  __device__ __forceinline__ float renew(float lane_maximum, float scale_log2) {
    lane_maximum = of_all_lanes(lane_maximum);
    const float offset = lane_maximum == MINUS_INFINITY ? 0.0f : lane_maximum * scale_log2;
    factor = exp2_fast(EXACT ? __fmul_rn(maximum, scale_log2) - offset : maximum * scale_log2 - offset);
    maximum = lane_maximum;
    return offset;
  }

  // As `renew`; where the maximum has grown by no more than LARGEST_GROWTH, the weights stay relative to the
  // one before, are up to 2^LARGEST_GROWTH, and `factor` is 1.
  __device__ __forceinline__ float renew_if_grown(float lane_maximum, float scale_log2) {
    const float before = maximum, most = of_all_lanes(lane_maximum);
    const bool stays = (most - before) * scale_log2 <= LARGEST_GROWTH;
    maximum = stays ? before : most;
    const float offset = maximum == MINUS_INFINITY ? 0.0f : maximum * scale_log2;
    factor = stays ? 1.0f : exp2_fast(before * scale_log2 - offset);
    return offset;
  }

  // The largest of the four lanes'.
  static __device__ __forceinline__ float of_all_lanes(float lane_maximum) {
    lane_maximum = fmaxf(lane_maximum, __shfl_xor_sync(FULL_WARP, lane_maximum, 1));
    return fmaxf(lane_maximum, __shfl_xor_sync(FULL_WARP, lane_maximum, 2));
  }

  static __device__ __forceinline__ float weight(float score, float scale_log2, float offset) {
    return exp2_fast(fmaf(score, scale_log2, -offset));
  }

  // The new scores' weights.
  __device__ __forceinline__ void add(float weights) { sum = sum * factor + weights; }

  // The sum of all lanes' weights.
  __device__ __forceinline__ float row_sum() const {
    float total = sum;
    total += __shfl_xor_sync(FULL_WARP, total, 1);
    total += __shfl_xor_sync(FULL_WARP, total, 2);
    return total;
  }

  // Turns a weighted sum into a weighted mean; 0 for a row that saw no key.
  static __device__ __forceinline__ float inverse(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }
};
