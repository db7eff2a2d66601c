// Causal attention over packed sequences and its backward, for every dtype and head size; flash.cu and
// flash_gradient.cu are those for 16-bit elements on tensor cores.
#include "generated/training_attention.cuh"
#include "training/packed_attention.cuh"

constexpr int MAX_PER_LANE = MAX_HEAD_DIM / WARP_SIZE;
constexpr int TILE = WARP_SIZE;  // rows that a block's warps share, one a lane

// A row's elements of one head to shared memory, times `factor`; zeros where there is no such row.
template <typename T>
__device__ __forceinline__ void load_head(float* to, const T* from, int head_dim, bool valid, float factor) {
  for (int d = threadIdx.x % WARP_SIZE; d < head_dim; d += WARP_SIZE)
    to[d] = valid ? to_float(from[d]) * factor : 0.0f;
}

__device__ __forceinline__ float dot(const float* a, const float* b, int head_dim) {
  float sum = 0.0f;
  for (int d = 0; d < head_dim; ++d) sum = fmaf(a[d], b[d], sum);
  return sum;
}

// sums[d] += weight of row r times rows[r, d], for all r; a lane has the weight of its own row.
__device__ __forceinline__ void add_weighted(float (&sums)[MAX_PER_LANE], float weight, const float* rows,
                                             int pitch, int head_dim) {
  for (int r = 0; r < TILE; ++r) {
    const float other = __shfl_sync(FULL_WARP, weight, r);
#pragma unroll
    for (int i = 0; i < MAX_PER_LANE; ++i) {
      const int d = i * WARP_SIZE + threadIdx.x % WARP_SIZE;
      if (d < head_dim) sums[i] = fmaf(other, rows[r * pitch + d], sums[i]);
    }
  }
}

template <typename T>
__device__ __forceinline__ void store_head(T* to, const float (&sums)[MAX_PER_LANE], int head_dim,
                                           float factor) {
#pragma unroll
  for (int i = 0; i < MAX_PER_LANE; ++i) {
    const int d = i * WARP_SIZE + threadIdx.x % WARP_SIZE;
    if (d < head_dim) to[d] = from_float<T>(sums[i] * factor);
  }
}

// out = softmax over the visible keys of (q . k * scale), times v; logsumexp = log of the sum of exp(q . k *
// scale); running maximum and sum as in "Online normalizer calculation for softmax" (Milakov and Gimelshein
// 2018).
//   in:  qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim] T
//        cu_seqlens [sequences + 1] int, where each begins; a token sees those of its own sequence, itself
//        and the window - 1 before it
//   out: out [tokens, num_heads * head_dim] T, logsumexp [num_heads, tokens] float
// Layout: row-major, any alignment; head_dim <= MAX_HEAD_DIM.
// Grid: (`tiles` a sequence, num_heads), tiles of ROWS queries.
// Block: 32 * ROWS threads.
// Shared memory: ((ROWS + TILE) * head_dim + TILE * (head_dim + 1)) floats.
// Unit of work: one warp a query of one head. A block's warps share tiles of keys and values; a lane computes
// one key's score, then every 32nd element of the output.
template <typename T>
__global__ void __launch_bounds__(ROWS* WARP_SIZE) packed_attention_kernel(PACKED_ATTENTION_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const PackedHeads heads{num_heads, num_kv_heads, head_dim};
  const PackedSequence sequence(cu_seqlens, tiles);
  const int query0 = sequence.tile * ROWS;
  if (query0 >= sequence.length) return;
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int pitch = head_dim + 1;  // lanes read rows from different banks
  float* const query_row = reinterpret_cast<float*>(shared_memory) + warp * head_dim;
  float* const keys = reinterpret_cast<float*>(shared_memory) + ROWS * head_dim;
  float* const values = keys + TILE * pitch;
  const int head = blockIdx.y, kv_head = head / heads.group();
  const T* const rows = qkv + sequence.begin * heads.row();
  const int query = query0 + warp;
  const bool is_query = query < sequence.length;
  load_head(query_row, rows + query * heads.row() + heads.query(head), head_dim, is_query, scale * LOG2_E);

  float maximum = MINUS_INFINITY, sum = 0.0f, weighted[MAX_PER_LANE] = {};
  const int key_end = min(query0 + ROWS, sequence.length);
  for (int key0 = max(query0 - window + 1, 0); key0 < key_end; key0 += TILE) {
    __syncthreads();  // the tile before is no longer in use
    for (int r = warp; r < TILE; r += ROWS) {
      const T* const from = rows + (key0 + r) * heads.row();
      load_head(keys + r * pitch, from + heads.key(kv_head), head_dim, key0 + r < key_end, 1.0f);
      load_head(values + r * head_dim, from + heads.value(kv_head), head_dim, key0 + r < key_end, 1.0f);
    }
    __syncthreads();
    const bool is_seen = is_query && is_visible(key0 + lane, query, window);
    const float score = is_seen ? dot(query_row, keys + lane * pitch, head_dim) : MINUS_INFINITY;
    const float renewed = fmaxf(maximum, warp_max(score));
    const float factor = rescale_factor(maximum, renewed);
    const float weight = is_seen ? exp2f(score - renewed) : 0.0f;
    maximum = renewed;
    sum = sum * factor + warp_sum(weight);
#pragma unroll
    for (int i = 0; i < MAX_PER_LANE; ++i) weighted[i] *= factor;
    add_weighted(weighted, weight, values, head_dim, head_dim);
  }
  if (!is_query) return;
  const long long token = sequence.begin + query;
  store_head(out + token * heads.result_row() + heads.query(head), weighted, head_dim, 1.0f / sum);
  if (lane == 0) {
    const float log_sum = (maximum + log2f(sum)) * LN_2;
    logsumexp[static_cast<long long>(head) * num_tokens + token] = log_sum;
  }
}

// delta = sum over d of dout[d] * out[d], of each token's head.
//   in:  dout [tokens, num_heads * head_dim] T, out [tokens, num_heads * head_dim] T
//   out: delta [num_heads, tokens] float
// Layout: row-major, any alignment.
// Grid: blocks of 8 that cover tokens * num_heads. Block: 256 threads. Shared memory: none.
// Unit of work: one warp a token's head.
template <typename T>
__global__ void attention_delta_kernel(ATTENTION_DELTA_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long item = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP_SIZE;
  if (item >= static_cast<long long>(num_tokens) * num_heads) return;
  float sum = 0.0f;
  for (int d = threadIdx.x % WARP_SIZE; d < head_dim; d += WARP_SIZE) {
    sum = fmaf(to_float(dout[item * head_dim + d]), to_float(out[item * head_dim + d]), sum);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % WARP_SIZE == 0) delta[item % num_heads * num_tokens + item / num_heads] = sum;
}

// dq = scale * sum over the visible keys of ds * k, ds = p * (dout . v - delta), p = exp(q . k * scale -
// logsumexp) (Dao et al. 2022, algorithm 4).
//   in:  qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim] T, dout [tokens, num_heads * head_dim] T
//        logsumexp [num_heads, tokens] float, delta [num_heads, tokens] float
//        cu_seqlens, window as of packed_attention_kernel
//   out: dqkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim] T, the columns of queries
// Layout: row-major, any alignment; head_dim <= MAX_HEAD_DIM.
// Grid: (`tiles` a sequence, num_heads), tiles of ROWS queries.
// Block: 32 * ROWS threads.
// Shared memory: (2 * ROWS * head_dim + 2 * TILE * (head_dim + 1)) floats.
// Unit of work: as of packed_attention_kernel.
template <typename T>
__global__ void __launch_bounds__(ROWS* WARP_SIZE)
    packed_query_gradient_kernel(PACKED_ATTENTION_GRADIENT_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const PackedHeads heads{num_heads, num_kv_heads, head_dim};
  const PackedSequence sequence(cu_seqlens, tiles);
  const int query0 = sequence.tile * ROWS;
  if (query0 >= sequence.length) return;
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int pitch = head_dim + 1;
  float* const query_row = reinterpret_cast<float*>(shared_memory) + 2 * warp * head_dim;
  float* const upper_row = query_row + head_dim;
  float* const keys = reinterpret_cast<float*>(shared_memory) + 2 * ROWS * head_dim;
  float* const values = keys + TILE * pitch;
  const int head = blockIdx.y, kv_head = head / heads.group();
  const T* const rows = qkv + sequence.begin * heads.row();
  const int query = query0 + warp;
  const bool is_query = query < sequence.length;
  const long long token = sequence.begin + query;
  const T* const upper_from = dout + token * heads.result_row() + heads.query(head);
  load_head(query_row, rows + query * heads.row() + heads.query(head), head_dim, is_query, scale);
  load_head(upper_row, upper_from, head_dim, is_query, 1.0f);
  const long long place = static_cast<long long>(head) * num_tokens + token;
  const float log_sum = is_query ? logsumexp[place] : 0.0f, along = is_query ? delta[place] : 0.0f;

  float sums[MAX_PER_LANE] = {};
  const int key_end = min(query0 + ROWS, sequence.length);
  for (int key0 = max(query0 - window + 1, 0); key0 < key_end; key0 += TILE) {
    __syncthreads();
    for (int r = warp; r < TILE; r += ROWS) {
      const T* const from = rows + (key0 + r) * heads.row();
      load_head(keys + r * pitch, from + heads.key(kv_head), head_dim, key0 + r < key_end, 1.0f);
      load_head(values + r * pitch, from + heads.value(kv_head), head_dim, key0 + r < key_end, 1.0f);
    }
    __syncthreads();
    float slope = 0.0f;
    if (is_query && is_visible(key0 + lane, query, window)) {
      const float weight = expf(dot(query_row, keys + lane * pitch, head_dim) - log_sum);
      slope = weight * (dot(upper_row, values + lane * pitch, head_dim) - along);
    }
    add_weighted(sums, slope, keys, pitch, head_dim);
  }
  if (is_query) store_head(dqkv + token * heads.row() + heads.query(head), sums, head_dim, scale);
}

// dv = sum over the queries that see the key of p * dout, dk = scale * sum of ds * q; p and ds as of
// packed_query_gradient_kernel.
//   in:  qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim] T, dout [tokens, num_heads * head_dim] T
//        logsumexp [num_heads, tokens] float, delta [num_heads, tokens] float
//        cu_seqlens, window as of packed_attention_kernel
//   out: dqkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim] T, the columns of keys and values
// Layout: row-major, any alignment; head_dim <= MAX_HEAD_DIM.
// Grid: (`tiles` a sequence, num_kv_heads), tiles of ROWS keys.
// Block: 32 * ROWS threads.
// Shared memory: (2 * ROWS * head_dim + 2 * TILE * (head_dim + 1)) floats.
// Unit of work: one warp a key of one head, over all query heads of its group in their order. A block's warps
// share tiles of queries; a lane has one query's weight, then every 32nd element of the sums.
template <typename T>
__global__ void __launch_bounds__(ROWS* WARP_SIZE)
    packed_key_gradient_kernel(PACKED_ATTENTION_GRADIENT_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const PackedHeads heads{num_heads, num_kv_heads, head_dim};
  const PackedSequence sequence(cu_seqlens, tiles);
  const int key0 = sequence.tile * ROWS;
  if (key0 >= sequence.length) return;
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int pitch = head_dim + 1;
  float* const key_row = reinterpret_cast<float*>(shared_memory) + 2 * warp * head_dim;
  float* const value_row = key_row + head_dim;
  float* const queries = reinterpret_cast<float*>(shared_memory) + 2 * ROWS * head_dim;
  float* const uppers = queries + TILE * pitch;
  const int kv_head = blockIdx.y;
  const T* const rows = qkv + sequence.begin * heads.row();
  const int key = key0 + warp;
  const bool is_key = key < sequence.length;
  load_head(key_row, rows + key * heads.row() + heads.key(kv_head), head_dim, is_key, scale);
  load_head(value_row, rows + key * heads.row() + heads.value(kv_head), head_dim, is_key, 1.0f);

  float key_sums[MAX_PER_LANE] = {}, value_sums[MAX_PER_LANE] = {};
  const int last_key = min(key0 + ROWS, sequence.length) - 1;
  const int query_end = query_end_of(last_key, sequence.length, window);
  for (int head = kv_head * heads.group(); head < (kv_head + 1) * heads.group(); ++head) {
    for (int query0 = key0; query0 < query_end; query0 += TILE) {
      __syncthreads();
      for (int r = warp; r < TILE; r += ROWS) {
        const long long query = query0 + r;
        const bool valid = query < query_end;
        const T* const upper = dout + (sequence.begin + query) * heads.result_row() + heads.query(head);
        load_head(queries + r * pitch, rows + query * heads.row() + heads.query(head), head_dim, valid, 1.0f);
        load_head(uppers + r * pitch, upper, head_dim, valid, 1.0f);
      }
      __syncthreads();
      const int query = query0 + lane;
      float weight = 0.0f, slope = 0.0f;
      if (is_key && query < query_end && is_visible(key, query, window)) {
        const long long place = static_cast<long long>(head) * num_tokens + sequence.begin + query;
        weight = expf(dot(key_row, queries + lane * pitch, head_dim) - logsumexp[place]);
        slope = weight * (dot(value_row, uppers + lane * pitch, head_dim) - delta[place]);
      }
      add_weighted(key_sums, slope, queries, pitch, head_dim);
      add_weighted(value_sums, weight, uppers, pitch, head_dim);
    }
  }
  if (!is_key) return;
  T* const to = dqkv + (sequence.begin + key) * heads.row();
  store_head(to + heads.key(kv_head), key_sums, head_dim, scale);
  store_head(to + heads.value(kv_head), value_sums, head_dim, 1.0f);
}
