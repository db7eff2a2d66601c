// Products of a warp group as a kernel starts them. Lanes meet at each of these, as `sync.aligned` says: one
// may then speak for all.
#pragma once

#include <vector>

#include "product.h"

namespace emulated {

struct Kind {
  Element element;
  unsigned columns;
};
using Fragment = std::vector<const std::uint32_t*>;  // of A in registers

// `a` and `b` are matrix descriptors; a sign is 1 or -1.
void start_product(const Kind& kind, const Sums& sums, std::uint64_t a, std::uint64_t b, bool adds,
                   int sign_a, int sign_b, bool transposed_a, bool transposed_b);
void start_product(const Kind& kind, const Sums& sums, const Fragment& a, std::uint64_t b, bool adds,
                   int sign_a, int sign_b, bool transposed_b);
void fence_products();
void close_group();
void wait_for_groups(int pending);  // until at most so many of the youngest are unfinished

}  // namespace emulated
