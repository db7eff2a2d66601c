// The backward of attention over packed sequences on tensor cores: one kernel for queries, one for keys and
// values, so that nothing is added by several blocks.
#include "generated/training_flash.cuh"
#include "training/flash.cuh"

// dq = scale * sum over the visible keys of ds * k, ds = p * (dout . v - delta), p = exp(q . k * scale -
// logsumexp) (FlashAttention-2, Dao 2023). ds is rounded to T before it meets k.
//   in:  qkv [tokens, (num_heads + 2 * num_kv_heads) * HEAD_DIM] T, dout [tokens, num_heads * HEAD_DIM] T
//        logsumexp [num_heads, tokens] float, delta [num_heads, tokens] float
//        cu_seqlens, window as of flash_attention_kernel
//   out: dqkv [tokens, (num_heads + 2 * num_kv_heads) * HEAD_DIM] T, the columns of queries
// Layout: row-major, qkv and dout 16-byte and dqkv 4-byte aligned; head_dim is HEAD_DIM.
// Grid: (`tiles` a sequence, num_heads), tiles of GRADIENT_ROWS queries, later ones first since they see more
// keys.
// Block: 128 threads.
// Shared memory: (2 * GRADIENT_ROWS + 4 * GRADIENT_TILE) * (HEAD_DIM + 8) * sizeof(T).
// Unit of work: a block a tile of queries, a warp 16 of them; keys and values of the next tile are copied
// meanwhile.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(WARP_SIZE* WARPS)
    flash_query_gradient_kernel(PACKED_FLASH_GRADIENT_PARAMS(T)) {
  constexpr int PITCH = FLASH_PITCH<HEAD_DIM>, THREADS = WARP_SIZE * WARPS, TILE = GRADIENT_TILE * PITCH;
  static_assert(sizeof(T) == 2, "tensor-core attention takes bfloat16 or float16");
  static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 128, "head_dim must be a multiple of 16 and at most 128");
  static_assert(GRADIENT_ROWS == 16 * WARPS, "a warp has 16 rows");
  extern __shared__ __align__(128) unsigned char shared_memory[];
  T* const tile_q = reinterpret_cast<T*>(shared_memory);
  T* const tile_upper = tile_q + GRADIENT_ROWS * PITCH;
  T* const ring = tile_upper + GRADIENT_ROWS * PITCH;  // [2][keys, values][TILE]
  const PackedHeads heads{num_heads, num_kv_heads, HEAD_DIM};
  const PackedSequence sequence(cu_seqlens, tiles);
  const int query0 = (tiles - 1 - sequence.tile) * GRADIENT_ROWS;
  if (query0 >= sequence.length) return;
  const int head = blockIdx.y, kv_head = head / heads.group();
  const T* const rows = qkv + sequence.begin * heads.row();
  const T* const uppers = dout + sequence.begin * heads.result_row() + heads.query(head);
  const int key_end = min(query0 + GRADIENT_ROWS, sequence.length);
  const int key_begin = max(query0 - window + 1, 0) / GRADIENT_TILE * GRADIENT_TILE;
  auto copy_tile = [&](int key0, int stage) {
    T* const to = ring + stage * 2 * TILE;
    copy_rows<T, HEAD_DIM, GRADIENT_TILE, THREADS>(to, rows + heads.key(kv_head), heads.row(), key0, key_end);
    copy_rows<T, HEAD_DIM, GRADIENT_TILE, THREADS>(to + TILE, rows + heads.value(kv_head), heads.row(), key0,
                                                   key_end);
  };
  copy_rows<T, HEAD_DIM, GRADIENT_ROWS, THREADS>(tile_q, rows + heads.query(head), heads.row(), query0,
                                                 sequence.length);
  copy_rows<T, HEAD_DIM, GRADIENT_ROWS, THREADS>(tile_upper, uppers, heads.result_row(), query0,
                                                 sequence.length);
  copy_tile(key_begin, 0);
  copy_async_commit();

  const int lane = threadIdx.x % WARP_SIZE;
  const int warp_row = threadIdx.x / WARP_SIZE * 16;
  const int first_query = query0 + warp_row, last_query = first_query + 15;
  const float scale_log2 = scale * LOG2_E;
  float log_sums[2], along[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = first_query + h * 8 + lane / 4;
    const long long place = static_cast<long long>(head) * num_tokens + sequence.begin + query;
    log_sums[h] = query < sequence.length ? logsumexp[place] * LOG2_E : FLOAT_INFINITY;
    along[h] = query < sequence.length ? delta[place] : 0.0f;
  }
  float sums[1][HEAD_DIM / 8][4] = {};
  int stage = 0;
  for (int key0 = key_begin; key0 < key_end; key0 += GRADIENT_TILE, stage ^= 1) {
    copy_async_wait<0>();
    __syncthreads();  // this tile is there, and that before it is no longer in use
    if (key0 + GRADIENT_TILE < key_end) copy_tile(key0 + GRADIENT_TILE, stage ^ 1);
    copy_async_commit();
    if (key0 > last_query) continue;
    const T* const tile_k = ring + stage * 2 * TILE;
    float slopes[1][GRADIENT_TILE / 8][4] = {}, uppers_of_weights[1][GRADIENT_TILE / 8][4] = {};
    multiply_transposed<T, HEAD_DIM, 1, GRADIENT_TILE>(slopes, tile_q + warp_row * PITCH, tile_k);
    multiply_transposed<T, HEAD_DIM, 1, GRADIENT_TILE>(uppers_of_weights, tile_upper + warp_row * PITCH,
                                                       tile_k + TILE);
    const bool all_seen = key0 + GRADIENT_TILE - 1 <= first_query && key0 > last_query - window;
#pragma unroll
    for (int j = 0; j < GRADIENT_TILE / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int query = first_query + e / 2 * 8 + lane / 4, key = key0 + j * 8 + lane % 4 * 2 + e % 2;
        float weight = exp2_fast(fmaf(slopes[0][j][e], scale_log2, -log_sums[e / 2]));
        if (!all_seen && !is_visible(key, query, window)) weight = 0.0f;
        slopes[0][j][e] = weight * (uppers_of_weights[0][j][e] - along[e / 2]);
      }
    }
    multiply_weighted<T, HEAD_DIM, 1, GRADIENT_TILE>(sums, slopes, tile_k);
  }
  const float factors[1][2] = {{scale, scale}};
  store_rows<T, HEAD_DIM, 1>(dqkv + sequence.begin * heads.row() + heads.query(head), heads.row(),
                             first_query, sequence.length, sums, factors);
}

// dv = sum over the queries that see the key of p * dout, dk = scale * sum of ds * q; p and ds as of
// flash_query_gradient_kernel, both rounded to T before they meet dout and q.
//   in:  qkv [tokens, (num_heads + 2 * num_kv_heads) * HEAD_DIM] T, dout [tokens, num_heads * HEAD_DIM] T
//        logsumexp [num_heads, tokens] float, delta [num_heads, tokens] float
//        cu_seqlens, window as of flash_attention_kernel
//   out: dqkv [tokens, (num_heads + 2 * num_kv_heads) * HEAD_DIM] T, the columns of keys and values
// Layout: row-major, qkv and dout 16-byte and dqkv 4-byte aligned; head_dim is HEAD_DIM.
// Grid: (`tiles` a sequence, num_kv_heads), tiles of GRADIENT_ROWS keys, earlier ones first since more
// queries see them.
// Block: 128 threads.
// Shared memory: (2 * GRADIENT_ROWS + 4 * TILE_QUERIES) * (HEAD_DIM + 8) * sizeof(T) + 4 * TILE_QUERIES
// floats.
// Unit of work: a block a tile of keys, over the query heads of its group in their order; a warp 16 keys,
// which are the rows of its products. Queries and dout of the next tile are copied meanwhile.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(WARP_SIZE* WARPS)
    flash_key_gradient_kernel(PACKED_FLASH_GRADIENT_PARAMS(T)) {
  constexpr int PITCH = FLASH_PITCH<HEAD_DIM>, THREADS = WARP_SIZE * WARPS, TILE = TILE_QUERIES * PITCH;
  static_assert(sizeof(T) == 2, "tensor-core attention takes bfloat16 or float16");
  static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 128, "head_dim must be a multiple of 16 and at most 128");
  static_assert(GRADIENT_ROWS == 16 * WARPS, "a warp has 16 rows");
  static_assert(2 * TILE_QUERIES <= THREADS, "a thread copies one number of a query");
  extern __shared__ __align__(128) unsigned char shared_memory[];
  T* const tile_k = reinterpret_cast<T*>(shared_memory);
  T* const tile_v = tile_k + GRADIENT_ROWS * PITCH;
  T* const ring = tile_v + GRADIENT_ROWS * PITCH;                    // [2][queries, dout][TILE]
  float* const numbers = reinterpret_cast<float*>(ring + 4 * TILE);  // [2][logsumexp, delta][TILE_QUERIES]
  const PackedHeads heads{num_heads, num_kv_heads, HEAD_DIM};
  const PackedSequence sequence(cu_seqlens, tiles);
  const int key0 = sequence.tile * GRADIENT_ROWS;
  if (key0 >= sequence.length) return;
  const int kv_head = blockIdx.y, group = heads.group();
  const T* const rows = qkv + sequence.begin * heads.row();
  const int last_key = min(key0 + GRADIENT_ROWS, sequence.length) - 1;
  const int query_end = query_end_of(last_key, sequence.length, window);
  const int steps_a_head = ceil_div(query_end - key0, TILE_QUERIES);
  auto copy_tile = [&](int step) {
    const int head = kv_head * group + step / steps_a_head;
    const int query0 = key0 + step % steps_a_head * TILE_QUERIES;
    T* const to = ring + step % 2 * 2 * TILE;
    copy_rows<T, HEAD_DIM, TILE_QUERIES, THREADS>(to, rows + heads.query(head), heads.row(), query0,
                                                  query_end);
    copy_rows<T, HEAD_DIM, TILE_QUERIES, THREADS>(
        to + TILE, dout + sequence.begin * heads.result_row() + heads.query(head), heads.result_row(), query0,
        query_end);
    if (threadIdx.x < 2 * TILE_QUERIES) {
      const int query = query0 + threadIdx.x % TILE_QUERIES;
      const bool is_log = threadIdx.x < TILE_QUERIES, valid = query < query_end;
      const long long place = static_cast<long long>(head) * num_tokens + sequence.begin + query;
      const float value = !valid   ? (is_log ? FLOAT_INFINITY : 0.0f)
                          : is_log ? logsumexp[place] * LOG2_E
                                   : delta[place];
      numbers[step % 2 * 2 * TILE_QUERIES + threadIdx.x] = value;
    }
  };
  copy_rows<T, HEAD_DIM, GRADIENT_ROWS, THREADS>(tile_k, rows + heads.key(kv_head), heads.row(), key0,
                                                 sequence.length);
  copy_rows<T, HEAD_DIM, GRADIENT_ROWS, THREADS>(tile_v, rows + heads.value(kv_head), heads.row(), key0,
                                                 sequence.length);
  copy_tile(0);
  copy_async_commit();

  const int lane = threadIdx.x % WARP_SIZE;
  const int warp_row = threadIdx.x / WARP_SIZE * 16;
  const int first_key = key0 + warp_row;
  const float scale_log2 = scale * LOG2_E;
  float key_sums[1][HEAD_DIM / 8][4] = {}, value_sums[1][HEAD_DIM / 8][4] = {};
  for (int step = 0; step < steps_a_head * group; ++step) {
    copy_async_wait<0>();
    __syncthreads();  // this tile is there, and that before it is no longer in use
    if (step + 1 < steps_a_head * group) copy_tile(step + 1);
    copy_async_commit();
    const int query0 = key0 + step % steps_a_head * TILE_QUERIES;
    const T* const tile_q = ring + step % 2 * 2 * TILE;
    const float* const log_sums = numbers + step % 2 * 2 * TILE_QUERIES;
    if (query0 + TILE_QUERIES - 1 < first_key || query0 >= first_key + 15 + window) continue;
    float weights[1][TILE_QUERIES / 8][4] = {}, slopes[1][TILE_QUERIES / 8][4] = {};
    multiply_transposed<T, HEAD_DIM, 1, TILE_QUERIES>(weights, tile_k + warp_row * PITCH, tile_q);
    multiply_transposed<T, HEAD_DIM, 1, TILE_QUERIES>(slopes, tile_v + warp_row * PITCH, tile_q + TILE);
    const bool all_seen = first_key + 15 <= query0 && first_key > query0 + TILE_QUERIES - 1 - window;
#pragma unroll
    for (int j = 0; j < TILE_QUERIES / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int place = j * 8 + lane % 4 * 2 + e % 2, key = first_key + e / 2 * 8 + lane / 4;
        float weight = exp2_fast(fmaf(weights[0][j][e], scale_log2, -log_sums[place]));
        if (!all_seen && !is_visible(key, query0 + place, window)) weight = 0.0f;
        weights[0][j][e] = weight;
        slopes[0][j][e] = weight * (slopes[0][j][e] - log_sums[TILE_QUERIES + place]);
      }
    }
    multiply_weighted<T, HEAD_DIM, 1, TILE_QUERIES>(value_sums, weights, tile_q + TILE);
    multiply_weighted<T, HEAD_DIM, 1, TILE_QUERIES>(key_sums, slopes, tile_q);
  }
  T* const to = dqkv + sequence.begin * heads.row();
  const float key_factors[1][2] = {{scale, scale}}, value_factors[1][2] = {{1.0f, 1.0f}};
  store_rows<T, HEAD_DIM, 1>(to + heads.key(kv_head), heads.row(), first_key, sequence.length, key_sums,
                             key_factors);
  store_rows<T, HEAD_DIM, 1>(to + heads.value(kv_head), heads.row(), first_key, sequence.length, value_sums,
                             value_factors);
}
