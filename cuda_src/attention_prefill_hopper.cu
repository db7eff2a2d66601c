// Paged attention on sm_90a's tensor cores for rows with two or more queries: what attention_prefill.cu does,
// for block sizes that are multiples of 8.

#include "attention.cuh"
#include "copy.cuh"
#include "hopper_attention.cuh"
#include "mma.cuh"

constexpr int GROUP_THREADS = 128;  // four warps that multiply together
constexpr int GROUP_WARPS = GROUP_THREADS / WARP_SIZE;
constexpr int GROUP_ROWS = 64;
constexpr int TILE_KEYS = 128;
constexpr int LINE = 64;          // elements of a swizzled line of 128 bytes
constexpr int ATOM_BYTES = 1024;  // eight lines
constexpr int SLOTS = 2;          // tiles of queries announced at a time
constexpr bool WHOLE = true;

// Warps of the group that does not multiply.
constexpr int SCHEDULER_WARP = 0;
constexpr int KEY_WARP = 1;
constexpr int VALUE_WARP = 2;

// Named barriers; 0 is __syncthreads.
constexpr int TURN_BARRIER = 1;
constexpr int GROUP_BARRIER = 4;

// A tile of queries of one key/value head, as the scheduling warp announces it to the others.
struct alignas(16) QueryTile {
  int kv_head;  // -1: there are no more
  int first_token;
  int tile_row0;
  int num_rows;
  int first_position;
  int context_len;
  int row;
  int unused;
};

// Where a tile of queries is that a group has not taken, or that does not exist.
constexpr int NOT_TAKEN = -1;
constexpr int NONE = -2;

// A query of a sequence, counted from the first of this step.
struct QueryRow {
  int token;
  int head;  // of the key/value head's group
};

// Of what a block has not yet taken, the next tile. Every launch leaves 0.
__device__ unsigned tiles_taken;

// Barriers in shared memory. `K` and `V` stand for keys and values.
template <int STAGES>
struct Barriers {
  unsigned long long full_k[STAGES];
  unsigned long long full_v[STAGES];
  unsigned long long empty_k[STAGES];
  unsigned long long empty_v[STAGES];
  unsigned long long announced[SLOTS];
  unsigned long long noted[SLOTS];
};

// The keys that a tile of queries meets, in tiles of TILE_KEYS that begin at its multiples.
struct KeyRange {
  int begin;
  int tiles;
};

__device__ __forceinline__ KeyRange find_keys(const QueryTile& tile, int group, int sliding_window) {
  const int end = max(tile.first_position + (tile.tile_row0 + tile.num_rows - 1) / group + 1, 0);
  const int oldest = max(tile.first_position + tile.tile_row0 / group - sliding_window + 1, 0);
  const int begin = oldest / TILE_KEYS * TILE_KEYS;
  return {begin, end > begin ? ceil_div(end - begin, TILE_KEYS) : 0};
}

// Number of tiles of all rows with two or more queries. Every lane of a warp must call; all get the result.
__device__ __forceinline__ int count_tiles(const int* cu_seqlens_q, int num_seqs, int group, int tile_rows) {
  int tiles = 0;
  for (int row = threadIdx.x % WARP_SIZE; row < num_seqs; row += WARP_SIZE) {
    const int num_queries = cu_seqlens_q[row + 1] - cu_seqlens_q[row];
    if (num_queries > 1) tiles += ceil_div(num_queries * group, tile_rows);
  }
  return __reduce_add_sync(FULL_WARP, tiles);
}

// The row of tile number `tile`, counted through all rows with two or more queries, and its number in the
// row. Every lane of a warp must call; all get the result.
__device__ __forceinline__ int2 find_tile(const int* cu_seqlens_q, int num_seqs, int tile, int group,
                                          int tile_rows) {
  const int lane = threadIdx.x % WARP_SIZE;
  int tiles_before = 0;
  for (int row0 = 0; row0 < num_seqs; row0 += WARP_SIZE) {
    const int row = row0 + lane;
    const int num_queries = row < num_seqs ? cu_seqlens_q[row + 1] - cu_seqlens_q[row] : 0;
    const int tiles = num_queries > 1 ? ceil_div(num_queries * group, tile_rows) : 0;
    int tiles_through = tiles;
#pragma unroll
    for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
      const int other = __shfl_up_sync(FULL_WARP, tiles_through, offset);
      if (lane >= offset) tiles_through += other;
    }
    tiles_through += tiles_before;
    const unsigned reached = __ballot_sync(FULL_WARP, tile < tiles_through);
    if (reached != 0) {
      const int found = __ffs(reached) - 1;
      return {row0 + found, tile - __shfl_sync(FULL_WARP, tiles_through - tiles, found)};
    }
    tiles_before = __shfl_sync(FULL_WARP, tiles_through, WARP_SIZE - 1);
  }
  return {-1, 0};
}

// Scores of a warp's 16 rows and TILE_KEYS keys to weights relative to the rows' new maxima, in place.
// `factors` takes what was summed before to the new maxima.
struct Softmax {
  float maxima[2];
  float sums[2];
  float factors[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      maxima[h] = MINUS_INFINITY;
      sums[h] = 0.0f;
    }
  }

  __device__ __forceinline__ void update(float (&scores)[TILE_KEYS / 2], float scale_log2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float maximum = fmaxf(scores[h * 2], scores[h * 2 + 1]);
      float other = maxima[h];
#pragma unroll
      for (int j = 1; j < TILE_KEYS / 8; ++j) {
        maximum = fmaxf(maximum, scores[j * 4 + h * 2]);
        other = fmaxf(other, scores[j * 4 + h * 2 + 1]);
      }
      maximum = fmaxf(maximum, other);
      maximum = fmaxf(maximum, __shfl_xor_sync(FULL_WARP, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(FULL_WARP, maximum, 2));
      const float offset = maximum == MINUS_INFINITY ? 0.0f : maximum * scale_log2;
      factors[h] = exp2_fast(maxima[h] * scale_log2 - offset);
      maxima[h] = maximum;
      float sum[2] = {};
#pragma unroll
      for (int j = 0; j < TILE_KEYS / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[j * 4 + h * 2 + e];
          score = exp2_fast(fmaf(score, scale_log2, -offset));
          sum[e] += score;
        }
      }
      sums[h] = sums[h] * factors[h] + (sum[0] + sum[1]);
    }
  }

  // What makes weighted sums weighted means; 0 for rows that saw no key.
  __device__ __forceinline__ void finish(float (&inverses)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = sums[h];
      sum += __shfl_xor_sync(FULL_WARP, sum, 1);
      sum += __shfl_xor_sync(FULL_WARP, sum, 2);
      inverses[h] = sum == 0.0f ? 0.0f : 1.0f / sum;
    }
  }
};

// Lane t of every four gets the four lanes' words number t, in their order.
__device__ __forceinline__ void transpose_4x4(unsigned (&words)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const unsigned other = __shfl_xor_sync(FULL_WARP, odd ? words[i] : words[i + 1], 1);
    (odd ? words[i] : words[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned other = __shfl_xor_sync(FULL_WARP, high ? words[i] : words[i + 2], 2);
    (high ? words[i] : words[i + 2]) = other;
  }
}

// out = softmax over the visible keys of (q . k * scale), times v, for rows with two or more queries, in one
// pass over the keys (FlashAttention-3, Shah et al. 2024). Weights are rounded to T before they meet v.
//
// key_map, value_map: maps of [num_blocks * num_kv_heads * block_size, HEAD_DIM] T with boxes of [PIECE, 64]
// swizzled over 128 bytes, PIECE = gcd(block_size, 128); q [num_tokens, num_heads * HEAD_DIM] T; block_tables
// [tables, block_table_width] int; table_rows [num_seqs] int; cu_seqlens_q [num_seqs + 1] int; context_lens
// [num_seqs] int; out [num_tokens, num_heads * HEAD_DIM] T. scale_log2 = scale * log2(e), positive. Layout:
// row-major, q and out 16-byte aligned; num_heads = group * num_kv_heads; block_size = 8 n. The group's heads
// of consecutive tokens are the consecutive rows of a tile, so that they share its keys. Grid: as many blocks
// as run at a time; they take tiles of 64 * CONSUMERS rows of one of `heads_at_once` key/value heads until
// none is left, later tiles first since they see more keys. Block: 128 * (CONSUMERS + 1) threads; shared: (64
// * CONSUMERS + 2 * STAGES * 128) * HEAD_DIM * sizeof(T) + 2048 bytes. Unit of work: a group of four warps
// holds 64 rows of a tile; one more warp copies keys and values. A group multiplies while another one
// computes weights; within a group the weights of a tile of keys are computed while the one before meets its
// values. Tiles of keys are taken from the last to the first and begin at multiples of TILE_KEYS, so a
// query's result depends on its own row alone, and not on how its prompt was cut into chunks.
template <typename T, int HEAD_DIM, int CONSUMERS, int STAGES>
__global__ void __launch_bounds__(GROUP_THREADS*(CONSUMERS + 1), 1) paged_attention_prefill_hopper_kernel(
    const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap value_map,
    const T* __restrict__ q, const int* __restrict__ block_tables, const int* __restrict__ table_rows,
    const int* __restrict__ cu_seqlens_q, const int* __restrict__ context_lens, T* __restrict__ out,
    int num_seqs, int num_heads, int num_kv_heads, int block_size, int piece, int block_table_width,
    int sliding_window, int heads_at_once, float scale_log2) {
  constexpr int HALVES = HEAD_DIM / LINE;
  constexpr int TILE_ROWS = GROUP_ROWS * CONSUMERS;
  constexpr int QUERY_HALF = GROUP_ROWS * LINE * 2;  // [2][CONSUMERS][HALVES][GROUP_ROWS][LINE]
  constexpr int GROUP_BYTES = HALVES * QUERY_HALF;
  constexpr int KEY_BYTES = TILE_KEYS * HEAD_DIM * 2;
  constexpr int KEY_HALF = WHOLE ? ATOM_BYTES : TILE_KEYS * LINE * 2;  // [TILE_KEYS / 8][HALVES][8][LINE]
  constexpr int KEY_STEP = WHOLE ? ATOM_BYTES * HALVES : ATOM_BYTES;
  static_assert(sizeof(T) == 2, "tensor-core attention takes bfloat16 or float16");
  static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "a row of keys is one or two swizzled lines");
  static_assert(CONSUMERS == 2 || CONSUMERS == 3, "two or three groups share the registers");
  static_assert(STAGES >= 2, "a tile of keys is copied while another one is used");
  // Together no more than the block has from its launch.
  constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;
  constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;

  extern __shared__ __align__(128) unsigned char unaligned_memory[];
  unsigned char* const memory = unaligned_memory + (-shared_address(unaligned_memory) & (ATOM_BYTES - 1));
  unsigned char* const tiles_q = memory;
  unsigned char* const tiles_k = tiles_q + 2 * CONSUMERS * GROUP_BYTES;
  unsigned char* const tiles_v = tiles_k + STAGES * KEY_BYTES;
  __shared__ Barriers<STAGES> barriers;
  __shared__ QueryTile announced_tiles[SLOTS];
  const unsigned full_k = shared_address(barriers.full_k), full_v = shared_address(barriers.full_v);
  const unsigned empty_k = shared_address(barriers.empty_k), empty_v = shared_address(barriers.empty_v);
  const unsigned announced = shared_address(barriers.announced), noted = shared_address(barriers.noted);

  const int warp = uniform(threadIdx.x / WARP_SIZE);
  const int lane = threadIdx.x % WARP_SIZE;
  const int group = num_heads / num_kv_heads;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(key_map);
    prefetch_tensor_map(value_map);
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full_k + i * 8, 1);
      barrier_init(full_v + i * 8, 1);
      barrier_init(empty_k + i * 8, CONSUMERS * GROUP_WARPS);
      barrier_init(empty_v + i * 8, CONSUMERS * GROUP_WARPS);
    }
    for (int i = 0; i < SLOTS; ++i) {
      barrier_init(announced + i * 8, 1);
      barrier_init(noted + i * 8, CONSUMERS * GROUP_WARPS + 2);
    }
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_earlier_kernels();

  // The slot of the next tile; whoever takes it frees the slot when the tile is not looked at any more.
  int announcement = 0;
  auto take_slot = [&] {
    const int slot = announcement % SLOTS;
    barrier_wait(announced + slot * 8, announcement / SLOTS % 2);
    ++announcement;
    return slot;
  };
  auto free_slot = [&](int slot) {
    __syncwarp();
    if (lane == 0) barrier_arrive(noted + slot * 8);
  };

  if (warp < GROUP_WARPS) {
    decrease_registers<PRODUCER_REGISTERS>();

    if (warp == SCHEDULER_WARP) {
      const int tiles_per_head = count_tiles(cu_seqlens_q, num_seqs, group, TILE_ROWS);
      const unsigned num_tiles = static_cast<unsigned>(tiles_per_head) * num_kv_heads;
      unsigned number = blockIdx.x;
      while (true) {
        QueryTile tile;
        tile.kv_head = -1;
        if (number < num_tiles) {
          const int heads0 = number / (tiles_per_head * heads_at_once) * heads_at_once;
          const int heads = min(heads_at_once, num_kv_heads - heads0);
          const int rest = number % (tiles_per_head * heads_at_once);
          const int2 found =
              find_tile(cu_seqlens_q, num_seqs, tiles_per_head - 1 - rest / heads, group, TILE_ROWS);
          tile.row = found.x;
          tile.kv_head = heads0 + rest % heads;
          tile.first_token = cu_seqlens_q[found.x];
          const int num_queries = cu_seqlens_q[found.x + 1] - tile.first_token;
          tile.tile_row0 = found.y * TILE_ROWS;
          tile.num_rows = min(num_queries * group - tile.tile_row0, TILE_ROWS);
          tile.context_len = context_lens[found.x];
          tile.first_position = tile.context_len - num_queries;
        }
        const int slot = announcement % SLOTS;
        barrier_wait(noted + slot * 8, announcement / SLOTS % 2 ^ 1);
        if (lane == 0) {
          announced_tiles[slot] = tile;
          barrier_arrive(announced + slot * 8);
        }
        if (tile.kv_head < 0) return;
        ++announcement;
        // The second tile is as short as the first one is long. After that as many numbers are drawn as there
        // are tiles beyond the first of each block, so that the counter ends where it began.
        if (announcement == 1) {
          number = 2 * gridDim.x - 1 - blockIdx.x;
        } else {
          if (lane == 0) number = 2 * gridDim.x + atomicInc(&tiles_taken, num_tiles - gridDim.x - 1);
          number = __shfl_sync(FULL_WARP, number, 0);
        }
      }
    }

    if (warp == KEY_WARP || warp == VALUE_WARP) {
      fence_async_global();  // keys and values were stored by ordinary instructions
      const TensorMap& map = warp == KEY_WARP ? key_map : value_map;
      const unsigned tiles = shared_address(warp == KEY_WARP ? tiles_k : tiles_v);
      const unsigned full = warp == KEY_WARP ? full_k : full_v;
      const unsigned empty = warp == KEY_WARP ? empty_k : empty_v;
      const int piece_number = WHOLE ? lane : lane % 16;
      const int half = WHOLE ? 0 : lane / 16;
      const bool copies = piece_number < TILE_KEYS / piece && half < HALVES;
      const unsigned piece_offset = half * KEY_HALF + piece_number * piece / 8 * KEY_STEP;
      const int piece_bytes = piece * (WHOLE ? HEAD_DIM : LINE) * 2;
      int step = 0;  // counts tiles of keys through all tiles of queries
      while (true) {
        const int slot = take_slot();
        const QueryTile tile = announced_tiles[slot];
        free_slot(slot);
        if (tile.kv_head < 0) return;
        const KeyRange keys = find_keys(tile, group, sliding_window);
        const int* const block_table =
            block_tables + static_cast<long long>(table_rows[tile.row]) * block_table_width;
        auto find_piece = [&](int key0) {
          const int key = key0 + piece_number * piece;
          return copies && key < tile.context_len
                     ? cache_row(block_table, key, tile.kv_head, num_kv_heads, block_size)
                     : -1;
        };
        int key0 = keys.begin + (keys.tiles - 1) * TILE_KEYS;
        int cache_row = keys.tiles > 0 ? find_piece(key0) : -1;
        for (int i = 0; i < keys.tiles; ++i, ++step) {
          key0 -= TILE_KEYS;
          const int next_row = i + 1 < keys.tiles ? find_piece(key0) : -1;
          const int stage = step % STAGES;
          const int pieces = __popc(__ballot_sync(FULL_WARP, cache_row >= 0));
          barrier_wait(empty + stage * 8, step / STAGES % 2 ^ 1);
          if (lane == 0) barrier_arrive_expecting(full + stage * 8, pieces * piece_bytes);
          __syncwarp();
          if (cache_row >= 0) {
            if (WHOLE) {
              copy_box_4d(tiles + stage * KEY_BYTES + piece_offset, map, cache_row / 8, full + stage * 8);
            } else {
              copy_box(tiles + stage * KEY_BYTES + piece_offset, map, half * LINE, cache_row,
                       full + stage * 8);
            }
          }
          cache_row = next_row;
        }
      }
    }
    return;
  }

  increase_registers<CONSUMER_REGISTERS>();
  const int consumer = warp / GROUP_WARPS - 1;
  const int thread = threadIdx.x % GROUP_THREADS;
  const int group_row0 = consumer * GROUP_ROWS;
  const int warp_row0 = group_row0 + warp % GROUP_WARPS * 16;
  const int turn = TURN_BARRIER + consumer;
  const int next_turn = TURN_BARRIER + (consumer + 1) % CONSUMERS;
  unsigned char* const tile_q = tiles_q + consumer * GROUP_BYTES;

  // Row m of a tile is head m % group of its token m / group; where it begins in q and out.
  auto find_row = [&](const QueryTile& tile, int m) {
    const int row = tile.tile_row0 + m;
    return QueryRow{row / group, row % group};
  };
  auto skip_8 = [&](QueryRow& row) {
    row.token += 8 / group;
    row.head += 8 % group;
    if (row.head >= group) {
      row.head -= group;
      ++row.token;
    }
  };
  auto row_offset = [&](const QueryTile& tile, const QueryRow& row) {
    const long long token = tile.first_token + row.token;
    return (token * num_heads + tile.kv_head * group + row.head) * HEAD_DIM;
  };
  auto load_queries = [&](int slot, int buffer) {
    constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
    constexpr int ROWS_AT_ONCE = GROUP_THREADS / SEGMENTS;
    static_assert(ROWS_AT_ONCE % 8 == 0, "a thread's rows are eights apart");
    const QueryTile& tile = announced_tiles[slot];
    const int segment = thread % SEGMENTS;
    unsigned char* const to = tile_q + buffer * CONSUMERS * GROUP_BYTES + segment / 8 * QUERY_HALF;
    QueryRow row = find_row(tile, group_row0 + thread / SEGMENTS);
#pragma unroll
    for (int m = thread / SEGMENTS; m < GROUP_ROWS; m += ROWS_AT_ONCE) {
      const bool valid = group_row0 + m < tile.num_rows;
      copy_async_16(to + m * LINE * 2 + (segment % 8 ^ m % 8) * 16,
                    q + (valid ? row_offset(tile, row) : 0) + segment * SEGMENT, valid);
#pragma unroll
      for (int i = 0; i < ROWS_AT_ONCE; i += 8) skip_8(row);
    }
    copy_async_commit();
  };
  // Of all threads of the group, before it multiplies what they copied.
  auto wait_for_queries = [&] {
    copy_async_wait<0>();
    fence_async_proxy();
    named_barrier_wait(GROUP_BARRIER + consumer, GROUP_THREADS);
  };
  auto release = [&](unsigned empty, int stage) {
    if (lane == 0) barrier_arrive(empty + stage * 8);
  };

  const SwizzledMatrix queries(shared_address(tile_q), 16, ATOM_BYTES);
  const SwizzledMatrix key_tiles(shared_address(tiles_k), 16, KEY_STEP);
  const SwizzledMatrix value_tiles(shared_address(tiles_v), KEY_HALF, KEY_STEP);
  float scores[TILE_KEYS / 2] = {};
  float outputs[HEAD_DIM / 2] = {};
  unsigned weights[TILE_KEYS / 4];
  Softmax softmax;
  float inverses[2];

  auto multiply_keys = [&](int buffer, int stage) {
    const unsigned tile_a = uniform(buffer * CONSUMERS * GROUP_BYTES), tile_b = uniform(stage * KEY_BYTES);
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += 16) {
      const unsigned long long a = queries.at(tile_a + d / LINE * QUERY_HALF + d % LINE * 2);
      const unsigned long long b = key_tiles.at(tile_b + d / LINE * KEY_HALF + d % LINE * 2);
      if (d == 0) {
        product_shared<T, false>(scores, a, b);
      } else {
        product_shared<T, true>(scores, a, b);
      }
    }
    product_commit();
  };
  auto multiply_values = [&](int stage) {
    const unsigned tile_b = uniform(stage * KEY_BYTES);
#pragma unroll
    for (int k = 0; k < TILE_KEYS / 16; ++k) {
      product_registers<T>(outputs, weights + k * 4, value_tiles.at(tile_b + k * 2 * KEY_STEP));
    }
    product_commit();
  };
  // Of the tile whose scores are being computed: its keys from key0 on are next, with tiles_left behind them.
  int key0;
  int tiles_left;
  int positions[2];  // of the lane's two rows
  int all_visible_from, all_visible_to;
  auto begin_tile = [&](int slot) {
    const QueryTile& tile = announced_tiles[slot];
    const KeyRange keys = find_keys(tile, group, sliding_window);
    tiles_left = uniform(keys.tiles);
    key0 = uniform(keys.begin + keys.tiles * TILE_KEYS);
    QueryRow row = find_row(tile, warp_row0 + lane / 4);
    positions[0] = tile.first_position + row.token;
    skip_8(row);
    positions[1] = tile.first_position + row.token;
    all_visible_from = __shfl_sync(FULL_WARP, positions[1], WARP_SIZE - 1) - sliding_window + 1;
    all_visible_to = __shfl_sync(FULL_WARP, positions[0], 0) - TILE_KEYS + 1;
  };
  auto mask = [&] {
    if (key0 >= all_visible_from && key0 <= all_visible_to) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int keys_before = positions[h] - key0 - lane % 4 * 2;
#pragma unroll
      for (int s = 0; s < TILE_KEYS / 4; ++s) {
        const bool visible =
            static_cast<unsigned>(keys_before - (s / 2 * 8 + s % 2)) < static_cast<unsigned>(sliding_window);
        if (!visible) scores[s / 2 * 4 + h * 2 + s % 2] = MINUS_INFINITY;
      }
    }
  };
  auto round_weights = [&] {
#pragma unroll
    for (int i = 0; i < TILE_KEYS / 4; ++i) weights[i] = pack<T>(scores[i * 2], scores[i * 2 + 1]);
  };
  // Behind a row's last key there may be anything, even NaN, which no weight of 0 makes harmless.
  auto clear_values = [&](int stage, int num_values) {
    unsigned char* const tile_v = tiles_v + stage * KEY_BYTES;
    for (int i = num_values * 8 + thread; i < TILE_KEYS * 8; i += GROUP_THREADS) {
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        *reinterpret_cast<uint4*>(tile_v + i / 64 * KEY_STEP + half * KEY_HALF + i % 64 * 16) =
            uint4{0, 0, 0, 0};
      }
    }
    fence_async_proxy();
    named_barrier_wait(GROUP_BARRIER + consumer, GROUP_THREADS);
  };
  // Four lanes share a row's eight columns; exchanged among them, each writes all of every fourth eight.
  auto store_outputs = [&](int slot) {
    const QueryTile& tile = announced_tiles[slot];
    QueryRow row = find_row(tile, warp_row0 + lane / 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      T* const to = out + row_offset(tile, row) + lane % 4 * 8;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n += 4) {
        unsigned pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const from = &outputs[(n + i) * 4 + h * 2];
          pairs[i] = pack<T>(from[0] * inverses[h], from[1] * inverses[h]);
        }
        transpose_4x4(pairs);
        if (warp_row0 + h * 8 + lane / 4 < tile.num_rows) {
          *reinterpret_cast<uint4*>(to + n * 8) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
        }
      }
      skip_8(row);
    }
    free_slot(slot);
  };
  // The next tile with keys, NONE behind the last; those without have no outputs but zeros.
  auto take_slot_with_keys = [&]() -> int {
    while (true) {
      const int slot = take_slot();
      const QueryTile& tile = announced_tiles[slot];
      if (tile.kv_head < 0) return NONE;
      if (uniform(find_keys(tile, group, sliding_window).tiles) > 0) return slot;
      const int m = group_row0 + thread / 2;
      if (m < tile.num_rows) {
        T* const to = out + row_offset(tile, find_row(tile, m)) + thread % 2 * (HEAD_DIM / 2);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i += SEGMENT) *reinterpret_cast<uint4*>(to + i) = uint4{0, 0, 0, 0};
      }
      free_slot(slot);
    }
  };

  if (consumer == CONSUMERS - 1) named_barrier_arrive(TURN_BARRIER, 2 * GROUP_THREADS);
  int slot = take_slot_with_keys();
  if (slot == NONE) return;
  int next_slot = NOT_TAKEN;
  int step = 0;
  int buffer = 0;
  load_queries(slot, buffer);
  begin_tile(slot);
  int num_values = announced_tiles[slot].context_len - key0 + TILE_KEYS;
  wait_for_queries();

  softmax.clear();
  barrier_wait(full_k, 0);
  pin(scores);
  product_fence();
  multiply_keys(0, 0);
  product_wait<0>();
  pin(scores);
  release(empty_k, 0);
  key0 -= TILE_KEYS;
  --tiles_left;
  mask();
  softmax.update(scores, scale_log2);
  round_weights();

  // Each turn multiplies one tile's weights by its values, and computes the weights of the next one, which
  // may be the first of the next tile of queries.
  while (true) {
    const int stage = step % STAGES, next_stage = (step + 1) % STAGES;
    if (num_values < TILE_KEYS) {
      barrier_wait(full_v + stage * 8, step / STAGES % 2);
      clear_values(stage, num_values);
      num_values = TILE_KEYS;
    }
    if (tiles_left <= 1 && next_slot == NOT_TAKEN) {
      next_slot = take_slot_with_keys();
      if (next_slot != NONE) load_queries(next_slot, buffer ^ 1);
    }
    const bool is_last = tiles_left == 0;
    if (is_last) {
      if (next_slot == NONE) break;
      wait_for_queries();
      buffer ^= 1;
      begin_tile(next_slot);
      num_values = announced_tiles[next_slot].context_len - key0 + TILE_KEYS;
    }
    key0 -= TILE_KEYS;
    --tiles_left;

    barrier_wait(full_k + next_stage * 8, (step + 1) / STAGES % 2);
    named_barrier_wait(turn, 2 * GROUP_THREADS);
    pin(scores);
    pin(outputs);
    pin(weights);
    product_fence();
    multiply_keys(buffer, next_stage);
    barrier_wait(full_v + stage * 8, step / STAGES % 2);
    product_fence();
    multiply_values(stage);
    named_barrier_arrive(next_turn, 2 * GROUP_THREADS);
    product_wait<1>();
    pin(scores);
    release(empty_k, next_stage);

    if (is_last) {
      softmax.finish(inverses);
      softmax.clear();
    }
    mask();
    softmax.update(scores, scale_log2);
    // That the vote looks at the sums, which are never negative, keeps the exponentials from being computed
    // only after the wait.
    const bool rescales = __any_sync(FULL_WARP, softmax.factors[0] != 1.0f || softmax.factors[1] != 1.0f ||
                                                    softmax.sums[0] < 0.0f || softmax.sums[1] < 0.0f);
    product_wait<0>();
    pin(outputs);
    pin(weights);
    release(empty_v, stage);
    round_weights();
    if (is_last) {
      store_outputs(slot);
      slot = next_slot;
      next_slot = NOT_TAKEN;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 2; ++n) outputs[n] = 0.0f;
    } else if (rescales) {
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 2; ++n) outputs[n] *= softmax.factors[n / 2 % 2];
    }
    ++step;
  }

  barrier_wait(full_v + step % STAGES * 8, step / STAGES % 2);
  pin(outputs);
  pin(weights);
  product_fence();
  multiply_values(step % STAGES);
  product_wait<0>();
  pin(outputs);
  softmax.finish(inverses);
  store_outputs(slot);
}
