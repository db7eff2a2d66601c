// What ranks give each other for a sum, without anything that says that it is there: a place that nothing has
// come to has EMPTY words, and what takes a word leaves EMPTY behind. A word that is EMPTY itself, -0.0 in 32
// bits or 0.0 and -0.0 in 16, goes as 0: no sum that begins with 0.0 differs by the sign of a zero.
#pragma once

#include "collectives/block_meetings.cuh"

// A chunk's elements and the words that they are sent as.
template <typename T>
union ChunkWords {
  static constexpr int WORDS = CHUNK * sizeof(T) / sizeof(unsigned);
  __device__ __forceinline__ ChunkWords() {}
  T elements[CHUNK];
  unsigned of[WORDS];
};

class Summands : public BlockMeetings {
 public:
  using BlockMeetings::BlockMeetings;

  // Piece `piece` of this thread's, all of the block's having BLOCK_SUMMANDS bytes at most, to all others.
  template <int WORDS>
  __device__ __forceinline__ void push(int piece, const unsigned (&words)[WORDS]) const {
    static_assert(WORDS % 4 == 0, "four words go at once");
    for (int other = 0; other < ranks_; ++other) {
      if (other == rank_) continue;
      unsigned long long* to = summands<WORDS>(box(other), rank_, piece);
#pragma unroll
      for (int w = 0; w < WORDS; w += 4) {
        store_pair_relaxed_system(to + w / 2 * blockDim.x, pair(words[w], words[w + 1]),
                                  pair(words[w + 2], words[w + 3]));
      }
    }
  }

  // The first `count` pieces of this thread's, at least one, from another rank, once they are there. All are
  // looked at at once and without branches between them, since a look takes as long as all of them; what is
  // beyond `count` has the words of piece 0.
  template <int PIECES, int WORDS>
  __device__ __forceinline__ void pull(int other, int count, unsigned (&words)[PIECES][WORDS]) const {
    unsigned long long begun = 0;
    for (unsigned polls = 1;; ++polls) {
      bool missing = false;
#pragma unroll
      for (int p = 0; p < PIECES; ++p) {
        const unsigned long long* from = summands<WORDS>(own_, other, p < count ? p : 0);
#pragma unroll
        for (int w = 0; w < WORDS; w += 4) {
          unsigned long long first, second;
          load_pair_relaxed_system(from + w / 2 * blockDim.x, first, second);
          words[p][w] = static_cast<unsigned>(first), words[p][w + 1] = static_cast<unsigned>(first >> 32);
          words[p][w + 2] = static_cast<unsigned>(second);
          words[p][w + 3] = static_cast<unsigned>(second >> 32);
        }
      }
#pragma unroll
      for (int p = 0; p < PIECES; ++p) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) missing |= words[p][w] == EMPTY;
      }
      if (!missing) break;
      begun = look_again(other, polls, begun);
    }
    constexpr unsigned long long NOTHING = static_cast<unsigned long long>(EMPTY) << 32 | EMPTY;
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
      if (p >= count) continue;
      unsigned long long* to = summands<WORDS>(own_, other, p);
#pragma unroll
      for (int w = 0; w < WORDS; w += 4) store_pair_relaxed_system(to + w / 2 * blockDim.x, NOTHING, NOTHING);
    }
  }

 private:
  static __device__ __forceinline__ unsigned long long pair(unsigned first, unsigned second) {
    first = first == EMPTY ? 0 : first, second = second == EMPTY ? 0 : second;
    return static_cast<unsigned long long>(second) << 32 | first;
  }
  // Of this thread's part of a piece: a warp's vectors of a kind lie together.
  template <int WORDS>
  __device__ __forceinline__ unsigned long long* summands(unsigned long long box, int source,
                                                          int piece) const {
    const unsigned long long block = places(box, source) + blockIdx.x * BLOCK_SUMMANDS;
    return reinterpret_cast<unsigned long long*>(block) + piece * WORDS / 2 * blockDim.x + 2 * threadIdx.x;
  }
};
