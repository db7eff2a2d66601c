// A token per row of logits of which several ranks have slices of the vocabulary: each rank's part of the
// choice.

#include "generated/sampling_row.cuh"
#include "generated/slice.cuh"
#include "sampling/row_choice.cuh"

// A slice [num_rows, width] of the ids from `first` on, as one part of a row.
__device__ __forceinline__ Row slice_of_row(const float* logits, int width, int first) {
  Row row;
  row.logits = logits + static_cast<long long>(blockIdx.y) * width - first;
  row.begin = first;
  row.end = first + width;
  return row;
}

// choices[s] = the highest logit of the slice of row s with its id; NO_CHOICE in padding.
//   in:  logits [num_rows, width] float, rows [num_rows] SamplingRow (slot below 0: padding)
//   out: choices [num_rows] Choice
// Layout: row-major; 16-byte loads where the row's address allows.
// Grid: (1, num_rows). Block: THREADS. Shared memory: none dynamic.
// Unit of work: one block a row.
__global__ void __launch_bounds__(THREADS) slice_best_kernel(SLICE_BEST_PARAMS) {
  let_next_kernel_start();
  wait_for_earlier_kernels();
  Choice best = NO_CHOICE;
  if (rows[blockIdx.y].slot >= 0)
    best = block_best(best_of_part<THREADS>(slice_of_row(logits, width, first)));
  if (threadIdx.x == 0) choices[blockIdx.y] = best;
}

// choices[s] = the slice's best of row s by noise - distance from maxima[s], the highest logit of all slices,
// as Ops.sample defines it without filters; maxima[s] itself where the temperature is 0 or the maximum not
// finite.
//   in:  logits [num_rows, width] float, rows [num_rows] SamplingRow, maxima [num_rows] Choice
//   out: choices [num_rows] Choice
// Layout: row-major; 16-byte loads where the row's address allows; `first` a multiple of GROUP.
// Grid: (1, num_rows). Block: THREADS. Shared memory: none dynamic.
// Unit of work: one block a row.
__global__ void __launch_bounds__(THREADS) slice_choice_kernel(SLICE_CHOICE_PARAMS) {
  __shared__ unsigned best_score;
  let_next_kernel_start();
  if (threadIdx.x == 0) best_score = 0;
  wait_for_earlier_kernels();
  __syncthreads();
  Choice best = load_updated(maxima + blockIdx.y);
  Row row = slice_of_row(logits, width, first);
  row.maximum = score_of(best);
  row.temperature = rows[blockIdx.y].temperature;
  if (isfinite(row.maximum) && row.temperature > 0.0f) {
    GumbelChoice choice(row, LAST_KEY, rows[blockIdx.y].seed, rows[blockIdx.y].position, &best_score);
    row.for_each_group_in_turn<THREADS>(
        [&](int id, const float (&values)[GROUP]) { choice.visit(id, values); });
    best = block_best(choice.best());
  }
  if (threadIdx.x == 0) choices[blockIdx.y] = best;
}

// token_ids[s] = the token of choices[s], -1 where that of maxima[s] has no finite logit.
//   in:  maxima [num_rows] Choice, choices [num_rows] Choice
//   out: token_ids [num_rows] int32
// Layout: contiguous.
// Grid: ceil(num_rows / THREADS). Block: THREADS. Shared memory: none.
// Unit of work: one thread a row.
__global__ void __launch_bounds__(THREADS) slice_tokens_kernel(SLICE_TOKENS_PARAMS) {
  wait_for_earlier_kernels();
  const int s = blockIdx.x * THREADS + threadIdx.x;
  if (s >= num_rows) return;
  token_ids[s] = isfinite(score_of(load_updated(maxima + s))) ? token_of(load_updated(choices + s)) : -1;
}
