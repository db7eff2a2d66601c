// Instructions of sm_90a, one function each: barriers in shared memory that count bytes, TMA,
// clusters of blocks, and matrix products of a warp group of 128 threads (PTX ISA 8.0 and later).
//
// Rings of shared memory: a producer waits for a slot's `empty` barrier, announces the bytes to its `full`
// barrier and starts the copies; consumers wait for `full`, use the slot and arrive at `empty`. A barrier's
// phases alternate between parity 0 and 1; waiting for parity 1 on a fresh barrier returns at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "generated/swizzle.cuh"
#include "generated/tensor_cores.cuh"
#include "ptx/copy.cuh"

using Barrier = unsigned long long;

// ---- barriers -------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

// After the thread's barrier_init calls, before a barrier among the threads (of the cluster) that use them.
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrive and let the phase wait for `bytes` more from TMA.
__device__ __forceinline__ void barrier_arrive_expecting(Barrier* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// Return once the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Count one in shared memory; whether it was the last of `of`, with which counting begins anew.
__device__ __forceinline__ bool count_is_last(unsigned* counter, unsigned of) {
  unsigned before;
  asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(shared_address(counter)), "r"(of - 1)
               : "memory");
  return before == of - 1;
}

// Named barriers 1 to 15 of a block, for `threads` threads that arrive or wait.
__device__ __forceinline__ void named_barrier_wait(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
// The same of a name and a number that the compiler knows.
template <int NAME, int THREADS>
__device__ __forceinline__ void named_barrier_wait() {
  asm volatile("bar.sync %0, %1;" ::"n"(NAME), "n"(THREADS) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// ---- clusters -------------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier of all threads of all blocks of the cluster that have not ended, in two steps: shared memory
// written before an arrival is visible after the wait.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Arrive at `barrier`, of this block's shared memory, where it is in block `rank` of the cluster. It orders
// no plain accesses beyond this block, which would cost a fence of the whole device each time: it is for
// slots that only products read and only copies write.
__device__ __forceinline__ void barrier_arrive_in_block(Barrier* barrier, unsigned rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// As count_is_last with a counter of the cluster's first block, where `counter` is in this one; it orders as
// little as barrier_arrive_in_block.
__device__ __forceinline__ bool count_in_cluster_is_last(unsigned* counter, unsigned of) {
  unsigned before;
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, 0;\n"
      "atom.relaxed.cluster.shared::cluster.inc.u32 %0, [remote], %2;\n"
      "}"
      : "=r"(before)
      : "r"(shared_address(counter)), "r"(of - 1)
      : "memory");
  return before == of - 1;
}

// Start copying `bytes`, a multiple of 16, of this block's shared memory to where `to` is in block `rank` of
// the cluster; they count towards `barrier` there. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_to_block(void* to, const void* from, unsigned bytes, Barrier* barrier,
                                              unsigned rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote, remote_barrier;\n"
      "mapa.shared::cluster.u32 remote, %0, %4;\n"
      "mapa.shared::cluster.u32 remote_barrier, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [remote], [%1], %2, "
      "[remote_barrier];\n"
      "}" ::"r"(shared_address(to)),
      "r"(shared_address(from)), "r"(bytes), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}

// ---- copies ---------------------------------------------------------------------------------------------

// What cuTensorMapEncodeTiled writes: base, shape and strides of a matrix and the box that a copy moves. A
// kernel takes it as `const __grid_constant__ TensorMap`.
struct alignas(128) TensorMap {
  unsigned long long opaque[16];
};

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<unsigned long long>(&map)) : "memory");
}

// Start copying the box at (row, column) of the map's matrix to shared memory, zeros beyond the edges; its
// bytes count towards `barrier`'s phase.
__device__ __forceinline__ void copy_box(void* shared, const TensorMap& map, int row, int column,
                                         Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<unsigned long long>(&map)), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// The same by a policy for L2.
__device__ __forceinline__ void copy_box(void* shared, const TensorMap& map, int row, int column,
                                         Barrier* barrier, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<unsigned long long>(&map)), "r"(column), "r"(row), "r"(shared_address(barrier)),
      "l"(policy)
      : "memory");
}

// The same by a map of three dimensions, of which `column` is the innermost and `plane` the outermost.
__device__ __forceinline__ void copy_box(void* shared, const TensorMap& map, int plane, int row, int column,
                                         Barrier* barrier, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<unsigned long long>(&map)), "r"(column), "r"(row), "r"(plane),
      "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// The same to each of the first BLOCKS blocks of the cluster, where `shared` and `barrier` are in them: the
// box is read once.
template <int BLOCKS>
__device__ __forceinline__ void copy_box_to_blocks(void* shared, const TensorMap& map, int row, int column,
                                                   Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<unsigned long long>(&map)), "r"(column), "r"(row), "r"(shared_address(barrier)),
      "h"(static_cast<unsigned short>((1 << BLOCKS) - 1))
      : "memory");
}

// This thread's plain stores to shared memory are seen by copies and products that start after a barrier.
__device__ __forceinline__ void fence_shared_for_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// What earlier kernels wrote with plain stores is seen by this thread's copies.
__device__ __forceinline__ void fence_global_for_async() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- registers ------------------------------------------------------------------------------------------

// All warps of a warp group; a multiple of 8. The kernel must have a bound on its registers.
template <int COUNT>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- products of a warp group ---------------------------------------------------------------------------

// Where an operand lies: rows of 64 2-byte elements along k (128 bytes), 16-byte segments XORed with the row
// modulo 8 (what a map with 128-byte swizzle writes), 8 rows after 8 rows; `shared` a multiple of 1024. The
// operand 16 elements further along k is at descriptor + DESCRIPTOR_STEP_K.
__device__ __forceinline__ unsigned long long operand_descriptor(const void* shared) {
  constexpr unsigned long long SWIZZLE_128 = 1ull << 62;
  constexpr unsigned long long REPEAT = static_cast<unsigned long long>(SWIZZLE_REPEAT >> 4) << 32;
  return SWIZZLE_128 | REPEAT | (1ull << 16) | ((shared_address(shared) & 0x3ffff) >> 4);
}
constexpr unsigned long long DESCRIPTOR_STEP_K = 32 >> 4;

// Of an operand that lies 16 * `segments` bytes behind; its upper half, which is the same, stays a constant.
__device__ __forceinline__ unsigned long long descriptor_behind(unsigned long long descriptor,
                                                                unsigned segments) {
  return descriptor >> 32 << 32 | static_cast<unsigned>(descriptor) + segments;
}

// The same value, of which the compiler no longer knows where it comes from: what follows from it is neither
// found anew later on nor kept from before.
template <typename T>
__device__ __forceinline__ T unknown(T value) {
  static_assert(sizeof(T) == sizeof(int), "one register");
  asm volatile("" : "+r"(value));
  return value;
}

// A value that all lanes of a warp have, as one that the compiler knows they share: products must not be
// reached by paths that might diverge, and descriptors that follow from it need not be brought into uniform
// registers before each of them.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// Before the first product, and before one whose registers were touched since.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until at most PENDING of the youngest groups of products are unfinished.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Between a product's wait and what uses its sums, floats or ints: the compiler moves no use of them across.
template <int COUNT>
__device__ __forceinline__ void hold_registers(float (&values)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void hold_registers(int (&values)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

// Start sums[64xN] = a[64x16] b[Nx16]^T, + sums where `add`. Warp w of the group has rows 16 w to 16 w + 15;
// with g = lane / 4 and t = lane % 4, sums[4 j + i] is row g + i / 2 * 8, column 8 j + 2 t + i % 2.
template <typename T, int N>
__device__ __forceinline__ void wgmma(float (&sums)[N / 2], unsigned long long a, unsigned long long b,
                                      bool add);

// clang-format off
#define WGMMA_FLOATS_8(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), \
    "+f"(sums[i + 4]), "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define WGMMA_FLOATS_16(i) WGMMA_FLOATS_8(i), WGMMA_FLOATS_8(i + 8)
#define WGMMA_FLOATS_32 WGMMA_FLOATS_16(0), WGMMA_FLOATS_16(16)
#define WGMMA_FLOATS_48 WGMMA_FLOATS_32, WGMMA_FLOATS_16(32)
#define WGMMA_FLOATS_64 WGMMA_FLOATS_48, WGMMA_FLOATS_16(48)
#define WGMMA_FLOATS_80 WGMMA_FLOATS_64, WGMMA_FLOATS_16(64)
#define WGMMA_FLOATS_96 WGMMA_FLOATS_80, WGMMA_FLOATS_16(80)
#define WGMMA_FLOATS_112 WGMMA_FLOATS_96, WGMMA_FLOATS_16(96)
#define WGMMA_FLOATS_128 WGMMA_FLOATS_112, WGMMA_FLOATS_16(112)
#define WGMMA_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_32 WGMMA_NAMES_16 ", " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_48 WGMMA_NAMES_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_64 WGMMA_NAMES_48 ", " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_80 WGMMA_NAMES_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_96 WGMMA_NAMES_80 ", " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_112 WGMMA_NAMES_96 ", " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_NAMES_128 WGMMA_NAMES_112 ", " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define DEFINE_WGMMA(T, TYPE, N, FLOATS, NAMES, A, B, ADD)                                                \
  template <>                                                                                             \
  __device__ __forceinline__ void wgmma<T, N>(float (&sums)[N / 2], unsigned long long a,                 \
                                              unsigned long long b, bool add) {                           \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES "}, " A ", "  \
                 B ", add, 1, 1, 0, 0;\n}"                                                                \
                 : FLOATS                                                                                 \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                           \
  }
#define DEFINE_WGMMA_SIZES(T, TYPE) \
  DEFINE_WGMMA(T, TYPE, 32, WGMMA_FLOATS_16(0), WGMMA_NAMES_16, "%16", "%17", "%18") \
  DEFINE_WGMMA(T, TYPE, 64, WGMMA_FLOATS_32, WGMMA_NAMES_32, "%32", "%33", "%34") \
  DEFINE_WGMMA(T, TYPE, 96, WGMMA_FLOATS_48, WGMMA_NAMES_48, "%48", "%49", "%50") \
  DEFINE_WGMMA(T, TYPE, 128, WGMMA_FLOATS_64, WGMMA_NAMES_64, "%64", "%65", "%66") \
  DEFINE_WGMMA(T, TYPE, 160, WGMMA_FLOATS_80, WGMMA_NAMES_80, "%80", "%81", "%82") \
  DEFINE_WGMMA(T, TYPE, 192, WGMMA_FLOATS_96, WGMMA_NAMES_96, "%96", "%97", "%98") \
  DEFINE_WGMMA(T, TYPE, 224, WGMMA_FLOATS_112, WGMMA_NAMES_112, "%112", "%113", "%114") \
  DEFINE_WGMMA(T, TYPE, 256, WGMMA_FLOATS_128, WGMMA_NAMES_128, "%128", "%129", "%130")
// clang-format on

DEFINE_WGMMA_SIZES(__nv_bfloat16, "bf16")
DEFINE_WGMMA_SIZES(__half, "f16")
