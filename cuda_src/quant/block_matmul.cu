// Matrix product of a few rows by a weight in the quantised blocks of GGUF files, bound by reading the weight
// once; with the norm before it and the activation or the residual stream behind it.

#include "generated/block_matmul.cuh"
#include "quant/block_product.cuh"
#include "quant/block_row.cuh"

constexpr int FIXED_BATCH = 8;  // of the one row: vectors that a lane has on their way at once

// out[m, n] = sum over k of y[m, k] * weight[n, k], + bias[n], + out[m, n] if `accumulate`; gated and with a
// norm as `matmul_decode_kernel` has it. The weight's elements are those of `dequantize_blocks_kernel` in T.
//   in:  x [num_rows, in_features] T, num_rows <= TOKENS; norm [in_features] T or null; bias [out_features] T
//   or
//        null; codes [out_features, any] unsigned and headers [out_features, any] unsigned, as packed
//   out: out [num_rows, out_features, or half of it if `gated`] Out (T or float), rows `out_stride` apart;
//   `gated`
//        takes no bias and does not accumulate
// Layout: x and norm 16-byte aligned, in_features a multiple of 32, out and its rows aligned to two elements.
// `followed` and `follows` as of `sm90_block_rows_kernel`.
// Grid: any number of blocks; they share the weight's units of 8 rows (gated: 8 gates and their ups) evenly.
// Block: 256 threads. Shared memory: `BlockTile.shared_bytes` in engine/ops/cuda/quant/product.py.
// Unit of work: as in `matmul_decode_kernel`; a warp's step is 128 elements, of which a lane has 32 of each
// row in a row. The order of a row's sums depends on in_features alone.
template <typename T, typename Out, typename F, int TOKENS, int UNITS, int STAGES>
__global__ void __launch_bounds__(THREADS, TOKENS <= 16 ? 2 : 1)
    block_matmul_kernel(BLOCK_MATMUL_PARAMS(T, Out)) {
  using V = BlockVariant<T, Out, F, TOKENS, UNITS, STAGES>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  constexpr bool IN_FIXED_POINT = V::RESIDENT && HAS_INTEGERS<F>;
  __shared__ float sums_of_squares[WARPS][TOKENS];
  const BlockUnits<UNITS> units(out_features, gated);
  const WarpSteps<V> steps(in_features);
  const BlockSteps<V> row(in_features);
  float2* const partial = reinterpret_cast<float2*>(shared_memory + STAGES * V::STAGE_BYTES);
  uint4* const rows = reinterpret_cast<uint4*>(partial + WARPS * UNITS * V::GROUPS * V::SUM_LANES);
  // This warp's vectors of the one resident row, and of the norm's weight, which none in fixed point needs.
  uint4* const y = rows + warp_of_thread() * steps.vectors;
  uint4* const gains = y + (IN_FIXED_POINT || !V::RESIDENT ? 0 : WARPS * steps.vectors);
  using Group = RowGroupOf<F>;
  Group* const groups =
      reinterpret_cast<Group*>(rows + WARPS * steps.vectors) + warp_of_thread() * (steps.vectors / 4);
  __shared__ __align__(64) uint4 zeros[4];

  const NormPrologue<V> prologue = {norm, gains, sums_of_squares, in_features, eps};
  RowPrologue<T, F, WARPS, FIXED_BATCH> fixed_row(x, IN_FIXED_POINT ? norm : nullptr, &sums_of_squares[0][0],
                                                  in_features, eps, steps.vectors);
  if constexpr (!IN_FIXED_POINT) prologue.load_gains(steps);
  BlockProducer<V> producer(shared_memory, units, row, steps.count, x, codes, headers, num_rows, in_features,
                            gated);
  producer.fill_weights();
  if constexpr (IN_FIXED_POINT) {
    if (threadIdx.x < 4) zeros[threadIdx.x] = make_uint4(0, 0, 0, 0);
    __syncthreads();
  }
  if (!followed) let_next_kernel_start();
  if (!follows) wait_for_earlier_kernels();
  if (followed) let_next_kernel_start();
  if constexpr (IN_FIXED_POINT) {
    fixed_row.take(y, groups);
  } else if constexpr (V::RESIDENT) {
    prologue.load_row(x, y, steps);
  } else {
    producer.fill_x();
    if (norm != nullptr) copy_async_wait<2 * STAGES>();
  }
  __syncwarp();  // y and gains are there for all lanes
  producer.measure_units();
  auto consumer = ConsumerFor<V, IN_FIXED_POINT>::make(shared_memory, y, groups, zeros);
#pragma unroll 1
  for (int tile = 0; tile < units.num_tiles; ++tile) {
    const int tile_unit = units.begin + tile * units.a_tile;
    DecodeEpilogue<V> epilogue(units, bias, out, out_stride, num_rows, accumulate, gated);
    epilogue.fetch(tile_unit);

    if constexpr (IN_FIXED_POINT) {
      consumer.begin_tile(min(units.a_tile, units.end - tile_unit), gated);
    } else {
      consumer.clear();
    }
#pragma unroll 1
    for (int step = 0; step < steps.count; ++step) {
      if constexpr (IN_FIXED_POINT) {
        if (tile == 0) fixed_row.fix_until(step, y, groups);
      }
      consumer.take_step(shared_memory, y, prologue, step, tile == 0);
      producer.refill();
      consumer.advance();
    }

    if (tile > 0) __syncthreads();  // the partial sums of the tile before may still be in use
    if constexpr (IN_FIXED_POINT) {
      if (tile == 0) fixed_row.share_squares();
    } else if constexpr (!V::RESIDENT && V::SCALES_SUMS) {
      if (norm != nullptr && tile == 0) consumer.share_squares(sums_of_squares);
    }
    consumer.share_sums(reinterpret_cast<float*>(partial), num_rows);
    __syncthreads();
    epilogue.store(tile_unit, partial, prologue);
  }
  if (follows) wait_for_earlier_kernels();
}
