// Copies by TMA: what is checked when a thread starts one, and what it does when it lands.

#include "tma.h"

#include "fibers.h"
#include "tensor_map.h"

namespace emulated {

namespace {

// What a bulk copy is from when it is started to when it lands.
struct BulkCopy {
  int from_rank;
  Moment issued;
  Calls calls;
  const void* trace;
};

void fail_copy(const BulkCopy& copy, const std::string& what) {
  fail(what + ", started at " + place_of(copy.calls));
}

BulkCopy begin_copy() { return {block->rank, moment(), find_calls(), trace()}; }

// Bytes have landed in block `rank`, where `landed` notes them: they count towards the mbarrier there.
template <typename Landed>
void land(const BulkCopy& copy, int rank, std::uint32_t barrier, std::uint32_t bytes, const Landed& landed) {
  const char* wrong = nullptr;
  {
    const std::lock_guard guard(block->cluster->lock);
    Block* const of = block->cluster->blocks[rank];
    if (of == nullptr) {
      wrong = "a copy to a block that has ended";
    } else if (const auto found = of->mbarriers.find(offset_of(barrier)); found == of->mbarriers.end()) {
      wrong = "a copy that counts towards an mbarrier that was not made";
    } else if (!found->second.published) {
      wrong = "a copy that counts towards an mbarrier made without fence.mbarrier_init";
    } else {
      Mbarrier& to = found->second;
      const unsigned actor =
          rank * (block->cluster->threads + MOST_MBARRIERS) + block->cluster->threads + to.number;
      landed(BulkAccess{copy.issued, actor, to.phase + 1, copy.trace});
      note_arrival_of_copy(to.order, actor, to.phase + 1);
      wrong = to.receive(bytes);
    }
  }
  if (wrong != nullptr) fail_copy(copy, wrong);
}

TensorMap map_at(std::uint64_t address) {
  TensorMap map;
  if (address % 64 != 0) fail("a tensor map at an address that is no multiple of 64");
  std::memcpy(&map, reinterpret_cast<const void*>(address), sizeof(map));
  if (map.magic != TensorMap::MAGIC) fail("what should be a tensor map is none");
  return map;
}

}  // namespace

void check_map(std::uint64_t address) { map_at(address); }

void start_box(std::uint32_t to, std::uint64_t map_address, std::initializer_list<int> coordinates,
               std::uint32_t barrier, unsigned blocks) {
  const TensorMap map = map_at(map_address);
  if (map.rank != coordinates.size()) fail("a tensor map of other dimensions than the copy");
  const std::uint32_t bytes = map.box_bytes();
  if (const char* const wrong = wrong_access(to, bytes, 128)) fail(wrong);
  at(barrier, sizeof(std::uint64_t));
  if (blocks == ONLY_THIS) blocks = 1u << rank_of(to);
  if (blocks == 0 || blocks >> block->cluster->shared.size() != 0) fail("a copy to blocks that do not exist");
  std::vector<std::int32_t> box(coordinates);
  const BulkCopy copy = begin_copy();
  for (int rank = 0; rank < static_cast<int>(block->cluster->shared.size()); ++rank) {
    if (!(blocks >> rank & 1)) continue;
    block->in_flight.start([=] {
      land(copy, rank, barrier, bytes, [&](const BulkAccess& access) {
        note_bulk(access, memory_of(rank) + offset_of(to), bytes, true);
        map.copy_box(memory_of(rank), offset_of(to), box.data());
      });
    });
  }
}
void start_bulk(std::uint32_t to, std::uint32_t from, unsigned bytes, std::uint32_t barrier) {
  if (bytes % 16 != 0) fail("a bulk copy of bytes that are no multiple of 16");
  for (const std::uint32_t address : {to, from}) {
    if (const char* const wrong = wrong_access(address, bytes, 16)) fail(wrong);
  }
  if (rank_of(to) != rank_of(barrier)) fail("a bulk copy that counts in another block than it goes to");
  const int rank = rank_of(to);
  block->in_flight.start([=, copy = begin_copy()] {
    unsigned char* const source = memory_of(copy.from_rank) + offset_of(from);
    unsigned char* const target = memory_of(rank) + offset_of(to);
    land(copy, rank, barrier, bytes, [&](const BulkAccess& access) {
      note_bulk(access, source, bytes, false);
      note_bulk(access, target, bytes, true);
      std::memcpy(target, source, bytes);
    });
  });
}

}  // namespace emulated
