// The quantised blocks of GGUF files: from the order of a file to that of the kernels, and to elements that
// the dense products take.
#include "generated/blocks.cuh"
#include "quant/block_formats.cuh"
#include "quant/int8_codes.cuh"
#include "quant/stored_blocks.cuh"
#include "quant/stored_row.cuh"

constexpr int STEP_VECTORS = STEP / 8;                        // of eight elements
constexpr int WARP_STEPS = WARP_SIZE * LANE_ELEMENTS / STEP;  // that a warp's lanes take at once

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

// Shared memory of a warp: vectors of eight elements, those of a step in a row; where neighbours have the
// same one, eight lanes that store at once and eight that load have different banks.
__device__ __forceinline__ int staged_vector(int step, int vector) {
  return step * STEP_VECTORS + (vector ^ (step & 1));
}

// The numbers of a lane's part of a step, zeros where it has none, as floats to `out` or in 16 bits to
// `staged`.
template <typename T, typename F>
struct LanePart {
  LaneCodes<F> codes;
  LaneScales<T, F> scales;
  int step, lane;
  bool is_there;

  // Of the numbers, or of `scale` times them.
  template <typename Scale = AsTheyAre>
  __device__ __forceinline__ LanePart(const unsigned* row_codes, const unsigned* row_headers, int step,
                                      int lane, bool is_there, const Scale& scale = {})
      : step(step), lane(lane), is_there(is_there) {
    unsigned record[RECORD_WORDS] = {};
    codes = {};
    if (is_there) {
      codes = load_lane_codes<F>(row_codes + step * F::STEP_WORDS, lane);
#pragma unroll
      for (int l = 0; l < RECORD_WORDS; ++l) {
        const int word = header_word<F>(step % F::STEPS_A_SPAN, l);
        if (word >= 0) record[l] = row_headers[step / F::STEPS_A_SPAN * F::HEADER_WORDS + word];
      }
    }
    scales = LaneScales<T, F>(record, step % F::STEPS_A_SPAN, lane, scale);
  }

  __device__ __forceinline__ void store(float* row, int columns) const {
#pragma unroll
    for (int round = 0; round < 4; ++round) {
      float numbers[8] = {};
      if (is_there) float_elements_of<F>(codes, round, lane, scales, numbers);
      const int first = step * STEP + lane * LANE_ELEMENTS + vector_of_round(round, lane) * 8;
      store_floats(row + first, columns - first, numbers);
    }
  }

  __device__ __forceinline__ void stage(uint4* staged, int place) const {
#pragma unroll
    for (int round = 0; round < 4; ++round) {
      const uint4 elements =
          is_there ? elements_of<T, F>(codes, round, lane, scales) : make_uint4(0, 0, 0, 0);
      staged[staged_vector(place, lane * 4 + vector_of_round(round, lane))] = elements;
    }
  }
};

// out[r] = the numbers that row s = stored_row(r) stands for, or zeros where there is none.
//   in:  codes [num_stored, steps * F::STEP_WORDS] unsigned and headers [num_stored, spans * F::HEADER_WORDS]
//        unsigned, as packed; ids [rows] int32 or null, sampled [any] int32 or null
//   out: out [rows, columns] T
// Layout: contiguous rows; out 16-byte aligned, columns a multiple of 32.
// Grid: blocks whose warps cover all rows. Block: ROW_WARPS warps. Shared memory: 2 KB for each warp.
// Unit of work: one warp WARP_STEPS steps of a row, four lanes a step. 16-bit elements pass through shared
// memory, for what a lane has lies in pieces of 16 bytes and memory takes whole lines.
template <typename T, typename F>
__global__ void __launch_bounds__(ROW_WARPS* WARP_SIZE)
    dequantize_blocks_kernel(DEQUANTIZE_BLOCKS_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  __shared__ uint4 staging[sizeof(T) == 2 ? ROW_WARPS : 1][WARP_STEPS * STEP_VECTORS];
  const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  const int num_spans = ceil_div(columns, F::SPAN);
  const int num_steps = num_spans * F::STEPS_A_SPAN;
  const int pieces = ceil_div(num_steps, WARP_STEPS);
  const int piece = blockIdx.x * ROW_WARPS + warp, row = piece / pieces;
  if (ids != nullptr) wait_for_earlier_kernels();
  const long long source = row < rows ? stored_row(ids, sampled, row, num_stored) : -1;
  const int first = (piece - row * pieces) * WARP_STEPS, step = first + lane / 4;
  const LanePart<T, F> part(codes + source * num_steps * F::STEP_WORDS,
                            headers + source * num_spans * F::HEADER_WORDS, step, lane % 4,
                            source >= 0 && step < num_steps);
  if (ids == nullptr) wait_for_earlier_kernels();  // a product may still read what was there
  if (row >= rows) return;
  T* const to = out + static_cast<long long>(row) * columns;
  if constexpr (sizeof(T) == 4) {
    part.store(to, columns);
  } else {
    part.stage(staging[warp], lane / 4);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < WARP_STEPS * STEP_VECTORS; i += WARP_SIZE) {
      const int vector = i + lane, column = first * STEP + vector * 8;
      if (column < columns) {
        reinterpret_cast<uint4*>(to + column)[0] =
            staging[warp][staged_vector(vector / STEP_VECTORS, vector % STEP_VECTORS)];
      }
    }
  }
}

// The largest magnitude of a lane's numbers, as bits, and of half of their offsets: codes of numbers that are
// small beside what they are the difference of would be rounded too far.
template <typename F>
__device__ __forceinline__ unsigned largest_of(const LanePart<float, F>& part) {
  unsigned largest = 0;
#pragma unroll
  for (int round = 0; round < 4; ++round) {
    float numbers[8];
    float_elements_of<F>(part.codes, round, part.lane, part.scales, numbers);
#pragma unroll
    for (int e = 0; e < 8; ++e) largest = max(largest, __float_as_uint(fabsf(numbers[e])));
  }
  if constexpr (F::HAS_OFFSET && F::GROUP_ZERO < 0) {
#pragma unroll
    for (int i = 0; i < F::GROUPS; ++i) {
      largest = max(largest, __float_as_uint(fabsf(__uint_as_float(part.scales.offsets[i])) * 0.5f));
    }
  }
  return largest;
}

// scales[r] = max |w| / 127 of row r, its scale as int8; NaN where one of its numbers is.
//   in:  codes, headers as of `dequantize_blocks_kernel`
//   out: scales [rows] float
// Layout: contiguous rows.
// Grid: rows. Block: ROW_WARPS warps. Shared memory: none dynamic.
// Unit of work: one block a row, one warp WARP_STEPS steps of it at a time.
template <typename F>
__global__ void __launch_bounds__(ROW_WARPS* WARP_SIZE) block_scales_kernel(BLOCK_SCALES_PARAMS) {
  __shared__ unsigned largest_of_warps[ROW_WARPS];
  const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  const long long row = blockIdx.x;
  const int num_spans = ceil_div(columns, F::SPAN);
  const int num_steps = num_spans * F::STEPS_A_SPAN;
  const unsigned* const row_codes = codes + row * num_steps * F::STEP_WORDS;
  const unsigned* const row_headers = headers + row * num_spans * F::HEADER_WORDS;
  unsigned largest = 0;
#pragma unroll 1
  for (int first = warp * WARP_STEPS; first < num_steps; first += ROW_WARPS * WARP_STEPS) {
    const int step = first + lane / 4;
    if (step * STEP + lane % 4 * LANE_ELEMENTS >= columns) continue;
    largest = max(largest, largest_of<F>(LanePart<float, F>(row_codes, row_headers, step, lane % 4, true)));
  }
  largest = __reduce_max_sync(FULL_WARP, largest);
  if (lane == 0) largest_of_warps[warp] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ROW_WARPS; ++i) largest = max(largest, largest_of_warps[i]);
  if (threadIdx.x == 0) scales[row] = Int8Scale::of(__uint_as_float(largest)).scale;
}

// A lane's 32 numbers, at most 127 in magnitude, as integers to `to` in their order.
template <typename F>
__device__ __forceinline__ void store_int8(const LanePart<__half, F>& part, uint4* to) {
  uint2 vectors[4];
#pragma unroll
  for (int round = 0; round < 4; ++round) {
    vectors[round] = int8_codes_of_halves(elements_of<__half, F>(part.codes, round, part.lane, part.scales));
  }
  // Round r has vector r ^ lane (see `vector_of_round`).
  if (part.lane & 1) swap_vectors(vectors[0], vectors[1]), swap_vectors(vectors[2], vectors[3]);
  if (part.lane & 2) swap_vectors(vectors[0], vectors[2]), swap_vectors(vectors[1], vectors[3]);
  to[0] = make_uint4(vectors[0].x, vectors[0].y, vectors[1].x, vectors[1].y);
  to[1] = make_uint4(vectors[2].x, vectors[2].y, vectors[3].x, vectors[3].y);
}

// values[r] = integers that times scales[r] are the numbers of row r, off by at most 0.9: numbers over scales
// are halves before they are rounded.
//   in:  codes, headers as of `dequantize_blocks_kernel`; scales [rows] float, of `block_scales_kernel`
//   out: values [rows, columns] int8
// Layout: contiguous rows; values 16-byte aligned, columns a multiple of 32.
// Grid: (rows, blocks whose warps cover a row). Block: whole warps, up to ROW_WARPS. Shared memory: none.
// Unit of work: one warp WARP_STEPS steps of a row, four lanes a step.
template <typename F>
__global__ void __launch_bounds__(ROW_WARPS* WARP_SIZE) blocks_to_int8_kernel(BLOCKS_TO_INT8_PARAMS) {
  const int lane = threadIdx.x % WARP_SIZE;
  const int num_spans = ceil_div(columns, F::SPAN);
  const int num_steps = num_spans * F::STEPS_A_SPAN;
  const long long row = blockIdx.x;
  const int step = (blockIdx.y * blockDim.x + threadIdx.x) / WARP_SIZE * WARP_STEPS + lane / 4;
  const int first = step * STEP + lane % 4 * LANE_ELEMENTS;
  const bool is_there = first < columns;
  const LanePart<__half, F> part(codes + row * num_steps * F::STEP_WORDS,
                                 headers + row * num_spans * F::HEADER_WORDS, step, lane % 4, is_there,
                                 Times{is_there ? __fdividef(1.0f, scales[row]) : 0.0f});
  wait_for_earlier_kernels();  // a product may still read what was there
  if (is_there) store_int8<F>(part, reinterpret_cast<uint4*>(values + row * columns + first));
}
