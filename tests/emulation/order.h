// What is known to have happened before what: barriers pass it on. Kept only where races are watched
// (races.cc), by vector clocks.
#pragma once

#include <memory>

namespace emulated {

constexpr unsigned MOST_MBARRIERS = 64;  // of a block

#ifdef EMULATED_RACES

constexpr bool WATCHED = true;

struct Clock;

// What those who arrive at a barrier pass on to those who wait there.
struct Order {
  std::shared_ptr<Clock> clock;
};

// A thread's point in its program and what it knows of the others.
struct Moment {
  std::shared_ptr<const Clock> seen;
  unsigned actor = 0;   // threads of all blocks of the cluster, and mbarriers for what copies do
  unsigned epoch = 1;   // of the thread itself, begun anew whenever it passes something on
  unsigned fenced = 0;  // its last epoch that ended with a proxy fence
};

void release(Order& order);         // what this thread has done and knows is passed on
void release_weakly(Order& order);  // only that it is done: enough for copies over what products have read
void follow(const Order& order);
void follow_weakly(const Order& order);
bool is_known(const Order& order);  // whether this thread knows that all of it is done
void fence_proxy();                 // what this thread knows of plain writes the asynchronous proxy sees
Moment moment();                    // now; what the thread does later comes after it
void note_arrival_of_copy(Order& order, unsigned actor, unsigned epoch);
Order copied(const Order& order);

void watch_block(int rank);  // to be called before any block of the cluster runs

// Accesses that are no plain ones.
void note_copy(void* to, std::size_t bytes);  // by cp.async, which is of the generic proxy
struct BulkAccess {
  const Moment& issued;
  unsigned actor, epoch;  // of the mbarrier that it counts towards, and the phase
  const void* trace;
};
void note_bulk(const BulkAccess& bulk, void* at, std::size_t bytes, bool writes);
void note_product(const void* at, std::size_t bytes, unsigned group);  // reads of this warp's products
void note_products_done(unsigned up_to_group);
void settle();        // whether the last write that raced has changed anything
const void* trace();  // where the caller is in the kernel

#else

constexpr bool WATCHED = false;
struct Order {};
struct Moment {};
inline void release(Order&) {}
inline void release_weakly(Order&) {}
inline void follow(const Order&) {}
inline void follow_weakly(const Order&) {}
inline bool is_known(const Order&) { return true; }
inline void fence_proxy() {}
inline Moment moment() { return {}; }
inline void note_arrival_of_copy(Order&, unsigned, unsigned) {}
inline Order copied(const Order&) { return {}; }
inline void watch_block(int) {}
inline void note_copy(void*, std::size_t) {}
struct BulkAccess {
  const Moment& issued;
  unsigned actor, epoch;
  const void* trace;
};
inline void note_bulk(const BulkAccess&, void*, std::size_t, bool) {}
inline void note_product(const void*, std::size_t, unsigned) {}
inline void note_products_done(unsigned) {}
inline void settle() {}
inline const void* trace() { return nullptr; }

#endif

}  // namespace emulated
