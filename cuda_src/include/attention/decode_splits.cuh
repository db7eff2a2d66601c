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

// How rows are divided where a split depends on the other rows: in `even` splits or, where those had more
// than `max_keys`, in a multiple of them. All rows together have at most `long_parts` beyond `even` each: a
// split of a long row has at least that share of all rows' keys.
struct RowDivision {
  int even;
  int min_keys;  // a multiple of SPLIT_KEYS, as is max_keys
  int max_keys;
  int max_splits;
  int long_parts;
  int sliding_window;

  __device__ __forceinline__ int keys_of(int context_len) const {
    return context_len - max(context_len - sliding_window, 0) / WARP_KEYS * WARP_KEYS;
  }
  __device__ __forceinline__ bool is_long(int context_len) const {
    return keys_of(context_len) > even * max_keys;
  }
  // `limit`: keys of a split of a long row.
  __device__ __forceinline__ Splits find(int context_len, int limit) const {
    int units = small_ceil_div(ceil_div(keys_of(context_len), SPLIT_KEYS), even);
    if (units * SPLIT_KEYS > limit) units = small_ceil_div(units, small_ceil_div(units * SPLIT_KEYS, limit));
    return find_splits(context_len, sliding_window, max(units * SPLIT_KEYS, min_keys), max_splits);
  }
};

// The keys that a split of a long row has at most. All lanes of a warp must call. Apart, as what follows,
// since it is seldom needed: every instruction that a short kernel carries along delays it.
__device__ __noinline__ int find_long_limit(RowDivision division, const int* context_lens, int num_seqs) {
  int keys = 0;
#pragma unroll 4
  for (int row = threadIdx.x % WARP_SIZE; row < num_seqs; row += WARP_SIZE) {
    keys += division.keys_of(max(context_lens[row], 0));
  }
  int all_keys = static_cast<int>(__reduce_add_sync(FULL_WARP, keys));
  all_keys += all_keys / 16;  // since sizes and numbers of splits are rounded
  return max(division.max_keys, ceil_div(ceil_div(all_keys, division.long_parts), SPLIT_KEYS) * SPLIT_KEYS);
}

__device__ __forceinline__ Splits find_row_splits(const RowDivision& division, int context_len,
                                                  const int* context_lens, int num_seqs) {
  int limit = division.max_keys;
  if (division.long_parts > 0 && division.is_long(context_len)) {
    limit = find_long_limit(division, context_lens, num_seqs);
  }
  return division.find(context_len, limit);
}

// What a block does: a row's `part`, its first `even` splits or, of a long row, any.
struct RowPart {
  int row;  // -1: nothing
  int part;
};

// Split `number` of those that long rows have beyond `even` each.
__device__ __noinline__ RowPart find_long_part(int number, RowDivision division, const int* context_lens,
                                               int num_seqs) {
  const int lane = threadIdx.x % WARP_SIZE;
  int limit = 0, before = 0;  // splits of the rows in front
#pragma unroll 1
  for (int first = 0; first < num_seqs; first += WARP_SIZE) {
    const int context_len = first + lane < num_seqs ? context_lens[first + lane] : 0;
    const bool is_long = division.is_long(context_len);
    if (!__any_sync(FULL_WARP, is_long)) continue;
    if (limit == 0) limit = find_long_limit(division, context_lens, num_seqs);
    const int own = is_long ? max(division.find(context_len, limit).count - division.even, 0) : 0;
    int sum = own;
#pragma unroll
    for (int step = 1; step < WARP_SIZE; step *= 2) {
      const int lower = __shfl_up_sync(FULL_WARP, sum, step);
      if (lane >= step) sum += lower;
    }
    const unsigned reached = __ballot_sync(FULL_WARP, before + sum > number);
    if (reached != 0) {
      const int source = __ffs(reached) - 1;
      const int own_first = __shfl_sync(FULL_WARP, before + sum - own, source);
      return {first + source, division.even + number - own_first};
    }
    before += __shfl_sync(FULL_WARP, sum, WARP_SIZE - 1);
  }
  return {-1, 0};
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
