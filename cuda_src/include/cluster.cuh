// Blocks that work on one thing together and reach into each other's shared memory.
#pragma once

#include "common.cuh"

// BLOCKS blocks of a cluster (sm_90 and later). BLOCKS = 1 is a block by itself, on any architecture.
template <int BLOCKS>
struct Cluster {
  static __device__ __forceinline__ int rank() {
    if (BLOCKS == 1) return 0;
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
  }

  // All threads of all blocks must call the two in turn; what one wrote before `arrive`, to its own or
  // another block's shared memory, all see after `wait`. No block's memory may be touched before a first such
  // pair.
  static __device__ __forceinline__ void arrive() {
    if (BLOCKS > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  static __device__ __forceinline__ void wait() {
    if (BLOCKS > 1) {
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    } else {
      __syncthreads();
    }
  }
  static __device__ __forceinline__ void sync() {
    arrive();
    wait();
  }

  // Block `rank`'s instance of a variable in shared memory.
  template <typename T>
  static __device__ __forceinline__ T* at(T* shared, int rank) {
    if (BLOCKS == 1) return shared;
    unsigned long long address;
    asm("mapa.u64 %0, %1, %2;"
        : "=l"(address)
        : "l"(reinterpret_cast<unsigned long long>(shared)), "r"(rank));
    return reinterpret_cast<T*>(address);
  }
};

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
