// Attention by warps of a few queries of one sequence over sixteen keys at a time: each query's heads as
// WarpAttention has them, in its order and to the last bit, several queries beside each other.
#pragma once

#include "attention/warp_attention.cuh"

constexpr int TILE_QUERY_ROWS = 16;                 // of queries, that one mma takes
constexpr int SETS = TILE_QUERY_ROWS / GROUP_ROWS;  // of such a tile: what one query of WarpAttention fills

// Where heads of consecutive queries are among the rows of a block: a query has 2^head_rows_log2 rows, of
// which the first num_group_heads are heads.
struct DraftRows {
  int head_rows_log2;
  int num_group_heads;
  int num_queries;

  __device__ __forceinline__ int query(int row) const { return row >> head_rows_log2; }
  __device__ __forceinline__ int head(int row) const { return row - (query(row) << head_rows_log2); }
  __device__ __forceinline__ bool has(int row) const {
    return query(row) < num_queries && head(row) < num_group_heads;
  }
  // The lanes of a warp that hold scores of the same query as this one.
  __device__ __forceinline__ unsigned lanes_of_query() const {
    const int row_lanes = WARP_SIZE / GROUP_ROWS;
    const int lanes = row_lanes << head_rows_log2;
    const int first = threadIdx.x % WARP_SIZE / lanes * lanes;
    return FULL_WARP >> (WARP_SIZE - lanes) << first;
  }
};

// The keys that queries see: query i those from max(context_len + i - sliding_window, 0) to context_len + i -
// 1.
struct DraftKeys {
  int context_len;  // of the first query
  int sliding_window;
  int num_queries;

  __device__ __forceinline__ bool all_see(int begin) const {
    return begin + WARP_KEYS <= context_len && begin >= context_len + num_queries - 1 - sliding_window;
  }
  __device__ __forceinline__ bool sees(int query, int key) const {
    const int end = context_len + query;
    return key < end && key >= end - sliding_window;
  }
};

// One warp's softmax over the keys that it was given, times their values, for up to 16 * ROW_TILES rows of
// heads of queries. Of a tile of 16 rows and of columns a lane holds those numbered by lane / 4 and lane % 4
// (ptx/mma.cuh), as in WarpAttention; rows 8 to 15 are a set of their own.
template <typename T, int HEAD_DIM, int ROW_TILES, typename Cached = T>
struct DraftAttention {
  using Tile = KeyTile<T, Cached, HEAD_DIM>;
  using Operand = typename Tile::Operand;
  static constexpr int PITCH = Tile::PITCH;
  static constexpr int MERGE_PITCH = WarpAttention<T, HEAD_DIM>::MERGE_PITCH;
  static_assert(IS_E4M3<Cached> || Tile::BYTES >= TILE_QUERY_ROWS * MERGE_PITCH * sizeof(float),
                "a warp's output of a tile must fit into a tile of keys and values");

  DraftRows rows;
  DraftKeys seen;
  unsigned query_lanes;
  float outputs[ROW_TILES][SETS][HEAD_DIM / 16][4] = {};
  float maximum[ROW_TILES][SETS];  // of row lane / 4 of each set, or somewhat less
  float sum[ROW_TILES][SETS];      // of that row, this lane's keys

  __device__ __forceinline__ DraftAttention(const DraftRows& rows, const DraftKeys& seen)
      : rows(rows), seen(seen), query_lanes(rows.lanes_of_query()) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) reset(m);
  }

  // tile_q [16 * ROW_TILES, PITCH] in shared memory; `tile` has the keys from `begin` on, and the values of
  // keys that are not seen are finite. CAPPED scores s become cap_log2 * tanh(s).
  template <bool CAPPED>
  __device__ __forceinline__ void add(const Operand* tile_q, Tile tile, int begin, float scale_log2,
                                      float cap_log2) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int num_tiles = ceil_div(seen.num_queries << rows.head_rows_log2, TILE_QUERY_ROWS);
    float scores[ROW_TILES][2][2][4] = {};  // keys 0 to 7 and 8 to 15, each in two sums
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; ++d) {
      unsigned b[4];
      tile.load_keys(d, b);
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
        if (m > 0 && m >= num_tiles) continue;
        unsigned a[4];
        ldmatrix_x4(a, tile_q + (m * TILE_QUERY_ROWS + lane % 16) * PITCH + d * 16 + lane / 16 * 8);
        mma_m16n8k16<Operand>(scores[m][0][d % 2], a, {b[0], b[1]});
        mma_m16n8k16<Operand>(scores[m][1][d % 2], a, {b[2], b[3]});
      }
    }
    unsigned weights[ROW_TILES][SETS][2];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      if (m > 0 && m >= num_tiles) continue;
#pragma unroll
      for (int h = 0; h < SETS; ++h) {
        float score[4];
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          const float product = scores[m][s / 2][0][h * 2 + s % 2] + scores[m][s / 2][1][h * 2 + s % 2];
          score[s] = __fmul_rn(product, scale_log2);
          if constexpr (CAPPED) score[s] = soft_capped(score[s], cap_log2);
        }
        if (!seen.all_see(begin)) mask(score, m * TILE_QUERY_ROWS + h * GROUP_ROWS + lane / 4, begin);
        weigh(score, m, h);
        // The scores' layout is that of a right operand with a row a key.
        weights[m][h][0] = pack<Operand>(score[0], score[1]);
        weights[m][h][1] = pack<Operand>(score[2], score[3]);
      }
    }
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; ++d) {
      unsigned a[4];
      tile.load_values(d, a);
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
        if (m > 0 && m >= num_tiles) continue;
#pragma unroll
        for (int h = 0; h < SETS; ++h) mma_m16n8k16<Operand>(outputs[m][h][d], a, weights[m][h]);
      }
    }
  }

  // Leave the outputs [16, MERGE_PITCH], times the values' scale, maxima and sums of tile m in shared memory
  // and begin it anew.
  __device__ __forceinline__ void finish(int m, float* merged, float (&maxima)[TILE_QUERY_ROWS],
                                         float (&sums)[TILE_QUERY_ROWS], float value_scale) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int h = 0; h < SETS; ++h) {
      float total = sum[m][h];
      total += __shfl_xor_sync(FULL_WARP, total, 1);
      total += __shfl_xor_sync(FULL_WARP, total, 2);
      if (lane % 4 == 0) {
        maxima[h * GROUP_ROWS + lane / 4] = maximum[m][h];
        sums[h * GROUP_ROWS + lane / 4] = total;
      }
      Tile::template move_outputs<MERGE_PITCH>(merged + h * GROUP_ROWS * MERGE_PITCH, outputs[m][h],
                                               GROUP_ROWS, value_scale);
    }
    reset(m);
  }

 private:
  __device__ __forceinline__ void reset(int m) {
#pragma unroll
    for (int h = 0; h < SETS; ++h) {
      maximum[m][h] = MINUS_INFINITY;
      sum[m][h] = 0.0f;
    }
  }

  __device__ __forceinline__ void mask(float (&score)[4], int row, int begin) const {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const int key = begin + s / 2 * 8 + lane % 4 * 2 + s % 2;
      if (!seen.sees(rows.query(row), key)) score[s] = MINUS_INFINITY;
    }
  }

  // Turns scores into weights relative to a maximum that is renewed, for all heads of a query together, where
  // a score of one passes it by far. What is not renewed is multiplied by 1.
  __device__ __forceinline__ void weigh(float (&score)[4], int m, int h) {
    const int lane = threadIdx.x % WARP_SIZE;
    const float highest = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
    const unsigned passing = __ballot_sync(FULL_WARP, highest > maximum[m][h] + STALE_LOG2);
    if (passing != 0) {
      float renewed = fmaxf(highest, __shfl_xor_sync(FULL_WARP, highest, 1));
      renewed = fmaxf(maximum[m][h], fmaxf(renewed, __shfl_xor_sync(FULL_WARP, renewed, 2)));
      const bool renews = (passing & query_lanes) != 0;
      const float factor = renews ? rescale_fast(maximum[m][h], renewed) : 1.0f;
      if (renews) maximum[m][h] = renewed;
      sum[m][h] = __fmul_rn(sum[m][h], factor);
      const float first = __shfl_sync(FULL_WARP, factor, lane % 4 * 8);
      const float second = __shfl_sync(FULL_WARP, factor, lane % 4 * 8 + 4);
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 16; ++d) {
        outputs[m][h][d][0] *= first;
        outputs[m][h][d][1] *= second;
        outputs[m][h][d][2] *= first;
        outputs[m][h][d][3] *= second;
      }
    }
    const float offset = maximum[m][h] == MINUS_INFINITY ? 0.0f : maximum[m][h];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      score[s] = exp2_fast(score[s] - offset);
      sum[m][h] += score[s];
    }
  }
};
