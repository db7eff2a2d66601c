// How blocks walk over the tiles of products by experts' weights, of which only the device knows how many
// there are: each expert's rows in chunks, each chunk in tiles of columns.
#pragma once

#include "common.cuh"
#include "generated/expert_tiles.cuh"

struct ExpertTile {
  int expert;
  int row0, rows;  // of the rows sorted by expert
  int column;      // which tile of columns
};

// All threads of a block make it together; `starts` and `first` are shared memory of MAX_EXPERTS + 1 ints
// each.
struct ExpertTiles {
  const int* starts;  // of each expert's rows
  const int* first;   // of each expert's chunks
  int num_experts;
  int tiles_n;     // tiles of columns
  int chunk_rows;  // at most
  int count;

  __device__ __forceinline__ ExpertTiles(const int* offsets, int num_experts, int tiles_n, int chunk_rows,
                                         int* starts, int* first)
      : starts(starts), first(first), num_experts(num_experts), tiles_n(tiles_n), chunk_rows(chunk_rows) {
    for (int i = threadIdx.x; i <= num_experts; i += blockDim.x) starts[i] = load_updated(offsets + i);
    __syncthreads();
    if (threadIdx.x < WARP_SIZE) {
      const int lane = threadIdx.x;
      int sum = 0;
      for (int base = 0; base < num_experts; base += WARP_SIZE) {
        const int expert = base + lane;
        const int rows = expert < num_experts ? starts[expert + 1] - starts[expert] : 0;
        int value = small_ceil_div(rows, chunk_rows);
#pragma unroll
        for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
          const int other = __shfl_up_sync(FULL_WARP, value, distance);
          if (lane >= distance) value += other;
        }
        if (expert < num_experts) first[expert + 1] = sum + value;
        sum += __shfl_sync(FULL_WARP, value, WARP_SIZE - 1);
      }
      if (lane == 0) first[0] = 0;
    }
    __syncthreads();
    count = first[num_experts] * tiles_n;
  }

  // Of an expert all chunks take a tile of columns one after the other, while it is in L2.
  __device__ __forceinline__ ExpertTile tile(int index) const {
    int low = 0, high = num_experts;  // the last expert whose first tile is not behind the index
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first[middle] * tiles_n <= index) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int chunks = first[low + 1] - first[low];
    const int within = index - first[low] * tiles_n;
    const int column = small_div(within, chunks);
    const int row0 = starts[low] + (within - column * chunks) * chunk_rows;
    return {low, row0, min(chunk_rows, starts[low + 1] - row0), column};
  }
};
