// The choice of a token among a part of a row of logits.
#pragma once

#include "generated/row_choice.cuh"
#include "sampling/choice.cuh"
#include "sampling/philox.cuh"
#include "sampling/token_filter.cuh"

constexpr int LOADS = 5;  // groups in flight per thread

// A block's part of a row.
struct Row {
  const float* logits;
  int begin;  // of the block's part of the vocabulary
  int end;
  float maximum;
  float temperature;

  // visit(id, values of id to id + 3) for each group of the thread's share, in order; values from `end` on
  // are anything. With many loads in flight, for what is done fast.
  template <int NUM_THREADS, typename Visit>
  __device__ __forceinline__ void for_each_group(Visit visit) const {
    constexpr int STRIDE = NUM_THREADS * GROUP;
    for (int first = begin + threadIdx.x * GROUP; first < end; first += STRIDE * LOADS) {
      float values[LOADS][GROUP];
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const int id = first + i * STRIDE;
        load_floats(logits + id, end - id, values[i]);
      }
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        if (first + i * STRIDE < end) visit(first + i * STRIDE, values[i]);
      }
    }
  }

  // The same with little code, for what is costly; the lanes of a warp visit together, those whose ids are
  // `end` and more as well.
  template <int NUM_THREADS, typename Visit>
  __device__ __forceinline__ void for_each_group_in_turn(Visit visit) const {
    constexpr int STRIDE = NUM_THREADS * GROUP;
    const int lane_ids = threadIdx.x % WARP_SIZE * GROUP;
    int id = begin + threadIdx.x * GROUP;
    float values[GROUP];
    load_floats(logits + id, end - id, values);
#pragma unroll 1
    for (; id - lane_ids < end; id += STRIDE) {
      float next[GROUP];
      load_floats(logits + id + STRIDE, end - id - STRIDE, next);
      visit(id, values);
#pragma unroll
      for (int j = 0; j < GROUP; ++j) values[j] = next[j];
    }
  }

  // visit(maximum - logit) for each logit of the thread's share that is not -inf.
  template <int NUM_THREADS, typename Visit>
  __device__ __forceinline__ void for_each_distance(Visit visit) const {
    for_each_group<NUM_THREADS>([&](int id, const float (&values)[GROUP]) {
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        const float distance = maximum - values[j];
        if (id + j < end && distance < FLOAT_INFINITY) visit(distance);
      }
    });
  }

  __device__ __forceinline__ unsigned key(float logit) const {
    const float distance = distance_of(logit, maximum, temperature);
    return distance < MAX_DISTANCE ? key_of(distance) : NO_KEY;
  }
};

// The best choice of the part by logit; NaN wins.
template <int NUM_THREADS>
__device__ __forceinline__ Choice best_of_part(const Row& row) {
  float best = -FLOAT_INFINITY;
  int best_id = row.begin + threadIdx.x * GROUP;
  bool has_nan = false;
  row.for_each_group<NUM_THREADS>([&](int id, const float (&values)[GROUP]) {
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
      if (id + j >= row.end) break;
      has_nan |= isnan(values[j]);
      if (values[j] > best) {
        best = values[j];
        best_id = id + j;
      }
    }
  });
  if (best_id >= row.end) return NO_CHOICE;
  return make_choice(has_nan ? __int_as_float(0x7fc00000) : best, best_id);
}

// The best of the part's kept ids by noise - distance, where noise = -log(-log(u)) (Gumbel 1954), u = ((word
// >> 9) + 0.5) / 2^23, word id % 4 of Philox4x32-10 with counter (id / 4, position, 0, 0) and the row's seed
// as key; kept are keys up to `cutoff`. Scores are computed for those alone that can pass `best_score`,
// shared memory with the best so far as the upper half of a Choice: -log(-log(u)) <= -log(1 - u).
class GumbelChoice {
 public:
  __device__ __forceinline__ GumbelChoice(const Row& row, unsigned cutoff, unsigned long long seed,
                                          unsigned position, unsigned* best_score)
      : row_(row),
        cutoff_(cutoff),
        position_(position),
        key_(make_uint2(static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32))),
        inverse_temperature_(1.0f / row.temperature),
        best_score_(best_score) {}

  // Every lane of the warp calls it; ids from the row's `end` on are none.
  __device__ __forceinline__ void visit(int id, const float (&values)[GROUP]) {
    constexpr float SLACK = 0x1p-10f;
    float threshold = score_of(static_cast<Choice>(*static_cast<volatile unsigned*>(best_score_)) << 32);
    const float reach = fminf(REACH, MAX_NOISE + SLACK - threshold);  // the threshold is NaN at first
    float bounds[GROUP];  // so far distances, at most the real ones
    unsigned possible = 0;
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
      bounds[j] = (row_.maximum - values[j]) * inverse_temperature_ * (1.0f - 0x1p-20f);
      possible |= bounds[j] >= reach || id + j >= row_.end ? 0u : 1u << j;
    }
    if (!__any_sync(FULL_WARP, possible != 0)) return;
    const uint4 random = philox4x32_10(make_uint4(id / GROUP, position_, 0u, 0u), key_);
    const unsigned words[GROUP] = {random.x, random.y, random.z, random.w};
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
      const float one_to_two = __uint_as_float(words[j] >> 9 | 0x3f800000u);  // 1 + (word >> 9) / 2^23
      const float complement = 2.0f - one_to_two - 0x1p-24f;                  // 1 - u, exact
      bounds[j] = SLACK - __logf(complement) - bounds[j];
    }
    while (true) {
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        if (bounds[j] < threshold) possible &= ~(1u << j);
      }
      if (!__any_sync(FULL_WARP, possible != 0)) return;
      if (possible != 0) {
        const int j = likeliest(bounds, possible);
        possible ^= 1u << j;
        score(id + j, pick(values, j), pick(words, j));
      }
      const unsigned highest = __reduce_max_sync(FULL_WARP, static_cast<unsigned>(best_ >> 32));
      if (threadIdx.x % WARP_SIZE == 0) atomicMax(best_score_, highest);
      threshold = fmaxf(threshold, score_of(static_cast<Choice>(highest) << 32));
    }
  }

  // The thread's.
  __device__ __forceinline__ Choice best() const { return best_; }

 private:
  template <typename T>
  static __device__ __forceinline__ T pick(const T (&items)[GROUP], int j) {
    return j < 2 ? (j == 0 ? items[0] : items[1]) : (j == 2 ? items[2] : items[3]);
  }

  // That of the possible ones with the highest bound, so that a row's first scores rule out most others.
  static __device__ __forceinline__ int likeliest(const float (&bounds)[GROUP], unsigned possible) {
    int best = __ffs(possible) - 1;
    float highest = pick(bounds, best);
#pragma unroll
    for (int j = 1; j < GROUP; ++j) {
      if ((possible >> j & 1) != 0 && bounds[j] > highest) {
        highest = bounds[j];
        best = j;
      }
    }
    return best;
  }

  __device__ __forceinline__ void score(int id, float logit, unsigned word) {
    const float distance = distance_of(logit, row_.maximum, row_.temperature);
    if (!(distance < REACH) || key_of(distance) > cutoff_) return;
    const float uniform = (static_cast<float>(word >> 9) + 0.5f) * 0x1p-23f;
    best_ = better(best_, make_choice(-logf(-logf(uniform)) - distance, id));
  }

  const Row& row_;
  unsigned cutoff_;
  unsigned position_;
  uint2 key_;
  float inverse_temperature_;
  unsigned* best_score_;
  Choice best_ = NO_CHOICE;
};
