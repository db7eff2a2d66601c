// Matrix product for the few rows of a decode step in the order of sums of the kernels for many rows:
// ascending groups of 16 elements of k in one chain. See docs/kernels/order-of-sums.md.

#include "generated/ordered_matmul.cuh"
#include "linear/ordered_product.cuh"

// out[m, n] = sum over k of y[m, k] * weight[n, k], + bias[n], + out[m, n] if `accumulate`; if `gated`,
// silu(g) * u with g = out[m, n] and u = out[m, n + out_features / 2] of that. y is x, or with `norm` what
// rmsnorm_kernel makes of it, bit for bit. Sums in float32, rounded once.
//   in:  x [num_rows, in_features] T, num_rows <= TOKENS; norm [in_features] T or null; weight
//        [out_features, in_features] T; bias [out_features] T or null
//   out: out [num_rows, out_features, or half of it if `gated`] Out (T or float); `gated` takes no bias, does
//        not accumulate and needs two units
// Layout: row-major; x, norm and weight 16-byte aligned, in_features a multiple of 8, out and its rows
// aligned to two elements.
// Grid: any number of blocks; they share the weight's groups of units evenly.
// Block: 32 * WARPS threads. Shared memory: `OrderedTile.shared_bytes` in engine/ops/cuda/linear/ordered.py:
// rings of WARPS * STAGES * UNITS * STAGE_BYTES, then `x_buffers` chunks of num_rows rows of CHUNK_K elements
// of y.
// Unit of work: a warp UNITS units of 8 rows of the weight (gated: 8 gates and their ups) over all of k, with
// a ring of its own. With as many x_buffers as y has chunks, y stays in shared memory; with fewer, at least
// STREAMED_BUFFERS, y comes past all warps once for each group that they have, and they meet at the end of
// each chunk. `norm` needs all of y. norm_threads: of a block of rmsnorm_kernel.
template <typename T, typename Out, int TOKENS, int UNITS, int WARPS, int STAGES>
__global__ void __launch_bounds__(32 * WARPS, TOKENS <= 16 ? 2 : 1)
    ordered_matmul_kernel(ORDERED_MATMUL_PARAMS(T, Out)) {
  using V = Variant<T, Out, TOKENS, UNITS, WARPS, STAGES>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ float norm_parts[TOKENS][WARP_SIZE];
  const int warp = threadIdx.x / WARP_SIZE;
  const int steps = ceil_div(in_features, STEP_K);
  const int num_chunks = ceil_div(steps, CHUNK_STEPS);
  const bool streams = x_buffers < num_chunks;
  T* const chunks = reinterpret_cast<T*>(shared_memory + WARPS * V::RING_BYTES);
  const unsigned ring = shared_address(shared_memory + warp * V::RING_BYTES);

  const BlockGroups<V> groups(out_features, gated);
  WeightRing<V> weights(ring, groups, weight, steps, in_features, gated);
  const RowChunks<V> rows{chunks, x, num_rows, in_features};
  OrderedNorm<V> prologue{norm, chunks, norm_parts, num_rows, in_features, norm_threads, eps};
  prologue.load_gains();
  weights.fill();
  let_next_kernel_start();
  wait_for_earlier_kernels();
  rows.load(0, 0);
  copy_async_commit();
#pragma unroll 1
  for (int chunk = 1; chunk < min(num_chunks, x_buffers); ++chunk) rows.load(chunk, chunk);
  copy_async_commit();
  if (norm != nullptr) {
    copy_async_wait<0>();
    __syncthreads();
    prologue.apply();
  } else {
    copy_async_wait<1>();
  }
  __syncthreads();

  OrderedConsumer<V> consumer(ring, shared_address(chunks), num_rows);
  consumer.load_half(0, 0);
  int chunk = 0;   // of those that came past, in all rounds
  int buffer = 0;  // that it is in
#pragma unroll 1
  for (int round = 0; round < groups.rounds; ++round) {
    const int group = groups.begin + round * WARPS + warp;
    const bool active = group < groups.end;
    if (!active && !streams && round > 0) break;
    OrderedEpilogue<V> epilogue(groups, group, active, bias, out, num_rows, accumulate, gated);
    consumer.clear();
    int steps_left = min(steps, CHUNK_STEPS);  // of the chunk
    int chunk_of_row = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if (active) {
        consumer.load_half(1, 1);
        consumer.multiply(0);
      }
      copy_async_wait<STAGES - 2>();
      const bool chunk_ends = --steps_left == 0;
      if (chunk_ends && (streams || chunk == 0)) {
        // The first chunk's successors were copied together; later ones are older than the weights waited
        // for.
        if (chunk == 0) copy_async_wait<CHUNK_STEPS - 1>();
        __syncthreads();
        if (streams) {
          const int ahead = chunk_of_row + x_buffers;
          const int next_of_row = ahead < num_chunks ? ahead : ahead - num_chunks;
          if (ahead < num_chunks || round + 1 < groups.rounds) rows.load(next_of_row, buffer);
        }
      } else {
        __syncwarp();
      }
      weights.refill();
      consumer.advance_step();
      if (chunk_ends) {
        ++chunk;
        if (++chunk_of_row == num_chunks) chunk_of_row = 0;
        buffer = buffer + 1 == x_buffers || (!streams && chunk_of_row == 0) ? 0 : buffer + 1;
        consumer.begin_chunk(buffer);
        steps_left = min(steps - chunk_of_row * CHUNK_STEPS, CHUNK_STEPS);
      }
      if (active) {
        consumer.load_half(0, 0);
        consumer.multiply(1);
      }
    }
    if (active) epilogue.store(consumer.sums);
  }
}
