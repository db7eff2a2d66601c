// The bytes that TMA moves, apart from the kernel: not watched.

#include "tensor_map.h"

#include <algorithm>

namespace emulated {

void TensorMap::copy_box(unsigned char* memory, std::uint32_t to, const std::int32_t* coordinates) const {
  constexpr unsigned SEGMENT = 16;
  const std::uint32_t line_bytes = box[0] * item_bytes, lines = box_bytes() / line_bytes;
  for (std::uint32_t line = 0; line < lines; ++line) {
    const unsigned char* from = reinterpret_cast<const unsigned char*>(address);
    bool exists = true;
    std::uint32_t rest = line;
    for (unsigned i = 1; i < rank; rest /= box[i++]) {
      const std::int64_t at = coordinates[i] + static_cast<std::int64_t>(rest % box[i]);
      exists &= at >= 0 && at < sizes[i];
      from += at * static_cast<std::int64_t>(strides[i - 1]);
    }
    const std::int64_t first = static_cast<std::int64_t>(coordinates[0]) * item_bytes;
    const std::int64_t width = static_cast<std::int64_t>(sizes[0]) * item_bytes;
    for (std::uint32_t at = 0; at < line_bytes; at += SEGMENT) {
      unsigned char segment[SEGMENT] = {};
      const std::int64_t begin = first + at;
      const std::int64_t low = std::max<std::int64_t>(begin, 0);
      const std::int64_t high = std::min<std::int64_t>(begin + SEGMENT, width);
      if (exists && low < high) std::memcpy(segment + (low - begin), from + low, high - low);
      const std::uint32_t place = to + line * line_bytes + at;
      const std::uint32_t swizzled =
          swizzle_bytes == 0 ? place : place ^ (place >> 3 & (swizzle_bytes - 1u) & ~15u);
      std::memcpy(memory + swizzled, segment, SEGMENT);
    }
  }
}

}  // namespace emulated
