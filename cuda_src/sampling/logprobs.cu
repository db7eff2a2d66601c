// Log-probabilities of chosen and of most probable tokens.

#include "cluster.cuh"
#include "generated/logprobs.cuh"
#include "sampling/choice.cuh"

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
// probable token, the lower id first on ties.
//   in:  logits [num_rows, vocab_size] float, token_ids [num_rows] int32; num_top <= vocab_size
//   out: chosen [num_rows] float, rank [num_rows] int32, top_ids [num_rows, num_top] int32, top_logprobs
//        [num_rows, num_top] float
// Layout: contiguous.
// Grid: (1, num_rows). Block: 1024 threads. Shared memory: 8 KB, none dynamic.
// Unit of work: one block a row. The best of each of 1024 segments is kept; one warp takes the best of
// those num_top times and looks through its segment alone for the next.
__global__ void __launch_bounds__(BLOCK_SIZE) top_logprobs_kernel(TOP_LOGPROBS_PARAMS) {
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
    __syncwarp();
    if (lane == 0) {
      top_ids[static_cast<long long>(row) * num_top + i] = token_of(best);
      top_logprobs[static_cast<long long>(row) * num_top + i] = score_of(best) - maximum - log_sum;
      segment_best[segment] = next;
    }
    __syncwarp();
  }
}

#if __CUDA_ARCH__ >= 900

// The formulas of top_logprobs_kernel for num_top <= 64.
//   in:  logits [num_rows, vocab_size] float, token_ids [num_rows] int32; num_top <= vocab_size
//   out: chosen [num_rows] float, rank [num_rows] int32, top_ids [num_rows, num_top] int32, top_logprobs
//        [num_rows, num_top] float
// Layout: contiguous.
// Grid: (8, num_rows), eight blocks a cluster. Block: 512 threads.
// Shared memory: 8 * num_top * ceil(ceil(vocab_size / 8) / 512) bytes and 9 KB of static.
// Unit of work: a cluster a row, a block an eighth of it, a thread every 512th id. The num_top-th best of the
// threads' best ids bounds what can be among the top: those ids are listed, and an id's place is the number
// of better ones.
__cluster_dims__(CLUSTER_BLOCKS, 1, 1) __global__ void __launch_bounds__(CLUSTER_THREADS)
    top_logprobs_cluster_kernel(TOP_LOGPROBS_PARAMS) {
  using Blocks = Cluster<CLUSTER_BLOCKS>;
  struct PartSums {
    float maximum;
    float sum;  // of exp(logit - maximum)
    float num_greater;
  };
  extern __shared__ __align__(8) Choice candidates[];
  __shared__ Choice thread_best[CLUSTER_THREADS];
  __shared__ Choice part_top[MAX_CLUSTER_TOP];
  __shared__ Choice all_tops[CLUSTER_BLOCKS * MAX_CLUSTER_TOP];
  __shared__ PartSums part_sums;
  __shared__ Choice bound;
  __shared__ int num_candidates;
  const int row = blockIdx.y;
  const int lane = threadIdx.x % WARP_SIZE;
  const float* const row_logits = logits + static_cast<long long>(row) * vocab_size;
  const int part = ceil_div(vocab_size, CLUSTER_BLOCKS);
  const int begin = min(Blocks::rank() * part, vocab_size);
  const int end = min(begin + part, vocab_size);
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    bound = NO_CHOICE;
    num_candidates = 0;
  }
  if (threadIdx.x < MAX_CLUSTER_TOP) part_top[threadIdx.x] = NO_CHOICE;
  wait_for_earlier_kernels();

  Choice best = NO_CHOICE;
#pragma unroll 8
  for (int id = begin + threadIdx.x; id < end; id += CLUSTER_THREADS) {
    best = better(best, make_choice(row_logits[id], id));
  }
  thread_best[threadIdx.x] = best;
  const Choice part_best = block_best(best);
  const float part_maximum = part_best == NO_CHOICE ? -FLOAT_INFINITY : score_of(part_best);

  const int token_id = token_ids[row];
  const bool known = token_id >= 0 && token_id < vocab_size;
  const float token_logit = known ? row_logits[token_id] : 0.0f;
  float sum = 0.0f;
  float num_greater = 0.0f;  // exact: a vocabulary is smaller than 2^24
  if (part_maximum != -FLOAT_INFINITY) {
#pragma unroll 4
    for (int id = begin + threadIdx.x; id < end; id += CLUSTER_THREADS) {
      const float logit = row_logits[id];
      sum += expf(logit - part_maximum);
      num_greater += logit > token_logit ? 1.0f : 0.0f;
    }
  }
  sum = block_sum(sum);
  num_greater = block_sum(num_greater);
  if (threadIdx.x == 0) part_sums = {part_maximum, sum, num_greater};

  if (num_top > 0) {
    int num_better = 0;
#pragma unroll 8
    for (int i = 0; i < CLUSTER_THREADS; ++i) num_better += thread_best[i] > best;
    if (best != NO_CHOICE && num_better == num_top - 1) bound = best;
    __syncthreads();
    // A warp looks through the ids of those of its threads that have any to offer.
    unsigned offering = __ballot_sync(FULL_WARP, best != NO_CHOICE && best >= bound);
    while (offering != 0) {
      const int thread = threadIdx.x - lane + __ffs(offering) - 1;
      offering &= offering - 1;
      for (int id = begin + thread + lane * CLUSTER_THREADS; id < end; id += WARP_SIZE * CLUSTER_THREADS) {
        const Choice choice = make_choice(row_logits[id], id);
        if (choice >= bound) candidates[atomicAdd(&num_candidates, 1)] = choice;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_candidates; i += CLUSTER_THREADS) {
      int place = 0;
#pragma unroll 1
      for (int j = 0; j < num_candidates; ++j) place += candidates[j] > candidates[i];
      if (place < num_top) part_top[place] = candidates[i];
    }
  }
  Blocks::sync();

  if (Blocks::rank() == 0) {
    for (int i = threadIdx.x; i < CLUSTER_BLOCKS * num_top; i += CLUSTER_THREADS) {
      all_tops[i] = Blocks::at(part_top, i / num_top)[i % num_top];
    }
    PartSums parts[CLUSTER_BLOCKS];
    float maximum = -FLOAT_INFINITY;
    bool has_nan = false;
#pragma unroll
    for (int b = 0; b < CLUSTER_BLOCKS; ++b) {
      parts[b] = *Blocks::at(&part_sums, b);
      maximum = fmaxf(maximum, parts[b].maximum);
      has_nan |= isnan(parts[b].maximum);
    }
    float total = 0.0f;
    float total_greater = 0.0f;
#pragma unroll
    for (int b = 0; b < CLUSTER_BLOCKS; ++b) {
      if (parts[b].maximum != -FLOAT_INFINITY) total += parts[b].sum * expf(parts[b].maximum - maximum);
      total_greater += parts[b].num_greater;
    }
    const float log_sum = has_nan ? __int_as_float(0x7fc00000) : logf(total);
    if (threadIdx.x == 0) {
      chosen[row] = known ? token_logit - maximum - log_sum : __int_as_float(0x7fc00000);
      rank[row] = known ? 1 + static_cast<int>(total_greater) : 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < CLUSTER_BLOCKS * num_top; i += CLUSTER_THREADS) {
      const Choice own = all_tops[i];
      int place = 0;
      for (int j = 0; j < CLUSTER_BLOCKS * num_top; ++j) place += all_tops[j] > own;
      if (own == NO_CHOICE || place >= num_top) continue;
      top_ids[static_cast<long long>(row) * num_top + place] = token_of(own);
      top_logprobs[static_cast<long long>(row) * num_top + place] = score_of(own) - maximum - log_sum;
    }
  }
  Blocks::sync();  // no block's memory goes while another reads it
}

#endif
