// Products of few rows by experts' weights in quantised blocks.

#include "generated/expert_blocks.cuh"
#include "moe/expert_blocks.cuh"

// out as `expert_decode_kernel` has it, by the elements that `dequantize_blocks_kernel` gives.
//   in:  x, bias, offsets, pairs as there; codes [num_experts * out_features, any] unsigned and headers
//        [num_experts * out_features, any] unsigned, as packed
//   out: out [num_pairs, out_features, or half of it with an activation] T
// Layout: x 16-byte aligned, in_features a multiple of 32, out and bias aligned to two elements.
// Grid: any number of blocks; they share the tiles evenly. Block: 256 threads.
// Shared memory: `BlockTile.shared_bytes` in engine/ops/cuda/quant/product.py.
// Unit of work: as in `block_matmul_kernel`; a tile is UNITS units of the weight of one expert and up to
// TOKENS of its rows. The order of a row's sums depends on in_features alone.
template <typename T, typename F, int TOKENS, int UNITS, int STAGES>
__global__ void __launch_bounds__(THREADS, TOKENS <= 16 ? 2 : 1)
    expert_block_matmul_kernel(EXPERT_BLOCK_MATMUL_PARAMS(T)) {
  using V = BlockVariant<T, T, F, TOKENS, UNITS, STAGES>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ int starts[MAX_EXPERTS + 1], first[MAX_EXPERTS + 1];
  __shared__ float sums_of_squares[WARPS][TOKENS];
  float2* const partial = reinterpret_cast<float2*>(shared_memory + STAGES * V::STAGE_BYTES);
  const bool gated = activation != EXPERT_NONE;
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const int tiles_n = ceil_div(gated ? out_features / 2 : out_features, ExpertUnits<UNITS>::columns(gated));
  const ExpertTiles tiles(offsets, num_experts, tiles_n, TOKENS, starts, first);
  const ExpertUnits<UNITS> units(tiles, out_features, gated);
  const WarpSteps<V> steps(in_features);
  const BlockSteps<V> row(in_features);
  const NormPrologue<V> no_norm = {nullptr, nullptr, sums_of_squares, in_features, 0.0f};
  ExpertBlockProducer<V> producer(shared_memory, units, row, steps.count, x, pairs, top_k, codes, headers,
                                  in_features, gated);
  producer.fill();

  const ExpertEpilogue<V, ExpertUnits<UNITS>> epilogue = {units, bias, out, activation};
  BlockConsumer<V> consumer;
#pragma unroll 1
  for (int index = units.begin; index < units.end; ++index) {
    consumer.clear();
#pragma unroll 1
    for (int step = 0; step < steps.count; ++step) {
      consumer.take_step(shared_memory, nullptr, no_norm, step, false);
      producer.refill();
      consumer.advance();
    }
    const ExpertTile tile = tiles.tile(index);
    if (index > units.begin) __syncthreads();  // the partial sums of the tile before may still be in use
    consumer.share_sums(reinterpret_cast<float*>(partial), tile.rows);
    __syncthreads();
    epilogue.store(tile, partial);
  }
}
