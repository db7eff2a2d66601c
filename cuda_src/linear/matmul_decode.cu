// Matrix product for the few rows of a decode step, bound by reading the weight once; with the norm before it
// and the activation or the residual stream behind it.

#include "generated/matmul_decode.cuh"
#include "linear/decode_product.cuh"

// A multiprocessor has room for the blocks of the next kernels, which fill their rings while this one runs.
template <int TOKENS, int UNITS>
constexpr int MIN_BLOCKS = UNITS > 6     ? 1
                           : TOKENS <= 8 ? 3
                                         : 2;

// out[m, n] = sum over k of y[m, k] * weight[n, k], + bias[n], + out[m, n] if `accumulate`; if `gated`,
// silu(g) * u (SILU_GATE) or gelu(g) * u (GELU_GATE) with g = out[m, n] and u = out[m, n + out_features / 2]
// of that. y is x, or with `norm` x / sqrt(mean(x^2) + eps) * norm. In T with the range of a float, x * norm
// is rounded to T and the sums are divided by the root, so that nothing waits for it; else y is rounded to T.
// Sums in float32. With `update`, which TOKENS = 1 with a `norm` and Out = T take, the row is the sum of x
// and RMSNorm(update), each rounded to T, and the first block stores it for later kernels.
//   in:  x [num_rows, in_features] T, num_rows <= TOKENS; update as x or null, update_norm [in_features] T of
//        it, at most SUM_VECTORS vectors of a lane; norm [in_features] T or null; weight
//        [out_features, in_features] T; bias [out_features] T or null
//   out: sum as x, neither x nor update; out [num_rows, out_features, or half of it if `gated`] Out (T or
//        float); `gated` takes no bias and does not accumulate
// Layout: row-major; x, update, sum, norms and weight 16-byte aligned, in_features a multiple of 8, out and
// its rows aligned to two elements.
// Grid: any number of blocks; they share the weight's units of 8 rows (gated: 8 gates and their ups) evenly.
// Block: 256 threads.
// Shared memory: `DecodeTile.shared_bytes` in engine/ops/cuda/linear/decode.py.
// Unit of work: a block's warps take every eighth step of k each, of UNITS
// units at a time (a tile), and are added in order at its end, so the order of a row's sums depends on
// in_features, UNITS and HALVES alone. A lane copies just the weights that it gives to the tensor cores,
// through a ring of its own, so that no barrier delays the stream: the k of an instruction may be in any
// order that is the same for x and weight, and 16 bytes of a row are what lane t needs as elements 2t, 2t+1,
// 2t+8, 2t+9 of two instructions. One row of y (TOKENS = 1) stays in shared memory; more rows of x travel
// through the ring, once a tile, and meet the norm on their way to the tensor cores, for T with the range of
// a float alone.
template <typename T, typename Out, int TOKENS, int UNITS, int STAGES, int HALVES>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS<TOKENS, UNITS>)
    matmul_decode_kernel(MATMUL_DECODE_PARAMS(T, Out)) {
  using V = CompactVariant<T, Out, TOKENS, UNITS, STAGES, HALVES>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ float sums_of_squares[WARPS][TOKENS];
  const BlockUnits<UNITS> units(out_features, gated);
  const WarpSteps<V> steps(in_features);
  uint4* const ring = reinterpret_cast<uint4*>(shared_memory);
  float2* const partial = reinterpret_cast<float2*>(ring + STAGES * V::LOADS * THREADS);
  uint4* const gains = reinterpret_cast<uint4*>(partial + WARPS * UNITS * V::GROUPS * V::SUM_LANES) +
                       warp_of_thread() * steps.vectors;
  // This warp's vectors of the one resident row.
  uint4* const y = gains + (norm == nullptr ? 0 : WARPS * steps.vectors);

  DecodeProducer<V> producer(ring, units, steps.count, x, weight, num_rows, in_features, gated);
  const NormPrologue<V> prologue = {norm, gains, sums_of_squares, in_features, eps};
  const RowSum<V> row_sum = {update, update_norm, sum, in_features, update_eps};
  if constexpr (V::ADDS) row_sum.load_gains(y, steps);
  prologue.load_gains(steps);
  producer.fill_weights();
  let_next_kernel_start();
  wait_for_earlier_kernels();
  if constexpr (V::RESIDENT) {
    if (V::ADDS && update != nullptr) {
      prologue.load_sum(x, row_sum, y, steps);
    } else {
      prologue.load_row(x, y, steps);
    }
  } else {
    producer.fill_x();
    if (norm != nullptr) copy_async_wait<2 * STAGES>();
  }
  __syncwarp();  // y and gains are there for all lanes

  DecodeConsumer<V> consumer;
#pragma unroll 1
  for (int tile = 0; tile < units.num_tiles; ++tile) {
    const int tile_unit = units.begin + tile * units.a_tile;
    DecodeEpilogue<V> epilogue(units, bias, out, units.features, num_rows, accumulate, gated);
    epilogue.fetch(tile_unit);

    consumer.clear();
#pragma unroll 1
    for (int step = 0; step < steps.count; ++step) {
      consumer.take_step(ring, y, prologue, step, tile == 0);
      producer.refill();
      consumer.advance();
    }

    if (tile > 0) __syncthreads();  // the partial sums of the tile before may still be in use
    if constexpr (!V::RESIDENT && V::SCALES_SUMS) {
      if (norm != nullptr && tile == 0) consumer.share_squares(sums_of_squares);
    }
    consumer.share_sums(partial, num_rows);
    __syncthreads();
    epilogue.store(tile_unit, partial, prologue);
  }
}
