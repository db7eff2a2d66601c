// The instructions that only sm_90a has, and the named barriers and fences that go with them.
#pragma once

#include "cuda.h"
#include "tma.h"
#include "wgmma.h"

namespace emulated {

inline void check_registers(unsigned count) {
  if (count % 8 != 0 || count < 24 || count > 256)
    fail("a number of registers that setmaxnreg does not take");
}

}  // namespace emulated

inline void ptx_mov_u32_laneid(int& lane) { lane = emulated::lane(); }
inline void ptx_setp_ne_b32(bool& p, int a, int b) { p = a != b; }

inline void ptx_mbarrier_init_shared__cta_b64(std::uint32_t barrier, int arrivals) {
  emulated::make_mbarrier(barrier, arrivals);
}
inline void ptx_fence_mbarrier_init_release_cluster() { emulated::publish_mbarriers(); }
inline void ptx_mbarrier_arrive_shared__cta_b64(std::uint32_t address) {
  emulated::arrive(address, emulated::Scope::BLOCK);
}
inline void ptx_mbarrier_arrive_shared__cluster_b64(std::uint32_t address) {
  emulated::arrive(address, emulated::Scope::BLOCK);
}
inline void ptx_mbarrier_arrive_release_cluster_shared__cluster_b64(std::uint32_t address) {
  emulated::arrive(address, emulated::Scope::CLUSTER);
}
inline void ptx_mbarrier_arrive_expect_tx_shared__cta_b64(std::uint32_t address, unsigned bytes) {
  emulated::arrive(address, emulated::Scope::BLOCK, bytes);
}
inline void ptx_mbarrier_try_wait_parity_shared__cta_b64(bool& done, std::uint32_t address, unsigned parity) {
  done = emulated::try_wait(address, parity);
}

// What counts in shared memory orders what its users did before, or with `relaxed` only that it is done.
inline void ptx_atom_acq_rel_cta_shared__cta_inc_u32(unsigned& before, std::uint32_t address, unsigned last) {
  before = atomicInc(reinterpret_cast<unsigned*>(emulated::at(address, 4)), last);
  const std::lock_guard guard(emulated::block->cluster->lock);
  emulated::Order& order = emulated::block->atomics[address];
  emulated::follow(order);
  emulated::release(order);
}
inline void ptx_atom_relaxed_cluster_shared__cluster_inc_u32(unsigned& before, std::uint32_t address,
                                                             unsigned last) {
  before = atomicInc(reinterpret_cast<unsigned*>(emulated::at(address, 4)), last);
  const std::lock_guard guard(emulated::block->cluster->lock);
  emulated::Order& order = emulated::block->cluster->atomics[address];
  emulated::follow_weakly(order);
  emulated::release_weakly(order);
}

inline void ptx_bar_sync(int name, int threads) { emulated::meet_at(name, threads, true); }
inline void ptx_bar_arrive(int name, int threads) { emulated::meet_at(name, threads, false); }

inline void ptx_fence_proxy_async_shared__cta() { emulated::fence_proxy(); }
inline void ptx_fence_proxy_async_global() {}

inline void ptx_prefetch_tensormap(unsigned long long map) { emulated::check_map(map); }
inline void ptx_cp_async_bulk_tensor_2d_shared__cluster_global_mbarrier__complete_tx__bytes(
    std::uint32_t to, unsigned long long map, int x, int y, std::uint32_t barrier) {
  emulated::start_box(to, map, {x, y}, barrier);
}
inline void ptx_cp_async_bulk_tensor_2d_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(
    std::uint32_t to, unsigned long long map, int x, int y, std::uint32_t barrier,
    unsigned long long policy) {
  emulated::check_policy(policy);
  emulated::start_box(to, map, {x, y}, barrier);
}
inline void ptx_cp_async_bulk_tensor_3d_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(
    std::uint32_t to, unsigned long long map, int x, int y, int z, std::uint32_t barrier,
    unsigned long long policy) {
  emulated::check_policy(policy);
  emulated::start_box(to, map, {x, y, z}, barrier);
}
inline void
ptx_cp_async_bulk_tensor_2d_shared__cluster_global_mbarrier__complete_tx__bytes_multicast__cluster(
    std::uint32_t to, unsigned long long map, int x, int y, std::uint32_t barrier, unsigned short blocks) {
  emulated::start_box(to, map, {x, y}, barrier, blocks);
}
inline void ptx_cp_async_bulk_tensor_4d_shared__cluster_global_mbarrier__complete_tx__bytes(
    std::uint32_t to, unsigned long long map, int x, int y, int z, int w, std::uint32_t barrier) {
  emulated::start_box(to, map, {x, y, z, w}, barrier);
}
inline void ptx_cp_async_bulk_shared__cluster_shared__cta_mbarrier__complete_tx__bytes(
    std::uint32_t to, std::uint32_t from, unsigned bytes, std::uint32_t barrier) {
  emulated::start_bulk(to, from, bytes, barrier);
}

inline void ptx_setmaxnreg_dec_sync_aligned_u32(unsigned count) {
  emulated::meet(~0u);
  emulated::check_registers(count);
  if (count > emulated::self->registers) emulated::fail("setmaxnreg.dec to more registers than there are");
  emulated::block->free_registers += std::exchange(emulated::self->registers, count) - count;
}
inline void ptx_setmaxnreg_inc_sync_aligned_u32(unsigned count) {
  emulated::meet(~0u);
  emulated::check_registers(count);
  if (count < emulated::self->registers) emulated::fail("setmaxnreg.inc to less registers than there are");
  const unsigned more = count - emulated::self->registers;
  emulated::wait_for([more] { return emulated::block->free_registers >= more; });
  emulated::block->free_registers -= more;
  emulated::self->registers = count;
}

inline void ptx_wgmma_fence_sync_aligned() { emulated::fence_products(); }
inline void ptx_wgmma_commit_group_sync_aligned() { emulated::close_group(); }
inline void ptx_wgmma_wait_group_sync_aligned(int pending) { emulated::wait_for_groups(pending); }

#define DEFINE_WGMMA(N)                                                                                 \
  template <typename A, typename... P>                                                                  \
  void ptx_wgmma_mma_async_sync_aligned_m64n##N##k16_f32_bf16_bf16(const emulated::Sums& d, const A& a, \
                                                                   P... p) {                            \
    emulated::start_product({emulated::Element::BFLOAT16, N}, d, a, p...);                              \
  }                                                                                                     \
  template <typename A, typename... P>                                                                  \
  void ptx_wgmma_mma_async_sync_aligned_m64n##N##k16_f32_f16_f16(const emulated::Sums& d, const A& a,   \
                                                                 P... p) {                              \
    emulated::start_product({emulated::Element::FLOAT16, N}, d, a, p...);                               \
  }                                                                                                     \
  inline void ptx_wgmma_mma_async_sync_aligned_m64n##N##k32_f32_e4m3_e4m3(                              \
      const emulated::Sums& d, unsigned long long a, unsigned long long b, bool adds, int sign_a,       \
      int sign_b) {                                                                                     \
    emulated::start_product({emulated::Element::E4M3, N}, d, a, b, adds, sign_a, sign_b, false, false); \
  }                                                                                                     \
  inline void ptx_wgmma_mma_async_sync_aligned_m64n##N##k32_s32_s8_s8(                                  \
      const emulated::Sums& d, unsigned long long a, unsigned long long b, bool adds) {                 \
    emulated::start_product({emulated::Element::INT8, N}, d, a, b, adds, 1, 1, false, false);           \
  }
DEFINE_WGMMA(8)
DEFINE_WGMMA(16)
DEFINE_WGMMA(32)
DEFINE_WGMMA(64)
DEFINE_WGMMA(96)
DEFINE_WGMMA(128)
DEFINE_WGMMA(160)
DEFINE_WGMMA(192)
DEFINE_WGMMA(224)
DEFINE_WGMMA(256)
#undef DEFINE_WGMMA

inline void ptx_stmatrix_sync_aligned_m8n8_x4_shared_b16(std::uint32_t address, std::uint32_t r0,
                                                         std::uint32_t r1, std::uint32_t r2,
                                                         std::uint32_t r3) {
  const std::uint32_t words[] = {address, r0, r1, r2, r3};
  const auto shown = emulated::show(~0u, words, 5);
  // Each lane stores the row whose address it gave: others' words, two elements each.
  unsigned char* const row = emulated::at(address, 16);
  const unsigned lane = emulated::lane();
  std::uint32_t segment[4];
  for (unsigned t = 0; t < 4; ++t) segment[t] = shown[lane % 8 * 4 + t][1 + lane / 8];
  *reinterpret_cast<uint4*>(row) = {segment[0], segment[1], segment[2], segment[3]};
}
