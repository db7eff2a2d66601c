// Rows of a table by number.
#include "common.cuh"
#include "generated/embedding.cuh"

// out[t] = table[ids[t]] * factor, rounded to T, or zeros where the id is outside 0 .. vocab_size - 1. Where
// `sampled` is given, a negative id -1 - n stands for sampled[n].
//   in:  ids [tokens] int32, table [vocab_size, hidden] T, sampled [any] int32 or null
//   out: out [tokens, hidden] T
// Layout: contiguous rows of any length; 16-byte accesses where a row's address allows them.
// Grid: tokens. Block: whole warps, up to 1024 threads. Shared memory: none.
// Unit of work: one block per token. A step's first kernels write what those of its layers read ahead, so
// that the next kernel starts no earlier than when they have ended.
template <typename T>
__global__ void embedding_kernel(EMBEDDING_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const long long token = blockIdx.x;
  long long id = ids[token];
  if (id < 0 && sampled != nullptr) id = sampled[-1 - id];
  const bool known = 0 <= id && id < vocab_size;
  for (int i = threadIdx.x * CHUNK; i < hidden; i += blockDim.x * CHUNK) {
    float values[CHUNK] = {};
    if (known) load_floats(table + id * hidden + i, hidden - i, values);
    if (factor != 1.0f) {  // without one, bits of any kind are as they were
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) values[j] *= factor;
    }
    store_floats(out + token * hidden + i, hidden - i, values);
  }
}
