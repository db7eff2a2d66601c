// TMA: copies of boxes by a tensor map, and of bytes from block to block (PTX ISA, "cp.async.bulk").
#pragma once

#include <cstdint>
#include <initializer_list>

namespace emulated {

constexpr unsigned ONLY_THIS = ~0u;  // the block that an address names

void check_map(std::uint64_t address);  // that it is one

// A box to shared memory of each block of `blocks`, a bit each; its bytes count towards the mbarrier there.
void start_box(std::uint32_t to, std::uint64_t map, std::initializer_list<int> coordinates,
               std::uint32_t barrier, unsigned blocks = ONLY_THIS);

// From this block's shared memory to that of the block that `to` and `barrier` name.
void start_bulk(std::uint32_t to, std::uint32_t from, unsigned bytes, std::uint32_t barrier);

}  // namespace emulated
