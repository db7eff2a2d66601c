// What tensor_maps.py writes in the place of the driver's cuTensorMapEncodeTiled, and a copy by it.
#pragma once

#include <cstdint>
#include <cstring>

namespace emulated {

struct TensorMap {
  static constexpr std::uint32_t MAGIC = 0x70614d54;
  static constexpr unsigned MOST_DIMENSIONS = 5;

  // From the innermost dimension on; strides of all but that.
  std::uint64_t address, strides[MOST_DIMENSIONS - 1];
  std::uint32_t magic, sizes[MOST_DIMENSIONS];
  std::uint16_t box[MOST_DIMENSIONS];
  std::uint8_t rank, item_bytes, swizzle_bytes;
  std::uint8_t padding[51];

  std::uint32_t box_bytes() const {
    std::uint32_t bytes = item_bytes;
    for (unsigned i = 0; i < rank; ++i) bytes *= box[i];
    return bytes;
  }

  // The box at these coordinates to shared memory at `to`, zeros where there is no matrix. `memory` is the
  // block's, less what its addresses begin with.
  void copy_box(unsigned char* memory, std::uint32_t to, const std::int32_t* coordinates) const;
};
static_assert(sizeof(TensorMap) == 128);

}  // namespace emulated
