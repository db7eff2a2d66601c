// Products with adapters on tensor cores: 2-byte elements in whole segments. lora.cu has those of all others.

#include "lora_tiles.cuh"

// shrunk[slice, row, p, r] = sum over the slice's k of x[row, k] * a[slot, p, r, k], for r below the slot's
// rank; where the grid has one block for all slices, their sum in order as slice 0.
//   in:  x [num_rows, width] T; a [slots, parts, max_rank, width] T, 0 from the slot's rank on; b [slots,
//        features, max_rank] T, only fetched into L2, if `fetches_b` and there are several slices; factors
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
  const int rank_blocks = ceil_div(max_rank, static_cast<int>(LORA_RANKS));
  const int part = blockIdx.y / rank_blocks;
  const int first = blockIdx.y % rank_blocks * LORA_RANKS;
  const SlotValues<int> slot_ranks(ranks, 1, num_slots);
  const SlotValues<float> slot_factors(factors + part, parts, num_slots);
  const RowTile tile(groups, num_rows, blockIdx.x);
  const RowTile tile_before(groups, num_rows, max(static_cast<int>(blockIdx.x) - 1, 0));
  const int rank = slot_ranks.at(tile.slot);
  const bool is_there = slot_factors.at(tile.slot) != 0.0f;
  if (tile.count == 0 || first >= rank || !is_there) {
    leave_to_others();
    return;
  }
  const int matrix = (tile.slot * parts + part) * max_rank + first;
  const T* const a_rows = a + static_cast<long long>(matrix + g) * width + t * SEGMENT;
  const bool has_high = first + 8 < rank;  // row first + 8 + g is there then: slots have whole segments
  Line a_low, a_high = {};
  auto load_a = [&](int k) {
    auto load = [](const T* from) { return load_once_16(from); };
    const int columns = width - k - t * SEGMENT;
    load_line(a_low, a_rows + k, columns, load);
    if (has_high) load_line(a_high, a_rows + 8ll * width + k, columns, load);
  };

  int k = blockIdx.z * LORA_SLICE + warp * LORA_CHUNK;
  load_a(k);
  // Of x, at this lane's first segment; of places behind the last any row, whose sums are not stored.
  const T* rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = load_updated(groups + tile.begin + min(8 * half + g, tile.count - 1));
    rows[half] = x + static_cast<long long>(row) * width + t * SEGMENT;
  }
  const int place = threadIdx.x / LORA_RANKS, r = threadIdx.x % LORA_RANKS;  // of the sum that it adds up
  const int row = load_updated(groups + tile.begin + min(place, tile.count - 1));
  auto load_x = [&](Line& line, int half, int k) {
    auto load = [](const T* from) { return load_updated(reinterpret_cast<const uint4*>(from)); };
    load_line(line, rows[half] + k, width - k - t * SEGMENT, load);
  };
  const bool is_first_of_slot = blockIdx.x == 0 || tile_before.slot != tile.slot;
  if (fetches_b && gridDim.z > 1 && threadIdx.x == 0 && is_first_of_slot) {
    const int elements = features * max_rank;
    fetch_share(b + static_cast<long long>(tile.slot) * elements, elements);
  }
  wait_for_earlier_kernels();

  const int end =
      gridDim.z > 1 ? k + LORA_SLICE : warp * LORA_CHUNK + ceil_div(width, LORA_SLICE) * LORA_SLICE;
  const bool has_more = tile.count > 8;
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
  if (place >= tile.count || first + r >= rank) return;
  const long long place_of_row = static_cast<long long>(blockIdx.z) * num_rows + row;
  shrunk[(place_of_row * parts + part) * max_rank + first + r] = total;
}

// A sum as two elements of T, one the rest of the other: 16 or more of its bits.
template <typename T>
__device__ __forceinline__ void split_sum(float sum, T& high, T& low) {
  high = from_float<T>(sum);
  low = from_float<T>(sum - to_float(high));
}

// The power of two that is at most `value`, and its inverse, away from the ends of what floats can hold.
struct PowerOfTwo {
  float value = 1.0f;
  float inverse = 1.0f;

  __device__ __forceinline__ void set_below(float bound) {
    constexpr unsigned EXPONENT = 0x7f800000, LEAST = 0x04000000, MOST = 0x7b000000, PRODUCT = 0x7f000000;
    const unsigned bits = min(max(__float_as_uint(bound) & EXPONENT, LEAST), MOST);
    value = __uint_as_float(bits);
    inverse = __uint_as_float(PRODUCT - bits);
  }
};

// factor * the sums of the slices, of the rows of a tile and one part, and * what `inverses` has of the row,
// as mma wants them.
template <typename T, int MOST_RANKS>
struct ShrunkTile {
  static constexpr int STRIDE = MOST_RANKS + (MOST_RANKS % 32 == 0 ? 16 : 0);  // rows begin in other banks
  T high[LORA_ROWS][STRIDE];
  T low[LORA_ROWS][STRIDE];
  float scales[LORA_ROWS];  // by which float16, whose range is small, has been divided
};

// The largest of the lane's `SIZE` lanes.
template <int SIZE>
__device__ __forceinline__ float largest_of(float value) {
#pragma unroll
  for (int offset = SIZE / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, offset));
  }
  return value;
}

// Fills the tiles of the parts from the one that `shrunk` points to on, 0 from the rank on. By all threads, a
// warp a row; a barrier must follow. Lane (g, t) passes rows g and 8 + g of the tile.
template <typename T, int MOST_RANKS, int PARTS>
__device__ __forceinline__ void fill_tiles(ShrunkTile<T, MOST_RANKS> (&tiles)[PARTS], const float* shrunk,
                                           const int (&rows)[2], int count, long long row_size,
                                           long long slice_size, int max_rank, int slices, int rank,
                                           const float (&factors)[2], const float* inverses, bool in_halves) {
  // The upper lanes, which have no ranks of their own, can take the second half of the slices.
  constexpr bool HALVABLE = PARTS * MOST_RANKS * 2 <= WARP_SIZE;
  constexpr int ROUNDS = ceil_div(PARTS * MOST_RANKS, static_cast<int>(WARP_SIZE));
  constexpr int BATCH = ROUNDS == 1 ? 16 : 4;  // slices whose sums are under way at a time
  constexpr int SHARING = MOST_RANKS < WARP_SIZE ? MOST_RANKS : WARP_SIZE;  // lanes of the same part
  const int lane = threadIdx.x % WARP_SIZE;
  auto part_of = [&](int i) { return (i * WARP_SIZE + lane) / MOST_RANKS; };
  auto rank_of = [&](int i) { return (i * WARP_SIZE + lane) % MOST_RANKS; };
  auto factor_of = [&](int i) {
    return part_of(i) == 0 ? factors[0] : part_of(i) < PARTS ? factors[1] : 0.0f;
  };
  const bool is_upper = HALVABLE && in_halves && lane >= MOST_RANKS;
  const int middle = HALVABLE && in_halves ? ceil_div(slices, 2) : slices;
  const int first_slice = is_upper ? middle : 0, end_slice = is_upper ? slices : middle;
  for (int place = threadIdx.x / WARP_SIZE; place < count; place += LORA_EXPAND_WARPS) {
    const int row = __shfl_sync(FULL_WARP, place < 8 ? rows[0] : rows[1], place % 8 * 4);
    const float* from = shrunk + row * row_size + first_slice * slice_size;
    const float inverse = inverses == nullptr ? 1.0f : load_updated(inverses + row);
    float sums[ROUNDS] = {};
    for (int slice = first_slice; slice < end_slice; slice += BATCH) {
      float loaded[BATCH][ROUNDS];
#pragma unroll
      for (int j = 0; j < BATCH; ++j, from += slice_size) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
          const int part = is_upper ? 0 : part_of(i);
          const bool is_there =
              rank_of(i) < rank && (is_upper ? factors[0] : factor_of(i)) != 0.0f && slice + j < end_slice;
          loaded[j][i] = is_there ? load_updated(from + part * max_rank + rank_of(i)) : 0.0f;
        }
      }
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) sums[i] += loaded[j][i];
      }
    }
    if (HALVABLE && in_halves) sums[0] += __shfl_xor_sync(FULL_WARP, sums[0], MOST_RANKS % WARP_SIZE);
    float largest[PARTS] = {};
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      sums[i] = sums[i] * factor_of(i) * inverse;
      float& of_part = largest[i * WARP_SIZE / MOST_RANKS];
      of_part = fmaxf(of_part, fabsf(sums[i]));
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      PowerOfTwo scale;
      if constexpr (!has_float_range<T>) {
        scale.set_below(largest_of<SHARING>(largest[i * WARP_SIZE / MOST_RANKS]));
      }
      if (part_of(i) >= PARTS) continue;
      ShrunkTile<T, MOST_RANKS>& tile = tiles[part_of(i)];
      if (rank_of(i) == 0) tile.scales[place] = scale.value;
      split_sum(sums[i] * scale.inverse, tile.high[place][rank_of(i)], tile.low[place][rank_of(i)]);
    }
  }
}

// Of mma's tile of 16 rows by 32 columns sums[j] are columns 8 j to 8 j + 7: += the product of ranks `base`
// on.
template <typename T, int STEPS, int MOST_RANKS>
__device__ __forceinline__ void multiply_ranks(float (&sums)[4][4], const ShrunkTile<T, MOST_RANKS>& tile,
                                               int base, const uint2 (&weights)[4][STEPS]) {
  const int lane = threadIdx.x % WARP_SIZE;
  const int g = lane / 4, t = lane % 4;
  auto multiply = [&](const T(&rows)[LORA_ROWS][ShrunkTile<T, MOST_RANKS>::STRIDE], int s) {
    const int r = base + 16 * s + 4 * t;
    const uint2 upper = *reinterpret_cast<const uint2*>(&rows[g][r]);
    const uint2 lower = *reinterpret_cast<const uint2*>(&rows[g + 8][r]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      mma_m16n8k16<T>(sums[j], {upper.x, lower.x, upper.y, lower.y}, {weights[j][s].x, weights[j][s].y});
    }
  };
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    multiply(tile.high, s);
    multiply(tile.low, s);
  }
}

// A lane's segment of row g, or g + 8 for half 1, += the sums of 8 columns a lane, rounded once.
template <typename T>
__device__ __forceinline__ void add_sums(Vec<T, SEGMENT>& values, const float (&sums)[4][4],
                                         const float* scales, int half) {
  const float scale = has_float_range<T> ? 1.0f : scales[threadIdx.x % WARP_SIZE / 4 + 8 * half];
#pragma unroll
  for (int c = 0; c < SEGMENT; ++c) {
    values[c] = from_float<T>(to_float(values[c]) + scale * sums[c / 2][2 * half + c % 2]);
  }
}

// As silu_mul_kernel does it.
template <typename T>
__device__ __forceinline__ Vec<T, SEGMENT> silu_mul(const Vec<T, SEGMENT>& gates,
                                                    const Vec<T, SEGMENT>& ups) {
  Vec<T, SEGMENT> result;
#pragma unroll
  for (int c = 0; c < SEGMENT; ++c) {
    const float gate = to_float(gates[c]);
    result[c] = from_float<T>(to_float(ups[c]) * (gate / (1.0f + expf(-gate))));
  }
  return result;
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
  constexpr int GROUP = 4 * SEGMENT;                       // features
  constexpr int OWN_GROUPS = GATED ? GROUPS / 2 : GROUPS;  // of a warp in a part
  constexpr int BLOCK_FEATURES = LORA_EXPAND_WARPS * OWN_GROUPS * GROUP;
  constexpr bool CAN_BEGIN_NEXT = GATED && MOST_RANKS == LORA_RANKS;
  __shared__ __align__(16) ShrunkTile<T, MOST_RANKS> tiles[GATED ? 2 : 1];
  __shared__ ChunkSums<CAN_BEGIN_NEXT ? LORA_EXPAND_WARPS : 1> chunk_sums;
  let_next_kernel_start();
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int g = lane / 4, t = lane % 4;
  const bool is_adapted = !GATED || blockIdx.y < num_tiles;

  int part = 0, first = blockIdx.x * BLOCK_FEATURES, end = second;
  if (!GATED) {
    const int blocks = ceil_div(second, BLOCK_FEATURES), more = ceil_div(third - second, BLOCK_FEATURES);
    part = (blockIdx.x >= blocks) + (blockIdx.x >= blocks + more);
    if (part == 1) first = second + (blockIdx.x - blocks) * BLOCK_FEATURES, end = third;
    if (part == 2) first = third + (blockIdx.x - blocks - more) * BLOCK_FEATURES, end = features;
  }
  const SlotValues<int> slot_ranks(ranks, 1, num_slots);
  const SlotValues<float> slot_factors(factors + part, parts, num_slots);
  const SlotValues<float> other_factors(factors + (GATED ? 1 : part), parts, num_slots);
  const RowTile tile(groups, num_rows, is_adapted ? blockIdx.y : 0);
  if (is_adapted && tile.count == 0) {
    leave_to_others();
    return;
  }
  // Of a group the first feature, and whether this lane's segment of it is there.
  auto group_of = [&](int i) {
    return first + (warp * OWN_GROUPS + i % OWN_GROUPS) * GROUP + i / OWN_GROUPS * second;
  };
  auto is_inside = [&](int i, int offset) { return group_of(i % OWN_GROUPS) + offset < end; };

  // Row g of the next A where this lane has its features; row 8 + g is 8 rows further.
  const T* next_rows = nullptr;
  if (CAN_BEGIN_NEXT && is_adapted && next_a != nullptr) {
    if (SlotValues<float>(next_factors, 1, num_slots).at(tile.slot) != 0.0f) {
      next_rows = next_a + static_cast<long long>(tile.slot * MOST_RANKS + g) * second + t * SEGMENT;
      const T* const row = next_rows - t * SEGMENT + first;
      if (warp < 2 && t == 0) {
        prefetch_l2(row + 8ll * warp * second, min(BLOCK_FEATURES, end - first) * sizeof(T));
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
  // Column g of mma's 8 features `j` is feature g / 2 * 8 + 2 j + g % 2, so that of a row a lane gets the
  // sums of a segment; lane t has ranks 4 t to 4 t + 3 of each step. Behind the last feature and rank it is
  // any weight: the sums are not stored, the sums with A are 0.
  const int stride = MOST_RANKS == 16 ? 16 : max_rank;
  const bool is_whole = first + BLOCK_FEATURES <= end;
  const T* const b_rows = b + (static_cast<long long>(tile.slot) * features + g % 2) * stride;
  uint2 weights[GROUPS][4][STEPS];
  auto load_weights = [&](int base, bool whole) {
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      const int segment = group_of(i) + g / 2 * SEGMENT;
      const T* const from =
          b_rows + static_cast<long long>(whole ? segment : min(segment, features - SEGMENT)) * stride;
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        const bool is_there = base + 16 * s < rank;
        const int r = base + 16 * s + 4 * t;
        const T* const from_rank = from + (MOST_RANKS == 16 ? 4 * t : min(r, max_rank - 4));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          weights[i][j][s] = make_uint2(0, 0);
          if (is_there) load_past_l1(weights[i][j][s], from_rank + 2 * j * stride);
        }
      }
    }
  };
  if (is_whole) {
    load_weights(0, true);
  } else {
    load_weights(0, false);
  }
  int rows[2];  // -1: none
  if (is_adapted) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = load_updated(groups + tile.begin + min(8 * half + g, tile.count - 1));
      rows[half] = 8 * half + g < tile.count ? row : -1;
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (blockIdx.y - num_tiles) * LORA_ROWS + 8 * half + g;
      rows[half] = row < num_rows && load_updated(slots + row) < 0 ? row : -1;
    }
    if (!__any_sync(FULL_WARP, rows[0] >= 0 || rows[1] >= 0)) {
      leave_to_others();
      return;
    }
  }
  const bool has_more = !is_adapted || tile.count > 8;
  wait_for_earlier_kernels();

  using Segment = Vec<T, SEGMENT>;
  Segment values[GROUPS][2] = {};
  uint4 next_weights[OWN_GROUPS][2] = {};
  auto load_values = [&](int half) {
    const T* const from = out + static_cast<long long>(rows[half]) * features + t * SEGMENT;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      if (rows[half] < 0 || !is_inside(i, t * SEGMENT)) continue;
      *reinterpret_cast<uint4*>(values[i][half].data) =
          load_updated(reinterpret_cast<const uint4*>(from + group_of(i)));
    }
  };
  load_values(0);
  if (has_more) load_values(1);
  if (is_adapted) {
    const long long row_size = static_cast<long long>(parts) * max_rank;
    fill_tiles(tiles, shrunk + part * max_rank, rows, tile.count, row_size, row_size * num_rows, max_rank,
               slices, rank, own_factors, inverses, in_halves != 0);
    __syncthreads();
    float sums[GROUPS][4][4] = {};
    for (int base = 0;;) {
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        multiply_ranks<T, STEPS>(sums[i], tiles[i / OWN_GROUPS], base, weights[i]);
      }
      base += 16 * STEPS;
      if (16 * STEPS == MOST_RANKS || base >= rank) break;
      load_weights(base, false);
    }
    if (CAN_BEGIN_NEXT && next_rows != nullptr) {
#pragma unroll
      for (int i = 0; i < OWN_GROUPS; ++i) {
        if (!is_inside(i, t * SEGMENT)) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          next_weights[i][half] = load_once_16(next_rows + 8ll * half * second + group_of(i));
        }
      }
    }
    auto add = [&](int half) {
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) add_sums(values[i][half], sums[i], tiles[i / OWN_GROUPS].scales, half);
    };
    add(0);
    if (has_more) add(1);
  }
  auto store = [&](int half) {
    T* const to = (GATED ? activated + static_cast<long long>(rows[half]) * second
                         : out + static_cast<long long>(rows[half]) * features) +
                  t * SEGMENT;
#pragma unroll
    for (int i = 0; i < OWN_GROUPS; ++i) {
      if (rows[half] < 0 || !is_inside(i, t * SEGMENT)) continue;
      Segment result = values[i][half];
      if (GATED) values[i][half] = result = silu_mul<T>(result, values[i + GROUPS - OWN_GROUPS][half]);
      result.store(to + group_of(i));
    }
  };
  store(0);
  if (has_more) store(1);
  if constexpr (CAN_BEGIN_NEXT) {
    if (next_rows == nullptr) return;
    float sums[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < OWN_GROUPS; ++i) {
        const uint4 low = next_weights[i][0], high = next_weights[i][1];
        const uint4 x = *reinterpret_cast<const uint4*>(values[i][half].data);
        mma_m16n8k16<T>(sums[half], {low.x, high.x, low.y, high.y}, {x.x, x.y});
        mma_m16n8k16<T>(sums[half], {low.z, high.z, low.w, high.w}, {x.z, x.w});
      }
    }
    chunk_sums.put(sums);
    __syncthreads();
    for (int i = threadIdx.x; i < tile.count * LORA_RANKS; i += LORA_EXPAND_WARPS * WARP_SIZE) {
      const int place = i / LORA_RANKS, r = i % LORA_RANKS;
      const long long row = blockIdx.x * num_rows + load_updated(groups + tile.begin + place);
      next_shrunk[row * LORA_RANKS + r] = chunk_sums.total(place, r);
    }
  }
}
