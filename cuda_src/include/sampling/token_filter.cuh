// min_p, top_k and top_p of a row as one number: the largest key (distance.cuh) that is kept. Without
// sorting: keys are counted, or weighed, in bins; the bin with the last kept key is divided again.
#pragma once

#include "cluster.cuh"
#include "sampling/distance.cuh"

// As engine/ops/cpu/sampling.py: a p or a sum that rounds to the limit in float32 is within it.
constexpr double MIN_P_SLACK = 0x1p-25;
constexpr double TOP_P_SLACK = 0x1p-22;

constexpr unsigned NO_KEY = 0xffffffffu;  // above those of distances below MAX_DISTANCE
constexpr int BIN_BITS = 9;
constexpr int NUM_BINS = 1 << BIN_BITS;

// Sums of numbers below 2^41 in bins, exact in any order: each number goes to three places of 13, 13 and 15
// bits, and neighbouring lanes to different copies, so that they seldom meet. A copy holds 2^17 numbers.
struct Histogram {
  static constexpr int COPIES = 2;
  static constexpr int PLACE_BITS = 13;
  unsigned places[COPIES][3][NUM_BINS];

  __device__ __forceinline__ void add_one(unsigned bin) {
    atomicAdd(&places[threadIdx.x % COPIES][0][bin], 1u);
  }
  __device__ __forceinline__ void add(unsigned bin, const Mass& mass) {
#pragma unroll
    for (int p = 0; p < 3; ++p) atomicAdd(&places[threadIdx.x % COPIES][p][bin], mass.places[p]);
  }
  // Of all copies, which are cleared.
  __device__ __forceinline__ unsigned long long take(int bin) {
    unsigned long long sum = 0;
#pragma unroll
    for (int p = 2; p >= 0; --p) {
      sum <<= PLACE_BITS;
#pragma unroll
      for (int c = 0; c < COPIES; ++c) {
        sum += places[c][p][bin];
        places[c][p][bin] = 0;
      }
    }
    return sum;
  }
};

// A row's filter in BLOCKS blocks of THREADS threads, each of which goes through its own part of the keys.
// Every block keeps one in shared memory; all threads of all blocks must call what follows.
template <int BLOCKS, int THREADS>
class TokenFilter {
 public:
  // Largest key up to `limit` kept by min_p (0: off), then top_k (0: off), then top_p (1: off).
  // for_each_key(visit) calls visit(key) for each key of the thread's share, NO_KEY where there is none. Once
  // a kernel; afterwards the blocks must meet once more before one of them ends.
  template <typename ForEachKey>
  __device__ unsigned cutoff(ForEachKey for_each_key, unsigned limit, float min_p, int top_k, float top_p) {
    if (threadIdx.x == 0) {
      // In double and by one thread: it must round as on the CPU, and most GPUs are slow at it.
      const double steps = min_p > 0.0f ? (MIN_P_SLACK - log(static_cast<double>(min_p))) * KEY_STEPS
                                        : static_cast<double>(LAST_KEY);
      limit_ = steps < LAST_KEY ? static_cast<unsigned>(steps) : LAST_KEY;
    }
    if (threadIdx.x < NUM_BINS) histogram_.take(threadIdx.x);
    __syncthreads();
    limit = min(limit, limit_);
    int turn = 0;
    if (top_k > 0) {
      limit = select<false>(for_each_key, limit, turn, [&](unsigned long long count) {
        return top_k < count ? static_cast<unsigned long long>(top_k) : 0ull;
      });
    }
    if (top_p < 1.0f) {
      limit = select<true>(for_each_key, limit, turn, [&](unsigned long long mass) {
        const double target = ceil(top_p * (1.0 - TOP_P_SLACK) * static_cast<double>(mass));
        return target < 1.0 ? 1ull : static_cast<unsigned long long>(target);
      });
    }
    return limit;
  }

 private:
  using Blocks = Cluster<BLOCKS>;
  static constexpr int NUM_WARPS = THREADS / WARP_SIZE;
  static_assert(THREADS % WARP_SIZE == 0 && NUM_BINS <= THREADS, "a thread looks after one bin");

  // Least key such that the amounts of the keys up to it reach `target_of(amount of all)`, or one that keeps
  // the same tokens; `limit` if that is the whole or more. Amounts are masses or, not BY_MASS, ones. Keys
  // above `limit` do not exist for it. The first round looks at the first 16 nats in parts of 1/32, later
  // ones at 9 more bits of the keys that share the bits found so far, until one token is left or all bits are
  // known. Every block adds up all blocks' bins for itself, and so they meet but once a round.
  template <bool BY_MASS, typename ForEachKey, typename TargetOf>
  __device__ unsigned select(ForEachKey for_each_key, unsigned limit, int& turn, TargetOf target_of) {
    constexpr int FIRST_SHIFT = 22;
    constexpr int REST_SHIFT = 23;  // beyond the first 16 nats
    unsigned base = 0;
    unsigned last = LAST_KEY;
    unsigned long long target = 0;
    bool first_round = true;
    for (int shift = FIRST_SHIFT;;) {
      turn = 1 - turn;
      const unsigned end = min(limit, last);
      for_each_key([&](unsigned key) {
        if (key != NO_KEY && key >= base && key <= end) {
          const unsigned bin = min((key - base) >> shift, NUM_BINS - 1u);
          if (BY_MASS) {
            histogram_.add(bin, mass_of(key));
          } else {
            histogram_.add_one(bin);
          }
        }
      });
      __syncthreads();
      // What is written two rounds later, all blocks have read by then: they meet in between.
      if (threadIdx.x < NUM_BINS) amounts_[turn][threadIdx.x] = histogram_.take(threadIdx.x);
      Blocks::sync();

      unsigned long long amount = 0;
      if (threadIdx.x < NUM_BINS) {
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) amount += Blocks::at(amounts_[turn], b)[threadIdx.x];
      }
      const unsigned long long through = inclusive_sum(amount);
      if (first_round) target = target_of(whole_);
      if (target > 0 && through - amount < target && target <= through) {
        found_ = {through - amount, amount, static_cast<unsigned>(threadIdx.x)};
      }
      __syncthreads();
      if (target == 0) return limit;
      target -= found_.before;
      base += found_.bin << shift;
      if (first_round && found_.bin == NUM_BINS - 1) {
        shift = REST_SHIFT;
      } else {
        last = base + min((1u << shift) - 1, LAST_KEY - base);
        if (shift == 0 || target == found_.amount || (BY_MASS && is_one_token(found_.amount, base))) {
          return min(last, limit);
        }
        shift = max(shift - BIN_BITS, 0);
      }
      first_round = false;
    }
  }

  // Whether a bin of at most 1/16 nat from this key on has one token: its amount is not twice what one has.
  // Far tokens weigh too few steps to tell.
  static __device__ __forceinline__ bool is_one_token(unsigned long long amount, unsigned key) {
    constexpr unsigned long long ENOUGH_STEPS = 16;
    const Mass mass = mass_of(key);
    const unsigned long long most =
        static_cast<unsigned long long>(mass.places[2]) << 26 | mass.places[1] << 13 | mass.places[0];
    return most >= ENOUGH_STEPS && 2 * amount < 3 * most;
  }

  // Of the block's threads up to and with this one; that of all goes to whole_.
  __device__ unsigned long long inclusive_sum(unsigned long long sum) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int warp = threadIdx.x / WARP_SIZE;
#pragma unroll
    for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
      const unsigned long long below = __shfl_up_sync(FULL_WARP, sum, offset);
      if (lane >= offset) sum += below;
    }
    if (lane == WARP_SIZE - 1) warp_sums_[warp] = sum;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < NUM_WARPS; ++i) {
      if (i < warp) sum += warp_sums_[i];
    }
    if (threadIdx.x == THREADS - 1) whole_ = sum;
    __syncthreads();
    return sum;
  }

  struct Found {
    unsigned long long before;  // amount of the bins before
    unsigned long long amount;
    unsigned bin;
  };

  Histogram histogram_;                      // of the block's part
  unsigned long long amounts_[2][NUM_BINS];  // its sums, in this round and the one before
  unsigned long long warp_sums_[NUM_WARPS];
  unsigned long long whole_;
  Found found_;
  unsigned limit_;
};
