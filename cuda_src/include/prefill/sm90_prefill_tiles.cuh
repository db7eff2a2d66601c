// How a block of sm_90 prefill attention lays out shared memory, and how it passes its tiles of queries from
// the warp that chooses them to the others.
#pragma once

#include "generated/sm90_prefill.cuh"
#include "prefill/prefill_units.cuh"
#include "ptx/sm90.cuh"
#include "ptx/sm90_attention.cuh"
#include "ptx/warp_arrival.cuh"

constexpr int WARPS = WARPGROUP_SIZE / WARP_SIZE;
constexpr int LINE = SWIZZLE_BYTES / 2;  // elements
constexpr int SLOTS = 3;                 // tiles of queries announced at a time

// Of shared memory, in bytes: queries [2][CONSUMERS][HALVES][GROUP_ROWS][LINE], then keys and values, each
// [STAGES][TILE_KEYS / 8][HALVES][8][LINE]. CODES: keys are e4m3, [STAGES][TILE_KEYS][HEAD_DIM], and so
// become queries, in the first of their halves.
template <int HEAD_DIM, int CONSUMERS, int STAGES, bool CODES>
struct PrefillLayout {
  static constexpr int HALVES = HEAD_DIM / LINE;
  static constexpr int TILE_ROWS = GROUP_ROWS * CONSUMERS;
  static constexpr int QUERY_HALF = GROUP_ROWS * SWIZZLE_BYTES;
  static constexpr int QUERY_BYTES = HALVES * QUERY_HALF;
  static constexpr int VALUE_STEP = HALVES * SWIZZLE_REPEAT;
  static constexpr int VALUE_BYTES = TILE_KEYS / 8 * VALUE_STEP;
  static constexpr int KEY_STEP = CODES ? SWIZZLE_REPEAT : VALUE_STEP;
  static constexpr int KEY_BYTES = TILE_KEYS / 8 * KEY_STEP;
  static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "a row of keys is one or two swizzled lines");
  static_assert(!CODES || HEAD_DIM == SWIZZLE_BYTES, "a row of codes is one swizzled line");
  static_assert(STAGES >= 2, "a tile of keys is copied while another one is used");
};

// A ring of SLOTS tiles of queries, as one thread sees it.
struct TileQueue {
  Barrier* announced;  // [SLOTS]
  Barrier* freed;      // [SLOTS]
  AnnouncedTile* tiles;
  int announcement = 0;

  // The slot of the next tile; every lane that takes it frees it when it does not look at the tile any more.
  __device__ __forceinline__ int take_slot() {
    const int slot = announcement % SLOTS;
    barrier_wait(&announced[slot], announcement / SLOTS % 2);
    ++announcement;
    return slot;
  }
  __device__ __forceinline__ void free_slot(int slot) const { barrier_arrive(&freed[slot]); }
};

// The barriers of the rings of keys and values and of the queue; by one thread, before the block meets.
// `key_fillers`, `value_fillers`: arrivals that fill a tile; `producers`: warps that take tiles of queries.
template <int CONSUMERS, int STAGES>
__device__ __forceinline__ void init_barriers(int key_fillers, int value_fillers, int producers,
                                              Barrier* full_k, Barrier* full_v, Barrier* empty_k,
                                              Barrier* empty_v, const TileQueue& queue) {
  for (int i = 0; i < STAGES; ++i) {
    barrier_init(&full_k[i], key_fillers);
    barrier_init(&full_v[i], value_fillers);
    barrier_init(&empty_k[i], CONSUMERS * WARPS * WARP_ARRIVALS);
    barrier_init(&empty_v[i], CONSUMERS * WARPS * WARP_ARRIVALS);
  }
  for (int i = 0; i < SLOTS; ++i) {
    barrier_init(&queue.announced[i], 1);
    barrier_init(&queue.freed[i], (CONSUMERS * WARPS + producers) * WARP_SIZE);
  }
  barrier_init_done();
}
