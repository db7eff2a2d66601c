// A warp's arrival at a barrier for all of its lanes.
#pragma once

#include "common.cuh"
#include "ptx/sm90.cuh"

// EVERY_LANE_ARRIVES is for NVIDIA's racecheck, which follows what a lane passes on by itself, and not what
// other lanes have passed on to it before.
#ifdef EVERY_LANE_ARRIVES
constexpr int WARP_ARRIVALS = WARP_SIZE;
#else
constexpr int WARP_ARRIVALS = 1;  // that a barrier counts for each warp
#endif

// Whether this lane arrives, of a warp whose lanes have met.
__device__ __forceinline__ bool arrives_for_warp(int lane) { return WARP_ARRIVALS > 1 || lane == 0; }

// What the warp's lanes have done is done.
__device__ __forceinline__ void barrier_arrive_warp(Barrier* barrier, int lane = threadIdx.x % WARP_SIZE) {
  __syncwarp();
  if (arrives_for_warp(lane)) barrier_arrive(barrier);
}
