// The parts of a product of a few rows by a weight in quantised blocks: as those of decode_product.cuh, with
// a ring of codes and headers and elements made in registers.
#pragma once

#include "linear/decode_product.cuh"
#include "quant/block_formats.cuh"

// Constants of a variant.
template <typename Element, typename Result, typename Format, int MAX_TOKENS, int UNITS_A_TILE,
          int RING_STAGES>
struct BlockVariant : CompactVariant<Element, Result, MAX_TOKENS, UNITS_A_TILE, RING_STAGES, STEP / HALF_K> {
  using F = Format;
  using Base = CompactVariant<Element, Result, MAX_TOKENS, UNITS_A_TILE, RING_STAGES, STEP / HALF_K>;
  static constexpr int ROUNDS = Base::HALVES;
  // Of a stage: the rows of x, then of each unit the pieces of codes and a word of a header for each thread.
  static constexpr int TOKEN_BYTES = Base::RESIDENT ? 0 : Base::GROUPS * ROUNDS * THREADS * 16;
  static constexpr int UNIT_BYTES = THREADS * 4 * (F::LANE_WORDS + 1);
  static constexpr int STAGE_BYTES = TOKEN_BYTES + UNITS_A_TILE * UNIT_BYTES;
};

// Steps of 128 elements that a row has, and of them the number of this warp's step.
template <typename V>
struct BlockSteps {
  using F = typename V::F;
  int spans;
  int count;

  __device__ __forceinline__ explicit BlockSteps(int in_features)
      : spans(ceil_div(in_features, F::SPAN)), count(spans * F::STEPS_A_SPAN) {}

  static __device__ __forceinline__ int of_warp(int step) { return step * WARPS + warp_of_thread(); }
  // Which part of a span's header this warp's steps need: the same for all of them.
  static __device__ __forceinline__ int half() {
    static_assert(WARPS % F::STEPS_A_SPAN == 0, "a warp's steps lie at the same place of their spans");
    return warp_of_thread() % F::STEPS_A_SPAN;
  }
};

// Producer: as DecodeProducer. What a lane copies others of its row read, so that a warp meets before it uses
// a stage and before it fills it again.
template <typename V>
class BlockProducer {
  using T = typename V::T;
  using F = typename V::F;
  static constexpr int WORD = 4;  // bytes

 public:
  __device__ __forceinline__ BlockProducer(unsigned char* ring, const BlockUnits<V::UNITS>& units,
                                           const BlockSteps<V>& row, int steps, const T* x,
                                           const unsigned* codes, const unsigned* headers, int num_rows,
                                           int in_features, int gated)
      : units_(units),
        row_(row),
        steps_(steps),
        x_(x),
        codes_(codes),
        headers_(headers),
        num_rows_(num_rows),
        in_features_(in_features),
        gated_(gated),
        ring_(shared_address(ring)),
        row_codes_(row.count * F::STEP_WORDS * WORD),
        row_headers_(row.spans * F::HEADER_WORDS * WORD) {
    measure_units();
  }

  // Where the rest of a lane's rows lie. Called once more behind what takes many registers: the compiler
  // keeps what it does not know how to compute again.
  __device__ __forceinline__ void measure_units() {
    const int rows = gated_ ? units_.features - (V::UNITS / 2 - 1) * UNIT : UNIT;
    unit_codes_ = UNIT * row_codes_, unit_headers_ = UNIT * row_headers_;
    middle_codes_ = static_cast<long long>(rows) * row_codes_;
    middle_headers_ = static_cast<long long>(rows) * row_headers_;
    asm volatile("" : "+r"(unit_codes_), "+r"(unit_headers_), "+l"(middle_codes_), "+l"(middle_headers_));
  }

  __device__ __forceinline__ void fill_weights() {
#pragma unroll 1
    for (int stage = 0; stage < V::STAGES; ++stage) {
      if (tile_ < units_.num_tiles) load_weight();
      copy_async_commit();
      advance();
    }
  }

  __device__ __forceinline__ void fill_x() const {
    int step = 0;
#pragma unroll 1
    for (int stage = 0; stage < V::STAGES; ++stage) {
      if (stage < units_.num_tiles * steps_) load_x(stage, step);
      copy_async_commit();
      step = step + 1 == steps_ ? 0 : step + 1;
    }
  }

  __device__ __forceinline__ void refill() {
    __syncwarp();
    if (tile_ < units_.num_tiles) {
      load_weight();
      if constexpr (!V::RESIDENT) load_x(slot_, step_);
    }
    copy_async_commit();
    advance();
  }

 private:
  __device__ __forceinline__ void load_weight() {
    const int lane = lane_of_thread() % 4;
    const int word = header_word<F>(BlockSteps<V>::half(), lane);
    if (step_ == 0) {
      const int unit = units_.begin + tile_ * units_.a_tile;
      const int row = unit * UNIT + row_of_lane();
      const int warp = warp_of_thread();
      codes_from_ = reinterpret_cast<const unsigned char*>(codes_) +
                    static_cast<long long>(row) * row_codes_ +
                    (warp * F::STEP_WORDS + first_piece<F>(lane)) * WORD;
      headers_from_ = reinterpret_cast<const unsigned char*>(headers_) +
                      static_cast<long long>(row) * row_headers_ +
                      (warp / F::STEPS_A_SPAN * F::HEADER_WORDS + max(word, 0)) * WORD;
      tile_units_ = min(min(units_.end - unit, units_.a_tile), ceil_div(units_.features - row, UNIT));
    }
    const unsigned char* codes = codes_from_ + step_ * (WARPS * F::STEP_WORDS * WORD);
    const unsigned char* header = headers_from_ + step_ * (WARPS / F::STEPS_A_SPAN * F::HEADER_WORDS * WORD);
    const bool in_row = BlockSteps<V>::of_warp(step_) < row_.count;
    const int low_units = in_row ? tile_units_ : 0;
    const int high_units = in_row ? tile_units_ + (gated_ ? V::UNITS / 2 : 0) : 0;
    const unsigned stage = ring_ + slot_ * V::STAGE_BYTES + V::TOKEN_BYTES;
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
      if (u > 0) {
        codes += u == V::UNITS / 2 ? middle_codes_ : unit_codes_;
        header += u == V::UNITS / 2 ? middle_headers_ : unit_headers_;
      }
      const bool valid = u < (u < V::UNITS / 2 ? low_units : high_units);
      const unsigned to = stage + u * V::UNIT_BYTES;
      constexpr int FIRST = FIRST_WORDS<F>, SECOND = SECOND_WORDS<F>;
      copy_async<FIRST * WORD>(to + threadIdx.x * FIRST * WORD, codes, valid);
      if constexpr (SECOND > 0) {
        copy_async<SECOND * WORD>(to + THREADS * FIRST * WORD + threadIdx.x * SECOND * WORD,
                                  codes + (second_piece<F>(lane) - first_piece<F>(lane)) * WORD, valid);
      }
      copy_async<WORD>(to + THREADS * F::LANE_WORDS * WORD + threadIdx.x * WORD, header, valid && word >= 0);
    }
  }

  __device__ __forceinline__ void load_x(int slot, int step) const {
    const int k = WarpSteps<V>::lane_k(step);
    const T* from = x_ + row_of_lane() * in_features_ + k;
    const unsigned to = ring_ + slot * V::STAGE_BYTES + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < V::GROUPS * V::HALVES; ++i) {
      const int element = i % V::HALVES * HALF_K;
      const int group = i / V::HALVES;
      copy_async_16(to + i * THREADS * 16, from + group * 8 * in_features_ + element,
                    group * 8 + row_of_lane() < num_rows_ && k + element < in_features_);
    }
  }

  __device__ __forceinline__ void advance() {
    slot_ = slot_ + 1 == V::STAGES ? 0 : slot_ + 1;
    if (++step_ == steps_) {
      step_ = 0;
      ++tile_;
    }
  }

  const BlockUnits<V::UNITS>& units_;
  const BlockSteps<V>& row_;
  const int steps_;
  const T* const x_;
  const unsigned* const codes_;
  const unsigned* const headers_;
  const int num_rows_;
  const int in_features_;
  const int gated_;
  const unsigned ring_;
  int tile_ = 0;
  int step_ = 0;
  int slot_ = 0;
  const int row_codes_, row_headers_;  // bytes of a row
  int unit_codes_, unit_headers_;      // from a unit to the next,
  // and to that in the middle of a tile: gated, the first of the ups.
  long long middle_codes_, middle_headers_;
  // Of this lane's row of the tile's first unit, at this warp's first step, and the word that this lane
  // copies.
  const unsigned char *codes_from_ = nullptr, *headers_from_ = nullptr;
  int tile_units_ = 0;  // units of the tile in which this lane has a row
};

// This lane's codes of its row of a unit of a stage, and the record of its quad's scales.
template <typename F>
struct LaneUnit {
  LaneCodes<F> codes;
  alignas(16) unsigned record[RECORD_WORDS];

  __device__ __forceinline__ explicit LaneUnit(const unsigned char* unit) {
    const unsigned* const words = reinterpret_cast<const unsigned*>(unit);
    constexpr int FIRST = FIRST_WORDS<F>, SECOND = SECOND_WORDS<F>;
    copy_words<FIRST>(codes.words, words + threadIdx.x * FIRST);
    if constexpr (SECOND > 0) {
      copy_words<SECOND>(codes.words + FIRST, words + THREADS * FIRST + threadIdx.x * SECOND);
    }
    copy_words<RECORD_WORDS>(record, words + THREADS * F::LANE_WORDS + threadIdx.x - lane_of_thread() % 4);
  }
};

// Consumer: this warp's sums of a tile over its steps of k. Two units are the 16 rows of an mma, eight tokens
// its columns.
template <typename V>
class BlockConsumer {
  using T = typename V::T;
  using F = typename V::F;
  static constexpr int PAIRS = V::UNITS / 2;  // of units
  static_assert(V::UNITS % 2 == 0, "an mma has 16 rows of the weight");

 public:
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < PAIRS * V::GROUPS * 4; ++i) (&sums_[0][0][0])[i] = 0.0f;
  }
  __device__ __forceinline__ void advance() { slot_ = slot_ + 1 == V::STAGES ? 0 : slot_ + 1; }

  __device__ __forceinline__ void take_step(const unsigned char* ring, const uint4* y,
                                            const NormPrologue<V>& prologue, int step, bool is_first_tile) {
    copy_async_wait<V::STAGES - 1>();
    __syncwarp();
    const unsigned char* const stage = ring + slot_ * V::STAGE_BYTES;
    const unsigned char* const units = stage + V::TOKEN_BYTES;
    UnitPair pairs[PAIRS];
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) pairs[p].load(units + 2 * p * V::UNIT_BYTES);
#pragma unroll
    for (int round = 0; round < V::ROUNDS; ++round) {
      uint4 tokens[V::GROUPS];
#pragma unroll
      for (int i = 0; i < V::GROUPS; ++i) {
        tokens[i] = V::RESIDENT ? y[vector(step, round)] : staged_tokens(stage, round, i);
        if (!V::RESIDENT && V::SCALES_SUMS && prologue.norm != nullptr) {
          if (is_first_tile) squares_[i] = add_squares<T>(squares_[i], tokens[i]);
          tokens[i] = multiply_elements<T>(tokens[i], prologue.gains[vector(step, round)]);
        }
      }
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) {
        const uint4 low = pairs[p].elements(0, round), high = pairs[p].elements(1, round);
#pragma unroll
        for (int i = 0; i < V::GROUPS; ++i) {
          mma_m16n8k16<T>(sums_[p][i], {low.x, high.x, low.y, high.y}, {tokens[i].x, tokens[i].y});
          mma_m16n8k16<T>(sums_[p][i], {low.z, high.z, low.w, high.w}, {tokens[i].z, tokens[i].w});
        }
      }
    }
  }

  // This warp's part of its tokens' sums of squares, after the first tile.
  __device__ __forceinline__ void share_squares(float (&sums_of_squares)[WARPS][V::TOKENS]) {
#pragma unroll
    for (int i = 0; i < V::GROUPS; ++i) {
      squares_[i] += __shfl_xor_sync(FULL_WARP, squares_[i], 1);
      squares_[i] += __shfl_xor_sync(FULL_WARP, squares_[i], 2);
      if (lane() == 0) sums_of_squares[warp_of_thread()][i * 8 + row_of_lane()] = squares_[i];
    }
  }

  // partial [WARPS][UNITS][GROUPS][8 tokens, or the one][UNIT rows].
  __device__ __forceinline__ void share_sums(float* partial, int num_rows) const {
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
#pragma unroll
      for (int i = 0; i < V::GROUPS; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int token = lane() * 2 + e % 2;
          const int unit = warp_of_thread() * V::UNITS + p * 2 + e / 2;
          if (i * 8 + token < num_rows) {
            partial[(unit * V::GROUPS + i) * 2 * V::SUM_LANES + token * UNIT + row_of_lane()] =
                sums_[p][i][e];
          }
        }
      }
    }
  }

 private:
  // This lane's codes and scales of its rows of two units.
  struct UnitPair {
    LaneCodes<F> codes[2];
    LaneScales<T, F> scales[2];

    __device__ __forceinline__ void load(const unsigned char* unit) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const LaneUnit<F> loaded(unit + i * V::UNIT_BYTES);
        codes[i] = loaded.codes;
        scales[i] = LaneScales<T, F>(loaded.record, BlockSteps<V>::half(), lane());
      }
    }
    __device__ __forceinline__ uint4 elements(int i, int round) const {
      return elements_of<T, F>(codes[i], round, lane(), scales[i]);
    }
  };

  static __device__ __forceinline__ int lane() { return lane_of_thread() % 4; }

  // The vector of a row of x, of this warp's, that this lane takes in a round.
  static __device__ __forceinline__ int vector(int step, int round) {
    return step * V::STEP_VECTORS + lane() * 4 + vector_of_round(round, lane());
  }
  static __device__ __forceinline__ uint4 staged_tokens(const unsigned char* stage, int round, int group) {
    const int thread = threadIdx.x - lane() + vector_of_round(round, lane());  // which copied it
    return reinterpret_cast<const uint4*>(stage)[(group * V::HALVES + lane()) * THREADS + thread];
  }

  float sums_[PAIRS][V::GROUPS][4];
  int slot_ = 0;
  float squares_[V::GROUPS] = {};  // of this lane's elements of x, taken from the first tile's steps
};
