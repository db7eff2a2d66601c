// The warps of sm_90 prefill attention that choose tiles of queries and copy keys and values.
#pragma once

#include "prefill/sm90_prefill_tiles.cuh"

constexpr int SHORT_TILES = 2;  // of keys

// How many tiles beyond the first two of each block have been taken. Every launch leaves 0.
__device__ unsigned tiles_taken;

// Announces the block's tiles of queries, one after the other, then a tile with NO_UNIT. All of a warp.
struct TileScheduler {
  PrefillUnits units;
  int num_kv_heads;
  int heads_at_once;

  template <bool IN_ORDER>
  __device__ __forceinline__ void run(TileQueue queue, int lane) {
    units.divide(num_kv_heads, IN_ORDER ? 0 : gridDim.x);
    const unsigned num_units = static_cast<unsigned>(units.per_head) * num_kv_heads;
    unsigned number = blockIdx.x;
    for (;; ++queue.announcement) {
      AnnouncedTile tile;
      tile.kv_head = NO_UNIT;
      if (number < num_units) {
        const int head0 = number / (units.per_head * heads_at_once) * heads_at_once;
        const int heads = min(heads_at_once, num_kv_heads - head0);
        const int rest = number % (units.per_head * heads_at_once);
        tile = units.find(head0 + rest % heads, units.per_head - 1 - rest / heads);
      }
      const int slot = queue.announcement % SLOTS;
      barrier_wait(&queue.freed[slot], queue.announcement / SLOTS % 2 ^ 1);
      if (lane == 0) {
        queue.tiles[slot] = tile;
        barrier_arrive(&queue.announced[slot]);
      }
      if (tile.kv_head < 0) return;

      // The second tile is as short as the first one is long. As many numbers are drawn after it as there
      // are tiles beyond the first of each block, so that the counter ends where it began. Who holds a long
      // tile draws late, when the one before it is done: another block may then be the first to need work.
      if (queue.announcement == 0) {
        number = 2 * gridDim.x - 1 - blockIdx.x;
      } else {
        const int before = queue.announcement - 1;
        if (tile.key_tiles > SHORT_TILES) barrier_wait(&queue.freed[before % SLOTS], before / SLOTS % 2);
        wait_for_earlier_kernels();  // the launch before this one may still count
        if (lane == 0) number = 2 * gridDim.x + atomicInc(&tiles_taken, num_units - gridDim.x - 1);
        number = __shfl_sync(FULL_WARP, number, 0);
      }
    }
  }
};

// Where the rows of sequences lie in the cache.
struct CachedRows {
  const int* block_tables;
  const int* table_rows;
  int block_table_width;
  int num_kv_heads;
  int block_size;
  int piece;  // rows of a copy

  __device__ __forceinline__ const int* block_table(int row) const {
    return block_tables + static_cast<long long>(table_rows[row]) * block_table_width;
  }
};

// Copies the keys, or the values, of ROW_BYTES each, of all of a block's tiles of queries to a ring of STAGES
// tiles, from each tile's last key to its first. All of a warp.
template <int ROW_BYTES, int STAGES>
struct KeyProducer {
  const TensorMap& map;
  unsigned char* ring;
  Barrier* full;   // [STAGES]
  Barrier* empty;  // [STAGES]
  CachedRows cached;

  __device__ __forceinline__ void run(TileQueue queue, int lane) const {
    const int piece = cached.piece;
    unsigned char* const to = ring + lane * piece * ROW_BYTES;
    int step = 0;  // counts tiles of keys through all tiles of queries
    bool waited = false;
    while (true) {
      const int slot = queue.take_slot();
      const AnnouncedTile tile = queue.tiles[slot];
      queue.free_slot(slot);
      if (tile.kv_head < 0) return;
      const int* const block_table = cached.block_table(tile.row);
      // The row of the cache where the lane's piece of a tile of keys begins, -1 if it has none.
      auto find_piece = [&](int key_tile) {
        const int key = tile.key_begin + key_tile * TILE_KEYS + lane * piece;
        const bool exists = key_tile >= 0 && lane < TILE_KEYS / piece && key < tile.context_len;
        return exists ? cache_row(block_table, key, tile.kv_head, cached.num_kv_heads, cached.block_size)
                      : -1;
      };
      int row = find_piece(tile.key_tiles - 1);
      if (!waited) {
        wait_for_earlier_kernels();
        fence_global_for_async();
        waited = true;
      }
      for (int key_tile = tile.key_tiles - 1; key_tile >= 0; --key_tile, ++step) {
        const int next_row = find_piece(key_tile - 1);
        const int stage = step % STAGES;
        const int pieces = __popc(__ballot_sync(FULL_WARP, row >= 0));
        barrier_wait(&empty[stage], step / STAGES % 2 ^ 1);
        if (lane == 0) barrier_arrive_expecting(&full[stage], pieces * piece * ROW_BYTES);
        __syncwarp();
        if (row >= 0) copy_row_groups(to + stage * TILE_KEYS * ROW_BYTES, map, row / 8, &full[stage]);
        row = next_row;
      }
    }
  }
};
