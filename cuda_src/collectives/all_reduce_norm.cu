// Sums over ranks, with the addition to the residual stream and the norm that follow.
#include "generated/all_reduce_norm.cuh"
#include "packets.cuh"

// residual += x of rank 0 + x of rank 1 + ..., rounded once; normed = RMSNorm of a row of it, as
// rmsnorm_kernel.
// FORM: Form::PACKETS, every rank sends its rows to all others; Form::BOXED, it copies them to its box, of at
// most DATA_BYTES, and reads those of all; Form::DIRECT, it reads the others' x, and ends when they have read
// its own.
//   in:  x [rows, hidden] T, weight [hidden] T, boxes [ranks + 1] addresses
//   out: residual [rows, hidden] T, normed [rows, hidden] T; x stays
// Layout: contiguous, 16-byte aligned; hidden a multiple of CHUNK, at most ROW_CHUNKS chunks of each thread.
// Grid: one block a row, at most MAX_BLOCKS, which is the most rows of packets. Block: whole warps, up to
// MAX_THREADS. Shared memory: none.
// Unit of work: rows of a block, the grid's blocks apart.
template <typename T, int FORM>
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
  // Of row `row`, whose sum over the ranks is in `sums` and whose residual in `others`.
  auto finish_row = [&](int row) {
    const long long start = static_cast<long long>(row) * hidden;
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
  };

  let_next_kernel_start();
  load(weight, gains);
  wait_for_earlier_kernels();
  if constexpr (FORM == Form::PACKETS) {
    const Packets<T> packets(boxes, rank, ranks, patience, Meeting::ALL_REDUCE_NORM);
    const long long start = static_cast<long long>(blockIdx.x) * hidden;
    auto present = [&](int c) { return first + c * stride < hidden; };
    load(x + start, sums);
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
      if (present(c)) packets.push(c, sums[c]);
    }
    __syncthreads();  // all is sent before any thread waits
    load(residual + start, others);
    float own[ROW_CHUNKS][CHUNK];
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) {
        own[c][j] = sums[c][j];
        sums[c][j] = 0.0f;
      }
    }
    for (int other = 0; other < ranks; ++other) {
      typename Packets<T>::Words words[ROW_CHUNKS];
      if (other != rank) packets.pull(other, present, words);
#pragma unroll
      for (int c = 0; c < ROW_CHUNKS; ++c) {
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
          if (present(c)) sums[c][j] += other == rank ? own[c][j] : to_float(words[c].elements[j]);
        }
      }
    }
    finish_row(blockIdx.x);
    packets.finish();
  } else {
    Peers peers(boxes, rank, ranks, patience, Meeting::ALL_REDUCE_NORM);
    if constexpr (FORM == Form::BOXED) {
      for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const long long start = static_cast<long long>(row) * hidden;
        load(x + start, others);
        store(peers.data<T>(rank) + start, others);
      }
    }
    peers.meet(START, x);
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
      auto row_of = [&](int other) {
        return (FORM == Form::BOXED ? peers.data<T>(other) : peers.address_of<T>(other)) +
               static_cast<long long>(row) * hidden;
      };
      load(row_of(0), sums);
      for (int other = 1; other < ranks; ++other) {
        load(row_of(other), others);
        add_others();
      }
      load(residual + static_cast<long long>(row) * hidden, others);
      finish_row(row);
    }
    if constexpr (FORM == Form::DIRECT) peers.meet(END);
    peers.finish();
  }
}
