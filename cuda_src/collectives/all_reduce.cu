// Sums over ranks, in place and in the order of the ranks, so that all have the same bits.
#include "collectives/summands.cuh"
#include "generated/all_reduce.cuh"

// Chunks chunk, chunk + THREADS, ... of x [size], as far as they are before `last`.
template <typename T, int PIECES>
__device__ __forceinline__ void load_part(const T* x, long long chunk, long long last, long long size,
                                          float (&values)[PIECES][CHUNK]) {
#pragma unroll
  for (int p = 0; p < PIECES; ++p, chunk += THREADS) {
    if (chunk < last) load_updated_floats(x + chunk * CHUNK, size - chunk * CHUNK, values[p]);
  }
}

template <typename T, int PIECES>
__device__ __forceinline__ void store_part(const float (&values)[PIECES][CHUNK], T* x, long long chunk,
                                           long long last, long long size) {
#pragma unroll
  for (int p = 0; p < PIECES; ++p, chunk += THREADS) {
    if (chunk < last) store_floats(x + chunk * CHUNK, size - chunk * CHUNK, values[p]);
  }
}

template <int PIECES>
__device__ __forceinline__ void add(const float (&values)[PIECES][CHUNK], float (&sums)[PIECES][CHUNK]) {
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) sums[p][j] += values[p][j];
  }
}

// x = x of rank 0 + x of rank 1 + ..., or residual += that sum, rounded once; x then stays.
//   in:  x [size] T, boxes [ranks + 1] addresses
//   out: x, or residual [size] T where ADDS
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: at most COUNTED_BLOCKS, all of them on the device at a time. Block: THREADS. Shared memory: none.
// Unit of work: PIECES chunks of a thread, THREADS apart, which every rank sends to all others (one shot); a
// meeting of a block's. What is beyond `size` goes as zeros, so that all threads are at all meetings.
template <typename T, bool ADDS, int PIECES>
__global__ void __launch_bounds__(THREADS, SUMMING_BLOCKS) all_reduce_kernel(ALL_REDUCE_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  using Words = ChunkWords<T>;
  let_next_kernel_start();
  Summands summands(boxes, rank, ranks, patience, Meeting::ALL_REDUCE);
  wait_for_earlier_kernels();
  summands.begin();
  const long long chunks = ceil_div(size, static_cast<long long>(CHUNK));
  const long long step = static_cast<long long>(gridDim.x) * THREADS * PIECES;
  const long long first = static_cast<long long>(blockIdx.x) * THREADS * PIECES;
#pragma unroll 1
  for (long long begin = first; begin < chunks; begin += step) {
    const long long c = begin + threadIdx.x;
    float own[PIECES][CHUNK] = {}, stream[PIECES][CHUNK] = {}, sums[PIECES][CHUNK] = {};
    load_part(x, c, chunks, size, own);
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
      Words words;
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) words.elements[j] = from_float<T>(own[p][j]);
      summands.push(p, words.of);
    }
    if (begin == first) summands.end_pushes(static_cast<int>(ceil_div(chunks - first, step)));
    if constexpr (ADDS && PIECES == 1) load_part(residual, c, chunks, size, stream);
    for (int other = 0; other < ranks; ++other) {
      if (other == rank) {
        add(own, sums);
        continue;
      }
      unsigned pulled[PIECES][Words::WORDS];
      summands.pull(other, PIECES, pulled);
#pragma unroll
      for (int p = 0; p < PIECES; ++p) {
        Words words;
#pragma unroll
        for (int w = 0; w < Words::WORDS; ++w) words.of[w] = pulled[p][w];
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) sums[p][j] += to_float(words.elements[j]);
      }
    }
    if constexpr (ADDS && PIECES > 1) load_part(residual, c, chunks, size, stream);  // for want of registers
    if constexpr (ADDS) add(stream, sums);
    store_part(sums, ADDS ? residual : x, c, chunks, size);
    if (begin + step < chunks) summands.begin_next();
  }
}

// The same without a box, for much between more than two ranks: each sums an equal part of the elements, and
// writes the sums to all (two shots).
//   in:  x [size] T, boxes [ranks + 1] addresses
//   out: x, or residual [size] T where ADDS, which all ranks have alike
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: at most MAX_BLOCKS. Block: THREADS. Shared memory: none.
// Unit of work: PART_CHUNKS chunks of a thread, THREADS apart, all of which are on their way at once.
template <typename T, bool ADDS>
__global__ void __launch_bounds__(THREADS) all_reduce_parts_kernel(ALL_REDUCE_PARTS_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  let_next_kernel_start();
  wait_for_earlier_kernels();  // of this rank; the others write here once it has told them where
  Peers peers(boxes, rank, ranks, patience, Meeting::ALL_REDUCE_PARTS);
  peers.meet(START, x, residual);
  const long long chunks = ceil_div(size, static_cast<long long>(CHUNK));
  const long long last = chunks * (rank + 1) / ranks;
  const long long step = static_cast<long long>(gridDim.x) * THREADS * PART_CHUNKS;
  for (long long c =
           chunks * rank / ranks + static_cast<long long>(blockIdx.x) * THREADS * PART_CHUNKS + threadIdx.x;
       c < last; c += step) {
    float sums[PART_CHUNKS][CHUNK] = {}, stream[PART_CHUNKS][CHUNK] = {};
    if constexpr (ADDS) load_part(residual, c, last, size, stream);
    for (int other = 0; other < ranks; ++other) {
      float values[PART_CHUNKS][CHUNK] = {};
      load_part(peers.address_of<T>(other), c, last, size, values);
      add(values, sums);
    }
    if constexpr (ADDS) add(stream, sums);
    for (int other = 0; other < ranks; ++other)
      store_part(sums, peers.address_of<T>(other, ADDS ? 1 : 0), c, last, size);
  }
  peers.meet(END);
  peers.finish();
}
