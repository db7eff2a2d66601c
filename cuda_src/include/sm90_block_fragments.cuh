// The parts of a product whose weight, in quantised blocks, is the left operand of wgmma in registers: tiles
// of work, the producer of x, the fragments of the weight and the epilogue.
#pragma once

#include "block_formats.cuh"
#include "cluster.cuh"
#include "generated/sm90_block_fragments.cuh"
#include "ptx/sm90_fragments.cuh"
#include "sm90_product.cuh"

constexpr int FEEDERS = WARPGROUP_SIZE;
constexpr int FEEDER_WARPS = FEEDERS / WARP_SIZE;

// Constants of a variant.
template <typename Element, typename Result, typename Format, int GROUPS, int MAX_TOKENS>
struct FragmentsVariant {
  using T = Element;
  using Out = Result;
  using F = Format;
  static constexpr int TOKENS = MAX_TOKENS;
  static constexpr int FEATURES = WGMMA_M * GROUPS;
  static constexpr int CONSUMERS = WARPGROUP_SIZE * GROUPS;
  static constexpr int HALF_ELEMENTS = TOKENS * TILE_K;  // of x, half a stage
  static constexpr int STAGE_ELEMENTS = TOKENS * STEP;
  static constexpr int STRIDE = FEATURES + STAGING_PADDING;  // of a token's sums on their way out
  // What a warp group's threads copy of a row each: codes and a word of a header.
  static constexpr int ROW_BYTES = WARPGROUP_SIZE * 4 * (F::LANE_WORDS + 1);
  static constexpr int SLOTS_BYTES = AHEAD * 2 * ROW_BYTES;  // of a warp group
  // Of a feeding thread: parts of x that are on their way, as many as its registers hold.
  static constexpr int PARTS_AHEAD = GROUPS == 2 ? 4 : 2;
  static_assert(sizeof(T) == 2, "the product is of 16-bit elements");
  static_assert(STEP == 2 * TILE_K, "a step is two tiles of lines of 128 bytes");
  static_assert(TOKENS % FEED_TOKENS == 0 && TOKENS % CHUNK_TOKENS == 0, "parts of a tile are whole");
};

// What a block does: tiles first, first + stride, ... and of each `num_steps` steps of 128 elements along k.
// `sharing` tiles of neighbouring features count as one here, block `rank` of a cluster has one of them.
struct FragmentsWork {
  int tiles_m, tiles;
  int first, stride;
  int first_step, num_steps;
  int sharing, rank;

  // (tile of tokens, tile of features): neighbours have the same features, which L2 then reads once.
  __device__ __forceinline__ int2 tile(int index) const {
    const int column = small_div(index, tiles_m);
    return make_int2(index - column * tiles_m, column * sharing + rank);
  }
};

// Producer of x: the tokens' elements in the order in which lanes have those of the weight. Of a step, word t
// (two elements) of segment 4 * round + p of 16 bytes is pair p of the eight that lane t takes in that round.
// Two blocks that share x bring half of it each and send it to the other one.
template <typename V>
class TokenFeeder {
  using T = typename V::T;
  static constexpr int PARTS = V::TOKENS / FEED_TOKENS;  // of a step, one after the other
  static constexpr int WARP_BYTES =
      FEED_TOKENS / FEEDER_WARPS * SWIZZLE_BYTES;  // of a part's half, by a warp
  static_assert(WARP_BYTES % SWIZZLE_REPEAT == 0 && PARTS % 2 == 0, "what is sent lies in a row");

  // A part of a step that this thread comes to.
  struct Place {
    int index, part, step = 0;

    __device__ __forceinline__ void advance(const FragmentsWork& work) {
      part += work.sharing;
      if (part < PARTS) return;
      part = work.rank;
      if (++step < work.num_steps) return;
      step = 0;
      index += work.stride;
    }
  };

 public:
  __device__ __forceinline__ TokenFeeder(const FragmentsWork& work, T* ring, Barrier* full, Barrier* empty,
                                         int stages, const T* x, int num_rows, int in_features)
      : work_(work),
        ring_(ring),
        full_(full),
        empty_(empty),
        stages_(stages),
        x_(x),
        num_rows_(num_rows),
        in_features_(in_features) {}

  __device__ __forceinline__ void run() {
    constexpr int PARTS_AHEAD = V::PARTS_AHEAD;
    uint4 vectors[PARTS_AHEAD][4];
    Place loaded = {work_.first, work_.rank}, stored = {work_.first, work_.rank};
#pragma unroll
    for (int i = 0; i < PARTS_AHEAD; ++i) {
      load(vectors[i], loaded);
      loaded.advance(work_);
    }
#pragma unroll 1
    while (true) {
#pragma unroll
      for (int i = 0; i < PARTS_AHEAD; ++i) {
        if (stored.index >= work_.tiles) return;
        store(vectors[i], stored.part);
        stored.advance(work_);
        load(vectors[i], loaded);
        loaded.advance(work_);
      }
    }
  }

 private:
  // Eight threads that store together: two segments of four tokens, in different banks.
  static __device__ __forceinline__ int lane() { return threadIdx.x % WARP_SIZE; }
  static __device__ __forceinline__ int round() { return lane() % 2 + lane() / 8 % 2 * 2; }
  static __device__ __forceinline__ int token() {
    return lane() / 2 % 4 + lane() / 16 * 4 + threadIdx.x % FEEDERS / WARP_SIZE * 8;
  }

  __device__ __forceinline__ void load(uint4 (&vectors)[4], const Place& place) const {
    const int2 tile = work_.tile(place.index);
    const int row = tile.x * V::TOKENS + place.part * FEED_TOKENS + token();
    const int first = (work_.first_step + place.step) * STEP;
    const bool is_row = place.index < work_.tiles && row < num_rows_;
    const T* const from = x_ + static_cast<long long>(row) * in_features_ + first;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int column = t * LANE_ELEMENTS + vector_of_round(round(), t) * 8;
      vectors[t] = make_uint4(0, 0, 0, 0);
      if (is_row && first + column < in_features_) load_past_l1(vectors[t], from + column);
    }
  }

  __device__ __forceinline__ void store(const uint4 (&vectors)[4], int part) {
    if (part == work_.rank) barrier_wait(&empty_[at_.stage], at_.parity ^ 1);
    T* const half = ring_ + at_.stage * V::STAGE_ELEMENTS + round() / 2 * V::HALF_ELEMENTS;
    uint4* const line = reinterpret_cast<uint4*>(half + (part * FEED_TOKENS + token()) * TILE_K);
    const int first = round() % 2 * 4, turn = token() % 8;
    line[first ^ turn] = make_uint4(vectors[0].x, vectors[1].x, vectors[2].x, vectors[3].x);
    line[(first + 1) ^ turn] = make_uint4(vectors[0].y, vectors[1].y, vectors[2].y, vectors[3].y);
    line[(first + 2) ^ turn] = make_uint4(vectors[0].z, vectors[1].z, vectors[2].z, vectors[3].z);
    line[(first + 3) ^ turn] = make_uint4(vectors[0].w, vectors[1].w, vectors[2].w, vectors[3].w);
    const bool is_last = part + work_.sharing >= PARTS;
    if (work_.sharing == 1 && !is_last) return;
    fence_shared_for_async();
    __syncwarp();
    if (lane() == 0) {
      Barrier* const full = &full_[at_.stage];
      if (work_.sharing > 1) {
        T* const sent = ring_ + at_.stage * V::STAGE_ELEMENTS + (part * FEED_TOKENS + token()) * TILE_K;
        copy_to_block(sent, sent, WARP_BYTES, full, work_.rank ^ 1);
        copy_to_block(sent + V::HALF_ELEMENTS, sent + V::HALF_ELEMENTS, WARP_BYTES, full, work_.rank ^ 1);
      }
      if (is_last && work_.sharing == 1) barrier_arrive(full);
      // The other block's half may arrive before it is announced: the phase does not end before.
      if (is_last && work_.sharing > 1) barrier_arrive_expecting(full, PARTS / 2 * 2 * WARP_BYTES);
    }
    if (is_last) at_.advance(stages_);
  }

  const FragmentsWork& work_;
  T* const ring_;
  Barrier* const full_;
  Barrier* const empty_;
  const int stages_;
  const T* const x_;
  const int num_rows_, in_features_;
  RingPosition at_;
};

// The weight of a warp group: 64 rows, of which a lane has its quarter of two rows, 8 apart, in each step.
// Codes and headers are copied AHEAD steps before they become elements.
template <typename V>
class WeightFragments {
  using T = typename V::T;
  using F = typename V::F;
  static constexpr int FIRST = FIRST_WORDS<F>, SECOND = SECOND_WORDS<F>;

 public:
  // `slots`: this warp group's.
  __device__ __forceinline__ WeightFragments(const FragmentsWork& work, unsigned char* slots,
                                             const unsigned* codes, const unsigned* headers, int out_features,
                                             int in_features, int silu_mul)
      : work_(work),
        slots_(slots),
        codes_(codes),
        headers_(headers),
        spans_(ceil_div(in_features, F::SPAN)),
        out_features_(out_features),
        silu_mul_(silu_mul),
        thread_(threadIdx.x % WARPGROUP_SIZE),
        index_(work.first) {}

  // Start copying the codes of the next step, if there is one; a group of copies in any case.
  __device__ __forceinline__ void copy_next() {
    if (index_ < work_.tiles) {
      if (step_ == 0) begin_tile();
      const int step = work_.first_step + step_;
      const int word = header_word<F>(step % F::STEPS_A_SPAN, lane());
      const int header = step / F::STEPS_A_SPAN * F::HEADER_WORDS + max(word, 0);
#pragma unroll
      for (int i = 0; i < 2; ++i) copy_row(i, step * F::STEP_WORDS, header, word >= 0);
      if (++step_ == work_.num_steps) {
        step_ = 0;
        index_ += work_.stride;
      }
    }
    copy_async_commit();
    copy_slot_ = copy_slot_ + 1 == AHEAD ? 0 : copy_slot_ + 1;
  }

  // The oldest step's codes and scales; `step` is counted from the first of this block.
  __device__ __forceinline__ void take_step(int step) {
    copy_async_wait<AHEAD - 1>();
    __syncwarp();
    const int half = (work_.first_step + step) % F::STEPS_A_SPAN;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned* const words = reinterpret_cast<const unsigned*>(slot(slot_, i));
      copy_words<FIRST>(taken_[i].words, words + thread_ * FIRST);
      if constexpr (SECOND > 0) {
        copy_words<SECOND>(taken_[i].words + FIRST, words + WARPGROUP_SIZE * FIRST + thread_ * SECOND);
      }
      alignas(16) unsigned record[RECORD_WORDS];
      copy_words<RECORD_WORDS>(record, words + WARPGROUP_SIZE * F::LANE_WORDS + thread_ - lane());
      scales_[i] = LaneScales<T, F>(record, half, lane());
    }
    __syncwarp();  // the slot may be filled again
    slot_ = slot_ + 1 == AHEAD ? 0 : slot_ + 1;
  }

  // Operands of two products: pairs 0 and 1 of what lanes take in a round, and pairs 2 and 3.
  __device__ __forceinline__ void fragments(int round, unsigned (&first)[4], unsigned (&second)[4]) const {
    const uint4 upper = elements_of<T, F>(taken_[0], round, lane(), scales_[0]);
    const uint4 lower = elements_of<T, F>(taken_[1], round, lane(), scales_[1]);
    first[0] = upper.x, first[1] = lower.x, first[2] = upper.y, first[3] = lower.y;
    second[0] = upper.z, second[1] = lower.z, second[2] = upper.w, second[3] = lower.w;
  }

 private:
  __device__ __forceinline__ int lane() const { return thread_ % 4; }
  __device__ __forceinline__ unsigned char* slot(int slot, int i) const {
    return slots_ + (slot * 2 + i) * V::ROW_BYTES;
  }

  // The row of the weight that is row i of this thread, or none where the tile ends: -1. Gates are the first
  // half of a tile's rows, their ups the second.
  __device__ __forceinline__ int weight_row(int i, int column) const {
    constexpr int HALF = V::FEATURES / 2;
    const int warp = threadIdx.x / WARP_SIZE;
    const int row = warp * WARP_ROWS + i * 8 + thread_ % WARP_SIZE / 4;
    if (!silu_mul_) {
      const int feature = column * V::FEATURES + row;
      return feature < out_features_ ? feature : -1;
    }
    const int feature = column * HALF + row % HALF;
    const int gates = out_features_ / 2;
    return feature >= gates ? -1 : row < HALF ? feature : gates + feature;
  }

  __device__ __forceinline__ void begin_tile() {
    const int column = work_.tile(index_).y;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = weight_row(i, column);
      const long long spans = static_cast<long long>(max(row, 0)) * spans_;
      is_row_[i] = row >= 0;
      codes_from_[i] = codes_ + spans * (F::STEPS_A_SPAN * F::STEP_WORDS);
      headers_from_[i] = headers_ + spans * F::HEADER_WORDS;
    }
  }

  __device__ __forceinline__ void copy_row(int i, int words, int header, bool has_word) const {
    const unsigned* const codes = codes_from_[i] + words;
    const unsigned to = shared_address(slot(copy_slot_, i));
    copy_async<FIRST * 4>(to + thread_ * FIRST * 4, codes + first_piece<F>(lane()), is_row_[i]);
    if constexpr (SECOND > 0) {
      copy_async<SECOND * 4>(to + (WARPGROUP_SIZE * FIRST + thread_ * SECOND) * 4,
                             codes + second_piece<F>(lane()), is_row_[i]);
    }
    copy_async<4>(to + (WARPGROUP_SIZE * F::LANE_WORDS + thread_) * 4, headers_from_[i] + header,
                  is_row_[i] && has_word);
  }

  const FragmentsWork& work_;
  unsigned char* const slots_;
  const unsigned* const codes_;
  const unsigned* const headers_;
  const int spans_;  // of a row
  const int out_features_;
  const int silu_mul_;
  const int thread_;
  int index_, step_ = 0;  // to be copied next
  const unsigned* codes_from_[2] = {};
  const unsigned* headers_from_[2] = {};
  bool is_row_[2] = {};
  int copy_slot_ = 0, slot_ = 0;
  LaneCodes<F> taken_[2];
  LaneScales<T, F> scales_[2];
};

// Where a tile's sums go, CHUNK_TOKENS tokens at a time through `staging` [CHUNK_TOKENS][STRIDE], where the
// blocks of a cluster add each other's.
template <typename V>
struct FragmentsEpilogue {
  using T = typename V::T;
  using Out = typename V::Out;

  float* staging;
  const T* bias;
  Out* out;
  int num_rows, out_features, out_stride;
  int split, splits;
  bool accumulate, silu_mul;

  __device__ __forceinline__ void store(const float (&sums)[V::TOKENS / 2], int2 tile) const {
    const int lane = threadIdx.x % WARP_SIZE;
    float* const own = staging + lane % 4 * 2 * V::STRIDE + threadIdx.x / WARP_SIZE * WARP_ROWS + lane / 4;
#pragma unroll
    for (int first = 0; first < V::TOKENS; first += CHUNK_TOKENS) {
      const int token = tile.x * V::TOKENS + first;
      if (token >= num_rows) break;
#pragma unroll
      for (int i = 0; i < CHUNK_TOKENS / 2; ++i) {
        own[(i / 4 * 8 + i % 2) * V::STRIDE + i % 4 / 2 * 8] = sums[first / 2 + i];
      }
      meet();
      store_chunk(token, tile.y);
      meet();
    }
  }

 private:
  __device__ __forceinline__ void meet() const {
    if (splits > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      named_barrier_wait<1, V::CONSUMERS>();
    }
  }

  // Four features of a token, all blocks' sums in their order.
  __device__ __forceinline__ void add_up(const float* from, float (&totals)[4]) const {
    if (splits == 1) {
      const float4 own = *reinterpret_cast<const float4*>(from);
      totals[0] = own.x, totals[1] = own.y, totals[2] = own.z, totals[3] = own.w;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) totals[i] = 0.0f;
#pragma unroll 1
    for (int rank = 0; rank < splits; ++rank) {
      const float2 low = load_cluster(reinterpret_cast<const float2*>(from), rank);
      const float2 high = load_cluster(reinterpret_cast<const float2*>(from + 2), rank);
      totals[0] += low.x, totals[1] += low.y, totals[2] += high.x, totals[3] += high.y;
    }
  }

  // This block's share of the tokens from `first` on.
  __device__ __forceinline__ void store_chunk(int first, int column) const {
    constexpr int HALF = V::FEATURES / 2;
    const int quads = silu_mul ? HALF / 4 : V::FEATURES / 4;
    const int columns = silu_mul ? out_features / 2 : out_features;
    const int count = min(CHUNK_TOKENS, num_rows - first) * quads;
#pragma unroll 2
    for (int i = split * V::CONSUMERS + threadIdx.x; i < count; i += splits * V::CONSUMERS) {
      const int token = small_div(i, quads), in_tile = (i - token * quads) * 4;
      const int feature = column * quads * 4 + in_tile;
      if (feature >= columns) continue;
      Out* const to = out + static_cast<long long>(first + token) * out_stride + feature;
      const float* const from = staging + token * V::STRIDE + in_tile;
      float totals[4];
      add_up(from, totals);
      if (silu_mul) {
        float ups[4];
        add_up(from + HALF, ups);
        silu_mul_into(totals, ups);
      }
      if constexpr (sizeof(Out) == 2) {
        if (bias != nullptr) {
#pragma unroll
          for (int e = 0; e < 4; ++e) totals[e] += to_float(bias[feature + e]);
        }
        if (accumulate) {
          float before[4];
          load_updated_floats(to, 4, before);
#pragma unroll
          for (int e = 0; e < 4; ++e) totals[e] += before[e];
        }
      }
      Vec<Out, 4> result;
#pragma unroll
      for (int e = 0; e < 4; ++e) result[e] = from_float<Out>(totals[e]);
      result.store(to);
    }
  }
};
