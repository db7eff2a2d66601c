// Products on sm_90a of operands that lie with rows or columns along their lines: what tiles of two and of
// three warp groups have in common.
#pragma once

#include "generated/training_sm90.cuh"
#include "linear/sm90_product.cuh"
#include "ptx/sm90_turned.cuh"

constexpr int LINE = SWIZZLE_BYTES / 2;      // elements of a line of a turned operand
constexpr int BOX_ELEMENTS = LINE * TILE_K;  // that a copy of one brings
constexpr int BOX_BYTES = BOX_ELEMENTS * 2;
static_assert(BOX_BYTES % SWIZZLE_REPEAT == 0, "boxes end where the swizzle repeats");

// Start a warp group's products of a stage, as multiply_stage, with the weight turned and x if TURNED_X.
template <typename T, int COLUMNS, bool TURNED_X>
__device__ __forceinline__ void multiply_turned_stage(float (&sums)[COLUMNS / 2],
                                                      unsigned long long x_descriptor,
                                                      unsigned long long weight_descriptor,
                                                      unsigned long long offset, bool adds) {
  constexpr unsigned long long X_STEP = TURNED_X ? TURNED_STEP_K : DESCRIPTOR_STEP_K;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < TILE_K / WGMMA_K; ++k) {
    wgmma_turned<T, TURNED_X>(sums, x_descriptor + offset + k * X_STEP,
                              weight_descriptor + offset + k * TURNED_STEP_K, adds || k > 0);
  }
  wgmma_commit();
}

// A warp's float sums to their place, + what is there if `result.accumulate`, of which a thread has BATCH
// pairs on their way at a time.
template <typename T, int COLUMNS, int BATCH, int CHUNK>
__device__ __forceinline__ void add_tile(const float (&sums)[COLUMNS / 2],
                                         const WarpTile<T, float, CHUNK>& result) {
  constexpr int PAIRS = COLUMNS / 8;
  static_assert(PAIRS % BATCH == 0, "batches are whole");
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int first = 0; first < PAIRS; first += BATCH) {
      float2 pairs[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int column = (first + j) * 8;
        pairs[j] = result.accumulate && result.has_pair(i, column)
                       ? *reinterpret_cast<const float2*>(result.pair_at(i, column))
                       : make_float2(0.0f, 0.0f);
      }
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int column = (first + j) * 8, sum = (first + j) * 4 + i * 2;
        if (result.has_pair(i, column)) {
          *reinterpret_cast<float2*>(result.pair_at(i, column)) =
              make_float2(pairs[j].x + sums[sum], pairs[j].y + sums[sum + 1]);
        }
      }
    }
  }
}
