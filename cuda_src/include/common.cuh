// What every kernel shares: conversions to and from float, 16-byte accesses, warp and block reductions.
//
// Blocks are one-dimensional and a whole number of warps wherever a block reduction is used.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "generated/common.cuh"

constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr float FLOAT_INFINITY = __builtin_bit_cast(float, 0x7f800000);
constexpr float LOWEST_FLOAT = -3.402823466e+38f;

template <typename A, typename B>
__host__ __device__ constexpr auto ceil_div(A a, B b) -> decltype(a + b) {
  return (a + b - 1) / b;
}

// ---- fast arithmetic ------------------------------------------------------------------------------------

// By approximations of the special function unit, each within 2 units in the last place.

// 2^x within 2^-22 relative, 0 for -inf; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x / (1 + exp(-x)), by two of them.
__device__ __forceinline__ float silu_fast(float x) {
  constexpr float LOG2_E = 1.4426950408889634f;
  return x * reciprocal_fast(1.0f + exp2_fast(x * -LOG2_E));
}

// What GELU by its tanh approximation has for the x of SiLU's exponent: gelu(x) = x / (1 + exp(-this)), this
// being 2 sqrt(2 / pi) (x + 0.044715 x^3).
__device__ __forceinline__ float gelu_exponent(float x) {
  constexpr float LINEAR = 1.5957691216057308f, CUBIC = 0.07135481627260025f;
  return x * fmaf(CUBIC, x * x, LINEAR);
}

__device__ __forceinline__ float gelu_fast(float x) {
  constexpr float LOG2_E = 1.4426950408889634f;
  return x * reciprocal_fast(1.0f + exp2_fast(gelu_exponent(x) * -LOG2_E));
}

// Quotients of what is counted up to a million, in a fifth of the instructions that integers take.
__device__ __forceinline__ int small_div(int a, int b) {
  return static_cast<int>((a + 0.5f) * reciprocal_fast(b));
}
__device__ __forceinline__ int small_ceil_div(int a, int b) { return small_div(a + b - 1, b); }

// ---- order of kernels -----------------------------------------------------------------------------------

// A kernel whose description says `overlaps` may start before the ones in front of it have ended. It calls
// this in every thread before it reads or writes anything that they write or read; only weights may be
// touched earlier. What they wrote is visible afterwards, but not to loads that take memory for constant:
// such a kernel has no __restrict__ pointers. Elsewhere, and below sm_90, it does nothing.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start its preamble once every block has called this or has ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- element types --------------------------------------------------------------------------------------

template <typename T>
struct is_element {
  static constexpr bool value = false;
};
template <>
struct is_element<float> {
  static constexpr bool value = true;
};
template <>
struct is_element<__half> {
  static constexpr bool value = true;
};
template <>
struct is_element<__nv_bfloat16> {
  static constexpr bool value = true;
};

// Put this into every kernel that is a template on its element type.
#define ASSERT_ELEMENT(T) \
  static_assert(is_element<T>::value, "the element type is float, __half or __nv_bfloat16")

// Whether T's exponents are those of a float: no product of two elements that floats can hold overflows.
template <typename T>
constexpr bool has_float_range = false;
template <>
constexpr bool has_float_range<float> = true;
template <>
constexpr bool has_float_range<__nv_bfloat16> = true;

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(signed char value) { return value; }

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// ---- vectors --------------------------------------------------------------------------------------------

template <int BYTES>
struct raw_vector;
template <>
struct raw_vector<2> {
  using type = unsigned short;
};
template <>
struct raw_vector<4> {
  using type = unsigned;
};
template <>
struct raw_vector<8> {
  using type = uint2;
};
template <>
struct raw_vector<16> {
  using type = uint4;
};

// N elements moved by one access of N * sizeof(T) bytes (2, 4, 8 or 16), to which the address is aligned.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  using Raw = typename raw_vector<sizeof(T) * N>::type;
  T data[N];

  __device__ __forceinline__ T& operator[](int i) { return data[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return data[i]; }

  static __device__ __forceinline__ Vec load(const T* source) {
    Vec vector;
    *reinterpret_cast<Raw*>(vector.data) = *reinterpret_cast<const Raw*>(source);
    return vector;
  }
  __device__ __forceinline__ void store(T* target) const {
    *reinterpret_cast<Raw*>(target) = *reinterpret_cast<const Raw*>(data);
  }
};

// Elements of T in 16 bytes: 4 floats, 8 halves.
template <typename T>
constexpr int VECTOR_SIZE = 16 / sizeof(T);

__device__ __forceinline__ bool is_aligned(const void* pointer, int bytes = 16) {
  return reinterpret_cast<unsigned long long>(pointer) % bytes == 0;
}

// The first min(count, N) elements at `source` as floats, the rest zeros. 16-byte accesses where all N are
// wanted and the address allows it, so that odd sizes and unaligned rows are merely slower.
template <int N, typename T>
__device__ __forceinline__ void load_floats(const T* source, long long count, float (&values)[N]) {
  constexpr int STEP = N < VECTOR_SIZE<T> ? N : VECTOR_SIZE<T>;
  static_assert(N % STEP == 0, "N is a whole number of vectors");
  if (count >= N && is_aligned(source, STEP * sizeof(T))) {
#pragma unroll
    for (int i = 0; i < N; i += STEP) {
      const Vec<T, STEP> vector = Vec<T, STEP>::load(source + i);
#pragma unroll
      for (int j = 0; j < STEP; ++j) values[i + j] = to_float(vector[j]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = i < count ? to_float(source[i]) : 0.0f;
  }
}

// The first min(count, N) values to `target`, rounded to T; the counterpart of load_floats.
template <int N, typename T>
__device__ __forceinline__ void store_floats(T* target, long long count, const float (&values)[N]) {
  constexpr int STEP = N < VECTOR_SIZE<T> ? N : VECTOR_SIZE<T>;
  static_assert(N % STEP == 0, "N is a whole number of vectors");
  if (count >= N && is_aligned(target, STEP * sizeof(T))) {
#pragma unroll
    for (int i = 0; i < N; i += STEP) {
      Vec<T, STEP> vector;
#pragma unroll
      for (int j = 0; j < STEP; ++j) vector[j] = from_float<T>(values[i + j]);
      vector.store(target + i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < count) target[i] = from_float<T>(values[i]);
    }
  }
}

// What kernels that overlap read of memory that others of them update in place (the residual stream), past
// this multiprocessor's cache: a block that started early may find there what neighbours fetched before the
// update.
template <typename V>
__device__ __forceinline__ V load_updated(const V* source) {
  return __ldcg(source);
}

// As load_floats, by load_updated.
template <int N, typename T>
__device__ __forceinline__ void load_updated_floats(const T* source, long long count, float (&values)[N]) {
  constexpr int STEP = N < VECTOR_SIZE<T> ? N : VECTOR_SIZE<T>;
  using Vector = Vec<T, STEP>;
  static_assert(N % STEP == 0, "N is a whole number of vectors");
  if (count >= N && is_aligned(source, STEP * sizeof(T))) {
#pragma unroll
    for (int i = 0; i < N; i += STEP) {
      Vector vector;
      *reinterpret_cast<typename Vector::Raw*>(vector.data) =
          load_updated(reinterpret_cast<const typename Vector::Raw*>(source + i));
#pragma unroll
      for (int j = 0; j < STEP; ++j) values[i + j] = to_float(vector[j]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = i < count ? to_float(load_updated(source + i)) : 0.0f;
  }
}

// Where the thread's CHUNK elements begin in a kernel whose grid covers an array.
__device__ __forceinline__ long long first_element() {
  return (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * CHUNK;
}

// ---- reductions -----------------------------------------------------------------------------------------

// All lanes get the result; its order of additions depends on nothing but the lane numbers.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(FULL_WARP, value, offset);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, offset));
  }
  return value;
}

// All threads of the block must call; all get the result. May be called again at once.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float partial[WARP_SIZE];
  const int lane = threadIdx.x % WARP_SIZE;
  value = warp_sum(value);
  __syncthreads();  // the partials of an earlier call may still be in use
  if (lane == 0) partial[threadIdx.x / WARP_SIZE] = value;
  __syncthreads();
  return warp_sum(lane < blockDim.x / WARP_SIZE ? partial[lane] : 0.0f);
}

__device__ __forceinline__ float block_max(float value) {
  __shared__ float partial[WARP_SIZE];
  const int lane = threadIdx.x % WARP_SIZE;
  value = warp_max(value);
  __syncthreads();
  if (lane == 0) partial[threadIdx.x / WARP_SIZE] = value;
  __syncthreads();
  return warp_max(lane < blockDim.x / WARP_SIZE ? partial[lane] : -FLOAT_INFINITY);
}
