// Norms of vectors that lie side by side in the rows of a matrix.
#include "common.cuh"
#include "generated/columns.cuh"

// out = (x - m) / sqrt(mean((x - m)^2) + eps) * weight over each vector of `size` elements, m = 0 (RMSNorm,
// Zhang and Sennrich 2019) or, CENTRED, mean(x) (LayerNorm without a bias, Ba et al. 2016).
//   in:  x [rows, width] T, of whose columns first .. first + groups * size - 1 are `groups` vectors
//        weight [groups * size] T
//   out: x [rows, width] T, these columns; the others stay as they are
// Layout: row-major; 16-byte accesses where a vector's address allows them.
// Grid: (rows, groups). Block: whole warps, up to 1024 threads. Shared memory: none dynamic.
// Unit of work: one block per vector.
template <typename T, bool CENTRED>
__global__ void norm_columns_kernel(NORM_COLUMNS_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  T* const vector = x + static_cast<long long>(blockIdx.x) * width + first + blockIdx.y * size;
  const T* const weights = weight + blockIdx.y * size;
  const int stride = blockDim.x * CHUNK;

  float mean = 0.0f;
  if constexpr (CENTRED) {
    float sum = 0.0f;
    for (int i = threadIdx.x * CHUNK; i < size; i += stride) {
      float values[CHUNK];
      load_floats(vector + i, size - i, values);
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) sum += values[j];
    }
    mean = block_sum(sum) / size;
  }

  float sum_of_squares = 0.0f;
  for (int i = threadIdx.x * CHUNK; i < size; i += stride) {
    float values[CHUNK];
    load_floats(vector + i, size - i, values);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      const float difference = i + j < size ? values[j] - mean : 0.0f;
      sum_of_squares = fmaf(difference, difference, sum_of_squares);
    }
  }
  const float inverse = rsqrtf(block_sum(sum_of_squares) / size + eps);

  for (int i = threadIdx.x * CHUNK; i < size; i += stride) {
    float values[CHUNK], gains[CHUNK];
    load_floats(vector + i, size - i, values);
    load_floats(weights + i, size - i, gains);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) values[j] = (values[j] - mean) * inverse * gains[j];
    store_floats(vector + i, size - i, values);
  }
}
