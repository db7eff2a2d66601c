// Products of a few e4m3 rows by tensor cores: the row that a block quantises for itself, and the sums.
#pragma once

#include "decode_product.cuh"
#include "fp8_rows.cuh"
#include "generated/fp8_product.cuh"

constexpr int HALVES = 2;  // of a step, of 64 e4m3 each
constexpr int STEP_ELEMENTS = 2 * HALVES * HALF_K;
constexpr int ROW_VECTORS = STEP_ELEMENTS / SEGMENT;  // of 8 elements of a row that is not e4m3, a step
static_assert(STEP_ELEMENTS == SCALES, "a step has one scale of a row");

// The one row of a product: the norm, its scales, and its elements as what e4m3 makes of them. A warp has the
// elements of its own steps, as vectors of eight one step after another; each lane keeps to its own vectors.
template <typename T, bool BLOCKS>
struct RowQuantizer {
  const T* norm;         // null without
  uint4* gains;          // this warp's vectors of it in shared memory, zeros beyond in_features
  uint4* y;              // this warp's vectors of the row: __half at the end
  float* step_scales;    // of this warp's steps, with BLOCKS
  float *sums, *maxima;  // of the warps
  int steps, in_features;
  float eps, static_scale;

  __device__ __forceinline__ int element(int v) const {
    return (v / ROW_VECTORS * WARPS + warp_of_thread()) * STEP_ELEMENTS + v % ROW_VECTORS * SEGMENT;
  }

  // One group of copies, also where empty.
  __device__ __forceinline__ void load_gains() const {
    if (norm != nullptr) {
#pragma unroll 1
      for (int v = lane_of_thread(); v < steps * ROW_VECTORS; v += WARP_SIZE) {
        const bool valid = element(v) < in_features;
        copy_async_16(gains + v, valid ? norm + element(v) : norm, valid);
      }
    }
    copy_async_commit();
  }

  // The row to `y`; returns its scale, or 1 with BLOCKS.
  __device__ __forceinline__ float load_row(const T* x) const {
    using Vector = Vec<T, SEGMENT>;
    constexpr int BATCH = 4;  // loads in flight
    const int lane = lane_of_thread();
    const int vectors = steps * ROW_VECTORS;
    float squares = 0.0f, largest = 0.0f;
#pragma unroll 1
    for (int first = lane; first < vectors; first += BATCH * WARP_SIZE) {
      uint4 raw[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int v = first + i * WARP_SIZE;
        raw[i] = make_uint4(0, 0, 0, 0);
        if (v < vectors && element(v) < in_features) load_past_l1(raw[i], x + element(v));
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int v = first + i * WARP_SIZE;
        if (v >= vectors) break;
        y[v] = raw[i];
        float elements[SEGMENT];
        floats_of(raw[i], elements);
        if (norm != nullptr) squares = add_squares<T>(squares, raw[i]);
        largest = fmaxf(largest, largest_of(elements));
      }
    }
    if (norm != nullptr) {
      const float inverse_rms = rsqrtf(sum_of_warps(squares) / in_features + eps);
      largest = 0.0f;
#pragma unroll 1
      for (int v = lane; v < vectors; v += WARP_SIZE) {
        float elements[SEGMENT], factors[SEGMENT];
        floats_of(y[v], elements);
        floats_of(gains[v], factors);
        Vector rounded;
#pragma unroll
        for (int e = 0; e < SEGMENT; ++e) {
          rounded[e] = from_float<T>(elements[e] * inverse_rms * factors[e]);
          largest = fmaxf(largest, fabsf(to_float(rounded[e])));
        }
        y[v] = reinterpret_cast<const uint4&>(rounded);
      }
    }
    float scale = static_scale;
    if (!BLOCKS && !(static_scale > 0.0f)) scale = scale_for(largest_of_warps(largest));
#pragma unroll 1
    for (int first = 0; first < vectors; first += WARP_SIZE) {  // whole warps: half of one has a step
      const int v = first + lane;
      const bool valid = v < vectors;
      float elements[SEGMENT] = {};
      if (valid) floats_of(y[v], elements);
      if constexpr (BLOCKS) {
        float of_step = largest_of(elements);
#pragma unroll
        for (int distance = ROW_VECTORS / 2; distance > 0; distance /= 2) {
          of_step = fmaxf(of_step, __shfl_xor_sync(FULL_WARP, of_step, distance));
        }
        scale = static_scale > 0.0f ? static_scale : scale_for(of_step);
        if (valid && v % ROW_VECTORS == 0) step_scales[v / ROW_VECTORS] = scale;
      }
      if (!valid) continue;
      const uint2 codes = e4m3_codes(elements, scale);
      y[v] = make_uint4(unpack_e4m3(codes.x), unpack_e4m3(codes.x >> 16), unpack_e4m3(codes.y),
                        unpack_e4m3(codes.y >> 16));
    }
    return BLOCKS ? 1.0f : scale;
  }

 private:
  static __device__ __forceinline__ void floats_of(const uint4& raw, float (&elements)[SEGMENT]) {
    const Vec<T, SEGMENT> vector = reinterpret_cast<const Vec<T, SEGMENT>&>(raw);
#pragma unroll
    for (int e = 0; e < SEGMENT; ++e) elements[e] = to_float(vector[e]);
  }
  // Of all threads, in the order of warps.
  __device__ __forceinline__ float sum_of_warps(float value) const {
    value = warp_sum(value);
    if (lane_of_thread() == 0) sums[warp_of_thread()] = value;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums[w];
    return sum;
  }
  __device__ __forceinline__ float largest_of_warps(float value) const {
    value = warp_max(value);
    if (lane_of_thread() == 0) maxima[warp_of_thread()] = value;
    __syncthreads();
    float largest = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, maxima[w]);
    return largest;
  }
};

// This warp's sums of a tile over its steps of k.
template <typename V, bool BLOCKS>
class Fp8Consumer {
  static constexpr int WORDS = 4;  // of a lane, of 16 e4m3 of a row

 public:
  __device__ __forceinline__ Fp8Consumer(const BlockUnits<V::UNITS>& units, const float* x_scales,
                                         const float* weight_scales, const float* step_scales,
                                         float row_scale, int num_rows, int in_features)
      : units_(units),
        x_scales_(x_scales),
        weight_scales_(weight_scales),
        step_scales_(step_scales),
        row_scale_(row_scale),
        num_rows_(num_rows),
        num_blocks_(ceil_div(in_features, STEP_ELEMENTS)) {}

  __device__ __forceinline__ void begin(int tile_unit, int gated) {
#pragma unroll
    for (int i = 0; i < V::UNITS * V::MMAS_M * 4; ++i) (&sums_[0][0][0])[i] = 0.0f;
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
      const bool is_up = gated && u >= V::UNITS / 2;
      const int unit = tile_unit + (is_up ? u - V::UNITS / 2 : u);
      rows_[u] = unit < units_.end ? unit * UNIT + (is_up ? units_.features : 0) : -1;
      of_rows_[u] = make_float2(1.0f, 1.0f);
      const int in_unit = lane_of_thread() % 4 * 2;
      if (!BLOCKS && rows_[u] >= 0 && unit * UNIT + in_unit < units_.features) {
        of_rows_[u] = *reinterpret_cast<const float2*>(weight_scales_ + rows_[u] + in_unit);
      }
    }
  }

  // Add one step's products from the ring's next stage; `y` is the row that is RESIDENT.
  __device__ __forceinline__ void take_step(const uint4* ring, const uint4* y, int step) {
    copy_async_wait<V::STAGES - 1>();
    const uint4* const stage = ring + slot_ * V::LOADS * THREADS + threadIdx.x;
    float of_x[2 * V::MMAS_M], of_weight[V::UNITS];
    if constexpr (BLOCKS) load_scales(of_x, of_weight, step);
    unsigned tokens[V::HALVES][V::GROUPS][2 * WORDS];
#pragma unroll
    for (int half = 0; half < V::HALVES; ++half) {
#pragma unroll
      for (int i = 0; i < V::GROUPS; ++i) {
        if constexpr (V::RESIDENT) {  // for all 8 rows; only the first is stored
          const uint4* const vectors =
              y + step * ROW_VECTORS + half * (ROW_VECTORS / HALVES) + lane_of_thread() % 4 * 2;
          reinterpret_cast<uint4*>(tokens[half][i])[0] = vectors[0];
          reinterpret_cast<uint4*>(tokens[half][i])[1] = vectors[1];
        } else {
          unpack(stage[((V::UNITS + i) * V::HALVES + half) * THREADS], tokens[half][i]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
      float products[V::MMAS_M][4] = {};
#pragma unroll
      for (int half = 0; half < V::HALVES; ++half) {
        unsigned w[2 * WORDS];
        unpack(stage[(u * V::HALVES + half) * THREADS], w);
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
#pragma unroll
          for (int i = 0; i < V::MMAS_M; ++i) {
            constexpr int LAST = V::GROUPS - 1;
            const unsigned (&low)[2 * WORDS] = tokens[half][i * 2];
            const unsigned (&high)[2 * WORDS] = tokens[half][min(i * 2 + 1, LAST)];
            const bool has_high = i * 2 + 1 < V::GROUPS;
            mma_m16n8k16<__half>(BLOCKS ? products[i] : sums_[u][i],
                                 {low[word * 2], has_high ? high[word * 2] : 0, low[word * 2 + 1],
                                  has_high ? high[word * 2 + 1] : 0},
                                 {w[word * 2], w[word * 2 + 1]});
          }
        }
      }
      if constexpr (BLOCKS) {
#pragma unroll
        for (int i = 0; i < V::MMAS_M * 4; ++i) {
          float* const sum = &sums_[u][0][0] + i;
          *sum = fmaf(products[i / 4][i % 4], of_x[i / 2] * of_weight[u], *sum);
        }
      }
    }
  }
  __device__ __forceinline__ void advance() { slot_ = slot_ + 1 == V::STAGES ? 0 : slot_ + 1; }

  // partial [WARPS][UNITS][GROUPS][WARP_SIZE]: pairs of sums, with their scales.
  __device__ __forceinline__ void share_sums(float2* partial) const {
    float of_x[V::GROUPS];
#pragma unroll
    for (int i = 0; i < V::GROUPS; ++i) {
      const int token = i * 8 + row_of_lane();
      of_x[i] = row_scale_;
      if (!BLOCKS && !V::RESIDENT && token < num_rows_) of_x[i] = load_updated(x_scales_ + token);
    }
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
#pragma unroll
      for (int i = 0; i < V::GROUPS; ++i) {
        const float (&sums)[4] = sums_[u][i / 2];
        const float2 pair = make_float2(sums[i % 2 * 2] * (of_x[i] * of_rows_[u].x),
                                        sums[i % 2 * 2 + 1] * (of_x[i] * of_rows_[u].y));
        if (i * 8 + row_of_lane() < num_rows_) {
          partial[((warp_of_thread() * V::UNITS + u) * V::GROUPS + i) * WARP_SIZE + lane_of_thread()] = pair;
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ void unpack(const uint4& codes, unsigned (&halves)[2 * WORDS]) {
    const unsigned words[WORDS] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      halves[i * 2] = unpack_e4m3(words[i]);
      halves[i * 2 + 1] = unpack_e4m3(words[i] >> 16);
    }
  }

  // Of the 128 elements of a step, which of x is in memory or, where RESIDENT, in shared memory.
  __device__ __forceinline__ void load_scales(float (&of_x)[2 * V::MMAS_M], float (&of_weight)[V::UNITS],
                                              int step) const {
    const int block = min(step * WARPS + warp_of_thread(), num_blocks_ - 1);
#pragma unroll
    for (int i = 0; i < 2 * V::MMAS_M; ++i) {
      const int token = i * 8 + row_of_lane();
      of_x[i] = 0.0f;
      if (V::RESIDENT) {
        if (i == 0) of_x[i] = step_scales_[step];
      } else if (token < num_rows_) {
        of_x[i] = load_updated(x_scales_ + block * num_rows_ + token);
      }
    }
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
      of_weight[u] = rows_[u] < 0 ? 0.0f : weight_scales_[rows_[u] / SCALES * num_blocks_ + block];
    }
  }

  const BlockUnits<V::UNITS>& units_;
  const float* const x_scales_;
  const float* const weight_scales_;
  const float* const step_scales_;
  const float row_scale_;
  const int num_rows_;
  const int num_blocks_;  // of 128 columns
  float sums_[V::UNITS][V::MMAS_M][4];
  int rows_[V::UNITS];        // of the weight, with which units begin, -1 where there is none
  float2 of_rows_[V::UNITS];  // scales of this lane's two rows of a unit, without BLOCKS
  int slot_ = 0;
};
