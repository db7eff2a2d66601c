// One token per row of logits. The vocabulary of a row is split over `num_splits` blocks, chunk_size ids
// each: row_maximum_kernel, then (where a row may filter) token_filter.cu, then gumbel_choice_kernel, then
// pick_token_kernel. Nothing depends on how a row was split, nor on other rows.

#include "choice.cuh"
#include "common.cuh"
#include "distance.cuh"
#include "philox.cuh"

constexpr int BLOCK_SIZE = 256;
constexpr int GROUP = 4;  // ids that share one call of the random generator

// maxima[s, i] = best choice among the ids of chunk i, scored by logit; NaN wins
//
// logits [num_rows, vocab_size] float, slots [num_rows] int32 (below 0: padding, skipped),
// maxima [num_rows, num_splits] Choice.
// Layout: row-major; chunk_size a multiple of 4; 16-byte loads where the row's address allows.
// Grid: (num_splits, num_rows); block: 256 threads. Unit of work: one block a chunk.
__global__ void __launch_bounds__(BLOCK_SIZE)
    row_maximum_kernel(const float* __restrict__ logits, const int* __restrict__ slots,
                       unsigned long long* __restrict__ maxima, int vocab_size, int chunk_size) {
  const int row = blockIdx.y;
  if (slots[row] < 0) return;
  const float* const row_logits = logits + static_cast<long long>(row) * vocab_size;
  const int begin = blockIdx.x * chunk_size;
  const int end = min(begin + chunk_size, vocab_size);

  Choice best = NO_CHOICE;
#pragma unroll 4
  for (int id = begin + threadIdx.x * GROUP; id < end; id += BLOCK_SIZE * GROUP) {
    float values[GROUP];
    load_floats(row_logits + id, end - id, values);
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
      if (id + j < end) best = better(best, make_choice(values[j], id + j));
    }
  }
  best = block_best(best);
  if (threadIdx.x == 0) maxima[static_cast<long long>(row) * gridDim.x + blockIdx.x] = best;
}

// choices[s, i] = best choice among the kept ids of chunk i, scored by noise - distance, where
// noise = -log(-log(u)) (Gumbel 1954), u = ((word >> 9) + 0.5) / 2^23, word id % 4 of Philox4x32-10 with
// counter (id / 4, position, 0, 0) and the row's seed as key; kept are keys up to cutoffs[s]
//
// logits [num_rows, vocab_size] float, slots [num_rows] int32, maxima [num_rows, num_splits] Choice,
// cutoffs [num_rows] uint32 or null (all kept), temperature [num_rows] float (0: greedy, skipped),
// seeds [num_rows] uint64, positions [num_rows] int32, choices [num_rows, num_splits] Choice.
// Layout, grid, block and unit of work as row_maximum_kernel.
__global__ void __launch_bounds__(BLOCK_SIZE)
    gumbel_choice_kernel(const float* __restrict__ logits, const int* __restrict__ slots,
                         const unsigned long long* __restrict__ maxima, const unsigned* __restrict__ cutoffs,
                         const float* __restrict__ temperature, const unsigned long long* __restrict__ seeds,
                         const int* __restrict__ positions, unsigned long long* __restrict__ choices,
                         int vocab_size, int chunk_size) {
  const int row = blockIdx.y;
  const float row_temperature = temperature[row];
  if (slots[row] < 0 || !(row_temperature > 0.0f)) return;
  const float maximum = score_of(best_of(maxima + static_cast<long long>(row) * gridDim.x, gridDim.x));
  if (!isfinite(maximum)) return;
  const float* const row_logits = logits + static_cast<long long>(row) * vocab_size;
  const unsigned cutoff = cutoffs == nullptr ? LAST_KEY : cutoffs[row];
  const unsigned position = positions[row];
  const uint2 key = make_uint2(static_cast<unsigned>(seeds[row]), static_cast<unsigned>(seeds[row] >> 32));
  const int begin = blockIdx.x * chunk_size;
  const int end = min(begin + chunk_size, vocab_size);

  Choice best = NO_CHOICE;
  for (int id = begin + threadIdx.x * GROUP; id < end; id += BLOCK_SIZE * GROUP) {
    float values[GROUP];
    load_floats(row_logits + id, end - id, values);
    bool kept[GROUP];
    bool any_kept = false;
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
      values[j] = distance_of(values[j], maximum, row_temperature);
      kept[j] = id + j < end && values[j] < REACH && key_of(values[j]) <= cutoff;
      any_kept |= kept[j];
    }
    if (!any_kept) continue;
    const uint4 random = philox4x32_10(make_uint4(id / GROUP, position, 0u, 0u), key);
    const unsigned words[GROUP] = {random.x, random.y, random.z, random.w};
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
      if (!kept[j]) continue;
      const float uniform = (static_cast<float>(words[j] >> 9) + 0.5f) * 0x1p-23f;
      best = better(best, make_choice(-logf(-logf(uniform)) - values[j], id + j));
    }
  }
  best = block_best(best);
  if (threadIdx.x == 0) choices[static_cast<long long>(row) * gridDim.x + blockIdx.x] = best;
}

// token_ids[s] = id of the row's best choice; of its maximum where temperature is 0; -1 where the maximum
// is not finite or the row is padding
//
// slots [num_rows] int32, maxima and choices [num_rows, num_splits] Choice, temperature [num_rows] float,
// token_ids [num_rows] int32.
// Grid: ceil(num_rows / 8); block: 256 threads. Unit of work: one warp a row.
__global__ void __launch_bounds__(BLOCK_SIZE)
    pick_token_kernel(const int* __restrict__ slots, const unsigned long long* __restrict__ maxima,
                      const unsigned long long* __restrict__ choices, const float* __restrict__ temperature,
                      int* __restrict__ token_ids, int num_rows, int num_splits) {
  const int row = (blockIdx.x * BLOCK_SIZE + threadIdx.x) / WARP_SIZE;
  if (row >= num_rows) return;
  int token_id = -1;
  if (slots[row] >= 0) {
    const long long first = static_cast<long long>(row) * num_splits;
    Choice best = best_of(maxima + first, num_splits);
    if (isfinite(score_of(best))) {
      if (temperature[row] > 0.0f) best = best_of(choices + first, num_splits);
      token_id = token_of(best);
    }
  }
  if (threadIdx.x % WARP_SIZE == 0) token_ids[row] = token_id;
}
