// The backward of RMSNorm and LayerNorm by their input.
#include "common.cuh"
#include "generated/training_norm.cuh"

// dx = inverse * (g - normalised * mean(g * normalised)), g = dy * weight, normalised = (x - mean) * inverse;
// inverse = 1 / sqrt(mean((x - mean)^2) + eps). CENTRED (LayerNorm): mean is that of the row's x, and g loses
// its mean, too; else (RMSNorm) it is 0.
//   in:  dy [rows, hidden] T, x [rows, hidden] T, weight [hidden] T
//   out: out [rows, hidden] T, may be dy
//        statistics [rows, 2] float, mean and inverse of each row, or null
// Layout: contiguous rows of any length; 16-byte accesses where a row's address allows them.
// Grid: rows. Block: whole warps, up to 1024 threads. Shared memory: none dynamic.
// Unit of work: one block per row, read three times.
template <typename T, bool CENTRED>
__global__ void norm_gradient_kernel(NORM_GRADIENT_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long start = static_cast<long long>(blockIdx.x) * hidden;
  const int first = threadIdx.x * CHUNK, stride = blockDim.x * CHUNK;
  float mean = 0.0f;
  if constexpr (CENTRED) {
    float sum = 0.0f;
    for (int i = first; i < hidden; i += stride) {
      float values[CHUNK];
      load_floats(x + start + i, hidden - i, values);
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) sum += values[j];
    }
    mean = block_sum(sum) / hidden;
  }
  float squares = 0.0f, along = 0.0f, scaled_sum = 0.0f;
  for (int i = first; i < hidden; i += stride) {
    float values[CHUNK], upper[CHUNK], gains[CHUNK];
    load_floats(x + start + i, hidden - i, values);
    load_floats(dy + start + i, hidden - i, upper);
    load_floats(weight + i, hidden - i, gains);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      const float centred = i + j < hidden ? values[j] - mean : 0.0f;
      const float scaled = upper[j] * gains[j];
      squares = fmaf(centred, centred, squares);
      along = fmaf(scaled, centred, along);
      scaled_sum += scaled;
    }
  }
  const float inverse = rsqrtf(block_sum(squares) / hidden + eps);
  const float mean_along = block_sum(along) * inverse / hidden;
  const float mean_scaled = CENTRED ? block_sum(scaled_sum) / hidden : 0.0f;
  if (statistics != nullptr && threadIdx.x == 0) {
    statistics[blockIdx.x * 2ll] = mean;
    statistics[blockIdx.x * 2ll + 1] = inverse;
  }
  for (int i = first; i < hidden; i += stride) {
    float values[CHUNK], upper[CHUNK], gains[CHUNK];
    load_floats(x + start + i, hidden - i, values);
    load_floats(dy + start + i, hidden - i, upper);
    load_floats(weight + i, hidden - i, gains);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      const float normalised = (values[j] - mean) * inverse;
      upper[j] = inverse * (upper[j] * gains[j] - mean_scaled - normalised * mean_along);
    }
    store_floats(out + start + i, hidden - i, upper);
  }
}
