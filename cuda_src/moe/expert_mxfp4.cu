// Products of few rows by experts' weights in MXFP4, bound by reading each weight once.

#include "moe/expert_mxfp4.cuh"

// out as `expert_decode_kernel` has it, by the elements that `dequantize_blocks_kernel` gives.
//   in:  x, bias, offsets, pairs as there, of bfloat16; codes [num_experts * out_features, any] unsigned and
//        headers [num_experts * out_features, any] unsigned, as packed
//   out: out [num_pairs, out_features, or half of it with an activation] bfloat16
// Layout: x 16-byte aligned, in_features a multiple of 32. |x| < 2^87, blocks' exponents up to 2^41.
// Grid: any number of blocks; they share the tiles evenly. Block: TEAMS * SLICES warps.
// Shared memory: a chunk of TOKENS rows of x, whole steps of 128 elements; each warp's ring of AHEAD steps.
// Unit of work: a tile is 16 rows of an expert's weight (gated: 8 gates and their ups) and up to TOKENS of
// its rows of x, which stay in shared memory for all of a block's tiles. A warp has a tile of its own, or
// SLICES warps every SLICES-th step of one. The order of a row's sums depends on in_features and the variant
// alone. `settled` as there: the first weights are then on their way before x is there.
template <typename T, int TOKENS, int TEAMS, int SLICES, int AHEAD>
__global__ void __launch_bounds__(TEAMS * SLICES * WARP_SIZE, 16 / (TEAMS * SLICES))
    expert_mxfp4_kernel(EXPERT_MXFP4_PARAMS(T)) {
  static_assert(is_same_type<T, __nv_bfloat16>, "magnitudes are placed in the bits of bfloat16");
  using V = MxVariant<TOKENS, TEAMS, SLICES, AHEAD>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ int starts[MAX_EXPERTS + 1], first[MAX_EXPERTS + 1];
  __shared__ float4 partial[2][SLICES][V::GROUPS][SLICES == 1 ? 1 : WARP_SIZE];
  uint4* const rows = reinterpret_cast<uint4*>(shared_memory);
  const MxProblem problem(out_features, in_features, activation != EXPERT_NONE);
  const MxEpilogue epilogue = {problem, bias, out, activation};
  const int slice = SLICES == 1 ? 0 : warp_of_block();
  if (!settled) wait_for_earlier_kernels();
  let_next_kernel_start();
  const ExpertTiles tiles(offsets, num_experts, ceil_div(problem.features, problem.tile_features()), TOKENS,
                          starts, first);
  const int a_block = tiles.count / static_cast<int>(gridDim.x);
  const int one_more = tiles.count - a_block * static_cast<int>(gridDim.x);
  const int block = blockIdx.x;
  const int begin = block * a_block + min(block, one_more);
  const int end = begin + a_block + (block < one_more ? 1 : 0);
  if (begin == end) {
    if (settled) wait_for_earlier_kernels();
    return;
  }

  MxCursor<V> cursor(tiles, begin, end);
  MxRing<V>* const rings = reinterpret_cast<MxRing<V>*>(rows + problem.steps * (TOKENS * STEP_VECTORS));
  MxWeights<V> weights(cursor, problem, codes, headers, rings[warp_of_block()]);
  if (settled) wait_for_earlier_kernels();
  int parity = 0;
#pragma unroll 1
  for (; cursor.has_chunk(); cursor.next_chunk()) {
    ExpertTile tile = cursor.rows();
    __syncthreads();  // the rows before these may still be in use
    stage_rows<V>(rows, tile, problem, x, pairs, top_k);
    __syncthreads();
#pragma unroll 1
    for (; cursor.has_tile(); cursor.column += TEAMS) {
      tile.column = cursor.column;
      MxConsumer<V> consumer(rows + slice * (TOKENS * STEP_VECTORS));
#pragma unroll 1
      for (int step = slice; step < problem.steps; step += SLICES) consumer.take_step(weights.next());
      if constexpr (SLICES == 1) {
#pragma unroll
        for (int group = 0; group < V::GROUPS; ++group) epilogue.store(tile, group, consumer.total(group));
      } else {
        const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
        for (int group = 0; group < V::GROUPS; ++group) {
          partial[parity][slice][group][lane] = consumer.total(group);
        }
        // The sums of two tiles take turns: who writes over these has met all warps once more. The last warp
        // adds up, which has the fewest steps.
        __syncthreads();
#pragma unroll 1
        for (int group = SLICES - 1 - slice; group < V::GROUPS; group += SLICES) {
          float4 sum = partial[parity][0][group][lane];
#pragma unroll
          for (int other = 1; other < SLICES; ++other) {
            const float4 part = partial[parity][other][group][lane];
            sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
          }
          epilogue.store(tile, group, sum);
        }
        parity ^= 1;
      }
    }
  }
}
