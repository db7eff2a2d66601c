// The way of sm_90 prefill attention's outputs from registers to memory, and the merging of split keys.
#pragma once

#include "attention/attention.cuh"
#include "prefill/sm90_prefill_codes.cuh"
#include "prefill/sm90_prefill_consumer.cuh"

// Lane t of every four gets the four lanes' words number t, in the lanes' order.
__device__ __forceinline__ void transpose_4x4(unsigned (&words)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const unsigned other = __shfl_xor_sync(FULL_WARP, odd ? words[i] : words[i + 1], 1);
    (odd ? words[i] : words[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned other = __shfl_xor_sync(FULL_WARP, high ? words[i] : words[i + 2], 2);
    (high ? words[i] : words[i + 2]) = other;
  }
}

// One group's outputs [64, HEAD_DIM] of a tile, as sums of wgmma.
template <typename T, typename Cached, int HEAD_DIM, int CONSUMERS>
struct PrefillEpilogue {
  static constexpr int TILE_ROWS = GROUP_ROWS * CONSUMERS;

  QueryRows<HEAD_DIM> rows;
  T* out;
  float* partial_out;
  float* partial_sums;
  unsigned* arrivals;
  bool* merges;          // the group's, in shared memory
  float scales_log2[2];  // of the scores of the tile in hand, of each of the lane's rows
  int consumer;
  int thread;
  int lane;
  int lane_row0;             // in the tile; the other row is 8 further
  const T* sinks;            // of all heads, with SINKS
  CacheScales cache_scales;  // of e4m3
  float inverses[2];

  // What makes weighted sums weighted means; 0 for rows that saw no key.
  template <bool SINKS>
  __device__ __forceinline__ void finish(const AnnouncedTile& tile, const Softmax& softmax) {
    float sums[2], maxima[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sums[h] = softmax.rows[h].row_sum();
      maxima[h] = softmax.rows[h].maximum * scales_log2[h];
    }
    invert<SINKS>(tile, sums, maxima);
  }

  // Of sums of weights relative to these maxima, in powers of 2.
  template <bool SINKS>
  __device__ __forceinline__ void invert(const AnnouncedTile& tile, float (&sums)[2],
                                         const float (&maxima)[2]) {
    if constexpr (SINKS) {
      QueryRow row = rows.find_row(tile, lane_row0);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sums[h] += exp2_fast(sink_score(sinks[tile.kv_head * rows.group + row.head]) - maxima[h]);
        rows.skip_8(row);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) inverses[h] = RowSoftmax::inverse(sums[h]);
    if constexpr (IS_E4M3<Cached>) {
      const float scale = cache_scales.value(tile.kv_head);
#pragma unroll
      for (int h = 0; h < 2; ++h) inverses[h] *= scale;
    }
  }

  // Four lanes share a row's eight columns; they exchange them, so that each writes all of every fourth
  // eight.
  __device__ __forceinline__ void store(const AnnouncedTile& tile,
                                        const float (&outputs)[HEAD_DIM / 2]) const {
    QueryRow row = rows.find_row(tile, lane_row0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      T* const to = out + rows.row_offset(tile, row) + lane % 4 * 8;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n += 4) {
        unsigned pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const from = &outputs[(n + i) * 4 + h * 2];
          pairs[i] = pack<T>(from[0] * inverses[h], from[1] * inverses[h]);
        }
        transpose_4x4(pairs);
        if (lane_row0 + h * 8 < tile.num_rows) {
          *reinterpret_cast<uint4*>(to + n * 8) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
        }
      }
      rows.skip_8(row);
    }
  }

  // Of a tile whose keys are split: leaves this split's outputs, relative to the rows' maxima, with maxima
  // and sums. The last group to do so adds up all splits, in their order, so that it does not matter which
  // one it is, and has the tile's outputs; the others get false.
  template <bool SINKS>
  __device__ __forceinline__ bool merge_splits(const AnnouncedTile& tile, float (&outputs)[HEAD_DIM / 2],
                                               const Softmax& softmax) {
    constexpr int PART = HEAD_DIM / 8 * WARPGROUP_SIZE;  // of a group's outputs: each thread's, four by four
    const int counter = tile.first_unit * CONSUMERS + consumer;
    float4* const parts = reinterpret_cast<float4*>(partial_out) + counter * PART + thread;
    float2* const part_sums =
        reinterpret_cast<float2*>(partial_sums) + tile.first_unit * TILE_ROWS + lane_row0;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      const float* const from = &outputs[n * 4];
      parts[tile.split * CONSUMERS * PART + n * WARPGROUP_SIZE] =
          make_float4(from[0], from[1], from[2], from[3]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = softmax.rows[h].row_sum();
      if (lane % 4 == 0) {
        part_sums[tile.split * TILE_ROWS + h * 8] =
            make_float2(softmax.rows[h].maximum * scales_log2[h], sum);
      }
    }
    named_barrier_wait(GROUP_BARRIER + consumer, WARPGROUP_SIZE);
    if (thread == 0) *merges = arrives_last(arrivals + counter, tile.num_splits);
    named_barrier_wait(GROUP_BARRIER + consumer, WARPGROUP_SIZE);
    if (!*merges) return false;

    float maxima[2] = {MINUS_INFINITY, MINUS_INFINITY}, sums[2] = {};
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 2; ++n) outputs[n] = 0.0f;
#pragma unroll 1
    for (int split = 0; split < tile.num_splits; ++split) {
      float4 values[HEAD_DIM / 8];  // all in flight
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        values[n] = __ldcg(parts + split * CONSUMERS * PART + n * WARPGROUP_SIZE);
      }
      float factors_before[2], factors[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 maximum_and_sum = __ldcg(part_sums + split * TILE_ROWS + h * 8);
        const float maximum = fmaxf(maxima[h], maximum_and_sum.x);
        factors_before[h] = rescale_factor(maxima[h], maximum);
        factors[h] = rescale_factor(maximum_and_sum.x, maximum);
        sums[h] = sums[h] * factors_before[h] + maximum_and_sum.y * factors[h];
        maxima[h] = maximum;
      }
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        const float parts_of_rows[4] = {values[n].x, values[n].y, values[n].z, values[n].w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& output = outputs[n * 4 + e];
          output = output * factors_before[e / 2] + parts_of_rows[e] * factors[e / 2];
        }
      }
    }
    invert<SINKS>(tile, sums, maxima);
    return true;
  }
};
