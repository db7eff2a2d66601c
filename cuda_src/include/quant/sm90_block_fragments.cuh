// The parts of a product whose weight, in quantised blocks, is the left operand of wgmma in registers: tiles
// of work, the producers of x, the fragments of the weight and the epilogue.
#pragma once

#include "cluster.cuh"
#include "generated/sm90_block_fragments.cuh"
#include "linear/sm90_product.cuh"
#include "ptx/sm90_fragments.cuh"
#include "ptx/warp_arrival.cuh"
#include "quant/block_formats.cuh"
#include "quant/block_small.cuh"

constexpr int FEEDERS = WARPGROUP_SIZE;
constexpr int TURNING_WARPS = FEEDERS / WARP_SIZE - 1;  // bring x into order; the last warp copies it
constexpr int SWIZZLE_ROWS = SWIZZLE_REPEAT / SWIZZLE_BYTES;
constexpr int SEGMENT_ELEMENTS = 8;  // of 16 bits, whose pairs are of four lanes
constexpr int PAIR_STEPS = 2;        // whose codes come together: the most elements that share a header

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
  // Pairs of steps whose codes are on their way.
  static constexpr int AHEAD = TOKENS > 128 ? WIDE_AHEAD : GROUPS == 2 ? NARROW_AHEAD : BROAD_AHEAD;
  // Of a warp group: a step's codes of one of each thread's two rows, and the headers of a pair of steps.
  static constexpr int ROW_CODES = WARPGROUP_SIZE * F::LANE_WORDS * 4;
  static constexpr int HEADER_WORDS = F::HEADER_WORDS * PAIR_STEPS / F::STEPS_A_SPAN;
  static constexpr int ROW_HEADERS = WARPGROUP_SIZE / 4 * HEADER_WORDS * 4;
  static constexpr int PAIR_BYTES = 2 * (PAIR_STEPS * ROW_CODES + ROW_HEADERS);
  static constexpr int SLOTS_BYTES = AHEAD * PAIR_BYTES;
  static_assert(sizeof(T) == 2, "the product is of 16-bit elements");
  static_assert(STEP == 2 * TILE_K, "a step is two tiles of lines of 128 bytes");
  static_assert(TOKENS % CHUNK_TOKENS == 0, "parts of a tile are whole");
};

// What a block does: tiles first, first + stride, ... and of each `num_steps` steps of 128 elements along k,
// whole pairs, of which the last may be beyond the rows' end.
struct FragmentsWork {
  int tiles_m, tiles;
  int first, stride;
  int first_step, num_steps;

  // (tile of tokens, tile of features): neighbours have the same features, which L2 then reads once.
  __device__ __forceinline__ int2 tile(int index) const {
    const int column = small_div(index, tiles_m);
    return make_int2(index - column * tiles_m, column);
  }
};

// Producers of x: one thread copies steps of it to the ring as `full_` steps are used, and warps turn them,
// in place, to the order in which lanes have the elements of the weight. Of a step, word t (two elements) of
// segment 4 * round + p of 16 bytes is then pair p of the eight that lane t takes in that round.
template <typename V>
class TokenFeeder {
  using T = typename V::T;

 public:
  __device__ __forceinline__ TokenFeeder(const FragmentsWork& work, T* ring, Barrier* arrived, Barrier* full,
                                         Barrier* empty, int stages)
      : work_(work), ring_(ring), arrived_(arrived), full_(full), empty_(empty), stages_(stages) {}

  __device__ __forceinline__ void copy(const TensorMap& x_map) const {
    RingPosition at;
#pragma unroll 1
    for (int index = work_.first; index < work_.tiles; index += work_.stride) {
      const int row = work_.tile(index).x * V::TOKENS;
#pragma unroll 1
      for (int step = 0; step < work_.num_steps; ++step) {
        barrier_wait(&empty_[at.stage], at.parity ^ 1);
        Barrier* const arrived = &arrived_[at.stage];
        barrier_arrive_expecting(arrived, V::STAGE_ELEMENTS * sizeof(T));
        T* const to = ring_ + at.stage * V::STAGE_ELEMENTS;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = (work_.first_step + step) * STEP + half * TILE_K;
          copy_box(to + half * V::HALF_ELEMENTS, x_map, row, column, arrived);
        }
        at.advance(stages_);
      }
    }
  }

  // Eight tokens at a time: ldmatrix gives lane (token, p) word p of the segments of four lanes.
  __device__ __forceinline__ void turn(int warp) const {
    constexpr int HALF_BYTES = V::HALF_ELEMENTS * sizeof(T);
    const int lane = threadIdx.x % WARP_SIZE;
    // Neighbours are four tokens apart, whose segments lie in different halves of the banks.
    const int owner = lane / 8, source = token_of(lane % 8), to_token = token_of(lane / 4);
    const int from = owner / 2 * HALF_BYTES + source * SWIZZLE_BYTES +
                     ((owner % 2 * 4 + vector_of_round(0, owner)) ^ source) * 16;
    const int to = to_token * SWIZZLE_BYTES + (lane % 4 ^ to_token) * 16;
    RingPosition at;
#pragma unroll 1
    for (int index = work_.first; index < work_.tiles; index += work_.stride) {
#pragma unroll 1
      for (int step = 0; step < work_.num_steps; ++step) {
        barrier_wait(&arrived_[at.stage], at.parity);
        unsigned char* const stage = reinterpret_cast<unsigned char*>(ring_ + at.stage * V::STAGE_ELEMENTS);
#pragma unroll 2
        for (int group = warp; group < V::TOKENS / SWIZZLE_ROWS; group += TURNING_WARPS) {
          unsigned char* const rows = stage + group * SWIZZLE_REPEAT;
          unsigned words[4][4];
#pragma unroll
          for (int round = 0; round < 4; ++round) ldmatrix_x4(words[round], rows + (from ^ round * 16));
          __syncwarp();
#pragma unroll
          for (int round = 0; round < 4; ++round) {
            *reinterpret_cast<uint4*>(rows + round / 2 * HALF_BYTES + (to ^ round % 2 * 64)) =
                make_uint4(words[round][0], words[round][1], words[round][2], words[round][3]);
          }
        }
        fence_shared_for_async();
        barrier_arrive_warp(&full_[at.stage]);
        at.advance(stages_);
      }
    }
  }

 private:
  static __device__ __forceinline__ int token_of(int i) { return i / 2 + i % 2 * 4; }

  const FragmentsWork& work_;
  T* const ring_;
  Barrier* const arrived_;  // what was copied
  Barrier* const full_;
  Barrier* const empty_;
  const int stages_;
};

// The weight of a warp group: 64 rows, of which a lane has its quarter of two rows, 8 apart, in each step.
// Codes and headers are copied in pairs of steps, AHEAD pairs before they become elements.
template <typename V>
class WeightFragments {
  using T = typename V::T;
  using F = typename V::F;
  static constexpr int FIRST = FIRST_WORDS<F>, SECOND = SECOND_WORDS<F>;
  static constexpr int PAIR_WORDS = PAIR_STEPS * F::STEP_WORDS;
  static constexpr bool ONE_HEADER = F::STEPS_A_SPAN == PAIR_STEPS;  // of both steps
  // From a slot's beginning on: codes [step][row], first pieces before second ones, then headers [row].
  static constexpr int CODES_BYTES = 2 * PAIR_STEPS * V::ROW_CODES;

 public:
  // `slots`: this warp group's.
  __device__ __forceinline__ WeightFragments(const FragmentsWork& work, unsigned char* slots,
                                             const unsigned* codes, const unsigned* headers, int out_features,
                                             int in_features, int silu_mul)
      : work_(work),
        slots_(slots),
        codes_(codes),
        headers_(headers),
        steps_(ceil_div(in_features, F::SPAN) * F::STEPS_A_SPAN),
        out_features_(out_features),
        silu_mul_(silu_mul),
        thread_(threadIdx.x % WARPGROUP_SIZE),
        index_(work.first) {}

  // Start copying the codes of the next pair of steps, if there is one; a group of copies in any case.
  __device__ __forceinline__ void copy_next() {
    if (index_ < work_.tiles) {
      if (step_ == 0) begin_tile();
      const bool has_both = ONE_HEADER || work_.first_step + step_ + 1 < steps_;
#pragma unroll
      for (int i = 0; i < 2; ++i) copy_row(i, has_both);
      if ((step_ += PAIR_STEPS) == work_.num_steps) {
        step_ = 0;
        index_ += work_.stride;
      }
    }
    copy_async_commit();
    copy_slot_ = copy_slot_ + 1 == V::AHEAD ? 0 : copy_slot_ + 1;
  }

  // The oldest pair's copies have arrived.
  __device__ __forceinline__ void begin_pair() {
    copy_async_wait<V::AHEAD - 1>();
    __syncwarp();
    if constexpr (ONE_HEADER && F::HEADER_WORDS <= RECORD_WORDS) {
#pragma unroll
      for (int i = 0; i < 2; ++i) copy_words<F::HEADER_WORDS>(records_[i], header(i));
    }
  }

  // A step's codes and scales.
  __device__ __forceinline__ void take_step(int step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned* const words = reinterpret_cast<const unsigned*>(slot(slot_) + code_place(step, i));
      copy_words<FIRST>(taken_[i].words, words + thread_ * FIRST);
      if constexpr (SECOND > 0) {
        copy_words<SECOND>(taken_[i].words + FIRST, words + WARPGROUP_SIZE * FIRST + thread_ * SECOND);
      }
      if constexpr (F::HEADER_WORDS > RECORD_WORDS) {
        // A lane takes one of a step's first two.
        records_[i][0] = records_[i][1] = header(i)[step * 2 + lane() / 2];
        records_[i][2] = header(i)[F::HEADER_WORDS - 1];
      } else if constexpr (!ONE_HEADER) {
        copy_words<F::HEADER_WORDS>(records_[i], header(i) + step * F::HEADER_WORDS);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      makers_[i].begin(records_[i], ONE_HEADER ? step : 0, lane());
    }
  }

  // After the last take_step of a pair: its slot may be filled again.
  __device__ __forceinline__ void end_pair() {
    __syncwarp();
    slot_ = slot_ + 1 == V::AHEAD ? 0 : slot_ + 1;
  }

  // Operands of four products, half a step: pairs 0 and 1 of what lanes take in a round, then pairs 2 and 3.
  __device__ __forceinline__ void fragments(int half, unsigned (&operands)[4][4]) const {
    uint4 upper[2], lower[2];
    makers_[0].make(taken_[0], half, lane(), upper);
    makers_[1].make(taken_[1], half, lane(), lower);
#pragma unroll
    for (int round = 0; round < 2; ++round) {
      unsigned (&first)[4] = operands[round * 2];
      unsigned (&second)[4] = operands[round * 2 + 1];
      first[0] = upper[round].x, first[1] = lower[round].x;
      first[2] = upper[round].y, first[3] = lower[round].y;
      second[0] = upper[round].z, second[1] = lower[round].z;
      second[2] = upper[round].w, second[3] = lower[round].w;
    }
  }

 private:
  __device__ __forceinline__ int lane() const { return thread_ % 4; }
  __device__ __forceinline__ unsigned char* slot(int slot) const { return slots_ + slot * V::PAIR_BYTES; }
  static __device__ __forceinline__ int code_place(int step, int i) { return (step * 2 + i) * V::ROW_CODES; }
  static __device__ __forceinline__ int header_place(int i) { return CODES_BYTES + i * V::ROW_HEADERS; }
  __device__ __forceinline__ const unsigned* header(int i) const {
    return reinterpret_cast<const unsigned*>(slot(slot_) + header_place(i)) + thread_ / 4 * V::HEADER_WORDS;
  }

  // The row of the weight that is row i of this thread; where the tile ends, some other one. Gates are the
  // first half of a tile's rows, their ups the second.
  __device__ __forceinline__ int weight_row(int i, int column) const {
    constexpr int HALF = V::FEATURES / 2;
    const int row = threadIdx.x / WARP_SIZE * WARP_ROWS + i * 8 + thread_ % WARP_SIZE / 4;
    if (!silu_mul_) return min(column * V::FEATURES + row, out_features_ - 1);
    const int gates = out_features_ / 2;
    return min(column * HALF + row % HALF, gates - 1) + (row < HALF ? 0 : gates);
  }

  __device__ __forceinline__ void begin_tile() {
    const int column = work_.tile(index_).y;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const long long row = weight_row(i, column);
      codes_from_[i] = codes_ + (row * steps_ + work_.first_step) * F::STEP_WORDS;
      headers_from_[i] =
          headers_ + (row * steps_ + work_.first_step) / F::STEPS_A_SPAN * F::HEADER_WORDS + lane();
    }
  }

  // A lane brings its own codes, and some words of the headers of its quad.
  __device__ __forceinline__ void copy_row(int i, bool has_both) {
    const unsigned to = shared_address(slot(copy_slot_));
    const unsigned* const codes = codes_from_[i];
#pragma unroll
    for (int step = 0; step < PAIR_STEPS; ++step) {
      const unsigned place = to + code_place(step, i);
      const unsigned* const from = codes + step * F::STEP_WORDS;
      const bool has = step == 0 || has_both;
      copy_async<FIRST * 4>(place + thread_ * FIRST * 4, from + first_piece<F>(lane()), has);
      if constexpr (SECOND > 0) {
        copy_async<SECOND * 4>(place + (WARPGROUP_SIZE * FIRST + thread_ * SECOND) * 4,
                               from + second_piece<F>(lane()), has);
      }
    }
    const unsigned place = to + header_place(i) + (thread_ / 4 * V::HEADER_WORDS + lane()) * 4;
#pragma unroll
    for (int word = 0; word < V::HEADER_WORDS; word += 4) {
      if (word + 4 > V::HEADER_WORDS && word + lane() >= V::HEADER_WORDS) continue;
      const bool has = ONE_HEADER || has_both || word + lane() < F::HEADER_WORDS;
      copy_async<4>(place + word * 4, headers_from_[i] + word, has);
    }
    codes_from_[i] += PAIR_WORDS;
    headers_from_[i] += V::HEADER_WORDS;
  }

  const FragmentsWork& work_;
  unsigned char* const slots_;
  const unsigned* const codes_;
  const unsigned* const headers_;
  const int steps_;  // of a row
  const int out_features_;
  const int silu_mul_;
  const int thread_;
  int index_, step_ = 0;  // to be copied next
  const unsigned* codes_from_[2] = {};
  const unsigned* headers_from_[2] = {};
  int copy_slot_ = 0, slot_ = 0;
  alignas(16) unsigned records_[2][RECORD_WORDS];
  LaneCodes<F> taken_[2];
  ElementMaker<T, F> makers_[2];
};

// Where a tile's sums go, CHUNK_TOKENS tokens at a time through `staging` [CHUNK_TOKENS][STRIDE]. The blocks
// of a cluster, which have one tile each, add each other's in as few meetings as the ring and `staging`
// behind it have room for.
template <typename V>
struct FragmentsEpilogue {
  using T = typename V::T;
  using Out = typename V::Out;
  // Of four features, that a thread has on their way at once: what registers allow.
  static constexpr int ITEMS = V::CONSUMERS > 2 * WARPGROUP_SIZE ? 1 : V::TOKENS > 128 ? 2 : 4;

  float* ring;
  int stages;
  const T* bias;
  Out* out;
  int num_rows, out_features, out_stride;
  int split, splits;
  bool accumulate, silu_mul, turns;

  __device__ __forceinline__ void store(const float (&sums)[V::TOKENS / 2], int2 tile) const {
    const int ring_floats = stages * V::STAGE_ELEMENTS / 2;
    float* const sums_of_tokens = splits > 1 ? ring : ring + ring_floats;
    const int at_once = splits > 1 ? ring_floats / (CHUNK_TOKENS * V::STRIDE) + 1 : 1;  // chunks
    const int lane = threadIdx.x % WARP_SIZE;
    float* const own =
        sums_of_tokens + lane % 4 * 2 * V::STRIDE + threadIdx.x / WARP_SIZE * WARP_ROWS + lane / 4;
    if (splits > 1) named_barrier_wait<1, V::CONSUMERS>();  // all have multiplied by what lies there
    int staged = 0;
#pragma unroll
    for (int first = 0; first < V::TOKENS; first += CHUNK_TOKENS) {
      const int token = tile.x * V::TOKENS + first;
      if (token >= num_rows) break;
      float* const to = own + staged * (CHUNK_TOKENS * V::STRIDE);
#pragma unroll
      for (int i = 0; i < CHUNK_TOKENS / 2; ++i) {
        to[(i / 4 * 8 + i % 2) * V::STRIDE + i % 4 / 2 * 8] =
            sums[first / 2 + i] * SUMS_FACTOR<T, typename V::F>;
      }
      const bool is_last = first + CHUNK_TOKENS == V::TOKENS || token + CHUNK_TOKENS >= num_rows;
      if (++staged < at_once && !is_last) continue;
      meet();
      store_tokens(sums_of_tokens, token - (staged - 1) * CHUNK_TOKENS, staged * CHUNK_TOKENS, tile.y);
      meet();
      staged = 0;
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

  // Four features of some tokens, all blocks' sums in their order.
  __device__ __forceinline__ void add_up(const float* const (&from)[ITEMS], int offset,
                                         float (&totals)[ITEMS][4]) const {
    if (splits == 1) {
#pragma unroll
      for (int j = 0; j < ITEMS; ++j) {
        const float4 own = *reinterpret_cast<const float4*>(from[j] + offset);
        totals[j][0] = own.x, totals[j][1] = own.y, totals[j][2] = own.z, totals[j][3] = own.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < ITEMS * 4; ++i) totals[i / 4][i % 4] = 0.0f;
#pragma unroll 1
    for (int rank = 0; rank < splits; ++rank) {
      float2 low[ITEMS], high[ITEMS];
#pragma unroll
      for (int j = 0; j < ITEMS; ++j) {
        low[j] = load_cluster(reinterpret_cast<const float2*>(from[j] + offset), rank);
        high[j] = load_cluster(reinterpret_cast<const float2*>(from[j] + offset + 2), rank);
      }
#pragma unroll
      for (int j = 0; j < ITEMS; ++j) {
        totals[j][0] += low[j].x, totals[j][1] += low[j].y;
        totals[j][2] += high[j].x, totals[j][3] += high[j].y;
      }
    }
  }

  // This block's share of up to `tokens` tokens from `first` on, whose sums begin at `sums`.
  __device__ __forceinline__ void store_tokens(const float* sums, int first, int tokens, int column) const {
    constexpr int HALF = V::FEATURES / 2;
    const int quads = silu_mul ? HALF / 4 : V::FEATURES / 4;
    const int columns = silu_mul ? out_features / 2 : out_features;
    const int count = min(tokens, num_rows - first) * quads, stride = splits * V::CONSUMERS;
#pragma unroll 1
    for (int begin = split * V::CONSUMERS + threadIdx.x; begin < count; begin += ITEMS * stride) {
      const float* from[ITEMS];
      Out* to[ITEMS];  // null where there is nothing to store
      int features[ITEMS];
      float before[ITEMS][4];
#pragma unroll
      for (int j = 0; j < ITEMS; ++j) {
        const int i = begin + j * stride < count ? begin + j * stride : begin;
        const int token = small_div(i, quads), in_tile = (i - token * quads) * 4;
        features[j] = column * quads * 4 + in_tile;
        from[j] = sums + token * V::STRIDE + in_tile;
        const int place = turns ? turned_place(features[j]) : features[j];
        to[j] = out + static_cast<long long>(first + token) * out_stride + place;
        if (features[j] >= columns || begin + j * stride >= count) to[j] = nullptr;
        if constexpr (sizeof(Out) == 2) {
          if (accumulate && to[j] != nullptr) load_updated_floats(to[j], 4, before[j]);
        }
      }
      float totals[ITEMS][4];
      add_up(from, 0, totals);
      if (silu_mul) {
        float ups[ITEMS][4];
        add_up(from, HALF, ups);
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) silu_mul_into(totals[j], ups[j]);
      }
#pragma unroll
      for (int j = 0; j < ITEMS; ++j) {
        if (to[j] == nullptr) continue;
        if constexpr (sizeof(Out) == 2) {
          if (bias != nullptr) {
#pragma unroll
            for (int e = 0; e < 4; ++e) totals[j][e] += to_float(bias[features[j] + e]);
          }
          if (accumulate) {
#pragma unroll
            for (int e = 0; e < 4; ++e) totals[j][e] += before[j][e];
          }
        }
        Vec<Out, 4> result;
#pragma unroll
        for (int e = 0; e < 4; ++e) result[e] = from_float<Out>(totals[j][e]);
        if constexpr (sizeof(Out) == 2) {
          if (turns) {
            const uint2 pairs = *reinterpret_cast<const uint2*>(&result);
            *reinterpret_cast<unsigned*>(to[j]) = pairs.x;
            *reinterpret_cast<unsigned*>(to[j] + SEGMENT_ELEMENTS) = pairs.y;
            continue;
          }
        }
        result.store(to[j]);
      }
    }
  }
};
