// LayerNorm per row.
#include "common.cuh"
#include "generated/layernorm.cuh"

// out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over each row, var with divisor hidden
// (Ba et al. 2016).
//   in:  x [rows, hidden] T, weight [hidden] T, bias [hidden] T or null
//   out: out [rows, hidden] T, may be x
// Layout: contiguous rows of any length; 16-byte accesses where a row's address allows them.
// Grid: rows. Block: whole warps, up to 1024 threads. Shared memory: none dynamic.
// Unit of work: one block per row.
template <typename T>
__global__ void layernorm_kernel(LAYERNORM_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long start = static_cast<long long>(blockIdx.x) * hidden;
  const T* row = x + start;

  float sum = 0.0f;
  for (int i = threadIdx.x * CHUNK; i < hidden; i += blockDim.x * CHUNK) {
    float values[CHUNK];
    load_floats(row + i, hidden - i, values);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) sum += values[j];
  }
  const float mean = block_sum(sum) / hidden;

  // A second pass instead of a running sum of squares, which would cancel where the mean is large.
  float sum_of_squares = 0.0f;
  for (int i = threadIdx.x * CHUNK; i < hidden; i += blockDim.x * CHUNK) {
    float values[CHUNK];
    load_floats(row + i, hidden - i, values);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      const float difference = i + j < hidden ? values[j] - mean : 0.0f;
      sum_of_squares += difference * difference;
    }
  }
  const float inverse_deviation = rsqrtf(block_sum(sum_of_squares) / hidden + eps);

  for (int i = threadIdx.x * CHUNK; i < hidden; i += blockDim.x * CHUNK) {
    float values[CHUNK], weights[CHUNK], biases[CHUNK] = {};
    load_floats(row + i, hidden - i, values);
    load_floats(weight + i, hidden - i, weights);
    if (bias != nullptr) load_floats(bias + i, hidden - i, biases);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j)
      values[j] = (values[j] - mean) * inverse_deviation * weights[j] + biases[j];
    store_floats(out + start + i, hidden - i, values);
  }
}
