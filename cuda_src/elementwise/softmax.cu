// Softmax per row.
#include "common.cuh"
#include "generated/softmax.cuh"

// out = exp(x - max(x)) / sum(exp(x - max(x))) over each row, or its logarithm. Maximum and sum are
// found in one pass (Milakov and Gimelshein 2018).
//   in:  x [rows, width] T
//   out: out [rows, width] float, may be x where T is float
// Layout: contiguous rows of any length; 16-byte accesses where a row's address allows them.
// Grid: rows. Block: whole warps, up to 1024 threads. Shared memory: none dynamic.
// Unit of work: one block per row.
template <typename T, bool LOG>
__global__ void softmax_kernel(SOFTMAX_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long start = static_cast<long long>(blockIdx.x) * width;
  const T* row = x + start;

  // Of this thread's elements, the sum relative to their maximum. Beginning with the lowest finite number
  // keeps -inf - -inf out of it.
  float maximum = LOWEST_FLOAT, sum = 0.0f;
  for (int i = threadIdx.x * CHUNK; i < width; i += blockDim.x * CHUNK) {
    float values[CHUNK];
    load_floats(row + i, width - i, values);
    float larger = maximum;
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      if (i + j < width) larger = fmaxf(larger, values[j]);
    }
    sum *= expf(maximum - larger);
    maximum = larger;
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      if (i + j < width) sum += expf(values[j] - maximum);
    }
  }
  const float row_maximum = block_max(maximum);
  const float row_sum = block_sum(sum * expf(maximum - row_maximum));
  const float scale = LOG ? logf(row_sum) : 1.0f / row_sum;

  for (int i = threadIdx.x * CHUNK; i < width; i += blockDim.x * CHUNK) {
    float values[CHUNK];
    load_floats(row + i, width - i, values);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      const float difference = values[j] - row_maximum;
      values[j] = LOG ? difference - scale : expf(difference) * scale;
    }
    store_floats(out + start + i, width - i, values);
  }
}
