// Paged attention on tensor cores for rows with a few queries, a token and its draft: keys and values are
// read once for all of them, and each query's result has the bits that attention/decode.cu gives it in a row
// of its own.

#include "attention/decode_keys.cuh"
#include "attention/decode_splits.cuh"
#include "attention/draft_attention.cuh"
#include "attention/draft_merge.cuh"
#include "generated/drafts.cuh"
#include "ptx/copy.cuh"

// The part of a row that is a block's: of `parts` parts, part `part`.
struct DraftUnit {
  int row;
  int part;
  int parts;
};

// Blocks are for the rows up to the last one with context, as many each as there are, but no more than most.
__device__ __forceinline__ DraftUnit find_unit(int unit, int num_units, int num_rows, int most_parts) {
  const int parts = min(max(num_units / max(num_rows, 1), 1), max(ceil_div(most_parts, max(num_rows, 1)), 1));
  const int part = unit / max(num_rows, 1);
  return {unit - part * num_rows, part, parts};
}

// The rows up to the last one with context. Every lane of a warp must call; all get the result.
__device__ __forceinline__ int count_rows(const int* context_lens, int num_seqs) {
  unsigned count = 0;
#pragma unroll 4
  for (int row = threadIdx.x % WARP_SIZE; row < num_seqs; row += WARP_SIZE) {
    if (context_lens[row] > 0) count = row + 1;
  }
  return static_cast<int>(__reduce_max_sync(FULL_WARP, count));
}

// How many queries from the first on have their keys divided alike; `most` at most.
__device__ __forceinline__ int count_alike(const Splits& splits, int context_len, int most,
                                           int sliding_window, int min_split_keys, int max_splits) {
  int count = most;
#pragma unroll 1
  for (; count > 1; --count) {  // where the last is divided so, all are
    const Splits last = find_splits(context_len + count - 1, sliding_window, min_split_keys, max_splits);
    if (last.first_key == splits.first_key && last.size == splits.size) break;
  }
  return count;
}

// The queries of a block's heads to shared memory, [16 * ROW_TILES, PITCH]; rows without one are zeros.
template <typename Tile, typename T, int HEAD_DIM, int ROW_TILES, int THREADS>
__device__ __forceinline__ void copy_draft_queries(typename Tile::Operand* tile_q, const T* queries,
                                                   const DraftRows& rows, int num_heads) {
  constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
#pragma unroll 4
  for (int i = threadIdx.x; i < TILE_QUERY_ROWS * ROW_TILES * SEGMENTS; i += THREADS) {
    const int row = i / SEGMENTS;
    const int place = i % SEGMENTS * SEGMENT;
    Vec<T, SEGMENT> elements = {};
    if (rows.has(row)) {
      elements =
          Vec<T, SEGMENT>::load(queries + (rows.query(row) * num_heads + rows.head(row)) * HEAD_DIM + place);
    }
    Tile::store_query(tile_q + row * Tile::PITCH, place, elements);
  }
}

// out = softmax over the visible keys of (q . k * scale), times v: of a row's n queries, its last n tokens,
// each sees the keys up to its own. Rows without context, and the tokens after the last row, give zeros.
//   in:  q [num_tokens, num_heads * HEAD_DIM] T
//        key_cache, value_cache [blocks, num_kv_heads, block_size, HEAD_DIM] Cached: T, or e4m3 with
//        kv_scales [2, num_kv_heads] float or null; they have every key
//        block_tables [*, block_table_width] int
//        table_rows [num_seqs] int, each row's place in block_tables
//        cu_seqlens_q [num_seqs + 1] int, at most tiles * (16 * ROW_TILES >> head_rows_log2) queries a row
//        context_lens [num_seqs] int, of the row's last query
//        sinks [num_heads] T, with SINKS: exp(sinks[h]) is added to the sum that head h's softmax divides by
//        min_split_keys, max_splits, scale_log2, cap_log2 as paged_attention_decode_kernel;
//        2^head_rows_log2 rows of a tile for a query's heads; most_parts of all rows together
//   out: out [num_tokens, num_heads * HEAD_DIM] T
//        partial_out [num_tokens, num_heads, max_splits, HEAD_DIM] float
//        partial_sums [num_tokens, num_heads, max_splits, 2] float
//        arrivals [num_tokens, num_groups] unsigned, 0 before and after
// q, the keys and values of this step's tokens and `out` alone may be written or read by a kernel of the same
// graph that may not have ended: all else is read ahead.
// Layout: row-major, q, out and the caches 16-byte aligned; num_heads = group * num_kv_heads, block_size a
// multiple of 8. Rows of shared memory are padded by 16 bytes, so that eight of them fill all banks.
// Grid: (num_groups * tiles, at least num_seqs) with num_groups = num_kv_heads * ceil(group / 8).
// Block: 32 * WARPS threads.
// Shared memory: (WARPS * STAGES * 2 * 16 + 16 * ROW_TILES) * (HEAD_DIM + 8) * sizeof(T) and SENT_FLOATS
// floats for each MERGED_FLOATS elements of 16 * ROW_TILES rows; of e4m3 WARPS * (STAGES * 2 * 16 * HEAD_DIM
// bytes and 16 * (HEAD_DIM + 4) floats) for the first rows.
// Unit of work: a block a part of the splits of a key/value head's keys for a tile of its heads' queries (up
// to 8 heads together). Blocks are shared out among the rows that there are. Splits, and the keys of each of
// the WARPS warps within them, are those of a query alone; queries of a tile that are divided in different
// ways are done one after the other. Where a row's splits are several blocks' work, every split's result goes
// to partial_out and partial_sums, and the last of the blocks to arrive merges them; else the one block
// merges as it goes. The order is the same.
template <typename T, typename Cached, int HEAD_DIM, int WARPS, int STAGES, int ROW_TILES, bool CAPPED,
          bool SINKS>
__global__ void __launch_bounds__(32 * WARPS)
    paged_attention_drafts_kernel(PAGED_ATTENTION_DRAFTS_PARAMS(T, Cached)) {
  constexpr int STEP_KEYS = WARP_KEYS * WARPS;
  constexpr int TILE_ROWS = TILE_QUERY_ROWS * ROW_TILES;
  using Attention = DraftAttention<T, HEAD_DIM, ROW_TILES, Cached>;
  using Tile = typename Attention::Tile;
  using Operand = typename Tile::Operand;
  using Ring = KeyRing<T, Cached, HEAD_DIM, WARPS, STAGES>;
  static_assert(SPLIT_KEYS % STEP_KEYS == 0, "all warps must end a split together");

  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ float warp_maxima[WARPS][TILE_QUERY_ROWS];
  __shared__ float warp_sums[WARPS][TILE_QUERY_ROWS];
  __shared__ bool is_last;
  unsigned char* const rings = shared_memory;
  Operand* const tile_q = reinterpret_cast<Operand*>(rings + Ring::bytes(TILE_QUERY_ROWS));
  float* const results = reinterpret_cast<float*>(tile_q + TILE_ROWS * Attention::PITCH);

  let_next_kernel_start();
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int num_heads = group * num_kv_heads;
  const int tile = small_div(blockIdx.x, num_groups);
  const int head_group = blockIdx.x - tile * num_groups;
  int kv_head = head_group;
  int group_begin = 0;
#pragma unroll 1
  for (; kv_head >= num_kv_heads; kv_head -= num_kv_heads) group_begin += GROUP_ROWS;
  const int head0 = kv_head * group + group_begin;
  const int num_group_heads = min(group - group_begin, GROUP_ROWS);

  const int num_rows = count_rows(context_lens, num_seqs);
  const DraftUnit unit = find_unit(blockIdx.y, gridDim.y, num_rows, most_parts);
  const bool has_row = num_rows > 0 && unit.part < unit.parts;
  const int first_token = has_row ? cu_seqlens_q[unit.row] : 0;
  const int num_queries = has_row ? cu_seqlens_q[unit.row + 1] - first_token : 0;
  const int context_len = has_row ? context_lens[unit.row] : 0;
  const bool is_empty = context_len <= 0 || num_queries == 0;
  // The last blocks, which have nothing else to do, clear what is behind the rows.
  const int first_behind = cu_seqlens_q[num_rows] + static_cast<int>(gridDim.y - 1 - blockIdx.y);
  if (tile == 0 && (first_behind < num_tokens || (is_empty && unit.part == 0))) {
    wait_for_earlier_kernels();
    T* const heads = out + head0 * HEAD_DIM;
    const int width = num_heads * HEAD_DIM, elements = num_group_heads * HEAD_DIM;
    if (is_empty && unit.part == 0) {
      clear_rows(heads, first_token, first_token + num_queries, 1, width, elements);
    }
    clear_rows(heads, first_behind, num_tokens, gridDim.y, width, elements);
  }
  if (is_empty) return;
  const int tile_queries = TILE_ROWS >> head_rows_log2;
  const int tile_end = min((tile + 1) * tile_queries, num_queries);
  const int fresh_key = context_len - num_queries;  // the first that this step has stored
  const int* const block_table =
      block_tables + static_cast<long long>(table_rows[unit.row]) * block_table_width;
  const PagedKeys<Cached> keys{
      key_cache, value_cache, block_table, kv_head, num_kv_heads, block_size, 0xffffffffu / block_size + 1,
      kv_scales};
  const float key_scale_log2 = keys.scale(0, scale_log2), value_scale = keys.scale(1, 1.0f);

#pragma unroll 1
  for (int query = tile * tile_queries, alike = 0; query < tile_end; query += alike) {
    const int first_len = fresh_key + query + 1;  // keys that the first of the queries sees
    Splits splits = find_splits(first_len, sliding_window, min_split_keys, max_splits);
    alike = count_alike(splits, first_len, tile_end - query, sliding_window, min_split_keys, max_splits);
    const int last_len = first_len + alike - 1;
    splits.count = max(ceil_div(last_len - splits.first_key, splits.size), 1);
    const int num_blocks = min(splits.count, unit.parts);
    if (unit.part >= num_blocks) continue;
    const int first_split = unit.part * splits.count / num_blocks;
    const int end_split = (unit.part + 1) * splits.count / num_blocks;
    const int key_begin = splits.first_key + first_split * splits.size;
    const int key_end = min(splits.first_key + end_split * splits.size, last_len);
    const int oldest_key = max(first_len - sliding_window, 0);
    const unsigned place = shared_address(rings + warp * Ring::WARP_BYTES);
    const Ring ring{keys, key_begin, key_end, oldest_key, key_end, place, evict_first_policy(), lane, warp};

    // Keys of earlier steps may be copied while the kernels in front of this one still run.
    const bool reads_fresh = key_begin + STAGES * STEP_KEYS > fresh_key;
    if (reads_fresh) wait_for_earlier_kernels();
    int next_row = ring.find_unit_row(0);
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) {
      const int unit_row = next_row;
      next_row = ring.find_unit_row(i + 1);
      if (ring.tile_begin(i) < key_end) ring.load_tile(i, unit_row);
      copy_async_commit();
    }
    if (!reads_fresh) wait_for_earlier_kernels();
    const DraftRows rows{head_rows_log2, num_group_heads, alike};
    const long long first_head = static_cast<long long>(first_token + query) * num_heads + head0;
    copy_draft_queries<Tile, T, HEAD_DIM, ROW_TILES, WARP_SIZE * WARPS>(tile_q, q + first_head * HEAD_DIM,
                                                                        rows, num_heads);
    __syncthreads();

    Attention attention(rows, {first_len, sliding_window, alike});
    const DraftMerger<T, HEAD_DIM, WARPS, ROW_TILES, SINKS> merger{
        rows,         splits.count, num_blocks, num_heads,     max_splits, partial_out,
        partial_sums, results,      out,        sinks + head0, first_head};
    const int num_steps = ceil_div(key_end - key_begin, STEP_KEYS);
    const int split_steps = splits.size / STEP_KEYS;
    int split = first_split;
    int steps_left = split_steps;
#pragma unroll 1
    for (int i = 0; i < num_steps; ++i) {
      copy_async_wait<STAGES - 1>();
      __syncwarp();
      if (ring.tile_begin(i) < key_end) {
        const Tile keys_and_values(rings + warp * Ring::WARP_BYTES + i % STAGES * Ring::TILE_BYTES);
        attention.template add<CAPPED>(tile_q, keys_and_values, ring.tile_begin(i), key_scale_log2, cap_log2);
        __syncwarp();
      }
      if (--steps_left == 0 || i + 1 == num_steps) {
        // The end of a split: merge the warps through the stages that they have just left.
        float* const merged = Ring::merged(rings, i);
        const int stride = Ring::merge_stride(TILE_QUERY_ROWS);
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
          attention.finish(m, merged + warp * stride, warp_maxima[warp], warp_sums[warp], value_scale);
          __syncthreads();
          merger.merge_split(m, merged, stride, warp_maxima, warp_sums, split);
          __syncthreads();  // the stages are free, and the tile's results are written
        }
        ++split;
        steps_left = split_steps;
      }
      if (ring.tile_begin(i + STAGES) < key_end) ring.load_tile(i + STAGES, next_row);
      copy_async_commit();
      next_row = ring.find_unit_row(i + STAGES + 1);
    }

    if (num_blocks > 1) {
      if (threadIdx.x == 0) {
        const long long counter = static_cast<long long>(first_token + query) * num_groups + head_group;
        is_last = arrives_last(arrivals + counter, num_blocks);
      }
      __syncthreads();
      if (is_last) merger.store_partials();
    }
    if (query + alike < tile_end) {  // what follows begins with the ring anew
      copy_async_wait<0>();
      __syncthreads();
    }
  }
}
