// The parts of products of few rows by experts' weights, as those of decode_product.cuh and
// block_product.cuh, with another weight and other rows of x for each tile.
#pragma once

#include "block_product.cuh"
#include "expert_tiles.cuh"
#include "generated/expert_decode.cuh"
#include "swiglu.cuh"

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

// Producer of a dense weight: this lane's ring, ahead of the products.
template <typename V>
class ExpertProducer {
  using T = typename V::T;
  static constexpr unsigned COPY_BYTES = THREADS * sizeof(uint4);  // of all threads

 public:
  __device__ __forceinline__ ExpertProducer(uint4* ring, const ExpertUnits<V::UNITS>& units, int steps,
                                            const T* x, const int* pairs, int top_k, const T* weight,
                                            int in_features, bool gated)
      : units_(units),
        steps_(steps),
        x_(x),
        pairs_(pairs),
        top_k_(top_k),
        weight_(weight),
        in_features_(in_features),
        gated_(gated),
        ring_(shared_address(ring + threadIdx.x)),
        tile_(units.begin),
        from_(weight),
        unit_elements_(static_cast<long long>(UNIT) * in_features),
        policy_(evict_first_policy()) {}

  // Groups of copies are committed also where empty, because the waits count them.
  __device__ __forceinline__ void fill() {
#pragma unroll 1
    for (int stage = 0; stage < V::STAGES; ++stage) refill();
  }

  // The stage that was used last.
  __device__ __forceinline__ void refill() {
    if (tile_ < units_.end) load();
    copy_async_commit();
    slot_ = slot_ + 1 == V::STAGES ? 0 : slot_ + 1;
    if (++step_ == steps_) {
      step_ = 0;
      ++tile_;
    }
  }

 private:
  __device__ __forceinline__ void load() {
    if (step_ == 0) {
      const ExpertTile tile = units_.tiles.tile(tile_);
      rows_.find(tile, x_, pairs_, top_k_, in_features_);
      const int row = tile.column * units_.a_tile * UNIT + row_of_lane();
      from_ = weight_ + (static_cast<long long>(tile.expert) * units_.out_features + row) * in_features_ +
              WarpSteps<V>::lane_k(0);
      tile_units_ = min(units_.a_tile, ceil_div(units_.features - row, UNIT));
    }
    const int k = step_ * WARPS * V::STEP_K;
    const int left = in_features_ - k - WarpSteps<V>::lane_k(0);
    const unsigned to = ring_ + slot_ * V::LOADS * COPY_BYTES;
    const T* from = from_ + k;
    int unit = 0;
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
      if (u > 0) {
        const bool first_up = u == V::UNITS / 2 && gated_;
        from = first_up ? from_ + k + static_cast<long long>(units_.features) * in_features_
                        : from + unit_elements_;
        unit = first_up ? 0 : unit + 1;
      }
#pragma unroll
      for (int half = 0; half < V::HALVES; ++half) {
        const int element = half * HALF_K;
        copy_async_16(to + (u * V::HALVES + half) * COPY_BYTES, from + element,
                      unit < tile_units_ && element < left, policy_);
      }
    }
    const int lane_k = WarpSteps<V>::lane_k(step_);
#pragma unroll
    for (int i = 0; i < V::GROUPS * V::HALVES; ++i) {
      const int element = i % V::HALVES * HALF_K;
      const T* const row = rows_.rows[i / V::HALVES];
      const bool valid = row != nullptr && lane_k + element < in_features_;
      copy_async_16(to + (V::UNITS * V::HALVES + i) * COPY_BYTES, valid ? row + lane_k + element : x_, valid);
    }
  }

  const ExpertUnits<V::UNITS>& units_;
  const int steps_;
  const T* const x_;
  const int* const pairs_;
  const int top_k_;
  const T* const weight_;
  const int in_features_;
  const bool gated_;
  const unsigned ring_;
  int tile_;
  int step_ = 0;
  int slot_ = 0;
  const T* from_;       // this lane's row of the tile's first unit, from its first element on
  int tile_units_ = 0;  // units of the tile in which this lane has a row
  TileRows<T, V::GROUPS> rows_;
  const long long unit_elements_;
  const unsigned long long policy_;
};

// Epilogue: adds the warps' sums and the bias, and multiplies the gate; as DecodeEpilogue.
template <typename V>
struct ExpertEpilogue {
  using T = typename V::T;

  const ExpertUnits<V::UNITS>& units;
  const T* bias;
  T* out;
  int activation;

  __device__ __forceinline__ void store(const ExpertTile& tile, const float2* partial) const {
#pragma unroll
    for (int i = 0; i < V::ITEMS; ++i) {
      const int index = i * THREADS + threadIdx.x;
      const int unit = index / WARP_SIZE / V::GROUPS;
      const int token = index / WARP_SIZE % V::GROUPS * 8 + row_of_lane();
      const int column = (tile.column * units.a_tile + unit) * UNIT + lane_of_thread() % 4 * 2;
      if (unit >= units.a_tile || token >= tile.rows || column >= units.features) continue;
      const long long first = static_cast<long long>(tile.expert) * units.out_features + column;
      float2 result = with_bias(total(partial + index), first);
      if (activation != EXPERT_NONE) {
        const float2 up = with_bias(total(partial + (index + units.a_tile * V::GROUPS * WARP_SIZE)),
                                    first + units.features);
        if (activation == EXPERT_SILU) {
          result.x = up.x * __fdividef(result.x, 1.0f + __expf(-result.x));
          result.y = up.y * __fdividef(result.y, 1.0f + __expf(-result.y));
        } else {
          result.x = clamped_swiglu(result.x, up.x);
          result.y = clamped_swiglu(result.y, up.y);
        }
      }
      const Vec<T, 2> pair = {from_float<T>(result.x), from_float<T>(result.y)};
      pair.store(out + static_cast<long long>(tile.row0 + token) * units.features + column);
    }
  }

 private:
  __device__ __forceinline__ float2 with_bias(float2 sums, long long first) const {
    if (bias == nullptr) return sums;
    const Vec<T, 2> pair = Vec<T, 2>::load(bias + first);
    return make_float2(sums.x + to_float(pair[0]), sums.y + to_float(pair[1]));
  }
  // Of all warps, in order.
  static __device__ __forceinline__ float2 total(const float2* parts) {
    float2 sum = parts[0];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) {
      const float2 other = parts[w * V::UNITS * V::GROUPS * WARP_SIZE];
      sum.x += other.x;
      sum.y += other.y;
    }
    return sum;
  }
};
