// A barrier in shared memory that counts arrivals and bytes (PTX ISA, "mbarrier").
#pragma once

#include <atomic>
#include <cstdint>

#include "order.h"

namespace emulated {

// The caller holds the cluster's lock, except for `phase`. Functions return what is wrong, or null.
struct Mbarrier {
  unsigned expected = 0;           // arrivals in each phase
  unsigned missing = 0;            // in this one
  std::int64_t bytes = 0;          // announced and not there; less than 0 where they were faster
  std::atomic<unsigned> phase{0};  // how many have ended
  unsigned number = 0;             // among the block's
  bool published = false;          // by fence.mbarrier_init
  Order order, ended;              // of this phase's arrivals, and of those before it
  Order ended_before;              // of those before the last that has ended

  // Whether the phase of this parity has ended: on a fresh barrier that of parity 1 has.
  bool has_ended(unsigned parity) const { return (phase & 1) != parity; }

  const char* arrive() {
    if (missing == 0) return "more arrivals at an mbarrier than it was made for";
    --missing;
    end_phase_if_all_is_there();
    return nullptr;
  }
  const char* expect(unsigned count) { return add(count); }
  const char* receive(unsigned count) {
    const char* const wrong = add(-static_cast<std::int64_t>(count));
    if (wrong == nullptr) end_phase_if_all_is_there();
    return wrong;
  }

 private:
  static constexpr std::int64_t MOST_BYTES = (1 << 20) - 1;

  const char* add(std::int64_t count) {
    bytes += count;
    if (bytes > MOST_BYTES || bytes < -MOST_BYTES) return "an mbarrier counts more than 2^20 - 1 bytes";
    return nullptr;
  }
  void end_phase_if_all_is_there() {
    if (missing > 0 || bytes != 0) return;
    missing = expected;
    ended_before = ended;
    ended = order;
    order = copied(ended);  // who arrives later passes on what those before passed on, too
    ++phase;
  }
};

void make_mbarrier(std::uint32_t address, unsigned arrivals);
void publish_mbarriers();  // fence.mbarrier_init: TMA knows of those that there are

// What an arrival passes on to threads of other blocks: nothing that they may read plainly if its scope is
// the block, wherever the mbarrier is.
enum class Scope { BLOCK, CLUSTER };
void arrive(std::uint32_t address, Scope scope, unsigned bytes = 0);  // and announce these bytes

// Whether the phase of this parity has ended; waits for it, unless it times out as a try_wait may.
bool try_wait(std::uint32_t address, unsigned parity);

}  // namespace emulated
