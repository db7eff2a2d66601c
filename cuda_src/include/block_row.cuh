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

// Whether a byte of codes has two integers: the upper one is multiplied where it is, sixteen times too large.
template <typename F>
constexpr bool IN_NIBBLES = F::LOW == 4 && F::HIGH == 0 && !F::Table::LOOKS_UP;

constexpr int ROUNDS_A_STEP = LANE_ELEMENTS / SEGMENT;
constexpr int ROW_ZEROS = STEP * 2 / sizeof(uint4);  // what a lane without a column reads, of 16 bytes

// Where the four elements that lane `v % 32` brings into fixed point first lie, and the other four: its
// vector v of the row; in pairs, one half of it and of its neighbour, that of the even round first.
template <typename F>
__device__ __forceinline__ int2 halves_of_vector(int v) {
  if constexpr (!IN_PAIRS<F>) return make_int2(v * 2, v * 2 + 1);
  const int even = v / 4 % 2;  // the vector of a lane's even round, of the two
  const int half = v / 2 * 4 + v % 2;
  return make_int2(half + even * 2, half + 2 - even * 2);
}

// Rounds whose bytes a lane loads at once.
template <typename F>
constexpr int ROUNDS_AT_ONCE = IN_PAIRS<F> || IN_NIBBLES<F> ? 2 : 1;

// Of a step's bytes, as words, those of lane t's vector e begin at `high` and at `low`, and the second four
// are `apart` from the first. What is loaded at once the four lanes have one behind the other: lanes that
// read together read neighbours, and rounds differ by a number that the compiler knows.
struct VectorPlace {
  int high, low, apart;
};
template <typename F>
__device__ __forceinline__ VectorPlace place_of_vector(int t, int e) {
  constexpr int WORDS = 2 * ROUNDS_AT_ONCE<F>;  // of a lane at once, high or low
  const int round = e ^ t, first = (round / ROUNDS_AT_ONCE<F> * 4 + t) * 2 * WORDS;
  if constexpr (IN_NIBBLES<F>) return {first + round % 2, first + round % 2 + WORDS, 2};
  if constexpr (IN_PAIRS<F>) return {first + e % 2 * 2, first + e % 2 * 2 + WORDS, 1};
  return {first, first + WORDS, 1};
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
  unsigned* const to = reinterpret_cast<unsigned*>(y + v / 16 * 16);
  const VectorPlace place = place_of_vector<F>(v % 16 / 4, v % 4);
  to[place.high] = high[0];
  to[place.high + place.apart] = high[1];
  to[place.low] = low[0];
  to[place.low + place.apart] = low[1];
  RowGroupOf<F>& group = groups[v / 4];
  if (v % 4 == 0) {
    constexpr float UNIT_OF_SUMS = 1.0f / (MOST_FIXED * (IN_NIBBLES<F> ? 16 : 1));
    group.scale = most_bits < INFINITE_BITS ? most * UNIT_OF_SUMS : __uint_as_float(NAN_BITS);
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

// Sums of a lane's integers of two rows times the row's bytes; in nibbles of the lower integers and of the
// upper ones, else of each group.
template <typename F>
struct RowProducts {
  int sums[IN_NIBBLES<F> ? 2 : F::GROUPS][4] = {};

  // Of row `i`, and sixteen times as much in nibbles; `s`: of the lane's first group or the other one.
  __device__ __forceinline__ float total(int i, int s) const {
    if constexpr (IN_NIBBLES<F>) {
      const int high = sums[0][i * 2] * 16 + sums[1][i * 2];
      const int low = sums[0][i * 2 + 1] * 16 + sums[1][i * 2 + 1];
      return high * 256 + low;
    }
    return sums[s][i * 2] * 256 + sums[s][i * 2 + 1];
  }
};

// The row's bytes as a lane gives them to the tensor cores. Of an mma's eight columns, 2t and 2t+1 are the
// high and low bytes of lane t's elements, and zero where k is another lane's: so the sums of a step's four
// groups stay apart, and lane t finds those of its own.
template <typename F>
class RowBytes {
 public:
  static constexpr int LOADS = ROUNDS_A_STEP / ROUNDS_AT_ONCE<F>;
  using Words = Vec<unsigned, 2 * ROUNDS_AT_ONCE<F>>;

  // `y`: as `fix_vector` leaves it; `zeros`: ROW_ZEROS, for lanes without a column. Both at multiples of 128
  // bytes.
  __device__ __forceinline__ RowBytes(const unsigned char* shared, const uint4* y, const uint4* zeros)
      : shared_(shared) {
    const int column = row_of_lane(), lane = lane_of_thread() % 4;
    const bool own = column / 2 == lane;
    const unsigned place = (lane * 2 + column % 2) * static_cast<int>(sizeof(Words));
    const unsigned from = own ? shared_address(y) + place : shared_address(zeros);
    from_ = static_cast<int>(from - shared_address(shared));
    step_ = own ? STEP * 2 : 0;
    asm volatile("" : "+r"(from_), "+r"(step_));  // else they are computed again in each step
  }

  __device__ __forceinline__ void load(int step, Words (&bytes)[LOADS]) const {
    const unsigned char* const from = shared_ + (from_ + step * step_);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      bytes[i] = Words::load(reinterpret_cast<const unsigned*>(from + i * (STEP * 2 / LOADS)));
    }
  }

  static __device__ __forceinline__ void multiply(const LaneCodes<F>& low, const LaneCodes<F>& high,
                                                  const Words (&bytes)[LOADS], RowProducts<F>& products) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const Words& words = bytes[i];
      if constexpr (IN_PAIRS<F>) {
        int (&sums)[4] = products.sums[i * F::GROUPS / LOADS];
        const uint4 a = paired_bytes<F>(low, i), b = paired_bytes<F>(high, i);
        mma_bytes<false>(sums, {a.x, b.x, a.y, b.y}, {words[0], words[1]});
        mma_bytes<false>(sums, {a.z, b.z, a.w, b.w}, {words[2], words[3]});
      } else if constexpr (IN_NIBBLES<F>) {  // an mma has half of the elements of two rounds
        constexpr unsigned LOW = 0x0f0f0f0f, HIGH = 0xf0f0f0f0;
        const unsigned a0 = low.words[i * 2], a1 = low.words[i * 2 + 1];
        const unsigned b0 = high.words[i * 2], b1 = high.words[i * 2 + 1];
        mma_bytes<false>(products.sums[0], {a0 & LOW, b0 & LOW, a1 & LOW, b1 & LOW}, {words[0], words[1]});
        mma_bytes<false>(products.sums[1], {a0 & HIGH, b0 & HIGH, a1 & HIGH, b1 & HIGH},
                         {words[2], words[3]});
      } else {
        const uint2 a = integer_bytes<F>(low, i), b = integer_bytes<F>(high, i);
        mma_bytes<F::SIGNED>(products.sums[i * F::GROUPS / LOADS], {a.x, b.x, a.y, b.y},
                             {words[0], words[1]});
      }
    }
  }

 private:
  const unsigned char* const shared_;
  int from_, step_;  // bytes
};

// Adds the products of a lane's 32 elements of row `i` of two, whose header is `record`.
template <typename F>
__device__ __forceinline__ void add_scaled(float& sum, const RowProducts<F>& products, int i,
                                           const unsigned (&record)[RECORD_WORDS], int half,
                                           const RowGroupOf<F>& group) {
  const int lane = lane_of_thread() % 4;
  float factors[F::GROUPS], offsets[F::GROUPS] = {};
  F::scales(record, half, lane, factors, offsets);
  float scaled = 0.0f;
#pragma unroll
  for (int s = 0; s < F::GROUPS; ++s) {
    const float product = products.total(i, s);
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
    typename RowBytes<F>::Words bytes[RowBytes<F>::LOADS];
    bytes_.load(step, bytes);
#pragma unroll
    for (int p = 0; p < COUNT; ++p) {
      const LaneUnit<F> low(units + pairs_.unit(p, 0) * V::UNIT_BYTES);
      const LaneUnit<F> high(units + pairs_.unit(p, 1) * V::UNIT_BYTES);
      RowProducts<F> products;
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
