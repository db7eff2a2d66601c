// What the matrix products of many rows on sm_90a have in common: how blocks walk over tiles, the ring of
// stages in shared memory, and the way of results to the tile's place.
#pragma once

#include "common.cuh"
#include "generated/gates.cuh"
#include "generated/sm90_product.cuh"
#include "ptx/mma.cuh"
#include "ptx/sm90.cuh"

constexpr int WGMMA_K = 16;

// Elements from one row of a chunk in shared memory to the next.
__host__ __device__ constexpr int chunk_stride(int columns) { return columns + CHUNK_PADDING; }

// What a block does: tiles first, first + stride, ... and of each the same steps along k. SHARING
// neighbouring rows of tiles count as one here, block `rank` of a cluster has one of them.
template <int SHARING>
struct Work {
  int tiles_m, tiles_n;
  int tiles_m_in_l2;  // rows of tiles that share each tile of the weight while it is in L2
  int first, stride;
  int first_step, num_steps;
  int stages;
  int rank;

  // (row, column) of this block's tile `index`: groups of rows, each column by column.
  __device__ __forceinline__ int2 tile(int index) const {
    const int above = small_div(index, tiles_m_in_l2 * tiles_n) * tiles_m_in_l2;
    const int rows = min(tiles_m - above, tiles_m_in_l2);
    const int in_group = index - above * tiles_n;
    const int column = small_div(in_group, rows);
    return make_int2((above + in_group - column * rows) * SHARING + rank, column);
  }
};

// Where a thread is in the ring of stages.
struct RingPosition {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Start a warp group's products of the stage of the ring that lies `offset` behind what the descriptors
// describe; they begin the sums or, if `adds`, add to them.
template <typename T, int COLUMNS>
__device__ __forceinline__ void multiply_stage(float (&sums)[COLUMNS / 2], unsigned long long x_descriptor,
                                               unsigned long long weight_descriptor,
                                               unsigned long long offset, bool adds) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < TILE_K / WGMMA_K; ++k) {
    wgmma<T, COLUMNS>(sums, x_descriptor + offset + k * DESCRIPTOR_STEP_K,
                      weight_descriptor + offset + k * DESCRIPTOR_STEP_K, adds || k > 0);
  }
  wgmma_commit();
}

// This thread's lane, read whenever it is called: the compiler keeps nothing that follows from it in between.
__device__ __forceinline__ int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Four 8x8 matrices of 2-byte elements to shared memory, the counterpart of ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4(void* row, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Four sums of a thread: gate becomes silu(gate) * up.
__device__ __forceinline__ void silu_mul_into(float* gate, const float* up) {
#pragma unroll
  for (int i = 0; i < 4; ++i) gate[i] = silu_fast(gate[i]) * up[i];
}

// Sums of a thread, 4 * BLOCKS gates: each becomes its activation, which `gated` says, times its up.
template <int BLOCKS>
__device__ __forceinline__ void multiply_gates(float* gates, const float* ups, int gated) {
  if (gated == GELU_GATE) {
#pragma unroll
    for (int i = 0; i < BLOCKS * 4; ++i) gates[i] = gelu_fast(gates[i]) * ups[i];
  } else {
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) silu_mul_into(gates + j * 4, ups + j * 4);
  }
}

// Four sums of a thread, two rows of a pair of columns, plus that pair of a bias.
template <typename T>
__device__ __forceinline__ void add_bias(float* sums, const T* bias) {
  const Vec<T, 2> pair = Vec<T, 2>::load(bias);
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] += to_float(pair[i % 2]);
}

// A warp's part of a tile of the result, CHUNK columns of which pass through shared memory at a time.
template <typename T, typename Out, int CHUNK>
struct WarpTile {
  static constexpr int STRIDE = chunk_stride(CHUNK);
  static constexpr int SEGMENTS = WARP_ROWS * CHUNK / SEGMENT / WARP_SIZE;  // of 16 bytes, for each lane

  const T* bias;  // at its first column, or null
  Out* out;       // its first element
  int rows, columns, row_stride;
  bool accumulate;
  int lane;

  // Segment i of SEGMENTS of this lane, in the CHUNK columns from `first` on.
  __device__ __forceinline__ int row(int i) const { return (i * WARP_SIZE + lane) / (CHUNK / SEGMENT); }
  __device__ __forceinline__ int column() const { return lane % (CHUNK / SEGMENT) * SEGMENT; }
  __device__ __forceinline__ bool has(int i, int first) const {
    return row(i) < rows && first + column() < columns;
  }
  __device__ __forceinline__ Out* at(int i, int first) const {
    return out + row(i) * row_stride + first + column();
  }

  __device__ __forceinline__ void load_chunk(uint4 (&segments)[SEGMENTS], int first) const {
#pragma unroll
    for (int i = 0; i < SEGMENTS; ++i) {
      if (has(i, first)) segments[i] = load_updated(reinterpret_cast<const uint4*>(at(i, first)));
    }
  }

  // Columns from `first` on, 8 for each 4 sums, through this warp's `staging` [WARP_ROWS][STRIDE].
  // `residual`: what load_chunk got, if `accumulate`; the next chunk's afterwards.
  template <int COLUMNS>
  __device__ __forceinline__ void store_chunk(float* sums, int first, T* staging,
                                              uint4 (&residual)[SEGMENTS]) const {
    T* const fragments = staging + lane % 16 * STRIDE + lane / 16 * 8;
    if (bias != nullptr) {
#pragma unroll
      for (int j = 0; j < COLUMNS; j += 8) {
        if (first + j < columns) add_bias(sums + j / 2, bias + first + j + lane % 4 * 2);
      }
    }
    if (accumulate) {
#pragma unroll
      for (int i = 0; i < SEGMENTS; ++i) {
        *reinterpret_cast<uint4*>(staging + row(i) * STRIDE + column()) = residual[i];
      }
      load_chunk(residual, first + CHUNK);
      __syncwarp();
#pragma unroll
      for (int j = 0; j < COLUMNS; j += 16) {
        unsigned packed[4];
        ldmatrix_x4(packed, fragments + j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Vec<T, 2> pair = __builtin_bit_cast(Vec<T, 2>, packed[i]);
          sums[j / 2 + i * 2] += to_float(pair.data[0]);
          sums[j / 2 + i * 2 + 1] += to_float(pair.data[1]);
        }
      }
      __syncwarp();
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; j += 16) {
      unsigned packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) packed[i] = pack<T>(sums[j / 2 + i * 2], sums[j / 2 + i * 2 + 1]);
      stmatrix_x4(fragments + j, packed);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SEGMENTS; ++i) {
      if (has(i, first)) {
        *reinterpret_cast<uint4*>(at(i, first)) =
            *reinterpret_cast<const uint4*>(staging + row(i) * STRIDE + column());
      }
    }
    __syncwarp();
  }

  // Four sums of this lane, in the 8 columns from `column` on, straight from registers.
  __device__ __forceinline__ bool has_pair(int i, int column) const {
    return lane / 4 + i * 8 < rows && column < columns;
  }
  __device__ __forceinline__ Out* pair_at(int i, int column) const {
    return out + (lane / 4 + i * 8) * row_stride + column + lane % 4 * 2;
  }
};
