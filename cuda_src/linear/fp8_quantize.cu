// Rows of activations as e4m3 with scales, for products by e4m3 weights; with the norm before them.

#include "common.cuh"
#include "fp8_rows.cuh"
#include "generated/fp8_quantize.cuh"

// values[m, k] = e4m3(y[m, k] / scale), and the scales: max |y| / 448 of a row or, with GROUPS, of each 128
// of its columns; `static_scale` if that is positive. y is x or, with NORM, x / sqrt(mean(x^2) + eps) *
// norm rounded to T, with the bits that `rmsnorm_kernel` gives.
//   in:  x [rows, hidden] T; norm [hidden] T or null
//   out: values [rows, hidden] e4m3; scales [1 or ceil(hidden / 128), rows] float
// Layout: contiguous rows, hidden a multiple of 16; norm and values 16-byte aligned; 16-byte loads of x where
// its address allows.
// Grid: rows. Block: as of `rmsnorm_kernel`. Shared memory: none dynamic.
// Unit of work: one block a row. Where ROW_CHUNKS chunks of each thread are less than the row, the rest is
// read again.
template <typename T, bool GROUPS, bool NORM>
__global__ void __launch_bounds__(MAX_THREADS, NORM ? 1 : 3) fp8_quantize_kernel(FP8_QUANTIZE_PARAMS(T)) {
  static_assert(sizeof(T) == 2 && CHUNK == VECTOR_SIZE<T>, "activations are bfloat16 or float16");
  using Vector = Vec<T, CHUNK>;
  const int row = blockIdx.x;
  const T* const source = x + static_cast<long long>(row) * hidden;
  unsigned char* const target = values + static_cast<long long>(row) * hidden;
  const int stride = blockDim.x * CHUNK;
  const int first = threadIdx.x * CHUNK;
  const bool aligned = is_aligned(x);
  // All threads of a warp take part in each round, those beyond the row with zeros.
  auto load = [&](int i) {
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (i < hidden) {
      if (aligned) {
        raw = load_updated(reinterpret_cast<const uint4*>(source + i));
      } else {
        Vector elements;
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) elements[j] = load_updated(source + i + j);
        raw = reinterpret_cast<const uint4&>(elements);
      }
    }
    return raw;
  };
  auto load_gains = [&](int i) {
    return i < hidden ? *reinterpret_cast<const uint4*>(norm + i) : make_uint4(0, 0, 0, 0);
  };
  auto add_squares = [&](float sum, const uint4& raw) {
    const Vector elements = reinterpret_cast<const Vector&>(raw);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) sum = fmaf(to_float(elements[j]), to_float(elements[j]), sum);
    return sum;
  };
  auto normalise = [&](uint4& raw, const uint4& gains, float inverse_rms) {
    Vector elements = reinterpret_cast<const Vector&>(raw);
    const Vector factors = reinterpret_cast<const Vector&>(gains);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      elements[j] = from_float<T>(to_float(elements[j]) * inverse_rms * to_float(factors[j]));
    }
    raw = reinterpret_cast<const uint4&>(elements);
  };
  // With GROUPS the scale is that of the 128 columns of which this thread has eight.
  auto store = [&](int i, const uint4& raw, float scale, float inverse) {
    if constexpr (GROUPS) {
      float largest = largest_of_vector<T>(raw);
#pragma unroll
      for (int distance = GROUP / CHUNK / 2; distance > 0; distance /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, distance));
      }
      if (!(static_scale > 0.0f)) {
        scale = scale_for(largest);
        inverse = __frcp_rn(scale);
      }
      if (i % GROUP == 0 && i < hidden) scales[static_cast<long long>(i / GROUP) * gridDim.x + row] = scale;
    }
    if (i < hidden)
      *reinterpret_cast<uint2*>(target + i) = e4m3_codes<T>(raw, scale, inverse, static_scale > 0.0f);
  };

  uint4 kept[ROW_CHUNKS];
  uint4 gains[NORM ? ROW_CHUNKS : 1];
  let_next_kernel_start();
  if constexpr (NORM) {
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) gains[c] = load_gains(first + c * stride);
  }
  wait_for_earlier_kernels();
#pragma unroll
  for (int c = 0; c < ROW_CHUNKS; ++c) kept[c] = load(first + c * stride);

  float inverse_rms = 1.0f;
  if constexpr (NORM) {
    float sum_of_squares = 0.0f;
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) sum_of_squares = add_squares(sum_of_squares, kept[c]);
#pragma unroll 1
    for (int i = first + ROW_CHUNKS * stride; i < hidden; i += stride) {
      sum_of_squares = add_squares(sum_of_squares, load(i));
    }
    inverse_rms = rsqrtf(block_sum(sum_of_squares) / hidden + eps);
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) normalise(kept[c], gains[c], inverse_rms);
  }
  auto load_rest = [&](int i) {
    uint4 raw = load(i);
    if constexpr (NORM) normalise(raw, load_gains(i), inverse_rms);
    return raw;
  };

  float scale = static_scale;
  if (!GROUPS && !(static_scale > 0.0f)) {
    float largest = 0.0f;
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) largest = fmaxf(largest, largest_of_vector<T>(kept[c]));
#pragma unroll 1
    for (int i = first + ROW_CHUNKS * stride; i < hidden; i += stride) {
      largest = fmaxf(largest, largest_of_vector<T>(load_rest(i)));
    }
    scale = scale_for(block_max(largest));
  }
  const float inverse = __frcp_rn(scale);
  if (!GROUPS && threadIdx.x == 0) scales[row] = scale;
#pragma unroll
  for (int c = 0; c < ROW_CHUNKS; ++c) {
    if (c * stride < hidden) store(first + c * stride, kept[c], scale, inverse);
  }
#pragma unroll 1
  for (int begin = ROW_CHUNKS * stride; begin < hidden; begin += stride) {
    store(begin + first, load_rest(begin + first), scale, inverse);
  }
}
