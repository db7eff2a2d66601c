// Instructions between GPUs that see each other's memory.
#pragma once

// All that this thread has written, or seen written, is visible to a thread that sees the value.
__device__ __forceinline__ void store_release_system(unsigned* target, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(target), "r"(value) : "memory");
}

__device__ __forceinline__ unsigned load_acquire_system(const unsigned* source) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

// What this thread has read and written comes before what it writes from now on, for a thread that has seen
// the latter and has a fence of its own behind that.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// 8 bytes aligned, and as the two words below.
__device__ __forceinline__ void store_relaxed_system(unsigned long long* target, unsigned long long value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(target), "l"(value) : "memory");
}

// Two words, 16 bytes aligned. Each comes whole, and says nothing of others.
__device__ __forceinline__ void store_pair_relaxed_system(unsigned long long* target,
                                                          unsigned long long first,
                                                          unsigned long long second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(target), "l"(first), "l"(second)
               : "memory");
}

__device__ __forceinline__ void load_pair_relaxed_system(const unsigned long long* source,
                                                         unsigned long long& first,
                                                         unsigned long long& second) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second)
               : "l"(source)
               : "memory");
}

__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Ends the kernel, and all work of the device, with an error.
__device__ __forceinline__ void end_with_error() { asm volatile("trap;"); }
