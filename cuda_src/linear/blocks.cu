// The quantised blocks of GGUF files: from the order of a file to that of the kernels, and to elements that
// the dense products take.
#include "block_formats.cuh"
#include "generated/blocks.cuh"
#include "stored_blocks.cuh"
#include "stored_row.cuh"

// Integer `element` of a row; zeros after its end.
template <typename F>
__device__ __forceinline__ unsigned stored_integer(const unsigned char* row, int element, int columns) {
  using S = Stored<F>;
  if (element >= columns) return 0;
  return S::integer(row + static_cast<long long>(element / S::ELEMENTS) * S::BYTES, element % S::ELEMENTS);
}

// Byte `byte` of a span's header; zeros after the last block.
template <typename F>
__device__ __forceinline__ unsigned stored_header_byte(const unsigned char* row, int span, int byte,
                                                       int columns) {
  using S = Stored<F>;
  constexpr int A_BLOCK = S::FIRST_BYTES + S::SECOND_BYTES;
  const int block = span * (F::SPAN / S::ELEMENTS) + byte / A_BLOCK;
  if (byte / A_BLOCK >= F::SPAN / S::ELEMENTS || block * S::ELEMENTS >= columns) return 0;
  const int place = byte % A_BLOCK;
  const int offset = place < S::FIRST_BYTES ? S::FIRST + place : S::SECOND + place - S::FIRST_BYTES;
  return row[static_cast<long long>(block) * S::BYTES + offset];
}

// A lane's part of a step, as `PackedFormat.pack` in engine/formats/packed_blocks.py has it.
template <typename F>
__device__ __forceinline__ LaneCodes<F> packed_codes(const unsigned char* row, int first, int lane,
                                                     int columns) {
  LaneCodes<F> codes = {};
#pragma unroll
  for (int i = 0; i < LANE_ELEMENTS; ++i) {
    const int pair = i / 2;
    const int element = first + lane * LANE_ELEMENTS + vector_of_round(pair / 4, lane) * 8 + i % 8;
    const unsigned integer = stored_integer<F>(row, element, columns);
    const int half = i % 2 * 16;
    codes.words[pair / (16 / F::LOW)] |= (integer & ((1u << F::LOW) - 1))
                                         << (pair % (16 / F::LOW) * F::LOW + half);
    if constexpr (F::HIGH > 0) {
      codes.words[F::LOW + pair / (16 / F::HIGH)] |=
          integer >> F::LOW << (pair % (16 / F::HIGH) * F::HIGH + half);
    }
  }
  return codes;
}

// codes[r], headers[r] = the blocks of row r in the order of the kernels.
//   in:  stored [rows, bytes of a row] unsigned char, as in a file
//   out: codes [rows, steps * F::STEP_WORDS] unsigned, with steps of 128 elements
//        headers [rows, spans * F::HEADER_WORDS] unsigned, with spans of F::SPAN elements; zeros fill the
//        last one
// Layout: contiguous rows of whole blocks.
// Grid: rows. Block: whole warps, up to 1024 threads. Shared memory: none.
// Unit of work: one block per row; a thread takes a lane's part of a step, or a word of a header.
template <typename F>
__global__ void pack_blocks_kernel(PACK_BLOCKS_PARAMS) {
  const long long row = blockIdx.x;
  const int num_spans = ceil_div(columns, F::SPAN);
  const int num_steps = num_spans * F::STEPS_A_SPAN;
  const unsigned char* const from = stored + row * (columns / Stored<F>::ELEMENTS * Stored<F>::BYTES);
  for (int i = threadIdx.x; i < num_steps * 4; i += blockDim.x) {
    const int step = i / 4, lane = i % 4;
    const LaneCodes<F> packed = packed_codes<F>(from, step * STEP, lane, columns);
    unsigned* const to = codes + (row * num_steps + step) * F::STEP_WORDS;
    copy_words<FIRST_WORDS<F>>(to + first_piece<F>(lane), packed.words);
    if constexpr (SECOND_WORDS<F> > 0) {
      copy_words<SECOND_WORDS<F>>(to + second_piece<F>(lane), packed.words + FIRST_WORDS<F>);
    }
  }
  for (int i = threadIdx.x; i < num_spans * F::HEADER_WORDS; i += blockDim.x) {
    unsigned word = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int byte = i % F::HEADER_WORDS * 4 + b;
      word |= stored_header_byte<F>(from, i / F::HEADER_WORDS, byte, columns) << b * 8;
    }
    headers[row * num_spans * F::HEADER_WORDS + i] = word;
  }
}

// out[r] = the numbers that row s = stored_row(r) stands for, or zeros where there is none.
//   in:  codes [num_stored, steps * F::STEP_WORDS] unsigned and headers [num_stored, spans * F::HEADER_WORDS]
//        unsigned, as packed; ids [rows] int32 or null, sampled [any] int32 or null
//   out: out [rows, columns] T
// Layout: contiguous rows; 16-byte stores where addresses allow them.
// Grid: rows. Block: whole warps, up to 1024 threads. Shared memory: none.
// Unit of work: one block per row; a thread takes a lane's part of a step.
template <typename T, typename F>
__global__ void dequantize_blocks_kernel(DEQUANTIZE_BLOCKS_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const long long row = blockIdx.x;
  const long long source = stored_row(ids, sampled, row, num_stored);
  const int num_spans = ceil_div(columns, F::SPAN);
  const int num_steps = num_spans * F::STEPS_A_SPAN;
  for (int i = threadIdx.x; i < num_steps * 4; i += blockDim.x) {
    const int step = i / 4, lane = i % 4;
    float numbers[4][8] = {};
    if (source >= 0) {
      const unsigned* const header =
          headers + (source * num_spans + step / F::STEPS_A_SPAN) * F::HEADER_WORDS;
      unsigned record[RECORD_WORDS] = {};
#pragma unroll
      for (int l = 0; l < RECORD_WORDS; ++l) {
        const int word = header_word<F>(step % F::STEPS_A_SPAN, l);
        if (word >= 0) record[l] = header[word];
      }
      const LaneScales<T, F> scales(record, step % F::STEPS_A_SPAN, lane);
      const LaneCodes<F> packed =
          load_lane_codes<F>(codes + (source * num_steps + step) * F::STEP_WORDS, lane);
#pragma unroll
      for (int round = 0; round < 4; ++round) {
        if constexpr (sizeof(T) == 4) {
          float_elements_of<F>(packed, round, lane, scales, numbers[round]);
        } else {
          const uint4 elements = elements_of<T, F>(packed, round, lane, scales);
          const Vec<T, 8> vector = reinterpret_cast<const Vec<T, 8>&>(elements);
#pragma unroll
          for (int e = 0; e < 8; ++e) numbers[round][e] = to_float(vector[e]);
        }
      }
    }
#pragma unroll
    for (int round = 0; round < 4; ++round) {
      const int first = step * STEP + lane * LANE_ELEMENTS + vector_of_round(round, lane) * 8;
      store_floats(out + row * columns + first, columns - first, numbers[round]);
    }
  }
}
