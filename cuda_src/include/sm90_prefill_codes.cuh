// The warps of sm_90 prefill attention that fill tiles of keys and values from a cache of e4m3.
#pragma once

#include "cached.cuh"
#include "sm90_prefill_producer.cuh"

// What scores and outputs are multiplied by for keys and values that are left as the cache has them.
struct CacheScales {
  const float* scales;  // [2, num_kv_heads] or null
  int num_kv_heads;

  __device__ __forceinline__ float key(int kv_head) const {
    return cache_scale(scales, 0, num_kv_heads, kv_head);
  }
  __device__ __forceinline__ float value(int kv_head) const {
    return cache_scale(scales, 1, num_kv_heads, kv_head);
  }
};

// One of WIDENERS warps that copy the codes of keys and values and widen them to __half, exactly, into the
// rings that KeyProducer fills otherwise. Of a tile each warp has every third eight of keys; four lanes have
// 64 codes of a key, 16 each, so that eight lanes write to all banks. A lane widens just what it has copied,
// while the next tile's codes are on their way. Of rows that `widen_cache_kernel` has widened already, two of
// the warps copy tiles by TMA, as KeyProducer does.
template <int HEAD_DIM, int CONSUMERS, int STAGES>
struct CodeProducer {
  using Layout = PrefillLayout<HEAD_DIM, CONSUMERS, STAGES>;
  static constexpr int WIDENERS = 3;
  static constexpr int GROUPS = TILE_KEYS / 8;
  static constexpr int GROUP_CODES = 8 * HEAD_DIM;
  static constexpr int KIND_CODES = TILE_KEYS * HEAD_DIM;
  static constexpr int STAGED_BYTES = 2 * KIND_CODES;  // of shared memory, behind the rings
  static_assert(GROUPS <= WARP_SIZE, "a lane finds a group's keys");

  // Keys, then values.
  const unsigned char* caches[2];
  unsigned char* rings[2];
  Barrier* full[2];   // [STAGES]
  Barrier* empty[2];  // [STAGES]
  CachedRows cached;
  const TensorMap* widened[2];  // [tiles, num_kv_heads, TILE_KEYS, HEAD_DIM] __half
  const int* first_tiles;       // of each row in `widened`, -1: it has none; null: none has
  unsigned char* staged;        // [2][TILE_KEYS, HEAD_DIM] of all warps
  int widener;
  int lane;

  __device__ __forceinline__ void run(TileQueue queue) const {
    int step = 0;  // counts tiles of keys through all tiles of queries
    bool waited = false;
    while (true) {
      const int slot = queue.take_slot();
      const AnnouncedTile tile = queue.tiles[slot];
      queue.free_slot(slot);
      if (tile.kv_head < 0) return;
      const int* const block_table = cached.block_table(tile.row);
      // The row of the cache where the lane's eight keys of a tile begin.
      auto find_group = [&](int key_tile) {
        const int key = tile.key_begin + key_tile * TILE_KEYS + lane * 8;
        const bool exists = key_tile >= 0 && lane < GROUPS && key < tile.context_len;
        return exists ? cache_row(block_table, key, tile.kv_head, cached.num_kv_heads, cached.block_size) : 0;
      };
      int row = find_group(tile.key_tiles - 1);
      if (!waited) {
        wait_for_earlier_kernels();
        fence_global_for_async();
        waited = true;
      }
      const int first_tile = first_tiles == nullptr ? -1 : load_updated(first_tiles + tile.row);
      if (first_tile >= 0) {
        copy_widened(tile, first_tile, step);
        step += tile.key_tiles;
        continue;
      }
      int keys_left = tile.context_len - tile.key_begin - (tile.key_tiles - 1) * TILE_KEYS;
      copy<0>(row, keys_left);
      copy<1>(row, keys_left);
#pragma unroll 1
      for (int key_tile = tile.key_tiles - 1; key_tile >= 0; --key_tile, ++step) {
        row = find_group(key_tile - 1);
        keys_left = key_tile > 0 ? TILE_KEYS : 0;  // of the next tile, which is not the row's last
        fill<0>(step);
        copy<0>(row, keys_left);
        fill<1>(step);
        copy<1>(row, keys_left);
      }
    }
  }

 private:
  // Copies the tiles of keys and values of a widened row. All three warps arrive for each of them, as they do
  // where they widen; the one that copies keys does so for values a tile later, so that the next keys need
  // not wait for room for values.
  __device__ __forceinline__ void copy_widened(const AnnouncedTile& tile, int first_tile, int step) const {
    const int newest = first_tile + tile.key_begin / TILE_KEYS + tile.key_tiles - 1;
    const int lag = widener == 0 ? 1 : 0;
#pragma unroll 1
    for (int i = 0; i < tile.key_tiles + lag; ++i) {
      const int group = ((newest - i) * cached.num_kv_heads + tile.kv_head) * GROUPS;
      if (i < tile.key_tiles) give_widened<0>(step + i, group);
      if (i >= lag) give_widened<1>(step + i - lag, group);
    }
  }
  template <int KIND>
  __device__ __forceinline__ void give_widened(int step, int group) const {
    const int stage = step % STAGES;
    barrier_wait(&empty[KIND][stage], step / STAGES % 2 ^ 1);
    if (lane == 0) {
      if (widener == KIND) {
        barrier_arrive_expecting(&full[KIND][stage], Layout::KEY_BYTES);
        copy_row_groups(rings[KIND] + stage * Layout::KEY_BYTES, *widened[KIND], group, &full[KIND][stage]);
      } else {
        barrier_arrive(&full[KIND][stage]);
      }
    }
    __syncwarp();
  }

  // Start copying the codes of a tile's keys or values, zeros behind the first `num_keys`; nothing where
  // there is no tile.
  template <int KIND>
  __device__ __forceinline__ void copy(int row, int num_keys) const {
    const int end = num_keys > 0 ? GROUPS : 0;
    unsigned to = shared_address(staged + KIND * KIND_CODES + widener * GROUP_CODES + lane * 16);
#pragma unroll 1
    for (int group = widener; group < end; group += WIDENERS, to += WIDENERS * GROUP_CODES) {
      const int key = lane / 4;
      const bool valid = group * 8 + key < num_keys;
      const long long first = __shfl_sync(FULL_WARP, row, group) + key;
      const unsigned char* const from = caches[KIND] + (valid ? first * HEAD_DIM : 0) + lane % 4 * 16;
#pragma unroll
      for (int half = 0; half < Layout::HALVES; ++half) {
        copy_async_16(to + half * WARP_SIZE * 16, from + half * LINE, valid);
      }
    }
    copy_async_commit();
  }

  // Widen the tile that was copied last but one, as soon as its place in the ring is free.
  template <int KIND>
  __device__ __forceinline__ void fill(int step) const {
    const int stage = step % STAGES, key = lane / 4;
    const unsigned char* from = staged + KIND * KIND_CODES + widener * GROUP_CODES + lane * 16;
    unsigned char* to =
        rings[KIND] + stage * Layout::KEY_BYTES + widener * Layout::KEY_STEP + key * SWIZZLE_BYTES;
    const int low = (lane % 4 * 2 ^ key) * 16, high = (lane % 4 * 2 + 1 ^ key) * 16;
    copy_async_wait<1>();
    barrier_wait(&empty[KIND][stage], step / STAGES % 2 ^ 1);
#pragma unroll 1
    for (int group = widener; group < GROUPS; group += WIDENERS) {
#pragma unroll
      for (int half = 0; half < Layout::HALVES; ++half) {
        const uint4 codes = *reinterpret_cast<const uint4*>(from + half * WARP_SIZE * 16);
        *reinterpret_cast<uint4*>(to + half * SWIZZLE_REPEAT + low) = halves_of_e4m3(codes.x, codes.y);
        *reinterpret_cast<uint4*>(to + half * SWIZZLE_REPEAT + high) = halves_of_e4m3(codes.z, codes.w);
      }
      from += WIDENERS * GROUP_CODES;
      to += WIDENERS * Layout::KEY_STEP;
    }
    fence_shared_for_async();
    __syncwarp();
    if (lane == 0) barrier_arrive(&full[KIND][stage]);
  }
};
