// The warps of sm_90 prefill attention that fill tiles of keys and values from a cache of e4m3.
#pragma once

#include "attention/cached.cuh"
#include "prefill/sm90_prefill_producer.cuh"

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

// A ring of tiles of keys or values, and where they come from.
struct CodedRing {
  const unsigned char* cache;
  unsigned char* tiles;      // [STAGES]
  Barrier* full;             // [STAGES]
  Barrier* empty;            // [STAGES]
  const TensorMap* widened;  // [tiles, num_kv_heads, TILE_KEYS, HEAD_DIM] __half
};

// One of WIDENERS warps that copy the codes of keys and values, or of VALUES_ALONE, and widen them to __half,
// exactly, into the rings that KeyProducer fills otherwise. Of a tile each warp has every WIDENERS-th eight
// of keys; four lanes have 64 codes of a key, 16 each, so that eight lanes write to all banks. A lane widens
// just what it has copied, while the codes of the next part are on their way: a tile of keys or one of
// values. Of rows that `widen_cache_kernel` has widened already, a warp of each ring copies tiles by TMA, as
// KeyProducer does.
template <int HEAD_DIM, int STAGES, bool VALUES_ALONE>
struct CodeProducer {
  static constexpr int KINDS = VALUES_ALONE ? 1 : 2;
  static constexpr int WIDENERS = VALUES_ALONE ? 2 : 3;
  static constexpr int PARTS_AHEAD = 2;
  static constexpr int TILES_AHEAD = PARTS_AHEAD / KINDS;
  static constexpr int HALVES = HEAD_DIM / LINE;
  static constexpr int GROUPS = TILE_KEYS / 8;
  static constexpr int GROUP_BYTES = 8 * HEAD_DIM * 2;  // in a ring
  static constexpr int TILE_BYTES = GROUPS * GROUP_BYTES;
  static constexpr int GROUP_CODES = 8 * HEAD_DIM;
  static constexpr int PART_CODES = TILE_KEYS * HEAD_DIM;
  static_assert(GROUPS <= WARP_SIZE, "a lane finds a group's keys");

  CodedRing rings[2];  // of keys and of values, or the first of values
  CachedRows cached;
  const int* first_tiles;  // of each row in what is widened, -1: it has none; null: none has
  unsigned char* staged;   // [PARTS_AHEAD][TILE_KEYS, HEAD_DIM] of all warps, behind the rings
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
      auto count_keys = [&](int key_tile) {
        return key_tile < 0 ? 0 : tile.context_len - tile.key_begin - key_tile * TILE_KEYS;
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
#pragma unroll
      for (int ahead = 0; ahead < TILES_AHEAD; ++ahead) {
        const int key_tile = tile.key_tiles - 1 - ahead;
        if (ahead > 0) row = find_group(key_tile);
        copy_all(row, count_keys(key_tile), step + ahead);
      }
#pragma unroll 1
      for (int key_tile = tile.key_tiles - 1; key_tile >= 0; --key_tile, ++step) {
        const int later = key_tile - TILES_AHEAD;
        row = find_group(later);
        fill<0>(step);
        copy<0>(row, count_keys(later), step);
        if constexpr (KINDS == 2) {
          fill<1>(step);
          copy<1>(row, count_keys(later), step);
        }
      }
    }
  }

 private:
  // Copies the tiles of a widened row. All warps arrive for each of them, as they do where they widen; the
  // one that copies keys does so for values a tile later, so that the next keys need not wait for room for
  // values.
  __device__ __forceinline__ void copy_widened(const AnnouncedTile& tile, int first_tile, int step) const {
    const int newest = first_tile + tile.key_begin / TILE_KEYS + tile.key_tiles - 1;
    const int lag = KINDS == 2 && widener == 0 ? 1 : 0;
#pragma unroll 1
    for (int i = 0; i < tile.key_tiles + lag; ++i) {
      const int group = ((newest - i) * cached.num_kv_heads + tile.kv_head) * GROUPS;
      if (i < tile.key_tiles) give_widened<0>(step + i, group);
      if constexpr (KINDS == 2) {
        if (i >= lag) give_widened<1>(step + i - lag, group);
      }
    }
  }
  template <int KIND>
  __device__ __forceinline__ void give_widened(int step, int group) const {
    const CodedRing& ring = rings[KIND];
    const int stage = step % STAGES;
    barrier_wait(&ring.empty[stage], step / STAGES % 2 ^ 1);
    if (lane == 0) {
      if (widener == KIND) {
        barrier_arrive_expecting(&ring.full[stage], TILE_BYTES);
        copy_row_groups(ring.tiles + stage * TILE_BYTES, *ring.widened, group, &ring.full[stage]);
      } else {
        barrier_arrive(&ring.full[stage]);
      }
    } else if (arrives_for_warp(lane)) {
      barrier_arrive(&ring.full[stage]);
    }
    __syncwarp();
  }

  // Where the lane's first codes of a tile lie.
  template <int KIND>
  __device__ __forceinline__ unsigned char* staged_codes(int step) const {
    const int part = KINDS == 2 ? KIND : step % PARTS_AHEAD;
    return staged + part * PART_CODES + widener * GROUP_CODES + lane * 16;
  }

  // Start copying the codes of the tile `step`, zeros behind the first `num_keys`; nothing where there is no
  // tile.
  template <int KIND>
  __device__ __forceinline__ void copy(int row, int num_keys, int step) const {
    const int end = num_keys > 0 ? GROUPS : 0;
    unsigned to = shared_address(staged_codes<KIND>(step));
#pragma unroll 1
    for (int group = widener; group < end; group += WIDENERS, to += WIDENERS * GROUP_CODES) {
      const int key = lane / 4;
      const bool valid = group * 8 + key < num_keys;
      const long long first = __shfl_sync(FULL_WARP, row, group) + key;
      const unsigned char* const from = rings[KIND].cache + (valid ? first * HEAD_DIM : 0) + lane % 4 * 16;
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        copy_async_16(to + half * WARP_SIZE * 16, from + half * LINE, valid);
      }
    }
    copy_async_commit();
  }
  __device__ __forceinline__ void copy_all(int row, int num_keys, int step) const {
    copy<0>(row, num_keys, step);
    if constexpr (KINDS == 2) copy<1>(row, num_keys, step);
  }

  // Widen what was copied last but one, as soon as its place in the ring is free.
  template <int KIND>
  __device__ __forceinline__ void fill(int step) const {
    const CodedRing& ring = rings[KIND];
    const int stage = step % STAGES, key = lane / 4;
    const unsigned char* from = staged_codes<KIND>(step);
    unsigned char* to = ring.tiles + stage * TILE_BYTES + widener * GROUP_BYTES + key * SWIZZLE_BYTES;
    const int low = (lane % 4 * 2 ^ key) * 16, high = (lane % 4 * 2 + 1 ^ key) * 16;
    copy_async_wait<PARTS_AHEAD - 1>();
    barrier_wait(&ring.empty[stage], step / STAGES % 2 ^ 1);
#pragma unroll 1
    for (int group = widener; group < GROUPS; group += WIDENERS) {
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        const uint4 codes = *reinterpret_cast<const uint4*>(from + half * WARP_SIZE * 16);
        *reinterpret_cast<uint4*>(to + half * SWIZZLE_REPEAT + low) = halves_of_e4m3(codes.x, codes.y);
        *reinterpret_cast<uint4*>(to + half * SWIZZLE_REPEAT + high) = halves_of_e4m3(codes.z, codes.w);
      }
      from += WIDENERS * GROUP_CODES;
      to += WIDENERS * GROUP_BYTES;
    }
    fence_shared_for_async();
    barrier_arrive_warp(&ring.full[stage], lane);
  }
};
