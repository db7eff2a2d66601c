// RMSNorm per row.
#include "common.cuh"

namespace {

// out = row / sqrt(mean_square + eps) * weight; the part of one thread.
template <typename T>
__device__ __forceinline__ void scale_row(const T* row, const T* weight, T* out, int hidden,
                                          float inverse_rms) {
  for (int i = threadIdx.x * CHUNK; i < hidden; i += blockDim.x * CHUNK) {
    float values[CHUNK], weights[CHUNK];
    load_updated_floats(row + i, hidden - i, values);
    load_floats(weight + i, hidden - i, weights);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) values[j] = values[j] * inverse_rms * weights[j];
    store_floats(out + i, hidden - i, values);
  }
}

}  // namespace

// out = x / sqrt(mean(x^2) + eps) * weight over each row (Zhang and Sennrich 2019).
//   in:  x [rows, hidden] T, weight [hidden] T
//   out: out [rows, hidden] T, may be x
// Layout: contiguous rows of any length; 16-byte accesses where a row's address allows them.
// Grid: rows. Block: whole warps, up to 1024 threads. Shared memory: none dynamic.
// Unit of work: one block per row.
template <typename T>
__global__ void rmsnorm_kernel(const T* x, const T* weight, T* out, int hidden, float eps) {
  ASSERT_ELEMENT(T);
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const long long start = static_cast<long long>(blockIdx.x) * hidden;
  const T* row = x + start;
  float sum_of_squares = 0.0f;
  for (int i = threadIdx.x * CHUNK; i < hidden; i += blockDim.x * CHUNK) {
    float values[CHUNK];
    load_updated_floats(row + i, hidden - i, values);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) sum_of_squares += values[j] * values[j];
  }
  const float inverse_rms = rsqrtf(block_sum(sum_of_squares) / hidden + eps);
  scale_row(row, weight, out + start, hidden, inverse_rms);
}
