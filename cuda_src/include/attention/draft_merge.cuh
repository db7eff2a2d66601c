// How attention of drafts merges what warps, splits and blocks have found, as SplitMerger does for one query.
#pragma once

#include "attention/decode_merge.cuh"
#include "attention/draft_attention.cuh"

// Merges warps' results at the end of each split, and splits' results in their order, for the rows of
// ROW_TILES tiles. A thread has MERGED_FLOATS elements of a row, an item, at a time.
template <typename T, int HEAD_DIM, int WARPS, int ROW_TILES, bool SINKS>
struct DraftMerger {
  static constexpr int THREADS = WARP_SIZE * WARPS;
  static constexpr int ROW_PARTS = HEAD_DIM / MERGED_FLOATS;
  static constexpr int TILE_ITEMS = TILE_QUERY_ROWS * ROW_PARTS;

  DraftRows rows;
  int num_splits;
  int num_blocks;  // that have some of them
  int num_heads;
  int max_splits;
  float* partial_out;
  float* partial_sums;
  float* results;  // [16 * ROW_TILES * ROW_PARTS, SENT_FLOATS] of the splits so far, in shared memory
  T* out;
  const T* sinks;        // of the block's heads, with SINKS
  long long first_head;  // of the first query, among the heads of all tokens

  // What the warps have left of tile m, `stride` floats apart, of one split.
  __device__ __forceinline__ void merge_split(int m, const float* merged, int stride,
                                              const float (&maxima)[WARPS][TILE_QUERY_ROWS],
                                              const float (&sums)[WARPS][TILE_QUERY_ROWS], int split) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE_ITEMS; i += THREADS) {
      const int tile_row = i / ROW_PARTS;
      const int row = m * TILE_QUERY_ROWS + tile_row;
      if (!rows.has(row)) continue;
      const int d = i % ROW_PARTS * MERGED_FLOATS;
      float highest, total;
      const Floats values =
          merge_warps(merged + tile_row * DraftAttention<T, HEAD_DIM, ROW_TILES>::MERGE_PITCH + d, stride,
                      maxima, sums, tile_row, highest, total);
      if (num_blocks > 1) {
        const long long partial = head_of(row) * max_splits + split;
        values.store(partial_out + partial * HEAD_DIM + d);
        if (d == 0) *reinterpret_cast<float2*>(partial_sums + partial * 2) = make_float2(highest, total);
        continue;
      }
      float* const kept = results + (m * TILE_ITEMS + i) * SENT_FLOATS;
      Merged result;
      if (split > 0) {
        result.values = Floats::load(kept);
        result.maximum = kept[MERGED_FLOATS];
        result.sum = kept[MERGED_FLOATS + 1];
      }
      result.add(values, highest, total);
      if (split + 1 == num_splits) {
        store(result, row, d);
      } else {
        result.values.store(kept);
        *reinterpret_cast<float2*>(kept + MERGED_FLOATS) = make_float2(result.maximum, result.sum);
      }
    }
  }

  // All rows' outputs, by the last of several blocks.
  __device__ __forceinline__ void store_partials() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < ROW_TILES * TILE_ITEMS; i += THREADS) {
      const int row = i / ROW_PARTS;
      if (!rows.has(row)) continue;
      const int d = i % ROW_PARTS * MERGED_FLOATS;
      const long long first = head_of(row) * max_splits;
      Merged result;
      add_partials<HEAD_DIM>(result, partial_out + first * HEAD_DIM + d,
                             reinterpret_cast<const float2*>(partial_sums) + first, num_splits);
      store(result, row, d);
    }
  }

 private:
  __device__ __forceinline__ long long head_of(int row) const {
    return first_head + static_cast<long long>(rows.query(row)) * num_heads + rows.head(row);
  }
  __device__ __forceinline__ void store(Merged& result, int row, int d) const {
    if constexpr (SINKS) result.add_sink(sinks[rows.head(row)]);
    result.store(out + head_of(row) * HEAD_DIM + d);
  }
};
