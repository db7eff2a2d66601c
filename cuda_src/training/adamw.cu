// A step of AdamW.
#include "common.cuh"
#include "generated/training_adamw.cuh"

// first = beta1 * first + beta1_rest * g, second = beta2 * second + beta2_rest * g^2, g = gradient_factor *
// gradient; weight = kept * weight - rate * first / (sqrt(second) * correction + eps) (Loshchilov and Hutter
// 2019). rate = learning rate / (1 - beta1^step), correction = 1 / sqrt(1 - beta2^step), kept = 1 - learning
// rate * weight decay, beta_rest = 1 - beta.
//   in:  gradient [size] float
//   out: weight [size] float, first [size] float, second [size] float, all updated in place
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements per thread.
__global__ void adamw_kernel(ADAMW_PARAMS) {
  const long long i = first_element();
  if (i >= size) return;
  float w[CHUNK], g[CHUNK], m[CHUNK], v[CHUNK];
  load_floats(weight + i, size - i, w);
  load_floats(gradient + i, size - i, g);
  load_floats(first + i, size - i, m);
  load_floats(second + i, size - i, v);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) {
    const float scaled = g[j] * gradient_factor;
    m[j] = fmaf(m[j], beta1, scaled * beta1_rest);
    v[j] = fmaf(v[j], beta2, scaled * scaled * beta2_rest);
    w[j] = fmaf(w[j], kept, -rate * m[j] / (sqrtf(v[j]) * correction + eps));
  }
  store_floats(weight + i, size - i, w);
  store_floats(first + i, size - i, m);
  store_floats(second + i, size - i, v);
}
