// The functions and variables of CUDA C++ that the kernels use.
#pragma once

#include "fibers.h"

#define threadIdx (emulated::self->thread)
#define blockIdx (emulated::block_index)
#define blockDim (emulated::block_size)
#define gridDim (emulated::grid_size)

using std::isfinite;
using std::isnan;
using std::max;
using std::min;

inline void __syncthreads() { emulated::sync_threads(); }
inline void __syncwarp(unsigned mask = ~0u) {
  emulated::Order& order = emulated::warp().order;
  emulated::release(order);
  const emulated::Order joined = order;
  emulated::meet(mask);
  emulated::follow(joined);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
  return emulated::from_lane(mask, value, source % emulated::LANES);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  return emulated::from_lane(mask, value, static_cast<int>(emulated::lane()) ^ distance);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
  return emulated::from_lane(mask, value, static_cast<int>(emulated::lane()) - static_cast<int>(distance));
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const std::uint32_t word = predicate != 0;
  const auto shown = emulated::show(mask, &word, 1);
  unsigned votes = 0;
  for (int lane = 0; lane < emulated::LANES; ++lane) {
    if (mask >> lane & 1) votes |= shown[lane][0] << lane;
  }
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  const auto shown = emulated::show(mask, &value, 1);
  unsigned sum = 0;
  for (int lane = 0; lane < emulated::LANES; ++lane) {
    if (mask >> lane & 1) sum += shown[lane][0];
  }
  return sum;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  const auto shown = emulated::show(mask, &value, 1);
  unsigned largest = 0;
  for (int lane = 0; lane < emulated::LANES; ++lane) {
    if (mask >> lane & 1) largest = std::max(largest, shown[lane][0]);
  }
  return largest;
}

// Bytes of `a` (0 to 3) and `b` (4 to 7), by four nibbles whose highest bits are clear.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> i * 4 & 15;
    if (nibble > 7) emulated::fail("a byte permutation that replicates a sign");
    result |= static_cast<unsigned>(bytes >> nibble * 8 & 0xff) << i * 8;
  }
  return result;
}
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<std::uint64_t>(a) * b >> 32; }
inline float __int_as_float(int v) { return bits_as<float>(v); }
inline float __uint_as_float(unsigned v) { return bits_as<float>(v); }
inline unsigned __float_as_uint(float v) { return bits_as<unsigned>(v); }
inline float __uint2float_rn(unsigned v) { return static_cast<float>(v); }
inline unsigned __float2uint_rz(float v) {
  return !(v > 0) ? 0 : v >= 4294967296.0f ? ~0u : static_cast<unsigned>(v);
}
inline int __float2int_rn(float v) { return std::isnan(v) ? 0 : static_cast<int>(std::nearbyint(v)); }
inline unsigned __vmaxu2(unsigned a, unsigned b) {  // of each half
  return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return std::exp(v); }
inline float __logf(float v) { return std::log(v); }
inline void sincospif(float v, float* sine, float* cosine) {
  *sine = std::sin(M_PI * v), *cosine = std::cos(M_PI * v);
}
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
template <typename T>
T __ldcg(const T* from) {
  return *from;
}

// One fiber of one block runs at a time, blocks of a cluster apart.
template <typename T>
T atomicAdd(T* to, std::type_identity_t<T> value) {
  return reinterpret_cast<std::atomic<T>*>(to)->fetch_add(value);
}
template <typename T>
T atomicOr(T* to, std::type_identity_t<T> value) {
  return reinterpret_cast<std::atomic<T>*>(to)->fetch_or(value);
}
template <typename T>
T atomicMax(T* to, std::type_identity_t<T> value) {
  auto& place = *reinterpret_cast<std::atomic<T>*>(to);
  T before = place;
  while (before < value && !place.compare_exchange_weak(before, value)) {
  }
  return before;
}

inline unsigned atomicInc(unsigned* to, unsigned last) {
  auto& place = *reinterpret_cast<std::atomic<unsigned>*>(to);
  unsigned before = place;
  while (!place.compare_exchange_weak(before, before >= last ? 0 : before + 1)) {
  }
  return before;
}

inline std::uint32_t __cvta_generic_to_shared(const void* pointer) {
  return emulated::address_of(static_cast<const unsigned char*>(pointer));
}
