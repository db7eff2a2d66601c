// The product of at most 64 rows on sm_90a with those of their adapters. products.cu has adapters of more
// rows, behind the product.

#include "lora/sm90_adapted.cuh"

// A warp group that multiplies: as multiply_tiles, and half-way along k the stages of B.
template <typename V, bool GATED>
__device__ __forceinline__ void multiply_adapted_tiles(const RingBlock<V>& block,
                                                       unsigned char* shared_memory, OwnSlots& own_slots,
                                                       const AdapterSums& adapters, int second, int third,
                                                       int splits, int out_features,
                                                       const typename V::T* bias, typename V::T* out,
                                                       int accumulate, int gated) {
  using T = typename V::T;
  using Columns = AdaptedColumns<V, GATED>;
  const Work<1>& work = block.work;
  T* const ring = reinterpret_cast<T*>(shared_memory);
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int warpgroup_n = warp / 4;
  const int out_columns = GATED ? out_features / 2 : out_features;
  const int warpgroup_columns = GATED ? V::HALF_N : V::WARPGROUP_N;
  const int row0 = warp % 4 * WARP_ROWS;
  const unsigned long long x_descriptor = operand_descriptor(ring);
  const unsigned long long weight_descriptor =
      operand_descriptor(ring + V::X_ELEMENTS + warpgroup_n * V::WARPGROUP_N * TILE_K);
  T* const staging = ring + work.stages * V::STAGE_ELEMENTS + warp * WARP_ROWS * CHUNK_STRIDE;
  const int middle = work.num_steps / 2;
  auto first_column = [&](int index) {
    return (work.tile(index).y * V::WARPGROUPS_N + warpgroup_n) * warpgroup_columns;
  };
  // Behind the last column any part, whose sums are not stored.
  auto part_at = [&](int column) {
    return GATED ? 0 : min((column >= second) + (column >= third), adapters.parts - 1);
  };

  Columns adapted;
  adapted.rows.find_slots(adapters, row0 + lane / 4);
  if (warp == 0) own_slots.tell(adapters.find_own(block.split, splits));
  adapted.rows.find_factors(adapters, part_at(first_column(work.first)));
  const unsigned own = own_slots.ask();
  wait_for_earlier_kernels();
  int part = -1;  // whose sums with A are there
  RingPosition at;
#pragma unroll 1
  for (int index = work.first; index < work.tiles_n; index += work.stride) {
    const int column0 = first_column(index), own_part = part_at(column0);
    // In front of the products, as x still comes when the first of them begin.
    if (own != 0 && part != own_part) {
      if (part >= 0) adapted.rows.find_factors(adapters, own_part);
      adapted.rows.load(adapters, row0 + lane / 4, own_part);
      part = own_part;
    }
    Result<T, T> result = {bias == nullptr ? nullptr : bias + column0,
                           out + static_cast<long long>(row0) * out_columns + column0,
                           adapters.num_rows - row0,
                           min(warpgroup_columns, out_columns - column0),
                           out_columns,
                           accumulate != 0,
                           lane};
    float sums[V::WARPGROUP_N / 2];
    uint4 residual[Result<T, T>::SEGMENTS];
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int begin = half == 0 ? 0 : middle, end = half == 0 ? middle : work.num_steps;
      int previous = 0;
      for (int step = begin; step < end; ++step) {
        barrier_wait(&block.full[at.stage], at.parity);
        const unsigned long long offset = at.stage * (V::STAGE_ELEMENTS * sizeof(T) >> 4);
        multiply_stage<T, V::WARPGROUP_N>(sums, x_descriptor, weight_descriptor, offset, step > 0);
        wgmma_wait<1>();
        if (step > begin) release_stage<1>(&block.empty[previous], lane);
        previous = at.stage;
        at.advance(work.stages);
      }
      // What is to be added comes while the last products run.
      if (half == 1 && accumulate && splits == 1) result.load_chunk(residual, 0);
      wgmma_wait<0>();
      if (end > begin) release_stage<1>(&block.empty[previous], lane);
      if (half == 1 || own == 0) continue;
      adapted.clear();
#pragma unroll 1
      for (unsigned left = own; left != 0;) {
        barrier_wait(&block.full[at.stage], at.parity);
        const T* b = ring + at.stage * V::STAGE_ELEMENTS + V::X_ELEMENTS;
#pragma unroll 1
        for (int i = 0; i < SLOTS_OF_STAGE && left != 0; ++i, b += Columns::SLOT_ELEMENTS) {
          adapted.add_slot(b, take_slot(left), warpgroup_n);
        }
        __syncwarp();
        release_stage<1>(&block.empty[at.stage], lane);
        at.advance(work.stages);
      }
    }
    if (own != 0) adapted.add_to(sums);
    if (splits > 1) {
      finish_share<T, T, V::WARPGROUP_N>(
          sums, result, block.split, splits, block.received, shared_memory,
          reinterpret_cast<unsigned char*>(ring + work.stages * V::STAGE_ELEMENTS) +
              CONSUMER_WARPS * WARP_ROWS * CHUNK_STRIDE * sizeof(T),
          staging, gated);
      return;
    }
    if (GATED) multiply_gates<V::HALF_N / 8>(sums, sums + V::HALF_N / 2, gated);
    store_tile<V>(sums, result, staging, residual);
  }
}

// As sm90_matmul_kernel, and before bias, activation and addition + sum over r of factors[slot, p] *
// shrunk[m, p, r] * b[slot, n, r], if slots[m] is a slot with a rank; p is the part that n is in. Rows
// without an adapter have the bits of sm90_matmul_kernel with the same splits and stages.
//   in:  x_map, x_tail_map, weight_map, bias as there; b_map: b [num_slots, out_features, LORA_RANKS] T, 0
//        from the slot's rank on, as lines of 64 elements in boxes of TILE_N columns, of half as many if
//        GATED; shrunk [slices, num_rows, parts, LORA_RANKS] float, whose sum over the slices counts;
//        inverses [num_rows] float, by which the sums are multiplied, or null; factors [num_slots, parts]
//        float, 0: there is no such part; ranks [num_slots] int; slots [num_rows] int, below 0: no adapter;
//        part 1 begins at feature `second`, part 2 at `third`, multiples of WARPGROUP_N
//   out: out [num_rows, out_features, or half of it if GATED] T
// Layout: as there; b_map without swizzle, shrunk 16-byte aligned. num_rows is at most 64, num_slots at most
// WARP_SIZE.
// Grid: as there; a tile is all rows by TILE_N = 2 * WARPGROUP_N columns.
// Block: as there. Shared memory: as there.
// Unit of work: as there. Block `split` of a cluster adds the slots whose number is `split` modulo `splits`.
template <typename T, int WARPGROUP_N, bool GATED>
__global__ void __launch_bounds__(384, 1) sm90_adapted_matmul_kernel(SM90_ADAPTED_MATMUL_PARAMS(T)) {
  using V = Variant<T, T, 1, WARPGROUP_N, 1>;
  static_assert(V::SPLITTABLE, "all plans may split k");
  static_assert(has_float_range<T>, "sums with A are split into two elements without a scale");
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ OwnSlots own_slots;
  if (threadIdx.x == 0) {
    own_slots.begin();
    prefetch_map(b_map);
  }
  const AdapterSums adapters = {shrunk, inverses, factors, ranks, slots, num_rows, num_slots, parts, slices};
  const auto multiply = [&](const RingBlock<V>& block) {
    multiply_adapted_tiles<V, GATED>(block, shared_memory, own_slots, adapters, second, third, splits,
                                     out_features, bias, out, accumulate, gated);
  };
  run_block<V>(shared_memory, x_map, x_tail_map, weight_map, ceil_div(in_features, TILE_K), num_rows,
               out_features, splits, 1, stages, GATED, multiply,
               AdaptedSteps<V, GATED>{b_map, own_slots, out_features});
}
