// Whether threads touch the same shared memory with nothing between them that orders the two.
//
// Kernels are compiled for it with -fsanitize=thread, which calls a function of this file at each access. It
// keeps for each two bytes of a block's shared memory who wrote them last and who read them since, and knows
// what each thread has heard of the others (order.cc): so a race is found in whatever order the threads
// really ran. Unordered are accesses of two threads, at least one of which writes, unless both are atomic or
// volatile, with no chain of barriers from one to the other. A collective like a shuffle orders nothing, as
// in CUDA.
//
// What cp.async copies is written when it starts and when it is waited for. What TMA copies is written when
// it lands, by someone that only those have heard of who waited for its mbarrier, and that has itself heard
// what its thread had when it started the copy. A product reads from when it is started to when its warp
// waits for it. Both are of the asynchronous proxy: what they find or write over must have been written
// before a proxy fence on the way to them. Memory of the device is not watched.
//
// Writes that race and change nothing are let pass, as compute-sanitizer does: several threads may clear the
// same memory. Who reads it must come after one of them.

#include <link.h>

#include <array>
#include <optional>
#include <set>
#include <thread>

#include "clock.h"
#include "fibers.h"

namespace emulated {

namespace {

constexpr int MOST_BLOCKS = 16;  // of a cluster
constexpr int MOST_WARPS = 32;   // of a block
constexpr int READERS = 4;
constexpr int WRITERS = 3;  // of the same
constexpr std::size_t CELL_BYTES = 2;
constexpr std::size_t LINE_BYTES = 16;
constexpr unsigned NEVER = ~0u;

struct Access {
  const void* place;  // in the code; of the asynchronous proxy the calls that led there
  unsigned actor;     // of several lanes the warp's first
  unsigned epoch;
  std::uint32_t lanes;  // of its warp, that did the same in the same epoch
  bool atomic, async;
  std::uint8_t bytes;  // of the cell, a bit each
};

struct Cell {
  unsigned run;  // of blocks: what was noted in an earlier one means nothing
  int writers;
  int readers;  // of those the last
  int oldest;
  Access writes[WRITERS], reads[READERS];
};

// For each warp the last group of its products that read here, from 1 on.
struct Line {
  unsigned run;
  unsigned groups[MOST_WARPS];
};

struct Groups {
  std::vector<std::array<unsigned, LANES>> ends;  // of each the epochs in which lanes waited for it, or NEVER
  std::vector<const void*> places;                // where a lane started it
};

// A block's shared memory: all that is thread_local in the library.
struct Region {
  std::uintptr_t begin = 0, end = 0;
  Cell* cells = nullptr;
  Line* lines = nullptr;
  unsigned run = 0;
  Groups groups[MOST_WARPS];
  std::atomic_flag taken = ATOMIC_FLAG_INIT;
};

Region regions[MOST_BLOCKS];
std::uintptr_t library = 0;
thread_local std::unique_ptr<Cell, decltype(&std::free)> cells{nullptr, &std::free};
thread_local std::unique_ptr<Line, decltype(&std::free)> lines{nullptr, &std::free};
thread_local std::uintptr_t begin = 0, end = 0;

int find_library(dl_phdr_info* info, std::size_t, void*) {
  const auto here = reinterpret_cast<std::uintptr_t>(&find_library);
  bool found = false;
  std::size_t thread_bytes = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    const std::uintptr_t from = info->dlpi_addr + part.p_vaddr;
    found |= part.p_type == PT_LOAD && from <= here && here < from + part.p_memsz;
    if (part.p_type == PT_TLS) thread_bytes = part.p_memsz;
  }
  if (!found) return 0;
  library = info->dlpi_addr;
  begin = reinterpret_cast<std::uintptr_t>(info->dlpi_tls_data);
  end = begin + thread_bytes;
  return 1;
}

bool knows(const Moment& now, Clock::Kind kind, unsigned actor, unsigned epoch) {
  if (actor == now.actor) return epoch <= (kind == Clock::FENCED ? now.fenced : now.epoch);
  return now.seen != nullptr && now.seen->at(kind, actor) >= epoch;
}

bool is_ordered(const Access& earlier, const Moment& now, Clock::Kind kind) {
  for (std::uint32_t left = earlier.lanes; left != 0; left &= left - 1) {
    if (!knows(now, kind, earlier.actor + __builtin_ctz(left), earlier.epoch)) return false;
  }
  return true;
}

// Whether somebody knows that a warp's group of products is done.
bool is_ordered(const Groups& groups, unsigned group, unsigned warp, const Moment& now, Clock::Kind kind) {
  for (int lane = 0; lane < LANES; ++lane) {
    const unsigned ended = groups.ends[group][lane];
    if (ended != NEVER && knows(now, kind, warp + lane, ended)) return true;
  }
  return false;
}

struct Doing {
  const Moment& moment;  // when it began, for who does it
  Access access;
  bool writes;

  // Of a cell, where it touches bytes `from` to `to` of the block's.
  void take_cell(std::size_t cell, std::size_t from, std::size_t to) {
    const bool first = from <= cell * CELL_BYTES, second = to > cell * CELL_BYTES;
    access.bytes = first | second << 1;
  }
};

// What must be known of an earlier access.
Clock::Kind needed(const Access& earlier, bool written, const Doing& now) {
  if (earlier.async) return now.access.async ? Clock::WEAK : Clock::STRONG;
  return now.access.async && written ? Clock::FENCED : Clock::STRONG;
}

bool is_race(const Access& earlier, bool written, const Doing& now) {
  if ((earlier.bytes & now.access.bytes) == 0) return false;
  return !(earlier.atomic && now.access.atomic) &&
         !is_ordered(earlier, now.moment, needed(earlier, written, now));
}

void note_read(Cell& cell, const Doing& now) {
  for (int i = 0; i < cell.readers; ++i) {
    Access& other = cell.reads[i];
    if (other.actor == now.access.actor && other.epoch == now.access.epoch &&
        other.async == now.access.async) {
      other.lanes |= now.access.lanes;
      other.bytes |= now.access.bytes;
      other.atomic &= now.access.atomic;
      return;
    }
  }
  for (int i = 0; i < cell.readers; ++i) {
    Access& other = cell.reads[i];
    if (other.async == now.access.async && is_ordered(other, now.moment, Clock::STRONG)) {
      other = now.access;
      return;
    }
  }
  const int place = cell.readers < READERS ? cell.readers++ : cell.oldest++ % READERS;
  cell.reads[place] = now.access;
}

void renew(Cell& cell, unsigned run) {
  if (cell.run != run) cell.run = run, cell.writers = cell.readers = cell.oldest = 0;
}

// The write that this read races with, or null: it must come after one of those who wrote what is there.
const Access* unordered_write(const Cell& cell, const Doing& now) {
  for (int i = 0; i < cell.writers; ++i) {
    if (!is_race(cell.writes[i], true, now)) return nullptr;
  }
  return cell.writers > 0 ? &cell.writes[0] : nullptr;
}

// The access that this one races with, or null.
const Access* unordered(const Cell& cell, const Doing& now) {
  if (!now.writes) return unordered_write(cell, now);
  for (int i = 0; i < cell.writers; ++i) {
    if (is_race(cell.writes[i], true, now)) return &cell.writes[i];
  }
  for (int i = 0; i < cell.readers; ++i) {
    if (is_race(cell.reads[i], false, now)) return &cell.reads[i];
  }
  return nullptr;
}

void note(Cell& cell, const Doing& now) {
  if (now.writes) {
    cell.writes[0] = now.access, cell.writers = 1, cell.readers = cell.oldest = 0;
  } else {
    note_read(cell, now);
  }
}

unsigned actors_of_block() { return block->cluster->threads + MOST_MBARRIERS; }

std::string described(const Access& access) {
  const unsigned rank = access.actor / actors_of_block(), index = access.actor % actors_of_block();
  const bool copy = index >= block->cluster->threads;
  std::string text =
      copy ? "a copy to" : "thread " + std::to_string(index + __builtin_ctz(access.lanes)) + " of";
  text += " block " + std::to_string(rank) + " at ";
  if (access.async) return text + place_of(*static_cast<const Calls*>(access.place));
  return text + place_of({access.place});
}

// The block whose shared memory this is, or -1.
int rank_at(std::uintptr_t address) {
  if (begin <= address && address < end) return block->rank;
  const int blocks = block->cluster->blocks.size();
  for (int rank = 0; rank < blocks; ++rank) {
    if (regions[rank].begin <= address && address < regions[rank].end) return rank;
  }
  return -1;
}

struct Taken {
  explicit Taken(Region& of) : region(of) {
    while (region.taken.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  }
  ~Taken() { region.taken.clear(std::memory_order_release); }
  Region& region;
};

std::string race(const Access& earlier, bool written, const Doing& now, const char* reads = "") {
  const bool fence =
      needed(earlier, written, now) == Clock::FENCED && is_ordered(earlier, now.moment, Clock::STRONG);
  return std::string(fence ? "a race for want of a proxy fence of " : "a race of ") + described(earlier) +
         " and " + reads + described(now.access);
}

// What is wrong with an access to memory of a block, or nothing.
std::string find_race(Region& region, int rank, std::size_t from, std::size_t to, Doing& now) {
  for (std::size_t i = from / CELL_BYTES; i <= to / CELL_BYTES; ++i) {
    Cell& cell = region.cells[i];
    now.take_cell(i, from, to);
    renew(cell, region.run);
    if (const Access* const other = unordered(cell, now)) return race(*other, true, now);
  }
  if (!now.writes) return {};
  for (std::size_t i = from / LINE_BYTES; i <= to / LINE_BYTES; ++i) {
    const Line& line = region.lines[i];
    if (line.run != region.run) continue;
    for (int warp = 0; warp < MOST_WARPS; ++warp) {
      const unsigned group = line.groups[warp], actor = rank * actors_of_block() + warp * LANES;
      const Clock::Kind kind = now.access.async ? Clock::WEAK : Clock::STRONG;
      if (group == 0 || is_ordered(region.groups[warp], group, actor, now.moment, kind)) continue;
      const Access product{region.groups[warp].places[group], actor, 0, 1, false, true, 3};
      return "a race of a product of " + described(product) + " and " + described(now.access);
    }
  }
  return {};
}

// A plain write that races, if it changes anything.
struct Suspicion {
  std::string race;
  const unsigned char* place;
  std::vector<unsigned char> before;
  Region* region;
  Access access;
};
thread_local std::optional<Suspicion> suspicion;

// What is wrong with an access to memory of block `rank`, or nothing; notes it.
std::string check(int rank, std::uintptr_t first, std::size_t bytes, Doing now) {
  Region& region = regions[rank];
  const Taken taken(region);
  const std::size_t from = first - region.begin, to = from + bytes - 1;
  std::string found = find_race(region, rank, from, to, now);
  if (!found.empty()) {
    if (!now.writes || now.access.async) return found;
    const auto* const place = reinterpret_cast<const unsigned char*>(first);
    suspicion = Suspicion{std::move(found), place, {place, place + bytes}, &region, now.access};
    return {};
  }
  for (std::size_t i = from / CELL_BYTES; i <= to / CELL_BYTES; ++i) {
    now.take_cell(i, from, to);
    note(region.cells[i], now);
  }
  return {};
}

bool is_of_emulation(std::uintptr_t address) {
  const auto self = reinterpret_cast<std::uintptr_t>(&emulated::self);
  const auto block = reinterpret_cast<std::uintptr_t>(emulated::block);
  return address - self < sizeof(emulated::self) || address - block < sizeof(Block);
}

Access of_this_thread(const void* place, bool atomic, bool async) {
  const unsigned lane = self->index % LANES;
  return {place, self->moment.actor - lane, self->moment.epoch, 1u << lane, atomic, async, 3};
}

void access(const void* address, std::size_t bytes, bool writes, bool atomic, const void* place) {
  if (self == nullptr) return;
  settle();
  const auto first = reinterpret_cast<std::uintptr_t>(address);
  if (is_of_emulation(first)) return;
  const int rank = rank_at(first);
  if (rank < 0) return;
  const std::string wrong =
      check(rank, first, bytes, {self->moment, of_this_thread(place, atomic, false), writes});
  if (!wrong.empty()) fail(wrong);
}

}  // namespace

void watch_block(int rank) {
  if (rank >= MOST_BLOCKS) return fail("more blocks in a cluster than are watched");
  shared_bytes[0] = 0;  // now there is memory for what is thread_local
  if (begin == 0) {
    dl_iterate_phdr(find_library, nullptr);
    // Zeros: of no run. Pages that no kernel touches take no time.
    cells.reset(static_cast<Cell*>(std::calloc((end - begin) / CELL_BYTES + 1, sizeof(Cell))));
    lines.reset(static_cast<Line*>(std::calloc((end - begin) / LINE_BYTES + 1, sizeof(Line))));
  }
  Region& region = regions[rank];
  region.begin = begin, region.end = end, region.cells = cells.get(), region.lines = lines.get();
  for (Groups& groups : region.groups) groups.ends.assign(1, {}), groups.places.assign(1, nullptr);
  ++region.run;
}

// The write in question has been made.
void settle() {
  if (!suspicion) return;
  const Suspicion made = std::move(*suspicion);
  suspicion.reset();
  if (!std::equal(made.before.begin(), made.before.end(), made.place)) return fail(made.race);
  const Taken taken(*made.region);
  const std::size_t from = reinterpret_cast<std::uintptr_t>(made.place) - made.region->begin;
  for (std::size_t i = from / CELL_BYTES; i <= (from + made.before.size() - 1) / CELL_BYTES; ++i) {
    Cell& cell = made.region->cells[i];
    cell.writes[cell.writers < WRITERS ? cell.writers++ : WRITERS - 1] = made.access;
  }
}

void note_copy(void* to, std::size_t bytes) { access(to, bytes, true, false, __builtin_return_address(0)); }

void note_bulk(const BulkAccess& bulk, void* at, std::size_t bytes, bool writes) {
  settle();
  const auto first = reinterpret_cast<std::uintptr_t>(at);
  const Access now{bulk.trace, bulk.actor, bulk.epoch, 1, false, true, 3};
  const std::string wrong = check(rank_at(first), first, bytes, {bulk.issued, now, writes});
  if (!wrong.empty()) end_launch(wrong);
}

void note_product(const void* at, std::size_t bytes, unsigned group) {
  settle();
  const auto first = reinterpret_cast<std::uintptr_t>(at);
  const int rank = block->rank, warp = self->index / LANES;
  const Doing now{self->moment, of_this_thread(trace(), false, true), false};
  std::string wrong;
  {
    Region& region = regions[rank];
    const Taken taken(region);
    Groups& groups = region.groups[warp];
    if (groups.ends.size() <= group) {
      std::array<unsigned, LANES> none;
      none.fill(NEVER);
      groups.ends.resize(group + 1, none);
      groups.places.resize(group + 1, now.access.place);
    }
    Line& line = region.lines[(first - region.begin) / LINE_BYTES];
    if (line.run != region.run) line = {region.run, {}};
    line.groups[warp] = group;
    const std::size_t from = first - region.begin;
    for (std::size_t i = from / CELL_BYTES; i <= (from + bytes - 1) / CELL_BYTES && wrong.empty(); ++i) {
      Cell& cell = region.cells[i];
      renew(cell, region.run);
      if (const Access* const write = unordered_write(cell, now))
        wrong = race(*write, true, now, "a product of ");
    }
  }
  if (!wrong.empty()) fail(wrong);
}

void note_products_done(unsigned up_to_group) {
  Region& region = regions[block->rank];
  const Taken taken(region);
  Groups& groups = region.groups[self->index / LANES];
  const unsigned lane = self->index % LANES;
  for (unsigned group = std::min<unsigned>(up_to_group, groups.ends.size()); group-- > 1;) {
    if (groups.ends[group][lane] != NEVER) break;
    groups.ends[group][lane] = self->moment.epoch;
  }
}

const void* trace() {
  static std::set<Calls> all;
  static std::mutex lock;
  const std::lock_guard guard(lock);
  return &*all.insert(find_calls()).first;
}

}  // namespace emulated

// What -fsanitize=thread calls.

using emulated::access;

#define PLACE __builtin_return_address(0)
#define DEFINE_ACCESS(bytes)                                                              \
  void __tsan_read##bytes(void* at) { access(at, bytes, false, false, PLACE); }           \
  void __tsan_write##bytes(void* at) { access(at, bytes, true, false, PLACE); }           \
  void __tsan_unaligned_read##bytes(void* at) { access(at, bytes, false, false, PLACE); } \
  void __tsan_unaligned_write##bytes(void* at) { access(at, bytes, true, false, PLACE); } \
  void __tsan_volatile_read##bytes(void* at) { access(at, bytes, false, true, PLACE); }   \
  void __tsan_volatile_write##bytes(void* at) { access(at, bytes, true, true, PLACE); }
#define DEFINE_FETCH(bits, T, name)                                    \
  T __tsan_atomic##bits##_fetch_##name(volatile T* at, T value, int) { \
    access(const_cast<T*>(at), sizeof(T), true, true, PLACE);          \
    return __atomic_fetch_##name(at, value, __ATOMIC_SEQ_CST);         \
  }
#define DEFINE_COMPARE_EXCHANGE(bits, T, strength)                                                        \
  int __tsan_atomic##bits##_compare_exchange_##strength(volatile T* at, T* expected, T value, int, int) { \
    access(const_cast<T*>(at), sizeof(T), true, true, PLACE);                                             \
    return __atomic_compare_exchange_n(at, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);   \
  }
#define DEFINE_ATOMIC(bits, T)                                       \
  DEFINE_FETCH(bits, T, add)                                         \
  DEFINE_FETCH(bits, T, or)                                          \
  DEFINE_COMPARE_EXCHANGE(bits, T, strong)                           \
  DEFINE_COMPARE_EXCHANGE(bits, T, weak)                             \
  T __tsan_atomic##bits##_load(const volatile T* at, int) {          \
    access(const_cast<const T*>(at), sizeof(T), false, true, PLACE); \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                    \
  }                                                                  \
  void __tsan_atomic##bits##_store(volatile T* at, T value, int) {   \
    access(const_cast<T*>(at), sizeof(T), true, true, PLACE);        \
    __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                   \
  }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_read_range(void* at, std::size_t bytes) { access(at, bytes, false, false, PLACE); }
void __tsan_write_range(void* at, std::size_t bytes) { access(at, bytes, true, false, PLACE); }
DEFINE_ACCESS(1)
DEFINE_ACCESS(2)
DEFINE_ACCESS(4)
DEFINE_ACCESS(8)
DEFINE_ACCESS(16)
DEFINE_ATOMIC(8, std::uint8_t)
DEFINE_ATOMIC(32, std::uint32_t)
DEFINE_ATOMIC(64, std::uint64_t)
}
