// A token and its score in one 64-bit number whose order is theirs: the higher score, then the lower id.
#pragma once

#include "common.cuh"

using Choice = unsigned long long;

// Below every real choice; its score reads as NaN.
constexpr Choice NO_CHOICE = 0;

// NaN is above infinity, so that one NaN in a row decides its maximum.
__device__ __forceinline__ Choice make_choice(float score, int token_id) {
  unsigned ordered;
  if (isnan(score)) {
    ordered = 0xff800001u;  // the next after infinity
  } else {
    const unsigned bits = score == 0.0f ? 0u : __float_as_uint(score);  // -0 and 0 are a tie
    ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  }
  return static_cast<Choice>(ordered) << 32 | ~static_cast<unsigned>(token_id);
}

__device__ __forceinline__ float score_of(Choice choice) {
  const unsigned ordered = static_cast<unsigned>(choice >> 32);
  return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}

__device__ __forceinline__ int token_of(Choice choice) {
  return static_cast<int>(~static_cast<unsigned>(choice));
}

__device__ __forceinline__ Choice better(Choice a, Choice b) { return a > b ? a : b; }

// All lanes get the best.
__device__ __forceinline__ Choice warp_best(Choice choice) {
#pragma unroll
  for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) {
    choice = better(choice, __shfl_xor_sync(FULL_WARP, choice, offset));
  }
  return choice;
}

// All threads of the block must call; all get the best. May be called again at once.
__device__ __forceinline__ Choice block_best(Choice choice) {
  __shared__ Choice partial[WARP_SIZE];
  const int lane = threadIdx.x % WARP_SIZE;
  choice = warp_best(choice);
  __syncthreads();  // the partials of an earlier call may still be in use
  if (lane == 0) partial[threadIdx.x / WARP_SIZE] = choice;
  __syncthreads();
  return warp_best(lane < blockDim.x / WARP_SIZE ? partial[lane] : NO_CHOICE);
}

// The best of `count` choices in memory, found by each warp for itself.
__device__ __forceinline__ Choice best_of(const Choice* choices, int count) {
  Choice best = NO_CHOICE;
  for (int i = threadIdx.x % WARP_SIZE; i < count; i += WARP_SIZE) best = better(best, choices[i]);
  return warp_best(best);
}
