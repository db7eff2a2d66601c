// Sums over ranks, in place and in the order of the ranks, so that all have the same bits.
#include "generated/all_reduce.cuh"
#include "summands.cuh"

// x = x of rank 0 + x of rank 1 + ..., or residual += that sum, rounded once; x then stays.
//   in:  x [size] T, boxes [ranks + 1] addresses
//   out: x, or residual [size] T where ADDS
// Layout: contiguous; 16-byte accesses where addresses allow them. At most MAX_BLOCKS blocks' elements.
// Grid: one block for each THREADS * CHUNK elements. Block: THREADS. Shared memory: none.
// Unit of work: a chunk of a thread, which every rank sends to all others (one shot).
template <typename T, bool ADDS>
__global__ void __launch_bounds__(THREADS) all_reduce_kernel(ALL_REDUCE_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  let_next_kernel_start();
  Summands summands(boxes, rank, ranks, patience, Meeting::ALL_REDUCE);
  wait_for_earlier_kernels();
  summands.begin();
  const long long i = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) * CHUNK;
  float own[CHUNK];
  if (i < size) {
    load_updated_floats(x + i, size - i, own);
    ChunkWords<T> words;
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) words.elements[j] = from_float<T>(own[j]);
    summands.push(0, words.of);
  }
  summands.end_pushes();
  if (i < size) {
    float stream[CHUNK], sum[CHUNK] = {};
    if constexpr (ADDS) load_updated_floats(residual + i, size - i, stream);
    for (int other = 0; other < ranks; ++other) {
      unsigned pulled[1][ChunkWords<T>::WORDS];
      if (other != rank) summands.pull(other, 1, pulled);
      ChunkWords<T> words;
#pragma unroll
      for (int w = 0; w < ChunkWords<T>::WORDS; ++w) words.of[w] = pulled[0][w];
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) sum[j] += other == rank ? own[j] : to_float(words.elements[j]);
    }
    if constexpr (ADDS) {
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) sum[j] += stream[j];
    }
    store_floats((ADDS ? residual : x) + i, size - i, sum);
  }
}

// Chunks chunk, chunk + THREADS, ... of x [size], as far as they are before `last`.
template <typename T>
__device__ __forceinline__ void load_part(const T* x, long long chunk, long long last, long long size,
                                          float (&values)[PART_CHUNKS][CHUNK]) {
#pragma unroll
  for (int p = 0; p < PART_CHUNKS; ++p, chunk += THREADS) {
    if (chunk < last) load_updated_floats(x + chunk * CHUNK, size - chunk * CHUNK, values[p]);
  }
}

template <typename T>
__device__ __forceinline__ void store_part(const float (&values)[PART_CHUNKS][CHUNK], T* x, long long chunk,
                                           long long last, long long size) {
#pragma unroll
  for (int p = 0; p < PART_CHUNKS; ++p, chunk += THREADS) {
    if (chunk < last) store_floats(x + chunk * CHUNK, size - chunk * CHUNK, values[p]);
  }
}

__device__ __forceinline__ void add(const float (&values)[PART_CHUNKS][CHUNK],
                                    float (&sums)[PART_CHUNKS][CHUNK]) {
#pragma unroll
  for (int p = 0; p < PART_CHUNKS; ++p) {
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) sums[p][j] += values[p][j];
  }
}

// The same for any size and without a box: each rank sums an equal part of the elements, and writes the sums
// to all ranks (two shots).
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
