// RMSNorm per row.
#include "common.cuh"

// out = x / sqrt(mean(x^2) + eps) * weight over each row (Zhang and Sennrich 2019).
//   in:  x [rows, hidden] T, weight [hidden] T
//   out: out [rows, hidden] T, may be x
// Layout: contiguous rows of any length; 16-byte accesses where a row's address allows them.
// Grid: rows. Block: whole warps, up to 1024 threads. Shared memory: none dynamic.
// Unit of work: one block per row.
template <typename T>
__global__ void rmsnorm_kernel(const T* x, const T* weight, T* out, int hidden, float eps) {
  ASSERT_ELEMENT(T);
  const long long start = static_cast<long long>(blockIdx.x) * hidden;
  const int first = threadIdx.x * CHUNK;
  const int stride = blockDim.x * CHUNK;
  auto load = [&](int i, float (&values)[CHUNK]) { load_updated_floats(x + start + i, hidden - i, values); };
  auto store = [&](int i, float (&values)[CHUNK], const float (&gains)[CHUNK], float inverse_rms) {
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) values[j] = values[j] * inverse_rms * gains[j];
    store_floats(out + start + i, hidden - i, values);
  };

  // A thread keeps what it needs again of its first chunk, which is all of most rows.
  float gains[CHUNK] = {};
  float values[CHUNK] = {};
  let_next_kernel_start();
  if (first < hidden) load_floats(weight + first, hidden - first, gains);
  wait_for_earlier_kernels();
  if (first < hidden) load(first, values);
  float sum_of_squares = 0.0f;
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) sum_of_squares += values[j] * values[j];
#pragma unroll 1
  for (int i = first + stride; i < hidden; i += stride) {
    float others[CHUNK];
    load(i, others);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) sum_of_squares += others[j] * others[j];
  }
  const float inverse_rms = rsqrtf(block_sum(sum_of_squares) / hidden + eps);
  if (first < hidden) store(first, values, gains, inverse_rms);
#pragma unroll 1
  for (int i = first + stride; i < hidden; i += stride) {
    float others[CHUNK];
    load(i, others);
    load_floats(weight + i, hidden - i, gains);
    store(i, others, gains, inverse_rms);
  }
}
