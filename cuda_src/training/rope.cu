// Rotation of heads, and its transpose.
#include "common.cuh"
#include "generated/training_rope.cuh"

// Of each of the first num_rotated heads, with half = rotary_dim / 2 and a = x[d], b = x[half + d] for d <
// half: out[d] = a cos - b sin, out[half + d] = b cos + a sin; other elements are copied (Su et al. 2021).
// INVERSE: with -sin.
//   in:  x [tokens, width] T, heads of head_dim elements side by side
//        cos_sin [*, rotary_dim] float, cosines, then sines, of a position
//        positions [tokens] int
//   out: out [tokens, width] T
// Layout: row-major. WHOLE: head_dim and half are multiples of CHUNK; else elements are taken one by one.
// Grid: (tokens, blocks that cover a row). Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements of a token, or one, per thread.
template <typename T, bool INVERSE, bool WHOLE>
__global__ void packed_rope_kernel(PACKED_ROPE_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  constexpr int SIZE = WHOLE ? CHUNK : 1;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * SIZE;
  if (i >= width) return;
  const long long token = blockIdx.x;
  const T* const from = x + token * width + i;
  const int d = i % head_dim, half = rotary_dim / 2;
  float values[SIZE];
  load_floats(from, SIZE, values);
  if (i / head_dim < num_rotated && d < rotary_dim) {
    const bool is_first = d < half;
    const float* const cosines = cos_sin + positions[token] * static_cast<long long>(rotary_dim) + d % half;
    float others[SIZE], cos[SIZE], sin[SIZE];
    load_floats(is_first ? from + half : from - half, SIZE, others);
    load_floats(cosines, SIZE, cos);
    load_floats(cosines + half, SIZE, sin);
    const float sign = is_first != INVERSE ? -1.0f : 1.0f;
#pragma unroll
    for (int j = 0; j < SIZE; ++j) values[j] = values[j] * cos[j] + sign * others[j] * sin[j];
  }
  store_floats(out + token * width + i, SIZE, values);
}
