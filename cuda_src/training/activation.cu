// SiLU, and the backward of activations.
#include "common.cuh"
#include "generated/training_activation.cuh"

// An activation's value and derivative.
struct Slope {
  float value;
  float slope;
};

// 1 / (1 + exp(-x)). For values of 16 bits by approximations: with the exact ones the kernels would wait for
// arithmetic rather than for memory.
template <typename T>
__device__ __forceinline__ float logistic(float x) {
  constexpr float LOG2_E = 1.4426950408889634f;
  if constexpr (sizeof(T) == 2) return reciprocal_fast(1.0f + exp2_fast(x * -LOG2_E));
  return 1.0f / (1.0f + expf(-x));
}

template <typename T>
__device__ __forceinline__ Slope silu(float x) {
  const float sigmoid = logistic<T>(x);
  return {x * sigmoid, sigmoid * (1.0f + x * (1.0f - sigmoid))};
}

// GELU as in elementwise/activation.cu.
template <typename T, bool TANH>
__device__ __forceinline__ Slope gelu(float x) {
  if constexpr (TANH) {
    constexpr float INNER = 1.595769121605730f;  // 2 sqrt(2 / pi)
    constexpr float CUBIC = 0.044715f;
    const float sigmoid = logistic<T>(INNER * (x + CUBIC * x * x * x));
    return {x * sigmoid, sigmoid + x * sigmoid * (1.0f - sigmoid) * INNER * (1.0f + 3.0f * CUBIC * x * x)};
  } else {
    constexpr float SQRT_1_OVER_2 = 0.707106781186548f, SQRT_1_OVER_2_PI = 0.398942280401433f;
    const float probability = 0.5f * erfcf(-x * SQRT_1_OVER_2);
    return {x * probability, probability + x * SQRT_1_OVER_2_PI * expf(-0.5f * x * x)};
  }
}

// out = x / (1 + exp(-x)) (Elfwing et al. 2017).
//   in:  x [size] T
//   out: out [size] T, may be x
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements per thread.
template <typename T>
__global__ void silu_kernel(SILU_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long i = first_element();
  if (i >= size) return;
  float values[CHUNK];
  load_floats(x + i, size - i, values);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) values[j] = silu<T>(values[j]).value;
  store_floats(out + i, size - i, values);
}

// out = dy * silu'(x).
//   in:  dy [size] T, x [size] T
//   out: out [size] T, may be dy or x
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements per thread.
template <typename T>
__global__ void silu_gradient_kernel(SLOPE_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long i = first_element();
  if (i >= size) return;
  float values[CHUNK], upper[CHUNK];
  load_floats(x + i, size - i, values);
  load_floats(dy + i, size - i, upper);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) upper[j] *= silu<T>(values[j]).slope;
  store_floats(out + i, size - i, upper);
}

// out = dy * gelu'(x).
//   in:  dy [size] T, x [size] T
//   out: out [size] T, may be dy or x
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements per thread.
template <typename T, bool TANH>
__global__ void gelu_gradient_kernel(SLOPE_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long i = first_element();
  if (i >= size) return;
  float values[CHUNK], upper[CHUNK];
  load_floats(x + i, size - i, values);
  load_floats(dy + i, size - i, upper);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) upper[j] *= gelu<T, TANH>(values[j]).slope;
  store_floats(out + i, size - i, upper);
}

// The backward of activation(gate) * up for one thread's elements of a row.
template <typename T, typename Activation>
__device__ __forceinline__ void gated_gradient(const T* dy, const T* gate_up, T* out, int inner,
                                               Activation activation) {
  const long long row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
  if (i >= inner) return;
  const T* const gate = gate_up + row * 2 * inner + i;
  float gates[CHUNK], ups[CHUNK], upper[CHUNK];
  load_floats(gate, inner - i, gates);
  load_floats(gate + inner, inner - i, ups);
  load_floats(dy + row * inner + i, inner - i, upper);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) {
    const Slope found = activation(gates[j]);
    gates[j] = found.slope * ups[j] * upper[j];
    ups[j] = found.value * upper[j];
  }
  T* const to = out + row * 2 * inner + i;
  store_floats(to, inner - i, gates);
  store_floats(to + inner, inner - i, ups);
}

// out = (dy * up * silu'(gate), dy * silu(gate)).
//   in:  dy [rows, inner] T, gate_up [rows, 2 * inner] T, a row's gate before its up
//   out: out [rows, 2 * inner] T, may be gate_up
// Layout: contiguous rows of any length; 16-byte accesses where addresses allow them.
// Grid: (rows, blocks that cover a row). Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements of one row per thread.
template <typename T>
__global__ void silu_mul_gradient_kernel(GATED_GRADIENT_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  gated_gradient(dy, gate_up, out, inner, [](float x) { return silu<T>(x); });
}

// out = (dy * up * gelu'(gate), dy * gelu(gate)).
//   in:  dy [rows, inner] T, gate_up [rows, 2 * inner] T, a row's gate before its up
//   out: out [rows, 2 * inner] T, may be gate_up
// Layout: contiguous rows of any length; 16-byte accesses where addresses allow them.
// Grid: (rows, blocks that cover a row). Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements of one row per thread.
template <typename T, bool TANH>
__global__ void gelu_mul_gradient_kernel(GATED_GRADIENT_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  gated_gradient(dy, gate_up, out, inner, [](float x) { return gelu<T, TANH>(x); });
}
