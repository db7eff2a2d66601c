// What the paged-attention kernels share.
#pragma once

#include "common.cuh"

constexpr float MINUS_INFINITY = -FLOAT_INFINITY;

// Index, in rows of head_dim elements, of a key (or value) in a cache [blocks, num_kv_heads, block_size,
// head_dim].
__device__ __forceinline__ int cache_row(const int* block_table, int key, int kv_head, int num_kv_heads,
                                         int block_size) {
  return (block_table[key / block_size] * num_kv_heads + kv_head) * block_size + key % block_size;
}

// The factor that takes an exponential relative to `maximum` to one relative to a new maximum:
// 2^(difference), 0 where nothing has been seen yet.
__device__ __forceinline__ float rescale_factor(float maximum, float new_maximum) {
  return maximum == MINUS_INFINITY ? 0.0f : exp2f(maximum - new_maximum);
}

// A head's sink as a score in powers of 2.
template <typename T>
__device__ __forceinline__ float sink_score(T sink) {
  return to_float(sink) * 1.4426950408889634f;  // log2(e)
}

// cap * tanh(x), by approximations whose error is a few units of 2^-23 of the cap.
__device__ __forceinline__ float soft_capped(float x, float cap) {
  constexpr float TWO_LOG2_E = 2.8853900817779268f;
  return cap - 2.0f * cap * reciprocal_fast(1.0f + exp2_fast(x * TWO_LOG2_E));
}

// Whether a query at `position` sees `key`: itself and the sliding_window - 1 before it.
__device__ __forceinline__ bool is_visible(int key, int position, int sliding_window) {
  return key <= position && key > position - sliding_window;
}

// An item of a row, counted from the row's first.
struct RowItem {
  int row;  // -1: there is no such item
  int item;
};

// Where item number `item` of all rows in order is, of which a row has `count_items(row)`. Every lane of a
// warp must call; all get the result.
template <typename CountItems>
__device__ __forceinline__ RowItem find_row_item(int num_seqs, int item, const CountItems& count_items) {
  const int lane = threadIdx.x % WARP_SIZE;
  int items_before = 0;
  for (int row0 = 0; row0 < num_seqs; row0 += WARP_SIZE) {
    const int row = row0 + lane;
    const int items = row < num_seqs ? count_items(row) : 0;
    int items_through = items;
#pragma unroll
    for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
      const int other = __shfl_up_sync(FULL_WARP, items_through, offset);
      if (lane >= offset) items_through += other;
    }
    items_through += items_before;
    const unsigned reached = __ballot_sync(FULL_WARP, item < items_through);
    if (reached != 0) {
      const int found = __ffs(reached) - 1;
      return {row0 + found, item - __shfl_sync(FULL_WARP, items_through - items, found)};
    }
    items_before = __shfl_sync(FULL_WARP, items_through, WARP_SIZE - 1);
  }
  return {-1, 0};
}

// Tiles of a row with two or more queries, of each of which `group` heads make rows; others have none.
__device__ __forceinline__ int count_query_tiles(const int* cu_seqlens_q, int row, int group, int tile_rows) {
  const int num_queries = cu_seqlens_q[row + 1] - cu_seqlens_q[row];
  return num_queries > 1 ? ceil_div(num_queries * group, tile_rows) : 0;
}

// Whether this is the last of `count` arrivals at a counter, which begins and ends at 0. What the callers
// (and their blocks, before a barrier) have written, the last one sees.
__device__ __forceinline__ bool arrives_last(unsigned* counter, unsigned count) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(count - 1)
               : "memory");
  return before == count - 1;
}
