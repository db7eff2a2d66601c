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

// Whether a query at `position` sees `key`: itself and the sliding_window - 1 before it.
__device__ __forceinline__ bool is_visible(int key, int position, int sliding_window) {
  return key <= position && key > position - sliding_window;
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
