// A norm and the product of its rows with adapters, side by side. products.cu has that product by itself.

#include "lora/lora_tiles.cuh"
#include "pairs.cuh"

// The elements of a row's operand times those of `gains`, to `high` what T holds of each product and to `low`
// what that leaves: in bfloat16 the two together are the product to the last bit.
template <typename T>
__device__ __forceinline__ void multiply_gains(Line& high, Line& low, const Line& gains) {
  using Pair = typename pair_of<T>::type;
  constexpr unsigned SIGNS = 0x80008000;
  auto multiply = [&](unsigned& values, unsigned& rests, unsigned by) {
    const unsigned product = multiply_pair<Pair>(values, by);
    rests = multiply_add_pair<Pair>(values, by, product ^ SIGNS);
    values = product;
  };
#pragma unroll
  for (int i = 0; i < CHUNK_LINES; ++i) {
    multiply(high[i].x, low[i].x, gains[i].x);
    multiply(high[i].y, low[i].y, gains[i].y);
    multiply(high[i].z, low[i].z, gains[i].z);
    multiply(high[i].w, low[i].w, gains[i].w);
  }
}

// The norms of the block's rows, `row_threads` threads each, with the sums of rmsnorm_kernel in its order;
// the inverse of each row's root mean square to `inverses`.
template <typename T>
__device__ __forceinline__ void norm_rows(const T* x, const T* gains, T* normed, float* inverses,
                                          int first_row, int num_rows, int width, int row_threads,
                                          float eps) {
  using Segment = Vec<T, SEGMENT>;
  __shared__ float partial[LORA_SHRINK_WARPS];
  const int lane = threadIdx.x % WARP_SIZE;
  const int place = threadIdx.x / row_threads, thread = threadIdx.x % row_threads;
  const int row = first_row + place;
  const int row_warps = row_threads / WARP_SIZE;
  const bool is_row = row < num_rows && place < blockDim.x / row_threads;
  const long long start = static_cast<long long>(row) * width;
  auto column_of = [&](int i) { return (i * row_threads + thread) * SEGMENT; };
  uint4 loaded_gains[LORA_NORM_CHUNKS] = {}, loaded[LORA_NORM_CHUNKS] = {};
#pragma unroll
  for (int i = 0; i < LORA_NORM_CHUNKS; ++i) {
    if (column_of(i) < width) loaded_gains[i] = *reinterpret_cast<const uint4*>(gains + column_of(i));
  }
  wait_for_earlier_kernels();
#pragma unroll
  for (int i = 0; i < LORA_NORM_CHUNKS; ++i) {
    const T* const from = x + start + column_of(i);
    if (is_row && column_of(i) < width) loaded[i] = load_updated(reinterpret_cast<const uint4*>(from));
  }
  float sum_of_squares = 0.0f;
#pragma unroll
  for (int i = 0; i < LORA_NORM_CHUNKS; ++i) {
    const Segment& values = reinterpret_cast<const Segment&>(loaded[i]);
#pragma unroll
    for (int c = 0; c < SEGMENT; ++c) {
      const float value = to_float(values[c]);
      sum_of_squares = fmaf(value, value, sum_of_squares);
    }
  }
  sum_of_squares = warp_sum(sum_of_squares);
  if (lane == 0) partial[threadIdx.x / WARP_SIZE] = sum_of_squares;
  __syncthreads();
  if (!is_row) return;
  const float total = warp_sum(lane < row_warps ? partial[place * row_warps + lane] : 0.0f);
  const float inverse_rms = rsqrtf(total / width + eps);
  if (thread == 0) inverses[row] = inverse_rms;
#pragma unroll
  for (int i = 0; i < LORA_NORM_CHUNKS; ++i) {
    if (column_of(i) >= width) continue;
    const Segment& values = reinterpret_cast<const Segment&>(loaded[i]);
    const Segment& row_gains = reinterpret_cast<const Segment&>(loaded_gains[i]);
    Segment result;
#pragma unroll
    for (int c = 0; c < SEGMENT; ++c) {
      result[c] = from_float<T>(to_float(values[c]) * inverse_rms * to_float(row_gains[c]));
    }
    result.store(normed + start + column_of(i));
  }
}

// normed[row] = x[row] / rms(row) * gains, inverses[row] = 1 / rms(row), and
// shrunk[slice, row, p, r] = sum over the slice's k of x[row, k] * (gains[k] * a[slot, p, r, k]), for r below
// the slot's rank: the product with A of what lora_expand_kernel multiplies by `inverses`. So neither waits
// for the other. rms(row) = sqrt(mean of x[row]^2 + eps).
//   in:  x [num_rows, width] T, gains [width] T; a [slots, parts, max_rank, width] T, 0 from the slot's rank
//        on; factors [slots, parts] float, 0: there is no such part; ranks [slots] int; groups of
//        group_rows_kernel
//   out: normed [num_rows, width] T, inverses [num_rows] float; shrunk [slices, num_rows, parts, max_rank]
//        float, of which only rows and parts with an adapter are written
// Layout: row-major; x, gains, normed and a 16-byte aligned, width a multiple of 8, and at most
// row_threads * LORA_NORM_CHUNKS segments.
// Grid: num_tiles, then what makes blocks enough for the norms; parts times blocks of LORA_RANKS ranks;
// slices of LORA_SLICE of the width.
// Block: LORA_SHRINK_WARPS warps. Shared memory: none dynamic.
// Unit of work: a tile by LORA_RANKS ranks by a slice, a warp a chunk; or the norms of as many rows as there
// are row_threads in a block. Chunks are added in order to slices.
template <typename T>
__global__ void __launch_bounds__(LORA_SHRINK_WARPS* WARP_SIZE, 2)
    lora_shrink_norm_kernel(LORA_SHRINK_NORM_PARAMS(T)) {
  static_assert(sizeof(T) == 2 && has_float_range<T>, "x is multiplied before its norm: bfloat16");
  static_assert(LORA_SHRINK_WARPS * WARP_SIZE == LORA_ROWS * LORA_RANKS, "a thread adds up one sum");
  __shared__ ChunkSums<LORA_SHRINK_WARPS> chunk_sums;
  let_next_kernel_start();
  if (blockIdx.x >= num_tiles) {
    const int block = ((blockIdx.x - num_tiles) * gridDim.y + blockIdx.y) * gridDim.z + blockIdx.z;
    const int first_row = block * (blockDim.x / row_threads);
    if (first_row < num_rows) {
      norm_rows(x, gains, normed, inverses, first_row, num_rows, width, row_threads, eps);
    }
    return;
  }
  const int lane = threadIdx.x % WARP_SIZE;
  const int g = lane / 4, t = lane % 4;
  ShrinkTile tile(groups, ranks, factors, num_rows, num_slots, parts, max_rank);
  const int k = blockIdx.z * LORA_SLICE + threadIdx.x / WARP_SIZE * LORA_CHUNK + t * SEGMENT;
  Line line_gains;
  load_line(line_gains, gains + k, width - k, [](const T* from) { return load_once_16(from); });
  if (!tile.find_rank()) {
    leave_to_others();
    return;
  }
  const T* const a_rows = a + tile.matrix_row(parts, max_rank, g) * width + k;
  // Rows g and 8 + g of A, each as what T holds of its product with the gains, and the rest.
  Line a_high[2] = {}, a_low[2];
  load_line(a_high[0], a_rows, width - k, [](const T* from) { return load_once_16(from); });
  if (tile.has_high()) {
    load_line(a_high[1], a_rows + 8ll * width, width - k, [](const T* from) { return load_once_16(from); });
  }
  const T* rows[2];  // of x, at this lane's first segment
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows[half] = x + static_cast<long long>(tile.row(groups, 8 * half + g)) * width + k;
  }
  const int place = threadIdx.x / LORA_RANKS, r = threadIdx.x % LORA_RANKS;  // of the sum that it adds up
  const int row = tile.row(groups, place);
#pragma unroll
  for (int half = 0; half < 2; ++half) multiply_gains<T>(a_high[half], a_low[half], line_gains);
  wait_for_earlier_kernels();

  float sums[2][4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (8 * half >= tile.rows.count) continue;
    Line values;
    load_line(values, rows[half], width - k,
              [](const T* from) { return load_updated(reinterpret_cast<const uint4*>(from)); });
    float rests[4] = {};
    multiply_chunk<T>(sums[half], a_high[0], a_high[1], values);
    multiply_chunk<T>(rests, a_low[0], a_low[1], values);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[half][i] += rests[i];
  }
  chunk_sums.put(sums);
  __syncthreads();
  tile.store(shrunk, chunk_sums.total(place, r), row, place, r, num_rows, parts, max_rank);
}
