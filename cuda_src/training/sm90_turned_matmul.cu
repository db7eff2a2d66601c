// The products of the backward on sm_90a, of operands as they lie: dx = dy W and dW = dy^T x without
// transposed copies. See ../linear/sm90_matmul.cu for the product whose operands have k along their rows.

#include "training/sm90_turned_ring.cuh"

// out[m, n] = sum over k of x[m, k] * weight[k, n], TURNED_X: of x[k, m] * weight[k, n], + out[m, n] if
// `accumulate`. Sums in float32. With gridDim.y slices of k, out[s, m, n] is the sum over slice s.
//   in:  x_map: x [num_rows, in_features] T in boxes of TILE_M rows and 64 columns, x_tail_map: the same in
//        boxes of num_rows % TILE_M rows, for the last tile; TURNED_X: both x [in_features, num_rows] T in
//        boxes of 64 rows and 64 columns; weight_map: weight [in_features, out_features] T in such boxes
//   out: out [slices, num_rows, out_features] T or float. A T out takes no accumulate and one slice
// Layout: row-major, 16-byte aligned, rows of the matrices multiples of 8; num_rows of a turned x and
// out_features may be less than what the matrix has. All maps with 128-byte swizzle.
// Grid: (blocks that walk over the tiles of TILE_M = 64 * WARPGROUPS_M rows by TILE_N = WARPGROUP_N * (2 /
// WARPGROUPS_M) columns, slices of k). SHARING > 1: clusters of that many along x, whose blocks take
// neighbouring rows of tiles (`tiles_m_in_l2` counts groups of these) and copy a part of each weight tile
// into all of them.
// Block: 384 threads: two warp groups that multiply, and one of which two threads copy.
// Shared memory: `stages` times (TILE_M + TILE_N) * 64 * sizeof(T) of the ring; for a T out
// CONSUMER_WARPS * WARP_ROWS * CHUNK_STRIDE results on their way out.
// Unit of work: one block a tile of a slice at a time, one warp group 64 rows by WARPGROUP_N columns of it.
template <typename T, typename Out, bool TURNED_X, int WARPGROUPS_M, int WARPGROUP_N, int SHARING>
__global__ void __launch_bounds__(384, 1) sm90_turned_matmul_kernel(SM90_TURNED_MATMUL_PARAMS(Out)) {
  using V = TurnedVariant<T, Out, TURNED_X, WARPGROUPS_M, WARPGROUP_N, SHARING>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ Barrier full[MAX_STAGES], empty[MAX_STAGES];
  T* const ring = reinterpret_cast<T*>(shared_memory);

  const int rank = SHARING > 1 ? cluster_rank() : 0;
  const int steps = ceil_div(in_features, TILE_K);
  const int slice = blockIdx.y, slices = gridDim.y;
  const int first_step = slice * steps / slices;
  const Work<SHARING> work = {ceil_div(num_rows, V::TILE_M * SHARING),
                              ceil_div(out_features, V::TILE_N),
                              tiles_m_in_l2,
                              static_cast<int>(blockIdx.x) / SHARING,
                              static_cast<int>(gridDim.x) / SHARING,
                              first_step,
                              (slice + 1) * steps / slices - first_step,
                              stages,
                              rank};

  if (threadIdx.x == CONSUMERS) {
    prefetch_map(weight_map);
    prefetch_map(x_map);
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      barrier_init(&full[i], PRODUCERS);
      barrier_init(&empty[i], CONSUMER_WARPS * SHARING);
    }
    barrier_init_done();
  }
  __syncthreads();
  if constexpr (SHARING > 1) {
    cluster_arrive();
    cluster_wait();
  }

  if (threadIdx.x >= CONSUMERS) {
    give_registers<40>();
    if (threadIdx.x == CONSUMERS) {
      fence_global_for_async();
      RingPosition at =
          produce(work, empty, TurnedWeightCopies<V>{ring, full, weight_map, out_features, rank});
      if constexpr (SHARING > 1) {
        // The other block arrives here until it is through with every stage; its copies end before that.
#pragma unroll 1
        for (int i = 0; i < stages; ++i) {
          barrier_wait(&empty[at.stage], at.parity ^ 1);
          at.advance(stages);
        }
      }
    } else if (threadIdx.x == CONSUMERS + WARP_SIZE) {
      fence_global_for_async();
      if constexpr (TURNED_X) {
        produce(work, empty, TurnedRowCopies<V>{ring, full, x_map, num_rows});
      } else {
        produce(work, empty, RowCopies<V>{ring, full, x_map, x_tail_map, num_rows});
      }
    }
    return;
  }

  take_registers<232>();
  multiply_turned_tiles<V>(work, shared_memory, full, empty, num_rows, out_features,
                           out + static_cast<long long>(slice) * num_rows * out_features, accumulate != 0);
}
