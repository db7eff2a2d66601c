// Keys and values of a cache of e4m3 as __half, for rows of which many tiles of queries read them.

#include "attention/attention.cuh"
#include "attention/cached.cuh"
#include "generated/widen_cache.cuh"

// The tiles of rows, in their order, each row's behind those of the rows before it.
struct WidenedRows {
  const int* cu_seqlens_q;
  const int* context_lens;
  int num_seqs;
  int min_queries;
  int min_keys;
  int capacity;

  __device__ __forceinline__ int num_queries(int row) const {
    return cu_seqlens_q[row + 1] - cu_seqlens_q[row];
  }
  __device__ __forceinline__ int count_tiles(int row) const {
    const int num_keys = context_lens[row];
    const bool pays = num_queries(row) >= min_queries && num_keys >= min_keys;
    return pays ? ceil_div(num_keys, TILE_KEYS) : 0;
  }

  // By one warp.
  __device__ __forceinline__ void store_first_tiles(int* first_tiles) const {
    const int lane = threadIdx.x % WARP_SIZE;
    int before = 0;
    for (int row0 = 0; row0 < num_seqs; row0 += WARP_SIZE) {
      const int row = row0 + lane;
      const int tiles = row < num_seqs ? count_tiles(row) : 0;
      int through = tiles;
#pragma unroll
      for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
        const int other = __shfl_up_sync(FULL_WARP, through, offset);
        if (lane >= offset) through += other;
      }
      through += before;
      if (row < num_seqs) first_tiles[row] = tiles > 0 && through <= capacity ? through - tiles : -1;
      before = __shfl_sync(FULL_WARP, through, WARP_SIZE - 1);
    }
  }
};

// keys, values = codes of the caches, exactly and without their scales, of rows with at least `min_queries`
// queries and `min_keys` keys, as far as there is room. Where `keys` is null, values alone.
//   in:  key_cache, value_cache [blocks, num_kv_heads, block_size, HEAD_DIM] e4m3
//        block_tables [tables, block_table_width] int
//        table_rows [num_seqs] int
//        cu_seqlens_q [num_seqs + 1] int
//        context_lens [num_seqs] int
//   out: keys, values [capacity, num_kv_heads, TILE_KEYS, HEAD_DIM] __half: a row's keys from its first on,
//        in tiles one after another. What lies behind its last key, and tiles that no query's window reaches,
//        stay as they are
//        first_tiles [num_seqs] int: the first of each row, -1 of a row that is left as it is
// Only the caches may be written by a kernel of the same graph that may not have ended.
// Layout: row-major, caches 8-byte and the results 16-byte aligned.
// Grid: any number of blocks.
// Block: 256 threads.
// Shared memory: none.
// Unit of work: a block has a tile of keys or of values of a head, a thread eight elements of every 16th (of
// 64: every 32nd) key.
template <typename Cached, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS, 6) widen_cache_kernel(WIDEN_CACHE_PARAMS(Cached)) {
  constexpr int VECTORS = HEAD_DIM / CHUNK;  // of a key
  constexpr int KEYS_AT_ONCE = THREADS / VECTORS;
  constexpr int ROUNDS = TILE_KEYS / KEYS_AT_ONCE;
  static_assert(IS_E4M3<Cached> && ROUNDS * KEYS_AT_ONCE == TILE_KEYS, "all threads have the same rounds");
  const WidenedRows rows{cu_seqlens_q, context_lens, num_seqs, min_queries, min_keys, capacity};
  const int key_of_thread = threadIdx.x / VECTORS, element = threadIdx.x % VECTORS * CHUNK;
  const int parts = keys == nullptr ? num_kv_heads : 2 * num_kv_heads;  // of a tile, values last

  let_next_kernel_start();
  wait_for_earlier_kernels();
  if (blockIdx.x == 0 && threadIdx.x < WARP_SIZE) rows.store_first_tiles(first_tiles);
#pragma unroll 1
  for (int item = blockIdx.x; item < capacity * parts; item += gridDim.x) {
    const int tile = item / parts, kv_head = item % num_kv_heads;
    const bool is_value = item % parts >= parts - num_kv_heads;
    const RowItem found = find_row_item(num_seqs, tile, [&](int row) { return rows.count_tiles(row); });
    if (found.row < 0) return;
    const int key0 = found.item * TILE_KEYS, context_len = context_lens[found.row];
    const int first_seen = context_len - rows.num_queries(found.row) - sliding_window + 1;
    if (tile - found.item + rows.count_tiles(found.row) > capacity || key0 + TILE_KEYS <= first_seen)
      continue;

    const int* const block_table =
        block_tables + static_cast<long long>(table_rows[found.row]) * block_table_width;
    const Cached* const from = (is_value ? value_cache : key_cache) + element;
    __half* const to =
        (is_value ? values : keys) +
        ((static_cast<long long>(tile) * num_kv_heads + kv_head) * TILE_KEYS + key_of_thread) * HEAD_DIM +
        element;
    uint2 codes[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int key = key0 + key_of_thread + i * KEYS_AT_ONCE;
      if (key < context_len) {
        const long long row = cache_row(block_table, key, kv_head, num_kv_heads, block_size);
        codes[i] = load_updated(reinterpret_cast<const uint2*>(from + row * HEAD_DIM));
      }
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      if (key0 + key_of_thread + i * KEYS_AT_ONCE < context_len) {
        *reinterpret_cast<uint4*>(to + i * KEYS_AT_ONCE * HEAD_DIM) = halves_of_e4m3(codes[i].x, codes[i].y);
      }
    }
  }
}
