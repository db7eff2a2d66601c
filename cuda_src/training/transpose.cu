// Matrices with rows and columns exchanged, for products that sum over rows.
#include "common.cuh"
#include "generated/training_transpose.cuh"

// out[n, m] = x[m, n], 0 for m >= rows.
//   in:  x [rows, columns] T
//   out: out [columns, out_columns] T, out_columns >= rows
// Layout: row-major; pairs of elements at a time where columns is even and x aligned to a pair. out_columns
// is even and out aligned to a pair.
// Grid: (tiles that cover out_columns, tiles that cover columns).
// Block: THREADS.
// Shared memory: static.
// Unit of work: a block a tile of TILE x TILE elements.
template <typename T>
__global__ void __launch_bounds__(THREADS) transpose_kernel(TRANSPOSE_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  constexpr int PITCH = TILE + (sizeof(T) == 2 ? 2 : 1);
  constexpr int WARPS = THREADS / WARP_SIZE;
  static_assert(TILE == 2 * WARP_SIZE, "a lane takes a pair of a row");
  __shared__ T tile[TILE * PITCH];
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const long long row0 = static_cast<long long>(blockIdx.x) * TILE;
  const int column0 = blockIdx.y * TILE;
  const int column = column0 + lane * 2;
  const bool in_pairs = columns % 2 == 0 && is_aligned(x, 2 * sizeof(T));
#pragma unroll 4
  for (int i = warp; i < TILE; i += WARPS) {
    const long long row = row0 + i;
    Vec<T, 2> pair = {from_float<T>(0.0f), from_float<T>(0.0f)};
    if (row < rows && column < columns) {
      const T* const from = x + row * columns + column;
      if (in_pairs) {
        pair = Vec<T, 2>::load(from);
      } else {
        pair[0] = from[0];
        if (column + 1 < columns) pair[1] = from[1];
      }
    }
    tile[i * PITCH + lane * 2] = pair[0];
    tile[i * PITCH + lane * 2 + 1] = pair[1];
  }
  __syncthreads();
  const long long out_column = row0 + lane * 2;
#pragma unroll 4
  for (int i = warp; i < TILE; i += WARPS) {
    if (column0 + i >= columns || out_column >= out_columns) continue;
    const Vec<T, 2> pair = {tile[lane * 2 * PITCH + i], tile[(lane * 2 + 1) * PITCH + i]};
    pair.store(out + static_cast<long long>(column0 + i) * out_columns + out_column);
  }
}
