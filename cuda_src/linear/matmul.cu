// Matrix product on tensor cores for more rows of x than a decode step of 16; see matmul_decode.cu for those.

#include "cluster.cuh"
#include "common.cuh"
#include "generated/matmul.cuh"
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

// The work of one block; see the kernels below. SPLITS blocks, a cluster, share a tile of out: each takes its
// part of k, and then adds its part of the tile from all of them in order.
template <typename T, typename Out, int TILE_M, int TILE_N, int TILE_K, int WARPS_M, int WARPS_N, int WARPS_K,
          int STAGES, bool ALIGNED, int SPLITS>
__device__ __forceinline__ void multiply_tile(const T* x, const T* weight, const T* bias, Out* out,
                                              int num_rows, int out_features, int in_features,
                                              int accumulate) {
  constexpr int THREADS = 32 * WARPS_M * WARPS_N * WARPS_K;
  constexpr int SEGMENTS_PER_ROW = TILE_K / SEGMENT;
  constexpr int WARP_M = TILE_M / WARPS_M;
  constexpr int WARP_N = TILE_N / WARPS_N;
  constexpr int MMAS_M = WARP_M / 16;
  constexpr int MMAS_N = WARP_N / 8;
  constexpr int STEPS = TILE_K / 16 / WARPS_K;
  constexpr int STAGE_ELEMENTS = (TILE_M + TILE_N) * TILE_K;
  static_assert(sizeof(T) == 2, "tensor-core matmul takes bfloat16 or float16");
  static_assert(SEGMENTS_PER_ROW == 4 || SEGMENTS_PER_ROW % 8 == 0, "TILE_K must be 32 or a multiple of 64");
  static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "a warp's tile must be made of 16x16 pieces");
  static_assert(STEPS % 2 == 0, "each warp needs an even number of k steps for its two sets of fragments");
  static_assert(STAGES >= 2, "copies need a stage to run ahead in");
  constexpr int PARTIALS = WARPS_K > 1 ? WARPS_K - 1 : SPLITS > 1;
  static_assert(PARTIALS * TILE_M * TILE_N * sizeof(float) <= STAGES * STAGE_ELEMENTS * sizeof(T),
                "partial sums of the k slices must fit into the stages");

  extern __shared__ __align__(128) unsigned char shared_memory[];
  T* const stages = reinterpret_cast<T*>(shared_memory);

  const int tiles_m = ceil_div(num_rows, TILE_M);
  const int tiles_n = ceil_div(out_features, TILE_N);
  const int tile = blockIdx.x / SPLITS;
  const int rank = blockIdx.x % SPLITS;
  const int group_begin = tile / (TILE_ROWS_IN_L2 * tiles_n) * TILE_ROWS_IN_L2;
  const int group_rows = min(tiles_m - group_begin, TILE_ROWS_IN_L2);
  const int in_group = tile - group_begin * tiles_n;
  const int row0 = (group_begin + in_group % group_rows) * TILE_M;
  const int column0 = in_group / group_rows * TILE_N;

  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int warp_m = warp % WARPS_M;
  const int warp_n = warp / WARPS_M % WARPS_N;
  const int warp_k = warp / (WARPS_M * WARPS_N);

  const int tiles_k = ceil_div(in_features, TILE_K);
  const int first_tile_k = tiles_k * rank / SPLITS;
  const int num_tiles_k = tiles_k * (rank + 1) / SPLITS - first_tile_k;
  constexpr bool ONE_TILE = TILE_M <= 32;  // of rows; larger ones are for more rows
  auto load_weight = [&](int tile_k) {
    if (tile_k >= num_tiles_k) return;
    T* const to = stages + tile_k % STAGES * STAGE_ELEMENTS + TILE_M * TILE_K;
    load_tile<T, TILE_N, TILE_K, THREADS, ALIGNED, ONE_TILE>(to, weight, column0, out_features,
                                                             (first_tile_k + tile_k) * TILE_K, in_features);
  };
  auto load_x = [&](int tile_k) {
    if (tile_k >= num_tiles_k) return;
    T* const to = stages + tile_k % STAGES * STAGE_ELEMENTS;
    load_tile<T, TILE_M, TILE_K, THREADS, ALIGNED, false>(to, x, row0, num_rows,
                                                          (first_tile_k + tile_k) * TILE_K, in_features);
  };

  unsigned a[2][MMAS_M][4];
  unsigned b[2][MMAS_N][2];
  const int row_a = warp_m * WARP_M + lane % 16;
  const int row_b = warp_n * WARP_N + lane % 8 + lane / 16 * 8;
  auto load_fragments = [&](int set, int tile_k, int step) {
    const T* tile_x = stages + tile_k % STAGES * STAGE_ELEMENTS;
    const T* tile_weight = tile_x + TILE_M * TILE_K;
    const int segment = (warp_k * STEPS + step) * 2;
#pragma unroll
    for (int i = 0; i < MMAS_M; ++i) {
      ldmatrix_x4(a[set][i],
                  tile_x + swizzled<SEGMENTS_PER_ROW>(row_a + i * 16, segment + lane / 16) * SEGMENT);
    }
#pragma unroll
    for (int j = 0; j < MMAS_N; j += 2) {
      unsigned r[4];
      ldmatrix_x4(r,
                  tile_weight + swizzled<SEGMENTS_PER_ROW>(row_b + j * 8, segment + lane / 8 % 2) * SEGMENT);
      b[set][j][0] = r[0];
      b[set][j][1] = r[1];
      b[set][j + 1][0] = r[2];
      b[set][j + 1][1] = r[3];
    }
  };

  float sums[MMAS_M][MMAS_N][4] = {};
  // Groups are committed also where empty, because the waits count them.
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    load_weight(stage);
    copy_async_commit();
  }
  let_next_kernel_start();
  wait_for_earlier_kernels();
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    load_x(stage);
    copy_async_commit();
  }
  copy_async_wait<STAGES - 2>();
  __syncthreads();
  load_fragments(0, 0, 0);

  // Fragments are read one step ahead of their use, so the next tile's first are read in this tile's last
  // step.
  for (int tile_k = 0; tile_k < num_tiles_k; ++tile_k) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      if (step == STEPS - 1) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        load_fragments((step + 1) % 2, tile_k + 1, 0);
      } else {
        load_fragments((step + 1) % 2, tile_k, step + 1);
      }
      if (step == 0) {
        load_weight(tile_k + STAGES - 1);
        load_x(tile_k + STAGES - 1);
        copy_async_commit();
      }
#pragma unroll
      for (int i = 0; i < MMAS_M; ++i) {
#pragma unroll
        for (int j = 0; j < MMAS_N; ++j) mma_m16n8k16<T>(sums[i][j], a[step % 2][i], b[step % 2][j]);
      }
    }
  }

  if constexpr (WARPS_K > 1) {
    copy_async_wait<0>();
    __syncthreads();
    constexpr int SUMS = MMAS_M * MMAS_N * 4;
    float* const partial = reinterpret_cast<float*>(shared_memory);
    const int slice = (warp_n * WARPS_M + warp_m) * SUMS * 32 + lane;
    constexpr int SLICE_STRIDE = WARPS_M * WARPS_N * SUMS * 32;
    if (warp_k > 0) {
#pragma unroll
      for (int s = 0; s < SUMS; ++s) {
        partial[(warp_k - 1) * SLICE_STRIDE + slice + s * 32] = sums[s / 4 / MMAS_N][s / 4 % MMAS_N][s % 4];
      }
    }
    __syncthreads();
    if (SPLITS == 1 && warp_k > 0) return;
#pragma unroll
    for (int other = 0; warp_k == 0 && other < WARPS_K - 1; ++other) {
#pragma unroll
      for (int s = 0; s < SUMS; ++s) {
        sums[s / 4 / MMAS_N][s / 4 % MMAS_N][s % 4] += partial[other * SLICE_STRIDE + slice + s * 32];
      }
    }
  }

  auto store = [&](int row, int column, float value0, float value1) {
    if (row >= num_rows || column >= out_features) return;
    const bool second = ALIGNED || column + 1 < out_features;
    Out* const to = out + static_cast<long long>(row) * out_features + column;
    if (bias != nullptr) {
      value0 += to_float(bias[column]);
      if (second) value1 += to_float(bias[column + 1]);
    }
    if (accumulate) {
      value0 += to_float(load_updated(to));
      if (second) value1 += to_float(load_updated(to + 1));
    }
    const Vec<Out, 2> pair = {from_float<Out>(value0), from_float<Out>(value1)};
    if constexpr (ALIGNED) {
      pair.store(to);
    } else {
      to[0] = pair[0];
      if (second) to[1] = pair[1];
    }
  };

  // Pairs of neighbouring columns: of mma `i`, `j` of a warp, its upper or lower 8 rows.
  constexpr int PAIRS = MMAS_M * MMAS_N * 2;
  auto store_pair = [&](int pair, int pair_warp_m, int pair_warp_n, float value0, float value1) {
    const int row = pair_warp_m * WARP_M + pair / 2 / MMAS_N * 16 + pair % 2 * 8 + lane / 4;
    const int column = pair_warp_n * WARP_N + pair / 2 % MMAS_N * 8 + lane % 4 * 2;
    store(row0 + row, column0 + column, value0, value1);
  };
  if constexpr (SPLITS == 1) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      const float (&values)[4] = sums[pair / 2 / MMAS_N][pair / 2 % MMAS_N];
      store_pair(pair, warp_m, warp_n, values[pair % 2 * 2], values[pair % 2 * 2 + 1]);
    }
  } else {
    // [warp][pair][lane], so that a warp reads and writes whole lines.
    float2* const partial = reinterpret_cast<float2*>(shared_memory);
    copy_async_wait<0>();
    __syncthreads();
    if (warp_k == 0) {
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        const float (&values)[4] = sums[pair / 2 / MMAS_N][pair / 2 % MMAS_N];
        partial[(warp * PAIRS + pair) * WARP_SIZE + lane] =
            make_float2(values[pair % 2 * 2], values[pair % 2 * 2 + 1]);
      }
    }
    cluster_barrier();
    constexpr int ROUNDS = WARPS_M * WARPS_N * PAIRS / SPLITS;  // of a warp's width
    static_assert(WARPS_M * WARPS_N * PAIRS % SPLITS == 0, "the blocks of a cluster share a tile evenly");
    for (int i = warp; i < ROUNDS; i += THREADS / WARP_SIZE) {
      const int pair = rank * ROUNDS + i;
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int other = 0; other < SPLITS; ++other) {
        const float2 part = load_cluster(partial + pair * WARP_SIZE + lane, other);
        sum.x += part.x;
        sum.y += part.y;
      }
      const int pair_warp = pair / PAIRS;
      store_pair(pair % PAIRS, pair_warp % WARPS_M, pair_warp / WARPS_M, sum.x, sum.y);
    }
    cluster_barrier();  // shared memory must last until all have read it
  }
}

// out[m, n] = sum over k of x[m, k] * weight[n, k], + bias[n], + out[m, n] if `accumulate`; sums in float32.
//   in:  x [num_rows, in_features] T, weight [out_features, in_features] T, bias [out_features] T or null
//   out: out [num_rows, out_features] Out (T or float)
// Layout: row-major; ALIGNED: x and weight 16-byte aligned, in_features a multiple of 8, out_features even
// and out aligned to two elements.
// Grid: one block a tile of out, ceil(num_rows / TILE_M) * ceil(out_features / TILE_N).
// Block: 32 * WARPS_M * WARPS_N * WARPS_K threads.
// Shared memory: STAGES * (TILE_M + TILE_N) * TILE_K * sizeof(T).
// Unit of work: a warp keeps TILE_M / WARPS_M x TILE_N / WARPS_N of the tile in registers; WARPS_K warps
// share these outputs, each taking its slice of every TILE_K, and are added in order at the end. With
// WARPS_K = 1 an output is summed in steps of 16 in ascending k whatever the tile, so tiles with equal
// WARPS_K and TILE_K, and all with WARPS_K = 1, give equal bits.
template <typename T, typename Out, int TILE_M, int TILE_N, int TILE_K, int WARPS_M, int WARPS_N, int WARPS_K,
          int STAGES, bool ALIGNED>
__global__ void __launch_bounds__(32 * WARPS_M * WARPS_N * WARPS_K) matmul_kernel(MATMUL_PARAMS(T, Out)) {
  multiply_tile<T, Out, TILE_M, TILE_N, TILE_K, WARPS_M, WARPS_N, WARPS_K, STAGES, ALIGNED, 1>(
      x, weight, bias, out, num_rows, out_features, in_features, accumulate);
}

// The formula of matmul_kernel with split-K, for results of fewer tiles than the device has multiprocessors.
//   in:  x [num_rows, in_features] T, weight [out_features, in_features] T, bias [out_features] T or null
//   out: out [num_rows, out_features] Out (T or float)
// Layout: row-major; x and weight 16-byte aligned, in_features a multiple of 8, out_features even and out
// aligned to two elements.
// Grid: SPLITS neighbouring blocks, a cluster, for each tile of out.
// Block: 32 * WARPS_M * WARPS_N * WARPS_K threads.
// Shared memory: STAGES * (TILE_M + TILE_N) * TILE_K * sizeof(T).
// Unit of work: a block takes its part of k in whole TILE_K, then adds its part of the tile from all blocks;
// the order of a sum depends on in_features and SPLITS.
template <typename T, typename Out, int TILE_M, int TILE_N, int TILE_K, int WARPS_M, int WARPS_N, int WARPS_K,
          int STAGES, int SPLITS>
__global__ void BLOCKS_OF_A_CLUSTER(SPLITS) __launch_bounds__(32 * WARPS_M * WARPS_N * WARPS_K)
    matmul_split_kernel(MATMUL_PARAMS(T, Out)) {
  multiply_tile<T, Out, TILE_M, TILE_N, TILE_K, WARPS_M, WARPS_N, WARPS_K, STAGES, true, SPLITS>(
      x, weight, bias, out, num_rows, out_features, in_features, accumulate);
}
