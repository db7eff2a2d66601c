// Sums over ranks, in place and in the order of the ranks, so that all have the same bits.
#include "generated/all_reduce.cuh"
#include "packets.cuh"

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
  wait_for_earlier_kernels();
  const Packets<T> packets(boxes, rank, ranks, patience, Meeting::ALL_REDUCE);
  const long long i = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) * CHUNK;
  float own[CHUNK];
  if (i < size) {
    load_updated_floats(x + i, size - i, own);
    packets.push(0, own);
  }
  __syncthreads();  // all is sent before any thread waits
  if (i < size) {
    float stream[CHUNK], sum[CHUNK] = {};
    if constexpr (ADDS) load_updated_floats(residual + i, size - i, stream);
    for (int other = 0; other < ranks; ++other) {
      typename Packets<T>::Words words[1];
      if (other != rank) packets.pull(other, [](int) { return true; }, words);
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) sum[j] += other == rank ? own[j] : to_float(words[0].elements[j]);
    }
    if constexpr (ADDS) {
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) sum[j] += stream[j];
    }
    store_floats((ADDS ? residual : x) + i, size - i, sum);
  }
  packets.finish();
}

// The same for any size and without a box: each rank sums an equal part of the elements, and writes the sums
// to all ranks (two shots).
//   in:  x [size] T, boxes [ranks + 1] addresses
//   out: x [size] T
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: at most MAX_BLOCKS. Block: THREADS. Shared memory: none.
// Unit of work: chunks of a thread, the grid's threads apart.
template <typename T>
__global__ void __launch_bounds__(THREADS) all_reduce_parts_kernel(ALL_REDUCE_PARTS_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  Peers peers(boxes, rank, ranks, patience, Meeting::ALL_REDUCE_PARTS);
  peers.meet(START, x);
  const long long chunks = ceil_div(size, static_cast<long long>(CHUNK));
  const long long last = chunks * (rank + 1) / ranks;
  const long long step = static_cast<long long>(gridDim.x) * THREADS;
  for (long long c = chunks * rank / ranks + static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
       c < last; c += step) {
    const long long i = c * CHUNK;
    float sum[CHUNK];
    sum_ranks([&](int other) { return peers.address_of<T>(other); }, ranks, i, size, sum);
    for (int other = 0; other < ranks; ++other) store_floats(peers.address_of<T>(other) + i, size - i, sum);
  }
  peers.meet(END);
  peers.finish();
}
