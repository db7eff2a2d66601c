// What TMA copies, from when a thread starts it to when it lands: nothing orders copies, so each takes a
// random time, and a later one may land first.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <utility>
#include <vector>

namespace emulated {

// Of a block. Time is counted in its rounds, in each of which all its threads that can go on do so once.
class CopiesInFlight {
 public:
  // Blocks of the same number and seed draw the same times.
  void begin_block(std::uint32_t seed, std::uint32_t number) {
    std::seed_seq numbers{seed, number};
    random_.seed(numbers);
    copies_.clear();
    round_ = 0;
  }

  void start(std::function<void()> land) {
    const bool waits_for_all = random_() % 4 == 0;
    copies_.push_back({waits_for_all ? NEVER : round_ + random_() % LONGEST, std::move(land)});
  }

  bool empty() const { return copies_.empty(); }

  // Those whose time has come; -> whether there were any.
  bool end_round() {
    ++round_;
    bool landed = false;
    for (std::size_t i = 0; i < copies_.size();) {
      if (copies_[i].due < round_) {
        land(i);
        landed = true;
      } else {
        ++i;
      }
    }
    return landed;
  }

  // One of them, where no thread can go on.
  void land_any() { land(random_() % copies_.size()); }

 private:
  static constexpr unsigned LONGEST = 16, NEVER = ~0u;  // rounds

  struct Copy {
    unsigned due;
    std::function<void()> land;
  };

  void land(std::size_t i) {
    std::swap(copies_[i], copies_.back());
    const Copy copy = std::move(copies_.back());
    copies_.pop_back();
    copy.land();
  }

  std::vector<Copy> copies_;
  std::minstd_rand random_;
  unsigned round_ = 0;
};

}  // namespace emulated
