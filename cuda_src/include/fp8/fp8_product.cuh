// Products of a few e4m3 rows by tensor cores: the row that a block quantises for itself, and the sums.
#pragma once

#include "fp8/fp8_rows.cuh"
#include "generated/fp8_product.cuh"
#include "linear/decode_product.cuh"

constexpr int HALVES = 2;  // of a step, of 64 e4m3 each
constexpr int STEP_ELEMENTS = 2 * HALVES * HALF_K;
constexpr int ROW_VECTORS = STEP_ELEMENTS / SEGMENT;  // of 8 elements of a row, a step
constexpr int CODE_VECTORS = STEP_ELEMENTS / 16;      // of 16 bytes of e4m3, a step
static_assert(STEP_ELEMENTS == SCALES, "a step has one scale of a row");

// Pairs of sums that a unit of a warp leaves for the others, of several rows.
template <typename V>
constexpr int PARTIAL_PAIRS = V::GROUPS * WARP_SIZE;

// Where a block keeps its one row: of each warp the elements of its own steps and, once they are codes and
// take half of the room, its sums behind them.
template <typename V>
struct RowPlaces {
  int code_bytes;  // of a warp
  int warp_bytes;

  __device__ __forceinline__ explicit RowPlaces(int steps)
      : code_bytes(steps * STEP_ELEMENTS),
        warp_bytes(max(2 * code_bytes, code_bytes + V::UNITS * UNIT * static_cast<int>(sizeof(float)))) {}
};

// The one row of a product as e4m3: the norm, the scales and the codes. A warp has the elements of its own
// steps, as vectors of eight one step after another; each lane keeps to its own vectors until they are codes.
// Loops that do not unroll: what a short kernel runs but once is as fast as its instructions arrive.
template <typename T, bool BLOCKS>
class RowQuantizer {
  using Vector = Vec<T, SEGMENT>;
  static constexpr int LOADS = 8;  // in flight
  static constexpr int KEPT_GAINS =
      2;  // vectors of the norm that a lane loads early, the rest come when needed

 public:
  //   row: this warp's vectors, codes in their place in the end; step_scales: of its steps, with BLOCKS;
  //   sums, maxima: of the warps
  __device__ __forceinline__ RowQuantizer(const T* norm, uint4* row, float* step_scales, float* sums,
                                          float* maxima, int steps, int in_features, float eps,
                                          float static_scale)
      : norm_(norm),
        row_(row),
        step_scales_(step_scales),
        sums_(sums),
        maxima_(maxima),
        vectors_(steps * ROW_VECTORS),
        in_features_(in_features),
        eps_(eps),
        static_scale_(static_scale) {}

  __device__ __forceinline__ void load_gains() {
#pragma unroll
    for (int i = 0; i < KEPT_GAINS; ++i) gains_[i] = gain(lane_of_thread() + i * WARP_SIZE);
  }

  // The row's codes; returns its scale, or 1 with BLOCKS.
  __device__ __forceinline__ float load_row(const T* x) const {
    load(x);
    if (norm_ != nullptr) {
      const float inverse_rms = rsqrtf(sum_of_warps(sum_of_squares()) / in_features_ + eps_);
      int round = 0;
#pragma unroll 1
      for (int v = lane_of_thread(); v < vectors_; v += WARP_SIZE) {
        uint4 gains = gains_[0];
        if (round == 1) gains = gains_[1];
        if (round >= KEPT_GAINS) gains = gain(v);
        normalise(v, gains, inverse_rms);
        ++round;
      }
    }
    float scale = static_scale_;
    if (!BLOCKS && !(static_scale_ > 0.0f)) scale = scale_for(largest_of_warps(largest()));
    const float inverse = __frcp_rn(scale);
#pragma unroll 1
    for (int first = 0; first < vectors_; first += WARP_SIZE) {  // whole warps
      const int v = first + lane_of_thread();
      const uint4 raw = v < vectors_ ? row_[v] : make_uint4(0, 0, 0, 0);
      __syncwarp();  // codes take the place of vectors that other lanes have
      store(v, raw, scale, inverse);
    }
    return BLOCKS ? 1.0f : scale;
  }

 private:
  static_assert(KEPT_GAINS == 2, "load_row names them");
  static_assert(WARP_SIZE % ROW_VECTORS == 0, "from one vector of a lane to the next are whole steps");
  static constexpr int LANE_STRIDE = WARP_SIZE / ROW_VECTORS * WARPS * STEP_ELEMENTS;

  __device__ __forceinline__ int element(int v) const {
    return (v / ROW_VECTORS * WARPS + warp_of_thread()) * STEP_ELEMENTS + v % ROW_VECTORS * SEGMENT;
  }

  // Zeros beyond the row.
  __device__ __forceinline__ void load(const T* x) const {
#pragma unroll 1
    for (int first = lane_of_thread(); first < vectors_; first += LOADS * WARP_SIZE) {
      const int k = element(first);
      uint4 raw[LOADS];
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        raw[i] = make_uint4(0, 0, 0, 0);
        if (k + i * LANE_STRIDE < in_features_) load_past_l1(raw[i], x + k + i * LANE_STRIDE);
      }
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        if (first + i * WARP_SIZE < vectors_) row_[first + i * WARP_SIZE] = raw[i];
      }
    }
  }
  __device__ __forceinline__ uint4 gain(int v) const {
    const bool has = norm_ != nullptr && v < vectors_ && element(v) < in_features_;
    return has ? load_once_16(norm_ + element(v)) : make_uint4(0, 0, 0, 0);
  }

  __device__ __forceinline__ float sum_of_squares() const {
    float squares = 0.0f;
#pragma unroll 1
    for (int v = lane_of_thread(); v < vectors_; v += WARP_SIZE) squares = add_squares<T>(squares, row_[v]);
    return squares;
  }
  __device__ __forceinline__ float largest() const {
    float found = 0.0f;
#pragma unroll 1
    for (int v = lane_of_thread(); v < vectors_; v += WARP_SIZE) {
      found = fmaxf(found, largest_of_vector<T>(row_[v]));
    }
    return found;
  }

  __device__ __forceinline__ void normalise(int v, const uint4& gains, float inverse_rms) const {
    const uint4 raw = row_[v];
    Vector values = reinterpret_cast<const Vector&>(raw);
    const Vector factors = reinterpret_cast<const Vector&>(gains);
#pragma unroll
    for (int e = 0; e < SEGMENT; ++e) {
      values[e] = from_float<T>(to_float(values[e]) * inverse_rms * to_float(factors[e]));
    }
    row_[v] = reinterpret_cast<const uint4&>(values);
  }

  // Half of a warp has a step: its scale, with BLOCKS.
  __device__ __forceinline__ void store(int v, const uint4& raw, float scale, float inverse) const {
    if constexpr (BLOCKS) {
      float largest = largest_of_vector<T>(raw);
#pragma unroll
      for (int distance = ROW_VECTORS / 2; distance > 0; distance /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, distance));
      }
      if (!(static_scale_ > 0.0f)) {
        scale = scale_for(largest);
        inverse = __frcp_rn(scale);
      }
      if (v < vectors_ && v % ROW_VECTORS == 0) step_scales_[v / ROW_VECTORS] = scale;
    }
    if (v < vectors_) {
      reinterpret_cast<uint2*>(row_)[v] = e4m3_codes<T>(raw, scale, inverse, static_scale_ > 0.0f);
    }
  }

  // Of all threads, in the order of warps.
  __device__ __forceinline__ float sum_of_warps(float value) const {
    value = warp_sum(value);
    if (lane_of_thread() == 0) sums_[warp_of_thread()] = value;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums_[w];
    return sum;
  }
  // Of numbers that are not negative: they are in the order of their bits.
  __device__ __forceinline__ float largest_of_warps(float value) const {
    value = __uint_as_float(__reduce_max_sync(FULL_WARP, __float_as_uint(value)));
    if (lane_of_thread() == 0) maxima_[warp_of_thread()] = value;
    __syncthreads();
    float largest = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, maxima_[w]);
    return largest;
  }

  const T* const norm_;  // null without
  uint4* const row_;
  float* const step_scales_;
  float* const sums_;
  float* const maxima_;
  const int vectors_, in_features_;
  const float eps_, static_scale_;
  uint4 gains_[KEPT_GAINS];
};

// This warp's sums of a tile over its steps of k. Two units are the 16 rows of an mma, eight tokens its
// columns.
template <typename V, bool BLOCKS>
class Fp8Consumer {
  static constexpr int WORDS = 4;                      // of a lane, of 16 e4m3 of a row
  static constexpr int PAIRS = ceil_div(V::UNITS, 2);  // of units
  static constexpr int LANE_TOKENS = 2 * V::GROUPS;    // of which a lane has sums

 public:
  __device__ __forceinline__ Fp8Consumer(const BlockUnits<V::UNITS>& units, const float* x_scales,
                                         const float* weight_scales, const float* step_scales,
                                         float row_scale, int num_rows, int in_features)
      : units_(units),
        x_scales_(x_scales),
        weight_scales_(weight_scales),
        step_scales_(step_scales),
        num_rows_(num_rows),
        num_blocks_(ceil_div(in_features, STEP_ELEMENTS)) {
#pragma unroll
    for (int i = 0; i < LANE_TOKENS; ++i) {
      of_tokens_[i] = V::RESIDENT ? row_scale : BLOCKS ? 1.0f : scale_of_token(i, 0);
    }
  }

  __device__ __forceinline__ void begin(int tile_unit, int gated) {
#pragma unroll
    for (int i = 0; i < PAIRS * V::GROUPS * 4; ++i) (&sums_[0][0][0])[i] = 0.0f;
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
      const bool is_up = gated && u >= V::UNITS / 2;
      const int unit = tile_unit + (is_up ? u - V::UNITS / 2 : u);
      const int row = unit * UNIT + (is_up ? units_.features : 0);
      if constexpr (BLOCKS) {
        blocks_[u] = unit < units_.end ? row / SCALES * num_blocks_ : -1;
      } else {
        const bool valid = unit < units_.end && unit * UNIT + row_of_lane() < units_.features;
        of_rows_[u] = valid ? weight_scales_[row + row_of_lane()] : 0.0f;
      }
    }
    if constexpr (BLOCKS) load_scales(0);
  }

  // Add one step's products from the ring's next stage; `y` are the codes of the row that is RESIDENT.
  __device__ __forceinline__ void take_step(const uint4* ring, const uint4* y, int step) {
    float products[PAIRS][V::GROUPS][4] = {};
    float of_x[LANE_TOKENS], of_weight[V::UNITS];
    if constexpr (BLOCKS) {
#pragma unroll
      for (int i = 0; i < LANE_TOKENS; ++i) of_x[i] = V::RESIDENT ? step_scales_[step] : next_of_x_[i];
#pragma unroll
      for (int u = 0; u < V::UNITS; ++u) of_weight[u] = of_rows_[u];
      load_scales(step + 1);
    }
    copy_async_wait<V::STAGES - 1>();
    const uint4* const stage = ring + slot_ * V::LOADS * THREADS + threadIdx.x;
#pragma unroll
    for (int half = 0; half < V::HALVES; ++half) {
      unsigned x[V::GROUPS][WORDS][2];
#pragma unroll
      for (int i = 0; i < V::GROUPS; ++i) {
        unpack(x[i], V::RESIDENT ? y[step * CODE_VECTORS + half * 4 + lane_of_thread() % 4]
                                 : stage[((V::UNITS + i) * V::HALVES + half) * THREADS]);
      }
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) {
        unsigned low[WORDS][2], high[WORDS][2] = {};
        unpack(low, stage[(2 * p * V::HALVES + half) * THREADS]);
        if (2 * p + 1 < V::UNITS) unpack(high, stage[((2 * p + 1) * V::HALVES + half) * THREADS]);
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
#pragma unroll
          for (int i = 0; i < V::GROUPS; ++i) {
            mma_m16n8k16<__half>(BLOCKS ? products[p][i] : sums_[p][i],
                                 {low[word][0], high[word][0], low[word][1], high[word][1]},
                                 {x[i][word][0], x[i][word][1]});
          }
        }
      }
    }
    if constexpr (BLOCKS) {
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) {
#pragma unroll
        for (int i = 0; i < V::GROUPS; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float scale = of_x[i * 2 + e % 2] * of_weight[min(p * 2 + e / 2, V::UNITS - 1)];
            sums_[p][i][e] = fmaf(products[p][i][e], scale, sums_[p][i][e]);
          }
        }
      }
    }
  }
  __device__ __forceinline__ void advance() { slot_ = slot_ + 1 == V::STAGES ? 0 : slot_ + 1; }

  // partial, of this warp: [UNITS][GROUPS][8 tokens][UNIT rows], or [UNITS][UNIT rows] where RESIDENT: sums
  // with their scales.
  __device__ __forceinline__ void share_sums(float* partial) const {
    const int lane = lane_of_thread() % 4;
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
      const float of_row = BLOCKS ? 1.0f : of_rows_[u];
#pragma unroll
      for (int i = 0; i < LANE_TOKENS; ++i) {
        const float sum = sums_[u / 2][i / 2][u % 2 * 2 + i % 2] * (of_tokens_[i] * of_row);
        if constexpr (V::RESIDENT) {  // all columns of the product are the one row's
          if (i == 0 && lane == u % 4) partial[u * UNIT + row_of_lane()] = sum;
        } else {
          const int token = lane * 2 + i % 2;
          if (i / 2 * 8 + token < num_rows_) {
            partial[((u * V::GROUPS + i / 2) * 8 + token) * UNIT + row_of_lane()] = sum;
          }
        }
      }
    }
  }

 private:
  // Pairs of halves of 16 codes.
  static __device__ __forceinline__ void unpack(unsigned (&halves)[WORDS][2], const uint4& codes) {
    const unsigned words[WORDS] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
      const uint2 pairs = unpack_four_e4m3(words[word]);
      halves[word][0] = pairs.x, halves[word][1] = pairs.y;
    }
  }

  // Of this lane's tokens, in a block of 128 columns.
  __device__ __forceinline__ float scale_of_token(int i, int block) const {
    const int token = i / 2 * 8 + lane_of_thread() % 4 * 2 + i % 2;
    return token < num_rows_ ? load_updated(x_scales_ + block * num_rows_ + token) : 0.0f;
  }

  // Of the 128 elements of a step, a step ahead.
  __device__ __forceinline__ void load_scales(int step) {
    const int block = min(step * WARPS + warp_of_thread(), num_blocks_ - 1);
    if constexpr (!V::RESIDENT) {
#pragma unroll
      for (int i = 0; i < LANE_TOKENS; ++i) next_of_x_[i] = scale_of_token(i, block);
    }
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u)
      of_rows_[u] = blocks_[u] < 0 ? 0.0f : weight_scales_[blocks_[u] + block];
  }

  const BlockUnits<V::UNITS>& units_;
  const float* const x_scales_;
  const float* const weight_scales_;
  const float* const step_scales_;
  const int num_rows_;
  const int num_blocks_;  // of 128 columns
  float sums_[PAIRS][V::GROUPS][4];
  float of_tokens_[LANE_TOKENS];  // without BLOCKS
  float of_rows_[V::UNITS];       // of this lane's row of each unit or, with BLOCKS, of the next step's block
  float next_of_x_[LANE_TOKENS];  // with BLOCKS, where not RESIDENT
  int blocks_[V::UNITS];  // with BLOCKS: where the scales of a unit's rows begin, -1 where it has none
  int slot_ = 0;
};

// Epilogue of the row that is RESIDENT: a thread has a column of a tile. The warps' sums begin `warp_floats`
// apart.
template <typename V>
class RowEpilogue {
  using T = typename V::T;
  using Out = typename V::Out;

 public:
  __device__ __forceinline__ RowEpilogue(const BlockUnits<V::UNITS>& units, const T* bias, Out* out,
                                         int warp_floats, int, int accumulate, int gated)
      : units_(units),
        bias_(bias),
        out_(out),
        warp_floats_(warp_floats),
        accumulate_(accumulate),
        gated_(gated) {}

  // What the sums are added to, so that it is there when they are.
  __device__ __forceinline__ void fetch(int tile_unit) {
    const int column = tile_unit * UNIT + threadIdx.x;
    if (is_outside(column)) return;
    if (bias_ != nullptr) offset_ = to_float(bias_[column]);
    if (accumulate_) before_ = to_float(load_updated(out_ + column));
  }

  __device__ __forceinline__ void store(int tile_unit, const float* partial) const {
    const int column = tile_unit * UNIT + threadIdx.x;
    if (is_outside(column)) return;
    const float* const parts = partial + threadIdx.x;
    float result = total(parts);
    if (gated_) {
      result = total(parts + units_.a_tile * UNIT) * __fdividef(result, 1.0f + __expf(-result));
    } else {
      result += offset_ + before_;
    }
    out_[column] = from_float<Out>(result);
  }

 private:
  __device__ __forceinline__ bool is_outside(int column) const {
    return threadIdx.x >= units_.a_tile * UNIT || column >= units_.end * UNIT || column >= units_.features;
  }

  // Of all warps, in order.
  __device__ __forceinline__ float total(const float* parts) const {
    float sum = parts[0];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) sum += parts[w * warp_floats_];
    return sum;
  }

  const BlockUnits<V::UNITS>& units_;
  const T* const bias_;
  Out* const out_;
  const int warp_floats_;
  const int accumulate_;
  const int gated_;
  float before_ = 0.0f, offset_ = 0.0f;
};

// Epilogue of several rows: that of 16-bit weights, after no norm.
template <typename V>
struct RowsEpilogue : DecodeEpilogue<V> {
  using DecodeEpilogue<V>::DecodeEpilogue;

  __device__ __forceinline__ void store(int tile_unit, const float* partial) const {
    __shared__ float no_sums[WARPS][V::TOKENS];
    const NormPrologue<V> no_norm = {nullptr, nullptr, no_sums, 0, 0.0f};
    DecodeEpilogue<V>::store(tile_unit, reinterpret_cast<const float2*>(partial), no_norm);
  }
};

template <typename V, bool RESIDENT = V::RESIDENT>
struct fp8_epilogue {
  using type = RowsEpilogue<V>;
};
template <typename V>
struct fp8_epilogue<V, true> {
  using type = RowEpilogue<V>;
};
