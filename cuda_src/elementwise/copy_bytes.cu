// Bytes between the device and page-locked memory of the host, which are read and written over the bus.
#include "common.cuh"
#include "generated/copy_bytes.cuh"

// target[i] = source[i]
//   in:  source [size] bytes
//   out: target [size] bytes
// Layout: contiguous; both begin at a multiple of a piece.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: PIECES pieces per thread, all of them loaded before the first is stored, so that their
// latencies on the bus overlap; and in the first block the bytes behind the last whole piece, one per thread.
template <typename Piece>
__global__ void copy_bytes_kernel(COPY_BYTES_PARAMS) {
  static_assert(sizeof(Piece) <= 16, "a thread moves at most 16 bytes at a time");
  const long long count = size / static_cast<int>(sizeof(Piece));
  const long long first = static_cast<long long>(blockIdx.x) * PIECES * blockDim.x + threadIdx.x;
  const Piece* from = reinterpret_cast<const Piece*>(source);
  Piece* to = reinterpret_cast<Piece*>(target);
  Piece pieces[PIECES];
#pragma unroll
  for (int j = 0; j < PIECES; ++j) {
    const long long i = first + j * static_cast<long long>(blockDim.x);
    if (i < count) pieces[j] = from[i];
  }
#pragma unroll
  for (int j = 0; j < PIECES; ++j) {
    const long long i = first + j * static_cast<long long>(blockDim.x);
    if (i < count) to[i] = pieces[j];
  }
  const long long rest = count * static_cast<int>(sizeof(Piece)) + threadIdx.x;
  if (blockIdx.x == 0 && rest < size) target[rest] = source[rest];
}
