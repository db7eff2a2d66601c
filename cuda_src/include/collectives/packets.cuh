// Data that ranks give each other word by word, each with the number of its meeting: half of a packet's 8
// bytes is data. (NCCL's LL protocol has the same idea: https://arxiv.org/abs/2507.04786.)
#pragma once

#include "collectives/block_meetings.cuh"

class Packets : public BlockMeetings {
 public:
  using BlockMeetings::BlockMeetings;

  // Two words of this thread's, to all others.
  __device__ __forceinline__ void push(unsigned first, unsigned second) const {
    const unsigned long long number = static_cast<unsigned long long>(meeting_) << 32;
    for (int other = 0; other < ranks_; ++other) {
      if (other == rank_) continue;
      store_pair_relaxed_system(packets(box(other), rank_), number | first, number | second);
    }
  }

  // The same from another rank, once they are there.
  __device__ __forceinline__ void pull(int other, unsigned& first, unsigned& second) const {
    const unsigned long long* const from = packets(own_, other);
    unsigned long long begun = 0;
    for (unsigned polls = 1;; ++polls) {
      unsigned long long seen[2];
      load_pair_relaxed_system(from, seen[0], seen[1]);
      if (seen[0] >> 32 == meeting_ && seen[1] >> 32 == meeting_) {
        first = static_cast<unsigned>(seen[0]), second = static_cast<unsigned>(seen[1]);
        return;
      }
      begun = look_again(other, polls, begun);
    }
  }

 private:
  __device__ __forceinline__ unsigned long long* packets(unsigned long long box, int source) const {
    return reinterpret_cast<unsigned long long*>(places(box, source) + PACKETS) +
           2 * (blockIdx.x * blockDim.x + threadIdx.x);
  }
};
