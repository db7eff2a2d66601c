// Sums over all elements or over rows, in two stages whose order depends on the shape alone.
#include "common.cuh"
#include "generated/training_sums.cuh"

// partial[b] = sum over the elements of block b of x, SQUARED: of their squares.
//   in:  x [size] T
//   out: partial [blocks] float
// Layout: contiguous; 16-byte accesses where addresses allow them. Block b has every gridDim.x-th piece of
// blockDim.x * CHUNK elements.
// Grid: at most MAX_PARTIALS. Block: 256 threads. Shared memory: static.
// Unit of work: every gridDim.x-th CHUNK of a thread's place.
template <typename T, bool SQUARED>
__global__ void partial_sum_kernel(PARTIAL_SUM_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x * CHUNK;
  float sum = 0.0f;
  for (long long i = first_element(); i < size; i += stride) {
    float values[CHUNK];
    load_floats(x + i, size - i, values);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) sum += SQUARED ? values[j] * values[j] : values[j];
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// out[0] = sum of the partials, + out[0] if `accumulate`.
//   in:  partial [num_partials] float
//   out: out [1] float
// Layout: contiguous; num_partials <= MAX_PARTIALS.
// Grid: 1. Block: MAX_PARTIALS threads. Shared memory: static.
// Unit of work: one partial per thread.
__global__ void total_kernel(TOTAL_PARAMS) {
  const int i = threadIdx.x;
  const float sum = block_sum(i < num_partials ? partial[i] : 0.0f);
  if (i == 0) out[0] = accumulate ? out[0] + sum : sum;
}

// partial[c, n] = sum over the rows m of chunk c of x[m, n], NORMED: of x[m, n] * normalised[m, n], where
// normalised = (of[m, n] - statistics[m, 0]) * statistics[m, 1].
//   in:  x [rows, width] T, NORMED: of [rows, width] T, statistics [rows, 2] float
//   out: partial [chunks of CHUNK_ROWS rows, width] float
// Layout: contiguous rows of any length; 16-byte accesses where addresses allow them.
// Grid: (blocks of COLUMNS columns that cover a row, chunks of rows).
// Block: 32 * ROWS_AT_ONCE threads. Shared memory: static.
// Unit of work: a warp sums every ROWS_AT_ONCE-th row of the chunk, a lane CHUNK columns of it; the warps'
// sums are added in their order.
template <typename T, bool NORMED>
__global__ void __launch_bounds__(WARP_SIZE* ROWS_AT_ONCE) column_sums_kernel(COLUMN_SUMS_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  __shared__ float shared_sums[ROWS_AT_ONCE][COLUMNS];
  static_assert(COLUMNS == WARP_SIZE * CHUNK, "a warp has all columns of a block");
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int column = blockIdx.x * COLUMNS + lane * CHUNK;
  const long long first = static_cast<long long>(blockIdx.y) * CHUNK_ROWS;
  const long long end = min(first + CHUNK_ROWS, rows);
  float sums[CHUNK] = {};
  if (column < width) {
    for (long long row = first + warp; row < end; row += ROWS_AT_ONCE) {
      float values[CHUNK];
      load_floats(x + row * width + column, width - column, values);
      if constexpr (NORMED) {
        const float mean = statistics[row * 2], inverse = statistics[row * 2 + 1];
        float others[CHUNK];
        load_floats(of + row * width + column, width - column, others);
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) values[j] *= (others[j] - mean) * inverse;
      }
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) sums[j] += values[j];
    }
  }
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) shared_sums[warp][lane * CHUNK + j] = sums[j];
  __syncthreads();
  for (int i = threadIdx.x; i < COLUMNS; i += blockDim.x) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < ROWS_AT_ONCE; ++w) sum += shared_sums[w][i];
    const int place = blockIdx.x * COLUMNS + i;
    if (place < width) partial[static_cast<long long>(blockIdx.y) * width + place] = sum;
  }
}

// out[i] = sum over c of partial[c, i], + out[i] if `accumulate`.
//   in:  partial [num_partials, size] float
//   out: out [size] float
// Layout: contiguous.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: one element per thread, its partials in their order.
__global__ void add_partials_kernel(ADD_PARTIALS_PARAMS) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= size) return;
  float sum = accumulate ? out[i] : 0.0f;
  for (int c = 0; c < num_partials; ++c) sum += partial[c * size + i];
  out[i] = sum;
}
