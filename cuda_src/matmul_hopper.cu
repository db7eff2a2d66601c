// Matrix product of many rows on sm_90a: the copy engine fills a ring of shared memory, two warp groups
// multiply from it. See matmul.cu for other devices and for what is not aligned.

#include "common.cuh"
#include "hopper.cuh"
#include "mma.cuh"

constexpr int CONSUMER_WARPGROUPS = 2;
constexpr int CONSUMER_WARPS = CONSUMER_WARPGROUPS * WARPGROUP_SIZE / WARP_SIZE;
constexpr int CONSUMERS = CONSUMER_WARPGROUPS * WARPGROUP_SIZE;
constexpr int TILE_K = 64;  // 2-byte elements in SWIZZLE_BYTES
constexpr int WGMMA_M = 64;
constexpr int WGMMA_K = 16;
constexpr int WARP_ROWS = 16;  // of a product, that one warp holds
constexpr int MAX_STAGES = 8;
constexpr int PAD = 8;  // elements after each staged row: 8 rows of 16 bytes fall into different banks

// The order in which clusters of blocks walk over the result.
struct Walk {
  int clusters_m, clusters_n;  // that cover the result
  int group;                   // rows of clusters that share each tile of the weight while it is in L2

  // (row, column) of place `index`: groups of rows, each column by column.
  __device__ __forceinline__ int2 place(int index) const {
    const int first = index / (group * clusters_n) * group;
    const int rows = min(clusters_m - first, group);
    const int in_group = index - first * clusters_n;
    return make_int2(first + in_group % rows, in_group / rows);
  }
};

// Four 8x8 matrices of 2-byte elements to shared memory, the counterpart of ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4(void* row, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ void store_16(unsigned address, const float* v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]),
               "f"(v[3])
               : "memory");
}

__device__ __forceinline__ void add_from_block_16(float (&sums)[4], unsigned remote) {
  float v[4];
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(remote)
               : "memory");
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] += v[i];
}

// Four sums of a thread: gate becomes silu(gate) * up.
__device__ __forceinline__ void silu_mul_into(float* gate, const float* up) {
#pragma unroll
  for (int i = 0; i < 4; ++i) gate[i] = __fdividef(gate[i], 1.0f + __expf(-gate[i])) * up[i];
}

// Four sums of a thread, two rows of a pair of columns, plus that pair of a bias.
template <typename T>
__device__ __forceinline__ void add_pair(float* sums, const T* bias) {
  const Vec<T, 2> pair = Vec<T, 2>::load(bias);
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] += to_float(pair[i % 2]);
}

template <typename T>
__device__ __forceinline__ void add_packed(float* sums, unsigned packed) {
  const Vec<T, 2> pair = __builtin_bit_cast(Vec<T, 2>, packed);
  sums[0] += to_float(pair[0]);
  sums[1] += to_float(pair[1]);
}

// Where results go that do not leave through shared memory.
template <typename T, typename Out>
struct Results {
  const T* bias;
  Out* out;
  int num_rows, columns;
  bool accumulate;

  // Four sums of a thread: rows `row` and `row` + 8, columns `column` and the next.
  __device__ __forceinline__ void store(int row, int column, float* sums) const {
    if (bias != nullptr) add_pair<T>(sums, bias + column);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row + i * 8 >= num_rows) continue;
      Out* const to = out + static_cast<long long>(row + i * 8) * columns + column;
      if (accumulate) {
        const Vec<Out, 2> before = Vec<Out, 2>::load(to);
        sums[i * 2] += to_float(before[0]);
        sums[i * 2 + 1] += to_float(before[1]);
      }
      const Vec<Out, 2> pair = {from_float<Out>(sums[i * 2]), from_float<Out>(sums[i * 2 + 1])};
      pair.store(to);
    }
  }
};

// out[m, n] = sum over k of x[m, k] * weight[n, k], + bias[n], + out[m, n] if `accumulate`; if `silu_mul`,
// out[m, i] = silu(y[m, i]) * y[m, I + i] of the product y [num_rows, 2 I]. Rounded once.
//
// x_map: x [num_rows, in_features] T in boxes of TILE_M / 2 rows and 64 columns; weight_map: weight
// [out_features, in_features] T in boxes of WARPGROUP_N / 2 rows and 64 columns; both with 128-byte swizzle.
// bias [out_features] T or null; out [num_rows, out_features or half of it] T or float; sums in float32.
// Layout: row-major, 16-byte aligned; in_features and the columns of out multiples of 8.
// Tile: TILE_M = 64 * WARPGROUPS_M rows by WARPGROUP_N * (2 / WARPGROUPS_M) columns.
// Block: 384 threads: two warp groups that multiply, one of which a thread copies. Cluster: cluster_m *
// cluster_n * splits blocks. Blocks of one split that lie in a row or column share its operand: each copies
// half of it into both. Blocks of different splits have slices of k, and each finishes its share of the
// columns: it gets the others' sums through shared memory and adds them in the order of k.
// Grid: with one split, whole clusters that walk over the tiles; else a cluster a tile.
// Shared: `stages` times (TILE_M + TILE_N) * 64 * sizeof(T) of the ring, where the splits' sums lie
// afterwards, then for a 16-bit out that is not split TILE_M x TILE_N results, padded.
template <typename T, typename Out, int WARPGROUPS_M, int WARPGROUP_N>
__global__ void __launch_bounds__(384, 1)
    matmul_hopper_kernel(const __grid_constant__ TensorMap x_map,
                         const __grid_constant__ TensorMap weight_map, const T* bias, Out* out, int num_rows,
                         int out_features, int in_features, int cluster_m, int cluster_n, int splits,
                         int clusters_in_l2, int stages, int accumulate, int silu_mul) {
  static_assert(sizeof(T) == 2, "the product is of 16-bit elements");
  static_assert(WARPGROUPS_M == 1 || WARPGROUPS_M == 2, "two warp groups lie in a row or in a column");
  static_assert(WARPGROUP_N % 32 == 0 && WARPGROUP_N <= 256,
                "halves of a warp group's columns are whole pairs");
  constexpr int WARPGROUPS_N = CONSUMER_WARPGROUPS / WARPGROUPS_M;
  constexpr int TILE_M = WGMMA_M * WARPGROUPS_M;
  constexpr int TILE_N = WARPGROUP_N * WARPGROUPS_N;
  constexpr int HALF_M = TILE_M / 2;
  constexpr int HALF_N = WARPGROUP_N / 2;
  constexpr int X_ELEMENTS = TILE_M * TILE_K;
  constexpr int STAGE_ELEMENTS = X_ELEMENTS + TILE_N * TILE_K;
  constexpr int STAGE_BYTES = STAGE_ELEMENTS * sizeof(T);
  static_assert(HALF_N * TILE_K * sizeof(T) % SWIZZLE_REPEAT == 0, "boxes end where the swizzle repeats");
  constexpr int BLOCKS_N = WARPGROUP_N / 8;  // 8 columns of a thread's sums
  constexpr int HALF_BLOCKS = BLOCKS_N / 2;
  constexpr int ROW_STRIDE = WARPGROUP_N + PAD;
  constexpr bool STAGED = sizeof(Out) == 2;  // results leave through shared memory, unless k is split

  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ Barrier full[MAX_STAGES], empty[MAX_STAGES], residual_full[CONSUMER_WARPS];
  T* const ring = reinterpret_cast<T*>(shared_memory);

  const int sharers = cluster_m * cluster_n;
  const int cluster_size = sharers * splits;
  const int rank = cluster_size > 1 ? cluster_rank() : 0;
  const int sharer = rank % sharers;
  const int split = rank / sharers;
  const Walk walk = {ceil_div(num_rows, TILE_M * cluster_m), ceil_div(out_features, TILE_N * cluster_n),
                     clusters_in_l2};
  const int places = walk.clusters_m * walk.clusters_n;
  const int first_place = blockIdx.x / cluster_size;
  const int stride = gridDim.x / cluster_size;
  const int steps = ceil_div(in_features, TILE_K);
  const int first_step = split * steps / splits;
  const int num_steps = (split + 1) * steps / splits - first_step;

  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], CONSUMER_WARPS * sharers);
    }
    for (int i = 0; i < CONSUMER_WARPS; ++i) barrier_init(&residual_full[i], WARP_ROWS);
    barrier_init_done();
  }
  if (cluster_size > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }

  if (threadIdx.x >= CONSUMERS) {
    give_registers<40>();
    if (threadIdx.x == CONSUMERS) {
      prefetch_map(x_map);
      prefetch_map(weight_map);
      const unsigned short both = 3u << (split * sharers);
      auto copy_half = [&](bool shared_by_two, T* to, const TensorMap& map, int row, int step,
                           Barrier* barrier) {
        const int column = (first_step + step) * TILE_K;
        if (shared_by_two) {
          copy_box_to_blocks(to, map, row, column, barrier, both);
        } else {
          copy_box(to, map, row, column, barrier);
        }
      };
      auto copy_weight = [&](int2 tile, int step, int stage) {
        barrier_arrive_expecting(&full[stage], STAGE_BYTES);
        T* const to = ring + stage * STAGE_ELEMENTS + X_ELEMENTS;
#pragma unroll
        for (int i = 0; i < WARPGROUPS_N * 2; ++i) {
          if (cluster_m == 2 && i % 2 != sharer) continue;
          const int row = silu_mul ? i % 2 * (out_features / 2) + tile.y * (TILE_N / 2) + i / 2 * HALF_N
                                   : tile.y * TILE_N + i * HALF_N;
          copy_half(cluster_m == 2, to + i * HALF_N * TILE_K, weight_map, row, step, &full[stage]);
        }
      };
      auto copy_x = [&](int2 tile, int step, int stage) {
        T* const to = ring + stage * STAGE_ELEMENTS;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (cluster_n == 2 && i != sharer) continue;
          copy_half(cluster_n == 2, to + i * HALF_M * TILE_K, x_map, tile.x * TILE_M + i * HALF_M, step,
                    &full[stage]);
        }
      };
      auto tile_at = [&](int index) {
        const int2 cluster = walk.place(index);
        return make_int2(cluster.x * cluster_m + (cluster_m == 2 ? sharer : 0),
                         cluster.y * cluster_n + (cluster_n == 2 ? sharer : 0));
      };

      // Weights do not change, so the ring's first may come before the earlier kernels end.
      int ahead = min(stages, num_steps);
      for (int i = 0; i < ahead; ++i) copy_weight(tile_at(first_place), i, i);
      wait_for_earlier_kernels();
      fence_global_for_async();
      int stage = 0;
      unsigned parity = 1;
      for (int index = first_place; index < places; index += stride) {
        const int2 tile = tile_at(index);
        for (int step = 0; step < num_steps; ++step) {
          if (ahead > 0) {
            --ahead;
          } else {
            barrier_wait(&empty[stage], parity);
            copy_weight(tile, step, stage);
          }
          copy_x(tile, step, stage);
          if (++stage == stages) {
            stage = 0;
            parity ^= 1;
          }
        }
      }
      let_next_kernel_start();
    }
  } else {
    take_registers<232>();
    const int lane = threadIdx.x % WARP_SIZE;
    const int warp = threadIdx.x / WARP_SIZE;
    const int warpgroup = warp / 4;
    const int warpgroup_m = WARPGROUPS_M == 2 ? warpgroup : 0;
    const int warpgroup_n = WARPGROUPS_M == 2 ? 0 : warpgroup;
    const int out_columns = silu_mul ? out_features / 2 : out_features;
    const int warpgroup_columns = silu_mul ? HALF_N : WARPGROUP_N;
    const unsigned long long x_descriptor = operand_descriptor(ring + warpgroup_m * WGMMA_M * TILE_K);
    const unsigned long long weight_descriptor =
        operand_descriptor(ring + X_ELEMENTS + warpgroup_n * WARPGROUP_N * TILE_K);
    T* const staged = ring + stages * STAGE_ELEMENTS + warp * WARP_ROWS * ROW_STRIDE;
    auto release = [&](int stage) {
      if (lane < sharers) {
        if (sharers == 1) {
          barrier_arrive(&empty[stage]);
        } else {
          barrier_arrive_at(&empty[stage], split * sharers + lane);
        }
      }
    };

    wait_for_earlier_kernels();
    int stage = 0;
    unsigned parity = 0;
    unsigned residual_parity = 0;
    for (int index = first_place; index < places; index += stride) {
      const int2 cluster = walk.place(index);
      const int row0 = (cluster.x * cluster_m + (cluster_m == 2 ? sharer : 0)) * TILE_M +
                       warpgroup_m * WGMMA_M + warp % 4 * WARP_ROWS;
      const int column0 =
          ((cluster.y * cluster_n + (cluster_n == 2 ? sharer : 0)) * WARPGROUPS_N + warpgroup_n) *
          warpgroup_columns;
      const int columns = min(warpgroup_columns, out_columns - column0);
      const bool has_row = lane < WARP_ROWS && row0 + lane < num_rows && columns > 0;
      Out* const out_row = out + static_cast<long long>(row0 + lane) * out_columns + column0;

      float sums[WARPGROUP_N / 2];
      int previous = 0;
      for (int step = 0; step < num_steps; ++step) {
        if constexpr (STAGED) {
          // By now the tile before has left, and what is to be added can arrive in its place.
          if (accumulate && splits == 1 && step == num_steps / 2) {
            if (lane < WARP_ROWS) {
              copy_out_wait_read();
              barrier_arrive_expecting(&residual_full[warp], has_row ? columns * sizeof(T) : 0);
              if (has_row) {
                copy_bytes_in(staged + lane * ROW_STRIDE, out_row, columns * sizeof(T), &residual_full[warp]);
              }
            }
            __syncwarp();
          }
        }
        barrier_wait(&full[stage], parity);
        const unsigned long long offset = stage * (STAGE_BYTES >> 4);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILE_K / WGMMA_K; ++k) {
          wgmma<T, WARPGROUP_N>(sums, x_descriptor + offset + k * DESCRIPTOR_STEP_K,
                                weight_descriptor + offset + k * DESCRIPTOR_STEP_K, step > 0 || k > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (step > 0) release(previous);
        previous = stage;
        if (++stage == stages) {
          stage = 0;
          parity ^= 1;
        }
      }
      wgmma_wait<0>();
      release(previous);

      const int pair = lane % 4 * 2;  // this thread's columns in a block of 8
      if (splits > 1) {
        // Every block lays its sums where its ring was; then each adds up its share of the columns.
        cluster_sync();  // no copy or product uses a ring any more
        const unsigned slots = shared_address(shared_memory) + threadIdx.x * 16;
#pragma unroll
        for (int j = 0; j < BLOCKS_N; ++j) store_16(slots + j * CONSUMERS * 16, sums + j * 4);
        cluster_sync();
        const int share = HALF_BLOCKS / splits;
        const Results<T, Out> results = {bias, out, num_rows, out_columns, accumulate != 0};
#pragma unroll 1
        for (int j = split * share; j < (split + 1) * share; ++j) {
          float first[4] = {}, second[4] = {};  // of both halves
          for (int other = 0; other < splits; ++other) {
            const unsigned from = address_in_block(slots + j * CONSUMERS * 16, other * sharers + sharer);
            add_from_block_16(first, from);
            add_from_block_16(second, from + HALF_BLOCKS * CONSUMERS * 16);
          }
          if (silu_mul) {
            silu_mul_into(first, second);
          } else if (j * 8 + HALF_N < columns) {
            results.store(row0 + lane / 4, column0 + HALF_N + j * 8 + pair, second);
          }
          if (j * 8 < columns) results.store(row0 + lane / 4, column0 + j * 8 + pair, first);
        }
        cluster_sync();  // the others have read this block's sums
        continue;
      }

      if (silu_mul) {
#pragma unroll
        for (int j = 0; j < HALF_BLOCKS; ++j) silu_mul_into(sums + j * 4, sums + (j + HALF_BLOCKS) * 4);
      }
      if constexpr (STAGED) {
        if (bias != nullptr) {
#pragma unroll
          for (int j = 0; j < BLOCKS_N; ++j) {
            if (j * 8 < columns) add_pair<T>(sums + j * 4, bias + column0 + j * 8 + pair);
          }
        }
        if (accumulate) {
          barrier_wait(&residual_full[warp], residual_parity);
          residual_parity ^= 1;
        } else {
          copy_out_wait_read();
          __syncwarp();
        }
        T* const at = staged + lane % 16 * ROW_STRIDE + lane / 16 * 8;
#pragma unroll
        for (int j = 0; j < BLOCKS_N; j += 2) {
          if (j * 8 < warpgroup_columns) {
            if (accumulate) {
              unsigned residual[4];
              ldmatrix_x4(residual, at + j * 8);
#pragma unroll
              for (int i = 0; i < 4; ++i) add_packed<T>(sums + j * 4 + i * 2, residual[i]);
            }
            unsigned packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) packed[i] = pack<T>(sums[j * 4 + i * 2], sums[j * 4 + i * 2 + 1]);
            stmatrix_x4(at + j * 8, packed);
          }
        }
        fence_shared_for_async();
        __syncwarp();
        if (has_row) copy_bytes_out(out_row, staged + lane * ROW_STRIDE, columns * sizeof(T));
        copy_out_commit();
      } else {
        const int row = row0 + lane / 4;
        Out* const to = out + static_cast<long long>(row) * out_columns + column0 + pair;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (row + i * 8 >= num_rows) continue;
#pragma unroll
          for (int j = 0; j < BLOCKS_N; ++j) {
            const Vec<Out, 2> results = {sums[j * 4 + i * 2], sums[j * 4 + i * 2 + 1]};
            if (j * 8 < columns) results.store(to + i * 8ll * out_columns + j * 8);
          }
        }
      }
    }
    copy_out_wait_read();
  }
  if (sharers > 1) cluster_sync();  // the other block may still copy and arrive here
}
