// Clusters of blocks that read each other's shared memory (sm_90 and later; PTX ISA, "Cluster of Cooperative
// Thread Arrays"). Kernels that use them are described with min_arch 90.
#pragma once

// Stands before __launch_bounds__ and makes every `blocks` neighbours along x of the grid a cluster.
#if __CUDA_ARCH__ >= 900
#define BLOCKS_OF_A_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define BLOCKS_OF_A_CLUSTER(blocks)
#endif

// All threads of the cluster must call; what each wrote to shared memory before is seen by all afterwards.
__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The two floats that block `rank` of the cluster has where this block has `shared`.
__device__ __forceinline__ float2 load_cluster(const float2* shared, int rank) {
  float2 v = make_float2(0.0f, 0.0f);
#if __CUDA_ARCH__ >= 900
  const unsigned own = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(rank));
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
#endif
  return v;
}
