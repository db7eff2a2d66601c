// The parts of a router of few tokens: its product, of which each block of a cluster has some experts, and
// the order of pairs by expert.
#pragma once

#include "cluster.cuh"
#include "decode_product.cuh"
#include "expert_choice.cuh"
#include "generated/route_rows.cuh"

// Constants of a variant.
template <typename Element, int MAX_TOKENS, int UNITS_A_BLOCK, int ROW_HALVES>
struct RouterVariant {
  using T = Element;
  static constexpr int TOKENS = MAX_TOKENS;     // of a cluster
  static constexpr int UNITS = UNITS_A_BLOCK;   // of 8 experts
  static constexpr int HALVES = ROW_HALVES;     // that a warp has of a row: every WARPS-th
  static constexpr int GROUPS = TOKENS / 8;     // of 8 tokens
  static constexpr int EXPERTS = UNITS * UNIT;  // of a block
  static constexpr int ALL_EXPERTS = EXPERTS * ROUTER_BLOCKS;
  static constexpr int PIECES = GROUPS * UNITS * WARP_SIZE;  // pairs of sums of a warp
  static_assert(TOKENS == 8 || TOKENS == 16, "an mma has 16 rows of x, of which 8 may be left out");
  static_assert(PIECES <= THREADS, "a thread adds up one pair of sums");

  // First element that this lane has of a half.
  static __device__ __forceinline__ int lane_k(int half) {
    return (half * WARPS + warp_of_thread()) * HALF_K + lane_of_thread() % 4 * SEGMENT;
  }
};

// This lane's part of a cluster's rows of x, in registers, and what the norm makes of them.
template <typename V>
struct RouterRows {
  using T = typename V::T;
  using Vector = Vec<T, SEGMENT>;
  uint4 parts[V::GROUPS][V::HALVES];

  // Of the `count` rows at x, zeros beyond them.
  __device__ __forceinline__ void load(const T* x, int count, int in_features) {
#pragma unroll
    for (int g = 0; g < V::GROUPS; ++g) {
      const int row = g * 8 + row_of_lane();
#pragma unroll
      for (int h = 0; h < V::HALVES; ++h) {
        parts[g][h] = make_uint4(0, 0, 0, 0);
        if (row < count && V::lane_k(h) < in_features) {
          load_past_l1(parts[g][h], x + static_cast<long long>(row) * in_features + V::lane_k(h));
        }
      }
    }
  }

  // This warp's sums of squares.
  __device__ __forceinline__ void share_squares(float (&squares)[WARPS][V::TOKENS]) const {
#pragma unroll
    for (int g = 0; g < V::GROUPS; ++g) {
      float sum = 0.0f;
#pragma unroll
      for (int h = 0; h < V::HALVES; ++h) sum = add_squares<T>(sum, parts[g][h]);
      sum += __shfl_xor_sync(FULL_WARP, sum, 1);
      sum += __shfl_xor_sync(FULL_WARP, sum, 2);
      if (lane_of_thread() % 4 == 0) squares[warp_of_thread()][g * 8 + row_of_lane()] = sum;
    }
  }

  // x / sqrt(mean(x^2) + eps) * norm, rounded. `gains`: this warp's vectors of the norm's weight.
  __device__ __forceinline__ void normalise(const float (&squares)[WARPS][V::TOKENS], const uint4* gains,
                                            int in_features, float eps) {
#pragma unroll
    for (int g = 0; g < V::GROUPS; ++g) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += squares[w][g * 8 + row_of_lane()];
      const float inverse_rms = rsqrtf(sum / in_features + eps);
#pragma unroll
      for (int h = 0; h < V::HALVES; ++h) {
        const uint4 raw = gains[h * 4 + lane_of_thread() % 4];
        const Vector gain = reinterpret_cast<const Vector&>(raw);
        Vector values = reinterpret_cast<const Vector&>(parts[g][h]);
#pragma unroll
        for (int e = 0; e < SEGMENT; ++e) {
          values[e] = from_float<T>(to_float(values[e]) * inverse_rms * to_float(gain[e]));
        }
        parts[g][h] = reinterpret_cast<const uint4&>(values);
      }
    }
  }

  __device__ __forceinline__ void store(T* out, int count, int in_features) const {
#pragma unroll
    for (int g = 0; g < V::GROUPS; ++g) {
      const int row = g * 8 + row_of_lane();
#pragma unroll
      for (int h = 0; h < V::HALVES; ++h) {
        if (row < count && V::lane_k(h) < in_features) {
          T* const to = out + static_cast<long long>(row) * in_features + V::lane_k(h);
          *reinterpret_cast<uint4*>(to) = parts[g][h];
        }
      }
    }
  }
};

// The product of the rows by the router's weights of this block's experts.
template <typename V>
struct RouterProduct {
  using T = typename V::T;
  uint4* weights;  // [UNITS][HALVES][THREADS]: what each lane gives to the tensor cores
  int first;       // of the block's experts

  // One group of copies.
  __device__ __forceinline__ void load(const T* router, int num_experts, int in_features) const {
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
      const int expert = first + u * UNIT + row_of_lane();
      const T* const from = router + static_cast<long long>(expert) * in_features;
#pragma unroll
      for (int h = 0; h < V::HALVES; ++h) {
        const bool valid = expert < num_experts && V::lane_k(h) < in_features;
        copy_async_16(weights + (u * V::HALVES + h) * THREADS + threadIdx.x,
                      valid ? from + V::lane_k(h) : router, valid);
      }
    }
    copy_async_commit();
  }

  // partial [WARPS][UNITS][GROUPS][WARP_SIZE]: pairs of this warp's sums.
  __device__ __forceinline__ void multiply(const RouterRows<V>& rows, float2* partial) const {
    float sums[V::UNITS][2][4] = {};  // two chains, which hide an mma's latency
#pragma unroll
    for (int h = 0; h < V::HALVES; ++h) {
      const uint4 low = rows.parts[0][h];
      const uint4 high = V::GROUPS > 1 ? rows.parts[V::GROUPS - 1][h] : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int u = 0; u < V::UNITS; ++u) {
        const uint4 w = weights[(u * V::HALVES + h) * THREADS + threadIdx.x];
        mma_m16n8k16<T>(sums[u][0], {low.x, high.x, low.y, high.y}, {w.x, w.y});
        mma_m16n8k16<T>(sums[u][1], {low.z, high.z, low.w, high.w}, {w.z, w.w});
      }
    }
#pragma unroll
    for (int u = 0; u < V::UNITS; ++u) {
#pragma unroll
      for (int g = 0; g < V::GROUPS; ++g) {
        partial[warp_of_thread() * V::PIECES + (u * V::GROUPS + g) * WARP_SIZE + lane_of_thread()] =
            make_float2(sums[u][0][g * 2] + sums[u][1][g * 2], sums[u][0][g * 2 + 1] + sums[u][1][g * 2 + 1]);
      }
    }
  }

  // The logits of the block's experts, all warps' sums in order, to `logits` [TOKENS][ALL_EXPERTS].
  __device__ __forceinline__ void add_up(const float2* partial, float* logits) const {
    if (threadIdx.x >= V::PIECES) return;
    float2 sum = partial[threadIdx.x];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) {
      const float2 other = partial[w * V::PIECES + threadIdx.x];
      sum.x += other.x;
      sum.y += other.y;
    }
    const int unit = warp_of_thread() / V::GROUPS;
    const int token = warp_of_thread() % V::GROUPS * 8 + row_of_lane();
    const int expert = first + unit * UNIT + lane_of_thread() % 4 * 2;
    *reinterpret_cast<float2*>(logits + token * V::ALL_EXPERTS + expert) = sum;
  }
};

// offsets, pairs and places of the pairs whose experts are `experts` [num_pairs]; `keys`: shared memory of as
// many words, to the next four. A pair's place is the number of keys below its own, expert and pair.
__device__ __forceinline__ void order_pairs(const int* experts, unsigned* keys, int num_pairs,
                                            int num_experts, int* offsets, int* pairs, int* places) {
  constexpr int PAIR_BITS = 16;
  const int fours = ceil_div(num_pairs, 4);
  for (int i = threadIdx.x; i < fours * 4; i += THREADS) {
    keys[i] = i < num_pairs ? static_cast<unsigned>(experts[i]) << PAIR_BITS | i : ~0u;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_experts + num_pairs; i += THREADS) {
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
