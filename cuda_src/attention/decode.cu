// Paged attention on tensor cores for rows with one query, bound by reading keys and values once; where every
// row of a step has one query, the step's norm, rotary embedding and KV store as well.

#include "attention/decode_keys.cuh"
#include "attention/decode_merge.cuh"
#include "attention/decode_splits.cuh"
#include "attention/warp_attention.cuh"
#include "generated/decode.cuh"
#include "ptx/copy.cuh"

constexpr int NO_KEY = -1;
static_assert(SENT_FLOATS >= MERGED_FLOATS + 2 && SENT_FLOATS % 4 == 0, "elements, maximum and sum");

// Waits when a block ends, wherever it does.
struct WaitAtEnd {
  bool waits;
  __device__ __forceinline__ ~WaitAtEnd() {
    if (waits) wait_for_earlier_kernels();
  }
};

// The splits of a row from `first` to `end` - 1, a block's share of them; num_blocks: that have some.
struct BlockSplits {
  int first;
  int end;
  int num_blocks;
};

// `part`: the block's number among those of its row and heads.
template <bool CLUSTERED>
__device__ __forceinline__ BlockSplits find_block_splits(const Splits& splits, int part, int block_splits,
                                                         int cluster_log2) {
  BlockSplits found;
  found.first = part * block_splits;
  found.end = min(found.first + block_splits, splits.count);
  found.num_blocks = 1;
  if constexpr (CLUSTERED) {
    found.num_blocks = min(splits.count, 1 << cluster_log2);
    if (splits.count > found.num_blocks) {
      found.first = part * splits.count >> cluster_log2;
      found.end = (part + 1) * splits.count >> cluster_log2;
    } else {
      found.first = part;
      found.end = part + 1;
    }
  } else if (splits.count > block_splits) {
    found.num_blocks = ceil_div(splits.count, block_splits);
  }
  return found;
}

// `part`: CLUSTERED of a cluster. The first `helpers` blocks along y have the splits that only long rows
// have.
template <bool CLUSTERED>
__device__ __forceinline__ RowPart find_row_part(const RowDivision& division, int helpers, int cluster_log2,
                                                 const int* context_lens, int num_seqs) {
  if constexpr (CLUSTERED) {
    return {static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x) & ((1 << cluster_log2) - 1)};
  }
  const int row = static_cast<int>(blockIdx.y) - helpers, part = blockIdx.z;
  if (row >= 0) return {row, part};
  return find_long_part(part * helpers + blockIdx.y, division, context_lens, num_seqs);
}

// A key/value head, and the first of those of its query heads that a block has.
struct HeadGroup {
  int kv_head;
  int begin;

  static __device__ __forceinline__ HeadGroup of(int number, int num_kv_heads) {
    HeadGroup found{number, 0};
#pragma unroll 1
    for (; found.kv_head >= num_kv_heads; found.kv_head -= num_kv_heads) found.begin += GROUP_ROWS;
    return found;
  }
};

// A row's place and length, and of its one query's token the slot in the cache and position (FUSED; else -1
// and 0). Zeros beyond the last row.
struct DecodeRow {
  int token;
  int next_token;
  int context_len;
  int table_row;
  int slot = -1;
  int position = 0;

  // All that does not depend on one another is asked for at once.
  __device__ __forceinline__ DecodeRow(int row, int num_seqs, const int* cu_seqlens_q,
                                       const int* context_lens, const int* table_rows) {
    const bool is_row = row < num_seqs;
    token = is_row ? cu_seqlens_q[row] : 0;
    next_token = is_row ? cu_seqlens_q[row + 1] : 0;
    context_len = is_row ? context_lens[row] : 0;
    table_row = is_row ? table_rows[row] : 0;
  }

  // Where every row has a query its token is the row's number: `likely`.
  __device__ __forceinline__ void find_slot(int likely, const int* slot_mapping, const int* positions,
                                            bool has_positions) {
    slot = slot_mapping[likely];
    if (has_positions) position = positions[likely];
    if (token != likely && next_token != token) {
      slot = slot_mapping[token];
      if (has_positions) position = positions[token];
    }
  }

  __device__ __forceinline__ bool has_one_query() const { return next_token - token == 1; }
};

// out = softmax over the visible keys of (q . k * scale), times v, for rows with one query. Rows without
// context, and the tokens after the last row, give zeros. FUSED: q and the newest key and value are made from
// qkv as rope_and_store_kernel makes them, and the key and value are stored in the cache (unless the slot is
// -1: then the cache has them); else q holds finished queries and the cache every key.
//   in:  q [num_tokens, num_heads * HEAD_DIM] T; FUSED:
//        q [num_tokens, (num_heads + 2 * num_kv_heads) * HEAD_DIM] T
//        key_cache, value_cache [blocks, num_kv_heads, block_size, HEAD_DIM] Cached: T, or e4m3 with
//        kv_scales [2, num_kv_heads] float or null
//        block_tables [*, block_table_width] int
//        table_rows [num_seqs] int, each row's place in block_tables
//        cu_seqlens_q [num_seqs + 1] int
//        context_lens [num_seqs] int
//        FUSED alone: q_norm, k_norm, cos_sin, positions, slot_mapping, rotary_dim, eps as
//        rope_and_store_kernel
//        sinks [num_heads] T, with SINKS: exp(sinks[h]) is added to the sum that head h's softmax divides by
//        scale_log2 = scale * log2(e), positive, or CAPPED scale / cap with cap_log2 = cap * log2(e), for
//        scores cap * tanh(q . k * scale / cap); even_splits, min_split_keys, max_split_keys and max_splits
//        as RowDivision, the keys multiples of 64; helpers: blocks along y for long rows; beside_prefill: the
//        kernel in front has let this one start when all that both need was there, and they run side by side
//   out: out [num_tokens, num_heads * HEAD_DIM] T
//        partial_out [num_seqs, num_heads, max_splits, HEAD_DIM] float
//        partial_sums [num_seqs, num_heads, max_splits, 2] float
//        arrivals [num_seqs, gridDim.x] unsigned, 0 before and after
// Only q, and without FUSED the cache, may be written by a kernel of the same graph that may not have ended:
// all else is read ahead.
// Layout: row-major, q, out and the caches 16-byte aligned, norms and cos_sin to two elements; num_heads =
// group * num_kv_heads, rotary_dim a multiple of 4, block_size of 8. Rows of shared memory are padded by 16
// bytes, so that eight of them fill all banks.
// Grid: (num_kv_heads * ceil(group / 8), helpers + max(num_seqs, 1), blocks of a row), the last of
// ceil(most splits of a row / block_splits) or, with helpers, even_splits; CLUSTERED: 2^cluster_log2 blocks
// along x, a cluster, for each of the former, and one along z.
// Block: 32 * WARPS threads.
// Shared memory: (WARPS * STAGES * 2 * 16 + min(group, 8)) * (HEAD_DIM + 8) * sizeof(T) + 2 * HEAD_DIM *
// sizeof(T), and CLUSTERED SENT_FLOATS floats for each split and MERGED_FLOATS elements of the largest share;
// of e4m3 WARPS * (STAGES * 2 * 16 * HEAD_DIM bytes and min(group, 8) * (HEAD_DIM + 4) floats) for the rings.
// Unit of work: a block block_splits consecutive splits of a key/value head's keys, CLUSTERED an even part of
// them, all of its query heads (up to 8) together; blocks beyond a row's splits end at once. Warps take 16
// keys at a time in turn, each with its own ring of STAGES copies that runs on across splits, and meet only
// at the end of a split. Where a row's splits are several blocks' work, every split's sum of weighted values,
// maximum and sum go to partial_out and partial_sums, and the last of the blocks to arrive merges them; or,
// CLUSTERED, to the shared memory of the block of the cluster whose share of the elements they belong to;
// else the one block merges as it goes. The order is the same.
template <typename T, typename Cached, int HEAD_DIM, int WARPS, int STAGES, bool FUSED, bool CLUSTERED,
          bool CAPPED, bool SINKS>
__global__ void __launch_bounds__(32 * WARPS)
    paged_attention_decode_kernel(PAGED_ATTENTION_DECODE_PARAMS(T, Cached)) {
  constexpr int STEP_KEYS = WARP_KEYS * WARPS;
  using Attention = WarpAttention<T, HEAD_DIM, Cached>;
  using Tile = typename Attention::Tile;
  using Operand = typename Tile::Operand;
  static_assert(SPLIT_KEYS % STEP_KEYS == 0, "all warps must end a split together");
  using Merger = SplitMerger<T, HEAD_DIM, WARPS, CLUSTERED, SINKS>;
  using Blocks = typename Merger::Blocks;

  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ float warp_maxima[WARPS][GROUP_ROWS];
  __shared__ float warp_sums[WARPS][GROUP_ROWS];
  __shared__ bool is_last;
  using Ring = KeyRing<T, Cached, HEAD_DIM, WARPS, STAGES>;
  unsigned char* const rings = shared_memory;
  const int merge_rows = min(group, GROUP_ROWS);
  Operand* const tile_q = reinterpret_cast<Operand*>(rings + Ring::bytes(merge_rows));

  let_next_kernel_start();
  if (!FUSED && !beside_prefill) wait_for_earlier_kernels();
  // Later kernels wait for this one alone.
  const WaitAtEnd at_end{!FUSED && beside_prefill != 0};
  const RowDivision division{
      even_splits,   min_split_keys, max_split_keys, max_splits, helpers * static_cast<int>(gridDim.z),
      sliding_window};
  const auto [row, part] = find_row_part<CLUSTERED>(division, helpers, cluster_log2, context_lens, num_seqs);
  if (row < 0) return;
  const auto [kv_head, group_begin] =
      HeadGroup::of(CLUSTERED ? blockIdx.x >> cluster_log2 : blockIdx.x, num_kv_heads);
  const int num_heads = group * num_kv_heads;
  const int head0 = kv_head * group + group_begin;
  const int num_group_heads = min(group - group_begin, GROUP_ROWS);
  // [2][HEAD_DIM]: key and value.
  Cached* const newest = reinterpret_cast<Cached*>(tile_q + num_group_heads * Tile::PITCH);
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  auto clear = [&](int first, int end) {
    clear_rows(out + head0 * HEAD_DIM, first, end, gridDim.y - helpers, num_heads * HEAD_DIM,
               num_group_heads * HEAD_DIM);
  };

  DecodeRow own_row(row, num_seqs, cu_seqlens_q, context_lens, table_rows);
  const int first_behind = part == 0 ? cu_seqlens_q[num_seqs] + row : num_tokens;  // of what has no row
  if constexpr (FUSED) own_row.find_slot(min(row, num_tokens - 1), slot_mapping, positions, rotary_dim > 0);
  const int token = own_row.token, slot = own_row.slot, context_len = own_row.context_len;
  const Splits splits = find_row_splits(division, context_len, context_lens, num_seqs);
  const BlockSplits own = find_block_splits<CLUSTERED>(splits, part, block_splits, cluster_log2);
  const int num_blocks = own.num_blocks;
  if (!own_row.has_one_query() || context_len <= 0) {
    if (part != 0) return;
    wait_for_earlier_kernels();
    if (own_row.has_one_query()) clear(token, token + 1);
    clear(first_behind, num_tokens);
    return;
  }
  if (own.first >= splits.count) return;
  if (CLUSTERED && num_blocks > 1) Blocks::arrive();
  const int key_begin = splits.first_key + own.first * splits.size;
  const int key_end = min(splits.first_key + own.end * splits.size, context_len);
  const int oldest_key = max(context_len - sliding_window, 0);
  const int newest_key = slot >= 0 ? context_len - 1 : NO_KEY;  // the one that the cache does not have yet
  const int cached_end = min(key_end, slot >= 0 ? context_len - 1 : context_len);
  const int* const block_table = block_tables + static_cast<long long>(own_row.table_row) * block_table_width;

  const int split_steps = splits.size / STEP_KEYS;
  const PagedKeys<Cached> keys{
      key_cache, value_cache, block_table, kv_head, num_kv_heads, block_size, 0xffffffffu / block_size + 1,
      kv_scales};
  const unsigned place = shared_address(rings + warp * Ring::WARP_BYTES);
  const Ring ring{keys, key_begin, key_end, oldest_key, cached_end, place, evict_first_policy(), lane, warp};
  const float key_scale_log2 = keys.scale(0, scale_log2), value_scale = keys.scale(1, 1.0f);

  // The keys of earlier steps may be copied while the kernels in front of this one still run.
  int next_row = ring.find_unit_row(0);
#pragma unroll 1
  for (int i = 0; i < STAGES; ++i) {
    const int unit_row = next_row;
    next_row = ring.find_unit_row(i + 1);
    if (ring.tile_begin(i) < key_end) ring.load_tile(i, unit_row);
    copy_async_commit();
  }

  if (FUSED) {
    const bool has_newest = newest_key >= key_begin && newest_key < key_end;
    const float* const angles =
        rotary_dim > 0 ? cos_sin + static_cast<long long>(own_row.position) * rotary_dim : nullptr;
    const T* const heads = q + static_cast<long long>(token) * (num_heads + 2 * num_kv_heads) * HEAD_DIM;
    const TokenHeads<T, HEAD_DIM, WARPS> token_heads{heads, angles,          q_norm,           k_norm,
                                                     head0, num_group_heads, num_heads,        rotary_dim,
                                                     eps,   has_newest,      group_begin == 0, slot};
    token_heads.prepare(tile_q, newest, keys, warp);
  } else {
    copy_queries<Tile, T, HEAD_DIM, WARP_SIZE * WARPS>(
        tile_q, q + (static_cast<long long>(token) * num_heads + head0) * HEAD_DIM, num_group_heads);
  }
  __syncthreads();

  Attention attention(tile_q, num_group_heads);
  const long long first_partial = (static_cast<long long>(row) * num_heads + head0) * max_splits;
  Merger merger(num_group_heads, num_blocks, max_splits, partial_out, partial_sums, first_partial,
                reinterpret_cast<float*>(reinterpret_cast<Operand*>(newest) + 2 * HEAD_DIM));
  const int num_steps = ceil_div(key_end - key_begin, STEP_KEYS);
  int split = own.first;
  int steps_left = split_steps;
#pragma unroll 1
  for (int i = 0; i < num_steps; ++i) {
    copy_async_wait<STAGES - 1>();
    __syncwarp();

    if (ring.tile_begin(i) < key_end) {
      unsigned char* const tile = rings + warp * Ring::WARP_BYTES + i % STAGES * Ring::TILE_BYTES;
      const int newest_place = newest_key - ring.tile_begin(i);
      if (FUSED && newest_place >= 0 && newest_place < WARP_KEYS) ring.insert(newest, newest_place, tile);

      attention.template add<CAPPED>(Tile(tile), ring.tile_begin(i), oldest_key, key_end, key_scale_log2,
                                     cap_log2);
      __syncwarp();
    }
    if (--steps_left == 0 || i + 1 == num_steps) {
      // The end of a split: merge the warps through the stages that they have just left.
      float* const merged = Ring::merged(rings, i);
      const int stride = Ring::merge_stride(merge_rows);
      attention.finish(merged + warp * stride, warp_maxima[warp], warp_sums[warp], num_group_heads,
                       value_scale);
      if (CLUSTERED && num_blocks > 1 && split == own.first) Blocks::wait();  // the others have begun
      __syncthreads();
      merger.merge_split(merged, stride, warp_maxima, warp_sums, split);
      __syncthreads();  // the stages are free, and all of the split's results are written
      ++split;
      steps_left = split_steps;
    }
    if (ring.tile_begin(i + STAGES) < key_end) ring.load_tile(i + STAGES, next_row);
    copy_async_commit();
    next_row = ring.find_unit_row(i + STAGES + 1);
  }

  if (first_behind < num_tokens) clear(first_behind, num_tokens);
  const long long first_head = static_cast<long long>(token) * num_heads + head0;
  if (CLUSTERED && num_blocks > 1) {
    Blocks::sync();
    merger.store_share(out, first_head, part, splits.count, sinks + head0);
    return;
  }
  if (!CLUSTERED && num_blocks > 1) {
    if (threadIdx.x == 0) {
      is_last = arrives_last(arrivals + static_cast<long long>(row) * gridDim.x + blockIdx.x, num_blocks);
    }
    __syncthreads();
    if (!is_last) return;
  }
  merger.store(out, first_head, splits.count, sinks + head0);
}
