// Masks logits by a grammar or a list of allowed ids.

#include "common.cuh"
#include "generated/token_mask.cuh"

constexpr int BITS = 32;
constexpr int IDS = 4;  // that a thread looks at together

// logits[rows[m], id] = -inf where bit id % 32 of words[m, id / 32] is 0.
//   in:  words [num_masked, ceil(vocab_size / 32)] uint32; rows [num_masked] int32, distinct, below 0
//        skipped
//   out: logits [num_rows, vocab_size] float, in place
// Layout: row-major; 16-byte stores where the row's address allows; chunk_size a multiple of 4.
// Grid: (ceil(vocab_size / chunk_size), num_masked). Block: 256 threads. Shared memory: none.
// Unit of work: one block a chunk of a row's ids, one thread four ids; only what is excluded is written.
__global__ void __launch_bounds__(BLOCK_SIZE) apply_token_mask_kernel(APPLY_TOKEN_MASK_PARAMS) {
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const int row = rows[blockIdx.y];
  if (row < 0) return;
  float* const row_logits = logits + static_cast<long long>(row) * vocab_size;
  const unsigned* const row_words = words + static_cast<long long>(blockIdx.y) * ceil_div(vocab_size, BITS);
  const int begin = blockIdx.x * chunk_size;
  const int end = min(begin + chunk_size, vocab_size);
  const bool aligned = is_aligned(row_logits + begin);
  const Vec<float, IDS> excluded = {-FLOAT_INFINITY, -FLOAT_INFINITY, -FLOAT_INFINITY, -FLOAT_INFINITY};
  for (int id = begin + threadIdx.x * IDS; id < end; id += BLOCK_SIZE * IDS) {
    const unsigned may_be_chosen = row_words[id / BITS] >> (id % BITS);
    if (aligned && id + IDS <= end && may_be_chosen % (1 << IDS) == 0) {
      excluded.store(row_logits + id);
      continue;
    }
#pragma unroll
    for (int j = 0; j < IDS; ++j) {
      if (id + j < end && !(may_be_chosen >> j & 1)) row_logits[id + j] = -FLOAT_INFINITY;
    }
  }
}
