// Blocks of threads: each thread is a fiber, each block of a cluster a thread of the host.
//
// A block's fibers run one after another, each until it waits for others, in the order that EMULATED_ORDER
// says (first_first, last_first): without a barrier that it needs, a kernel gives different results in the
// two. Where threads wait for some that never come, the launch fails and says where. What a kernel starts and
// waits for later, copies and products, is done at once, or with EMULATED_LATE_COPIES=1 only when it must:
// when a thread waits for it, or what TMA copies when no thread can go on.
#pragma once

#include <dlfcn.h>
#include <setjmp.h>
#include <ucontext.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "mbarrier.h"
#include "product.h"
#include "types.h"

namespace emulated {

constexpr std::size_t STACK_BYTES = 128 << 10;
constexpr std::size_t SHARED_BYTES = 227 << 10;  // what a block of sm_90 or sm_100 may have
constexpr int LANES = 32;
constexpr unsigned OVER = ~0u;
constexpr unsigned WORDS = 16;  // of 32 bits that a lane shows its warp at a time
constexpr int WARPGROUP = 128;
constexpr unsigned CALLS = 10;  // of those that lead to where a thread waits
constexpr unsigned NAMED_BARRIERS = 16;
constexpr unsigned REGISTERS = 64 << 10;  // of a multiprocessor
constexpr std::size_t MOST_ALIGNED = 1024;

struct Copy {
  void* to;
  const void* from;  // null: zeros
};

struct Fiber {
  ucontext_t context;
  jmp_buf place;  // where it waits
  bool begun = false;
  std::unique_ptr<unsigned char[]> stack;
  uint3 thread;
  int index = 0;
  bool done = false;
  std::function<bool()> ready;  // what it waits for
  std::vector<Copy> copies;     // started and in no group yet
  std::deque<std::vector<Copy>> groups;
  unsigned arrivals = 0, waits = 0;  // at the barrier of the cluster
  Order cluster_order;                   // of its last arrival there
  unsigned warp_phase = 0;
  const void* calls[CALLS];  // that led to where it waits
  std::vector<Product> products;  // of wgmma, started and in no group yet
  std::deque<std::vector<Product>> product_groups;
  unsigned groups_begun = 1;      // of products
  unsigned products_begun = 0;
  bool products_fenced = false;   // since it last waited for products
  unsigned registers = 0;
  bool timed_out = false;         // the last try_wait
  Moment moment;
};

struct Barrier {
  unsigned arrived = 0, generation = 0;
  unsigned threads = 0;  // of a named one
  Order order;           // of this generation

  void end_generation() {
    arrived = 0;
    ++generation;
    order = {};
  }
};

struct Warp : Barrier {
  std::uint32_t shown[2][LANES][WORDS];
};

// Four warps: what they multiply must be the same.
struct Warpgroup {
  std::vector<std::uint64_t> products;  // what tells them apart
};

struct Block;

// Blocks that run at the same time, each in a thread of the host.
struct Cluster {
  std::vector<unsigned char*> shared;  // of each block
  std::vector<Block*> blocks;          // null once they have ended
  const unsigned threads;              // of each block
  std::mutex lock;
  unsigned running;                // threads that have not ended
  unsigned missing;                // of these, who have not arrived in this phase
  std::atomic<unsigned> phase{0};  // how often all have arrived
  std::atomic<unsigned> moves{0};  // rounds of a block in which one of its threads could go on,
  std::vector<std::atomic<unsigned>> idle_rounds;  // and in which none could, by block; OVER: it has ended
  Order order;                                     // of this phase
  std::map<std::uint32_t, Order> atomics;          // by address

  Cluster(unsigned blocks, unsigned threads)
      : shared(blocks),
        blocks(blocks),
        threads(threads),
        running(blocks * threads),
        missing(running),
        idle_rounds(blocks) {}

  // -> what the threads pass on that arrive in this phase.
  Order arrive() {
    const std::lock_guard guard(lock);
    release(order);
    const Order joined = order;
    count_arrival();
    return joined;
  }
  // Of a thread that has arrived `arrivals` times: who has ended is not waited for.
  void end(unsigned arrivals) {
    const std::lock_guard guard(lock);
    --running;
    if (arrivals == phase) count_arrival();
  }

 private:
  void count_arrival() {
    if (--missing > 0) return;
    missing = running;
    order = {};
    ++phase;
  }
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  ucontext_t context;
  jmp_buf scheduler;
  std::vector<Warpgroup> warpgroups;
  Barrier barrier, named[NAMED_BARRIERS];
  std::map<std::uint32_t, Mbarrier> mbarriers;  // by address
  std::map<std::uint32_t, Order> atomics;       // by address
  std::deque<std::function<void()>> in_flight;  // what TMA is to copy
  unsigned free_registers = 0;
  unsigned running = 0;
  int rank = 0;
  Cluster* cluster = nullptr;
};

inline thread_local Block* block = nullptr;
inline thread_local Fiber* self = nullptr;
inline thread_local uint3 block_index;
inline thread_local uint3 block_size, grid_size;
alignas(MOST_ALIGNED) inline thread_local unsigned char shared_bytes[SHARED_BYTES + MOST_ALIGNED];
inline thread_local std::size_t dynamic_bytes = 0;
inline std::size_t dynamic_begin = 0;  // in `shared_bytes`: no more aligned than the kernel asks for
inline bool late_copies = false, last_first = false;
inline std::function<void()> body;
inline std::mutex error_lock;
inline char error[2048];
inline std::atomic<bool> failed{false};

// The innermost calls that lead here, up to the end or CALLS; what runs no fiber has none.
__attribute__((noinline)) inline void find_calls(const void* (&calls)[CALLS]) {
  std::memset(calls, 0, sizeof(calls));
  const auto* const stack = self->stack.get();
  auto* frame = static_cast<unsigned char*>(__builtin_frame_address(0));
  for (unsigned i = 0; i < CALLS; ++i) {
    if (frame < stack || frame >= stack + STACK_BYTES - 2 * sizeof(void*)) return;
    std::memcpy(&calls[i], frame + sizeof(void*), sizeof(void*));
    std::memcpy(&frame, frame, sizeof(frame));
  }
}

// Addresses that device.py makes lines of.
inline std::string place_of(const void* const* calls, std::size_t count) {
  std::string text = "{";
  for (std::size_t i = 0; i < count && calls[i] != nullptr; ++i) {
    Dl_info library;
    if (dladdr(calls[i], &library) == 0) continue;
    char address[32];
    const auto* const base = static_cast<const unsigned char*>(library.dli_fbase);
    std::snprintf(address, sizeof(address), "%s%#zx", text.size() > 1 ? " " : "",
                  static_cast<const unsigned char*>(calls[i]) - base - 1);
    text += address;
  }
  return text + "}";
}

// Ends the launch with this message, the first that there is; called in a fiber it does not return.
inline void end_launch(const std::string& what) {
  const std::lock_guard lock(error_lock);
  if (!failed) std::snprintf(error, sizeof(error), "%s", what.c_str());
  failed = true;
}
inline void fail(const std::string& what) {
  if (self == nullptr) return end_launch(what);
  {
    const void* calls[CALLS];
    find_calls(calls);
    end_launch(what.find('{') == what.npos ? what + " at " + place_of(calls, CALLS) : what);
  }
  _longjmp(block->scheduler, 1);
}

__attribute__((noinline)) inline void wait_for(std::function<bool()> ready) {
  if (ready()) return;
  find_calls(self->calls);
  self->ready = std::move(ready);
  if (_setjmp(self->place) == 0) _longjmp(block->scheduler, 1);
}

inline Warp& warp() { return block->warps[self->index / LANES]; }
inline unsigned lane() { return self->index % LANES; }

// All lanes of `mask` meet.
inline void meet(unsigned mask) {
  Warp& own = warp();
  const unsigned generation = own.generation;
  if (++own.arrived == static_cast<unsigned>(__builtin_popcount(mask))) own.end_generation();
  wait_for([&own, generation] { return own.generation != generation; });
}

// Show the lanes of `mask` some words; -> what all of them show. The next call but one uses the place again.
inline std::uint32_t (*show(unsigned mask, const std::uint32_t* words, unsigned count)) [WORDS] {
  auto& shown = warp().shown[self->warp_phase++ % 2];
  std::memcpy(shown[lane()], words, count * sizeof(*words));
  meet(mask);
  return shown;
}

template <typename T>
T from_lane(unsigned mask, T value, int source) {
  static_assert(sizeof(T) % 4 == 0 && sizeof(T) <= 4 * WORDS);
  std::uint32_t words[sizeof(T) / 4];
  std::memcpy(words, &value, sizeof(T));
  const auto shown = show(mask, words, sizeof(T) / 4);
  if (source >= 0 && source < LANES && (mask >> source & 1)) std::memcpy(&value, shown[source], sizeof(T));
  return value;
}

// -> what those pass on that arrive in this generation.
inline Order arrive_at(Barrier& barrier) {
  release(barrier.order);
  ++barrier.arrived;
  return barrier.order;
}

// ---- addresses in shared memory ----

// Where `shared_bytes` begins; variables lie before or after it.
constexpr std::uint32_t SHARED_AT = 8 << 10;
constexpr std::uint32_t SHARED_END = 1 << 18;  // what a matrix descriptor can name
constexpr std::uint32_t RANK_SHIFT = 24;       // of a block's rank + 1 in an address of the cluster's

inline std::uint32_t address_of(const unsigned char* pointer) {
  const std::ptrdiff_t address = pointer - shared_bytes + static_cast<std::ptrdiff_t>(SHARED_AT);
  if (address < 0 || address >= static_cast<std::ptrdiff_t>(SHARED_END)) fail("no address in shared memory");
  return address;
}

inline int rank_of(std::uint32_t address) {
  return address >> RANK_SHIFT == 0 ? block->rank : (address >> RANK_SHIFT) - 1;
}
inline std::uint32_t offset_of(std::uint32_t address) { return address & ((1u << RANK_SHIFT) - 1); }

// The shared memory of block `rank`, less what its addresses begin with.
inline unsigned char* memory_of(int rank) { return block->cluster->shared[rank] - SHARED_AT; }

// What is wrong with an access there, or null.
inline const char* wrong_access(std::uint32_t address, std::size_t bytes, std::size_t alignment) {
  const std::size_t first = offset_of(address), begin = SHARED_AT + dynamic_begin, end = begin + dynamic_bytes;
  const bool dynamic = first >= begin && first + bytes <= end;
  const bool variable = first + bytes <= SHARED_AT || first >= SHARED_AT + sizeof(shared_bytes);
  if (!dynamic && !(variable && first + bytes <= SHARED_END)) {
    return "an access outside of the block's shared memory";
  }
  return first % alignment == 0 ? nullptr : "a misaligned access to shared memory";
}

inline unsigned char* at(std::uint32_t address, std::size_t bytes) {
  if (const char* const wrong = wrong_access(address, bytes, bytes)) fail(wrong);
  return memory_of(rank_of(address)) + offset_of(address);
}

// ---- blocks ----

inline void release_if_all_are_here() {
  if (block->barrier.arrived == block->running) block->barrier.end_generation();
}

inline void entry() {
  body();
  settle();
  if (!self->products.empty() || !self->product_groups.empty()) fail("a thread ends and has products in flight");
  self->done = true;
  --block->running;
  release_if_all_are_here();  // who has ended is not waited for
  block->cluster->end(self->arrivals);
  _longjmp(block->scheduler, 1);
}

// Lets a fiber run until it waits or ends. Only its first step goes by swapcontext, which asks the system
// each time.
inline void resume(Fiber& fiber) {
  self = &fiber;
  if (_setjmp(block->scheduler) == 0) {
    if (std::exchange(fiber.begun, true)) _longjmp(fiber.place, 1);
    swapcontext(&block->context, &fiber.context);
  }
  self = nullptr;
}

// Whether all blocks of a cluster wait for each other: each has found nobody twice since anybody moved.
struct Watch {
  explicit Watch(Cluster& watched) : cluster(watched), since(cluster.shared.size()) {}

  bool nobody_can_go_on(int rank) {
    ++cluster.idle_rounds[rank];
    if (!watching || seen != cluster.moves) {
      watching = true, seen = cluster.moves;
      for (std::size_t i = 0; i < since.size(); ++i) since[i] = cluster.idle_rounds[i];
      return false;
    }
    for (std::size_t i = 0; i < since.size(); ++i) {
      const unsigned rounds = cluster.idle_rounds[i];
      if (rounds != OVER && rounds - since[i] < 2) return false;
    }
    return seen == cluster.moves;
  }

  Cluster& cluster;
  std::vector<unsigned> since;
  unsigned seen = 0;
  bool watching = false;
};

// The threads that still wait, by the calls that led them there.
inline std::string who_waits() {
  std::map<std::vector<const void*>, std::pair<int, int>> places;  // first thread and count
  for (const Fiber& fiber : block->fibers) {
    if (fiber.index >= static_cast<int>(block->cluster->threads) || fiber.done) continue;
    std::vector<const void*> calls;
    for (const void* call : fiber.calls) {
      if (call != nullptr) calls.push_back(call);
    }
    ++places.try_emplace(calls, fiber.index, 0).first->second.second;
  }
  std::string text;
  for (const auto& [calls, threads] : places) {
    text += "; " + std::to_string(threads.second) + " of block " + std::to_string(block->rank) + " from thread " +
            std::to_string(threads.first) + " on at " + place_of(calls.data(), calls.size());
  }
  return text;
}

// What is wrong where all threads of the block have ended.
inline void check_end() {
  const Block& own = *block;
  if (!own.in_flight.empty()) fail("a block ends before what TMA copies is there");
  for (const Warpgroup& group : own.warpgroups) {
    const auto first = own.fibers.begin() + (&group - own.warpgroups.data()) * WARPGROUP;
    for (auto fiber = first; fiber < first + WARPGROUP && fiber->index < static_cast<int>(own.cluster->threads);
         ++fiber) {
      if (fiber->products_begun != first->products_begun) {
        fail("some threads of a warp group start products and others do not");
      }
    }
  }
}

inline void run_block(Cluster& cluster, int rank, uint3 index, uint3 grid, uint3 size) {
  const int threads = cluster.threads;
  static thread_local Block own;
  own.cluster = &cluster;
  own.rank = rank;
  own.barrier = {};
  std::fill_n(own.named, NAMED_BARRIERS, Barrier{});
  own.mbarriers.clear(), own.atomics.clear();
  own.in_flight.clear();
  own.warpgroups.assign((threads + WARPGROUP - 1) / WARPGROUP, {});
  own.free_registers = 0;
  own.running = threads;
  own.warps.assign((threads + LANES - 1) / LANES, {});
  if (own.fibers.size() < static_cast<std::size_t>(threads)) own.fibers.resize(threads);
  block = &own, block_index = index, block_size = size, grid_size = grid;
  cluster.blocks[rank] = &own;
  std::memset(shared_bytes, 0xff, dynamic_begin + dynamic_bytes);  // NaN: what nobody wrote is found
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = own.fibers[i];
    if (fiber.stack == nullptr) fiber.stack.reset(new unsigned char[STACK_BYTES]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.context, entry, 0);
    fiber.index = i;
    fiber.thread = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    fiber.done = fiber.begun = false;
    fiber.ready = [] { return true; };
    fiber.copies.clear(), fiber.groups.clear();
    fiber.arrivals = fiber.waits = fiber.warp_phase = 0;
    fiber.products.clear(), fiber.product_groups.clear();
    fiber.groups_begun = 1, fiber.products_begun = 0;
    fiber.products_fenced = fiber.timed_out = false;
    fiber.registers = std::min(255u, REGISTERS / threads / 8 * 8);
    fiber.moment = {};
#ifdef EMULATED_RACES
    fiber.moment.actor = rank * (threads + MOST_MBARRIERS) + i;
#endif
  }
  Watch watch(cluster);
  while (own.running > 0) {
    bool moved = false;
    for (int turn = 0; turn < threads; ++turn) {
      Fiber& fiber = own.fibers[last_first ? threads - 1 - turn : turn];
      if (fiber.done || !fiber.ready()) continue;
      moved = true;
      resume(fiber);
      if (failed) break;
    }
    if (!moved && !failed && !own.in_flight.empty()) {
      // What was started first or last: nothing orders copies.
      const auto next = last_first ? own.in_flight.end() - 1 : own.in_flight.begin();
      const auto copy = std::move(*next);
      own.in_flight.erase(next);
      copy();
      moved = true;
    }
    if (!moved && watch.nobody_can_go_on(rank)) fail("threads wait for some that never come" + who_waits());
    if (failed) break;
    if (moved) {
      ++cluster.moves;
    } else {
      std::this_thread::yield();
    }
  }
  if (!failed) check_end();
  cluster.idle_rounds[rank] = OVER;
}

inline bool asked_for(const char* variable, const char* wanted) {
  const char* const value = std::getenv(variable);
  return value != nullptr && std::strcmp(value, wanted) == 0;
}

// Runs the whole grid, cluster after cluster; -> what went wrong, or null.
inline const char* run(uint3 grid, uint3 size, unsigned shared, unsigned cluster_size,
                       std::function<void()> kernel) {
  if (shared > SHARED_BYTES) return "more shared memory than a block may have";
  failed = false;
  late_copies = WATCHED || asked_for("EMULATED_LATE_COPIES", "1");
  last_first = asked_for("EMULATED_ORDER", "last_first");
  body = std::move(kernel);
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; x += cluster_size) {
        Cluster cluster(cluster_size, size.x * size.y * size.z);
        if (cluster_size == 1) {
          cluster.shared[0] = shared_bytes;
          dynamic_bytes = shared;
          watch_block(0);
          run_block(cluster, 0, {x, y, z}, grid, size);
          if (failed) return error;
          continue;
        }
        std::atomic<unsigned> here{0};
        std::vector<std::thread> blocks;
        for (unsigned rank = 0; rank < cluster_size; ++rank) {
          blocks.emplace_back([&, rank] {
            cluster.shared[rank] = shared_bytes;
            dynamic_bytes = shared;
            watch_block(rank);
            ++here;
            while (here < cluster_size) std::this_thread::yield();
            run_block(cluster, rank, {x + rank, y, z}, grid, size);
            ++here;  // its shared memory must last until all have ended
            while (here < 2 * cluster_size) std::this_thread::yield();
          });
        }
        for (std::thread& thread : blocks) thread.join();
        if (failed) return error;
      }
    }
  }
  return nullptr;
}

// Arguments lie packed, perhaps less aligned than their types ask for.
template <typename T>
T argument(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <typename... P, std::size_t... I>
void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  kernel(argument<std::decay_t<P>>(arguments[I])...);
}

// A launch as cuLaunchKernel has it: `arguments` point to the kernel's arguments.
template <typename... P>
const char* launch(void (*kernel)(P...), const unsigned* grid, const unsigned* size, unsigned dynamic_bytes,
                   unsigned cluster_size, void** arguments) {
  return run({grid[0], grid[1], grid[2]}, {size[0], size[1], size[2]}, dynamic_bytes, cluster_size,
             [=] { call(kernel, arguments, std::index_sequence_for<P...>{}); });
}

}  // namespace emulated
