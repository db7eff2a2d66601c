// What follows the sums of few rows' products by experts' weights, whatever the form of the weights.
#pragma once

#include "generated/expert_decode.cuh"
#include "linear/decode_product.cuh"
#include "swiglu.cuh"

// Adds the warps' sums and the bias, and multiplies the gate, as DecodeEpilogue. `Tiles` are those of a
// block, with the features of the weight (out_features), of the result (features), and the units of a tile
// (a_tile).
template <typename V, typename Tiles>
struct ExpertEpilogue {
  using T = typename V::T;

  const Tiles& tiles;
  const T* bias;
  T* out;
  int activation;

  template <typename Tile>
  __device__ __forceinline__ void store(const Tile& tile, const float2* partial) const {
#pragma unroll
    for (int i = 0; i < V::ITEMS; ++i) {
      const int index = i * THREADS + threadIdx.x;
      const int unit = index / WARP_SIZE / V::GROUPS;
      const int token = index / WARP_SIZE % V::GROUPS * 8 + row_of_lane();
      const int column = (tile.column * tiles.a_tile + unit) * UNIT + lane_of_thread() % 4 * 2;
      if (unit >= tiles.a_tile || token >= tile.rows || column >= tiles.features) continue;
      const long long first = static_cast<long long>(tile.expert) * tiles.out_features + column;
      float2 result = with_bias(total(partial + index), first);
      if (activation != EXPERT_NONE) {
        const float2 up = with_bias(total(partial + (index + tiles.a_tile * V::GROUPS * WARP_SIZE)),
                                    first + tiles.features);
        if (activation == EXPERT_SILU) {
          result.x = up.x * __fdividef(result.x, 1.0f + __expf(-result.x));
          result.y = up.y * __fdividef(result.y, 1.0f + __expf(-result.y));
        } else {
          result.x = clamped_swiglu(result.x, up.x);
          result.y = clamped_swiglu(result.y, up.y);
        }
      }
      const Vec<T, 2> pair = {from_float<T>(result.x), from_float<T>(result.y)};
      pair.store(out + static_cast<long long>(tile.row0 + token) * tiles.features + column);
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
