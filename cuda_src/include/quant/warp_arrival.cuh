// A warp's arrival at a barrier for all of its lanes.
#pragma once

#include "common.cuh"
#include "ptx/sm90.cuh"

// EVERY_LANE_ARRIVES is for NVIDIA's racecheck, which follows what a lane passes on by itself, and not what a
// warp's lanes have passed on to each other before.
#ifdef EVERY_LANE_ARRIVES
constexpr int WARP_ARRIVALS = WARP_SIZE;
#else
constexpr int WARP_ARRIVALS = 1;  // that a barrier counts for each warp
#endif

// What the warp's lanes have done is done.
__device__ __forceinline__ void barrier_arrive_warp(Barrier* barrier) {
  __syncwarp();
  if (WARP_ARRIVALS > 1 || threadIdx.x % WARP_SIZE == 0) barrier_arrive(barrier);
}
