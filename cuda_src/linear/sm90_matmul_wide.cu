// Matrix product of many rows on sm_90a with tiles of three warp groups' rows: those reuse each tile of the
// weight in shared memory once more than the two of sm90_matmul.cu.

#include "linear/sm90_wide.cuh"

// out[m, n] = sum over k of x[m, k] * weight[n, k], + bias[n], + out[m, n] if `accumulate`; if `gated`,
// out[m, i] = f(y[m, i]) * y[m, I + i] of the product y [num_rows, 2 I], f SiLU or GELU as
// `gated` says (SILU_GATE, GELU_GATE). Sums in float32, rounded once.
//   in:  x_map: x [num_rows, in_features] T in boxes of TILE_M rows and 64 columns; weight_map: weight
//        [out_features, in_features] T in boxes of TILE_N / 2 rows and 64 columns; bias [out_features] T or
//        null
//   out: out [num_rows, out_features, or half of it if `gated`] T
// Layout: row-major, 16-byte aligned; in_features and the columns of out multiples of 8; both maps with
// 128-byte swizzle.
// Grid: clusters of two blocks that walk over pairs of neighbouring rows of tiles (`tiles_m_in_l2` counts
// these) and have the same tiles of the weight, which are read once.
// Block: 384 threads, all of which multiply: there are no registers for one more warp group.
// Shared memory: `stages` times (TILE_M + TILE_N) * 64 * sizeof(T) of the ring; WARPS * WARP_ROWS *
// CHUNK_STRIDE results on their way out.
// Unit of work: one block a tile of TILE_M rows by TILE_N columns at a time, one warp group 64 rows of it.
// The last warp that is through with a stage copies into it, the last block of a cluster the weight.
template <typename T>
__global__ void __launch_bounds__(WARPS* WARP_SIZE, 1) sm90_matmul_wide_kernel(SM90_MATMUL_WIDE_PARAMS(T)) {
  static_assert(sizeof(T) == 2, "the product is of 16-bit elements");
  constexpr int HALF_N = TILE_N / 2;
  constexpr int HALF_BLOCKS = HALF_N / 8;
  constexpr int X_ELEMENTS = TILE_M * TILE_K;
  constexpr int STAGE_ELEMENTS = X_ELEMENTS + TILE_N * TILE_K;
  constexpr int STAGE_BYTES = STAGE_ELEMENTS * sizeof(T);
  static_assert(HALF_N * TILE_K * sizeof(T) % SWIZZLE_REPEAT == 0, "boxes end where the swizzle repeats");
  static_assert(TILE_N % CHUNK_COLUMNS == 0, "chunks are whole");

  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ Barrier full[MAX_STAGES];
  __shared__ unsigned warps_through[MAX_STAGES], blocks_through[MAX_STAGES];
  T* const ring = reinterpret_cast<T*>(shared_memory);

  const int rank = cluster_rank();
  const int steps = ceil_div(in_features, TILE_K);
  const Work<SHARING> work = {ceil_div(num_rows, TILE_M * SHARING),
                              ceil_div(out_features, TILE_N),
                              tiles_m_in_l2,
                              static_cast<int>(blockIdx.x) / SHARING,
                              static_cast<int>(gridDim.x) / SHARING,
                              0,
                              steps,
                              stages,
                              rank};
  const int num_tiles = work.tiles_m * work.tiles_n;
  const int warp = uniform(threadIdx.x / WARP_SIZE);

  if (threadIdx.x == 0) {
    prefetch_map(weight_map);
    prefetch_map(x_map);
  }
  const WideRing counts = {full, warps_through, blocks_through, stages};
  counts.init();

  const auto copy_x = [&](int2 tile, int step, int stage) {
    copy_box(ring + stage * STAGE_ELEMENTS, x_map, tile.x * TILE_M, step * TILE_K, &full[stage]);
  };
  // Half `half` of a tile, to both blocks.
  const auto copy_weight = [&](int2 tile, int step, int stage, int half) {
    T* const to = ring + stage * STAGE_ELEMENTS + X_ELEMENTS;
    const int row = gated ? tile.y * HALF_N : tile.y * TILE_N;
    const int to_second = gated ? out_features / 2 : HALF_N;
    copy_box_to_blocks<SHARING>(to + half * HALF_N * TILE_K, weight_map, row + half * to_second,
                                step * TILE_K, &full[stage]);
  };

  const auto release = [&](int stage, int index, int2 tile, int step) {
    counts.release<STAGE_BYTES>(work, stage, index, tile, step, copy_x, copy_weight);
  };

  // Weights do not change, so that their copies need not wait for earlier kernels.
  if (threadIdx.x == 0) {
    fill_ring(work, steps, [&](int2 tile, int step, int stage) {
      barrier_arrive_expecting(&full[stage], STAGE_BYTES);
      copy_weight(tile, step, stage, rank);
    });
  }
  wait_for_earlier_kernels();
  fence_global_for_async();  // each warp may copy x
  if (threadIdx.x == 0) fill_ring(work, steps, copy_x);
  __syncwarp();

  const unsigned long long x_descriptor = operand_descriptor(ring + warp / 4 * WGMMA_M * TILE_K);
  const unsigned long long weight_descriptor = operand_descriptor(ring + X_ELEMENTS);
  RingPosition at;
  for (int index = work.first; index < num_tiles; index += work.stride) {
    const int2 tile = work.tile(index);
    float sums[TILE_N / 2];
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      barrier_wait(&full[at.stage], at.parity);
      const unsigned long long offset = at.stage * (STAGE_BYTES >> 4);
      multiply_stage<T, TILE_N>(sums, x_descriptor, weight_descriptor, offset, step > 0);
      wgmma_wait<1>();
      if (step > 0) release(previous, index, tile, step - 1);
      previous = at.stage;
      at.advance(stages);
    }

    const int out_columns = gated ? out_features / 2 : out_features;
    const int tile_columns = gated ? HALF_N : TILE_N;
    const int row0 = tile.x * TILE_M + warp * WARP_ROWS;
    const int column0 = tile.y * tile_columns;
    WarpTile<T, T, CHUNK_COLUMNS> result = {bias == nullptr ? nullptr : bias + column0,
                                            out + static_cast<long long>(row0) * out_columns + column0,
                                            num_rows - row0,
                                            min(tile_columns, out_columns - column0),
                                            out_columns,
                                            accumulate != 0,
                                            lane_id()};
    T* const staging = ring + stages * STAGE_ELEMENTS + warp * WARP_ROWS * CHUNK_STRIDE;
    // What is to be added comes while the last products run.
    uint4 residual[WarpTile<T, T, CHUNK_COLUMNS>::SEGMENTS];
    if (accumulate) result.load_chunk(residual, 0);
    wgmma_wait<0>();
    release(previous, index, tile, steps - 1);
    if (index + work.stride >= num_tiles) {
      let_next_kernel_start();
      cluster_arrive();
    }

    if (gated) multiply_gates<HALF_BLOCKS>(sums, sums + HALF_BLOCKS * 4, gated);
#pragma unroll
    for (int first = 0; first < TILE_N; first += CHUNK_COLUMNS) {
      if (first >= result.columns) break;
      result.lane = lane_id();  // anew: what follows from it for each chunk does not all fit into registers
      result.template store_chunk<CHUNK_COLUMNS>(sums + first / 2, first, staging, residual);
    }
  }
  cluster_wait();  // the other block no longer counts or copies here
}
