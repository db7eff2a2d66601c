// How the weights of few rows' products in quantised blocks reach shared memory from sm_90 on: by TMA, which
// costs a lane neither instructions nor places in the queue of its loads.
#pragma once

#include "ptx/sm90.cuh"
#include "quant/block_product.cuh"

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

// A stage of the ring: of each unit of a tile the codes of an item, in lines of 128 bytes, eight rows' first
// lines before their second ones, and far off its headers. PARTS warps share an item's k, a step each.
template <typename Format, int PARTS_OF_K, int UNITS_A_TILE>
struct BlockStage {
  using F = Format;
  static constexpr int PARTS = PARTS_OF_K, UNITS = UNITS_A_TILE;
  static constexpr int STEP_BYTES = F::STEP_WORDS * 4, SPAN_BYTES = F::HEADER_WORDS * 4;
  static constexpr int LINES = PARTS * STEP_BYTES / SWIZZLE_BYTES;  // of a row
  static constexpr int ROW_HEADERS = PARTS / F::STEPS_A_SPAN * SPAN_BYTES;
  static constexpr int UNIT_CODES = UNIT * PARTS * STEP_BYTES, UNIT_HEADERS = UNIT * ROW_HEADERS;
  static constexpr int CODES = UNITS * UNIT_CODES, HEADERS = UNITS * UNIT_HEADERS;
  static constexpr bool SWIZZLES_HEADERS = ROW_HEADERS == SWIZZLE_BYTES;
  static_assert(UNIT_CODES % SWIZZLE_REPEAT == 0 && UNIT_HEADERS % 128 == 0,
                "boxes begin at multiples of it");

  // Where byte `at` of a row lies in its unit. A line's 16-byte pieces are XORed with the row.
  static __device__ __forceinline__ int place(int at, int row) {
    return at / SWIZZLE_BYTES * SWIZZLE_REPEAT + row * SWIZZLE_BYTES + ((at % SWIZZLE_BYTES) ^ row * 16);
  }
  static __device__ __forceinline__ int header_place(int at, int row) {
    return SWIZZLES_HEADERS ? place(at, row) : row * ROW_HEADERS + at;
  }
};

// This block's tiles: neighbouring units of the weight, or by turns those of gates and of their ups.
template <typename Stage>
struct BlockTiles {
  int features;  // of the result
  int a_tile;    // of them
  int begin, count;

  __device__ __forceinline__ BlockTiles(int out_features, int gated)
      : BlockTiles(out_features, gated, blockIdx.x, gridDim.x) {}
  // Those of one of so many blocks.
  __device__ __forceinline__ BlockTiles(int out_features, int gated, int block, int blocks)
      : features(gated ? out_features / 2 : out_features), a_tile(Stage::UNITS * UNIT / (gated ? 2 : 1)) {
    const int all = ceil_div(features, a_tile);
    begin = all / blocks * block + min(block, all % blocks);
    count = all / blocks + (block < all % blocks ? 1 : 0);
  }

  __device__ __forceinline__ bool gated() const { return a_tile < Stage::UNITS * UNIT; }
  // The weight's row with which unit `i` of a tile begins.
  __device__ __forceinline__ int row(int tile, int i) const {
    return (begin + tile) * a_tile + (gated() ? i / 2 * UNIT + i % 2 * features : i * UNIT);
  }
};

// Steps of 128 elements that a row has; part `part` of a block's warps takes every PARTS-th. Of a slice of k
// the items from `first` on.
template <typename Stage>
struct StageSteps {
  using F = typename Stage::F;
  int spans;
  int count;
  int first;
  int a_tile;   // items, and steps of a warp, with those beyond the row's end
  int vectors;  // of a warp

  __device__ __forceinline__ explicit StageSteps(int in_features, int slice = 0, int slices = 1)
      : spans(ceil_div(in_features, F::SPAN)), count(spans * F::STEPS_A_SPAN) {
    const int all = ceil_div(count, Stage::PARTS);
    first = slices == 1 ? 0 : small_div(slice * all, slices);
    a_tile = slices == 1 ? all : small_div((slice + 1) * all, slices) - first;
    vectors = a_tile * (STEP / SEGMENT);
  }

  static __device__ __forceinline__ int half() {
    static_assert(Stage::PARTS % F::STEPS_A_SPAN == 0, "a warp's steps lie at the same place of their spans");
    return warp_of_thread() % F::STEPS_A_SPAN;
  }
};

// Producer: copies items, the first lane of a warp that does nothing else, or of each warp in turn.
template <typename Stage>
class BoxProducer {
 public:
  __device__ __forceinline__ BoxProducer(unsigned char* codes, unsigned char* headers, Barrier* full,
                                         Barrier* empty, const BlockTiles<Stage>& tiles,
                                         const StageSteps<Stage>& steps, const TensorMap& codes_map,
                                         const TensorMap& headers_map, int stages)
      : codes_(codes),
        headers_(headers),
        full_(full),
        empty_(empty),
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
    Barrier* const full = full_ + slot;
    barrier_arrive_expecting(full, Stage::CODES + Stage::HEADERS);
#pragma unroll
    for (int i = 0; i < Stage::UNITS; ++i) {
      const int row = tiles_.row(tile, i);
      copy_box(codes_ + slot * Stage::CODES + i * Stage::UNIT_CODES, codes_map_,
               (steps_.first + part) * Stage::LINES, row, 0, full, policy);
      copy_box(headers_ + slot * Stage::HEADERS + i * Stage::UNIT_HEADERS, headers_map_, row,
               (steps_.first + part) * (Stage::ROW_HEADERS / 2), full, policy);
    }
  }

  // All items, into slots that are free from the beginning on.
  __device__ __forceinline__ void run() const {
    if (lane_of_thread() != 0) return;
    RingPlace place(stages_);
#pragma unroll 1
    for (int item = 0; item < tiles_.count * steps_.a_tile; ++item) {
      barrier_wait(empty_ + place.slot, place.parity ^ 1);
      start(item, place.slot);
      place.advance();
    }
  }

  // The slot of an item once all warps have used it; `next`: the place of the item behind that one.
  __device__ __forceinline__ void refill(int item, const RingPlace& next) const {
    const int slot = next.slot == 0 ? stages_ - 1 : next.slot - 1;
    barrier_wait(empty_ + slot, next.slot == 0 ? next.parity ^ 1 : next.parity);
    start(item + stages_, slot);
  }

 private:
  unsigned char* const codes_;
  unsigned char* const headers_;
  Barrier* const full_;
  Barrier* const empty_;
  const BlockTiles<Stage>& tiles_;
  const StageSteps<Stage>& steps_;
  const TensorMap& codes_map_;  // of 16-bit elements
  const TensorMap& headers_map_;
  const int stages_;
};

// Where this lane's words lie in a unit. The rows of a unit are those of an mma in an order in which
// neighbours, which are read at once, are four rows apart and so in different banks.
template <typename Stage>
class UnitPlaces {
  using F = typename Stage::F;

 public:
  __device__ __forceinline__ explicit UnitPlaces(int part) {
    const int step = part * Stage::STEP_BYTES;
    first_ = Stage::place(step + first_piece<F>(lane()) * 4, row());
    second_ = Stage::place(step + second_piece<F>(lane()) * 4, row());
    header_ = Stage::header_place(part / F::STEPS_A_SPAN * Stage::SPAN_BYTES, row());
    asm volatile(""
                 : "+r"(first_), "+r"(second_), "+r"(header_));  // else they are computed again in each step
  }
  // The row that this lane's row of an mma is.
  static __device__ __forceinline__ int row() { return row_of_lane() / 2 + row_of_lane() % 2 * (UNIT / 2); }

  __device__ __forceinline__ LaneCodes<F> codes(const unsigned char* unit) const {
    LaneCodes<F> codes;
    copy_words<FIRST_WORDS<F>>(codes.words, reinterpret_cast<const unsigned*>(unit + first_));
    if constexpr (SECOND_WORDS<F> > 0) {
      copy_words<SECOND_WORDS<F>>(codes.words + FIRST_WORDS<F>,
                                  reinterpret_cast<const unsigned*>(unit + second_));
    }
    return codes;
  }

  __device__ __forceinline__ void load_record(const unsigned char* headers, int half,
                                              unsigned (&record)[RECORD_WORDS]) const {
    const unsigned* const words = reinterpret_cast<const unsigned*>(headers + header_);
    if constexpr (F::HEADER_WORDS == 5) {  // a lane takes one of the first two
      record[0] = record[1] = words[half * 2 + lane() / 2];
      record[2] = words[4];
    } else {
      copy_words<F::HEADER_WORDS>(record, words);
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return lane_of_thread() % 4; }

  int first_, second_, header_;
};
