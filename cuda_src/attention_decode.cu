// Paged attention on tensor cores for rows with one query, bound by reading keys and values once.

#include "attention.cuh"
#include "copy.cuh"
#include "mma.cuh"

constexpr int WARP_KEYS = 16;  // keys that a warp handles at a time
constexpr int COMBINE_THREADS = 128;

// How a row's keys are divided. It depends on the row's own length, the window and two constants of the
// server, so a row's result does not depend on the other rows.
struct Splits {
  int first_key;  // a multiple of WARP_KEYS, not after the oldest visible key
  int size;       // keys a split, a multiple of WARP_KEYS
  int count;      // at least 1
};

__device__ __forceinline__ Splits find_splits(int context_len, int sliding_window, int min_split_keys,
                                              int max_splits) {
  const int first_key = max(context_len - sliding_window, 0) / WARP_KEYS * WARP_KEYS;
  const int num_keys = context_len - first_key;
  const int even = ceil_div(ceil_div(num_keys, max_splits), WARP_KEYS) * WARP_KEYS;
  const int size = max(even, min_split_keys);
  return {first_key, size, max(ceil_div(num_keys, size), 1)};
}

// out = softmax over the visible keys of (q . k * scale), times v, for rows with one query. With more than
// one split, each split's normalised output and the log2 of its sum go to partial_out and partial_lse
// (paged_attention_combine_kernel merges them); else straight to out. Rows without context, and the tokens
// after the last row, give zeros.
//
// q [num_tokens, num_heads * HEAD_DIM] T; key_cache, value_cache [blocks, num_kv_heads, block_size, HEAD_DIM]
// T; block_tables [*, block_table_width] int; table_rows [num_seqs] int, each row's place in block_tables;
// cu_seqlens_q [num_seqs + 1] int; context_lens [num_seqs] int; out [num_tokens, num_heads * HEAD_DIM] T;
// partial_out [num_seqs, num_heads, splits, HEAD_DIM] float and partial_lse [num_seqs, num_heads, splits]
// float, or null in a grid of one split. scale_log2 = scale * log2(e), positive. Layout: row-major, q, out
// and the caches 16-byte aligned; num_heads = group * num_kv_heads. Grid: (num_kv_heads * ceil(group / 16),
// num_seqs + 1, splits), splits at least the largest row's count; block: 32 * WARPS threads; shared: WARPS *
// STAGES * 2 * 16 * (HEAD_DIM + 8) * sizeof(T). Rows of shared memory are padded by 16 bytes, so that eight
// of them fill all banks. Unit of work: a block a split of a key/value head's keys, all of its query heads
// (padded to 16, the rows of the tensor cores' tile) together. Warps take 16 keys at a time in turn, each
// with its own ring of STAGES copies, and meet only at the end.
template <typename T, int HEAD_DIM, int WARPS, int STAGES>
__global__ void __launch_bounds__(32 * WARPS)
    paged_attention_decode_kernel(const T* __restrict__ q, const T* __restrict__ key_cache,
                                  const T* __restrict__ value_cache, const int* __restrict__ block_tables,
                                  const int* __restrict__ table_rows, const int* __restrict__ cu_seqlens_q,
                                  const int* __restrict__ context_lens, T* __restrict__ out,
                                  float* __restrict__ partial_out, float* __restrict__ partial_lse,
                                  int num_tokens, int num_seqs, int num_heads, int num_kv_heads,
                                  int block_size, int block_table_width, int sliding_window,
                                  int min_split_keys, int max_splits, float scale_log2) {
  constexpr int GROUP_ROWS = 16;  // query heads of a key/value head that a block handles together
  constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
  constexpr int PITCH = HEAD_DIM + SEGMENT;
  constexpr int MERGE_PITCH = HEAD_DIM + 8;
  constexpr int TILE_ELEMENTS = WARP_KEYS * PITCH;
  static_assert(sizeof(T) == 2, "tensor-core attention takes bfloat16 or float16");
  static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "head_dim must be a multiple of 16 and at most 256");
  static_assert(STAGES * 2 * TILE_ELEMENTS * sizeof(T) >= GROUP_ROWS * MERGE_PITCH * sizeof(float),
                "a warp's output must fit into its stages");

  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ float warp_maxima[WARPS][GROUP_ROWS];
  __shared__ float warp_sums[WARPS][GROUP_ROWS];

  const int row = blockIdx.y;
  const int split = blockIdx.z;
  const int token = cu_seqlens_q[row];
  if (row == num_seqs) {
    const long long begin = static_cast<long long>(token) * num_heads * HEAD_DIM;
    const long long end = static_cast<long long>(num_tokens) * num_heads * HEAD_DIM;
    const int thread = (split * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
    const int num_threads = gridDim.z * gridDim.x * blockDim.x;
    for (long long i = begin + thread; i < end; i += num_threads) out[i] = from_float<T>(0.0f);
    return;
  }
  if (cu_seqlens_q[row + 1] - token != 1) return;
  const int context_len = context_lens[row];
  const Splits splits = find_splits(context_len, sliding_window, min_split_keys, max_splits);
  if (split >= splits.count) return;
  const int key_begin = splits.first_key + split * splits.size;
  const int key_end = min(key_begin + splits.size, context_len);

  const int group = num_heads / num_kv_heads;
  const int kv_head = blockIdx.x % num_kv_heads;
  const int group_begin = blockIdx.x / num_kv_heads * GROUP_ROWS;
  const int head0 = kv_head * group + group_begin;
  const int num_group_heads = min(group - group_begin, GROUP_ROWS);
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;

  // The queries as left operands, straight from memory.
  unsigned queries[HEAD_DIM / 16][4];
  const T* const q_row = q + (static_cast<long long>(token) * num_heads + head0) * HEAD_DIM;
#pragma unroll
  for (int d = 0; d < HEAD_DIM / 16; ++d) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int head = lane / 4 + r % 2 * 8;
      const T* from = q_row + head * HEAD_DIM + d * 16 + r / 2 * 8 + lane % 4 * 2;
      queries[d][r] = head < num_group_heads ? *reinterpret_cast<const unsigned*>(from) : 0;
    }
  }

  // A warp's i-th tile of keys is tile i * WARPS + warp of the split.
  T* const warp_tiles = reinterpret_cast<T*>(shared_memory) + warp * STAGES * 2 * TILE_ELEMENTS;
  const int* const block_table = block_tables + static_cast<long long>(table_rows[row]) * block_table_width;
  const int num_tiles = max(ceil_div(key_end - key_begin - warp * WARP_KEYS, WARPS * WARP_KEYS), 0);
  auto tile_begin = [&](int i) { return key_begin + (i * WARPS + warp) * WARP_KEYS; };
  auto find_key_row = [&](int i) {
    const int key = tile_begin(i) + lane % WARP_KEYS;
    return key < key_end ? cache_row(block_table, key, kv_head, num_kv_heads, block_size) : -1;
  };
  auto load_tile = [&](int i, int key_row) {
    T* const tile_k = warp_tiles + i % STAGES * 2 * TILE_ELEMENTS;
#pragma unroll
    for (int s = 0; s < WARP_KEYS * SEGMENTS / WARP_SIZE; ++s) {
      const int key = (s * WARP_SIZE + lane) / SEGMENTS;
      const int segment = (s * WARP_SIZE + lane) % SEGMENTS;
      const int source_row = __shfl_sync(FULL_WARP, key_row, key);
      const bool valid = source_row >= 0;
      const long long from = static_cast<long long>(max(source_row, 0)) * HEAD_DIM + segment * SEGMENT;
      T* const to = tile_k + key * PITCH + segment * SEGMENT;
      copy_async_16(to, key_cache + from, valid);
      copy_async_16(to + TILE_ELEMENTS, value_cache + from, valid);
    }
  };

  float outputs[HEAD_DIM / 8][4] = {};
  float maxima[2] = {MINUS_INFINITY, MINUS_INFINITY};
  float sums[2] = {};
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < num_tiles) load_tile(i, find_key_row(i));
    copy_async_commit();
  }
  int next_row = find_key_row(STAGES - 1);
  for (int i = 0; i < num_tiles; ++i) {
    if (i + STAGES - 1 < num_tiles) load_tile(i + STAGES - 1, next_row);
    copy_async_commit();
    next_row = find_key_row(i + STAGES);
    copy_async_wait<STAGES - 1>();
    __syncwarp();

    const T* const tile_k = warp_tiles + i % STAGES * 2 * TILE_ELEMENTS;
    const T* const tile_v = tile_k + TILE_ELEMENTS;
    float scores[2][4] = {};
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; ++d) {
      unsigned b[4];
      ldmatrix_x4(b, tile_k + (lane % 8 + lane / 16 * 8) * PITCH + d * 16 + lane / 8 % 2 * 8);
      mma_m16n8k16<T>(scores[0], queries[d], {b[0], b[1]});
      mma_m16n8k16<T>(scores[1], queries[d], {b[2], b[3]});
    }

    unsigned weights[4];  // the scores' layout is that of a left operand
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float maximum = maxima[h];
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        float& score = scores[s / 2][h * 2 + s % 2];
        const int key = tile_begin(i) + s / 2 * 8 + lane % 4 * 2 + s % 2;
        // Keys after the split's end were not loaded; the first tile may begin before the window.
        score = key < key_end && key >= context_len - sliding_window ? score * scale_log2 : MINUS_INFINITY;
        maximum = fmaxf(maximum, score);
      }
      maximum = fmaxf(maximum, __shfl_xor_sync(FULL_WARP, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(FULL_WARP, maximum, 2));
      const float offset = maximum == MINUS_INFINITY ? 0.0f : maximum;
      const float factor = exp2_fast(maxima[h] - offset);
      maxima[h] = maximum;
      sums[h] *= factor;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float first = exp2_fast(scores[j][h * 2] - offset);
        const float second = exp2_fast(scores[j][h * 2 + 1] - offset);
        sums[h] += first + second;
        weights[j * 2 + h] = pack<T>(first, second);
      }
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        outputs[n][h * 2] *= factor;
        outputs[n][h * 2 + 1] *= factor;
      }
    }
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n += 2) {
      unsigned b[4];
      ldmatrix_x4_trans(b, tile_v + lane % 16 * PITCH + n * 8 + lane / 16 * 8);
      mma_m16n8k16<T>(outputs[n], weights, {b[0], b[1]});
      mma_m16n8k16<T>(outputs[n + 1], weights, {b[2], b[3]});
    }
    __syncwarp();  // the stage is free for the copy after next
  }

  // Merge the warps through their own stages, which are no longer in use.
  float* const merged = reinterpret_cast<float*>(shared_memory);
  constexpr int MERGE_STRIDE = STAGES * 2 * TILE_ELEMENTS * sizeof(T) / sizeof(float);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = lane / 4 + h * 8;
    float sum = sums[h];
    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
    sum += __shfl_xor_sync(FULL_WARP, sum, 2);
    if (lane % 4 == 0) {
      warp_maxima[warp][head] = maxima[h];
      warp_sums[warp][head] = sum;
    }
    float* const to = merged + warp * MERGE_STRIDE + head * MERGE_PITCH + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      *reinterpret_cast<float2*>(to + n * 8) = make_float2(outputs[n][h * 2], outputs[n][h * 2 + 1]);
    }
  }
  __syncthreads();

  for (int i = threadIdx.x; i < num_group_heads * HEAD_DIM; i += WARP_SIZE * WARPS) {
    const int head = i / HEAD_DIM;
    const int d = i % HEAD_DIM;
    float maximum = MINUS_INFINITY;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) maximum = fmaxf(maximum, warp_maxima[w][head]);
    float sum = 0.0f;
    float value = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float factor = rescale_factor(warp_maxima[w][head], maximum);
      sum = fmaf(warp_sums[w][head], factor, sum);
      value = fmaf(merged[w * MERGE_STRIDE + head * MERGE_PITCH + d], factor, value);
    }
    value = sum == 0.0f ? 0.0f : value / sum;
    if (splits.count == 1) {
      out[(static_cast<long long>(token) * num_heads + head0 + head) * HEAD_DIM + d] = from_float<T>(value);
    } else {
      const long long partial = (static_cast<long long>(row) * num_heads + head0 + head) * gridDim.z + split;
      partial_out[partial * HEAD_DIM + d] = value;
      if (d == 0) partial_lse[partial] = sum == 0.0f ? MINUS_INFINITY : maximum + log2f(sum);
    }
  }
}

// out = sum over splits s of partial_out[s] * 2^partial_lse[s], over the sum of 2^partial_lse[s], for rows
// with one query and more than one split.
//
// partial_out [num_seqs, num_heads, splits, head_dim] float; partial_lse [num_seqs, num_heads, splits] float;
// cu_seqlens_q [num_seqs + 1] int; context_lens [num_seqs] int; out [num_tokens, num_heads * head_dim] T.
// Layout: row-major; splits, sliding_window, min_split_keys and max_splits as given to the decode kernel.
// Grid: (num_heads, num_seqs); block: 128 threads; no shared memory.
// Unit of work: one block a row's head, a thread every 128th element.
template <typename T>
__global__ void __launch_bounds__(COMBINE_THREADS)
    paged_attention_combine_kernel(const float* __restrict__ partial_out,
                                   const float* __restrict__ partial_lse,
                                   const int* __restrict__ cu_seqlens_q, const int* __restrict__ context_lens,
                                   T* __restrict__ out, int head_dim, int splits, int sliding_window,
                                   int min_split_keys, int max_splits) {
  ASSERT_ELEMENT(T);
  const int head = blockIdx.x;
  const int num_heads = gridDim.x;
  const int row = blockIdx.y;
  const int token = cu_seqlens_q[row];
  if (cu_seqlens_q[row + 1] - token != 1) return;
  const int count = find_splits(context_lens[row], sliding_window, min_split_keys, max_splits).count;
  if (count == 1) return;

  const long long partial = (static_cast<long long>(row) * num_heads + head) * splits;
  float maximum = MINUS_INFINITY;
  for (int s = 0; s < count; ++s) maximum = fmaxf(maximum, partial_lse[partial + s]);
  for (int d = threadIdx.x; d < head_dim; d += COMBINE_THREADS) {
    float sum = 0.0f;
    float value = 0.0f;
    for (int s = 0; s < count; ++s) {
      const float weight = rescale_factor(partial_lse[partial + s], maximum);
      sum += weight;
      value = fmaf(partial_out[(partial + s) * head_dim + d], weight, value);
    }
    out[(static_cast<long long>(token) * num_heads + head) * head_dim + d] = from_float<T>(value / sum);
  }
}
