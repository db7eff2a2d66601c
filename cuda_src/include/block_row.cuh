// The product of a single row by a weight in quantised blocks whose values are integers: the row in fixed
// point, times the integers themselves, and scales for sums instead of for elements.
//
// An element of x is scale * (256 * high + low), where 32 elements share the scale and high and low are
// signed bytes: |error| <= 2^-15.96 max |x| of the 32. Integers times bytes add up exactly; scales, zeros and
// offsets are float32 throughout, so weights are not rounded as those of several rows are.
#pragma once

#include "block_product.cuh"

template <typename F>
constexpr bool HAS_INTEGERS = !F::IS_E4M3 && !F::IS_NF4;

constexpr int MOST_FIXED = 127 * 256;    // of an element in fixed point
constexpr float LEAST_ELEMENT = 1e-30f;  // a group without a larger one is zeros
constexpr unsigned INFINITE_BITS = 0x7f800000;
constexpr unsigned NAN_BITS = 0x7fffffff;
constexpr float ROUNDS_TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: an integer added to it is its last bits

// 32 elements of the row in fixed point: the scale, and the sums of each group of the weight's.
template <int GROUPS>
struct alignas(GROUPS == 1 ? 8 : 16) RowGroup {
  float scale;  // NaN where an element is not finite
  float sums[GROUPS];
};

template <typename F>
using RowGroupOf = RowGroup<F::GROUPS>;

// Whether the row's bytes lie in the order of `paired_bytes`, else in that of `integer_bytes`.
template <typename F>
constexpr bool IN_PAIRS = F::HIGH == 2;

// Where the four elements that lane `v % 32` brings into fixed point first lie, and the other four: its
// vector v of the row; in pairs, one half of it and of its neighbour, that of the even round first.
template <typename F>
__device__ __forceinline__ int2 halves_of_vector(int v) {
  if constexpr (!IN_PAIRS<F>) return make_int2(v * 2, v * 2 + 1);
  const int even = v / 4 % 2;  // the vector of a lane's even round, of the two
  const int half = v / 2 * 4 + v % 2;
  return make_int2(half + even * 2, half + 2 - even * 2);
}

// Brings eight elements into fixed point: to y the high bytes of elements 0, 4, 1, 5 and 2, 6, 3, 7 of those
// that `halves_of_vector` names, and the low ones, and of each four vectors to `groups`. Called by a warp,
// `valid` where there is such a vector; elsewhere `raw` is zeros.
template <typename T, typename F>
__device__ __forceinline__ void fix_vector(const uint4& raw, int v, bool valid, uint4* y,
                                           RowGroupOf<F>* groups) {
  const Vec<T, SEGMENT> elements = reinterpret_cast<const Vec<T, SEGMENT>&>(raw);
  float x[SEGMENT], sum = 0.0f, most = 0.0f;
#pragma unroll
  for (int e = 0; e < SEGMENT; ++e) {
    x[e] = to_float(elements[e]);
    sum += x[e];
    most = fmaxf(most, fabsf(x[e]));
  }
  // Magnitudes are in the order of their bits, NaN last.
  unsigned most_bits = sum == sum ? __float_as_uint(most) : NAN_BITS;
  sum += __shfl_xor_sync(FULL_WARP, sum, 1);
  if constexpr (F::GROUPS == 1) sum += __shfl_xor_sync(FULL_WARP, sum, 2);
  most_bits = max(most_bits, __shfl_xor_sync(FULL_WARP, most_bits, 1));
  most_bits = max(most_bits, __shfl_xor_sync(FULL_WARP, most_bits, 2));
  most = __uint_as_float(most_bits);
  const float inverse = most > LEAST_ELEMENT ? __fdividef(static_cast<float>(MOST_FIXED), most) : 0.0f;
  // With 128 added, the second byte is the high one, and the first the low one with its sign turned.
  unsigned fixed[SEGMENT], high[2], low[2];
#pragma unroll
  for (int e = 0; e < SEGMENT; ++e) {
    fixed[e] = __float_as_uint(fmaf(x[e], inverse, ROUNDS_TO_INTEGER + 128.0f));
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned begin = __byte_perm(fixed[i * 2], fixed[i * 2 + 4], 0x5140);
    const unsigned end = __byte_perm(fixed[i * 2 + 1], fixed[i * 2 + 5], 0x5140);
    low[i] = __byte_perm(begin, end, 0x5410) ^ 0x80808080;
    high[i] = __byte_perm(begin, end, 0x7632);
  }
  if (!valid) return;
  uint2* const to = reinterpret_cast<uint2*>(IN_PAIRS<F> ? y + v / 2 * 2 : y + v) + (IN_PAIRS<F> ? v % 2 : 0);
  to[0] = make_uint2(high[0], high[1]);
  to[IN_PAIRS<F> ? 2 : 1] = make_uint2(low[0], low[1]);
  RowGroupOf<F>& group = groups[v / 4];
  if (v % 4 == 0) {
    group.scale = most_bits < INFINITE_BITS ? most * (1.0f / MOST_FIXED) : __uint_as_float(NAN_BITS);
    group.sums[0] = sum;
  }
  if (F::GROUPS == 2 && v % 4 == 2) group.sums[F::GROUPS - 1] = sum;
}

// Turns this warp's vectors of the row into bytes, in place.
template <typename T, typename F>
__device__ __forceinline__ void fix_row(uint4* y, RowGroupOf<F>* groups, int vectors) {
  const uint2* const halves = reinterpret_cast<const uint2*>(y);
#pragma unroll 1
  for (int first = 0; first < vectors; first += WARP_SIZE) {
    const int v = first + lane_of_thread();
    uint4 raw = make_uint4(0, 0, 0, 0);
    __syncwarp();  // a lane reads what its neighbour has written, and writes where that one reads
    if (v < vectors) {
      const int2 place = halves_of_vector<F>(v);
      const uint2 a = halves[place.x], b = halves[place.y];
      raw = make_uint4(a.x, a.y, b.x, b.y);
    }
    __syncwarp();
    fix_vector<T, F>(raw, v, v < vectors, y, groups);
  }
}

// The row's bytes as a lane gives them to the tensor cores. Of an mma's eight columns, 2t and 2t+1 are the
// high and low bytes of lane t's elements, and zero where k is another lane's: so the sums of a step's four
// groups stay apart, and lane t finds those of its own.
template <typename F>
class RowBytes {
  static constexpr int ROUNDS = LANE_ELEMENTS / SEGMENT;

 public:
  // `y`: this warp's, as `fix_vector` leaves it; `zeros`: 64 bytes, for lanes without a column. Both, and
  // `shared`, at multiples of 64 bytes.
  __device__ __forceinline__ RowBytes(const unsigned char* shared, const uint4* y, const uint4* zeros)
      : shared_(shared) {
    const int column = row_of_lane();
    const bool own = column / 2 == lane();
    const uint4* const from = own ? y + lane() * 4 + vector(0) : zeros;
    from_ = static_cast<int>(shared_address(from) - shared_address(shared)) +
            (own ? column % 2 * COLUMN_BYTES : 0);
    step_ = own ? STEP * 2 : 0;
    asm volatile("" : "+r"(from_), "+r"(step_));  // else they are computed again in each step
  }

  // Of a round each; in pairs, of two rounds each two.
  __device__ __forceinline__ void load(int step, uint2 (&bytes)[ROUNDS]) const {
    const int from = from_ + step * step_;
#pragma unroll
    for (int i = 0; i < PLACES; ++i) {
      // Vector r ^ t of 64 bytes, or a pair of them.
      const unsigned char* const place = shared_ + (from ^ i * (LANE_ELEMENTS * 2 / PLACES));
      if constexpr (IN_PAIRS<F>) {
        const uint4 both = *reinterpret_cast<const uint4*>(place);
        bytes[i * 2] = make_uint2(both.x, both.y);
        bytes[i * 2 + 1] = make_uint2(both.z, both.w);
      } else {
        bytes[i] = *reinterpret_cast<const uint2*>(place);
      }
    }
  }

  // Products of a lane's integers of two rows, whose scales differ from SUMS to SUMS.
  template <int SUMS>
  static __device__ __forceinline__ void multiply(const LaneCodes<F>& low, const LaneCodes<F>& high,
                                                  const uint2 (&bytes)[ROUNDS], int (&products)[SUMS][4]) {
#pragma unroll
    for (int i = 0; i < PLACES; ++i) {
      if constexpr (IN_PAIRS<F>) {
        const uint4 a = paired_bytes<F>(low, i), b = paired_bytes<F>(high, i);
        mma_bytes<false>(products[i], {a.x, b.x, a.y, b.y}, {bytes[i * 2].x, bytes[i * 2].y});
        mma_bytes<false>(products[i], {a.z, b.z, a.w, b.w}, {bytes[i * 2 + 1].x, bytes[i * 2 + 1].y});
      } else {
        const uint2 a = integer_bytes<F>(low, i), b = integer_bytes<F>(high, i);
        mma_bytes<F::SIGNED>(products[i * SUMS / ROUNDS], {a.x, b.x, a.y, b.y}, {bytes[i].x, bytes[i].y});
      }
    }
  }

 private:
  static constexpr int PLACES = IN_PAIRS<F> ? ROUNDS / 2 : ROUNDS;
  static constexpr int COLUMN_BYTES = IN_PAIRS<F> ? 16 : 8;  // from the high bytes to the low ones

  static __device__ __forceinline__ int lane() { return lane_of_thread() % 4; }
  static __device__ __forceinline__ int vector(int round) {
    return vector_of_round(round, lane()) / (ROUNDS / PLACES) * (ROUNDS / PLACES);
  }

  const unsigned char* const shared_;
  int from_, step_;  // bytes
};

// Adds the products of a lane's 32 elements of row `i` of two, whose header is `record`.
template <typename F>
__device__ __forceinline__ void add_scaled(float& sum, const int (&products)[F::GROUPS][4], int i,
                                           const unsigned (&record)[RECORD_WORDS], int half,
                                           const RowGroupOf<F>& group) {
  const int lane = lane_of_thread() % 4;
  float factors[F::GROUPS], offsets[F::GROUPS] = {};
  F::scales(record, half, lane, factors, offsets);
  float scaled = 0.0f;
#pragma unroll
  for (int s = 0; s < F::GROUPS; ++s) {
    const float product = products[s][i * 2] * 256 + products[s][i * 2 + 1];
    const bool second = F::GROUPS == 2 && vector_of_round(2 * s, lane) >= 2;
    scaled = fmaf(second ? factors[F::GROUPS - 1] : factors[0], product, scaled);
  }
  sum = fmaf(group.scale, scaled, sum);
#pragma unroll
  for (int g = 0; g < F::GROUPS; ++g) {
    if constexpr (F::GROUP_ZERO >= 0) {
      sum = fmaf(-factors[g] * (offsets[g] - F::GROUP_ZERO), group.sums[g], sum);
    } else if constexpr (F::HAS_OFFSET || F::ZERO != 0) {
      static_assert(!F::HAS_OFFSET || F::ZERO == 0, "an offset is all that is added");
      sum = fmaf(F::HAS_OFFSET ? offsets[g] : -factors[g] * F::ZERO, group.sums[g], sum);
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

// Consumer of the one row: this warp's sums of a tile.
template <typename V>
class RowConsumer {
  using T = typename V::T;
  using F = typename V::F;
  static constexpr int PAIRS = V::UNITS / 2;

 public:
  // What `fix_row` leaves of this warp's.
  __device__ __forceinline__ RowConsumer(const unsigned char* shared, const uint4* y,
                                         const RowGroupOf<F>* groups, const uint4* zeros)
      : bytes_(shared, y, zeros), groups_(groups + lane_of_thread() % 4) {}

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
        if (lane_of_thread() % 4 == 0) partial[place * V::GROUPS * 8 * UNIT + row_of_lane()] = sum;
      }
    }
  }

 private:
  template <int COUNT>
  __device__ __forceinline__ void take_pairs(const unsigned char* units, int step) {
    const RowGroupOf<F> group = groups_[step * 4];
    uint2 bytes[V::ROUNDS];
    bytes_.load(step, bytes);
#pragma unroll
    for (int p = 0; p < COUNT; ++p) {
      const LaneUnit<F> low(units + pairs_.unit(p, 0) * V::UNIT_BYTES);
      const LaneUnit<F> high(units + pairs_.unit(p, 1) * V::UNIT_BYTES);
      int products[F::GROUPS][4] = {};
      RowBytes<F>::multiply(low.codes, high.codes, bytes, products);
      add_scaled<F>(sums_[p][0], products, 0, low.record, BlockSteps<V>::half(), group);
      add_scaled<F>(sums_[p][1], products, 1, high.record, BlockSteps<V>::half(), group);
    }
  }

  const RowBytes<F> bytes_;
  const RowGroupOf<F>* groups_;  // of this lane's 32 elements of a step
  TilePairs<PAIRS> pairs_;
  float sums_[PAIRS][2];
  int slot_ = 0;
};

template <typename V, bool IN_FIXED_POINT>
struct ConsumerFor {
  using type = BlockConsumer<V>;
  static __device__ __forceinline__ type make(const unsigned char*, const uint4*,
                                              const RowGroupOf<typename V::F>*, const uint4*) {
    return type();
  }
};
template <typename V>
struct ConsumerFor<V, true> {
  using type = RowConsumer<V>;
  static __device__ __forceinline__ type make(const unsigned char* shared, const uint4* y,
                                              const RowGroupOf<typename V::F>* groups, const uint4* zeros) {
    return type(shared, y, groups, zeros);
  }
};
