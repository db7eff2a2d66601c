// The parts of a portable matrix product: the loader that fills the stages, a warp's fragments and sums, and
// the epilogue that adds what slices of k and blocks of a cluster have.
#pragma once

#include "cluster.cuh"
#include "common.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"

constexpr int TILE_ROWS_IN_L2 = 8;  // rows of tiles that share each tile of the weight while it is in L2

// Index of a 16-byte segment in a tile of shared memory. The column is XORed with the row so that the 8 rows
// an ldmatrix phase reads, and the segments a copy writes, fall into different banks.
template <int SEGMENTS_PER_ROW>
__device__ __forceinline__ int swizzled(int row, int segment) {
  const int mask = SEGMENTS_PER_ROW >= 8 ? row & 7 : (row >> 1) & 3;
  return row * SEGMENTS_PER_ROW + (segment ^ mask);
}

// Copy rows [row0, row0 + ROWS) x columns [column0, column0 + TILE_K) of source [num_rows, in_features] to a
// swizzled tile, zeros beyond the edges.
template <typename T, int ROWS, int TILE_K, int THREADS, bool ALIGNED, bool READ_ONCE>
__device__ __forceinline__ void load_tile(T* tile, const T* source, int row0, int num_rows, int column0,
                                          int in_features) {
  constexpr int SEGMENTS_PER_ROW = TILE_K / SEGMENT;
  static_assert(ROWS * SEGMENTS_PER_ROW % THREADS == 0, "every thread copies the same number of segments");
#pragma unroll
  for (int i = 0; i < ROWS * SEGMENTS_PER_ROW / THREADS; ++i) {
    const int row = (i * THREADS + threadIdx.x) / SEGMENTS_PER_ROW;
    const int segment = threadIdx.x % SEGMENTS_PER_ROW;
    T* to = tile + swizzled<SEGMENTS_PER_ROW>(row, segment) * SEGMENT;
    const int column = column0 + segment * SEGMENT;
    const bool row_valid = row0 + row < num_rows;
    const T* from = source + static_cast<long long>(row_valid ? row0 + row : 0) * in_features;
    if constexpr (ALIGNED) {
      const bool valid = row_valid && column < in_features;
      const T* const segment_from = valid ? from + column : source;
      if constexpr (READ_ONCE) {
        copy_async_16(shared_address(to), segment_from, valid, evict_first_policy());
      } else {
        copy_async_16(to, segment_from, valid);
      }
    } else {
      Vec<T, SEGMENT> values;
#pragma unroll
      for (int e = 0; e < SEGMENT; ++e) {
        const bool valid = row_valid && column + e < in_features;
        values[e] = valid ? from[column + e] : from_float<T>(0.0f);
      }
      values.store(to);
    }
  }
}

// Constants of a variant.
template <typename Element, typename Result, int ROWS, int COLUMNS, int K, int WARPS_OF_ROWS,
          int WARPS_OF_COLUMNS, int WARPS_OF_K, int RING_STAGES, bool IS_ALIGNED, int BLOCKS>
struct PortableVariant {
  using T = Element;
  using Out = Result;
  static constexpr int TILE_M = ROWS, TILE_N = COLUMNS, TILE_K = K;
  static constexpr int WARPS_M = WARPS_OF_ROWS, WARPS_N = WARPS_OF_COLUMNS, WARPS_K = WARPS_OF_K;
  static constexpr int STAGES = RING_STAGES;
  static constexpr bool ALIGNED = IS_ALIGNED;
  static constexpr int SPLITS = BLOCKS;
  static constexpr int THREADS = 32 * WARPS_M * WARPS_N * WARPS_K;
  static constexpr int SEGMENTS_PER_ROW = TILE_K / SEGMENT;
  static constexpr int WARP_M = TILE_M / WARPS_M;
  static constexpr int WARP_N = TILE_N / WARPS_N;
  static constexpr int MMAS_M = WARP_M / 16;
  static constexpr int MMAS_N = WARP_N / 8;
  static constexpr int STEPS = TILE_K / 16 / WARPS_K;
  static constexpr int STAGE_ELEMENTS = (TILE_M + TILE_N) * TILE_K;
  static constexpr int SUMS = MMAS_M * MMAS_N * 4;
  static constexpr int PAIRS = SUMS / 2;  // of neighbouring columns
  static constexpr int PARTIALS = WARPS_K > 1 ? WARPS_K - 1 : SPLITS > 1;
  static_assert(sizeof(T) == 2, "tensor-core matmul takes bfloat16 or float16");
  static_assert(SEGMENTS_PER_ROW == 4 || SEGMENTS_PER_ROW % 8 == 0, "TILE_K must be 32 or a multiple of 64");
  static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "a warp's tile must be made of 16x16 pieces");
  static_assert(STEPS % 2 == 0, "each warp needs an even number of k steps for its two sets of fragments");
  static_assert(STAGES >= 2, "copies need a stage to run ahead in");
  static_assert(PARTIALS * TILE_M * TILE_N * sizeof(float) <= STAGES * STAGE_ELEMENTS * sizeof(T),
                "partial sums of the k slices must fit into the stages");
};

// The matrices of a product.
template <typename T, typename Out>
struct ProductOperands {
  const T* x;
  const T* weight;
  const T* bias;
  Out* out;
  int num_rows, out_features, in_features, accumulate;
};

// Which tile of out a block has, and which part of k: groups of rows of tiles, each column by column.
template <typename V>
struct TilePlace {
  int rank;  // in the cluster
  int row0, column0;
  int first_tile_k, num_tiles_k;

  __device__ __forceinline__ TilePlace(int num_rows, int out_features, int in_features) {
    const int tiles_m = ceil_div(num_rows, V::TILE_M);
    const int tiles_n = ceil_div(out_features, V::TILE_N);
    const int tile = blockIdx.x / V::SPLITS;
    rank = blockIdx.x % V::SPLITS;
    const int group_begin = tile / (TILE_ROWS_IN_L2 * tiles_n) * TILE_ROWS_IN_L2;
    const int group_rows = min(tiles_m - group_begin, TILE_ROWS_IN_L2);
    const int in_group = tile - group_begin * tiles_n;
    row0 = (group_begin + in_group % group_rows) * V::TILE_M;
    column0 = in_group / group_rows * V::TILE_N;
    const int tiles_k = ceil_div(in_features, V::TILE_K);
    first_tile_k = tiles_k * rank / V::SPLITS;
    num_tiles_k = tiles_k * (rank + 1) / V::SPLITS - first_tile_k;
  }
};

// Which part of the tile a warp has.
template <typename V>
struct WarpPlace {
  int lane, warp, m, n, k;

  __device__ __forceinline__ WarpPlace()
      : lane(threadIdx.x % WARP_SIZE),
        warp(threadIdx.x / WARP_SIZE),
        m(warp % V::WARPS_M),
        n(warp / V::WARPS_M % V::WARPS_N),
        k(warp / (V::WARPS_M * V::WARPS_N)) {}
};

// Fills the stages with tiles of x and of the weight behind them.
template <typename V>
struct TileLoader {
  using T = typename V::T;
  const ProductOperands<T, typename V::Out>& operands;
  const TilePlace<V>& place;
  T* stages;

  __device__ __forceinline__ void load_weight(int tile_k) const {
    constexpr bool ONE_TILE = V::TILE_M <= 32;  // of rows; larger ones are for more rows
    if (tile_k >= place.num_tiles_k) return;
    T* const to = stages + tile_k % V::STAGES * V::STAGE_ELEMENTS + V::TILE_M * V::TILE_K;
    load_tile<T, V::TILE_N, V::TILE_K, V::THREADS, V::ALIGNED, ONE_TILE>(
        to, operands.weight, place.column0, operands.out_features, (place.first_tile_k + tile_k) * V::TILE_K,
        operands.in_features);
  }
  __device__ __forceinline__ void load_x(int tile_k) const {
    if (tile_k >= place.num_tiles_k) return;
    T* const to = stages + tile_k % V::STAGES * V::STAGE_ELEMENTS;
    load_tile<T, V::TILE_M, V::TILE_K, V::THREADS, V::ALIGNED, false>(
        to, operands.x, place.row0, operands.num_rows, (place.first_tile_k + tile_k) * V::TILE_K,
        operands.in_features);
  }
};

// A warp's sums, and two sets of fragments: one is read while the other is multiplied.
template <typename V>
struct WarpProducts {
  using T = typename V::T;
  unsigned a[2][V::MMAS_M][4];
  unsigned b[2][V::MMAS_N][2];
  float sums[V::MMAS_M][V::MMAS_N][4] = {};

  __device__ __forceinline__ void load_fragments(const T* stages, const WarpPlace<V>& warp, int set,
                                                 int tile_k, int step) {
    const int row_a = warp.m * V::WARP_M + warp.lane % 16;
    const int row_b = warp.n * V::WARP_N + warp.lane % 8 + warp.lane / 16 * 8;
    const T* tile_x = stages + tile_k % V::STAGES * V::STAGE_ELEMENTS;
    const T* tile_weight = tile_x + V::TILE_M * V::TILE_K;
    const int segment = (warp.k * V::STEPS + step) * 2;
#pragma unroll
    for (int i = 0; i < V::MMAS_M; ++i) {
      ldmatrix_x4(a[set][i],
                  tile_x + swizzled<V::SEGMENTS_PER_ROW>(row_a + i * 16, segment + warp.lane / 16) * SEGMENT);
    }
#pragma unroll
    for (int j = 0; j < V::MMAS_N; j += 2) {
      unsigned r[4];
      ldmatrix_x4(r, tile_weight +
                         swizzled<V::SEGMENTS_PER_ROW>(row_b + j * 8, segment + warp.lane / 8 % 2) * SEGMENT);
      b[set][j][0] = r[0];
      b[set][j][1] = r[1];
      b[set][j + 1][0] = r[2];
      b[set][j + 1][1] = r[3];
    }
  }

  __device__ __forceinline__ void multiply(int set) {
#pragma unroll
    for (int i = 0; i < V::MMAS_M; ++i) {
#pragma unroll
      for (int j = 0; j < V::MMAS_N; ++j) mma_m16n8k16<T>(sums[i][j], a[set][i], b[set][j]);
    }
  }

  // The sums of all slices of k, in order, to the warps of the first one.
  __device__ __forceinline__ void add_slices(float* partial, const WarpPlace<V>& warp) {
    copy_async_wait<0>();
    __syncthreads();
    const int slice = (warp.n * V::WARPS_M + warp.m) * V::SUMS * 32 + warp.lane;
    constexpr int SLICE_STRIDE = V::WARPS_M * V::WARPS_N * V::SUMS * 32;
    if (warp.k > 0) {
#pragma unroll
      for (int s = 0; s < V::SUMS; ++s) {
        partial[(warp.k - 1) * SLICE_STRIDE + slice + s * 32] =
            sums[s / 4 / V::MMAS_N][s / 4 % V::MMAS_N][s % 4];
      }
    }
    __syncthreads();
    if (V::SPLITS == 1 && warp.k > 0) return;
#pragma unroll
    for (int other = 0; warp.k == 0 && other < V::WARPS_K - 1; ++other) {
#pragma unroll
      for (int s = 0; s < V::SUMS; ++s) {
        sums[s / 4 / V::MMAS_N][s / 4 % V::MMAS_N][s % 4] += partial[other * SLICE_STRIDE + slice + s * 32];
      }
    }
  }

  // Pair `pair` of the sums: of mma (i, j), its upper or lower 8 rows.
  __device__ __forceinline__ float2 pair_of_sums(int pair) const {
    const float (&values)[4] = sums[pair / 2 / V::MMAS_N][pair / 2 % V::MMAS_N];
    return make_float2(values[pair % 2 * 2], values[pair % 2 * 2 + 1]);
  }
};

// Adds bias and what is there, and stores.
template <typename V>
struct TileEpilogue {
  using T = typename V::T;
  using Out = typename V::Out;
  const ProductOperands<T, Out>& operands;
  const TilePlace<V>& place;
  const WarpPlace<V>& warp;

  __device__ __forceinline__ void store(int row, int column, float2 values) const {
    if (row >= operands.num_rows || column >= operands.out_features) return;
    const bool second = V::ALIGNED || column + 1 < operands.out_features;
    Out* const to = operands.out + static_cast<long long>(row) * operands.out_features + column;
    if (operands.bias != nullptr) {
      values.x += to_float(operands.bias[column]);
      if (second) values.y += to_float(operands.bias[column + 1]);
    }
    if (operands.accumulate) {
      values.x += to_float(load_updated(to));
      if (second) values.y += to_float(load_updated(to + 1));
    }
    const Vec<Out, 2> pair = {from_float<Out>(values.x), from_float<Out>(values.y)};
    if constexpr (V::ALIGNED) {
      pair.store(to);
    } else {
      to[0] = pair[0];
      if (second) to[1] = pair[1];
    }
  }

  __device__ __forceinline__ void store_pair(int pair, int warp_m, int warp_n, float2 values) const {
    const int row = warp_m * V::WARP_M + pair / 2 / V::MMAS_N * 16 + pair % 2 * 8 + warp.lane / 4;
    const int column = warp_n * V::WARP_N + pair / 2 % V::MMAS_N * 8 + warp.lane % 4 * 2;
    store(place.row0 + row, place.column0 + column, values);
  }

  __device__ __forceinline__ void store_sums(const WarpProducts<V>& products) const {
#pragma unroll
    for (int pair = 0; pair < V::PAIRS; ++pair) store_pair(pair, warp.m, warp.n, products.pair_of_sums(pair));
  }

  // A part of the tile, from all blocks of the cluster in order. partial [warp][pair][lane], so that a warp
  // reads and writes whole lines.
  __device__ __forceinline__ void store_sums_of_cluster(const WarpProducts<V>& products,
                                                        float2* partial) const {
    copy_async_wait<0>();
    __syncthreads();
    if (warp.k == 0) {
#pragma unroll
      for (int pair = 0; pair < V::PAIRS; ++pair) {
        partial[(warp.warp * V::PAIRS + pair) * WARP_SIZE + warp.lane] = products.pair_of_sums(pair);
      }
    }
    cluster_barrier();
    constexpr int ROUNDS = V::WARPS_M * V::WARPS_N * V::PAIRS / V::SPLITS;  // of a warp's width
    static_assert(V::WARPS_M * V::WARPS_N * V::PAIRS % V::SPLITS == 0,
                  "the blocks of a cluster share a tile evenly");
    for (int i = warp.warp; i < ROUNDS; i += V::THREADS / WARP_SIZE) {
      const int pair = place.rank * ROUNDS + i;
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int other = 0; other < V::SPLITS; ++other) {
        const float2 part = load_cluster(partial + pair * WARP_SIZE + warp.lane, other);
        sum.x += part.x;
        sum.y += part.y;
      }
      const int pair_warp = pair / V::PAIRS;
      store_pair(pair % V::PAIRS, pair_warp % V::WARPS_M, pair_warp / V::WARPS_M, sum);
    }
    cluster_barrier();  // shared memory must last until all have read it
  }
};
