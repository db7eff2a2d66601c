// Memory instructions beyond plain loads and stores: asynchronous copies to shared memory (sm_80 and later)
// and loads that leave no trace in L1.
#pragma once

// Where something lies in shared memory, as instructions take it.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Start copying 16 bytes, both addresses 16-byte aligned; where not `valid` write zeros and read nothing. The
// rest of the 128-byte line is fetched into L2, since neighbours want it soon.
__device__ __forceinline__ void copy_async_16(unsigned shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, bool valid) {
  copy_async_16(shared_address(shared), global, valid);
}

// The same of one of many streams that go on where this ends: 256 bytes come to L2 at a time, so that
// memory's pages are not opened again for each of them.
__device__ __forceinline__ void copy_async_stream_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(16)
               : "memory");
}

// How copies treat L2. What is read once leaves it first, so that what every kernel comes back to,
// activations, tables and instructions, stays.
__device__ __forceinline__ unsigned long long evict_first_policy() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// The order in which lines leave stays as it is.
__device__ __forceinline__ unsigned long long evict_unchanged_policy() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_async_16(unsigned shared, const void* global, bool valid,
                                              unsigned long long policy) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared),
               "l"(global), "r"(bytes), "l"(policy)
               : "memory");
}

// Start copying 4, 8 or 16 bytes, both addresses aligned to them; as above. Not with a policy: where its
// number is known and a part of the address is uniform, ptxas 13.0 emits LDGSTS with uniform registers that
// nothing has set, and the GPU stops at an illegal instruction (13.5 sets them).
template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned shared, const void* global, bool valid) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "there are copies of 4, 8 and 16 bytes");
  const int bytes = valid ? BYTES : 0;
  if constexpr (BYTES == 16) {
    copy_async_16(shared, global, valid);
  } else if constexpr (BYTES == 8) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(shared), "l"(global),
                 "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4, %2;" ::"r"(shared), "l"(global),
                 "r"(bytes)
                 : "memory");
  }
}

// Close this thread's group of copies started since the last call.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most PENDING of this thread's youngest groups are unfinished. Other threads see the copied
// bytes after a barrier.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Start fetching `bytes` into L2, a multiple of 16 as the address is; below sm_90 it does nothing.
__device__ __forceinline__ void prefetch_l2(const void* global, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
#endif
}

// 16 bytes of memory that no kernel running now writes, read once: kept out of L1.
__device__ __forceinline__ uint4 load_once_16(const void* global) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global));
  return v;
}

// 4, 8 or 16 bytes of what an earlier kernel wrote, kept out of L1. Unlike .cg and .volatile, which must ask
// the one place that all multiprocessors agree on, these come from the nearer half of L2 where it has them.
__device__ __forceinline__ void load_past_l1(unsigned& v, const void* global) {
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(global) : "memory");
}
__device__ __forceinline__ void load_past_l1(uint2& v, const void* global) {
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(global)
               : "memory");
}
__device__ __forceinline__ void load_past_l1(uint4& v, const void* global) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global)
               : "memory");
}
