// Matrix product on tensor cores for more rows of x than a decode step of 16; see matmul_decode.cu for those.

#include "generated/matmul.cuh"
#include "portable_product.cuh"

// The work of one block; see the kernels below. SPLITS blocks, a cluster, share a tile of out: each takes its
// part of k, and then adds its part of the tile from all of them in order.
template <typename V>
__device__ __forceinline__ void multiply_tile(
    const ProductOperands<typename V::T, typename V::Out>& operands) {
  using T = typename V::T;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  T* const stages = reinterpret_cast<T*>(shared_memory);
  const TilePlace<V> place(operands.num_rows, operands.out_features, operands.in_features);
  const WarpPlace<V> warp;
  const TileLoader<V> loader{operands, place, stages};

  // Groups are committed also where empty, because the waits count them.
#pragma unroll
  for (int stage = 0; stage < V::STAGES - 1; ++stage) {
    loader.load_weight(stage);
    copy_async_commit();
  }
  let_next_kernel_start();
  wait_for_earlier_kernels();
#pragma unroll
  for (int stage = 0; stage < V::STAGES - 1; ++stage) {
    loader.load_x(stage);
    copy_async_commit();
  }
  copy_async_wait<V::STAGES - 2>();
  __syncthreads();
  WarpProducts<V> products;
  products.load_fragments(stages, warp, 0, 0, 0);

  // Fragments are read one step ahead of their use, so the next tile's first are read in this tile's last
  // step.
  for (int tile_k = 0; tile_k < place.num_tiles_k; ++tile_k) {
#pragma unroll
    for (int step = 0; step < V::STEPS; ++step) {
      if (step == V::STEPS - 1) {
        copy_async_wait<V::STAGES - 2>();
        __syncthreads();
        products.load_fragments(stages, warp, (step + 1) % 2, tile_k + 1, 0);
      } else {
        products.load_fragments(stages, warp, (step + 1) % 2, tile_k, step + 1);
      }
      if (step == 0) {
        loader.load_weight(tile_k + V::STAGES - 1);
        loader.load_x(tile_k + V::STAGES - 1);
        copy_async_commit();
      }
      products.multiply(step % 2);
    }
  }

  if constexpr (V::WARPS_K > 1) {
    products.add_slices(reinterpret_cast<float*>(shared_memory), warp);
    if (V::SPLITS == 1 && warp.k > 0) return;
  }
  const TileEpilogue<V> epilogue{operands, place, warp};
  if constexpr (V::SPLITS == 1) {
    epilogue.store_sums(products);
  } else {
    epilogue.store_sums_of_cluster(products, reinterpret_cast<float2*>(shared_memory));
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
  multiply_tile<
      PortableVariant<T, Out, TILE_M, TILE_N, TILE_K, WARPS_M, WARPS_N, WARPS_K, STAGES, ALIGNED, 1>>(
      {x, weight, bias, out, num_rows, out_features, in_features, accumulate});
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
  multiply_tile<
      PortableVariant<T, Out, TILE_M, TILE_N, TILE_K, WARPS_M, WARPS_N, WARPS_K, STAGES, true, SPLITS>>(
      {x, weight, bias, out, num_rows, out_features, in_features, accumulate});
}
