// The instructions that only sm_90a has, and the named barriers and fences that go with them.
#pragma once

#include <tuple>

#include "cuda.h"
#include "tensor_map.h"

namespace emulated {

// ---- mbarriers ----

// Does something to an mbarrier, wherever in the cluster it is; ends the launch if it returns what is wrong.
template <typename Action>
void with_mbarrier(std::uint32_t address, const Action& action) {
  const int rank = rank_of(address);
  const char* wrong = wrong_access(address, sizeof(std::uint64_t), sizeof(std::uint64_t));
  if (wrong == nullptr) {
    const std::lock_guard guard(block->cluster->lock);
    Block* const of = block->cluster->blocks[rank];
    if (of == nullptr) {
      wrong = "an mbarrier of a block that has ended";
    } else if (const auto found = of->mbarriers.find(offset_of(address)); found == of->mbarriers.end()) {
      wrong = "an mbarrier that was not made";
    } else {
      wrong = action(found->second);
    }
  }
  if (wrong != nullptr) fail(wrong);
}

inline void make_mbarrier(std::uint32_t address, unsigned arrivals) {
  at(address, sizeof(std::uint64_t));
  if (arrivals == 0 || arrivals >= 1u << 20) fail("an mbarrier counts from 1 to 2^20 - 1 arrivals");
  bool fits;
  {
    const std::lock_guard guard(block->cluster->lock);
    auto& all = block->mbarriers;
    const auto [found, is_new] = all.try_emplace(address);
    Mbarrier& barrier = found->second;
    if (is_new) barrier.number = all.size() - 1;
    barrier.expected = barrier.missing = arrivals;
    barrier.bytes = 0;
    barrier.phase = 0;
    barrier.published = false;
    barrier.order = barrier.ended = {};
    fits = all.size() <= MOST_MBARRIERS;
  }
  if (!fits) fail("more mbarriers in a block than are watched");
}

// Returns once the phase of this parity has ended, or before: a try_wait may time out.
inline bool try_wait(std::uint32_t address, unsigned parity) {
  Mbarrier* waited = nullptr;
  with_mbarrier(address, [&](Mbarrier& barrier) -> const char* {
    waited = &barrier;
    return nullptr;
  });
  if (late_copies && !waited->has_ended(parity) && !std::exchange(self->timed_out, true)) return false;
  self->timed_out = false;
  wait_for([waited, parity] { return waited->has_ended(parity); });
  Order order;
  {
    const std::lock_guard guard(block->cluster->lock);
    order = waited->ended;
  }
  follow(order);
  return true;
}

// ---- copies ----

// What a bulk copy is from when it is started to when it lands.
struct BulkCopy {
  int from_rank;
  Moment issued;
  const void* calls[CALLS];
  const void* trace;
};

inline void fail_copy(const BulkCopy& copy, const std::string& what) {
  fail(what + ", started at " + place_of(copy.calls, CALLS));
}

inline BulkCopy begin_copy() {
  BulkCopy copy{block->rank, moment(), {}, emulated::trace()};
  find_calls(copy.calls);
  return copy;
}

// Does it now, or when no thread of the block can go on.
inline void run_copy(std::function<void()> copy) {
  if (late_copies) {
    block->in_flight.push_back(std::move(copy));
  } else {
    copy();
  }
}

// Bytes have landed in block `rank`, where `landed` notes them: they count towards the mbarrier there.
template <typename Landed>
void land(const BulkCopy& copy, int rank, std::uint32_t barrier, std::uint32_t bytes, const Landed& landed) {
  const char* wrong = nullptr;
  {
    const std::lock_guard guard(block->cluster->lock);
    Block* const of = block->cluster->blocks[rank];
    if (of == nullptr) {
      wrong = "a copy to a block that has ended";
    } else if (const auto found = of->mbarriers.find(offset_of(barrier)); found == of->mbarriers.end()) {
      wrong = "a copy that counts towards an mbarrier that was not made";
    } else if (!found->second.published) {
      wrong = "a copy that counts towards an mbarrier made without fence.mbarrier_init";
    } else {
      Mbarrier& to = found->second;
      const unsigned actor = rank * (block->cluster->threads + MOST_MBARRIERS) + block->cluster->threads + to.number;
      landed(BulkAccess{copy.issued, actor, to.phase + 1, copy.trace});
      note_arrival_of_copy(to.order, actor, to.phase + 1);
      wrong = to.receive(bytes);
    }
  }
  if (wrong != nullptr) fail_copy(copy, wrong);
}

inline TensorMap map_at(unsigned long long address) {
  TensorMap map;
  if (address % 64 != 0) fail("a tensor map at an address that is no multiple of 64");
  std::memcpy(&map, reinterpret_cast<const void*>(address), sizeof(map));
  if (map.magic != TensorMap::MAGIC) fail("what should be a tensor map is none");
  return map;
}

// A box to each block of `blocks`, a bit each.
inline void start_box(std::uint32_t to, unsigned long long map_address, std::initializer_list<int> coordinates,
                      std::uint32_t barrier, unsigned blocks) {
  const TensorMap map = map_at(map_address);
  if (map.rank != coordinates.size()) fail("a tensor map of other dimensions than the copy");
  const std::uint32_t bytes = map.box_bytes();
  if (const char* const wrong = wrong_access(to, bytes, 128)) fail(wrong);
  at(barrier, sizeof(std::uint64_t));
  if (blocks == 0 || blocks >> block->cluster->shared.size() != 0) fail("a copy to blocks that do not exist");
  std::vector<std::int32_t> box(coordinates);
  run_copy([=, copy = begin_copy()] {
    for (int rank = 0; rank < static_cast<int>(block->cluster->shared.size()); ++rank) {
      if (!(blocks >> rank & 1)) continue;
      land(copy, rank, barrier, bytes, [&](const BulkAccess& access) {
        note_bulk(access, memory_of(rank) + offset_of(to), bytes, true);
        map.copy_box(memory_of(rank), offset_of(to), box.data());
      });
    }
  });
}
inline void start_box(std::uint32_t to, unsigned long long map, std::initializer_list<int> coordinates,
                      std::uint32_t barrier) {
  start_box(to, map, coordinates, barrier, 1u << rank_of(to));
}

// From this block's shared memory to that of the block that `to` and `barrier` name.
inline void start_bulk(std::uint32_t to, std::uint32_t from, unsigned bytes, std::uint32_t barrier) {
  if (bytes % 16 != 0) fail("a bulk copy of bytes that are no multiple of 16");
  for (const std::uint32_t address : {to, from}) {
    if (const char* const wrong = wrong_access(address, bytes, 16)) fail(wrong);
  }
  if (rank_of(to) != rank_of(barrier)) fail("a bulk copy that counts in another block than it goes to");
  const int rank = rank_of(to);
  run_copy([=, copy = begin_copy()] {
    unsigned char* const source = memory_of(copy.from_rank) + offset_of(from);
    unsigned char* const target = memory_of(rank) + offset_of(to);
    land(copy, rank, barrier, bytes, [&](const BulkAccess& access) {
      note_bulk(access, source, bytes, false);
      note_bulk(access, target, bytes, true);
      std::memcpy(target, source, bytes);
    });
  });
}

// ---- named barriers ----

// Arrives at one of a block's named barriers and, if it `waits`, returns once all `threads` have.
inline void meet_at(int name, int threads, bool waits) {
  if (name <= 0 || name >= static_cast<int>(NAMED_BARRIERS)) fail("no name of a barrier");
  if (threads <= 0 || threads % LANES != 0) fail("a barrier of threads that are no whole warps");
  Barrier& barrier = block->named[name];
  if (barrier.arrived > 0 && static_cast<int>(barrier.threads) != threads) fail("a barrier of different counts");
  barrier.threads = threads;
  const unsigned generation = barrier.generation;
  const Order joined = arrive_at(barrier);
  if (static_cast<int>(barrier.arrived) == threads) barrier.end_generation();
  if (!waits) return;
  wait_for([&barrier, generation] { return barrier.generation != generation; });
  follow(joined);
}

// ---- products ----

inline MatrixLayout layout(unsigned long long descriptor, bool transposed) {
  constexpr unsigned LINE_BYTES[] = {0, 128, 64, 32};
  const auto field = [&](unsigned at) { return static_cast<std::uint32_t>(descriptor >> at & 0x3fff) << 4; };
  const MatrixLayout found{field(0), field(16), field(32), LINE_BYTES[descriptor >> 62], transposed};
  if ((descriptor >> 49 & 7) != 0) fail("a matrix descriptor with an offset of its base is not emulated");
  if (transposed && found.line_bytes == 0) fail("a transposed matrix without swizzle is not emulated");
  return found;
}

// This lane's share of what its warp reads: rows or columns `first` to `end` of the operand.
inline void note_operand(const MatrixLayout& operand, unsigned first, unsigned end) {
  const auto note = [](std::uint32_t address) {
    if (const char* const wrong = wrong_access(address, 16, 16)) fail(wrong);
    note_product(memory_of(block->rank) + address, 16, self->groups_begun);
  };
  if (operand.transposed) {
    const unsigned segments = (end - first) / 8, count = segments * Product::K;
    for (unsigned i = lane(); i < count; i += LANES) note(operand.at(first + i % segments * 8, i / segments));
  } else {
    for (unsigned i = lane(); i < (end - first) * 2; i += LANES) note(operand.at(first + i / 2, i % 2 * 8));
  }
}

inline float in_flight() { return bits_as<float>(0x7fc0f1f1u); }  // NaN, in sums that nobody may touch

inline void check_untouched(const Product& product) {
  for (const float* sum : product.sums) {
    if (bits_as<std::uint32_t>(*sum) != bits_as<std::uint32_t>(in_flight())) {
      fail("sums of a product in flight were changed");
    }
  }
  for (std::size_t i = 0; i < product.registers.size(); ++i) {
    if (*product.registers[i] != product.words[i]) fail("registers that a product in flight reads were changed");
  }
}

// Products that this thread has started and not waited for, in their order.
inline std::vector<Product*> flying() {
  std::vector<Product*> found;
  for (auto& group : self->product_groups) {
    for (Product& product : group) found.push_back(&product);
  }
  for (Product& product : self->products) found.push_back(&product);
  return found;
}

inline void check_same_in_group(const Product& product, std::uint64_t a, std::uint64_t b) {
  std::uint64_t same = 0;
  for (const std::uint64_t part : {a, b, std::uint64_t{product.columns}, std::uint64_t{product.adds}}) {
    same = (same ^ part) * 0x9e3779b97f4a7c15u;
  }
  auto& started = block->warpgroups[self->index / WARPGROUP].products;
  if (self->products_begun == started.size()) started.push_back(same);
  if (started[self->products_begun++] != same) fail("threads of a warp group start different products");
}

inline void start_product(Product product) {
  Product* previous = nullptr;  // that has the same sums
  for (Product* const other : flying()) {
    if (other->sums == product.sums) {
      previous = other;
    } else if (other->sums.front() == product.sums.front()) {
      fail("a product into some of the sums of another one in flight");
    }
  }
  if (!self->products_fenced && (previous == nullptr || product.a_in_registers)) {
    fail("a product without wgmma.fence after what touched its registers");
  }
  if (!product.a_in_registers) note_operand(product.a, product.warp * 16, product.warp * 16 + 16);
  note_operand(product.b, 0, product.columns);
  if (previous != nullptr) {
    check_untouched(*previous);
    if (!late_copies) product.before = previous->before;
  } else {
    for (float* const sum : product.sums) product.before.push_back(std::exchange(*sum, in_flight()));
  }
  if (!late_copies) product.multiply(memory_of(block->rank));
  self->products.push_back(std::move(product));
}

// The oldest group is done: its sums are there, but those that a product in flight goes on with.
inline void finish_group() {
  std::vector<Product> group = std::move(self->product_groups.front());
  self->product_groups.pop_front();
  const std::vector<Product*> later = flying();
  for (std::size_t i = 0; i < group.size(); ++i) {
    Product& product = group[i];
    check_untouched(product);
    if (late_copies) product.multiply(memory_of(block->rank));
    Product* next = nullptr;
    for (std::size_t j = group.size(); j-- > i + 1;) {
      if (group[j].sums == product.sums) next = &group[j];
    }
    for (std::size_t j = 0; j < later.size() && next == nullptr; ++j) {
      if (later[j]->sums == product.sums) next = later[j];
    }
    if (next == nullptr) {
      for (std::size_t sum = 0; sum < product.sums.size(); ++sum) *product.sums[sum] = product.before[sum];
    } else if (late_copies) {
      next->before = std::move(product.before);
    }
  }
}

// Operands as the instruction has them: sums, a descriptor or four registers of A, a descriptor of B, whether
// to add, signs of A and B, and for each that is in shared memory whether it is transposed.
template <Element ELEMENT, int COLUMNS, typename... P>
void wgmma(P&&... operands) {
  constexpr std::size_t SUMS = COLUMNS / 2, REST = sizeof...(P) - SUMS;
  constexpr bool A_IN_REGISTERS = REST == 9;
  static_assert(A_IN_REGISTERS || REST == 7, "as many operands as the instruction has");
  const auto all = std::forward_as_tuple(operands...);
  Product product{.element = ELEMENT, .columns = COLUMNS, .lane = lane()};
  product.warp = self->index % WARPGROUP / LANES;
  product.a_in_registers = A_IN_REGISTERS;
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    product.sums = {&std::get<I>(all)...};
  }(std::make_index_sequence<SUMS>{});
  constexpr std::size_t B = SUMS + (A_IN_REGISTERS ? 4 : 1);
  const std::uint64_t b = std::get<B>(all);
  product.adds = std::get<B + 1>(all);
  product.negates = (std::get<B + 2>(all) < 0) != (std::get<B + 3>(all) < 0);
  product.b = layout(b, std::get<sizeof...(P) - 1>(all));
  if constexpr (A_IN_REGISTERS) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      product.registers = {&std::get<SUMS + I>(all)...};
    }(std::make_index_sequence<4>{});
    for (int i = 0; i < 4; ++i) product.words[i] = *product.registers[i];
    check_same_in_group(product, 0, b);
    const auto shown = show(~0u, product.words, 4);
    const auto first = [](std::uint32_t word) {
      return ELEMENT == Element::BFLOAT16 ? low<__nv_bfloat16>(word) : low<__half>(word);
    };
    for (unsigned k = 0; k < Product::K; ++k) {
      for (unsigned h = 0; h < 2; ++h) {
        const std::uint32_t word = shown[lane() / 4 * 4 + k % 8 / 2][h + k / 8 * 2];
        product.rows[h][k] = first(k % 2 == 0 ? word : word >> 16);
      }
    }
  } else {
    const std::uint64_t a = std::get<SUMS>(all);
    product.a = layout(a, std::get<sizeof...(P) - 2>(all));
    check_same_in_group(product, a, b);
    meet(~0u);
  }
  start_product(std::move(product));
}

// ---- registers ----

inline void check_registers(unsigned count) {
  if (count % 8 != 0 || count < 24 || count > 256) fail("a number of registers that setmaxnreg does not take");
}

}  // namespace emulated

inline void ptx_mov_u32_laneid(int& lane) { lane = emulated::lane(); }
inline void ptx_setp_ne_b32(bool& p, int a, int b) { p = a != b; }

inline void ptx_mbarrier_init_shared__cta_b64(std::uint32_t barrier, int arrivals) {
  emulated::make_mbarrier(barrier, arrivals);
}
inline void ptx_fence_mbarrier_init_release_cluster() {
  const std::lock_guard guard(emulated::block->cluster->lock);
  for (auto& [address, barrier] : emulated::block->mbarriers) barrier.published = true;
}
inline void ptx_mbarrier_arrive_shared__cta_b64(std::uint32_t address) {
  emulated::with_mbarrier(address, [](emulated::Mbarrier& barrier) {
    emulated::release(barrier.order);
    return barrier.arrive();
  });
}
// A release at the scope of the block, wherever the barrier is: nothing that others read plainly is passed on.
inline void ptx_mbarrier_arrive_shared__cluster_b64(std::uint32_t address) {
  emulated::with_mbarrier(address, [address](emulated::Mbarrier& barrier) {
    if (emulated::rank_of(address) == emulated::block->rank) {
      emulated::release(barrier.order);
    } else {
      emulated::release_weakly(barrier.order);
    }
    return barrier.arrive();
  });
}
inline void ptx_mbarrier_arrive_expect_tx_shared__cta_b64(std::uint32_t address, unsigned bytes) {
  emulated::with_mbarrier(address, [bytes](emulated::Mbarrier& barrier) {
    emulated::release(barrier.order);
    const char* const wrong = barrier.expect(bytes);
    return wrong == nullptr ? barrier.arrive() : wrong;
  });
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

inline void ptx_prefetch_tensormap(unsigned long long map) { emulated::map_at(map); }
inline void ptx_cp_async_bulk_tensor_2d_shared__cluster_global_mbarrier__complete_tx__bytes(
    std::uint32_t to, unsigned long long map, int x, int y, std::uint32_t barrier) {
  emulated::start_box(to, map, {x, y}, barrier);
}
inline void ptx_cp_async_bulk_tensor_2d_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(
    std::uint32_t to, unsigned long long map, int x, int y, std::uint32_t barrier, unsigned long long policy) {
  emulated::check_policy(policy);
  emulated::start_box(to, map, {x, y}, barrier);
}
inline void ptx_cp_async_bulk_tensor_2d_shared__cluster_global_mbarrier__complete_tx__bytes_multicast__cluster(
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

// Lanes go on together from each of these, as `sync` says: one may then speak for all.
inline void ptx_wgmma_fence_sync_aligned() {
  emulated::meet(~0u);
  emulated::self->products_fenced = true;
}
inline void ptx_wgmma_commit_group_sync_aligned() {
  emulated::meet(~0u);
  emulated::self->product_groups.push_back(std::exchange(emulated::self->products, {}));
  ++emulated::self->groups_begun;
}
inline void ptx_wgmma_wait_group_sync_aligned(int pending) {
  auto& groups = emulated::self->product_groups;
  while (static_cast<int>(groups.size()) > pending) emulated::finish_group();
  emulated::note_products_done(emulated::self->groups_begun - groups.size());
  emulated::self->products_fenced = false;
  emulated::meet(~0u);
}

#define DEFINE_WGMMA(N)                                                                      \
  template <typename... P>                                                                   \
  void ptx_wgmma_mma_async_sync_aligned_m64n##N##k16_f32_bf16_bf16(P&&... operands) {        \
    emulated::wgmma<emulated::Element::BFLOAT16, N>(operands...);                            \
  }                                                                                          \
  template <typename... P>                                                                   \
  void ptx_wgmma_mma_async_sync_aligned_m64n##N##k16_f32_f16_f16(P&&... operands) {          \
    emulated::wgmma<emulated::Element::FLOAT16, N>(operands...);                             \
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
