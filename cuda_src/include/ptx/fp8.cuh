// Eight-bit floats (e4m3 of the OCP specification: bias 7, no infinity, 0x7f and 0xff are NaN), sm_89 and
// later, one function an instruction. Lane numbers as in mma.cuh.
#pragma once

// Two floats rounded to e4m3, `low` in the low byte; magnitudes above 448 become 448, NaN stays.
__device__ __forceinline__ unsigned short pack_e4m3(float low, float high) {
  unsigned short packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

// Four floats, the first in the lowest byte.
__device__ __forceinline__ unsigned pack_four_e4m3(const float* values) {
  return pack_e4m3(values[0], values[1]) | static_cast<unsigned>(pack_e4m3(values[2], values[3])) << 16;
}

// Two e4m3 as a pair of __half, exactly.
__device__ __forceinline__ unsigned unpack_e4m3(unsigned short codes) {
  unsigned halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  return halves;
}

// Four e4m3 as two pairs of __half, exactly. The conversion takes either half of a register, where a shift of
// it would be an instruction more.
__device__ __forceinline__ uint2 unpack_four_e4m3(unsigned codes) {
  uint2 halves;
  asm("{ .reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(halves.x), "=r"(halves.y)
      : "r"(codes));
  return halves;
}

// c[16x8] += a[16x32] b[32x8]. c as of m16n8k16. a, in fours of columns: {(g, 4t), (g+8, 4t), (g, 4t+16),
// (g+8, 4t+16)}. b, in fours of rows: {(4t, g), (4t+16, g)}.
__device__ __forceinline__ void mma_e4m3(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
