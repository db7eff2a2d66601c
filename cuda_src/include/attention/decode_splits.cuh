// How decode attention divides a row's keys, whatever kernel does it, and what it leaves where there are
// none.
#pragma once

#include "attention/attention.cuh"
#include "generated/decode.cuh"

// How a row's keys are divided: by its own length, the window and numbers that with one order of sums are the
// same for every step, but for one of a single row.
struct Splits {
  int first_key;  // a multiple of WARP_KEYS, not after the oldest visible key
  int size;       // keys a split, a multiple of SPLIT_KEYS
  int count;      // at least 1
};

__device__ __forceinline__ Splits find_splits(int context_len, int sliding_window, int min_split_keys,
                                              int max_splits) {
  const int first_key = max(context_len - sliding_window, 0) / WARP_KEYS * WARP_KEYS;
  const int num_keys = context_len - first_key;
  int size = min_split_keys;
  if (num_keys > size * max_splits) size = ceil_div(ceil_div(num_keys, max_splits), SPLIT_KEYS) * SPLIT_KEYS;
  return {first_key, size, max(ceil_div(num_keys, size), 1)};
}

// `even_splits` of a row or, where those had more than max_split_keys, a multiple of them.
__device__ __forceinline__ Splits find_even_splits(int context_len, int sliding_window, int even_splits,
                                                   int min_split_keys, int max_split_keys, int max_splits) {
  const int first_key = max(context_len - sliding_window, 0) / WARP_KEYS * WARP_KEYS;
  int units = small_ceil_div(ceil_div(context_len - first_key, SPLIT_KEYS), even_splits);
  if (units * SPLIT_KEYS > max_split_keys) {
    units = small_ceil_div(units, small_ceil_div(units * SPLIT_KEYS, max_split_keys));
  }
  return find_splits(context_len, sliding_window, max(units * SPLIT_KEYS, min_split_keys), max_splits);
}

// Zeros for `elements` of each of the rows first, first + stride, ... before `end` of a matrix [*,
// row_elements]. Apart, since it is seldom needed: every instruction that a short kernel carries along delays
// it.
template <typename T>
__device__ __noinline__ void clear_rows(T* matrix, int first, int end, int stride, int row_elements,
                                        int elements) {
#pragma unroll 1
  for (int row = first; row < end; row += stride) {
    const Vec<T, SEGMENT> zeros = {};
#pragma unroll 1
    for (int i = threadIdx.x * SEGMENT; i < elements; i += blockDim.x * SEGMENT) {
      zeros.store(matrix + static_cast<long long>(row) * row_elements + i);
    }
  }
}
