// The sampling state of a sequence, and its effect on the logits. In a token's state, bit 31: it is in the
// prompt; lower bits: its count in the output.

#include "common.cuh"
#include "generated/penalties.cuh"
#include "generated/sampling_row.cuh"

constexpr int STATES = 4;  // that a thread looks at together
constexpr int LOADS = 4;   // of them, in flight per thread
constexpr unsigned IN_PROMPT_BIT = 0x80000000u;

// logits += bias; then -inf at suppressed ids while position - num_prompt_tokens < min_tokens; then, for
// tokens seen, logits = (logit > 0 ? logit / repetition : logit * repetition) - frequency * count - presence
// * (count > 0).
//   in:  token_state [num_slots, vocab_size] uint32; bias_token_ids [num_slots, max_bias] int32, distinct in
//        a row; bias_values [num_slots, max_bias] float; bias_counts [num_slots] int32; suppressed_token_ids
//        [num_slots, max_suppressed] int32; suppressed_counts [num_slots] int32; rows [num_rows] SamplingRow
//        (slot below 0: skipped)
//   out: logits [num_rows, vocab_size] float, in place
// Layout: row-major; 16-byte loads of token states where the row's address allows; chunk_size a multiple
// of 4.
// Grid: (ceil(vocab_size / chunk_size), num_rows). Block: 256 threads. Shared memory: none.
// Unit of work: one block a chunk of ids, which it alone writes, so that its barriers order the three steps.
__global__ void __launch_bounds__(BLOCK_SIZE) adjust_logits_kernel(ADJUST_LOGITS_PARAMS) {
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const SamplingRow row = rows[blockIdx.y];
  const long long slot = row.slot;
  if (slot < 0) return;
  float* const row_logits = logits + static_cast<long long>(blockIdx.y) * vocab_size;
  const int begin = blockIdx.x * chunk_size;
  const int end = min(begin + chunk_size, vocab_size);

  const int num_bias = min(bias_counts[slot], max_bias);
  for (int i = threadIdx.x; i < num_bias; i += BLOCK_SIZE) {
    const int id = bias_token_ids[slot * max_bias + i];
    if (id >= begin && id < end) row_logits[id] += bias_values[slot * max_bias + i];
  }
  __syncthreads();

  if (row.position - row.num_prompt_tokens < row.min_tokens) {
    const int num_suppressed = min(suppressed_counts[slot], max_suppressed);
    for (int i = threadIdx.x; i < num_suppressed; i += BLOCK_SIZE) {
      const int id = suppressed_token_ids[slot * max_suppressed + i];
      if (id >= begin && id < end) row_logits[id] = __int_as_float(0xff800000);
    }
  }
  __syncthreads();

  if ((row.flags & RowFlag::PENALIZED) == 0) return;
  const unsigned* const row_states = token_state + slot * vocab_size;
  auto penalize = [&](int id, unsigned state) {
    if (state == 0) return;
    const float logit = row_logits[id];
    const float count = static_cast<float>(state & ~IN_PROMPT_BIT);
    const float repeated = logit > 0.0f ? logit / row.repetition_penalty : logit * row.repetition_penalty;
    const float presence = count > 0.0f ? row.presence_penalty : 0.0f;
    row_logits[id] = repeated - (row.frequency_penalty * count + presence);
  };
  const bool aligned = is_aligned(row_states + begin);
  for (int first = begin + threadIdx.x * STATES; first < end; first += BLOCK_SIZE * STATES * LOADS) {
    Vec<unsigned, STATES> states[LOADS] = {};
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int id = first + i * BLOCK_SIZE * STATES;
      if (aligned && id + STATES <= end) {
        states[i] = Vec<unsigned, STATES>::load(row_states + id);
      } else {
        for (int j = 0; j < STATES; ++j) states[i][j] = id + j < end ? row_states[id + j] : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
#pragma unroll
      for (int j = 0; j < STATES; ++j) penalize(first + i * BLOCK_SIZE * STATES + j, states[i][j]);
    }
  }
}

// token_state = what these tokens make of it, whatever it was before.
//   in:  prompt_token_ids [num_prompt_tokens] int32, output_token_ids [num_output_tokens] int32; ids out of
//        range are ignored
//   out: token_state [vocab_size] uint32, one slot's
// Layout: contiguous.
// Grid: ceil(vocab_size / chunk_size). Block: 256 threads. Shared memory: none.
// Unit of work: one block a chunk of ids: it clears them, then takes its own from the whole lists.
__global__ void __launch_bounds__(BLOCK_SIZE) reset_slot_kernel(RESET_SLOT_PARAMS) {
  const int begin = blockIdx.x * chunk_size;
  const int end = min(begin + chunk_size, vocab_size);
  for (int id = begin + threadIdx.x; id < end; id += BLOCK_SIZE) token_state[id] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < num_prompt_tokens; i += BLOCK_SIZE) {
    const int id = prompt_token_ids[i];
    if (id >= begin && id < end) atomicOr(&token_state[id], IN_PROMPT_BIT);
  }
  for (int i = threadIdx.x; i < num_output_tokens; i += BLOCK_SIZE) {
    const int id = output_token_ids[i];
    if (id >= begin && id < end) atomicAdd(&token_state[id], 1u);
  }
}

// token_state[slots[s], token_ids[s]] += 1.
//   in:  slots, token_ids [num_rows] int32, either below 0: skipped
//   out: token_state [num_slots, vocab_size] uint32
// Layout: contiguous.
// Grid: ceil(num_rows / 256). Block: 256 threads. Shared memory: none.
// Unit of work: one thread a row.
__global__ void __launch_bounds__(BLOCK_SIZE) record_tokens_kernel(RECORD_TOKENS_PARAMS) {
  const int row = blockIdx.x * BLOCK_SIZE + threadIdx.x;
  let_next_kernel_start();
  wait_for_earlier_kernels();
  if (row >= num_rows) return;
  const int slot = slots[row];
  const int id = token_ids[row];
  if (slot < 0 || slot >= num_slots || id < 0 || id >= vocab_size) return;
  atomicAdd(&token_state[static_cast<long long>(slot) * vocab_size + id], 1u);
}
