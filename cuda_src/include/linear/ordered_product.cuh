// The parts of ordered_matmul_kernel: the ring of weights, the chunks of rows of x and the norm before the
// product, the consumer with its tensor-core sums, and the epilogue.
#pragma once

#include "common.cuh"
#include "generated/ordered_matmul.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"

constexpr int STEP_VECTORS = STEP_K / SEGMENT;  // of a row of weights, in a stage of the ring
constexpr int ROW_BYTES = STEP_K * 2;           // the same
constexpr int CHUNK_STEPS = CHUNK_K / STEP_K;   // of the ring
constexpr int CHUNK_PITCH = CHUNK_K + SEGMENT;  // elements; eight rows fill all banks
constexpr int STAGE_BYTES = UNIT * ROW_BYTES;   // of a unit
static_assert(STEP_VECTORS == 8, "vectors are exchanged within 128 bytes");
static_assert(CHUNK_K % STEP_K == 0, "chunks are whole steps");

// Constants of a variant.
template <typename Element, typename Result, int MAX_TOKENS, int UNITS_A_WARP, int BLOCK_WARPS,
          int RING_STAGES>
struct Variant {
  using T = Element;
  using Out = Result;
  static constexpr int TOKENS = MAX_TOKENS;
  static constexpr int UNITS = UNITS_A_WARP;
  static constexpr int WARPS = BLOCK_WARPS;
  static constexpr int THREADS = WARPS * WARP_SIZE;
  static constexpr int STAGES = RING_STAGES;
  static constexpr int MMAS_M = ceil_div(TOKENS, 16);
  static constexpr int HALVES_M = ceil_div(TOKENS, 8);  // of the mmas' rows, that are there
  static constexpr int RING_BYTES = STAGES * UNITS * STAGE_BYTES;
  static_assert(sizeof(T) == 2, "tensor cores take bfloat16 or float16");
  static_assert(TOKENS == 8 || TOKENS % 16 == 0, "an mma has 16 rows of x, of which 8 may be left out");
  // The copy of a chunk is older than the weights that a warp waits for when the chunk is needed, also behind
  // a row's last chunk of one step.
  static_assert(STAGES >= 3 && STAGES - 2 <= (STREAMED_BUFFERS - 2) * CHUNK_STEPS,
                "chunks must have come when the ring is as far");
};

// This block's groups of UNITS units; a gated one has a unit of gates and one of their ups.
template <typename V>
struct BlockGroups {
  int features;  // of the result
  int a_group;
  int begin, end;
  int rounds;  // of a group a warp

  __device__ __forceinline__ BlockGroups(int out_features, int gated) {
    features = gated ? out_features / 2 : out_features;
    a_group = gated ? UNIT : UNIT * V::UNITS;
    const int num_groups = ceil_div(features, a_group);
    const int blocks = gridDim.x;
    const int block = blockIdx.x;
    const int a_block = num_groups / blocks;
    const int one_more = num_groups - a_block * blocks;  // blocks with one more
    begin = block * a_block + min(block, one_more);
    end = begin + a_block + (block < one_more ? 1 : 0);
    rounds = ceil_div(end - begin, V::WARPS);
  }
};

// A warp's ring of STAGES steps of its units' weights. Rows of 128 bytes, whose vectors are XORed with the
// row, so that eight rows' vectors fall into different banks.
template <typename V>
class WeightRing {
  using T = typename V::T;

 public:
  __device__ __forceinline__ WeightRing(unsigned ring, const BlockGroups<V>& groups, const T* weight,
                                        int steps, int in_features, int gated)
      : groups_(groups),
        weight_(weight),
        steps_(steps),
        in_features_(in_features),
        gated_(gated),
        group_(groups.begin + threadIdx.x / WARP_SIZE),
        policy_(evict_first_policy()) {
    const int row = row_of_lane(), vector = vector_of_lane();
    upper_ = ring + row * ROW_BYTES + (vector ^ row) * 16;
    lower_ = ring + (row + ROWS) * ROW_BYTES + (vector ^ (row + ROWS)) * 16;
    begin_group();
  }

  // Groups of copies are committed also where empty, because the waits count them.
  __device__ __forceinline__ void fill() {
#pragma unroll 1
    for (int stage = 0; stage < V::STAGES; ++stage) refill();
  }

  // The stage that was used last.
  __device__ __forceinline__ void refill() {
    if (group_ < groups_.end) {
      load();
      if (++step_ == steps_) {
        step_ = 0;
        group_ += V::WARPS;
        begin_group();
      }
    }
    copy_async_commit();
    slot_ = slot_ + 1 == V::STAGES ? 0 : slot_ + 1;
  }

 private:
  static constexpr int ROWS = WARP_SIZE / STEP_VECTORS;  // that a warp copies at a time

  static __device__ __forceinline__ int row_of_lane() { return threadIdx.x % WARP_SIZE / STEP_VECTORS; }
  static __device__ __forceinline__ int vector_of_lane() { return threadIdx.x % STEP_VECTORS; }

  __device__ __forceinline__ void begin_group() {
    const int row = group_ * groups_.a_group + row_of_lane();
    from_ = weight_ + static_cast<long long>(row) * in_features_ + vector_of_lane() * SEGMENT;
    rows_left_ = groups_.features - row;
  }

  __device__ __forceinline__ void load() const {
    const int k = step_ * STEP_K;
    const bool in_row = k + vector_of_lane() * SEGMENT < in_features_;
    const unsigned slot = slot_ * V::UNITS * STAGE_BYTES;
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
      const int row = gated_ ? 0 : u * UNIT;
      const int behind = gated_ && u > 0 ? groups_.features : row;
      const T* const from = from_ + static_cast<long long>(behind) * in_features_ + k;
      const unsigned to = slot + u * STAGE_BYTES;
      copy_async_16(upper_ + to, from, in_row && row < rows_left_, policy_);
      copy_async_16(lower_ + to, from + static_cast<long long>(ROWS) * in_features_,
                    in_row && row + ROWS < rows_left_, policy_);
    }
  }

  const BlockGroups<V>& groups_;
  const T* const weight_;
  const int steps_;
  const int in_features_;
  const int gated_;
  unsigned upper_, lower_;  // where this lane's two vectors of a unit go
  int group_;
  int step_ = 0;
  int slot_ = 0;
  const T* from_;
  int rows_left_;  // from this lane's first row of the group on
  const unsigned long long policy_;
};

// Rows of x in chunks of CHUNK_K elements: [buffers][num_rows][CHUNK_PITCH] in shared memory, zeros beyond
// in_features.
template <typename V>
struct RowChunks {
  using T = typename V::T;

  T* chunks;
  const T* x;
  int num_rows;
  int in_features;

  // By all threads.
  __device__ __forceinline__ void load(int chunk, int buffer) const {
    constexpr int VECTORS = CHUNK_K / SEGMENT;
    const unsigned to = shared_address(chunks) + buffer * num_rows * CHUNK_PITCH * sizeof(T);
#pragma unroll 1
    for (int i = threadIdx.x; i < num_rows * VECTORS; i += V::THREADS) {
      const int row = i / VECTORS, vector = i % VECTORS;
      const int k = chunk * CHUNK_K + vector * SEGMENT;
      copy_async_16(to + (row * CHUNK_PITCH + vector * SEGMENT) * sizeof(T),
                    x + static_cast<long long>(row) * in_features + k, k < in_features);
    }
  }
};

// The norm before the product, as rmsnorm_kernel does it: threads of a row's block are gone through by warps
// of this one.
template <typename V>
struct OrderedNorm {
  using T = typename V::T;
  using Vector = Vec<T, SEGMENT>;
  static constexpr int EARLY = 2;  // vectors of gains of a thread that are there before x is

  const T* norm;  // null without
  T* chunks;
  float (&parts)[V::TOKENS][WARP_SIZE];  // of a row's sum of squares, by warp of rmsnorm_kernel
  int num_rows;
  int in_features;
  int threads;
  float eps;
  Vector gains[EARLY];

  __device__ __forceinline__ void load_gains() {
    if (norm == nullptr) return;
#pragma unroll
    for (int i = 0; i < EARLY; ++i) {
      const int k = (i * V::THREADS + threadIdx.x) * SEGMENT;
      if (k < in_features) gains[i] = Vector::load(norm + k);
    }
  }

  // Once x is in shared memory; another barrier follows.
  __device__ __forceinline__ void apply() {
    const int lane = threadIdx.x % WARP_SIZE, warps = threads / WARP_SIZE;
#pragma unroll 1
    for (int item = threadIdx.x / WARP_SIZE; item < num_rows * warps; item += V::WARPS) {
      const int row = item / warps, warp = item - row * warps;
      float sum = 0.0f;
#pragma unroll 1
      for (int k = (warp * WARP_SIZE + lane) * SEGMENT; k < in_features; k += threads * SEGMENT) {
        const Vector values = Vector::load(at(row, k));
#pragma unroll
        for (int e = 0; e < SEGMENT; ++e) sum = fmaf(to_float(values[e]), to_float(values[e]), sum);
      }
      sum = warp_sum(sum);
      if (lane == 0) parts[row][warp] = sum;
    }
    __syncthreads();
#pragma unroll 1
    for (int row = 0; row < num_rows; ++row) {
      const float sum = warp_sum(lane < warps ? parts[row][lane] : 0.0f);
      const float inverse_rms = rsqrtf(sum / in_features + eps);
#pragma unroll
      for (int i = 0; i < EARLY; ++i) {
        const int k = (i * V::THREADS + threadIdx.x) * SEGMENT;
        if (k < in_features) scale(at(row, k), gains[i], inverse_rms);
      }
#pragma unroll 1
      for (int k = (EARLY * V::THREADS + threadIdx.x) * SEGMENT; k < in_features; k += V::THREADS * SEGMENT) {
        scale(at(row, k), Vector::load(norm + k), inverse_rms);
      }
    }
  }

 private:
  __device__ __forceinline__ T* at(int row, int k) const {
    return chunks + (k / CHUNK_K * num_rows + row) * CHUNK_PITCH + k % CHUNK_K;
  }

  static __device__ __forceinline__ void scale(T* elements, const Vector& gains, float inverse_rms) {
    Vector values = Vector::load(elements);
#pragma unroll
    for (int e = 0; e < SEGMENT; ++e) {
      values[e] = from_float<T>(to_float(values[e]) * inverse_rms * to_float(gains[e]));
    }
    values.store(elements);
  }
};

// A warp's sums of its group. Fragments of one half of a step are loaded while those of the other are
// multiplied.
template <typename V>
class OrderedConsumer {
  using T = typename V::T;

 public:
  float sums[V::UNITS][V::MMAS_M][4];

  __device__ __forceinline__ OrderedConsumer(unsigned ring, unsigned chunks, int num_rows)
      : ring_(ring), chunks_(chunks), buffer_bytes_(num_rows * CHUNK_PITCH * sizeof(T)) {
    const int lane = threadIdx.x % WARP_SIZE;
    weight_row_ = lane % 8 * ROW_BYTES;
    weight_vector_ = lane / 8 ^ lane % 8;
    // Rows that are not there are the last one; what becomes of them is not stored.
    if constexpr (V::TOKENS == 8) {
      x_rows_[0] = (min(lane % 8, num_rows - 1) * CHUNK_PITCH + lane / 8 * SEGMENT) * sizeof(T);
    } else {
#pragma unroll
      for (int i = 0; i < V::MMAS_M; ++i) {
        x_rows_[i] = (min(i * 16 + lane % 16, num_rows - 1) * CHUNK_PITCH + lane / 16 * SEGMENT) * sizeof(T);
      }
    }
    begin_chunk(0);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < V::UNITS * V::MMAS_M * 4; ++i) (&sums[0][0][0])[i] = 0.0f;
  }

  __device__ __forceinline__ void begin_chunk(int buffer) { x_ = chunks_ + buffer * buffer_bytes_; }

  __device__ __forceinline__ void advance_step() {
    slot_ = slot_ + 1 == V::STAGES ? 0 : slot_ + 1;
    x_ += ROW_BYTES;
  }

  // Two mmas' fragments of this step's half `half` to set `set`.
  __device__ __forceinline__ void load_half(int set, int half) {
    const unsigned stage =
        ring_ + slot_ * V::UNITS * STAGE_BYTES + weight_row_ + (weight_vector_ ^ half * 4) * 16;
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) ldmatrix_x4(weights_[set][u], stage + u * STAGE_BYTES);
    const unsigned x = x_ + half * (ROW_BYTES / 2);
    if constexpr (V::TOKENS == 8) {
      ldmatrix_x4(tokens_[set][0][0], x + x_rows_[0]);
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < V::MMAS_M; ++i) ldmatrix_x4(tokens_[set][j][i], x + x_rows_[i] + j * 32);
      }
    }
  }

  __device__ __forceinline__ void multiply(int set) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < V::MMAS_M; ++i) {
#pragma unroll
        for (int u = 0; u < V::UNITS; ++u) {
          const unsigned (&w)[4] = weights_[set][u];
          if constexpr (V::TOKENS == 8) {
            const unsigned (&x)[4] = tokens_[set][0][0];
            mma_m16n8k16<T>(sums[u][i], {x[j * 2], 0u, x[j * 2 + 1], 0u}, {w[j * 2], w[j * 2 + 1]});
          } else {
            mma_m16n8k16<T>(sums[u][i], tokens_[set][j][i], {w[j * 2], w[j * 2 + 1]});
          }
        }
      }
    }
  }

 private:
  const unsigned ring_;
  const unsigned chunks_;
  const int buffer_bytes_;
  unsigned weight_row_;
  unsigned weight_vector_;
  unsigned x_rows_[V::MMAS_M];
  unsigned x_;  // this step's first element of the first row
  int slot_ = 0;
  unsigned weights_[2][V::UNITS][4];
  unsigned tokens_[2][V::TOKENS == 8 ? 1 : 2][V::MMAS_M][4];
};

// What is added to a group's sums, fetched before them, and their way to `out`.
template <typename V>
class OrderedEpilogue {
  using T = typename V::T;
  using Out = typename V::Out;

 public:
  __device__ __forceinline__ OrderedEpilogue(const BlockGroups<V>& groups, int group, bool active,
                                             const T* bias, Out* out, int num_rows, int accumulate, int gated)
      : features_(groups.features),
        column_(group * groups.a_group + threadIdx.x % 4 * 2),
        has_bias_(bias != nullptr),
        accumulate_(accumulate),
        gated_(gated),
        num_rows_(num_rows),
        out_(out) {
    if (!active) return;
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
      const int column = column_ + u * UNIT;
      if (gated || column >= features_) continue;
      if (bias != nullptr) offset_[u] = {bias[column], bias[column + 1]};
#pragma unroll
      for (int h = 0; h < V::HALVES_M; ++h) {
        if (accumulate && token(h) < num_rows) {
          load_past_l1(reinterpret_cast<typename Vec<Out, 2>::Raw&>(before_[u][h]), at(h, column));
        }
      }
    }
  }

  __device__ __forceinline__ void store(float (&sums)[V::UNITS][V::MMAS_M][4]) const {
#pragma unroll
    for (int h = 0; h < V::HALVES_M; ++h) {
      if (token(h) >= num_rows_) continue;
#pragma unroll
      for (int u = 0; u < V::UNITS; ++u) {
        const int column = column_ + u * UNIT;
        if (column >= features_ || (gated_ && u > 0)) continue;
        float pair[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float value = sums[u][h / 2][h % 2 * 2 + e];
          if (gated_) value = silu_fast(value) * sums[V::UNITS - 1][h / 2][h % 2 * 2 + e];
          if (has_bias_) value += to_float(offset_[u][e]);
          if (accumulate_) value += to_float(before_[u][h][e]);
          pair[e] = value;
        }
        const Vec<Out, 2> rounded = {from_float<Out>(pair[0]), from_float<Out>(pair[1])};
        rounded.store(at(h, column));
      }
    }
  }

 private:
  // The token of this lane in a half of an mma's rows.
  static __device__ __forceinline__ int token(int h) { return h * 8 + threadIdx.x % WARP_SIZE / 4; }
  __device__ __forceinline__ Out* at(int h, int column) const {
    return out_ + static_cast<long long>(token(h)) * features_ + column;
  }

  const int features_;
  const int column_;
  const bool has_bias_;
  const int accumulate_;
  const int gated_;
  const int num_rows_;
  Out* const out_;
  Vec<T, 2> offset_[V::UNITS];
  Vec<Out, 2> before_[V::UNITS][V::HALVES_M];
};
