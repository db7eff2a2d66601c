// The parts of products of few rows by experts' weights in MXFP4: elements made in registers by a few integer
// instructions, weights streamed through each warp's own shared memory, and rows of x that stay in shared
// memory.
#pragma once

#include "generated/expert_decode.cuh"
#include "generated/expert_mxfp4.cuh"
#include "moe/expert_tiles.cuh"
#include "ptx/copy.cuh"
#include "quant/block_formats.cuh"
#include "swiglu.cuh"

template <typename A, typename B>
constexpr bool is_same_type = false;
template <typename A>
constexpr bool is_same_type<A, A> = true;

constexpr int TILE_ROWS = 16;  // of a weight: those of an mma; gated, 8 gates and their ups
constexpr int HALF_ROWS = TILE_ROWS / 2;
constexpr int STEP_VECTORS = STEP / SEGMENT;  // of a row of x
constexpr int CODE_WORDS = MXFP4::STEP_WORDS;

// Constants of a variant. SLICES warps of a block share k of a tile; or TEAMS warps have a tile each.
template <int MAX_TOKENS, int NUM_TEAMS, int NUM_SLICES, int STEPS_AHEAD>
struct MxVariant {
  static constexpr int TOKENS = MAX_TOKENS;
  static constexpr int TEAMS = NUM_TEAMS;
  static constexpr int SLICES = NUM_SLICES;
  static constexpr int THREADS = TEAMS * SLICES * WARP_SIZE;
  static constexpr int BLOCKS =
      16 / (TEAMS * SLICES);  // on a multiprocessor, of which each warp has 128 registers
  static constexpr int GROUPS = TOKENS / 8;
  static constexpr int CHAINS = GROUPS == 1 ? 2 : 1;  // independent sums that hide an mma's latency
  static constexpr int AHEAD = STEPS_AHEAD;           // steps of a warp on their way to shared memory
  static_assert(TOKENS % 8 == 0, "an mma has 8 columns");
  static_assert(TEAMS == 1 || SLICES == 1, "all warps of a block meet where they add up a tile");
};

__device__ __forceinline__ int warp_of_block() { return threadIdx.x / WARP_SIZE; }

// ---- elements ---------------------------------------------------------------------------------------------
//
// What `e2m1_pairs` leaves to be multiplied by is in the factor of 32 elements, except for 2^MX_SHIFT, by
// which x is multiplied beforehand: so neither leaves bfloat16's range. Products are exact.

constexpr int MX_SHIFT = 40;
constexpr unsigned MX_X_FACTOR = (127u + MX_SHIFT) << 7 | (127u + MX_SHIFT) << 23;

// The factor of an e8m0 in both halves. Beyond 2^41 it stays what it is there.
__device__ __forceinline__ unsigned mx_factor(unsigned exponent) {
  return min(exponent + (126 - MX_SHIFT), 254u) * 0x00800080u;
}

// Eight elements: pairs of neighbours.
__device__ __forceinline__ uint4 mx_elements(unsigned word, unsigned factor) {
  using Pair = __nv_bfloat162;
  unsigned pairs[4];
  e2m1_pairs(word, pairs);
  return make_uint4(multiply_pair<Pair>(pairs[0], factor), multiply_pair<Pair>(pairs[1], factor),
                    multiply_pair<Pair>(pairs[2], factor), multiply_pair<Pair>(pairs[3], factor));
}

// ---- tiles ------------------------------------------------------------------------------------------------

// A team's way through the block's tiles: chunks of experts' rows one after another, of each some columns.
template <typename V>
struct MxCursor {
  const ExpertTiles& tiles;
  int end;    // of the block's tiles
  int chunk;  // of all experts'
  int column, column_end;

  __device__ __forceinline__ MxCursor(const ExpertTiles& tiles, int begin, int end)
      : tiles(tiles), end(end), chunk(small_div(begin, tiles.tiles_n)) {
    column = begin - chunk * tiles.tiles_n + team();
    column_end = min(tiles.tiles_n, end - chunk * tiles.tiles_n);
  }
  static __device__ __forceinline__ int team() { return V::TEAMS == 1 ? 0 : warp_of_block(); }

  __device__ __forceinline__ bool has_tile() const { return column < column_end; }
  __device__ __forceinline__ bool has_chunk() const { return chunk * tiles.tiles_n < end; }
  __device__ __forceinline__ void next_chunk() {
    ++chunk;
    column = team();
    column_end = min(tiles.tiles_n, end - chunk * tiles.tiles_n);
  }
  // The next tile of this chunk or a later one; whether it is of another chunk.
  __device__ __forceinline__ bool next_tile() {
    column += V::TEAMS;
    return find_tile();
  }
  __device__ __forceinline__ bool find_tile() {
    bool moved = false;
    while (!has_tile() && (chunk + 1) * tiles.tiles_n < end) {
      next_chunk();
      moved = true;
    }
    return moved;
  }
  // The chunk's rows, as a tile without a column.
  __device__ __forceinline__ ExpertTile rows() const {
    int low = 0, high = tiles.num_experts;  // the last expert whose first chunk is not behind this one
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (tiles.first[middle] <= chunk) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int row0 = tiles.starts[low] + (chunk - tiles.first[low]) * V::TOKENS;
    return {low, row0, min(V::TOKENS, tiles.starts[low + 1] - row0), 0};
  }
};

// Sizes of a product.
struct MxProblem {
  int out_features;  // rows of an expert's weight
  int features;      // of the result
  int in_features;
  int steps;  // of a row
  bool gated;

  __device__ __forceinline__ MxProblem(int out_features, int in_features, bool gated)
      : out_features(out_features),
        features(gated ? out_features / 2 : out_features),
        in_features(in_features),
        steps(ceil_div(in_features, STEP)),
        gated(gated) {}
  __device__ __forceinline__ int tile_features() const { return gated ? HALF_ROWS : TILE_ROWS; }
};

// ---- weights ----------------------------------------------------------------------------------------------

// A lane's codes and exponents of two rows, 32 elements of each.
struct MxStep {
  uint4 codes[2];
  unsigned exponents[2];
};

// A warp's steps on their way: what each lane takes, and for each of 16 rows the word of its exponents.
template <typename V>
struct MxRing {
  uint4 codes[V::AHEAD][2][WARP_SIZE];
  unsigned headers[V::AHEAD][TILE_ROWS];
};

// Producer: copies weights AHEAD steps before they are used, past the ends of tiles. Not to registers: the
// compiler has too few things to wait by to tell a step's loads from those of the steps behind it.
template <typename V>
class MxWeights {
 public:
  __device__ __forceinline__ MxWeights(const MxCursor<V>& cursor, const MxProblem& problem,
                                       const unsigned* codes, const unsigned* headers, MxRing<V>& ring)
      : cursor_(cursor), problem_(problem), codes_(codes), headers_(headers), ring_(ring) {
    cursor_.find_tile();
    expert_ = cursor_.rows().expert;
    begin_tile();
#pragma unroll 1
    for (int i = 0; i < V::AHEAD; ++i) load(i);
  }

  // The warp's next step, in whose place another is copied.
  __device__ __forceinline__ MxStep next() {
    copy_async_wait<V::AHEAD - 1>();
    __syncwarp();  // a row's exponents were copied by one lane
    const int lane = threadIdx.x % WARP_SIZE;
    MxStep step;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      step.codes[half] = ring_.codes[place_][half][lane];
      step.exponents[half] =
          reinterpret_cast<const unsigned char*>(ring_.headers[place_])[half * WARP_SIZE + lane];
    }
    __syncwarp();
    load(place_);
    place_ = place_ + 1 == V::AHEAD ? 0 : place_ + 1;
    return step;
  }

 private:
  static __device__ __forceinline__ int slice() { return V::SLICES == 1 ? 0 : warp_of_block(); }

  // One group of copies, empty behind the last step.
  __device__ __forceinline__ void load(int place) {
    if (cursor_.has_tile() && slice() < problem_.steps) {
      const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
      for (int half = 0; half < 2; ++half) copy_async_stream_16(&ring_.codes[place][half][lane], from_[half]);
      if (lane < TILE_ROWS) copy_async<4>(shared_address(&ring_.headers[place][lane]), headers_from_, true);
      step_ += V::SLICES;
      if (step_ < problem_.steps) {
        from_[0] += V::SLICES * CODE_WORDS;
        from_[1] += V::SLICES * CODE_WORDS;
        headers_from_ += V::SLICES;
      } else {
        if (cursor_.next_tile()) expert_ = cursor_.rows().expert;
        begin_tile();
      }
    }
    copy_async_commit();
  }

  // Row `row` of the tile's 16. Rows behind the last one are read as that one, and not stored.
  __device__ __forceinline__ long long first_of_row(int row) const {
    const bool second = row >= HALF_ROWS;
    const int within = cursor_.column * problem_.tile_features() + (problem_.gated ? row % HALF_ROWS : row);
    const long long of_weight = static_cast<long long>(expert_) * problem_.out_features +
                                min(within, problem_.features - 1) +
                                (problem_.gated && second ? problem_.features : 0);
    return of_weight * problem_.steps + slice();
  }

  __device__ __forceinline__ void begin_tile() {
    step_ = slice();
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      from_[half] =
          codes_ + first_of_row(half * HALF_ROWS + lane / 4) * CODE_WORDS + lane % 4 * MXFP4::LANE_WORDS;
    }
    headers_from_ = headers_ + first_of_row(lane % TILE_ROWS);
  }

  MxCursor<V> cursor_;
  const MxProblem& problem_;
  const unsigned* const codes_;
  const unsigned* const headers_;
  MxRing<V>& ring_;
  int place_ = 0;  // of the ring: the oldest step's
  int expert_;
  int step_;  // to be copied next
  const unsigned* from_[2];
  const unsigned* headers_from_;
};

// ---- rows of x --------------------------------------------------------------------------------------------

// A chunk's rows times 2^MX_SHIFT to shared memory: [steps][TOKENS][STEP_VECTORS], the vectors of odd rows
// four places away from those of even ones, so that the lanes of an mma meet in no bank.
template <typename V>
__device__ __forceinline__ void stage_rows(uint4* staged, const ExpertTile& chunk, const MxProblem& problem,
                                           const __nv_bfloat16* x, const int* pairs, int top_k) {
  constexpr int BATCH = 4;  // loads in flight
  const int vectors = problem.steps * STEP_VECTORS;
  const int valid_vectors = problem.in_features / SEGMENT;
  const int count = chunk.rows * vectors;
#pragma unroll 1
  for (int first = threadIdx.x; first < count; first += BATCH * V::THREADS) {
    uint4 values[BATCH];
    int places[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int index = min(first + i * V::THREADS, count - 1);
      const int row = small_div(index, vectors), v = index - row * vectors;
      const int slot = (row * STEP_VECTORS + v % STEP_VECTORS) ^ row % 2 * 4;
      places[i] = v / STEP_VECTORS * (V::TOKENS * STEP_VECTORS) + slot;
      const int source = chunk.row0 + row;
      values[i] = make_uint4(0, 0, 0, 0);
      if (v < valid_vectors) {
        const long long of_x = pairs == nullptr ? source : small_div(load_updated(pairs + source), top_k);
        load_past_l1(values[i], x + of_x * problem.in_features + v * SEGMENT);
      }
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      using Pair = __nv_bfloat162;
      const uint4 v = values[i];
      if (first + i * V::THREADS < count) {
        staged[places[i]] =
            make_uint4(multiply_pair<Pair>(v.x, MX_X_FACTOR), multiply_pair<Pair>(v.y, MX_X_FACTOR),
                       multiply_pair<Pair>(v.z, MX_X_FACTOR), multiply_pair<Pair>(v.w, MX_X_FACTOR));
      }
    }
  }
}

// ---- products ---------------------------------------------------------------------------------------------

// Consumer: a warp's sums of a tile, 16 rows of the weight by TOKENS rows of x.
template <typename V>
class MxConsumer {
 public:
  float sums[V::CHAINS][V::GROUPS][4];

  // `rows`: the staged rows of this warp's first step.
  __device__ __forceinline__ explicit MxConsumer(const uint4* rows) {
    const int lane = threadIdx.x % 4, row = threadIdx.x % WARP_SIZE / 4;
    rows_ = rows + ((row * STEP_VECTORS + lane * 5) ^ row % 2 * 4);
#pragma unroll
    for (int i = 0; i < V::CHAINS * V::GROUPS * 4; ++i) (&sums[0][0][0])[i] = 0.0f;
  }

  // The lane takes its 32 elements' vector `round ^ lane` at a time.
  __device__ __forceinline__ void take_step(const MxStep& step) {
    const unsigned factors[2] = {mx_factor(step.exponents[0]), mx_factor(step.exponents[1])};
    const uint4 low_codes = step.codes[0], high_codes = step.codes[1];
    const unsigned low_words[4] = {low_codes.x, low_codes.y, low_codes.z, low_codes.w};
    const unsigned high_words[4] = {high_codes.x, high_codes.y, high_codes.z, high_codes.w};
#pragma unroll
    for (int round = 0; round < 4; ++round) {
      const uint4 low = mx_elements(low_words[round], factors[0]);
      const uint4 high = mx_elements(high_words[round], factors[1]);
      const uint4* const tokens = xor_vector(rows_, round);
#pragma unroll
      for (int group = 0; group < V::GROUPS; ++group) {
        const uint4 y = tokens[group * 8 * STEP_VECTORS];
        mma_m16n8k16<__nv_bfloat16>(sums[0][group], {low.x, high.x, low.y, high.y}, {y.x, y.y});
        mma_m16n8k16<__nv_bfloat16>(sums[V::CHAINS - 1][group], {low.z, high.z, low.w, high.w}, {y.z, y.w});
      }
    }
    rows_ += V::SLICES * (V::TOKENS * STEP_VECTORS);
  }

  // Of a group of 8 tokens.
  __device__ __forceinline__ float4 total(int group) const {
    float4 sum = make_float4(sums[0][group][0], sums[0][group][1], sums[0][group][2], sums[0][group][3]);
    if constexpr (V::CHAINS > 1) {
      sum.x += sums[1][group][0];
      sum.y += sums[1][group][1];
      sum.z += sums[1][group][2];
      sum.w += sums[1][group][3];
    }
    return sum;
  }

 private:
  // Vectors of a step begin where a multiple of 8 vectors does.
  static __device__ __forceinline__ const uint4* xor_vector(const uint4* vector, int round) {
    const unsigned lane = threadIdx.x % 4;
    return vector + static_cast<int>((lane ^ round) - lane);
  }

  const uint4* rows_;
};

// Epilogue: a tile's sums of a group of tokens with bias and activation. Sums are of the weight's rows g and
// g + 8, or a gate and its up, by tokens 2 t and 2 t + 1.
struct MxEpilogue {
  const MxProblem& problem;
  const __nv_bfloat16* bias;
  __nv_bfloat16* out;
  int activation;

  __device__ __forceinline__ void store(const ExpertTile& tile, int group, const float4& sums) const {
    const int row = threadIdx.x % WARP_SIZE / 4;
    const int column = tile.column * problem.tile_features() + row;
    const int token = group * 8 + threadIdx.x % 4 * 2;
    if (column >= problem.features || token >= tile.rows) return;
    const bool second = token + 1 < tile.rows;
    const long long first = static_cast<long long>(tile.expert) * problem.out_features + column;
    __nv_bfloat16* const to = out + static_cast<long long>(tile.row0 + token) * problem.features + column;
    const float low_bias = bias_at(first, true);
    if (problem.gated) {
      const float up_bias = bias_at(first + problem.features, true);
      to[0] = gate(sums.x + low_bias, sums.z + up_bias);
      if (second) to[problem.features] = gate(sums.y + low_bias, sums.w + up_bias);
      return;
    }
    const bool has_high = column + HALF_ROWS < problem.features;
    const float high_bias = bias_at(first + HALF_ROWS, has_high);
    to[0] = from_float<__nv_bfloat16>(sums.x + low_bias);
    if (second) to[problem.features] = from_float<__nv_bfloat16>(sums.y + low_bias);
    if (has_high) to[HALF_ROWS] = from_float<__nv_bfloat16>(sums.z + high_bias);
    if (has_high && second) to[problem.features + HALF_ROWS] = from_float<__nv_bfloat16>(sums.w + high_bias);
  }

 private:
  __device__ __forceinline__ float bias_at(long long row, bool valid) const {
    return bias == nullptr || !valid ? 0.0f : to_float(bias[row]);
  }
  __device__ __forceinline__ __nv_bfloat16 gate(float gate, float up) const {
    return from_float<__nv_bfloat16>(activation == EXPERT_SILU ? up * __fdividef(gate, 1.0f + __expf(-gate))
                                                               : clamped_swiglu(gate, up));
  }
};
