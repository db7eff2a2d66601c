// What threads do to mbarriers, of their block or of others of the cluster.

#include "mbarrier.h"

#include "fibers.h"

namespace emulated {

namespace {

// Does something to an mbarrier, wherever in the cluster it is; ends the launch if it returns what is wrong.
template <typename Action>
void with_mbarrier(std::uint32_t address, const Action& action) {
  settle();
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

}  // namespace

void make_mbarrier(std::uint32_t address, unsigned arrivals) {
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
    barrier.order = barrier.ended = barrier.ended_before = {};
    fits = all.size() <= MOST_MBARRIERS;
  }
  if (!fits) fail("more mbarriers in a block than are watched");
}

bool try_wait(std::uint32_t address, unsigned parity) {
  Mbarrier* waited = nullptr;
  with_mbarrier(address, [&](Mbarrier& barrier) -> const char* {
    waited = &barrier;
    return nullptr;
  });
  if (late_copies && !waited->has_ended(parity) && !std::exchange(self->timed_out, true)) return false;
  self->timed_out = false;
  wait_for([waited, parity] { return waited->has_ended(parity); });
  Order order, before;
  {
    const std::lock_guard guard(block->cluster->lock);
    order = waited->ended;
    before = waited->ended_before;
  }
  // By parity alone a phase is the same as that two before it: who has not heard that the one between has
  // ended may come before its end, and the wait then returns at once.
  if (!is_known(before)) fail("a wait by parity that may return two phases too early");
  follow(order);
  return true;
}

void publish_mbarriers() {
  const std::lock_guard guard(block->cluster->lock);
  for (auto& [address, barrier] : block->mbarriers) barrier.published = true;
}

void arrive(std::uint32_t address, Scope scope, unsigned bytes) {
  with_mbarrier(address, [=](Mbarrier& barrier) {
    if (scope == Scope::BLOCK && rank_of(address) != block->rank) {
      release_weakly(barrier.order);
    } else {
      release(barrier.order);
    }
    const char* const wrong = barrier.expect(bytes);
    return wrong == nullptr ? barrier.arrive() : wrong;
  });
}

}  // namespace emulated
