// The product of a single row by a weight in quantised blocks whose values are integers: the row in fixed
// point, times the integers themselves, and scales for sums instead of for elements.
//
// An element of x is scale * (128 * high + low), where 32 elements share the scale and high and low are
// signed bytes: |error| <= 2^-14.99 max |x| of the 32. Integers times bytes add up exactly; scales, zeros and
// offsets are float32 throughout, so weights are not rounded as those of several rows are.
#pragma once

#include "block_product.cuh"

template <typename F>
constexpr bool HAS_INTEGERS = !F::IS_E4M3 && !F::IS_NF4;

constexpr int MOST_FIXED = 127 * 128;    // of an element in fixed point
constexpr float LEAST_ELEMENT = 1e-30f;  // a group without a larger one is zeros
constexpr unsigned INFINITE_BITS = 0x7f800000;
constexpr float ROUNDS_TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: an integer added to it is its last bits

// 32 elements of the row in fixed point: the scale, and the sums of each group of the weight's.
template <int GROUPS>
struct alignas(GROUPS == 1 ? 8 : 16) RowGroup {
  float scale;  // NaN where an element is not finite
  float sums[GROUPS];
};

template <typename F>
using RowGroupOf = RowGroup<F::GROUPS>;

__device__ __forceinline__ unsigned first_bytes(unsigned a, unsigned b, unsigned c, unsigned d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// The bytes of two vectors next to each other, in the order of `plane_bytes`: a lane has one of them and its
// neighbour the other, and each gets half of the words. `is_first`: its vector is that of the even round.
__device__ __forceinline__ uint2 in_turn(const unsigned (&bytes)[SEGMENT], bool is_first) {
  const unsigned begin = first_bytes(bytes[0], bytes[1], bytes[2], bytes[3]);
  const unsigned end = first_bytes(bytes[4], bytes[5], bytes[6], bytes[7]);
  const unsigned other = __shfl_xor_sync(FULL_WARP, is_first ? end : begin, 1);
  const unsigned even = is_first ? begin : other, odd = is_first ? other : end;
  return make_uint2(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362));
}

// Turns this warp's vectors of the row, each as its lane has written it, into bytes: high ones of elements
// 0, 4, 1, 5 and 2, 6, 3, 7, then low ones. `groups`: of each four vectors. `pairs`: if IN_PAIRS, the high
// bytes of each two vectors in the order of `plane_bytes`, then the low ones.
template <typename T, int GROUPS, bool IN_PAIRS>
__device__ __forceinline__ void fix_row(uint4* y, uint4* pairs, RowGroup<GROUPS>* groups, int vectors) {
  const int lane = lane_of_thread();
  if constexpr (IN_PAIRS) __syncwarp();  // a lane writes where its neighbour has read the norm's gains
#pragma unroll 1
  for (int first = 0; first < vectors; first += WARP_SIZE) {
    const int v = first + lane;
    const uint4 raw = v < vectors ? y[v] : make_uint4(0, 0, 0, 0);
    const Vec<T, SEGMENT> elements = reinterpret_cast<const Vec<T, SEGMENT>&>(raw);
    float x[SEGMENT], sum = 0.0f;
    unsigned most_bits = 0;  // of magnitudes, which are in the order of their bits, NaN last
#pragma unroll
    for (int e = 0; e < SEGMENT; ++e) {
      x[e] = to_float(elements[e]);
      sum += x[e];
      most_bits = max(most_bits, __float_as_uint(x[e]) & 0x7fffffff);
    }
    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
    if constexpr (GROUPS == 1) sum += __shfl_xor_sync(FULL_WARP, sum, 2);
    most_bits = max(most_bits, __shfl_xor_sync(FULL_WARP, most_bits, 1));
    most_bits = max(most_bits, __shfl_xor_sync(FULL_WARP, most_bits, 2));
    const float most = __uint_as_float(most_bits);
    const float inverse = most > LEAST_ELEMENT ? __fdividef(static_cast<float>(MOST_FIXED), most) : 0.0f;
    unsigned high[SEGMENT], low[SEGMENT];
#pragma unroll
    for (int e = 0; e < SEGMENT; ++e) {
      const unsigned fixed =
          __float_as_uint(fmaf(x[e], inverse, ROUNDS_TO_INTEGER)) - __float_as_uint(ROUNDS_TO_INTEGER);
      high[e] = static_cast<int>(fixed + 64) >> 7;
      low[e] = fixed - (high[e] << 7);
    }
    if constexpr (IN_PAIRS) {
      const bool is_first = v % 2 == v / 4 % 2;
      const uint2 high_words = in_turn(high, is_first), low_words = in_turn(low, is_first);
      uint2* const to = reinterpret_cast<uint2*>(pairs + v / 2 * 2) + (is_first ? 0 : 1);
      if (v < vectors) {
        to[0] = high_words;
        to[2] = low_words;
      }
    }
    if (v < vectors) {
      y[v] = make_uint4(
          first_bytes(high[0], high[4], high[1], high[5]), first_bytes(high[2], high[6], high[3], high[7]),
          first_bytes(low[0], low[4], low[1], low[5]), first_bytes(low[2], low[6], low[3], low[7]));
      RowGroup<GROUPS>& group = groups[v / 4];
      if (lane % 4 == 0) {
        group.scale = most_bits < INFINITE_BITS ? most * (1.0f / MOST_FIXED) : __uint_as_float(0x7fffffff);
        group.sums[0] = sum;
      }
      if (GROUPS == 2 && lane % 4 == 2) group.sums[GROUPS - 1] = sum;
    }
  }
}

// The pairs of a tile's units, which are the 16 rows of an mma: neighbours, or a gate and its up. So the last
// tile of a block, with units for half of the pairs or less, takes half the time.
template <int PAIRS>
struct TilePairs {
  int count = PAIRS, stride = 2, partner = 1;

  // Before a tile with so many units, or gates and as many ups.
  __device__ __forceinline__ void begin_tile(int num_units, int gated) {
    count = gated ? num_units : ceil_div(num_units, 2);
    stride = gated ? 1 : 2;
    partner = gated ? PAIRS : 1;
  }
  __device__ __forceinline__ bool needs_all() const { return PAIRS == 1 || count > PAIRS / 2; }
  // Of the tile's units, unit `i` of a pair.
  __device__ __forceinline__ int unit(int pair, int i) const { return pair * stride + i * partner; }
};

// Consumer of the one row: this warp's sums of a tile. Of an mma's eight columns, 2t and 2t+1 are the high
// and low bytes of lane t's elements, and zero where k is another lane's: so the sums of a step's four groups
// stay apart, and lane t finds those of its own.
template <typename V>
class RowConsumer {
  using T = typename V::T;
  using F = typename V::F;
  static constexpr int PAIRS = V::UNITS / 2;
  static constexpr int SUMS = F::GROUPS;  // whose scales differ: of rounds 0 and 1, 2 and 3

 public:
  static constexpr bool IN_PAIRS = F::HIGH == 2;

  // What `fix_row` leaves of this warp's; `zeros`: 64 bytes, for lanes without a column.
  __device__ __forceinline__ void begin(const uint4* y, const uint4* pairs, const RowGroupOf<F>* groups,
                                        const uint4* zeros) {
    groups_ = groups + lane();
    const int column = row_of_lane();
    const bool own = column / 2 == lane();
    row_ = reinterpret_cast<const uint2*>(own ? y + lane() * 4 : zeros) + (own ? column % 2 : 0);
    plane_row_ = own ? pairs + lane() * 4 + column % 2 : zeros;
    row_step_ = own ? V::STEP_VECTORS : 0;
#pragma unroll
    for (int round = 0; round < V::ROUNDS; ++round) {
      places_[round] = vector_of_round(round, lane()) * 2;
      asm volatile("" : "+r"(places_[round]));  // else it is computed again in each step
    }
  }

  __device__ __forceinline__ void begin_tile(int num_units, int gated) {
    pairs_.begin_tile(num_units, gated);
#pragma unroll
    for (int i = 0; i < PAIRS * 2; ++i) (&sums_[0][0])[i] = 0.0f;
  }
  __device__ __forceinline__ void advance() { slot_ = slot_ + 1 == V::STAGES ? 0 : slot_ + 1; }

  __device__ __forceinline__ void take_step(const unsigned char* ring, const uint4*, const NormPrologue<V>&,
                                            int step, bool) {
    copy_async_wait<V::STAGES - 1>();
    __syncwarp();
    const unsigned char* const units = ring + slot_ * V::STAGE_BYTES;
    if (pairs_.needs_all()) {
      take_pairs<PAIRS>(units, step);
    } else {
      take_pairs<ceil_div(PAIRS, 2)>(units, step);
    }
  }

  // As BlockConsumer's.
  __device__ __forceinline__ void share_sums(float* partial, int) const {
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = sums_[p][i];
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        const int place = warp_of_thread() * V::UNITS + pairs_.unit(p, i);
        if (lane() == 0) partial[place * V::GROUPS * 8 * UNIT + row_of_lane()] = sum;
      }
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return lane_of_thread() % 4; }

  template <int COUNT>
  __device__ __forceinline__ void take_pairs(const unsigned char* units, int step) {
    const RowGroupOf<F> group = groups_[step * 4];
    uint2 row[V::ROUNDS];
#pragma unroll
    for (int round = 0; round < V::ROUNDS; ++round) {
      row[round] = row_[step * row_step_ * 2 + places_[round]];
    }
#pragma unroll
    for (int p = 0; p < COUNT; ++p) {
      const LaneUnit<F> low(units + pairs_.unit(p, 0) * V::UNIT_BYTES);
      const LaneUnit<F> high(units + pairs_.unit(p, 1) * V::UNIT_BYTES);
      int products[SUMS][4] = {};
#pragma unroll
      for (int round = 0; round < V::ROUNDS; ++round) {
        const uint2 a = integer_bytes<F>(low.codes, round), b = integer_bytes<F>(high.codes, round);
        mma_bytes<F::SIGNED>(products[round * SUMS / V::ROUNDS], {a.x, b.x, a.y, b.y},
                             {row[round].x, row[round].y});
      }
      if constexpr (IN_PAIRS) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 a = plane_bytes<F>(low.codes, i), b = plane_bytes<F>(high.codes, i);
          const uint4 x = plane_row_[step * row_step_ + (vector_of_round(2 * i, lane()) / 2) * 2];
          mma_bytes<false>(products[i], {a.x, b.x, a.y, b.y}, {x.x, x.y});
          mma_bytes<false>(products[i], {a.z, b.z, a.w, b.w}, {x.z, x.w});
        }
      }
      add_scaled(sums_[p][0], products, 0, low, group);
      add_scaled(sums_[p][1], products, 1, high, group);
    }
  }

  // Products of this lane's 32 elements of unit `i` of a pair.
  static __device__ __forceinline__ void add_scaled(float& sum, const int (&products)[SUMS][4], int i,
                                                    const LaneUnit<F>& own, const RowGroupOf<F>& group) {
    float factors[F::GROUPS], offsets[F::GROUPS] = {};
    F::scales(own.record, BlockSteps<V>::half(), lane(), factors, offsets);
    float scaled = 0.0f;
#pragma unroll
    for (int s = 0; s < SUMS; ++s) {
      const float product = products[s][i * 2] * 128 + products[s][i * 2 + 1];
      const bool second = F::GROUPS == 2 && vector_of_round(2 * s, lane()) >= 2;
      scaled = fmaf(second ? factors[F::GROUPS - 1] : factors[0], product, scaled);
    }
    sum = fmaf(group.scale, scaled, sum);
#pragma unroll
    for (int g = 0; g < F::GROUPS; ++g) {
      if constexpr (F::GROUP_ZERO >= 0) {
        sum = fmaf(-factors[g] * (offsets[g] - F::GROUP_ZERO), group.sums[g], sum);
      } else if constexpr (F::HAS_OFFSET || F::ZERO != 0) {
        sum = fmaf(F::HAS_OFFSET ? offsets[g] - factors[g] * F::ZERO : -factors[g] * F::ZERO, group.sums[g],
                   sum);
      }
    }
  }

  const RowGroupOf<F>* groups_;  // of this lane's 32 elements of a step
  const uint2* row_;             // its bytes, of one kind,
  const uint4* plane_row_;       // and in pairs
  int row_step_;                 // vectors
  int places_[V::ROUNDS];        // in a step's part of `row_`
  TilePairs<PAIRS> pairs_;
  float sums_[PAIRS][2];
  int slot_ = 0;
};

template <typename V, bool IN_FIXED_POINT>
struct ConsumerFor {
  using type = BlockConsumer<V>;
};
template <typename V>
struct ConsumerFor<V, true> {
  using type = RowConsumer<V>;
};
