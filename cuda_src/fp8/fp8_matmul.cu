// Matrix product of e4m3 rows by an e4m3 weight with mma.sync, sm_89 and later. See sm90_fp8_matmul.cu for
// many rows on sm_90a, fp8_decode.cu for few.

#include "common.cuh"
#include "generated/fp8_matmul.cuh"
#include "generated/tensor_cores.cuh"
#include "ptx/copy.cuh"
#include "ptx/fp8.cuh"
#include "ptx/mma.cuh"

constexpr int THREADS = WARPS_M * WARPS_N * WARP_SIZE;
constexpr int SEGMENT_BYTES = 16;
constexpr int ROW_SEGMENTS = TILE_K / SEGMENT_BYTES;  // of a row of a stage, XORed with the row modulo 8
constexpr int MMA_K = 32;
static_assert(TILE_K == 128, "a stage has one scale of a row, and its rows are 128 bytes");

// Start copying `ROWS` rows of a matrix from `row0` on, 128 bytes of each from `column` on, zeros beyond it.
template <int ROWS>
__device__ __forceinline__ void copy_rows(unsigned char* to, const unsigned char* matrix, int row0, int rows,
                                          int column, int columns) {
  static_assert(ROWS * ROW_SEGMENTS % THREADS == 0, "every thread copies as many segments");
#pragma unroll
  for (int i = 0; i < ROWS * ROW_SEGMENTS / THREADS; ++i) {
    const int index = i * THREADS + threadIdx.x;
    const int row = index / ROW_SEGMENTS, segment = index % ROW_SEGMENTS;
    const int k = column + segment * SEGMENT_BYTES;
    const bool valid = row0 + row < rows && k < columns;
    const unsigned char* const from = matrix + static_cast<long long>(row0 + row) * columns + k;
    copy_async_16(to + row * TILE_K + (segment ^ row % 8) * SEGMENT_BYTES, valid ? from : matrix, valid);
  }
}

// Four 8x8 matrices of pairs of e4m3. Lane l names row l % 8 of matrix l / 8, of which it is 16 bytes.
__device__ __forceinline__ void load_fragments(unsigned (&fragments)[4], const unsigned char* rows, int row,
                                               int segment) {
  ldmatrix_x4(fragments, rows + row * TILE_K + (segment ^ row % 8) * SEGMENT_BYTES);
}

// out[m, n] = sum over k of x[m, k] * weight[n, k], with scales, bias and `accumulate` as of
// `sm90_fp8_matmul_kernel`. Sums of 128 of k in the tensor cores, of those in float32, rounded once.
//   in:  x [num_rows, in_features] and weight [out_features, in_features] e4m3; x_scales [1 or
//        ceil(in_features / 128), num_rows] float; weight_scales [out_features] or [ceil(out_features / 128),
//        ceil(in_features / 128)] float; bias [out_features] T or null
//   out: out [num_rows, out_features] Out (T or float), rows `out_stride` apart
// Layout: row-major; x and weight 16-byte aligned, in_features a multiple of 16, out and its rows aligned to
// two elements.
// Grid: (tiles of columns, tiles of rows). Block: 256 threads. Shared memory: STAGES * (TILE_M + TILE_N) *
// TILE_K bytes.
// Unit of work: one block a tile; its warps lie 2 along the rows, 4 along the columns. The order of a sum
// depends on in_features alone.
template <typename T, typename Out, int TILE_M, int TILE_N, bool BLOCKS>
__global__ void __launch_bounds__(THREADS) fp8_matmul_kernel(FP8_MATMUL_PARAMS(T, Out)) {
  constexpr int MMAS_M = TILE_M / WARPS_M / 16, MMAS_N = TILE_N / WARPS_N / 8;
  static_assert(MMAS_M >= 1 && MMAS_N >= 2 && MMAS_N % 2 == 0, "a warp takes 16 rows by 16 columns at least");
  static_assert(SCALES % TILE_N == 0, "a tile's columns lie in one block");
  extern __shared__ __align__(128) unsigned char ring[];
  constexpr int STAGE_BYTES = (TILE_M + TILE_N) * TILE_K;
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int row0 = blockIdx.y * TILE_M, column0 = blockIdx.x * TILE_N;
  const int warp_row = warp / WARPS_N * (TILE_M / WARPS_M), warp_column = warp % WARPS_N * (TILE_N / WARPS_N);
  const int steps = ceil_div(in_features, TILE_K);

  auto copy_weight = [&](int step) {
    if (step < steps) {
      copy_rows<TILE_N>(ring + step % STAGES * STAGE_BYTES + TILE_M * TILE_K, weight, column0, out_features,
                        step * TILE_K, in_features);
    }
  };
  auto copy_x = [&](int step) {
    if (step < steps) {
      copy_rows<TILE_M>(ring + step % STAGES * STAGE_BYTES, x, row0, num_rows, step * TILE_K, in_features);
    }
    copy_async_commit();
  };
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) copy_weight(step);
  let_next_kernel_start();
  wait_for_earlier_kernels();
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) copy_x(step);

  auto x_row = [&](int i, int half) { return row0 + warp_row + i * 16 + half * 8 + lane / 4; };
  float sums[MMAS_M][MMAS_N][4] = {};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<STAGES - 2>();
    __syncthreads();
    float of_rows[MMAS_M][2];
    if constexpr (BLOCKS) {
      const float of_block = weight_scales[column0 / SCALES * steps + step];
#pragma unroll
      for (int i = 0; i < MMAS_M * 2; ++i) {
        const int row = x_row(i / 2, i % 2);
        of_rows[i / 2][i % 2] =
            row < num_rows ? load_updated(x_scales + static_cast<long long>(step) * num_rows + row) * of_block
                           : 0.0f;
      }
    }
    const unsigned char* const x_rows = ring + step % STAGES * STAGE_BYTES;
    const unsigned char* const weight_rows = x_rows + TILE_M * TILE_K;
    float parts[MMAS_M][MMAS_N][4] = {};
#pragma unroll
    for (int k = 0; k < TILE_K / MMA_K; ++k) {
      unsigned b[MMAS_N / 2][4];
#pragma unroll
      for (int j = 0; j < MMAS_N / 2; ++j) {
        load_fragments(b[j], weight_rows, warp_column + j * 16 + lane / 16 * 8 + lane % 8,
                       k * 2 + lane / 8 % 2);
      }
#pragma unroll
      for (int i = 0; i < MMAS_M; ++i) {
        unsigned a[4];
        load_fragments(a, x_rows, warp_row + i * 16 + lane % 16, k * 2 + lane / 16);
#pragma unroll
        for (int j = 0; j < MMAS_N; ++j) {
          mma_e4m3(parts[i][j], a, {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]});
        }
      }
    }
#pragma unroll
    for (int i = 0; i < MMAS_M; ++i) {
#pragma unroll
      for (int j = 0; j < MMAS_N; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (BLOCKS) {
            sums[i][j][e] = fmaf(parts[i][j][e], of_rows[i][e / 2], sums[i][j][e]);
          } else {
            sums[i][j][e] += parts[i][j][e];
          }
        }
      }
    }
    // All warps are through with the stage that is filled here: it is the one before this.
    copy_weight(step + STAGES - 1);
    copy_x(step + STAGES - 1);
  }

#pragma unroll
  for (int i = 0; i < MMAS_M * 2; ++i) {
    const int row = x_row(i / 2, i % 2);
    if (row >= num_rows) continue;
    const float of_row = BLOCKS ? 1.0f : load_updated(x_scales + row);
#pragma unroll
    for (int j = 0; j < MMAS_N; ++j) {
      const int column = column0 + warp_column + j * 8 + lane % 4 * 2;
      if (column >= out_features) continue;
      float pair[2] = {sums[i / 2][j][i % 2 * 2], sums[i / 2][j][i % 2 * 2 + 1]};
      Out* const to = out + static_cast<long long>(row) * out_stride + column;
      Vec<Out, 2> before;
      if (accumulate) {
        const auto raw = load_updated(reinterpret_cast<const typename Vec<Out, 2>::Raw*>(to));
        before = reinterpret_cast<const Vec<Out, 2>&>(raw);
      }
      Vec<Out, 2> result;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if constexpr (!BLOCKS) pair[e] *= of_row * weight_scales[column + e];
        if (bias != nullptr) pair[e] += to_float(bias[column + e]);
        if (accumulate) pair[e] += to_float(before[e]);
        result[e] = from_float<Out>(pair[e]);
      }
      result.store(to);
    }
  }
}
