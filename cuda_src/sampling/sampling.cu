// One token per row of logits: the most probable, or one by chance among those that the filters keep.

#include "cluster.cuh"
#include "generated/sampling.cuh"
#include "generated/sampling_row.cuh"
#include "sampling/row_choice.cuh"

// Calls visit(key) for each key of the thread's share of a part, NO_KEY where there is none. CACHED: by this
// thread itself, in shared memory; else they are computed again.
template <int NUM_THREADS, bool CACHED>
struct RowKeys {
  const Row& row;
  const unsigned* cached;

  template <typename Visit>
  __device__ __forceinline__ void operator()(Visit visit) const {
    if (CACHED) {
#pragma unroll 1
      for (int i = threadIdx.x * GROUP; i < row.end - row.begin; i += NUM_THREADS * GROUP) {
        const auto keys = Vec<unsigned, GROUP>::load(cached + i);
#pragma unroll
        for (int j = 0; j < GROUP; ++j) visit(keys[j]);
      }
    } else {
      row.for_each_group_in_turn<NUM_THREADS>([&](int id, const float (&values)[GROUP]) {
#pragma unroll
        for (int j = 0; j < GROUP; ++j) visit(id + j < row.end ? row.key(values[j]) : NO_KEY);
      });
    }
  }
};

// The best of all blocks' choices; `bests` is shared memory of its own for each call.
template <int BLOCKS>
__device__ __forceinline__ Choice best_of_blocks(Choice best, Choice (&bests)[BLOCKS]) {
  using Blocks = Cluster<BLOCKS>;
  best = block_best(best);
  if (BLOCKS == 1) return best;
  if (threadIdx.x < BLOCKS) Blocks::at(bests, threadIdx.x)[Blocks::rank()] = best;
  Blocks::sync();
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) best = better(best, bests[b]);
  return best;
}

// The sum of all threads of all blocks; `sums` is shared memory of its own for each call.
template <int BLOCKS>
__device__ __forceinline__ unsigned long long sum_of_blocks(unsigned long long sum,
                                                            unsigned long long (&sums)[BLOCKS]) {
  using Blocks = Cluster<BLOCKS>;
  __shared__ unsigned long long partial[WARP_SIZE];
#pragma unroll
  for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
  __syncthreads();  // the partial sums of an earlier call may still be in use
  if (threadIdx.x % WARP_SIZE == 0) partial[threadIdx.x / WARP_SIZE] = sum;
  __syncthreads();
  sum = 0;
  for (int warp = 0; warp < blockDim.x / WARP_SIZE; ++warp) sum += partial[warp];
  if (BLOCKS == 1) return sum;
  if (threadIdx.x < BLOCKS) Blocks::at(sums, threadIdx.x)[Blocks::rank()] = sum;
  Blocks::sync();
  sum = 0;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) sum += sums[b];
  return sum;
}

// Largest key within n standard deviations of the row's logits, those that are not -inf, from its maximum
// (Tang et al. 2024). The deviation is that of whole numbers below 2^20, in proportion to the logits'
// distances from the maximum: their sums do not depend on their order, and are those of
// engine/ops/cpu/sampling.py.
template <int BLOCKS, int NUM_THREADS>
__device__ unsigned top_n_sigma_key(const Row& row, float n) {
  constexpr int BITS = 20;
  constexpr double SLACK = 0x1p-20;
  __shared__ Choice farthest[BLOCKS];
  __shared__ unsigned long long counts[BLOCKS], totals[BLOCKS], squares[BLOCKS];
  float longest = 0.0f;
  row.for_each_distance<NUM_THREADS>([&](float distance) { longest = fmaxf(longest, distance); });
  // Bits of floats that are not negative are in their order.
  const Choice bits = best_of_blocks(static_cast<Choice>(__float_as_uint(longest)), farthest);
  int exponent;
  frexpf(__uint_as_float(static_cast<unsigned>(bits)), &exponent);

  unsigned long long count = 0, total = 0, square = 0;
  row.for_each_distance<NUM_THREADS>([&](float distance) {
    const unsigned long long number = static_cast<unsigned>(ldexpf(distance, BITS - exponent));
    count += 1;
    total += number;
    square += number * number;
  });
  count = sum_of_blocks(count, counts);
  total = sum_of_blocks(total, totals);
  square = sum_of_blocks(square, squares);
  const unsigned long long mean = total / count;
  square -= mean * (2 * total - mean * count);  // of differences from the mean
  const double sigma = sqrt(static_cast<double>(square) / static_cast<double>(count));
  const double limit = static_cast<double>(n) * sigma * (1.0 + SLACK) * KEY_STEPS;
  const double steps = ldexp(limit, exponent - BITS) / static_cast<double>(row.temperature);
  return steps < LAST_KEY ? static_cast<unsigned>(steps) : LAST_KEY;
}

// CACHED: `cached_keys` is shared memory for the keys of a block's part of the vocabulary.
template <int BLOCKS, int NUM_THREADS, bool FILTERED, bool CACHED>
__device__ __forceinline__ void sample_row(const float* logits, const SamplingRow* rows, int* token_ids,
                                           int vocab_size, unsigned* cached_keys) {
  using Blocks = Cluster<BLOCKS>;
  __shared__ Choice bests[2][BLOCKS];
  __shared__ unsigned best_score;
  const int row_index = blockIdx.y;
  let_next_kernel_start();
  Blocks::arrive();
  if (threadIdx.x == 0) best_score = 0;
  wait_for_earlier_kernels();
  Blocks::wait();
  const bool reports = Blocks::rank() == 0 && threadIdx.x == 0;
  const SamplingRow parameters = rows[row_index];  // all at once: memory is far
  if (parameters.slot < 0) {
    if (reports) token_ids[row_index] = -1;
    return;
  }

  const int part = ceil_div(ceil_div(vocab_size, BLOCKS), GROUP) * GROUP;
  Row row;
  row.logits = logits + static_cast<long long>(row_index) * vocab_size;
  row.begin = min(Blocks::rank() * part, vocab_size);
  row.end = min(row.begin + part, vocab_size);
  row.temperature = parameters.temperature;
  Choice best = best_of_blocks(best_of_part<NUM_THREADS>(row), bests[0]);
  row.maximum = score_of(best);

  if (isfinite(row.maximum) && row.temperature > 0.0f) {
    const bool filters = FILTERED && (parameters.flags & RowFlag::FILTERED) != 0;
    unsigned cutoff = LAST_KEY;
    if (filters) {
      __shared__ TokenFilter<BLOCKS, NUM_THREADS> filter;
      if (CACHED) {
        row.for_each_group_in_turn<NUM_THREADS>([&](int id, const float (&values)[GROUP]) {
          Vec<unsigned, GROUP> keys;
#pragma unroll
          for (int j = 0; j < GROUP; ++j) keys[j] = id + j < row.end ? row.key(values[j]) : NO_KEY;
          if (id < row.end) keys.store(cached_keys + (id - row.begin));
        });
      }
      const unsigned limit = parameters.top_n_sigma > 0.0f
                                 ? top_n_sigma_key<BLOCKS, NUM_THREADS>(row, parameters.top_n_sigma)
                                 : LAST_KEY;
      cutoff = filter.cutoff(RowKeys<NUM_THREADS, CACHED>{row, cached_keys}, limit, parameters.min_p,
                             parameters.top_k, parameters.top_p);
    }
    GumbelChoice choice(row, cutoff, parameters.seed, parameters.position, &best_score);
    if (CACHED && filters) {
      const int lane_ids = threadIdx.x % WARP_SIZE * GROUP;
#pragma unroll 1
      for (int id = row.begin + threadIdx.x * GROUP; id - lane_ids < row.end; id += NUM_THREADS * GROUP) {
        bool any_kept = false;
        if (id < row.end) {
          const auto keys = Vec<unsigned, GROUP>::load(cached_keys + (id - row.begin));
          any_kept = min(min(keys[0], keys[1]), min(keys[2], keys[3])) <= cutoff;
        }
        if (!__any_sync(FULL_WARP, any_kept)) continue;
        float values[GROUP];
        load_floats(row.logits + id, any_kept ? row.end - id : 0, values);
        choice.visit(any_kept ? id : row.end, values);
      }
    } else {
      row.for_each_group_in_turn<NUM_THREADS>(
          [&](int id, const float (&values)[GROUP]) { choice.visit(id, values); });
    }
    best = best_of_blocks(choice.best(), bests[1]);
  }
  if (reports) token_ids[row_index] = isfinite(row.maximum) ? token_of(best) : -1;
}

// token_ids[s] = a token of row s as Ops.sample defines it, -1 where the maximum is not finite or the row is
// padding. Not FILTERED promises that no row has the flag.
//   in:  logits [num_rows, vocab_size] float, rows [num_rows] SamplingRow (slot below 0: padding)
//   out: token_ids [num_rows] int32
// Layout: row-major; 16-byte loads where the row's address allows.
// Grid: (1, num_rows). Block: 1024 threads. Shared memory: 21 KB, none dynamic.
// Unit of work: one block a row. Nothing depends on other rows, nor on the number of blocks.
template <bool FILTERED>
__global__ void __launch_bounds__(THREADS) sample_kernel(SAMPLE_PARAMS) {
  sample_row<1, THREADS, FILTERED, false>(logits, rows, token_ids, vocab_size, nullptr);
}

#if __CUDA_ARCH__ >= 900

// The tokens of sample_kernel, by eight blocks a row.
//   in:  logits [num_rows, vocab_size] float, rows [num_rows] SamplingRow (slot below 0: padding)
//   out: token_ids [num_rows] int32
// Layout: row-major; 16-byte loads where the row's address allows.
// Grid: (8, num_rows), eight blocks a cluster. Block: 512 threads.
// Shared memory: FILTERED, 4 bytes for each id of an eighth of the vocabulary (in whole groups of 4) or more;
// and 21 KB of static.
// Unit of work: a cluster a row.
template <bool FILTERED>
__cluster_dims__(CLUSTER_BLOCKS, 1, 1) __global__ void __launch_bounds__(CLUSTER_THREADS, FILTERED ? 2 : 3)
    sample_cluster_kernel(SAMPLE_PARAMS) {
  extern __shared__ __align__(16) unsigned cached_keys[];
  sample_row<CLUSTER_BLOCKS, CLUSTER_THREADS, FILTERED, FILTERED>(logits, rows, token_ids, vocab_size,
                                                                  cached_keys);
}

#endif
