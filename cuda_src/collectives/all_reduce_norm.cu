// Sums over ranks, with the addition to the residual stream and the norm that follow.
#include "generated/all_reduce_norm.cuh"
#include "peers.cuh"

// residual += x of rank 0 + x of rank 1 + ..., rounded once; normed = RMSNorm of a row of it, as
// rmsnorm_kernel.
// BOXED: every rank copies its rows to its box, of at most DATA_BYTES, and reads those of all. Else it reads
// the others' x, and ends when they have read its own.
//   in:  x [rows, hidden] T, weight [hidden] T, boxes [ranks + 1] addresses
//   out: residual [rows, hidden] T, normed [rows, hidden] T; x stays
// Layout: contiguous, 16-byte aligned; hidden a multiple of CHUNK, at most ROW_CHUNKS chunks of each thread.
// Grid: one block a row, at most MAX_BLOCKS. Block: whole warps, up to MAX_THREADS. Shared memory: none.
// Unit of work: rows of a block, the grid's blocks apart.
template <typename T, bool BOXED>
__global__ void __launch_bounds__(MAX_THREADS) all_reduce_norm_kernel(ALL_REDUCE_NORM_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const int stride = blockDim.x * CHUNK;
  const int first = threadIdx.x * CHUNK;
  // All of a row at once: what comes from another rank takes microseconds.
  auto load = [&](const T* row, float (&values)[ROW_CHUNKS][CHUNK]) {
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
      const int i = first + c * stride;
      if (i < hidden) load_updated_floats(row + i, CHUNK, values[c]);
    }
  };
  auto store = [&](T* row, const float (&values)[ROW_CHUNKS][CHUNK]) {
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
      const int i = first + c * stride;
      if (i < hidden) store_floats(row + i, CHUNK, values[c]);
    }
  };
  float sums[ROW_CHUNKS][CHUNK] = {}, others[ROW_CHUNKS][CHUNK] = {}, gains[ROW_CHUNKS][CHUNK] = {};
  auto add_others = [&] {
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) sums[c][j] += others[c][j];
    }
  };

  let_next_kernel_start();
  load(weight, gains);
  wait_for_earlier_kernels();
  Peers peers(boxes, rank, ranks, patience, Meeting::ALL_REDUCE_NORM);
  if constexpr (BOXED) {
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
      const long long start = static_cast<long long>(row) * hidden;
      load(x + start, others);
      store(peers.data<T>(rank) + start, others);
    }
  }
  peers.meet(START, x);
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const long long start = static_cast<long long>(row) * hidden;
    auto row_of = [&](int other) {
      return (BOXED ? peers.data<T>(other) : peers.address_of<T>(other)) + start;
    };
    load(row_of(0), sums);
    for (int other = 1; other < ranks; ++other) {
      load(row_of(other), others);
      add_others();
    }
    load(residual + start, others);
    add_others();
    float sum_of_squares = 0.0f;
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) {
        sums[c][j] = to_float(from_float<T>(sums[c][j]));
        sum_of_squares = fmaf(sums[c][j], sums[c][j], sum_of_squares);
      }
    }
    store(residual + start, sums);
    const float inverse_rms = rsqrtf(block_sum(sum_of_squares) / hidden + eps);
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) sums[c][j] = sums[c][j] * inverse_rms * gains[c][j];
    }
    store(normed + start, sums);
  }
  if constexpr (!BOXED) peers.meet(END);
  peers.finish();
}
