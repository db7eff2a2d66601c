// Backward of the softmax, and cross entropy of rows of logits.
#include "common.cuh"
#include "generated/training_softmax.cuh"

// out = y * (dy - sum(dy * y)) over each row, LOG: dy - exp(y) * sum(dy).
//   in:  dy [rows, width] float, y [rows, width] float, the softmax or its logarithm
//   out: out [rows, width] float, may be dy or y
// Layout: contiguous rows of any length; 16-byte accesses where a row's address allows them.
// Grid: rows. Block: whole warps, up to 1024 threads. Shared memory: none dynamic.
// Unit of work: one block per row, read twice.
template <bool LOG>
__global__ void softmax_gradient_kernel(SOFTMAX_GRADIENT_PARAMS) {
  const long long start = static_cast<long long>(blockIdx.x) * width;
  const int first = threadIdx.x * CHUNK, stride = blockDim.x * CHUNK;
  float sum = 0.0f;
  for (int i = first; i < width; i += stride) {
    float upper[CHUNK], values[CHUNK];
    load_floats(dy + start + i, width - i, upper);
    load_floats(y + start + i, width - i, values);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) sum += LOG ? upper[j] : upper[j] * values[j];
  }
  sum = block_sum(sum);
  for (int i = first; i < width; i += stride) {
    float upper[CHUNK], values[CHUNK];
    load_floats(dy + start + i, width - i, upper);
    load_floats(y + start + i, width - i, values);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      upper[j] = LOG ? upper[j] - expf(values[j]) * sum : values[j] * (upper[j] - sum);
    }
    store_floats(out + start + i, width - i, upper);
  }
}

// losses[t] = logsumexp[t] - multiplier * logits[t, targets[t]], logsumexp[t] = log of the sum over v of
// exp(multiplier * logits[t, v]); both 0 where targets[t] is outside 0 .. vocab_size - 1. Running maximum and
// sum as in "Online normalizer calculation for softmax" (Milakov and Gimelshein 2018).
//   in:  logits [rows, width] float, of which the first vocab_size columns count, targets [rows] int
//   out: losses [rows] float, logsumexp [rows] float
// Layout: contiguous rows of any length; 16-byte accesses where a row's address allows them.
// Grid: rows. Block: whole warps, up to 1024 threads. Shared memory: none dynamic.
// Unit of work: one block per row, read once.
__global__ void cross_entropy_kernel(CROSS_ENTROPY_PARAMS) {
  const int row = blockIdx.x;
  const int target = targets[row];
  if (target < 0 || target >= vocab_size) {
    if (threadIdx.x == 0) losses[row] = logsumexp[row] = 0.0f;
    return;
  }
  const float* const from = logits + static_cast<long long>(row) * width;
  float highest = LOWEST_FLOAT, sum = 0.0f;
  for (int i = threadIdx.x * CHUNK; i < vocab_size; i += blockDim.x * CHUNK) {
    float values[CHUNK];
    load_floats(from + i, vocab_size - i, values);
    float above = highest;
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      values[j] = i + j < vocab_size ? values[j] * multiplier : LOWEST_FLOAT;
      above = fmaxf(above, values[j]);
    }
    sum *= expf(highest - above);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) sum += i + j < vocab_size ? expf(values[j] - above) : 0.0f;
    highest = above;
  }
  const float maximum = block_max(highest);
  const float total = block_sum(sum * expf(highest - maximum));
  if (threadIdx.x == 0) {
    const float log_total = maximum + logf(total);
    logsumexp[row] = log_total;
    losses[row] = log_total - multiplier * from[target];
  }
}

// out[t, v] = factors[t] * multiplier * (exp(multiplier * logits[t, v] - logsumexp[t]) - (v == targets[t]));
// 0 for columns from vocab_size on, and in rows whose target is outside 0 .. vocab_size - 1.
//   in:  logits [rows, width] float, targets [rows] int, logsumexp [rows] float, factors [rows] float
//   out: out [rows, width] T
// Layout: contiguous rows of any length; 16-byte accesses where a row's address allows them.
// Grid: (rows, blocks that cover a row). Block: 256 threads. Shared memory: none.
// Unit of work: CHUNK elements of one row per thread.
template <typename T>
__global__ void cross_entropy_gradient_kernel(CROSS_ENTROPY_GRADIENT_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  const int row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
  if (i >= width) return;
  const long long start = static_cast<long long>(row) * width + i;
  const int target = targets[row];
  const float factor = factors[row] * multiplier;
  const bool counts = 0 <= target && target < vocab_size && factor != 0.0f;
  float values[CHUNK] = {};
  if (counts) {
    load_floats(logits + start, width - i, values);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      const float probability = expf(values[j] * multiplier - logsumexp[row]);
      values[j] = i + j < vocab_size ? factor * (probability - (i + j == target ? 1.0f : 0.0f)) : 0.0f;
    }
  }
  store_floats(out + start, width - i, values);
}
