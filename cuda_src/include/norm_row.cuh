// A row normed by its root mean square, by one block, for kernels that differ in where it goes.
#pragma once

#include "common.cuh"
#include "generated/rmsnorm.cuh"

// The same address, which the compiler may take for a multiple of 16 bytes if it IS_ALIGNED.
template <bool IS_ALIGNED, typename T>
__device__ __forceinline__ T* aligned(T* elements) {
  return IS_ALIGNED ? static_cast<T*>(__builtin_assume_aligned(elements, 16)) : elements;
}

// Where this block's row goes: CHUNK elements from `i` on, as they lie in the row.
template <typename T, bool WHOLE>
struct RowInOrder {
  T* out;
  int hidden;

  __device__ __forceinline__ void store(int i, const float (&values)[CHUNK]) const {
    T* const to = out + static_cast<long long>(blockIdx.x) * hidden + i;
    store_floats(aligned<WHOLE>(to), WHOLE ? CHUNK : hidden - i, values);
  }
};

// This block's row of x normed, or with ADDS stream + that, to where Row stores it. WHOLE: x, stream and
// weight are 16-byte aligned, hidden is a multiple of CHUNK.
template <typename T, bool WHOLE, bool ADDS, typename Row>
__device__ __forceinline__ void norm_row(const T* x, const T* stream, const T* weight, int hidden, float eps,
                                         const Row& row) {
  const long long start = static_cast<long long>(blockIdx.x) * hidden;
  const int stride = blockDim.x * CHUNK;
  const int first = threadIdx.x * CHUNK;
  auto count = [&](int i) { return WHOLE ? CHUNK : hidden - i; };
  auto load = [&](const T* from, int i, float (&values)[CHUNK]) {
    load_updated_floats(aligned<WHOLE>(from + start + i), count(i), values);
  };
  auto load_gains = [&](int i, float (&gains)[CHUNK]) {
    load_floats(aligned<WHOLE>(weight + i), count(i), gains);
  };
  auto store = [&](int i, float (&values)[CHUNK], const float (&gains)[CHUNK], const float (&sums)[CHUNK],
                   float inverse_rms) {
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      values[j] = values[j] * inverse_rms * gains[j];
      // As two kernels would add it: in float32 the compiler would otherwise fuse the product with the sum.
      if constexpr (ADDS) values[j] = __fadd_rn(sums[j], to_float(from_float<T>(values[j])));
    }
    row.store(i, values);
  };

  float values[ROW_CHUNKS][CHUNK] = {};
  float gains[ROW_CHUNKS][CHUNK], sums[ROW_CHUNKS][CHUNK];
  let_next_kernel_start();
#pragma unroll
  for (int c = 0; c < ROW_CHUNKS; ++c) {
    const int i = first + c * stride;
    if (i < hidden) load_gains(i, gains[c]);
  }
  wait_for_earlier_kernels();
#pragma unroll
  for (int c = 0; c < ROW_CHUNKS; ++c) {
    const int i = first + c * stride;
    if (i >= hidden) continue;
    load(x, i, values[c]);
    if constexpr (ADDS) load(stream, i, sums[c]);
  }
  float sum_of_squares = 0.0f;
#pragma unroll
  for (int c = 0; c < ROW_CHUNKS; ++c) {
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) sum_of_squares = fmaf(values[c][j], values[c][j], sum_of_squares);
  }
#pragma unroll 1
  for (int i = first + ROW_CHUNKS * stride; i < hidden; i += stride) {
    float others[CHUNK];
    load(x, i, others);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) sum_of_squares = fmaf(others[j], others[j], sum_of_squares);
  }
  const float inverse_rms = rsqrtf(block_sum(sum_of_squares) / hidden + eps);
#pragma unroll
  for (int c = 0; c < ROW_CHUNKS; ++c) {
    const int i = first + c * stride;
    if (i < hidden) store(i, values[c], gains[c], sums[c], inverse_rms);
  }
#pragma unroll 1
  for (int i = first + ROW_CHUNKS * stride; i < hidden; i += stride) {
    float others[CHUNK], other_gains[CHUNK], other_sums[CHUNK];
    load(x, i, others);
    load_gains(i, other_gains);
    if constexpr (ADDS) load(stream, i, other_sums);
    store(i, others, other_gains, other_sums, inverse_rms);
  }
}
