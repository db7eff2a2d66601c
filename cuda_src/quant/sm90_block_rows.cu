// Matrix product of 2 to 16 rows by a weight in quantised blocks, read once; with the norm before it and the
// activation or the residual stream behind it. From sm_90 on.

#include "generated/sm90_block_rows.cuh"
#include "quant/sm90_block_rows.cuh"

// out[m, n] = sum over k of y[m, k] * weight[n, k], + bias[n], + out[m, n] if `accumulate`; gated and with a
// norm as `matmul_decode_kernel` has it. With `slices` > 1, k is cut into as many, between items, and their
// sums are out[slice, m, n], without norm, bias, addition and gate; else bit for bit what
// `block_matmul_kernel` gives.
//   in:  x [num_rows, in_features] T, num_rows <= TOKENS; norm [in_features] T or null, null for a T without
//   the range
//        of a float; bias [out_features] T or null; maps of codes [out_features, any] unsigned and headers
//        [out_features, any] unsigned, as packed
//   out: out [num_rows, out_features, or half of it if `gated`] Out (T or float), rows `out_stride` apart;
//   `gated`
//        takes no bias and does not accumulate
// If `followed`, the next kernels are products of the same rows for other columns, each of which `follows`:
// it has no more to wait for when it starts, and ends after those in front of it.
// Layout: x, norm, codes and headers 16-byte aligned; rows of codes multiples of 128 bytes, of headers of 16;
// in_features a multiple of 32.
// Grid: any number of blocks for each slice; they share the weight's tiles of 32 rows (gated: 16 gates and
// their ups) evenly.
// Block: 672 threads. Shared memory: `shared_bytes` in engine/ops/cuda/quant/sm90_rows.py.
// Unit of work: an item, 1,024 elements of the 32 rows of a tile, comes by TMA into a ring of `stages`, which
// one warp fills; each of 16 warps takes 128 elements of 16 rows of it. x stays in shared memory, for it
// would come past as often as there are tiles; the first tile takes each step of it as it comes. A tile's
// sums are added up and stored by four warps more, while the others go on. The order of a row's sums depends
// on in_features alone. Waits: no barrier of all warps once the ring runs. Every wait is for what others do
// at an earlier place of the same sequence (item, sums of the tile before stored, other items, sums left), so
// none is in vain. A warp reads the next item's codes and scales while it multiplies this one: otherwise each
// step would wait for the ring.
template <typename T, typename Out, typename F, int TOKENS>
__global__ void __launch_bounds__(ROWS_THREADS, 1) sm90_block_rows_kernel(SM90_BLOCK_ROWS_PARAMS(T, Out)) {
  using Stage = RowsStage<F>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const int block = small_div(blockIdx.x, slices), slice = blockIdx.x - block * slices;
  const BlockTiles<Stage> tiles(out_features, gated, block, small_div(gridDim.x, slices));
  const StageSteps<Stage> steps(in_features, slice, slices);
  unsigned char* const header_ring = shared_memory + stages * Stage::CODES;
  RowsShared<TOKENS>& shared = *reinterpret_cast<RowsShared<TOKENS>*>(header_ring + stages * Stage::HEADERS);
  uint4* const rows = reinterpret_cast<uint4*>(&shared + 1);
  uint4* const gains = rows + WARPS * steps.vectors * TOKENS;

  shared.init(stages);
  __syncthreads();
  const BoxProducer<Stage> producer(shared_memory, header_ring, shared.full, shared.empty, tiles, steps,
                                    codes_map, headers_map, stages);
  if (warp_of_thread() == MULTIPLYING_WARPS + STORING_WARPS) {
    producer.run();
    return;
  }
  if (warp_of_thread() >= MULTIPLYING_WARPS) {
    Out* const own = out + static_cast<long long>(slice) * num_rows * out_stride;
    if (!follows) wait_for_earlier_kernels();
    RowsEpilogue<T, Out, F, TOKENS> epilogue(tiles, bias, own, out_stride, num_rows, accumulate);
    epilogue.run(shared, norm != nullptr, in_features, eps);
    if (follows) wait_for_earlier_kernels();
    return;
  }
  if (!followed) let_next_kernel_start();
  ResidentRows<T, Stage, TOKENS> resident(rows, gains, steps, in_features);
  if (norm != nullptr) resident.load_gains(norm);
  if (!follows) wait_for_earlier_kernels();
  if (followed) let_next_kernel_start();
  resident.load(x, num_rows);

  RowsItems<T, F, TOKENS> items(shared_memory, resident);
  RingPlace place(stages);
  int left = tiles.count * steps.a_tile;  // items
  if (left == 0) return;
  const auto load = [&] {
    barrier_wait(&shared.full[place.slot], place.parity);
    items.load(shared_memory + place.slot * Stage::CODES, header_ring + place.slot * Stage::HEADERS);
  };
  // Multiplies an item and loads the next. The last one is loaded twice: its slot is not filled again.
  const auto take = [&](int part) {
    if (--left > 0) place.advance();
    items.begin(part);
    load();
    items.end();
    if (!SLOTS_ARE_FREED_ONCE || left > 0) barrier_arrive_warp(&shared.empty[place.slot]);
  };

  load();
  barrier_arrive_warp(&shared.empty[0]);
#pragma unroll 1
  for (int part = 0; part < steps.a_tile; ++part) {
    resident.await_step(part, norm != nullptr, shared.squares);
    take(part);
  }
  items.share(shared.partial);
  barrier_arrive_warp(&shared.sums_full);
#pragma unroll 1
  for (int tile = 1; tile < tiles.count; ++tile) {
#pragma unroll 1
    for (int part = 0; part < steps.a_tile; ++part) take(part);
    barrier_wait(&shared.sums_empty, (tile - 1) % 2);
    items.share(shared.partial);
    barrier_arrive_warp(&shared.sums_full);
  }
}
