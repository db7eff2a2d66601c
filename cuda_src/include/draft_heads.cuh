// What the tokens of a step bring into attention of drafts: a row's queries, keys and values, which a block
// makes from qkv as rope_and_store_kernel makes them.
#pragma once

#include "decode_keys.cuh"
#include "draft_attention.cuh"
#include "generated/drafts.cuh"

// All of a row's tokens for a key/value head; the cache does not have their keys yet. A warp makes several
// heads at once, so that it waits for memory once; by one piece of code, as each instruction delays the
// kernel.
template <typename T, typename Cached, int HEAD_DIM, int WARPS>
struct FreshHeads {
  using Transform = HeadTransform<HEAD_DIM, 2, T>;
  using Head = typename Transform::Head;
  using Tile = KeyTile<T, Cached, HEAD_DIM>;
  using Operand = typename Tile::Operand;
  static constexpr int AT_ONCE = 4;  // heads of a warp
  static constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
  static_assert(FUSED_QUERIES * SEGMENTS <= WARP_SIZE * WARPS, "a thread has a segment of one value");

  Cached* made;    // [FUSED_QUERIES, 2, HEAD_DIM] in shared memory: keys and values as the cache has them
  const T* heads;  // of the row's first token
  const int* positions;  // of the row's tokens
  const float* cos_sin;
  int token_width;     // elements from one token to the next
  int key_place;       // of the key in a token's heads
  int value_distance;  // from there to the value
  int num_tokens;
  const T* q_norm;
  const T* k_norm;
  int rotary_dim;
  float eps;

  // q [*, num_heads + 2 * num_kv_heads, HEAD_DIM] and positions of all tokens.
  __device__ __forceinline__ FreshHeads(void* memory, const T* q, const int* positions, int first_token,
                                        int num_tokens, int num_heads, const PagedKeys<Cached>& paged,
                                        const float* cos_sin, const T* q_norm, const T* k_norm,
                                        int rotary_dim, float eps)
      : made(static_cast<Cached*>(memory)),
        positions(positions + first_token),
        cos_sin(cos_sin),
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
  __device__ __forceinline__ Cached* cached(int i) const { return made + i * 2 * HEAD_DIM; }

  // Wait for the projections and make the queries of a tile of ROWS rows, from token `first` on and head
  // `head0`, and where asked keys and values, which go to the cache as well if there are `slots`
  // [num_tokens]. All threads of the block call.
  template <int ROWS>
  __device__ __forceinline__ void make(Operand* tile_q, const DraftRows& rows, int first, int head0,
                                       bool makes_keys, const PagedKeys<Cached>& paged,
                                       const int* slots) const {
    static_assert(AT_ONCE == 4);
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int num_heads = ROWS + (makes_keys ? num_tokens : 0);  // queries, then keys
    const auto find = [&](int i) { return Place(*this, rows, i, ROWS, first, head0); };
    Vec<T, SEGMENT> value = {};
    const int value_token = threadIdx.x / SEGMENTS, value_begin = threadIdx.x % SEGMENTS * SEGMENT;
    const bool has_value = makes_keys && value_token < num_tokens;
#pragma unroll 1
    for (int begin = warp; begin < num_heads; begin += WARPS * AT_ONCE) {
      const Place places[AT_ONCE] = {find(begin), find(begin + WARPS), find(begin + 2 * WARPS),
                                     find(begin + 3 * WARPS)};
      const Transform transforms[AT_ONCE] = {transform_of(places[0]), transform_of(places[1]),
                                             transform_of(places[2]), transform_of(places[3])};
      if (begin == warp) {
        wait_for_earlier_kernels();
        if (has_value)
          value = Vec<T, SEGMENT>::load(projected_key(value_token) + value_distance + value_begin);
      }
      Head loaded[AT_ONCE];
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) {
        if (begin + n * WARPS < num_heads && places[n].exists) loaded[n] = transforms[n].load(places[n].from);
      }
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) {
        const int i = begin + n * WARPS;
        if (i >= num_heads) break;
        Operand* const query = tile_q + i * Tile::PITCH;
        Cached* const key = cached(i - ROWS);
        if (!places[n].exists) {
          for (int e = lane * 2; e < HEAD_DIM; e += WARP_SIZE * 2) Tile::store_query(query, e, Vec<T, 2>{});
        } else if constexpr (IS_E4M3<Cached>) {
          const float scale = paged.scale(0);
          transforms[n](loaded[n], [&](int e, const Vec<T, 2>& z) {
            if (i < ROWS) {
              Tile::store_query(query, e, z);
            } else {
              store_e4m3(key + e, z, scale);
            }
          });
        } else {
          T* const made_head = i < ROWS ? query : key;
          transforms[n](loaded[n], [&](int e, const Vec<T, 2>& z) { z.store(made_head + e); });
        }
        if (i >= ROWS && slots != nullptr) {
          __syncwarp();
          if (lane < SEGMENTS)
            store(paged.key_cache, key + lane * SEGMENT, lane * SEGMENT, slots[i - ROWS], paged);
        }
      }
    }
    if (!has_value) return;
    Cached* const made_value = cached(value_token) + HEAD_DIM + value_begin;
    if constexpr (IS_E4M3<Cached>) {
      const float scale = paged.scale(1);
#pragma unroll
      for (int e = 0; e < SEGMENT; e += 2) {
        Vec<T, 2> pair;
        pair[0] = value[e];
        pair[1] = value[e + 1];
        store_e4m3(made_value + e, pair, scale);
      }
    } else {
      value.store(made_value);
    }
    if (slots != nullptr) store(paged.value_cache, made_value, value_begin, slots[value_token], paged);
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

 private:
  // Where the projection of a head is: of `count` queries, from token `first` on and head `head0`, or a key.
  struct Place {
    const T* norm;
    const T* from;
    int token;
    bool exists;  // some rows of a tile have no query

    __device__ __forceinline__ Place(const FreshHeads& fresh, const DraftRows& rows, int i, int count,
                                     int first, int head0) {
      const bool is_key = i >= count;
      exists = is_key || rows.has(i);
      norm = is_key ? fresh.k_norm : fresh.q_norm;
      token = min(is_key ? i - count : first + rows.query(i), fresh.num_tokens - 1);
      from = is_key ? fresh.projected_key(token)
                    : fresh.heads + static_cast<long long>(token) * fresh.token_width +
                          (head0 + rows.head(i)) * HEAD_DIM;
    }
  };

  __device__ __forceinline__ const T* projected_key(int token) const {
    return heads + static_cast<long long>(token) * token_width + key_place;
  }

  __device__ __forceinline__ Transform transform_of(const Place& place) const {
    const int position = rotary_dim > 0 ? positions[place.token] : 0;
    return Transform(place.norm, cos_sin + static_cast<long long>(position) * rotary_dim, HEAD_DIM,
                     rotary_dim, eps);
  }

  // A segment that was made, from element `begin` of its head on, to the cache, if it has a slot there.
  __device__ __forceinline__ static void store(Cached* cache, const Cached* segment, int begin, int slot,
                                               const PagedKeys<Cached>& paged) {
    if (slot < 0) return;
    const int block = paged.block_of(slot);
    const long long place =
        (block * paged.num_kv_heads + paged.kv_head) * paged.block_size + slot - block * paged.block_size;
    Vec<Cached, SEGMENT>::load(segment).store(cache + place * HEAD_DIM + begin);
  }
};
