// Rows of quantised weights as elements that the dense products take: one kernel for each weight format.
#include "common.cuh"
#include "generated/dequantize.cuh"
#include "quant/stored_row.cuh"

// out[r] = values[s] * scales[s] with s = stored_row(r), or zeros where there is none.
//   in:  values [num_stored, columns] int8, scales [num_stored] float, ids [rows] int32 or null, sampled
//        [any] int32 or null
//   out: out [rows, columns] T
// Layout: contiguous rows of any length; 8-byte loads and 16-byte stores where addresses allow them.
// Grid: rows. Block: whole warps, up to 1024 threads. Shared memory: none.
// Unit of work: one block per row.
template <typename T>
__global__ void dequantize_int8_rows_kernel(DEQUANTIZE_INT8_ROWS_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long row = blockIdx.x;
  const long long stored = stored_row(ids, sampled, row, num_stored);
  const float scale = stored < 0 ? 0.0f : scales[stored];
  for (int i = threadIdx.x * CHUNK; i < columns; i += blockDim.x * CHUNK) {
    float numbers[CHUNK] = {};
    if (stored >= 0) load_floats(values + stored * columns + i, columns - i, numbers);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) numbers[j] *= scale;
    store_floats(out + row * columns + i, columns - i, numbers);
  }
}
