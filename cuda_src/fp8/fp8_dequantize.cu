// Rows of e4m3 weights as elements that the dense products take, on any architecture.
#include "common.cuh"
#include "generated/fp8_dequantize.cuh"
#include "quant/stored_row.cuh"

// Exactly: the bits of a float with e4m3's exponent, times what its bias is short of.
__device__ __forceinline__ float float_of_e4m3(unsigned code) {
  constexpr float BIASES = 0x1p120f;
  if ((code & 0x7fu) == 0x7fu) return __uint_as_float(0x7fffffffu);
  return __uint_as_float((code & 0x80u) << 24 | (code & 0x7fu) << 20) * BIASES;
}

// out[r, k] = values[s, k] * scales[s / high, k / wide] with s = stored_row(r), or zeros where there is none.
//   in:  values [num_stored, columns] e4m3, scales [ceil(num_stored / high), ceil(columns / wide)] float, ids
//        [rows] int32 or null, sampled [any] int32 or null
//   out: out [rows, columns] T
// Layout: contiguous rows of any length; 16-byte stores where addresses allow them.
// Grid: rows. Block: whole warps, up to 1024 threads. Shared memory: none.
// Unit of work: one block per row.
template <typename T>
__global__ void fp8_dequantize_kernel(FP8_DEQUANTIZE_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long row = blockIdx.x;
  const long long stored = stored_row(ids, sampled, row, num_stored);
  const float* const of_row = scales + max(stored, 0ll) / high * ceil_div(columns, wide);
  for (int i = threadIdx.x * CHUNK; i < columns; i += blockDim.x * CHUNK) {
    float numbers[CHUNK] = {};
    if (stored >= 0) {
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) {
        if (i + j < columns) {
          numbers[j] = float_of_e4m3(values[stored * columns + i + j]) * of_row[(i + j) / wide];
        }
      }
    }
    store_floats(out + row * columns + i, columns - i, numbers);
  }
}
