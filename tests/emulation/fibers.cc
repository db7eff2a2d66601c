// Threads of a launch: when each runs, and what they wait for.

#include "fibers.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

namespace emulated {

namespace {

thread_local std::function<void()> body;  // several devices may run at a time, each in a thread of its own
std::mutex error_lock;
char error[2048];
std::atomic<bool> failed{false};

}  // namespace

Calls find_calls() {
  Calls calls{};
  if (self == nullptr) return calls;
  const auto* const stack = self->stack.get();
  auto* frame = static_cast<unsigned char*>(__builtin_frame_address(0));
  for (const void*& call : calls) {
    if (frame < stack || frame >= stack + STACK_BYTES - 2 * sizeof(void*)) break;
    std::memcpy(&call, frame + sizeof(void*), sizeof(void*));
    std::memcpy(&frame, frame, sizeof(frame));
  }
  return calls;
}

std::string place_of(const Calls& calls) {
  std::string text = "{";
  for (const void* const call : calls) {
    Dl_info library;
    if (call == nullptr || dladdr(call, &library) == 0) continue;
    char address[32];
    const auto* const base = static_cast<const unsigned char*>(library.dli_fbase);
    std::snprintf(address, sizeof(address), "%s%#zx", text.size() > 1 ? " " : "",
                  static_cast<const unsigned char*>(call) - base - 1);
    text += address;
  }
  return text + "}";
}

void end_launch(const std::string& what) {
  const std::lock_guard lock(error_lock);
  if (!failed) std::snprintf(error, sizeof(error), "%s", what.c_str());
  failed = true;
}
void fail(const std::string& what) {
  if (self == nullptr) return end_launch(what);
  {
    end_launch(what.find('{') == what.npos ? what + " at " + place_of(find_calls()) : what);
  }
  _longjmp(block->scheduler, 1);
}

void wait_for(std::function<bool()> ready) {
  if (ready()) return;
  self->calls = find_calls();
  self->ready = std::move(ready);
  if (_setjmp(self->place) == 0) _longjmp(block->scheduler, 1);
}

void meet(unsigned mask) {
  Warp& own = warp();
  const unsigned generation = own.generation;
  if (++own.arrived == static_cast<unsigned>(__builtin_popcount(mask))) own.end_generation();
  wait_for([&own, generation] { return own.generation != generation; });
}

std::uint32_t (*show(unsigned mask, const std::uint32_t* words, unsigned count)) [WORDS] {
  auto& shown = warp().shown[self->warp_phase++ % 2];
  std::memcpy(shown[lane()], words, count * sizeof(*words));
  meet(mask);
  return shown;
}

Order arrive_at(Barrier& barrier) {
  release(barrier.order);
  ++barrier.arrived;
  return barrier.order;
}

std::uint32_t address_of(const unsigned char* pointer) {
  const std::ptrdiff_t address = pointer - shared_bytes + static_cast<std::ptrdiff_t>(SHARED_AT);
  if (address < 0 || address >= static_cast<std::ptrdiff_t>(SHARED_END)) fail("no address in shared memory");
  return address;
}

int rank_of(std::uint32_t address) {
  return address >> RANK_SHIFT == 0 ? block->rank : (address >> RANK_SHIFT) - 1;
}

const char* wrong_access(std::uint32_t address, std::size_t bytes, std::size_t alignment) {
  const std::size_t first = offset_of(address), begin = SHARED_AT + dynamic_begin,
                    end = begin + dynamic_bytes;
  const bool dynamic = first >= begin && first + bytes <= end;
  const bool variable = first + bytes <= SHARED_AT || first >= SHARED_AT + sizeof(shared_bytes);
  if (!dynamic && !(variable && first + bytes <= SHARED_END)) {
    return "an access outside of the block's shared memory";
  }
  return first % alignment == 0 ? nullptr : "a misaligned access to shared memory";
}

unsigned char* at(std::uint32_t address, std::size_t bytes) {
  if (const char* const wrong = wrong_access(address, bytes, bytes)) fail(wrong);
  return memory_of(rank_of(address)) + offset_of(address);
}

namespace {

void release_if_all_are_here() {
  if (block->barrier.arrived == block->running) block->barrier.end_generation();
}

void entry() {
  body();
  settle();
  if (!self->products.empty() || !self->product_groups.empty())
    fail("a thread ends and has products in flight");
  self->done = true;
  --block->running;
  release_if_all_are_here();  // who has ended is not waited for
  block->cluster->end(self->arrivals);
  _longjmp(block->scheduler, 1);
}

// Lets a fiber run until it waits or ends. Only its first step goes by swapcontext, which asks the system
// each time.
void resume(Fiber& fiber) {
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
std::string who_waits() {
  std::map<Calls, std::pair<int, int>> places;  // first thread and count
  for (const Fiber& fiber : block->fibers) {
    if (fiber.index >= static_cast<int>(block->cluster->threads) || fiber.done) continue;
    ++places.try_emplace(fiber.calls, fiber.index, 0).first->second.second;
  }
  std::string text;
  for (const auto& [calls, threads] : places) {
    text += "; " + std::to_string(threads.second) + " of block " + std::to_string(block->rank) +
            " from thread " + std::to_string(threads.first) + " on at " + place_of(calls);
  }
  return text;
}

// What is wrong where all threads of the block have ended.
void check_end() {
  const Block& own = *block;
  if (!own.in_flight.empty()) fail("a block ends before what TMA copies is there");
  for (const Warpgroup& group : own.warpgroups) {
    const auto first = own.fibers.begin() + (&group - own.warpgroups.data()) * WARPGROUP;
    const auto end = std::min(first + WARPGROUP, own.fibers.begin() + own.cluster->threads);
    for (auto fiber = first; fiber < end; ++fiber) {
      if (fiber->products_begun != first->products_begun) {
        fail("some threads of a warp group start products and others do not");
      }
    }
  }
}

void run_block(Cluster& cluster, int rank, uint3 index, uint3 grid, uint3 size) {
  const int threads = cluster.threads;
  static thread_local Block own;
  own.cluster = &cluster;
  own.rank = rank;
  own.barrier = {};
  std::fill_n(own.named, NAMED_BARRIERS, Barrier{});
  own.mbarriers.clear(), own.atomics.clear();
  own.in_flight.begin_block(seed, (index.z * grid.y + index.y) * grid.x + index.x);
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
    if (!failed) moved |= own.in_flight.end_round();
    if (!moved && !failed && !own.in_flight.empty()) {
      own.in_flight.land_any();
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
  {
    const std::lock_guard guard(cluster.lock);
    cluster.blocks[rank] = nullptr;
  }
  cluster.idle_rounds[rank] = OVER;
}

std::string asked(const char* variable) {
  const char* const value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

}  // namespace

void meet_at(int name, int threads, bool waits) {
  if (name <= 0 || name >= static_cast<int>(NAMED_BARRIERS)) fail("no name of a barrier");
  if (threads <= 0 || threads % LANES != 0) fail("a barrier of threads that are no whole warps");
  Barrier& barrier = block->named[name];
  if (barrier.arrived > 0 && static_cast<int>(barrier.threads) != threads)
    fail("a barrier of different counts");
  barrier.threads = threads;
  const unsigned generation = barrier.generation;
  const Order joined = arrive_at(barrier);
  if (static_cast<int>(barrier.arrived) == threads) barrier.end_generation();
  if (!waits) return;
  wait_for([&barrier, generation] { return barrier.generation != generation; });
  follow(joined);
}

void sync_threads() {
  Barrier& barrier = block->barrier;
  const Order joined = arrive_at(barrier);
  const unsigned generation = barrier.generation;
  release_if_all_are_here();
  wait_for([&barrier, generation] { return barrier.generation != generation; });
  follow(joined);
}

const char* run(uint3 grid, uint3 size, unsigned shared, unsigned cluster_size,
                std::function<void()> kernel) {
  if (shared > SHARED_BYTES) return "more shared memory than a block may have";
  failed = false;
  late_copies = WATCHED || asked("EMULATED_LATE_COPIES") == "1";
  last_first = asked("EMULATED_ORDER") == "last_first";
  seed = std::atoi(asked("EMULATED_SEED").c_str());
  body = kernel;
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
            body = kernel;
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

}  // namespace emulated
