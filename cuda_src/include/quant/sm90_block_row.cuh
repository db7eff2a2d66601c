// The parts of the product of one row by a weight in quantised blocks, from sm_90 on: rows of the weight come
// by bulk copies, which cost a lane neither instructions nor places in the queue of its loads.
#pragma once

#include "generated/sm90_block_row.cuh"
#include "ptx/warp_arrival.cuh"
#include "quant/block_row.cuh"
#include "quant/sm90_block_ring.cuh"

constexpr int ROW_THREADS = ROW_WARPS * WARP_SIZE;
constexpr int TILE_ROWS = 2 * UNIT;  // of an mma

template <typename F>
using RowStage = BlockStage<F, ROW_WARPS, 2>;

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
      barrier_init(empty + thread, ROW_WARPS * WARP_ARRIVALS);
    }
    if (thread <= stages) barrier_init(sums + thread, ROW_WARPS * WARP_ARRIVALS);
    barrier_init_done();
  }
};
static_assert(sizeof(RowShared) == ROW_SHARED_BYTES, "the launch leaves it this much");

// Consumer: this warp's sums of a tile over its steps of k.
template <typename F>
class RowItems {
  using Stage = RowStage<F>;
  using Steps = StageSteps<Stage>;

 public:
  __device__ __forceinline__ RowItems(const unsigned char* shared, const uint4* y,
                                      const RowGroupOf<F>* groups, const uint4* zeros, const Steps& steps)
      : places_(warp_of_thread()),
        bytes_(shared, y, zeros),
        groups_(groups + lane_of_thread() % 4),
        count_(steps.count) {}

  __device__ __forceinline__ void take(const unsigned char* codes, const unsigned char* headers, int part) {
    if (part * ROW_WARPS + warp_of_thread() >= count_) return;
    const RowGroupOf<F> group = groups_[part * 4];
    uint2 bytes[LANE_ELEMENTS / SEGMENT];
    bytes_.load(part, bytes);
    int products[F::GROUPS][4] = {};
    RowBytes<F>::multiply(places_.codes(codes), places_.codes(codes + Stage::UNIT_CODES), bytes, products);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned record[RECORD_WORDS];
      places_.load_record(headers + i * Stage::UNIT_HEADERS, Steps::half(), record);
      add_scaled<F>(sums_[i], products, i, record, Steps::half(), group);
    }
  }

  // After a tile's last step: partial [ROW_WARPS][TILE_ROWS].
  __device__ __forceinline__ void share(float* partial) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = sums_[i];
      sum += __shfl_xor_sync(FULL_WARP, sum, 1);
      sum += __shfl_xor_sync(FULL_WARP, sum, 2);
      if (lane_of_thread() % 4 == 0) partial[warp_of_thread() * TILE_ROWS + i * UNIT + places_.row()] = sum;
      sums_[i] = 0.0f;
    }
  }

 private:
  const UnitPlaces<Stage> places_;
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
