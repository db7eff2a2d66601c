// Data that ranks give each other word by word, each with the number of its meeting: a rank writes into the
// others' boxes and reads its own, so one way over the link is all that it waits for, without fences and
// flags of a block. (NCCL's LL protocol has the same idea: https://arxiv.org/abs/2507.04786.)
#pragma once

#include "peers.cuh"

// A chunk's elements and the words that they are sent as.
template <typename T>
union ChunkWords {
  static constexpr int WORDS = CHUNK * sizeof(T) / sizeof(unsigned);
  __device__ __forceinline__ ChunkWords() {}
  T elements[CHUNK];
  unsigned of[WORDS];
};

// Half of a packet's 8 bytes is data. A block has packets of its own, and counts its own meetings: so kernels
// with other grids may follow one another. What a block wrote is read before it writes there again, two
// meetings later: it has by then what the others wrote in the meeting between, for which they had to end the
// first.
class Packets {
 public:
  // Reads nothing that changes, so that it may be made before earlier kernels end.
  __device__ __forceinline__ Packets(const unsigned long long* boxes, int rank, int ranks,
                                     unsigned long long patience, unsigned kind)
      : boxes_(boxes), rank_(rank), ranks_(ranks), kind_(kind), patience_(patience) {
    own_ = boxes[rank];
    next_ = rank == 0 ? 1 : 0;
    next_box_ = boxes[next_];
  }

  // After earlier kernels, which may have met.
  __device__ __forceinline__ void begin() { meeting_ = __ldcg(meetings()) + 1; }

  // Piece `piece` of this thread's, all of the block's having BLOCK_PACKETS words at most, to all others.
  template <int WORDS>
  __device__ __forceinline__ void push(int piece, const unsigned (&words)[WORDS]) const {
    static_assert(WORDS % 2 == 0, "two packets go at once");
    const unsigned long long number = static_cast<unsigned long long>(meeting_) << 32;
    for (int other = 0; other < ranks_; ++other) {
      if (other == rank_) continue;
      unsigned long long* to = packets<WORDS>(other == next_ ? next_box_ : boxes_[other], rank_, piece);
#pragma unroll
      for (int w = 0; w < WORDS; w += 2)
        store_pair_relaxed_system(to + w * blockDim.x, number | words[w], number | words[w + 1]);
    }
  }

  // To be called by all threads of the block when they have pushed, before any pulls: all is sent before any
  // waits, and all know the meeting's number, which may go up.
  __device__ __forceinline__ void end_pushes() const {
    __syncthreads();
    if (threadIdx.x == 0) *meetings() = meeting_;
  }

  // The first `count` pieces of this thread's, at least one, from another rank, once they are there. All are
  // looked at at once and without branches between them, since a look takes as long as all of them; what is
  // beyond `count` has the words of piece 0.
  template <int PIECES, int WORDS>
  __device__ __forceinline__ void pull(int other, int count, unsigned (&words)[PIECES][WORDS]) const {
    unsigned long long begun = 0;
    for (unsigned polls = 1;; ++polls) {
      unsigned long long seen[PIECES][WORDS];
#pragma unroll
      for (int p = 0; p < PIECES; ++p) {
        const unsigned long long* from = packets<WORDS>(own_, other, p < count ? p : 0);
#pragma unroll
        for (int w = 0; w < WORDS; w += 2)
          load_pair_relaxed_system(from + w * blockDim.x, seen[p][w], seen[p][w + 1]);
      }
      unsigned differs = 0;
#pragma unroll
      for (int p = 0; p < PIECES; ++p) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
          words[p][w] = static_cast<unsigned>(seen[p][w]);
          differs |= static_cast<unsigned>(seen[p][w] >> 32) ^ meeting_;
        }
      }
      if (differs == 0) return;
      if (polls % POLLS == 0) {
        const Wait wait{kind_, static_cast<unsigned>(other), START, meeting_, late(seen)};
        begun = check_time(wait, begun, patience_, reinterpret_cast<unsigned*>(boxes_[ranks_]),
                           reinterpret_cast<unsigned*>(own_) + 2);
      }
    }
  }

 private:
  // The number of a packet that is not of this meeting.
  template <int PIECES, int WORDS>
  __device__ __forceinline__ unsigned late(const unsigned long long (&seen)[PIECES][WORDS]) const {
    unsigned number = meeting_;
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        const unsigned other = static_cast<unsigned>(seen[p][w] >> 32);
        number = other == meeting_ ? number : other;
      }
    }
    return number;
  }
  // Of this block.
  __device__ __forceinline__ unsigned* meetings() const {
    return reinterpret_cast<unsigned*>(own_ + MEETINGS) + blockIdx.x;
  }
  // In a box, from `source`, for this thread's part of a piece: a warp's pairs of a kind lie together.
  template <int WORDS>
  __device__ __forceinline__ unsigned long long* packets(unsigned long long box, int source,
                                                         int piece) const {
    const int place = ((meeting_ & 1) * ranks_ + source) * PACKET_BLOCKS + blockIdx.x;
    return reinterpret_cast<unsigned long long*>(box + PACKETS) +
           static_cast<long long>(place) * BLOCK_PACKETS + piece * WORDS * blockDim.x + 2 * threadIdx.x;
  }

  const unsigned long long* boxes_;
  unsigned long long own_, next_box_;  // the boxes of this rank, and of the first that is another
  int rank_, ranks_, next_;
  unsigned kind_;
  unsigned long long patience_;
  unsigned meeting_;
};
