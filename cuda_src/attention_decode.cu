// Paged attention on tensor cores for rows with one query, bound by reading keys and values once; where every
// row of a step has one query, the step's norm, rotary embedding and KV store as well.

#include "copy.cuh"
#include "rope.cuh"
#include "warp_attention.cuh"

constexpr int SPLIT_KEYS = 64;  // of which a split's size is a multiple
constexpr int NO_KEY = -1;

// How a row's keys are divided. It depends on the row's own length, the window and two constants of the
// server, so a row's result does not depend on the other rows.
struct Splits {
  int first_key;  // a multiple of WARP_KEYS, not after the oldest visible key
  int size;       // keys a split, a multiple of SPLIT_KEYS
  int count;      // at least 1
};

__device__ __forceinline__ Splits find_splits(int context_len, int sliding_window, int min_split_keys,
                                              int max_splits) {
  const int first_key = max(context_len - sliding_window, 0) / WARP_KEYS * WARP_KEYS;
  const int num_keys = context_len - first_key;
  const int even = ceil_div(ceil_div(num_keys, max_splits), SPLIT_KEYS) * SPLIT_KEYS;
  const int size = max(even, min_split_keys);
  return {first_key, size, max(ceil_div(num_keys, size), 1)};
}

// out = softmax over the visible keys of (q . k * scale), times v, for rows with one query. Rows without
// context, and the tokens after the last row, give zeros. FUSED: q and the newest key and value are made from
// qkv as rope_and_store_kernel makes them, and the key and value are stored in the cache (unless the slot is
// -1: then the cache has them); else q holds finished queries and the cache every key.
//
// Where a row's splits are several blocks' work, every split's sum of weighted values, maximum and sum go to
// partial_out and partial_sums, and the last of the blocks to arrive merges them; else the one block does so
// as it goes. The order is the same.
//
// q [num_tokens, num_heads * HEAD_DIM] T, FUSED: [num_tokens, (num_heads + 2 * num_kv_heads) * HEAD_DIM];
// key_cache, value_cache [blocks, num_kv_heads, block_size, HEAD_DIM] T; block_tables [*, block_table_width]
// int; table_rows [num_seqs] int, each row's place in block_tables; cu_seqlens_q [num_seqs + 1] int;
// context_lens [num_seqs] int; q_norm, k_norm, cos_sin, positions, slot_mapping, rotary_dim, eps: as
// rope_and_store_kernel, FUSED alone; out [num_tokens, num_heads * HEAD_DIM] T; partial_out [num_seqs,
// num_heads, max_splits, HEAD_DIM] float; partial_sums [num_seqs, num_heads, max_splits, 2] float; arrivals
// [num_seqs, gridDim.x] unsigned, 0 before and after. scale_log2 = scale * log2(e), positive; min_split_keys
// a multiple of 64; Layout: row-major, q, out and the caches 16-byte aligned, norms and
// cos_sin to two elements; num_heads = group * num_kv_heads, rotary_dim a multiple of 4, block_size of 8.
// Only q, and without FUSED the cache, may be written by a kernel of the same graph that may not have ended:
// all else is read ahead. Grid: (num_kv_heads * ceil(group / 8), max(num_seqs, 1), ceil(most splits of a row
// / block_splits)); block: 32 * WARPS threads; shared: (WARPS * STAGES * 2 * 16 + min(group, 8)) * (HEAD_DIM
// + 8) * sizeof(T) + 2 * HEAD_DIM * sizeof(T). Rows of shared memory are padded by 16 bytes, so that eight of
// them fill all banks. Unit of work: a block block_splits consecutive splits of a key/value head's keys, all
// of its query heads (up to 8) together; blocks beyond a row's splits end at once. Warps take 16 keys at a
// time in turn, each with its own ring of STAGES copies that runs on across splits, and meet only at the end
// of a split.
template <typename T, int HEAD_DIM, int WARPS, int STAGES, bool FUSED>
__global__ void __launch_bounds__(32 * WARPS)
    paged_attention_decode_kernel(const T* q, T* key_cache, T* value_cache, const int* block_tables,
                                  const int* table_rows, const int* cu_seqlens_q, const int* context_lens,
                                  const T* q_norm, const T* k_norm, const float* cos_sin,
                                  const int* positions, const int* slot_mapping, T* out, float* partial_out,
                                  float* partial_sums, unsigned* arrivals, int num_tokens, int num_seqs,
                                  int num_heads, int num_kv_heads, int rotary_dim, int block_size,
                                  int block_table_width, int sliding_window, int min_split_keys,
                                  int max_splits, int block_splits, float eps, float scale_log2) {
  constexpr int THREADS = WARP_SIZE * WARPS;
  constexpr int STEP_KEYS = WARP_KEYS * WARPS;
  constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
  using Attention = WarpAttention<T, HEAD_DIM>;
  constexpr int PITCH = Attention::PITCH;
  constexpr int TILE_ELEMENTS = Attention::TILE_ELEMENTS;
  constexpr int HEAD_PARTS = HEAD_DIM / FLOATS;
  constexpr int ITEMS = ceil_div(GROUP_ROWS * HEAD_PARTS, THREADS);  // parts of heads that a thread merges
  static_assert(SPLIT_KEYS % STEP_KEYS == 0, "all warps must end a split together");
  using Transform = HeadTransform<HEAD_DIM, 2, T>;

  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ float warp_maxima[WARPS][GROUP_ROWS];
  __shared__ float warp_sums[WARPS][GROUP_ROWS];
  __shared__ bool is_last;
  T* const tiles = reinterpret_cast<T*>(shared_memory);
  T* const tile_q = tiles + WARPS * STAGES * 2 * TILE_ELEMENTS;

  let_next_kernel_start();
  if (!FUSED) wait_for_earlier_kernels();
  const int group = num_heads / num_kv_heads;
  const int kv_head = blockIdx.x % num_kv_heads;
  const int group_begin = blockIdx.x / num_kv_heads * GROUP_ROWS;
  const int head0 = kv_head * group + group_begin;
  const int num_group_heads = min(group - group_begin, GROUP_ROWS);
  T* const newest = tile_q + num_group_heads * PITCH;  // [2][HEAD_DIM]: key and value
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int row = blockIdx.y;
  auto clear = [&](int token) {
    const Vec<T, SEGMENT> zeros = {};
    for (int i = threadIdx.x; i < num_group_heads * SEGMENTS; i += THREADS) {
      zeros.store(out + (static_cast<long long>(token) * num_heads + head0) * HEAD_DIM + i * SEGMENT);
    }
  };
  auto clear_behind_rows = [&]() {
    if (blockIdx.z != 0) return;
    for (int token = cu_seqlens_q[num_seqs] + row; token < num_tokens; token += gridDim.y) clear(token);
  };
  if (num_seqs == 0) {
    wait_for_earlier_kernels();
    clear_behind_rows();
    return;
  }

  const int token = cu_seqlens_q[row];
  const int next_token = cu_seqlens_q[row + 1];
  const int context_len = context_lens[row];
  const int table_row = table_rows[row];
  const Splits splits = find_splits(context_len, sliding_window, min_split_keys, max_splits);
  const int first_split = blockIdx.z * block_splits;
  if (first_split >= splits.count) return;
  if (next_token - token != 1 || context_len <= 0) {
    wait_for_earlier_kernels();
    if (next_token - token == 1) clear(token);
    clear_behind_rows();
    return;
  }
  const int end_split = min(first_split + block_splits, splits.count);
  const int key_begin = splits.first_key + first_split * splits.size;
  const int key_end = min(splits.first_key + end_split * splits.size, context_len);
  const int oldest_key = max(context_len - sliding_window, 0);
  const int slot = FUSED ? slot_mapping[token] : -1;
  const int position = FUSED && rotary_dim > 0 ? positions[token] : 0;
  const int newest_key = slot >= 0 ? context_len - 1 : NO_KEY;  // the one that the cache does not have yet
  const int cached_end = min(key_end, slot >= 0 ? context_len - 1 : context_len);
  const int* const block_table = block_tables + static_cast<long long>(table_row) * block_table_width;

  // A warp's i-th tile of keys is tile i * WARPS + warp of the block. Its two units lie somewhere in the
  // cache.
  const int num_steps = ceil_div(key_end - key_begin, STEP_KEYS);
  const int split_steps = splits.size / STEP_KEYS;
  T* const warp_tiles = tiles + warp * STAGES * 2 * TILE_ELEMENTS;
  auto tile_begin = [&](int i) { return key_begin + (i * WARPS + warp) * WARP_KEYS; };
  auto find_unit_row = [&](int i) {  // by lanes 0 and 1
    const int key = tile_begin(i) + lane * UNIT_KEYS;
    return lane < WARP_KEYS / UNIT_KEYS && key < key_end
               ? cache_row(block_table, key, kv_head, num_kv_heads, block_size)
               : 0;
  };
  auto load_tile = [&](int i, int unit_row) {
    constexpr int UNIT_COPIES = UNIT_KEYS * SEGMENTS / WARP_SIZE;
    T* const tile_k = warp_tiles + i % STAGES * 2 * TILE_ELEMENTS;
    const int begin = tile_begin(i);
    const bool is_whole = begin >= oldest_key && begin + WARP_KEYS <= cached_end;
#pragma unroll
    for (int u = 0; u < WARP_KEYS / UNIT_KEYS; ++u) {
      const long long first =
          static_cast<long long>(__shfl_sync(FULL_WARP, unit_row, u)) * HEAD_DIM + lane * SEGMENT;
#pragma unroll
      for (int c = 0; c < UNIT_COPIES; ++c) {
        const int key = u * UNIT_KEYS + (c * WARP_SIZE + lane) / SEGMENTS;
        const int segment = (c * WARP_SIZE + lane) % SEGMENTS;
        const bool valid = is_whole || (begin + key >= oldest_key && begin + key < cached_end);
        const long long from = valid ? first + c * WARP_SIZE * SEGMENT : 0;
        T* const to = tile_k + key * PITCH + segment * SEGMENT;
        copy_async_16(to, key_cache + from, valid);
        copy_async_16(to + TILE_ELEMENTS, value_cache + from, valid);
      }
    }
  };

  // The keys of earlier steps may be copied while the kernels in front of this one still run.
  int unit_rows[STAGES + 1];
#pragma unroll
  for (int i = 0; i <= STAGES; ++i) unit_rows[i] = find_unit_row(i);
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    if (tile_begin(i) < key_end) load_tile(i, unit_rows[i]);
    copy_async_commit();
  }
  int next_row = unit_rows[STAGES];

  if (FUSED) {
    const bool has_newest = newest_key >= key_begin && newest_key < key_end;
    const int num_items =
        num_group_heads + (has_newest ? 2 : 0);  // queries, key, value: a warp each, in turn
    const float* const angles =
        rotary_dim > 0 ? cos_sin + static_cast<long long>(position) * rotary_dim : nullptr;
    auto is_key = [&](int item) { return item == num_group_heads; };
    auto is_value = [&](int item) { return item == num_group_heads + 1; };
    auto transform_of = [&](int item) {
      const T* const norm = is_value(item) ? nullptr : is_key(item) ? k_norm : q_norm;
      return Transform(norm, angles, HEAD_DIM, is_value(item) ? 0 : rotary_dim, eps);
    };
    auto prepare = [&](const Transform& transform, int item) {
      const T* const heads = q + static_cast<long long>(token) * (num_heads + 2 * num_kv_heads) * HEAD_DIM;
      if (item < num_group_heads) {
        transform(heads + (head0 + item) * HEAD_DIM,
                  [&](int i, const Vec<T, 2>& z) { z.store(tile_q + item * PITCH + i); });
        return;
      }
      const long long place =
          (static_cast<long long>(slot / block_size) * num_kv_heads + kv_head) * block_size +
          slot % block_size;
      T* const stored = (is_key(item) ? key_cache : value_cache) + place * HEAD_DIM;
      const int head = num_heads + (is_key(item) ? 0 : num_kv_heads) + kv_head;
      transform(heads + head * HEAD_DIM, [&](int i, const Vec<T, 2>& z) {
        z.store(newest + (is_key(item) ? 0 : HEAD_DIM) + i);
        if (group_begin == 0) z.store(stored + i);
      });
    };
    const Transform first = transform_of(warp);
    wait_for_earlier_kernels();
    if (warp < num_items) prepare(first, warp);
    for (int item = warp + WARPS; item < num_items; item += WARPS) prepare(transform_of(item), item);
  } else {
    const T* const queries = q + (static_cast<long long>(token) * num_heads + head0) * HEAD_DIM;
    for (int i = threadIdx.x; i < num_group_heads * SEGMENTS; i += THREADS) {
      const Vec<T, SEGMENT> elements = Vec<T, SEGMENT>::load(queries + i * SEGMENT);
      elements.store(tile_q + i / SEGMENTS * PITCH + i % SEGMENTS * SEGMENT);
    }
  }
  clear_behind_rows();
  __syncthreads();

  Attention attention(tile_q, num_group_heads);
  Merged result[ITEMS];
  const int num_blocks = ceil_div(splits.count, block_splits);
  const long long first_partial = (static_cast<long long>(row) * num_heads + head0) * max_splits;
  int split = first_split;
  int steps_left = split_steps;
  for (int i = 0; i < num_steps; ++i) {
    copy_async_wait<STAGES - 1>();
    __syncwarp();

    if (tile_begin(i) < key_end) {
      T* const tile_k = warp_tiles + i % STAGES * 2 * TILE_ELEMENTS;
      T* const tile_v = tile_k + TILE_ELEMENTS;
      const int newest_place = newest_key - tile_begin(i);
      if (FUSED && newest_place >= 0 && newest_place < WARP_KEYS) {
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
      __syncthreads();
#pragma unroll
      for (int n = 0; n < ITEMS; ++n) {
        const int item = n * THREADS + threadIdx.x;
        if (item >= num_group_heads * HEAD_PARTS) continue;
        const int head = item / HEAD_PARTS;
        const int d = item % HEAD_PARTS * FLOATS;
        float highest, total;
        const Vec<float, FLOATS> values =
            merge_warps<WARPS>(merged + head * Attention::MERGE_PITCH + d, MERGE_STRIDE, warp_maxima,
                               warp_sums, head, highest, total);
        if (num_blocks == 1) {
          result[n].add(values, highest, total);
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

  if (num_blocks > 1) {
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
    const int d = item % HEAD_PARTS * FLOATS;
    if (num_blocks > 1) {
      const float4* const parts =
          reinterpret_cast<const float4*>(partial_out + (first_partial + head * max_splits) * HEAD_DIM + d);
      const float2* const part_sums =
          reinterpret_cast<const float2*>(partial_sums) + first_partial + head * max_splits;
      constexpr int LOADS = 6;  // in flight
      for (int s0 = 0; s0 < splits.count; s0 += LOADS) {
        float4 values[LOADS];
        float2 maximum_and_sum[LOADS];
#pragma unroll
        for (int s = 0; s < LOADS; ++s) {
          if (s0 + s >= splits.count) continue;
          values[s] = __ldcg(parts + (s0 + s) * HEAD_PARTS);
          maximum_and_sum[s] = __ldcg(part_sums + s0 + s);
        }
#pragma unroll
        for (int s = 0; s < LOADS; ++s) {
          if (s0 + s >= splits.count) continue;
          result[n].add({values[s].x, values[s].y, values[s].z, values[s].w}, maximum_and_sum[s].x,
                        maximum_and_sum[s].y);
        }
      }
    }
    result[n].store(out + (static_cast<long long>(token) * num_heads + head0 + head) * HEAD_DIM + d);
  }
}
