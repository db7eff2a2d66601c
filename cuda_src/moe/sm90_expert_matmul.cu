// Products of many rows by experts' weights on sm_90a: as sm90_matmul.cu, with tiles that only the device
// knows. See expert_matmul.cu for other devices.

#include "generated/expert_decode.cuh"
#include "generated/sm90_expert_matmul.cuh"
#include "linear/sm90_matmul.cuh"
#include "moe/expert_tiles.cuh"
#include "swiglu.cuh"

// The stages of all of a block's tiles, one after another: copy(tile, column of k, stage).
template <typename Copy>
__device__ __forceinline__ void produce_tiles(const ExpertTiles& tiles, Barrier* empty, int steps, int stages,
                                              const Copy& copy) {
  RingPosition at;
#pragma unroll 1
  for (int index = blockIdx.x; index < tiles.count; index += gridDim.x) {
    const ExpertTile tile = tiles.tile(index);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      barrier_wait(&empty[at.stage], at.parity ^ 1);
      copy(tile, step * TILE_K, at.stage);
      at.advance(stages);
    }
  }
}

template <typename V>
struct ExpertWeightCopies {
  using T = typename V::T;

  T* ring;
  Barrier* full;
  const TensorMap& map;
  int out_features;
  bool gated;
  unsigned long long policy;

  __device__ __forceinline__ void operator()(const ExpertTile& tile, int column, int stage) const {
    T* to = ring + stage * V::STAGE_ELEMENTS + V::X_ELEMENTS;
    const int expert_row = tile.expert * out_features;
    barrier_arrive_expecting(&full[stage], V::WEIGHT_ELEMENTS * sizeof(T));
#pragma unroll
    for (int i = 0; i < V::WARPGROUPS_N; ++i, to += V::WARPGROUP_N * TILE_K) {
      const int group = tile.column * V::WARPGROUPS_N + i;
      if (gated) {
        const int row = expert_row + group * V::HALF_N;
        copy_box(to, map, row, column, &full[stage], policy);
        copy_box(to + V::HALF_N * TILE_K, map, row + out_features / 2, column, &full[stage], policy);
      } else {
        copy_box(to, map, expert_row + group * V::WARPGROUP_N, column, &full[stage], policy);
      }
    }
  }
};

template <typename V>
struct ExpertRowCopies {
  typename V::T* ring;
  Barrier* full;
  const TensorMap& map;

  __device__ __forceinline__ void operator()(const ExpertTile& tile, int column, int stage) const {
    barrier_arrive_expecting(&full[stage], V::X_ELEMENTS * sizeof(typename V::T));
    copy_box(ring + stage * V::STAGE_ELEMENTS, map, tile.row0, column, &full[stage]);
  }
};

// The activation of a warp group's gates and ups, plus their biases where there are any, into the gates.
template <typename V>
__device__ __forceinline__ void activate(float (&sums)[V::WARPGROUP_N / 2], int activation,
                                         const typename V::T* bias, int up_offset, int columns, int lane) {
#pragma unroll
  for (int j = 0; j < V::HALF_N / 8; ++j) {
    float* const gates = sums + j * 4;
    float* const ups = sums + (j + V::HALF_N / 8) * 4;
    const int column = j * 8 + lane % 4 * 2;
    if (bias != nullptr && column < columns) {
      add_bias(gates, bias + column);
      add_bias(ups, bias + up_offset + column);
    }
    if (activation == EXPERT_SILU) {
      silu_mul_into(gates, ups);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) gates[i] = clamped_swiglu(gates[i], ups[i]);
    }
  }
}

// out[p, n] = sum over k of x[p, k] * weight[e * out_features + n, k], + bias[e * out_features + n], e being
// the expert of row p. With an activation, one of EXPERT_*, out[p, i] = activation(y[p, i], y[p, I + i]) of
// that y [*, 2 I]. Sums in float32, rounded once.
//   in:  x_map: x [num_rows, in_features] T in boxes of TILE_M rows and 64 columns; weight_map: weight
//        [num_experts * out_features, in_features] T in boxes of WARPGROUP_N rows, of half as many with an
//        activation, and 64 columns; bias [num_experts * out_features] T or null; offsets [num_experts + 1]
//        int
//   out: out [num_rows, out_features, or half of it with an activation] T
// Layout: row-major, 16-byte aligned; in_features and the columns of out multiples of 8; maps with 128-byte
// swizzle.
// Grid: any number of blocks, which walk over the tiles of TILE_M = 64 * WARPGROUPS_M rows by TILE_N =
// WARPGROUP_N * (2 / WARPGROUPS_M) columns. Block: 384 threads: two warp groups that multiply, and one of
// which two threads copy.
// Shared memory: `stages` times (TILE_M + TILE_N) * 64 * sizeof(T), and CONSUMER_WARPS * WARP_ROWS *
// CHUNK_STRIDE results on their way out.
// Unit of work: one block a tile at a time. A tile may begin at any row; those behind an expert's last one
// are multiplied and not stored. k is never split, so that a row's sums do not depend on the others.
template <typename T, int WARPGROUPS_M, int WARPGROUP_N>
__global__ void __launch_bounds__(384, 1) sm90_expert_matmul_kernel(SM90_EXPERT_MATMUL_PARAMS(T)) {
  using V = Variant<T, T, WARPGROUPS_M, WARPGROUP_N, 1>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ Barrier full[MAX_STAGES], empty[MAX_STAGES];
  __shared__ int starts[MAX_EXPERTS + 1], first[MAX_EXPERTS + 1];
  T* const ring = reinterpret_cast<T*>(shared_memory);
  const bool gated = activation != EXPERT_NONE;
  const int out_columns = gated ? out_features / 2 : out_features;
  const int warpgroup_columns = gated ? V::HALF_N : WARPGROUP_N;
  const int steps = ceil_div(in_features, TILE_K);

  if (threadIdx.x == CONSUMERS) {
    prefetch_map(weight_map);
    prefetch_map(x_map);
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      barrier_init(&full[i], PRODUCERS);
      barrier_init(&empty[i], CONSUMER_WARPS);
    }
    barrier_init_done();
  }
  wait_for_earlier_kernels();
  const ExpertTiles tiles(offsets, num_experts, ceil_div(out_columns, warpgroup_columns * V::WARPGROUPS_N),
                          V::TILE_M, starts, first);

  if (threadIdx.x >= CONSUMERS) {
    give_registers<40>();
    if (threadIdx.x == CONSUMERS) {
      const ExpertWeightCopies<V> copy = {ring,         full,  weight_map,
                                          out_features, gated, evict_unchanged_policy()};
      produce_tiles(tiles, empty, steps, stages, copy);
      let_next_kernel_start();
    } else if (threadIdx.x == CONSUMERS + WARP_SIZE) {
      fence_global_for_async();
      produce_tiles(tiles, empty, steps, stages, ExpertRowCopies<V>{ring, full, x_map});
    }
    return;
  }

  take_registers<232>();
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = uniform(threadIdx.x / WARP_SIZE);
  const int warpgroup_m = WARPGROUPS_M == 2 ? warp / 4 : 0;
  const int warpgroup_n = WARPGROUPS_M == 2 ? 0 : warp / 4;
  const unsigned long long x_descriptor = operand_descriptor(ring + warpgroup_m * WGMMA_M * TILE_K);
  const unsigned long long weight_descriptor =
      operand_descriptor(ring + V::X_ELEMENTS + warpgroup_n * WARPGROUP_N * TILE_K);
  T* const staging = ring + stages * V::STAGE_ELEMENTS + warp * WARP_ROWS * CHUNK_STRIDE;
  const int num_tiles = uniform(tiles.count);
  RingPosition at;
#pragma unroll 1
  for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    const ExpertTile tile = tiles.tile(index);
    float sums[WARPGROUP_N / 2];
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      barrier_wait(&full[at.stage], at.parity);
      const unsigned long long offset = at.stage * (V::STAGE_ELEMENTS * sizeof(T) >> 4);
      multiply_stage<T, WARPGROUP_N>(sums, x_descriptor, weight_descriptor, offset, step > 0);
      wgmma_wait<1>();
      if (step > 0) release_stage<1>(&empty[previous], lane);
      previous = at.stage;
      at.advance(stages);
    }
    wgmma_wait<0>();
    release_stage<1>(&empty[previous], lane);

    const int row_in_tile = warpgroup_m * WGMMA_M + warp % 4 * WARP_ROWS;
    const int column0 = (tile.column * V::WARPGROUPS_N + warpgroup_n) * warpgroup_columns;
    const int columns = min(warpgroup_columns, out_columns - column0);
    const T* const tile_bias =
        bias == nullptr ? nullptr : bias + static_cast<long long>(tile.expert) * out_features + column0;
    if (gated) activate<V>(sums, activation, tile_bias, out_columns, columns, lane);
    const Result<T, T> result = {
        gated ? nullptr : tile_bias,
        out + static_cast<long long>(tile.row0 + row_in_tile) * out_columns + column0,
        tile.rows - row_in_tile,
        columns,
        out_columns,
        false,
        lane};
    uint4 no_residual[Result<T, T>::SEGMENTS];
    store_tile<V>(sums, result, staging, no_residual);
  }
}
