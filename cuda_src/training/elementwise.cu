// Differences, quotients, sums into place, and columns of matrices.
#include "common.cuh"
#include "generated/training_elementwise.cuh"

// out = a - b.
//   in:  a [size] T, b [size] T
//   out: out [size] T, may be a or b
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements per thread.
template <typename T>
__global__ void subtract_kernel(PAIR_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long i = first_element();
  if (i >= size) return;
  float left[CHUNK], right[CHUNK];
  load_floats(a + i, size - i, left);
  load_floats(b + i, size - i, right);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) left[j] -= right[j];
  store_floats(out + i, size - i, left);
}

// out = a / b.
//   in:  a [size] T, b [size] T
//   out: out [size] T, may be a or b
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements per thread.
template <typename T>
__global__ void divide_kernel(PAIR_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long i = first_element();
  if (i >= size) return;
  float left[CHUNK], right[CHUNK];
  load_floats(a + i, size - i, left);
  load_floats(b + i, size - i, right);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) left[j] /= right[j];
  store_floats(out + i, size - i, left);
}

// out[m] = x[m] + row.
//   in:  x [rows, width] T, row [width] T
//   out: out [rows, width] T, may be x
// Layout: contiguous rows of any length; 16-byte accesses where addresses allow them.
// Grid: (rows, blocks that cover a row). Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements of one row per thread.
template <typename T>
__global__ void add_row_kernel(ADD_ROW_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
  if (i >= width) return;
  const long long start = static_cast<long long>(blockIdx.x) * width + i;
  float values[CHUNK], added[CHUNK];
  load_floats(x + start, width - i, values);
  load_floats(row + i, width - i, added);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) values[j] += added[j];
  store_floats(out + start, width - i, values);
}

// out = out + factor * x.
//   in:  x [size] Source
//   out: out [size] Target
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements per thread.
template <typename Source, typename Target>
__global__ void add_to_kernel(ADD_TO_PARAMS(Source, Target)) {
  ASSERT_ELEMENT(Source);
  ASSERT_ELEMENT(Target);
  const long long i = first_element();
  if (i >= size) return;
  float values[CHUNK], sums[CHUNK];
  load_floats(x + i, size - i, values);
  load_floats(out + i, size - i, sums);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) sums[j] = fmaf(values[j], factor, sums[j]);
  store_floats(out + i, size - i, sums);
}

// out[i] = x[0].
//   in:  x [1] Source
//   out: out [size] Target
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements per thread.
template <typename Source, typename Target>
__global__ void broadcast_kernel(BROADCAST_PARAMS(Source, Target)) {
  ASSERT_ELEMENT(Source);
  ASSERT_ELEMENT(Target);
  const long long i = first_element();
  if (i >= size) return;
  float values[CHUNK];
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) values[j] = to_float(x[0]);
  store_floats(out + i, size - i, values);
}

// out[m, out_start + n] = factor * x[m, x_start + n], ACCUMULATES: added to what is there.
//   in:  x [rows, x_width] T
//   out: out [rows, out_width] T, of which other columns stay
// Layout: contiguous rows of any length; 16-byte accesses where addresses allow them.
// Grid: (rows, blocks that cover the columns). Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements of one row per thread.
template <typename T, bool ACCUMULATES>
__global__ void copy_columns_kernel(COPY_COLUMNS_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
  if (i >= width) return;
  const long long row = blockIdx.x;
  T* const to = out + row * out_width + out_start + i;
  float values[CHUNK], sums[CHUNK] = {};
  load_floats(x + row * x_width + x_start + i, width - i, values);
  if constexpr (ACCUMULATES) load_floats(to, width - i, sums);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) sums[j] = fmaf(values[j], factor, sums[j]);
  store_floats(to, width - i, sums);
}
