// How decode attention merges what warps, splits and blocks have found.
#pragma once

#include "attention/warp_attention.cuh"
#include "cluster.cuh"
#include "generated/decode.cuh"

// What splits have left in memory, in their order: parts [num_splits, HEAD_DIM], from an element on, and
// their maxima and sums.
template <int HEAD_DIM>
__device__ __forceinline__ void add_partials(Merged& sum, const float* parts, const float2* part_sums,
                                             int num_splits) {
  constexpr int LOADS = 4;  // in flight
#pragma unroll 1
  for (int s0 = 0; s0 < num_splits; s0 += LOADS) {
    Floats values[LOADS];
    float2 maximum_and_sum[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int s = min(s0 + i, num_splits - 1);
      values[i] = Floats::load_shared_by_multiprocessors(parts + s * HEAD_DIM);
      maximum_and_sum[i] = __ldcg(part_sums + s);
    }
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (s0 + i < num_splits) sum.add(values[i], maximum_and_sum[i].x, maximum_and_sum[i].y);
    }
  }
}

// Merges warps' results at the end of each split, and splits' results at the end, in their order. A thread
// has MERGED_FLOATS elements of a head, an item, at a time.
template <typename T, int HEAD_DIM, int WARPS, bool CLUSTERED, bool SINKS>
struct SplitMerger {
  using Blocks = Cluster<CLUSTERED ? MAX_CLUSTER : 1>;
  static constexpr int THREADS = WARP_SIZE * WARPS;
  static constexpr int HEAD_PARTS = HEAD_DIM / MERGED_FLOATS;
  static constexpr int ITEMS = ceil_div(GROUP_ROWS * HEAD_PARTS, THREADS);  // of a thread

  int num_group_heads;
  int num_blocks;
  int max_splits;
  float* partial_out;
  float* partial_sums;
  long long first_partial;  // of the block's first head, split 0
  // Each block of a cluster finishes a share of the row's items; splits' results lie [splits][share].
  float* received;
  int num_items;
  int share;
  float share_reciprocal;
  Merged result[ITEMS];  // so far, where this block has all splits

  __device__ __forceinline__ SplitMerger(int num_group_heads, int num_blocks, int max_splits,
                                         float* partial_out, float* partial_sums, long long first_partial,
                                         float* received)
      : num_group_heads(num_group_heads),
        num_blocks(num_blocks),
        max_splits(max_splits),
        partial_out(partial_out),
        partial_sums(partial_sums),
        first_partial(first_partial),
        received(received),
        num_items(num_group_heads * HEAD_PARTS),
        share(small_ceil_div(num_items, num_blocks)),
        share_reciprocal(__fdividef(1.0f, share)) {}

  // What the warps have left in shared memory, `stride` floats apart, of one split.
  __device__ __forceinline__ void merge_split(const float* merged, int stride,
                                              const float (&maxima)[WARPS][GROUP_ROWS],
                                              const float (&sums)[WARPS][GROUP_ROWS], int split) {
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) {
      const int item = n * THREADS + threadIdx.x;
      if (item >= num_group_heads * HEAD_PARTS) continue;
      const int head = item / HEAD_PARTS;
      const int d = item % HEAD_PARTS * MERGED_FLOATS;
      float highest, total;
      const Floats values = merge_warps(merged + head * WarpAttention<T, HEAD_DIM>::MERGE_PITCH + d, stride,
                                        maxima, sums, head, highest, total);
      if (num_blocks == 1) {
        result[n].add(values, highest, total);
      } else if constexpr (CLUSTERED) {
        const int owner = static_cast<int>((item + 0.5f) * share_reciprocal);
        float* const to = Blocks::at(received + (split * share + item - owner * share) * SENT_FLOATS, owner);
        values.store(to);
        *reinterpret_cast<float2*>(to + MERGED_FLOATS) = make_float2(highest, total);
      } else {
        const long long partial = first_partial + head * max_splits + split;
        values.store(partial_out + partial * HEAD_DIM + d);
        if (d == 0) *reinterpret_cast<float2*>(partial_sums + partial * 2) = make_float2(highest, total);
      }
    }
  }

  // This block's share of what its cluster has sent to it. out [*, HEAD_DIM], first_head the block's first
  // row; sinks: of the block's heads, with SINKS.
  __device__ __forceinline__ void store_share(T* out, long long first_head, int part, int num_splits,
                                              const T* sinks) const {
    const int first_item = part * share;
#pragma unroll 1
    for (int i = threadIdx.x; i < min(share, num_items - first_item); i += THREADS) {
      Merged sum;
#pragma unroll 1
      for (int s = 0; s < num_splits; ++s) {
        const float* const from = received + (s * share + i) * SENT_FLOATS;
        sum.add(Floats::load(from), from[MERGED_FLOATS], from[MERGED_FLOATS + 1]);
      }
      if constexpr (SINKS) sum.add_sink(sinks[(first_item + i) / HEAD_PARTS]);
      sum.store(out + first_head * HEAD_DIM + (first_item + i) * MERGED_FLOATS);
    }
  }

  // All heads' outputs, of this block's own splits or, by the last of several blocks, of theirs.
  __device__ __forceinline__ void store(T* out, long long first_head, int num_splits, const T* sinks) {
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) {
      const int item = n * THREADS + threadIdx.x;
      if (item >= num_group_heads * HEAD_PARTS) continue;
      const int head = item / HEAD_PARTS;
      const int d = item % HEAD_PARTS * MERGED_FLOATS;
      if (!CLUSTERED && num_blocks > 1) {
        const long long first = first_partial + head * max_splits;
        add_partials<HEAD_DIM>(result[n], partial_out + first * HEAD_DIM + d,
                               reinterpret_cast<const float2*>(partial_sums) + first, num_splits);
      }
      if constexpr (SINKS) result[n].add_sink(sinks[head]);
      result[n].store(out + (first_head + head) * HEAD_DIM + d);
    }
  }
};
