// Log-probabilities of chosen and of most probable tokens.

#include "choice.cuh"
#include "common.cuh"

constexpr int BLOCK_SIZE = 1024;
constexpr int NUM_WARPS = BLOCK_SIZE / WARP_SIZE;
constexpr int NUM_SEGMENTS = BLOCK_SIZE;
constexpr int SEGMENTS_PER_WARP = NUM_SEGMENTS / NUM_WARPS;

// Best of the ids begin to end that are behind `previous`; by one warp, all lanes get it.
__device__ Choice best_behind(const float* row_logits, int begin, int end, Choice previous) {
  Choice best = NO_CHOICE;
  for (int id = begin + threadIdx.x % WARP_SIZE; id < end; id += WARP_SIZE) {
    const Choice choice = make_choice(row_logits[id], id);
    if (choice < previous) best = better(best, choice);
  }
  return warp_best(best);
}

// chosen[s] = logit[token_ids[s]] - maximum - log(sum(exp(logit - maximum))); rank[s] = 1 + number of greater
// logits; NaN and 0 for an id out of range. top_ids[s, i], top_logprobs[s, i]: the same for the i-th most
// probable token, the lower id first on ties
//
// logits [num_rows, vocab_size] float; token_ids, rank [num_rows] int32; chosen [num_rows] float;
// top_ids [num_rows, num_top] int32, top_logprobs [num_rows, num_top] float, num_top <= vocab_size.
// Grid: (1, num_rows); block: 1024 threads; 8 KB of static shared memory.
// Unit of work: one block a row. The best of each of 1024 segments is kept; one warp takes the best of
// those num_top times and looks through its segment alone for the next.
__global__ void __launch_bounds__(BLOCK_SIZE)
    top_logprobs_kernel(const float* __restrict__ logits, const int* __restrict__ token_ids,
                        float* __restrict__ chosen, int* __restrict__ rank, int* __restrict__ top_ids,
                        float* __restrict__ top_logprobs, int vocab_size, int num_top) {
  __shared__ Choice segment_best[NUM_SEGMENTS];
  const int row = blockIdx.y;
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const float* const row_logits = logits + static_cast<long long>(row) * vocab_size;
  const int segment_size = ceil_div(vocab_size, NUM_SEGMENTS);

  for (int i = 0; i < SEGMENTS_PER_WARP; ++i) {
    const int segment = warp * SEGMENTS_PER_WARP + i;
    const int begin = min(segment * segment_size, vocab_size);
    const Choice best = best_behind(row_logits, begin, min(begin + segment_size, vocab_size), ~0ull);
    if (lane == 0) segment_best[segment] = best;
  }
  __syncthreads();
  const float maximum = score_of(block_best(segment_best[threadIdx.x]));

  const int token_id = token_ids[row];
  const bool known = token_id >= 0 && token_id < vocab_size;
  const float token_logit = known ? row_logits[token_id] : 0.0f;
  float sum = 0.0f;
  float num_greater = 0.0f;  // exact: a vocabulary is smaller than 2^24
#pragma unroll 4
  for (int id = threadIdx.x; id < vocab_size; id += BLOCK_SIZE) {
    const float logit = row_logits[id];
    sum += expf(logit - maximum);
    num_greater += logit > token_logit ? 1.0f : 0.0f;
  }
  const float log_sum = logf(block_sum(sum));
  num_greater = block_sum(num_greater);
  if (threadIdx.x == 0) {
    chosen[row] = known ? token_logit - maximum - log_sum : __int_as_float(0x7fc00000);
    rank[row] = known ? 1 + static_cast<int>(num_greater) : 0;
  }

  if (warp != 0) return;
  for (int i = 0; i < num_top; ++i) {
    const Choice best = best_of(segment_best, NUM_SEGMENTS);
    const int segment = token_of(best) / segment_size;
    const int begin = segment * segment_size;
    const Choice next = best_behind(row_logits, begin, min(begin + segment_size, vocab_size), best);
    if (lane == 0) {
      top_ids[static_cast<long long>(row) * num_top + i] = token_of(best);
      top_logprobs[static_cast<long long>(row) * num_top + i] = score_of(best) - maximum - log_sum;
      segment_best[segment] = next;
    }
    __syncwarp();
  }
}
