// min_p, top_k and top_p of a row as one number: the largest key (distance.cuh) that is kept.

#include "choice.cuh"
#include "common.cuh"
#include "distance.cuh"

constexpr int BLOCK_SIZE = 1024;
constexpr int NUM_WARPS = BLOCK_SIZE / WARP_SIZE;
constexpr int NUM_BINS = 2 * BLOCK_SIZE;
constexpr int BIN_BITS = 11;
constexpr int LIST_SIZE = 4096;
constexpr int VALUES_PER_LOAD = 4;
constexpr int LOADS = 4;  // in flight per thread
static_assert(NUM_BINS == 1 << BIN_BITS, "a key is taken apart into bins of 11 bits");

// As engine/ops/cpu/sampling.py: a p or a sum that rounds to the limit in float32 is within it.
constexpr double MIN_P_SLACK = 0x1p-25;
constexpr double TOP_P_SLACK = 0x1p-22;

// 64-bit sums made of 32-bit additions, which shared memory does at once; exact in any order.
struct Histogram {
  unsigned low[NUM_BINS];
  unsigned high[NUM_BINS];

  __device__ void clear() {
    for (int i = threadIdx.x; i < NUM_BINS; i += BLOCK_SIZE) low[i] = high[i] = 0;
  }
  __device__ void add(unsigned bin, unsigned long long amount) {
    const unsigned addend = static_cast<unsigned>(amount);
    const unsigned before = atomicAdd(&low[bin], addend);
    const unsigned carried = static_cast<unsigned>(amount >> 32) + (before + addend < before);
    if (carried != 0) atomicAdd(&high[bin], carried);
  }
  __device__ unsigned long long operator[](unsigned bin) const {
    return static_cast<unsigned long long>(high[bin]) << 32 | low[bin];
  }
};

struct Shared {
  Histogram histogram;
  unsigned list[LIST_SIZE];
  int list_count;
  unsigned long long warp_sums[NUM_WARPS];
  unsigned long long target;
  unsigned long long before_bin;
  unsigned bin;
  unsigned limit;
};

// Where the keys of a row come from: its logits, until few enough matter to be listed in shared memory.
struct Keys {
  const float* row_logits;
  int vocab_size;
  float maximum;
  float temperature;
  bool listed;
};

template <typename Visit>
__device__ void for_each_key(const Keys& keys, const Shared& shared, Visit visit) {
  if (keys.listed) {
    for (int i = threadIdx.x; i < shared.list_count; i += BLOCK_SIZE) visit(shared.list[i]);
    return;
  }
  constexpr int STRIDE = BLOCK_SIZE * VALUES_PER_LOAD;
  for (int first = threadIdx.x * VALUES_PER_LOAD; first < keys.vocab_size; first += STRIDE * LOADS) {
    float values[LOADS][VALUES_PER_LOAD];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int id = first + i * STRIDE;
      load_floats(keys.row_logits + id, keys.vocab_size - id, values[i]);
    }
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
#pragma unroll
      for (int j = 0; j < VALUES_PER_LOAD; ++j) {
        const float distance = distance_of(values[i][j], keys.maximum, keys.temperature);
        if (first + i * STRIDE + j < keys.vocab_size && distance < MAX_DISTANCE) visit(key_of(distance));
      }
    }
  }
}

// Sum of the histogram up to and with this thread's two bins.
__device__ unsigned long long inclusive_sum(Shared& shared) {
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  unsigned long long sum = shared.histogram[2 * threadIdx.x] + shared.histogram[2 * threadIdx.x + 1];
#pragma unroll
  for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
    const unsigned long long below = __shfl_up_sync(FULL_WARP, sum, offset);
    if (lane >= offset) sum += below;
  }
  if (lane == WARP_SIZE - 1) shared.warp_sums[warp] = sum;
  __syncthreads();
  for (int i = 0; i < warp; ++i) sum += shared.warp_sums[i];
  return sum;
}

// Least key such that the amounts of the keys up to it reach `target_of(amount of all)`; `limit` if that is
// the whole or more. Amounts are masses or, not BY_MASS, ones. Keys above `limit` do not exist for it.
//
// Three rounds look at 11, 11 and 10 bits of the keys that share the bits found so far. The second lists
// in shared memory what can still matter, so that later rounds need not read the logits.
template <bool BY_MASS, typename TargetOf>
__device__ unsigned select_key(Keys& keys, Shared& shared, unsigned limit, TargetOf target_of) {
  unsigned base = 0;
  unsigned last = LAST_KEY;
  unsigned long long target = 0;
  for (int shift = 32 - BIN_BITS;; shift = max(shift - BIN_BITS, 0)) {
    const bool first_round = shift == 32 - BIN_BITS;
    const bool listing = !first_round && !keys.listed;
    shared.histogram.clear();
    if (threadIdx.x == 0 && listing) shared.list_count = 0;
    __syncthreads();
    for_each_key(keys, shared, [&](unsigned key) {
      if (key > limit || key > last) return;
      if (key >= base) shared.histogram.add((key - base) >> shift, BY_MASS ? mass_of(key) : 1);
      if (listing && *const_cast<volatile int*>(&shared.list_count) <= LIST_SIZE) {
        const int place = atomicAdd(&shared.list_count, 1);
        if (place < LIST_SIZE) shared.list[place] = key;
      }
    });
    __syncthreads();
    const unsigned long long sum = inclusive_sum(shared);
    if (first_round) {
      if (threadIdx.x == BLOCK_SIZE - 1) shared.target = target_of(sum);
      __syncthreads();
      target = shared.target;
      if (target == 0) return limit;
    }
    const unsigned long long upper = shared.histogram[2 * threadIdx.x + 1];
    const unsigned long long lower = shared.histogram[2 * threadIdx.x];
    if (sum - upper - lower < target && target <= sum) {
      const bool in_lower = target <= sum - upper;
      shared.bin = 2 * threadIdx.x + (in_lower ? 0 : 1);
      shared.before_bin = in_lower ? sum - upper - lower : sum - upper;
    }
    __syncthreads();
    if (listing) keys.listed = shared.list_count <= LIST_SIZE;
    const unsigned bin = shared.bin;
    target -= shared.before_bin;
    base += bin << shift;
    last = base + ((1u << shift) - 1);
    const bool whole_bin = target == shared.histogram[bin];
    __syncthreads();
    if (shift == 0 || whole_bin) return min(last, limit);
  }
}

// cutoffs[s] = largest key kept by min_p, then top_k, then top_p, as Ops.sample defines them
//
// logits [num_rows, vocab_size] float, slots [num_rows] int32 (below 0: skipped),
// maxima [num_rows, num_splits] Choice (row_maximum_kernel), temperature [num_rows] float (0: skipped),
// top_k [num_rows] int32 (0: off), top_p [num_rows] float (1: off), min_p [num_rows] float (0: off),
// cutoffs [num_rows] uint32.
// Layout: row-major; 16-byte loads where the row's address allows.
// Grid: num_rows; block: 1024 threads; 33 KB of static shared memory. Unit of work: one block a row.
__global__ void __launch_bounds__(BLOCK_SIZE)
    token_filter_kernel(const float* __restrict__ logits, const int* __restrict__ slots,
                        const unsigned long long* __restrict__ maxima, const float* __restrict__ temperature,
                        const int* __restrict__ top_k, const float* __restrict__ top_p,
                        const float* __restrict__ min_p, unsigned* __restrict__ cutoffs, int vocab_size,
                        int num_splits) {
  __shared__ Shared shared;
  const int row = blockIdx.x;
  if (slots[row] < 0 || !(temperature[row] > 0.0f)) return;
  const float maximum = score_of(best_of(maxima + static_cast<long long>(row) * num_splits, num_splits));
  if (!isfinite(maximum)) return;
  const float* const row_logits = logits + static_cast<long long>(row) * vocab_size;
  Keys keys = {row_logits, vocab_size, maximum, temperature[row], false};

  if (threadIdx.x == 0) {
    // In double and by one thread: it must round as on the CPU, and most GPUs are slow at it.
    const double steps = min_p[row] > 0.0f ? (MIN_P_SLACK - log(static_cast<double>(min_p[row]))) * KEY_STEPS
                                           : static_cast<double>(LAST_KEY);
    shared.limit = steps < LAST_KEY ? static_cast<unsigned>(steps) : LAST_KEY;
  }
  __syncthreads();
  unsigned cutoff = shared.limit;
  if (top_k[row] > 0) {
    cutoff = select_key<false>(keys, shared, cutoff, [&](unsigned long long count) {
      return top_k[row] < count ? static_cast<unsigned long long>(top_k[row]) : 0ull;
    });
  }
  if (top_p[row] < 1.0f) {
    cutoff = select_key<true>(keys, shared, cutoff, [&](unsigned long long mass) {
      const double target = ceil(top_p[row] * (1.0 - TOP_P_SLACK) * static_cast<double>(mass));
      return target < 1.0 ? 1ull : static_cast<unsigned long long>(target);
    });
  }
  if (threadIdx.x == 0) cutoffs[row] = cutoff;
}
