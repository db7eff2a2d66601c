// A row whose sum over ranks has no kernel of its own: the product that ends a half of a layer sends its row
// to the other ranks, and the product behind it adds up the rows that came.
#pragma once

#include "collectives/peers.cuh"
#include "linear/decode_product.cuh"

// Rows in packets, as of packets.cuh: a word of two elements with the number of the sum. A rank's rows of a
// half of a layer lie in a place of their own in the others' boxes. Sums are numbered by two counts in a
// rank's own box: what takes a sum counts it, and what sends the next one reads that and notes its number for
// what will take it. These kernels follow one another, and each waits for the one before: so neither count
// changes while it is read.
//
// Nothing waits in a circle: what sends a row waits for nothing but earlier kernels of its rank, and what
// takes one waits for those that send it. A place is written again only when its last row has been taken:
// between two sums of one half of a layer, each rank has got something from every other, be it the row of the
// other half or a sum in one shot, that the other sent after it had taken the first.
class RankRows {
 public:
  __device__ __forceinline__ RankRows(const unsigned long long* boxes, int half, int rank, int ranks,
                                      unsigned long long patience)
      : boxes_(boxes), half_(half), rank_(rank), ranks_(ranks), patience_(patience), own_(boxes[rank]) {}

  // After earlier kernels.
  __device__ __forceinline__ void begin_to_send() { number_ = __ldcg(count(TAKEN)) + 1; }
  __device__ __forceinline__ void begin_to_take() { number_ = __ldcg(count(SENT)); }

  // Elements `column` and the next, to all others.
  __device__ __forceinline__ void send(int column, unsigned word) const {
#pragma unroll 1
    for (int other = 0; other < ranks_; ++other) {
      if (other == rank_) continue;
      store_relaxed_system(packets(boxes_[other], rank_) + column / 2,
                           static_cast<unsigned long long>(number_) << 32 | word);
    }
  }
  __device__ __forceinline__ void note_sent() const {
    if (blockIdx.x == 0 && threadIdx.x == 0) *count(SENT) = number_;
  }
  __device__ __forceinline__ void note_taken() const {
    if (blockIdx.x == 0 && threadIdx.x == 0) *count(TAKEN) = number_;
  }

  // Of another rank's row the eight elements from each of `places` on, once they are there. All are looked at
  // at once, since a look takes as long as all of them.
  template <int VECTORS>
  __device__ __forceinline__ void take(int other, const int (&places)[VECTORS], uint4 (&row)[VECTORS]) const {
    const unsigned long long* const from = packets(own_, other);
    unsigned long long begun = 0;
#pragma unroll 1
    for (unsigned polls = 1;; ++polls) {
      unsigned long long seen[VECTORS][SEGMENT / 2];
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        static_assert(SEGMENT == 8, "a vector comes in four packets");
#pragma unroll
        for (int w = 0; w < SEGMENT / 2; w += 2)
          load_pair_relaxed_system(from + places[i] / 2 + w, seen[i][w], seen[i][w + 1]);
      }
      unsigned differs = 0;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        row[i] = make_uint4(static_cast<unsigned>(seen[i][0]), static_cast<unsigned>(seen[i][1]),
                            static_cast<unsigned>(seen[i][2]), static_cast<unsigned>(seen[i][3]));
#pragma unroll
        for (int w = 0; w < SEGMENT / 2; ++w) {
          differs |= static_cast<unsigned>(seen[i][w] >> 32) ^ number_;
        }
      }
      if (differs == 0) return;
      if (polls % POLLS == 0) {
        const unsigned* const sent = reinterpret_cast<unsigned*>(boxes_[other] + SUM_COUNTS) + SENT;
        const Wait wait{Meeting::MATMUL_OF_RANKS, static_cast<unsigned>(other), START, number_, sent};
        begun = check_time(wait, begun, patience_, reinterpret_cast<unsigned*>(boxes_[ranks_]),
                           reinterpret_cast<unsigned*>(own_) + 2);
      }
    }
  }

 private:
  enum Count { TAKEN, SENT };
  __device__ __forceinline__ unsigned* count(Count which) const {
    return reinterpret_cast<unsigned*>(own_ + SUM_COUNTS) + which;
  }
  // In a box, of the row from `source`.
  __device__ __forceinline__ unsigned long long* packets(unsigned long long box, int source) const {
    return reinterpret_cast<unsigned long long*>(box + SUM_PACKETS) +
           (half_ * MAX_RANKS + source) * ROW_PACKETS;
  }

  const unsigned long long* boxes_;
  int half_, rank_, ranks_;
  unsigned long long patience_;
  unsigned long long own_;
  unsigned number_;
};

// The row of a product: x + this rank's update + those of the others, in the order of the ranks and rounded
// once, times the norm's gains. VECTORS: of eight elements, of a lane.
template <typename V, int VECTORS>
struct RankSum {
  using T = typename V::T;
  using Vector = Vec<T, SEGMENT>;
  using Steps = WarpSteps<V>;
  static_assert(V::SCALES_SUMS, "the norm's root divides the sums");

  const T* x;
  const T* update;
  T* sum;
  int places[VECTORS];  // first elements of this lane's vectors; 0 for those that there are not
  uint4 gains[VECTORS];

  // Before earlier kernels have ended.
  __device__ __forceinline__ void load_gains(const T* norm, const Steps& steps, int in_features) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int v = lane_of_thread() + i * WARP_SIZE;
      const int k = Steps::vector_k(v);
      places[i] = v < steps.vectors && k < in_features ? k : 0;
      gains[i] = *reinterpret_cast<const uint4*>(norm + places[i]);
    }
  }

  // This warp's vectors of the row to shared memory, `y`, with zeros beyond in_features. -> this lane's sum
  // of squares.
  __device__ __forceinline__ float load(const RankRows& rows, int rank, int ranks, uint4* y,
                                        const Steps& steps, int in_features) const {
    uint4 own[VECTORS], stream[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      load_past_l1(own[i], update + places[i]);
      load_past_l1(stream[i], x + places[i]);
    }
    float sums[VECTORS][SEGMENT] = {};
#pragma unroll 1
    for (int other = 0; other < ranks; ++other) {
      if (other == rank) {
        add(own, sums);
      } else {
        uint4 theirs[VECTORS];
        rows.take(other, places, theirs);
        add(theirs, sums);
      }
    }
    add(stream, sums);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int v = lane_of_thread() + i * WARP_SIZE;
      if (v >= steps.vectors) continue;
      if (Steps::vector_k(v) >= in_features) {
        y[v] = make_uint4(0, 0, 0, 0);
        continue;
      }
      Vector rounded;
#pragma unroll
      for (int e = 0; e < SEGMENT; ++e) rounded[e] = from_float<T>(sums[i][e]);
      const uint4 row = reinterpret_cast<const uint4&>(rounded);
      if (blockIdx.x == 0) *reinterpret_cast<uint4*>(sum + places[i]) = row;
      squares = add_squares<T>(squares, row);
      y[v] = multiply_elements<T>(row, gains[i]);
    }
    return squares;
  }

 private:
  static __device__ __forceinline__ void add(const uint4 (&vectors)[VECTORS],
                                             float (&sums)[VECTORS][SEGMENT]) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const Vector values = reinterpret_cast<const Vector&>(vectors[i]);
#pragma unroll
      for (int e = 0; e < SEGMENT; ++e) sums[i][e] += to_float(values[e]);
    }
  }
};

// Epilogue: what is stored goes to the other ranks too.
template <typename V>
struct RankEpilogue : DecodeEpilogue<V> {
  using Out = typename V::Out;
  using DecodeEpilogue<V>::DecodeEpilogue;

  __device__ __forceinline__ void send(int tile_unit, const float2* partial, const NormPrologue<V>& prologue,
                                       const RankRows& rows, Out* out) const {
    this->each_pair(tile_unit, partial, prologue, [&](int, int column, const Vec<Out, 2>& pair) {
      rows.send(column, reinterpret_cast<const unsigned&>(pair));
      pair.store(out + column);
    });
  }
};
