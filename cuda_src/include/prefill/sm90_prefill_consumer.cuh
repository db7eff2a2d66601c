// A warp group of sm_90 prefill attention that multiplies: 64 rows of a tile of queries by tiles of keys and
// values.
#pragma once

#include "attention/cached.cuh"
#include "attention/online_softmax.cuh"
#include "fp8/fp8_rows.cuh"
#include "prefill/sm90_prefill_tiles.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"
#include "ptx/peer.cuh"
#include "ptx/sm90_fp8.cuh"

// Named barriers; 0 is __syncthreads.
constexpr int TURN_BARRIER = 1;
constexpr int GROUP_BARRIER = 4;

// A query of a sequence, counted from the first of this step, and its head in the key/value head's group.
struct QueryRow {
  int token;
  int head;
};

// Where a tile's rows are: row m is head m % group of its token m / group.
template <int HEAD_DIM>
struct QueryRows {
  int num_heads;
  int group;

  __device__ __forceinline__ QueryRow find_row(const AnnouncedTile& tile, int m) const {
    const int row = tile.tile_row0 + m;
    return QueryRow{row / group, row % group};
  }
  __device__ __forceinline__ void skip_8(QueryRow& row) const {
    row.token += 8 / group;
    row.head += 8 % group;
    if (row.head >= group) {
      row.head -= group;
      ++row.token;
    }
  }
  __device__ __forceinline__ long long row_offset(const AnnouncedTile& tile, const QueryRow& row) const {
    const long long token = tile.first_token + row.token;
    return (token * num_heads + tile.kv_head * group + row.head) * HEAD_DIM;
  }
};

// Scores become tanh(score * scale).
__device__ __forceinline__ void cap_scores(float (&scores)[TILE_KEYS / 2], float scale) {
#pragma unroll
  for (int s = 0; s < TILE_KEYS / 2; ++s) scores[s] = soft_capped(scores[s] * scale, 1.0f);
}

// A lane's part of the softmax of its two rows, from tile of keys to tile of keys.
struct Softmax {
  RowSoftmax rows[2];
  float offsets[2];  // of the weights of the tile in hand

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows[h].maximum = MINUS_INFINITY;
      rows[h].sum = 0.0f;
    }
  }

  // The maxima to which the weights of these scores are relative: with IN_ORDER the rows' own.
  template <bool IN_ORDER>
  __device__ __forceinline__ void renew(const float (&scores)[TILE_KEYS / 2], const float (&scales_log2)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float maximum = fmaxf(scores[h * 2], scores[h * 2 + 1]);
      float other = rows[h].maximum;
#pragma unroll
      for (int j = 1; j < TILE_KEYS / 8; ++j) {
        maximum = fmaxf(maximum, scores[j * 4 + h * 2]);
        other = fmaxf(other, scores[j * 4 + h * 2 + 1]);
      }
      maximum = fmaxf(maximum, other);
      offsets[h] = IN_ORDER ? rows[h].template renew<true>(maximum, scales_log2[h])
                            : rows[h].renew_if_grown(maximum, scales_log2[h]);
    }
  }

  // Turns the scores into weights.
  __device__ __forceinline__ void weigh(float (&scores)[TILE_KEYS / 2], const float (&scales_log2)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sums[2] = {};
#pragma unroll
      for (int j = 0; j < TILE_KEYS / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[j * 4 + h * 2 + e];
          score = RowSoftmax::weight(score, scales_log2[h], offsets[h]);
          sums[e] += score;
        }
      }
      rows[h].add(sums[0] + sums[1]);
    }
  }

  // Between `weigh` and a wait for products in flight: the weights are computed before it. ptxas would have
  // them wait, too, which need nothing of these products; it moves no wait across a branch, and the sums, of
  // which it does not know that they are never negative, need all weights.
  __device__ __forceinline__ void complete() const {
    if (rows[0].sum + rows[1].sum < 0.0f) end_with_error();
  }
};

// The keys that a lane's two rows meet, tile of keys by tile of keys, from the last to the first.
struct VisibleKeys {
  int key0;        // the scores in hand, or the next, are of the keys from key0 on
  int tiles_left;  // tiles of keys without scores yet
  int num_values;  // of the tile of values that the weights in hand meet
  int positions[2];
  int all_visible_from, all_visible_to;
  int sliding_window;
  int lane;

  template <int HEAD_DIM>
  __device__ __forceinline__ void begin_tile(const AnnouncedTile& tile, const QueryRows<HEAD_DIM>& rows,
                                             int lane_row0) {
    tiles_left = uniform(tile.key_tiles);
    key0 = uniform(tile.key_begin) + tiles_left * TILE_KEYS;
    num_values = uniform(tile.context_len) - key0 + TILE_KEYS;
    QueryRow row = rows.find_row(tile, lane_row0);
    positions[0] = tile.first_position + row.token;
    rows.skip_8(row);
    positions[1] = tile.first_position + row.token;
    all_visible_from = __shfl_sync(FULL_WARP, positions[1], WARP_SIZE - 1) - sliding_window + 1;
    all_visible_to = __shfl_sync(FULL_WARP, positions[0], 0) - TILE_KEYS + 1;
  }

  __device__ __forceinline__ void next_tile() {
    key0 -= TILE_KEYS;
    --tiles_left;
  }

  __device__ __forceinline__ void mask(float (&scores)[TILE_KEYS / 2]) const {
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
  }
};

// A group's operands in shared memory, queries of T that products take as Operand, CODES: as e4m3 with a
// scale for each row, and its scores, weights and outputs in registers: of a matrix of wgmma a lane has two
// rows, lane_row0 and the one 8 further.
template <typename T, typename Operand, int HEAD_DIM, int CONSUMERS, int STAGES, bool CODES>
struct PrefillConsumer {
  using Layout = PrefillLayout<HEAD_DIM, CONSUMERS, STAGES, CODES>;
  static constexpr float LEAST_MAXIMUM = 1e-30f;  // of a row's queries: less becomes 0

  int consumer;
  unsigned char* tile_q;
  unsigned char* tiles_v;
  float (*query_scales)[Layout::TILE_ROWS];  // of each buffer, with CODES
  SwizzledOperand queries, keys, values;
  float scores[TILE_KEYS / 2] = {};
  float outputs[HEAD_DIM / 2] = {};
  unsigned weights[TILE_KEYS / 4];

  __device__ __forceinline__ PrefillConsumer(int consumer, unsigned char* tiles_q, unsigned char* tiles_k,
                                             unsigned char* tiles_v, float (*query_scales)[Layout::TILE_ROWS])
      : consumer(consumer),
        tile_q(tiles_q + consumer * Layout::QUERY_BYTES),
        tiles_v(tiles_v),
        query_scales(query_scales),
        queries(tile_q, 16, SWIZZLE_REPEAT),
        keys(tiles_k, 16, Layout::KEY_STEP),
        values(tiles_v, SWIZZLE_REPEAT, Layout::VALUE_STEP) {}

  // Starts to copy the group's rows of a tile, zeros behind the last one.
  __device__ __forceinline__ void load_queries(const T* q, const AnnouncedTile& tile,
                                               const QueryRows<HEAD_DIM>& rows, int buffer) const {
    const int group_row0 = consumer * GROUP_ROWS;
    constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
    constexpr int ROWS_AT_ONCE = WARPGROUP_SIZE / SEGMENTS;
    static_assert(ROWS_AT_ONCE % 8 == 0, "a thread's rows are eights apart");
    const int thread = threadIdx.x % WARPGROUP_SIZE;  // so that the compiler knows the trip count
    const int segment = thread % SEGMENTS;
    unsigned char* const to =
        tile_q + buffer * CONSUMERS * Layout::QUERY_BYTES + segment / 8 * Layout::QUERY_HALF;
    QueryRow row = rows.find_row(tile, group_row0 + thread / SEGMENTS);
#pragma unroll
    for (int m = thread / SEGMENTS; m < GROUP_ROWS; m += ROWS_AT_ONCE) {
      const bool valid = group_row0 + m < tile.num_rows;
      copy_async_16(to + m * SWIZZLE_BYTES + (segment % 8 ^ m % 8) * 16,
                    q + (valid ? rows.row_offset(tile, row) : 0) + segment * SEGMENT, valid);
#pragma unroll
      for (int i = 0; i < ROWS_AT_ONCE; i += 8) rows.skip_8(row);
    }
    copy_async_commit();
  }

  // Turns the queries that this thread has copied into operands, if these are of another type.
  __device__ __forceinline__ void convert_queries(int buffer) const {
    if constexpr (IS_SAME<T, Operand> && !CODES) return;
    constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
    const int thread = threadIdx.x % WARPGROUP_SIZE;
    unsigned char* const to = tile_q + buffer * CONSUMERS * Layout::QUERY_BYTES;
    unsigned char* const from = to + thread % SEGMENTS / 8 * Layout::QUERY_HALF;
    copy_async_wait<0>();
    if constexpr (CODES) {
      encode_queries(from, to, query_scales[buffer] + consumer * GROUP_ROWS);
      return;
    }
#pragma unroll 2
    for (int m = thread / SEGMENTS; m < GROUP_ROWS; m += WARPGROUP_SIZE / SEGMENTS) {
      T* const at = reinterpret_cast<T*>(from + m * SWIZZLE_BYTES + (thread % SEGMENTS % 8 ^ m % 8) * 16);
      const auto queries = Vec<T, SEGMENT>::load(at);
      *reinterpret_cast<uint4*>(at) =
          make_uint4(half_pair(queries[0], queries[1]), half_pair(queries[2], queries[3]),
                     half_pair(queries[4], queries[5]), half_pair(queries[6], queries[7]));
    }
  }

  // Turns the group's queries of T, in two halves, into e4m3 in the first: each row times what makes its
  // largest magnitude the largest of e4m3. The 16 lanes that have copied a row have all of it in registers
  // before one of them writes.
  __device__ __forceinline__ void encode_queries(unsigned char* from, unsigned char* to,
                                                 float* scales) const {
    constexpr int SEGMENTS = HEAD_DIM / SEGMENT;
    const int thread = threadIdx.x % WARPGROUP_SIZE, segment = thread % SEGMENTS;
#pragma unroll 2
    for (int m = thread / SEGMENTS; m < GROUP_ROWS; m += WARPGROUP_SIZE / SEGMENTS) {
      const auto vector = Vec<T, SEGMENT>::load(
          reinterpret_cast<const T*>(from + m * SWIZZLE_BYTES + (segment % 8 ^ m % 8) * 16));
      float queries[SEGMENT], maximum = LEAST_MAXIMUM;
#pragma unroll
      for (int i = 0; i < SEGMENT; ++i) {
        queries[i] = to_float(vector[i]);
        maximum = fmaxf(maximum, fabsf(queries[i]));
      }
#pragma unroll
      for (int lanes = 1; lanes < SEGMENTS; lanes *= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(FULL_WARP, maximum, lanes));
      }
      const float factor = __fdiv_rn(E4M3_MAX, maximum);
#pragma unroll
      for (int i = 0; i < SEGMENT; ++i) queries[i] *= factor;
      const uint2 codes = make_uint2(pack_four_e4m3(queries), pack_four_e4m3(queries + 4));
      __syncwarp();
      *reinterpret_cast<uint2*>(to + m * SWIZZLE_BYTES + (segment / 2 ^ m % 8) * 16 + segment % 2 * 8) =
          codes;
      if (segment == 0) scales[m] = maximum * (1.0f / E4M3_MAX);
    }
  }

  // The products with all values of a tile, done.
  __device__ __forceinline__ void multiply_last_values(int stage, bool adds) {
    pin(outputs);
    pin(weights);
    wgmma_fence();
    multiply_values(stage, adds);
    wgmma_wait<0>();
    pin(outputs);
  }

  // The compiler keeps what products in flight read and write where it is.
  __device__ __forceinline__ void pin_registers() {
    pin(scores);
    pin(outputs);
    pin(weights);
  }

  // What all threads of the group have written is there for its products.
  __device__ __forceinline__ void synchronize_group() const {
    copy_async_wait<0>();
    fence_shared_for_async();
    named_barrier_wait(GROUP_BARRIER + consumer, WARPGROUP_SIZE);
  }

  __device__ __forceinline__ void multiply_keys(int buffer, int stage) {
    const int tile_a = uniform(buffer * CONSUMERS * Layout::QUERY_BYTES),
              tile_b = uniform(stage * Layout::KEY_BYTES);
    if constexpr (CODES) {
#pragma unroll
      for (int d = 0; d < HEAD_DIM; d += 32) {
        wgmma_e4m3<TILE_KEYS>(scores, queries.at(tile_a + d), keys.at(tile_b + d), d != 0);
      }
      wgmma_commit();
      return;
    }
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += 16) {
      const unsigned long long a = queries.at(tile_a + d / LINE * Layout::QUERY_HALF + d % LINE * 2);
      const unsigned long long b = keys.at(tile_b + d / LINE * SWIZZLE_REPEAT + d % LINE * 2);
      wgmma<Operand, TILE_KEYS>(scores, a, b, d != 0);
    }
    wgmma_commit();
  }

  // `adds`: to the outputs of the tiles before.
  __device__ __forceinline__ void multiply_values(int stage, bool adds) {
    const int tile_b = uniform(stage * Layout::VALUE_BYTES);
#pragma unroll
    for (int k = 0; k < TILE_KEYS / 16; ++k) {
      wgmma_registers<Operand>(outputs, weights + k * 4, values.at(tile_b + k * 2 * Layout::VALUE_STEP),
                               k > 0 || adds);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int i = 0; i < TILE_KEYS / 4; ++i) weights[i] = pack<Operand>(scores[i * 2], scores[i * 2 + 1]);
  }

  // Behind a row's last key there may be anything, even NaN, which no weight of 0 makes harmless. All groups
  // write the same zeros, with no order among them: each needs them before its own products, and waiting for
  // another group would break the turns.
  __device__ __forceinline__ void clear_values(int stage, int num_values) const {
    unsigned char* const tile_v = tiles_v + stage * Layout::VALUE_BYTES;
    for (int i = num_values * 8 + threadIdx.x % WARPGROUP_SIZE; i < TILE_KEYS * 8; i += WARPGROUP_SIZE) {
#pragma unroll
      for (int half = 0; half < Layout::HALVES; ++half) {
        unsigned char* const at = tile_v + i / 64 * Layout::VALUE_STEP + half * SWIZZLE_REPEAT + i % 64 * 16;
        *reinterpret_cast<uint4*>(at) = uint4{0, 0, 0, 0};
      }
    }
    synchronize_group();
  }

  // After the products of a tile: to the rows' new maxima.
  __device__ __forceinline__ void rescale_outputs(const Softmax& softmax) {
    const bool renewed = softmax.rows[0].factor != 1.0f || softmax.rows[1].factor != 1.0f;
    if (!__any_sync(FULL_WARP, renewed)) return;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 2; ++n) outputs[n] *= softmax.rows[n / 2 % 2].factor;
  }
};
