// Rows of activations in 8 bits with scales, for products by weights of 8 bits; with the norm before them.

#include "common.cuh"
#include "fp8/fp8_rows.cuh"
#include "generated/quantize_rows.cuh"
#include "quant/int8_codes.cuh"

template <int CHUNKS>
constexpr int MOST_THREADS = CHUNKS < ROW_CHUNKS ? WIDE_THREADS : MAX_THREADS;
template <bool NORM, int CHUNKS>
constexpr int MIN_BLOCKS = NORM                  ? 1
                           : CHUNKS < ROW_CHUNKS ? 2
                                                 : 3;

// values[m, k] = code(y[m, k] / scale), and the scales: max |y| / 448 of a row or, with GROUPS, of each 128
// of its columns; `static_scale` if that is positive. With INT8 codes are integers, and scales max |y| / 127
// of each 256 columns, NaN where one of them is NaN. y is x or, with NORM, x / sqrt(mean(x^2) + eps) * norm
// rounded to T, with the bits that `rmsnorm_kernel` gives.
//   in:  x [rows, hidden] T; norm [hidden] T or null
//   out: values [rows, hidden] e4m3 or int8; scales [1 or ceil(hidden / columns of a group), rows] float
// Layout: contiguous rows, hidden a multiple of 16; norm and values 16-byte aligned; 16-byte loads of x where
// its address allows.
// Grid: rows. Block: as of `rmsnorm_kernel`, times ROW_CHUNKS / CHUNKS. Shared memory: with NORM and CHUNKS <
// ROW_CHUNKS CHUNKS * 16 bytes a thread, else none dynamic.
// Unit of work: one block a row. Where ROW_CHUNKS chunks of each thread are less than the row, the rest is
// read again; with fewer they are the whole row, which is soon done: that counts while there are few rows.
template <typename T, bool INT8, bool GROUPS, bool NORM, int CHUNKS>
__global__ void __launch_bounds__(MOST_THREADS<CHUNKS>, MIN_BLOCKS<NORM, CHUNKS>)
    quantize_rows_kernel(QUANTIZE_ROWS_PARAMS(T)) {
  static_assert(sizeof(T) == 2 && CHUNK == VECTOR_SIZE<T>, "activations are bfloat16 or float16");
  static_assert(ROW_CHUNKS % CHUNKS == 0, "threads are a multiple of those of `rmsnorm_kernel`");
  static_assert(GROUPS || !INT8, "integers have scales of groups");
  using Vector = Vec<T, CHUNK>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const int row = blockIdx.x;
  const T* const source = x + static_cast<long long>(row) * hidden;
  unsigned char* const target = values + static_cast<long long>(row) * hidden;
  const int stride = blockDim.x * CHUNK;
  const int first = threadIdx.x * CHUNK;
  const int rest = CHUNKS < ROW_CHUNKS ? hidden : CHUNKS * stride;  // begins here
  const bool aligned = is_aligned(x);
  // All threads of a warp take part in each round, those beyond the row with zeros.
  auto load = [&](int i) {
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (i < hidden) {
      if (aligned) {
        raw = load_updated(reinterpret_cast<const uint4*>(source + i));
      } else {
        Vector elements;
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) elements[j] = load_updated(source + i + j);
        raw = reinterpret_cast<const uint4&>(elements);
      }
    }
    return raw;
  };
  auto load_gains = [&](int i) {
    return i < hidden ? *reinterpret_cast<const uint4*>(norm + i) : make_uint4(0, 0, 0, 0);
  };
  auto add_squares = [&](float sum, const uint4& raw) {
    const Vector elements = reinterpret_cast<const Vector&>(raw);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) sum = fmaf(to_float(elements[j]), to_float(elements[j]), sum);
    return sum;
  };
  // The squares of the whole row, in the order of `rmsnorm_kernel`: by as many threads as that has.
  [[maybe_unused]] auto sum_as_norm_adds = [&](const uint4(&chunks)[CHUNKS]) {
    uint4* const row_chunks = reinterpret_cast<uint4*>(shared_memory);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) row_chunks[c * blockDim.x + threadIdx.x] = chunks[c];
    __syncthreads();
    const int adders = blockDim.x / (ROW_CHUNKS / CHUNKS);
    float sum = 0.0f;
    if (threadIdx.x < adders) {
#pragma unroll
      for (int c = 0; c < ROW_CHUNKS; ++c) sum = add_squares(sum, row_chunks[c * adders + threadIdx.x]);
    }
    return block_sum(sum);  // zeros of the other warps do not change a sum
  };
  auto normalise = [&](uint4& raw, const uint4& gains, float inverse_rms) {
    Vector elements = reinterpret_cast<const Vector&>(raw);
    const Vector factors = reinterpret_cast<const Vector&>(gains);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      elements[j] = from_float<T>(to_float(elements[j]) * inverse_rms * to_float(factors[j]));
    }
    raw = reinterpret_cast<const uint4&>(elements);
  };
  // With GROUPS the scale is that of the columns of which this thread has eight.
  auto store = [&](int i, const uint4& raw, float scale, float inverse) {
    if constexpr (INT8) {
      static_assert(INT8_GROUP == CHUNK * WARP_SIZE, "a warp has a group");
      const Int8Scale of_group = Int8Scale::of_bits<T>(__reduce_max_sync(FULL_WARP, largest_magnitude(raw)));
      if (i % INT8_GROUP == 0 && i < hidden) {
        scales[static_cast<long long>(i / INT8_GROUP) * gridDim.x + row] = of_group.scale;
      }
      if (i < hidden) *reinterpret_cast<uint2*>(target + i) = int8_codes<T>(raw, of_group.inverse);
      return;
    }
    if constexpr (GROUPS) {
      float largest = largest_of_vector<T>(raw);
#pragma unroll
      for (int distance = GROUP / CHUNK / 2; distance > 0; distance /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, distance));
      }
      if (!(static_scale > 0.0f)) {
        scale = scale_for(largest);
        inverse = __frcp_rn(scale);
      }
      if (i % GROUP == 0 && i < hidden) scales[static_cast<long long>(i / GROUP) * gridDim.x + row] = scale;
    }
    if (i < hidden)
      *reinterpret_cast<uint2*>(target + i) = e4m3_codes<T>(raw, scale, inverse, static_scale > 0.0f);
  };

  uint4 kept[CHUNKS];
  uint4 gains[NORM ? CHUNKS : 1];
  let_next_kernel_start();
  if constexpr (NORM) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) gains[c] = load_gains(first + c * stride);
  }
  wait_for_earlier_kernels();
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) kept[c] = load(first + c * stride);

  float inverse_rms = 1.0f;
  if constexpr (NORM) {
    float sum = 0.0f;
    if constexpr (CHUNKS < ROW_CHUNKS) {
      sum = sum_as_norm_adds(kept);
    } else {
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) sum = add_squares(sum, kept[c]);
#pragma unroll 1
      for (int i = first + rest; i < hidden; i += stride) sum = add_squares(sum, load(i));
      sum = block_sum(sum);
    }
    inverse_rms = rsqrtf(sum / hidden + eps);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) normalise(kept[c], gains[c], inverse_rms);
  }
  auto load_rest = [&](int i) {
    uint4 raw = load(i);
    if constexpr (NORM) normalise(raw, load_gains(i), inverse_rms);
    return raw;
  };

  float scale = static_scale;
  if (!GROUPS && !(static_scale > 0.0f)) {
    float largest = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) largest = fmaxf(largest, largest_of_vector<T>(kept[c]));
#pragma unroll 1
    for (int i = first + rest; i < hidden; i += stride) {
      largest = fmaxf(largest, largest_of_vector<T>(load_rest(i)));
    }
    scale = scale_for(block_max(largest));
  }
  const float inverse = __frcp_rn(scale);
  if (!GROUPS && threadIdx.x == 0) scales[row] = scale;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    if (c * stride < hidden) store(first + c * stride, kept[c], scale, inverse);
  }
#pragma unroll 1
  for (int begin = rest; begin < hidden; begin += stride) {
    store(begin + first, load_rest(begin + first), scale, inverse);
  }
}
