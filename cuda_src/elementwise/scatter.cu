// Single values to places of a table.
#include "common.cuh"

// table[rows[i], columns[i]] = values[i]; a row below 0 is skipped.
//   in:  rows, values [count] int32, columns [count] int32 or null for column 0
//   out: table [any, width] int32
// Grid: ceil(count / 256). Block: 256 threads. Shared memory: none.
// Unit of work: one thread a value.
__global__ void scatter_kernel(int* table, const int* rows, const int* columns, const int* values, int width,
                               int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count || rows[i] < 0) return;
  table[static_cast<long long>(rows[i]) * width + (columns != nullptr ? columns[i] : 0)] = values[i];
}
