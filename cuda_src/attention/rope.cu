// What happens to a token's projections before attention: head norms, rotary embedding, KV cache.
// decode.cu does the same for steps in which every row has one token.

#include "attention/cached.cuh"
#include "attention/rope.cuh"
#include "generated/rope.cuh"

// out = rotated(norm(q)), key_cache[slot] = rotated(norm(k)), value_cache[slot] = v: heads are normalised
// (where they have a norm) and rotated as HeadTransform says.
//   in:  qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] T: query, key, value heads of a token
//        q_norm, k_norm [head_dim] T or null
//        cos_sin [positions, rotary_dim] float (cosines, then sines) or null if rotary_dim is 0
//        positions [num_tokens] int
//        slot_mapping [num_tokens] int, block * block_size + offset, -1 stores nothing
//        kv_scales [2, num_kv_heads] float, of keys and values as e4m3, or null: 1
//   out: key_cache, value_cache [blocks, num_kv_heads, block_size, head_dim] Cached: T or e4m3
//        out [num_tokens, num_heads * head_dim] T: the queries
// Layout: row-major; head_dim <= MAX_HEAD_DIM; VECTOR = 2 needs pointers aligned to two elements, head_dim
// and rotary_dim / 2 even.
// Grid: (num_tokens, ceil((ceil(num_heads / part_heads) + 2 * ceil(num_kv_heads / part_heads)) / 4)).
// Block: 128 threads.
// Shared memory: none.
// Unit of work: a warp up to part_heads heads of one kind of a token, which have norm and angles in common.
template <typename T, typename Cached, int VECTOR, int MAX_HEAD_DIM>
__global__ void __launch_bounds__(32 * WARPS) rope_and_store_kernel(ROPE_AND_STORE_PARAMS(T, Cached)) {
  ASSERT_ELEMENT(T);
  static_assert(VECTOR == 1 || VECTOR == 2, "a lane moves one or two elements at a time");
  using Transform = HeadTransform<MAX_HEAD_DIM, VECTOR, T>;
  const int query_parts = ceil_div(num_heads, part_heads);
  const int kv_parts = ceil_div(num_kv_heads, part_heads);
  const int token = blockIdx.x;
  const int part = blockIdx.y * WARPS + threadIdx.x / WARP_SIZE;
  if (part >= query_parts + 2 * kv_parts) return;
  let_next_kernel_start();
  const bool is_query = part < query_parts;
  const bool is_value = part >= query_parts + kv_parts;
  // Within its kind.
  const int first = (part - (is_query ? 0 : is_value ? query_parts + kv_parts : query_parts)) * part_heads;
  const int count = min((is_query ? num_heads : num_kv_heads) - first, part_heads);

  T* target = nullptr;  // of the first head; the next ones follow after `stride`
  Cached* codes = nullptr;
  int stride = head_dim;
  if (is_query) {
    target = out + (static_cast<long long>(token) * num_heads + first) * head_dim;
  } else {
    const int slot = slot_mapping[token];
    const long long row = (static_cast<long long>(slot / block_size) * num_kv_heads + first) * block_size;
    Cached* const cached =
        slot < 0 ? nullptr : (is_value ? value_cache : key_cache) + (row + slot % block_size) * head_dim;
    if constexpr (IS_E4M3<Cached>) {
      codes = cached;
    } else {
      target = cached;
    }
    stride *= block_size;
  }
  const int rotated = is_value ? 0 : rotary_dim;
  const float* const angles =
      rotated > 0 ? cos_sin + static_cast<long long>(positions[token]) * rotary_dim : nullptr;
  const T* const norm = is_query ? q_norm : is_value ? nullptr : k_norm;
  const Transform transform(norm, angles, head_dim, rotated, eps);
  const int head = first + (is_query ? 0 : is_value ? num_heads + num_kv_heads : num_heads);
  const T* const heads =
      qkv + (static_cast<long long>(token) * (num_heads + 2 * num_kv_heads) + head) * head_dim;

  wait_for_earlier_kernels();
  if (target == nullptr && (!IS_E4M3<Cached> || codes == nullptr)) return;
  typename Transform::Head current = transform.load(heads), next = current, after_next = current;
  if (count > 1) next = transform.load(heads + head_dim);
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    if (i + 2 < count) after_next = transform.load(heads + (i + 2) * head_dim);
    if (IS_E4M3<Cached> && codes != nullptr) {
      if constexpr (IS_E4M3<Cached>) {
        Cached* const to = codes + i * stride;
        const float scale = cache_scale(kv_scales, is_value ? 1 : 0, num_kv_heads, first + i);
        transform(current, [&](int e, const Vec<T, VECTOR>& z) { store_e4m3(to + e, z, scale); });
      }
    } else {
      T* const to = target + i * stride;
      transform(current, [&](int e, const Vec<T, VECTOR>& z) { z.store(to + e); });
    }
    current = next;
    next = after_next;
  }
}
