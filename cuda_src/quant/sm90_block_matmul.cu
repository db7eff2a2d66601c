// Matrix product of many rows by a weight in the quantised blocks of GGUF files, on sm_90a: teams of two warp
// groups dequantise tiles of the weight into the ring from which two others multiply.

#include "generated/sm90_block_matmul.cuh"
#include "linear/sm90_matmul.cuh"
#include "quant/block_formats.cuh"

constexpr int TEAM = TEAM_WARPGROUPS * WARPGROUP_SIZE;
constexpr int TEAM_WARPS = TEAM / WARP_SIZE;
constexpr int ROWS_AT_ONCE = TEAM / 4;  // of the weight: four lanes take a step of one
constexpr int STAGES_A_STEP = STEP / TILE_K;
static_assert(STAGES_A_STEP == 2, "lanes 0 and 1 of a row fill one stage, 2 and 3 the next");

// Teams take turns at the steps, so that one waits while another works; wide warp groups leave registers for
// one.
__host__ __device__ constexpr int teams_beside(int warpgroup_n) { return warpgroup_n <= 64 ? 2 : 1; }
__host__ __device__ constexpr int threads_with(int teams) { return CONSUMERS + teams * TEAM; }

// Producer of the weight: this thread's share of each tile's codes, copied AHEAD steps of 128 elements before
// they are dequantised into two stages of the ring.
template <typename V, typename F, int TEAMS>
class Dequantizer {
  using T = typename V::T;
  static constexpr int ITEMS = V::TILE_N / ROWS_AT_ONCE;  // rows of this thread
  static constexpr int ITEM_BYTES = TEAM * 4 * (F::LANE_WORDS + 1);
  static constexpr int FIRST = FIRST_WORDS<F>, SECOND = SECOND_WORDS<F>;
  static_assert(V::TILE_N % ROWS_AT_ONCE == 0, "every thread has as many rows");

 public:
  static constexpr int SLOTS_BYTES = AHEAD * ITEMS * ITEM_BYTES;  // of a team

  // Steps are of 128 elements: this block's of a row, from `first_step` on.
  __device__ __forceinline__ Dequantizer(const Work<1>& work, unsigned char* slots, const unsigned* codes,
                                         const unsigned* headers, int first_step, int num_steps,
                                         int out_features, int in_features, int silu_mul)
      : work_(work),
        slots_(slots),
        codes_(codes),
        headers_(headers),
        first_step_(first_step),
        num_steps_(num_steps),
        spans_(ceil_div(in_features, F::SPAN)),
        out_features_(out_features),
        silu_mul_(silu_mul),
        thread_(threadIdx.x % TEAM),
        tile_(work.first) {
    skip(threadIdx.x / TEAM - CONSUMERS / TEAM);
  }

  // Start copying the codes of the next step, if there is one; a group of copies in any case.
  __device__ __forceinline__ void copy_next() {
    if (tile_ < work_.tiles_m * work_.tiles_n) {
      const int column = work_.tile(tile_).y;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) copy_row(i, column);
      skip(TEAMS);
    }
    copy_async_commit();
    copy_slot_ = copy_slot_ + 1 == AHEAD ? 0 : copy_slot_ + 1;
  }

  // The oldest step's elements to the tiles of a weight at `low`, its first 64 of k, and at `high`; `step` is
  // counted from the first of this block.
  __device__ __forceinline__ void dequantize(T* low, T* high, int step) {
    copy_async_wait<AHEAD - 1>();
    __syncwarp();
    T* const tile = lane() < 2 ? low : high;
    const int half = (first_step_ + step) % F::STEPS_A_SPAN;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const unsigned* const words = reinterpret_cast<const unsigned*>(slot(slot_, i));
      LaneCodes<F> codes;
      copy_words<FIRST>(codes.words, words + thread_ * FIRST);
      if constexpr (SECOND > 0) {
        copy_words<SECOND>(codes.words + FIRST, words + TEAM * FIRST + thread_ * SECOND);
      }
      alignas(16) unsigned record[RECORD_WORDS];
      copy_words<RECORD_WORDS>(record, words + TEAM * F::LANE_WORDS + thread_ - lane());
      const LaneScales<T, F> scales(record, half, lane());
      const int row = i * ROWS_AT_ONCE + thread_ / 4;
      uint4* const segments = reinterpret_cast<uint4*>(tile + row * TILE_K);
#pragma unroll
      for (int round = 0; round < 4; ++round) {
        const int segment = lane() % 2 * 4 + vector_of_round(round, lane());
        segments[segment ^ row % 8] = elements_of<T, F>(codes, round, lane(), scales);
      }
    }
    slot_ = slot_ + 1 == AHEAD ? 0 : slot_ + 1;
  }

 private:
  __device__ __forceinline__ void skip(int steps) {
    step_ += steps;
    while (step_ >= num_steps_) {
      step_ -= num_steps_;
      tile_ += work_.stride;
    }
  }
  __device__ __forceinline__ int lane() const { return thread_ % 4; }
  __device__ __forceinline__ unsigned char* slot(int slot, int item) const {
    return slots_ + (slot * ITEMS + item) * ITEM_BYTES;
  }

  // The row of the weight that belongs to row i of this thread, or none where the tile ends: -1.
  __device__ __forceinline__ int weight_row(int i, int column) const {
    const int row = i * ROWS_AT_ONCE + thread_ / 4;
    if (!silu_mul_) {
      const int feature = column * V::TILE_N + row;
      return feature < out_features_ ? feature : -1;
    }
    const int in_group = row % V::WARPGROUP_N;
    const int feature = (column * V::WARPGROUPS_N + row / V::WARPGROUP_N) * V::HALF_N + in_group % V::HALF_N;
    const int gates = out_features_ / 2;
    return feature >= gates ? -1 : in_group < V::HALF_N ? feature : gates + feature;
  }

  __device__ __forceinline__ void copy_row(int i, int column) const {
    const int row = weight_row(i, column);
    const int step = first_step_ + step_;
    const long long valid_row = max(row, 0);
    const unsigned* const codes = codes_ + (valid_row * spans_ * F::STEPS_A_SPAN + step) * F::STEP_WORDS;
    const unsigned to = shared_address(slot(copy_slot_, i));
    copy_async<FIRST * 4>(to + thread_ * FIRST * 4, codes + first_piece<F>(lane()), row >= 0);
    if constexpr (SECOND > 0) {
      copy_async<SECOND * 4>(to + (TEAM * FIRST + thread_ * SECOND) * 4, codes + second_piece<F>(lane()),
                             row >= 0);
    }
    const int word = header_word<F>(step % F::STEPS_A_SPAN, lane());
    const unsigned* const header =
        headers_ + (valid_row * spans_ + step / F::STEPS_A_SPAN) * F::HEADER_WORDS + max(word, 0);
    copy_async<4>(to + (TEAM * F::LANE_WORDS + thread_) * 4, header, row >= 0 && word >= 0);
  }

  const Work<1>& work_;
  unsigned char* const slots_;
  const unsigned* const codes_;
  const unsigned* const headers_;
  const int first_step_, num_steps_;
  const int spans_;  // of a row
  const int out_features_;
  const int silu_mul_;
  const int thread_;
  int tile_, step_ = 0;  // to be copied next
  int copy_slot_ = 0, slot_ = 0;
};

// out = x weight^T with bias, residual or gate as `sm90_matmul_kernel` has it, by the elements that
// `dequantize_blocks_kernel` gives: bit for bit its results where k is split alike.
//   in:  x_map, x_tail_map, bias as there; codes [out_features, any] unsigned and headers [out_features, any]
//        unsigned, as packed
//   out: out [num_rows, out_features, or half of it if `silu_mul`] Out (T or float), rows `out_stride` apart
// Layout: as there; the rows of out 16-byte aligned.
// Grid: as there without SHARING. splits cut k between steps of 128 elements.
// Block: two warp groups that multiply, and teams that dequantise, of each of which one thread copies x.
// Shared memory: as there, and from `slots_offset` on for each
// team AHEAD steps of codes and headers of TILE_N rows.
// Unit of work: one block a tile at a time; a producer dequantises 32 elements of each of its rows in a step.
template <typename T, typename Out, typename F, int WARPGROUPS_M, int WARPGROUP_N>
__global__ void __launch_bounds__(threads_with(teams_beside(WARPGROUP_N)), 1)
    sm90_block_matmul_kernel(SM90_BLOCK_MATMUL_PARAMS(T, Out)) {
  using V = Variant<T, Out, WARPGROUPS_M, WARPGROUP_N, 1>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ Barrier full[MAX_STAGES], empty[MAX_STAGES], received;
  constexpr int TEAMS = teams_beside(WARPGROUP_N);
  T* const ring = reinterpret_cast<T*>(shared_memory);

  const int split = splits > 1 ? cluster_rank() : 0;
  const int all_steps = ceil_div(in_features, STEP);
  const int first_step = small_div(split * all_steps, splits);
  const int num_steps = small_div((split + 1) * all_steps, splits) - first_step;
  const Work<1> work = {ceil_div(num_rows, V::TILE_M),
                        ceil_div(out_features, V::TILE_N),
                        tiles_m_in_l2,
                        small_div(blockIdx.x, splits),
                        small_div(gridDim.x, splits),
                        first_step * STAGES_A_STEP,
                        num_steps * STAGES_A_STEP,
                        stages,
                        0};

  if (threadIdx.x == CONSUMERS) {
    prefetch_map(x_map);
    prefetch_map(x_tail_map);
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      barrier_init(&full[i], TEAM_WARPS + 1);
      barrier_init(&empty[i], CONSUMER_WARPS);
    }
    barrier_init(&received, 1);
    barrier_init_done();
  }
  __syncthreads();
  if (splits > 1) cluster_arrive();  // others may send from here on, and wait before they do

  if (threadIdx.x >= CONSUMERS) {
    give_registers<TEAMS == 1 ? 88 : 64>();  // as many as the others take, from 128 or 80 each
    const int team = (threadIdx.x - CONSUMERS) / TEAM;
    const bool copies_x = threadIdx.x % TEAM == 0;
    using Producer = Dequantizer<V, F, TEAMS>;
    Producer dequantizer(work, shared_memory + slots_offset + team * Producer::SLOTS_BYTES, codes, headers,
                         first_step, num_steps, out_features, in_features, silu_mul);
#pragma unroll 1
    for (int i = 0; i < AHEAD; ++i) dequantizer.copy_next();
    const RowCopies<V> copy_x = {ring, full, x_map, x_tail_map, num_rows};
    if (copies_x) {
      // Weights do not change: their copies need not wait for earlier kernels.
      wait_for_earlier_kernels();
      fence_global_for_async();
    }
    RingPosition at;
    int turn = 0;
#pragma unroll 1
    for (int index = work.first; index < work.tiles_m * work.tiles_n; index += work.stride) {
      const int2 tile = work.tile(index);
#pragma unroll 1
      for (int step = 0; step < num_steps; ++step) {
        RingPosition next = at;
        next.advance(stages);
        if (turn == team) {
          barrier_wait(&empty[at.stage], at.parity ^ 1);
          barrier_wait(&empty[next.stage], next.parity ^ 1);
          if (copies_x) {
            const int column = (first_step + step) * STEP;
            copy_x(tile, column, at.stage);
            copy_x(tile, column + TILE_K, next.stage);
          }
          T* const weights = ring + V::X_ELEMENTS;
          dequantizer.dequantize(weights + at.stage * V::STAGE_ELEMENTS,
                                 weights + next.stage * V::STAGE_ELEMENTS, step);
          fence_shared_for_async();
          __syncwarp();
          if (threadIdx.x % WARP_SIZE == 0) {
            barrier_arrive(&full[at.stage]);
            barrier_arrive(&full[next.stage]);
          }
          dequantizer.copy_next();
        }
        turn = turn + 1 == TEAMS ? 0 : turn + 1;
        at = next;
        at.advance(stages);
      }
    }
    if (threadIdx.x == CONSUMERS) let_next_kernel_start();
    if (splits > 1) cluster_wait();
    return;
  }

  take_registers<TEAMS == 1 ? 168 : 112>();
  multiply_tiles<V>(work, shared_memory, full, empty, &received, stages, split, splits, num_rows,
                    out_features, bias, out, out_stride, accumulate, silu_mul);
}
