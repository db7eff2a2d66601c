// The parts of products of few rows by experts' weights, as those of decode_product.cuh, with another weight
// and other rows of x for each tile.
#pragma once

#include "generated/expert_decode.cuh"
#include "generated/expert_tiles.cuh"
#include "linear/decode_product.cuh"
#include "moe/expert_epilogue.cuh"

// A tile: up to TOKENS rows of one expert, of the rows sorted by expert, and UNITS units of its weight.
struct DecodeTile {
  int expert;
  int row0, rows;
  int column;  // which tile of columns
};

// The experts that have rows. All threads of a block make it together; `starts` and `chunks` are shared
// memory of MAX_EXPERTS + 1 words each.
template <int TOKENS>
class UsedExperts {
  static constexpr int EXPERT_BITS = 12;
  static_assert(MAX_EXPERTS < 1 << EXPERT_BITS, "an expert and where its rows begin share a word");

 public:
  int num_chunks;  // of TOKENS rows of an expert, or what is left

  __device__ __forceinline__ UsedExperts(const int* offsets, int num_experts, unsigned* starts, int* chunks,
                                         int2 (&totals)[WARPS])
      : starts_(starts), chunks_(chunks) {
    const int lane = lane_of_thread(), warp = warp_of_thread();
    int2 before = make_int2(0, 0);  // experts with rows, and their chunks
    for (int base = 0; base < num_experts; base += THREADS) {
      const int expert = base + threadIdx.x;
      const bool valid = expert < num_experts;
      const int start = valid ? load_updated(offsets + expert) : 0;
      const int rows = valid ? load_updated(offsets + expert + 1) - start : 0;
      const unsigned used = __ballot_sync(FULL_WARP, rows > 0);
      const int own = ceil_div(rows, TOKENS);
      int through = own;
#pragma unroll
      for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
        const int other = __shfl_up_sync(FULL_WARP, through, distance);
        if (lane >= distance) through += other;
      }
      if (base > 0) __syncthreads();  // all have read the totals before
      if (lane == WARP_SIZE - 1) totals[warp] = make_int2(__popc(used), through);
      __syncthreads();
      int2 place = before;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const int2 total = totals[w];
        if (w < warp) place = make_int2(place.x + total.x, place.y + total.y);
        before = make_int2(before.x + total.x, before.y + total.y);
      }
      place.x += __popc(used & ((1u << lane) - 1));
      if (rows > 0) {
        starts[place.x] = static_cast<unsigned>(start) << EXPERT_BITS | expert;
        chunks[place.x] = place.y + through - own;
      }
      if (expert == num_experts - 1) end_ = start + rows;
    }
    // The thread of the last expert knows where all rows end.
    if ((num_experts - 1) % THREADS == static_cast<int>(threadIdx.x)) {
      starts[before.x] = static_cast<unsigned>(end_) << EXPERT_BITS;
      chunks[before.x] = before.y;
    }
    __syncthreads();
    count_ = before.x;
    num_chunks = before.y;
  }

  // The place, among experts with rows, of the one to which a chunk belongs.
  __device__ __forceinline__ int place_of(int chunk) const {
    int low = 0, high = count_;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (chunks_[middle] <= chunk) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
  __device__ __forceinline__ int first_chunk(int place) const { return chunks_[place]; }
  __device__ __forceinline__ int chunks(int place) const { return chunks_[place + 1] - chunks_[place]; }
  __device__ __forceinline__ DecodeTile tile(int place, int chunk, int column) const {
    const unsigned word = starts_[place];
    const int row0 = static_cast<int>(word >> EXPERT_BITS) + chunk * TOKENS;
    const int end = starts_[place + 1] >> EXPERT_BITS;
    return {static_cast<int>(word & ((1u << EXPERT_BITS) - 1)), row0, min(TOKENS, end - row0), column};
  }

 private:
  const unsigned* const starts_;  // of an expert's rows, and the expert; behind the last the number of rows
  const int* const chunks_;       // how many those before it have
  int count_;
  int end_ = 0;
};

// A block's tiles, of which it walks over a contiguous part: of an expert all chunks take a tile of columns
// one after the other, while it is in L2.
template <int TOKENS, int UNITS>
struct BlockTiles {
  const UsedExperts<TOKENS>& experts;
  int out_features;  // rows of an expert's weight
  int features;      // of the result
  int a_tile;        // units; gated, half as many gates and their ups
  int tiles_n;       // tiles of columns
  int begin, end;

  __device__ __forceinline__ BlockTiles(const UsedExperts<TOKENS>& experts, int out_features, bool gated)
      : experts(experts),
        out_features(out_features),
        features(gated ? out_features / 2 : out_features),
        a_tile(gated ? UNITS / 2 : UNITS),
        tiles_n(ceil_div(features, a_tile * UNIT)) {
    const int count = experts.num_chunks * tiles_n;
    const int blocks = gridDim.x, block = blockIdx.x;
    const int a_block = count / blocks;
    const int one_more = count - a_block * blocks;
    begin = block * a_block + min(block, one_more);
    end = begin + a_block + (block < one_more ? 1 : 0);
  }
};

// A place in the walk over a block's tiles.
template <int TOKENS, int UNITS>
struct TilePlace {
  using Tiles = BlockTiles<TOKENS, UNITS>;
  int index;
  int expert, chunk, column;  // the expert's place among those that have rows, and the chunk of its own
  int chunks;                 // of the expert

  __device__ __forceinline__ explicit TilePlace(const Tiles& tiles) : index(tiles.begin) {
    const int some_chunk = small_div(index, tiles.tiles_n);
    expert = tiles.experts.place_of(some_chunk);
    chunks = tiles.experts.chunks(expert);
    const int within = index - tiles.experts.first_chunk(expert) * tiles.tiles_n;
    column = small_div(within, chunks);
    chunk = within - column * chunks;
  }
  __device__ __forceinline__ DecodeTile tile(const Tiles& tiles) const {
    return tiles.experts.tile(expert, chunk, column);
  }
  // True where the rows are others.
  __device__ __forceinline__ bool advance(const Tiles& tiles) {
    ++index;
    if (++chunk < chunks) return true;
    chunk = 0;
    const bool has_one = chunks == 1;
    if (++column < tiles.tiles_n) return !has_one;
    column = 0;
    if (index < tiles.end) chunks = tiles.experts.chunks(++expert);
    return true;
  }
};

// Where rows of x are: sorted row p is that of number p, with `pairs` that of the pair's token, and with a
// stride of 0 always the one row.
template <typename T>
struct ExpertRows {
  const T* x;
  const int* pairs;
  int top_k;
  int stride;

  __device__ __forceinline__ const T* row(int sorted) const {
    if (pairs == nullptr) return x + static_cast<long long>(sorted) * stride;
    return x + static_cast<long long>(small_div(load_updated(pairs + sorted), top_k)) * stride;
  }
};

// Producer of a dense weight: this lane's ring, ahead of the products.
template <typename V>
class ExpertProducer {
  using T = typename V::T;
  using Tiles = BlockTiles<V::TOKENS, V::UNITS>;
  using Place = TilePlace<V::TOKENS, V::UNITS>;
  static constexpr unsigned COPY_BYTES = THREADS * sizeof(uint4);  // of all threads

 public:
  __device__ __forceinline__ ExpertProducer(uint4* ring, const Tiles& tiles, const Place& first, int steps,
                                            const ExpertRows<T>& x, const T* weight, int in_features,
                                            bool gated)
      : tiles_(tiles),
        steps_(steps),
        x_(x),
        weight_(weight),
        in_features_(in_features),
        ring_(shared_address(ring + threadIdx.x)),
        place_(first),
        from_(weight),
        unit_elements_(static_cast<long long>(UNIT) * in_features),
        middle_elements_(gated ? static_cast<long long>(tiles.features - (V::UNITS / 2 - 1) * UNIT) *
                                     in_features
                               : unit_elements_),
        gated_(gated),
        policy_(evict_first_policy()) {}

  // All stages. Weights are LEAD - 1 stages ahead of x: which rows those are is asked for afar. `settled`:
  // they are all ahead, and x waits for the kernels in front. Groups of copies are committed also where
  // empty, because the waits count them.
  template <int LEAD>
  __device__ __forceinline__ void fill(const Place& first, bool settled) {
    static_assert(LEAD < V::STAGES, "the first step must not wait for all stages");
    const int lead = settled ? V::STAGES : LEAD;
    Place place = first;
    int step = 0;
#pragma unroll 1
    for (int stage = 1 - lead; stage < V::STAGES; ++stage) {
      if (stage + lead <= V::STAGES) {
        if (place_.index < tiles_.end) load_weight();
        advance();
      }
      if (stage < 0) continue;
      if (stage == 0) {
        if (settled) wait_for_earlier_kernels();
        rows_are_others_ = true;
      }
      if (place.index < tiles_.end) {
        if (step == 0) find_rows(place);
        load_x(stage, step);
      }
      copy_async_commit();
      if (++step == steps_) {
        step = 0;
        rows_are_others_ |= place.advance(tiles_);
      }
    }
  }

  // The stage that was used last.
  __device__ __forceinline__ void refill() {
    if (place_.index < tiles_.end) {
      load_weight();
      if (step_ == 0) find_rows(place_);
      load_x(slot_, step_);
    }
    copy_async_commit();
    advance();
  }

 private:
  __device__ __forceinline__ void advance() {
    slot_ = slot_ + 1 == V::STAGES ? 0 : slot_ + 1;
    if (++step_ == steps_) {
      step_ = 0;
      rows_are_others_ |= place_.advance(tiles_);
    }
  }

  // Only where they are others: pairs are far away.
  __device__ __forceinline__ void find_rows(const Place& place) {
    if (!rows_are_others_) return;
    rows_are_others_ = false;
    const DecodeTile tile = place.tile(tiles_);
#pragma unroll
    for (int i = 0; i < V::GROUPS; ++i) {
      const int row = i * 8 + row_of_lane();
      rows_[i] = row < tile.rows ? x_.row(tile.row0 + row) : nullptr;
    }
  }

  __device__ __forceinline__ void load_weight() {
    if (step_ == 0) {
      const DecodeTile tile = place_.tile(tiles_);
      const int row = tile.column * tiles_.a_tile * UNIT + row_of_lane();
      from_ = weight_ + (static_cast<long long>(tile.expert) * tiles_.out_features + row) * in_features_ +
              WarpSteps<V>::lane_k(0);
      const int units = min(tiles_.a_tile, ceil_div(tiles_.features - row, UNIT));
      low_units_ = units;
      high_units_ = gated_ ? units + V::UNITS / 2 : units;
    }
    const int k = step_ * WARPS * V::STEP_K;
    const int left = in_features_ - k - WarpSteps<V>::lane_k(0);
    const unsigned to = ring_ + slot_ * V::LOADS * COPY_BYTES;
    const T* from = from_ + k;
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
      if (u > 0) from += u == V::UNITS / 2 ? middle_elements_ : unit_elements_;
      const bool valid = u < (u < V::UNITS / 2 ? low_units_ : high_units_);
#pragma unroll
      for (int half = 0; half < V::HALVES; ++half) {
        const int element = half * HALF_K;
        copy_async_16(to + (u * V::HALVES + half) * COPY_BYTES, from + element, valid && element < left,
                      policy_);
      }
    }
  }

  __device__ __forceinline__ void load_x(int slot, int step) const {
    const unsigned to = ring_ + (slot * V::LOADS + V::UNITS * V::HALVES) * COPY_BYTES;
    const int lane_k = WarpSteps<V>::lane_k(step);
#pragma unroll
    for (int i = 0; i < V::GROUPS * V::HALVES; ++i) {
      const int element = i % V::HALVES * HALF_K;
      const T* const row = rows_[i / V::HALVES];
      const bool valid = row != nullptr && lane_k + element < in_features_;
      copy_async_16(to + i * COPY_BYTES, valid ? row + lane_k + element : x_.x, valid);
    }
  }

  const Tiles& tiles_;
  const int steps_;
  const ExpertRows<T> x_;
  const T* const weight_;
  const int in_features_;
  const unsigned ring_;
  Place place_;
  int step_ = 0;
  int slot_ = 0;
  const T* from_;  // this lane's row of the tile's first unit, from its first element on
  int low_units_ = 0,
      high_units_ = 0;               // of the halves of a tile, before which this lane has a row
  const T* rows_[V::GROUPS];         // this lane's of x, of each eight tokens that of its number, or null
  bool rows_are_others_ = true;      // than those found last
  const long long unit_elements_;    // from a unit to the next,
  const long long middle_elements_;  // and to that in the middle of a tile: gated, the first of the ups
  const bool gated_;
  const unsigned long long policy_;
};
