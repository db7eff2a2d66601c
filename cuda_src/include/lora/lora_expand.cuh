// The parts of lora_expand_kernel: the features of a warp, its rows, the sums of slices as operands, the
// product with B, and that of the activation with the next A.
#pragma once

#include "lora/lora_tiles.cuh"

// The features of a block, which are in one part, or at the same places of both if GATED, and of them those
// of a warp: groups of 32, if GATED first all of the first part. Lane (g, t) has segment t of a group of
// values.
template <int GROUPS, bool GATED>
struct ExpandFeatures {
  static constexpr int GROUP = 4 * SEGMENT;                // features
  static constexpr int OWN = GATED ? GROUPS / 2 : GROUPS;  // groups of a warp in a part
  static constexpr int BLOCK = LORA_EXPAND_WARPS * OWN * GROUP;
  int part = 0;
  int first = blockIdx.x * BLOCK;
  int end;  // of the part
  int second;

  __device__ __forceinline__ ExpandFeatures(int second, int third, int features)
      : end(second), second(second) {
    if (GATED) return;
    const int blocks = ceil_div(second, BLOCK), more = ceil_div(third - second, BLOCK);
    part = (blockIdx.x >= blocks) + (blockIdx.x >= blocks + more);
    if (part == 1) first = second + (blockIdx.x - blocks) * BLOCK, end = third;
    if (part == 2) first = third + (blockIdx.x - blocks - more) * BLOCK, end = features;
  }
  __device__ __forceinline__ int of_group(int i) const {
    const int warp = threadIdx.x / WARP_SIZE;
    return first + (warp * OWN + i % OWN) * GROUP + i / OWN * second;
  }
  // Whether this lane's segment of a group is there.
  __device__ __forceinline__ bool has_segment(int i) const {
    const int lane = threadIdx.x % WARP_SIZE;
    return of_group(i % OWN) + lane % 4 * SEGMENT < end;
  }
  __device__ __forceinline__ bool is_whole() const { return first + BLOCK <= end; }
};

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

// Of a tile with an adapter rows g and 8 + g. -1: none.
__device__ __forceinline__ void find_adapted_rows(int (&rows)[2], const int* groups, const RowTile& tile) {
  const int lane = threadIdx.x % WARP_SIZE;
  const int g = lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = load_updated(groups + tile.begin + min(8 * half + g, tile.count - 1));
    rows[half] = 8 * half + g < tile.count ? row : -1;
  }
}

// The same of the LORA_ROWS rows from `begin` on, without those that have an adapter.
__device__ __forceinline__ void find_other_rows(int (&rows)[2], const int* slots, int begin, int num_rows) {
  const int lane = threadIdx.x % WARP_SIZE;
  const int g = lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = begin + 8 * half + g;
    rows[half] = row < num_rows && load_updated(slots + row) < 0 ? row : -1;
  }
}

// Of `slot_b`, a slot's B, the warp's groups at ranks `base` on, as multiply_ranks wants them. Column g of
// mma's 8 features `j` is feature g / 2 * 8 + 2 j + g % 2, so that of a row a lane gets the sums of a
// segment; lane t has ranks 4 t to 4 t + 3 of each step. Behind the last feature, which is not looked for if
// `is_whole`, and rank it is any weight: the sums are not stored, the sums with A are 0.
template <int MOST_RANKS, int STEPS, typename T, int GROUPS, bool GATED>
__device__ __forceinline__ void load_weights(uint2 (&weights)[GROUPS][4][STEPS], const T* slot_b,
                                             const ExpandFeatures<GROUPS, GATED>& own, int base, int rank,
                                             int max_rank, int features, bool is_whole) {
  const int lane = threadIdx.x % WARP_SIZE;
  const int g = lane / 4, t = lane % 4;
  const int stride = MOST_RANKS == 16 ? 16 : max_rank;
  const T* const b_rows = slot_b + g % 2 * stride;
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    const int segment = own.of_group(i) + g / 2 * SEGMENT;
    const T* const from =
        b_rows + static_cast<long long>(is_whole ? segment : min(segment, features - SEGMENT)) * stride;
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
}

// A lane's segments of rows g and 8 + g of each group.
template <typename T, int GROUPS>
using ExpandValues = Vec<T, SEGMENT>[GROUPS][2];

// Those of row `half`, which is row `row` of `out`, or none if that is -1.
template <typename T, int GROUPS, bool GATED>
__device__ __forceinline__ void load_values(ExpandValues<T, GROUPS>& values, int half, const T* out, int row,
                                            const ExpandFeatures<GROUPS, GATED>& own, int features) {
  const int lane = threadIdx.x % WARP_SIZE;
  const T* const from = out + static_cast<long long>(row) * features + lane % 4 * SEGMENT;
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    if (row < 0 || !own.has_segment(i)) continue;
    *reinterpret_cast<uint4*>(values[i][half].data) =
        load_updated(reinterpret_cast<const uint4*>(from + own.of_group(i)));
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

// Stores a lane's segments of row `half`, or if GATED their activation, which then is in `values` as well.
// `to` is the row at feature 0 of what is stored; `row` is -1 if there is none.
template <typename T, int GROUPS, bool GATED>
__device__ __forceinline__ void store_values(ExpandValues<T, GROUPS>& values, int half, T* to, int row,
                                             const ExpandFeatures<GROUPS, GATED>& own) {
  constexpr int OWN = ExpandFeatures<GROUPS, GATED>::OWN;
  const int lane = threadIdx.x % WARP_SIZE;
  to += lane % 4 * SEGMENT;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    if (row < 0 || !own.has_segment(i)) continue;
    Vec<T, SEGMENT> result = values[i][half];
    if (GATED) values[i][half] = result = silu_mul<T>(result, values[i + GROUPS - OWN][half]);
    result.store(to + own.of_group(i));
  }
}

// Of the next product's A, this lane's segments of rows g and 8 + g: 0 behind the last feature.
template <int OWN>
using NextWeights = uint4[OWN][2];

// `rows` is row g at this lane's segment of feature 0.
template <typename T, int GROUPS>
__device__ __forceinline__ void load_next_weights(NextWeights<GROUPS / 2>& weights, const T* rows,
                                                  const ExpandFeatures<GROUPS, true>& own) {
#pragma unroll
  for (int i = 0; i < GROUPS / 2; ++i) {
    if (!own.has_segment(i)) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weights[i][half] = load_once_16(rows + 8ll * half * own.second + own.of_group(i));
    }
  }
}

// The sums of a warp's features of the activation times A.
template <typename T, int GROUPS>
__device__ __forceinline__ void multiply_next(float (&sums)[2][4], const NextWeights<GROUPS / 2>& weights,
                                              const ExpandValues<T, GROUPS>& values) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < GROUPS / 2; ++i) {
      const uint4 low = weights[i][0], high = weights[i][1];
      const uint4 x = *reinterpret_cast<const uint4*>(values[i][half].data);
      mma_m16n8k16<T>(sums[half], {low.x, high.x, low.y, high.y}, {x.x, x.y});
      mma_m16n8k16<T>(sums[half], {low.z, high.z, low.w, high.w}, {x.z, x.w});
    }
  }
}
