// Blocks of threads: each thread is a fiber, each block of a cluster a thread of the host.
//
// A block's fibers run one after another, each until it waits for others, in the order that EMULATED_ORDER
// says (first_first, last_first): without a barrier that it needs, a kernel gives different results in the
// two. Where threads wait for some that never come, the launch fails and says where. What a kernel starts and
// waits for later, copies and products, is done at once, or with EMULATED_LATE_COPIES=1 only when a thread
// waits for it. What TMA copies lands after a random time, drawn anew for each EMULATED_SEED.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "in_flight.h"
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
constexpr unsigned NAMED_BARRIERS = 16;
constexpr unsigned REGISTERS = 64 << 10;  // of a multiprocessor
constexpr std::size_t MOST_ALIGNED = 1024;

using Calls = std::array<const void*, 10>;  // the innermost, null after the last

struct Copy {
  void* to;
  const void* from;  // null: zeros
  int bytes;
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
  Order cluster_order;               // of its last arrival there
  unsigned warp_phase = 0;
  Calls calls;                    // that led to where it waits
  std::vector<Product> products;  // of wgmma, started and in no group yet
  std::deque<std::vector<Product>> product_groups;
  unsigned groups_begun = 1;  // of products
  unsigned products_begun = 0;
  bool products_fenced = false;  // since it last waited for products
  unsigned registers = 0;
  bool timed_out = false;  // the last try_wait
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
  CopiesInFlight in_flight;                     // by TMA
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
inline unsigned seed = 0;

Calls find_calls();                        // that lead here
std::string place_of(const Calls& calls);  // for messages: addresses in the library
void end_launch(const std::string& what);  // with this message, if it is the first
void fail(const std::string& what);        // the same; in a fiber it does not return
void wait_for(std::function<bool()> ready);

inline Warp& warp() { return block->warps[self->index / LANES]; }
inline unsigned lane() { return self->index % LANES; }

void meet(unsigned mask);  // all lanes of `mask`

// Show the lanes of `mask` some words; -> what all of them show. The next call but one uses the place again.
std::uint32_t (*show(unsigned mask, const std::uint32_t* words, unsigned count))[WORDS];

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
Order arrive_at(Barrier& barrier);

// ---- addresses in shared memory ----

// Where `shared_bytes` begins; variables lie before or after it.
constexpr std::uint32_t SHARED_AT = 8 << 10;
constexpr std::uint32_t SHARED_END = 1 << 18;  // what a matrix descriptor can name
constexpr std::uint32_t RANK_SHIFT = 24;       // of a block's rank + 1 in an address of the cluster's

std::uint32_t address_of(const unsigned char* pointer);
int rank_of(std::uint32_t address);
inline std::uint32_t offset_of(std::uint32_t address) { return address & ((1u << RANK_SHIFT) - 1); }

// The shared memory of block `rank`, less what its addresses begin with.
inline unsigned char* memory_of(int rank) { return block->cluster->shared[rank] - SHARED_AT; }

// What is wrong with an access there, or null.
const char* wrong_access(std::uint32_t address, std::size_t bytes, std::size_t alignment);
unsigned char* at(std::uint32_t address, std::size_t bytes);

// ---- barriers ----

void sync_threads();

// Arrives at one of a block's named barriers and, if it `waits`, returns once all `threads` have.
void meet_at(int name, int threads, bool waits);

// ---- launches ----

// Runs the whole grid, cluster after cluster; -> what went wrong, or null.
const char* run(uint3 grid, uint3 size, unsigned shared, unsigned cluster_size, std::function<void()> kernel);

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
