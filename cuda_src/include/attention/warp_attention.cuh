// Attention of one query by warps: of each head of a group over sixteen keys at a time, and the merging of
// what warps and blocks have found.
#pragma once

#include "attention/attention.cuh"
#include "attention/key_tile.cuh"
#include "generated/decode.cuh"
#include "ptx/mma.cuh"

constexpr float STALE_LOG2 = 8.0f;  // powers of 2 by which scores may pass what they are relative to

// As rescale_factor, in one instruction of the special function unit.
__device__ __forceinline__ float rescale_fast(float maximum, float new_maximum) {
  return maximum == MINUS_INFINITY ? 0.0f : exp2_fast(maximum - new_maximum);
}

// A few floats in a row, 16-byte aligned wherever they lie.
struct Floats {
  float data[MERGED_FLOATS] = {};

  __device__ __forceinline__ float& operator[](int i) { return data[i]; }
  __device__ __forceinline__ float operator[](int i) const { return data[i]; }

  static __device__ __forceinline__ Floats load(const float* source) {
    return from(*reinterpret_cast<const float4*>(source), *reinterpret_cast<const float4*>(source + 4));
  }
  // Past L1, which does not see what other multiprocessors write.
  static __device__ __forceinline__ Floats load_shared_by_multiprocessors(const float* source) {
    return from(__ldcg(reinterpret_cast<const float4*>(source)),
                __ldcg(reinterpret_cast<const float4*>(source + 4)));
  }
  __device__ __forceinline__ void store(float* target) const {
    *reinterpret_cast<float4*>(target) = make_float4(data[0], data[1], data[2], data[3]);
    *reinterpret_cast<float4*>(target + 4) = make_float4(data[4], data[5], data[6], data[7]);
  }

 private:
  static __device__ __forceinline__ Floats from(const float4& a, const float4& b) {
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  }
};

// What parts of the keys give together, added up in their order: a few elements of the weighted values of a
// head, and the sum of the weights, both relative to the maximum so far.
struct Merged {
  Floats values;
  float maximum = MINUS_INFINITY;
  float sum = 0.0f;

  __device__ __forceinline__ void add(const Floats& part_values, float part_maximum, float part_sum) {
    const float renewed = fmaxf(maximum, part_maximum);
    const float own = rescale_fast(maximum, renewed);
    const float added = rescale_fast(part_maximum, renewed);
    maximum = renewed;
    sum = fmaf(sum, own, __fmul_rn(part_sum, added));
#pragma unroll
    for (int e = 0; e < MERGED_FLOATS; ++e)
      values[e] = fmaf(values[e], own, __fmul_rn(part_values[e], added));
  }
  // A key of no value whose score is that of a head's sink.
  template <typename T>
  __device__ __forceinline__ void add_sink(T sink) {
    add(Floats(), sink_score(sink), 1.0f);
  }
  template <typename T>
  __device__ __forceinline__ void store(T* out) const {
    const float inverse = reciprocal_fast(sum);
    Vec<T, MERGED_FLOATS> rounded;
#pragma unroll
    for (int e = 0; e < MERGED_FLOATS; ++e) rounded[e] = from_float<T>(values[e] * inverse);
    rounded.store(out);
  }
};

// One warp's softmax over the keys that it was given, times their values, for up to GROUP_ROWS heads.
//
// Of a matrix's rows and columns a lane holds those numbered by lane / 4 and lane % 4 (ptx/mma.cuh). Queries
// are a left operand whose rows 8 to 15 are zeros: scores have a row a head, a column a key. Outputs have a
// row an element and a column a head, so that there is room for 8 heads and no more. Rows of shared memory
// are padded by 16 bytes, so that eight of them fill all banks.
template <typename T, int HEAD_DIM, typename Cached = T>
struct WarpAttention {
  using Tile = KeyTile<T, Cached, HEAD_DIM>;
  using Operand = typename Tile::Operand;
  static constexpr int PITCH = Tile::PITCH;
  static constexpr int MERGE_PITCH = HEAD_DIM + MERGE_PADDING;
  static constexpr int STEPS = HEAD_DIM / 16;
  // Rows 8 to 15 of queries are those of the next 16 elements instead of zeros: of every second product they
  // are the ones whose scores count, and no registers have to be set to 0 before each.
  static constexpr bool PAIRED = IS_E4M3<Cached>;
  static_assert(sizeof(T) == 2, "tensor-core attention takes bfloat16 or float16");
  static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "head_dim must be a multiple of 16 and at most 256");
  static_assert(IS_E4M3<Cached> || Tile::BYTES >= GROUP_ROWS * MERGE_PITCH * sizeof(float),
                "a warp's output must fit into a tile of keys and values");

  unsigned queries[STEPS + STEPS % 2][2];
  float outputs[HEAD_DIM / 16][4] = {};
  float maximum = MINUS_INFINITY;  // of head lane / 4, or somewhat less
  float sum = 0.0f;                // of head lane / 4, this lane's keys

  // tile_q [num_heads, PITCH] in shared memory.
  __device__ __forceinline__ WarpAttention(const Operand* tile_q, int num_heads) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; ++d) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Operand* const from = tile_q + lane / 4 * PITCH + d * 16 + r * 8 + lane % 4 * 2;
        queries[d][r] = lane / 4 < num_heads ? *reinterpret_cast<const unsigned*>(from) : 0;
      }
    }
    if constexpr (STEPS % 2 == 1) queries[STEPS][0] = queries[STEPS][1] = 0;
  }

  // `tile` has the keys from `begin` on, of which those from oldest_key to key_end - 1 are seen; the values
  // of others are finite. CAPPED scores s become cap_log2 * tanh(s).
  template <bool CAPPED>
  __device__ __forceinline__ void add(Tile tile, int begin, int oldest_key, int key_end, float scale_log2,
                                      float cap_log2) {
    const int lane = threadIdx.x % WARP_SIZE;
    float scores[2][2][4] = {};  // keys 0 to 7 and 8 to 15, each in two sums
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; ++d) {
      const unsigned (&even)[2] = queries[d / 2 * 2], (&odd)[2] = queries[d / 2 * 2 + 1];
      const unsigned a[4] = {PAIRED ? even[0] : queries[d][0], PAIRED ? odd[0] : 0u,
                             PAIRED ? even[1] : queries[d][1], PAIRED ? odd[1] : 0u};
      unsigned b[4];
      tile.load_keys(d, b);
      mma_m16n8k16<Operand>(scores[0][d % 2], a, {b[0], b[1]});
      mma_m16n8k16<Operand>(scores[1][d % 2], a, {b[2], b[3]});
    }
    float score[4];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      score[s] = (scores[s / 2][0][s % 2] + scores[s / 2][1][s % 2 + (PAIRED ? 2 : 0)]) * scale_log2;
      if constexpr (CAPPED) score[s] = soft_capped(score[s], cap_log2);
    }
    if (begin < oldest_key || begin + WARP_KEYS > key_end) {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const int key = begin + s / 2 * 8 + lane % 4 * 2 + s % 2;
        if (key < oldest_key || key >= key_end) score[s] = MINUS_INFINITY;
      }
    }

    // All is relative to a maximum that is renewed where a score passes it by far.
    const float highest = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
    if (__any_sync(FULL_WARP, highest > maximum + STALE_LOG2)) {
      float renewed = fmaxf(highest, __shfl_xor_sync(FULL_WARP, highest, 1));
      renewed = fmaxf(maximum, fmaxf(renewed, __shfl_xor_sync(FULL_WARP, renewed, 2)));
      const float factor = rescale_fast(maximum, renewed);
      maximum = renewed;
      sum *= factor;
      const float first = __shfl_sync(FULL_WARP, factor, lane % 4 * 8);
      const float second = __shfl_sync(FULL_WARP, factor, lane % 4 * 8 + 4);
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 16; ++d) {
        outputs[d][0] *= first;
        outputs[d][1] *= second;
        outputs[d][2] *= first;
        outputs[d][3] *= second;
      }
    }
    const float offset = maximum == MINUS_INFINITY ? 0.0f : maximum;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      score[s] = exp2_fast(score[s] - offset);
      sum += score[s];
    }
    // The scores' layout is that of a right operand with a row a key.
    const unsigned weights[2] = {pack<Operand>(score[0], score[1]), pack<Operand>(score[2], score[3])};
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; ++d) {
      unsigned a[4];
      tile.load_values(d, a);
      mma_m16n8k16<Operand>(outputs[d], a, weights);
    }
  }

  // Leave the heads' outputs [num_heads, MERGE_PITCH], times the values' scale, maxima and sums in shared
  // memory and begin anew.
  __device__ __forceinline__ void finish(float* merged, float (&maxima)[GROUP_ROWS],
                                         float (&sums)[GROUP_ROWS], int num_heads, float value_scale) {
    const int lane = threadIdx.x % WARP_SIZE;
    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
    sum += __shfl_xor_sync(FULL_WARP, sum, 2);
    if (lane % 4 == 0) {
      maxima[lane / 4] = maximum;
      sums[lane / 4] = sum;
    }
    Tile::template move_outputs<MERGE_PITCH>(merged, outputs, num_heads, value_scale);
    maximum = MINUS_INFINITY;
    sum = 0.0f;
  }
};

// What WARPS warps have left of `head` from element d on, `stride` floats apart, relative to `highest`;
// `total` is the sum of the weights.
template <int WARPS, int ROWS>
__device__ __forceinline__ Floats merge_warps(const float* merged, int stride,
                                              const float (&maxima)[WARPS][ROWS],
                                              const float (&sums)[WARPS][ROWS], int head, float& highest,
                                              float& total) {
  highest = MINUS_INFINITY;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, maxima[w][head]);
  total = 0.0f;
  Floats values;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const float factor = rescale_fast(maxima[w][head], highest);
    total = fmaf(sums[w][head], factor, total);
    const auto part = Floats::load(merged + w * stride);
#pragma unroll
    for (int e = 0; e < MERGED_FLOATS; ++e) values[e] = fmaf(part[e], factor, values[e]);
  }
  return values;
}
