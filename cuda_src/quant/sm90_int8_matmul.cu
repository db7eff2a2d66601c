// Matrix product of int8 rows by an int8 weight on sm_90a, with integer sums of the columns that share a
// scale of x.

#include "generated/sm90_int8_matmul.cuh"
#include "linear/sm90_scaled.cuh"
#include "ptx/sm90_int8.cuh"

static_assert(GROUP_STEPS == 2, "two stages are a group of columns");

// Of a tile; a group's scales of x come while the products of the one before run.
template <typename V>
class GroupSums {
  static constexpr int SUMS = V::WARPGROUP_N / 2;

 public:
  __device__ __forceinline__ GroupSums(const TileScales<V>& scales, int first_step, int num_steps)
      : scales_(scales), first_group_(first_step / GROUP_STEPS), num_steps_(num_steps) {
    scales.load_columns(of_all_columns_);
  }
  __device__ __forceinline__ void add(float (&sums)[SUMS], StageReader<V>& reader) const {
    const int num_groups = ceil_div(num_steps_, GROUP_STEPS);
    float coming[2] = {scales_.of_row(0, first_group_), scales_.of_row(1, first_group_)};
#pragma unroll 1
    for (int group = 0; group < num_groups; ++group) {
      int parts[SUMS];
      const float of_rows[2] = {coming[0], coming[1]};
      const int first_stage = reader.at.stage;
      const bool has_two = (group + 1) * GROUP_STEPS <= num_steps_;
      start(parts, reader, false);
      if (has_two) {
        reader.at.advance(reader.stages);
        start(parts, reader, true);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        coming[i] = scales_.of_row(i, first_group_ + min(group + 1, num_groups - 1));
      if (has_two) {
        wgmma_wait<1>();
        release_stage<V::SHARING>(&reader.empty[first_stage], reader.lane);
      }
      wgmma_wait<0>();
      hold_registers(parts);
      reader.release();
#pragma unroll
      for (int i = 0; i < SUMS; ++i)
        sums[i] = fmaf(static_cast<float>(parts[i]), of_rows[i / 2 % 2], sums[i]);
    }
  }
  __device__ __forceinline__ void scale(float (&sums)[SUMS]) const {
#pragma unroll
    for (int j = 0; j < V::WARPGROUP_N / 8; ++j) {
      const float of_columns[2] = {scales_.of_column(of_all_columns_, j, 0),
                                   scales_.of_column(of_all_columns_, j, 1)};
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j * 4 + i] *= of_columns[i % 2];
    }
  }

 private:
  static __device__ __forceinline__ void start(int (&parts)[SUMS], StageReader<V>& reader, bool add) {
    reader.start([&](unsigned long long x, unsigned long long weight, int k) {
      wgmma_int8<V::WARPGROUP_N>(parts, x, weight, add || k > 0);
    });
  }

  const TileScales<V>& scales_;
  const int first_group_, num_steps_;
  float of_all_columns_[V::WARPGROUP_N / WARP_SIZE];
};

// out[m, n] = sum over k of x[m, k] * x_scales[k / 256, m] * weight[n, k], times weight_scales[n]; + bias[n],
// + out[m, n] if `accumulate`; if `silu_mul`, out[m, i] = silu(y[m, i]) * y[m, I + i] of the product y
// [num_rows, 2 I]. Sums of 256 of k are exact, those of them in float32.
//   in:  as of `sm90_fp8_matmul_kernel`, of int8; x_scales [ceil(in_features / 256), num_rows] float;
//        weight_scales [out_features] float
//   out: out [num_rows, out_features, or half of it if `silu_mul`] T, rows `out_stride` apart
// Layout: as there without BLOCKS; a split of k begins with a group of 256.
// Grid: as of `sm90_matmul_kernel`. Block: 384 threads. Shared memory: as there, a stage having 128 of k.
// Unit of work: one block a tile at a time, one warp group 64 rows by WARPGROUP_N columns of it.
template <typename T, typename Out, int WARPGROUPS_M, int WARPGROUP_N, int SHARING>
__global__ void __launch_bounds__(384, 1) sm90_int8_matmul_kernel(SM90_SCALED_MATMUL_PARAMS(T, Out)) {
  using V = Variant<T, Out, WARPGROUPS_M, WARPGROUP_N, SHARING>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const auto multiply = [&](const RingBlock<V>& block) {
    multiply_scaled_tiles<V, GroupSums>(block, shared_memory, stages, splits, num_rows, out_features,
                                        in_features, x_scales, weight_scales, bias, out, out_stride,
                                        accumulate, silu_mul);
  };
  run_block<V>(shared_memory, x_map, x_tail_map, weight_map, ceil_div(in_features, STEP), num_rows,
               out_features, splits, tiles_m_in_l2, stages, silu_mul, multiply);
}
