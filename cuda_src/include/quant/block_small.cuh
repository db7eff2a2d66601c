// Elements of quantised blocks times 2^-40 in bfloat16, in fewer instructions than `elements_of` takes.
//
// An integer of up to eight bits in the last bits of a bfloat16 is that times 2^-133: a subnormal number, or
// one of the smallest exponent, whose last bit counts as much. So integers need no base that is subtracted
// again, and nibbles may stay where they lie in a byte. The factor has the power of two that they lack, but
// for 2^-40, which leaves it room above; products, which are in float32, get that back. No rounding differs.
#pragma once

#include "quant/block_formats.cuh"

constexpr float SMALL = 1.0f / (1ull << 40);

// Whether there are such elements of a type: nibbles, and six bits in two planes.
template <typename T, typename F>
constexpr bool HAS_SMALL = has_float_range<T> && sizeof(T) == 2 && !F::Table::LOOKS_UP && !F::IS_NF4 &&
                           F::LOW == 4 && (F::HIGH == 0 || F::HIGH == 2);

// What the sums of products are multiplied by.
template <typename T, typename F>
constexpr float SUMS_FACTOR = HAS_SMALL<T, F> ? 1.0f / SMALL : 1.0f;

// `factor` is a constant that bfloat16 holds exactly. Its bits are taken, as the compiler does not fold the
// conversion.
__device__ __forceinline__ unsigned scaled_pair(unsigned pair, float factor) {
  return multiply_pair<__nv_bfloat162>(pair, (__float_as_uint(factor) >> 16) * 0x00010001u);
}

// Factors of integers in a half's last bits; `upper`, and zeros, of those four bits above. Zeros are in
// integers' place.
template <typename F>
struct SmallScales {
  static constexpr bool HAS_ZERO = F::GROUP_ZERO >= 0;
  static constexpr float FACTOR = 9903520314283042199192993792.0f;  // 2^133 * 2^-40
  unsigned factors[F::GROUPS], upper, offsets[F::GROUPS], upper_zero;

  __device__ __forceinline__ SmallScales() {}
  __device__ __forceinline__ SmallScales(const unsigned (&record)[RECORD_WORDS], int half, int lane) {
    const LaneScales<__nv_bfloat16, F> scales(record, half, lane);
#pragma unroll
    for (int i = 0; i < F::GROUPS; ++i) {
      factors[i] = scaled_pair(scales.factors[i], FACTOR);
      if (F::HAS_OFFSET) offsets[i] = scaled_pair(scales.offsets[i], SMALL);
      if (F::ZERO > 0) offsets[i] = scaled_pair(scales.factors[i], -F::ZERO * SMALL);
    }
    upper = scaled_pair(factors[0], 1.0f / 16);
    if (HAS_ZERO) {
      offsets[0] = scales.offsets[0] & 0x00ff00ff ^ INTEGER_BASE<__nv_bfloat16> & 0x00ff00ff;
      upper_zero = scaled_pair(offsets[0], 16.0f);
    }
  }
};

// A pair of integers as elements.
template <typename F>
__device__ __forceinline__ unsigned small_pair(unsigned integers, unsigned factor, unsigned offset) {
  using Pair = __nv_bfloat162;
  if constexpr (SmallScales<F>::HAS_ZERO) {
    return multiply_pair<Pair>(subtract_pair<Pair>(integers, offset), factor);
  } else {
    return multiply_add_pair<Pair>(integers, factor, offset);
  }
}

// Of rounds 2 i and 2 i + 1 the pairs of a lane, as `elements_of` has them.
template <typename F>
__device__ __forceinline__ void small_elements(const LaneCodes<F>& codes, int i, int lane,
                                               const SmallScales<F>& scales, uint4 (&rounds)[2]) {
  if constexpr (F::HIGH == 2) {
    static_assert(F::GROUPS == 2, "both rounds have one of a lane's groups");
    const bool second = vector_of_round(i * 2, lane) >= 2;
    const unsigned factor = second ? scales.factors[1] : scales.factors[0];
    const unsigned offset = second ? scales.offsets[1] : scales.offsets[0];
    const uint4 bytes = paired_bytes<F>(codes, i);
    const unsigned words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    unsigned first[4], last[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      first[p] = small_pair<F>(words[p] & 0x00ff00ff, factor, offset);
      last[p] = small_pair<F>(__byte_perm(words[p], 0, 0x4341), factor, offset);
    }
    rounds[0] = make_uint4(first[0], first[1], first[2], first[3]);
    rounds[1] = make_uint4(last[0], last[1], last[2], last[3]);
  } else {
#pragma unroll
    for (int round = 0; round < 2; ++round) {
      const unsigned low = codes.words[i * 2 + round], high = low >> 8;
      const unsigned offset = scales.offsets[0];
      const unsigned upper_offset = SmallScales<F>::HAS_ZERO ? scales.upper_zero : offset;
      rounds[round] = make_uint4(small_pair<F>(low & 0x000f000f, scales.factors[0], offset),
                                 small_pair<F>(low & 0x00f000f0, scales.upper, upper_offset),
                                 small_pair<F>(high & 0x000f000f, scales.factors[0], offset),
                                 small_pair<F>(high & 0x00f000f0, scales.upper, upper_offset));
    }
  }
}

// A lane's scales of a step of one row, and what it makes with them of its codes: elements, times
// 2^-40 where SMALL_ELEMENTS.
template <typename T, typename F, bool SMALL_ELEMENTS = HAS_SMALL<T, F>>
struct ElementMaker {
  LaneScales<T, F> scales;

  __device__ __forceinline__ void begin(const unsigned (&record)[RECORD_WORDS], int half, int lane) {
    scales = LaneScales<T, F>(record, half, lane);
  }
  // The pairs of rounds 2 i and 2 i + 1.
  __device__ __forceinline__ void make(const LaneCodes<F>& codes, int i, int lane, uint4 (&rounds)[2]) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) rounds[j] = elements_of<T, F>(codes, i * 2 + j, lane, scales);
  }
};
template <typename T, typename F>
struct ElementMaker<T, F, true> {
  SmallScales<F> scales;

  __device__ __forceinline__ void begin(const unsigned (&record)[RECORD_WORDS], int half, int lane) {
    scales = SmallScales<F>(record, half, lane);
  }
  __device__ __forceinline__ void make(const LaneCodes<F>& codes, int i, int lane, uint4 (&rounds)[2]) const {
    small_elements<F>(codes, i, lane, scales, rounds);
  }
};
