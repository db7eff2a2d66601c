// A warp's tile of 16 keys and their values in shared memory, and how its elements become operands of mma
// (ptx/mma.cuh): elements of the activations by ldmatrix, e4m3 by conversions in registers.
#pragma once

#include "attention/cached.cuh"
#include "generated/decode.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"

// Of keys and values in T. Rows are padded by 16 bytes, so that eight of them fill all banks.
template <typename T, typename Cached, int HEAD_DIM>
struct KeyTile {
  using Operand = OperandOf<T, Cached>;  // of queries and weights, too
  static constexpr int PITCH = HEAD_DIM + SEGMENT;
  static constexpr int TILE_ELEMENTS = WARP_KEYS * PITCH;
  static constexpr int BYTES = 2 * TILE_ELEMENTS * sizeof(T);

  const T* keys;    // [WARP_KEYS, PITCH]
  const T* values;  // [WARP_KEYS, PITCH]

  __device__ __forceinline__ explicit KeyTile(const unsigned char* tile)
      : keys(reinterpret_cast<const T*>(tile)), values(keys + TILE_ELEMENTS) {}

  // Right operands of elements 16 d to 16 d + 15: of keys 0 to 7, and of 8 to 15.
  __device__ __forceinline__ void load_keys(int d, unsigned (&b)[4]) {
    const int lane = threadIdx.x % WARP_SIZE;
    ldmatrix_x4(b, keys + (lane % 8 + lane / 16 * 8) * PITCH + d * 16 + lane / 8 % 2 * 8);
  }
  // A left operand with a row an element of 16, a column a key.
  __device__ __forceinline__ void load_values(int d, unsigned (&a)[4]) {
    const int lane = threadIdx.x % WARP_SIZE;
    ldmatrix_x4_trans(a, values + (lane % 8 + lane / 16 * 8) * PITCH + d * 16 + lane / 8 % 2 * 8);
  }

  // Elements of a query, from `first` on, to its row in shared memory.
  template <int COUNT>
  static __device__ __forceinline__ void store_query(Operand* row, int first, const Vec<T, COUNT>& elements) {
    elements.store(row + first);
  }

  // A lane's outputs of two heads to their rows of `merged`, MERGE_PITCH floats apart; `scale` is 1.
  template <int MERGE_PITCH>
  static __device__ __forceinline__ void move_outputs(float* merged, float (&outputs)[HEAD_DIM / 16][4],
                                                      int num_heads, float scale) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; ++d) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int head = lane % 4 * 2 + e % 2;
        if (head < num_heads) merged[head * MERGE_PITCH + d * 16 + e / 2 * 8 + lane / 4] = outputs[d][e];
        outputs[d][e] = 0.0f;
      }
    }
  }
};

// Of e4m3, which become __half exactly; the scales are left to scores and outputs. The elements of a
// product's sum, and the rows of its result, are in such an order that what a lane needs lies together: it
// has pieces of KEY_PIECE codes of a key, and of VALUE_PIECE of each of four values. Where a row fills all
// banks or half of them, its 16-byte segments change places from key to key, so that no two lanes ask for the
// same bank.
template <typename T, int HEAD_DIM>
struct KeyTile<T, unsigned char, HEAD_DIM> {
  using Operand = OperandOf<T, unsigned char>;
  static constexpr int PITCH = HEAD_DIM + SEGMENT;  // of queries
  static constexpr int CODES = 16;                  // of a segment
  static constexpr int KIND_BYTES = WARP_KEYS * HEAD_DIM;
  static constexpr int BYTES = 2 * KIND_BYTES;
  static constexpr int KEY_PIECE = HEAD_DIM % 64 == 0 ? 16 : HEAD_DIM % 32 == 0 ? 8 : 4;
  static constexpr int VALUE_PIECE = HEAD_DIM % 128 == 0  ? 16
                                     : HEAD_DIM % 64 == 0 ? 8
                                     : HEAD_DIM % 32 == 0 ? 4
                                                          : 2;
  static constexpr int KEY_STEPS = KEY_PIECE / 4;      // products that a piece is for
  static constexpr int VALUE_STEPS = VALUE_PIECE / 2;  // the same

  const unsigned char* keys;  // [WARP_KEYS, HEAD_DIM], then values
  unsigned pieces[4][(KEY_PIECE > VALUE_PIECE ? KEY_PIECE : VALUE_PIECE) / 4];

  __device__ __forceinline__ explicit KeyTile(const unsigned char* tile) : keys(tile) {}

  // Where byte `at` of a key, or a value, is among all of them.
  static __device__ __forceinline__ int place(int key, int at) {
    int segment = at / CODES;
    if constexpr (HEAD_DIM % 128 == 0) segment ^= (key & 6) ^ (key & 1) << 2;
    if constexpr (HEAD_DIM == 64) segment ^= key >> 1 & 3;
    return key * HEAD_DIM + segment * CODES + at % CODES;
  }

  __device__ __forceinline__ void load_keys(int d, unsigned (&b)[4]) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int step = d % KEY_STEPS;
    if (step == 0) {
      const int at = d / KEY_STEPS * 4 * KEY_PIECE + lane % 4 * KEY_PIECE;
#pragma unroll
      for (int half = 0; half < 2; ++half) load<KEY_PIECE>(half, keys + place(half * 8 + lane / 4, at));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 halves = unpack_four_e4m3(pieces[half][step]);
      b[half * 2] = halves.x, b[half * 2 + 1] = halves.y;
    }
  }

  __device__ __forceinline__ void load_values(int d, unsigned (&a)[4]) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int step = d % VALUE_STEPS;
    if (step == 0) {
      const int at = d / VALUE_STEPS * 8 * VALUE_PIECE + lane / 4 * VALUE_PIECE;
#pragma unroll
      for (int key = 0; key < 4; ++key) {
        load<VALUE_PIECE>(key, keys + KIND_BYTES + place(key / 2 * 8 + lane % 4 * 2 + key % 2, at));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // two elements of two keys each
      const unsigned pairs = __byte_perm(pieces[half * 2][step / 2], pieces[half * 2 + 1][step / 2],
                                         step % 2 == 0 ? 0x5140 : 0x7362);
      const uint2 halves = unpack_four_e4m3(pairs);
      a[half * 2] = halves.x, a[half * 2 + 1] = halves.y;
    }
  }

  // Elements of a query, from `first` on, in the order of a lane's codes.
  template <int COUNT>
  static __device__ __forceinline__ void store_query(Operand* row, int first, const Vec<T, COUNT>& elements) {
#pragma unroll
    for (int e = 0; e < COUNT; e += 2) {
      const int i = first + e, in_piece = i % KEY_PIECE;
      const int step = i / (4 * KEY_PIECE) * KEY_STEPS + in_piece / 4;
      const int to = step * 16 + in_piece % 4 / 2 * 8 + i / KEY_PIECE % 4 * 2;
      *reinterpret_cast<unsigned*>(row + to) = half_pair(elements[e], elements[e + 1]);
    }
  }

  template <int MERGE_PITCH>
  static __device__ __forceinline__ void move_outputs(float* merged, float (&outputs)[HEAD_DIM / 16][4],
                                                      int num_heads, float scale) {
    constexpr int AT_ONCE = VALUE_PIECE == 2 ? 2 : 4;
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int head = lane % 4 * 2 + column;
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 16; d += AT_ONCE / 2) {
        const int element = d / VALUE_STEPS * 8 * VALUE_PIECE + lane / 4 * VALUE_PIECE + d % VALUE_STEPS * 2;
        Vec<float, AT_ONCE> scaled;
#pragma unroll
        for (int e = 0; e < AT_ONCE; ++e) {
          float& output = outputs[d + e / 2][e % 2 * 2 + column];
          scaled[e] = output * scale;
          output = 0.0f;
        }
        if (head < num_heads) scaled.store(merged + head * MERGE_PITCH + element);
      }
    }
  }

 private:
  template <int PIECE>
  __device__ __forceinline__ void load(int i, const unsigned char* from) {
    if constexpr (PIECE == 16) {
      const uint4 codes = *reinterpret_cast<const uint4*>(from);
      pieces[i][0] = codes.x;
      pieces[i][1] = codes.y;
      pieces[i][2] = codes.z;
      pieces[i][3] = codes.w;
    } else if constexpr (PIECE == 8) {
      const uint2 codes = *reinterpret_cast<const uint2*>(from);
      pieces[i][0] = codes.x;
      pieces[i][1] = codes.y;
    } else if constexpr (PIECE == 4) {
      pieces[i][0] = *reinterpret_cast<const unsigned*>(from);
    } else {
      pieces[i][0] = *reinterpret_cast<const unsigned short*>(from);
    }
  }
};
