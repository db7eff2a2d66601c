// The parts of the product of one row by a weight in quantised blocks, from sm_90 on: rows of the weight come by
// bulk copies, which cost a lane neither instructions nor places in the queue of its loads.
#pragma once

#include "block_row.cuh"
#include "generated/sm90_block_row.cuh"
#include "ptx/sm90.cuh"

constexpr int ROW_THREADS = ROW_WARPS * WARP_SIZE;
constexpr int TILE_ROWS = 2 * UNIT;  // of an mma

// What a block has in shared memory beside the ring and the row.
struct alignas(128) RowShared {
  uint4 zeros[4];
  float squares[ROW_WARPS];
  Barrier full[MAX_ROW_STAGES], empty[MAX_ROW_STAGES], sums[MAX_ROW_STAGES + 1];
  alignas(16) float partial[MAX_ROW_STAGES + 1][ROW_WARPS * TILE_ROWS];

  // By all threads, before a barrier of theirs.
  __device__ __forceinline__ void init(int stages) {
    const int thread = threadIdx.x;
    if (thread < 4) zeros[thread] = make_uint4(0, 0, 0, 0);
    if (thread < stages) {
      barrier_init(full + thread, 1);
      barrier_init(empty + thread, ROW_WARPS);
    }
    if (thread <= stages) barrier_init(sums + thread, ROW_WARPS);
    barrier_init_done();
  }
};
static_assert(sizeof(RowShared) == ROW_SHARED_BYTES, "the launch leaves it this much");

// A slot of a ring and the parity of its phase.
struct RingPlace {
  const int slots;
  int slot = 0;
  unsigned parity = 0;

  __device__ __forceinline__ explicit RingPlace(int count) : slots(count) {}
  __device__ __forceinline__ void advance() {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// A stage of the ring: of each of two units the codes of an item, in lines of 128 bytes, eight rows' first lines
// before their second ones, and far off its headers.
template <typename F>
struct RowStage {
  static constexpr int STEP_BYTES = F::STEP_WORDS * 4, SPAN_BYTES = F::HEADER_WORDS * 4;
  static constexpr int LINES = ROW_WARPS * STEP_BYTES / SWIZZLE_BYTES;  // of a row
  static constexpr int ROW_HEADERS = ROW_WARPS / F::STEPS_A_SPAN * SPAN_BYTES;
  static constexpr int UNIT_CODES = UNIT * ROW_WARPS * STEP_BYTES, UNIT_HEADERS = UNIT * ROW_HEADERS;
  static constexpr int CODES = 2 * UNIT_CODES, HEADERS = 2 * UNIT_HEADERS;
  static constexpr bool SWIZZLES_HEADERS = ROW_HEADERS == SWIZZLE_BYTES;
  static_assert(UNIT_CODES % SWIZZLE_REPEAT == 0 && UNIT_HEADERS % 128 == 0, "boxes begin at multiples of it");

  // Where byte `at` of a row lies in its unit. A line's 16-byte pieces are XORed with the row.
  static __device__ __forceinline__ int place(int at, int row) {
    return at / SWIZZLE_BYTES * SWIZZLE_REPEAT + row * SWIZZLE_BYTES + ((at % SWIZZLE_BYTES) ^ row * 16);
  }
  static __device__ __forceinline__ int header_place(int at, int row) {
    return SWIZZLES_HEADERS ? place(at, row) : row * ROW_HEADERS + at;
  }
};

// This block's tiles: neighbouring rows of the weight, or 8 gates and their ups.
struct RowTiles {
  int features;  // of the result
  int a_tile;    // of them
  int begin, count;

  __device__ __forceinline__ RowTiles(int out_features, int gated)
      : features(gated ? out_features / 2 : out_features), a_tile(gated ? UNIT : TILE_ROWS) {
    const int all = ceil_div(features, a_tile), blocks = gridDim.x, block = blockIdx.x;
    begin = all / blocks * block + min(block, all % blocks);
    count = all / blocks + (block < all % blocks ? 1 : 0);
  }

  // The weight's row with which unit `i` of a tile begins.
  __device__ __forceinline__ int row(int tile, int i) const {
    return (begin + tile) * a_tile + i * (a_tile == UNIT ? features : UNIT);
  }
};

// Steps of 128 elements that a row has; a warp takes every 16th.
template <typename F>
struct RowSteps {
  int spans;
  int count;
  int a_tile;   // items, and steps of a warp, with those beyond the row's end
  int vectors;  // of a warp

  __device__ __forceinline__ explicit RowSteps(int in_features)
      : spans(ceil_div(in_features, F::SPAN)),
        count(spans * F::STEPS_A_SPAN),
        a_tile(ceil_div(count, ROW_WARPS)),
        vectors(a_tile * (STEP / SEGMENT)) {}

  static __device__ __forceinline__ int half() {
    static_assert(ROW_WARPS % F::STEPS_A_SPAN == 0, "a warp's steps lie at the same place of their spans");
    return warp_of_thread() % F::STEPS_A_SPAN;
  }
};

// Producer: copies items, each warp's first lane in turn.
template <typename F>
class RowProducer {
  using Stage = RowStage<F>;

 public:
  __device__ __forceinline__ RowProducer(unsigned char* codes, unsigned char* headers, RowShared& shared,
                                         const RowTiles& tiles, const RowSteps<F>& steps,
                                         const TensorMap& codes_map, const TensorMap& headers_map, int stages)
      : codes_(codes),
        headers_(headers),
        shared_(shared),
        tiles_(tiles),
        steps_(steps),
        codes_map_(codes_map),
        headers_map_(headers_map),
        stages_(stages) {}

  // Into a slot that is free.
  __device__ __forceinline__ void start(int item, int slot) const {
    const int tile = small_div(item, steps_.a_tile), part = item - tile * steps_.a_tile;
    if (tile >= tiles_.count || lane_of_thread() != 0) return;
    const unsigned long long policy = evict_first_policy();
    Barrier* const full = &shared_.full[slot];
    barrier_arrive_expecting(full, Stage::CODES + Stage::HEADERS);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tiles_.row(tile, i);
      copy_box(codes_ + slot * Stage::CODES + i * Stage::UNIT_CODES, codes_map_, part * Stage::LINES, row, 0, full,
               policy);
      copy_box(headers_ + slot * Stage::HEADERS + i * Stage::UNIT_HEADERS, headers_map_, row,
               part * (Stage::ROW_HEADERS / 2), full, policy);
    }
  }

  // The slot of an item once all warps have used it; `next`: the place of the item behind that one.
  __device__ __forceinline__ void refill(int item, const RingPlace& next) const {
    const int slot = next.slot == 0 ? stages_ - 1 : next.slot - 1;
    barrier_wait(&shared_.empty[slot], next.slot == 0 ? next.parity ^ 1 : next.parity);
    start(item + stages_, slot);
  }

 private:
  unsigned char* const codes_;
  unsigned char* const headers_;
  RowShared& shared_;
  const RowTiles& tiles_;
  const RowSteps<F>& steps_;
  const TensorMap& codes_map_;  // of 16-bit elements
  const TensorMap& headers_map_;
  const int stages_;
};

// The norm before the product, and the row in fixed point.
template <typename T, typename F>
class RowPrologue {
  static constexpr int BATCH = 4;                              // loads in flight
  static constexpr bool SCALES_SUMS = has_float_range<T>;      // the norm's root divides the sums

 public:
  // Before earlier kernels have ended.
  __device__ __forceinline__ RowPrologue(const T* norm, float (&sums_of_squares)[ROW_WARPS], int in_features,
                                         float eps, int vectors)
      : norm_(norm), squares_(sums_of_squares), in_features_(in_features), eps_(eps), vectors_(vectors) {
    load(norm, 0, gains_);
  }

  // This warp's vectors of the row, every 16th 128 elements of it.
  __device__ __forceinline__ void fix(const T* x, uint4* y, RowGroupOf<F>* groups) {
    float scale = 1.0f, squares = 0.0f;
    uint4 raw[BATCH];
    if (norm_ != nullptr && !SCALES_SUMS) {
#pragma unroll 1
      for (int first = 0; first < vectors_; first += BATCH * WARP_SIZE) {
        load(x, first, raw);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) squares = add_squares<T>(squares, raw[i]);
      }
      share_squares(squares);
      __syncthreads();
      scale = inverse_rms();
    }
#pragma unroll 1
    for (int first = 0; first < vectors_; first += BATCH * WARP_SIZE) {
      load(x, first, raw);
      if (first > 0) load(norm_, first, gains_);
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int v = first + i * WARP_SIZE + lane_of_thread();
        if (first + i * WARP_SIZE >= vectors_) break;
        if (norm_ != nullptr) {
          if constexpr (SCALES_SUMS) {
            squares = add_squares<T>(squares, raw[i]);
            raw[i] = multiply_elements<T>(raw[i], gains_[i]);
          } else {
            raw[i] = scaled_elements<T>(raw[i], gains_[i], scale);
          }
        }
        fix_vector<T, F>(raw[i], v, v < vectors_, y, groups);
      }
    }
    if (norm_ != nullptr && SCALES_SUMS) share_squares(squares);
  }

  // What the sums of a tile are multiplied by. Called by a warp.
  __device__ __forceinline__ float scale_of_sums() const {
    return norm_ != nullptr && SCALES_SUMS ? inverse_rms() : 1.0f;
  }

 private:
  __device__ __forceinline__ void share_squares(float squares) {
    squares = warp_sum(squares);
    if (lane_of_thread() == 0) squares_[warp_of_thread()] = squares;
  }
  __device__ __forceinline__ float inverse_rms() const {
    const float sum = warp_sum(lane_of_thread() < ROW_WARPS ? squares_[lane_of_thread()] : 0.0f);
    return rsqrtf(__fdividef(sum, in_features_) + eps_);
  }

  // The halves of vectors `first` + 32 i + lane that `fix_vector` takes together, zeros beyond the row's end.
  __device__ __forceinline__ void load(const T* from, int first, uint4 (&raw)[BATCH]) const {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int v = first + i * WARP_SIZE + lane_of_thread();
      const int2 halves = halves_of_vector<F>(v);
      raw[i] = make_uint4(0, 0, 0, 0);
      if (from == nullptr || v >= vectors_ || element(halves.x) >= in_features_) continue;
      if constexpr (IN_PAIRS<F>) {
        uint2 a, b;
        load_past_l1(a, from + element(halves.x));
        load_past_l1(b, from + element(halves.y));
        raw[i] = make_uint4(a.x, a.y, b.x, b.y);
      } else {
        load_past_l1(raw[i], from + element(halves.x));
      }
    }
  }
  // The first one of half a vector of this warp's.
  static __device__ __forceinline__ int element(int half) {
    constexpr int HALVES = STEP / SEGMENT * 2;
    return (half / HALVES * ROW_WARPS + warp_of_thread()) * STEP + half % HALVES * (SEGMENT / 2);
  }

  const T* const norm_;
  float (&squares_)[ROW_WARPS];
  const int in_features_;
  const float eps_;
  const int vectors_;
  uint4 gains_[BATCH];
};

// Consumer: this warp's sums of a tile over its steps of k. The rows of a unit are those of the mma in an order in
// which neighbours, which are read at once, are four rows apart and so in different banks.
template <typename F>
class RowItems {
  using Stage = RowStage<F>;

 public:
  __device__ __forceinline__ RowItems(const unsigned char* shared, const uint4* y,
                                      const RowGroupOf<F>* groups, const uint4* zeros, const RowSteps<F>& steps)
      : bytes_(shared, y, zeros), groups_(groups + lane()), count_(steps.count) {
    const int step = warp_of_thread() * Stage::STEP_BYTES;
    first_ = Stage::place(step + first_piece<F>(lane()) * 4, row());
    second_ = Stage::place(step + second_piece<F>(lane()) * 4, row());
    header_ = Stage::header_place(warp_of_thread() / F::STEPS_A_SPAN * Stage::SPAN_BYTES, row());
  }

  __device__ __forceinline__ void take(const unsigned char* codes, const unsigned char* headers, int part) {
    if (part * ROW_WARPS + warp_of_thread() >= count_) return;
    const RowGroupOf<F> group = groups_[part * 4];
    uint2 bytes[LANE_ELEMENTS / SEGMENT];
    bytes_.load(part, bytes);
    LaneCodes<F> rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned char* const unit = codes + i * Stage::UNIT_CODES;
      copy_words<FIRST_WORDS<F>>(rows[i].words, reinterpret_cast<const unsigned*>(unit + first_));
      if constexpr (SECOND_WORDS<F> > 0) {
        copy_words<SECOND_WORDS<F>>(rows[i].words + FIRST_WORDS<F>,
                                    reinterpret_cast<const unsigned*>(unit + second_));
      }
    }
    int products[F::GROUPS][4] = {};
    RowBytes<F>::multiply(rows[0], rows[1], bytes, products);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned record[RECORD_WORDS];
      load_record(headers + i * Stage::UNIT_HEADERS + header_, record);
      add_scaled<F>(sums_[i], products, i, record, RowSteps<F>::half(), group);
    }
  }

  // After a tile's last step: partial [ROW_WARPS][TILE_ROWS].
  __device__ __forceinline__ void share(float* partial) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = sums_[i];
      sum += __shfl_xor_sync(FULL_WARP, sum, 1);
      sum += __shfl_xor_sync(FULL_WARP, sum, 2);
      if (lane() == 0) partial[warp_of_thread() * TILE_ROWS + i * UNIT + row()] = sum;
      sums_[i] = 0.0f;
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return lane_of_thread() % 4; }
  static __device__ __forceinline__ int row() { return row_of_lane() / 2 + row_of_lane() % 2 * (UNIT / 2); }

  static __device__ __forceinline__ void load_record(const unsigned char* header, unsigned (&record)[RECORD_WORDS]) {
    const unsigned* const words = reinterpret_cast<const unsigned*>(header);
    if constexpr (F::HEADER_WORDS == 5) {  // a lane takes one of the first two
      record[0] = record[1] = words[RowSteps<F>::half() * 2 + lane() / 2];
      record[2] = words[4];
    } else {
      copy_words<F::HEADER_WORDS>(record, words);
    }
  }

  const RowBytes<F> bytes_;
  const RowGroupOf<F>* const groups_;  // of this lane's 32 elements of a step
  const int count_;                    // steps of a row
  int first_, second_, header_;        // where this lane's lie in a unit
  float sums_[2] = {};
};

// Epilogue: a warp adds the warps' sums of a tile, then the bias and the residual or the gate.
template <typename T, typename Out>
class RowEpilogue {
 public:
  __device__ __forceinline__ RowEpilogue(const RowTiles& tiles, const T* bias, Out* out, int accumulate, int gated)
      : tiles_(tiles), bias_(bias), out_(out), accumulate_(accumulate), gated_(gated) {}

  // What the sums are added to, so that it is there when they are.
  __device__ __forceinline__ void fetch(int tile) {
    before_ = 0.0f;
    if (!has_column(tile)) return;
    if (accumulate_) before_ = to_float(load_updated(out_ + column(tile)));
    if (bias_ != nullptr) before_ += to_float(bias_[column(tile)]);
  }

  // partial [ROW_WARPS][TILE_ROWS], added in order by half a warp each half.
  template <typename Prologue>
  __device__ __forceinline__ void store(int tile, const float* partial, const Prologue& prologue) const {
    const int row = lane_of_thread() % TILE_ROWS, half = lane_of_thread() / TILE_ROWS;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < ROW_WARPS / 2; ++w) sum += partial[(half * (ROW_WARPS / 2) + w) * TILE_ROWS + row];
    sum += __shfl_xor_sync(FULL_WARP, sum, TILE_ROWS);
    sum *= prologue.scale_of_sums();
    const float up = __shfl_xor_sync(FULL_WARP, sum, UNIT);
    if (!has_column(tile)) return;
    out_[column(tile)] = from_float<Out>(gated_ ? up * __fdividef(sum, 1.0f + __expf(-sum)) : sum + before_);
  }

 private:
  __device__ __forceinline__ int column(int tile) const {
    return (tiles_.begin + tile) * tiles_.a_tile + lane_of_thread();
  }
  __device__ __forceinline__ bool has_column(int tile) const {
    return lane_of_thread() < tiles_.a_tile && column(tile) < tiles_.features;
  }

  const RowTiles& tiles_;
  const T* const bias_;
  Out* const out_;
  const int accumulate_, gated_;
  float before_ = 0.0f;  // of this lane's column
};
