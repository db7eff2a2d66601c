// Products of many rows by two warp groups that multiply from a ring in shared memory: their
// variants, the producer of x, the consumers and their epilogue.
#pragma once

#include "generated/sm90_matmul.cuh"
#include "linear/sm90_product.cuh"

constexpr int CONSUMER_WARPS = CONSUMER_WARPGROUPS * WARPGROUP_SIZE / WARP_SIZE;
constexpr int CONSUMERS = CONSUMER_WARPGROUPS * WARPGROUP_SIZE;
constexpr int CHUNK_STRIDE = chunk_stride(CHUNK_COLUMNS);
constexpr int PRODUCERS = 2;                               // threads that copy: one the weight, one x
constexpr int SLOT_BYTES = CONSUMERS * 4 * sizeof(float);  // sums of all consumers in 8 columns

// Fill the ring step after step: copy(tile, column, stage) announces how much arrives in this block and
// starts its copies. Returns where the next step would go.
template <int SHARING, typename Copy>
__device__ __forceinline__ RingPosition produce(const Work<SHARING>& work, Barrier* empty, const Copy& copy) {
  RingPosition at;
#pragma unroll 1
  for (int index = work.first; index < work.tiles_m * work.tiles_n; index += work.stride) {
    const int2 tile = work.tile(index);
#pragma unroll 1
    for (int step = 0; step < work.num_steps; ++step) {
      barrier_wait(&empty[at.stage], at.parity ^ 1);
      copy(tile, (work.first_step + step) * TILE_K, at.stage);
      at.advance(work.stages);
    }
  }
  return at;
}

// A warp no longer needs the stage of this barrier: all blocks that copy into it hear of it.
template <int SHARING>
__device__ __forceinline__ void release_stage(Barrier* empty, int lane) {
  if constexpr (SHARING > 1) {
    if (lane < SHARING) barrier_arrive_in_block(empty, lane);
  } else {
    if (lane == 0) barrier_arrive(empty);
  }
}

// A barrier of the two warp groups that multiply.
__device__ __forceinline__ void consumers_sync() { named_barrier_wait<1, CONSUMERS>(); }

template <typename T, typename Out>
using Result = WarpTile<T, Out, CHUNK_COLUMNS>;

// Of a tile whose k is split among the blocks of a cluster, finish this block's share of the columns of each
// half of a warp group's columns. All consumers call it with their `sums` of their slice of k.
//   ring:     free, room for [splits][2][per_share] slots of SLOT_BYTES: each block's share, sent as one
//   piece incoming: [splits - 1][2][per_share] slots, the others' in order
template <typename T, typename Out, int WARPGROUP_N>
__device__ __forceinline__ void finish_share(const float (&sums)[WARPGROUP_N / 2],
                                             const Result<T, Out>& result, int split, int splits,
                                             Barrier* received, unsigned char* ring, unsigned char* incoming,
                                             T* staging, int gated) {
  constexpr int HALF_N = WARPGROUP_N / 2;
  constexpr int HALF_BLOCKS = HALF_N / 8;
  constexpr int MAX_SHARE = ceil_div(HALF_BLOCKS, 4) * 2;  // whole stmatrix_x4 of a half by two
  const int per_share = small_ceil_div(HALF_BLOCKS, splits);
  const int piece = 2 * per_share * SLOT_BYTES;
  const int first = split * per_share;
  const int count = min(per_share, HALF_BLOCKS - first);

  uint4 residuals[2][Result<T, Out>::SEGMENTS];
  Result<T, Out> shares[2] = {result, result};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    shares[half].columns = min(result.columns, half * HALF_N + (first + count) * 8);
    if (result.accumulate) shares[half].load_chunk(residuals[half], half * HALF_N + first * 8);
  }

  consumers_sync();  // no product of this block uses the ring any more
  float4* const mine = reinterpret_cast<float4*>(ring) + threadIdx.x;
#pragma unroll
  for (int j = 0; j < HALF_BLOCKS; ++j) {
    const int owner = small_div(j, per_share);
    float4* const slot = mine + (owner * 2 * per_share + j - owner * per_share) * CONSUMERS;
    const float* half = sums + HALF_BLOCKS * 4;
    slot[0] = make_float4(sums[j * 4], sums[j * 4 + 1], sums[j * 4 + 2], sums[j * 4 + 3]);
    slot[per_share * CONSUMERS] = make_float4(half[j * 4], half[j * 4 + 1], half[j * 4 + 2], half[j * 4 + 3]);
  }
  fence_shared_for_async();
  cluster_wait();  // the others have begun
  consumers_sync();
  if (threadIdx.x == 0) {
    barrier_arrive_expecting(received, (splits - 1) * piece);
#pragma unroll 1
    for (int i = 1; i < splits; ++i) {
      const int owner = split + i < splits ? split + i : split + i - splits;
      const int place = split < owner ? split : split - 1;
      copy_to_block(incoming + place * piece, ring + owner * piece, piece, received, owner);
    }
  }

  float totals[2][MAX_SHARE * 4] = {};
  barrier_wait(received, 0);
  cluster_arrive();
#pragma unroll 1
  for (int other = 0; other < splits; ++other) {
    const unsigned char* const from =
        other == split ? ring + split * piece : incoming + (other < split ? other : other - 1) * piece;
    const float4* const parts = reinterpret_cast<const float4*>(from) + threadIdx.x;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < MAX_SHARE; ++j) {
        if (j < count) {
          const float4 part = parts[(half * per_share + j) * CONSUMERS];
          totals[half][j * 4] += part.x;
          totals[half][j * 4 + 1] += part.y;
          totals[half][j * 4 + 2] += part.z;
          totals[half][j * 4 + 3] += part.w;
        }
      }
    }
  }
  if (gated) multiply_gates<MAX_SHARE>(totals[0], totals[1], gated);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half == 0 || !gated) {
      shares[half].template store_chunk<MAX_SHARE * 8>(totals[half], half * HALF_N + first * 8, staging,
                                                       residuals[half]);
    }
  }
  cluster_wait();  // the others have what this block sent
}

// Constants of a variant.
template <typename Element, typename Result, int GROUPS_M, int GROUP_N, int BLOCKS>
struct Variant {
  using T = Element;
  using Out = Result;
  static constexpr int WARPGROUPS_M = GROUPS_M;
  static constexpr int WARPGROUP_N = GROUP_N;
  static constexpr int SHARING = BLOCKS;
  static_assert(sizeof(T) == 2, "the product is of 16-bit elements");
  static_assert(WARPGROUPS_M == 1 || WARPGROUPS_M == 2, "two warp groups lie in a row or in a column");
  static_assert(WARPGROUP_N % 32 == 0 && WARPGROUP_N <= 256,
                "halves of a warp group's columns are whole pairs of 8");
  static_assert(SHARING == 1 || ((SHARING == 2 || SHARING == 4) && WARPGROUPS_M == 2),
                "blocks copy a half or a quarter of one warp group's columns each");
  static constexpr int WARPGROUPS_N = CONSUMER_WARPGROUPS / WARPGROUPS_M;
  static constexpr int TILE_M = WGMMA_M * WARPGROUPS_M;
  static constexpr int TILE_N = WARPGROUP_N * WARPGROUPS_N;
  static constexpr int HALF_N = WARPGROUP_N / 2;
  static constexpr int X_ELEMENTS = TILE_M * TILE_K;
  static constexpr int WEIGHT_ELEMENTS = TILE_N * TILE_K;
  static constexpr int STAGE_ELEMENTS = X_ELEMENTS + WEIGHT_ELEMENTS;
  static constexpr int PART_N = SHARING > 2 ? WARPGROUP_N / SHARING : HALF_N;  // of a box, at least
  static_assert(PART_N * TILE_K * sizeof(T) % SWIZZLE_REPEAT == 0, "boxes end where the swizzle repeats");
  static constexpr bool THROUGH_SHARED = sizeof(Out) == 2;
  static constexpr int UNROLL = THROUGH_SHARED && WARPGROUP_N == 256 ? 4 : 1;  // 1 % where x has many rows
  static constexpr bool SPLITTABLE = THROUGH_SHARED && WARPGROUP_N <= SPLITTABLE_N && SHARING == 1;
};

// Producer of x: one step's part of a tile's rows.
template <typename V>
struct RowCopies {
  typename V::T* ring;
  Barrier* full;
  const TensorMap& map;
  const TensorMap& tail_map;
  int num_rows;

  __device__ __forceinline__ void operator()(int2 tile, int column, int stage) const {
    const int row = tile.x * V::TILE_M;
    const int rows = min(num_rows - row, V::TILE_M);
    const TensorMap& from = rows == V::TILE_M ? map : tail_map;
    barrier_arrive_expecting(&full[stage], max(rows, 0) * TILE_K * sizeof(typename V::T));
    if (rows > 0) copy_box(ring + stage * V::STAGE_ELEMENTS, from, row, column, &full[stage]);
  }
};

// Producer of the weight: one step's part of a tile.
template <typename V>
struct WeightCopies {
  using T = typename V::T;

  T* ring;
  Barrier* full;
  const TensorMap& map;
  int out_features;
  int rank;
  int silu_mul;
  unsigned long long policy;

  __device__ __forceinline__ void operator()(int2 tile, int column, int stage) const {
    constexpr int WEIGHT_ELEMENTS = V::WEIGHT_ELEMENTS;
    constexpr int HALF_N = V::HALF_N;
    T* to = ring + stage * V::STAGE_ELEMENTS + V::X_ELEMENTS;
    barrier_arrive_expecting(&full[stage], WEIGHT_ELEMENTS * sizeof(T));
    if constexpr (V::SHARING > 1) {
      // The other parts come from the other blocks, perhaps before this one has announced the whole: `full`
      // may be that far ahead within a phase, which does not end before this thread has arrived.
      constexpr int PARTS = V::SHARING / 2;  // of half of the columns
      const int row = silu_mul
                          ? tile.y * HALF_N + rank / PARTS * (out_features / 2) + rank % PARTS * V::PART_N
                          : tile.y * V::TILE_N + rank * V::PART_N;
      copy_box_to_blocks<V::SHARING>(to + rank * V::PART_N * TILE_K, map, row, column, &full[stage]);
    } else {
#pragma unroll
      for (int i = 0; i < V::WARPGROUPS_N; ++i, to += V::WARPGROUP_N * TILE_K) {
        if (silu_mul) {
          const int row = tile.y * (V::TILE_N / 2) + i * HALF_N;
          copy(to, row, column, stage);
          copy(to + HALF_N * TILE_K, row + out_features / 2, column, stage);
        } else {
          copy(to, tile.y * V::TILE_N + i * V::WARPGROUP_N, column, stage);
        }
      }
    }
  }

  __device__ __forceinline__ void copy(T* to, int row, int column, int stage) const {
    copy_box(to, map, row, column, &full[stage], policy);
  }
};

// Epilogue of a whole tile: a warp's sums, with what `result` says is added, to their place; 16-bit results
// pass through `staging`.
template <typename V>
__device__ __forceinline__ void store_tile(
    float (&sums)[V::WARPGROUP_N / 2], const Result<typename V::T, typename V::Out>& result,
    typename V::T* staging, uint4 (&residual)[Result<typename V::T, typename V::Out>::SEGMENTS]) {
  using Out = typename V::Out;
  constexpr int WARPGROUP_N = V::WARPGROUP_N;
  if constexpr (V::THROUGH_SHARED) {
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
      for (int j = 0; j < WARPGROUP_N / 8; ++j) {
        const Vec<Out, 2> pair = {from_float<Out>(sums[j * 4 + i * 2]),
                                  from_float<Out>(sums[j * 4 + i * 2 + 1])};
        if (result.has_pair(i, j * 8)) pair.store(result.pair_at(i, j * 8));
      }
    }
  }
}

// A warp group that multiplies: the tiles of `work` one after another, from the ring to their places.
template <typename V>
__device__ __forceinline__ void multiply_tiles(const Work<V::SHARING>& work, unsigned char* shared_memory,
                                               Barrier* full, Barrier* empty, Barrier* received, int stages,
                                               int split, int splits, int num_rows, int out_features,
                                               const typename V::T* bias, typename V::Out* out,
                                               int out_stride, int accumulate, int gated) {
  using T = typename V::T;
  using Out = typename V::Out;
  constexpr int WARPGROUPS_M = V::WARPGROUPS_M, WARPGROUP_N = V::WARPGROUP_N, SHARING = V::SHARING;
  T* const ring = reinterpret_cast<T*>(shared_memory);
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = uniform(threadIdx.x / WARP_SIZE);
  const int warpgroup_m = WARPGROUPS_M == 2 ? warp / 4 : 0;
  const int warpgroup_n = WARPGROUPS_M == 2 ? 0 : warp / 4;
  const int out_columns = gated ? out_features / 2 : out_features;
  const int warpgroup_columns = gated ? V::HALF_N : WARPGROUP_N;
  const unsigned long long x_descriptor = operand_descriptor(ring + warpgroup_m * WGMMA_M * TILE_K);
  const unsigned long long weight_descriptor =
      operand_descriptor(ring + V::X_ELEMENTS + warpgroup_n * WARPGROUP_N * TILE_K);
  T* const staging = ring + stages * V::STAGE_ELEMENTS + warp * WARP_ROWS * CHUNK_STRIDE;

  wait_for_earlier_kernels();
  RingPosition at;
#pragma unroll 1
  for (int index = work.first; index < work.tiles_m * work.tiles_n; index += work.stride) {
    const int2 tile = work.tile(index);
    const int row0 = tile.x * V::TILE_M + warpgroup_m * WGMMA_M + warp % 4 * WARP_ROWS;
    const int column0 = (tile.y * V::WARPGROUPS_N + warpgroup_n) * warpgroup_columns;
    Result<T, Out> result = {bias == nullptr ? nullptr : bias + column0,
                             out + static_cast<long long>(row0) * out_stride + column0,
                             num_rows - row0,
                             min(warpgroup_columns, out_columns - column0),
                             out_stride,
                             accumulate != 0,
                             lane};

    float sums[WARPGROUP_N / 2];
    int previous = 0;
#pragma unroll V::UNROLL
    for (int step = 0; step < work.num_steps; ++step) {
      barrier_wait(&full[at.stage], at.parity);
      const unsigned long long offset = at.stage * (V::STAGE_ELEMENTS * sizeof(T) >> 4);
      multiply_stage<T, WARPGROUP_N>(sums, x_descriptor, weight_descriptor, offset, step > 0);
      wgmma_wait<1>();
      if (step > 0) release_stage<SHARING>(&empty[previous], lane);
      previous = at.stage;
      at.advance(stages);
    }
    // What is to be added comes while the last products run.
    uint4 residual[Result<T, Out>::SEGMENTS];
    if constexpr (V::THROUGH_SHARED) {
      if (accumulate && splits == 1) result.load_chunk(residual, 0);
    }
    wgmma_wait<0>();
    release_stage<SHARING>(&empty[previous], lane);

    if constexpr (V::SPLITTABLE) {
      if (splits > 1) {
        finish_share<T, Out, WARPGROUP_N>(
            sums, result, split, splits, received, shared_memory,
            reinterpret_cast<unsigned char*>(ring + stages * V::STAGE_ELEMENTS) +
                CONSUMER_WARPS * WARP_ROWS * CHUNK_STRIDE * sizeof(T),
            staging, gated);
        return;
      }
    }

    if (gated) multiply_gates<V::HALF_N / 8>(sums, sums + V::HALF_N / 2, gated);
    store_tile<V>(sums, result, staging, residual);
  }
}

// What the warp groups of a block that multiply have in common with its producers.
template <typename V>
struct RingBlock {
  const Work<V::SHARING>& work;
  Barrier* full;
  Barrier* empty;
  Barrier* received;
  int split;
};

// What fills the ring of a product that has nothing but its own steps.
struct ProductSteps {
  template <int SHARING, typename Copy>
  __device__ __forceinline__ RingPosition operator()(const Work<SHARING>& work, Barrier* empty,
                                                     const Copy& copy) const {
    return produce(work, empty, copy);
  }
};

// A block's work: one warp group of which two threads copy `steps` steps of a row to the ring, each by
// fill(work, empty, copy), and two that multiply(block) from it.
template <typename V, typename Multiply, typename Fill = ProductSteps>
__device__ __forceinline__ void run_block(unsigned char* shared_memory, const TensorMap& x_map,
                                          const TensorMap& x_tail_map, const TensorMap& weight_map, int steps,
                                          int num_rows, int out_features, int splits, int tiles_m_in_l2,
                                          int stages, int silu_mul, const Multiply& multiply,
                                          const Fill& fill = {}) {
  using T = typename V::T;
  constexpr int SHARING = V::SHARING;
  __shared__ Barrier full[MAX_STAGES], empty[MAX_STAGES], received;
  T* const ring = reinterpret_cast<T*>(shared_memory);

  const int rank = SHARING > 1 ? cluster_rank() : 0;
  const int split = splits > 1 ? cluster_rank() : 0;
  const int first_step = small_div(split * steps, splits);
  const int cluster_blocks = SHARING > 1 ? SHARING : splits;
  const Work<SHARING> work = {ceil_div(num_rows, V::TILE_M * SHARING),
                              ceil_div(out_features, V::TILE_N),
                              tiles_m_in_l2,
                              small_div(blockIdx.x, cluster_blocks),
                              small_div(gridDim.x, cluster_blocks),
                              first_step,
                              small_div((split + 1) * steps, splits) - first_step,
                              stages,
                              rank};

  if (threadIdx.x == CONSUMERS) {
    prefetch_map(weight_map);
    prefetch_map(x_map);
    prefetch_map(x_tail_map);
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      barrier_init(&full[i], PRODUCERS);
      barrier_init(&empty[i], CONSUMER_WARPS * SHARING);
    }
    barrier_init(&received, 1);
    barrier_init_done();
  }
  __syncthreads();
  if (SHARING > 1 || splits > 1) cluster_arrive();  // others may send from here on, and wait before they do
  if constexpr (SHARING > 1) cluster_wait();

  if (threadIdx.x >= CONSUMERS) {
    give_registers<40>();
    if (threadIdx.x == CONSUMERS) {
      // Weights do not change: their copies need not wait for earlier kernels.
      const unsigned long long policy =
          num_rows <= V::TILE_M ? evict_first_policy() : evict_unchanged_policy();
      const WeightCopies<V> copy = {ring, full, weight_map, out_features, rank, silu_mul, policy};
      RingPosition at = fill(work, empty, copy);
      let_next_kernel_start();
      if constexpr (SHARING > 1) {
        // The other block arrives here until it is through with every stage; its copies end before that.
#pragma unroll 1
        for (int i = 0; i < stages; ++i) {
          barrier_wait(&empty[at.stage], at.parity ^ 1);
          at.advance(stages);
        }
      }
    } else if (threadIdx.x == CONSUMERS + WARP_SIZE) {
      wait_for_earlier_kernels();
      fence_global_for_async();
      fill(work, empty, RowCopies<V>{ring, full, x_map, x_tail_map, num_rows});
    }
    if (splits > 1) cluster_wait();
    return;
  }

  take_registers<232>();
  multiply(RingBlock<V>{work, full, empty, &received, split});
}
