// The products of the backward on sm_90a with tiles of three warp groups' rows, as ../linear/
// sm90_matmul_wide.cu has them.

#include "linear/sm90_wide.cuh"
#include "training/sm90_turned.cuh"

// out[m, n] = sum over k of x[m, k] * weight[k, n], TURNED_X: of x[k, m] * weight[k, n], + out[m, n] if
// `accumulate`. Sums in float32. With gridDim.y slices of k, out[s, m, n] is the sum over slice s.
//   in:  x_map: x [num_rows, in_features] T in boxes of TILE_M rows and 64 columns, TURNED_X: x [in_features,
//        num_rows] T in boxes of 64 rows and 64 columns; weight_map: weight [in_features, out_features] T in
//        such boxes
//   out: out [slices, num_rows, out_features] T or float. A T out takes no accumulate and one slice
// Layout: row-major, 16-byte aligned, rows of the matrices multiples of 8; num_rows of a turned x may be less
// than what the matrix has. Both maps with 128-byte swizzle.
// Grid: (clusters of two blocks that walk over pairs of neighbouring rows of tiles, `tiles_m_in_l2` counting
// these, and have the same tiles of the weight, which are read once; slices of k).
// Block: 384 threads, all of which multiply.
// Shared memory: `stages` times (TILE_M + TILE_N) * 64 * sizeof(T) of the ring; for a T out WARPS *
// WARP_ROWS * CHUNK_STRIDE results on their way out.
// Unit of work: one block a tile of a slice at a time, one warp group 64 rows of it. The last warp that is
// through with a stage copies into it, the last block of a cluster the weight.
template <typename T, typename Out, bool TURNED_X>
__global__ void __launch_bounds__(WARPS* WARP_SIZE, 1) sm90_turned_wide_kernel(SM90_TURNED_WIDE_PARAMS(Out)) {
  static_assert(sizeof(T) == 2, "the product is of 16-bit elements");
  constexpr bool THROUGH_SHARED = sizeof(Out) == 2;
  constexpr int X_ELEMENTS = TILE_M * TILE_K;
  constexpr int STAGE_ELEMENTS = X_ELEMENTS + TILE_N * TILE_K;
  constexpr int STAGE_BYTES = STAGE_ELEMENTS * sizeof(T);
  constexpr int HALF_BOXES = TILE_N / 2 / LINE;  // of a block's part of the weight
  static_assert(TILE_N % (2 * LINE) == 0 && WGMMA_M == LINE, "tiles are whole boxes");

  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ Barrier full[MAX_STAGES];
  __shared__ unsigned warps_through[MAX_STAGES], blocks_through[MAX_STAGES];
  T* const ring = reinterpret_cast<T*>(shared_memory);

  const int rank = cluster_rank();
  const int all_steps = ceil_div(in_features, TILE_K);
  const int slices = gridDim.y;
  const int first_step = static_cast<int>(blockIdx.y) * all_steps / slices;
  const int steps = (static_cast<int>(blockIdx.y) + 1) * all_steps / slices - first_step;
  const Work<SHARING> work = {ceil_div(num_rows, TILE_M * SHARING),
                              ceil_div(out_features, TILE_N),
                              tiles_m_in_l2,
                              static_cast<int>(blockIdx.x) / SHARING,
                              static_cast<int>(gridDim.x) / SHARING,
                              first_step,
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
    T* const to = ring + stage * STAGE_ELEMENTS;
    const int row = tile.x * TILE_M, k = (first_step + step) * TILE_K;
    if constexpr (TURNED_X) {
#pragma unroll
      for (int i = 0; i < WARPGROUPS_M; ++i) {
        copy_box(to + i * BOX_ELEMENTS, x_map, k, row + i * LINE, &full[stage]);
      }
    } else {
      copy_box(to, x_map, row, k, &full[stage]);
    }
  };
  // Half `half` of a tile, to both blocks.
  const auto copy_weight = [&](int2 tile, int step, int stage, int half) {
    T* const to = ring + stage * STAGE_ELEMENTS + X_ELEMENTS;
#pragma unroll
    for (int i = half * HALF_BOXES; i < (half + 1) * HALF_BOXES; ++i) {
      copy_box_to_blocks<SHARING>(to + i * BOX_ELEMENTS, weight_map, (first_step + step) * TILE_K,
                                  tile.y * TILE_N + i * LINE, &full[stage]);
    }
  };

  const auto release = [&](int stage, int index, int2 tile, int step) {
    counts.release<STAGE_BYTES>(work, stage, index, tile, step, copy_x, copy_weight);
  };

  fence_global_for_async();  // each warp may copy
  if (threadIdx.x == 0) {
    fill_ring(work, steps, [&](int2 tile, int step, int stage) {
      barrier_arrive_expecting(&full[stage], STAGE_BYTES);
      copy_weight(tile, step, stage, rank);
      copy_x(tile, step, stage);
    });
  }
  __syncwarp();

  const T* const x = ring + warp / 4 * WGMMA_M * TILE_K;
  const unsigned long long x_descriptor = TURNED_X ? turned_descriptor<TILE_K>(x) : operand_descriptor(x);
  const unsigned long long weight_descriptor = turned_descriptor<TILE_K>(ring + X_ELEMENTS);
  RingPosition at;
  for (int index = work.first; index < num_tiles; index += work.stride) {
    const int2 tile = work.tile(index);
    float sums[TILE_N / 2];
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      barrier_wait(&full[at.stage], at.parity);
      const unsigned long long offset = at.stage * (STAGE_BYTES >> 4);
      multiply_turned_stage<T, TILE_N, TURNED_X>(sums, x_descriptor, weight_descriptor, offset, step > 0);
      wgmma_wait<1>();
      if (step > 0) release(previous, index, tile, step - 1);
      previous = at.stage;
      at.advance(stages);
    }
    wgmma_wait<0>();
    release(previous, index, tile, steps - 1);
    if (index + work.stride >= num_tiles) cluster_arrive();

    const int row0 = tile.x * TILE_M + warp * WARP_ROWS;
    const int column0 = tile.y * TILE_N;
    const long long row = static_cast<long long>(blockIdx.y) * num_rows + row0;
    WarpTile<T, Out, CHUNK_COLUMNS> result = {nullptr,         out + row * out_features + column0,
                                              num_rows - row0, min(TILE_N, out_features - column0),
                                              out_features,    !THROUGH_SHARED && accumulate != 0,
                                              lane_id()};
    if constexpr (THROUGH_SHARED) {
      T* const staging = ring + stages * STAGE_ELEMENTS + warp * WARP_ROWS * CHUNK_STRIDE;
      uint4 nothing[WarpTile<T, Out, CHUNK_COLUMNS>::SEGMENTS];
#pragma unroll
      for (int first = 0; first < TILE_N; first += CHUNK_COLUMNS) {
        if (first >= result.columns) break;
        result.lane = lane_id();  // anew: what follows from it for each chunk does not all fit into registers
        result.template store_chunk<CHUNK_COLUMNS>(sums + first / 2, first, staging, nothing);
      }
    } else {
      add_tile<T, TILE_N, 8>(sums, result);
    }
  }
  cluster_wait();  // the other block no longer counts or copies here
}
