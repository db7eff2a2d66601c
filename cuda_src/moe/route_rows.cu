// The router of a step of few tokens in one kernel: norm, logits, choice of experts, order of pairs.

#include "moe/router_product.cuh"

// Threads of a block at most. For 16 tokens more than there are: registers are then so few that the block
// begins beside one of the product in front.
template <int TOKENS, int HALVES>
constexpr int ROUTER_THREADS = TOKENS <= 8   ? THREADS
                               : HALVES <= 8 ? 800
                                             : 512;

// experts[t, i] and weights[t, i] = the choice for token t, as `route_kernel` makes it, by logits[t, e] = sum
// over k of y[t, k] * weight[e, k], + bias[e]. y is x, or with `norm` x / sqrt(mean(x^2) + eps) * norm,
// rounded to T, which is stored as `normed`. Where the grid is one cluster, offsets, pairs and places are
// those of `group_pairs_kernel`; else that has to follow.
//   in:  x [num_tokens, in_features] T; norm [in_features] T or null; weight [num_experts, in_features] T;
//        bias [num_experts] T or null; correction [num_experts] float or null; kind one of ROUTE_*
//   out: normed [num_tokens, in_features] T, with `norm`; experts [num_tokens, top_k] int; weights
//        [num_tokens, top_k] float; offsets [num_experts + 1] int; pairs, places [num_tokens * top_k] int
// Layout: row-major; x, normed, norm and weight 16-byte aligned; in_features a multiple of 8, at most 256 *
// HALVES; num_experts at most 64 * UNITS.
// Grid: clusters of ROUTER_BLOCKS blocks, one for TOKENS tokens. Block: 256 threads, for 16 tokens 512.
// Shared memory: `RouterTile.shared_bytes` in engine/ops/cuda/moe/router.py.
// Unit of work: a block's share of the experts for all tokens of its cluster; the weights are on their way
// before the kernels in front have ended, those by one token in registers. Its warps share k, eight those of
// up to eight tokens, and their sums are added in order, so a logit depends on its row alone. The first block
// then chooses, a warp a token.
template <typename T, int TOKENS, int UNITS, int HALVES>
__cluster_dims__(ROUTER_BLOCKS, 1, 1) __global__
    void __launch_bounds__(ROUTER_THREADS<TOKENS, HALVES>, TOKENS <= 8 ? 2 : 1)
        route_rows_kernel(ROUTE_ROWS_PARAMS(T)) {
  using V = RouterVariant<T, TOKENS, UNITS, HALVES>;
  using Blocks = Cluster<ROUTER_BLOCKS>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ float sums_of_squares[WARPS][TOKENS];
  __shared__ __align__(16) float logits[TOKENS * V::ALL_EXPERTS];
  __shared__ float rows_of_scores[V::GROUPS * WARPS][V::ALL_EXPERTS];
  __shared__ int chosen_experts[TOKENS * ROUTER_TOP_K];
  __shared__ __align__(16) unsigned keys[TOKENS * ROUTER_TOP_K];
  uint4* const of_experts = reinterpret_cast<uint4*>(shared_memory);
  uint4* const gains = of_experts + UNITS * HALVES * THREADS + V::warp_of_group() * HALVES * 4;
  float2* const partial =
      reinterpret_cast<float2*>(of_experts + UNITS * HALVES * THREADS + WARPS * HALVES * 4);
  const int rank = Blocks::rank();
  const int lane = lane_of_thread(), warp = warp_of_thread();
  const int first_token = blockIdx.x / ROUTER_BLOCKS * TOKENS;
  const int count = min(TOKENS, num_tokens - first_token);

  Blocks::arrive();
  const RouterProduct<V> product = {of_experts, rank * V::EXPERTS};
  product.load(weight, num_experts, in_features);
  if (norm != nullptr && V::group() == 0) {
    for (int v = lane; v < HALVES * 4; v += WARP_SIZE) {
      const int k = (v / 4 * WARPS + V::warp_of_group()) * HALF_K + v % 4 * SEGMENT;
      copy_async_16(gains + v, k < in_features ? norm + k : norm, k < in_features);
    }
  }
  copy_async_commit();
  let_next_kernel_start();

  const long long first_element = static_cast<long long>(first_token) * in_features;
  // Each block has all rows: together they store each warp's part once.
  const bool stores = norm != nullptr && V::warp_of_group() % ROUTER_BLOCKS == rank;
  RouterRows<V> rows;
  if constexpr (TOKENS == 1) {
    uint4 held[UNITS][HALVES];
    copy_async_wait<0>();
    product.hold(held);
    wait_for_earlier_kernels();
    RouterRow<V> row;
    row.load(x + first_element, in_features);
    if (norm != nullptr) {
      row.share_squares(sums_of_squares);
      __syncthreads();
      row.normalise(sums_of_squares, gains, in_features, eps);
      if (stores) row.store(normed + first_element, in_features);
    }
    row.spread(gains, rows);
    product.multiply([&](int u, int h) { return held[u][h]; }, rows, partial);
  } else {
    wait_for_earlier_kernels();
    rows.load(x + first_element, count, in_features);
    copy_async_wait<0>();
    if (norm != nullptr) rows.share_squares(sums_of_squares);
    if (norm != nullptr || V::GROUPS > 1) __syncthreads();  // also, the other group's copies are there
    if (norm != nullptr) {
      rows.normalise(sums_of_squares, gains, in_features, eps);
      if (stores) rows.store(normed + first_element, count, in_features);
    }
    product.multiply([&](int u, int h) { return product.at(u, h); }, rows, partial);
  }
  __syncthreads();
  Blocks::wait();
  product.add_up(partial, Blocks::at(logits, 0));
  Blocks::sync();
  if (rank != 0) return;

  const ExpertChoice choice = {correction, num_experts,   top_k, kind,  normalised,
                               groups,     chosen_groups, scale, jitter};
#pragma unroll 1
  for (int token = warp; token < count; token += V::GROUPS * WARPS) {
    auto logit = [&](int expert) {
      const float value = logits[token * V::ALL_EXPERTS + expert];
      return bias == nullptr ? value : value + to_float(bias[expert]);
    };
    int chosen;
    float share;
    choice.choose<V::ALL_EXPERTS / WARP_SIZE>(logit, rows_of_scores[warp], chosen, share);
    if (lane < top_k) {
      chosen_experts[token * top_k + lane] = chosen;
      experts[(first_token + token) * top_k + lane] = chosen;
      weights[(first_token + token) * top_k + lane] = share;
    }
    __syncwarp();
  }
  if (gridDim.x > ROUTER_BLOCKS) return;
  __syncthreads();
  order_pairs<V::GROUPS * THREADS>(chosen_experts, keys, num_tokens * top_k, num_experts, offsets, pairs,
                                   places);
}
