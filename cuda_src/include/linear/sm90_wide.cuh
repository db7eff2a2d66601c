// What the products with tiles of three warp groups' rows have in common: their tile, and the first steps of
// a ring that their own warps refill.
#pragma once

#include "generated/sm90_matmul_wide.cuh"
#include "linear/sm90_product.cuh"

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

// What is counted of a ring that a block's own warps refill.
//   full: [stages], in shared memory, as are the counts of warps, and of blocks, that are through with a
//   stage.
struct WideRing {
  Barrier* full;
  unsigned* warps_through;
  unsigned* blocks_through;
  int stages;

  // Before a block of the cluster uses it.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < stages; ++i) {
        barrier_init(&full[i], 1);
        warps_through[i] = blocks_through[i] = 0;
      }
      barrier_init_done();
    }
    __syncthreads();
    cluster_arrive();
    cluster_wait();
  }

  // This warp no longer needs stage `stage`, which held `step` of tile `index`, that is `tile`. The last warp
  // of the block copies what the ring has there next; the other block's stage must be free, too, for the
  // weight; each block announces all bytes before it counts.
  template <int STAGE_BYTES, int SHARING, typename CopyX, typename CopyWeight>
  __device__ __forceinline__ void release(const Work<SHARING>& work, int stage, int index, int2 tile,
                                          int step, const CopyX& copy_x,
                                          const CopyWeight& copy_weight) const {
    const int steps = work.num_steps, num_tiles = work.tiles_m * work.tiles_n;
    if (threadIdx.x % WARP_SIZE == 0 && count_is_last(&warps_through[stage], WARPS)) {
      step += stages;
      if (step >= steps) {
        for (; step >= steps; step -= steps) index += work.stride;
        tile = work.tile(index);
      }
      if (index < num_tiles) {
        barrier_arrive_expecting(&full[stage], STAGE_BYTES);
        copy_x(tile, step, stage);
        if (count_in_cluster_is_last(&blocks_through[stage], SHARING)) {
#pragma unroll
          for (int half = 0; half < SHARING; ++half) copy_weight(tile, step, stage, half);
        }
      }
    }
    __syncwarp();
  }
};
