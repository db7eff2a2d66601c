// The parts of a decode step's GEMV: the producer that streams the weights, the norm before the product, the
// consumer with its tensor-core sums, and the epilogue with bias, residual or gate (SwiGLU, GEGLU).
#pragma once

#include "common.cuh"
#include "generated/gates.cuh"
#include "generated/matmul_decode.cuh"
#include "pairs.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"

constexpr int THREADS = WARPS * WARP_SIZE;

// sum + the squares of eight elements.
template <typename T>
__device__ __forceinline__ float add_squares(float sum, const uint4& raw) {
  const unsigned words[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (unsigned word : words) {
    const float2 values = floats_of_pair<typename pair_of<T>::type>(word);
    sum = fmaf(values.y, values.y, fmaf(values.x, values.x, sum));
  }
  return sum;
}

// Products of eight elements and eight others, rounded to T.
template <typename T>
__device__ __forceinline__ uint4 multiply_elements(const uint4& a, const uint4& b) {
  using Pair = typename pair_of<T>::type;
  return make_uint4(multiply_pair<Pair>(a.x, b.x), multiply_pair<Pair>(a.y, b.y),
                    multiply_pair<Pair>(a.z, b.z), multiply_pair<Pair>(a.w, b.w));
}

// Elements times `scale` and others, rounded to T once.
template <typename T>
__device__ __forceinline__ uint4 scaled_elements(const uint4& elements, const uint4& gain, float scale) {
  using Vector = Vec<T, SEGMENT>;
  const Vector gains = reinterpret_cast<const Vector&>(gain);
  Vector values = reinterpret_cast<const Vector&>(elements);
#pragma unroll
  for (int e = 0; e < SEGMENT; ++e) {
    values[e] = from_float<T>(to_float(values[e]) * scale * to_float(gains[e]));
  }
  return reinterpret_cast<const uint4&>(values);
}

// Two elements plus two others times `scale` and a gain; the products are rounded to T, and the sums.
template <typename T>
__device__ __forceinline__ unsigned add_scaled_pair(unsigned pair, unsigned others, unsigned gain,
                                                    float scale) {
  using Pair = typename pair_of<T>::type;
  const float2 values = floats_of_pair<Pair>(others), gains = floats_of_pair<Pair>(gain);
  const unsigned scaled = pair_of_floats<Pair>(values.x * scale * gains.x, values.y * scale * gains.y);
  const float2 a = floats_of_pair<Pair>(pair), b = floats_of_pair<Pair>(scaled);
  return pair_of_floats<Pair>(a.x + b.x, a.y + b.y);
}
template <typename T>
__device__ __forceinline__ uint4 add_scaled_elements(const uint4& a, const uint4& others, const uint4& gain,
                                                     float scale) {
  return make_uint4(
      add_scaled_pair<T>(a.x, others.x, gain.x, scale), add_scaled_pair<T>(a.y, others.y, gain.y, scale),
      add_scaled_pair<T>(a.z, others.z, gain.z, scale), add_scaled_pair<T>(a.w, others.w, gain.w, scale));
}

// Constants of a variant.
template <typename Element, typename Result, int MAX_TOKENS, int UNITS_A_TILE, int RING_STAGES,
          int HALVES_A_STEP>
struct Variant {
  using T = Element;
  using Out = Result;
  static constexpr int TOKENS = MAX_TOKENS;
  static constexpr int UNITS = UNITS_A_TILE;
  static constexpr int STAGES = RING_STAGES;
  static constexpr int HALVES = HALVES_A_STEP;
  static constexpr bool RESIDENT = TOKENS == 1;                       // the row of x stays in shared memory
  static constexpr bool ADDS = RESIDENT && sizeof(Out) == sizeof(T);  // the row may be a sum; not for logits
  static constexpr bool SCALES_SUMS = has_float_range<T>;             // the norm's root divides the sums
  static constexpr int GROUPS = ceil_div(TOKENS, 8);                  // of 8 tokens
  static constexpr int MMAS_M = ceil_div(TOKENS, 16);
  static constexpr int CHAINS = UNITS * MMAS_M >= 4 ? 1 : 2;  // independent sums that hide an mma's latency
  static constexpr int STEP_K = HALVES * HALF_K;  // elements of each row that a warp takes at a time
  static constexpr int STEP_VECTORS = STEP_K / SEGMENT;
  static constexpr int LOADS = HALVES * (UNITS + (RESIDENT ? 0 : GROUPS));  // of a lane, a stage
  static constexpr int ITEMS = ceil_div(UNITS * GROUPS * WARP_SIZE, THREADS);
  static constexpr int SUM_LANES = WARP_SIZE;  // whose sums a warp leaves for the others
  static_assert(sizeof(T) == 2, "tensor cores take bfloat16 or float16");
  static_assert(TOKENS == 1 || TOKENS == 8 || TOKENS % 16 == 0,
                "an mma has 16 rows of x, of which 8 may be left out");
  static_assert(STAGES >= 2, "copies need a stage to run ahead in");
};

// The same where a block's sums of one row take the room of that row's alone, which the first four lanes
// have.
template <typename Element, typename Result, int MAX_TOKENS, int UNITS_A_TILE, int RING_STAGES,
          int HALVES_A_STEP>
struct CompactVariant : Variant<Element, Result, MAX_TOKENS, UNITS_A_TILE, RING_STAGES, HALVES_A_STEP> {
  static constexpr int SUM_LANES = MAX_TOKENS == 1 ? 4 : WARP_SIZE;
};

__device__ __forceinline__ int lane_of_thread() { return threadIdx.x % WARP_SIZE; }
__device__ __forceinline__ int warp_of_thread() { return threadIdx.x / WARP_SIZE; }
__device__ __forceinline__ int row_of_lane() { return lane_of_thread() / 4; }  // of a unit, and of 8 tokens

// This block's units of the weight. Gated, a tile has half as many gates and their ups.
template <int UNITS>
struct BlockUnits {
  int features;  // of the result
  int a_tile;
  int begin, end;
  int num_tiles;

  __device__ __forceinline__ BlockUnits(int out_features, int gated) {
    features = gated ? out_features / 2 : out_features;
    a_tile = gated ? UNITS / 2 : UNITS;
    const int num_units = ceil_div(features, UNIT);
    const int block = blockIdx.x;
    const int a_block = num_units / static_cast<int>(gridDim.x);
    const int one_more = num_units - a_block * static_cast<int>(gridDim.x);  // blocks with one more
    begin = block * a_block + min(block, one_more);
    end = begin + a_block + (block < one_more ? 1 : 0);
    num_tiles = gated ? ceil_div(end - begin, UNITS / 2 + (UNITS == 1)) : ceil_div(end - begin, UNITS);
  }
};

// This warp's steps along k: every WARPS-th. Its vectors of a row lie one step after another.
template <typename V>
struct WarpSteps {
  // From a vector to that which the same lane has next, where a warp's lanes take its vectors in turn.
  static constexpr int LANES_K = THREADS * SEGMENT;
  static_assert(WARP_SIZE % V::STEP_VECTORS == 0, "a warp takes whole steps");

  int count;
  int vectors;

  __device__ __forceinline__ explicit WarpSteps(int in_features)
      : count(ceil_div(in_features, V::STEP_K * WARPS)), vectors(count * V::STEP_VECTORS) {}

  // First element of this lane in a step.
  static __device__ __forceinline__ int lane_k(int step) {
    return (step * WARPS + warp_of_thread()) * V::STEP_K + lane_of_thread() % 4 * SEGMENT;
  }
  // First element of vector v.
  static __device__ __forceinline__ int vector_k(int v) {
    return (v / V::STEP_VECTORS * WARPS + warp_of_thread()) * V::STEP_K + v % V::STEP_VECTORS * SEGMENT;
  }
  // The vector that this lane needs.
  static __device__ __forceinline__ int lane_vector(int step, int half) {
    return (step * V::HALVES + half) * 4 + lane_of_thread() % 4;
  }
};

// Producer: fills this lane's ring, ahead of the products and with its own place in the sequence of tiles and
// steps.
template <typename V>
class DecodeProducer {
  using T = typename V::T;
  static constexpr unsigned COPY_BYTES = THREADS * sizeof(uint4);  // of all threads

 public:
  __device__ __forceinline__ DecodeProducer(uint4* ring, const BlockUnits<V::UNITS>& units, int steps,
                                            const T* x, const T* weight, int num_rows, int in_features,
                                            int gated)
      : units_(units),
        steps_(steps),
        x_(x),
        weight_(weight),
        num_rows_(num_rows),
        in_features_(in_features),
        gated_(gated),
        ring_(shared_address(ring + threadIdx.x)),
        from_(weight),
        unit_elements_(static_cast<long long>(UNIT) * in_features),
        policy_(evict_first_policy()) {}

  // The weights of the first stages. Groups of copies are committed also where empty, because the waits count
  // them.
  __device__ __forceinline__ void fill_weights() {
#pragma unroll 1
    for (int stage = 0; stage < V::STAGES; ++stage) {
      if (tile_ < units_.num_tiles) load_weight();
      copy_async_commit();
      advance();
    }
  }

  // The rows of x of the first stages.
  __device__ __forceinline__ void fill_x() const {
    int step = 0;
#pragma unroll 1
    for (int stage = 0; stage < V::STAGES; ++stage) {
      if (stage < units_.num_tiles * steps_) load_x(stage, step);
      copy_async_commit();
      step = step + 1 == steps_ ? 0 : step + 1;
    }
  }

  // The stage that was used last.
  __device__ __forceinline__ void refill() {
    if (tile_ < units_.num_tiles) {
      load_weight();
      if constexpr (!V::RESIDENT) load_x(slot_, step_);
    }
    copy_async_commit();
    advance();
  }

 private:
  __device__ __forceinline__ void load_weight() {
    if (step_ == 0) {
      const int unit = units_.begin + tile_ * units_.a_tile;
      const int row = unit * UNIT + row_of_lane();
      from_ = weight_ + static_cast<long long>(row) * in_features_ + WarpSteps<V>::lane_k(0);
      tile_units_ = min(min(units_.end - unit, units_.a_tile), ceil_div(units_.features - row, UNIT));
    }
    const int k = step_ * WARPS * V::STEP_K;
    const T* from = from_ + k;
    const int left = in_features_ - k - WarpSteps<V>::lane_k(0);
    const unsigned to = ring_ + slot_ * V::LOADS * COPY_BYTES;
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
  }

  __device__ __forceinline__ void load_x(int slot, int step) const {
    const int k = WarpSteps<V>::lane_k(step);
    const T* from = x_ + row_of_lane() * in_features_ + k;
    const unsigned to = ring_ + (slot * V::LOADS + V::UNITS * V::HALVES) * COPY_BYTES;
#pragma unroll
    for (int i = 0; i < V::GROUPS * V::HALVES; ++i) {
      const int element = i % V::HALVES * HALF_K;
      const int group = i / V::HALVES;
      copy_async_16(to + i * COPY_BYTES, from + group * 8 * in_features_ + element,
                    group * 8 + row_of_lane() < num_rows_ && k + element < in_features_);
    }
  }

  __device__ __forceinline__ void advance() {
    slot_ = slot_ + 1 == V::STAGES ? 0 : slot_ + 1;
    if (++step_ == steps_) {
      step_ = 0;
      ++tile_;
    }
  }

  const BlockUnits<V::UNITS>& units_;
  const int steps_;
  const T* const x_;
  const T* const weight_;
  const int num_rows_;
  const int in_features_;
  const int gated_;
  const unsigned ring_;
  int tile_ = 0;
  int step_ = 0;
  int slot_ = 0;
  const T* from_;       // this lane's row of the tile's first unit, from its first element on
  int tile_units_ = 0;  // units of the tile in which this lane has a row
  const long long unit_elements_;
  const unsigned long long policy_;
};

// The sum of a row of x and the norm of an update: this lane's vectors of it.
template <typename V>
struct RowSum {
  using T = typename V::T;
  using Steps = WarpSteps<V>;

  const T* update;  // null without
  const T* update_norm;
  T* sum;
  int in_features;
  float eps;

  // The update's gains to where this warp's vectors of the sum will be, with the next group of copies; before
  // earlier kernels have ended.
  __device__ __forceinline__ void load_gains(uint4* y, const Steps& steps) const {
    if (update == nullptr) return;
#pragma unroll 1
    for (int v = lane_of_thread(); v < steps.vectors; v += WARP_SIZE) {
      const bool valid = Steps::vector_k(v) < in_features;
      copy_async_16(y + v, valid ? update_norm + Steps::vector_k(v) : update_norm, valid);
    }
  }

  // row [SUM_VECTORS]: zeros beyond in_features. `gains`: where load_gains put them; the copies have ended.
  // All threads of the block must call.
  __device__ __forceinline__ void load(const T* x, const uint4* gains, uint4 (&row)[SUM_VECTORS]) const {
    __shared__ float sums_of_squares[WARPS];
    const int first_k = Steps::vector_k(lane_of_thread());
    uint4 updates[SUM_VECTORS];
    // Without branches, at which the compiler waits for one before it asks for the next.
#pragma unroll
    for (int i = 0; i < SUM_VECTORS; ++i) {
      const int k = first_k + i * Steps::LANES_K;
      updates[i] = row[i] = make_uint4(0, 0, 0, 0);
      if (k < in_features) load_past_l1(updates[i], update + k);
      if (k < in_features) load_past_l1(row[i], x + k);
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < SUM_VECTORS; ++i) squares = add_squares<T>(squares, updates[i]);
    squares = warp_sum(squares);
    if (lane_of_thread() == 0) sums_of_squares[warp_of_thread()] = squares;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += sums_of_squares[w];
    const float scale = rsqrtf(__fdividef(total, in_features) + eps);
#pragma unroll
    for (int i = 0; i < SUM_VECTORS; ++i) {
      const int k = first_k + i * Steps::LANES_K;
      if (k >= in_features) break;
      row[i] = add_scaled_elements<T>(row[i], updates[i], gains[lane_of_thread() + i * WARP_SIZE], scale);
      if (blockIdx.x == 0) *reinterpret_cast<uint4*>(sum + k) = row[i];
    }
  }
};

// The norm before the product: this warp's vectors of its weight and the sums of squares.
template <typename V>
struct NormPrologue {
  using T = typename V::T;
  using Steps = WarpSteps<V>;

  const T* norm;  // null without
  uint4* gains;   // this warp's vectors of it in shared memory, zeros beyond in_features
  float (&sums_of_squares)[WARPS][V::TOKENS];
  int in_features;
  float eps;

  // One group of copies, also where empty.
  __device__ __forceinline__ void load_gains(const Steps& steps) const {
    if (norm != nullptr) {
#pragma unroll 1
      for (int v = lane_of_thread(); v < steps.vectors; v += WARP_SIZE) {
        const bool valid = Steps::vector_k(v) < in_features;
        copy_async_16(gains + v, valid ? norm + Steps::vector_k(v) : norm, valid);
      }
    }
    copy_async_commit();
  }

  // 1 / sqrt(mean(x^2) + eps) of a token, once every warp's sum of squares is there.
  __device__ __forceinline__ float inverse_rms(int token) const {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums_of_squares[w][token];
    return rsqrtf(__fdividef(sum, in_features) + eps);
  }

  // This warp's vectors of the one row of x to shared memory: `y`, normalised unless SCALES_SUMS.
  __device__ __forceinline__ void load_row(const T* x, uint4* y, const Steps& steps) const {
    if (norm == nullptr) {
      copy_row(x, y, steps);
      return;
    }
    constexpr int BATCH = 2;  // loads in flight
    const int lane = lane_of_thread();
    copy_async_wait<V::STAGES>();
    float squares = 0.0f;
#pragma unroll 1
    for (int first = lane; first < steps.vectors; first += BATCH * WARP_SIZE) {
      uint4 raw[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int k = Steps::vector_k(first + i * WARP_SIZE);
        raw[i] = make_uint4(0, 0, 0, 0);
        if (k < in_features) load_past_l1(raw[i], x + k);
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int v = first + i * WARP_SIZE;
        if (v >= steps.vectors) break;
        squares = add_squares<T>(squares, raw[i]);
        if (V::SCALES_SUMS) raw[i] = multiply_elements<T>(raw[i], gains[v]);
        y[v] = raw[i];
      }
    }
    finish_row(squares, y, steps);
  }

  // The same of the row that `row_sum` makes of x; there is a norm.
  __device__ __forceinline__ void load_sum(const T* x, const RowSum<V>& row_sum, uint4* y,
                                           const Steps& steps) const {
    uint4 row[SUM_VECTORS];
    copy_async_wait<V::STAGES>();
    row_sum.load(x, y, row);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < SUM_VECTORS; ++i) {
      const int v = lane_of_thread() + i * WARP_SIZE;
      if (v >= steps.vectors) break;
      squares = add_squares<T>(squares, row[i]);
      y[v] = V::SCALES_SUMS ? multiply_elements<T>(row[i], gains[v]) : row[i];
    }
    finish_row(squares, y, steps);
  }

 private:
  // Without a norm nothing else is done while the row is on its way, so as much of it as fits is at once: the
  // first product waits for the last vector.
  __device__ __forceinline__ void copy_row(const T* x, uint4* y, const Steps& steps) const {
#pragma unroll 1
    for (int first = lane_of_thread(); first < steps.vectors; first += ROW_LOADS * WARP_SIZE) {
      const int k = Steps::vector_k(first);
      uint4 raw[ROW_LOADS];
#pragma unroll
      for (int i = 0; i < ROW_LOADS; ++i) {
        raw[i] = make_uint4(0, 0, 0, 0);
        if (k + i * Steps::LANES_K < in_features) load_past_l1(raw[i], x + k + i * Steps::LANES_K);
      }
#pragma unroll
      for (int i = 0; i < ROW_LOADS; ++i) {
        if (first + i * WARP_SIZE < steps.vectors) y[first + i * WARP_SIZE] = raw[i];
      }
    }
  }

  // Of a row in `y`, after this lane's sum of squares.
  __device__ __forceinline__ void finish_row(float squares, uint4* y, const Steps& steps) const {
    squares = warp_sum(squares);
    if (lane_of_thread() == 0) sums_of_squares[warp_of_thread()][0] = squares;
    if constexpr (!V::SCALES_SUMS) {
      __syncthreads();
      const float scale = inverse_rms(0);
      for (int v = lane_of_thread(); v < steps.vectors; v += WARP_SIZE)
        y[v] = scaled_elements<T>(y[v], gains[v], scale);
    }
  }
};

// Consumer: this warp's sums of a tile over its steps of k.
template <typename V>
class DecodeConsumer {
  using T = typename V::T;

 public:
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < V::CHAINS * V::UNITS * V::MMAS_M * 4; ++i) (&sums_[0][0][0][0])[i] = 0.0f;
  }

  // Add one step's products from the ring's next stage; `y` is the row that is RESIDENT.
  __device__ __forceinline__ void take_step(const uint4* ring, const uint4* y,
                                            const NormPrologue<V>& prologue, int step, bool is_first_tile) {
    copy_async_wait<V::STAGES - 1>();
    const uint4* const stage = ring + slot_ * V::LOADS * THREADS + threadIdx.x;
#pragma unroll
    for (int half = 0; half < V::HALVES; ++half) {
      uint4 tokens[V::GROUPS];
#pragma unroll
      for (int i = 0; i < V::GROUPS; ++i) {
        if constexpr (V::RESIDENT) {
          tokens[i] = y[WarpSteps<V>::lane_vector(step, half)];  // for all 8 rows; only the first is stored
        } else {
          tokens[i] = stage[((V::UNITS + i) * V::HALVES + half) * THREADS];
          if (V::SCALES_SUMS && prologue.norm != nullptr) {
            if (is_first_tile) squares_[i] = add_squares<T>(squares_[i], tokens[i]);
            tokens[i] =
                multiply_elements<T>(tokens[i], prologue.gains[WarpSteps<V>::lane_vector(step, half)]);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < V::UNITS; ++u) {
        multiply_unit(u, stage[(u * V::HALVES + half) * THREADS], tokens);
      }
    }
  }
  __device__ __forceinline__ void advance() { slot_ = slot_ + 1 == V::STAGES ? 0 : slot_ + 1; }

  // This warp's part of its tokens' sums of squares, after the first tile.
  __device__ __forceinline__ void share_squares(float (&sums_of_squares)[WARPS][V::TOKENS]) {
#pragma unroll
    for (int i = 0; i < V::GROUPS; ++i) {
      squares_[i] += __shfl_xor_sync(FULL_WARP, squares_[i], 1);
      squares_[i] += __shfl_xor_sync(FULL_WARP, squares_[i], 2);
      if (lane_of_thread() % 4 == 0) sums_of_squares[warp_of_thread()][i * 8 + row_of_lane()] = squares_[i];
    }
  }

  // partial [WARPS][UNITS][GROUPS][SUM_LANES]: pairs of sums.
  __device__ __forceinline__ void share_sums(float2* partial, int num_rows) const {
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
#pragma unroll
      for (int i = 0; i < V::GROUPS; ++i) {
        float2 pair = make_float2(sums_[0][u][i / 2][i % 2 * 2], sums_[0][u][i / 2][i % 2 * 2 + 1]);
        if constexpr (V::CHAINS > 1) {
          pair.x += sums_[1][u][i / 2][i % 2 * 2];
          pair.y += sums_[1][u][i / 2][i % 2 * 2 + 1];
        }
        if (i * 8 + row_of_lane() < num_rows) {
          partial[((warp_of_thread() * V::UNITS + u) * V::GROUPS + i) * V::SUM_LANES + lane_of_thread()] =
              pair;
        }
      }
    }
  }

 protected:
  // Eight elements of this lane's row of a unit times those of the tokens.
  __device__ __forceinline__ void multiply_unit(int u, const uint4& w, const uint4 (&tokens)[V::GROUPS]) {
#pragma unroll
    for (int i = 0; i < V::MMAS_M; ++i) {
      const uint4 low = tokens[i * 2];
      const uint4 high =
          i * 2 + 1 < V::GROUPS ? tokens[min(i * 2 + 1, V::GROUPS - 1)] : make_uint4(0, 0, 0, 0);
      mma_m16n8k16<T>(sums_[0][u][i], {low.x, high.x, low.y, high.y}, {w.x, w.y});
      mma_m16n8k16<T>(sums_[V::CHAINS - 1][u][i], {low.z, high.z, low.w, high.w}, {w.z, w.w});
    }
  }

  float sums_[V::CHAINS][V::UNITS][V::MMAS_M][4];
  int slot_ = 0;
  float squares_[V::GROUPS] = {};  // of this lane's elements of x, taken from the first tile's steps
};

// Epilogue: adds the warps' sums, then the bias and the residual or the gate. A thread has ITEMS pairs of
// neighbouring columns of a tile.
template <typename V>
class DecodeEpilogue {
  using T = typename V::T;
  using Out = typename V::Out;

 public:
  __device__ __forceinline__ DecodeEpilogue(const BlockUnits<V::UNITS>& units, const T* bias, Out* out,
                                            int out_stride, int num_rows, int accumulate, int gated)
      : units_(units),
        bias_(bias),
        out_(out),
        out_stride_(out_stride),
        num_rows_(num_rows),
        accumulate_(accumulate),
        gated_(gated) {}

  // What the sums are added to, so that it is there when they are.
  __device__ __forceinline__ void fetch(int tile_unit) {
#pragma unroll
    for (int i = 0; i < V::ITEMS; ++i) {
      const Item item(i, tile_unit);
      before_[i] = {from_float<Out>(0.0f), from_float<Out>(0.0f)};
      offset_[i] = {from_float<T>(0.0f), from_float<T>(0.0f)};
      if (is_outside(item, tile_unit)) continue;
      if (bias_ != nullptr) offset_[i] = {bias_[item.column], bias_[item.column + 1]};
      if (accumulate_) {
        load_past_l1(reinterpret_cast<typename Vec<Out, 2>::Raw&>(before_[i]),
                     out_ + item.token * out_stride_ + item.column);
      }
    }
  }

  __device__ __forceinline__ void store(int tile_unit, const float2* partial,
                                        const NormPrologue<V>& prologue) const {
    each_pair(tile_unit, partial, prologue, [&](int token, int column, const Vec<Out, 2>& pair) {
      pair.store(out_ + token * out_stride_ + column);
    });
  }

 protected:
  // keep(token, column, pair) of each pair of this thread's results.
  template <typename Keep>
  __device__ __forceinline__ void each_pair(int tile_unit, const float2* partial,
                                            const NormPrologue<V>& prologue, Keep keep) const {
#pragma unroll
    for (int i = 0; i < V::ITEMS; ++i) {
      const Item item(i, tile_unit);
      if (is_outside(item, tile_unit)) continue;
      const float scale =
          V::SCALES_SUMS && prologue.norm != nullptr ? prologue.inverse_rms(item.token) : 1.0f;
      float2 result = total(partial + item.place);
      result.x *= scale;
      result.y *= scale;
      if (gated_) {
        float2 up = total(partial + (item.place + units_.a_tile * V::GROUPS * V::SUM_LANES));
        up.x *= scale;
        up.y *= scale;
        float2 exponent = result;
        if (gated_ == GELU_GATE) exponent = make_float2(gelu_exponent(result.x), gelu_exponent(result.y));
        result.x = up.x * __fdividef(result.x, 1.0f + __expf(-exponent.x));
        result.y = up.y * __fdividef(result.y, 1.0f + __expf(-exponent.y));
      } else {
        result.x += to_float(offset_[i][0]) + to_float(before_[i][0]);
        result.y += to_float(offset_[i][1]) + to_float(before_[i][1]);
      }
      keep(item.token, item.column, Vec<Out, 2>{from_float<Out>(result.x), from_float<Out>(result.y)});
    }
  }

 private:
  // Item i of this thread.
  struct Item {
    int place;  // in a warp's part of `partial`
    int unit;   // of the tile
    int token, column;

    __device__ __forceinline__ Item(int i, int tile_unit) {
      const int index = i * THREADS + threadIdx.x;
      place = V::SUM_LANES == WARP_SIZE ? index : index / WARP_SIZE * V::SUM_LANES + lane_of_thread();
      unit = index / WARP_SIZE / V::GROUPS;
      token = index / WARP_SIZE % V::GROUPS * 8 + row_of_lane();
      column = (tile_unit + unit) * UNIT + lane_of_thread() % 4 * 2;
    }
  };

  __device__ __forceinline__ bool is_outside(const Item& item, int tile_unit) const {
    return item.unit >= units_.a_tile || tile_unit + item.unit >= units_.end || item.token >= num_rows_ ||
           item.column >= units_.features;
  }

  // Of all warps, in order.
  static __device__ __forceinline__ float2 total(const float2* parts) {
    float2 sum = parts[0];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) {
      const float2 other = parts[w * V::UNITS * V::GROUPS * V::SUM_LANES];
      sum.x += other.x;
      sum.y += other.y;
    }
    return sum;
  }

  const BlockUnits<V::UNITS>& units_;
  const T* const bias_;
  Out* const out_;
  const int out_stride_;  // elements from row to row
  const int num_rows_;
  const int accumulate_;
  const int gated_;
  Vec<Out, 2> before_[V::ITEMS];
  Vec<T, 2> offset_[V::ITEMS];
};
