// Rows of activations as e4m3 with scales, for products by e4m3 weights; with the norm before them.

#include "common.cuh"
#include "fp8_rows.cuh"
#include "generated/fp8_quantize.cuh"

// values[m, k] = e4m3(y[m, k] / scale), and the scales: max |y| / 448 of a row or, with GROUPS, of each 128
// of its columns; `static_scale` if that is positive. y is x or, with `norm`, x / sqrt(mean(x^2) + eps) *
// norm rounded to T, with the bits that `rmsnorm_kernel` gives.
//   in:  x [rows, hidden] T; norm [hidden] T or null
//   out: values [rows, hidden] e4m3; scales [1 or ceil(hidden / 128), rows] float
// Layout: contiguous rows, hidden a multiple of 16; norm and values 16-byte aligned; 16-byte loads of x where
// its address allows.
// Grid: rows. Block: as of `rmsnorm_kernel`. Shared memory: none dynamic.
// Unit of work: one block a row. Where ROW_CHUNKS chunks of each thread are less than the row, the rest is
// read again.
template <typename T, bool GROUPS>
__global__ void __launch_bounds__(MAX_THREADS) fp8_quantize_kernel(FP8_QUANTIZE_PARAMS(T)) {
  static_assert(sizeof(T) == 2, "activations are bfloat16 or float16");
  const int row = blockIdx.x;
  const T* const source = x + static_cast<long long>(row) * hidden;
  unsigned char* const target = values + static_cast<long long>(row) * hidden;
  const int stride = blockDim.x * CHUNK;
  const int first = threadIdx.x * CHUNK;
  // All threads of a warp take part in each round, those beyond the row with zeros.
  auto load = [&](int i, float (&chunk)[CHUNK]) {
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) chunk[j] = 0.0f;
    if (i < hidden) load_updated_floats(source + i, CHUNK, chunk);
  };
  auto normalise = [&](int i, float (&chunk)[CHUNK], const float (&gains)[CHUNK], float inverse_rms) {
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) chunk[j] = to_float(from_float<T>(chunk[j] * inverse_rms * gains[j]));
  };
  auto store = [&](int i, const float (&chunk)[CHUNK], float scale) {
    if (i < hidden) *reinterpret_cast<uint2*>(target + i) = e4m3_codes(chunk, scale);
  };
  // The scale of the 128 columns of which this thread has eight.
  auto group_scale = [&](int i, const float (&chunk)[CHUNK]) {
    float largest = largest_of(chunk);
#pragma unroll
    for (int distance = GROUP / CHUNK / 2; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, distance));
    }
    const float scale = static_scale > 0.0f ? static_scale : scale_for(largest);
    if (i % GROUP == 0 && i < hidden) scales[static_cast<long long>(i / GROUP) * gridDim.x + row] = scale;
    return scale;
  };

  float kept[ROW_CHUNKS][CHUNK];
  float gains[ROW_CHUNKS][CHUNK] = {};
  let_next_kernel_start();
  if (norm != nullptr) {
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
      const int i = first + c * stride;
      if (i < hidden) load_floats(norm + i, CHUNK, gains[c]);
    }
  }
  wait_for_earlier_kernels();
#pragma unroll
  for (int c = 0; c < ROW_CHUNKS; ++c) load(first + c * stride, kept[c]);

  float inverse_rms = 1.0f;
  if (norm != nullptr) {
    float sum_of_squares = 0.0f;
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) sum_of_squares = fmaf(kept[c][j], kept[c][j], sum_of_squares);
    }
#pragma unroll 1
    for (int i = first + ROW_CHUNKS * stride; i < hidden; i += stride) {
      float others[CHUNK];
      load(i, others);
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) sum_of_squares = fmaf(others[j], others[j], sum_of_squares);
    }
    inverse_rms = rsqrtf(block_sum(sum_of_squares) / hidden + eps);
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) normalise(first + c * stride, kept[c], gains[c], inverse_rms);
  }
  auto load_rest = [&](int i, float (&chunk)[CHUNK]) {
    load(i, chunk);
    if (norm != nullptr) {
      float others[CHUNK] = {};
      if (i < hidden) load_floats(norm + i, CHUNK, others);
      normalise(i, chunk, others, inverse_rms);
    }
  };

  float scale = static_scale;
  if (!GROUPS && !(static_scale > 0.0f)) {
    float largest = 0.0f;
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) largest = fmaxf(largest, largest_of(kept[c]));
#pragma unroll 1
    for (int i = first + ROW_CHUNKS * stride; i < hidden; i += stride) {
      float others[CHUNK];
      load_rest(i, others);
      largest = fmaxf(largest, largest_of(others));
    }
    scale = scale_for(block_max(largest));
  }
  if (!GROUPS && threadIdx.x == 0) scales[row] = scale;
#pragma unroll
  for (int c = 0; c < ROW_CHUNKS; ++c) {
    const int i = first + c * stride;
    if (i - first < hidden) store(i, kept[c], GROUPS ? group_scale(i, kept[c]) : scale);
  }
#pragma unroll 1
  for (int begin = ROW_CHUNKS * stride; begin < hidden; begin += stride) {
    const int i = begin + first;
    float others[CHUNK];
    load_rest(i, others);
    store(i, others, GROUPS ? group_scale(i, others) : scale);
  }
}
