// What rope.cu does for many tokens whose heads are rotated as a whole, by accesses of 16 bytes.

#include "attention/cached.cuh"
#include "generated/whole_rope.cuh"

// CHUNK elements of 16 bits as floats.
template <typename T>
__device__ __forceinline__ void widen_chunk(float (&values)[CHUNK], const uint4& raw) {
  const Vec<T, CHUNK> elements = __builtin_bit_cast(Vec<T, CHUNK>, raw);
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) values[i] = to_float(elements.data[i]);
}

template <typename T>
__device__ __forceinline__ uint4 round_chunk(const float (&values)[CHUNK]) {
  return make_uint4(pack<T>(values[0], values[1]), pack<T>(values[2], values[3]),
                    pack<T>(values[4], values[5]), pack<T>(values[6], values[7]));
}

// Of a head of which each of LANES lanes has CHUNK elements of either half; all lanes of a warp call. The
// order is that of HeadTransform, where a lane has two elements of either half, so that there are four such
// lanes' sums here.
template <int LANES>
__device__ __forceinline__ float head_squares(const float (&low)[CHUNK], const float (&high)[CHUNK]) {
  float sums[CHUNK / 2];
#pragma unroll
  for (int i = 0; i < CHUNK / 2; ++i) {
    const float of_low = fmaf(low[2 * i + 1], low[2 * i + 1], fmaf(low[2 * i], low[2 * i], 0.0f));
    sums[i] = fmaf(high[2 * i + 1], high[2 * i + 1], fmaf(high[2 * i], high[2 * i], of_low));
  }
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < CHUNK / 2; ++i) sums[i] += __shfl_xor_sync(FULL_WARP, sums[i], offset);
  }
  static_assert(CHUNK == 8, "four sums are added up");
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

template <typename T>
__device__ __forceinline__ void scale_chunk(float (&values)[CHUNK], float inverse_rms, const uint4& gains) {
  float factors[CHUNK];
  widen_chunk<T>(factors, gains);
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) values[i] = values[i] * inverse_rms * factors[i];
}

// Each product but the last is rounded, as in HeadTransform.
__device__ __forceinline__ void rotate_chunks(float (&low)[CHUNK], float (&high)[CHUNK],
                                              const float (&cosines)[CHUNK], const float (&sines)[CHUNK]) {
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) {
    const float front = fmaf(low[i], cosines[i], -__fmul_rn(high[i], sines[i]));
    high[i] = fmaf(high[i], cosines[i], __fmul_rn(low[i], sines[i]));
    low[i] = front;
  }
}

template <typename T, typename Cached>
__device__ __forceinline__ void store_cached(Cached* to, const uint4& raw, float scale) {
  if constexpr (IS_E4M3<Cached>) {
    float values[CHUNK];
    widen_chunk<T>(values, raw);
    if (scale != 1.0f) {  // most caches have none
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) values[i] = __fdiv_rn(values[i], scale);
    }
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_four_e4m3(values), pack_four_e4m3(values + 4));
  } else {
    *reinterpret_cast<uint4*>(to) = raw;
  }
}

// out = rotated(norm(q)), key_cache[slot] = rotated(norm(k)), value_cache[slot] = v, with the bits that
// `rope_and_store_kernel` gives.
//   in:  as of `rope_and_store_kernel`, rotary_dim being HEAD_DIM; with NORMS there is q_norm or k_norm
//   out: key_cache, value_cache [blocks, num_kv_heads, block_size, HEAD_DIM] Cached: T or e4m3
//        out [num_tokens, num_heads * HEAD_DIM] T: the queries
// Layout: row-major, all but positions and slots 16-byte aligned.
// Grid: (num_tokens, parts of the heads). Block: up to MOST_WARPS warps, all of which together have at least
// a TEAM_HEADS-th of a part's heads at a time.
// Shared memory: none.
// Unit of work: HEAD_DIM / 16 lanes TEAM_HEADS heads of a token, all of which are on their way at once.
template <typename T, typename Cached, int HEAD_DIM, bool NORMS>
__global__ void __launch_bounds__(WARP_SIZE* MOST_WARPS)
    whole_rope_and_store_kernel(WHOLE_ROPE_AND_STORE_PARAMS(T, Cached)) {
  ASSERT_ELEMENT(T);
  static_assert(sizeof(T) == 2, "a chunk is 16 bytes");
  constexpr int HALF = HEAD_DIM / 2;
  constexpr int LANES = HALF / CHUNK;
  static_assert(WARP_SIZE % LANES == 0, "a warp has whole heads");
  const int token = blockIdx.x;
  const int teams = blockDim.x / LANES;
  const int first = blockIdx.y * TEAM_HEADS * teams + threadIdx.x / LANES;
  const int place = threadIdx.x % LANES * CHUNK;
  const int heads = num_heads + 2 * num_kv_heads;
  let_next_kernel_start();

  float cosines[CHUNK], sines[CHUNK];
  const float* const angles = cos_sin + static_cast<long long>(positions[token]) * HEAD_DIM + place;
#pragma unroll
  for (int i = 0; i < CHUNK; i += 4) {
    const float4 cosine = *reinterpret_cast<const float4*>(angles + i);
    const float4 sine = *reinterpret_cast<const float4*>(angles + HALF + i);
    cosines[i] = cosine.x, cosines[i + 1] = cosine.y, cosines[i + 2] = cosine.z, cosines[i + 3] = cosine.w;
    sines[i] = sine.x, sines[i + 1] = sine.y, sines[i + 2] = sine.z, sines[i + 3] = sine.w;
  }
  // Of queries and of keys, either half's.
  uint4 gains[2][2];
  if constexpr (NORMS) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T* const norm = i / 2 == 0 ? q_norm : k_norm;
      if (norm != nullptr) gains[i / 2][i % 2] = *reinterpret_cast<const uint4*>(norm + i % 2 * HALF + place);
    }
  }
  const int slot = slot_mapping[token];
  const int block = slot / block_size;
  // Of the first head; the next ones follow after block_size rows.
  const long long row =
      static_cast<long long>(block) * num_kv_heads * block_size + (slot - block * block_size);

  wait_for_earlier_kernels();
  const T* const source = qkv + static_cast<long long>(token) * heads * HEAD_DIM + place;
  uint4 lows[TEAM_HEADS], highs[TEAM_HEADS];
#pragma unroll
  for (int i = 0; i < TEAM_HEADS; ++i) {
    const int head = first + i * teams;
    if (head < heads) {
      lows[i] = load_updated(reinterpret_cast<const uint4*>(source + head * HEAD_DIM));
      highs[i] = load_updated(reinterpret_cast<const uint4*>(source + head * HEAD_DIM + HALF));
    } else {
      lows[i] = highs[i] = make_uint4(0, 0, 0, 0);
    }
  }
#pragma unroll
  for (int i = 0; i < TEAM_HEADS; ++i) {
    const int head = first + i * teams;
    const bool is_query = head < num_heads, is_value = head >= num_heads + num_kv_heads;
    float low[CHUNK], high[CHUNK];
    widen_chunk<T>(low, lows[i]);
    widen_chunk<T>(high, highs[i]);
    if constexpr (NORMS) {
      const float inverse_rms = rsqrtf(head_squares<LANES>(low, high) / HEAD_DIM + eps);
      if ((is_query ? q_norm : k_norm) != nullptr && !is_value) {
        scale_chunk<T>(low, inverse_rms, is_query ? gains[0][0] : gains[1][0]);
        scale_chunk<T>(high, inverse_rms, is_query ? gains[0][1] : gains[1][1]);
      }
    }
    if (head >= heads) continue;
    if (!is_value) {
      rotate_chunks(low, high, cosines, sines);
      lows[i] = round_chunk<T>(low);
      highs[i] = round_chunk<T>(high);
    }
    if (is_query) {
      T* const to = out + (static_cast<long long>(token) * num_heads + head) * HEAD_DIM + place;
      store_cached<T>(to, lows[i], 1.0f);
      store_cached<T>(to + HALF, highs[i], 1.0f);
    } else if (slot >= 0) {
      const int kv_head = head - num_heads - (is_value ? num_kv_heads : 0);
      Cached* const to = (is_value ? value_cache : key_cache) +
                         (row + static_cast<long long>(kv_head) * block_size) * HEAD_DIM + place;
      const float scale = IS_E4M3<Cached> ? cache_scale(kv_scales, is_value, num_kv_heads, kv_head) : 1.0f;
      store_cached<T>(to, lows[i], scale);
      store_cached<T>(to + HALF, highs[i], scale);
    }
  }
}
