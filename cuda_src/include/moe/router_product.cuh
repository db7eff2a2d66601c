// The parts of a router of few tokens: its product, of which each block of a cluster has some experts, and
// the order of pairs by expert.
#pragma once

#include "cluster.cuh"
#include "generated/route_rows.cuh"
#include "linear/decode_product.cuh"
#include "moe/expert_choice.cuh"

// Constants of a variant.
template <typename Element, int MAX_TOKENS, int UNITS_A_BLOCK, int ROW_HALVES>
struct RouterVariant {
  using T = Element;
  static constexpr int TOKENS = MAX_TOKENS;     // of a cluster
  static constexpr int UNITS = UNITS_A_BLOCK;   // of 8 experts
  static constexpr int HALVES = ROW_HALVES;     // that a warp has of a row: every WARPS-th
  static constexpr int EXPERTS = UNITS * UNIT;  // of a block
  static constexpr int ALL_EXPERTS = EXPERTS * ROUTER_BLOCKS;
  static constexpr int PIECES = UNITS * WARP_SIZE;  // pairs of sums of a warp
  static constexpr int GROUPS =
      ceil_div(TOKENS, 8);  // of 8 tokens, for each of which a block has WARPS warps
  static_assert(TOKENS == 1 || TOKENS == 8 || TOKENS == 16,
                "an mma has 16 rows of x, of which 8 are left out");
  static_assert(HALVES >= 8 && HALVES <= 16, "squares are added in a tree of eight");
  static_assert(PIECES <= THREADS, "a thread adds up one pair of sums");

  static __device__ __forceinline__ int thread_of_group() {
    return GROUPS > 1 ? threadIdx.x % THREADS : threadIdx.x;
  }
  static __device__ __forceinline__ int warp_of_group() {
    return GROUPS > 1 ? warp_of_thread() % WARPS : warp_of_thread();
  }
  static __device__ __forceinline__ int group() { return GROUPS > 1 ? warp_of_thread() / WARPS : 0; }
  static __device__ __forceinline__ int token() { return group() * 8 + row_of_lane(); }  // of this lane

  // First element that this lane has of a half.
  static __device__ __forceinline__ int lane_k(int half) {
    return (half * WARPS + warp_of_group()) * HALF_K + lane_of_thread() % 4 * SEGMENT;
  }
};

// x * inverse_rms * gain, rounded.
template <typename T>
__device__ __forceinline__ uint4 normalised_vector(const uint4& x, float inverse_rms, const uint4& gain) {
  using Vector = Vec<T, SEGMENT>;
  Vector values = reinterpret_cast<const Vector&>(x);
#pragma unroll
  for (int e = 0; e < SEGMENT; ++e) {
    const float factor = to_float(reinterpret_cast<const Vector&>(gain)[e]);
    values[e] = from_float<T>(to_float(values[e]) * inverse_rms * factor);
  }
  return reinterpret_cast<const uint4&>(values);
}

// 1 / sqrt(mean(x^2) + eps) of a row.
template <typename V>
__device__ __forceinline__ float inverse_rms_of(const float (&squares)[WARPS][V::TOKENS], int row,
                                                int in_features, float eps) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) sum += squares[w][row];
  return rsqrtf(sum / in_features + eps);
}

// This lane's part of a group's rows of x, in registers, and what the norm makes of them.
template <typename V>
struct RouterRows {
  using T = typename V::T;
  uint4 parts[V::HALVES];

  // Of the `count` rows at x, zeros beyond them.
  __device__ __forceinline__ void load(const T* x, int count, int in_features) {
    const int row = V::token();
#pragma unroll
    for (int h = 0; h < V::HALVES; ++h) {
      parts[h] = make_uint4(0, 0, 0, 0);
      if (row < count && V::lane_k(h) < in_features) {
        load_past_l1(parts[h], x + static_cast<long long>(row) * in_features + V::lane_k(h));
      }
    }
  }

  // This warp's sums of squares: of halves, then of eight and of four by pairs.
  __device__ __forceinline__ void share_squares(float (&squares)[WARPS][V::TOKENS]) const {
    float sums[V::HALVES];
#pragma unroll
    for (int h = 0; h < V::HALVES; ++h) sums[h] = add_squares<T>(0.0f, parts[h]);
#pragma unroll
    for (int h = 8; h < V::HALVES; ++h) sums[h - 8] += sums[h];
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
#pragma unroll
      for (int h = 0; h < 8; h += 2 * distance) sums[h] += sums[h + distance];
    }
    sums[0] += __shfl_xor_sync(FULL_WARP, sums[0], 1);
    sums[0] += __shfl_xor_sync(FULL_WARP, sums[0], 2);
    if (lane_of_thread() % 4 == 0) squares[V::warp_of_group()][V::token()] = sums[0];
  }

  // `gains`: this warp's vectors of the norm's weight.
  __device__ __forceinline__ void normalise(const float (&squares)[WARPS][V::TOKENS], const uint4* gains,
                                            int in_features, float eps) {
    const float inverse_rms = inverse_rms_of<V>(squares, V::token(), in_features, eps);
#pragma unroll
    for (int h = 0; h < V::HALVES; ++h) {
      parts[h] = normalised_vector<T>(parts[h], inverse_rms, gains[h * 4 + lane_of_thread() % 4]);
    }
  }

  __device__ __forceinline__ void store(T* out, int count, int in_features) const {
    const int row = V::token();
#pragma unroll
    for (int h = 0; h < V::HALVES; ++h) {
      if (row < count && V::lane_k(h) < in_features) {
        T* const to = out + static_cast<long long>(row) * in_features + V::lane_k(h);
        *reinterpret_cast<uint4*>(to) = parts[h];
      }
    }
  }
};

// A warp's part of one row, a lane every 32nd vector: the same sums as those of `RouterRows`, by an eighth of
// the instructions.
template <typename V>
struct RouterRow {
  using T = typename V::T;
  static constexpr int VECTORS = V::HALVES * 4, PARTS = ceil_div(VECTORS, WARP_SIZE);
  static_assert(PARTS <= 2, "eight halves, then those behind them");
  uint4 parts[PARTS];

  static __device__ __forceinline__ int vector(int part) { return part * WARP_SIZE + lane_of_thread(); }
  static __device__ __forceinline__ int first_of(int part) {
    return (vector(part) / 4 * WARPS + warp_of_thread()) * HALF_K + lane_of_thread() % 4 * SEGMENT;
  }
  static __device__ __forceinline__ bool has(int part, int in_features) {
    return vector(part) < VECTORS && first_of(part) < in_features;
  }

  __device__ __forceinline__ void load(const T* x, int in_features) {
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      parts[p] = make_uint4(0, 0, 0, 0);
      if (has(p, in_features)) load_past_l1(parts[p], x + first_of(p));
    }
  }

  __device__ __forceinline__ void share_squares(float (&squares)[WARPS][V::TOKENS]) const {
    float sum = add_squares<T>(0.0f, parts[0]);
    if (PARTS > 1) sum += add_squares<T>(0.0f, parts[PARTS - 1]);
#pragma unroll
    for (int distance = 4; distance < WARP_SIZE; distance *= 2) {
      sum += __shfl_xor_sync(FULL_WARP, sum, distance);
    }
    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
    sum += __shfl_xor_sync(FULL_WARP, sum, 2);
    if (lane_of_thread() == 0) squares[warp_of_thread()][0] = sum;
  }

  __device__ __forceinline__ void normalise(const float (&squares)[WARPS][V::TOKENS], const uint4* gains,
                                            int in_features, float eps) {
    const float inverse_rms = inverse_rms_of<V>(squares, 0, in_features, eps);
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      if (vector(p) < VECTORS) parts[p] = normalised_vector<T>(parts[p], inverse_rms, gains[vector(p)]);
    }
  }

  __device__ __forceinline__ void store(T* out, int in_features) const {
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      if (has(p, in_features)) *reinterpret_cast<uint4*>(out + first_of(p)) = parts[p];
    }
  }

  // As the tensor cores take them; by way of `shared`, of as many vectors as the warp has.
  __device__ __forceinline__ void spread(uint4* shared, RouterRows<V>& rows) const {
    __syncwarp();  // who has normalised has read its gains there
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      if (vector(p) < VECTORS) shared[vector(p)] = parts[p];
    }
    __syncwarp();
#pragma unroll
    for (int h = 0; h < V::HALVES; ++h) {
      rows.parts[h] = row_of_lane() == 0 ? shared[h * 4 + lane_of_thread() % 4] : make_uint4(0, 0, 0, 0);
    }
  }
};

// The product of the rows by the router's weights of this block's experts.
template <typename V>
struct RouterProduct {
  using T = typename V::T;
  uint4* weights;  // [UNITS][HALVES][THREADS]: what each lane gives to the tensor cores
  int first;       // of the block's experts

  // One group of copies; each group of warps starts its share.
  __device__ __forceinline__ void load(const T* router, int num_experts, int in_features) const {
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
      const int expert = first + u * UNIT + row_of_lane();
      const T* const from = router + static_cast<long long>(expert) * in_features;
#pragma unroll
      for (int h = 0; h < V::HALVES; ++h) {
        if (h % V::GROUPS != V::group()) continue;
        const bool valid = expert < num_experts && V::lane_k(h) < in_features;
        copy_async_16(weights + (u * V::HALVES + h) * THREADS + V::thread_of_group(),
                      valid ? from + V::lane_k(h) : router, valid);
      }
    }
    copy_async_commit();
  }

  // What this lane gives of a unit and a half.
  __device__ __forceinline__ const uint4& at(int unit, int half) const {
    return weights[(unit * V::HALVES + half) * THREADS + V::thread_of_group()];
  }
  __device__ __forceinline__ void hold(uint4 (&held)[V::UNITS][V::HALVES]) const {
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
#pragma unroll
      for (int h = 0; h < V::HALVES; ++h) held[u][h] = at(u, h);
    }
  }

  // partial [GROUPS * WARPS][UNITS][WARP_SIZE]: pairs of this warp's sums. `weight(u, h)`: as `at` has it.
  template <typename Weight>
  static __device__ __forceinline__ void multiply(Weight weight, const RouterRows<V>& rows, float2* partial) {
    float sums[V::UNITS][2][4] = {};  // two chains, which hide an mma's latency
#pragma unroll
    for (int h = 0; h < V::HALVES; ++h) {
      const uint4 x = rows.parts[h];
#pragma unroll
      for (int u = 0; u < V::UNITS; ++u) {
        const uint4 w = weight(u, h);
        mma_m16n8k16<T>(sums[u][0], {x.x, 0, x.y, 0}, {w.x, w.y});
        mma_m16n8k16<T>(sums[u][1], {x.z, 0, x.w, 0}, {w.z, w.w});
      }
    }
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
      partial[warp_of_thread() * V::PIECES + u * WARP_SIZE + lane_of_thread()] =
          make_float2(sums[u][0][0] + sums[u][1][0], sums[u][0][1] + sums[u][1][1]);
    }
  }

  // The logits of the block's experts, all warps' sums in order, to `logits` [TOKENS][ALL_EXPERTS].
  __device__ __forceinline__ void add_up(const float2* partial, float* logits) const {
    const int piece = V::thread_of_group(), token = V::token();
    if (piece >= V::PIECES || token >= V::TOKENS) return;
    const float2* const of_group = partial + V::group() * WARPS * V::PIECES + piece;
    float2 sum = of_group[0];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) {
      const float2 other = of_group[w * V::PIECES];
      sum.x += other.x;
      sum.y += other.y;
    }
    const int expert = first + V::warp_of_group() * UNIT + lane_of_thread() % 4 * 2;
    *reinterpret_cast<float2*>(logits + token * V::ALL_EXPERTS + expert) = sum;
  }
};

// offsets, pairs and places of the pairs whose experts are `experts` [num_pairs]; `keys`: shared memory of as
// many words, to the next four. A pair's place is the number of keys below its own, expert and pair. For all
// threads of a block of NUM_THREADS.
template <int NUM_THREADS>
__device__ __forceinline__ void order_pairs(const int* experts, unsigned* keys, int num_pairs,
                                            int num_experts, int* offsets, int* pairs, int* places) {
  constexpr int PAIR_BITS = 16;
  const int fours = ceil_div(num_pairs, 4);
  for (int i = threadIdx.x; i < fours * 4; i += NUM_THREADS) {
    keys[i] = i < num_pairs ? static_cast<unsigned>(experts[i]) << PAIR_BITS | i : ~0u;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_experts + num_pairs; i += NUM_THREADS) {
    const int pair = i - num_experts;
    const unsigned key = pair < 0 ? static_cast<unsigned>(i) << PAIR_BITS : keys[pair];
    int below = 0;
#pragma unroll 4
    for (int j = 0; j < fours; ++j) {
      const uint4 others = reinterpret_cast<const uint4*>(keys)[j];
      below += (others.x < key) + (others.y < key) + (others.z < key) + (others.w < key);
    }
    if (pair < 0) {
      offsets[i] = below;
    } else {
      pairs[below] = pair;
      places[pair] = below;
    }
  }
  if (threadIdx.x == 0) offsets[num_experts] = num_pairs;
}
