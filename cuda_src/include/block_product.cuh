// The parts of a product of a few rows by a weight in quantised blocks: as those of decode_product.cuh, with
// a ring of codes and headers and elements made in registers.
#pragma once

#include "block_formats.cuh"
#include "decode_product.cuh"

// Constants of a variant.
template <typename Element, typename Result, typename Format, int MAX_TOKENS, int UNITS_A_TILE,
          int RING_STAGES>
struct BlockVariant : Variant<Element, Result, MAX_TOKENS, UNITS_A_TILE, RING_STAGES, STEP / HALF_K> {
  using F = Format;
  using Base = Variant<Element, Result, MAX_TOKENS, UNITS_A_TILE, RING_STAGES, STEP / HALF_K>;
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
        ring_(shared_address(ring)) {}

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
  __device__ __forceinline__ void load_weight() const {
    const int first_unit = units_.begin + tile_ * units_.a_tile;
    const int units = min(units_.end - first_unit, units_.a_tile);
    const int lane = lane_of_thread() % 4;
    const int step = BlockSteps<V>::of_warp(step_);
    const int word = header_word<F>(BlockSteps<V>::half(), lane);
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
      const bool up = gated_ && u >= V::UNITS / 2;
      const int unit = up ? u - V::UNITS / 2 : u;
      const int feature = (first_unit + unit) * UNIT + row_of_lane();
      const bool valid = unit < units && feature < units_.features && step < row_.count;
      const long long row = up ? feature + units_.features : feature;
      const unsigned* const from = codes_ + (row * row_.count + step) * F::STEP_WORDS;
      const unsigned to = ring_ + slot_ * V::STAGE_BYTES + V::TOKEN_BYTES + u * V::UNIT_BYTES;
      constexpr int FIRST = FIRST_WORDS<F>, SECOND = SECOND_WORDS<F>;
      copy_async<FIRST * 4>(to + threadIdx.x * FIRST * 4, from + first_piece<F>(lane), valid);
      if constexpr (SECOND > 0) {
        copy_async<SECOND * 4>(to + THREADS * FIRST * 4 + threadIdx.x * SECOND * 4,
                               from + second_piece<F>(lane), valid);
      }
      const unsigned* const header =
          headers_ + (row * row_.spans + step / F::STEPS_A_SPAN) * F::HEADER_WORDS + max(word, 0);
      copy_async<4>(to + THREADS * F::LANE_WORDS * 4 + threadIdx.x * 4, header, valid && word >= 0);
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
};

// Consumer: as DecodeConsumer, with its sums.
template <typename V>
class BlockConsumer : public DecodeConsumer<V> {
  using T = typename V::T;
  using F = typename V::F;

 public:
  __device__ __forceinline__ void take_step(const unsigned char* ring, const uint4* y,
                                            const NormPrologue<V>& prologue, int step, bool is_first_tile) {
    copy_async_wait<V::STAGES - 1>();
    __syncwarp();
    const unsigned char* const stage = ring + this->slot_ * V::STAGE_BYTES;
    uint4 tokens[V::ROUNDS][V::GROUPS];
#pragma unroll
    for (int round = 0; round < V::ROUNDS; ++round) {
#pragma unroll
      for (int i = 0; i < V::GROUPS; ++i) {
        tokens[round][i] = V::RESIDENT ? y[vector(step, round)] : staged_tokens(stage, round, i);
        if (!V::RESIDENT && V::SCALES_SUMS && prologue.norm != nullptr) {
          if (is_first_tile) this->squares_[i] = add_squares<T>(this->squares_[i], tokens[round][i]);
          tokens[round][i] = multiply_elements<T>(tokens[round][i], prologue.gains[vector(step, round)]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
      const unsigned char* const unit = stage + V::TOKEN_BYTES + u * V::UNIT_BYTES;
      const LaneScales<T, F> scales = unit_scales(unit);
      const LaneCodes<F> codes = unit_codes(unit);
#pragma unroll
      for (int round = 0; round < V::ROUNDS; ++round) {
        this->multiply_unit(u, elements_of<T, F>(codes, round, lane(), scales), tokens[round]);
      }
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return lane_of_thread() % 4; }

  // The vector of a row of x, of this warp's, that this lane takes in a round.
  static __device__ __forceinline__ int vector(int step, int round) {
    return step * V::STEP_VECTORS + lane() * 4 + vector_of_round(round, lane());
  }
  static __device__ __forceinline__ uint4 staged_tokens(const unsigned char* stage, int round, int group) {
    const int thread = threadIdx.x - lane() + vector_of_round(round, lane());  // which copied it
    return reinterpret_cast<const uint4*>(stage)[(group * V::HALVES + lane()) * THREADS + thread];
  }
  static __device__ __forceinline__ LaneScales<T, F> unit_scales(const unsigned char* unit) {
    const unsigned* const words = reinterpret_cast<const unsigned*>(unit + THREADS * F::LANE_WORDS * 4);
    alignas(16) unsigned record[RECORD_WORDS];
    copy_words<RECORD_WORDS>(record, words + threadIdx.x - lane());
    return LaneScales<T, F>(record, BlockSteps<V>::half(), lane());
  }
  static __device__ __forceinline__ LaneCodes<F> unit_codes(const unsigned char* unit) {
    constexpr int FIRST = FIRST_WORDS<F>, SECOND = SECOND_WORDS<F>;
    const unsigned* const words = reinterpret_cast<const unsigned*>(unit);
    LaneCodes<F> codes;
    copy_words<FIRST>(codes.words, words + threadIdx.x * FIRST);
    if constexpr (SECOND > 0) {
      copy_words<SECOND>(codes.words + FIRST, words + THREADS * FIRST + threadIdx.x * SECOND);
    }
    return codes;
  }
};
