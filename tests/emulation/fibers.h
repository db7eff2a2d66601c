// Blocks of threads: each thread is a fiber, each block of a cluster a thread of the host.
//
// A block's fibers run one after another, each until it waits for others, in the order that EMULATED_ORDER
// says (first_first, last_first): without a barrier that it needs, a kernel gives different results in the
// two. Where threads wait for some that never come, the launch fails. Copies that a kernel starts and waits
// for later are done at once, or with EMULATED_LATE_COPIES=1 only when it waits.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "types.h"

namespace emulated {

constexpr std::size_t STACK_BYTES = 128 << 10;
constexpr std::size_t SHARED_BYTES = 227 << 10;  // what a block of sm_90 or sm_100 may have
constexpr int LANES = 32;
constexpr unsigned OVER = ~0u;
constexpr unsigned WORDS = 16;  // of 32 bits that a lane shows its warp at a time

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
  unsigned warp_phase = 0;
  unsigned syncs = 0, warp_syncs = 0;  // how often it passed __syncthreads and __syncwarp
};

struct Warp {
  unsigned arrived = 0, generation = 0;
  std::uint32_t shown[2][LANES][WORDS];
};

// Blocks that run at the same time, each in a thread of the host.
struct Cluster {
  std::vector<unsigned char*> shared;  // of each block
  std::mutex lock;
  unsigned running;                // threads that have not ended
  unsigned missing;                // of these, who have not arrived in this phase
  std::atomic<unsigned> phase{0};  // how often all have arrived
  std::atomic<unsigned> moves{0};  // rounds of a block in which one of its threads could go on,
  std::vector<std::atomic<unsigned>> idle_rounds;  // and in which none could, by block; OVER: it has ended

  Cluster(unsigned blocks, unsigned threads)
      : shared(blocks), running(blocks * threads), missing(running), idle_rounds(blocks) {}

  void arrive() {
    const std::lock_guard guard(lock);
    count_arrival();
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
    ++phase;
  }
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  ucontext_t context;
  jmp_buf scheduler;
  unsigned arrived = 0, generation = 0, running = 0;
  int rank = 0;
  Cluster* cluster = nullptr;
};

inline thread_local Block* block = nullptr;
inline thread_local Fiber* self = nullptr;
inline thread_local uint3 block_index;
inline thread_local uint3 block_size, grid_size;
alignas(1024) inline thread_local unsigned char shared_bytes[SHARED_BYTES];
inline thread_local std::size_t shared_limit = 0;
inline bool late_copies = false, last_first = false;
inline std::function<void()> body;
inline std::mutex error_lock;
inline char error[256];
inline std::atomic<bool> failed{false};

// Ends the launch with this message, the first that there is; called in a fiber it does not return.
inline void fail(const char* what) {
  {
    const std::lock_guard lock(error_lock);
    if (!failed) std::snprintf(error, sizeof(error), "%s", what);
    failed = true;
  }
  if (self != nullptr) _longjmp(block->scheduler, 1);
}

#ifdef EMULATED_RACES  // races.cc
constexpr bool WATCHED = true;
void watch_block(int rank);                   // to be called before any block of the cluster runs
void note_copy(void* to, std::size_t bytes);  // which is no plain access
#else
constexpr bool WATCHED = false;
inline void watch_block(int) {}
inline void note_copy(void*, std::size_t) {}
#endif

inline void wait_for(std::function<bool()> ready) {
  if (ready()) return;
  self->ready = std::move(ready);
  if (_setjmp(self->place) == 0) _longjmp(block->scheduler, 1);
}

inline Warp& warp() { return block->warps[self->index / LANES]; }
inline unsigned lane() { return self->index % LANES; }

// All lanes of `mask` meet.
inline void meet(unsigned mask) {
  Warp& own = warp();
  const unsigned generation = own.generation;
  if (++own.arrived == static_cast<unsigned>(__builtin_popcount(mask))) {
    own.arrived = 0;
    ++own.generation;
  }
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

inline void check_shared(const void* at, std::size_t bytes, const unsigned char* base) {
  const auto* first = static_cast<const unsigned char*>(at);
  if (first < base || first + bytes > base + shared_limit)
    fail("an access outside of the block's shared memory");
  if ((first - base) % bytes != 0) fail("a misaligned access to shared memory");
}

inline void release_if_all_are_here() {
  if (block->arrived < block->running) return;
  block->arrived = 0;
  ++block->generation;
}

inline void entry() {
  body();
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

inline void run_block(Cluster& cluster, int rank, uint3 index, uint3 grid, uint3 size,
                      std::size_t dynamic_bytes) {
  const int threads = size.x * size.y * size.z;
  static thread_local Block own;
  own.cluster = &cluster;
  own.rank = rank;
  own.arrived = own.generation = 0;
  own.running = threads;
  own.warps.assign((threads + LANES - 1) / LANES, {});
  if (own.fibers.size() < static_cast<std::size_t>(threads)) own.fibers.resize(threads);
  block = &own, block_index = index, block_size = size, grid_size = grid, shared_limit = dynamic_bytes;
  std::memset(shared_bytes, 0xff, dynamic_bytes);  // NaN: what nobody wrote is found
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
    fiber.arrivals = fiber.waits = fiber.warp_phase = fiber.syncs = fiber.warp_syncs = 0;
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
    if (!moved && watch.nobody_can_go_on(rank)) fail("threads wait for some that never come");
    if (failed) break;
    if (moved) {
      ++cluster.moves;
    } else {
      std::this_thread::yield();
    }
  }
  cluster.idle_rounds[rank] = OVER;
}

inline bool asked_for(const char* variable, const char* wanted) {
  const char* const value = std::getenv(variable);
  return value != nullptr && std::strcmp(value, wanted) == 0;
}

// Runs the whole grid, cluster after cluster; -> what went wrong, or null.
inline const char* run(uint3 grid, uint3 size, unsigned dynamic_bytes, unsigned cluster_size,
                       std::function<void()> kernel) {
  if (dynamic_bytes > SHARED_BYTES) return "more shared memory than a block may have";
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
          watch_block(0);
          run_block(cluster, 0, {x, y, z}, grid, size, dynamic_bytes);
          if (failed) return error;
          continue;
        }
        std::atomic<unsigned> here{0};
        std::vector<std::thread> blocks;
        for (unsigned rank = 0; rank < cluster_size; ++rank) {
          blocks.emplace_back([&, rank] {
            cluster.shared[rank] = shared_bytes;
            watch_block(rank);
            ++here;
            while (here < cluster_size) std::this_thread::yield();
            run_block(cluster, rank, {x + rank, y, z}, grid, size, dynamic_bytes);
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

template <typename... P, std::size_t... I>
void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::decay_t<P>*>(arguments[I])...);
}

// A launch as cuLaunchKernel has it: `arguments` point to the kernel's arguments.
template <typename... P>
const char* launch(void (*kernel)(P...), const unsigned* grid, const unsigned* size, unsigned dynamic_bytes,
                   unsigned cluster_size, void** arguments) {
  return run({grid[0], grid[1], grid[2]}, {size[0], size[1], size[2]}, dynamic_bytes, cluster_size,
             [=] { call(kernel, arguments, std::index_sequence_for<P...>{}); });
}

}  // namespace emulated
