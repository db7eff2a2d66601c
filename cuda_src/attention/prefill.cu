// Paged attention on tensor cores for rows with two or more queries; decode.cu does the others.

#include "attention/attention.cuh"
#include "attention/cached.cuh"
#include "attention/online_softmax.cuh"
#include "generated/prefill.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"

// Threads copying tiles of TILE_KEYS keys or values [TILE_KEYS, PITCH] to shared memory.
template <typename T, int HEAD_DIM, int TILE_KEYS>
struct KeyTiles {
  static constexpr int THREADS = WARP_SIZE * WARPS;
  static constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
  static constexpr int PITCH = HEAD_DIM + SEGMENT;

  const int* block_table;
  int key_end;
  int kv_head;
  int num_kv_heads;
  int block_size;

  // A key's row in the caches, -1: there is no such key.
  __device__ __forceinline__ int find_row(int key) const {
    return key < key_end ? cache_row(block_table, key, kv_head, num_kv_heads, block_size) : -1;
  }

  // Starts to copy the rows of `cache` that `rows` [TILE_KEYS] names, zeros for -1.
  static __device__ __forceinline__ void load(T* tile, const T* cache, const int* rows) {
#pragma unroll
    for (int i = 0; i < TILE_KEYS * SEGMENTS / THREADS; ++i) {
      const int key = (i * THREADS + threadIdx.x) / SEGMENTS;
      const int segment = (i * THREADS + threadIdx.x) % SEGMENTS;
      const int row = rows[key];
      const T* from = cache + static_cast<long long>(max(row, 0)) * HEAD_DIM + segment * SEGMENT;
      copy_async_16(tile + key * PITCH + segment * SEGMENT, from, row >= 0);
    }
  }
};

// A tile of e4m3 on its way through shared memory, in which a thread widens just what it has copied.
template <typename T, int HEAD_DIM, int TILE_KEYS>
struct CodeTile {
  static constexpr int THREADS = WARP_SIZE * WARPS;
  static constexpr int CODES = 16;
  static constexpr int PIECES = HEAD_DIM / CODES;  // of a key
  static constexpr int PITCH = HEAD_DIM + SEGMENT;

  unsigned char* codes;  // [TILE_KEYS, HEAD_DIM]

  // Starts to copy the rows of `cache` that `rows` [TILE_KEYS] names, zeros for -1.
  __device__ __forceinline__ void load(const unsigned char* cache, const int* rows) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE_KEYS * PIECES; i += THREADS) {
      const int row = rows[i / PIECES];
      const unsigned char* const from =
          cache + static_cast<long long>(max(row, 0)) * HEAD_DIM + i % PIECES * CODES;
      copy_async_16(codes + i * CODES, from, row >= 0);
    }
  }
  // To the tile [TILE_KEYS, PITCH] of T, once this thread's copies are there.
  __device__ __forceinline__ void widen(T* tile, float scale) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE_KEYS * PIECES; i += THREADS) {
      widen_e4m3(tile + i / PIECES * PITCH + i % PIECES * CODES,
                 *reinterpret_cast<const uint4*>(codes + i * CODES), scale);
    }
  }
};

// A block's tile of queries: row m is head m % group of the row's token m / group, counted from tile_row0.
template <int HEAD_DIM>
struct QueryTile {
  int first_token;
  int tile_row0;
  int num_rows;
  int num_heads;
  int group;
  int kv_head;

  __device__ __forceinline__ long long row_offset(int m) const {
    const int token = first_token + (tile_row0 + m) / group;
    return (static_cast<long long>(token) * num_heads + kv_head * group + (tile_row0 + m) % group) * HEAD_DIM;
  }

  __device__ __forceinline__ int head(int m) const { return kv_head * group + (tile_row0 + m) % group; }

  // Starts to copy TILE_ROWS rows to tile_q [TILE_ROWS, PITCH] in shared memory, zeros behind the last one.
  template <int TILE_ROWS, typename T>
  __device__ __forceinline__ void load(T* tile_q, const T* q) const {
    constexpr int THREADS = WARP_SIZE * WARPS;
    constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
    constexpr int PITCH = HEAD_DIM + SEGMENT;
#pragma unroll
    for (int i = 0; i < TILE_ROWS * SEGMENTS / THREADS; ++i) {
      const int m = (i * THREADS + threadIdx.x) / SEGMENTS;
      const int segment = (i * THREADS + threadIdx.x) % SEGMENTS;
      const bool valid = m < num_rows;
      copy_async_16(tile_q + m * PITCH + segment * SEGMENT,
                    q + (valid ? row_offset(m) : 0) + segment * SEGMENT, valid);
    }
  }
};

// A warp's 16 * ROW_TILES rows of a tile of queries. Of scores and outputs a lane holds, per 16 rows, those
// of rows lane / 4 and lane / 4 + 8 (ptx/mma.cuh).
template <typename T, int HEAD_DIM, int ROW_TILES, int TILE_KEYS>
struct WarpRows {
  static constexpr int PITCH = HEAD_DIM + SEGMENT;
  using Scores = float[ROW_TILES][TILE_KEYS / 8][4];

  int lane;
  float outputs[ROW_TILES][HEAD_DIM / 8][4];
  RowSoftmax softmax[ROW_TILES][2];

  // Adds the rows' products with the keys. warp_q [16 * ROW_TILES, PITCH], tile_k [TILE_KEYS, PITCH].
  __device__ __forceinline__ void multiply_keys(Scores& scores, const T* warp_q, const T* tile_k) const {
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += 16) {
      unsigned a[ROW_TILES][4];
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
        ldmatrix_x4(a[i], warp_q + (i * 16 + lane % 16) * PITCH + d + lane / 16 * 8);
      }
#pragma unroll
      for (int j = 0; j < TILE_KEYS / 8; j += 2) {
        unsigned b[4];
        ldmatrix_x4(b, tile_k + (j * 8 + lane % 8 + lane / 16 * 8) * PITCH + d + lane / 8 % 2 * 8);
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) {
          mma_m16n8k16<T>(scores[i][j], a[i], {b[0], b[1]});
          mma_m16n8k16<T>(scores[i][j + 1], a[i], {b[2], b[3]});
        }
      }
    }
  }

  // Turns scores s into tanh(s * scale).
  __device__ __forceinline__ void cap(Scores& scores, float scale) const {
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
      for (int j = 0; j < TILE_KEYS / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[i][j][e] = soft_capped(scores[i][j][e] * scale, 1.0f);
      }
    }
  }

  // Keys from key0 on. The warp's first row is `row0` of the sequence's rows, whose first is a head of the
  // token at first_position.
  __device__ __forceinline__ void mask(Scores& scores, int key0, int first_position, int row0, int group,
                                       int sliding_window) const {
#pragma unroll
    for (int i = 0; i < ROW_TILES * 2; ++i) {
      const int position = first_position + (row0 + i * 8 + lane / 4) / group;
#pragma unroll
      for (int s = 0; s < TILE_KEYS / 4; ++s) {
        const int key = key0 + s / 2 * 8 + lane % 4 * 2 + s % 2;
        float& score = scores[i / 2][s / 2][i % 2 * 2 + s % 2];
        if (!is_visible(key, position, sliding_window)) score = MINUS_INFINITY;
      }
    }
  }

  // Turns scores into weights relative to the rows' new maxima, and what was summed before with them.
  template <bool EXACT>
  __device__ __forceinline__ void weigh(Scores& scores, float scale_log2) {
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        RowSoftmax& row = softmax[i][h];
        float maximum = row.maximum;
#pragma unroll
        for (int j = 0; j < TILE_KEYS / 8; ++j) {
          maximum = fmaxf(maximum, fmaxf(scores[i][j][h * 2], scores[i][j][h * 2 + 1]));
        }
        const float offset = row.template renew<EXACT>(maximum, scale_log2);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < TILE_KEYS / 8; ++j) {
#pragma unroll
          for (int e = h * 2; e < h * 2 + 2; ++e) {
            scores[i][j][e] = RowSoftmax::weight(scores[i][j][e], scale_log2, offset);
            sum += scores[i][j][e];
          }
        }
        row.add(sum);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n) {
          outputs[i][n][h * 2] *= row.factor;
          outputs[i][n][h * 2 + 1] *= row.factor;
        }
      }
    }
  }

  // Adds the weighted values. tile_v [TILE_KEYS, PITCH].
  __device__ __forceinline__ void multiply_values(const Scores& weights, const T* tile_v) {
#pragma unroll
    for (int k = 0; k < TILE_KEYS / 16; ++k) {
      unsigned a[ROW_TILES][4];  // the scores' layout is that of a left operand
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float* pair = &weights[i][k * 2 + r / 2][r % 2 * 2];
          a[i][r] = pack<T>(pair[0], pair[1]);
        }
      }
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n += 2) {
        unsigned b[4];
        ldmatrix_x4_trans(b, tile_v + (k * 16 + lane % 16) * PITCH + n * 8 + lane / 16 * 8);
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) {
          mma_m16n8k16<T>(outputs[i][n], a[i], {b[0], b[1]});
          mma_m16n8k16<T>(outputs[i][n + 1], a[i], {b[2], b[3]});
        }
      }
    }
  }

  // warp_row0: the warp's first row in the tile; sinks of all heads, with SINKS.
  template <bool SINKS>
  __device__ __forceinline__ void store(T* out, const QueryTile<HEAD_DIM>& tile, int warp_row0,
                                        const T* sinks, float scale_log2) const {
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = softmax[i][h].row_sum();
        if constexpr (SINKS) {
          const int row = min(warp_row0 + i * 16 + h * 8 + lane / 4, tile.num_rows - 1);
          sum += exp2_fast(sink_score(sinks[tile.head(row)]) - softmax[i][h].maximum * scale_log2);
        }
        const float inverse = RowSoftmax::inverse(sum);
        const int m = warp_row0 + i * 16 + h * 8 + lane / 4;
        if (m >= tile.num_rows) continue;
        T* const to = out + tile.row_offset(m) + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n) {
          const unsigned pair = pack<T>(outputs[i][n][h * 2] * inverse, outputs[i][n][h * 2 + 1] * inverse);
          *reinterpret_cast<unsigned*>(to + n * 8) = pair;
        }
      }
    }
  }
};

// out = softmax over the visible keys of (q . k * scale), times v, for rows with two or more queries, in one
// pass over the keys (FlashAttention-2, Dao 2023). CAPPED scores are cap * tanh(q . k * scale / cap). Weights
// are rounded to T before they meet v.
//   in:  q [num_tokens, num_heads * HEAD_DIM] T
//        key_cache, value_cache [blocks, num_kv_heads, block_size, HEAD_DIM] Cached: T, or e4m3 with
//        kv_scales [2, num_kv_heads] float or null
//        block_tables [*, block_table_width] int
//        table_rows [num_seqs] int, each row's place in block_tables
//        cu_seqlens_q [num_seqs + 1] int
//        context_lens [num_seqs] int
//        scale_log2 = scale * log2(e), positive, or CAPPED scale / cap with cap_log2 = cap * log2(e)
//        sinks [num_heads] T, with SINKS: exp(sinks[h]) is added to the sum that head h's softmax divides by
//   out: out [num_tokens, num_heads * HEAD_DIM] T
// Layout: row-major, q and the caches 16-byte aligned; num_heads = group * num_kv_heads. The group's heads of
// consecutive tokens are the consecutive rows of a tile, so that they share its keys. Rows of shared memory
// are padded by 16 bytes, so that eight of them fill all banks.
// Grid: (at least the number of tiles, num_kv_heads), tiles of 64 * ROW_TILES rows, later tiles first since
// they see more keys.
// Block: 128 threads.
// Shared memory: (64 * ROW_TILES + 2 * TILE_KEYS) * (HEAD_DIM + 8) * sizeof(T) + 8 * TILE_KEYS bytes, and of
// e4m3 TILE_KEYS * HEAD_DIM.
// Unit of work: a block a tile of queries, a warp 16 * ROW_TILES rows of it. Key tiles begin at multiples of
// TILE_KEYS, so a query's result depends on its own row alone, and not on how its prompt was cut into chunks;
// IN_ORDER to the last bit, also where tiles of keys that it does not see differ with the queries beside it.
template <typename T, typename Cached, int HEAD_DIM, int ROW_TILES, int TILE_KEYS, bool IN_ORDER, bool CAPPED,
          bool SINKS>
__global__ void __launch_bounds__(32 * WARPS)
    paged_attention_prefill_kernel(PAGED_ATTENTION_PREFILL_PARAMS(T, Cached)) {
  constexpr int THREADS = WARP_SIZE * WARPS;
  constexpr int WARP_ROWS = 16 * ROW_TILES;
  constexpr int TILE_ROWS = WARP_ROWS * WARPS;
  constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
  constexpr int PITCH = HEAD_DIM + SEGMENT;
  using Keys = KeyTiles<T, HEAD_DIM, TILE_KEYS>;
  static_assert(sizeof(T) == 2, "tensor-core attention takes bfloat16 or float16");
  static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "head_dim must be a multiple of 16 and at most 256");
  static_assert(TILE_KEYS % 16 == 0 && TILE_KEYS <= THREADS, "a tile of keys is made of steps of 16");
  static_assert(TILE_ROWS * SEGMENTS % THREADS == 0 && TILE_KEYS * SEGMENTS % THREADS == 0,
                "every thread copies the same number of segments");

  extern __shared__ __align__(128) unsigned char shared_memory[];
  T* const tile_q = reinterpret_cast<T*>(shared_memory);
  T* const tile_k = tile_q + TILE_ROWS * PITCH;
  T* const tile_v = tile_k + TILE_KEYS * PITCH;
  int* const key_rows = reinterpret_cast<int*>(tile_v + TILE_KEYS * PITCH);  // [2][TILE_KEYS], -1: no key

  const int group = num_heads / num_kv_heads;
  const int kv_head = blockIdx.y;
  const int tile = gridDim.x - 1 - blockIdx.x;
  const RowItem found = find_row_item(
      num_seqs, tile, [&](int row) { return count_query_tiles(cu_seqlens_q, row, group, TILE_ROWS); });
  if (found.row < 0) return;
  const int first_token = cu_seqlens_q[found.row];
  const int num_queries = cu_seqlens_q[found.row + 1] - first_token;
  const int first_position = context_lens[found.row] - num_queries;
  const int* const block_table =
      block_tables + static_cast<long long>(table_rows[found.row]) * block_table_width;

  const int tile_row0 = found.item * TILE_ROWS;
  const int num_rows = min(num_queries * group - tile_row0, TILE_ROWS);
  const int key_end = max(first_position + (tile_row0 + num_rows - 1) / group + 1, 0);
  const int oldest_key = max(first_position + tile_row0 / group - sliding_window + 1, 0);
  const int key_begin = oldest_key / TILE_KEYS * TILE_KEYS;
  const QueryTile<HEAD_DIM> queries{first_token, tile_row0, num_rows, num_heads, group, kv_head};
  const Keys keys{block_table, key_end, kv_head, num_kv_heads, block_size};

  if (threadIdx.x < TILE_KEYS) key_rows[threadIdx.x] = keys.find_row(key_begin + threadIdx.x);
  queries.template load<TILE_ROWS>(tile_q, q);
  __syncthreads();
  const CodeTile<T, HEAD_DIM, TILE_KEYS> codes{reinterpret_cast<unsigned char*>(key_rows + 2 * TILE_KEYS)};
  if constexpr (IS_E4M3<Cached>) {
    if (key_begin < key_end) codes.load(key_cache, key_rows);
  } else if (key_begin < key_end) {
    Keys::load(tile_k, key_cache, key_rows);
  }
  copy_async_commit();

  const int lane = threadIdx.x % WARP_SIZE;
  const int warp_row0 = threadIdx.x / WARP_SIZE * WARP_ROWS;
  const int warp_first_position = first_position + (tile_row0 + warp_row0) / group;
  const int warp_last_position = first_position + (tile_row0 + warp_row0 + WARP_ROWS - 1) / group;
  WarpRows<T, HEAD_DIM, ROW_TILES, TILE_KEYS> rows{lane, {}, {}};

  int buffer = 0;
  for (int key0 = key_begin; key0 < key_end; key0 += TILE_KEYS) {
    const bool has_next = key0 + TILE_KEYS < key_end;
    int next_row = -1;
    if (has_next && threadIdx.x < TILE_KEYS) next_row = keys.find_row(key0 + TILE_KEYS + threadIdx.x);
    copy_async_wait<0>();
    if constexpr (IS_E4M3<Cached>) codes.widen(tile_k, cache_scale(kv_scales, 0, num_kv_heads, kv_head));
    __syncthreads();  // keys are there, and the tile of values is free
    if constexpr (IS_E4M3<Cached>) {
      codes.load(value_cache, key_rows + buffer * TILE_KEYS);
    } else {
      Keys::load(tile_v, value_cache, key_rows + buffer * TILE_KEYS);
    }
    copy_async_commit();

    float scores[ROW_TILES][TILE_KEYS / 8][4] = {};
    rows.multiply_keys(scores, tile_q + warp_row0 * PITCH, tile_k);
    if constexpr (CAPPED) rows.cap(scores, scale_log2);
    const int last_key = key0 + TILE_KEYS - 1;
    if (last_key > warp_first_position || key0 <= warp_last_position - sliding_window) {
      rows.mask(scores, key0, first_position, tile_row0 + warp_row0, group, sliding_window);
    }

    rows.template weigh<IN_ORDER>(scores, CAPPED ? cap_log2 : scale_log2);

    buffer ^= 1;
    if (threadIdx.x < TILE_KEYS) key_rows[buffer * TILE_KEYS + threadIdx.x] = next_row;
    copy_async_wait<0>();
    if constexpr (IS_E4M3<Cached>) codes.widen(tile_v, cache_scale(kv_scales, 1, num_kv_heads, kv_head));
    __syncthreads();  // values and the next rows are there, and the tile of keys is free
    if constexpr (IS_E4M3<Cached>) {
      if (has_next) codes.load(key_cache, key_rows + buffer * TILE_KEYS);
    } else if (has_next) {
      Keys::load(tile_k, key_cache, key_rows + buffer * TILE_KEYS);
    }
    copy_async_commit();

    rows.multiply_values(scores, tile_v);
  }

  rows.template store<SINKS>(out, queries, warp_row0, sinks, scale_log2);
}
