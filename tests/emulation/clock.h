// What a thread, or who waits at a barrier, knows of all actors of a cluster: a vector clock.
#pragma once

#include <vector>

#include "order.h"

namespace emulated {

// Threads come first among a block's actors, then its mbarriers: for what copies write the phase is the
// epoch.
struct Clock {
  enum Kind {
    WEAK,    // is done
    STRONG,  // and seen by plain accesses
    FENCED,  // plain accesses are seen by the asynchronous proxy
    KINDS
  };

  std::vector<unsigned> epochs;         // of each kind all actors
  unsigned latest = 0;                  // of those that passed something on
  std::shared_ptr<const Clock> joined;  // what was joined last

  explicit Clock(std::size_t actors) : epochs(KINDS * actors) {}

  std::size_t actors() const { return epochs.size() / KINDS; }
  unsigned& at(Kind kind, unsigned actor) { return epochs[kind * actors() + actor]; }
  unsigned at(Kind kind, unsigned actor) const { return epochs[kind * actors() + actor]; }

  void join(const Clock& other, std::size_t kinds = KINDS) {
    const std::size_t count = kinds * actors();
    for (std::size_t i = 0; i < count; ++i)
      epochs[i] = epochs[i] < other.epochs[i] ? other.epochs[i] : epochs[i];
  }
};

}  // namespace emulated
