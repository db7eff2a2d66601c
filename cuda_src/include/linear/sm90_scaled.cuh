// Products of rows of bytes by a weight of bytes, as e4m3 or integers, whose sums leave the tensor cores to
// be scaled: the ring and the epilogue of sm90_matmul.cuh, whose 2-byte elements are pairs of bytes here.
#pragma once

#include "generated/sm90_scaled_matmul.cuh"
#include "linear/sm90_matmul.cuh"

constexpr int STEP = 2 * TILE_K;  // of k, in a stage

// Scales of what a thread holds of a warp group's tile: two rows of x, and of the weight pairs of columns or,
// of square blocks of the weight, the block that each half of the columns lies in.
template <typename V>
struct TileScales {
  const float* x;       // [1 or groups of columns][num_rows], at the warp's first row
  const float* weight;  // [out_features] or [.][steps]
  int num_rows, rows;   // of x, and of them from the warp's first row on
  int steps;            // of a row of the weight
  int first[2], end;    // rows of the weight that the halves of the columns begin with, and where it ends
  int lane;

  __device__ __forceinline__ float of_row(int i, int group) const {
    const int row = lane / 4 + i * 8;
    return row < rows ? load_updated(x + static_cast<long long>(group) * num_rows + row) : 0.0f;
  }
  __device__ __forceinline__ float of_block(int half, int step) const {
    return first[half] < end ? weight[first[half] / STEP * steps + step] : 0.0f;
  }
  // Of all columns, those of this lane: every 32nd.
  __device__ __forceinline__ void load_columns(float (&held)[V::WARPGROUP_N / WARP_SIZE]) const {
#pragma unroll
    for (int i = 0; i < V::WARPGROUP_N / WARP_SIZE; ++i) {
      const int column = i * WARP_SIZE + lane;
      const int row = column < V::HALF_N ? first[0] + column : first[1] + column - V::HALF_N;
      held[i] = row < end ? weight[row] : 0.0f;
    }
  }
  // Of a column of those in which this thread's sums 4 j to 4 j + 3 are, of what lanes have loaded.
  __device__ __forceinline__ float of_column(const float (&held)[V::WARPGROUP_N / WARP_SIZE], int j,
                                             int i) const {
    return __shfl_sync(FULL_WARP, held[j / 4], j % 4 * 8 + lane % 4 * 2 + i);
  }
};

// The ring as a warp group that multiplies sees it.
template <typename V>
struct StageReader {
  Barrier* full;
  Barrier* empty;
  unsigned long long x, weight;  // descriptors of the first stage's operands
  int stages, lane;
  RingPosition at;

  // Once the next stage is there, start multiply(descriptor of x, of the weight, k) for each 32 bytes of its
  // rows.
  template <typename Multiply>
  __device__ __forceinline__ void start(const Multiply& multiply) {
    barrier_wait(&full[at.stage], at.parity);
    const unsigned offset = at.stage * static_cast<unsigned>(V::STAGE_ELEMENTS * sizeof(typename V::T) >> 4);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TILE_K / WGMMA_K; ++k) {
      const unsigned behind = offset + k * DESCRIPTOR_STEP_K;
      multiply(descriptor_behind(x, behind), descriptor_behind(weight, behind), k);
    }
    wgmma_commit();
  }
  // Its products have ended.
  __device__ __forceinline__ void release() {
    release_stage<V::SHARING>(&empty[at.stage], lane);
    at.advance(stages);
  }
};

// A warp group that multiplies: the tiles of `work` one after another, from the ring to their places. For
// each a `Sums` of its scales and steps add(sums, reader) and then scale(sums).
template <typename V, template <typename> class Sums>
__device__ __forceinline__ void multiply_scaled_tiles(const RingBlock<V>& block, unsigned char* shared_memory,
                                                      int stages, int splits, int num_rows, int out_features,
                                                      int in_features, const float* x_scales,
                                                      const float* weight_scales, const typename V::T* bias,
                                                      typename V::Out* out, int out_stride, int accumulate,
                                                      int silu_mul) {
  const Work<V::SHARING>& work = block.work;
  using T = typename V::T;
  using Out = typename V::Out;
  constexpr int WARPGROUPS_M = V::WARPGROUPS_M, WARPGROUP_N = V::WARPGROUP_N;
  T* const ring = reinterpret_cast<T*>(shared_memory);
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = uniform(threadIdx.x / WARP_SIZE);
  const int warpgroup_m = WARPGROUPS_M == 2 ? warp / 4 : 0;
  const int warpgroup_n = WARPGROUPS_M == 2 ? 0 : warp / 4;
  const int out_columns = silu_mul ? out_features / 2 : out_features;
  const int warpgroup_columns = silu_mul ? V::HALF_N : WARPGROUP_N;
  const unsigned long long x_descriptor = operand_descriptor(ring + warpgroup_m * WGMMA_M * TILE_K);
  const unsigned long long weight_descriptor =
      operand_descriptor(ring + V::X_ELEMENTS + warpgroup_n * WARPGROUP_N * TILE_K);
  T* const staging = ring + stages * V::STAGE_ELEMENTS + warp * WARP_ROWS * CHUNK_STRIDE;

  // Of a warp's part of a tile.
  auto row_of = [&](int2 tile) { return tile.x * V::TILE_M + warpgroup_m * WGMMA_M + warp % 4 * WARP_ROWS; };
  auto column_of = [&](int2 tile) { return (tile.y * V::WARPGROUPS_N + warpgroup_n) * warpgroup_columns; };

  wait_for_earlier_kernels();
  StageReader<V> reader = {block.full, block.empty, x_descriptor, weight_descriptor, stages, lane, {}};
#pragma unroll 1
  for (int index = work.first; index < work.tiles_m * work.tiles_n; index += work.stride) {
    const int2 tile = work.tile(index);
    const int row0 = row_of(tile), column0 = column_of(tile);
    const TileScales<V> scales = {x_scales + row0,
                                  weight_scales,
                                  num_rows,
                                  num_rows - row0,
                                  ceil_div(in_features, STEP),
                                  {column0, column0 + (silu_mul ? out_columns : V::HALF_N)},
                                  out_features,
                                  lane};
    Sums<V> of_tile(scales, work.first_step, work.num_steps);
    float sums[WARPGROUP_N / 2] = {};
    of_tile.add(sums, reader);
    // Where results go is found anew: registers are short while products run.
    const int2 place = work.tile(unknown(index));
    const int first_row = row_of(place), first_column = column_of(place);
    Result<T, Out> result = {bias == nullptr ? nullptr : bias + first_column,
                             out + static_cast<long long>(first_row) * out_stride + first_column,
                             num_rows - first_row,
                             min(warpgroup_columns, out_columns - first_column),
                             out_stride,
                             accumulate != 0,
                             lane};
    // What is to be added comes while sums are scaled.
    uint4 residual[Result<T, Out>::SEGMENTS];
    if constexpr (V::THROUGH_SHARED) {
      if (accumulate && splits == 1) result.load_chunk(residual, 0);
    }
    of_tile.scale(sums);

    if constexpr (V::SPLITTABLE) {
      if (splits > 1) {
        finish_share<T, Out, WARPGROUP_N>(
            sums, result, block.split, splits, block.received, shared_memory,
            reinterpret_cast<unsigned char*>(ring + stages * V::STAGE_ELEMENTS) +
                CONSUMER_WARPS * WARP_ROWS * CHUNK_STRIDE * sizeof(T),
            staging, silu_mul != 0);
        return;
      }
    }

    if (silu_mul) {
#pragma unroll
      for (int j = 0; j < V::HALF_N / 8; ++j) silu_mul_into(sums + j * 4, sums + (j + V::HALF_N / 8) * 4);
    }
    store_tile<V>(sums, result, staging, residual);
  }
}
