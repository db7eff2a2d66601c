// What the tokens of a step bring into attention of drafts: a row's queries, keys and values, which a block
// makes from qkv as rope_and_store_kernel makes them.
#pragma once

#include "decode_keys.cuh"
#include "draft_attention.cuh"
#include "generated/drafts.cuh"

// All of a row's tokens for a key/value head, in shared memory; the cache does not have their keys yet.
template <typename T, typename Cached, int HEAD_DIM, int WARPS>
struct FreshHeads {
  using Transform = HeadTransform<HEAD_DIM, 2, T>;
  using Tile = KeyTile<T, Cached, HEAD_DIM>;
  using Operand = typename Tile::Operand;
  static constexpr int THREADS = WARP_SIZE * WARPS;
  static constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
  static_assert(sizeof(Operand) == sizeof(T), "a query is made where its projection is");

  T* keys;             // [FUSED_QUERIES, 2, HEAD_DIM]: keys and values as projected, then as `cached` says
  float* angles;       // [FUSED_QUERIES, rotary_dim]
  const T* heads;      // of the row's first token
  int token_width;     // elements from one token to the next
  int key_place;       // of the key in a token's heads
  int value_distance;  // from there to the value
  int num_tokens;
  const T* q_norm;
  const T* k_norm;
  int rotary_dim;
  float eps;

  // memory: of `keys`, then `angles`; q [*, num_heads + 2 * num_kv_heads, HEAD_DIM] of all tokens.
  __device__ __forceinline__ FreshHeads(void* memory, const T* q, int first_token, int num_tokens,
                                        int num_heads, const PagedKeys<Cached>& paged, const T* q_norm,
                                        const T* k_norm, int rotary_dim, float eps)
      : keys(static_cast<T*>(memory)),
        angles(reinterpret_cast<float*>(keys + FUSED_QUERIES * 2 * HEAD_DIM)),
        token_width((num_heads + 2 * paged.num_kv_heads) * HEAD_DIM),
        key_place((num_heads + paged.kv_head) * HEAD_DIM),
        value_distance(paged.num_kv_heads * HEAD_DIM),
        num_tokens(num_tokens),
        q_norm(q_norm),
        k_norm(k_norm),
        rotary_dim(rotary_dim),
        eps(eps) {
    heads = q + static_cast<long long>(first_token) * token_width;
  }

  // [2, HEAD_DIM]: key and value `i` as the cache has them.
  __device__ __forceinline__ Cached* cached(int i) const {
    return reinterpret_cast<Cached*>(keys + i * 2 * HEAD_DIM);
  }

  // The queries of a tile of ROWS rows, from token `first` on and head `head0`, and where asked keys and
  // values, which go to the cache as well if there are `slots` [num_tokens]. All threads of the block call.
  template <int ROWS>
  __device__ __forceinline__ void make(Operand* tile_q, const DraftRows& rows, int first, int head0,
                                       bool makes_keys, const PagedKeys<Cached>& paged,
                                       const int* slots) const {
    const int warp = threadIdx.x / WARP_SIZE;
    load_queries(tile_q, rows, ROWS, first, head0);
    if (makes_keys) load_keys();
    __syncthreads();
    make_queries(tile_q, rows, ROWS, first, warp);
    if (makes_keys) make_keys(paged, slots, warp, threadIdx.x % WARP_SIZE);
  }

  // The row's keys from `fresh_key` on that belong to the warp's tile at `begin`, to their places in it.
  template <typename Ring>
  __device__ __forceinline__ void insert(const Ring& ring, int fresh_key, int begin,
                                         unsigned char* tile) const {
#pragma unroll 1
    for (int key = max(fresh_key, begin); key < min(ring.key_end, begin + WARP_KEYS); ++key) {
      ring.insert(cached(key - fresh_key), key - begin, tile);
    }
  }

  // positions [num_tokens] of the row's tokens.
  __device__ __forceinline__ void load_angles(const float* cos_sin, const int* positions, int warp,
                                              int lane) const {
#pragma unroll 2
    for (int i = warp; i < num_tokens; i += WARPS) {
      const float* const of_token =
          cos_sin + static_cast<long long>(rotary_dim > 0 ? positions[i] : 0) * rotary_dim;
      for (int place = lane * 2; place < rotary_dim; place += WARP_SIZE * 2) {
        Vec<float, 2>::load(of_token + place).store(angles + i * rotary_dim + place);
      }
    }
  }

 private:
  // The projections of the queries of a tile's `count` rows, from token `first` on and head `head0`; rows
  // without a query are zeros.
  __device__ __forceinline__ void load_queries(Operand* tile_q, const DraftRows& rows, int count, int first,
                                               int head0) const {
    const T* const of_head = heads + static_cast<long long>(first) * token_width + head0 * HEAD_DIM;
#pragma unroll 4
    for (int i = threadIdx.x; i < count * SEGMENTS; i += THREADS) {
      const int row = i / SEGMENTS;
      const int place = i % SEGMENTS * SEGMENT;
      Vec<T, SEGMENT> elements = {};
      if (rows.has(row)) {
        elements = Vec<T, SEGMENT>::load(of_head + static_cast<long long>(rows.query(row)) * token_width +
                                         rows.head(row) * HEAD_DIM + place);
      }
      elements.store(reinterpret_cast<T*>(tile_q) + row * Tile::PITCH + place);
    }
  }

  // The projections of keys and values.
  __device__ __forceinline__ void load_keys() const {
#pragma unroll 2
    for (int i = threadIdx.x; i < num_tokens * 2 * SEGMENTS; i += THREADS) {
      const int token = i / (2 * SEGMENTS);
      const bool is_value = i / SEGMENTS % 2 != 0;
      const T* const from = heads + static_cast<long long>(token) * token_width + key_place +
                            (is_value ? value_distance : 0) + i % SEGMENTS * SEGMENT;
      Vec<T, SEGMENT>::load(from).store(keys + i * SEGMENT);
    }
  }

  // The queries of a tile, whose projections are there, a warp each in turn.
  __device__ __forceinline__ void make_queries(Operand* tile_q, const DraftRows& rows, int count, int first,
                                               int warp) const {
#pragma unroll 1
    for (int row = warp; row < count; row += WARPS) {
      if (!rows.has(row)) continue;
      const Transform transform(q_norm, angles + (first + rows.query(row)) * rotary_dim, HEAD_DIM, rotary_dim,
                                eps);
      Operand* const query = tile_q + row * Tile::PITCH;
      const auto loaded = transform.load(reinterpret_cast<const T*>(query));
      __syncwarp();
      transform(loaded, [&](int i, const Vec<T, 2>& z) { Tile::store_query(query, i, z); });
    }
  }

  // Keys and values likewise, and to the cache where there are slots.
  __device__ __forceinline__ void make_keys(const PagedKeys<Cached>& paged, const int* slots, int warp,
                                            int lane) const {
#pragma unroll 1
    for (int i = warp; i < num_tokens; i += WARPS) {
      const int slot = slots != nullptr ? slots[i] : -1;
      T* const projected = keys + i * 2 * HEAD_DIM;
      Cached* const made = cached(i);
      const Transform transform(k_norm, angles + i * rotary_dim, HEAD_DIM, rotary_dim, eps);
      const auto key = transform.load(projected);
      __syncwarp();
      if constexpr (IS_E4M3<Cached>) {
        const Transform unchanged(nullptr, nullptr, HEAD_DIM, 0, eps);
        const auto value = unchanged.load(projected + HEAD_DIM);
        const float key_scale = paged.scale(0), value_scale = paged.scale(1);
        __syncwarp();
        transform(key, [&](int e, const Vec<T, 2>& z) { store_e4m3(made + e, z, key_scale); });
        unchanged(value, [&](int e, const Vec<T, 2>& z) { store_e4m3(made + HEAD_DIM + e, z, value_scale); });
      } else {
        transform(key, [&](int e, const Vec<T, 2>& z) { z.store(made + e); });
      }
      __syncwarp();
      if (slot >= 0) store(paged, slot, made, lane);
    }
  }

  __device__ __forceinline__ void store(const PagedKeys<Cached>& paged, int slot, const Cached* made,
                                        int lane) const {
    constexpr int ELEMENTS = 16 / sizeof(Cached), PIECES = HEAD_DIM / ELEMENTS;
    const int block = paged.block_of(slot);
    const long long place =
        (block * paged.num_kv_heads + paged.kv_head) * paged.block_size + slot - block * paged.block_size;
#pragma unroll 1
    for (int piece = lane; piece < 2 * PIECES; piece += WARP_SIZE) {
      Cached* const cache = piece < PIECES ? paged.key_cache : paged.value_cache;
      *reinterpret_cast<uint4*>(cache + place * HEAD_DIM + piece % PIECES * ELEMENTS) =
          *reinterpret_cast<const uint4*>(made + piece * ELEMENTS);
    }
  }
};
