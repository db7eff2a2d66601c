// The backward of looking rows up: tokens are put into an order in which those of one id stand together, by
// counting; then a block sums the rows of each id. Ids outside 0 .. vocab_size - 1 add nothing.
#include "common.cuh"
#include "generated/training_embedding.cuh"

constexpr int WARPS = THREADS / WARP_SIZE;

// places[v] = places[v] + the number of tokens with id v.
//   in:  ids [num_tokens] int
//   out: places [vocab_size] int, zeros before
// Layout: contiguous.
// Grid: blocks that cover the tokens. Block: THREADS. Shared memory: none.
// Unit of work: one token per thread.
__global__ void __launch_bounds__(THREADS) embedding_count_kernel(EMBEDDING_COUNT_PARAMS) {
  const int token = blockIdx.x * THREADS + threadIdx.x;
  if (token >= num_tokens) return;
  const int id = ids[token];
  if (id >= 0 && id < vocab_size) atomicAdd(&places[id], 1);
}

// places[v] = sum of places[u] over u < v: where the tokens with id v begin in the order.
//   in:  places [vocab_size] int, numbers of tokens
//   out: places [vocab_size] int
// Layout: contiguous.
// Grid: 1. Block: MAX_THREADS. Shared memory: static.
// Unit of work: a thread has neighbouring ids.
__global__ void __launch_bounds__(MAX_THREADS) embedding_starts_kernel(EMBEDDING_STARTS_PARAMS) {
  __shared__ int warp_sums[MAX_THREADS / WARP_SIZE];
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int per_thread = ceil_div(vocab_size, MAX_THREADS);
  const int first = min(static_cast<int>(threadIdx.x) * per_thread, vocab_size);
  const int end = min(first + per_thread, vocab_size);
  int sum = 0;
  for (int v = first; v < end; ++v) sum += places[v];
  int through = sum;  // with the lanes before
#pragma unroll
  for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
    const int other = __shfl_up_sync(FULL_WARP, through, offset);
    if (lane >= offset) through += other;
  }
  if (lane == WARP_SIZE - 1) warp_sums[warp] = through;
  __syncthreads();
  int before = through - sum;
  for (int w = 0; w < warp; ++w) before += warp_sums[w];
  for (int v = first; v < end; ++v) {
    const int count = places[v];
    places[v] = before;
    before += count;
  }
}

// order[places[v] ..] = the tokens with id v, in any order; afterwards places[v] is behind the last of them.
//   in:  ids [num_tokens] int, places [vocab_size] int, where the tokens of each id begin
//   out: order [num_tokens] int, places [vocab_size] int
// Layout: contiguous.
// Grid: blocks that cover the tokens. Block: THREADS. Shared memory: none.
// Unit of work: one token per thread.
__global__ void __launch_bounds__(THREADS) embedding_place_kernel(EMBEDDING_PLACE_PARAMS) {
  const int token = blockIdx.x * THREADS + threadIdx.x;
  if (token >= num_tokens) return;
  const int id = ids[token];
  if (id >= 0 && id < vocab_size) order[atomicAdd(&places[id], 1)] = token;
}

// out[v] = out[v] + sum over t with ids[t] = v of dy[t], in ascending t.
//   in:  dy [num_tokens, hidden] T, ids [num_tokens] int
//        order [num_tokens] int, tokens of one id side by side
//        ends [vocab_size] int, the place in `order` behind those of each id
//   out: out [vocab_size, hidden] float
// Layout: contiguous rows of any length; 16-byte accesses where a row's address allows them.
// Grid: (num_tokens, blocks of THREADS * CHUNK columns that cover a row).
// Block: THREADS. Shared memory: static.
// Unit of work: a block the tokens of one id: of up to MAX_SORTED it sorts the numbers, of more it finds them
// among all tokens. No two blocks write to the same place.
template <typename T>
__global__ void __launch_bounds__(THREADS) embedding_gradient_kernel(EMBEDDING_GRADIENT_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  __shared__ int tokens[MAX_SORTED], sorted[MAX_SORTED];
  __shared__ unsigned matches[WARPS];
  const int place = blockIdx.x;
  if (place >= ends[vocab_size - 1]) return;
  const int id = ids[order[place]];
  const int begin = id == 0 ? 0 : ends[id - 1];
  if (place != begin) return;
  const int count = ends[id] - begin;
  const int column = (blockIdx.y * THREADS + threadIdx.x) * CHUNK;
  float sums[CHUNK] = {};
  auto add = [&](long long token) {
    if (column >= hidden) return;
    float values[CHUNK];
    load_floats(dy + token * hidden + column, hidden - column, values);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) sums[j] += values[j];
  };
  if (count <= MAX_SORTED) {
    for (int i = threadIdx.x; i < count; i += THREADS) tokens[i] = order[begin + i];
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) {
      int rank = 0;
      for (int k = 0; k < count; ++k) rank += tokens[k] < tokens[i];
      sorted[rank] = tokens[i];
    }
    __syncthreads();
#pragma unroll 4
    for (int i = 0; i < count; ++i) add(sorted[i]);
  } else {
    for (int from = 0; from < num_tokens; from += THREADS) {
      const int other = from + threadIdx.x;
      const unsigned found = __ballot_sync(FULL_WARP, other < num_tokens && ids[other] == id);
      __syncthreads();  // the matches before are no longer in use
      if (threadIdx.x % WARP_SIZE == 0) matches[threadIdx.x / WARP_SIZE] = found;
      __syncthreads();
      for (int warp = 0; warp < WARPS; ++warp) {
        for (unsigned left = matches[warp]; left != 0; left &= left - 1) {
          add(from + warp * WARP_SIZE + __ffs(left) - 1);
        }
      }
    }
  }
  if (column >= hidden) return;
  float* const to = out + static_cast<long long>(id) * hidden + column;
  float before[CHUNK];
  load_floats(to, hidden - column, before);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) sums[j] += before[j];
  store_floats(to, hidden - column, sums);
}
