// The product of a single row by a weight in quantised blocks whose values are integers: the row in fixed
// point, times the integers themselves, and scales for sums instead of for elements.
//
// An element of x is scale * (256 * high + low), where 32 elements share the scale and high and low are
// signed bytes: |error| <= 2^-15.96 max |x| of the 32. Integers times bytes add up exactly; scales, zeros and
// offsets are float32 throughout, so weights are not rounded as those of several rows are.
#pragma once

#include "quant/block_product.cuh"

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

// Brings eight elements of each of `raw` into fixed point, of vectors `first` + 32 i + lane: to y the high
// bytes of elements 0, 4, 1, 5 and 2, 6, 3, 7 of those that `halves_of_vector` names, and the low ones, and
// of each four vectors to `groups`. Called by a warp; there are `vectors`, and beyond them `raw` is zeros.
// Each step is taken for all of `raw`, so that they hide each other's latency.
template <typename T, typename F, int COUNT>
__device__ __forceinline__ void fix_vectors(const uint4 (&raw)[COUNT], int first, int vectors, uint4* y,
                                            RowGroupOf<F>* groups) {
  float x[COUNT][SEGMENT], sums[COUNT] = {};
  unsigned most_bits[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const Vec<T, SEGMENT> elements = reinterpret_cast<const Vec<T, SEGMENT>&>(raw[i]);
    float most = 0.0f;
#pragma unroll
    for (int e = 0; e < SEGMENT; ++e) {
      x[i][e] = to_float(elements[e]);
      sums[i] += x[i][e];
      most = fmaxf(most, fabsf(x[i][e]));
    }
    // Magnitudes are in the order of their bits, NaN last.
    most_bits[i] = sums[i] == sums[i] ? __float_as_uint(most) : NAN_BITS;
  }
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if (distance == 1 || F::GROUPS == 1) {
        sums[i] += __shfl_xor_sync(FULL_WARP, sums[i], distance);
      }
      most_bits[i] = max(most_bits[i], __shfl_xor_sync(FULL_WARP, most_bits[i], distance));
    }
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int v = first + i * WARP_SIZE + lane_of_thread();
    const float most = __uint_as_float(most_bits[i]);
    const float inverse = most > LEAST_ELEMENT ? __fdividef(static_cast<float>(MOST_FIXED), most) : 0.0f;
    // With 128 added, the second byte is the high one, and the first the low one with its sign turned.
    unsigned fixed[SEGMENT], high[2], low[2];
#pragma unroll
    for (int e = 0; e < SEGMENT; ++e) {
      fixed[e] = __float_as_uint(fmaf(x[i][e], inverse, ROUNDS_TO_INTEGER + 128.0f));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned begin = __byte_perm(fixed[h * 2], fixed[h * 2 + 4], 0x5140);
      const unsigned end = __byte_perm(fixed[h * 2 + 1], fixed[h * 2 + 5], 0x5140);
      low[h] = __byte_perm(begin, end, 0x5410) ^ 0x80808080;
      high[h] = __byte_perm(begin, end, 0x7632);
    }
    if (v >= vectors) continue;
    constexpr bool PAIRED = IN_PAIRS<F>;
    uint2* const to = reinterpret_cast<uint2*>(PAIRED ? y + v / 2 * 2 : y + v) + (PAIRED ? v % 2 : 0);
    to[0] = make_uint2(high[0], high[1]);
    to[PAIRED ? 2 : 1] = make_uint2(low[0], low[1]);
    RowGroupOf<F>& group = groups[v / 4];
    if (v % 4 == 0) {
      group.scale = most_bits[i] < INFINITE_BITS ? most * (1.0f / MOST_FIXED) : __uint_as_float(NAN_BITS);
      group.sums[0] = sums[i];
    }
    if (F::GROUPS == 2 && v % 4 == 2) group.sums[F::GROUPS - 1] = sums[i];
  }
}

// The norm before the product, and the row in fixed point, of which each warp has its steps: of the first
// ones at once, of the others before the first tile takes them, so that weights come meanwhile. BATCH loads
// of a lane are in flight at once.
template <typename T, typename F, int NUM_WARPS, int BATCH>
class RowPrologue {
  static constexpr bool SCALES_SUMS = has_float_range<T>;  // the norm's root divides the sums
  static constexpr int TOGETHER = BATCH > 4 ? 2 : 1;       // whose instructions hide each other's latency
  static constexpr int STEP_VECTORS = STEP / SEGMENT;
  static constexpr int LANES_K = WARP_SIZE / STEP_VECTORS * NUM_WARPS * STEP;
  static constexpr int STEPS_AT_ONCE = TOGETHER * WARP_SIZE / STEP_VECTORS;

 public:
  // Before earlier kernels have ended.
  __device__ __forceinline__ RowPrologue(const T* x, const T* norm, float* sums_of_squares, int in_features,
                                         float eps, int vectors)
      : norm_(norm), squares_(sums_of_squares), in_features_(in_features), eps_(eps), vectors_(vectors) {
    const int2 halves = halves_of_vector<F>(lane_of_thread());
    const int k = element(halves.x);
    to_other_ = element(halves.y) - k;
    left_ = in_features - k;
    x_ = reinterpret_cast<unsigned long long>(x + k);
    // Else they are computed when earlier kernels have ended.
    asm volatile("" : "+l"(x_), "+r"(left_), "+r"(vectors_));
    load(norm + k, norm == nullptr ? 0 : left_, gains_);
  }

  // This warp's vectors of the row, 128 elements of every NUM_WARPS * 128: those of the first STEPS_AT_ONCE
  // in fixed point, the others as they are.
  __device__ __forceinline__ void take(uint4* y, RowGroupOf<F>* groups) {
    const T* const x = reinterpret_cast<const T*>(x_);
    float scale = 1.0f;
    uint4 raw[BATCH];
    if (norm_ != nullptr && !SCALES_SUMS) {
#pragma unroll 1
      for (int first = 0; first < vectors_; first += BATCH * WARP_SIZE) {
        load(x + passed(first), left_ - passed(first), raw);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) sum_ = add_squares<T>(sum_, raw[i]);
      }
      share_sum();
      __syncthreads();
      scale = inverse_rms();
    }
#pragma unroll 1
    for (int first = 0; first < vectors_; first += BATCH * WARP_SIZE) {
      load(x + passed(first), left_ - passed(first), raw);
      if (first > 0 && norm_ != nullptr) {
        load(norm_ + (in_features_ - left_) + passed(first), left_ - passed(first), gains_);
      }
#pragma unroll
      for (int i = 0; i < BATCH; i += TOGETHER) {
        if (first + i * WARP_SIZE >= vectors_) break;
        uint4 some[TOGETHER];
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) some[j] = normalised(raw[i + j], gains_[i + j], scale);
        if (i == 0 && first == 0) {
          fix_vectors<T, F>(some, 0, vectors_, y, groups);
          continue;
        }
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
          const int v = first + (i + j) * WARP_SIZE + lane_of_thread();
          if (v < vectors_) y[v] = some[j];
        }
      }
    }
    __syncwarp();
  }

  // Before a step of the first tile, one after the other.
  __device__ __forceinline__ void fix_until(int step, uint4* y, RowGroupOf<F>* groups) {
    if (step < fixed_steps_) return;
    const int first = fixed_steps_ * STEP_VECTORS;
    uint4 some[TOGETHER];
#pragma unroll
    for (int j = 0; j < TOGETHER; ++j) {
      const int v = first + j * WARP_SIZE + lane_of_thread();
      some[j] = v < vectors_ ? y[v] : make_uint4(0, 0, 0, 0);
    }
    __syncwarp();  // a lane writes where its neighbour reads
    fix_vectors<T, F>(some, first, vectors_, y, groups);
    __syncwarp();
    fixed_steps_ += STEPS_AT_ONCE;
  }

  // After the first tile's last step, so that nothing waits for it.
  __device__ __forceinline__ void share_squares() const {
    if (norm_ != nullptr && SCALES_SUMS) share_sum();
  }

  // What the sums of a tile are multiplied by. Called by a warp.
  __device__ __forceinline__ float scale_of_sums() const {
    return norm_ != nullptr && SCALES_SUMS ? inverse_rms() : 1.0f;
  }

 private:
  __device__ __forceinline__ uint4 normalised(const uint4& raw, const uint4& gains, float scale) {
    if (norm_ == nullptr) return raw;
    if constexpr (!SCALES_SUMS) return scaled_elements<T>(raw, gains, scale);
    sum_ = add_squares<T>(sum_, raw);
    return multiply_elements<T>(raw, gains);
  }
  __device__ __forceinline__ void share_sum() const {
    const float squares = warp_sum(sum_);
    if (lane_of_thread() == 0) squares_[warp_of_thread()] = squares;
  }
  __device__ __forceinline__ float inverse_rms() const {
    const float sum = warp_sum(lane_of_thread() < NUM_WARPS ? squares_[lane_of_thread()] : 0.0f);
    return rsqrtf(__fdividef(sum, in_features_) + eps_);
  }

  // Elements from this lane's vector v % 32 to its vector v.
  static __device__ __forceinline__ int passed(int v) { return v / WARP_SIZE * LANES_K; }

  // The halves of every 32nd vector that `fix_vectors` takes together, zeros beyond `left` elements. Without
  // branches, which take longer than loads.
  __device__ __forceinline__ void load(const T* from, int left, uint4 (&raw)[BATCH]) const {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const T* const place = from + i * LANES_K;
      raw[i] = make_uint4(0, 0, 0, 0);
      if constexpr (IN_PAIRS<F>) {
        uint2 a = make_uint2(0, 0), b = make_uint2(0, 0);
        if (i * LANES_K < left) load_past_l1(a, place);
        if (i * LANES_K < left) load_past_l1(b, place + to_other_);
        raw[i] = make_uint4(a.x, a.y, b.x, b.y);
      } else {
        if (i * LANES_K < left) load_past_l1(raw[i], place);
      }
    }
  }
  // The first one of half a vector of this warp's.
  static __device__ __forceinline__ int element(int half) {
    constexpr int HALVES = STEP / SEGMENT * 2;
    return (half / HALVES * NUM_WARPS + warp_of_thread()) * STEP + half % HALVES * (SEGMENT / 2);
  }

  const T* const norm_;
  float* const squares_;  // [NUM_WARPS]
  const int in_features_;
  const float eps_;
  int vectors_;
  unsigned long long x_;  // of this lane's first half of a vector
  int left_, to_other_;   // elements from there to the row's end and to the other half
  float sum_ = 0.0f;      // of this lane's squares
  int fixed_steps_ = STEPS_AT_ONCE;
  uint4 gains_[BATCH];
};

// The row's bytes as a lane gives them to the tensor cores. Of an mma's eight columns, 2t and 2t+1 are the
// high and low bytes of lane t's elements, and zero where k is another lane's: so the sums of a step's four
// groups stay apart, and lane t finds those of its own.
template <typename F>
class RowBytes {
  static constexpr int ROUNDS = LANE_ELEMENTS / SEGMENT;

 public:
  // `y`: this warp's, as `fix_vectors` leaves it; `zeros`: 64 bytes, for lanes without a column. Both, and
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
  // What `RowPrologue` leaves of this warp's.
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
        if (lane_of_thread() % 4 == 0) partial[place * UNIT + row_of_lane()] = sum;
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
