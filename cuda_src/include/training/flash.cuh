// Tiles and products of attention on tensor cores, forward and backward. Rows of tiles are padded by 16
// bytes, so that eight of them fall into different banks.
#pragma once

#include "ptx/copy.cuh"
#include "ptx/mma.cuh"
#include "training/packed_attention.cuh"

template <int HEAD_DIM>
constexpr int FLASH_PITCH = HEAD_DIM + SEGMENT;

// Start to copy rows [row0, row0 + ROWS) of one head, `stride` elements apart, to a tile [ROWS, PITCH]; zeros
// from row `end` on.
template <typename T, int HEAD_DIM, int ROWS, int THREADS>
__device__ __forceinline__ void copy_rows(T* tile, const T* head, long long stride, int row0, int end) {
  constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
#pragma unroll
  for (int i = threadIdx.x; i < ROWS * SEGMENTS; i += THREADS) {
    const int row = i / SEGMENTS, segment = i % SEGMENTS;
    const bool valid = row0 + row < end;
    const T* const from = head + (valid ? row0 + row : 0) * stride + segment * SEGMENT;
    copy_async_16(tile + row * FLASH_PITCH<HEAD_DIM> + segment * SEGMENT, from, valid);
  }
}

// sums [16 * ROW_TILES, COLUMNS] += rows [16 * ROW_TILES, HEAD_DIM] times columns [COLUMNS, HEAD_DIM]
// transposed, by one warp. Of sums a lane holds what ptx/mma.cuh says, of each 16 x 8.
template <typename T, int HEAD_DIM, int ROW_TILES, int COLUMNS>
__device__ __forceinline__ void multiply_transposed(float (&sums)[ROW_TILES][COLUMNS / 8][4], const T* rows,
                                                    const T* columns) {
  constexpr int PITCH = FLASH_PITCH<HEAD_DIM>;
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += 16) {
    unsigned a[ROW_TILES][4];
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
      ldmatrix_x4(a[i], rows + (i * 16 + lane % 16) * PITCH + d + lane / 16 * 8);
    }
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j += 2) {
      unsigned b[4];
      ldmatrix_x4(b, columns + (j * 8 + lane % 8 + lane / 16 * 8) * PITCH + d + lane / 8 % 2 * 8);
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
        mma_m16n8k16<T>(sums[i][j], a[i], {b[0], b[1]});
        mma_m16n8k16<T>(sums[i][j + 1], a[i], {b[2], b[3]});
      }
    }
  }
}

// sums [16 * ROW_TILES, HEAD_DIM] += weights [16 * ROW_TILES, COLUMNS], rounded to T, times rows [COLUMNS,
// HEAD_DIM]. The layout of sums is that of a left operand.
template <typename T, int HEAD_DIM, int ROW_TILES, int COLUMNS>
__device__ __forceinline__ void multiply_weighted(float (&sums)[ROW_TILES][HEAD_DIM / 8][4],
                                                  const float (&weights)[ROW_TILES][COLUMNS / 8][4],
                                                  const T* rows) {
  constexpr int PITCH = FLASH_PITCH<HEAD_DIM>;
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int k = 0; k < COLUMNS / 16; ++k) {
    unsigned a[ROW_TILES][4];
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float* pair = &weights[i][k * 2 + r / 2][r % 2 * 2];
        a[i][r] = pack<T>(pair[0], pair[1]);
      }
    }
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n += 2) {
      unsigned b[4];
      ldmatrix_x4_trans(b, rows + (k * 16 + lane % 16) * PITCH + n * 8 + lane / 16 * 8);
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
        mma_m16n8k16<T>(sums[i][n], a[i], {b[0], b[1]});
        mma_m16n8k16<T>(sums[i][n + 1], a[i], {b[2], b[3]});
      }
    }
  }
}

// A warp's sums of rows from row0 on to one head's columns, `stride` elements apart, times factors[i][h] of
// rows i * 16 + h * 8 + lane / 4; nothing from row `end` on.
template <typename T, int HEAD_DIM, int ROW_TILES>
__device__ __forceinline__ void store_rows(T* head, long long stride, int row0, int end,
                                           const float (&sums)[ROW_TILES][HEAD_DIM / 8][4],
                                           const float (&factors)[ROW_TILES][2]) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int i = 0; i < ROW_TILES * 2; ++i) {
    const int row = row0 + i * 8 + lane / 4;
    if (row >= end) continue;
    T* const to = head + row * stride + lane % 4 * 2;
    const float factor = factors[i / 2][i % 2];
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      const float* pair = &sums[i / 2][n][i % 2 * 2];
      *reinterpret_cast<unsigned*>(to + n * 8) = pack<T>(pair[0] * factor, pair[1] * factor);
    }
  }
}
