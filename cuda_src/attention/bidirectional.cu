// Attention of text encoders: every token of a text sees all of it, or what is near on both sides.

#include "attention/attention.cuh"
#include "attention/rope.cuh"
#include "generated/bidirectional.cuh"

constexpr int TILE_KEYS = WARP_SIZE;
constexpr int MAX_PER_LANE = MAX_HEAD_DIM / WARP_SIZE;

// to[i] = factor * z[i], z as in HeadTransform: by one warp. angles is null if rotary_dim is 0.
template <typename T>
__device__ __forceinline__ void load_rotated(const T* head, const float* angles, int head_dim, int rotary_dim,
                                             float factor, float* to) {
  const HeadTransform<MAX_HEAD_DIM, 1, T> transform(nullptr, angles, head_dim, rotary_dim, 0.0f);
  transform(transform.load(head), [&](int d, const Vec<T, 1>& z) { to[d] = to_float(z[0]) * factor; });
}

// out = softmax over the text's keys of (q . k * scale), times v; 2^x with log2(e) in the scale; running
// maximum and sum as in "Online normalizer calculation for softmax" (Milakov and Gimelshein 2018).
//   in:  qkv [tokens, 3 * num_heads * head_dim] T: queries, keys and values of all heads
//        cu_seqlens [num_seqs + 1] int
//        cos_sin [longest text, rotary_dim] float (cosines, then sines) or null if rotary_dim is 0
//        scale_log2 = scale * log2(e)
//        reach: a query sees keys at most this far from it
//   out: out [tokens, num_heads * head_dim] T
// GENERAL: queries and keys are rotated by their place in the text, and `reach` counts; else every query sees
// the whole text.
// Layout: row-major, any alignment; head_dim <= 128.
// Grid: (num_seqs, blocks of 8 queries that cover the longest text, num_heads).
// Block: 256 threads.
// Shared memory: static.
// Unit of work: one warp a query of one head. A block's warps share tiles of 32 keys and values; a lane
// computes one key's score, then every 32nd element of the output.
template <typename T, bool GENERAL>
__global__ void __launch_bounds__(QUERIES* WARP_SIZE)
    bidirectional_attention_kernel(BIDIRECTIONAL_ATTENTION_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  __shared__ float queries[QUERIES][MAX_HEAD_DIM];
  __shared__ float keys[TILE_KEYS][MAX_HEAD_DIM + 1];  // one more, so that lanes read from different banks
  __shared__ float values[TILE_KEYS][MAX_HEAD_DIM];

  const int row = blockIdx.x;
  const int head = blockIdx.z;
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int begin = cu_seqlens[row];
  const int num_keys = cu_seqlens[row + 1] - begin;
  if (static_cast<int>(blockIdx.y) * QUERIES >= num_keys) return;  // the whole block

  const int query = blockIdx.y * QUERIES + warp;
  const bool is_query = query < num_keys;
  const long long width = static_cast<long long>(num_heads) * head_dim;
  const T* const first = qkv + begin * 3 * width + static_cast<long long>(head) * head_dim;
  if (GENERAL && is_query) {
    const float* const angles =
        rotary_dim > 0 ? cos_sin + query * static_cast<long long>(rotary_dim) : nullptr;
    load_rotated(first + query * 3 * width, angles, head_dim, rotary_dim, scale_log2, queries[warp]);
  } else {
    for (int d = lane; d < head_dim; d += WARP_SIZE)
      queries[warp][d] = is_query ? to_float(first[query * 3 * width + d]) * scale_log2 : 0.0f;
  }
  // Keys that one of the block's queries sees.
  const int block_query = blockIdx.y * QUERIES;
  const int first_key = GENERAL ? max(block_query - reach, 0) : 0;
  const int end_key = GENERAL ? min(block_query + QUERIES + reach, num_keys) : num_keys;

  float maximum = MINUS_INFINITY;
  float sum = 0.0f;
  float weighted[MAX_PER_LANE] = {};
  for (int key0 = first_key; key0 < end_key; key0 += TILE_KEYS) {
    const int tile_keys = min(TILE_KEYS, end_key - key0);
    __syncthreads();  // the tile before is no longer in use, and the queries are there
    for (int key = warp; key < tile_keys; key += QUERIES) {
      const T* const source = first + (key0 + key) * 3 * width;
      if (GENERAL) {
        const float* const angles =
            rotary_dim > 0 ? cos_sin + (key0 + key) * static_cast<long long>(rotary_dim) : nullptr;
        load_rotated(source + width, angles, head_dim, rotary_dim, 1.0f, keys[key]);
      }
      for (int d = lane; d < head_dim; d += WARP_SIZE) {
        if (!GENERAL) keys[key][d] = to_float(source[width + d]);
        values[key][d] = to_float(source[2 * width + d]);
      }
    }
    __syncthreads();

    const bool is_seen = lane < tile_keys && (!GENERAL || abs(key0 + lane - query) <= reach);
    float score = MINUS_INFINITY;
    if (is_seen) {
      score = 0.0f;
      for (int d = 0; d < head_dim; ++d) score = fmaf(queries[warp][d], keys[lane][d], score);
    }
    const float new_maximum = fmaxf(maximum, warp_max(score));
    const float factor = rescale_factor(maximum, new_maximum);
    const float weight = is_seen ? exp2f(score - new_maximum) : 0.0f;
    maximum = new_maximum;
    sum = sum * factor + warp_sum(weight);
#pragma unroll
    for (int i = 0; i < MAX_PER_LANE; ++i) weighted[i] *= factor;
    for (int key = 0; key < tile_keys; ++key) {
      const float key_weight = __shfl_sync(FULL_WARP, weight, key);
#pragma unroll
      for (int i = 0; i < MAX_PER_LANE; ++i) {
        const int d = i * WARP_SIZE + lane;
        if (d < head_dim) weighted[i] = fmaf(key_weight, values[key][d], weighted[i]);
      }
    }
  }

  if (!is_query) return;
  T* const target = out + (begin + query) * width + static_cast<long long>(head) * head_dim;
#pragma unroll
  for (int i = 0; i < MAX_PER_LANE; ++i) {
    const int d = i * WARP_SIZE + lane;
    if (d < head_dim) target[d] = from_float<T>(weighted[i] / sum);
  }
}
