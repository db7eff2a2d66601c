// Matrix product of many rows on sm_90a: the copy engine fills a ring of shared memory, two warp groups
// multiply from it. See matmul.cu for other devices and for what is not aligned.

#include "common.cuh"
#include "hopper.cuh"
#include "mma.cuh"

constexpr int CONSUMER_WARPGROUPS = 2;
constexpr int CONSUMER_WARPS = CONSUMER_WARPGROUPS * WARPGROUP_SIZE / WARP_SIZE;
constexpr int CONSUMERS = CONSUMER_WARPGROUPS * WARPGROUP_SIZE;
constexpr int PRODUCERS = 2;  // threads that copy: one the weight, one x
constexpr int TILE_K = 64;    // 2-byte elements in SWIZZLE_BYTES
constexpr int WGMMA_M = 64;
constexpr int WGMMA_K = 16;
constexpr int WARP_ROWS = 16;  // of a product, that one warp holds
constexpr int MAX_STAGES = 8;
constexpr int CHUNK_COLUMNS = 64;  // of a warp's rows, that pass through shared memory at a time
constexpr int CHUNK_STRIDE = CHUNK_COLUMNS + 8;  // 8 rows of 16 bytes fall into different banks
constexpr int CHUNK_SEGMENTS = WARP_ROWS * CHUNK_COLUMNS / SEGMENT / WARP_SIZE;  // of 16 bytes, for each lane

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

// What a block does: places first_place, first_place + stride, ... and at each the same steps along k.
struct Work {
  int first_place, places, stride;
  int first_step, num_steps;
  int stages;
  Barrier *full, *empty;
};

// Fill the ring step after step: copy(tile, column, stage) starts copies of `bytes`.
template <typename TileAt, typename Copy>
__device__ __forceinline__ void produce(const Work& work, const TileAt& tile_at, int bytes,
                                        const Copy& copy) {
  int stage = 0;
  unsigned parity = 1;
  for (int place = work.first_place; place < work.places; place += work.stride) {
    const int2 tile = tile_at(place);
    for (int step = 0; step < work.num_steps; ++step) {
      barrier_wait(&work.empty[stage], parity);
      barrier_arrive_expecting(&work.full[stage], bytes);
      copy(tile, (work.first_step + step) * TILE_K, stage);
      if (++stage == work.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

// Four 8x8 matrices of 2-byte elements to shared memory, the counterpart of ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4(void* row, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Four sums of a thread: gate becomes silu(gate) * up.
__device__ __forceinline__ void silu_mul_into(float* gate, const float* up) {
#pragma unroll
  for (int i = 0; i < 4; ++i) gate[i] = __fdividef(gate[i], 1.0f + __expf(-gate[i])) * up[i];
}

// Four sums of a thread, two rows of a pair of columns, plus that pair of a bias.
template <typename T>
__device__ __forceinline__ void add_bias(float* sums, const T* bias) {
  const Vec<T, 2> pair = Vec<T, 2>::load(bias);
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] += to_float(pair[i % 2]);
}

// A warp's part of a tile of the result.
template <typename T, typename Out>
struct WarpTile {
  const T* bias;  // at its first column, or null
  Out* out;       // its first element
  int rows, columns, row_stride;
  bool accumulate;
  int lane;

  // Segment i of CHUNK_SEGMENTS of this lane, in the CHUNK_COLUMNS columns from `first` on.
  __device__ __forceinline__ int row(int i) const {
    return (i * WARP_SIZE + lane) / (CHUNK_COLUMNS / SEGMENT);
  }
  __device__ __forceinline__ int column() const { return lane % (CHUNK_COLUMNS / SEGMENT) * SEGMENT; }
  __device__ __forceinline__ bool has(int i, int first) const {
    return row(i) < rows && first + column() < columns;
  }
  __device__ __forceinline__ Out* at(int i, int first) const {
    return out + static_cast<long long>(row(i)) * row_stride + first + column();
  }

  __device__ __forceinline__ void load_chunk(uint4 (&segments)[CHUNK_SEGMENTS], int first) const {
#pragma unroll
    for (int i = 0; i < CHUNK_SEGMENTS; ++i) {
      if (has(i, first)) segments[i] = *reinterpret_cast<const uint4*>(at(i, first));
    }
  }

  // Columns from `first` on, 8 for each 4 sums, through this warp's `staging` [WARP_ROWS][CHUNK_STRIDE].
  // `residual`: what load_chunk got, if `accumulate`; the next chunk's afterwards.
  template <int COLUMNS>
  __device__ __forceinline__ void store_chunk(float* sums, int first, T* staging,
                                              uint4 (&residual)[CHUNK_SEGMENTS]) const {
    T* const fragments = staging + lane % 16 * CHUNK_STRIDE + lane / 16 * 8;
    if (bias != nullptr) {
#pragma unroll
      for (int j = 0; j < COLUMNS; j += 8) {
        if (first + j < columns) add_bias(sums + j / 2, bias + first + j + lane % 4 * 2);
      }
    }
    if (accumulate) {
#pragma unroll
      for (int i = 0; i < CHUNK_SEGMENTS; ++i) {
        *reinterpret_cast<uint4*>(staging + row(i) * CHUNK_STRIDE + column()) = residual[i];
      }
      load_chunk(residual, first + CHUNK_COLUMNS);
      __syncwarp();
#pragma unroll
      for (int j = 0; j < COLUMNS; j += 16) {
        unsigned packed[4];
        ldmatrix_x4(packed, fragments + j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Vec<T, 2> pair = __builtin_bit_cast(Vec<T, 2>, packed[i]);
          sums[j / 2 + i * 2] += to_float(pair.data[0]);
          sums[j / 2 + i * 2 + 1] += to_float(pair.data[1]);
        }
      }
      __syncwarp();
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; j += 16) {
      unsigned packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) packed[i] = pack<T>(sums[j / 2 + i * 2], sums[j / 2 + i * 2 + 1]);
      stmatrix_x4(fragments + j, packed);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNK_SEGMENTS; ++i) {
      if (has(i, first)) {
        *reinterpret_cast<uint4*>(at(i, first)) =
            *reinterpret_cast<const uint4*>(staging + row(i) * CHUNK_STRIDE + column());
      }
    }
    __syncwarp();
  }

  // Four sums of this lane, in the 8 columns from `column` on, straight from registers.
  __device__ __forceinline__ bool has_pair(int i, int column) const {
    return lane / 4 + i * 8 < rows && column < columns;
  }
  __device__ __forceinline__ Out* pair_at(int i, int column) const {
    return out + static_cast<long long>(lane / 4 + i * 8) * row_stride + column + lane % 4 * 2;
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
  constexpr bool STAGED = sizeof(Out) == 2;  // results leave through shared memory, unless k is split

  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ Barrier full[MAX_STAGES], empty[MAX_STAGES], received;
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

  // The (row, column) of this block's tile at a place.
  auto tile_at = [&](int index) {
    const int2 cluster = walk.place(index);
    return make_int2(cluster.x * cluster_m + (cluster_m == 2 ? sharer : 0),
                     cluster.y * cluster_n + (cluster_n == 2 ? sharer : 0));
  };

  if (threadIdx.x == CONSUMERS) {
    prefetch_map(weight_map);
    prefetch_map(x_map);
    for (int i = 0; i < stages; ++i) {
      barrier_init(&full[i], PRODUCERS);
      barrier_init(&empty[i], CONSUMER_WARPS * sharers);
    }
    barrier_init(&received, 1);
    barrier_init_done();
  }
  if (sharers > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }

  if (threadIdx.x >= CONSUMERS) {
    give_registers<40>();
    const unsigned short both = 3u << (split * sharers);
    auto copy = [&](bool to_both, T* to, const TensorMap& map, int row, int column, Barrier* barrier) {
      if (to_both) {
        copy_box_to_blocks(to, map, row, column, barrier, both);
      } else {
        copy_box(to, map, row, column, barrier);
      }
    };
    const Work work = {first_place, places, stride, first_step, num_steps, stages, full, empty};
    if (threadIdx.x == CONSUMERS) {
      // Weights do not change: their copies need not wait for earlier kernels.
      const bool halves = silu_mul || cluster_m == 2;
      produce(work, tile_at, TILE_N * TILE_K * sizeof(T), [&](int2 tile, int column, int stage) {
        T* const slot = ring + stage * STAGE_ELEMENTS;
        Barrier* const barrier = &full[stage];
#pragma unroll
        for (int i = 0; i < WARPGROUPS_N; ++i) {
          T* const to = slot + X_ELEMENTS + i * WARPGROUP_N * TILE_K;
          if (!halves) {
            copy(false, to, weight_map, tile.y * TILE_N + i * WARPGROUP_N, column, barrier);
            continue;
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (cluster_m == 2 && half != sharer) continue;
            const int row = silu_mul ? half * (out_features / 2) + tile.y * (TILE_N / 2) + i * HALF_N
                                     : tile.y * TILE_N + i * WARPGROUP_N + half * HALF_N;
            copy(cluster_m == 2, to + half * HALF_N * TILE_K, weight_map, row, column, barrier);
          }
        }
      });
      let_next_kernel_start();
    } else if (threadIdx.x == CONSUMERS + WARP_SIZE) {
      wait_for_earlier_kernels();
      fence_global_for_async();
      produce(work, tile_at, X_ELEMENTS * sizeof(T), [&](int2 tile, int column, int stage) {
        const int half = cluster_n == 2 ? sharer : 0;
        copy(cluster_n == 2, ring + stage * STAGE_ELEMENTS + half * HALF_M * TILE_K, x_map,
             tile.x * TILE_M + half * HALF_M, column, &full[stage]);
      });
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
    T* const staging = ring + stages * STAGE_ELEMENTS + warp * WARP_ROWS * CHUNK_STRIDE;
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
    for (int index = first_place; index < places; index += stride) {
      const int2 tile = tile_at(index);
      const int row0 = tile.x * TILE_M + warpgroup_m * WGMMA_M + warp % 4 * WARP_ROWS;
      const int column0 = (tile.y * WARPGROUPS_N + warpgroup_n) * warpgroup_columns;
      WarpTile<T, Out> result = {bias == nullptr ? nullptr : bias + column0,
                                 out + static_cast<long long>(row0) * out_columns + column0,
                                 num_rows - row0,
                                 min(warpgroup_columns, out_columns - column0),
                                 out_columns,
                                 accumulate != 0,
                                 lane};

      float sums[WARPGROUP_N / 2];
      int previous = 0;
      for (int step = 0; step < num_steps; ++step) {
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
      // What is to be added comes while the last products run, a chunk ahead of its use.
      uint4 residual[CHUNK_SEGMENTS];
      if constexpr (STAGED) {
        if (accumulate && splits == 1) result.load_chunk(residual, 0);
      }
      wgmma_wait<0>();
      release(previous);

      if constexpr (STAGED) {
        if (splits > 1) {
          // Each block finishes a share of the columns of each half: all send it their sums of these, which
          // take the place of its ring as [splits][2][per_share][CONSUMERS][4].
          constexpr int SLOT_BYTES = CONSUMERS * 16;
          const int per_share = ceil_div(HALF_BLOCKS, splits);
          const int first = split * per_share;
          const int count = min(per_share, HALF_BLOCKS - first);
          if (threadIdx.x == 0) {
            barrier_arrive_expecting(&received, max(count, 0) * splits * 2 * SLOT_BYTES);
          }
          cluster_sync();  // no copy or product uses a ring any more
          const unsigned slots = shared_address(shared_memory) + threadIdx.x * 16;
#pragma unroll
          for (int j = 0; j < HALF_BLOCKS; ++j) {
            const int owner = j / per_share;
            const unsigned slot = slots + (split * 2 * per_share + j - owner * per_share) * SLOT_BYTES;
            const unsigned block = owner * sharers + sharer;
            const unsigned to = address_in_block(slot, block);
            const unsigned barrier = address_in_block(shared_address(&received), block);
            send_to_block_16(to, sums + j * 4, barrier);
            send_to_block_16(to + per_share * SLOT_BYTES, sums + (j + HALF_BLOCKS) * 4, barrier);
          }
          uint4 residuals[2][CHUNK_SEGMENTS];
          WarpTile<T, Out> shares[2] = {result, result};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            shares[half].columns = min(result.columns, half * HALF_N + (first + count) * 8);
            if (accumulate) shares[half].load_chunk(residuals[half], half * HALF_N + first * 8);
          }
          constexpr int MAX_SHARE = ceil_div(HALF_BLOCKS, 4) * 2;  // whole stmatrix_x4 of a half by two
          float totals[2][MAX_SHARE * 4] = {};
          barrier_wait(&received, 0);
          const float4* parts = reinterpret_cast<const float4*>(shared_memory) + threadIdx.x;
#pragma unroll 1
          for (int other = 0; other < splits; ++other) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
              for (int j = 0; j < MAX_SHARE; ++j) {
                if (j >= count) break;
                const float4 part = parts[j * CONSUMERS];
                totals[half][j * 4] += part.x;
                totals[half][j * 4 + 1] += part.y;
                totals[half][j * 4 + 2] += part.z;
                totals[half][j * 4 + 3] += part.w;
              }
              parts += per_share * CONSUMERS;
            }
          }
          if (silu_mul) {
#pragma unroll
            for (int j = 0; j < MAX_SHARE; ++j) silu_mul_into(totals[0] + j * 4, totals[1] + j * 4);
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (half == 1 && silu_mul) break;
            shares[half].template store_chunk<MAX_SHARE * 8>(totals[half], half * HALF_N + first * 8, staging,
                                                             residuals[half]);
          }
          break;
        }
      }

      if (silu_mul) {
#pragma unroll
        for (int j = 0; j < HALF_BLOCKS; ++j) silu_mul_into(sums + j * 4, sums + (j + HALF_BLOCKS) * 4);
      }
      if constexpr (STAGED) {
#pragma unroll
        for (int first = 0; first < WARPGROUP_N; first += CHUNK_COLUMNS) {
          constexpr int REST = WARPGROUP_N % CHUNK_COLUMNS;
          constexpr int WHOLE = WARPGROUP_N - REST;
          if (first >= result.columns) break;
          if (first < WHOLE) {
            result.template store_chunk<CHUNK_COLUMNS>(sums + first / 2, first, staging, residual);
          } else {
            result.template store_chunk<REST>(sums + first / 2, first, staging, residual);
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int j = 0; j < BLOCKS_N; ++j) {
            const Vec<Out, 2> pair = {from_float<Out>(sums[j * 4 + i * 2]),
                                      from_float<Out>(sums[j * 4 + i * 2 + 1])};
            if (result.has_pair(i, j * 8)) pair.store(result.pair_at(i, j * 8));
          }
        }
      }
    }
  }
  if (sharers > 1) cluster_sync();  // the other block may still copy and arrive here
}
