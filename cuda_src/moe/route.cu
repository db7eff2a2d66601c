// The choice of each token's experts, and the order of (token, expert) pairs by expert.

#include "moe/expert_choice.cuh"

// experts[t, i] and weights[t, i] = the choice for token t, see Routing in engine/ops/moe_interface.py.
//   in:  logits [num_tokens, num_experts] float; bias [num_experts] T or null; correction [num_experts] float
//        or null; kind one of ROUTE_*
//   out: experts [num_tokens, top_k] int, weights [num_tokens, top_k] float
// Layout: row-major. num_experts at most 32 * PER_LANE, top_k and groups at most 32.
// Grid: blocks of ROUTE_WARPS tokens. Block: 32 * ROUTE_WARPS threads. Shared memory: none dynamic.
// Unit of work: a warp a token.
template <typename T, int PER_LANE>
__global__ void __launch_bounds__(ROUTE_WARPS* WARP_SIZE) route_kernel(ROUTE_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  __shared__ float rows[ROUTE_WARPS][PER_LANE * WARP_SIZE];
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int token = blockIdx.x * ROUTE_WARPS + warp;
  if (token >= num_tokens) return;

  auto logit = [&](int expert) {
    const float value = load_updated(logits + static_cast<long long>(token) * num_experts + expert);
    return bias == nullptr ? value : value + to_float(bias[expert]);
  };
  const ExpertChoice choice = {correction, num_experts,   top_k, kind,  normalised,
                               groups,     chosen_groups, scale, jitter};
  int chosen;
  float weight;
  choice.choose<PER_LANE>(logit, rows[warp], chosen, weight);
  if (lane < top_k) {
    experts[token * top_k + lane] = chosen;
    weights[token * top_k + lane] = weight;
  }
}

// offsets, pairs and places = the (token, expert) pairs sorted by expert, those of an expert in their order.
//   in:  experts [num_pairs] int, each below num_experts
//   out: offsets [num_experts + 1] int; pairs [num_pairs] int: which is the p-th; places [num_pairs] int: the
//        inverse
// Layout: contiguous.
// Grid: one block. Block: 32 to 1024 threads. Shared memory: (warps + 1) * num_experts + 1 ints.
// Unit of work: a warp a part of the pairs, 32 at a time: it counts them by expert, all counts are added up,
// and it puts them in their places.
__global__ void __launch_bounds__(1024) group_pairs_kernel(GROUP_PAIRS_PARAMS) {
  extern __shared__ __align__(16) int shared_counts[];
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int warps = blockDim.x / WARP_SIZE;
  int* const counts = shared_counts + warp * num_experts;   // of this warp
  int* const starts = shared_counts + warps * num_experts;  // [num_experts + 1]
  for (int i = threadIdx.x; i < warps * num_experts; i += blockDim.x) shared_counts[i] = 0;
  let_next_kernel_start();
  wait_for_earlier_kernels();
  __syncthreads();

  const int a_warp = ceil_div(ceil_div(num_pairs, WARP_SIZE), warps) * WARP_SIZE;
  const int begin = warp * a_warp, end = min(begin + a_warp, num_pairs);
  // Of the lanes with this lane's expert, or with none, whose number is num_experts: how many come before it,
  // and how many there are. A vote for each bit of the number.
  auto rank_of = [&](int expert, int& count) {
    unsigned same = FULL_WARP;
    for (int bit = 0; num_experts >> bit != 0; bit += 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool is_set = expert >> (bit + i) & 1;
        const unsigned votes = __ballot_sync(FULL_WARP, is_set);
        same &= is_set ? votes : ~votes;
      }
    }
    count = __popc(same);
    return __popc(same & ((1u << lane) - 1));
  };
  for (int base = begin; base < end; base += WARP_SIZE) {
    const bool valid = base + lane < end;
    const int expert = valid ? load_updated(experts + base + lane) : num_experts;
    int count;
    const int before = rank_of(expert, count);
    if (valid && before == 0) counts[expert] += count;
    __syncwarp();
  }
  __syncthreads();

  // Each warp's first place among an expert's pairs, and each expert's number of pairs.
  for (int expert = threadIdx.x; expert < num_experts; expert += blockDim.x) {
    int sum = 0;
    for (int w = 0; w < warps; ++w) {
      const int count = shared_counts[w * num_experts + expert];
      shared_counts[w * num_experts + expert] = sum;
      sum += count;
    }
    starts[expert + 1] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    int sum = 0;
    for (int base = 0; base < num_experts; base += WARP_SIZE) {
      const int expert = base + lane;
      int value = expert < num_experts ? starts[expert + 1] : 0;
#pragma unroll
      for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
        const int other = __shfl_up_sync(FULL_WARP, value, distance);
        if (lane >= distance) value += other;
      }
      if (expert < num_experts) starts[expert + 1] = sum + value;
      sum += __shfl_sync(FULL_WARP, value, WARP_SIZE - 1);
    }
    if (lane == 0) starts[0] = 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i <= num_experts; i += blockDim.x) offsets[i] = starts[i];

  for (int base = begin; base < end; base += WARP_SIZE) {
    const int pair = base + lane;
    const bool valid = pair < end;
    const int expert = valid ? load_updated(experts + pair) : num_experts;
    int count;
    const int before = rank_of(expert, count);
    const int place = valid ? starts[expert] + counts[expert] + before : 0;
    __syncwarp();
    if (valid && before == 0) counts[expert] += count;
    __syncwarp();
    if (valid) {
      pairs[place] = pair;
      places[pair] = place;
    }
  }
}
