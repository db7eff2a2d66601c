// Rows on their way to and from experts.

#include "common.cuh"
#include "generated/expert_rows.cuh"

// out[p] = x[pairs[p] / top_k]: the rows of tokens, sorted by expert.
//   in:  x [num_tokens, width] T, pairs [num_pairs] int
//   out: out [num_pairs, width] T
// Layout: contiguous rows of any length; 16-byte accesses where addresses allow them.
// Grid: (pairs, blocks that cover a row). Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements of one row per thread.
template <typename T>
__global__ void gather_rows_kernel(GATHER_ROWS_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const long long row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
  if (i >= width) return;
  const long long token = load_updated(pairs + row) / top_k;
  float values[CHUNK];
  load_updated_floats(x + token * width + i, width - i, values);
  store_floats(out + row * width + i, width - i, values);
}

// out[t] = the sum of weights[t, i] * x[places[t, i]] in the order of i, + shared[t], times
// 1 / (1 + exp(-shared_gate[t])) where there is a gate, + out[t] if `accumulate`; rounded once.
//   in:  x [num_tokens * top_k, width] T; weights [num_tokens, top_k] float; places [num_tokens, top_k] int;
//        shared [num_tokens, width] T or null; shared_gate [num_tokens] float or null
//   out: out [num_tokens, width] T
// Layout: contiguous rows of any length; 16-byte accesses where addresses allow them.
// Grid: (tokens, blocks that cover a row). Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements of one row per thread.
template <typename T>
__global__ void combine_experts_kernel(COMBINE_EXPERTS_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const long long row = blockIdx.x;
  const int first = (blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
  if (first >= width) return;
  const int left = width - first;
  float sums[CHUNK] = {};
#pragma unroll 4
  for (int i = 0; i < top_k; ++i) {
    const long long place = load_updated(places + row * top_k + i);
    const float weight = load_updated(weights + row * top_k + i);
    float values[CHUNK];
    load_updated_floats(x + place * width + first, left, values);
#pragma unroll
    for (int e = 0; e < CHUNK; ++e) sums[e] += weight * values[e];
  }
  if (shared != nullptr) {
    float values[CHUNK];
    load_updated_floats(shared + row * width + first, left, values);
    const float factor =
        shared_gate == nullptr ? 1.0f : 1.0f / (1.0f + expf(-load_updated(shared_gate + row)));
#pragma unroll
    for (int e = 0; e < CHUNK; ++e) sums[e] += factor * values[e];
  }
  T* const to = out + row * width + first;
  if (accumulate) {
    float values[CHUNK];
    load_updated_floats(to, left, values);
#pragma unroll
    for (int e = 0; e < CHUNK; ++e) sums[e] += values[e];
  }
  store_floats(to, left, sums);
}
