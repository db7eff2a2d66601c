// The choice of a token's experts by its router logits, of which a warp has those of experts lane, lane + 32,
// ... in a lane each.
#pragma once

#include "common.cuh"
#include "generated/route.cuh"

constexpr unsigned NO_EXPERT = 0x7fffffff;

// Whole numbers in the order of floats: 0 is below all of them, NaN is 1.
__device__ __forceinline__ unsigned key_of(float value) {
  if (value != value) return 1;
  const unsigned bits = __float_as_uint(value + 0.0f);  // of the two zeros one
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(unsigned key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// One token's scores.
template <int PER_LANE>
struct Scores {
  float values[PER_LANE];   // -infinity beyond the experts
  unsigned keys[PER_LANE];  // 0: out of the choice
  int lane;

  __device__ __forceinline__ explicit Scores(int lane) : lane(lane) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      values[i] = -FLOAT_INFINITY;
      keys[i] = 0;
    }
  }
  __device__ __forceinline__ void set(int i, float value) {
    values[i] = value;
    keys[i] = key_of(value);
  }

  // The largest value, of equal ones that of the lowest expert; all lanes get both.
  __device__ __forceinline__ float largest(int& expert) const {
    unsigned best = 0, of_lane = NO_EXPERT;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      if (keys[i] > best) {
        best = keys[i];
        of_lane = i * WARP_SIZE + lane;
      }
    }
    const unsigned highest = __reduce_max_sync(FULL_WARP, best);
    const unsigned lowest = __reduce_max_sync(FULL_WARP, best == highest ? NO_EXPERT - of_lane : 0u);
    expert = NO_EXPERT - lowest;
    return value_of(highest);
  }

  __device__ __forceinline__ void take(int expert) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      if (expert == i * WARP_SIZE + lane) keys[i] = 0;
    }
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
  Scores<1> sums(lane);
  if (lane < groups) {
    float first = -FLOAT_INFINITY, second = -FLOAT_INFINITY;
    for (int i = 0; i < size; ++i) {
      const float value = row[lane * size + i];
      second = fmaxf(second, fminf(value, first));
      first = fmaxf(first, value);
    }
    sums.set(0, first + second);
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
    if (expert < num_experts && (kept >> expert / size & 1) == 0) scores.keys[i] = 0;
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
    if (logits.keys[i] != 0 && !(below > 2.0f * jitter)) total += expf(value - largest);
  }
  return 1.0f / warp_sum(total);
}

// How experts are chosen: Routing in engine/ops/moe_interface.py.
struct ExpertChoice {
  const float* correction;  // [num_experts] or null
  int num_experts, top_k;
  int kind;  // one of ROUTE_*
  int normalised;
  int groups, chosen_groups;
  float scale, jitter;

  // Lane i < top_k gets the i-th expert of a token and its weight. `logit(expert)`: of this lane's experts,
  // and of those chosen; NaN counts as the smallest. `row`: shared memory of a float for each expert.
  template <int PER_LANE, typename Logit>
  __device__ __forceinline__ void choose(Logit logit, float* row, int& chosen, float& weight) const {
    const int lane = threadIdx.x % WARP_SIZE;
    auto weighing = [&](int expert) {  // the score that weighs an expert
      float value = logit(expert);
      if (value != value) value = -FLOAT_INFINITY;
      return kind == ROUTE_SIGMOID ? 1.0f / (1.0f + expf(-value)) : value;
    };
    Scores<PER_LANE> scores(lane);
    // With a correction, softmax chooses by its shares: exp(logit - peak) / sum.
    const bool by_shares = kind == ROUTE_SOFTMAX && correction != nullptr;
    float peak = -FLOAT_INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int expert = i * WARP_SIZE + lane;
      if (expert >= num_experts) continue;
      const float value = weighing(expert);
      peak = fmaxf(peak, value);
      scores.set(i, by_shares || correction == nullptr ? value : value + correction[expert]);
    }
    if (by_shares) {
      peak = warp_max(peak);
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) sum += expf(scores.values[i] - peak);  // 0 beyond the experts
      sum = warp_sum(sum);
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        const int expert = i * WARP_SIZE + lane;
        if (expert < num_experts) scores.set(i, expf(scores.values[i] - peak) / sum + correction[expert]);
      }
    }
    if (chosen_groups < groups) keep_groups(scores, row, num_experts, groups, chosen_groups);

    chosen = 0;
    weight = 0.0f;
    float first = 0.0f;
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
    weight *= scale;
  }
};
