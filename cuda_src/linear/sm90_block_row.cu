// Matrix product of one row by a weight in the quantised blocks of GGUF files, bound by reading the weight
// once; with the norm before it and the activation or the residual stream behind it. From sm_90 on.

#include "generated/sm90_block_row.cuh"
#include "sm90_block_row.cuh"

// out[n] = sum over k of y[k] * weight[n, k], + bias[n], + out[n] if `accumulate`; gated and with a norm as
// `matmul_decode_kernel` has it. y is in fixed point, see block_row.cuh.
//   in:  x [in_features] T; norm [in_features] T or null; bias [out_features] T or null; maps of codes
//        [out_features, any] unsigned and headers [out_features, any] unsigned, as packed
//   out: out [out_features, or half of it if `gated`] Out (T or float); `gated` takes no bias and does not
//        accumulate
// `beside`: the kernel before this one has waited for all that this one reads before it let this one start,
// and writes nothing of it; so they run side by side. `early`: the next kernel may start before this one has
// waited.
// Layout: x, norm, codes and headers 16-byte aligned; rows of codes multiples of 128 bytes, of headers of 16;
// in_features a multiple of 32.
// Grid: any number of blocks; they share the weight's tiles of 16 rows (gated: 8 gates and their ups) evenly.
// Block: 512 threads; two fit a multiprocessor, of this kernel and the next, so that the ring of that one
// fills while this one ends. Shared memory: `asked_bytes` in engine/ops/cuda/quant/sm90_row.py.
// Unit of work: an item, 2,048 elements of the 16 rows of a tile, comes by TMA into a ring of `stages`; two
// groups of eight warps take items by turns, a warp 256 elements of one. No barrier joins the warps: one of
// them adds up the sums of a tile, and one of a group starts the copies into the place of the item before
// once all have used it, while the others go on. The order of a row's sums depends on in_features alone: a
// warp's sums lie where the numbers of its items within the tile, even or odd, belong.
template <typename T, typename Out, typename F>
__global__ void __launch_bounds__(ROW_THREADS, 2) sm90_block_row_kernel(SM90_BLOCK_ROW_PARAMS(T, Out)) {
  using Stage = RowStage<F>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const BlockTiles<Stage> tiles(out_features, gated);
  const StageSteps<Stage> steps(in_features);
  unsigned char* const header_ring = shared_memory + stages * Stage::CODES;
  RowShared& shared = *reinterpret_cast<RowShared*>(header_ring + stages * Stage::HEADERS);
  uint4* const y = reinterpret_cast<uint4*>(&shared + 1);
  const int vectors = ROW_WARPS * steps.vectors;
  RowGroupOf<F>* const row_groups = reinterpret_cast<RowGroupOf<F>*>(y + vectors);
  const int groups = min(steps.a_tile, 2);

  shared.init(stages, groups);
  __syncthreads();
  const BoxProducer<Stage> producer(shared_memory, header_ring, shared.full, shared.empty, tiles, steps,
                                    codes_map, headers_map, stages);
  if (warp_of_thread() < stages) producer.start(warp_of_thread(), warp_of_thread());
  RowPrologue<T, F> prologue(norm, shared.squares, in_features, eps, vectors);
  if (early) let_next_kernel_start();
  if (!beside) wait_for_earlier_kernels();
  // Else not before: while blocks of an earlier kernel end, two of the next one's could come to share a
  // multiprocessor and leave none to another.
  if (!early) let_next_kernel_start();
  prologue.fix(x, y, row_groups);
  __syncthreads();

  RowItems<F> items(shared_memory, y, row_groups, shared.zeros, steps);
  RowEpilogue<T, Out, F> epilogue(tiles, bias, out, accumulate, gated);
  ItemPlace place(stages, group_of_warp());
  const int all_items = tiles.count * steps.a_tile;
  int item = group_of_warp(), parity = item, turns = warp_of_group() + 1;  // until this warp refills
  // Of two groups each takes a tile's even parts or its odd ones; where these are an odd number, by turns.
#pragma unroll 1
  for (int tile = 0; tile < tiles.count; ++tile, parity ^= steps.a_tile & 1) {
    if (parity >= groups) continue;
    const int place_of_sums = tile % SUMS_PLACES;
    const unsigned phase = tile / SUMS_PLACES & 1;
    const bool takes_last = (parity ^ steps.a_tile) & 1;
    const bool adds_up = takes_last && warp_of_group() == GROUP_WARPS - 1 - tile % GROUP_WARPS;
    if (adds_up) epilogue.fetch(tile);
#pragma unroll 1
    for (int part = parity; part < steps.a_tile; part += 2, item += 2) {
      if (turns == 0) {
        turns = GROUP_WARPS;
        if (item - 2 + stages < all_items) {
          barrier_wait(&shared.empty[place.slot_before()], place.parity_before());
          producer.start(item - 2 + stages, place.slot_before());
        }
      }
      --turns;
      barrier_wait(&shared.full[place.slot], place.parity);
      items.take(shared_memory + place.slot * Stage::CODES, header_ring + place.slot * Stage::HEADERS, part);
      __syncwarp();
      if (lane_of_thread() == 0) barrier_arrive(&shared.empty[place.slot]);
      place.advance();
    }
    float* const sums = shared.partial[place_of_sums];
    barrier_wait(&shared.added[place_of_sums], phase ^ 1);
    items.share(sums + (parity * GROUP_WARPS + warp_of_group()) * TILE_ROWS);
    __syncwarp();
    if (lane_of_thread() == 0) barrier_arrive(&shared.sums[place_of_sums]);
    if (adds_up) {
      barrier_wait(&shared.sums[place_of_sums], phase);
      epilogue.store(tile, sums, groups, prologue);
      __syncwarp();
      if (lane_of_thread() == 0) barrier_arrive(&shared.added[place_of_sums]);
    }
  }
  if (beside) wait_for_earlier_kernels();  // who waits for this one waits for that one, too
}
