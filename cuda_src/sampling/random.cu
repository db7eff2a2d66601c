// Normal random numbers that depend on nothing but the seed and the element's index.
#include "common.cuh"
#include "generated/random.cuh"
#include "sampling/philox.cuh"

namespace {

// Two standard normal numbers from two words (Box and Muller 1958): r * cos(2 pi u2) and r * sin(2 pi u2)
// with r = sqrt(-2 ln u1), u1 = ((first >> 8) + 1) * 2^-24 in (0, 1], u2 = (second >> 8) * 2^-24 in [0, 1).
__device__ __forceinline__ float2 box_muller(unsigned first, unsigned second) {
  constexpr float STEP = 1.0f / 16777216.0f;
  const float radius = sqrtf(-2.0f * logf(static_cast<float>((first >> 8) + 1) * STEP));
  float sine, cosine;
  sincospif(2.0f * (static_cast<float>(second >> 8) * STEP), &sine, &cosine);
  return make_float2(radius * cosine, radius * sine);
}

}  // namespace

// out[i] = mean + deviation * z[i], z standard normal. Elements 4 b .. 4 b + 3 come from one Philox4x32-10
// block (Salmon et al. 2011) with key (seed's low word, high word) and counter (b's low word, high word, 0,
// 0): the first two of its words make the first two elements, the others the other two (see box_muller).
//   in:  numbers alone
//   out: out [size] T
// Layout: contiguous; vector stores where addresses allow them.
// Grid: blocks that cover the size. Block: 256 threads. Shared memory: none.
// Unit of work: four elements per thread.
template <typename T>
__global__ void fill_normal_kernel(FILL_NORMAL_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long block = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long i = block * PHILOX_WORDS;
  if (i >= size) return;
  const uint4 counter = make_uint4(static_cast<unsigned>(block), static_cast<unsigned>(block >> 32), 0u, 0u);
  const uint2 key = make_uint2(static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32));
  const uint4 words = philox4x32_10(counter, key);
  const float2 front = box_muller(words.x, words.y);
  const float2 back = box_muller(words.z, words.w);
  const float values[PHILOX_WORDS] = {mean + deviation * front.x, mean + deviation * front.y,
                                      mean + deviation * back.x, mean + deviation * back.y};
  store_floats(out + i, size - i, values);
}
