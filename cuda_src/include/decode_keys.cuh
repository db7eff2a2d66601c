// How a block of decode attention gets a row's keys, and the queries that it makes for them.
#pragma once

#include "cached.cuh"
#include "generated/decode.cuh"
#include "ptx/copy.cuh"
#include "rope.cuh"
#include "warp_attention.cuh"

// Where the keys of a row and a key/value head lie in the caches.
template <typename Cached>
struct PagedKeys {
  Cached* key_cache;
  Cached* value_cache;
  const int* block_table;
  int kv_head;
  int num_kv_heads;
  int block_size;
  unsigned block_reciprocal;      // of block_size, in 2^-32
  const float* scales = nullptr;  // of e4m3

  // Of the head's keys (0) or values (1); not kept, since registers are short.
  __device__ __forceinline__ float scale(int kind) const {
    return cache_scale(scales, kind, num_kv_heads, kv_head);
  }

  // The quotient of a key and block_size: exact for contexts of less than 2^32 / block_size.
  __device__ __forceinline__ int block_of(int key) const {
    return static_cast<int>(__umulhi(key, block_reciprocal));
  }
};

// A warp's ring of STAGES tiles of 16 keys and their values, copied from the cache while others are used. Its
// i-th tile is tile i * WARPS + warp of the block; the tile's two units lie somewhere in the cache. Tiles of
// e4m3 are widened, one at a time, into one tile of T.
template <typename T, typename Cached, int HEAD_DIM, int WARPS, int STAGES>
struct KeyRing {
  static constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
  static constexpr int PITCH = WarpAttention<T, HEAD_DIM>::PITCH;
  static constexpr int TILE_ELEMENTS = WarpAttention<T, HEAD_DIM>::TILE_ELEMENTS;
  static constexpr int CODE_BYTES = WARP_KEYS * HEAD_DIM;     // of keys or values of a tile
  static constexpr int CODES = 16;                            // that a lane copies or widens at a time
  static constexpr int TILES = IS_E4M3<Cached> ? 1 : STAGES;  // of keys and values in T, of a warp
  static constexpr int RING_BYTES = IS_E4M3<Cached> ? STAGES * 2 * CODE_BYTES : 0;  // of its codes
  static constexpr int WARP_ELEMENTS = TILES * 2 * TILE_ELEMENTS + RING_BYTES / sizeof(T);
  static constexpr int MERGE_STRIDE = TILES * 2 * TILE_ELEMENTS * sizeof(T) / sizeof(float);  // of warps

  // Where a warp's codes begin, after all warps' tiles, and where its copies go.
  static __device__ __forceinline__ const unsigned char* codes_of(const T* tiles, int warp) {
    return reinterpret_cast<const unsigned char*>(tiles + WARPS * 2 * TILE_ELEMENTS) + warp * RING_BYTES;
  }
  static __device__ __forceinline__ unsigned place_of(const T* tiles, int warp) {
    if constexpr (IS_E4M3<Cached>) {
      return shared_address(codes_of(tiles, warp));
    } else {
      return shared_address(tiles + warp * STAGES * 2 * TILE_ELEMENTS);
    }
  }

  PagedKeys<Cached> keys;
  int key_begin;  // the block's
  int key_end;
  int oldest_key;  // the row's first visible one
  int cached_end;  // of those that the cache has
  unsigned warp_tiles;
  unsigned long long policy;
  int lane;
  int warp;

  __device__ __forceinline__ int tile_begin(int i) const {
    return key_begin + (i * WARPS + warp) * WARP_KEYS;
  }

  // The row of the cache where unit `lane` of tile i begins, for lanes 0 and 1.
  __device__ __forceinline__ int find_unit_row(int i) const {
    const int key = tile_begin(i) + lane * UNIT_KEYS;
    if (lane >= WARP_KEYS / UNIT_KEYS || key >= key_end) return 0;
    const int block = keys.block_of(key);
    return (keys.block_table[block] * keys.num_kv_heads + keys.kv_head) * keys.block_size + key -
           block * keys.block_size;
  }

  // `warp_tiles` is where the warp's codes begin.
  __device__ __forceinline__ void load_codes(int i, int unit_row) const {
    constexpr int UNIT_BYTES = UNIT_KEYS * HEAD_DIM;
    const unsigned codes_k = warp_tiles + i % STAGES * 2 * CODE_BYTES;
    const int oldest = oldest_key - tile_begin(i);
    const int end = cached_end - tile_begin(i);
#pragma unroll
    for (int u = 0; u < WARP_KEYS / UNIT_KEYS; ++u) {
      const long long first = static_cast<long long>(__shfl_sync(FULL_WARP, unit_row, u)) * HEAD_DIM;
#pragma unroll
      for (int place = 0; place < UNIT_BYTES; place += WARP_SIZE * CODES) {
        const int byte = place + lane * CODES;
        if (UNIT_BYTES % (WARP_SIZE * CODES) != 0 && byte >= UNIT_BYTES) continue;
        const int key = u * UNIT_KEYS + byte / HEAD_DIM;
        const bool valid = key >= oldest && key < end;
        const unsigned to = codes_k + u * UNIT_BYTES + byte;
        copy_async_16(to, keys.key_cache + first + byte, valid, policy);
        copy_async_16(to + CODE_BYTES, keys.value_cache + first + byte, valid, policy);
      }
    }
  }

  // Tile i of the warp's codes to its tiles of T.
  __device__ __forceinline__ void widen(int i, const T* tiles, T* tile_k, T* tile_v) const {
    const unsigned char* const codes_k = codes_of(tiles, warp) + i % STAGES * 2 * CODE_BYTES;
#pragma unroll 1
    for (int place = 0; place < CODE_BYTES; place += WARP_SIZE * CODES) {
      const int byte = place + lane * CODES;
      if (CODE_BYTES % (WARP_SIZE * CODES) != 0 && byte >= CODE_BYTES) continue;
      const int to = byte / HEAD_DIM * PITCH + byte % HEAD_DIM;
      widen_e4m3(tile_k + to, *reinterpret_cast<const uint4*>(codes_k + byte), keys.scale(0));
      widen_e4m3(tile_v + to, *reinterpret_cast<const uint4*>(codes_k + CODE_BYTES + byte), keys.scale(1));
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_tile(int i, int unit_row) const {
    if constexpr (IS_E4M3<Cached>) {
      load_codes(i, unit_row);
    } else {
      load_elements(i, unit_row);
    }
  }

  __device__ __forceinline__ void load_elements(int i, int unit_row) const {
    constexpr int UNIT_COPIES = ceil_div(UNIT_KEYS * SEGMENTS, WARP_SIZE);
    constexpr int COPY_KEYS = WARP_SIZE % SEGMENTS == 0 ? WARP_SIZE / SEGMENTS : 0;  // 0: no whole number
    const unsigned tile_k = warp_tiles + i % STAGES * 2 * TILE_ELEMENTS * sizeof(T);
    const int oldest = oldest_key - tile_begin(i);
    const int end = cached_end - tile_begin(i);
#pragma unroll
    for (int u = 0; u < WARP_KEYS / UNIT_KEYS; ++u) {
      const long long first =
          static_cast<long long>(__shfl_sync(FULL_WARP, unit_row, u)) * HEAD_DIM + lane * SEGMENT;
      const T* const unit_keys = keys.key_cache + first;
      const T* const unit_values = keys.value_cache + first;
#pragma unroll
      for (int c = 0; c < UNIT_COPIES; ++c) {
        const int segment = COPY_KEYS > 0 ? lane % SEGMENTS : (c * WARP_SIZE + lane) % SEGMENTS;
        const int key = u * UNIT_KEYS +
                        (COPY_KEYS > 0 ? c * COPY_KEYS + lane / SEGMENTS : (c * WARP_SIZE + lane) / SEGMENTS);
        if constexpr (UNIT_KEYS * SEGMENTS % WARP_SIZE != 0) {
          if (key >= (u + 1) * UNIT_KEYS) continue;
        }
        const bool valid = key >= oldest && key < end;
        const unsigned to = tile_k + (key * PITCH + segment * SEGMENT) * sizeof(T);
        copy_async_16(to, unit_keys + c * WARP_SIZE * SEGMENT, valid, policy);
        copy_async_16(to + TILE_ELEMENTS * sizeof(T), unit_values + c * WARP_SIZE * SEGMENT, valid, policy);
      }
    }
  }

  // The newest key and value [2][HEAD_DIM], which the cache may not have yet, to their place in a tile.
  __device__ __forceinline__ void insert(const T* newest, int place, T* tile_k, T* tile_v) const {
#pragma unroll 1
    for (int s = lane; s < 2 * SEGMENTS; s += WARP_SIZE) {
      T* const to = (s < SEGMENTS ? tile_k : tile_v) + place * PITCH + s % SEGMENTS * SEGMENT;
      Vec<T, SEGMENT>::load(newest + s * SEGMENT).store(to);
    }
    __syncwarp();
  }
};

// A token's heads that a block makes from qkv as rope_and_store_kernel does: queries, and where `has_newest`
// its key and value as well.
template <typename T, int HEAD_DIM, int WARPS>
struct TokenHeads {
  using Transform = HeadTransform<HEAD_DIM, 2, T>;

  const T* heads;       // of the token: queries, keys, values
  const float* angles;  // null without rotary embedding
  const T* q_norm;
  const T* k_norm;
  int head0;  // of the block's queries
  int num_group_heads;
  int num_heads;
  int rotary_dim;
  float eps;
  bool has_newest;
  bool stores;  // the key and value to the cache, in `slot`
  int slot;

  // A warp each, in turn. tile_q [num_group_heads, PITCH], newest [2][HEAD_DIM], in shared memory.
  template <typename Cached>
  __device__ __forceinline__ void prepare(T* tile_q, T* newest, const PagedKeys<Cached>& keys,
                                          int warp) const {
    const int num_items = num_group_heads + (has_newest ? 2 : 0);
#pragma unroll 1
    for (int item = warp; item < num_items || item == warp; item += WARPS) {
      const bool is_key = item == num_group_heads;
      const bool is_value = item > num_group_heads;
      const T* const norm = is_value ? nullptr : is_key ? k_norm : q_norm;
      const Transform transform(norm, angles, HEAD_DIM, is_value ? 0 : rotary_dim, eps);
      if (item == warp) wait_for_earlier_kernels();
      if (item >= num_items) break;
      const int head = is_value ? num_heads + keys.num_kv_heads + keys.kv_head
                       : is_key ? num_heads + keys.kv_head
                                : head0 + item;
      T* const prepared = is_value ? newest + HEAD_DIM
                          : is_key ? newest
                                   : tile_q + item * WarpAttention<T, HEAD_DIM>::PITCH;
      Cached* stored = nullptr;
      if ((is_key || is_value) && stores) {
        const int block = keys.block_of(slot);
        const int place =
            (block * keys.num_kv_heads + keys.kv_head) * keys.block_size + slot - block * keys.block_size;
        stored = (is_key ? keys.key_cache : keys.value_cache) + static_cast<long long>(place) * HEAD_DIM;
      }
      transform(transform.load(heads + head * HEAD_DIM), [&](int i, const Vec<T, 2>& z) {
        if constexpr (IS_E4M3<Cached>) {
          const float scale = keys.scale(is_value ? 1 : 0);
          (is_key || is_value ? through_e4m3(z, scale) : z).store(prepared + i);
          if (stored != nullptr) store_e4m3(stored + i, z, scale);
        } else {
          z.store(prepared + i);
          if (stored != nullptr) z.store(stored + i);
        }
      });
    }
  }
};

// The finished queries [num_group_heads, HEAD_DIM] of a block's heads to shared memory.
template <typename T, int HEAD_DIM, int THREADS>
__device__ __forceinline__ void copy_queries(T* tile_q, const T* queries, int num_group_heads) {
  constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
#pragma unroll 1
  for (int i = threadIdx.x; i < num_group_heads * SEGMENTS; i += THREADS) {
    const Vec<T, SEGMENT> elements = Vec<T, SEGMENT>::load(queries + i * SEGMENT);
    elements.store(tile_q + i / SEGMENTS * WarpAttention<T, HEAD_DIM>::PITCH + i % SEGMENTS * SEGMENT);
  }
}
