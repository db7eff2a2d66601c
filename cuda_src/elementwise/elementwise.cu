// One result element from the input elements at the same place.
#include "common.cuh"
#include "generated/elementwise.cuh"

// out = a + b.
//   in:  a [size] T, b [size] T
//   out: out [size] T, may be a or b
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements per thread.
template <typename T>
__global__ void add_kernel(BINARY_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long i = first_element();
  if (i >= size) return;
  float left[CHUNK], right[CHUNK];
  load_floats(a + i, size - i, left);
  load_floats(b + i, size - i, right);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) left[j] += right[j];
  store_floats(out + i, size - i, left);
}

// out = a * b.
//   in:  a [size] T, b [size] T
//   out: out [size] T, may be a or b
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements per thread.
template <typename T>
__global__ void mul_kernel(BINARY_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long i = first_element();
  if (i >= size) return;
  float left[CHUNK], right[CHUNK];
  load_floats(a + i, size - i, left);
  load_floats(b + i, size - i, right);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) left[j] *= right[j];
  store_floats(out + i, size - i, left);
}

// out = x * factor.
//   in:  x [size] T
//   out: out [size] T, may be x
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements per thread.
template <typename T>
__global__ void scale_kernel(SCALE_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long i = first_element();
  if (i >= size) return;
  float values[CHUNK];
  load_floats(x + i, size - i, values);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) values[j] *= factor;
  store_floats(out + i, size - i, values);
}

// out = cap * tanh(x / cap).
//   in:  x [size] T
//   out: out [size] T, may be x
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements per thread.
template <typename T>
__global__ void soft_cap_kernel(SOFT_CAP_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long i = first_element();
  if (i >= size) return;
  float values[CHUNK];
  load_floats(x + i, size - i, values);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) values[j] = cap * tanhf(values[j] / cap);
  store_floats(out + i, size - i, values);
}

// out = x, rounded to nearest even.
//   in:  x [size] Source
//   out: out [size] Target
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements per thread.
template <typename Source, typename Target>
__global__ void convert_kernel(CONVERT_PARAMS(Source, Target)) {
  ASSERT_ELEMENT(Source);
  ASSERT_ELEMENT(Target);
  const long long i = first_element();
  if (i >= size) return;
  float values[CHUNK];
  load_floats(x + i, size - i, values);
  store_floats(out + i, size - i, values);
}
