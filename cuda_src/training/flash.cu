// Causal attention over packed sequences on tensor cores.
#include "attention/online_softmax.cuh"
#include "generated/training_flash.cuh"
#include "training/flash.cuh"

// A warp's rows of queries.
template <typename T, int HEAD_DIM>
struct QueryRows {
  static constexpr int ROWS = 16 * ROW_TILES;
  float outputs[ROW_TILES][HEAD_DIM / 8][4];
  RowSoftmax softmax[ROW_TILES][2];

  // Turns scores of keys from key0 on into weights, and what was summed before with them.
  __device__ __forceinline__ void weigh(float (&scores)[ROW_TILES][TILE_KEYS / 8][4], float scale_log2) {
#pragma unroll
    for (int i = 0; i < ROW_TILES * 2; ++i) {
      RowSoftmax& row = softmax[i / 2][i % 2];
      float maximum = row.maximum;
#pragma unroll
      for (int s = 0; s < TILE_KEYS / 4; ++s) {
        maximum = fmaxf(maximum, scores[i / 2][s / 2][i % 2 * 2 + s % 2]);
      }
      const float offset = row.renew(maximum, scale_log2);
      float sum = 0.0f;
#pragma unroll
      for (int s = 0; s < TILE_KEYS / 4; ++s) {
        float& score = scores[i / 2][s / 2][i % 2 * 2 + s % 2];
        score = RowSoftmax::weight(score, scale_log2, offset);
        sum += score;
      }
      row.add(sum);
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        outputs[i / 2][n][i % 2 * 2] *= row.factor;
        outputs[i / 2][n][i % 2 * 2 + 1] *= row.factor;
      }
    }
  }
};

// out = softmax over the visible keys of (q . k * scale), times v, in one pass over the keys
// (FlashAttention-2, Dao 2023); logsumexp = log of the sum of exp(q . k * scale). Weights are rounded to T
// before they meet v.
//   in:  qkv [tokens, (num_heads + 2 * num_kv_heads) * HEAD_DIM] T
//        cu_seqlens [sequences + 1] int, where each begins; a token sees those of its own sequence, itself
//        and the window - 1 before it; scale is positive
//   out: out [tokens, num_heads * HEAD_DIM] T, logsumexp [num_heads, tokens] float
// Layout: row-major, qkv 16-byte and out 4-byte aligned; head_dim is HEAD_DIM.
// Grid: (`tiles` a sequence, num_heads), tiles of 64 * ROW_TILES queries, later ones first since they see
// more keys.
// Block: 128 threads.
// Shared memory: (64 * ROW_TILES + 4 * TILE_KEYS) * (HEAD_DIM + 8) * sizeof(T).
// Unit of work: a block a tile of queries, a warp 16 * ROW_TILES of them; keys and values of the next tile
// are copied meanwhile.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(WARP_SIZE* WARPS) flash_attention_kernel(PACKED_FLASH_PARAMS(T)) {
  constexpr int PITCH = FLASH_PITCH<HEAD_DIM>, THREADS = WARP_SIZE * WARPS;
  constexpr int WARP_ROWS = 16 * ROW_TILES, TILE_ROWS = WARP_ROWS * WARPS, TILE = TILE_KEYS * PITCH;
  static_assert(sizeof(T) == 2, "tensor-core attention takes bfloat16 or float16");
  static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 128, "head_dim must be a multiple of 16 and at most 128");
  extern __shared__ __align__(128) unsigned char shared_memory[];
  T* const tile_q = reinterpret_cast<T*>(shared_memory);
  T* const ring = tile_q + TILE_ROWS * PITCH;  // [2][keys, values][TILE]
  const PackedHeads heads{num_heads, num_kv_heads, HEAD_DIM};
  const PackedSequence sequence(cu_seqlens, tiles);
  const int query0 = (tiles - 1 - sequence.tile) * TILE_ROWS;
  if (query0 >= sequence.length) return;
  const int head = blockIdx.y, kv_head = head / heads.group();
  const T* const rows = qkv + sequence.begin * heads.row();
  const int key_end = min(query0 + TILE_ROWS, sequence.length);
  const int key_begin = max(query0 - window + 1, 0) / TILE_KEYS * TILE_KEYS;
  auto copy_tile = [&](int key0, int stage) {
    T* const to = ring + stage * 2 * TILE;
    copy_rows<T, HEAD_DIM, TILE_KEYS, THREADS>(to, rows + heads.key(kv_head), heads.row(), key0, key_end);
    copy_rows<T, HEAD_DIM, TILE_KEYS, THREADS>(to + TILE, rows + heads.value(kv_head), heads.row(), key0,
                                               key_end);
  };
  copy_rows<T, HEAD_DIM, TILE_ROWS, THREADS>(tile_q, rows + heads.query(head), heads.row(), query0,
                                             sequence.length);
  copy_tile(key_begin, 0);
  copy_async_commit();

  const int lane = threadIdx.x % WARP_SIZE;
  const int warp_row = threadIdx.x / WARP_SIZE * WARP_ROWS;
  const int first_query = query0 + warp_row, last_query = first_query + WARP_ROWS - 1;
  const float scale_log2 = scale * LOG2_E;
  QueryRows<T, HEAD_DIM> own = {};
  int stage = 0;
  for (int key0 = key_begin; key0 < key_end; key0 += TILE_KEYS, stage ^= 1) {
    copy_async_wait<0>();
    __syncthreads();  // this tile is there, and that before it is no longer in use
    if (key0 + TILE_KEYS < key_end) copy_tile(key0 + TILE_KEYS, stage ^ 1);
    copy_async_commit();
    if (key0 > last_query) continue;
    const T* const tile_k = ring + stage * 2 * TILE;
    float scores[ROW_TILES][TILE_KEYS / 8][4] = {};
    multiply_transposed<T, HEAD_DIM, ROW_TILES, TILE_KEYS>(scores, tile_q + warp_row * PITCH, tile_k);
    if (key0 + TILE_KEYS - 1 > first_query || key0 <= last_query - window) {
#pragma unroll
      for (int i = 0; i < ROW_TILES * 2; ++i) {
        const int query = first_query + i * 8 + lane / 4;
#pragma unroll
        for (int s = 0; s < TILE_KEYS / 4; ++s) {
          const int key = key0 + s / 2 * 8 + lane % 4 * 2 + s % 2;
          if (!is_visible(key, query, window)) scores[i / 2][s / 2][i % 2 * 2 + s % 2] = MINUS_INFINITY;
        }
      }
    }
    own.weigh(scores, scale_log2);
    multiply_weighted<T, HEAD_DIM, ROW_TILES, TILE_KEYS>(own.outputs, scores, tile_k + TILE);
  }

  float factors[ROW_TILES][2];
#pragma unroll
  for (int i = 0; i < ROW_TILES * 2; ++i) {
    const RowSoftmax& row = own.softmax[i / 2][i % 2];
    const float sum = row.row_sum();
    factors[i / 2][i % 2] = RowSoftmax::inverse(sum);
    const int query = first_query + i * 8 + lane / 4;
    if (lane % 4 == 0 && query < sequence.length) {
      const float log_sum = (row.maximum * scale_log2 + log2f(sum)) * LN_2;
      logsumexp[static_cast<long long>(head) * num_tokens + sequence.begin + query] = log_sum;
    }
  }
  store_rows<T, HEAD_DIM, ROW_TILES>(out + sequence.begin * heads.result_row() + heads.query(head),
                                     heads.result_row(), first_query, sequence.length, own.outputs, factors);
}
