// Meetings of blocks that count their own, so that kernels with other grids may follow one another.
//
// A rank writes what it gives into the others' boxes, in places of the block's own, and reads its own box:
// one way over the link is all that it waits for, without fences and flags of a block. Meetings with even
// numbers have other places than those with odd ones. What a block wrote is read before it writes there
// again, two meetings later: it has by then what the others wrote in the meeting between, for which they had
// to end the first.
#pragma once

#include "collectives/peers.cuh"

class BlockMeetings {
 public:
  // Reads nothing that changes, so that it may be made before earlier kernels end.
  __device__ __forceinline__ BlockMeetings(const unsigned long long* boxes, int rank, int ranks,
                                           unsigned long long patience, unsigned kind)
      : rank_(rank), ranks_(ranks), boxes_(boxes), kind_(kind), patience_(patience) {
    own_ = boxes[rank];
    next_ = rank == 0 ? 1 : 0;
    next_box_ = boxes[next_];
  }

  // After earlier kernels, which may have met.
  __device__ __forceinline__ void begin() { meeting_ = __ldcg(meetings_of(own_)) + 1; }

  // To be called by all threads of the block when they have pushed in the first of its `meetings`, before any
  // pulls: all is sent before any waits, and all know the meeting's number, which may go up.
  __device__ __forceinline__ void end_pushes(int meetings = 1) const {
    __syncthreads();
    if (threadIdx.x == 0) *meetings_of(own_) = meeting_ + meetings - 1;
  }

  // The kernel's next meeting, once this thread has pulled from all others. It need not know of other
  // threads: each writes where none but itself has written and read in this kernel. What it read and left in
  // its places comes before what it pushes now, which others see before they write there.
  __device__ __forceinline__ void begin_next() {
    fence_system();
    ++meeting_;
  }

 protected:
  __device__ __forceinline__ unsigned long long box(int other) const {
    return other == next_ ? next_box_ : boxes_[other];
  }
  // In a box, what `source` gives in this meeting.
  __device__ __forceinline__ unsigned long long places(unsigned long long box, int source) const {
    return box + PLACES + static_cast<unsigned long long>((meeting_ & 1) * ranks_ + source) * PLACES_BYTES;
  }
  // To be called at each look in vain, of which this is number `polls`. -> when the wait began.
  __device__ __forceinline__ unsigned long long look_again(int other, unsigned polls,
                                                           unsigned long long begun) const {
    if (polls % POLLS != 0) return begun;
    const Wait wait{kind_, static_cast<unsigned>(other), START, meeting_, meetings_of(boxes_[other])};
    return check_time(wait, begun, patience_, reinterpret_cast<unsigned*>(boxes_[ranks_]),
                      reinterpret_cast<unsigned*>(own_) + 2);
  }

  int rank_, ranks_;
  unsigned meeting_;
  unsigned long long own_;

 private:
  // Of this block.
  __device__ __forceinline__ unsigned* meetings_of(unsigned long long box) const {
    return reinterpret_cast<unsigned*>(box + MEETINGS) + blockIdx.x;
  }

  const unsigned long long* boxes_;
  unsigned long long next_box_;  // of the first rank that is another
  int next_;
  unsigned kind_;
  unsigned long long patience_;
};
