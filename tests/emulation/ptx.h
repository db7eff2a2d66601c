// The instructions that the kernels' asm statements name, `.` and `:` in their names as `_`.
#pragma once

#include <chrono>
#include <thread>

#include "cuda.h"

namespace emulated {

inline void check_rank(int rank) {
  if (rank < 0 || rank >= static_cast<int>(block->cluster->shared.size())) {
    fail("a block that is not of the cluster");
  }
}

// Of a size that the compiler knows, so that the stores are watched.
template <int BYTES>
void copy_bytes(const Copy& copy) {
  if (copy.from == nullptr) {
    std::memset(copy.to, 0, BYTES);
  } else {
    std::memcpy(copy.to, copy.from, BYTES);
  }
}

inline void finish_copy(const Copy& copy) {
  note_copy(copy.to, copy.bytes);
  if (copy.bytes == 16) copy_bytes<16>(copy);
  if (copy.bytes == 8) copy_bytes<8>(copy);
  if (copy.bytes == 4) copy_bytes<4>(copy);
}

inline void check_policy(unsigned long long policy) {
  if (policy != 1 && policy != 2) fail("a copy with a policy that nobody made");
}

inline void start_copy(std::uint32_t to, const void* from, int size, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(from) % size != 0) fail("a copy from a misaligned address");
  const Copy copy{at(to, size), bytes == 0 ? nullptr : from, size};
  if (late_copies) {
    note_copy(copy.to, size);
    self->copies.push_back(copy);
  } else {
    finish_copy(copy);
  }
}

template <typename T>
float low(std::uint32_t word);
template <typename T>
float high(std::uint32_t word);
template <>
inline float low<__half>(std::uint32_t word) {
  return __half2float({static_cast<std::uint16_t>(word)});
}
template <>
inline float high<__half>(std::uint32_t word) {
  return low<__half>(word >> 16);
}
template <>
inline float low<__nv_bfloat16>(std::uint32_t word) {
  return bits_as<float>(word << 16);
}
template <>
inline float high<__nv_bfloat16>(std::uint32_t word) {
  return bits_as<float>(word & 0xffff0000u);
}

template <typename T>
void mma_m16n8k16(float& c0, float& c1, float& c2, float& c3, std::uint32_t a0, std::uint32_t a1,
                  std::uint32_t a2, std::uint32_t a3, std::uint32_t b0, std::uint32_t b1, float, float, float,
                  float) {
  const std::uint32_t words[] = {a0, a1, a2, a3, b0, b1};
  const auto shown = show(~0u, words, 6);
  float* const c[] = {&c0, &c1, &c2, &c3};
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    float sum = *c[i];
    for (int k = 0; k < 16; k += 2) {
      const std::uint32_t a = shown[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const std::uint32_t b = shown[column * 4 + k % 8 / 2][4 + k / 8];
      sum += low<T>(a) * low<T>(b);
      sum += high<T>(a) * high<T>(b);
    }
    *c[i] = sum;
  }
}

inline void mma_e4m3(float& c0, float& c1, float& c2, float& c3, std::uint32_t a0, std::uint32_t a1,
                     std::uint32_t a2, std::uint32_t a3, std::uint32_t b0, std::uint32_t b1, float, float,
                     float, float) {
  const std::uint32_t words[] = {a0, a1, a2, a3, b0, b1};
  const auto shown = show(~0u, words, 6);
  float* const c[] = {&c0, &c1, &c2, &c3};
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    float sum = *c[i];
    for (int k = 0; k < 32; ++k) {
      const std::uint32_t a = shown[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2] >> k % 4 * 8;
      const std::uint32_t b = shown[column * 4 + k % 16 / 4][4 + k / 16] >> k % 4 * 8;
      sum += e4m3_value(a) * e4m3_value(b);
    }
    *c[i] = sum;
  }
}

// `A`: std::int8_t or std::uint8_t.
template <typename A>
void mma_bytes(int& c0, int& c1, int& c2, int& c3, std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
               std::uint32_t a3, std::uint32_t b0, std::uint32_t b1, int, int, int, int) {
  const std::uint32_t words[] = {a0, a1, a2, a3, b0, b1};
  const auto shown = show(~0u, words, 6);
  int* const c[] = {&c0, &c1, &c2, &c3};
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    int sum = *c[i];
    for (int k = 0; k < 32; ++k) {
      const std::uint32_t a = shown[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2] >> k % 4 * 8;
      const std::uint32_t b = shown[column * 4 + k % 16 / 4][4 + k / 16] >> k % 4 * 8;
      sum += static_cast<A>(a) * static_cast<std::int8_t>(b);
    }
    *c[i] = sum;
  }
}

template <bool TRANSPOSED>
void ldmatrix(std::uint32_t& r0, std::uint32_t& r1, std::uint32_t& r2, std::uint32_t& r3,
              std::uint32_t address) {
  const auto shown = show(~0u, &address, 1);
  std::uint32_t* const r[] = {&r0, &r1, &r2, &r3};
  for (int matrix = 0; matrix < 4; ++matrix) {
    const int g = lane() / 4, t = lane() % 4;
    for (int half = 0; half < 2; ++half) {
      const int row = TRANSPOSED ? 2 * t + half : g, column = TRANSPOSED ? g : 2 * t + half;
      std::uint16_t element;
      std::memcpy(&element, at(shown[matrix * 8 + row][0], 16) + column * 2, 2);
      const std::uint32_t shifted = std::uint32_t{element} << half * 16;
      *r[matrix] = half == 0 ? shifted : *r[matrix] | shifted;
    }
  }
}

}  // namespace emulated

// Bit i of the result is bit `table` of the index that the operands' bits i make, the first being the
// highest.
inline void ptx_lop3_b32(std::uint32_t& result, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                         int table) {
  result = 0;
  for (int i = 0; i < 32; ++i) {
    const int index = (a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1);
    result |= static_cast<std::uint32_t>(table >> index & 1) << i;
  }
}

inline void ptx_ex2_approx_ftz_f32(float& y, float x) {
  y = std::exp2(x);
  if (y < 1.17549435e-38f) y = 0;
}
inline void ptx_rcp_approx_ftz_f32(float& y, float x) { y = 1.0f / x; }
inline void ptx_griddepcontrol_wait() {}
inline void ptx_cp_async_bulk_prefetch_L2_global(const void* from, unsigned bytes) {
  const bool fits = reinterpret_cast<std::uintptr_t>(from) % 16 == 0 && bytes % 16 == 0 && bytes > 0;
  if (!fits) emulated::fail("a prefetch that is not of aligned units of 16 bytes");
}
inline void ptx_griddepcontrol_launch_dependents() {}

inline void ptx_createpolicy_fractional_L2__evict_first_b64(unsigned long long& policy, double) {
  policy = 1;
}
inline void ptx_createpolicy_fractional_L2__evict_unchanged_b64(unsigned long long& policy, double) {
  policy = 2;
}
inline void ptx_cp_async_cg_shared_global_L2__128B(std::uint32_t to, const void* from, int size, int bytes) {
  emulated::start_copy(to, from, size, bytes);
}
inline void ptx_cp_async_cg_shared_global_L2__256B(std::uint32_t to, const void* from, int size, int bytes) {
  ptx_cp_async_cg_shared_global_L2__128B(to, from, size, bytes);
}
inline void ptx_cp_async_cg_shared_global_L2__cache_hint_L2__128B(std::uint32_t to, const void* from,
                                                                  int size, int bytes,
                                                                  unsigned long long policy) {
  emulated::check_policy(policy);
  emulated::start_copy(to, from, size, bytes);
}
inline void ptx_cp_async_ca_shared_global_L2__128B(std::uint32_t to, const void* from, int size, int bytes) {
  emulated::start_copy(to, from, size, bytes);
}
inline void ptx_cp_async_commit_group() {
  emulated::self->groups.push_back(std::move(emulated::self->copies));
  emulated::self->copies.clear();
}
inline void ptx_cp_async_wait_group(int pending) {
  auto& groups = emulated::self->groups;
  for (; static_cast<int>(groups.size()) > pending; groups.pop_front()) {
    for (const emulated::Copy& copy : groups.front()) emulated::finish_copy(copy);
  }
}

inline void ptx_ld_global_nc_L1__no_allocate_v4_u32(unsigned& x, unsigned& y, unsigned& z, unsigned& w,
                                                    const void* from) {
  const uint4 v = *static_cast<const uint4*>(from);
  x = v.x, y = v.y, z = v.z, w = v.w;
}
inline void ptx_ld_global_nc_L1__no_allocate_L2__256B_v4_u32(unsigned& x, unsigned& y, unsigned& z,
                                                             unsigned& w, const void* from) {
  ptx_ld_global_nc_L1__no_allocate_v4_u32(x, y, z, w, from);
}
inline void ptx_ld_global_nc_u8(unsigned& v, const void* from) {
  v = *static_cast<const unsigned char*>(from);
}
inline void ptx_ld_global_L1__no_allocate_u32(unsigned& v, const void* from) {
  v = *static_cast<const unsigned*>(from);
}
inline void ptx_ld_global_L1__no_allocate_v2_u32(unsigned& x, unsigned& y, const void* from) {
  const uint2 v = *static_cast<const uint2*>(from);
  x = v.x, y = v.y;
}
inline void ptx_ld_global_L1__no_allocate_v4_u32(unsigned& x, unsigned& y, unsigned& z, unsigned& w,
                                                 const void* from) {
  ptx_ld_global_nc_L1__no_allocate_v4_u32(x, y, z, w, from);
}
inline void ptx_atom_acq_rel_gpu_global_inc_u32(unsigned& before, unsigned* counter, unsigned last) {
  std::atomic<unsigned>& value = *reinterpret_cast<std::atomic<unsigned>*>(counter);
  before = value;
  while (!value.compare_exchange_weak(before, before >= last ? 0 : before + 1)) {
  }
}

template <typename... P>
void ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(P&&... operands) {
  emulated::mma_m16n8k16<__nv_bfloat16>(operands...);
}
template <typename... P>
void ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(P&&... operands) {
  emulated::mma_m16n8k16<__half>(operands...);
}
template <typename... P>
void ptx_mma_sync_aligned_m16n8k32_row_col_f32_e4m3_e4m3_f32(P&&... operands) {
  emulated::mma_e4m3(operands...);
}
template <typename... P>
void ptx_mma_sync_aligned_m16n8k32_row_col_s32_u8_s8_s32(P&&... operands) {
  emulated::mma_bytes<std::uint8_t>(operands...);
}
template <typename... P>
void ptx_mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32(P&&... operands) {
  emulated::mma_bytes<std::int8_t>(operands...);
}
template <typename... P>
void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(P&&... operands) {
  emulated::ldmatrix<false>(operands...);
}
template <typename... P>
void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(P&&... operands) {
  emulated::ldmatrix<true>(operands...);
}

inline void ptx_cvt_rn_bf16x2_f32(unsigned& packed, float high, float low) {
  packed = std::uint32_t{__float2bfloat16_rn(high).bits} << 16 | __float2bfloat16_rn(low).bits;
}
inline void ptx_cvt_rn_f16x2_f32(unsigned& packed, float high, float low) {
  packed = std::uint32_t{__float2half_rn(high).bits} << 16 | __float2half_rn(low).bits;
}
inline void ptx_cvt_rn_satfinite_e4m3x2_f32(unsigned short& packed, float high, float low) {
  packed = static_cast<unsigned short>(e4m3_code(high) << 8 | e4m3_code(low));
}
inline void ptx_mov_b32(unsigned short& low, unsigned short& high, unsigned word) {
  low = static_cast<unsigned short>(word);
  high = static_cast<unsigned short>(word >> 16);
}
inline void ptx_cvt_rn_f16x2_e4m3x2(unsigned& halves, unsigned short codes) {
  halves = std::uint32_t{__float2half_rn(e4m3_value(codes >> 8)).bits} << 16 |
           __float2half_rn(e4m3_value(codes)).bits;
}

template <typename T>
void ptx_mov_u32_cluster_ctarank(T& rank) {
  rank = emulated::block->rank;
}
inline void ptx_barrier_cluster_arrive_release() {
  if (emulated::self->arrivals++ > emulated::self->waits) {
    emulated::fail("a thread arrives at a cluster twice and does not wait between");
  }
  emulated::self->cluster_order = emulated::block->cluster->arrive();
}
inline void ptx_barrier_cluster_wait_acquire() {
  if (emulated::self->arrivals == emulated::self->waits++) {
    emulated::fail("a thread waits for a cluster at which it has not arrived");
  }
  emulated::Cluster& cluster = *emulated::block->cluster;
  const unsigned wanted = emulated::self->waits;
  emulated::wait_for([&cluster, wanted] { return cluster.phase >= wanted; });
  emulated::follow(emulated::self->cluster_order);
}
inline void ptx_barrier_cluster_arrive_release_aligned() { ptx_barrier_cluster_arrive_release(); }
inline void ptx_barrier_cluster_wait_acquire_aligned() { ptx_barrier_cluster_wait_acquire(); }
inline void ptx_mapa_u64(unsigned long long& address, unsigned long long own, int rank) {
  emulated::check_rank(rank);
  address = own - reinterpret_cast<std::uintptr_t>(emulated::shared_bytes) +
            reinterpret_cast<std::uintptr_t>(emulated::block->cluster->shared[rank]);
}
inline void ptx_mapa_shared__cluster_u32(unsigned& address, unsigned own, int rank) {
  emulated::check_rank(rank);
  address = own | (rank + 1u) << emulated::RANK_SHIFT;
}
inline void ptx_ld_shared__cluster_v2_f32(float& x, float& y, unsigned address) {
  const float2 v = *reinterpret_cast<const float2*>(emulated::at(address, sizeof(float2)));
  x = v.x, y = v.y;
}

#include "sm90.h"

// Between devices, each of which is run by a thread of its own.
inline void ptx_st_release_sys_global_u32(unsigned* to, unsigned value) {
  reinterpret_cast<std::atomic<unsigned>*>(to)->store(value, std::memory_order_release);
}
inline void ptx_ld_acquire_sys_global_u32(unsigned& value, const unsigned* from) {
  std::this_thread::yield();
  value = reinterpret_cast<const std::atomic<unsigned>*>(from)->load(std::memory_order_acquire);
}
inline void ptx_fence_acq_rel_sys() { std::atomic_thread_fence(std::memory_order_acq_rel); }
inline void ptx_st_relaxed_sys_global_u64(unsigned long long* to, unsigned long long value) {
  reinterpret_cast<std::atomic<unsigned long long>*>(to)->store(value, std::memory_order_relaxed);
}
inline void ptx_st_relaxed_sys_global_v2_u64(unsigned long long* to, unsigned long long first,
                                             unsigned long long second) {
  auto* words = reinterpret_cast<std::atomic<unsigned long long>*>(to);
  words[0].store(first, std::memory_order_relaxed);
  words[1].store(second, std::memory_order_relaxed);
}
inline void ptx_ld_relaxed_sys_global_v2_u64(unsigned long long& first, unsigned long long& second,
                                             const unsigned long long* from) {
  std::this_thread::yield();
  const auto* words = reinterpret_cast<const std::atomic<unsigned long long>*>(from);
  first = words[0].load(std::memory_order_relaxed);
  second = words[1].load(std::memory_order_relaxed);
}
inline void ptx_mov_u64_globaltimer(unsigned long long& now) {
  now = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}
inline void ptx_trap() { emulated::fail("trap"); }
