// Paged attention on sm_90a's tensor cores for rows with two or more queries: what prefill.cu does,
// for block sizes that are multiples of 8.

#include "attention.cuh"
#include "generated/sm90_prefill.cuh"
#include "prefill_units.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"
#include "ptx/sm90_attention.cuh"

constexpr int WARPS = WARPGROUP_SIZE / WARP_SIZE;
constexpr int LINE = SWIZZLE_BYTES / 2;  // elements
constexpr int SLOTS = 3;                 // tiles of queries announced at a time
constexpr int SHORT_TILES = 2;           // of keys

// Warps of the group that does not multiply.
constexpr int SCHEDULER_WARP = 0;
constexpr int KEY_WARP = 1;
constexpr int VALUE_WARP = 2;

// Named barriers; 0 is __syncthreads.
constexpr int TURN_BARRIER = 1;
constexpr int GROUP_BARRIER = 4;

// Where a tile of queries is that does not exist.
constexpr int NONE = -1;

// A query of a sequence, counted from the first of this step, and its head in the key/value head's group.
struct QueryRow {
  int token;
  int head;
};

// How many tiles beyond the first two of each block have been taken. Every launch leaves 0.
__device__ unsigned tiles_taken;

// Lane t of every four gets the four lanes' words number t, in the lanes' order.
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

// A lane's part of the softmax of its two rows, from tile of keys to tile of keys.
struct Softmax {
  float maxima[2];
  float sums[2];
  float factors[2];  // take what was summed before to the new maxima

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      maxima[h] = MINUS_INFINITY;
      sums[h] = 0.0f;
    }
  }

  // Turns scores into weights relative to the rows' new maxima.
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

  // The sum of all weights of row h.
  __device__ __forceinline__ float row_sum(int h) const {
    float sum = sums[h];
    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
    sum += __shfl_xor_sync(FULL_WARP, sum, 2);
    return sum;
  }

  // What makes weighted sums weighted means; 0 for rows that saw no key.
  __device__ __forceinline__ void finish(float (&inverses)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) inverses[h] = inverse(row_sum(h));
  }

  static __device__ __forceinline__ float inverse(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }
};

// out = softmax over the visible keys of (q . k * scale), times v, for rows with two or more queries, in one
// pass over the keys (FlashAttention-3, Shah et al. 2024). Weights are rounded to T before they meet v.
//
// key_map, value_map: maps of groups of eight rows of [num_blocks * num_kv_heads * block_size, HEAD_DIM] T
// with boxes of `piece` = gcd(block_size, 128) rows; q [num_tokens, num_heads * HEAD_DIM] T; block_tables
// [tables, block_table_width] int; table_rows [num_seqs] int; cu_seqlens_q [num_seqs + 1] int; context_lens
// [num_seqs] int; out [num_tokens, num_heads * HEAD_DIM] T; partial_out [blocks, 64 * CONSUMERS * HEAD_DIM]
// and partial_sums [blocks, 64 * CONSUMERS, 2] float and arrivals [blocks * CONSUMERS] uint, where splits
// leave their results; every launch finds arrivals 0 and leaves 0. scale_log2 = scale * log2(e), positive.
// Layout: row-major, q, out and partials 16-byte aligned; num_heads = group * num_kv_heads; block_size a
// multiple of 8. Only q and the caches may be written by a kernel of the same graph that may not have ended.
// The group's heads of consecutive tokens are the consecutive rows of a tile, so that they share its keys.
// Grid: at most as many blocks as run at a time; they take tiles of 64 * CONSUMERS rows until none is left,
// of `heads_at_once` key/value heads, then of the next; later tiles first, since they see more keys. Where
// there are so few tiles that each may have several blocks, its keys are split (prefill_units.cuh). Block:
// 128 * (CONSUMERS + 1) threads; shared: 4 * (64 * CONSUMERS + 128 * STAGES) * HEAD_DIM + 1024 bytes. Unit of
// work: a warp group holds 64 rows of a tile; of one more group a warp chooses tiles, one copies keys and one
// values. The groups take turns to multiply, so that one multiplies while another one computes weights; and a
// group multiplies the weights of a tile of keys while it computes those of the next. Tiles of keys are taken
// from the last to the first and begin at multiples of TILE_KEYS, so while keys are not split a query's
// result depends on its own row alone, and not on how its prompt was cut into chunks. Splits change its last
// bits, as sums are added up in another order: with a row's length, what else is in the step and the number
// of blocks, but not from one run to the next. Rows (or windows) of less than 2 * MIN_SPLIT_TILES * TILE_KEYS
// keys are never split.
template <typename T, int HEAD_DIM, int CONSUMERS, int STAGES>
__global__ void __launch_bounds__(WARPGROUP_SIZE*(CONSUMERS + 1), 1)
    sm90_paged_attention_prefill_kernel(SM90_PAGED_ATTENTION_PREFILL_PARAMS(T)) {
  constexpr int HALVES = HEAD_DIM / LINE;
  constexpr int TILE_ROWS = GROUP_ROWS * CONSUMERS;
  constexpr int QUERY_HALF = GROUP_ROWS * SWIZZLE_BYTES;  // [2][CONSUMERS][HALVES][GROUP_ROWS][LINE]
  constexpr int QUERY_BYTES = HALVES * QUERY_HALF;
  constexpr int KEY_STEP = HALVES * SWIZZLE_REPEAT;  // [STAGES][TILE_KEYS / 8][HALVES][8][LINE]
  constexpr int KEY_BYTES = TILE_KEYS / 8 * KEY_STEP;
  static_assert(sizeof(T) == 2, "tensor-core attention takes bfloat16 or float16");
  static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "a row of keys is one or two swizzled lines");
  static_assert(CONSUMERS == 2 || CONSUMERS == 3, "two or three groups share the registers");
  static_assert(STAGES >= 2, "a tile of keys is copied while another one is used");
  // Together no more than the block has from its launch.
  constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;
  constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;

  extern __shared__ __align__(128) unsigned char unaligned_memory[];
  unsigned char* const tiles_q =
      unaligned_memory + (-shared_address(unaligned_memory) & (SWIZZLE_REPEAT - 1));
  unsigned char* const tiles_k = tiles_q + 2 * CONSUMERS * QUERY_BYTES;
  unsigned char* const tiles_v = tiles_k + STAGES * KEY_BYTES;
  __shared__ Barrier full_k[STAGES], full_v[STAGES], empty_k[STAGES], empty_v[STAGES];
  __shared__ Barrier announced[SLOTS], freed[SLOTS];
  __shared__ AnnouncedTile tiles[SLOTS];
  __shared__ bool merges[CONSUMERS];

  const int warp = uniform(threadIdx.x / WARP_SIZE);
  const int lane = threadIdx.x % WARP_SIZE;
  const int group = num_heads / num_kv_heads;

  if (threadIdx.x == 0) {
    prefetch_map(key_map);
    prefetch_map(value_map);
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(&full_k[i], 1);
      barrier_init(&full_v[i], 1);
      barrier_init(&empty_k[i], CONSUMERS * WARPS);
      barrier_init(&empty_v[i], CONSUMERS * WARPS);
    }
    for (int i = 0; i < SLOTS; ++i) {
      barrier_init(&announced[i], 1);
      barrier_init(&freed[i], (CONSUMERS * WARPS + 2) * WARP_SIZE);
    }
    barrier_init_done();
  }
  __syncthreads();

  // The slot of the next tile; every lane that takes it frees it when it does not look at the tile any more.
  int announcement = 0;
  auto take_slot = [&] {
    const int slot = announcement % SLOTS;
    barrier_wait(&announced[slot], announcement / SLOTS % 2);
    ++announcement;
    return slot;
  };
  auto free_slot = [&](int slot) { barrier_arrive(&freed[slot]); };

  if (warp < WARPS) {
    give_registers<PRODUCER_REGISTERS>();

    if (warp == SCHEDULER_WARP) {
      PrefillUnits units{cu_seqlens_q, context_lens, num_seqs, group, TILE_ROWS, sliding_window};
      units.divide(num_kv_heads, gridDim.x);
      const unsigned num_units = static_cast<unsigned>(units.per_head) * num_kv_heads;
      unsigned number = blockIdx.x;
      for (;; ++announcement) {
        AnnouncedTile tile;
        tile.kv_head = NO_UNIT;
        if (number < num_units) {
          const int head0 = number / (units.per_head * heads_at_once) * heads_at_once;
          const int heads = min(heads_at_once, num_kv_heads - head0);
          const int rest = number % (units.per_head * heads_at_once);
          tile = units.find(head0 + rest % heads, units.per_head - 1 - rest / heads);
        }
        const int slot = announcement % SLOTS;
        barrier_wait(&freed[slot], announcement / SLOTS % 2 ^ 1);
        if (lane == 0) {
          tiles[slot] = tile;
          barrier_arrive(&announced[slot]);
        }
        if (tile.kv_head < 0) return;

        // The second tile is as short as the first one is long. As many numbers are drawn after it as there
        // are tiles beyond the first of each block, so that the counter ends where it began. Who holds a long
        // tile draws late, when the one before it is done: another block may then be the first to need work.
        if (announcement == 0) {
          number = 2 * gridDim.x - 1 - blockIdx.x;
        } else {
          const int before = announcement - 1;
          if (tile.key_tiles > SHORT_TILES) barrier_wait(&freed[before % SLOTS], before / SLOTS % 2);
          wait_for_earlier_kernels();  // the launch before this one may still count
          if (lane == 0) number = 2 * gridDim.x + atomicInc(&tiles_taken, num_units - gridDim.x - 1);
          number = __shfl_sync(FULL_WARP, number, 0);
        }
      }
    }

    if (warp == KEY_WARP || warp == VALUE_WARP) {
      const bool is_key = warp == KEY_WARP;
      const TensorMap& map = is_key ? key_map : value_map;
      unsigned char* const to = (is_key ? tiles_k : tiles_v) + lane * piece / 8 * KEY_STEP;
      Barrier* const full = is_key ? full_k : full_v;
      Barrier* const empty = is_key ? empty_k : empty_v;
      int step = 0;  // counts tiles of keys through all tiles of queries
      bool waited = false;
      while (true) {
        const int slot = take_slot();
        const AnnouncedTile tile = tiles[slot];
        free_slot(slot);
        if (tile.kv_head < 0) return;
        const int* const block_table =
            block_tables + static_cast<long long>(table_rows[tile.row]) * block_table_width;
        // The row of the cache where the lane's piece of a tile of keys begins, -1 if it has none.
        auto find_piece = [&](int key_tile) {
          const int key = tile.key_begin + key_tile * TILE_KEYS + lane * piece;
          const bool exists = key_tile >= 0 && lane < TILE_KEYS / piece && key < tile.context_len;
          return exists ? cache_row(block_table, key, tile.kv_head, num_kv_heads, block_size) : -1;
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
          if (lane == 0) barrier_arrive_expecting(&full[stage], pieces * piece * HEAD_DIM * 2);
          __syncwarp();
          if (row >= 0) copy_row_groups(to + stage * KEY_BYTES, map, row / 8, &full[stage]);
          row = next_row;
        }
      }
    }
    return;
  }

  take_registers<CONSUMER_REGISTERS>();
  const int consumer = warp / WARPS - 1;
  const int thread = threadIdx.x % WARPGROUP_SIZE;
  const int group_row0 = consumer * GROUP_ROWS;
  const int lane_row0 = group_row0 + warp % WARPS * 16 + lane / 4;  // the other row is 8 further
  const int turn = TURN_BARRIER + consumer;
  const int next_turn = TURN_BARRIER + (consumer + 1) % CONSUMERS;
  unsigned char* const tile_q = tiles_q + consumer * QUERY_BYTES;
  const SwizzledOperand queries(tile_q, 16, SWIZZLE_REPEAT);
  const SwizzledOperand keys(tiles_k, 16, KEY_STEP);
  const SwizzledOperand values(tiles_v, SWIZZLE_REPEAT, KEY_STEP);

  // Row m of a tile is head m % group of its token m / group.
  auto find_row = [&](const AnnouncedTile& tile, int m) {
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
  auto row_offset = [&](const AnnouncedTile& tile, const QueryRow& row) {
    const long long token = tile.first_token + row.token;
    return (token * num_heads + tile.kv_head * group + row.head) * HEAD_DIM;
  };
  auto load_queries = [&](int slot, int buffer) {
    constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
    constexpr int ROWS_AT_ONCE = WARPGROUP_SIZE / SEGMENTS;
    static_assert(ROWS_AT_ONCE % 8 == 0, "a thread's rows are eights apart");
    const AnnouncedTile& tile = tiles[slot];
    const int segment = thread % SEGMENTS;
    unsigned char* const to = tile_q + buffer * CONSUMERS * QUERY_BYTES + segment / 8 * QUERY_HALF;
    QueryRow row = find_row(tile, group_row0 + thread / SEGMENTS);
#pragma unroll
    for (int m = thread / SEGMENTS; m < GROUP_ROWS; m += ROWS_AT_ONCE) {
      const bool valid = group_row0 + m < tile.num_rows;
      copy_async_16(to + m * SWIZZLE_BYTES + (segment % 8 ^ m % 8) * 16,
                    q + (valid ? row_offset(tile, row) : 0) + segment * SEGMENT, valid);
#pragma unroll
      for (int i = 0; i < ROWS_AT_ONCE; i += 8) skip_8(row);
    }
    copy_async_commit();
  };
  // What all threads of the group have written is there for its products.
  auto synchronize_group = [&] {
    copy_async_wait<0>();
    fence_shared_for_async();
    named_barrier_wait(GROUP_BARRIER + consumer, WARPGROUP_SIZE);
  };
  auto release = [&](Barrier* empty) {
    if (lane == 0) barrier_arrive(empty);
  };

  float scores[TILE_KEYS / 2] = {};
  float outputs[HEAD_DIM / 2] = {};
  unsigned weights[TILE_KEYS / 4];
  float inverses[2];
  Softmax softmax;
  softmax.clear();

  auto multiply_keys = [&](int buffer, int stage) {
    const int tile_a = uniform(buffer * CONSUMERS * QUERY_BYTES), tile_b = uniform(stage * KEY_BYTES);
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += 16) {
      const unsigned long long a = queries.at(tile_a + d / LINE * QUERY_HALF + d % LINE * 2);
      const unsigned long long b = keys.at(tile_b + d / LINE * SWIZZLE_REPEAT + d % LINE * 2);
      wgmma<T, TILE_KEYS>(scores, a, b, d != 0);
    }
    wgmma_commit();
  };
  auto multiply_values = [&](int stage) {
    const int tile_b = uniform(stage * KEY_BYTES);
#pragma unroll
    for (int k = 0; k < TILE_KEYS / 16; ++k) {
      wgmma_registers<T>(outputs, weights + k * 4, values.at(tile_b + k * 2 * KEY_STEP));
    }
    wgmma_commit();
  };
  auto round_weights = [&] {
#pragma unroll
    for (int i = 0; i < TILE_KEYS / 4; ++i) weights[i] = pack<T>(scores[i * 2], scores[i * 2 + 1]);
  };
  // Behind a row's last key there may be anything, even NaN, which no weight of 0 makes harmless.
  auto clear_values = [&](int stage, int num_values) {
    unsigned char* const tile_v = tiles_v + stage * KEY_BYTES;
    for (int i = num_values * 8 + thread; i < TILE_KEYS * 8; i += WARPGROUP_SIZE) {
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        unsigned char* const at = tile_v + i / 64 * KEY_STEP + half * SWIZZLE_REPEAT + i % 64 * 16;
        *reinterpret_cast<uint4*>(at) = uint4{0, 0, 0, 0};
      }
    }
    synchronize_group();
  };
  // Four lanes share a row's eight columns; they exchange them, so that each writes all of every fourth
  // eight.
  auto store_outputs = [&](int slot) {
    const AnnouncedTile& tile = tiles[slot];
    QueryRow row = find_row(tile, lane_row0);
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
        if (lane_row0 + h * 8 < tile.num_rows) {
          *reinterpret_cast<uint4*>(to + n * 8) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
        }
      }
      skip_8(row);
    }
    free_slot(slot);
  };

  // Of a tile whose keys are split: leaves this split's outputs, relative to the rows' maxima, with maxima
  // and sums. The last group to do so adds up all splits, in their order, so that it does not matter which
  // one it is, and has the tile's outputs; the others get false.
  auto merge_splits = [&](int slot) {
    constexpr int PART = HEAD_DIM / 8 * WARPGROUP_SIZE;  // of a group's outputs: each thread's, four by four
    const AnnouncedTile& tile = tiles[slot];
    const int counter = tile.first_unit * CONSUMERS + consumer;
    float4* const parts = reinterpret_cast<float4*>(partial_out) + counter * PART + thread;
    float2* const part_sums =
        reinterpret_cast<float2*>(partial_sums) + tile.first_unit * TILE_ROWS + lane_row0;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      const float* const from = &outputs[n * 4];
      parts[tile.split * CONSUMERS * PART + n * WARPGROUP_SIZE] =
          make_float4(from[0], from[1], from[2], from[3]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = softmax.row_sum(h);
      if (lane % 4 == 0) {
        part_sums[tile.split * TILE_ROWS + h * 8] = make_float2(softmax.maxima[h] * scale_log2, sum);
      }
    }
    named_barrier_wait(GROUP_BARRIER + consumer, WARPGROUP_SIZE);
    if (thread == 0) merges[consumer] = arrives_last(arrivals + counter, tile.num_splits);
    named_barrier_wait(GROUP_BARRIER + consumer, WARPGROUP_SIZE);
    if (!merges[consumer]) return false;

    float maxima[2] = {MINUS_INFINITY, MINUS_INFINITY}, sums[2] = {};
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 2; ++n) outputs[n] = 0.0f;
#pragma unroll 1
    for (int split = 0; split < tile.num_splits; ++split) {
      float4 values[HEAD_DIM / 8];  // all in flight
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        values[n] = __ldcg(parts + split * CONSUMERS * PART + n * WARPGROUP_SIZE);
      }
      float factors_before[2], factors[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 maximum_and_sum = __ldcg(part_sums + split * TILE_ROWS + h * 8);
        const float maximum = fmaxf(maxima[h], maximum_and_sum.x);
        factors_before[h] = rescale_factor(maxima[h], maximum);
        factors[h] = rescale_factor(maximum_and_sum.x, maximum);
        sums[h] = sums[h] * factors_before[h] + maximum_and_sum.y * factors[h];
        maxima[h] = maximum;
      }
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        const float parts_of_rows[4] = {values[n].x, values[n].y, values[n].z, values[n].w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& output = outputs[n * 4 + e];
          output = output * factors_before[e / 2] + parts_of_rows[e] * factors[e / 2];
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) inverses[h] = Softmax::inverse(sums[h]);
    return true;
  };

  // Of the tile whose scores are computed: the scores in hand, or the next, are of the keys from key0 on.
  int key0, tiles_left;  // tiles of keys without scores yet
  int num_values;        // of the tile of values that the weights in hand meet
  int positions[2];      // of the lane's rows
  int all_visible_from, all_visible_to;
  auto begin_tile = [&](int slot) {
    const AnnouncedTile& tile = tiles[slot];
    tiles_left = uniform(tile.key_tiles);
    key0 = uniform(tile.key_begin) + tiles_left * TILE_KEYS;
    num_values = uniform(tile.context_len) - key0 + TILE_KEYS;
    QueryRow row = find_row(tile, lane_row0);
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
        const unsigned distance = keys_before - (s / 2 * 8 + s % 2);
        float& score = scores[s / 2 * 4 + h * 2 + s % 2];
        if (distance >= static_cast<unsigned>(sliding_window)) score = MINUS_INFINITY;
      }
    }
  };
  // While the last scores of a tile of queries are computed, its successor's queries are fetched.
  int slot, next_slot, buffer = 0;
  auto prepare_next = [&] {
    next_slot = take_slot();
    if (uniform(tiles[next_slot].kv_head) < 0) {
      next_slot = NONE;
    } else {
      load_queries(next_slot, buffer ^ 1);
    }
  };

  if (consumer == CONSUMERS - 1) named_barrier_arrive(TURN_BARRIER, 2 * WARPGROUP_SIZE);
  slot = take_slot();
  wait_for_earlier_kernels();
  let_next_kernel_start();  // attention of rows with one query, which needs no more than this has waited for
  if (uniform(tiles[slot].kv_head) < 0) return;
  load_queries(slot, buffer);
  begin_tile(slot);
  synchronize_group();
  barrier_wait(&full_k[0], 0);
  pin(scores);
  wgmma_fence();
  multiply_keys(buffer, 0);
  key0 -= TILE_KEYS;
  --tiles_left;
  wgmma_wait<0>();
  pin(scores);
  release(&empty_k[0]);
  if (tiles_left == 0) prepare_next();
  mask();
  softmax.update(scores, scale_log2);
  round_weights();

  // Each turn multiplies one tile's weights by its values and computes the weights of the next one, which may
  // be the first of the next tile of queries.
  int step = 0;
  while (true) {
    const int stage = step % STAGES, next_stage = (step + 1) % STAGES;
    if (num_values < TILE_KEYS) {
      barrier_wait(&full_v[stage], step / STAGES % 2);
      clear_values(stage, num_values);
      num_values = TILE_KEYS;
    }
    const bool is_last = tiles_left == 0;
    if (is_last) {
      if (next_slot == NONE) break;
      synchronize_group();
      buffer ^= 1;
    }

    barrier_wait(&full_k[next_stage], (step + 1) / STAGES % 2);
    named_barrier_wait(turn, 2 * WARPGROUP_SIZE);
    pin(scores);
    pin(outputs);
    pin(weights);
    wgmma_fence();
    multiply_keys(buffer, next_stage);
    barrier_wait(&full_v[stage], step / STAGES % 2);
    wgmma_fence();
    multiply_values(stage);
    named_barrier_arrive(next_turn, 2 * WARPGROUP_SIZE);

    const int finished_slot = slot;
    if (is_last) {
      slot = next_slot;
      begin_tile(slot);
      softmax.finish(inverses);
      softmax.clear();
    }
    key0 -= TILE_KEYS;
    --tiles_left;
    if (tiles_left == 0) prepare_next();

    wgmma_wait<1>();
    pin(scores);
    release(&empty_k[next_stage]);
    mask();
    softmax.update(scores, scale_log2);
    wgmma_wait<0>();
    pin(outputs);
    pin(weights);
    release(&empty_v[stage]);
    round_weights();
    if (is_last) store_outputs(finished_slot);
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 2; ++n) {
      outputs[n] = is_last ? 0.0f : outputs[n] * softmax.factors[n / 2 % 2];
    }
    ++step;
  }

  barrier_wait(&full_v[step % STAGES], step / STAGES % 2);
  pin(outputs);
  pin(weights);
  wgmma_fence();
  multiply_values(step % STAGES);
  wgmma_wait<0>();
  pin(outputs);
  softmax.finish(inverses);
  if (uniform(tiles[slot].num_splits) > 1 && !merge_splits(slot)) return;
  store_outputs(slot);
}
