// Attention of text encoders: every token of a text sees all of it.

#include "attention.cuh"
#include "generated/bidirectional.cuh"

constexpr int TILE_KEYS = WARP_SIZE;
constexpr int MAX_PER_LANE = MAX_HEAD_DIM / WARP_SIZE;

// out = softmax over the text's keys of (q . k * scale), times v; 2^x with log2(e) in the scale; running
// maximum and sum as in "Online normalizer calculation for softmax" (Milakov and Gimelshein 2018).
//   in:  qkv [tokens, 3 * num_heads * head_dim] T: queries, keys and values of all heads
//        cu_seqlens [num_seqs + 1] int
//        scale_log2 = scale * log2(e)
//   out: out [tokens, num_heads * head_dim] T
// Layout: row-major, any alignment; head_dim <= 128.
// Grid: (num_seqs, blocks of 8 queries that cover the longest text, num_heads).
// Block: 256 threads.
// Shared memory: static.
// Unit of work: one warp a query of one head. A block's warps share tiles of 32 keys and values; a lane
// computes one key's score, then every 32nd element of the output.
template <typename T>
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
  for (int d = lane; d < head_dim; d += WARP_SIZE)
    queries[warp][d] = is_query ? to_float(first[query * 3 * width + d]) * scale_log2 : 0.0f;

  float maximum = MINUS_INFINITY;
  float sum = 0.0f;
  float weighted[MAX_PER_LANE] = {};
  for (int key0 = 0; key0 < num_keys; key0 += TILE_KEYS) {
    const int tile_keys = min(TILE_KEYS, num_keys - key0);
    __syncthreads();  // the tile before is no longer in use, and the queries are there
    for (int key = warp; key < tile_keys; key += QUERIES) {
      const T* const source = first + (key0 + key) * 3 * width;
      for (int d = lane; d < head_dim; d += WARP_SIZE) {
        keys[key][d] = to_float(source[width + d]);
        values[key][d] = to_float(source[2 * width + d]);
      }
    }
    __syncthreads();

    float score = MINUS_INFINITY;
    if (lane < tile_keys) {
      score = 0.0f;
      for (int d = 0; d < head_dim; ++d) score = fmaf(queries[warp][d], keys[lane][d], score);
    }
    const float new_maximum = fmaxf(maximum, warp_max(score));
    const float factor = rescale_factor(maximum, new_maximum);
    const float weight = lane < tile_keys ? exp2f(score - new_maximum) : 0.0f;
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
