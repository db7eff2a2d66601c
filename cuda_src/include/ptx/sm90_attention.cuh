// What attention needs of sm_90a beside sm90.cuh.
#pragma once

#include "common.cuh"
#include "ptx/sm90.cuh"

// ---- order ----------------------------------------------------------------------------------------------

// Keep the compiler from moving uses of registers across products' fences and waits.
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

// ---- copies ---------------------------------------------------------------------------------------------

// Start copying a box of whole rows from row 8 * `group` on by a map of groups of eight rows; its bytes count
// towards `barrier`'s phase.
__device__ __forceinline__ void copy_row_groups(void* shared, const TensorMap& map, int group,
                                                Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %2, "
      "%3}], [%4];" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<unsigned long long>(&map)), "r"(0), "r"(group), "r"(shared_address(barrier))
      : "memory");
}

// ---- products of a warp group ---------------------------------------------------------------------------

// An operand in shared memory whose lines of 128 bytes are swizzled, in atoms of 8 lines. `stride` is the
// distance in bytes from 8 rows of keys to the next; `lead`, of an operand whose lines do not run along k,
// the one from 64 columns to the next.
struct SwizzledOperand {
  unsigned low;
  unsigned high;

  __device__ __forceinline__ SwizzledOperand(const void* shared, unsigned lead, unsigned stride)
      : low((shared_address(shared) & 0x3ffff) >> 4 | (lead >> 4) << 16), high(1u << 30 | stride >> 4) {}

  // The descriptor of what lies `bytes` further on.
  __device__ __forceinline__ unsigned long long at(unsigned bytes) const {
    return static_cast<unsigned long long>(high) << 32 | (low + bytes / 16);
  }
};

// Start sums[64xN] = a[64x16] b[16xN], + sums where `add`, with a in registers like mma.m16n8k16's and b's
// lines along N.
template <typename T>
__device__ __forceinline__ void wgmma_registers(float (&sums)[32], const unsigned* a, unsigned long long b,
                                                bool add);
template <typename T>
__device__ __forceinline__ void wgmma_registers(float (&sums)[64], const unsigned* a, unsigned long long b,
                                                bool add);

// clang-format off
#define DEFINE_WGMMA_REGISTERS(T, TYPE, N, FLOATS, NAMES, A, B, ADD)                                         \
  template <>                                                                                               \
  __device__ __forceinline__ void wgmma_registers<T>(float (&sums)[N / 2], const unsigned* a,               \
                                                     unsigned long long b, bool add) {                      \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES "}, {" A "}, "   \
                 B ", add, 1, 1, 1;\n}"                                                                     \
                 : FLOATS                                                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));         \
  }
#define DEFINE_WGMMA_REGISTERS_SIZES(T, TYPE)                                                                \
  DEFINE_WGMMA_REGISTERS(T, TYPE, 64, WGMMA_FLOATS_32, WGMMA_NAMES_32, "%32, %33, %34, %35", "%36", "%37")       \
  DEFINE_WGMMA_REGISTERS(T, TYPE, 128, WGMMA_FLOATS_64, WGMMA_NAMES_64, "%64, %65, %66, %67", "%68", "%69")
// clang-format on

DEFINE_WGMMA_REGISTERS_SIZES(__nv_bfloat16, "bf16")
DEFINE_WGMMA_REGISTERS_SIZES(__half, "f16")
