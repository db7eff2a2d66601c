// Quantised weights in the order of `engine/formats/packed.py`: where a lane's part of a step lies, its
// scales, and its elements.
//
// A weight is factor * value + offset. The value is an integer of a few bits less ZERO or the zero of a
// group, a signed byte, an e4m3, or the entry of a table; factor and offset belong to 16 or 32 elements. In
// 16-bit types factor, offset and the entries of NF4 are rounded, then the whole once more: |error| <= 1.01 u
// (|factor * value| + |offset| + |w|), of NF4 1.01 u (2 |factor * value| + |w|), with u = 2^-8 (bfloat16) or
// 2^-11.
#pragma once

#include "common.cuh"
#include "generated/block_formats.cuh"
#include "pairs.cuh"
#include "ptx/mma.cuh"

constexpr int STEP = 128;          // elements of a row that four lanes take at a time
constexpr int LANE_ELEMENTS = 32;  // of them of one lane
constexpr int RECORD_WORDS = 4;    // of a header, at most, that a step needs: one for each lane

// ---- scales -----------------------------------------------------------------------------------------------

__device__ __forceinline__ float low_half(unsigned word) {
  const unsigned short bits = word & 0xffff;
  return __half2float(reinterpret_cast<const __half&>(bits));
}
__device__ __forceinline__ float high_half(unsigned word) { return low_half(word >> 16); }
__device__ __forceinline__ unsigned byte_of(unsigned word, int i) { return word >> i * 8 & 0xff; }
// As a float, by instructions that go at full speed: 2^23 more is the byte below the bits of 2^23.
__device__ __forceinline__ float float_of_byte(unsigned word, int i) {
  return __uint_as_float(__byte_perm(word, 0x4b000000, 0x7650 | i)) - 8388608.0f;
}

// d for each 32 elements.
struct HalfScale {
  static constexpr int HEADER_WORDS = 2, SPAN = STEP, GROUPS = 1;
  static constexpr bool HAS_OFFSET = false;
  static __device__ __forceinline__ void scales(const unsigned (&record)[RECORD_WORDS], int, int lane,
                                                float (&factors)[1], float (&)[1]) {
    const unsigned word = lane < 2 ? record[0] : record[1];
    factors[0] = lane % 2 == 0 ? low_half(word) : high_half(word);
  }
};

// d and m for each 32 elements.
struct HalfScaleAndOffset {
  static constexpr int HEADER_WORDS = 4, SPAN = STEP, GROUPS = 1;
  static constexpr bool HAS_OFFSET = true;
  static __device__ __forceinline__ void scales(const unsigned (&record)[RECORD_WORDS], int, int lane,
                                                float (&factors)[1], float (&offsets)[1]) {
    const unsigned word = lane < 2 ? (lane == 0 ? record[0] : record[1]) : lane == 2 ? record[2] : record[3];
    factors[0] = low_half(word);
    offsets[0] = high_half(word);
  }
};

// d, dmin, and six bits of scale and minimum for each 32 elements: Q4_K, Q5_K.
struct SixBitScaleAndMinimum {
  static constexpr int HEADER_WORDS = 4, SPAN = 256, GROUPS = 1;
  static constexpr bool HAS_OFFSET = true;
  static __device__ __forceinline__ void scales(const unsigned (&record)[RECORD_WORDS], int half, int lane,
                                                float (&factors)[1], float (&offsets)[1]) {
    // Bytes of scale and minimum: six bits for the first half of a span, of the second one the two upper bits
    // of the same bytes, and a nibble each.
    const unsigned both = __byte_perm(record[1], record[2], 0x40 + lane * 0x11);
    const unsigned last = byte_of(record[3], lane), nibbles = last | last << 4;
    const unsigned six =
        (both >> (half == 0 ? 0 : 2) & (half == 0 ? 0x3f3f : 0x3030)) | (nibbles & (half == 0 ? 0 : 0x0f0f));
    factors[0] = low_half(record[0]) * float_of_byte(six, 0);
    offsets[0] = high_half(record[0]) * -float_of_byte(six, 1);
  }
};

// Four bits of scale and minimum for each 16 elements, d, dmin.
struct FourBitScaleAndMinimum {
  static constexpr int HEADER_WORDS = 5, SPAN = 256, GROUPS = 2;
  static constexpr bool HAS_OFFSET = true;
  static __device__ __forceinline__ void scales(const unsigned (&record)[RECORD_WORDS], int, int lane,
                                                float (&factors)[2], float (&offsets)[2]) {
    const unsigned bytes = (lane < 2 ? record[0] : record[1]) >> lane % 2 * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned both = byte_of(bytes, i);
      factors[i] = low_half(record[2]) * (both & 15);
      offsets[i] = high_half(record[2]) * -static_cast<float>(both >> 4);
    }
  }
};

// Six bits of scale, less 32, for each 16 elements, d: Q3_K.
struct SixBitScale {
  static constexpr int HEADER_WORDS = 4, SPAN = 256, GROUPS = 2;
  static constexpr bool HAS_OFFSET = false;
  static __device__ __forceinline__ void scales(const unsigned (&record)[RECORD_WORDS], int half, int lane,
                                                float (&factors)[2], float (&)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int group = lane * 2 + i;  // of this half; those of the other one are 8 away
      const unsigned low = byte_of(lane < 2 ? record[0] : record[1], group % 4) >> half * 4 & 15;
      const unsigned high = byte_of(record[2], group % 4) >> (half * 2 + group / 4) * 2 & 3;
      factors[i] = low_half(record[3]) * (static_cast<int>(low | high << 4) - 32);
    }
  }
};

// A signed byte for each 16 elements, d: Q6_K.
struct ByteScale {
  static constexpr int HEADER_WORDS = 5, SPAN = 256, GROUPS = 2;
  static constexpr bool HAS_OFFSET = false;
  static __device__ __forceinline__ void scales(const unsigned (&record)[RECORD_WORDS], int, int lane,
                                                float (&factors)[2], float (&)[2]) {
    const unsigned bytes = (lane < 2 ? record[0] : record[1]) >> lane % 2 * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      factors[i] = low_half(record[2]) * (float_of_byte(bytes ^ 0x8080, i) - 128.0f);
    }
  }
};

// d, and six bits of scale, less 32, for each 32 elements: IQ4_XS.
struct SplitSixBitScale {
  static constexpr int HEADER_WORDS = 2, SPAN = 256, GROUPS = 1;
  static constexpr bool HAS_OFFSET = false;
  static __device__ __forceinline__ void scales(const unsigned (&record)[RECORD_WORDS], int half, int lane,
                                                float (&factors)[1], float (&)[1]) {
    const int group = half * 4 + lane;
    const unsigned low = record[1] >> group * 4 & 15;
    const unsigned high = record[0] >> (16 + group * 2) & 3;
    factors[0] = low_half(record[0]) * (static_cast<int>(low | high << 4) - 32);
  }
};

// 2^(e - 128) for each 32 elements; the two smallest are subnormal.
struct ExponentScale {
  static constexpr int HEADER_WORDS = 1, SPAN = STEP, GROUPS = 1;
  static constexpr bool HAS_OFFSET = false;
  static __device__ __forceinline__ void scales(const unsigned (&record)[RECORD_WORDS], int, int lane,
                                                float (&factors)[1], float (&)[1]) {
    const unsigned exponent = byte_of(record[0], lane);
    factors[0] = __uint_as_float(exponent < 2 ? 0x200000u << exponent : exponent - 1 << 23);
  }
};

// The upper 24 bits of a float and a zero of 8 for each LANES * 32 elements: groups of safetensors files.
template <int LANES>
struct GroupScale {
  static constexpr int HEADER_WORDS = 4 / LANES, SPAN = STEP, GROUPS = 1;
  static constexpr bool HAS_OFFSET = false;
  static __device__ __forceinline__ void scales(const unsigned (&record)[RECORD_WORDS], int, int lane,
                                                float (&factors)[1], float (&zeros)[1]) {
    factors[0] = __uint_as_float(word(record, lane) & 0xffffff00);
    zeros[0] = zero(record, lane);
  }
  static __device__ __forceinline__ unsigned zero(const unsigned (&record)[RECORD_WORDS], int lane) {
    return word(record, lane) & 0xff;
  }

 private:
  static __device__ __forceinline__ unsigned word(const unsigned (&record)[RECORD_WORDS], int lane) {
    if (LANES == 4) return record[0];
    if (LANES == 2) return lane < 2 ? record[0] : record[1];
    return lane < 2 ? (lane == 0 ? record[0] : record[1]) : lane == 2 ? record[2] : record[3];
  }
};

// ---- types ------------------------------------------------------------------------------------------------

// LOW and HIGH are the bits of an integer's planes, Values the table in which it is looked up.
struct NoTable {
  static constexpr bool LOOKS_UP = false;
};
template <typename Scale, int LOW_BITS, int HIGH_BITS, int ZERO_VALUE = 0, typename Values = NoTable>
struct BlockFormat : Scale {
  using Table = Values;
  static constexpr int LOW = LOW_BITS, HIGH = HIGH_BITS, ZERO = ZERO_VALUE;
  static constexpr bool SIGNED = LOW == 8 || Values::LOOKS_UP;  // a value is a signed byte
  static constexpr int GROUP_ZERO = -1;  // in whose place the header has a zero, where it has one
  static constexpr bool IS_E4M3 = false, IS_NF4 = false, IS_E2M1 = false;
  static constexpr int LANE_WORDS = LOW + HIGH;
  static constexpr int STEP_WORDS = LANE_WORDS * 4;
  static constexpr int STEPS_A_SPAN = Scale::SPAN / STEP;
};

struct Q4_0 : BlockFormat<HalfScale, 4, 0, 8> {};
struct Q4_1 : BlockFormat<HalfScaleAndOffset, 4, 0> {};
struct Q5_0 : BlockFormat<HalfScale, 4, 1, 16> {};
struct Q5_1 : BlockFormat<HalfScaleAndOffset, 4, 1> {};
struct Q8_0 : BlockFormat<HalfScale, 8, 0> {};
struct Q2_K : BlockFormat<FourBitScaleAndMinimum, 2, 0> {};
struct Q3_K : BlockFormat<SixBitScale, 2, 1, 4> {};
struct Q4_K : BlockFormat<SixBitScaleAndMinimum, 4, 0> {};
struct Q5_K : BlockFormat<SixBitScaleAndMinimum, 4, 1> {};
struct Q6_K : BlockFormat<ByteScale, 4, 2, 32> {};
struct IQ4_NL : BlockFormat<HalfScale, 4, 0, 0, NonlinearTable> {};
struct IQ4_XS : BlockFormat<SplitSixBitScale, 4, 0, 0, NonlinearTable> {};
struct MXFP4 : BlockFormat<ExponentScale, 4, 0, 0, TwiceE2M1Table> {
  static constexpr bool IS_E2M1 = true;
};

template <int LANES>
struct Int4 : BlockFormat<GroupScale<LANES>, 4, 0> {
  static constexpr int GROUP_ZERO = 0;
};
struct Int4Group32 : Int4<1> {};
struct Int4Group64 : Int4<2> {};
struct Int4Group128 : Int4<4> {};
template <int LANES>
struct Int8 : BlockFormat<GroupScale<LANES>, 8, 0> {
  static constexpr int GROUP_ZERO = 128;
};
struct Int8Group32 : Int8<1> {};
struct Int8Group64 : Int8<2> {};
struct Int8Group128 : Int8<4> {};
struct Fp8Group128 : BlockFormat<GroupScale<4>, 8, 0> {
  static constexpr bool IS_E4M3 = true;
};
template <int LANES>
struct Nf4 : BlockFormat<GroupScale<LANES>, 4, 0> {
  static constexpr bool IS_NF4 = true;
};
struct Nf4Group64 : Nf4<2> {};
struct Nf4Group128 : Nf4<4> {};

// The word of a span's header that lane `lane` brings into the record of its step; none where it is negative.
template <typename F>
__device__ __forceinline__ int header_word(int half, int lane) {
  if (F::HEADER_WORDS == 5) return lane < 2 ? half * 2 + lane : lane == 2 ? 4 : -1;
  return lane < F::HEADER_WORDS ? lane : -1;
}

// ---- elements ---------------------------------------------------------------------------------------------

// A lane's words of a step, those of the low plane first.
template <typename F>
struct alignas(16) LaneCodes {
  unsigned words[F::LANE_WORDS];
};

// A lane's words of a step lie in two pieces: 4 words at most of the low plane, and the rest if there is one.
// A piece has those of the four lanes one after the other.
template <typename F>
constexpr int FIRST_WORDS = F::LOW == 8 ? 4 : F::LOW;
template <typename F>
constexpr int SECOND_WORDS = F::LANE_WORDS - FIRST_WORDS<F>;
template <typename F>
__device__ __forceinline__ int first_piece(int lane) {
  return lane * FIRST_WORDS<F>;
}
template <typename F>
__device__ __forceinline__ int second_piece(int lane) {
  return 4 * FIRST_WORDS<F> + lane * SECOND_WORDS<F>;
}

template <int WORDS>
__device__ __forceinline__ void copy_words(unsigned* to, const unsigned* from) {
  Vec<unsigned, WORDS>::load(from).store(to);
}
template <typename F>
__device__ __forceinline__ LaneCodes<F> load_lane_codes(const unsigned* step, int lane) {
  LaneCodes<F> codes;
  copy_words<FIRST_WORDS<F>>(codes.words, step + first_piece<F>(lane));
  if constexpr (SECOND_WORDS<F> > 0) {
    copy_words<SECOND_WORDS<F>>(codes.words + FIRST_WORDS<F>, step + second_piece<F>(lane));
  }
  return codes;
}

// Pair i (of 16) of a plane of BITS bits, at bit TO of both halves of a word; `base` has the other bits.
template <int BITS, int TO>
__device__ __forceinline__ unsigned field_pair(const unsigned* words, int i, unsigned base) {
  constexpr int A_WORD = 16 / BITS;
  constexpr unsigned MASK = ((1u << BITS) - 1) * 0x00010001u << TO;
  const int shift = i % A_WORD * BITS - TO;
  const unsigned word = words[i / A_WORD];
  return mask_into(shift >= 0 ? word >> shift : word << -shift, MASK, base);
}

// Bytes of a table of 16, by the eight nibbles of a word: those of the lower half, then those of the upper
// one.
template <typename Table>
__device__ __forceinline__ uint2 look_up(unsigned nibbles) {
  unsigned bytes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned four = nibbles >> i * 16;
    const unsigned low = __byte_perm(Table::WORD_0, Table::WORD_1, four & 0x7777);
    const unsigned high = __byte_perm(Table::WORD_2, Table::WORD_3, four & 0x7777);
    bytes[i] = __byte_perm(low, high, 0x3210 | (four & 0x8888) >> 1);
  }
  return make_uint2(bytes[0], bytes[1]);
}

// Adds a plane of BITS bits, at bit TO of each byte, to the bytes of a round.
template <int BITS, int TO>
__device__ __forceinline__ void place_plane(const unsigned* words, int round, uint2& bytes) {
  const int field = round * 4 % (16 / BITS);  // of pair 0, whose halves lie 16 bits apart
  const unsigned word = words[round * 4 / (16 / BITS)];
  if constexpr (BITS == 4 && TO == 0) {  // pairs 0 and 2 lie in bytes already
    bytes.x = word & 0x0f0f0f0f;
    bytes.y = word >> 4 & 0x0f0f0f0f;
    return;
  }
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const int to = TO + pair / 2 * 8;
    const unsigned mask = ((1u << BITS) - 1) * 0x00010001u << to;
    const int shift = (field + pair) * BITS - to;
    const unsigned moved = shift >= 0 ? word >> shift : word << -shift;
    unsigned& half = pair % 2 == 0 ? bytes.x : bytes.y;
    half = (moved & mask) | half;
  }
}

// The integers of a round in the last bits of `base`, or the signed bytes that they stand for with anything
// above them: pairs [4], even elements in the lower halves.
template <typename F>
__device__ __forceinline__ void integers(const LaneCodes<F>& codes, int round, unsigned base,
                                         unsigned (&pairs)[4]) {
  if constexpr (F::Table::LOOKS_UP) {
    const uint2 bytes = look_up<typename F::Table>(codes.words[round]);
#pragma unroll
    for (int p = 0; p < 4; ++p) pairs[p] = byte_of(bytes.x, p) | byte_of(bytes.y, p) << 16;
  } else if constexpr (F::LOW == 8) {
#pragma unroll
    for (int p = 0; p < 4; ++p) pairs[p] = codes.words[(round * 4 + p) / 2] >> p % 2 * 8;
  } else {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      pairs[p] = field_pair<F::LOW, 0>(codes.words, round * 4 + p, base);
      if constexpr (F::HIGH > 0) {
        pairs[p] = field_pair<F::HIGH, F::LOW>(codes.words + F::LOW, round * 4 + p, pairs[p]);
      }
    }
  }
}

// The same as bytes: elements 0, 4, 1, 5 of a round in x, 2, 6, 3, 7 in y; signed where the values are. The
// value of an unsigned one is so much less a zero.
template <typename F>
__device__ __forceinline__ uint2 integer_bytes(const LaneCodes<F>& codes, int round) {
  static_assert(!F::IS_E4M3 && !F::IS_NF4 && F::HIGH < 2, "others are no integers, or in pairs");
  if constexpr (F::Table::LOOKS_UP) {  // even elements, then odd ones
    const uint2 bytes = look_up<typename F::Table>(codes.words[round]);
    return make_uint2(__byte_perm(bytes.x, bytes.y, 0x6420), __byte_perm(bytes.x, bytes.y, 0x7531));
  } else if constexpr (F::LOW == 8) {  // a word has elements 0, 2, 1, 3, the next one 4, 6, 5, 7
    const unsigned first = codes.words[round * 2], second = codes.words[round * 2 + 1];
    return make_uint2(__byte_perm(first, second, 0x6240), __byte_perm(first, second, 0x7351));
  } else {
    uint2 bytes = make_uint2(0, 0);
    place_plane<F::LOW, 0>(codes.words, round, bytes);
    if constexpr (F::HIGH == 1) place_plane<1, F::LOW>(codes.words + F::LOW, round, bytes);
    return bytes;
  }
}

// The integers of rounds 2 i and 2 i + 1 as bytes, where a plane of two bits lies above one of four: elements
// 2 p and 2 p + 1 of both rounds, in turn, in word p.
template <typename F>
__device__ __forceinline__ uint4 paired_bytes(const LaneCodes<F>& codes, int i) {
  static_assert(F::HIGH == 2 && F::LOW == 4, "two bits above four");
  const unsigned begin = __byte_perm(codes.words[i * 2], codes.words[i * 2 + 1], 0x6240);
  const unsigned end = __byte_perm(codes.words[i * 2], codes.words[i * 2 + 1], 0x7351);
  const unsigned two = codes.words[F::LOW + i];
  constexpr unsigned FOUR = 0x0f0f0f0f, TWO = 0x30303030;
  return make_uint4(mask_into(begin, FOUR, two << 4 & TWO), mask_into(begin >> 4, FOUR, two << 2 & TWO),
                    mask_into(end, FOUR, two & TWO), mask_into(end >> 4, FOUR, two >> 2 & TWO));
}

template <typename T>
constexpr unsigned INTEGER_BASE = 0x64006400;  // 1024 in both halves: an integer below 128 is its last bits
template <>
constexpr unsigned INTEGER_BASE<__nv_bfloat16> = 0x43004300;  // 128

// e4m3 as T has the exponent of T, which counts from another bias: what it then lacks is in the factor.
template <typename T>
constexpr float E4M3_FACTOR = 256.0f;
template <>
constexpr float E4M3_FACTOR<float> = 1.0f;
template <>
constexpr float E4M3_FACTOR<__nv_bfloat16> = 1.329227995784916e36f;  // 2^120

template <typename T>
constexpr int E4M3_SHIFT = 7;  // to the last bit of T's exponent
template <>
constexpr int E4M3_SHIFT<__nv_bfloat16> = 4;

struct AsTheyAre {
  __device__ __forceinline__ float operator()(float number) const { return number; }
};
struct Times {
  float factor;
  __device__ __forceinline__ float operator()(float number) const { return number * factor; }
};

// Factors and offsets of a lane's elements as T takes them: in pairs of equal halves, or floats. The offsets
// of a group with a zero are what is subtracted from integers in the last bits of INTEGER_BASE, or from
// bytes.
template <typename T, typename F>
struct LaneScales {
  unsigned factors[F::GROUPS], offsets[F::GROUPS];

  __device__ __forceinline__ LaneScales() {}
  // Of the weights, or of `scale` times them.
  template <typename Scale = AsTheyAre>
  __device__ __forceinline__ LaneScales(const unsigned (&record)[RECORD_WORDS], int half, int lane,
                                        const Scale& scale = {}) {
    float wide_factors[F::GROUPS], wide_offsets[F::GROUPS] = {};
    F::scales(record, half, lane, wide_factors, wide_offsets);
#pragma unroll
    for (int i = 0; i < F::GROUPS; ++i) {
      wide_factors[i] = scale(wide_factors[i]);
      if constexpr (F::GROUP_ZERO < 0) wide_offsets[i] = scale(wide_offsets[i]);
    }
    if constexpr (F::IS_E4M3) wide_factors[0] *= E4M3_FACTOR<T>;
    if constexpr (F::GROUP_ZERO >= 0) wide_offsets[0] -= F::GROUP_ZERO;
    if constexpr (F::GROUP_ZERO == 0 && sizeof(T) == 2) {
      factors[0] = pair_of_one(wide_factors[0]);
      offsets[0] = INTEGER_BASE<T> + F::zero(record, lane) * 0x00010001u;
      return;
    }
#pragma unroll
    for (int i = 0; i < F::GROUPS; ++i) {
      factors[i] = pair_of_one(wide_factors[i]);
      offsets[i] = pair_of_one(wide_offsets[i]);
    }
  }

 private:
  static __device__ __forceinline__ unsigned pair_of_one(float value) {
    if constexpr (sizeof(T) == 4) {
      return __float_as_uint(value);
    } else {
      return pack<T>(value, value);
    }
  }
};

// Which of a lane's eight elements in a row it takes in a round: two rounds' are one half of its 32.
__device__ __forceinline__ int vector_of_round(int round, int lane) { return round ^ lane % 4; }

// Where a turned row (see turn_rows_kernel) has elements i and i + 1, i even: pair p of a vector is in
// segment p of the lane's round.
__device__ __forceinline__ int turned_place(int i) {
  const int lane = i % STEP / LANE_ELEMENTS, round = vector_of_round(i % LANE_ELEMENTS / 8, lane);
  return i / STEP * STEP + round * LANE_ELEMENTS + i % 8 * 4 + lane * 2;
}

// The bytes of NF4's entries in a 16-bit T.
template <typename T>
struct Nf4Bytes {
  using Low = Nf4Float16Byte0;
  using High = Nf4Float16Byte1;
};
template <>
struct Nf4Bytes<__nv_bfloat16> {
  using Low = Nf4Bfloat16Byte0;
  using High = Nf4Bfloat16Byte1;
};

// The entries of NF4 in T for the eight nibbles of a word: pairs [4], even elements in the lower halves.
template <typename T>
__device__ __forceinline__ void nf4_pairs(unsigned nibbles, unsigned (&pairs)[4]) {
  const uint2 low = look_up<typename Nf4Bytes<T>::Low>(nibbles);
  const uint2 high = look_up<typename Nf4Bytes<T>::High>(nibbles);
#pragma unroll
  for (int p = 0; p < 4; p += 2) {
    const unsigned order = p == 0 ? 0x5140 : 0x7362;  // of two elements' bytes
    const unsigned even = __byte_perm(low.x, high.x, order), odd = __byte_perm(low.y, high.y, order);
    pairs[p] = __byte_perm(even, odd, 0x5410);
    pairs[p + 1] = __byte_perm(even, odd, 0x7632);
  }
}

// The e2m1 of a word's eight nibbles in bfloat16 times 2^-126, in a third of the instructions of a table: the
// sign, and a magnitude's three bits where the last bit of the exponent would be, and one beside it on both
// sides. That is right for subnormal ones, too. Pairs [4], of which pair p is nibble p of both halves.
__device__ __forceinline__ void e2m1_pairs(unsigned word, unsigned (&pairs)[4]) {
  constexpr unsigned MASK = 0x81c081c0;
  // A nibble is moved by 12 and by 6, or by 8 and by 2: its sign and its magnitude to their places.
  pairs[0] = (word & 0x000f000fu) * 0x1040u & MASK;
  pairs[1] = (word & 0x00f000f0u) * 0x0104u & MASK;
  pairs[2] = (word >> 8 & 0x000f000fu) * 0x1040u & MASK;
  pairs[3] = mask_into(word, 0x80008000u, word >> 6 & 0x01c001c0u);
}

// Eight elements of a 16-bit T: pairs of neighbours.
template <typename T, typename F>
__device__ __forceinline__ uint4 elements_of(const LaneCodes<F>& codes, int round, int lane,
                                             const LaneScales<T, F>& scales) {
  using Pair = typename pair_of<T>::type;
  constexpr unsigned BASE = INTEGER_BASE<T>;
  const bool second = F::GROUPS == 2 && vector_of_round(round, lane) >= 2;
  const unsigned factor = second ? scales.factors[F::GROUPS - 1] : scales.factors[0];
  const unsigned offset = second ? scales.offsets[F::GROUPS - 1] : scales.offsets[0];
  unsigned pairs[4];
  if constexpr (F::IS_NF4) {
    nf4_pairs<T>(codes.words[round], pairs);
#pragma unroll
    for (int p = 0; p < 4; ++p) pairs[p] = multiply_pair<Pair>(pairs[p], factor);
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  if constexpr (F::IS_E2M1 && has_float_range<T>) {
    constexpr unsigned TWICE = 0x7f007f00;  // 2^127: factors are of twice the values
    e2m1_pairs(codes.words[round], pairs);
#pragma unroll
    for (int p = 0; p < 4; ++p) pairs[p] = multiply_pair<Pair>(multiply_pair<Pair>(pairs[p], TWICE), factor);
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  integers<F>(codes, round, F::SIGNED ? 0 : BASE, pairs);
  if constexpr (F::IS_E4M3) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const unsigned magnitude = (pairs[p] & 0x007f007f) << E4M3_SHIFT<T>;
      pairs[p] = multiply_pair<Pair>(mask_into(pairs[p] << 8, 0x80008000, magnitude), factor);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  if constexpr (F::GROUP_ZERO == 0) {
#pragma unroll
    for (int p = 0; p < 4; ++p) pairs[p] = multiply_pair<Pair>(subtract_pair<Pair>(pairs[p], offset), factor);
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    // Bit 7 of a signed byte counts -128: the difference of 128 and 256, or of 1024 and 1152.
    const unsigned value = F::SIGNED ? subtract_pair<Pair>(mask_into(pairs[p], 0x007f007f, BASE),
                                                           mask_into(pairs[p], 0x00800080, BASE))
                                     : subtract_pair<Pair>(pairs[p], BASE + F::ZERO * 0x00010001u);
    if constexpr (F::GROUP_ZERO >= 0) {
      pairs[p] = multiply_pair<Pair>(subtract_pair<Pair>(value, offset), factor);
    } else {
      pairs[p] =
          F::HAS_OFFSET ? multiply_add_pair<Pair>(value, factor, offset) : multiply_pair<Pair>(value, factor);
    }
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// The entries of NF4 for the eight nibbles of a word.
__device__ __forceinline__ void nf4_floats(unsigned nibbles, float (&elements)[8]) {
  const uint2 bytes[4] = {look_up<Nf4Float32Byte0>(nibbles), look_up<Nf4Float32Byte1>(nibbles),
                          look_up<Nf4Float32Byte2>(nibbles), look_up<Nf4Float32Byte3>(nibbles)};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    unsigned word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= byte_of(e % 2 == 0 ? bytes[i].x : bytes[i].y, e / 2) << i * 8;
    elements[e] = __uint_as_float(word);
  }
}

// The same as floats, in the arithmetic of ggml.
template <typename F>
__device__ __forceinline__ void float_elements_of(const LaneCodes<F>& codes, int round, int lane,
                                                  const LaneScales<float, F>& scales, float (&elements)[8]) {
  const bool second = F::GROUPS == 2 && vector_of_round(round, lane) >= 2;
  const float factor = __uint_as_float(second ? scales.factors[F::GROUPS - 1] : scales.factors[0]);
  const float offset = __uint_as_float(second ? scales.offsets[F::GROUPS - 1] : scales.offsets[0]);
  unsigned pairs[4];
  if constexpr (F::IS_NF4) {
    nf4_floats(codes.words[round], elements);
#pragma unroll
    for (int e = 0; e < 8; ++e) elements[e] = __fmul_rn(factor, elements[e]);
    return;
  }
  integers<F>(codes, round, 0, pairs);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const unsigned bits = pairs[e / 2] >> e % 2 * 16 & 0xffff;
    if constexpr (F::IS_E4M3) {
      // As a half its exponent counts from another bias by eight.
      elements[e] = __fmul_rn(factor, low_half((bits & 0x7f) << 7 | (bits & 0x80) << 8) * 256.0f);
      continue;
    }
    if constexpr (F::GROUP_ZERO >= 0) {
      const int integer = F::SIGNED ? static_cast<signed char>(bits) : static_cast<int>(bits);
      elements[e] = __fmul_rn(factor, integer - offset);
      continue;
    }
    const int value = F::SIGNED ? static_cast<signed char>(bits) : static_cast<int>(bits) - F::ZERO;
    const float product = __fmul_rn(factor, value);
    elements[e] = F::HAS_OFFSET ? product + offset : product;
  }
}
