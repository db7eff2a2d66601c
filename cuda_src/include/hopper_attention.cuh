// Instructions of sm_90a that attention needs, one function an instruction: barriers in shared memory, copies
// of boxes by tensor maps, products by groups of four warps (PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions").
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// ---- tensor maps ----------------------------------------------------------------------------------------

// What the driver makes of a tensor's address, shape and box; passed as `const __grid_constant__`.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Start copying the map's box whose first element is (column, row); its bytes count towards `barrier`.
__device__ __forceinline__ void copy_box(unsigned shared, const TensorMap& map, int column, int row,
                                         unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], "
      "[%4];" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The same with a map of [groups, lines of a row, 8, 64] elements: a box of whole groups of eight rows.
__device__ __forceinline__ void copy_box_4d(unsigned shared, const TensorMap& map, int group,
                                            unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, "
      "%2, %3}], [%4];" ::"r"(shared),
      "l"(&map), "r"(0), "r"(group), "r"(barrier)
      : "memory");
}

// ---- barriers -------------------------------------------------------------------------------------------

// A barrier's phase ends when `arrivals` have arrived and the expected bytes are there.
__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Make initialised barriers visible to copies.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expecting(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Wait until the phase of this parity has ended; the phases of a barrier have parities 0, 1, 0, ...
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Named barriers 1 to 15 of a block, for `threads` threads that arrive or wait.
__device__ __forceinline__ void named_barrier_wait(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Order this thread's ordinary writes to shared memory before later asynchronous reads of it.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Order what earlier kernels wrote to global memory before this thread's later copies.
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- registers ------------------------------------------------------------------------------------------

// All four warps of a group give registers back, or take them.
template <int REGISTERS>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- products -------------------------------------------------------------------------------------------

// A matrix of 2-byte elements in shared memory, its 16-byte units swizzled over 128 bytes: unit u of line l
// lies at u ^ l % 8. Eight lines of 128 bytes make an atom of 1024 aligned bytes. `lead` and `stride` are
// distances in bytes between atoms: of an operand whose reduced dimension is contiguous, `stride` along the
// other dimension; of one whose other dimension is contiguous, `lead` along that and `stride` along the
// reduced one.
struct SwizzledMatrix {
  unsigned low;
  unsigned high;

  __device__ __forceinline__ SwizzledMatrix(unsigned address, unsigned lead, unsigned stride)
      : low((address & 0x3ffff) >> 4 | (lead >> 4) << 16), high(1u << 30 | stride >> 4) {}

  // The operand that begins `bytes` further on.
  __device__ __forceinline__ unsigned long long at(unsigned bytes) const {
    return static_cast<unsigned long long>(high) << 32 | (low + bytes / 16);
  }
};

// A value that all lanes of a warp have, as one that the compiler knows they share.
__device__ __forceinline__ unsigned uniform(unsigned value) { return __shfl_sync(0xffffffffu, value, 0); }

// Before the first product, and after ordinary instructions wrote to registers of a product.
__device__ __forceinline__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void product_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until at most PENDING of the committed groups are unfinished.
template <int PENDING>
__device__ __forceinline__ void product_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keep the compiler from moving uses of registers across the products' fences and waits.
template <int N>
__device__ __forceinline__ void pin(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(unsigned (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

template <typename T>
constexpr bool is_bfloat16 = false;
template <>
constexpr bool is_bfloat16<__nv_bfloat16> = true;

// Accumulators below: of 64 rows a warp holds 16, and a lane of each 8 columns j, with g = lane / 4 and t =
// lane % 4, d[4j] to d[4j+3] = {(g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)}. Operands in registers are laid
// out like mma.m16n8k16's.

#define ACCUMULATORS_8(i)                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define ACCUMULATORS_32(i) \
  ACCUMULATORS_8(i), ACCUMULATORS_8(i + 8), ACCUMULATORS_8(i + 16), ACCUMULATORS_8(i + 24)

#define ACCUMULATOR_NAMES_32                                                \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define ACCUMULATOR_NAMES_64                                                         \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// d[64 x 128] = or += a[64 x 16] b[16 x 128], both in shared memory with the reduced dimension contiguous.
#define PRODUCT_SHARED(TYPE)                                                                \
  asm volatile(                                                                             \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                          \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " ACCUMULATOR_NAMES_64 \
      ", %64, %65, p, 1, 1, 0, 0;\n}"                                                       \
      : ACCUMULATORS_32(0), ACCUMULATORS_32(32)                                             \
      : "l"(a), "l"(b), "n"(ACCUMULATE ? 1 : 0))

template <typename T, bool ACCUMULATE>
__device__ __forceinline__ void product_shared(float (&d)[64], unsigned long long a, unsigned long long b) {
  if constexpr (is_bfloat16<T>) {
    PRODUCT_SHARED("bf16");
  } else {
    PRODUCT_SHARED("f16");
  }
}

// d[64 x N] += a[64 x 16] b[16 x N], a in registers, b in shared memory with N contiguous.
#define PRODUCT_REGISTERS_64(TYPE)                                                         \
  asm volatile(                                                                            \
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                           \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " ACCUMULATOR_NAMES_32 \
      ", {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"                                        \
      : ACCUMULATORS_32(0)                                                                 \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define PRODUCT_REGISTERS_128(TYPE)                                                         \
  asm volatile(                                                                             \
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                            \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " ACCUMULATOR_NAMES_64 \
      ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"                                         \
      : ACCUMULATORS_32(0), ACCUMULATORS_32(32)                                             \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <typename T>
__device__ __forceinline__ void product_registers(float (&d)[32], const unsigned* a, unsigned long long b) {
  if constexpr (is_bfloat16<T>) {
    PRODUCT_REGISTERS_64("bf16");
  } else {
    PRODUCT_REGISTERS_64("f16");
  }
}

template <typename T>
__device__ __forceinline__ void product_registers(float (&d)[64], const unsigned* a, unsigned long long b) {
  if constexpr (is_bfloat16<T>) {
    PRODUCT_REGISTERS_128("bf16");
  } else {
    PRODUCT_REGISTERS_128("f16");
  }
}

#undef PRODUCT_SHARED
#undef PRODUCT_REGISTERS_64
#undef PRODUCT_REGISTERS_128
#undef ACCUMULATOR_NAMES_32
#undef ACCUMULATOR_NAMES_64
#undef ACCUMULATORS_32
#undef ACCUMULATORS_8
