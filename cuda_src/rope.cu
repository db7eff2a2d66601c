// What happens to a token's projections before attention: head norms, rotary embedding, KV cache.

#include "common.cuh"

constexpr int WARPS = 4;

// Element i of a head: y[i] = x[i] / sqrt(mean(x^2) + eps) * norm[i] for query and key heads that have a
// norm, else x[i]. Then, with half = rotary_dim / 2 and i < half, for query and key heads:
//   z[i] = y[i] * cos[i] - y[i + half] * sin[i],  z[i + half] = y[i + half] * cos[i] + y[i] * sin[i];
// elements from rotary_dim on, and value heads, stay as they are.
//
// qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] T: query, key, value heads of a token;
// q_norm, k_norm [head_dim] T or null; cos_sin [positions, rotary_dim] float (cosines, then sines) or null if
// rotary_dim is 0; positions [num_tokens] int; slot_mapping [num_tokens] int, block * block_size + offset, -1
// stores nothing; key_cache, value_cache [blocks, num_kv_heads, block_size, head_dim] T;
// out [num_tokens, num_heads * head_dim] T: the queries.
// Layout: row-major; VECTOR = 2 needs pointers aligned to two elements, head_dim and rotary_dim / 2 even.
// Grid: ceil(num_tokens * (num_heads + 2 * num_kv_heads) / 4); block: 128 threads; no shared memory.
// Unit of work: one warp a head of a token.
template <typename T, int VECTOR>
__global__ void __launch_bounds__(32 * WARPS)
    rope_and_store_kernel(const T* __restrict__ qkv, const T* __restrict__ q_norm,
                          const T* __restrict__ k_norm, const float* __restrict__ cos_sin,
                          const int* __restrict__ positions, const int* __restrict__ slot_mapping,
                          T* __restrict__ key_cache, T* __restrict__ value_cache, T* __restrict__ out,
                          int num_tokens, int num_heads, int num_kv_heads, int head_dim, int rotary_dim,
                          int block_size, float eps) {
  ASSERT_ELEMENT(T);
  static_assert(VECTOR == 1 || VECTOR == 2, "a lane moves one or two elements at a time");
  using Elements = Vec<T, VECTOR>;
  using Floats = Vec<float, VECTOR>;

  const int lane = threadIdx.x % WARP_SIZE;
  const int heads_per_token = num_heads + 2 * num_kv_heads;
  const int item = blockIdx.x * WARPS + threadIdx.x / WARP_SIZE;
  if (item >= num_tokens * heads_per_token) return;
  const int token = item / heads_per_token;
  const int head = item % heads_per_token;
  const bool is_query = head < num_heads;
  const bool is_value = head >= num_heads + num_kv_heads;

  T* target;
  if (is_query) {
    target = out + (static_cast<long long>(token) * num_heads + head) * head_dim;
  } else {
    const int slot = slot_mapping[token];
    if (slot < 0) return;
    const int kv_head = is_value ? head - num_heads - num_kv_heads : head - num_heads;
    const long long row = (static_cast<long long>(slot / block_size) * num_kv_heads + kv_head) * block_size;
    target = (is_value ? value_cache : key_cache) + (row + slot % block_size) * head_dim;
  }

  const T* const source = qkv + static_cast<long long>(item) * head_dim;
  const T* const norm = is_query ? q_norm : is_value ? nullptr : k_norm;
  float inverse_rms = 1.0f;
  if (norm != nullptr) {
    float squares = 0.0f;
    for (int i = lane * VECTOR; i < head_dim; i += WARP_SIZE * VECTOR) {
      const Elements x = Elements::load(source + i);
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) squares = fmaf(to_float(x[e]), to_float(x[e]), squares);
    }
    inverse_rms = rsqrtf(warp_sum(squares) / head_dim + eps);
  }
  auto normalised = [&](int i) {
    const Elements x = Elements::load(source + i);
    Floats y;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) y[e] = to_float(x[e]);
    if (norm != nullptr) {
      const Elements weight = Elements::load(norm + i);
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) y[e] = y[e] * inverse_rms * to_float(weight[e]);
    }
    return y;
  };

  const int rotated = is_value ? 0 : rotary_dim;
  const int half = rotated / 2;
  const float* const cosines =
      cos_sin + static_cast<long long>(rotated > 0 ? positions[token] : 0) * rotary_dim;
  for (int i = lane * VECTOR; i < half; i += WARP_SIZE * VECTOR) {
    const Floats a = normalised(i);
    const Floats b = normalised(i + half);
    const Floats c = Floats::load(cosines + i);
    const Floats s = Floats::load(cosines + half + i);
    Elements low, high;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
      low[e] = from_float<T>(a[e] * c[e] - b[e] * s[e]);
      high[e] = from_float<T>(b[e] * c[e] + a[e] * s[e]);
    }
    low.store(target + i);
    high.store(target + i + half);
  }
  for (int i = rotated + lane * VECTOR; i < head_dim; i += WARP_SIZE * VECTOR) {
    const Floats y = normalised(i);
    Elements unrotated;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) unrotated[e] = from_float<T>(y[e]);
    unrotated.store(target + i);
  }
}
