// Paged attention on tensor cores for rows with one query, bound by reading keys and values once; where every
// row of a step has one query, the step's norm, rotary embedding and KV store as well.

#include "cluster.cuh"
#include "generated/decode.cuh"
#include "ptx/copy.cuh"
#include "rope.cuh"
#include "warp_attention.cuh"

constexpr int NO_KEY = -1;
static_assert(SENT_FLOATS >= MERGED_FLOATS + 2 && SENT_FLOATS % 4 == 0, "elements, maximum and sum");

// How a row's keys are divided. It depends on the row's own length, the window and two numbers that are the
// same for every step, but for one of a single row: what other rows there are makes no difference.
struct Splits {
  int first_key;  // a multiple of WARP_KEYS, not after the oldest visible key
  int size;       // keys a split, a multiple of SPLIT_KEYS
  int count;      // at least 1
};

__device__ __forceinline__ Splits find_splits(int context_len, int sliding_window, int min_split_keys,
                                              int max_splits) {
  const int first_key = max(context_len - sliding_window, 0) / WARP_KEYS * WARP_KEYS;
  const int num_keys = context_len - first_key;
  int size = min_split_keys;
  if (num_keys > size * max_splits) size = ceil_div(ceil_div(num_keys, max_splits), SPLIT_KEYS) * SPLIT_KEYS;
  return {first_key, size, max(ceil_div(num_keys, size), 1)};
}

// Waits when a block ends, wherever it does.
struct WaitAtEnd {
  bool waits;
  __device__ __forceinline__ ~WaitAtEnd() {
    if (waits) wait_for_earlier_kernels();
  }
};

// Zeros for `elements` of each of the rows first, first + stride, ... before `end` of a matrix [*,
// row_elements]. Apart, since it is seldom needed: every instruction that a short kernel carries along delays
// it.
template <typename T>
__device__ __noinline__ void clear_rows(T* matrix, int first, int end, int stride, int row_elements,
                                        int elements) {
#pragma unroll 1
  for (int row = first; row < end; row += stride) {
    const Vec<T, SEGMENT> zeros = {};
#pragma unroll 1
    for (int i = threadIdx.x * SEGMENT; i < elements; i += blockDim.x * SEGMENT) {
      zeros.store(matrix + static_cast<long long>(row) * row_elements + i);
    }
  }
}

// out = softmax over the visible keys of (q . k * scale), times v, for rows with one query. Rows without
// context, and the tokens after the last row, give zeros. FUSED: q and the newest key and value are made from
// qkv as rope_and_store_kernel makes them, and the key and value are stored in the cache (unless the slot is
// -1: then the cache has them); else q holds finished queries and the cache every key.
//
// Where a row's splits are several blocks' work, every split's sum of weighted values, maximum and sum go to
// partial_out and partial_sums, and the last of the blocks to arrive merges them; or, CLUSTERED, to the
// shared memory of the block of the cluster whose share of the elements they belong to; else the one block
// merges as it goes. The order is the same.
//
// q [num_tokens, num_heads * HEAD_DIM] T, FUSED: [num_tokens, (num_heads + 2 * num_kv_heads) * HEAD_DIM];
// key_cache, value_cache [blocks, num_kv_heads, block_size, HEAD_DIM] T; block_tables [*, block_table_width]
// int; table_rows [num_seqs] int, each row's place in block_tables; cu_seqlens_q [num_seqs + 1] int;
// context_lens [num_seqs] int; q_norm, k_norm, cos_sin, positions, slot_mapping, rotary_dim, eps: as
// rope_and_store_kernel, FUSED alone; out [num_tokens, num_heads * HEAD_DIM] T; partial_out [num_seqs,
// num_heads, max_splits, HEAD_DIM] float; partial_sums [num_seqs, num_heads, max_splits, 2] float; arrivals
// [num_seqs, gridDim.x] unsigned, 0 before and after. scale_log2 = scale * log2(e), positive; min_split_keys
// a multiple of 64. Layout: row-major, q, out and the caches 16-byte aligned, norms and cos_sin to two
// elements; num_heads = group * num_kv_heads, rotary_dim a multiple of 4, block_size of 8.
// Only q, and without FUSED the cache, may be written by a kernel of the same graph that may not have ended:
// all else is read ahead. beside_prefill: the kernel in front has let this one start when all that both need
// was there, and they run side by side. Grid: (num_kv_heads * ceil(group / 8), max(num_seqs, 1), ceil(most
// splits of a row / block_splits)), CLUSTERED: 2^cluster_log2 blocks along x, a cluster, for each of the
// former, and one along z; block: 32 * WARPS threads; shared: (WARPS * STAGES * 2 * 16 + min(group, 8)) *
// (HEAD_DIM + 8) * sizeof(T) + 2 * HEAD_DIM * sizeof(T), and CLUSTERED SENT_FLOATS floats for each split and
// MERGED_FLOATS elements of the largest share. Rows of shared memory are padded by 16 bytes, so that eight of
// them fill all banks. Unit of work: a block block_splits consecutive splits of a key/value head's keys,
// CLUSTERED an even part of them, all of its query heads (up to 8) together; blocks beyond a row's splits end
// at once. Warps take 16 keys at a time in turn, each with its own ring of STAGES copies that runs on across
// splits, and meet only at the end of a split.
template <typename T, int HEAD_DIM, int WARPS, int STAGES, bool FUSED, bool CLUSTERED>
__global__ void __launch_bounds__(32 * WARPS)
    paged_attention_decode_kernel(PAGED_ATTENTION_DECODE_PARAMS(T)) {
  constexpr int THREADS = WARP_SIZE * WARPS;
  constexpr int STEP_KEYS = WARP_KEYS * WARPS;
  constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
  using Attention = WarpAttention<T, HEAD_DIM>;
  constexpr int PITCH = Attention::PITCH;
  constexpr int TILE_ELEMENTS = Attention::TILE_ELEMENTS;
  constexpr int HEAD_PARTS = HEAD_DIM / MERGED_FLOATS;
  constexpr int ITEMS = ceil_div(GROUP_ROWS * HEAD_PARTS, THREADS);  // parts of heads that a thread merges
  static_assert(SPLIT_KEYS % STEP_KEYS == 0, "all warps must end a split together");
  using Transform = HeadTransform<HEAD_DIM, 2, T>;
  using Blocks = Cluster<CLUSTERED ? MAX_CLUSTER : 1>;

  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ float warp_maxima[WARPS][GROUP_ROWS];
  __shared__ float warp_sums[WARPS][GROUP_ROWS];
  __shared__ bool is_last;
  T* const tiles = reinterpret_cast<T*>(shared_memory);
  T* const tile_q = tiles + WARPS * STAGES * 2 * TILE_ELEMENTS;

  let_next_kernel_start();
  if (!FUSED && !beside_prefill) wait_for_earlier_kernels();
  // Later kernels wait for this one alone.
  const WaitAtEnd at_end{!FUSED && beside_prefill != 0};
  const int part =
      CLUSTERED ? static_cast<int>(blockIdx.x) & ((1 << cluster_log2) - 1) : static_cast<int>(blockIdx.z);
  int kv_head = CLUSTERED ? blockIdx.x >> cluster_log2 : blockIdx.x;
  int group_begin = 0;
#pragma unroll 1
  for (; kv_head >= num_kv_heads; kv_head -= num_kv_heads) group_begin += GROUP_ROWS;
  const int num_heads = group * num_kv_heads;
  const int head0 = kv_head * group + group_begin;
  const int num_group_heads = min(group - group_begin, GROUP_ROWS);
  T* const newest = tile_q + num_group_heads * PITCH;  // [2][HEAD_DIM]: key and value
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int row = blockIdx.y;
  auto clear = [&](int first, int end) {
    clear_rows(out + head0 * HEAD_DIM, first, end, gridDim.y, num_heads * HEAD_DIM,
               num_group_heads * HEAD_DIM);
  };

  // All that does not depend on one another is asked for at once.
  const bool is_row = row < num_seqs;
  const int token = is_row ? cu_seqlens_q[row] : 0;
  const int next_token = is_row ? cu_seqlens_q[row + 1] : 0;
  const int context_len = is_row ? context_lens[row] : 0;
  const int table_row = is_row ? table_rows[row] : 0;
  const int first_behind = part == 0 ? cu_seqlens_q[num_seqs] + row : num_tokens;  // of what has no row
  int slot = -1;
  int position = 0;
  if constexpr (FUSED) {
    // Where every row has a query it is the row's number.
    const int likely = min(row, num_tokens - 1);
    slot = slot_mapping[likely];
    if (rotary_dim > 0) position = positions[likely];
    if (token != likely && next_token != token) {
      slot = slot_mapping[token];
      if (rotary_dim > 0) position = positions[token];
    }
  }
  const Splits splits = find_splits(context_len, sliding_window, min_split_keys, max_splits);
  int first_split = part * block_splits;
  int end_split = min(first_split + block_splits, splits.count);
  int num_blocks = 1;  // that have splits of this row
  if constexpr (CLUSTERED) {
    num_blocks = min(splits.count, 1 << cluster_log2);
    if (splits.count > num_blocks) {
      first_split = part * splits.count >> cluster_log2;
      end_split = (part + 1) * splits.count >> cluster_log2;
    } else {
      first_split = part;
      end_split = part + 1;
    }
  } else if (splits.count > block_splits) {
    num_blocks = ceil_div(splits.count, block_splits);
  }
  if (next_token - token != 1 || context_len <= 0) {
    if (part != 0) return;
    wait_for_earlier_kernels();
    if (next_token - token == 1) clear(token, token + 1);
    clear(first_behind, num_tokens);
    return;
  }
  if (first_split >= splits.count) return;
  if (CLUSTERED && num_blocks > 1) Blocks::arrive();
  const int key_begin = splits.first_key + first_split * splits.size;
  const int key_end = min(splits.first_key + end_split * splits.size, context_len);
  const int oldest_key = max(context_len - sliding_window, 0);
  const int newest_key = slot >= 0 ? context_len - 1 : NO_KEY;  // the one that the cache does not have yet
  const int cached_end = min(key_end, slot >= 0 ? context_len - 1 : context_len);
  const int* const block_table = block_tables + static_cast<long long>(table_row) * block_table_width;

  // A warp's i-th tile of keys is tile i * WARPS + warp of the block. Its two units lie somewhere in the
  // cache.
  const int num_steps = ceil_div(key_end - key_begin, STEP_KEYS);
  const int split_steps = splits.size / STEP_KEYS;
  const unsigned warp_tiles = shared_address(tiles + warp * STAGES * 2 * TILE_ELEMENTS);
  auto tile_begin = [&](int i) { return key_begin + (i * WARPS + warp) * WARP_KEYS; };
  // The quotient of a key and block_size, by its reciprocal in 2^-32: exact for contexts of less than 2^32 /
  // block_size.
  const unsigned block_reciprocal = 0xffffffffu / block_size + 1;
  auto block_of = [&](int key) { return static_cast<int>(__umulhi(key, block_reciprocal)); };
  auto find_unit_row = [&](int i) {  // by lanes 0 and 1
    const int key = tile_begin(i) + lane * UNIT_KEYS;
    if (lane >= WARP_KEYS / UNIT_KEYS || key >= key_end) return 0;
    const int block = block_of(key);
    return (block_table[block] * num_kv_heads + kv_head) * block_size + key - block * block_size;
  };
  const unsigned long long policy = evict_first_policy();
  auto load_tile = [&](int i, int unit_row) {
    constexpr int UNIT_COPIES = UNIT_KEYS * SEGMENTS / WARP_SIZE;
    constexpr int COPY_KEYS = WARP_SIZE % SEGMENTS == 0 ? WARP_SIZE / SEGMENTS : 0;  // 0: no whole number
    const unsigned tile_k = warp_tiles + i % STAGES * 2 * TILE_ELEMENTS * sizeof(T);
    const int oldest = oldest_key - tile_begin(i);
    const int end = cached_end - tile_begin(i);
#pragma unroll
    for (int u = 0; u < WARP_KEYS / UNIT_KEYS; ++u) {
      const long long first =
          static_cast<long long>(__shfl_sync(FULL_WARP, unit_row, u)) * HEAD_DIM + lane * SEGMENT;
      const T* const keys = key_cache + first;
      const T* const values = value_cache + first;
#pragma unroll
      for (int c = 0; c < UNIT_COPIES; ++c) {
        const int segment = COPY_KEYS > 0 ? lane % SEGMENTS : (c * WARP_SIZE + lane) % SEGMENTS;
        const int key = u * UNIT_KEYS +
                        (COPY_KEYS > 0 ? c * COPY_KEYS + lane / SEGMENTS : (c * WARP_SIZE + lane) / SEGMENTS);
        const bool valid = key >= oldest && key < end;
        const unsigned to = tile_k + (key * PITCH + segment * SEGMENT) * sizeof(T);
        copy_async_16(to, keys + c * WARP_SIZE * SEGMENT, valid, policy);
        copy_async_16(to + TILE_ELEMENTS * sizeof(T), values + c * WARP_SIZE * SEGMENT, valid, policy);
      }
    }
  };

  // The keys of earlier steps may be copied while the kernels in front of this one still run.
  int next_row = find_unit_row(0);
#pragma unroll 1
  for (int i = 0; i < STAGES; ++i) {
    const int unit_row = next_row;
    next_row = find_unit_row(i + 1);
    if (tile_begin(i) < key_end) load_tile(i, unit_row);
    copy_async_commit();
  }

  if (FUSED) {
    const bool has_newest = newest_key >= key_begin && newest_key < key_end;
    const int num_items =
        num_group_heads + (has_newest ? 2 : 0);  // queries, key, value: a warp each, in turn
    const float* const angles =
        rotary_dim > 0 ? cos_sin + static_cast<long long>(position) * rotary_dim : nullptr;
    const T* const heads = q + static_cast<long long>(token) * (num_heads + 2 * num_kv_heads) * HEAD_DIM;
#pragma unroll 1
    for (int item = warp; item < num_items || item == warp; item += WARPS) {
      const bool is_key = item == num_group_heads;
      const bool is_value = item > num_group_heads;
      const T* const norm = is_value ? nullptr : is_key ? k_norm : q_norm;
      const Transform transform(norm, angles, HEAD_DIM, is_value ? 0 : rotary_dim, eps);
      if (item == warp) wait_for_earlier_kernels();
      if (item >= num_items) break;
      const int head = is_value ? num_heads + num_kv_heads + kv_head
                       : is_key ? num_heads + kv_head
                                : head0 + item;
      T* const prepared = is_value ? newest + HEAD_DIM : is_key ? newest : tile_q + item * PITCH;
      T* stored = nullptr;
      if ((is_key || is_value) && group_begin == 0) {
        const int block = block_of(slot);
        const int place = (block * num_kv_heads + kv_head) * block_size + slot - block * block_size;
        stored = (is_key ? key_cache : value_cache) + static_cast<long long>(place) * HEAD_DIM;
      }
      transform(transform.load(heads + head * HEAD_DIM), [&](int i, const Vec<T, 2>& z) {
        z.store(prepared + i);
        if (stored != nullptr) z.store(stored + i);
      });
    }
  } else {
    const T* const queries = q + (static_cast<long long>(token) * num_heads + head0) * HEAD_DIM;
#pragma unroll 1
    for (int i = threadIdx.x; i < num_group_heads * SEGMENTS; i += THREADS) {
      const Vec<T, SEGMENT> elements = Vec<T, SEGMENT>::load(queries + i * SEGMENT);
      elements.store(tile_q + i / SEGMENTS * PITCH + i % SEGMENTS * SEGMENT);
    }
  }
  __syncthreads();

  Attention attention(tile_q, num_group_heads);
  Merged result[ITEMS];
  const long long first_partial = (static_cast<long long>(row) * num_heads + head0) * max_splits;
  // Each block of a cluster finishes a share of the row's elements; splits' results lie [splits][share].
  const int num_items = num_group_heads * HEAD_PARTS;
  const int share = small_ceil_div(num_items, num_blocks);
  const float share_reciprocal = __fdividef(1.0f, share);
  float* const received = reinterpret_cast<float*>(newest + 2 * HEAD_DIM);
  int split = first_split;
  int steps_left = split_steps;
#pragma unroll 1
  for (int i = 0; i < num_steps; ++i) {
    copy_async_wait<STAGES - 1>();
    __syncwarp();

    if (tile_begin(i) < key_end) {
      T* const tile_k = tiles + (warp * STAGES + i % STAGES) * 2 * TILE_ELEMENTS;
      T* const tile_v = tile_k + TILE_ELEMENTS;
      const int newest_place = newest_key - tile_begin(i);
      if (FUSED && newest_place >= 0 && newest_place < WARP_KEYS) {
#pragma unroll 1
        for (int s = lane; s < 2 * SEGMENTS; s += WARP_SIZE) {
          T* const to = (s < SEGMENTS ? tile_k : tile_v) + newest_place * PITCH + s % SEGMENTS * SEGMENT;
          Vec<T, SEGMENT>::load(newest + s * SEGMENT).store(to);
        }
        __syncwarp();
      }

      attention.add(tile_k, tile_v, tile_begin(i), oldest_key, key_end, scale_log2);
      __syncwarp();
    }
    if (--steps_left == 0 || i + 1 == num_steps) {
      // The end of a split: merge the warps through the stages that they have just left.
      float* const merged = reinterpret_cast<float*>(tiles + i % STAGES * 2 * TILE_ELEMENTS);
      constexpr int MERGE_STRIDE = STAGES * 2 * TILE_ELEMENTS * sizeof(T) / sizeof(float);  // between warps
      attention.finish(merged + warp * MERGE_STRIDE, warp_maxima[warp], warp_sums[warp], num_group_heads);
      if (CLUSTERED && num_blocks > 1 && split == first_split) Blocks::wait();  // the others have begun
      __syncthreads();
#pragma unroll
      for (int n = 0; n < ITEMS; ++n) {
        const int item = n * THREADS + threadIdx.x;
        if (item >= num_group_heads * HEAD_PARTS) continue;
        const int head = item / HEAD_PARTS;
        const int d = item % HEAD_PARTS * MERGED_FLOATS;
        float highest, total;
        const Floats values = merge_warps<WARPS>(merged + head * Attention::MERGE_PITCH + d, MERGE_STRIDE,
                                                 warp_maxima, warp_sums, head, highest, total);
        if (num_blocks == 1) {
          result[n].add(values, highest, total);
        } else if constexpr (CLUSTERED) {
          const int owner = static_cast<int>((item + 0.5f) * share_reciprocal);
          float* const to =
              Blocks::at(received + (split * share + item - owner * share) * SENT_FLOATS, owner);
          values.store(to);
          *reinterpret_cast<float2*>(to + MERGED_FLOATS) = make_float2(highest, total);
        } else {
          const long long partial = first_partial + head * max_splits + split;
          values.store(partial_out + partial * HEAD_DIM + d);
          if (d == 0) *reinterpret_cast<float2*>(partial_sums + partial * 2) = make_float2(highest, total);
        }
      }
      __syncthreads();  // the stages are free, and all of the split's results are written
      ++split;
      steps_left = split_steps;
    }
    if (tile_begin(i + STAGES) < key_end) load_tile(i + STAGES, next_row);
    copy_async_commit();
    next_row = find_unit_row(i + STAGES + 1);
  }

  if (first_behind < num_tokens) clear(first_behind, num_tokens);
  if (CLUSTERED && num_blocks > 1) {
    Blocks::sync();
    const int first_item = part * share;
#pragma unroll 1
    for (int i = threadIdx.x; i < min(share, num_items - first_item); i += THREADS) {
      Merged sum;
#pragma unroll 1
      for (int s = 0; s < splits.count; ++s) {
        const float* const from = received + (s * share + i) * SENT_FLOATS;
        sum.add(Floats::load(from), from[MERGED_FLOATS], from[MERGED_FLOATS + 1]);
      }
      sum.store(out + (static_cast<long long>(token) * num_heads + head0) * HEAD_DIM +
                (first_item + i) * MERGED_FLOATS);
    }
    return;
  }
  if (!CLUSTERED && num_blocks > 1) {
    if (threadIdx.x == 0) {
      is_last = arrives_last(arrivals + static_cast<long long>(row) * gridDim.x + blockIdx.x, num_blocks);
    }
    __syncthreads();
    if (!is_last) return;
  }
#pragma unroll
  for (int n = 0; n < ITEMS; ++n) {
    const int item = n * THREADS + threadIdx.x;
    if (item >= num_group_heads * HEAD_PARTS) continue;
    const int head = item / HEAD_PARTS;
    const int d = item % HEAD_PARTS * MERGED_FLOATS;
    if (!CLUSTERED && num_blocks > 1) {
      const float* const parts = partial_out + (first_partial + head * max_splits) * HEAD_DIM + d;
      const float2* const part_sums =
          reinterpret_cast<const float2*>(partial_sums) + first_partial + head * max_splits;
      constexpr int LOADS = 4;  // in flight
#pragma unroll 1
      for (int s0 = 0; s0 < splits.count; s0 += LOADS) {
        Floats values[LOADS];
        float2 maximum_and_sum[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
          const int s = min(s0 + i, splits.count - 1);
          values[i] = Floats::load_shared_by_multiprocessors(parts + s * HEAD_DIM);
          maximum_and_sum[i] = __ldcg(part_sums + s);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
          if (s0 + i < splits.count) result[n].add(values[i], maximum_and_sum[i].x, maximum_and_sum[i].y);
        }
      }
    }
    result[n].store(out + (static_cast<long long>(token) * num_heads + head0 + head) * HEAD_DIM + d);
  }
}
