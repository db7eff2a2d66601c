// What ranks give one another without a sum.
#include "collectives/packets.cuh"
#include "generated/exchange.cuh"

// out[row, first + column] = x[row, column], `out` being that of rank 0.
//   in:  x [rows, width] float, boxes [ranks + 1] addresses
//   out: out [rows, whole] float; null but on rank 0
// Layout: contiguous.
// Grid: at most MAX_BLOCKS, the same on all ranks. Block: THREADS. Shared memory: none.
// Unit of work: elements of a thread, the grid's threads apart.
__global__ void __launch_bounds__(THREADS) gather_columns_kernel(GATHER_COLUMNS_PARAMS) {
  Peers peers(boxes, rank, ranks, patience, Meeting::GATHER_COLUMNS);
  peers.meet(START, out);
  float* target = peers.address_of<float>(0) + first;
  const long long size = static_cast<long long>(rows) * width;
  const long long step = static_cast<long long>(gridDim.x) * THREADS;
  for (long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x; i < size; i += step) {
    const long long row = i / width;
    target[row * whole + (i - row * width)] = x[i];
  }
  peers.meet(END);
  peers.finish();
}

// x = x of rank 0.
//   in:  x [size] int32, boxes [ranks + 1] addresses
//   out: x [size] int32
// Layout: contiguous.
// Grid: 1. Block: THREADS. Shared memory: none.
// Unit of work: elements of a thread, the block's threads apart.
__global__ void __launch_bounds__(THREADS) broadcast_kernel(BROADCAST_PARAMS) {
  Peers peers(boxes, rank, ranks, patience, Meeting::BROADCAST);
  peers.meet(START, x);
  const int* source = peers.address_of<int>(0);
  if (rank != 0) {
    for (int i = threadIdx.x; i < size; i += THREADS) x[i] = __ldcg(source + i);
  }
  peers.meet(END);
  peers.finish();
}

// x = the largest of all ranks' x.
//   in:  x [size] uint64, boxes [ranks + 1] addresses
//   out: x [size] uint64
// Layout: contiguous.
// Grid: ceil(size / THREADS), at most MAX_BLOCKS. Block: THREADS. Shared memory: none.
// Unit of work: an element of a thread, which every rank sends to all others.
__global__ void __launch_bounds__(THREADS) all_reduce_max_kernel(ALL_REDUCE_MAX_PARAMS) {
  let_next_kernel_start();
  Packets packets(boxes, rank, ranks, patience, Meeting::ALL_REDUCE_MAX);
  wait_for_earlier_kernels();
  packets.begin();
  const int i = blockIdx.x * THREADS + threadIdx.x;
  unsigned long long largest = 0;
  if (i < size) {
    largest = load_updated(x + i);
    packets.push(static_cast<unsigned>(largest), static_cast<unsigned>(largest >> 32));
  }
  packets.end_pushes();
  if (i < size) {
    for (int other = 0; other < ranks; ++other) {
      if (other == rank) continue;
      unsigned low, high;
      packets.pull(other, low, high);
      const unsigned long long theirs = static_cast<unsigned long long>(high) << 32 | low;
      largest = theirs > largest ? theirs : largest;
    }
    x[i] = largest;
  }
}

// out[t] = ids[t] - first, or LARGEST_ID where that is negative. Where `sampled` is given, a negative id -1 -
// n stands for sampled[n].
//   in:  ids [size] int32, sampled [any] int32 or null
//   out: out [size] int32
// Layout: contiguous.
// Grid: ceil(size / THREADS). Block: THREADS. Shared memory: none.
// Unit of work: one thread an id.
__global__ void __launch_bounds__(THREADS) own_ids_kernel(OWN_IDS_PARAMS) {
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= size) return;
  int id = load_updated(ids + i);
  if (id < 0 && sampled != nullptr) id = load_updated(sampled - 1 - id);
  out[i] = id < first ? LARGEST_ID : id - first;  // `first` is at least 0
}
