// What happens to a token's projections before attention: head norms, rotary embedding, KV cache.
// attention_decode.cu does the same for steps in which every row has one token.

#include "rope.cuh"

constexpr int WARPS = 4;
constexpr int MAX_HEAD_DIM = 256;

// Query and key heads are normalised (where they have a norm) and rotated as HeadTransform says, value
// heads stay as they are; keys and values go to the cache, queries to out.
//
// qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] T: query, key, value heads of a token;
// q_norm, k_norm [head_dim] T or null; cos_sin [positions, rotary_dim] float (cosines, then sines) or null if
// rotary_dim is 0; positions [num_tokens] int; slot_mapping [num_tokens] int, block * block_size + offset, -1
// stores nothing; key_cache, value_cache [blocks, num_kv_heads, block_size, head_dim] T;
// out [num_tokens, num_heads * head_dim] T: the queries.
// Layout: row-major; head_dim <= 256; VECTOR = 2 needs pointers aligned to two elements, head_dim and
// rotary_dim / 2 even. Grid: ceil(num_tokens * (num_heads + 2 * num_kv_heads) / 4); block: 128 threads; no
// shared memory. Unit of work: one warp a head of a token.
template <typename T, int VECTOR>
__global__ void __launch_bounds__(32 * WARPS)
    rope_and_store_kernel(const T* qkv, const T* q_norm, const T* k_norm, const float* cos_sin,
                          const int* positions, const int* slot_mapping, T* key_cache, T* value_cache, T* out,
                          int num_tokens, int num_heads, int num_kv_heads, int head_dim, int rotary_dim,
                          int block_size, float eps) {
  ASSERT_ELEMENT(T);
  static_assert(VECTOR == 1 || VECTOR == 2, "a lane moves one or two elements at a time");
  const int heads_per_token = num_heads + 2 * num_kv_heads;
  const int item = blockIdx.x * WARPS + threadIdx.x / WARP_SIZE;
  if (item >= num_tokens * heads_per_token) return;
  let_next_kernel_start();
  const int token = item / heads_per_token;
  const int head = item % heads_per_token;
  const bool is_query = head < num_heads;
  const bool is_value = head >= num_heads + num_kv_heads;

  T* target;
  if (is_query) {
    target = out + (static_cast<long long>(token) * num_heads + head) * head_dim;
  } else {
    const int slot = slot_mapping[token];
    const int kv_head = is_value ? head - num_heads - num_kv_heads : head - num_heads;
    const long long row = (static_cast<long long>(slot / block_size) * num_kv_heads + kv_head) * block_size;
    target = slot < 0 ? nullptr : (is_value ? value_cache : key_cache) + (row + slot % block_size) * head_dim;
  }
  const int rotated = is_value ? 0 : rotary_dim;
  const float* const angles =
      rotated > 0 ? cos_sin + static_cast<long long>(positions[token]) * rotary_dim : nullptr;

  const HeadTransform<MAX_HEAD_DIM, VECTOR, T> transform(is_query   ? q_norm
                                                         : is_value ? nullptr
                                                                    : k_norm,
                                                         angles, head_dim, rotated, eps);

  wait_for_earlier_kernels();
  if (target == nullptr) return;
  transform(qkv + static_cast<long long>(item) * head_dim,
            [&](int i, const Vec<T, VECTOR>& z) { z.store(target + i); });
}
