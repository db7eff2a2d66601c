// Activations in the order of k in which lanes have the elements of a weight in quantised blocks.
#include "common.cuh"
#include "generated/turn_rows.cuh"
#include "norm_row.cuh"
#include "ptx/copy.cuh"
#include "quant/block_formats.cuh"

// Of each 128 elements of a row, word t (two elements) of segment 4 * round + p of 16 bytes becomes pair p of
// the eight that lane t takes in that round; zeros beyond the row's end.
//   in:  x [rows, columns] T
//   out: out [rows, steps * 128] T
// Layout: contiguous rows, 16-byte aligned; columns a multiple of eight.
// Grid: (blocks that cover a row, rows). Block: any number of threads. Shared memory: none.
// Unit of work: one thread a round of one row's 128 elements, four segments.
template <typename T>
__global__ void turn_rows_kernel(TURN_ROWS_PARAMS(T)) {
  static_assert(sizeof(T) == 2, "elements have 16 bits");
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const int place = blockIdx.x * blockDim.x + threadIdx.x, step = place / 4, round = place % 4;
  if (step >= steps) return;
  const T* const from = x + static_cast<long long>(blockIdx.y) * columns;
  uint4 v[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int column = step * STEP + t * LANE_ELEMENTS + vector_of_round(round, t) * 8;
    v[t] = make_uint4(0, 0, 0, 0);
    if (column < columns) load_past_l1(v[t], from + column);
  }
  uint4* const to =
      reinterpret_cast<uint4*>(out + (static_cast<long long>(blockIdx.y) * steps + step) * STEP) + round * 4;
  to[0] = make_uint4(v[0].x, v[1].x, v[2].x, v[3].x);
  to[1] = make_uint4(v[0].y, v[1].y, v[2].y, v[3].y);
  to[2] = make_uint4(v[0].z, v[1].z, v[2].z, v[3].z);
  to[3] = make_uint4(v[0].w, v[1].w, v[2].w, v[3].w);
}

// Where this block's row goes, in the order of turn_rows_kernel.
template <typename T>
struct TurnedRow {
  unsigned* out;  // of the row

  // Eight elements are one pair of each of four segments.
  __device__ __forceinline__ void store(int i, const float (&values)[CHUNK]) const {
    static_assert(CHUNK == 8, "a vector of a lane");
    unsigned* const to = out + turned_place(i) / 2;
#pragma unroll
    for (int p = 0; p < CHUNK / 2; ++p) to[p * 4] = pack<T>(values[2 * p], values[2 * p + 1]);
  }
};

// out = rmsnorm(x) as rmsnorm_kernel gives it, turned as by turn_rows_kernel.
//   in:  x [rows, hidden] T, weight [hidden] T
//   out: out [rows, steps * 128] T
// Layout: contiguous rows, all 16-byte aligned; hidden a multiple of eight.
// Grid: rows. Block: whole warps, up to MAX_THREADS. Shared memory: none dynamic.
// Unit of work: one block per row.
template <typename T>
__global__ void __launch_bounds__(MAX_THREADS) turn_norm_kernel(TURN_NORM_PARAMS(T)) {
  static_assert(sizeof(T) == 2, "elements have 16 bits");
  const TurnedRow<T> row = {
      reinterpret_cast<unsigned*>(out + static_cast<long long>(blockIdx.x) * steps * STEP)};
  norm_row<T, true, false>(x, nullptr, weight, hidden, eps, row);
  const float zeros[CHUNK] = {};
  for (int i = hidden + threadIdx.x * CHUNK; i < steps * STEP; i += blockDim.x * CHUNK) row.store(i, zeros);
}
