// Vector clocks of threads and barriers.

#include "order.h"

#include "clock.h"
#include "fibers.h"

namespace emulated {

namespace {

std::size_t actors() { return block->cluster->blocks.size() * (block->cluster->threads + MOST_MBARRIERS); }

void pass_on(Order& order, bool weakly) {
  Moment& own = self->moment;
  if (order.clock == nullptr) order.clock = std::make_shared<Clock>(actors());
  Clock& clock = *order.clock;
  if (own.seen != nullptr && (weakly || clock.joined != own.seen)) {
    clock.join(*own.seen, weakly ? 1 : Clock::KINDS);
    if (!weakly) clock.joined = own.seen;
  }
  clock.at(Clock::WEAK, own.actor) = own.epoch;
  if (!weakly) {
    clock.at(Clock::STRONG, own.actor) = own.epoch;
    clock.at(Clock::FENCED, own.actor) = own.fenced;
  }
  clock.latest = std::max(clock.latest, own.epoch);
  ++own.epoch;
}

// Lanes and warps that have seen the same go on seeing the same: their clock is computed once.
struct Joined {
  std::shared_ptr<const Clock> before, with, result;
  unsigned latest;  // of `with`, which may grow
  std::size_t kinds;
};
thread_local Joined joined[16];
thread_local unsigned oldest = 0;

std::shared_ptr<const Clock> join(const std::shared_ptr<const Clock>& before, const Order& order,
                                  std::size_t kinds) {
  for (const Joined& known : joined) {
    if (known.with == order.clock && known.before == before && known.kinds == kinds &&
        known.latest == order.clock->latest) {
      return known.result;
    }
  }
  auto result = before == nullptr ? std::make_shared<Clock>(actors()) : std::make_shared<Clock>(*before);
  result->joined = nullptr;
  result->join(*order.clock, kinds);
  joined[oldest++ % std::size(joined)] = {before, order.clock, result, order.clock->latest, kinds};
  return result;
}

void learn(const Order& order, std::size_t kinds) {
  if (order.clock == nullptr) return;
  Moment& own = self->moment;
  own.seen = join(own.seen, order, kinds);
  own.epoch = std::max(own.epoch, order.clock->latest + 1);  // equal in a warp: reads are noted together
}

}  // namespace

void release(Order& order) { pass_on(order, false); }
void release_weakly(Order& order) { pass_on(order, true); }
void follow(const Order& order) { learn(order, Clock::KINDS); }
void follow_weakly(const Order& order) { learn(order, 1); }

bool is_known(const Order& order) {
  static thread_local std::shared_ptr<const Clock> seen, known;  // to whoever has seen it
  const Moment& own = self->moment;
  if (order.clock == nullptr || (order.clock == known && own.seen == seen)) return true;
  bool to_all = true;
  for (unsigned i = 0; i < order.clock->actors(); ++i) {
    if (order.clock->at(Clock::WEAK, i) <= (own.seen == nullptr ? 0 : own.seen->at(Clock::WEAK, i))) continue;
    if (i != own.actor) return false;
    to_all = false;
  }
  if (to_all) seen = own.seen, known = order.clock;
  return true;
}

void fence_proxy() {
  Moment& own = self->moment;
  own.fenced = own.epoch++;
  if (own.seen == nullptr) return;
  static thread_local std::shared_ptr<const Clock> before, fenced;
  if (before != own.seen) {
    auto clock = std::make_shared<Clock>(*own.seen);
    clock->joined = nullptr;
    for (unsigned i = 0; i < clock->actors(); ++i) clock->at(Clock::FENCED, i) = clock->at(Clock::STRONG, i);
    before = own.seen, fenced = clock;
  }
  own.seen = fenced;
}

Moment moment() {
  const Moment now = self->moment;
  ++self->moment.epoch;
  return now;
}

void note_arrival_of_copy(Order& order, unsigned actor, unsigned epoch) {
  if (order.clock == nullptr) order.clock = std::make_shared<Clock>(actors());
  order.clock->at(Clock::WEAK, actor) = order.clock->at(Clock::STRONG, actor) = epoch;
  ++order.clock->latest;
}

Order copied(const Order& order) {
  if (order.clock == nullptr) return {};
  auto clock = std::make_shared<Clock>(*order.clock);
  clock->joined = nullptr;
  return {clock};
}

}  // namespace emulated
