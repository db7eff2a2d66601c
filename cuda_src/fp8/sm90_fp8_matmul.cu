// Matrix product of e4m3 rows by an e4m3 weight on sm_90a, with sums that leave the tensor cores every 128 of
// k.

#include "generated/sm90_fp8_matmul.cuh"
#include "linear/sm90_scaled.cuh"
#include "ptx/sm90_fp8.cuh"

static_assert(SCALES == STEP, "a stage has one scale of x a row, and of each 128 rows of the weight");

constexpr int HELD = 4;  // steps of which the lanes of four hold the scales, one each

// With BLOCKS, the scales of HELD steps, and those of the next HELD on their way: a step is shorter than L2
// takes to answer. Of a thread's two rows of x and of its two halves of the columns.
template <typename V>
class StepScales {
 public:
  __device__ __forceinline__ StepScales(const TileScales<V>& scales, int first_step, int num_steps)
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

  const TileScales<V>& scales_;
  const int first_step_, num_steps_;
  float held_of_rows_[2], held_of_blocks_[2], coming_of_rows_[2], coming_of_blocks_[2];
};

// The sums of the next stage alone; `meanwhile` comes while its products run.
template <typename V, typename Meanwhile>
__device__ __forceinline__ void multiply_stage(float (&parts)[V::WARPGROUP_N / 2], StageReader<V>& reader,
                                               const Meanwhile& meanwhile) {
  reader.start([&](unsigned long long x, unsigned long long weight, int k) {
    wgmma_e4m3<V::WARPGROUP_N>(parts, x, weight, k > 0);
  });
  meanwhile();
  wgmma_wait<0>();
  hold_registers(parts);
  reader.release();
}

// Of a tile with scales of rows and tokens, which come while the products run: those of the weight from
// memory, not L2.
template <typename V>
class RowSums {
  static constexpr int SUMS = V::WARPGROUP_N / 2;

 public:
  __device__ __forceinline__ RowSums(const TileScales<V>& scales, int first_step, int num_steps)
      : scales_(scales), num_steps_(num_steps) {
    of_rows_[0] = scales.of_row(0, 0);
    of_rows_[1] = scales.of_row(1, 0);
    scales.load_columns(of_all_columns_);
  }
  __device__ __forceinline__ void add(float (&sums)[SUMS], StageReader<V>& reader) const {
#pragma unroll 1
    for (int step = 0; step < num_steps_; ++step) {
      float parts[SUMS];
      multiply_stage<V>(parts, reader, [] {});
#pragma unroll
      for (int i = 0; i < SUMS; ++i) sums[i] += parts[i];
    }
  }
  __device__ __forceinline__ void scale(float (&sums)[SUMS]) const {
#pragma unroll
    for (int j = 0; j < V::WARPGROUP_N / 8; ++j) {
      const float of_columns[2] = {scales_.of_column(of_all_columns_, j, 0),
                                   scales_.of_column(of_all_columns_, j, 1)};
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j * 4 + i] *= of_rows_[i / 2] * of_columns[i % 2];
    }
  }

 private:
  const TileScales<V>& scales_;
  const int num_steps_;
  float of_rows_[2], of_all_columns_[V::WARPGROUP_N / WARP_SIZE];
};

// Of a tile with scales of blocks: each step's sums are scaled by themselves.
template <typename V>
class BlockSums {
  static constexpr int SUMS = V::WARPGROUP_N / 2;

 public:
  __device__ __forceinline__ BlockSums(const TileScales<V>& scales, int first_step, int num_steps)
      : of_steps_(scales, first_step, num_steps), num_steps_(num_steps) {}
  __device__ __forceinline__ void add(float (&sums)[SUMS], StageReader<V>& reader) {
#pragma unroll 1
    for (int step = 0; step < num_steps_; ++step) {
      float parts[SUMS], of_parts[2][2];
      multiply_stage<V>(parts, reader, [&] { of_steps_.next(of_parts, step); });
#pragma unroll
      for (int i = 0; i < SUMS; ++i) {
        sums[i] = fmaf(parts[i], of_parts[i / 2 % 2][i / (SUMS / 2)], sums[i]);
      }
    }
  }
  __device__ __forceinline__ void scale(float (&sums)[SUMS]) const {}

 private:
  StepScales<V> of_steps_;
  const int num_steps_;
};

template <bool BLOCKS>
struct Sums {
  template <typename V>
  using Of = RowSums<V>;
};
template <>
struct Sums<true> {
  template <typename V>
  using Of = BlockSums<V>;
};

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
__global__ void __launch_bounds__(384, 1) sm90_fp8_matmul_kernel(SM90_SCALED_MATMUL_PARAMS(T, Out)) {
  using V = Variant<T, Out, WARPGROUPS_M, WARPGROUP_N, SHARING>;
  static_assert(!BLOCKS || STEP % WARPGROUP_N == 0, "a warp group's columns lie in one block");
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const auto multiply = [&](const RingBlock<V>& block) {
    multiply_scaled_tiles<V, Sums<BLOCKS>::template Of>(block, shared_memory, stages, splits, num_rows,
                                                        out_features, in_features, x_scales, weight_scales,
                                                        bias, out, out_stride, accumulate, silu_mul);
  };
  run_block<V>(shared_memory, x_map, x_tail_map, weight_map, ceil_div(in_features, STEP), num_rows,
               out_features, splits, tiles_m_in_l2, stages, silu_mul, multiply);
}
