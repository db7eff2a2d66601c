// Products by experts' weights on every device, in float32 without tensor cores and in 16-bit types with
// them.

#include "generated/expert_matmul.cuh"
#include "moe/expert_tiles.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"

constexpr int THREADS = 128;
constexpr int TILE = EXPERT_TILE;  // rows and columns of a tile
constexpr int TILE_K = 64;         // of 16-bit elements
constexpr int STAGES = 4;
constexpr int SEGMENTS_PER_ROW = TILE_K / SEGMENT;
constexpr int STAGE_ELEMENTS = 2 * TILE * TILE_K;

__device__ __forceinline__ int swizzled(int row, int segment) {
  return (row * SEGMENTS_PER_ROW + (segment ^ (row & 7))) * SEGMENT;
}

// Where a row of the result, sorted by expert, has its row of x.
__device__ __forceinline__ long long source_row(const int* pairs, int row, int top_k) {
  return pairs == nullptr ? row : load_updated(pairs + row) / top_k;
}

// out[p, n] = sum over k of x[source(p), k] * weight[e * out_features + n, k], + bias[e * out_features + n],
// e being the expert of row p, and source(p) p or, with `pairs`, pairs[p] / top_k.
//   in:  x [any, in_features] T; weight [num_experts * out_features, in_features] T; bias T or null;
//        offsets [num_experts + 1] int; pairs int or null
//   out: out [num_pairs, out_features] T
// Layout: row-major, 16-byte aligned; in_features a multiple of 8, out_features even.
// Grid: any number of blocks, which walk over the tiles. Block: 128 threads.
// Shared memory: STAGES * 2 * TILE * TILE_K * sizeof(T).
// Unit of work: a block a tile of 64 x 64 at a time, a warp a quarter of it. An output is summed in steps of
// 16 in ascending k.
template <typename T>
__global__ void __launch_bounds__(THREADS) expert_matmul_kernel(EXPERT_MATMUL_PARAMS(T)) {
  static_assert(sizeof(T) == 2, "tensor cores take bfloat16 or float16");
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ int starts[MAX_EXPERTS + 1], first[MAX_EXPERTS + 1];
  T* const stages = reinterpret_cast<T*>(shared_memory);
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const ExpertTiles tiles(offsets, num_experts, ceil_div(out_features, TILE), TILE, starts, first);
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int warp_m = warp % 2 * (TILE / 2), warp_n = warp / 2 * (TILE / 2);
  const int steps = ceil_div(in_features, TILE_K);
  constexpr int COPIES = TILE * SEGMENTS_PER_ROW / THREADS;  // of a thread a stage, of each operand
  constexpr int ROWS_A_COPY = THREADS / SEGMENTS_PER_ROW;
  const int segment = threadIdx.x % SEGMENTS_PER_ROW, copy_row = threadIdx.x / SEGMENTS_PER_ROW;

#pragma unroll 1
  for (int index = blockIdx.x; index < tiles.count; index += gridDim.x) {
    const ExpertTile tile = tiles.tile(index);
    const int column0 = tile.column * TILE;
    const T* x_rows[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const int row = i * ROWS_A_COPY + copy_row;
      x_rows[i] = row < tile.rows ? x + source_row(pairs, tile.row0 + row, top_k) * in_features : nullptr;
    }
    const long long weight_row = static_cast<long long>(tile.expert) * out_features + column0;
    auto load = [&](int step) {
      if (step < steps) {
        T* const to = stages + step % STAGES * STAGE_ELEMENTS;
        const int column = step * TILE_K + segment * SEGMENT;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
          const int row = i * ROWS_A_COPY + copy_row;
          const bool has_x = x_rows[i] != nullptr && column < in_features;
          copy_async_16(to + swizzled(row, segment), has_x ? x_rows[i] + column : x, has_x);
          const bool has_weight = column0 + row < out_features && column < in_features;
          copy_async_16(to + TILE * TILE_K + swizzled(row, segment),
                        has_weight ? weight + (weight_row + row) * in_features + column : weight, has_weight);
        }
      }
      copy_async_commit();
    };
    __syncthreads();  // the stages of the tile before may still be in use
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) load(stage);

    float sums[2][4][4] = {};
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      copy_async_wait<STAGES - 2>();
      __syncthreads();
      const T* const tile_x = stages + step % STAGES * STAGE_ELEMENTS;
      const T* const tile_weight = tile_x + TILE * TILE_K;
#pragma unroll
      for (int k = 0; k < TILE_K / 16; ++k) {
        unsigned a[2][4], b[4][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          ldmatrix_x4(a[i], tile_x + swizzled(warp_m + i * 16 + lane % 16, k * 2 + lane / 16));
        }
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          unsigned r[4];
          ldmatrix_x4(
              r, tile_weight + swizzled(warp_n + j * 8 + lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));
          b[j][0] = r[0];
          b[j][1] = r[1];
          b[j + 1][0] = r[2];
          b[j + 1][1] = r[3];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) mma_m16n8k16<T>(sums[i][j], a[i], b[j]);
        }
      }
      load(step + STAGES - 1);
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = column0 + warp_n + j * 8 + lane % 4 * 2;
        if (column >= out_features) continue;
        Vec<T, 2> offset = {from_float<T>(0.0f), from_float<T>(0.0f)};
        if (bias != nullptr) {
          offset = Vec<T, 2>::load(bias + static_cast<long long>(tile.expert) * out_features + column);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_m + i * 16 + half * 8 + lane / 4;
          if (row >= tile.rows) continue;
          const Vec<T, 2> pair = {from_float<T>(sums[i][j][half * 2] + to_float(offset[0])),
                                  from_float<T>(sums[i][j][half * 2 + 1] + to_float(offset[1]))};
          pair.store(out + static_cast<long long>(tile.row0 + row) * out_features + column);
        }
      }
    }
  }
}

// out as expert_matmul_kernel has it, in float32.
//   in:  x, weight, bias, offsets, pairs as there
//   out: out [num_pairs, out_features] T
// Layout: row-major, of any sizes.
// Grid: any number of blocks, which walk over the tiles. Block: 128 threads. Shared memory: none dynamic.
// Unit of work: a block a tile of 64 x 64 at a time, a thread 4 x 8 of it; an output is one chain of fused
// multiply-adds in ascending k.
template <typename T>
__global__ void __launch_bounds__(THREADS) expert_matmul_float32_kernel(EXPERT_MATMUL_PARAMS(T)) {
  static_assert(sizeof(T) == 4, "16-bit elements have tensor cores");
  constexpr int SLICE_K = 16;
  __shared__ __align__(16) float tile_x[SLICE_K][TILE + 4];
  __shared__ __align__(16) float tile_weight[SLICE_K][TILE + 4];
  __shared__ int starts[MAX_EXPERTS + 1], first[MAX_EXPERTS + 1];
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const ExpertTiles tiles(offsets, num_experts, ceil_div(out_features, TILE), TILE, starts, first);
  const int thread_m = threadIdx.x / 8 * 4, thread_n = threadIdx.x % 8 * 8;
  const int load_k = threadIdx.x % SLICE_K, load_row = threadIdx.x / SLICE_K;

#pragma unroll 1
  for (int index = blockIdx.x; index < tiles.count; index += gridDim.x) {
    const ExpertTile tile = tiles.tile(index);
    const int column0 = tile.column * TILE;
    const long long weight_row = static_cast<long long>(tile.expert) * out_features + column0;
    float sums[4][8] = {};
#pragma unroll 1
    for (int k0 = 0; k0 < in_features; k0 += SLICE_K) {
      __syncthreads();
      const int k = k0 + load_k;
#pragma unroll
      for (int i = 0; i < TILE; i += THREADS / SLICE_K) {
        const int row = i + load_row;
        const bool has_x = row < tile.rows && k < in_features;
        const bool has_weight = column0 + row < out_features && k < in_features;
        tile_x[load_k][row] =
            has_x ? load_updated(x + source_row(pairs, tile.row0 + row, top_k) * in_features + k) : 0.0f;
        tile_weight[load_k][row] = has_weight ? weight[(weight_row + row) * in_features + k] : 0.0f;
      }
      __syncthreads();
#pragma unroll
      for (int slice = 0; slice < SLICE_K; ++slice) {
        float a[4], b[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = tile_x[slice][thread_m + i];
#pragma unroll
        for (int j = 0; j < 8; ++j) b[j] = tile_weight[slice][thread_n + j];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 8; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (thread_m + i >= tile.rows) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int column = column0 + thread_n + j;
        if (column >= out_features) continue;
        const float offset =
            bias == nullptr ? 0.0f : bias[static_cast<long long>(tile.expert) * out_features + column];
        out[static_cast<long long>(tile.row0 + thread_m + i) * out_features + column] = sums[i][j] + offset;
      }
    }
  }
}
