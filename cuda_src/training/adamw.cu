// Steps of AdamW.
#include "common.cuh"
#include "generated/training_adamw.cuh"

// What a step has beside its tensors; see adamw_kernel.
struct AdamwNumbers {
  float gradient_factor, beta1, beta1_rest, beta2, beta2_rest, rate, correction, kept, eps;

  __device__ __forceinline__ void update(float& w, float g, float& m, float& v) const {
    const float scaled = g * gradient_factor;
    m = fmaf(m, beta1, scaled * beta1_rest);
    v = fmaf(v, beta2, scaled * scaled * beta2_rest);
    w = fmaf(w, kept, -rate * m / (sqrtf(v) * correction + eps));
  }
};

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
  const AdamwNumbers numbers = {gradient_factor, beta1, beta1_rest, beta2, beta2_rest, rate,
                                correction,      kept,  eps};
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) numbers.update(w[j], g[j], m[j], v[j]);
  store_floats(weight + i, size - i, w);
  store_floats(first + i, size - i, m);
  store_floats(second + i, size - i, v);
}

// What the codes of a moment stand for, and the bounds between them; a code is the number of bounds below.
struct CodeTable {
  float values[NUM_CODES];
  float bounds[NUM_CODES];  // of which the last one is not used

  __device__ __forceinline__ unsigned code_of(float share) const {
    int below = 0;
#pragma unroll
    for (int step = NUM_CODES / 2; step > 0; step /= 2) below += bounds[below + step - 1] < share ? step : 0;
    return below;
  }

  // A thread's elements of a block with this scale.
  __device__ __forceinline__ void decode(const unsigned* words, float scale, float (&moment)[CHUNK]) const {
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) moment[j] = values[words[j / 4] >> j % 4 * 8 & 0xff] * scale;
  }

  // All lanes of a warp, whose elements are a block, must call. -> its scale
  template <bool SIGNED>
  __device__ __forceinline__ float encode(const float (&moment)[CHUNK], unsigned* words) const {
    float scale = 0.0f;
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) scale = fmaxf(scale, fabsf(moment[j]));
    scale = warp_max(scale);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      unsigned code = code_of(scale > 0.0f ? moment[j] / scale : 0.0f);
      if (!SIGNED && code == 0 && moment[j] > 0.0f) code = 1;
      words[j / 4] = j % 4 == 0 ? code : words[j / 4] | code << j % 4 * 8;
    }
    return scale;
  }
};

// As adamw_kernel, with moments in codes of eight bits (Dettmers et al. 2022): decoded, updated, rounded anew
// by the largest magnitude of their block. A second moment above 0 has a code above 0.
//   in:  gradient [size] float; tables [2] CodeTable: of first, whose codes are signed, and of second
//   out: weight [size] float; first_codes, second_codes [blocks, CODE_BLOCK] in bytes; first_scales,
//        second_scales [blocks] float; all updated in place
// Layout: contiguous; 16-byte accesses to weights and gradients where addresses allow them.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: both tables.
// Unit of work: CHUNK elements per thread, a block of codes a warp.
__global__ void adamw_8bit_kernel(ADAMW8BIT_PARAMS) {
  static_assert(CODE_BLOCK == WARP_SIZE * CHUNK, "a warp has a block of codes");
  __shared__ CodeTable table[2];
  float* const entries = &table[0].values[0];
  for (int i = threadIdx.x; i < 4 * NUM_CODES; i += blockDim.x) entries[i] = tables[i];
  __syncthreads();
  const long long i = first_element();
  const long long block = i / CODE_BLOCK;
  if (block * CODE_BLOCK >= size) return;
  using Words = Vec<unsigned, CHUNK / 4>;
  float w[CHUNK], g[CHUNK], m[CHUNK], v[CHUNK];
  load_floats(weight + i, size - i, w);
  load_floats(gradient + i, size - i, g);
  Words first = Words::load(first_codes + i / 4), second = Words::load(second_codes + i / 4);
  table[0].decode(first.data, first_scales[block], m);
  table[1].decode(second.data, second_scales[block], v);
  __syncwarp();  // all have read the scales
  const AdamwNumbers numbers = {gradient_factor, beta1, beta1_rest, beta2, beta2_rest, rate,
                                correction,      kept,  eps};
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) numbers.update(w[j], g[j], m[j], v[j]);
  store_floats(weight + i, size - i, w);
  const float first_scale = table[0].encode<true>(m, first.data);
  const float second_scale = table[1].encode<false>(v, second.data);
  first.store(first_codes + i / 4);
  second.store(second_codes + i / 4);
  if (threadIdx.x % WARP_SIZE == 0) {
    first_scales[block] = first_scale;
    second_scales[block] = second_scale;
  }
}
