// What the products with tiles of three warp groups' rows have in common: their tile, and the first steps of
// a ring that their own warps refill.
#pragma once

#include "generated/sm90_matmul_wide.cuh"
#include "sm90_product.cuh"

constexpr int TILE_M = WGMMA_M * WARPGROUPS_M;
constexpr int WARPS = WARPGROUPS_M * WARPGROUP_SIZE / WARP_SIZE;
constexpr int CHUNK_STRIDE = chunk_stride(CHUNK_COLUMNS);

// The first steps of a block, as many as the ring has stages: copy(tile, step, stage).
template <int SHARING, typename Copy>
__device__ __forceinline__ void fill_ring(const Work<SHARING>& work, int steps, const Copy& copy) {
  int index = work.first;
  int step = 0;
#pragma unroll 1
  for (int stage = 0; stage < work.stages && index < work.tiles_m * work.tiles_n; ++stage) {
    copy(work.tile(index), step, stage);
    if (++step == steps) {
      step = 0;
      index += work.stride;
    }
  }
}
