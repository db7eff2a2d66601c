// Paged attention for every dtype and head size: float32, and head sizes that the tensor-core kernels
// (prefill.cu, decode.cu) are not made for.

#include "attention/attention.cuh"
#include "attention/cached.cuh"
#include "generated/attention.cuh"

constexpr int MAX_PER_LANE = MAX_HEAD_DIM / WARP_SIZE;

// The row of a token: the last r with cu_seqlens_q[r] <= token.
__device__ __forceinline__ int find_row(const int* cu_seqlens_q, int num_seqs, int token) {
  int low = 0;
  int high = num_seqs;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (cu_seqlens_q[middle] <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// out = softmax over the visible keys of (q . k * scale), times v; 2^x with log2(e) in the scale; running
// maximum and sum as in "Online normalizer calculation for softmax" (Milakov and Gimelshein 2018).
//
// CAPPED scores are cap * tanh(q . k * scale / cap). Tokens after the last row, and rows without context,
// give zeros.
//   in:  q [num_tokens, num_heads * head_dim] T
//        key_cache, value_cache [blocks, num_kv_heads, block_size, head_dim] Cached: T, or e4m3 with
//        kv_scales [2, num_kv_heads] float or null
//        block_tables [*, block_table_width] int
//        table_rows [num_seqs] int, each row's place in block_tables
//        cu_seqlens_q [num_seqs + 1] int
//        context_lens [num_seqs] int
//        scale_log2 = scale * log2(e), or CAPPED scale / cap with cap_log2 = cap * log2(e)
//        sinks [num_heads] T, with SINKS: exp(sinks[h]) is added to the sum that head h's softmax divides by
//   out: out [num_tokens, num_heads * head_dim] T
// Layout: row-major, head_dim <= 256; keys are read in 16-byte vectors where head_dim and the addresses
// allow.
// Grid: (num_tokens, num_heads).
// Block: 128 threads.
// Shared memory: static.
// Unit of work: one block a query token's head. Its warps take every fourth 32 keys; a lane computes one
// key's score, then every 32nd element of the output.
template <typename T, typename Cached, bool CAPPED, bool SINKS>
__global__ void __launch_bounds__(32 * WARPS) paged_attention_kernel(PAGED_ATTENTION_PARAMS(T, Cached)) {
  ASSERT_ELEMENT(T);
  constexpr int VECTOR = VECTOR_SIZE<T>;
  __shared__ __align__(16) float query[MAX_HEAD_DIM];
  __shared__ float merged[WARPS][MAX_HEAD_DIM];
  __shared__ float maxima[WARPS];
  __shared__ float sums[WARPS];

  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int token = blockIdx.x;
  const int head = blockIdx.y;
  const int kv_head = head / (num_heads / num_kv_heads);
  const bool in_row = token < cu_seqlens_q[num_seqs];
  const int row = in_row ? find_row(cu_seqlens_q, num_seqs, token) : 0;
  const int position = in_row ? context_lens[row] - (cu_seqlens_q[row + 1] - token) : -1;
  const int* const block_table =
      position < 0 ? nullptr : block_tables + static_cast<long long>(table_rows[row]) * block_table_width;
  const long long query_offset = (static_cast<long long>(token) * num_heads + head) * head_dim;

  for (int d = threadIdx.x; d < head_dim; d += blockDim.x)
    query[d] = to_float(q[query_offset + d]) * scale_log2;
  __syncthreads();

  const float key_scale = IS_E4M3<Cached> ? cache_scale(kv_scales, 0, num_kv_heads, kv_head) : 1.0f;
  const float value_scale = IS_E4M3<Cached> ? cache_scale(kv_scales, 1, num_kv_heads, kv_head) : 1.0f;
  const bool vectors = !IS_E4M3<Cached> && head_dim % VECTOR == 0 && is_aligned(key_cache);
  float maximum = MINUS_INFINITY;
  float sum = 0.0f;
  float weighted[MAX_PER_LANE] = {};
  const int key_end = position + 1;
  const int key_begin = max(key_end - sliding_window, 0) / WARP_SIZE * WARP_SIZE;
  for (int key0 = key_begin + warp * WARP_SIZE; key0 < key_end; key0 += WARPS * WARP_SIZE) {
    const int key = key0 + lane;
    long long offset = 0;
    float score = MINUS_INFINITY;
    if (is_visible(key, position, sliding_window)) {
      offset =
          static_cast<long long>(cache_row(block_table, key, kv_head, num_kv_heads, block_size)) * head_dim;
      const Cached* const k = key_cache + offset;
      score = 0.0f;
      if constexpr (IS_E4M3<Cached>) {
        for (int d = 0; d < head_dim; ++d) score = fmaf(query[d], floats_of_e4m3(k[d]).x * key_scale, score);
      } else if (vectors) {
        for (int d = 0; d < head_dim; d += VECTOR) {
          const Vec<T, VECTOR> values = Vec<T, VECTOR>::load(k + d);
#pragma unroll
          for (int e = 0; e < VECTOR; ++e) score = fmaf(query[d + e], to_float(values[e]), score);
        }
      } else {
        for (int d = 0; d < head_dim; ++d) score = fmaf(query[d], to_float(k[d]), score);
      }
      if constexpr (CAPPED) score = cap_log2 * tanhf(score);
    }

    const float new_maximum = fmaxf(maximum, warp_max(score));
    if (new_maximum == MINUS_INFINITY) continue;
    const float factor = rescale_factor(maximum, new_maximum);
    const float weight = exp2f(score - new_maximum);
    maximum = new_maximum;
    sum = sum * factor + warp_sum(weight);
#pragma unroll
    for (int i = 0; i < MAX_PER_LANE; ++i) weighted[i] *= factor;
    for (int other = 0; other < min(key_end - key0, WARP_SIZE); ++other) {
      const float other_weight = __shfl_sync(FULL_WARP, weight, other);
      const long long other_offset = __shfl_sync(FULL_WARP, offset, other);
      if (other_weight == 0.0f) continue;
#pragma unroll
      for (int i = 0; i < MAX_PER_LANE; ++i) {
        const int d = i * WARP_SIZE + lane;
        if (d >= head_dim) continue;
        float value;
        if constexpr (IS_E4M3<Cached>) {
          value = floats_of_e4m3(value_cache[other_offset + d]).x * value_scale;
        } else {
          value = to_float(value_cache[other_offset + d]);
        }
        weighted[i] = fmaf(other_weight, value, weighted[i]);
      }
    }
  }

#pragma unroll
  for (int i = 0; i < MAX_PER_LANE; ++i) merged[warp][i * WARP_SIZE + lane] = weighted[i];
  if (lane == 0) {
    maxima[warp] = maximum;
    sums[warp] = sum;
  }
  __syncthreads();
  float total_maximum = MINUS_INFINITY;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) total_maximum = fmaxf(total_maximum, maxima[w]);
  float factors[WARPS];
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    factors[w] = rescale_factor(maxima[w], total_maximum);
    total += sums[w] * factors[w];
  }
  if constexpr (SINKS) total += exp2f(sink_score(sinks[head]) - total_maximum);
  const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
  for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
    float value = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) value = fmaf(merged[w][d], factors[w], value);
    out[query_offset + d] = from_float<T>(value * inverse);
  }
}
