// Whether threads touch the same shared memory with nothing between them that orders the two.
//
// Kernels are compiled for it with -fsanitize=thread, which calls a function of this file at each access. It
// keeps for each two bytes of a block's shared memory who wrote them last and who read them since, and knows
// what barriers each thread has passed: so a race is found in whatever order the threads really ran.
// Unordered are accesses of two threads, at least one of which writes, unless both are atomic or volatile,
// with no __syncthreads, no barrier of the cluster and, within a warp, no __syncwarp between them. A
// collective like a shuffle orders nothing, as in CUDA. An asynchronous copy writes when it starts and when
// it is waited for. Memory of the device is not watched.

#include <link.h>

#include "fibers.h"

namespace {

constexpr int MOST_BLOCKS = 16;  // of a cluster
constexpr std::size_t CELL_BYTES = 2;

struct Access {
  const void* place;  // in the code
  unsigned rank, thread;
  unsigned syncs, arrivals, waits, warp_syncs;
  std::uint32_t lanes;  // of its warp, that did the same since the last __syncwarp
  bool atomic;

  unsigned warp() const { return thread / emulated::LANES; }
};

struct Cell {
  unsigned run;  // of blocks: what was noted in an earlier one means nothing
  bool is_written;
  int readers;  // of the last two warps
  Access write, reads[2];
};

// A block's shared memory: all that is thread_local in the library.
struct Region {
  std::uintptr_t begin = 0, end = 0;
  Cell* cells = nullptr;
  unsigned run = 0;
  std::atomic_flag taken = ATOMIC_FLAG_INIT;
};

Region regions[MOST_BLOCKS];
std::uintptr_t library = 0;
thread_local std::unique_ptr<Cell, decltype(&std::free)> cells{nullptr, &std::free};
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

bool is_ordered(const Access& earlier, const Access& now) {
  if (now.waits > earlier.arrivals) return true;
  if (earlier.rank != now.rank) return false;
  if (now.syncs > earlier.syncs) return true;
  if (earlier.warp() != now.warp()) return false;
  return now.warp_syncs > earlier.warp_syncs || (earlier.lanes & ~now.lanes) == 0;
}

bool is_race(const Access& earlier, const Access& now) {
  return !(earlier.atomic && now.atomic) && !is_ordered(earlier, now);
}

void note_read(Cell& cell, const Access& now) {
  Access& last = cell.reads[0];
  if (cell.readers > 0 && last.rank == now.rank && last.warp() == now.warp()) {
    const bool together = last.warp_syncs == now.warp_syncs && last.syncs == now.syncs;
    const std::uint32_t lanes = together ? last.lanes | now.lanes : now.lanes;
    const bool atomic = now.atomic && (!together || last.atomic);
    last = now;
    last.lanes = lanes;
    last.atomic = atomic;
    return;
  }
  cell.reads[1] = cell.reads[0];
  cell.reads[0] = now;
  cell.readers = std::min(cell.readers + 1, 2);
}

// The access that this one races with, or null; notes it.
const Access* note(Cell& cell, unsigned run, const Access& now, bool writes) {
  static thread_local Access found;
  if (cell.run != run) cell.run = run, cell.is_written = false, cell.readers = 0;
  const Access* other = nullptr;
  if (cell.is_written && is_race(cell.write, now)) other = &cell.write;
  for (int i = 0; writes && i < cell.readers; ++i) {
    if (is_race(cell.reads[i], now)) other = &cell.reads[i];
  }
  if (other != nullptr) found = *other, other = &found;
  if (writes) {
    cell.write = now, cell.is_written = true, cell.readers = 0;
  } else {
    note_read(cell, now);
  }
  return other;
}

bool is_of_emulation(std::uintptr_t address) {
  const auto self = reinterpret_cast<std::uintptr_t>(&emulated::self);
  const auto block = reinterpret_cast<std::uintptr_t>(emulated::block);
  return address - self < sizeof(emulated::self) || address - block < sizeof(emulated::Block);
}

void access(const void* address, std::size_t bytes, bool writes, bool atomic, const void* place) {
  emulated::Fiber* const fiber = emulated::self;
  if (fiber == nullptr) return;
  const auto first = reinterpret_cast<std::uintptr_t>(address);
  if (is_of_emulation(first)) return;
  const unsigned blocks = emulated::block->cluster->shared.size();
  const unsigned rank = emulated::block->rank;
  unsigned where = rank;
  if (first < begin || first >= end) {
    for (where = 0; where < blocks; ++where) {
      if (regions[where].begin <= first && first < regions[where].end) break;
    }
    if (where == blocks) return;
  }
  const unsigned index = fiber->index;
  const Access now{.place = place,
                   .rank = rank,
                   .thread = index,
                   .syncs = fiber->syncs,
                   .arrivals = fiber->arrivals,
                   .waits = fiber->waits,
                   .warp_syncs = fiber->warp_syncs,
                   .lanes = 1u << index % emulated::LANES,
                   .atomic = atomic};
  Region& region = regions[where];
  const Access* other = nullptr;
  while (blocks > 1 && region.taken.test_and_set(std::memory_order_acquire)) {
  }
  const std::size_t from = (first - region.begin) / CELL_BYTES;
  const std::size_t to = (first + bytes - 1 - region.begin) / CELL_BYTES;
  for (std::size_t i = from; i <= to && other == nullptr; ++i) {
    other = note(region.cells[i], region.run, now, writes);
  }
  region.taken.clear(std::memory_order_release);
  if (other == nullptr) return;
  char text[256];
  const auto offset = [](const void* code) { return reinterpret_cast<std::uintptr_t>(code) - library - 1; };
  std::snprintf(text, sizeof(text),
                "a race of thread %u of block %u at {%#zx} and thread %u of block %u at {%#zx}",
                other->thread, other->rank, offset(other->place), now.thread, now.rank, offset(now.place));
  emulated::fail(text);
}

}  // namespace

namespace emulated {

void watch_block(int rank) {
  if (rank >= MOST_BLOCKS) return fail("more blocks in a cluster than are watched");
  shared_bytes[0] = 0;  // now there is memory for what is thread_local
  if (begin == 0) {
    dl_iterate_phdr(find_library, nullptr);
    // Zeros: a cell of no run. Pages that no kernel touches take no time.
    cells.reset(static_cast<Cell*>(std::calloc((end - begin) / CELL_BYTES + 1, sizeof(Cell))));
  }
  Region& region = regions[rank];
  region.begin = begin, region.end = end, region.cells = cells.get();
  ++region.run;
}

void note_copy(void* to, std::size_t bytes) { access(to, bytes, true, false, __builtin_return_address(0)); }

}  // namespace emulated

// What -fsanitize=thread calls.

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
