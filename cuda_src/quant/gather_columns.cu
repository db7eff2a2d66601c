// The columns of activations in the order of a weight's.
#include "common.cuh"
#include "generated/gather_columns.cuh"

// out[r, c] = x[r, order[c]].
//   in:  x [rows, columns] T; order [columns] int32, each of 0 to columns - 1
//   out: out [rows, columns] T
// Layout: contiguous rows; 16-byte stores where addresses allow them.
// Grid: rows. Block: whole warps, up to 1024 threads. Shared memory: none.
// Unit of work: one block per row.
template <typename T>
__global__ void gather_columns_kernel(GATHER_COLUMNS_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long row = static_cast<long long>(blockIdx.x) * columns;
  for (int first = threadIdx.x * 8; first < columns; first += blockDim.x * 8) {
    float numbers[8] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (first + i < columns) numbers[i] = to_float(x[row + order[first + i]]);
    }
    store_floats(out + row + first, columns - first, numbers);
  }
}
