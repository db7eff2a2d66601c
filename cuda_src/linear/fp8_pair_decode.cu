// Product of a few wide e4m3 rows by an e4m3 weight: pairs of blocks share its units, each with half of k.

#include "cluster.cuh"
#include "fp8_product.cuh"
#include "generated/fp8_pair_decode.cuh"

constexpr int PAIR_WARPS = WARPS / PAIR;  // of a block

// Of the tiles of a pair, UNITS_A_TILE in each. A block's warps have parts of k of their own.
template <typename T, int UNITS_A_TILE>
struct PairVariant : Fp8Variant<T, T, PAIR_TOKENS, UNITS_A_TILE, PAIR_STAGES, false> {
  using Base = Fp8Variant<T, T, PAIR_TOKENS, UNITS_A_TILE, PAIR_STAGES, false>;
  static constexpr int BLOCK_THREADS = PAIR_WARPS * WARP_SIZE;
  static constexpr int ITEMS = ceil_div(UNITS_A_TILE * Base::GROUPS * WARP_SIZE, BLOCK_THREADS);
  static __device__ __forceinline__ int part() { return blockIdx.x % PAIR * PAIR_WARPS + warp_of_thread(); }
};

// out[m, n] = sum over k of y[m, k] * weight[n, k], times the scales, + bias[n], + out[m, n] if `accumulate`:
// bit for bit what `fp8_decode_kernel` gives.
//   in:  values [num_rows, in_features] e4m3, num_rows <= PAIR_TOKENS; x_scales, weight, weight_scales and
//        bias as it has them
//   out: out [num_rows, out_features] T, rows `out_stride` apart
// Layout: as there.
// Grid: any number of pairs of blocks, which are clusters; pairs share the weight's units of 8 rows evenly.
// Block: 128 threads.
// Shared memory: `shared_bytes` in engine/ops/cuda/fp8/pair_decode.py.
// Unit of work: as of `fp8_decode_kernel`, of which a block's four warps are four of the eight. So a
// multiprocessor reads half as much of x for as much of the weight. Each block adds up half of a tile's
// units, whose sums the other leaves in its shared memory.
template <typename T, bool BLOCKS>
__global__ void __launch_bounds__(PAIR_WARPS* WARP_SIZE, 1)
    fp8_pair_decode_kernel(FP8_PAIR_DECODE_PARAMS(T)) {
  using V = PairVariant<T, PAIR_UNITS>;
  using Own = PairVariant<T, PAIR_UNITS / PAIR>;  // what a block adds up
  using Pair = Cluster<PAIR>;
  static_assert(PAIR == 2, "the kernel names both halves");
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const int pairs = in_features / 2, rank = blockIdx.x % PAIR;
  const int pair = blockIdx.x / PAIR, num_pairs = gridDim.x / PAIR;
  const BlockUnits<V::UNITS> units(out_features, 0, pair, num_pairs);
  const BlockUnits<Own::UNITS> own(out_features, 0, pair, num_pairs);
  const WarpSteps<V> steps(pairs);
  uint4* const ring = reinterpret_cast<uint4*>(shared_memory);
  float* const partial = reinterpret_cast<float*>(ring + V::STAGES * V::LOADS * V::BLOCK_THREADS);
  float* const of_part = partial + V::part() * (Own::UNITS * PARTIAL_PAIRS<V> * 2);

  Pair::arrive();
  DecodeProducer<V> producer(ring, units, steps.count, reinterpret_cast<const T*>(values),
                             reinterpret_cast<const T*>(weight), num_rows, pairs, 0);
  producer.fill_weights();
  let_next_kernel_start();
  wait_for_earlier_kernels();
  producer.fill_x();
  Pair::wait();  // the other block runs: its memory may be touched

  Fp8Consumer<V, BLOCKS> consumer(units, x_scales, weight_scales, nullptr, 1.0f, num_rows, in_features);
#pragma unroll 1
  for (int tile = 0; tile < units.num_tiles; ++tile) {
    const int tile_unit = units.begin + tile * units.a_tile, own_unit = tile_unit + rank * Own::UNITS;
    RowsEpilogue<Own> epilogue(own, bias, out, out_stride, num_rows, accumulate, 0);
    epilogue.fetch(own_unit);

    consumer.begin(tile_unit, 0);
#pragma unroll 1
    for (int step = 0; step < steps.count; ++step) {
      consumer.take_step(ring, nullptr, step);
      producer.refill();
      consumer.advance();
    }

    if (tile > 0) Pair::sync();  // the partial sums of the tile before may still be in use
    consumer.template share_sums<0, Own::UNITS>(Pair::at(of_part, 0));
    consumer.template share_sums<Own::UNITS, V::UNITS>(Pair::at(of_part, 1));
    Pair::sync();
    epilogue.store(own_unit, partial);
  }
}
