// Products of one row around a sum over ranks, which the second takes from where the first sent it; see
// linear/matmul_decode.cu, whose parts they have.
#include "collectives/rank_row.cuh"
#include "generated/products.cuh"

// Registers leave room for blocks of the next kernels, which fill their rings while this one runs.
template <int UNITS>
constexpr int MIN_SENDERS = UNITS > 4 ? 2 : 3;
constexpr int MIN_TAKERS = 2;

// out[n] = sum over k of x[k] * weight[n, k], + bias[n], rounded to T: this rank's part of a sum, which is
// sent to all others. Sums in float32.
//   in:  x [in_features] T, weight [out_features, in_features] T, bias [out_features] T or null, boxes
//        [ranks + 1] addresses
//   out: out [out_features] T
// Layout: row-major; x and weight 16-byte aligned, in_features and out_features multiples of 8, at most
// 2 * ROW_PACKETS out_features.
// Grid: any number of blocks; they share the weight's units of 8 rows evenly. Block: 256 threads.
// Shared memory: `DecodeTile.shared_bytes` in engine/ops/cuda/linear/decode.py.
// Unit of work: as matmul_decode_kernel's of one row.
template <typename T, int UNITS, int STAGES>
__global__ void __launch_bounds__(THREADS, MIN_SENDERS<UNITS>)
    matmul_to_ranks_kernel(MATMUL_TO_RANKS_PARAMS(T)) {
  using V = CompactVariant<T, T, 1, UNITS, STAGES, HALVES>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ float sums_of_squares[WARPS][1];
  const BlockUnits<UNITS> units(out_features, 0);
  const WarpSteps<V> steps(in_features);
  uint4* const ring = reinterpret_cast<uint4*>(shared_memory);
  float2* const partial = reinterpret_cast<float2*>(ring + STAGES * V::LOADS * THREADS);
  uint4* const y = reinterpret_cast<uint4*>(partial + WARPS * UNITS * V::SUM_LANES) +
                   warp_of_thread() * steps.vectors;  // this warp's vectors of x

  DecodeProducer<V> producer(ring, units, steps.count, x, weight, 1, in_features, 0);
  const NormPrologue<V> prologue = {nullptr, nullptr, sums_of_squares, in_features, 0.0f};
  RankRows rows(boxes, half, rank, ranks, 0);
  producer.fill_weights();
  let_next_kernel_start();
  wait_for_earlier_kernels();
  rows.begin_to_send();
  prologue.load_row(x, y, steps);
  __syncwarp();  // y is there for all lanes

  DecodeConsumer<V> consumer;
#pragma unroll 1
  for (int tile = 0; tile < units.num_tiles; ++tile) {
    const int tile_unit = units.begin + tile * units.a_tile;
    RankEpilogue<V> epilogue(units, bias, out, out_features, 1, 0, 0);
    epilogue.fetch(tile_unit);
    consumer.clear();
#pragma unroll 1
    for (int step = 0; step < steps.count; ++step) {
      consumer.take_step(ring, y, prologue, step, false);
      producer.refill();
      consumer.advance();
    }
    if (tile > 0) __syncthreads();  // the partial sums of the tile before may still be in use
    consumer.share_sums(partial, 1);
    __syncthreads();
    epilogue.send(tile_unit, partial, prologue, rows, out);
  }
  rows.note_sent();
}

// out[n] = sum over k of y[k] * weight[n, k], + bias[n]; if `gated`, silu(g) * u (SILU_GATE) or gelu(g) * u
// (GELU_GATE) with g = out[n] and u = out[n + out_features / 2] of that. y = row / sqrt(mean(row^2) + eps) *
// norm, and row = x + the sum of all ranks' updates, which matmul_to_ranks_kernel sent: added in float32 in
// the order of the ranks, and rounded to T once. row * norm is rounded to T, and the sums are divided by the
// root. The first block stores the row for later kernels.
//   in:  x, update [in_features] T, norm [in_features] T, weight [out_features, in_features] T, bias
//        [out_features] T or null, boxes [ranks + 1] addresses
//   out: sum [in_features] T, neither x nor update; out [out_features, or half of it if `gated`] T
// Layout: row-major; x, update, sum, norm and weight 16-byte aligned, in_features a multiple of 8, at most
// VECTORS vectors of eight for each lane.
// Grid: any number of blocks; they share the weight's units of 8 rows (gated: 8 gates and their ups) evenly.
// Block: 256 threads. Shared memory: `DecodeTile.shared_bytes` in engine/ops/cuda/linear/decode.py.
// Unit of work: as matmul_decode_kernel's of one row. Every block adds up the whole row.
template <typename T, int UNITS, int STAGES, int VECTORS>
__global__ void __launch_bounds__(THREADS, MIN_TAKERS) matmul_of_ranks_kernel(MATMUL_OF_RANKS_PARAMS(T)) {
  using V = CompactVariant<T, T, 1, UNITS, STAGES, HALVES>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ float sums_of_squares[WARPS][1];
  const BlockUnits<UNITS> units(out_features, gated);
  const WarpSteps<V> steps(in_features);
  uint4* const ring = reinterpret_cast<uint4*>(shared_memory);
  float2* const partial = reinterpret_cast<float2*>(ring + STAGES * V::LOADS * THREADS);
  uint4* const y = reinterpret_cast<uint4*>(partial + WARPS * UNITS * V::SUM_LANES) +
                   warp_of_thread() * steps.vectors;  // this warp's vectors of the row

  DecodeProducer<V> producer(ring, units, steps.count, x, weight, 1, in_features, gated);
  const NormPrologue<V> prologue = {norm, nullptr, sums_of_squares, in_features, eps};
  RankSum<V, VECTORS> rank_sum = {x, update, sum};
  RankRows rows(boxes, half, rank, ranks, patience);
  rank_sum.load_gains(norm, steps, in_features);
  producer.fill_weights();
  let_next_kernel_start();
  wait_for_earlier_kernels();
  rows.begin_to_take();
  const float squares = warp_sum(rank_sum.load(rows, rank, ranks, y, steps, in_features));
  if (lane_of_thread() == 0) sums_of_squares[warp_of_thread()][0] = squares;
  rows.note_taken();
  __syncwarp();  // y is there for all lanes

  DecodeConsumer<V> consumer;
#pragma unroll 1
  for (int tile = 0; tile < units.num_tiles; ++tile) {
    const int tile_unit = units.begin + tile * units.a_tile;
    DecodeEpilogue<V> epilogue(units, bias, out, units.features, 1, 0, gated);
    epilogue.fetch(tile_unit);
    consumer.clear();
#pragma unroll 1
    for (int step = 0; step < steps.count; ++step) {
      consumer.take_step(ring, y, prologue, step, false);
      producer.refill();
      consumer.advance();
    }
    if (tile > 0) __syncthreads();  // the partial sums of the tile before may still be in use
    consumer.share_sums(partial, 1);
    __syncthreads();
    epilogue.store(tile_unit, partial, prologue);
  }
}
