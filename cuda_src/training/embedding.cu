// The backward of looking rows up.
#include "common.cuh"
#include "generated/training_embedding.cuh"

constexpr int WARPS = THREADS / WARP_SIZE;

// out[v] = out[v] + sum over t with ids[t] = v of dy[t], in ascending t; ids outside 0 .. vocab_size - 1 add
// nothing.
//   in:  dy [num_tokens, hidden] T, ids [num_tokens] int
//   out: out [vocab_size, hidden] float
// Layout: contiguous rows of any length; 16-byte accesses where a row's address allows them.
// Grid: (num_tokens, blocks of THREADS * CHUNK columns that cover a row).
// Block: THREADS. Shared memory: static.
// Unit of work: a block a token that is the first of its id: it finds the others and adds their rows. No two
// blocks write to the same place.
template <typename T>
__global__ void __launch_bounds__(THREADS) embedding_gradient_kernel(EMBEDDING_GRADIENT_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  __shared__ unsigned matches[WARPS];
  const int token = blockIdx.x;
  const int id = ids[token];
  if (id < 0 || id >= vocab_size) return;
  for (int end = token; end > 0; end -= THREADS) {  // the nearest first: frequent ids are found soon
    const int other = end - 1 - static_cast<int>(threadIdx.x);
    if (block_max(other >= 0 && ids[other] == id ? 1.0f : 0.0f) > 0.0f) return;
  }
  const int column = (blockIdx.y * THREADS + threadIdx.x) * CHUNK;
  float sums[CHUNK] = {};
  for (int begin = token; begin < num_tokens; begin += THREADS) {
    const int other = begin + threadIdx.x;
    const unsigned found = __ballot_sync(FULL_WARP, other < num_tokens && ids[other] == id);
    __syncthreads();  // the matches before are no longer in use
    if (threadIdx.x % WARP_SIZE == 0) matches[threadIdx.x / WARP_SIZE] = found;
    __syncthreads();
    if (column >= hidden) continue;
    for (int warp = 0; warp < WARPS; ++warp) {
      for (unsigned left = matches[warp]; left != 0; left &= left - 1) {
        const long long row = begin + warp * WARP_SIZE + __ffs(left) - 1;
        float values[CHUNK];
        load_floats(dy + row * hidden + column, hidden - column, values);
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) sums[j] += values[j];
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
