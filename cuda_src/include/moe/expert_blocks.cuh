// The parts of products of few rows by experts' weights in quantised blocks, as those of block_product.cuh,
// with another weight and other rows of x for each tile.
#pragma once

#include "moe/expert_epilogue.cuh"
#include "moe/expert_tiles.cuh"
#include "quant/block_product.cuh"

// A block's tiles of UNITS units of an expert's rows; gated, half as many gates and their ups.
template <int UNITS>
struct ExpertUnits {
  const ExpertTiles& tiles;
  int out_features;  // rows of an expert's weight
  int features;      // of the result
  int a_tile;
  int begin, end;

  __device__ __forceinline__ ExpertUnits(const ExpertTiles& tiles, int out_features, bool gated)
      : tiles(tiles),
        out_features(out_features),
        features(gated ? out_features / 2 : out_features),
        a_tile(gated ? UNITS / 2 : UNITS) {
    const int blocks = gridDim.x, block = blockIdx.x;
    const int a_block = tiles.count / blocks;
    const int one_more = tiles.count - a_block * blocks;
    begin = block * a_block + min(block, one_more);
    end = begin + a_block + (block < one_more ? 1 : 0);
  }
  static __device__ __forceinline__ int columns(bool gated) { return (gated ? UNITS / 2 : UNITS) * UNIT; }
};

// This lane's rows of x in a tile: of each eight tokens that of its number.
template <typename T, int GROUPS>
struct TileRows {
  const T* rows[GROUPS];  // null beyond the tile's rows

  __device__ __forceinline__ void find(const ExpertTile& tile, const T* x, const int* pairs, int top_k,
                                       int in_features) {
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      const int row = i * 8 + row_of_lane();
      rows[i] = nullptr;
      if (row >= tile.rows) continue;
      const long long source = tile.row0 + row;
      const long long of_x = pairs == nullptr ? source : load_updated(pairs + source) / top_k;
      rows[i] = x + of_x * in_features;
    }
  }
};

template <typename V>
class ExpertBlockProducer {
  using T = typename V::T;
  using F = typename V::F;

 public:
  __device__ __forceinline__ ExpertBlockProducer(unsigned char* ring, const ExpertUnits<V::UNITS>& units,
                                                 const BlockSteps<V>& row, int steps, const T* x,
                                                 const int* pairs, int top_k, const unsigned* codes,
                                                 const unsigned* headers, int in_features, bool gated)
      : units_(units),
        row_(row),
        steps_(steps),
        x_(x),
        pairs_(pairs),
        top_k_(top_k),
        codes_(codes),
        headers_(headers),
        in_features_(in_features),
        gated_(gated),
        ring_(shared_address(ring)),
        tile_(units.begin),
        unit_codes_(UNIT * row.count * F::STEP_WORDS),
        unit_headers_(UNIT * row.spans * F::HEADER_WORDS),
        codes_from_(codes),
        headers_from_(headers) {
    const long long rows = gated ? units.features - (V::UNITS / 2 - 1) * UNIT : UNIT;
    middle_codes_ = rows * row.count * F::STEP_WORDS;
    middle_headers_ = rows * row.spans * F::HEADER_WORDS;
  }

  __device__ __forceinline__ void fill() {
#pragma unroll 1
    for (int stage = 0; stage < V::STAGES; ++stage) refill();
  }

  // The stage that was used last: by all lanes of the warp.
  __device__ __forceinline__ void refill() {
    __syncwarp();
    if (tile_ < units_.end) {
      if (step_ == 0) begin_tile();
      load_weight();
      load_x();
    }
    copy_async_commit();
    slot_ = slot_ + 1 == V::STAGES ? 0 : slot_ + 1;
    if (++step_ == steps_) {
      step_ = 0;
      ++tile_;
    }
  }

 private:
  __device__ __forceinline__ void begin_tile() {
    const ExpertTile tile = units_.tiles.tile(tile_);
    rows_.find(tile, x_, pairs_, top_k_, in_features_);
    const int feature = tile.column * units_.a_tile * UNIT + row_of_lane();
    const long long row = static_cast<long long>(tile.expert) * units_.out_features + feature;
    const int warp = warp_of_thread();
    codes_from_ = codes_ + (row * row_.count + warp) * F::STEP_WORDS;
    headers_from_ = headers_ + (row * row_.spans + warp / F::STEPS_A_SPAN) * F::HEADER_WORDS + max(word(), 0);
    tile_units_ = min(units_.a_tile, ceil_div(units_.features - feature, UNIT));
  }

  // Of a header, that this lane copies.
  static __device__ __forceinline__ int word() {
    return header_word<F>(BlockSteps<V>::half(), lane_of_thread() % 4);
  }

  __device__ __forceinline__ void load_weight() const {
    const int lane = lane_of_thread() % 4;
    const unsigned* codes = codes_from_ + step_ * (WARPS * F::STEP_WORDS);
    const unsigned* header = headers_from_ + step_ * (WARPS / F::STEPS_A_SPAN * F::HEADER_WORDS);
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
      copy_async<FIRST * 4>(to + threadIdx.x * FIRST * 4, codes + first_piece<F>(lane), valid);
      if constexpr (SECOND > 0) {
        copy_async<SECOND * 4>(to + THREADS * FIRST * 4 + threadIdx.x * SECOND * 4,
                               codes + second_piece<F>(lane), valid);
      }
      copy_async<4>(to + THREADS * F::LANE_WORDS * 4 + threadIdx.x * 4, header, valid && word() >= 0);
    }
  }

  __device__ __forceinline__ void load_x() const {
    const int k = WarpSteps<V>::lane_k(step_);
    const unsigned to = ring_ + slot_ * V::STAGE_BYTES + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < V::GROUPS * V::HALVES; ++i) {
      const int element = k + i % V::HALVES * HALF_K;
      const T* const row = rows_.rows[i / V::HALVES];
      const bool valid = row != nullptr && element < in_features_;
      copy_async_16(to + i * THREADS * 16, valid ? row + element : x_, valid);
    }
  }

  const ExpertUnits<V::UNITS>& units_;
  const BlockSteps<V>& row_;
  const int steps_;
  const T* const x_;
  const int* const pairs_;
  const int top_k_;
  const unsigned* const codes_;
  const unsigned* const headers_;
  const int in_features_;
  const bool gated_;
  const unsigned ring_;
  int tile_;
  int step_ = 0;
  int slot_ = 0;
  const int unit_codes_, unit_headers_;  // words from a unit to the next,
  long long middle_codes_,
      middle_headers_;            // and to that in the middle of a tile: gated, the first of the ups
  const unsigned* codes_from_;    // of this lane's row of the tile's first unit, at this warp's first step
  const unsigned* headers_from_;  // the word that this lane copies
  int tile_units_ = 0;            // units of the tile in which this lane has a row
  TileRows<T, V::GROUPS> rows_;
};
