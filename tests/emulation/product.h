// A matrix product of a warp group, as far as one of its threads has a part in it (PTX ISA, "wgmma").
#pragma once

#include <cstdint>
#include <vector>

namespace emulated {

// Where an operand lies in shared memory: what a matrix descriptor says.
struct MatrixLayout {
  std::uint32_t start, lead, stride;  // bytes
  unsigned line_bytes;                // of the swizzle, 0 for none
  bool transposed;                    // lines run along rows or columns instead of k

  // Shared address of what is at `outer` (a row of A, a column of B) and `k`, both before the swizzle.
  std::uint32_t at(unsigned outer, unsigned k) const;
};

enum class Element { BFLOAT16, FLOAT16, E4M3, INT8 };  // sums are floats, of INT8 integers
float value(Element element, std::uint16_t bits);

// Places of a thread's sums; integers are kept as the floats of their bits.
struct Sum {
  float* place;

  Sum(float* place) : place(place) {}
  Sum(int* place) : place(reinterpret_cast<float*>(place)) {}
  operator float*() const { return place; }
};
using Sums = std::vector<Sum>;

struct Product {
  static constexpr unsigned K = 16;  // elements of 2 bytes, twice as many of one
  static constexpr unsigned MOST_K = 32;

  Element element;
  unsigned columns;
  unsigned lane, warp;  // in the warp group
  bool adds;
  bool negates;
  bool a_in_registers;
  MatrixLayout a, b;
  float rows[2][MOST_K];      // of A where it comes from registers
  Sums sums;                  // where they are to go
  std::vector<float> before;  // what was there, or what comes of the product in flight with the same sums
  std::vector<const std::uint32_t*> registers;  // of A, that must not change
  std::uint32_t words[4];                       // what is in them

  // Sets `before` to the sums. `shared` is the block's memory, less what its addresses begin with.
  void multiply(const unsigned char* shared);
};

}  // namespace emulated
