// Single values to places of a table.
#include "common.cuh"
#include "generated/scatter.cuh"

// table[rows[i], columns[i]] = values[i]; a row below 0 is skipped.
//   in:  rows, values [num_values] int32, columns [num_values] int32 or null for column 0
//   out: table [any, width] int32
// Layout: contiguous.
// Grid: ceil(num_values / 256). Block: 256 threads. Shared memory: none.
// Unit of work: one thread a value.
__global__ void scatter_kernel(SCATTER_PARAMS) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= num_values || rows[i] < 0) return;
  table[static_cast<long long>(rows[i]) * width + (columns != nullptr ? columns[i] : 0)] = values[i];
}
