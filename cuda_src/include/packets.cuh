// Data that ranks give each other word by word, each with the number of its meeting: a rank writes into the
// others' boxes and reads its own, so one way over the link is all that it waits for, without fences and
// flags of a block. (NCCL's LL protocol has the same idea: https://arxiv.org/abs/2507.04786.)
#pragma once

#include "peers.cuh"

// Half of a packet's 8 bytes is data. A block has packets of its own, and counts its own meetings: so kernels
// with other grids may follow one another. What a block wrote is read before it writes there again, two
// meetings later: it has by then what the others wrote in the meeting between, for which they had to end the
// first.
template <typename T>
class Packets {
 public:
  static constexpr int WORDS = CHUNK * sizeof(T) / sizeof(unsigned);  // of a chunk
  union Words {
    __device__ __forceinline__ Words() {}
    T elements[CHUNK];
    unsigned of[WORDS];
  };

  __device__ __forceinline__ Packets(const unsigned long long* boxes, int rank, int ranks,
                                     unsigned long long patience, unsigned kind)
      : boxes_(boxes), rank_(rank), ranks_(ranks), kind_(kind), patience_(patience) {
    meeting_ = __ldcg(meetings()) + 1;
  }

  // Chunk `chunk` of this block's, of at most BLOCK_PACKETS words together, to all others.
  __device__ __forceinline__ void push(int chunk, const float (&values)[CHUNK]) const {
    Words words;
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) words.elements[j] = from_float<T>(values[j]);
    for (int other = 0; other < ranks_; ++other) {
      if (other == rank_) continue;
      unsigned long long* to = packets(other, rank_, chunk);
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        store_relaxed_system(to + w * blockDim.x,
                             static_cast<unsigned long long>(meeting_) << 32 | words.of[w]);
      }
    }
  }

  // Chunks 0 to CHUNKS - 1 of another rank, those of which are `present`, once they are there; all are looked
  // at at once, since each look takes most of a microsecond.
  template <int CHUNKS, typename Present>
  __device__ __forceinline__ void pull(int other, Present present, Words (&words)[CHUNKS]) const {
    unsigned long long begun = 0;
    for (unsigned polls = 1;; ++polls) {
      bool came = true;
      unsigned seen = meeting_;
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        if (!present(c)) continue;
        const unsigned long long* from = packets(rank_, other, c);
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
          const unsigned long long packet = load_relaxed_system(from + w * blockDim.x);
          words[c].of[w] = static_cast<unsigned>(packet);
          const unsigned number = static_cast<unsigned>(packet >> 32);
          came = came && number == meeting_;
          seen = number == meeting_ ? seen : number;
        }
      }
      if (came) return;
      if (polls % POLLS == 0) {
        const Wait wait{kind_, static_cast<unsigned>(other), START, meeting_, seen};
        begun = check_time(wait, begun, patience_, reinterpret_cast<unsigned*>(boxes_[ranks_]),
                           reinterpret_cast<unsigned*>(boxes_[rank_]) + 2);
      }
    }
  }

  // To be called by all threads of the block when they are done.
  __device__ __forceinline__ void finish() const {
    __syncthreads();
    if (threadIdx.x == 0) *meetings() = meeting_;
  }

 private:
  __device__ __forceinline__ unsigned char* box(int rank) const {
    return reinterpret_cast<unsigned char*>(boxes_[rank]);
  }
  // Of this block.
  __device__ __forceinline__ unsigned* meetings() const {
    return reinterpret_cast<unsigned*>(box(rank_) + MEETINGS) + blockIdx.x;
  }
  // In the box of `owner`, from `source`, for this thread's part of a chunk: a warp's words of a kind lie
  // together.
  __device__ __forceinline__ unsigned long long* packets(int owner, int source, int chunk) const {
    const int place = ((meeting_ & 1) * ranks_ + source) * MAX_BLOCKS + blockIdx.x;
    return reinterpret_cast<unsigned long long*>(box(owner) + PACKETS) +
           static_cast<long long>(place) * BLOCK_PACKETS + chunk * WORDS * blockDim.x + threadIdx.x;
  }

  const unsigned long long* boxes_;
  int rank_, ranks_;
  unsigned kind_;
  unsigned long long patience_;
  unsigned meeting_;
};
