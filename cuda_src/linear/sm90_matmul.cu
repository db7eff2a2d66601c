// Matrix product of many rows on sm_90a: TMA fills a ring of shared memory, two warp groups multiply from
// it. See matmul.cu for other devices and for what is not aligned.

#include "sm90_matmul.cuh"

// out[m, n] = sum over k of x[m, k] * weight[n, k], + bias[n], + out[m, n] if `accumulate`; if `silu_mul`,
// out[m, i] = silu(y[m, i]) * y[m, I + i] of the product y [num_rows, 2 I]. Sums in float32, rounded once.
//   in:  x_map: x [num_rows, in_features] T in boxes of TILE_M rows and 64 columns; x_tail_map: the same in
//        boxes of num_rows % TILE_M rows, for the last tile (rows beyond a matrix take longer to copy than
//        others); weight_map: weight [out_features, in_features] T in boxes of WARPGROUP_N rows, of half as
//        many if `silu_mul` or SHARING > 1, and 64 columns; bias [out_features] T or null
//   out: out [num_rows, out_features, or half of it if `silu_mul`] T or float. A float out takes no bias,
//        accumulate or silu_mul; it, warp groups of more than SPLITTABLE_N columns and SHARING > 1 take no
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
  __shared__ Barrier full[MAX_STAGES], empty[MAX_STAGES], received;
  T* const ring = reinterpret_cast<T*>(shared_memory);

  const int rank = SHARING > 1 ? cluster_rank() : 0;
  const int split = splits > 1 ? cluster_rank() : 0;
  const int steps = ceil_div(in_features, TILE_K);
  const int first_step = small_div(split * steps, splits);
  const int cluster_blocks = SHARING > 1 ? SHARING : splits;
  const Work<SHARING> work = {ceil_div(num_rows, V::TILE_M * SHARING),
                              ceil_div(out_features, V::TILE_N),
                              tiles_m_in_l2,
                              small_div(blockIdx.x, cluster_blocks),
                              small_div(gridDim.x, cluster_blocks),
                              first_step,
                              small_div((split + 1) * steps, splits) - first_step,
                              stages,
                              rank};

  if (threadIdx.x == CONSUMERS) {
    prefetch_map(weight_map);
    prefetch_map(x_map);
    prefetch_map(x_tail_map);
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      barrier_init(&full[i], PRODUCERS);
      barrier_init(&empty[i], CONSUMER_WARPS * SHARING);
    }
    barrier_init(&received, 1);
    barrier_init_done();
  }
  __syncthreads();
  if (SHARING > 1 || splits > 1) cluster_arrive();  // others may send from here on, and wait before they do
  if constexpr (SHARING > 1) cluster_wait();

  if (threadIdx.x >= CONSUMERS) {
    give_registers<40>();
    if (threadIdx.x == CONSUMERS) {
      // Weights do not change: their copies need not wait for earlier kernels.
      const unsigned long long policy =
          num_rows <= V::TILE_M ? evict_first_policy() : evict_unchanged_policy();
      const WeightCopies<V> copy = {ring, full, weight_map, out_features, rank, silu_mul, policy};
      RingPosition at = produce(work, empty, copy);
      let_next_kernel_start();
      if constexpr (SHARING > 1) {
        // The other block arrives here until it is through with every stage; its copies end before that.
#pragma unroll 1
        for (int i = 0; i < stages; ++i) {
          barrier_wait(&empty[at.stage], at.parity ^ 1);
          at.advance(stages);
        }
      }
    } else if (threadIdx.x == CONSUMERS + WARP_SIZE) {
      wait_for_earlier_kernels();
      fence_global_for_async();
      produce(work, empty, RowCopies<V>{ring, full, x_map, x_tail_map, num_rows});
    }
    if (splits > 1) cluster_wait();
    return;
  }

  take_registers<232>();
  multiply_tiles<V>(work, shared_memory, full, empty, &received, stages, split, splits, num_rows,
                    out_features, bias, out, silu_mul ? out_features / 2 : out_features, accumulate,
                    silu_mul);
}
