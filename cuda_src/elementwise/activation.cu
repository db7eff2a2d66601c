// Activations of feed-forward layers.
#include "common.cuh"
#include "generated/activation.cuh"
#include "swiglu.cuh"

// out = gate / (1 + exp(-gate)) * up (SwiGLU, Shazeer 2020).
//   in:  gate_up [rows, 2 * inner] T, a row's gate before its up
//   out: out [rows, inner] T
// Layout: contiguous rows of any length; 16-byte accesses where addresses allow them.
// Grid: (rows, blocks that cover a row). Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements of one row per thread.
template <typename T>
__global__ void silu_mul_kernel(GATED_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const long long row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
  if (i >= inner) return;
  const T* gate = gate_up + row * 2 * inner + i;
  float gates[CHUNK], values[CHUNK];
  load_floats(gate, inner - i, gates);
  load_floats(gate + inner, inner - i, values);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) values[j] *= gates[j] / (1.0f + expf(-gates[j]));
  store_floats(out + row * inner + i, inner - i, values);
}

// out = the clamped SwiGLU of gate and up.
//   in:  gate_up [rows, 2 * inner] T, a row's gate before its up
//   out: out [rows, inner] T
// Layout: contiguous rows of any length; 16-byte accesses where addresses allow them.
// Grid: (rows, blocks that cover a row). Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements of one row per thread.
template <typename T>
__global__ void clamped_swiglu_mul_kernel(GATED_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const long long row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
  if (i >= inner) return;
  const T* gate = gate_up + row * 2 * inner + i;
  float gates[CHUNK], values[CHUNK];
  load_floats(gate, inner - i, gates);
  load_floats(gate + inner, inner - i, values);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) values[j] = clamped_swiglu(gates[j], values[j]);
  store_floats(out + row * inner + i, inner - i, values);
}

// GELU (Hendrycks and Gimpel 2016): x * Phi(x), Phi the standard normal distribution function, either
// exactly, Phi(x) = erfc(-x / sqrt(2)) / 2, or by its tanh approximation,
// Phi(x) = (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3).
// Both are written without the difference of nearly equal numbers that 1 + tanh and 1 + erf make.
template <bool TANH>
__device__ __forceinline__ float gelu(float x) {
  constexpr float SQRT_2_OVER_PI = 0.797884560802865f;
  constexpr float SQRT_1_OVER_2 = 0.707106781186548f;
  if constexpr (TANH) {
    const float u = SQRT_2_OVER_PI * (x + 0.044715f * x * x * x);
    return x / (1.0f + expf(-2.0f * u));
  } else {
    return 0.5f * x * erfcf(-x * SQRT_1_OVER_2);
  }
}

// out = gelu(gate) * up (GEGLU, Shazeer 2020).
//   in:  gate_up [rows, 2 * inner] T, a row's gate before its up
//   out: out [rows, inner] T
// Layout: contiguous rows of any length; 16-byte accesses where addresses allow them.
// Grid: (rows, blocks that cover a row). Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements of one row per thread.
template <typename T, bool TANH>
__global__ void gelu_mul_kernel(GATED_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const long long row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
  if (i >= inner) return;
  const T* gate = gate_up + row * 2 * inner + i;
  float gates[CHUNK], values[CHUNK];
  load_floats(gate, inner - i, gates);
  load_floats(gate + inner, inner - i, values);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) values[j] *= gelu<TANH>(gates[j]);
  store_floats(out + row * inner + i, inner - i, values);
}

// out = gelu(x).
//   in:  x [size] T
//   out: out [size] T, may be x
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements per thread.
template <typename T, bool TANH>
__global__ void gelu_kernel(GELU_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const long long i = first_element();
  if (i >= size) return;
  float values[CHUNK];
  load_floats(x + i, size - i, values);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) values[j] = gelu<TANH>(values[j]);
  store_floats(out + i, size - i, values);
}

// out = max(x, 0), SQUARED its square (So et al. 2021).
//   in:  x [size] T
//   out: out [size] T, may be x
// Layout: contiguous; 16-byte accesses where addresses allow them.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements per thread.
template <typename T, bool SQUARED>
__global__ void relu_kernel(GELU_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long i = first_element();
  if (i >= size) return;
  float values[CHUNK];
  load_floats(x + i, size - i, values);
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) {
    values[j] = values[j] < 0.0f ? 0.0f : values[j];  // keeps what is no number
    if constexpr (SQUARED) values[j] *= values[j];
  }
  store_floats(out + i, size - i, values);
}
