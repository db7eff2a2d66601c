// Rows of quantised weights as elements that the dense products take: one kernel for each weight format.
#include "common.cuh"
#include "generated/dequantize.cuh"

// The stored row that row `row` of the result is, or -1: `row` itself without `ids`, else ids[row], where a
// negative id -1 - n stands for sampled[n] if `sampled` is given.
__device__ __forceinline__ long long stored_row(const int* ids, const int* sampled, long long row,
                                                int num_stored) {
  if (ids == nullptr) return row;
  int id = ids[row];
  if (id < 0 && sampled != nullptr) id = sampled[-1 - id];
  return 0 <= id && id < num_stored ? id : -1;
}

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
