// Sums over ranks, with the addition to the residual stream and the norm that follow.
#include "collectives/summands.cuh"
#include "generated/all_reduce_norm.cuh"

// 16 bytes aligned; past this multiprocessor's cache, as `load_updated`.
template <typename T>
__device__ __forceinline__ void load_words(const T* source, ChunkWords<T>& words) {
#pragma unroll
  for (int w = 0; w < ChunkWords<T>::WORDS; w += 4) {
    const uint4 four = load_updated(reinterpret_cast<const uint4*>(source) + w / 4);
    words.of[w] = four.x, words.of[w + 1] = four.y, words.of[w + 2] = four.z, words.of[w + 3] = four.w;
  }
}

template <typename T>
__device__ __forceinline__ void store_words(T* target, const ChunkWords<T>& words) {
#pragma unroll
  for (int w = 0; w < ChunkWords<T>::WORDS; w += 4)
    reinterpret_cast<uint4*>(target)[w / 4] =
        make_uint4(words.of[w], words.of[w + 1], words.of[w + 2], words.of[w + 3]);
}

// residual += x of rank 0 + x of rank 1 + ..., rounded once; normed = RMSNorm of a row of it, as
// rmsnorm_kernel. Every rank sends its rows to all others.
//   in:  x [rows, hidden] T, weight [hidden] T, boxes [ranks + 1] addresses
//   out: residual [rows, hidden] T, normed [rows, hidden] T; x stays
// Layout: contiguous, 16-byte aligned; hidden a multiple of CHUNK, at most ROW_CHUNKS chunks of each thread.
// Grid: at most COUNTED_BLOCKS, all of them on the device at a time; a block a row if ONCE. Block: whole
// warps, up to MAX_THREADS. Shared memory: none.
// Unit of work: a row of a block, for which it meets. Loads are of all chunks at once and without branches
// between them. They are early if ONCE; else more blocks take turns, which have fewer registers each.
template <typename T, bool ONCE>
__global__ void __launch_bounds__(MAX_THREADS, ONCE ? 1 : SUMMING_BLOCKS)
    all_reduce_norm_kernel(ALL_REDUCE_NORM_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  using Words = ChunkWords<T>;
  let_next_kernel_start();
  const int stride = blockDim.x * CHUNK;
  const int first = threadIdx.x * CHUNK;
  int count = 0;  // this thread's chunks
#pragma unroll
  for (int c = 0; c < ROW_CHUNKS; ++c) count += first + c * stride < hidden;
  // Of a chunk that there is not: the row's first, whose elements count nowhere.
  auto load = [&](const T* row, Words(&words)[ROW_CHUNKS]) {
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) load_words(row + (c < count ? first + c * stride : 0), words[c]);
  };
  auto store = [&](T* row, const Words(&words)[ROW_CHUNKS]) {
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
      if (c < count) store_words(row + first + c * stride, words[c]);
    }
  };
  Summands summands(boxes, rank, ranks, patience, Meeting::ALL_REDUCE_NORM);
  Words gains[ROW_CHUNKS], own[ROW_CHUNKS], stream[ROW_CHUNKS];
  if constexpr (ONCE) load(weight, gains);
  wait_for_earlier_kernels();

  summands.begin();
  const int step = gridDim.x;
#pragma unroll 1
  for (int row = blockIdx.x;; row += step) {
    const long long start = static_cast<long long>(row) * hidden;
    load(x + start, own);
    if constexpr (ONCE) load(residual + start, stream);
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
      if (c < count) summands.push(c, own[c].of);
    }
    if (row == blockIdx.x) summands.end_pushes(ceil_div(rows - row, step));

    float sums[ROW_CHUNKS][CHUNK] = {};
    auto add = [&](const Words(&words)[ROW_CHUNKS]) {
#pragma unroll
      for (int c = 0; c < ROW_CHUNKS; ++c) {
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) sums[c][j] += to_float(words[c].elements[j]);
      }
    };
    for (int other = 0; other < ranks; ++other) {
      if (other == rank) {
        add(own);
      } else if (count > 0) {
        unsigned pulled[ROW_CHUNKS][Words::WORDS];
        summands.pull(other, count, pulled);
        Words words[ROW_CHUNKS];
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS; ++c) {
#pragma unroll
          for (int w = 0; w < Words::WORDS; ++w) words[c].of[w] = pulled[c][w];
        }
        add(words);
      }
    }
    if constexpr (!ONCE) load(residual + start, stream);
    add(stream);

    float sum_of_squares = 0.0f;
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) {
        stream[c].elements[j] = from_float<T>(sums[c][j]);
        sums[c][j] = c < count ? to_float(stream[c].elements[j]) : 0.0f;
        sum_of_squares = fmaf(sums[c][j], sums[c][j], sum_of_squares);
      }
    }
    store(residual + start, stream);
    if constexpr (!ONCE) load(weight, gains);
    const float inverse_rms = rsqrtf(block_sum(sum_of_squares) / hidden + eps);
    Words out[ROW_CHUNKS];
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
#pragma unroll
      for (int j = 0; j < CHUNK; ++j)
        out[c].elements[j] = from_float<T>(sums[c][j] * inverse_rms * to_float(gains[c].elements[j]));
    }
    store(normed + start, out);
    if (ONCE || row + step >= rows) return;
    summands.begin_next();
  }
}
