// The end of a product whose k was cut into slices.

#include "common.cuh"
#include "generated/add_slices.cuh"

// out[m, n] = the sum over slices of sums[slice, m, n], in their order, + bias[n], + out[m, n] if
// `accumulate`; rounded once.
//   in:  sums [slices, num_rows, features] float, slices <= MAX_SLICES; bias [features] T or null
//   out: out [num_rows, features] Out (T or float), rows `out_stride` apart
// Layout: row-major; features and out_stride even, sums, bias and out aligned to two elements.
// Grid: (blocks that cover a row, num_rows). Block: any number of threads. Shared memory: none.
// Unit of work: one thread two neighbouring columns of one row.
template <typename T, typename Out>
__global__ void add_slices_kernel(ADD_SLICES_PARAMS(T, Out)) {
  let_next_kernel_start();
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * 2;
  if (column >= features) return;
  const long long row = blockIdx.y, slice = static_cast<long long>(num_rows) * features;
  const float* const from = sums + row * features + column;
  Out* const to = out + row * out_stride + column;
  float offsets[2] = {};
  if (bias != nullptr) load_floats(bias + column, 2, offsets);
  wait_for_earlier_kernels();
  float parts[MAX_SLICES][2], before[2] = {};
#pragma unroll
  for (int i = 0; i < MAX_SLICES; ++i) {
    if (i < slices) load_updated_floats(from + i * slice, 2, parts[i]);
  }
  if (accumulate) load_updated_floats(to, 2, before);
  float totals[2] = {parts[0][0], parts[0][1]};
#pragma unroll
  for (int i = 1; i < MAX_SLICES; ++i) {
    if (i < slices) totals[0] += parts[i][0], totals[1] += parts[i][1];
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) totals[e] += offsets[e] + before[e];
  store_floats(to, 2, totals);
}
