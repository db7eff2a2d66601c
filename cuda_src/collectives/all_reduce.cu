// Sums over ranks, in place and in the order of the ranks, so that all have the same bits.
#include "generated/all_reduce.cuh"
#include "peers.cuh"

// x = x of rank 0 + x of rank 1 + ..., or residual += that sum, rounded once; x then stays.
//   in:  x [size] T, boxes [ranks + 1] addresses
//   out: x, or residual [size] T where ADDS
// Layout: contiguous; 16-byte accesses where addresses allow them. At most DATA_BYTES of each rank.
// Grid: one block for each THREADS * CHUNK elements, at most MAX_BLOCKS. Block: THREADS. Shared memory: none.
// Unit of work: a chunk of a thread, which every rank copies to its box, and reads from all of them (one
// shot).
template <typename T, bool ADDS>
__global__ void __launch_bounds__(THREADS) all_reduce_kernel(ALL_REDUCE_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  Peers peers(boxes, rank, ranks, patience, Meeting::ALL_REDUCE);
  const long long i = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) * CHUNK;
  float values[CHUNK];
  if (i < size) {
    load_floats(x + i, size - i, values);
    store_floats(peers.data<T>(rank) + i, size - i, values);
  }
  peers.meet(START);
  if (i < size) {
    float sum[CHUNK];
    sum_ranks([&](int other) { return peers.data<T>(other); }, ranks, i, size, sum);
    if constexpr (ADDS) {
      load_floats(residual + i, size - i, values);
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) sum[j] += values[j];
    }
    store_floats((ADDS ? residual : x) + i, size - i, sum);
  }
  peers.finish();
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
