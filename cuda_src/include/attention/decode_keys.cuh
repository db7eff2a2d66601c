// How a block of decode attention gets a row's keys, and the queries that it makes for them.
#pragma once

#include "attention/cached.cuh"
#include "attention/rope.cuh"
#include "attention/warp_attention.cuh"
#include "generated/decode.cuh"
#include "ptx/copy.cuh"

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
  // The factor `other` of products with codes, for products with what they stand for.
  __device__ __forceinline__ float scale(int kind, float other) const {
    return IS_E4M3<Cached> ? other * scale(kind) : other;
  }

  // The quotient of a key and block_size: exact for contexts of less than 2^32 / block_size.
  __device__ __forceinline__ int block_of(int key) const {
    return static_cast<int>(__umulhi(key, block_reciprocal));
  }
};

// A warp's ring of STAGES tiles of 16 keys and their values, copied from the cache while others are used. Its
// i-th tile is tile i * WARPS + warp of the block; the tile's two units lie somewhere in the cache. Warps
// leave what they have found in the tile that they have just used or, of e4m3, which are too small for it,
// behind all rings.
template <typename T, typename Cached, int HEAD_DIM, int WARPS, int STAGES>
struct KeyRing {
  using Tile = KeyTile<T, Cached, HEAD_DIM>;
  static constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
  static constexpr int PITCH = Tile::PITCH;
  static constexpr int TILE_BYTES = Tile::BYTES;
  static constexpr int WARP_BYTES = STAGES * TILE_BYTES;
  static constexpr int MERGE_PITCH = WarpAttention<T, HEAD_DIM>::MERGE_PITCH;

  // Of all warps' rings and, of e4m3, of what they leave of `rows` rows.
  static __device__ __forceinline__ int bytes(int rows) {
    return WARPS * WARP_BYTES + (IS_E4M3<Cached> ? WARPS * merge_stride(rows) * 4 : 0);
  }
  // Where the first warp leaves what it has found after its i-th tile, and how many floats the next is
  // further.
  static __device__ __forceinline__ float* merged(unsigned char* rings, int i) {
    return reinterpret_cast<float*>(rings + (IS_E4M3<Cached> ? WARPS * WARP_BYTES : i % STAGES * TILE_BYTES));
  }
  static __device__ __forceinline__ int merge_stride(int rows) {
    return IS_E4M3<Cached> ? rows * MERGE_PITCH : WARP_BYTES / static_cast<int>(sizeof(float));
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

  __device__ __forceinline__ void load_codes(int i, int unit_row) const {
    constexpr int CODES = Tile::CODES, UNIT_BYTES = UNIT_KEYS * HEAD_DIM;
    const unsigned codes_k = warp_tiles + i % STAGES * TILE_BYTES;
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
        const unsigned to = codes_k + Tile::place(key, byte % HEAD_DIM);
        copy_async_16(to, keys.key_cache + first + byte, valid, policy);
        copy_async_16(to + Tile::KIND_BYTES, keys.value_cache + first + byte, valid, policy);
      }
    }
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
    const unsigned tile_k = warp_tiles + i % STAGES * TILE_BYTES;
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
        copy_async_16(to + TILE_BYTES / 2, unit_values + c * WARP_SIZE * SEGMENT, valid, policy);
      }
    }
  }

  // The newest key and value [2][HEAD_DIM], which the cache may not have yet, to their place in a tile.
  __device__ __forceinline__ void insert(const Cached* newest, int place, unsigned char* tile) const {
    constexpr int ELEMENTS = 16 / sizeof(Cached), PIECES = HEAD_DIM / ELEMENTS;
#pragma unroll 1
    for (int s = lane; s < 2 * PIECES; s += WARP_SIZE) {
      const int first = s % PIECES * ELEMENTS;
      unsigned char* to = tile + s / PIECES * (TILE_BYTES / 2);
      if constexpr (IS_E4M3<Cached>) {
        to += Tile::place(place, first);
      } else {
        to += (place * PITCH + first) * sizeof(Cached);
      }
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(newest + s * ELEMENTS);
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
  __device__ __forceinline__ void prepare(typename KeyTile<T, Cached, HEAD_DIM>::Operand* tile_q,
                                          Cached* newest, const PagedKeys<Cached>& keys, int warp) const {
    using Tile = KeyTile<T, Cached, HEAD_DIM>;
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
      Cached* stored = nullptr;
      if ((is_key || is_value) && stores) {
        const int block = keys.block_of(slot);
        const int place =
            (block * keys.num_kv_heads + keys.kv_head) * keys.block_size + slot - block * keys.block_size;
        stored = (is_key ? keys.key_cache : keys.value_cache) + static_cast<long long>(place) * HEAD_DIM;
      }
      const auto loaded = transform.load(heads + head * HEAD_DIM);
      if constexpr (IS_E4M3<Cached>) {
        const float scale = keys.scale(is_value ? 1 : 0);
        Cached* const prepared = newest + (is_value ? HEAD_DIM : 0);
        auto* const query = tile_q + item * Tile::PITCH;
        transform(loaded, [&](int i, const Vec<T, 2>& z) {
          if (!is_key && !is_value) {
            Tile::store_query(query, i, z);
            return;
          }
          store_e4m3(prepared + i, z, scale);
          if (stored != nullptr) store_e4m3(stored + i, z, scale);
        });
      } else {
        T* const prepared = is_value ? newest + HEAD_DIM : is_key ? newest : tile_q + item * Tile::PITCH;
        transform(loaded, [&](int i, const Vec<T, 2>& z) {
          z.store(prepared + i);
          if (stored != nullptr) z.store(stored + i);
        });
      }
    }
  }
};

// The finished queries [num_group_heads, HEAD_DIM] of a block's heads to shared memory.
template <typename Tile, typename T, int HEAD_DIM, int THREADS>
__device__ __forceinline__ void copy_queries(typename Tile::Operand* tile_q, const T* queries,
                                             int num_group_heads) {
  constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
#pragma unroll 1
  for (int i = threadIdx.x; i < num_group_heads * SEGMENTS; i += THREADS) {
    const Vec<T, SEGMENT> elements = Vec<T, SEGMENT>::load(queries + i * SEGMENT);
    Tile::store_query(tile_q + i / SEGMENTS * Tile::PITCH, i % SEGMENTS * SEGMENT, elements);
  }
}
