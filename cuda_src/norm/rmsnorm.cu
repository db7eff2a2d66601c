// RMSNorm per row.
#include "common.cuh"
#include "generated/rmsnorm.cuh"
#include "norm_row.cuh"

// out = x / sqrt(mean(x^2) + eps) * weight over each row (Zhang and Sennrich 2019).
//   in:  x [rows, hidden] T, weight [hidden] T
//   out: out [rows, hidden] T, may be x
// Layout: contiguous rows of any length; 16-byte accesses where a row's address allows them, which WHOLE says
// of all rows: x, weight and out 16-byte aligned, hidden a multiple of 8.
// Grid: rows. Block: whole warps, up to MAX_THREADS. Shared memory: none dynamic.
// Unit of work: one block per row. Where ROW_CHUNKS chunks of each thread are less than the row, the rest is
// read twice.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(MAX_THREADS) rmsnorm_kernel(RMSNORM_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  norm_row<T, WHOLE, false>(x, nullptr, weight, hidden, eps, RowInOrder<T, WHOLE>{out, hidden});
}

// out = stream + rmsnorm(x), which is rounded to T before it is added, as two kernels would.
//   in:  as rmsnorm_kernel has them, and stream [rows, hidden] T
//   out: out [rows, hidden] T, may be stream, not x
// Layout: as there.
// Grid: rows. Block: whole warps, up to MAX_THREADS. Shared memory: none dynamic.
// Unit of work: one block per row, as there.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(MAX_THREADS) rmsnorm_add_kernel(RMSNORM_ADD_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  norm_row<T, WHOLE, true>(x, stream, weight, hidden, eps, RowInOrder<T, WHOLE>{out, hidden});
}
