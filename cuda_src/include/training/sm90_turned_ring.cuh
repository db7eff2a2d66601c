// Products on sm_90a of operands that lie with rows or columns along their lines: producers and consumers for
// the ring, tiles and epilogue of sm90_matmul.cuh.
#pragma once

#include "linear/sm90_matmul.cuh"
#include "training/sm90_turned.cuh"

// The weight is turned, x if TURNED; results that are float may be added to what is there.
template <typename T, typename Out, bool TURNED, int GROUPS_M, int GROUP_N, int BLOCKS>
struct TurnedVariant : Variant<T, Out, GROUPS_M, GROUP_N, BLOCKS> {
  static constexpr bool TURNED_X = TURNED;
  static constexpr int WEIGHT_BOXES = TurnedVariant::TILE_N / LINE;
  static_assert(GROUP_N % LINE == 0, "a warp group's columns are whole lines");
  static_assert(WEIGHT_BOXES % BLOCKS == 0, "blocks copy whole boxes");
  static_assert(WGMMA_M == LINE, "a warp group's rows are a line");
};

// Boxes of a turned operand that lie, at least in part, in the matrix, of `most` from line element `first`
// on.
__device__ __forceinline__ int boxes_in(int size, int first, int most) {
  return max(min(ceil_div(size - first, LINE), most), 0);
}

// Producer of x, turned: one step's part of a tile's rows, those boxes that exist.
template <typename V>
struct TurnedRowCopies {
  typename V::T* ring;
  Barrier* full;
  const TensorMap& map;
  int num_rows;

  __device__ __forceinline__ void operator()(int2 tile, int k, int stage) const {
    const int row = tile.x * V::TILE_M;
    const int boxes = boxes_in(num_rows, row, V::WARPGROUPS_M);
    barrier_arrive_expecting(&full[stage], boxes * BOX_BYTES);
#pragma unroll
    for (int i = 0; i < V::WARPGROUPS_M; ++i) {
      if (i < boxes) {
        copy_box(ring + stage * V::STAGE_ELEMENTS + i * BOX_ELEMENTS, map, k, row + i * LINE, &full[stage]);
      }
    }
  }
};

// Producer of the weight, turned: one step's part of a tile's columns, those boxes that exist. Of a tile that
// blocks share each copies its part into all.
template <typename V>
struct TurnedWeightCopies {
  typename V::T* ring;
  Barrier* full;
  const TensorMap& map;
  int out_features;
  int rank;

  __device__ __forceinline__ void operator()(int2 tile, int k, int stage) const {
    constexpr int OWN = V::WEIGHT_BOXES / V::SHARING;
    const int column = tile.y * V::TILE_N;
    const int boxes = boxes_in(out_features, column, V::WEIGHT_BOXES);
    typename V::T* const to = ring + stage * V::STAGE_ELEMENTS + V::X_ELEMENTS;
    barrier_arrive_expecting(&full[stage], boxes * BOX_BYTES);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int box = rank * OWN + i;
      if (box >= boxes) break;
      if constexpr (V::SHARING > 1) {
        copy_box_to_blocks<V::SHARING>(to + box * BOX_ELEMENTS, map, k, column + box * LINE, &full[stage]);
      } else {
        copy_box(to + box * BOX_ELEMENTS, map, k, column + box * LINE, &full[stage]);
      }
    }
  }
};

// A warp group that multiplies: the tiles of `work` one after another, from the ring to their places in `out`
// [num_rows, out_features].
template <typename V>
__device__ __forceinline__ void multiply_turned_tiles(const Work<V::SHARING>& work,
                                                      unsigned char* shared_memory, Barrier* full,
                                                      Barrier* empty, int num_rows, int out_features,
                                                      typename V::Out* out, bool accumulate) {
  using T = typename V::T;
  constexpr int WARPGROUP_N = V::WARPGROUP_N;
  T* const ring = reinterpret_cast<T*>(shared_memory);
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = uniform(threadIdx.x / WARP_SIZE);
  const int warpgroup_m = V::WARPGROUPS_M == 2 ? warp / 4 : 0;
  const int warpgroup_n = V::WARPGROUPS_M == 2 ? 0 : warp / 4;
  const T* const x = ring + warpgroup_m * WGMMA_M * TILE_K;
  const unsigned long long x_descriptor = V::TURNED_X ? turned_descriptor<TILE_K>(x) : operand_descriptor(x);
  const unsigned long long weight_descriptor =
      turned_descriptor<TILE_K>(ring + V::X_ELEMENTS + warpgroup_n * WARPGROUP_N * TILE_K);
  T* const staging = ring + work.stages * V::STAGE_ELEMENTS + warp * WARP_ROWS * CHUNK_STRIDE;

  RingPosition at;
#pragma unroll 1
  for (int index = work.first; index < work.tiles_m * work.tiles_n; index += work.stride) {
    const int2 tile = work.tile(index);
    float sums[WARPGROUP_N / 2];
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < work.num_steps; ++step) {
      barrier_wait(&full[at.stage], at.parity);
      const unsigned long long offset = at.stage * (V::STAGE_ELEMENTS * sizeof(T) >> 4);
      multiply_turned_stage<T, WARPGROUP_N, V::TURNED_X>(sums, x_descriptor, weight_descriptor, offset,
                                                         step > 0);
      wgmma_wait<1>();
      if (step > 0) release_stage<V::SHARING>(&empty[previous], lane);
      previous = at.stage;
      at.advance(work.stages);
    }
    wgmma_wait<0>();
    release_stage<V::SHARING>(&empty[previous], lane);

    const int row0 = tile.x * V::TILE_M + warpgroup_m * WGMMA_M + warp % 4 * WARP_ROWS;
    const int column0 = (tile.y * V::WARPGROUPS_N + warpgroup_n) * WARPGROUP_N;
    const Result<T, typename V::Out> result = {nullptr,
                                               out + static_cast<long long>(row0) * out_features + column0,
                                               num_rows - row0,
                                               min(WARPGROUP_N, out_features - column0),
                                               out_features,
                                               !V::THROUGH_SHARED && accumulate,
                                               lane};
    if constexpr (V::THROUGH_SHARED) {
      uint4 nothing[Result<T, T>::SEGMENTS];
      store_tile<V>(sums, result, staging, nothing);
    } else {
      add_tile<T, WARPGROUP_N, WARPGROUP_N >= 128 ? 16 : 8>(sums, result);
    }
  }
}
