// Matrix product of one row by a weight in the quantised blocks of GGUF files, bound by reading the weight
// once; with the norm before it and the activation or the residual stream behind it. From sm_90 on.

#include "generated/sm90_block_row.cuh"
#include "sm90_block_row.cuh"

// out[n] = sum over k of y[k] * weight[n, k], + bias[n], + out[n] if `accumulate`; gated and with a norm as
// `matmul_decode_kernel` has it. y is in fixed point, see block_row.cuh.
//   in:  x [in_features] T; norm [in_features] T or null; bias [out_features] T or null; codes [out_features,
//        any] unsigned and headers [out_features, any] unsigned, as packed
//   out: out [out_features, or half of it if `gated`] Out (T or float); `gated` takes no bias and does not
//        accumulate
// Layout: x, norm, codes and headers 16-byte aligned, and so each row of the headers; in_features a multiple
// of 32.
// Grid: any number of blocks; they share the weight's tiles of 16 rows (gated: 8 gates and their ups) evenly.
// Block: 512 threads; two fit a multiprocessor, of this kernel and the next, so that the ring of that one
// fills while this one ends. Shared memory: `shared_bytes` in engine/ops/cuda/quant/sm90_row.py.
// Unit of work: an item, 2,048 elements of the 16 rows of a tile, comes by bulk copies into a ring of
// `stages`; each of 16 warps takes 128 elements of it. No barrier joins the warps: one of them adds up the
// sums of a tile, and one starts the copies for the item before once all have used it, while the others go
// on. The order of a row's sums depends on in_features alone.
template <typename T, typename Out, typename F>
__global__ void __launch_bounds__(ROW_THREADS, 2) sm90_block_row_kernel(SM90_BLOCK_ROW_PARAMS(T, Out)) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ RowBarriers barriers;
  __shared__ float sums_of_squares[ROW_WARPS];
  __shared__ uint4 zeros[4];
  const RowTiles tiles(out_features, gated);
  const RowSteps<F> steps(in_features);
  float* const partial = reinterpret_cast<float*>(shared_memory + stages * RowStage<F>::BYTES);
  uint4* const y = reinterpret_cast<uint4*>(partial + (stages + 1) * ROW_WARPS * TILE_ROWS) +
                   warp_of_thread() * steps.vectors;
  RowGroupOf<F>* const groups =
      reinterpret_cast<RowGroupOf<F>*>(y + (ROW_WARPS - warp_of_thread()) * steps.vectors) +
      warp_of_thread() * (steps.vectors / 4);

  if (threadIdx.x == 0) barriers.init(stages);
  if (threadIdx.x < 4) zeros[threadIdx.x] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  const RowProducer<F> producer(shared_memory, barriers, tiles, steps, codes, headers, stages);
  if (warp_of_thread() < stages) producer.start(warp_of_thread(), warp_of_thread());
  let_next_kernel_start();
  RowPrologue<T, F> prologue(norm, sums_of_squares, in_features, eps, steps.vectors);
  wait_for_earlier_kernels();
  prologue.fix(x, y, groups);
  __syncwarp();

  RowItems<F> items(y, groups, zeros, steps);
  RowEpilogue<T, Out> epilogue(tiles, bias, out, accumulate, gated);
  RingPlace place(stages), sums_place(stages + 1);
  for (int item = 0, tile = 0, part = 0; item < tiles.count * steps.a_tile; ++item) {
    if (item > 0 && item % ROW_WARPS == warp_of_thread()) producer.refill(item - 1, place);
    const bool is_last = part == steps.a_tile - 1;
    const bool adds_up = is_last && tile % ROW_WARPS == ROW_WARPS - 1 - warp_of_thread();
    if (adds_up) epilogue.fetch(tile);

    barrier_wait(&barriers.full[place.slot], place.parity);
    items.take(shared_memory + place.slot * RowStage<F>::BYTES, part);
    __syncwarp();
    if (lane_of_thread() == 0) barrier_arrive(&barriers.empty[place.slot]);
    place.advance();

    ++part;
    if (!is_last) continue;
    float* const sums = partial + sums_place.slot * ROW_WARPS * TILE_ROWS;
    items.share(sums);
    __syncwarp();
    if (lane_of_thread() == 0) barrier_arrive(&barriers.sums[sums_place.slot]);
    if (adds_up) {
      barrier_wait(&barriers.sums[sums_place.slot], sums_place.parity);
      epilogue.store(tile, sums, prologue);
    }
    sums_place.advance();
    ++tile;
    part = 0;
  }
}
