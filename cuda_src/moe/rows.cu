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

// CHUNK elements of T as they are in memory.
template <typename T>
struct RawChunk {
  static constexpr int PARTS = CHUNK / VECTOR_SIZE<T>;
  Vec<T, VECTOR_SIZE<T>> parts[PARTS];

  __device__ __forceinline__ void load_updated_from(const T* source) {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      reinterpret_cast<uint4&>(parts[i]) =
          load_updated(reinterpret_cast<const uint4*>(source + i * VECTOR_SIZE<T>));
    }
  }
  __device__ __forceinline__ float operator[](int i) const {
    return to_float(parts[i / VECTOR_SIZE<T>].data[i % VECTOR_SIZE<T>]);
  }
};

// Places and weights of COMBINE_BATCH of a token's experts.
struct CombineBatch {
  int places[COMBINE_BATCH];
  float weights[COMBINE_BATCH];

  __device__ __forceinline__ void load(const int* all_places, const float* all_weights, int count) {
#pragma unroll
    for (int i = 0; i < COMBINE_BATCH; ++i) {
      places[i] = i < count ? load_updated(all_places + i) : 0;
      weights[i] = i < count ? load_updated(all_weights + i) : 0.0f;
    }
  }
};

// out[t] = the sum of weights[t, i] * x[places[t, i]] in the order of i, + shared[t], times
// 1 / (1 + exp(-shared_gate[t])) where there is a gate, + out[t] if `accumulate`; rounded once.
//   in:  x [num_tokens * top_k, width] T; weights [num_tokens, top_k] float; places [num_tokens, top_k] int;
//        shared [num_tokens, width] T or null; shared_gate [num_tokens] float or null; settled: places,
//        weights and what `out` holds were written before the kernel in front began
//   out: out [num_tokens, width] T
// Layout: contiguous rows of any length; 16-byte accesses where addresses allow them, `whole` where those of
// x and out do and width is a multiple of CHUNK.
// Grid: (tokens, blocks that cover a row). Block: whole warps. Shared memory: none.
// Unit of work: CHUNK elements of one row per thread, which has the rows of COMBINE_BATCH experts on the way.
template <typename T>
__global__ void __launch_bounds__(256) combine_experts_kernel(COMBINE_EXPERTS_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  let_next_kernel_start();
  const long long row = blockIdx.x;
  const int first = (blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
  const int left = width - first;
  T* const to = out + row * width + first;
  const int* const token_places = places + row * top_k;
  const float* const token_weights = weights + row * top_k;
  CombineBatch batch;
  float before[CHUNK] = {};
  if (!settled) wait_for_earlier_kernels();
  batch.load(token_places, token_weights, top_k);
  if (accumulate && left > 0) load_updated_floats(to, left, before);
  if (settled) wait_for_earlier_kernels();
  if (left <= 0) return;

  float sums[CHUNK] = {};
  if (whole) {
#pragma unroll 1
    for (int begin = 0; begin < top_k; begin += COMBINE_BATCH) {
      if (begin > 0) batch.load(token_places + begin, token_weights + begin, top_k - begin);
      RawChunk<T> rows[COMBINE_BATCH];
#pragma unroll
      for (int i = 0; i < COMBINE_BATCH; ++i) {
        if (begin + i < top_k) {
          rows[i].load_updated_from(x + static_cast<long long>(batch.places[i]) * width + first);
        }
      }
#pragma unroll
      for (int i = 0; i < COMBINE_BATCH; ++i) {
        if (begin + i < top_k) {
#pragma unroll
          for (int e = 0; e < CHUNK; ++e) sums[e] = fmaf(batch.weights[i], rows[i][e], sums[e]);
        }
      }
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < top_k; ++i) {
      const long long place = load_updated(token_places + i);
      const float weight = load_updated(token_weights + i);
      float values[CHUNK];
      load_updated_floats(x + place * width + first, left, values);
#pragma unroll
      for (int e = 0; e < CHUNK; ++e) sums[e] = fmaf(weight, values[e], sums[e]);
    }
  }
  if (shared != nullptr) {
    float values[CHUNK];
    load_updated_floats(shared + row * width + first, left, values);
    const float factor =
        shared_gate == nullptr ? 1.0f : 1.0f / (1.0f + expf(-load_updated(shared_gate + row)));
#pragma unroll
    for (int e = 0; e < CHUNK; ++e) sums[e] = fmaf(factor, values[e], sums[e]);
  }
  if (accumulate) {
#pragma unroll
    for (int e = 0; e < CHUNK; ++e) sums[e] += before[e];
  }
  store_floats(to, left, sums);
}
