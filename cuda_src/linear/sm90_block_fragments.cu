// Matrix product of many rows by a weight in the quantised blocks of GGUF files, on sm_90a: warp groups make the
// weight's elements in the registers from which wgmma multiplies, each tile of the weight once for all tokens.

#include "sm90_block_fragments.cuh"

// Registers of a thread that multiplies and of one that copies x, which together are what the block has.
template <int WARPGROUPS>
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 2 ? 200 : 96;
template <int WARPGROUPS>
constexpr int FEEDER_REGISTERS = 96;

// out = x weight^T with bias, residual or gate as `sm90_matmul_kernel` has it, by the elements that
// `dequantize_blocks_kernel` gives.
//   in:  x [num_rows, in_features] T; bias [out_features] T or null; codes [out_features, any] unsigned and
//        headers [out_features, any] unsigned, as packed
//   out: out [num_rows, out_features, or half of it if `silu_mul`] Out (T or float), rows `out_stride` apart. A
//        float out takes no bias, accumulate or silu_mul
// Layout: row-major, x and the rows of out 16-byte aligned; in_features and the columns of out multiples of 8.
// Grid: blocks that walk over tiles of 64 * WARPGROUPS features by TOKENS rows of x. splits > 1: a cluster of
// that many blocks a tile, each of which has a slice of k, between steps of 128 elements, and finishes a share
// of the results: it reads the others' sums, added in the order of k.
// Block: WARPGROUPS warp groups that multiply, and one that copies x.
// Shared memory: `stages` times TOKENS * 128 * sizeof(T) of x; CHUNK_TOKENS tokens' sums on their way out; for
// each warp group AHEAD steps of codes and headers.
// Unit of work: one block a tile at a time, one warp group 64 features of it. Products read a round's elements
// from registers while the next round's are made.
template <typename T, typename Out, typename F, int WARPGROUPS, int TOKENS>
__global__ void __launch_bounds__((WARPGROUPS + 1) * WARPGROUP_SIZE, 1)
    sm90_block_fragments_kernel(SM90_BLOCK_FRAGMENTS_PARAMS(T, Out)) {
  using V = FragmentsVariant<T, Out, F, WARPGROUPS, TOKENS>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ Barrier full[MAX_STEPS], empty[MAX_STEPS];
  T* const ring = reinterpret_cast<T*>(shared_memory);
  float* const staging = reinterpret_cast<float*>(ring + stages * V::STAGE_ELEMENTS);
  unsigned char* const slots = reinterpret_cast<unsigned char*>(staging + CHUNK_TOKENS * V::STRIDE);

  const int split = splits > 1 ? cluster_rank() : 0;
  const int all_steps = ceil_div(in_features, STEP);
  const int first_step = small_div(split * all_steps, splits);
  const int tiles_m = ceil_div(num_rows, TOKENS);
  const FragmentsWork work = {tiles_m,
                         tiles_m * ceil_div(out_features, V::FEATURES),
                         small_div(blockIdx.x, splits),
                         small_div(gridDim.x, splits),
                         first_step,
                         small_div((split + 1) * all_steps, splits) - first_step};

  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      barrier_init(&full[i], FEEDER_WARPS);
      barrier_init(&empty[i], V::CONSUMERS / WARP_SIZE);
    }
    barrier_init_done();
  }
  __syncthreads();

  if (threadIdx.x >= V::CONSUMERS) {
    if constexpr (CONSUMER_REGISTERS<WARPGROUPS> != FEEDER_REGISTERS<WARPGROUPS>) {
      give_registers<FEEDER_REGISTERS<WARPGROUPS>>();
    }
    wait_for_earlier_kernels();
    TokenFeeder<V>(work, ring, full, empty, stages, x, num_rows, in_features).run();
    if (threadIdx.x == V::CONSUMERS) let_next_kernel_start();
    return;
  }

  if constexpr (CONSUMER_REGISTERS<WARPGROUPS> != FEEDER_REGISTERS<WARPGROUPS>) {
    take_registers<CONSUMER_REGISTERS<WARPGROUPS>>();
  }
  WeightFragments<V> weight(work, slots + threadIdx.x / WARPGROUP_SIZE * V::SLOTS_BYTES, codes, headers,
                            out_features, in_features, silu_mul);
#pragma unroll 1
  for (int i = 0; i < AHEAD; ++i) weight.copy_next();  // weights do not change: this need not wait
  wait_for_earlier_kernels();
  const FragmentsEpilogue<V> epilogue = {staging, bias,  out,    num_rows,        out_features, out_stride,
                                    split,   splits, accumulate != 0, silu_mul != 0};
  const unsigned long long x_descriptor = operand_descriptor(ring);
  const auto release = [&](int stage) {
    if (threadIdx.x % WARP_SIZE == 0) barrier_arrive(&empty[stage]);
  };
  RingPosition at;
#pragma unroll 1
  for (int index = work.first; index < work.tiles; index += work.stride) {
    float sums[TOKENS / 2];
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < work.num_steps; ++step) {
      weight.take_step(step);
      weight.copy_next();
      barrier_wait(&full[at.stage], at.parity);
      const unsigned long long stage = x_descriptor + at.stage * (V::STAGE_ELEMENTS * sizeof(T) >> 4);
      unsigned a[2][2][4];  // of this round and of the one before
#pragma unroll
      for (int round = 0; round < ROUNDS; ++round) {
        wgmma_wait<1>();  // no product reads this round's registers
        if (round == 1 && step > 0) release(previous);
        weight.fragments(round, a[round % 2]);
        wgmma_fence();
        const unsigned long long half = stage + round / 2 * (V::HALF_ELEMENTS * sizeof(T) >> 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          wgmma_fragment<T, TOKENS>(sums, a[round % 2][i], half + (round % 2 * 2 + i) * DESCRIPTOR_STEP_K,
                                    step > 0 || round > 0 || i > 0);
        }
        wgmma_commit();
      }
      previous = at.stage;
      at.advance(stages);
    }
    wgmma_wait<0>();
    release(previous);
    epilogue.store(sums, work.tile(index));
  }
}
