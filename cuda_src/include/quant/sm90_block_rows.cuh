// The parts of the product of a few rows by a weight in quantised blocks, from sm_90 on: the rows of x stay
// in shared memory, and two warps share each eighth of k, each with a pair of a tile's units.
#pragma once

#include "generated/sm90_block_rows.cuh"
#include "ptx/warp_arrival.cuh"
#include "quant/block_small.cuh"
#include "quant/sm90_block_ring.cuh"

constexpr int MULTIPLYING_WARPS = 2 * WARPS;  // the first ones; then those that store, and one that copies
constexpr int ROWS_THREADS = (MULTIPLYING_WARPS + STORING_WARPS + 1) * WARP_SIZE;
constexpr int ROWS_TILE = 4 * UNIT;         // rows of the weight
constexpr int SUMS_STRIDE = ROWS_TILE + 4;  // of a token's sums, which keeps tokens in different banks

// NVIDIA's synccheck aborts a kernel that arrives at a barrier in a phase that no thread waits for, as here
// at the last slot's. Checking for the last item costs a step of 4 rows of Llama-3.1-8B in Q4_K_M 2,046 us
// instead of 1,997, of 16 rows 2,632 instead of 2,603 (`python -m tests.bench.steps llama-8b.gguf 4 16
// --context 640`, 2026-11-29, one NVIDIA H200).
#ifdef FREE_SLOTS_ONCE
constexpr bool SLOTS_ARE_FREED_ONCE = true;
#else
constexpr bool SLOTS_ARE_FREED_ONCE = false;
#endif

template <typename F>
using RowsStage = BlockStage<F, WARPS, 4>;

__device__ __forceinline__ int part_of_warp() { return warp_of_thread() % WARPS; }
__device__ __forceinline__ int pair_of_warp() { return warp_of_thread() / WARPS; }

// What a block has in shared memory beside the ring, x and the norm.
template <int TOKENS>
struct alignas(128) RowsShared {
  float squares[WARPS][TOKENS];
  Barrier full[MAX_ROWS_STAGES], empty[MAX_ROWS_STAGES];
  Barrier sums_full,
      sums_empty;  // of `partial`, where a tile's sums lie until all warps have added theirs up
  alignas(16) float partial[WARPS][TOKENS][SUMS_STRIDE];

  // By all threads, before a barrier of theirs.
  __device__ __forceinline__ void init(int stages) {
    const int thread = threadIdx.x;
    if (thread < stages) {
      barrier_init(full + thread, 1);
      barrier_init(empty + thread, MULTIPLYING_WARPS * WARP_ARRIVALS);
    }
    if (thread == 0) {
      barrier_init(&sums_full, MULTIPLYING_WARPS * WARP_ARRIVALS);
      barrier_init(&sums_empty, STORING_WARPS * WARP_ARRIVALS);
    }
    barrier_init_done();
  }
};

// Wait until at most `pending` of this thread's youngest groups of copies are unfinished, or fewer.
__device__ __forceinline__ void copy_async_wait_for_all_but(int pending) {
  if (pending >= 3) {
    copy_async_wait<3>();
  } else if (pending == 2) {
    copy_async_wait<2>();
  } else if (pending == 1) {
    copy_async_wait<1>();
  } else {
    copy_async_wait<0>();
  }
}

// The rows of x, each warp's part of k of all of them: [steps][TOKENS][16 vectors], the vectors of odd tokens
// XORed with one, so that those of neighbours are in different banks; and the norm's weight, [steps][16
// vectors]. Two warps have a part; they copy it, and wait for no others.
template <typename T, typename Stage, int TOKENS>
class ResidentRows {
  static constexpr int VECTORS = STEP / SEGMENT;
  static constexpr int GROUPS = TOKENS / 8;

 public:
  __device__ __forceinline__ ResidentRows(uint4* x, uint4* gains, const StageSteps<Stage>& steps,
                                          int in_features)
      : x_(x + part_of_warp() * steps.a_tile * TOKENS * VECTORS),
        gains_(gains + part_of_warp() * steps.a_tile * VECTORS),
        first_(steps.first),
        steps_(steps.a_tile),
        in_features_(in_features) {}

  // Before earlier kernels have ended; the first warp of each part.
  __device__ __forceinline__ void load_gains(const T* norm) const {
    for (int v = lane_of_thread(); v < steps_ * VECTORS && pair_of_warp() == 0; v += WARP_SIZE) {
      const int k = element(v / VECTORS, v % VECTORS);
      copy_async_16(gains_ + v, k < in_features_ ? norm + k : norm, k < in_features_);
    }
  }

  // Half of the tokens of this warp's part of k, a group of copies a step; zeros beyond the last row and the
  // rows' end.
  __device__ __forceinline__ void load(const T* x, int num_rows) const {
    constexpr int TOKENS_A_COPY = WARP_SIZE / VECTORS, COPIES = TOKENS / 2 / TOKENS_A_COPY;
    const int token = pair_of_warp() * (TOKENS / 2) + lane_of_thread() / VECTORS;
    const int vector = lane_of_thread() % VECTORS;
    int rows[COPIES];  // in x, elements from its beginning on
    bool has_row[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      has_row[i] = token + i * TOKENS_A_COPY < num_rows;
      rows[i] = has_row[i] ? (token + i * TOKENS_A_COPY) * in_features_ : 0;
    }
    uint4* to = x_ + place(0, token, vector);
#pragma unroll 1
    for (int step = 0; step < steps_; ++step) {
      const int k = element(step, vector);
      const bool has_k = k < in_features_;
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        copy_async_16(to + i * TOKENS_A_COPY * VECTORS, x + rows[i] + (has_k ? k : 0), has_row[i] && has_k);
      }
      copy_async_commit();
      to += TOKENS * VECTORS;
    }
  }

  // A step of the rows, multiplied by the norm's weight if `normed`, is there for this warp: the first tile
  // asks for each in turn, so that the rest comes meanwhile.
  __device__ __forceinline__ void await_step(int step, bool normed, float (&squares)[WARPS][TOKENS]) {
    copy_async_wait_for_all_but(steps_ - 1 - step);
    meet();
    if constexpr (has_float_range<T>) {
      if (normed) {
        normalise(step, squares);
        meet();
      }
    }
  }

  // Where this lane's elements of the first group's token lie for round 0 of the first step, from `shared`
  // on: bytes. Those of round r are XORed with 16 r.
  __device__ __forceinline__ int first_place(const unsigned char* shared) const {
    return static_cast<int>(shared_address(x_ + place(0, row_of_lane(), vector(0))) - shared_address(shared));
  }

 private:
  // The two warps of a part.
  static __device__ __forceinline__ void meet() { named_barrier_wait(1 + part_of_warp(), 2 * WARP_SIZE); }

  // A group of tokens a warp; with the last step the sums of squares are complete. Their order is that of
  // `BlockConsumer`.
  __device__ __forceinline__ void normalise(int step, float (&squares)[WARPS][TOKENS]) {
    const int group = pair_of_warp();
    if (group >= GROUPS) return;
    constexpr int ROUNDS = LANE_ELEMENTS / SEGMENT;
    const int token = group * 8 + row_of_lane();
    uint4 x[ROUNDS], gains[ROUNDS];  // all are read before the first is stored
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      x[round] = x_[place(step, token, vector(round))];
      gains[round] = gains_[step * VECTORS + vector(round)];
    }
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      sum_ = add_squares<T>(sum_, x[round]);
      x_[place(step, token, vector(round))] = multiply_elements<T>(x[round], gains[round]);
    }
    if (step < steps_ - 1) return;
    sum_ += __shfl_xor_sync(FULL_WARP, sum_, 1);
    sum_ += __shfl_xor_sync(FULL_WARP, sum_, 2);
    if (lane_of_thread() % 4 == 0) squares[part_of_warp()][token] = sum_;
  }

  static __device__ __forceinline__ int place(int step, int token, int vector) {
    return (step * TOKENS + token) * VECTORS + (vector ^ token % 2);
  }
  static __device__ __forceinline__ int vector(int round) {
    const int lane = lane_of_thread() % 4;
    return lane * 4 + vector_of_round(round, lane);
  }
  __device__ __forceinline__ int element(int step, int vector) const {
    return ((first_ + step) * WARPS + part_of_warp()) * STEP + vector * SEGMENT;
  }

  uint4* const x_;
  uint4* const gains_;
  const int first_, steps_;
  const int in_features_;
  float sum_ = 0.0f;  // of squares
};

// Consumer: this warp's sums of its pair of units over its steps of k, in the order of `BlockConsumer`.
template <typename T, typename F, int TOKENS>
class RowsItems {
  using Stage = RowsStage<F>;
  static constexpr int GROUPS = TOKENS / 8;
  static constexpr int TOKEN_BYTES = STEP * sizeof(T);

 public:
  // `shared`: at a multiple of 64 bytes, as the rows of x are.
  __device__ __forceinline__ RowsItems(const unsigned char* shared, const ResidentRows<T, Stage, TOKENS>& x)
      : shared_(shared),
        places_(part_of_warp()),
        unit_(pair_of_warp() * 2),
        lane_(lane_of_thread() % 4),
        half_(StageSteps<Stage>::half()),
        x_(x.first_place(shared)) {
    asm volatile("" : "+r"(unit_), "+r"(lane_), "+r"(half_), "+r"(x_));  // else computed again in each step
  }

  // The codes and scales of an item.
  __device__ __forceinline__ void load(const unsigned char* codes, const unsigned char* headers) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      codes_[i] = places_.codes(codes + (unit_ + i) * Stage::UNIT_CODES);
      unsigned record[RECORD_WORDS];
      places_.load_record(headers + (unit_ + i) * Stage::UNIT_HEADERS, half_, record);
      makers_[i].begin(record, half_, lane_);
    }
  }

  // The first half of the item's products, and the elements of the second. Beyond the rows' end both are
  // zero.
  __device__ __forceinline__ void begin(int part) {
    from_ = x_ + part * (TOKENS * TOKEN_BYTES);
    read(0);
    make(0);
    multiply();
    read(1);
    make(1);
  }
  __device__ __forceinline__ void end() { multiply(); }

  // After a tile's last step.
  __device__ __forceinline__ void share(float (&partial)[WARPS][TOKENS][SUMS_STRIDE]) {
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = i * 8 + lane_of_thread() % 4 * 2 + e % 2;
        partial[part_of_warp()][token][(pair_of_warp() * 2 + e / 2) * UNIT + places_.row()] =
            sums_[i][e] * SUMS_FACTOR<T, F>;
        sums_[i][e] = 0.0f;
      }
    }
  }

 private:
  __device__ __forceinline__ void make(int half) {
    makers_[0].make(codes_[0], half, lane_, upper_);
    makers_[1].make(codes_[1], half, lane_, lower_);
  }
  __device__ __forceinline__ void read(int half) {
#pragma unroll
    for (int round = 0; round < 2; ++round) {
      const unsigned char* const place = shared_ + (from_ ^ (half * 2 + round) * 16);
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        tokens_[round][i] = *reinterpret_cast<const uint4*>(place + i * (8 * TOKEN_BYTES));
      }
    }
  }
  __device__ __forceinline__ void multiply() {
#pragma unroll
    for (int round = 0; round < 2; ++round) {
      const uint4 &upper = upper_[round], &lower = lower_[round];
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        const uint4& tokens = tokens_[round][i];
        mma_m16n8k16<T>(sums_[i], {upper.x, lower.x, upper.y, lower.y}, {tokens.x, tokens.y});
        mma_m16n8k16<T>(sums_[i], {upper.z, lower.z, upper.w, lower.w}, {tokens.z, tokens.w});
      }
    }
  }

  const unsigned char* const shared_;
  const UnitPlaces<Stage> places_;
  int unit_;  // the first of this warp's
  int lane_, half_;
  int x_;     // where this lane's elements begin, from `shared_` on
  int from_;  // and those of its step
  LaneCodes<F> codes_[2];
  ElementMaker<T, F> makers_[2];
  uint4 upper_[2], lower_[2];  // elements of half a step
  uint4 tokens_[2][GROUPS];    // and x's
  float sums_[GROUPS][4] = {};
};

// Epilogue, run by its own warps. Each warp has some tokens, each lane a row of the tile: it adds the partial
// sums of all parts of k, then the bias and the residual. Gated, a gate's lane gets its up's sum by a
// shuffle.
template <typename T, typename Out, typename F, int TOKENS>
class RowsEpilogue {
  using Tiles = BlockTiles<RowsStage<F>>;
  static constexpr int OWN = TOKENS / STORING_WARPS;  // tokens of a warp

 public:
  __device__ __forceinline__ RowsEpilogue(const Tiles& tiles, const T* bias, Out* out, int out_stride,
                                          int num_rows, int accumulate)
      : tiles_(tiles),
        bias_(bias),
        row_(lane_of_thread()),
        column_(tiles.gated() ? row_ / (2 * UNIT) * UNIT + row_ % UNIT : row_),
        token_((warp_of_thread() - MULTIPLYING_WARPS) * OWN),
        count_(min(num_rows - token_, OWN)),
        out_(out + static_cast<long long>(token_) * out_stride),
        out_stride_(out_stride),
        accumulate_(accumulate) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) scales_[i] = 1.0f;
  }

  // Stores all tiles as their sums come; the norm's mean is over in_features.
  __device__ __forceinline__ void run(RowsShared<TOKENS>& shared, bool normed, int in_features, float eps) {
#pragma unroll 1
    for (int tile = 0; tile < tiles_.count; ++tile) {
      fetch(tile);
      barrier_wait(&shared.sums_full, tile % 2);
      if (normed && tile == 0) take_scales(shared, in_features, eps);
      float results[OWN];
#pragma unroll
      for (int i = 0; i < OWN; ++i) results[i] = total(shared, i) * scales_[i];
      barrier_arrive_warp(&shared.sums_empty);
      store(tile, results);
    }
  }

 private:
  // What the sums are added to, so that it is there when they are.
  __device__ __forceinline__ void fetch(int tile) {
    const float bias = bias_ != nullptr && gives(tile) ? to_float(bias_[column(tile)]) : 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      before_[i] = bias;
      if (accumulate_ && i < count_ && gives(tile)) before_[i] += to_float(load_updated(place(tile, i)));
    }
  }

  // The squares are complete with the first tile's sums.
  __device__ __forceinline__ void take_scales(const RowsShared<TOKENS>& shared, int in_features, float eps) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += shared.squares[w][token_ + i];
      scales_[i] = rsqrtf(__fdividef(sum, in_features) + eps);
    }
  }

  // Of all parts of k, in order.
  __device__ __forceinline__ float total(const RowsShared<TOKENS>& shared, int i) const {
    float sum = shared.partial[0][token_ + i][row_];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) sum += shared.partial[w][token_ + i][row_];
    return sum;
  }

  __device__ __forceinline__ void store(int tile, const float (&results)[OWN]) const {
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      if (i >= count_) break;
      float result = results[i] + before_[i];
      if (tiles_.gated()) {
        const float up = __shfl_xor_sync(FULL_WARP, results[i], UNIT);
        result = up * __fdividef(results[i], 1.0f + __expf(-results[i]));
      }
      if (gives(tile)) *place(tile, i) = from_float<Out>(result);
    }
  }

  __device__ __forceinline__ bool gives(int tile) const {
    return column(tile) < tiles_.features && !(tiles_.gated() && row_ & UNIT);
  }
  __device__ __forceinline__ int column(int tile) const {
    return (tiles_.begin + tile) * tiles_.a_tile + column_;
  }
  __device__ __forceinline__ Out* place(int tile, int i) const {
    return out_ + i * out_stride_ + column(tile);
  }

  const Tiles& tiles_;
  const T* const bias_;
  const int row_;     // of a tile
  const int column_;  // of its results
  const int token_, count_;
  Out* const out_;  // the first token's
  const int out_stride_;
  const int accumulate_;
  float before_[OWN];
  float scales_[OWN];  // the norms'
};
