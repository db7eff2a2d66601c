// Meetings of the ranks' kernels, by flags in each other's memory.
//
// Each rank has a box that the others see. Every rank launches the same kernels in the same order and with
// the same grid, so block b of a kernel meets block b of the others. Nothing is reset between kernels: flags
// are numbered by an epoch that each kernel raises when its last block ends, so that a CUDA graph may be
// replayed.
#pragma once

#include "common.cuh"
#include "generated/peers.cuh"
#include "ptx/peer.cuh"

enum Phase { START, END };

// What a thread waits for: that the number `wanted` is at `seen`, which may be another rank's memory.
struct Wait {
  unsigned kind, other, phase, wanted;
  const unsigned* seen;
};

// The clock is looked at once in POLLS times, and the board, which is memory of the host, only in a wait that
// is not BRIEF: looks of all threads take the way of the host's launches. Ends the kernel with an error if
// the host says so, or after `patience` with a report on the board, of which `reports` counts those begun. ->
// when the wait began.
__device__ __noinline__ unsigned long long check_time(Wait wait, unsigned long long begun,
                                                      unsigned long long patience, volatile unsigned* board,
                                                      unsigned* reports) {
  const unsigned long long now = nanoseconds();
  if (begun == 0) begun = now;
  if (now - begun < BRIEF) return begun;
  if (board[Board::STOP] != 0) end_with_error();
  if (now - begun <= patience) return begun;
  if (atomicInc(reports, ~0u) != 0) {  // another thread reports, which must come to its end
    if (now - begun > 2 * patience) end_with_error();
    return begun;
  }
  board[Board::KIND] = wait.kind;
  board[Board::OTHER] = wait.other;
  board[Board::PHASE] = wait.phase;
  board[Board::BLOCK] = blockIdx.x;
  board[Board::WANTED] = wait.wanted;
  board[Board::SEEN] = load_acquire_system(wait.seen);
  __threadfence_system();
  board[Board::LATE] = 1;
  __threadfence_system();
  end_with_error();
  return begun;
}

class Peers {
 public:
  // `boxes`: of each rank, then this rank's board. `kind`: of the kernel, for the board.
  __device__ __forceinline__ Peers(const unsigned long long* boxes, int rank, int ranks,
                                   unsigned long long patience, unsigned kind)
      : boxes_(boxes), rank_(rank), ranks_(ranks), kind_(kind), patience_(patience) {
    epoch_ = __ldcg(reinterpret_cast<const unsigned*>(box(rank)));
  }

  // Returns in all threads of the block once the same block of every rank has come as far, with what the
  // others wrote until then. At START a rank may tell two addresses.
  __device__ __forceinline__ void meet(Phase phase, const void* address = nullptr,
                                       const void* second = nullptr) {
    __syncthreads();
    const int other = threadIdx.x;
    if (other < ranks_) {
      if (phase == START) {
        told(other, rank_)[0] = reinterpret_cast<unsigned long long>(address);
        told(other, rank_)[1] = reinterpret_cast<unsigned long long>(second);
      }
      store_release_system(flag(other, phase, rank_), epoch_ + 1);
      wait_for(other, phase);
    }
    __syncthreads();
  }

  // What `rank` told at START: the first address, or the second.
  template <typename T>
  __device__ __forceinline__ T* address_of(int rank, int which = 0) const {
    return reinterpret_cast<T*>(__ldcg(told(rank_, rank) + which));
  }

  // To be called by all threads of all blocks when they are done.
  __device__ __forceinline__ void finish() {
    __syncthreads();
    if (threadIdx.x != 0) return;
    unsigned* own = reinterpret_cast<unsigned*>(box(rank_));
    const unsigned before = atomicInc(own + 1, gridDim.x - 1);  // back to 0 with the last
    if (before == gridDim.x - 1) own[0] = epoch_ + 1;
  }

 private:
  __device__ __forceinline__ void wait_for(int other, Phase phase) const {
    const unsigned* mine = flag(rank_, phase, other);
    unsigned long long begun = 0;
    for (unsigned polls = 1;; ++polls) {
      const unsigned seen = load_acquire_system(mine);
      if (static_cast<int>(seen - (epoch_ + 1)) >= 0) return;
      if (polls % POLLS == 0) {
        const Wait wait{kind_, static_cast<unsigned>(other), static_cast<unsigned>(phase), epoch_ + 1, mine};
        begun = check_time(wait, begun, patience_, reinterpret_cast<unsigned*>(boxes_[ranks_]),
                           reinterpret_cast<unsigned*>(box(rank_)) + 2);
      }
    }
  }

  __device__ __forceinline__ unsigned char* box(int rank) const {
    return reinterpret_cast<unsigned char*>(boxes_[rank]);
  }
  // In the box of `owner`, for what `source` says of this block.
  __device__ __forceinline__ int slot(int source) const { return source * MAX_BLOCKS + blockIdx.x; }
  __device__ __forceinline__ unsigned* flag(int owner, Phase phase, int source) const {
    return reinterpret_cast<unsigned*>(box(owner) + FLAGS) + phase * MAX_RANKS * MAX_BLOCKS + slot(source);
  }
  __device__ __forceinline__ unsigned long long* told(int owner, int source) const {
    return reinterpret_cast<unsigned long long*>(box(owner) + ADDRESSES) + 2 * slot(source);
  }

  const unsigned long long* boxes_;
  int rank_, ranks_;
  unsigned kind_;
  unsigned long long patience_;
  unsigned epoch_;
};
