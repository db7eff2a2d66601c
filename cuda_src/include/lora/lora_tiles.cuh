// What products with adapters on tensor cores have in common: tiles of rows, and chunks of their width.
#pragma once

#include "common.cuh"
#include "generated/lora.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"

// Rows of x that share an adapter, as group_rows_kernel wrote them. It lets no kernel start before it has
// ended, so they are read without a wait, as adapters are.
struct RowTile {
  int slot;
  int begin;
  int count;

  __device__ __forceinline__ RowTile(const int* groups, int num_rows, int index) {
    const int* const tile = groups + num_rows + 3 * index;
    slot = load_updated(tile);
    begin = load_updated(tile + 1);
    count = load_updated(tile + 2);
  }
};

// One number of every slot. Those of the first slots come while the tile still does, which says what slot it
// is: else a block would wait for memory once more.
template <typename V>
struct SlotValues {
  const V* values;
  int stride;
  V of_lane;

  __device__ __forceinline__ SlotValues(const V* values, int stride, int num_slots)
      : values(values), stride(stride) {
    const int lane = threadIdx.x % WARP_SIZE;
    of_lane = load_updated(values + min(lane, num_slots - 1) * stride);
  }
  // By whole warps.
  __device__ __forceinline__ V at(int slot) const {
    return slot < WARP_SIZE ? __shfl_sync(FULL_WARP, of_lane, slot) : load_updated(values + slot * stride);
  }
};

// For blocks that have nothing to do. The next kernel waits for this one alone, so one block of the grid has
// to wait for those before; all others make room at once.
__device__ __forceinline__ void leave_to_others() {
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) wait_for_earlier_kernels();
}

// What a block multiplies with A: the rows of a tile by LORA_RANKS ranks of a part. All numbers are asked for
// at once.
struct ShrinkTile {
  int part;
  int first;  // rank
  SlotValues<int> slot_ranks;
  SlotValues<float> slot_factors;
  RowTile rows;
  int rank = 0;  // of the slot

  __device__ __forceinline__ ShrinkTile(const int* groups, const int* ranks, const float* factors,
                                        int num_rows, int num_slots, int parts, int max_rank)
      : part(blockIdx.y / ceil_div(max_rank, static_cast<int>(LORA_RANKS))),
        first(blockIdx.y % ceil_div(max_rank, static_cast<int>(LORA_RANKS)) * LORA_RANKS),
        slot_ranks(ranks, 1, num_slots),
        slot_factors(factors + part, parts, num_slots),
        rows(groups, num_rows, blockIdx.x) {}

  // Whether there is anything to multiply. By whole warps.
  __device__ __forceinline__ bool find_rank() {
    rank = slot_ranks.at(rows.slot);
    const bool is_there = slot_factors.at(rows.slot) != 0.0f;
    return rows.count != 0 && first < rank && is_there;
  }
  // Of A; it has one 8 further if `has_high`, as slots have whole segments.
  __device__ __forceinline__ long long matrix_row(int parts, int max_rank, int row) const {
    return (rows.slot * parts + part) * max_rank + first + row;
  }
  __device__ __forceinline__ bool has_high() const { return first + 8 < rank; }
  // Of x; of places behind the last any, whose sums are not stored.
  __device__ __forceinline__ int row(const int* groups, int place) const {
    return load_updated(groups + rows.begin + min(place, rows.count - 1));
  }
  // The sum of the row at `place` and of the r-th rank, of slice blockIdx.z.
  __device__ __forceinline__ void store(float* shrunk, float sum, int row, int place, int r, int num_rows,
                                        int parts, int max_rank) const {
    if (place >= rows.count || first + r >= rank) return;
    const long long place_of_row = static_cast<long long>(blockIdx.z) * num_rows + row;
    shrunk[(place_of_row * parts + part) * max_rank + first + r] = sum;
  }
};

// What a warp multiplies at a time of a row of an operand; lane (g, t) has the LORA_CHUNK / 4 elements that
// are in segments t, t + 4, ... from `k` on. Both operands are given to mma in this order, so that lanes load
// whole segments.
constexpr int CHUNK_LINES = LORA_CHUNK / (4 * SEGMENT);
using Line = uint4[CHUNK_LINES];

// a_low and a_high are rows g and g + 8 of mma's first operand, b is row g of its second, transposed.
template <typename T>
__device__ __forceinline__ void multiply_chunk(float (&sums)[4], const Line& a_low, const Line& a_high,
                                               const Line& b) {
#pragma unroll
  for (int i = 0; i < CHUNK_LINES; ++i) {
    mma_m16n8k16<T>(sums, {a_low[i].x, a_high[i].x, a_low[i].y, a_high[i].y}, {b[i].x, b[i].y});
    mma_m16n8k16<T>(sums, {a_low[i].z, a_high[i].z, a_low[i].w, a_high[i].w}, {b[i].z, b[i].w});
  }
}

// A lane's segments from `from` on, of which `columns` are left in the row; 0 behind them. Chunks that are
// whole, as nearly all are, take no branches.
template <typename T, typename Load>
__device__ __forceinline__ void load_line(Line& line, const T* from, int columns, Load load) {
  if (columns > (CHUNK_LINES - 1) * 4 * SEGMENT) {
#pragma unroll
    for (int i = 0; i < CHUNK_LINES; ++i) line[i] = load(from + 4 * i * SEGMENT);
  } else {
#pragma unroll
    for (int i = 0; i < CHUNK_LINES; ++i) {
      line[i] = 4 * i * SEGMENT < columns ? load(from + 4 * i * SEGMENT) : make_uint4(0, 0, 0, 0);
    }
  }
}

// The sums of a block's chunks: each warp's, and in their order the total of a row and rank.
template <int WARPS>
struct ChunkSums {
  float of_warp[WARPS][LORA_ROWS][LORA_RANKS + 1];

  // Of row g of each half of the rows.
  __device__ __forceinline__ void put(const float (&sums)[2][4]) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of_warp[threadIdx.x / WARP_SIZE][8 * half + 2 * t + i % 2][g + i / 2 * 8] = sums[half][i];
      }
    }
  }
  __device__ __forceinline__ float total(int place, int rank) const {
    float total = of_warp[0][place][rank];
#pragma unroll
    for (int i = 1; i < WARPS; ++i) total += of_warp[i][place][rank];
    return total;
  }
};
