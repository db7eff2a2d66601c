// The arithmetic of wgmma, apart from the kernel: optimized, and not watched.

#include "product.h"

#include <array>

#include "types.h"

namespace emulated {

std::uint32_t MatrixLayout::at(unsigned outer, unsigned k) const {
  constexpr unsigned ITEM = 2, ROWS = 8;
  std::uint32_t place = start;
  if (line_bytes == 0) {
    // Blocks of 8 rows of 16 bytes: `lead` from one to the next along k, `stride` along the rows.
    return place + outer / ROWS * stride + k / 8 * lead + outer % ROWS * 16 + k % 8 * ITEM;
  }
  if (transposed) {
    const unsigned line = line_bytes / ITEM;
    place += outer / line * lead + k / ROWS * stride + k % ROWS * line_bytes + outer % line * ITEM;
  } else {
    place += outer / ROWS * stride + outer % ROWS * line_bytes + k * ITEM;
  }
  // 16-byte segments of a line are XORed with the line's number, which is in the address.
  return place ^ (place >> 3 & (line_bytes - 1) & ~15u);
}

float value(Element element, std::uint16_t bits) {
  if (element == Element::E4M3) return e4m3_value(static_cast<unsigned char>(bits));
  if (element == Element::INT8) return static_cast<signed char>(bits);
  return element == Element::BFLOAT16 ? __bfloat162float({bits}) : __half2float({bits});
}

void Product::multiply(const unsigned char* shared) {
  const bool bytes = element == Element::E4M3 || element == Element::INT8;
  const unsigned depth = bytes ? MOST_K : K;
  const auto load = [&](const MatrixLayout& layout, unsigned outer, unsigned k) {
    if (bytes) return value(element, shared[layout.at(outer, k / 2) + k % 2]);
    std::uint16_t bits;
    std::memcpy(&bits, shared + layout.at(outer, k), sizeof(bits));
    return value(element, bits);
  };
  // Integers below 2^24 are floats exactly.
  const auto sum_of = [&](float sum) { return element == Element::INT8 ? float(bits_as<int>(sum)) : sum; };
  const auto kept = [&](float sum) { return element == Element::INT8 ? bits_as<float>(int(sum)) : sum; };
  const unsigned g = lane / 4, t = lane % 4;
  if (!a_in_registers) {
    for (unsigned h = 0; h < 2; ++h) {
      for (unsigned k = 0; k < depth; ++k) rows[h][k] = load(a, warp * 16 + g + h * 8, k);
    }
  }
  if (negates) {
    for (auto& row : rows) {
      for (float& x : row) x = -x;
    }
  }
  const unsigned pairs = columns / 8;
  constexpr unsigned MOST_COLUMNS = 64;  // of a thread
  alignas(64) float b_rows[MOST_K][MOST_COLUMNS], totals[2][MOST_COLUMNS];
  for (unsigned j = 0; j < pairs; ++j) {
    for (unsigned e = 0; e < 2; ++e) {
      for (unsigned k = 0; k < depth; ++k) b_rows[k][j * 2 + e] = load(b, j * 8 + t * 2 + e, k);
      for (unsigned h = 0; h < 2; ++h) totals[h][j * 2 + e] = adds ? sum_of(before[j * 4 + h * 2 + e]) : 0.0f;
    }
  }
  for (unsigned h = 0; h < 2; ++h) {
    for (unsigned k = 0; k < depth; ++k) {
      for (unsigned c = 0; c < pairs * 2; ++c) totals[h][c] += rows[h][k] * b_rows[k][c];
    }
  }
  for (unsigned j = 0; j < pairs; ++j) {
    for (unsigned i = 0; i < 4; ++i) before[j * 4 + i] = kept(totals[i / 2][j * 2 + i % 2]);
  }
}

}  // namespace emulated
