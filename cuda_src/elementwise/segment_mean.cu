// Means over segments of rows: the pooling of embeddings.
#include "common.cuh"
#include "generated/segment_mean.cuh"

// out[s] = mean of x[begins[s] .. ends[s] - 1], summed in the order of the rows.
//   in:  x [rows, hidden] T, begins [segments] int32, ends [segments] int32, begins < ends
//   out: out [segments, hidden] float
// Layout: contiguous rows of any length.
// Grid: (segments, blocks that cover hidden). Block: any. Shared memory: none.
// Unit of work: one thread per element of a mean, so that neighbours read neighbours.
template <typename T>
__global__ void segment_mean_kernel(SEGMENT_MEAN_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const int column = blockIdx.y * blockDim.x + threadIdx.x;
  if (column >= hidden) return;
  const int begin = begins[blockIdx.x];
  const int end = ends[blockIdx.x];
  float sum = 0.0f;
  for (int row = begin; row < end; ++row) sum += to_float(x[static_cast<long long>(row) * hidden + column]);
  out[static_cast<long long>(blockIdx.x) * hidden + column] = sum / (end - begin);
}
