// Matrix product of many rows by a weight in the quantised blocks of GGUF files, on sm_90a: warp groups make
// the weight's elements in the registers from which wgmma multiplies, each tile of the weight once for all
// tokens.

#include "quant/sm90_block_fragments.cuh"

// Registers of a thread that multiplies and of one that brings x, which together are what the block has.
template <int WARPGROUPS>
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 2 ? 232 : 112;
template <int WARPGROUPS>
constexpr int FEEDER_REGISTERS = WARPGROUPS == 2 ? 40 : 32;

// out = x weight^T with bias, residual or gate as `sm90_matmul_kernel` has it, by the elements that
// `dequantize_blocks_kernel` gives.
//   in:  map of x [num_rows, in_features] T, or if `turned` of what turn_rows_kernel made of it; bias
//   [out_features] T or null; codes [out_features, any] unsigned
//        and headers [out_features, any] unsigned, as packed
//   out: out [num_rows, out_features, or half of it if `silu_mul`] Out (T or float), rows `out_stride` apart;
//        a float out takes no bias, accumulate or silu_mul; if `turns`, which takes silu_mul and whole steps
//        of columns, as turn_rows_kernel makes it
// Layout: row-major, x and the rows of out 16-byte aligned; in_features and the columns of out multiples of
// eight. Boxes of x: TOKENS rows.
// Grid: blocks that walk over tiles of 64 * WARPGROUPS features by TOKENS rows of x. splits > 1: a cluster
// of that many blocks a tile, each of which has a slice of k, between pairs of steps of 128 elements, and
// finishes a share of the results: it reads the others' sums, added in the order of k. slices > 1: as many
// blocks a tile, each of which stores its slice's sums, `slice` * num_rows * out_stride floats into out.
// Block: WARPGROUPS warp groups that multiply, and one that brings x: a warp copies, three turn it.
// Shared memory: `stages` times TOKENS * 128 * sizeof(T) of x; CHUNK_TOKENS tokens' sums on their way out;
// for each warp group AHEAD pairs of steps of codes and headers.
// Unit of work: one block a tile at a time, one warp group 64 features of it. Products read half a step's
// elements from registers while the next half's are made.
template <typename T, typename Out, typename F, int WARPGROUPS, int TOKENS>
__global__ void __launch_bounds__((WARPGROUPS + 1) * WARPGROUP_SIZE, 1)
    sm90_block_fragments_kernel(SM90_BLOCK_FRAGMENTS_PARAMS(T, Out)) {
  using V = FragmentsVariant<T, Out, F, WARPGROUPS, TOKENS>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ Barrier arrived[MAX_STEPS], full[MAX_STEPS], empty[MAX_STEPS];
  T* const ring = reinterpret_cast<T*>(shared_memory);
  float* const staging = reinterpret_cast<float*>(ring + stages * V::STAGE_ELEMENTS);  // of sums
  unsigned char* const slots = reinterpret_cast<unsigned char*>(staging + CHUNK_TOKENS * V::STRIDE);

  const int parts = splits * slices;  // of k
  const int group = small_div(blockIdx.x, parts), part = blockIdx.x - group * parts;
  const int all_pairs = ceil_div(in_features, PAIR_STEPS * STEP);
  const int first_pair = small_div(part * all_pairs, parts);
  const int tiles_m = ceil_div(num_rows, TOKENS);
  const FragmentsWork work = {tiles_m,
                              tiles_m * ceil_div(out_features, V::FEATURES),
                              group,
                              small_div(gridDim.x, parts),
                              first_pair * PAIR_STEPS,
                              (small_div((part + 1) * all_pairs, parts) - first_pair) * PAIR_STEPS};

  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      barrier_init(&arrived[i], 1);
      barrier_init(&full[i], TURNING_WARPS * WARP_ARRIVALS);
      barrier_init(&empty[i], V::CONSUMERS / WARP_SIZE);
    }
    barrier_init_done();
  }
  __syncthreads();

  if (threadIdx.x >= V::CONSUMERS) {
    give_registers<FEEDER_REGISTERS<WARPGROUPS>>();
    const TokenFeeder<V> feeder(work, ring, arrived, full, empty, stages);
    const int warp = (threadIdx.x - V::CONSUMERS) / WARP_SIZE;
    if (warp < TURNING_WARPS) {
      if (!turned) feeder.turn(warp);
    } else if (threadIdx.x % WARP_SIZE == 0) {
      prefetch_map(x_map);
      wait_for_earlier_kernels();
      fence_global_for_async();
      feeder.copy(x_map);
      let_next_kernel_start();
    }
    return;
  }

  take_registers<CONSUMER_REGISTERS<WARPGROUPS>>();
  WeightFragments<V> weight(work, slots + threadIdx.x / WARPGROUP_SIZE * V::SLOTS_BYTES, codes, headers,
                            out_features, in_features, silu_mul);
#pragma unroll 1
  for (int i = 0; i < V::AHEAD; ++i) weight.copy_next();  // weights do not change: this need not wait
  wait_for_earlier_kernels();
  const long long slice = splits > 1 ? 0 : part;
  const FragmentsEpilogue<V> epilogue = {reinterpret_cast<float*>(ring),
                                         stages,
                                         bias,
                                         out + slice * num_rows * out_stride,
                                         num_rows,
                                         out_features,
                                         out_stride,
                                         splits > 1 ? part : 0,
                                         splits,
                                         accumulate != 0,
                                         silu_mul != 0,
                                         turns != 0};
  const unsigned long long x_descriptor = operand_descriptor(ring);
  const auto release = [&](int stage) {
    if (threadIdx.x % WARP_SIZE == 0) barrier_arrive(&empty[stage]);
  };
  Barrier* const ready = turned ? arrived : full;
  RingPosition at;
#pragma unroll 1
  for (int index = work.first; index < work.tiles; index += work.stride) {
    float sums[TOKENS / 2];
    unsigned a[2][4]
              [4];  // operands of both halves of a step: one's are made while the other's are multiplied
    int previous = 0;
#pragma unroll 1
    for (int pair = 0; pair < work.num_steps; pair += PAIR_STEPS) {
      weight.begin_pair();
#pragma unroll
      for (int step = 0; step < PAIR_STEPS; ++step) {
        weight.take_step(step);
        if (step == PAIR_STEPS - 1) {
          weight.end_pair();
          weight.copy_next();
        }
        barrier_wait(&ready[at.stage], at.parity);
        const unsigned long long stage = x_descriptor + at.stage * (V::STAGE_ELEMENTS * sizeof(T) >> 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          wgmma_wait<1>();  // what read these registers
          if (half == 1 && pair + step > 0) release(previous);
          weight.fragments(half, a[half]);
          const unsigned long long tokens = stage + half * (V::HALF_ELEMENTS * sizeof(T) >> 4);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            wgmma_fragment<T, TOKENS>(sums, a[half][k], tokens + k * DESCRIPTOR_STEP_K,
                                      pair + step > 0 || half > 0 || k > 0);
          }
          wgmma_commit();
        }
        previous = at.stage;
        at.advance(stages);
      }
    }
    wgmma_wait<0>();
    release(previous);
    epilogue.store(sums, work.tile(index));
  }
}
