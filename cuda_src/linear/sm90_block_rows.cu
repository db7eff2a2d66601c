// Matrix product of 2 to 16 rows by a weight in quantised blocks, read once; with the norm before it and the
// activation or the residual stream behind it. From sm_90 on.

#include "generated/sm90_block_rows.cuh"
#include "sm90_block_rows.cuh"

// out[m, n] = sum over k of y[m, k] * weight[n, k], + bias[n], + out[m, n] if `accumulate`; gated and with a
// norm as `matmul_decode_kernel` has it. Bit for bit what `block_matmul_kernel` gives.
//   in:  x [num_rows, in_features] T, num_rows <= TOKENS; norm [in_features] T or null, null for a T without
//   the range
//        of a float; bias [out_features] T or null; maps of codes [out_features, any] unsigned and headers
//        [out_features, any] unsigned, as packed
//   out: out [num_rows, out_features, or half of it if `gated`] Out (T or float), rows `out_stride` apart;
//   `gated`
//        takes no bias and does not accumulate
// Layout: x, norm, codes and headers 16-byte aligned; rows of codes multiples of 128 bytes, of headers of 16;
// in_features a multiple of 32.
// Grid: any number of blocks; they share the weight's tiles of 32 rows (gated: 16 gates and their ups)
// evenly.
// Block: 512 threads. Shared memory: `shared_bytes` in engine/ops/cuda/quant/sm90_rows.py.
// Unit of work: an item, 1,024 elements of the 32 rows of a tile, comes by TMA into a ring of `stages`; each
// of 16 warps takes 128 elements of 16 rows of it. x stays in shared memory, for it would come past as often
// as there are tiles. The order of a row's sums depends on in_features alone.
template <typename T, typename Out, typename F, int TOKENS>
__global__ void __launch_bounds__(ROWS_THREADS, 1) sm90_block_rows_kernel(SM90_BLOCK_ROWS_PARAMS(T, Out)) {
  using Stage = RowsStage<F>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const BlockTiles<Stage> tiles(out_features, gated);
  const StageSteps<Stage> steps(in_features);
  unsigned char* const header_ring = shared_memory + stages * Stage::CODES;
  RowsShared<TOKENS>& shared = *reinterpret_cast<RowsShared<TOKENS>*>(header_ring + stages * Stage::HEADERS);
  uint4* const rows = reinterpret_cast<uint4*>(&shared + 1);
  uint4* const gains = rows + WARPS * steps.vectors * TOKENS;

  shared.init(stages);
  __syncthreads();
  const BoxProducer<Stage> producer(shared_memory, header_ring, shared.full, shared.empty, tiles, steps,
                                    codes_map, headers_map, stages);
  if (warp_of_thread() < stages) producer.start(warp_of_thread(), warp_of_thread());
  let_next_kernel_start();
  const ResidentRows<T, Stage, TOKENS> resident(rows, gains, steps.a_tile, in_features);
  if (norm != nullptr) resident.load_gains(norm);
  wait_for_earlier_kernels();
  resident.load(x, num_rows);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  if constexpr (has_float_range<T>) {
    if (norm != nullptr) {
      resident.normalise(shared.squares);
      __syncthreads();
    }
  }

  RowsItems<T, F, TOKENS> items(shared_memory, resident, steps);
  RowsEpilogue<T, Out, F, TOKENS> epilogue(tiles, bias, out, out_stride, num_rows, accumulate);
  RingPlace place(stages);
  int refills_in = warp_of_thread() == 0 ? 2 * WARPS : warp_of_thread(), item = 0;
#pragma unroll 1
  for (int tile = 0; tile < tiles.count; ++tile) {
    epilogue.fetch(tile);
#pragma unroll 1
    for (int part = 0; part < steps.a_tile; ++part, ++item) {
      if (item == refills_in) {
        producer.refill(item - 1, place);
        refills_in += 2 * WARPS;
      }
      barrier_wait(&shared.full[place.slot], place.parity);
      items.take(shared_memory + place.slot * Stage::CODES, header_ring + place.slot * Stage::HEADERS, part);
      __syncwarp();
      if (lane_of_thread() == 0) barrier_arrive(&shared.empty[place.slot]);
      place.advance();
    }
    if (tile > 0) __syncthreads();  // the sums of the tile before may still be in use
    items.share(shared.partial);
    __syncthreads();
    epilogue.store(tile, shared, norm != nullptr, in_features, eps);
  }
}
