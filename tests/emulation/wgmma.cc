// What a thread does about products of its warp group: start them, close groups of them, wait.

#include "wgmma.h"

#include "fibers.h"

namespace emulated {

namespace {

MatrixLayout layout(unsigned long long descriptor, bool transposed) {
  constexpr unsigned LINE_BYTES[] = {0, 128, 64, 32};
  const auto field = [&](unsigned at) { return static_cast<std::uint32_t>(descriptor >> at & 0x3fff) << 4; };
  const MatrixLayout found{field(0), field(16), field(32), LINE_BYTES[descriptor >> 62], transposed};
  if ((descriptor >> 49 & 7) != 0) fail("a matrix descriptor with an offset of its base is not emulated");
  if (transposed && found.line_bytes == 0) fail("a transposed matrix without swizzle is not emulated");
  return found;
}

// This lane's share of what its warp reads: rows or columns `first` to `end` of the operand.
void note_operand(const MatrixLayout& operand, unsigned first, unsigned end) {
  const auto note = [](std::uint32_t address) {
    if (const char* const wrong = wrong_access(address, 16, 16)) fail(wrong);
    note_product(memory_of(block->rank) + address, 16, self->groups_begun);
  };
  if (operand.transposed) {
    const unsigned segments = (end - first) / 8, count = segments * Product::K;
    for (unsigned i = lane(); i < count; i += LANES) note(operand.at(first + i % segments * 8, i / segments));
  } else {
    for (unsigned i = lane(); i < (end - first) * 2; i += LANES) note(operand.at(first + i / 2, i % 2 * 8));
  }
}

float in_flight() { return bits_as<float>(0x7fc0f1f1u); }  // NaN, in sums that nobody may touch

void check_untouched(const Product& product) {
  for (const float* sum : product.sums) {
    if (bits_as<std::uint32_t>(*sum) != bits_as<std::uint32_t>(in_flight())) {
      fail("sums of a product in flight were changed");
    }
  }
  for (std::size_t i = 0; i < product.registers.size(); ++i) {
    if (*product.registers[i] != product.words[i])
      fail("registers that a product in flight reads were changed");
  }
}

// Products that this thread has started and not waited for, in their order.
std::vector<Product*> flying() {
  std::vector<Product*> found;
  for (auto& group : self->product_groups) {
    for (Product& product : group) found.push_back(&product);
  }
  for (Product& product : self->products) found.push_back(&product);
  return found;
}

void check_same_in_group(const Product& product, std::uint64_t a, std::uint64_t b) {
  std::uint64_t same = 0;
  for (const std::uint64_t part : {a, b, std::uint64_t{product.columns}, std::uint64_t{product.adds}}) {
    same = (same ^ part) * 0x9e3779b97f4a7c15u;
  }
  auto& started = block->warpgroups[self->index / WARPGROUP].products;
  if (self->products_begun == started.size()) started.push_back(same);
  if (started[self->products_begun++] != same) fail("threads of a warp group start different products");
}

void start_product(Product product) {
  Product* previous = nullptr;  // that has the same sums
  for (Product* const other : flying()) {
    if (other->sums == product.sums) {
      previous = other;
    } else if (other->sums.front() == product.sums.front()) {
      fail("a product into some of the sums of another one in flight");
    }
  }
  if (!self->products_fenced && (previous == nullptr || product.a_in_registers)) {
    fail("a product without wgmma.fence after what touched its registers");
  }
  if (!product.a_in_registers) note_operand(product.a, product.warp * 16, product.warp * 16 + 16);
  note_operand(product.b, 0, product.columns);
  if (previous != nullptr) {
    check_untouched(*previous);
    if (!late_copies) product.before = previous->before;
  } else {
    for (float* const sum : product.sums) product.before.push_back(std::exchange(*sum, in_flight()));
  }
  if (!late_copies) product.multiply(memory_of(block->rank));
  self->products.push_back(std::move(product));
}

// The oldest group is done: its sums are there, but those that a product in flight goes on with.
void finish_group() {
  std::vector<Product> group = std::move(self->product_groups.front());
  self->product_groups.pop_front();
  const std::vector<Product*> later = flying();
  for (std::size_t i = 0; i < group.size(); ++i) {
    Product& product = group[i];
    check_untouched(product);
    if (late_copies) product.multiply(memory_of(block->rank));
    Product* next = nullptr;
    for (std::size_t j = group.size(); j-- > i + 1;) {
      if (group[j].sums == product.sums) next = &group[j];
    }
    for (std::size_t j = 0; j < later.size() && next == nullptr; ++j) {
      if (later[j]->sums == product.sums) next = later[j];
    }
    if (next == nullptr) {
      for (std::size_t sum = 0; sum < product.sums.size(); ++sum) *product.sums[sum] = product.before[sum];
    } else if (late_copies) {
      next->before = std::move(product.before);
    }
  }
}

Product begun(const Kind& kind, const Sums& sums) {
  if (sums.size() != kind.columns / 2) fail("a product with other than its number of sums");
  Product product{};
  product.element = kind.element;
  product.columns = kind.columns;
  product.lane = lane();
  product.warp = self->index % WARPGROUP / LANES;
  product.sums = sums;
  return product;
}

}  // namespace

void start_product(const Kind& kind, const Sums& sums, std::uint64_t a, std::uint64_t b, bool adds,
                   int sign_a, int sign_b, bool transposed_a, bool transposed_b) {
  Product product = begun(kind, sums);
  product.adds = adds;
  product.negates = sign_a != sign_b;
  product.a = layout(a, transposed_a);
  product.b = layout(b, transposed_b);
  check_same_in_group(product, a, b);
  meet(~0u);
  start_product(std::move(product));
}

void start_product(const Kind& kind, const Sums& sums, const Fragment& a, std::uint64_t b, bool adds,
                   int sign_a, int sign_b, bool transposed_b) {
  Product product = begun(kind, sums);
  product.adds = adds;
  product.negates = sign_a != sign_b;
  product.b = layout(b, transposed_b);
  product.a_in_registers = true;
  product.registers = a;
  for (int i = 0; i < 4; ++i) product.words[i] = *product.registers[i];
  check_same_in_group(product, 0, b);
  // Four lanes have a row between them, two elements at a time.
  const auto shown = show(~0u, product.words, 4);
  for (unsigned k = 0; k < Product::K; ++k) {
    for (unsigned h = 0; h < 2; ++h) {
      const std::uint32_t word = shown[lane() / 4 * 4 + k % 8 / 2][h + k / 8 * 2];
      product.rows[h][k] = value(kind.element, k % 2 == 0 ? word : word >> 16);
    }
  }
  start_product(std::move(product));
}

void fence_products() {
  meet(~0u);
  self->products_fenced = true;
}

void close_group() {
  meet(~0u);
  self->product_groups.push_back(std::exchange(self->products, {}));
  ++self->groups_begun;
}

void wait_for_groups(int pending) {
  auto& groups = self->product_groups;
  while (static_cast<int>(groups.size()) > pending) finish_group();
  note_products_done(self->groups_begun - groups.size());
  self->products_fenced = false;
  meet(~0u);
}

}  // namespace emulated
