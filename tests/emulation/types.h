// CUDA C++ keywords and types.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static thread_local
#define __grid_constant__

struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};

struct uint3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename To, typename From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

struct __half {
  std::uint16_t bits;
};
struct __nv_bfloat16 {
  std::uint16_t bits;
};
struct __half2 {
  __half x, y;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __half2float(__half h) {
  const std::uint32_t sign = (h.bits & 0x8000u) << 16, magnitude = h.bits & 0x7fffu;
  if (magnitude >= 0x7c00) return bits_as<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  return bits_as<float>(sign | bits_as<std::uint32_t>(bits_as<float>(magnitude << 13) * 0x1p112f));
}
inline __half __float2half_rn(float f) {
  const auto bits = bits_as<std::uint32_t>(f);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
  if (std::isnan(f)) return {0x7fff};
  const float magnitude = std::fabs(f);
  if (magnitude >= 65520.0f) return {static_cast<std::uint16_t>(sign | 0x7c00u)};
  // What is too small for a full fraction is rounded by an addition to a multiple of 2^-24.
  const bool small = magnitude < 0x1p-14f;
  const std::uint32_t rounded = small
                                    ? bits_as<std::uint32_t>(magnitude + 0.5f) - bits_as<std::uint32_t>(0.5f)
                                    : (bits & 0x7fffffffu) - 0x38000000u + 0xfffu + (bits >> 13 & 1) >> 13;
  return {static_cast<std::uint16_t>(sign | rounded)};
}
inline float __bfloat162float(__nv_bfloat16 b) { return bits_as<float>(std::uint32_t{b.bits} << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  if (std::isnan(f)) return {0x7fff};
  const auto bits = bits_as<std::uint32_t>(f);
  return {static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline __half2 __floats2half2_rn(float low, float high) {
  return {__float2half_rn(low), __float2half_rn(high)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
}
inline __half2 __hmul2(__half2 a, __half2 b) {
  return {__float2half_rn(__half2float(a.x) * __half2float(b.x)),
          __float2half_rn(__half2float(a.y) * __half2float(b.y))};
}
inline __half2 __hsub2(__half2 a, __half2 b) {
  return {__float2half_rn(__half2float(a.x) - __half2float(b.x)),
          __float2half_rn(__half2float(a.y) - __half2float(b.y))};
}
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {__float2bfloat16_rn(__bfloat162float(a.x) - __bfloat162float(b.x)),
          __float2bfloat16_rn(__bfloat162float(a.y) - __bfloat162float(b.y))};
}
// Sums that lie between two elements to within 2^-24 may be rounded the other way.
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return {__float2half_rn(std::fma(__half2float(a.x), __half2float(b.x), __half2float(c.x))),
          __float2half_rn(std::fma(__half2float(a.y), __half2float(b.y), __half2float(c.y)))};
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return {__float2bfloat16_rn(std::fma(__bfloat162float(a.x), __bfloat162float(b.x), __bfloat162float(c.x))),
          __float2bfloat16_rn(std::fma(__bfloat162float(a.y), __bfloat162float(b.y), __bfloat162float(c.y)))};
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {__float2bfloat16_rn(__bfloat162float(a.x) * __bfloat162float(b.x)),
          __float2bfloat16_rn(__bfloat162float(a.y) * __bfloat162float(b.y))};
}
inline __half2 __habs2(__half2 a) {
  return {{static_cast<std::uint16_t>(a.x.bits & 0x7fffu)}, {static_cast<std::uint16_t>(a.y.bits & 0x7fffu)}};
}
inline __nv_bfloat162 __habs2(__nv_bfloat162 a) {
  return {{static_cast<std::uint16_t>(a.x.bits & 0x7fffu)}, {static_cast<std::uint16_t>(a.y.bits & 0x7fffu)}};
}
inline __half2 __hmax2(__half2 a, __half2 b) {
  return {__float2half_rn(std::fmax(__half2float(a.x), __half2float(b.x))),
          __float2half_rn(std::fmax(__half2float(a.y), __half2float(b.y)))};
}
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {__float2bfloat16_rn(std::fmax(__bfloat162float(a.x), __bfloat162float(b.x))),
          __float2bfloat16_rn(std::fmax(__bfloat162float(a.y), __bfloat162float(b.y)))};
}

// e4m3 of the OCP 8-bit floating point specification: bias 7, no infinity, 0x7f and 0xff are NaN.
inline float e4m3_value(unsigned char code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  float magnitude = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  if ((code & 0x7f) == 0x7f) magnitude = bits_as<float>(0x7fffffffu);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// Nearest even; what is larger than 448 becomes 448.
inline unsigned char e4m3_code(float value) {
  if (std::isnan(value)) return 0x7f;
  const unsigned char sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::min(std::fabs(value), 448.0f);
  int exponent;
  std::frexp(magnitude, &exponent);
  const int step = std::max(exponent - 4, -9);  // a unit of the last place is 2^step
  const float units = std::nearbyint(std::ldexp(magnitude, -step));
  if (units == 0) return sign;
  if (step == -9 && units < 8) return sign | static_cast<unsigned char>(units);
  const int carried = units == 16 ? 1 : 0;
  const int fraction = carried ? 0 : static_cast<int>(units) - 8;
  return sign | static_cast<unsigned char>((step + carried + 10) << 3 | fraction);
}
