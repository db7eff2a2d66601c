// The choice of each token's experts, and the order of (token, expert) pairs by expert.

#include "common.cuh"
#include "generated/route.cuh"

constexpr int NO_EXPERT = 0x7fffffff;

// One token's scores, those of experts lane, lane + 32, ... in a lane each.
template <int PER_LANE>
struct Scores {
  float values[PER_LANE];
  unsigned taken = 0;  // bit i: values[i] is out of the choice
  int lane;

  __device__ __forceinline__ Scores(int lane, int num_experts) : lane(lane) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      values[i] = -FLOAT_INFINITY;
      if (i * WARP_SIZE + lane >= num_experts) taken |= 1u << i;
    }
  }

  // The largest value, of equal ones that of the lowest expert; all lanes get both.
  __device__ __forceinline__ float largest(int& expert) const {
    float best = -FLOAT_INFINITY;
    expert = NO_EXPERT;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const bool first = expert == NO_EXPERT;
      if ((taken >> i & 1) == 0 && (first || values[i] > best)) {
        best = values[i];
        expert = i * WARP_SIZE + lane;
      }
    }
#pragma unroll
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(FULL_WARP, best, distance);
      const int other_expert = __shfl_xor_sync(FULL_WARP, expert, distance);
      if (other_expert != NO_EXPERT &&
          (expert == NO_EXPERT || other > best || (other == best && other_expert < expert))) {
        best = other;
        expert = other_expert;
      }
    }
    return best;
  }

  __device__ __forceinline__ void take(int expert) {
    if (expert % WARP_SIZE == lane) taken |= 1u << expert / WARP_SIZE;
  }
};

// Leave only the experts of the `chosen` groups of which the two largest scores have the largest sums. `row`:
// shared memory of a float for each expert.
template <int PER_LANE>
__device__ __forceinline__ void keep_groups(Scores<PER_LANE>& scores, float* row, int num_experts, int groups,
                                            int chosen) {
  const int lane = scores.lane;
  const int size = num_experts / groups;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int expert = i * WARP_SIZE + lane;
    if (expert < num_experts) row[expert] = scores.values[i];
  }
  __syncwarp();
  Scores<1> sums(lane, groups);
  if (lane < groups) {
    float first = -FLOAT_INFINITY, second = -FLOAT_INFINITY;
    for (int i = 0; i < size; ++i) {
      const float value = row[lane * size + i];
      second = fmaxf(second, fminf(value, first));
      first = fmaxf(first, value);
    }
    sums.values[0] = first + second;
  }
  unsigned kept = 0;
  for (int i = 0; i < chosen; ++i) {
    int group;
    sums.largest(group);
    sums.take(group);
    kept |= 1u << group;
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int expert = i * WARP_SIZE + lane;
    if (expert < num_experts && (kept >> expert / size & 1) == 0) scores.taken |= 1u << i;
  }
}

// The weight of the largest logit that is left, by the softmax over those near it.
template <int PER_LANE>
__device__ __forceinline__ float sparsemixer_weight(const Scores<PER_LANE>& logits, float largest,
                                                    float jitter) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const float value = logits.values[i];
    const float below = (largest - value) / fmaxf(fabsf(value), largest);
    if ((logits.taken >> i & 1) == 0 && !(below > 2.0f * jitter)) total += expf(value - largest);
  }
  return 1.0f / warp_sum(total);
}

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
  static_assert(PER_LANE <= 16, "a lane's experts are the bits of a word");
  __shared__ float rows[ROUTE_WARPS][PER_LANE * WARP_SIZE];
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int token = blockIdx.x * ROUTE_WARPS + warp;
  if (token >= num_tokens) return;

  // The score that weighs an expert.
  auto weighing = [&](int expert) {
    float value = load_updated(logits + static_cast<long long>(token) * num_experts + expert);
    if (bias != nullptr) value += to_float(bias[expert]);
    if (value != value) value = -FLOAT_INFINITY;
    return kind == ROUTE_SIGMOID ? 1.0f / (1.0f + expf(-value)) : value;
  };
  Scores<PER_LANE> scores(lane, num_experts);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int expert = i * WARP_SIZE + lane;
    if (expert >= num_experts) continue;
    scores.values[i] = weighing(expert) + (correction == nullptr ? 0.0f : correction[expert]);
  }
  // With a correction, softmax chooses by its shares: exp(logit - peak) / sum.
  const bool by_shares = kind == ROUTE_SOFTMAX && correction != nullptr;
  float peak = -FLOAT_INFINITY, sum = 0.0f;
  if (by_shares) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int expert = i * WARP_SIZE + lane;
      if (expert < num_experts) peak = fmaxf(peak, weighing(expert));
    }
    peak = warp_max(peak);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int expert = i * WARP_SIZE + lane;
      scores.values[i] = expert < num_experts ? expf(weighing(expert) - peak) : 0.0f;
      sum += scores.values[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int expert = i * WARP_SIZE + lane;
      scores.values[i] = scores.values[i] / sum + (expert < num_experts ? correction[expert] : 0.0f);
    }
  }
  if (chosen_groups < groups) keep_groups(scores, rows[warp], num_experts, groups, chosen_groups);

  int chosen = 0;
  float weight = 0.0f, first = 0.0f;
#pragma unroll 1
  for (int i = 0; i < top_k; ++i) {
    int expert;
    const float largest = scores.largest(expert);
    const float value = kind == ROUTE_SPARSEMIXER ? sparsemixer_weight(scores, largest, jitter) : largest;
    scores.take(expert);
    if (i == 0) first = largest;
    if (lane == i) {
      chosen = expert;
      weight = value;
    }
  }
  const bool has_expert = lane < top_k;
  if (kind == ROUTE_SIGMOID && has_expert) weight = weighing(chosen);
  if (by_shares) {
    weight = has_expert ? expf(weighing(chosen) - peak) / sum : 0.0f;
  } else if (kind == ROUTE_SOFTMAX || kind == ROUTE_SOFTMAX_OF_CHOSEN) {
    weight = has_expert ? expf(weight - first) : 0.0f;
    float total = weight;
    if (kind == ROUTE_SOFTMAX) {
      total = 0.0f;
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) total += expf(scores.values[i] - first);  // 0 beyond the experts
    }
    weight /= warp_sum(total);
  }
  if (normalised) weight /= warp_sum(has_expert ? weight : 0.0f) + 1e-20f;
  if (has_expert) {
    experts[token * top_k + lane] = chosen;
    weights[token * top_k + lane] = weight * scale;
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
  // Of the lanes with this lane's expert: how many come before it, and how many there are.
  auto rank_of = [&](int expert, int& count) {
    int before = 0;
    count = 0;
#pragma unroll
    for (int other = 0; other < WARP_SIZE; ++other) {
      const bool same = __shfl_sync(FULL_WARP, expert, other) == expert;
      before += same && other < lane;
      count += same;
    }
    return before;
  };
  for (int base = begin; base < end; base += WARP_SIZE) {
    const bool valid = base + lane < end;
    const int expert = valid ? load_updated(experts + base + lane) : -1;
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
    const int expert = valid ? load_updated(experts + pair) : -1;
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
