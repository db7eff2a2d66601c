// Rotary embedding in place, for queries and keys that pass their norms after it.

#include "common.cuh"
#include "generated/rotate.cuh"

// Pair (i, i + rotary_dim / 2) of each of a token's first num_heads heads is turned by the angle of its
// position, as HeadTransform in rope.cuh says.
//   in:  qkv [num_tokens, width] T, heads of head_dim elements
//        cos_sin [positions, rotary_dim] float (cosines, then sines)
//        positions [num_tokens] int
//   out: qkv [num_tokens, width] T, the first num_heads * head_dim columns
// Layout: row-major.
// Grid: (num_tokens, blocks that cover the pairs of a token). Block: 256 threads. Shared memory: none.
// Unit of work: one pair per thread.
template <typename T>
__global__ void rotate_kernel(ROTATE_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const int half = rotary_dim / 2;
  const int pair = blockIdx.y * blockDim.x + threadIdx.x;
  if (pair >= num_heads * half) return;
  const long long token = blockIdx.x;
  const int i = pair % half;
  const float* const angles = cos_sin + static_cast<long long>(positions[token]) * rotary_dim;
  T* const element = qkv + token * width + pair / half * head_dim + i;
  const float low = to_float(element[0]), high = to_float(element[half]);
  const float cosine = angles[i], sine = angles[half + i];
  element[0] = from_float<T>(fmaf(low, cosine, -__fmul_rn(high, sine)));
  element[half] = from_float<T>(fmaf(high, cosine, __fmul_rn(low, sine)));
}
