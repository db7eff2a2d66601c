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
// Unit of work: one block per row, of which each thread keeps a chunk; of longer ones the rest is read three
// times.
template <typename T, bool CENTRED>
__global__ void norm_gradient_kernel(NORM_GRADIENT_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long start = static_cast<long long>(blockIdx.x) * hidden;
  const int first = threadIdx.x * CHUNK, stride = blockDim.x * CHUNK;
  auto load = [&](int i, float (&values)[CHUNK], float (&scaled)[CHUNK]) {
    float gains[CHUNK];
    load_floats(x + start + i, hidden - i, values);
    load_floats(dy + start + i, hidden - i, scaled);
    load_floats(weight + i, hidden - i, gains);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) scaled[j] *= gains[j];
  };
  float kept[CHUNK], kept_scaled[CHUNK];
  if (first < hidden) load(first, kept, kept_scaled);

  float mean = 0.0f;
  if constexpr (CENTRED) {
    float sum = 0.0f;
    auto sum_up = [&](const float (&values)[CHUNK]) {
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) sum += values[j];
    };
    if (first < hidden) sum_up(kept);
    for (int i = first + stride; i < hidden; i += stride) {
      float values[CHUNK];
      load_floats(x + start + i, hidden - i, values);
      sum_up(values);
    }
    mean = block_sum(sum) / hidden;
  }
  float squares = 0.0f, along = 0.0f, scaled_sum = 0.0f;
  auto add = [&](int i, const float (&values)[CHUNK], const float (&scaled)[CHUNK]) {
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      const float centred = i + j < hidden ? values[j] - mean : 0.0f;
      squares = fmaf(centred, centred, squares);
      along = fmaf(scaled[j], centred, along);
      scaled_sum += scaled[j];
    }
  };
  if (first < hidden) add(first, kept, kept_scaled);
  for (int i = first + stride; i < hidden; i += stride) {
    float values[CHUNK], scaled[CHUNK];
    load(i, values, scaled);
    add(i, values, scaled);
  }
  const float inverse = rsqrtf(block_sum(squares) / hidden + eps);
  const float mean_along = block_sum(along) * inverse / hidden;
  const float mean_scaled = CENTRED ? block_sum(scaled_sum) / hidden : 0.0f;
  if (statistics != nullptr && threadIdx.x == 0) {
    statistics[blockIdx.x * 2ll] = mean;
    statistics[blockIdx.x * 2ll + 1] = inverse;
  }
  auto store = [&](int i, const float (&values)[CHUNK], const float (&scaled)[CHUNK]) {
    float results[CHUNK];
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      const float normalised = (values[j] - mean) * inverse;
      results[j] = inverse * (scaled[j] - mean_scaled - normalised * mean_along);
    }
    store_floats(out + start + i, hidden - i, results);
  };
  if (first < hidden) store(first, kept, kept_scaled);
  for (int i = first + stride; i < hidden; i += stride) {
    float values[CHUNK], scaled[CHUNK];
    load(i, values, scaled);
    store(i, values, scaled);
  }
}
