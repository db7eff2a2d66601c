// How attention/sm90_prefill.cu divides its work: tiles of queries, and of few tiles also their keys.
#pragma once

#include "attention/attention.cuh"
#include "generated/sm90_prefill.cuh"

constexpr int NO_UNIT = -1;

// A tile of queries of one key/value head, and the keys that it meets in tiles that begin at multiples of
// TILE_KEYS. A tile without keys meets one that it does not see. Where its keys are split, this is one
// split's share of them: the last tiles are the last split's, and no split has less than MIN_SPLIT_TILES.
struct alignas(16) AnnouncedTile {
  int kv_head;  // NO_UNIT: there are no more
  int row;
  int first_token;
  int tile_row0;
  int num_rows;
  int first_position;
  int context_len;
  int key_begin;
  int key_tiles;
  int split;
  int num_splits;
  int first_unit;  // split 0's number among the units of all heads; the other splits' follow
};

// The units of work of a key/value head: a unit is a tile of queries, or one split of its keys. A row is long
// if its keys are enough for two splits; each of its tiles has `splits` units, even if it sees less keys
// itself and leaves some of them empty.
struct PrefillUnits {
  const int* cu_seqlens_q;
  const int* context_lens;
  int num_seqs;
  int group;
  int tile_rows;
  int sliding_window;
  int splits;
  int per_head;

  __device__ __forceinline__ int count_tiles(int row) const {
    return count_query_tiles(cu_seqlens_q, row, group, tile_rows);
  }

  __device__ __forceinline__ bool is_long(int row) const {
    return min(context_lens[row], sliding_window) >= 2 * MIN_SPLIT_TILES * TILE_KEYS;
  }

  // Sets `splits` and `per_head`. Keys are split only while every unit of every head still has a block of its
  // own. Every lane of a warp must call; all get the result.
  __device__ __forceinline__ void divide(int num_kv_heads, int num_blocks) {
    int tiles = 0, long_tiles = 0;
    for (int row = threadIdx.x % WARP_SIZE; row < num_seqs; row += WARP_SIZE) {
      const int count = count_tiles(row);
      tiles += count;
      if (is_long(row)) long_tiles += count;
    }
    tiles = __reduce_add_sync(FULL_WARP, tiles);
    long_tiles = __reduce_add_sync(FULL_WARP, long_tiles);
    const int blocks_for_long = num_blocks - (tiles - long_tiles) * num_kv_heads;
    const int fitting = long_tiles > 0 ? blocks_for_long / (long_tiles * num_kv_heads) : 1;
    splits = min(max(fitting, 1), MAX_SPLITS);
    per_head = tiles + (splits - 1) * long_tiles;
  }

  // Unit number `unit` of head `kv_head`; kv_head is NO_UNIT if it is empty, which it is only where keys are
  // split. Every lane of a warp must call; all get the result.
  __device__ __forceinline__ AnnouncedTile find(int kv_head, int unit) const {
    const RowItem found = find_row_item(num_seqs, unit, [&](int row) {
      return count_tiles(row) * (splits > 1 && is_long(row) ? splits : 1);
    });
    const int row_splits = splits > 1 && is_long(found.row) ? splits : 1;
    AnnouncedTile tile;
    tile.row = found.row;
    tile.kv_head = kv_head;
    tile.first_token = cu_seqlens_q[found.row];
    const int num_queries = cu_seqlens_q[found.row + 1] - tile.first_token;
    tile.tile_row0 = found.item / row_splits * tile_rows;
    tile.num_rows = min(num_queries * group - tile.tile_row0, tile_rows);
    tile.context_len = context_lens[found.row];
    tile.first_position = tile.context_len - num_queries;
    const int newest = tile.first_position + (tile.tile_row0 + tile.num_rows - 1) / group;
    const int oldest = tile.first_position + tile.tile_row0 / group - sliding_window + 1;
    tile.key_begin = max(oldest, 0) / TILE_KEYS * TILE_KEYS;
    tile.key_tiles = max(ceil_div(newest + 1 - tile.key_begin, TILE_KEYS), 1);
    tile.split = found.item % row_splits;
    tile.num_splits = max(min(row_splits, tile.key_tiles / MIN_SPLIT_TILES), 1);
    tile.first_unit = kv_head * per_head + unit - tile.split;
    if (tile.split >= tile.num_splits) tile.kv_head = NO_UNIT;
    const int first_tile = tile.split * tile.key_tiles / tile.num_splits;
    const int tiles_to = (tile.split + 1) * tile.key_tiles / tile.num_splits;
    tile.key_begin += first_tile * TILE_KEYS;
    tile.key_tiles = tiles_to - first_tile;
    return tile;
  }
};
