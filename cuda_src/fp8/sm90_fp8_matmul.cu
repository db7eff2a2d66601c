// Matrix product of e4m3 rows by an e4m3 weight on sm_90a: the ring and the epilogue of sm90_matmul.cuh,
// whose 2-byte elements are pairs of e4m3 here, and sums that leave the tensor cores every 128 of k.

#include "generated/sm90_fp8_matmul.cuh"
#include "linear/sm90_matmul.cuh"
#include "ptx/sm90_fp8.cuh"

constexpr int STEP = 2 * TILE_K;   // of k, in a stage
constexpr int SCALE_BLOCK = STEP;  // rows and columns of a weight that share a scale
static_assert(SCALES == SCALE_BLOCK, "a stage has one scale of x a row");

constexpr int HELD = 4;  // steps of which the lanes of four hold the scales, one each

// Scales of what a thread holds of a warp group's tile: two rows of x, and of the weight pairs of columns or,
// with BLOCKS, the block that each half of the columns lies in.
template <typename V, bool BLOCKS>
struct TileScales {
  const float* x;       // [1 or steps][num_rows], at the warp's first row
  const float* weight;  // [out_features] or [.][steps]
  int num_rows, rows;   // of x, and of them from the warp's first row on
  int steps;            // of a row of the weight
  int first[2], end;    // rows of the weight that the halves of the columns begin with, and where it ends
  int lane;

  __device__ __forceinline__ float of_row(int i, int step) const {
    const int row = lane / 4 + i * 8;
    return row < rows ? load_updated(x + static_cast<long long>(step) * num_rows + row) : 0.0f;
  }
  __device__ __forceinline__ float of_block(int half, int step) const {
    return first[half] < end ? weight[first[half] / SCALE_BLOCK * steps + step] : 0.0f;
  }
  // Of all columns, those of this lane: every 32nd.
  __device__ __forceinline__ void load_columns(float (&held)[V::WARPGROUP_N / WARP_SIZE]) const {
#pragma unroll
    for (int i = 0; i < V::WARPGROUP_N / WARP_SIZE; ++i) {
      const int column = i * WARP_SIZE + lane;
      const int row = column < V::HALF_N ? first[0] + column : first[1] + column - V::HALF_N;
      held[i] = row < end ? weight[row] : 0.0f;
    }
  }
  // Of a column of those in which this thread's sums 4 j to 4 j + 3 are, of what lanes have loaded.
  __device__ __forceinline__ float of_column(const float (&held)[V::WARPGROUP_N / WARP_SIZE], int j,
                                             int i) const {
    return __shfl_sync(FULL_WARP, held[j / 4], j % 4 * 8 + lane % 4 * 2 + i);
  }
};

// With BLOCKS, the scales of HELD steps, and those of the next HELD on their way: a step is shorter than L2
// takes to answer. Of a thread's two rows of x and of its two halves of the columns.
template <typename V>
class StepScales {
 public:
  __device__ __forceinline__ StepScales(const TileScales<V, true>& scales, int first_step, int num_steps)
      : scales_(scales), first_step_(first_step), num_steps_(num_steps) {
    load(0);
  }

  // products[i][j]: of row i and half j in this step; steps come in their order, all lanes of a warp
  // together.
  __device__ __forceinline__ void next(float (&products)[2][2], int step) {
    const int place = step % HELD;
    if (place == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        held_of_rows_[i] = coming_of_rows_[i];
        held_of_blocks_[i] = coming_of_blocks_[i];
      }
      load(step + HELD);
    }
    const int holder = scales_.lane - scales_.lane % HELD + place;
    float of_rows[2], of_blocks[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      of_rows[i] = __shfl_sync(FULL_WARP, held_of_rows_[i], holder);
      of_blocks[i] = __shfl_sync(FULL_WARP, held_of_blocks_[i], holder);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) products[i / 2][i % 2] = of_rows[i / 2] * of_blocks[i % 2];
  }

 private:
  __device__ __forceinline__ void load(int first) {
    const int step = first_step_ + min(first + scales_.lane % HELD, num_steps_ - 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      coming_of_rows_[i] = scales_.of_row(i, step);
      coming_of_blocks_[i] = scales_.of_block(i, step);
    }
  }

  const TileScales<V, true>& scales_;
  const int first_step_, num_steps_;
  float held_of_rows_[2], held_of_blocks_[2], coming_of_rows_[2], coming_of_blocks_[2];
};

// Nothing without BLOCKS.
struct NoStepScales {
  template <typename Scales>
  __device__ __forceinline__ NoStepScales(const Scales&, int, int) {}
};
template <typename V, bool BLOCKS>
struct step_scales_of {
  using type = NoStepScales;
};
template <typename V>
struct step_scales_of<V, true> {
  using type = StepScales<V>;
};

// A warp group that multiplies: the tiles of `work` one after another, from the ring to their places.
template <typename V, bool BLOCKS>
__device__ __forceinline__ void multiply_fp8_tiles(const Work<V::SHARING>& work, unsigned char* shared_memory,
                                                   Barrier* full, Barrier* empty, Barrier* received,
                                                   int stages, int split, int splits, int num_rows,
                                                   int out_features, int in_features, const float* x_scales,
                                                   const float* weight_scales, const typename V::T* bias,
                                                   typename V::Out* out, int out_stride, int accumulate,
                                                   int silu_mul) {
  using T = typename V::T;
  using Out = typename V::Out;
  constexpr int WARPGROUPS_M = V::WARPGROUPS_M, WARPGROUP_N = V::WARPGROUP_N, SHARING = V::SHARING;
  constexpr int SUMS = WARPGROUP_N / 2;
  T* const ring = reinterpret_cast<T*>(shared_memory);
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = uniform(threadIdx.x / WARP_SIZE);
  const int warpgroup_m = WARPGROUPS_M == 2 ? warp / 4 : 0;
  const int warpgroup_n = WARPGROUPS_M == 2 ? 0 : warp / 4;
  const int out_columns = silu_mul ? out_features / 2 : out_features;
  const int warpgroup_columns = silu_mul ? V::HALF_N : WARPGROUP_N;
  const unsigned long long x_descriptor = operand_descriptor(ring + warpgroup_m * WGMMA_M * TILE_K);
  const unsigned long long weight_descriptor =
      operand_descriptor(ring + V::X_ELEMENTS + warpgroup_n * WARPGROUP_N * TILE_K);
  T* const staging = ring + stages * V::STAGE_ELEMENTS + warp * WARP_ROWS * CHUNK_STRIDE;

  // Of a warp's part of a tile.
  auto row_of = [&](int2 tile) { return tile.x * V::TILE_M + warpgroup_m * WGMMA_M + warp % 4 * WARP_ROWS; };
  auto column_of = [&](int2 tile) { return (tile.y * V::WARPGROUPS_N + warpgroup_n) * warpgroup_columns; };

  wait_for_earlier_kernels();
  RingPosition at;
#pragma unroll 1
  for (int index = work.first; index < work.tiles_m * work.tiles_n; index += work.stride) {
    const int2 tile = work.tile(index);
    const int row0 = row_of(tile), column0 = column_of(tile);
    const TileScales<V, BLOCKS> scales = {x_scales + row0,
                                          weight_scales,
                                          num_rows,
                                          num_rows - row0,
                                          ceil_div(in_features, STEP),
                                          {column0, column0 + (silu_mul ? out_columns : V::HALF_N)},
                                          out_features,
                                          lane};

    // Scales come while the products run: those of the weight from memory, not L2.
    [[maybe_unused]] float of_rows[2], of_all_columns[WARPGROUP_N / WARP_SIZE];
    if constexpr (!BLOCKS) {
      of_rows[0] = scales.of_row(0, 0);
      of_rows[1] = scales.of_row(1, 0);
      scales.load_columns(of_all_columns);
    }
    typename step_scales_of<V, BLOCKS>::type of_steps(scales, work.first_step, work.num_steps);
    float sums[SUMS] = {};
#pragma unroll 1
    for (int step = 0; step < work.num_steps; ++step) {
      float parts[SUMS], of_parts[2][2];
      barrier_wait(&full[at.stage], at.parity);
      const unsigned offset = at.stage * static_cast<unsigned>(V::STAGE_ELEMENTS * sizeof(T) >> 4);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < TILE_K / WGMMA_K; ++k) {
        const unsigned behind = offset + k * DESCRIPTOR_STEP_K;
        wgmma_e4m3<WARPGROUP_N>(parts, descriptor_behind(x_descriptor, behind),
                                descriptor_behind(weight_descriptor, behind), k > 0);
      }
      wgmma_commit();
      if constexpr (BLOCKS) of_steps.next(of_parts, step);
      wgmma_wait<0>();
      hold_registers(parts);
      release_stage<SHARING>(&empty[at.stage], lane);
      at.advance(stages);
#pragma unroll
      for (int i = 0; i < SUMS; ++i) {
        if constexpr (BLOCKS) {
          sums[i] = fmaf(parts[i], of_parts[i / 2 % 2][i / (SUMS / 2)], sums[i]);
        } else {
          sums[i] += parts[i];
        }
      }
    }
    // Where results go is found anew: registers are short while products run.
    const int2 place = work.tile(unknown(index));
    const int first_row = row_of(place), first_column = column_of(place);
    Result<T, Out> result = {bias == nullptr ? nullptr : bias + first_column,
                             out + static_cast<long long>(first_row) * out_stride + first_column,
                             num_rows - first_row,
                             min(warpgroup_columns, out_columns - first_column),
                             out_stride,
                             accumulate != 0,
                             lane};
    // What is to be added comes while sums are scaled.
    uint4 residual[Result<T, Out>::SEGMENTS];
    if constexpr (V::THROUGH_SHARED) {
      if (accumulate && splits == 1) result.load_chunk(residual, 0);
    }
    if constexpr (!BLOCKS) {
#pragma unroll
      for (int j = 0; j < WARPGROUP_N / 8; ++j) {
        const float of_columns[2] = {scales.of_column(of_all_columns, j, 0),
                                     scales.of_column(of_all_columns, j, 1)};
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[j * 4 + i] *= of_rows[i / 2] * of_columns[i % 2];
      }
    }

    if constexpr (V::SPLITTABLE) {
      if (splits > 1) {
        finish_share<T, Out, WARPGROUP_N>(
            sums, result, split, splits, received, shared_memory,
            reinterpret_cast<unsigned char*>(ring + stages * V::STAGE_ELEMENTS) +
                CONSUMER_WARPS * WARP_ROWS * CHUNK_STRIDE * sizeof(T),
            staging, silu_mul != 0);
        return;
      }
    }

    if (silu_mul) {
#pragma unroll
      for (int j = 0; j < V::HALF_N / 8; ++j) silu_mul_into(sums + j * 4, sums + (j + V::HALF_N / 8) * 4);
    }
    store_tile<V>(sums, result, staging, residual);
  }
}

// out[m, n] = sum over k of x[m, k] * weight[n, k], times x_scales[m] * weight_scales[n], or with BLOCKS each
// product times x_scales[k / 128, m] * weight_scales[n / 128, k / 128]; + bias[n], + out[m, n] if
// `accumulate`; if `silu_mul`, out[m, i] = silu(y[m, i]) * y[m, I + i] of the product y [num_rows, 2 I].
// Sums of 128 of k in the tensor cores, of those in float32, rounded once.
//   in:  maps as of `sm90_matmul_kernel`, of x [num_rows, in_features] and weight [out_features, in_features]
//        e4m3 as matrices of 2-byte elements; x_scales [1 or ceil(in_features / 128), num_rows] float;
//        weight_scales [out_features] or [ceil(out_features / 128), ceil(in_features / 128)] float; bias
//        [out_features] T or null
//   out: out [num_rows, out_features, or half of it if `silu_mul`] T or float, rows `out_stride` apart. A
//        float out takes no bias, accumulate or silu_mul; it and SHARING > 1 take no splits
// Layout: row-major; in_features a multiple of 16, the columns of out of 8, its rows 16-byte aligned. With
// BLOCKS, WARPGROUP_N divides 128 and, if `silu_mul`, half of it divides I.
// Grid: as of `sm90_matmul_kernel`. Block: 384 threads. Shared memory: as there, a stage having 128 of k.
// Unit of work: one block a tile at a time, one warp group 64 rows by WARPGROUP_N columns of it.
template <typename T, typename Out, int WARPGROUPS_M, int WARPGROUP_N, int SHARING, bool BLOCKS>
__global__ void __launch_bounds__(384, 1) sm90_fp8_matmul_kernel(SM90_FP8_MATMUL_PARAMS(T, Out)) {
  using V = Variant<T, Out, WARPGROUPS_M, WARPGROUP_N, SHARING>;
  static_assert(!BLOCKS || SCALE_BLOCK % WARPGROUP_N == 0, "a warp group's columns lie in one block");
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const auto multiply = [&](const RingBlock<V>& block) {
    multiply_fp8_tiles<V, BLOCKS>(block.work, shared_memory, block.full, block.empty, block.received, stages,
                                  block.split, splits, num_rows, out_features, in_features, x_scales,
                                  weight_scales, bias, out, out_stride, accumulate, silu_mul);
  };
  run_block<V>(shared_memory, x_map, x_tail_map, weight_map, ceil_div(in_features, STEP), num_rows,
               out_features, splits, tiles_m_in_l2, stages, silu_mul, multiply);
}
