// Matrix product for a few rows of x that matmul_decode.cu does not take: float32 and odd sizes.

#include "common.cuh"
#include "generated/gemv.cuh"
#include "ptx/copy.cuh"

// out[m, n] = sum over k of x[m, k] * weight[n, k], + bias[n], + out[m, n] if `accumulate`; sums in float32.
//   in:  x [num_rows, in_features] T, num_rows <= ROWS; weight [out_features, in_features] T; bias
//        [out_features] T or null
//   out: out [num_rows, out_features] Out (T or float)
// Layout: row-major; 16-byte loads where in_features and both addresses allow, else single elements.
// Grid: ceil(out_features * warps_per_output / 4). Block: 128 threads. Shared memory: none dynamic.
// Unit of work: warps_per_output (1, 2 or 4) warps an output feature; a lane takes every 32nd (64th, 128th)
// vector, so the order of a sum depends on the weight's shape alone, not on num_rows.
template <typename T, typename Out, int ROWS>
__global__ void __launch_bounds__(32 * WARPS) matvec_kernel(MATVEC_PARAMS(T, Out)) {
  constexpr int VECTOR = VECTOR_SIZE<T>;
  constexpr int UNROLL = ROWS >= 4 ? 2 : 4;
  static_assert(ROWS >= 1 && ROWS <= 4, "more rows than 4 are the tensor cores' work");

  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int part = warp % warps_per_output;
  const int column = (blockIdx.x * WARPS + warp) / warps_per_output;
  const bool column_valid = column < out_features;
  const T* const weight_row = weight + static_cast<long long>(column_valid ? column : 0) * in_features;

  const T* x_rows[ROWS];
#pragma unroll
  for (int m = 0; m < ROWS; ++m) x_rows[m] = x + static_cast<long long>(min(m, num_rows - 1)) * in_features;

  float sums[ROWS] = {};
  const int first = part * 32 + lane;
  const int stride = warps_per_output * 32;
  const bool aligned = in_features % VECTOR == 0 && is_aligned(x) && is_aligned(weight);
  if (aligned) {
    using Vector = Vec<T, VECTOR>;
    const int num_vectors = in_features / VECTOR;
    auto add_products = [&](const uint4& raw, int v) {
      const Vector w = reinterpret_cast<const Vector&>(raw);
#pragma unroll
      for (int m = 0; m < ROWS; ++m) {
        const Vector values = Vector::load(x_rows[m] + v * VECTOR);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
          sums[m] = fmaf(to_float(values[e]), to_float(w[e]), sums[m]);
        }
      }
    };
    int v = first;
    for (; v + (UNROLL - 1) * stride < num_vectors; v += UNROLL * stride) {
      uint4 w[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) w[u] = load_once_16(weight_row + (v + u * stride) * VECTOR);
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) add_products(w[u], v + u * stride);
    }
    for (; v < num_vectors; v += stride) add_products(load_once_16(weight_row + v * VECTOR), v);
  } else {
    for (int k = first; k < in_features; k += stride) {
      const float w = to_float(weight_row[k]);
#pragma unroll
      for (int m = 0; m < ROWS; ++m) sums[m] = fmaf(to_float(x_rows[m][k]), w, sums[m]);
    }
  }

  __shared__ float partial[ROWS][WARPS];
#pragma unroll
  for (int m = 0; m < ROWS; ++m) {
    sums[m] = warp_sum(sums[m]);
    if (warps_per_output > 1 && lane == 0) partial[m][warp] = sums[m];
  }
  if (warps_per_output > 1) __syncthreads();
  if (lane != 0 || part != 0 || !column_valid) return;
  const float offset = bias != nullptr ? to_float(bias[column]) : 0.0f;
#pragma unroll
  for (int m = 0; m < ROWS; ++m) {
    for (int p = 1; p < warps_per_output; ++p) sums[m] += partial[m][warp + p];
    if (m >= num_rows) break;
    Out* const to = out + static_cast<long long>(m) * out_features + column;
    *to = from_float<Out>(sums[m] + offset + (accumulate ? to_float(*to) : 0.0f));
  }
}
