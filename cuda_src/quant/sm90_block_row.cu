// Matrix product of one row by a weight in the quantised blocks of GGUF files, bound by reading the weight
// once; with the norm before it and the activation or the residual stream behind it. From sm_90 on.

#include "generated/sm90_block_row.cuh"
#include "quant/sm90_block_row.cuh"

// out[n] = sum over k of y[k] * weight[n, k], + bias[n], + out[n] if `accumulate`; gated and with a norm as
// `matmul_decode_kernel` has it. y is in fixed point, see block_row.cuh.
//   in:  x [in_features] T; norm [in_features] T or null; bias [out_features] T or null; maps of codes
//        [out_features, any] unsigned and headers [out_features, any] unsigned, as packed
//   out: out [out_features, or half of it if `gated`] Out (T or float); `gated` takes no bias and does not
//        accumulate
// Layout: x, norm, codes and headers 16-byte aligned; rows of codes multiples of 128 bytes, of headers of 16;
// in_features a multiple of 32.
// `follows` as of `sm90_block_rows_kernel`; unless `begins_next`, the next kernel starts behind the wait.
// Grid: any number of blocks; they share the weight's tiles of 16 rows (gated: 8 gates and their ups) evenly.
// Block: 512 threads; two fit a multiprocessor, of this kernel and the next, so that the ring of that one
// fills while this one ends. Shared memory: `asked_bytes` in engine/ops/cuda/quant/fixed_row.py.
// Unit of work: an item, 2,048 elements of the 16 rows of a tile, comes by TMA into a ring of `stages`; each
// of 16 warps takes 128 elements of it. No barrier joins the warps: one of them adds up the sums of a tile,
// and one starts the copies for the item before once all have used it, while the others go on. The order of a
// row's sums depends on in_features alone.
template <typename T, typename Out, typename F>
__global__ void __launch_bounds__(ROW_THREADS, 2) sm90_block_row_kernel(SM90_BLOCK_ROW_PARAMS(T, Out)) {
  using Stage = RowStage<F>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const BlockTiles<Stage> tiles(out_features, gated);
  const StageSteps<Stage> steps(in_features);
  unsigned char* const header_ring = shared_memory + stages * Stage::CODES;
  RowShared& shared = *reinterpret_cast<RowShared*>(header_ring + stages * Stage::HEADERS);
  uint4* const y = reinterpret_cast<uint4*>(&shared + 1) + warp_of_thread() * steps.vectors;
  RowGroupOf<F>* const groups =
      reinterpret_cast<RowGroupOf<F>*>(y + (ROW_WARPS - warp_of_thread()) * steps.vectors) +
      warp_of_thread() * (steps.vectors / 4);

  shared.init(stages);
  __syncthreads();
  const BoxProducer<Stage> producer(shared_memory, header_ring, shared.full, shared.empty, tiles, steps,
                                    codes_map, headers_map, stages);
  if (warp_of_thread() < stages) producer.start(warp_of_thread(), warp_of_thread());
  RowPrologue<T, F, ROW_WARPS, 4> prologue(x, norm, shared.squares, in_features, eps, steps.vectors);
  if (begins_next) let_next_kernel_start();
  if (!follows) wait_for_earlier_kernels();
  if (!begins_next) let_next_kernel_start();
  prologue.take(y, groups);

  RowItems<F> items(shared_memory, y, groups, shared.zeros, steps);
  RowEpilogue<T, Out, F> epilogue(tiles, bias, out, accumulate, gated);
  RingPlace place(stages), sums_place(stages + 1);
  int refills_in = warp_of_thread() == 0 ? ROW_WARPS : warp_of_thread(), item = 0;
#pragma unroll 1
  for (int tile = 0; tile < tiles.count; ++tile) {
    const bool adds_up = tile % ROW_WARPS == ROW_WARPS - 1 - warp_of_thread();
    if (adds_up) epilogue.fetch(tile);
#pragma unroll 1
    for (int part = 0; part < steps.a_tile; ++part, ++item) {
      if (item == refills_in) {
        producer.refill(item - 1, place);
        refills_in += ROW_WARPS;
      }
      if (tile == 0) prologue.fix_until(part, y, groups);
      barrier_wait(&shared.full[place.slot], place.parity);
      items.take(shared_memory + place.slot * Stage::CODES, header_ring + place.slot * Stage::HEADERS, part);
      barrier_arrive_warp(&shared.empty[place.slot]);
      place.advance();
    }
    if (tile == 0) prologue.share_squares();
    float* const sums = shared.partial[sums_place.slot];
    items.share(sums);
    barrier_arrive_warp(&shared.sums[sums_place.slot]);
    if (adds_up) {
      barrier_wait(&shared.sums[sums_place.slot], sums_place.parity);
      epilogue.store(tile, sums, prologue);
    }
    sums_place.advance();
  }
  if (follows) wait_for_earlier_kernels();
}
