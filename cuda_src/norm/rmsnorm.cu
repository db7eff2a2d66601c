// RMSNorm per row.
#include "common.cuh"
#include "generated/rmsnorm.cuh"

// The same address, which the compiler may take for a multiple of 16 bytes if it IS_ALIGNED.
template <bool IS_ALIGNED, typename T>
__device__ __forceinline__ T* aligned(T* elements) {
  return IS_ALIGNED ? static_cast<T*>(__builtin_assume_aligned(elements, 16)) : elements;
}

// A row of rmsnorm_kernel, or with ADDS of rmsnorm_add_kernel.
template <typename T, bool WHOLE, bool ADDS>
__device__ __forceinline__ void norm_row(const T* x, const T* stream, const T* weight, T* out, int hidden,
                                         float eps) {
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
    store_floats(aligned<WHOLE>(out + start + i), count(i), values);
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

// out = x / sqrt(mean(x^2) + eps) * weight over each row (Zhang and Sennrich 2019).
//   in:  x [rows, hidden] T, weight [hidden] T
//   out: out [rows, hidden] T, may be x
// Layout: contiguous rows of any length; 16-byte accesses where a row's address allows them, which WHOLE says
// of all rows: x, weight and out 16-byte aligned, hidden a multiple of 8.
// Grid: rows. Block: whole warps, up to MAX_THREADS. Shared memory: none dynamic.
// Unit of work: one block per row. Where ROW_CHUNKS chunks of each thread are less than the row, the rest is
// read twice.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(MAX_THREADS) rmsnorm_kernel(RMSNORM_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  norm_row<T, WHOLE, false>(x, nullptr, weight, out, hidden, eps);
}

// out = stream + rmsnorm(x), which is rounded to T before it is added, as two kernels would.
//   in:  as rmsnorm_kernel has them, and stream [rows, hidden] T
//   out: out [rows, hidden] T, may be stream, not x
// Layout: as there.
// Grid: rows. Block: whole warps, up to MAX_THREADS. Shared memory: none dynamic.
// Unit of work: one block per row, as there.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(MAX_THREADS) rmsnorm_add_kernel(RMSNORM_ADD_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  norm_row<T, WHOLE, true>(x, stream, weight, out, hidden, eps);
}
