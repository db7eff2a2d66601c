// Products with adapters on tensor cores: 2-byte elements in whole segments. lora.cu has those of all others.

#include "lora/lora_expand.cuh"
#include "lora/lora_tiles.cuh"

// shrunk[slice, row, p, r] = sum over the slice's k of x[row, k] * a[slot, p, r, k], for r below the slot's
// rank; where the grid has one block for all slices, their sum in order as slice 0.
//   in:  x [num_rows, width] T; a [slots, parts, max_rank, width] T, 0 from the slot's rank on; factors
//        [slots, parts] float, 0: there is no such part; ranks [slots] int; groups of group_rows_kernel
//   out: shrunk [slices, num_rows, parts, max_rank] float; only rows and parts with an adapter are written
// Layout: row-major; x and a 16-byte aligned, width a multiple of 8.
// Grid: tiles, parts times blocks of LORA_RANKS ranks, slices of LORA_SLICE of the width or 1.
// Block: LORA_SHRINK_WARPS warps. Shared memory: none dynamic.
// Unit of work: a tile by LORA_RANKS ranks; a warp LORA_CHUNK of each slice. Chunks are added in order to
// slices, and these in order, so the order of a row's sums depends on the width alone.
template <typename T>
__global__ void __launch_bounds__(LORA_SHRINK_WARPS* WARP_SIZE, 2) lora_shrink_kernel(LORA_SHRINK_PARAMS(T)) {
  static_assert(sizeof(T) == 2, "tensor cores take bfloat16 or float16");
  static_assert(LORA_ROWS == 16 && LORA_RANKS == 16, "a block has two m16n8 tiles");
  static_assert(LORA_SHRINK_WARPS * WARP_SIZE == LORA_ROWS * LORA_RANKS, "a thread adds up one sum");
  static_assert(LORA_SLICE == LORA_SHRINK_WARPS * LORA_CHUNK, "the warps share a slice");
  __shared__ ChunkSums<LORA_SHRINK_WARPS> chunk_sums;
  let_next_kernel_start();
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int g = lane / 4, t = lane % 4;
  ShrinkTile tile(groups, ranks, factors, num_rows, num_slots, parts, max_rank);
  if (!tile.find_rank()) {
    leave_to_others();
    return;
  }
  const T* const a_rows = a + tile.matrix_row(parts, max_rank, g) * width + t * SEGMENT;
  Line a_low, a_high = {};
  auto load_a = [&](int k) {
    auto load = [](const T* from) { return load_once_16(from); };
    const int columns = width - k - t * SEGMENT;
    load_line(a_low, a_rows + k, columns, load);
    if (tile.has_high()) load_line(a_high, a_rows + 8ll * width + k, columns, load);
  };

  int k = blockIdx.z * LORA_SLICE + warp * LORA_CHUNK;
  load_a(k);
  const T* rows[2];  // of x, at this lane's first segment
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows[half] = x + static_cast<long long>(tile.row(groups, 8 * half + g)) * width + t * SEGMENT;
  }
  const int place = threadIdx.x / LORA_RANKS, r = threadIdx.x % LORA_RANKS;  // of the sum that it adds up
  const int row = tile.row(groups, place);
  auto load_x = [&](Line& line, int half, int k) {
    auto load = [](const T* from) { return load_updated(reinterpret_cast<const uint4*>(from)); };
    load_line(line, rows[half] + k, width - k - t * SEGMENT, load);
  };
  wait_for_earlier_kernels();

  const int end =
      gridDim.z > 1 ? k + LORA_SLICE : warp * LORA_CHUNK + ceil_div(width, LORA_SLICE) * LORA_SLICE;
  const bool has_more = tile.rows.count > 8;
  float total = 0.0f;
  while (true) {
    float sums[2][4] = {};
    Line values[2];
    load_x(values[0], 0, k);
    if (has_more) load_x(values[1], 1, k);
    multiply_chunk<T>(sums[0], a_low, a_high, values[0]);
    if (has_more) multiply_chunk<T>(sums[1], a_low, a_high, values[1]);
    k += LORA_SLICE;
    const bool is_last = k >= end;
    if (!is_last) load_a(k);
    chunk_sums.put(sums);
    __syncthreads();
    total += chunk_sums.total(place, r);
    if (is_last) break;
    __syncthreads();
  }
  tile.store(shrunk, total, row, place, r, num_rows, parts, max_rank);
}

// out[row, n] += sum over r of factors[slot, p] * shrunk[row, p, r] * b[slot, n, r], rounded once; p is the
// part that n is in. GATED: then activated = silu of the first part times the second, in all rows.
//   in:  shrunk [slices, num_rows, parts, max_rank] float, whose sum over the slices counts; b [slots,
//        features, max_rank] T, 0 from the slot's rank on; factors [slots, parts] float; ranks [slots] int;
//        slots [num_rows] int and groups of group_rows_kernel; part 1 begins at feature `second`, part 2 at
//        `third`; inverses [num_rows] float, by which the sums are multiplied, or null
//   out: out [num_rows, features] T, which is added to, if not GATED; activated [num_rows, second] T if
//   GATED;
//        with `next_a` [slots, max_rank, second] T and `next_factors` [slots] of the product of `activated`,
//        as a and factors of lora_shrink_kernel, next_shrunk [blocks of features, num_rows, max_rank] float:
//        what that does, in slices of a block's features. GATED and 16 ranks alone; else all three are null.
// Layout: row-major; b, out and activated 16-byte aligned, max_rank, features, second and third multiples of
// 8; max_rank is 16 where MOST_RANKS is.
// Grid: blocks of 32 * GROUPS * LORA_EXPAND_WARPS features of a part, or half as many of both parts if GATED;
// tiles, then if GATED tiles of LORA_ROWS rows for those without an adapter. Tiles without rows are the last
// to start.
// Block: LORA_EXPAND_WARPS warps. Shared memory: none dynamic.
// Unit of work: a warp GROUPS times 32 features of the rows of a tile, 16 * STEPS ranks at a time, all of
// them if MOST_RANKS is not more. The order of sums depends on the ranks alone, and on `in_halves`: with 16
// ranks, the first half of the slices and the second are added up apart.
template <typename T, int GROUPS, int STEPS, int MOST_RANKS, bool GATED>
__global__ void __launch_bounds__(LORA_EXPAND_WARPS* WARP_SIZE, GATED&& MOST_RANKS <= 32 ? 4 : 3)
    lora_expand_kernel(LORA_EXPAND_PARAMS(T)) {
  static_assert(sizeof(T) == 2, "tensor cores take bfloat16 or float16");
  static_assert(GROUPS % 2 == 0, "each group of the first part has one of the second if GATED");
  static_assert(MOST_RANKS % (16 * STEPS) == 0, "ranks are whole steps");
  using Own = ExpandFeatures<GROUPS, GATED>;
  constexpr bool CAN_BEGIN_NEXT = GATED && MOST_RANKS == LORA_RANKS;
  __shared__ __align__(16) ShrunkTile<T, MOST_RANKS> tiles[GATED ? 2 : 1];
  __shared__ ChunkSums<CAN_BEGIN_NEXT ? LORA_EXPAND_WARPS : 1> chunk_sums;
  let_next_kernel_start();
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int g = lane / 4, t = lane % 4;
  const bool is_adapted = !GATED || blockIdx.y < num_tiles;

  const Own own(second, third, features);
  const SlotValues<int> slot_ranks(ranks, 1, num_slots);
  const SlotValues<float> slot_factors(factors + own.part, parts, num_slots);
  const SlotValues<float> other_factors(factors + (GATED ? 1 : own.part), parts, num_slots);
  const RowTile tile(groups, num_rows, is_adapted ? blockIdx.y : 0);
  if (is_adapted && tile.count == 0) {
    leave_to_others();
    return;
  }

  // Row g of the next A where this lane has its features; row 8 + g is 8 rows further.
  const T* next_rows = nullptr;
  if (CAN_BEGIN_NEXT && is_adapted && next_a != nullptr) {
    if (SlotValues<float>(next_factors, 1, num_slots).at(tile.slot) != 0.0f) {
      next_rows = next_a + static_cast<long long>(tile.slot * MOST_RANKS + g) * second + t * SEGMENT;
      const T* const row = next_rows - t * SEGMENT + own.first;
      if (warp < 2 && t == 0) {
        prefetch_l2(row + 8ll * warp * second, min(Own::BLOCK, own.end - own.first) * sizeof(T));
      }
    }
  }
  int rank = 0;
  float own_factors[2] = {};
  if (is_adapted) {
    rank = slot_ranks.at(tile.slot);
    own_factors[0] = slot_factors.at(tile.slot);
    if (GATED) own_factors[1] = other_factors.at(tile.slot);
    if (!GATED && (rank == 0 || own_factors[0] == 0.0f)) {
      leave_to_others();
      return;
    }
  }
  const int stride = MOST_RANKS == 16 ? 16 : max_rank;
  const T* const slot_b = b + static_cast<long long>(tile.slot) * features * stride;
  uint2 weights[GROUPS][4][STEPS];
  auto load_ranks = [&](int base, bool is_whole) {
    load_weights<MOST_RANKS>(weights, slot_b, own, base, rank, max_rank, features, is_whole);
  };
  if (own.is_whole()) {
    load_ranks(0, true);
  } else {
    load_ranks(0, false);
  }
  int rows[2];  // -1: none
  if (is_adapted) {
    find_adapted_rows(rows, groups, tile);
  } else {
    find_other_rows(rows, slots, (blockIdx.y - num_tiles) * LORA_ROWS, num_rows);
    if (!__any_sync(FULL_WARP, rows[0] >= 0 || rows[1] >= 0)) {
      leave_to_others();
      return;
    }
  }
  const bool has_more = !is_adapted || tile.count > 8;
  wait_for_earlier_kernels();

  ExpandValues<T, GROUPS> values = {};
  NextWeights<Own::OWN> next_weights = {};
  load_values(values, 0, out, rows[0], own, features);
  if (has_more) load_values(values, 1, out, rows[1], own, features);
  if (is_adapted) {
    const long long row_size = static_cast<long long>(parts) * max_rank;
    fill_tiles(tiles, shrunk + own.part * max_rank, rows, tile.count, row_size, row_size * num_rows, max_rank,
               slices, rank, own_factors, inverses, in_halves != 0);
    __syncthreads();
    float sums[GROUPS][4][4] = {};
    for (int base = 0;;) {
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        multiply_ranks<T, STEPS>(sums[i], tiles[i / Own::OWN], base, weights[i]);
      }
      base += 16 * STEPS;
      if (16 * STEPS == MOST_RANKS || base >= rank) break;
      load_ranks(base, false);
    }
    if constexpr (CAN_BEGIN_NEXT) {
      if (next_rows != nullptr) load_next_weights(next_weights, next_rows, own);
    }
    auto add = [&](int half) {
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) add_sums(values[i][half], sums[i], tiles[i / Own::OWN].scales, half);
    };
    add(0);
    if (has_more) add(1);
  }
  auto store = [&](int half) {
    T* const to = GATED ? activated + static_cast<long long>(rows[half]) * second
                        : out + static_cast<long long>(rows[half]) * features;
    store_values(values, half, to, rows[half], own);
  };
  store(0);
  if (has_more) store(1);
  if constexpr (CAN_BEGIN_NEXT) {
    if (next_rows == nullptr) return;
    float sums[2][4] = {};
    multiply_next<T, GROUPS>(sums, next_weights, values);
    chunk_sums.put(sums);
    __syncthreads();
    for (int i = threadIdx.x; i < tile.count * LORA_RANKS; i += LORA_EXPAND_WARPS * WARP_SIZE) {
      const int place = i / LORA_RANKS, r = i % LORA_RANKS;
      const long long row = blockIdx.x * num_rows + load_updated(groups + tile.begin + place);
      next_shrunk[row * LORA_RANKS + r] = chunk_sums.total(place, r);
    }
  }
}
