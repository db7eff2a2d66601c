// The parts of the product of one row by a weight in quantised blocks, from sm_90 on: rows of the weight come
// by bulk copies, which cost a lane neither instructions nor places in the queue of its loads.
#pragma once

#include "block_row.cuh"
#include "generated/sm90_block_row.cuh"
#include "sm90_block_ring.cuh"

constexpr int ROW_THREADS = ROW_WARPS * WARP_SIZE;
constexpr int TILE_ROWS = 2 * UNIT;  // of an mma

template <typename F>
using RowStage = BlockStage<F, ROW_WARPS, 2>;

// Warps take items by turns in two groups; a warp has two steps of one, so that half of an item's steps or
// more cost once what is not for elements: barriers, headers, addresses.
constexpr int GROUP_WARPS = ROW_WARPS / 2;
constexpr int WARP_STEPS = 2;
__device__ __forceinline__ int group_of_warp() { return warp_of_thread() / GROUP_WARPS; }
__device__ __forceinline__ int warp_of_group() { return warp_of_thread() % GROUP_WARPS; }

// What a block has in shared memory beside the ring and the row.
struct alignas(128) RowShared {
  uint4 zeros[ROW_ZEROS];
  float squares[ROW_WARPS];
  Barrier full[MAX_ROW_STAGES], empty[MAX_ROW_STAGES];
  Barrier sums[SUMS_PLACES], added[SUMS_PLACES];
  alignas(16) float partial[SUMS_PLACES][ROW_WARPS * TILE_ROWS];

  // By all threads, before a barrier of theirs. `groups` of warps take a part in each tile.
  __device__ __forceinline__ void init(int stages, int groups) {
    const int thread = threadIdx.x;
    if (thread < ROW_ZEROS) zeros[thread] = make_uint4(0, 0, 0, 0);
    if (thread < stages) {
      barrier_init(full + thread, 1);
      barrier_init(empty + thread, GROUP_WARPS);
    }
    if (thread < SUMS_PLACES) {
      barrier_init(sums + thread, groups * GROUP_WARPS);
      barrier_init(added + thread, 1);
    }
    barrier_init_done();
  }
};
static_assert(sizeof(RowShared) == ROW_SHARED_BYTES, "the launch leaves it this much");

// Where the items of a group of warps come in the ring, every other one.
struct ItemPlace {
  const int slots;
  int slot;
  unsigned parity = 0;

  __device__ __forceinline__ ItemPlace(int count, int first) : slots(count), slot(first) {}
  __device__ __forceinline__ void advance() {
    slot += 2;
    if (slot >= slots) {
      slot -= slots;
      parity ^= 1;
    }
  }
  // Of the group's item before.
  __device__ __forceinline__ int slot_before() const { return slot < 2 ? slot - 2 + slots : slot - 2; }
  __device__ __forceinline__ unsigned parity_before() const { return slot < 2 ? parity ^ 1 : parity; }
};

// The norm before the product, and the row in fixed point.
template <typename T, typename F>
class RowPrologue {
  static constexpr int BATCH = 4;                          // loads in flight
  static constexpr int HALF = SEGMENT / 2;                 // elements of half a vector
  static constexpr bool SCALES_SUMS = has_float_range<T>;  // the norm's root divides the sums

 public:
  // Before earlier kernels have ended.
  __device__ __forceinline__ RowPrologue(const T* norm, float (&sums_of_squares)[ROW_WARPS], int in_features,
                                         float eps, int vectors)
      : norm_(norm), squares_(sums_of_squares), in_features_(in_features), eps_(eps), vectors_(vectors) {
    load(norm, 0, gains_);
  }

  // The row, by all threads; a barrier of theirs must follow.
  __device__ __forceinline__ void fix(const T* x, uint4* y, RowGroupOf<F>* groups) {
    float scale = 1.0f, squares = 0.0f;
    uint4 raw[BATCH];
    if (norm_ != nullptr && !SCALES_SUMS) {
#pragma unroll 1
      for (int first = 0; first < vectors_; first += BATCH * ROW_THREADS) {
        load(x, first, raw);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) squares = add_squares<T>(squares, raw[i]);
      }
      share_squares(squares);
      __syncthreads();
      scale = inverse_rms();
    }
#pragma unroll 1
    for (int first = 0; first < vectors_; first += BATCH * ROW_THREADS) {
      load(x, first, raw);
      if (first > 0) load(norm_, first, gains_);
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int v = first + i * ROW_THREADS + threadIdx.x;
        if (v >= vectors_) break;  // whole warps
        if (norm_ != nullptr) {
          if constexpr (SCALES_SUMS) {
            squares = add_squares<T>(squares, raw[i]);
            raw[i] = multiply_elements<T>(raw[i], gains_[i]);
          } else {
            raw[i] = scaled_elements<T>(raw[i], gains_[i], scale);
          }
        }
        fix_vector<T, F>(raw[i], v, true, y, groups);
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

  // The halves of this thread's vectors from `first` on that `fix_vector` takes together, zeros beyond the
  // row's end.
  __device__ __forceinline__ void load(const T* from, int first, uint4 (&raw)[BATCH]) const {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int v = first + i * ROW_THREADS + threadIdx.x;
      const int2 halves = halves_of_vector<F>(v);
      raw[i] = make_uint4(0, 0, 0, 0);
      if (from == nullptr || halves.x * HALF >= in_features_) continue;
      if constexpr (IN_PAIRS<F>) {
        uint2 a, b;
        load_past_l1(a, from + halves.x * HALF);
        load_past_l1(b, from + halves.y * HALF);
        raw[i] = make_uint4(a.x, a.y, b.x, b.y);
      } else {
        load_past_l1(raw[i], from + halves.x * HALF);
      }
    }
  }

  const T* const norm_;
  float (&squares_)[ROW_WARPS];
  const int in_features_;
  const float eps_;
  const int vectors_;
  uint4 gains_[BATCH];
};

// Consumer: this warp's sums of a tile over its steps of k.
template <typename F>
class RowItems {
  using Stage = RowStage<F>;
  using Steps = StageSteps<Stage>;
  static constexpr bool SHARES_HEADERS = F::STEPS_A_SPAN == WARP_STEPS;
  static_assert(Stage::PARTS == GROUP_WARPS * WARP_STEPS, "a group takes an item");

 public:
  __device__ __forceinline__ RowItems(const unsigned char* shared, const uint4* y,
                                      const RowGroupOf<F>* groups, const uint4* zeros, const Steps& steps)
      : places_{UnitPlaces<Stage>(warp_of_group() * WARP_STEPS),
                UnitPlaces<Stage>(warp_of_group() * WARP_STEPS + 1)},
        bytes_(shared, y, zeros),
        groups_(groups + lane_of_thread() % 4),
        count_(steps.count) {}

  // A step beyond the row's end is zeros, as the row is there.
  __device__ __forceinline__ void take(const unsigned char* codes, const unsigned char* headers, int part) {
    const int first = part * Stage::PARTS + warp_of_group() * WARP_STEPS;
    if (first >= count_) return;
#pragma unroll
    for (int j = 0; j < WARP_STEPS; ++j) {
      typename RowBytes<F>::Words bytes[RowBytes<F>::LOADS];
      bytes_.load(first + j, bytes);
      const RowGroupOf<F> group = groups_[(first + j) * 4];
      RowProducts<F> products;
      RowBytes<F>::multiply(places_[j].codes(codes), places_[j].codes(codes + Stage::UNIT_CODES), bytes,
                            products);
      const int half = SHARES_HEADERS ? j : 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned record[RECORD_WORDS];
        places_[SHARES_HEADERS ? 0 : j].load_record(headers + i * Stage::UNIT_HEADERS, half, record);
        add_scaled<F>(sums_[i], products, i, record, half, group);
      }
    }
  }

  // After a tile's last step: partial [TILE_ROWS]. Of four lanes the first adds up one row, the second the
  // other.
  __device__ __forceinline__ void share(float* partial) {
    const int lane = lane_of_thread() % 4;
    float sum = lane % 2 == 0 ? sums_[0] : sums_[1];
    sum += __shfl_xor_sync(FULL_WARP, lane % 2 == 0 ? sums_[1] : sums_[0], 1);
    sum += __shfl_xor_sync(FULL_WARP, sum, 2);
    if (lane < 2) partial[lane * UNIT + UnitPlaces<Stage>::row()] = sum;
    sums_[0] = sums_[1] = 0.0f;
  }

 private:
  const UnitPlaces<Stage> places_[WARP_STEPS];
  const RowBytes<F> bytes_;
  const RowGroupOf<F>* const groups_;  // of this lane's 32 elements of a step
  const int count_;                    // steps of a row
  float sums_[2] = {};
};

// Epilogue: a warp adds the warps' sums of a tile, then the bias and the residual or the gate.
template <typename T, typename Out, typename F>
class RowEpilogue {
  using Tiles = BlockTiles<RowStage<F>>;

 public:
  __device__ __forceinline__ RowEpilogue(const Tiles& tiles, const T* bias, Out* out, int accumulate,
                                         int gated)
      : tiles_(tiles), bias_(bias), out_(out), accumulate_(accumulate), gated_(gated) {}

  // What the sums are added to, so that it is there when they are; nothing of it is waited for.
  __device__ __forceinline__ void fetch(int tile) {
    if (!has_column(tile)) return;
    if (accumulate_) before_ = load_updated(out_ + column(tile));
    if (bias_ != nullptr) own_bias_ = bias_[column(tile)];
  }

  // partial [groups][GROUP_WARPS][TILE_ROWS], added in order by half a warp each group's.
  template <typename Prologue>
  __device__ __forceinline__ void store(int tile, const float* partial, int groups,
                                        const Prologue& prologue) const {
    const int row = lane_of_thread() % TILE_ROWS, group = lane_of_thread() / TILE_ROWS;
    float sum = 0.0f;
    if (group < groups) {
#pragma unroll
      for (int w = 0; w < GROUP_WARPS; ++w) sum += partial[(group * GROUP_WARPS + w) * TILE_ROWS + row];
    }
    sum += __shfl_xor_sync(FULL_WARP, sum, TILE_ROWS);
    sum *= prologue.scale_of_sums();
    const float up = __shfl_xor_sync(FULL_WARP, sum, UNIT);
    if (!has_column(tile)) return;
    const float before = to_float(before_) + to_float(own_bias_);
    out_[column(tile)] = from_float<Out>(gated_ ? up * __fdividef(sum, 1.0f + __expf(-sum)) : sum + before);
  }

 private:
  __device__ __forceinline__ int column(int tile) const {
    return (tiles_.begin + tile) * tiles_.a_tile + lane_of_thread();
  }
  __device__ __forceinline__ bool has_column(int tile) const {
    return lane_of_thread() < tiles_.a_tile && column(tile) < tiles_.features;
  }

  const Tiles& tiles_;
  const T* const bias_;
  Out* const out_;
  const int accumulate_, gated_;
  Out before_ = from_float<Out>(0.0f);  // of this lane's column
  T own_bias_ = from_float<T>(0.0f);
};
