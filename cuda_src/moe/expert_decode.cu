// Products of few rows by experts' weights, bound by reading the weights of the experts that have any.

#include "moe/expert_decode.cuh"

constexpr int LEAD = 2;  // stages of weights that are on their way before a block finds its first rows of x

// out[p, n] = sum over k of x[source(p), k] * weight[e * out_features + n, k], + bias[e * out_features + n],
// e being the expert of row p, and source(p) p or, with `pairs`, pairs[p] / top_k. With an activation, one of
// EXPERT_*, out[p, i] = activation(y[p, i], y[p, I + i]) of that y [*, 2 I].
//   in:  x [any, in_features] T; weight [num_experts * out_features, in_features] T; bias T or null;
//        offsets [num_experts + 1] int; pairs int or null
//   out: out [num_pairs, out_features, or half of it with an activation] T
// Layout: row-major; x and weight 16-byte aligned, in_features a multiple of 8, x's rows `x_stride` apart: 0
// where all take the one row; out and bias aligned to two elements. At most MAX_EXPERTS experts.
// Grid: any number of blocks; they share the tiles evenly. Block: 256 threads.
// Shared memory: `ExpertDecodeTile.shared_bytes` in engine/ops/cuda/moe/decode.py.
// Unit of work: as in `matmul_decode_kernel`; a tile is UNITS units of the weight of one expert and up to
// TOKENS of its rows. The order of a row's sums depends on in_features alone. Where the routing is `settled`,
// written before the kernel in front began, weights are on their way before x is there. So that it is for the
// kernels behind, none begins before the routing is complete.
template <typename T, int TOKENS, int UNITS, int STAGES>
__global__ void __launch_bounds__(THREADS, 2) expert_decode_kernel(EXPERT_DECODE_PARAMS(T)) {
  using V = Variant<T, T, TOKENS, UNITS, STAGES, 1>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ unsigned starts[MAX_EXPERTS + 1];
  __shared__ int chunks[MAX_EXPERTS + 1];
  __shared__ int2 totals[WARPS];
  __shared__ float sums_of_squares[WARPS][TOKENS];
  uint4* const ring = reinterpret_cast<uint4*>(shared_memory);
  float2* const partial = reinterpret_cast<float2*>(ring + STAGES * V::LOADS * THREADS);
  const bool gated = activation != EXPERT_NONE;
  if (!settled) wait_for_earlier_kernels();
  let_next_kernel_start();
  const UsedExperts<TOKENS> experts(offsets, num_experts, starts, chunks, totals);
  const BlockTiles<TOKENS, UNITS> tiles(experts, out_features, gated);
  TilePlace<TOKENS, UNITS> place(tiles);
  const WarpSteps<V> steps(in_features);
  const NormPrologue<V> no_norm = {nullptr, nullptr, sums_of_squares, in_features, 0.0f};
  ExpertProducer<V> producer(ring, tiles, place, steps.count, {x, pairs, top_k, x_stride}, weight,
                             in_features, gated);
  producer.template fill<LEAD>(place, settled != 0);

  const ExpertEpilogue<V, BlockTiles<TOKENS, UNITS>> epilogue = {tiles, bias, out, activation};
  DecodeConsumer<V> consumer;
#pragma unroll 1
  while (place.index < tiles.end) {
    consumer.clear();
#pragma unroll 1
    for (int step = 0; step < steps.count; ++step) {
      consumer.take_step(ring, nullptr, no_norm, step, false);
      producer.refill();
      consumer.advance();
    }
    const DecodeTile tile = place.tile(tiles);
    if (place.index > tiles.begin)
      __syncthreads();  // the partial sums of the tile before may still be in use
    consumer.share_sums(partial, tile.rows);
    __syncthreads();
    epilogue.store(tile, partial);
    place.advance(tiles);
  }
}
