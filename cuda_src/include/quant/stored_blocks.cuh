// The quantised blocks of GGUF files as they are stored (ggml-common.h): a type's integers by the number of
// an element, and the bytes of a block that are its header, up to two ranges.
#pragma once

#include "quant/block_formats.cuh"

__device__ __forceinline__ unsigned nibble_of(const unsigned char* bytes, int byte, bool high) {
  return bytes[byte] >> (high ? 4 : 0) & 15;
}
// Two bits of an element of 128, of which 32 bytes have the lowest bits first.
__device__ __forceinline__ unsigned pair_of_bits(const unsigned char* bytes, int element) {
  return bytes[element / 128 * 32 + element % 32] >> element % 128 / 32 * 2 & 3;
}
// Bit b of byte l is of element 32 b + l.
__device__ __forceinline__ unsigned bit_of(const unsigned char* bytes, int element) {
  return bytes[element % 32] >> element / 32 & 1;
}

template <typename F>
struct Stored;

// Blocks of 32: HEADER bytes, fifth bits if FIFTH, then 16 bytes with the first 16 elements in their low
// nibbles.
template <int HEADER, bool FIFTH>
struct StoredNibbles {
  static constexpr int ELEMENTS = 32, BYTES = HEADER + (FIFTH ? 4 : 0) + 16;
  static constexpr int FIRST = 0, FIRST_BYTES = HEADER, SECOND = 0, SECOND_BYTES = 0;
  static __device__ __forceinline__ unsigned integer(const unsigned char* block, int e) {
    const unsigned low = nibble_of(block + BYTES - 16, e % 16, e >= 16);
    return FIFTH ? low | (block[HEADER + e / 8] >> e % 8 & 1) << 4 : low;
  }
};
template <>
struct Stored<Q4_0> : StoredNibbles<2, false> {};
template <>
struct Stored<Q4_1> : StoredNibbles<4, false> {};
template <>
struct Stored<Q5_0> : StoredNibbles<2, true> {};
template <>
struct Stored<Q5_1> : StoredNibbles<4, true> {};
template <>
struct Stored<IQ4_NL> : StoredNibbles<2, false> {};
template <>
struct Stored<MXFP4> : StoredNibbles<1, false> {};

template <>
struct Stored<Q8_0> {
  static constexpr int ELEMENTS = 32, BYTES = 34;
  static constexpr int FIRST = 0, FIRST_BYTES = 2, SECOND = 0, SECOND_BYTES = 0;
  static __device__ __forceinline__ unsigned integer(const unsigned char* block, int e) {
    return block[2 + e];
  }
};

template <>
struct Stored<Q2_K> {
  static constexpr int ELEMENTS = 256, BYTES = 84;
  static constexpr int FIRST = 0, FIRST_BYTES = 16, SECOND = 80, SECOND_BYTES = 4;
  static __device__ __forceinline__ unsigned integer(const unsigned char* block, int e) {
    return pair_of_bits(block + 16, e);
  }
};

template <>
struct Stored<Q3_K> {
  static constexpr int ELEMENTS = 256, BYTES = 110;
  static constexpr int FIRST = 96, FIRST_BYTES = 14, SECOND = 0, SECOND_BYTES = 0;
  static __device__ __forceinline__ unsigned integer(const unsigned char* block, int e) {
    return pair_of_bits(block + 32, e) | bit_of(block, e) << 2;
  }
};

template <>
struct Stored<Q4_K> {
  static constexpr int ELEMENTS = 256, BYTES = 144;
  static constexpr int FIRST = 0, FIRST_BYTES = 16, SECOND = 0, SECOND_BYTES = 0;
  static __device__ __forceinline__ unsigned integer(const unsigned char* block, int e) {
    return nibble_of(block + 16, e / 64 * 32 + e % 32, e % 64 >= 32);
  }
};

template <>
struct Stored<Q5_K> {
  static constexpr int ELEMENTS = 256, BYTES = 176;
  static constexpr int FIRST = 0, FIRST_BYTES = 16, SECOND = 0, SECOND_BYTES = 0;
  static __device__ __forceinline__ unsigned integer(const unsigned char* block, int e) {
    return nibble_of(block + 48, e / 64 * 32 + e % 32, e % 64 >= 32) | bit_of(block + 16, e) << 4;
  }
};

template <>
struct Stored<Q6_K> {
  static constexpr int ELEMENTS = 256, BYTES = 210;
  static constexpr int FIRST = 192, FIRST_BYTES = 18, SECOND = 0, SECOND_BYTES = 0;
  static __device__ __forceinline__ unsigned integer(const unsigned char* block, int e) {
    return nibble_of(block, e / 128 * 64 + e % 64, e % 128 >= 64) | pair_of_bits(block + 128, e) << 4;
  }
};

template <>
struct Stored<IQ4_XS> {
  static constexpr int ELEMENTS = 256, BYTES = 136;
  static constexpr int FIRST = 0, FIRST_BYTES = 8, SECOND = 0, SECOND_BYTES = 0;
  static __device__ __forceinline__ unsigned integer(const unsigned char* block, int e) {
    return nibble_of(block + 8, e / 32 * 16 + e % 16, e % 32 >= 16);
  }
};
