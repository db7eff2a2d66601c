// Matrix product in float32 without tensor cores, whose TF32 would lose half of the digits.

#include "common.cuh"
#include "generated/matmul_float32.cuh"

constexpr int THREADS = THREADS_PER_SIDE * THREADS_PER_SIDE;
constexpr int TILE_K = 16;

// Four consecutive elements of row `row` of source [num_rows, in_features] from `column`; zeros beyond the
// edges.
__device__ __forceinline__ float4 load_four(const float* source, int row, int num_rows, int column,
                                            int in_features, bool aligned) {
  float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (row >= num_rows || column >= in_features) return v;
  const float* from = source + static_cast<long long>(row) * in_features + column;
  if (aligned) return *reinterpret_cast<const float4*>(from);
  v.x = from[0];
  if (column + 1 < in_features) v.y = from[1];
  if (column + 2 < in_features) v.z = from[2];
  if (column + 3 < in_features) v.w = from[3];
  return v;
}

// out[m, n] = sum over k of x[m, k] * weight[n, k], + bias[n], + out[m, n] if `accumulate`.
//   in:  x [num_rows, in_features] float, weight [out_features, in_features] float, bias [out_features] float
//        or null
//   out: out [num_rows, out_features] float
// Layout: row-major; 16-byte loads where in_features and both addresses allow, else single elements.
// Grid: (ceil(out_features / TILE), ceil(num_rows / TILE)). Block: 256 threads. Shared memory: none dynamic.
// Unit of work: one block a TILE x TILE tile, one thread TILE / 16 rows by as many columns of it in groups of
// four; every output is one chain of fused multiply-adds in ascending k, whatever the tile.
template <int TILE>
__global__ void __launch_bounds__(THREADS) matmul_float32_kernel(MATMUL_FLOAT32_PARAMS) {
  constexpr int GROUPS = TILE / (4 * THREADS_PER_SIDE);
  constexpr int LOADS = TILE * TILE_K / 4 / THREADS;
  static_assert(TILE % (4 * THREADS_PER_SIDE) == 0, "a thread owns whole groups of four rows and columns");

  __shared__ __align__(16) float tile_x[TILE_K][TILE + 4];
  __shared__ __align__(16) float tile_weight[TILE_K][TILE + 4];

  const int row0 = blockIdx.y * TILE;
  const int column0 = blockIdx.x * TILE;
  const int thread_m = threadIdx.x / THREADS_PER_SIDE;
  const int thread_n = threadIdx.x % THREADS_PER_SIDE;
  const bool aligned = in_features % 4 == 0 && is_aligned(x) && is_aligned(weight);

  float4 next_x[LOADS];
  float4 next_weight[LOADS];
  const int load_row = threadIdx.x / (TILE_K / 4);
  const int load_k = threadIdx.x % (TILE_K / 4) * 4;
  constexpr int ROWS_PER_LOAD = THREADS / (TILE_K / 4);
  auto fetch = [&](int k0) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int row = load_row + i * ROWS_PER_LOAD;
      next_x[i] = load_four(x, row0 + row, num_rows, k0 + load_k, in_features, aligned);
      next_weight[i] = load_four(weight, column0 + row, out_features, k0 + load_k, in_features, aligned);
    }
  };

  float sums[GROUPS * 4][GROUPS * 4] = {};
  fetch(0);
  for (int k0 = 0; k0 < in_features; k0 += TILE_K) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int row = load_row + i * ROWS_PER_LOAD;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        tile_x[load_k + e][row] = reinterpret_cast<const float*>(&next_x[i])[e];
        tile_weight[load_k + e][row] = reinterpret_cast<const float*>(&next_weight[i])[e];
      }
    }
    __syncthreads();
    if (k0 + TILE_K < in_features) fetch(k0 + TILE_K);
#pragma unroll
    for (int k = 0; k < TILE_K; ++k) {
      float a[GROUPS * 4];
      float b[GROUPS * 4];
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
        const int offset = group * 4 * THREADS_PER_SIDE;
        *reinterpret_cast<float4*>(&a[group * 4]) =
            *reinterpret_cast<const float4*>(&tile_x[k][offset + thread_m * 4]);
        *reinterpret_cast<float4*>(&b[group * 4]) =
            *reinterpret_cast<const float4*>(&tile_weight[k][offset + thread_n * 4]);
      }
#pragma unroll
      for (int i = 0; i < GROUPS * 4; ++i) {
#pragma unroll
        for (int j = 0; j < GROUPS * 4; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
      }
    }
  }

#pragma unroll
  for (int i = 0; i < GROUPS * 4; ++i) {
    const int row = row0 + i / 4 * 4 * THREADS_PER_SIDE + thread_m * 4 + i % 4;
    if (row >= num_rows) continue;
#pragma unroll
    for (int j = 0; j < GROUPS * 4; ++j) {
      const int column = column0 + j / 4 * 4 * THREADS_PER_SIDE + thread_n * 4 + j % 4;
      if (column >= out_features) continue;
      const float offset = bias != nullptr ? bias[column] : 0.0f;
      float* const to = out + static_cast<long long>(row) * out_features + column;
      *to = sums[i][j] + offset + (accumulate ? *to : 0.0f);
    }
  }
}
