// The attention half of a layer behind its first product, for one or two rows with one query each: what
// attention_decode.cu does for a step in which every row has one query, then the product that takes the
// heads' outputs back to the residual stream. Made for small models, whose kernels are shorter than the way
// from one to the next.

#include "cluster.cuh"
#include "copy.cuh"
#include "rope.cuh"
#include "warp_attention.cuh"

#if __CUDA_ARCH__ >= 900

constexpr int CLUSTER_BLOCKS = 8;
constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP_SIZE;
constexpr int FEATURES = 16;  // that a warp computes at a time

// out[token] += weight (softmax over the visible keys of (q . k * scale), times v), for rows with one query;
// q and the newest key and value are made from qkv as rope_and_store_kernel makes them, and the key and value
// are stored in the cache (unless the slot is -1: then the cache has them). Rows without context add nothing.
//
// qkv [num_tokens, (num_heads + 2 * num_kv_heads) * HEAD_DIM] T; key_cache, value_cache [blocks,
// num_kv_heads, block_size, HEAD_DIM] T; block_tables [*, block_table_width] int; table_rows [num_rows] int,
// each row's place in block_tables; cu_seqlens_q [num_rows + 1] int; context_lens [num_rows] int; q_norm,
// k_norm, cos_sin, positions, slot_mapping, rotary_dim, eps: as rope_and_store_kernel; weight [hidden,
// num_heads * HEAD_DIM] T; out [num_tokens, hidden] T; partial_out [num_rows, num_kv_heads, hidden] float;
// arrivals [num_rows, 8] unsigned, 0 before and after. scale_log2 = scale * log2(e), positive. Layout:
// row-major; weight, out and the caches 16-byte aligned, norms and cos_sin to two elements; num_heads = group
// * num_kv_heads with a group of up to 8, rotary_dim a multiple of 4, block_size of 8, hidden of 128. Only
// qkv and out may be written by a kernel of the same graph that may not have ended: all else is read ahead.
// Grid: (8, num_kv_heads, num_rows), eight blocks along x a cluster; block: 128 threads; shared:
// `shared_bytes` in engine/ops/cuda/attention_out.py.
//
// Unit of work: a cluster one key/value head of a row. Its blocks take every eighth 16 keys, a warp each;
// they exchange what they have found, and each then multiplies the whole of the head's output by its eighth
// of the weight's rows and the head's columns of it, which have waited in shared memory. The last of the
// heads' blocks to arrive with an eighth adds the heads up in their order. Which keys a warp takes depends on
// the row's own length alone, so a row's result does not depend on the other rows.
template <typename T, int HEAD_DIM>
__cluster_dims__(CLUSTER_BLOCKS, 1, 1) __global__ void __launch_bounds__(THREADS)
    attention_out_kernel(const T* qkv, T* key_cache, T* value_cache, const int* block_tables,
                         const int* table_rows, const int* cu_seqlens_q, const int* context_lens,
                         const T* q_norm, const T* k_norm, const float* cos_sin, const int* positions,
                         const int* slot_mapping, const T* weight, T* out, float* partial_out,
                         unsigned* arrivals, int num_heads, int num_kv_heads, int rotary_dim, int block_size,
                         int block_table_width, int sliding_window, int hidden, float eps, float scale_log2) {
  using Attention = WarpAttention<T, HEAD_DIM>;
  using Transform = HeadTransform<HEAD_DIM, 2, T>;
  using Blocks = Cluster<CLUSTER_BLOCKS>;
  constexpr int PITCH = Attention::PITCH;
  constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
  constexpr int HEAD_PARTS = HEAD_DIM / FLOATS;
  constexpr int STEP_KEYS = WARP_KEYS * WARPS * CLUSTER_BLOCKS;
  constexpr int MERGE_STRIDE = 2 * Attention::TILE_ELEMENTS * sizeof(T) / sizeof(float);  // between warps

  let_next_kernel_start();
  const int row = blockIdx.z;
  const int kv_head = blockIdx.y;
  const int token = cu_seqlens_q[row];
  const int context_len = context_lens[row];
  if (cu_seqlens_q[row + 1] - token != 1 || context_len <= 0) {  // for all blocks of the row
    wait_for_earlier_kernels();
    return;
  }
  Blocks::arrive();  // from here on other blocks may write to this one's memory
  const int rank = Blocks::rank();
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int group = num_heads / num_kv_heads;
  const int columns = group * HEAD_DIM;  // of the weight that meet this head's output
  const int features = hidden / CLUSTER_BLOCKS;
  const int first_feature = rank * features;
  const int weight_pitch = columns + SEGMENT;

  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ float warp_maxima[WARPS][GROUP_ROWS];
  __shared__ float warp_sums[WARPS][GROUP_ROWS];
  __shared__ float2 block_sums[CLUSTER_BLOCKS][GROUP_ROWS];  // maximum and sum
  __shared__ bool is_last;
  float* const block_values = reinterpret_cast<float*>(shared_memory);  // [CLUSTER_BLOCKS][columns]
  T* const tiles = reinterpret_cast<T*>(block_values + CLUSTER_BLOCKS * columns);
  T* const tile_weight = tiles + WARPS * 2 * Attention::TILE_ELEMENTS;  // [features][weight_pitch]
  T* const tile_q = tile_weight + features * weight_pitch;              // [group][PITCH]
  T* const newest = tile_q + group * PITCH;                             // [2][HEAD_DIM]: key and value
  T* const attended = newest + 2 * HEAD_DIM;                            // [columns]

  const int first_key = max(context_len - sliding_window, 0) / WARP_KEYS * WARP_KEYS;
  const int oldest_key = max(context_len - sliding_window, 0);
  const int slot = slot_mapping[token];
  const int position = rotary_dim > 0 ? positions[token] : 0;
  const int newest_key = context_len - 1;
  const int cached_end = slot >= 0 ? newest_key : context_len;
  const bool has_newest = slot >= 0 && (newest_key - first_key) / WARP_KEYS % CLUSTER_BLOCKS == rank;
  const int* const block_table = block_tables + static_cast<long long>(table_rows[row]) * block_table_width;

  // The i-th sixteen keys of this warp.
  T* const tile_k = tiles + warp * 2 * Attention::TILE_ELEMENTS;
  T* const tile_v = tile_k + Attention::TILE_ELEMENTS;
  auto tile_begin = [&](int i) {
    return first_key + i * STEP_KEYS + (warp * CLUSTER_BLOCKS + rank) * WARP_KEYS;
  };
  auto find_unit_row = [&](int i) {  // by lanes 0 and 1
    const int key = tile_begin(i) + lane * UNIT_KEYS;
    return lane < WARP_KEYS / UNIT_KEYS && key < context_len
               ? cache_row(block_table, key, kv_head, num_kv_heads, block_size)
               : 0;
  };
  auto load_tile = [&](int i, int unit_row) {
    constexpr int UNIT_COPIES = UNIT_KEYS * SEGMENTS / WARP_SIZE;
    const int begin = tile_begin(i);
#pragma unroll
    for (int u = 0; u < WARP_KEYS / UNIT_KEYS; ++u) {
      const long long first =
          static_cast<long long>(__shfl_sync(FULL_WARP, unit_row, u)) * HEAD_DIM + lane * SEGMENT;
#pragma unroll
      for (int c = 0; c < UNIT_COPIES; ++c) {
        const int key = u * UNIT_KEYS + (c * WARP_SIZE + lane) / SEGMENTS;
        const int segment = (c * WARP_SIZE + lane) % SEGMENTS;
        const bool valid = begin + key >= oldest_key && begin + key < cached_end;
        const long long from = valid ? first + c * WARP_SIZE * SEGMENT : 0;
        T* const to = tile_k + key * PITCH + segment * SEGMENT;
        copy_async_16(to, key_cache + from, valid);
        copy_async_16(to + Attention::TILE_ELEMENTS, value_cache + from, valid);
      }
    }
  };

  // The keys of earlier steps and the weight may be copied while the kernels in front of this one still run.
  int unit_row = find_unit_row(0);
  if (tile_begin(0) < context_len) load_tile(0, unit_row);
  copy_async_commit();
  for (int i = threadIdx.x; i < features * (columns / SEGMENT); i += THREADS) {
    const int feature = i / (columns / SEGMENT);
    const int column = i % (columns / SEGMENT) * SEGMENT;
    copy_async_16(tile_weight + feature * weight_pitch + column,
                  weight +
                      (static_cast<long long>(first_feature + feature) * num_kv_heads + kv_head) * columns +
                      column,
                  true);
  }
  copy_async_commit();

  const int num_items = group + (has_newest ? 2 : 0);  // queries, key, value: a warp each, in turn
  const float* const angles =
      rotary_dim > 0 ? cos_sin + static_cast<long long>(position) * rotary_dim : nullptr;
  auto transform_of = [&](int item) {
    const bool is_value = item == group + 1;
    return Transform(is_value        ? nullptr
                     : item == group ? k_norm
                                     : q_norm,
                     angles, HEAD_DIM, is_value ? 0 : rotary_dim, eps);
  };
  auto prepare = [&](const Transform& transform, int item) {
    const T* const heads = qkv + static_cast<long long>(token) * (num_heads + 2 * num_kv_heads) * HEAD_DIM;
    if (item < group) {
      transform(heads + (kv_head * group + item) * HEAD_DIM,
                [&](int i, const Vec<T, 2>& z) { z.store(tile_q + item * PITCH + i); });
      return;
    }
    const bool is_key = item == group;
    const long long place =
        (static_cast<long long>(slot / block_size) * num_kv_heads + kv_head) * block_size + slot % block_size;
    T* const stored = (is_key ? key_cache : value_cache) + place * HEAD_DIM;
    transform(heads + (num_heads + (is_key ? 0 : num_kv_heads) + kv_head) * HEAD_DIM,
              [&](int i, const Vec<T, 2>& z) {
                z.store(newest + (is_key ? 0 : HEAD_DIM) + i);
                z.store(stored + i);
              });
  };
  const Transform first = transform_of(warp);
  wait_for_earlier_kernels();
  if (warp < num_items) prepare(first, warp);
  for (int item = warp + WARPS; item < num_items; item += WARPS) prepare(transform_of(item), item);
  __syncthreads();

  Attention attention(tile_q, group);
  copy_async_wait<1>();
  for (int i = 0; tile_begin(i) < context_len; ++i) {
    const int begin = tile_begin(i);
    unit_row = find_unit_row(i + 1);
    __syncwarp();
    const int newest_place = newest_key - begin;
    if (slot >= 0 && newest_place < WARP_KEYS) {
      for (int s = lane; s < 2 * SEGMENTS; s += WARP_SIZE) {
        T* const to = (s < SEGMENTS ? tile_k : tile_v) + newest_place * PITCH + s % SEGMENTS * SEGMENT;
        Vec<T, SEGMENT>::load(newest + s * SEGMENT).store(to);
      }
      __syncwarp();
    }
    attention.add(tile_k, tile_v, begin, oldest_key, context_len, scale_log2);
    __syncwarp();
    if (tile_begin(i + 1) < context_len) {
      load_tile(i + 1, unit_row);
      copy_async_commit();
      copy_async_wait<0>();
    }
  }

  // Each block tells the others what its warps have found.
  float* const merged = reinterpret_cast<float*>(tiles);
  attention.finish(merged + warp * MERGE_STRIDE, warp_maxima[warp], warp_sums[warp], group);
  __syncthreads();
  Blocks::wait();
  for (int item = threadIdx.x; item < group * HEAD_PARTS; item += THREADS) {
    const int head = item / HEAD_PARTS;
    const int d = item % HEAD_PARTS * FLOATS;
    float highest, total;
    const Vec<float, FLOATS> values =
        merge_warps<WARPS>(merged + head * Attention::MERGE_PITCH + d, MERGE_STRIDE, warp_maxima, warp_sums,
                           head, highest, total);
#pragma unroll
    for (int other = 0; other < CLUSTER_BLOCKS; ++other) {
      values.store(Blocks::at(block_values + rank * columns + head * HEAD_DIM + d, other));
      if (d == 0) *Blocks::at(&block_sums[rank][head], other) = make_float2(highest, total);
    }
  }
  Blocks::sync();
  for (int item = threadIdx.x; item < group * HEAD_PARTS; item += THREADS) {
    const int head = item / HEAD_PARTS;
    const int d = item % HEAD_PARTS * FLOATS;
    Merged result;
#pragma unroll
    for (int block = 0; block < CLUSTER_BLOCKS; ++block) {
      const float2 sums = block_sums[block][head];
      result.add(Vec<float, FLOATS>::load(block_values + block * columns + head * HEAD_DIM + d), sums.x,
                 sums.y);
    }
    result.store(attended + head * HEAD_DIM + d);
  }
  copy_async_wait<0>();
  __syncthreads();

  // Weights are a left operand with a row a feature; all columns of the right one are the head's output.
  float* const partial =
      partial_out + (static_cast<long long>(row) * num_kv_heads + kv_head) * hidden + first_feature;
  for (int feature = warp * FEATURES; feature < features; feature += WARPS * FEATURES) {
    float sums[2][4] = {};
#pragma unroll 4
    for (int k = 0; k < columns; k += 32) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        unsigned a[4];
        ldmatrix_x4(a, tile_weight + (feature + lane % 16) * weight_pitch + k + h * 16 + lane / 16 * 8);
        const unsigned* const from = reinterpret_cast<const unsigned*>(attended + k + h * 16) + lane % 4;
        mma_m16n8k16<T>(sums[h], a, {from[0], from[4]});
      }
    }
    if (lane % 4 == 0) {
      partial[feature + lane / 4] = sums[0][0] + sums[1][0];
      partial[feature + 8 + lane / 4] = sums[0][2] + sums[1][2];
    }
  }

  __syncthreads();
  if (threadIdx.x == 0) is_last = arrives_last(arrivals + row * CLUSTER_BLOCKS + rank, num_kv_heads);
  __syncthreads();
  if (!is_last) return;
  const float* const partials =
      partial_out + static_cast<long long>(row) * num_kv_heads * hidden + first_feature;
  T* const to = out + static_cast<long long>(token) * hidden + first_feature;
  for (int feature = threadIdx.x * 2; feature < features; feature += THREADS * 2) {
    constexpr int LOADS = 8;  // in flight
    const unsigned raw = load_updated(reinterpret_cast<const unsigned*>(to + feature));
    const Vec<T, 2> before = reinterpret_cast<const Vec<T, 2>&>(raw);
    float2 sum = make_float2(0.0f, 0.0f);
    for (int head0 = 0; head0 < num_kv_heads; head0 += LOADS) {
      float2 parts[LOADS];
#pragma unroll
      for (int h = 0; h < LOADS; ++h) {
        parts[h] = head0 + h < num_kv_heads
                       ? __ldcg(reinterpret_cast<const float2*>(partials + (head0 + h) * hidden + feature))
                       : make_float2(0.0f, 0.0f);
      }
#pragma unroll
      for (int h = 0; h < LOADS; ++h) {
        sum.x += parts[h].x;
        sum.y += parts[h].y;
      }
    }
    const Vec<T, 2> pair = {from_float<T>(to_float(before[0]) + sum.x),
                            from_float<T>(to_float(before[1]) + sum.y)};
    pair.store(to + feature);
  }
}

#endif
