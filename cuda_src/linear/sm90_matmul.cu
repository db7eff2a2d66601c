// Matrix product of many rows on sm_90a: TMA fills a ring of shared memory, two warp groups multiply from
// it. See matmul.cu for other devices and for what is not aligned.

#include "linear/sm90_matmul.cuh"

// out[m, n] = sum over k of x[m, k] * weight[n, k], + bias[n], + out[m, n] if `accumulate`; if `gated`,
// out[m, i] = f(y[m, i]) * y[m, I + i] of the product y [num_rows, 2 I], f SiLU or GELU as
// `gated` says (SILU_GATE, GELU_GATE). Sums in float32, rounded once.
//   in:  x_map: x [num_rows, in_features] T in boxes of TILE_M rows and 64 columns; x_tail_map: the same in
//        boxes of num_rows % TILE_M rows, for the last tile (rows beyond a matrix take longer to copy than
//        others); weight_map: weight [out_features, in_features] T in boxes of WARPGROUP_N rows, of half as
//        many if `gated` or SHARING > 1, and 64 columns; bias [out_features] T or null
//   out: out [num_rows, out_features, or half of it if `gated`] T or float. A float out takes no bias,
//        accumulate or gated; it, warp groups of more than SPLITTABLE_N columns and SHARING > 1 take no
//        splits
// Layout: row-major, 16-byte aligned; in_features and the columns of out multiples of 8; all maps with
// 128-byte swizzle.
// Grid: blocks that walk over the tiles of TILE_M = 64 * WARPGROUPS_M rows by TILE_N = WARPGROUP_N * (2 /
// WARPGROUPS_M) columns. SHARING > 1: clusters of that many, whose blocks take neighbouring rows of tiles
// (`tiles_m_in_l2` counts groups of these) and copy a part of each weight tile into all of them, so that it
// is read once. splits > 1: a cluster of that many blocks a tile, each of which has a slice of k and finishes
// a share of the columns: the others send it their sums, added in the order of k.
// Block: 384 threads: two warp groups that multiply, and one of which two threads copy.
// Shared memory: `stages` times (TILE_M + TILE_N) * 64 * sizeof(T) of the ring; for a 16-bit out
// CONSUMER_WARPS * WARP_ROWS * CHUNK_STRIDE results on their way out; for the others' sums
// (splits - 1) * 2 * ceil(WARPGROUP_N / 16 / splits) * SLOT_BYTES.
// Unit of work: one block a tile at a time, one warp group 64 rows by WARPGROUP_N columns of it.
template <typename T, typename Out, int WARPGROUPS_M, int WARPGROUP_N, int SHARING>
__global__ void __launch_bounds__(384, 1) sm90_matmul_kernel(SM90_MATMUL_PARAMS(T, Out)) {
  using V = Variant<T, Out, WARPGROUPS_M, WARPGROUP_N, SHARING>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const auto multiply = [&](const RingBlock<V>& block) {
    multiply_tiles<V>(block.work, shared_memory, block.full, block.empty, block.received, stages, block.split,
                      splits, num_rows, out_features, bias, out, gated ? out_features / 2 : out_features,
                      accumulate, gated);
  };
  run_block<V>(shared_memory, x_map, x_tail_map, weight_map, ceil_div(in_features, TILE_K), num_rows,
               out_features, splits, tiles_m_in_l2, stages, gated, multiply);
}
