// Product of a few e4m3 rows by an e4m3 weight on sm_90a, bound by reading the weight once. The weight's rows
// are those of wgmma and the rows of x its columns, so that neither passes through registers: to convert the
// e4m3 of 16 rows takes longer than memory does.

#include "generated/sm90_fp8_rows.cuh"
#include "linear/sm90_product.cuh"
#include "ptx/sm90_fp8.cuh"

constexpr int STEP = SWIZZLE_BYTES;                    // of k, that a product has
constexpr int SLAB_BYTES = WARP_ROWS * SWIZZLE_BYTES;  // of a slab: rows of a product that one warp holds
constexpr int GROUPS = 2;                              // of warps that multiply, each every second stage
constexpr int GROUP_WARPS = WARPGROUP_SIZE / WARP_SIZE;
constexpr int CONSUMER_WARPS = GROUPS * GROUP_WARPS;
constexpr int CONSUMERS = CONSUMER_WARPS * WARP_SIZE;
constexpr int THREADS = CONSUMERS + 2 * WARP_SIZE;  // a warp copies the weight, and one x

// A stage of the ring: the weight's slabs, TILES products of them, and behind them the rows of x, of which
// there is room for ROWS. With FOLD 2 a product's lower rows are the same slabs 128 further along k, and so
// are its right columns: its upper left and lower right quarters count.
template <int TILES_A_STAGE, int FOLDS, int MOST_ROWS>
struct RowsStage {
  static constexpr int TILES = TILES_A_STAGE, FOLD = FOLDS, ROWS = MOST_ROWS;
  static_assert(FOLD == 1 || (FOLD == 2 && TILES == 1), "a fold is for few slabs");
  static_assert(ROWS % 8 == 0, "a thread has two sums of each 8 tokens and 8 rows of the weight");
  static constexpr int SUMS = ROWS / 2;  // of a thread and a product
  static constexpr int TILE_SLABS = GROUP_WARPS / FOLD;
  static constexpr int SLABS = TILES * TILE_SLABS;
  static constexpr int COLUMNS = FOLD * ROWS;  // of a product
  static constexpr int TILE_BYTES = WGMMA_M * SWIZZLE_BYTES;
  static constexpr int X_BYTES = ROWS * SWIZZLE_BYTES;  // of 128 of k
  static constexpr int BYTES = TILES * TILE_BYTES + FOLD * X_BYTES;
  static constexpr int OWNERS = TILE_SLABS * WARP_SIZE;  // threads of a group that have the sums of a fold
};

// The ring's barriers, and how far it goes.
struct RowsRing {
  unsigned char* memory;
  Barrier* full;
  Barrier* empty;
  int stages;
  int steps;  // stages of a row
};

// This block's slabs of the weight; gated, each is 8 gates and their ups.
struct BlockSlabs {
  int features;  // of the result
  int a_slab;    // of them
  int begin, end;

  __device__ __forceinline__ BlockSlabs(int out_features, int gated)
      : features(gated ? out_features / 2 : out_features), a_slab(gated ? WARP_ROWS / 2 : WARP_ROWS) {
    const int all = ceil_div(features, a_slab), blocks = gridDim.x, block = blockIdx.x;
    const int each = all / blocks, more = all - each * blocks;
    begin = block * each + min(block, more);
    end = begin + each + (block < more ? 1 : 0);
  }
};

// Fill the ring with the weight, a lane each slab of a stage; it does not change, so that no copy waits for
// earlier kernels.
template <typename Stage>
__device__ __forceinline__ void copy_slabs(const RowsRing& ring, const BlockSlabs& slabs,
                                           const TensorMap& map) {
  const int lane = threadIdx.x % WARP_SIZE;
  const int slab = lane % Stage::SLABS, fold = lane / Stage::SLABS;
  const unsigned long long policy = evict_first_policy();
  RingPosition at;
  int started = 0;
#pragma unroll 1
  for (int first = slabs.begin; first < slabs.end; first += Stage::SLABS) {
    const int count = min(slabs.end - first, Stage::SLABS);
    const int row = (first + slab) * slabs.a_slab;
#pragma unroll 1
    for (int step = 0; step < ring.steps; ++step) {
      Barrier* const full = &ring.full[at.stage];
      barrier_wait(&ring.empty[at.stage], at.parity ^ 1);
      if (lane == 0) barrier_arrive_expecting(full, Stage::FOLD * count * SLAB_BYTES);
      if (slab < count && fold < Stage::FOLD) {
        copy_box(ring.memory + at.stage * Stage::BYTES + lane * SLAB_BYTES, map, 0, row,
                 (step * Stage::FOLD + fold) * TILE_K, full, policy);
      }
      if (++started == ring.stages) let_next_kernel_start();
      at.advance(ring.stages);
    }
  }
  if (started < ring.stages) let_next_kernel_start();
}

// Fill the ring with the rows of x, once they are there.
template <typename Stage>
__device__ __forceinline__ void copy_rows(const RowsRing& ring, const BlockSlabs& slabs, const TensorMap& map,
                                          int num_rows) {
  const int fold = threadIdx.x % WARP_SIZE;
  wait_for_earlier_kernels();
  fence_global_for_async();
  RingPosition at;
#pragma unroll 1
  for (int first = slabs.begin; first < slabs.end; first += Stage::SLABS) {
#pragma unroll 1
    for (int step = 0; step < ring.steps; ++step) {
      Barrier* const full = &ring.full[at.stage];
      barrier_wait(&ring.empty[at.stage], at.parity ^ 1);
      if (fold == 0) barrier_arrive_expecting(full, Stage::FOLD * num_rows * SWIZZLE_BYTES);
      if (fold < Stage::FOLD) {
        copy_box(
            ring.memory + at.stage * Stage::BYTES + Stage::TILES * Stage::TILE_BYTES + fold * Stage::X_BYTES,
            map, 0, (step * Stage::FOLD + fold) * TILE_K, full);
      }
      at.advance(ring.stages);
    }
  }
}

// What threads make of the sums that warps have left, parts of them in [GROUPS][FOLD][ITEMS] float4: an item
// is of two rows of a slab, 8 apart, and of two tokens. A thread has one at a time.
template <typename T, typename Stage>
class SlabResults {
  static constexpr int TOKEN_GROUPS = Stage::ROWS / 8;
  static constexpr int ITEMS = Stage::TILES * TOKEN_GROUPS * Stage::OWNERS;
  static constexpr bool EARLY = ITEMS <= CONSUMERS;  // what is added comes while products run

 public:
  __device__ __forceinline__ SlabResults(const BlockSlabs& slabs, const T* bias, T* out, int out_stride,
                                         int num_rows, int accumulate, int gated)
      : slabs_(slabs),
        bias_(bias),
        out_(out),
        out_stride_(out_stride),
        num_rows_(num_rows),
        accumulate_(accumulate),
        gated_(gated) {}

  // This thread's scale of the weight, which comes from memory; before earlier kernels have ended. With
  // BLOCKS, sums are scaled already.
  template <bool BLOCKS>
  __device__ __forceinline__ void begin(int first, const float* weight_scales) {
    static_assert(Stage::SLABS * WARP_ROWS <= CONSUMERS, "a thread has one row's");
    first_ = first;
    const int slab = first + threadIdx.x / WARP_ROWS, row = threadIdx.x % WARP_ROWS;
    const int feature = slab * slabs_.a_slab + row % slabs_.a_slab;
    const bool has = threadIdx.x < Stage::SLABS * WARP_ROWS && slab < slabs_.end && feature < slabs_.features;
    if constexpr (BLOCKS) {
      of_row_ = 1.0f;
    } else {
      of_row_ = has ? weight_scales[feature + row / slabs_.a_slab * slabs_.features] : 0.0f;
    }
  }

  // What earlier kernels have made, so that it is there when the sums are.
  template <bool BLOCKS>
  __device__ __forceinline__ void fetch(const float* x_scales) {
    if constexpr (BLOCKS) {
      of_token_ = 1.0f;
    } else {
      of_token_ = threadIdx.x < num_rows_ ? load_updated(x_scales + threadIdx.x) : 0.0f;
    }
    if constexpr (EARLY) load_added(Item(first_, threadIdx.x));
  }

  // By all threads; of_rows [SLABS * WARP_ROWS], of_tokens [Stage::ROWS]. A barrier must follow.
  __device__ __forceinline__ void share_scales(float* of_rows, float* of_tokens) const {
    if (threadIdx.x < Stage::SLABS * WARP_ROWS) of_rows[threadIdx.x] = of_row_;
    if (threadIdx.x < Stage::ROWS) of_tokens[threadIdx.x] = of_token_;
  }

  __device__ __forceinline__ void store(const float4* parts, const float* of_rows, const float* of_tokens) {
#pragma unroll 1
    for (int i = threadIdx.x; i < ITEMS; i += CONSUMERS) {
      const Item item(first_, i);
      if (item.slab >= slabs_.end || item.token >= num_rows_) continue;
      if constexpr (!EARLY) load_added(item);
      float sums[4];
      add_parts(parts + i, sums);
      const float* const of_slab = of_rows + (item.slab - first_) * WARP_ROWS + item.row;
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[e] *= of_tokens[item.token + e % 2] * of_slab[e / 2 * 8];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!has(item, e)) continue;
        float result = sums[e];
        if (gated_) {
          result = silu_fast(result) * sums[e % 2 + 2];
        } else {
          if (bias_ != nullptr) result += to_float(bias_[feature(item, e)]);
          result += added_[e];
        }
        *at(item, e) = from_float<T>(result);
      }
    }
  }

 private:
  // Sum e is of row e / 2 and of token e % 2.
  struct Item {
    int slab, row, token;  // row: the first of the slab's two

    __device__ __forceinline__ Item(int first, int item) {
      const int place = item % Stage::OWNERS;
      slab = first + item / (Stage::OWNERS * TOKEN_GROUPS) * Stage::TILE_SLABS + place / WARP_SIZE;
      row = place % WARP_SIZE / 4;
      token = item / Stage::OWNERS % TOKEN_GROUPS * 8 + place % 4 * 2;
    }
  };

  __device__ __forceinline__ int feature(const Item& item, int e) const {
    return item.slab * slabs_.a_slab + item.row + e / 2 * 8;
  }
  __device__ __forceinline__ T* at(const Item& item, int e) const {
    return out_ + (item.token + e % 2) * out_stride_ + feature(item, e);
  }
  // Whether the sum gives a result: ups give none.
  __device__ __forceinline__ bool has(const Item& item, int e) const {
    return item.slab < slabs_.end && item.token + e % 2 < num_rows_ && feature(item, e) < slabs_.features &&
           !(gated_ && e >= 2);
  }

  __device__ __forceinline__ void load_added(const Item& item) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      added_[e] = accumulate_ && has(item, e) ? to_float(load_updated(at(item, e))) : 0.0f;
    }
  }

  // In an order that does not depend on which group took which stages.
  static __device__ __forceinline__ void add_parts(const float4* parts, float (&sums)[4]) {
    sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
#pragma unroll
    for (int fold = 0; fold < Stage::FOLD; ++fold) {
      const float4 a = parts[fold * ITEMS], b = parts[(Stage::FOLD + fold) * ITEMS];
      sums[0] += a.x + b.x, sums[1] += a.y + b.y, sums[2] += a.z + b.z, sums[3] += a.w + b.w;
    }
  }

  const BlockSlabs& slabs_;
  const T* const bias_;
  T* const out_;
  const int out_stride_, num_rows_, accumulate_, gated_;
  int first_ = 0;
  float of_row_ = 0.0f, of_token_ = 0.0f, added_[4];
};

// With BLOCKS, the scales of a stage's products: of a token, which the warp passes around, and of this
// thread's two rows of each slab.
template <typename Stage>
struct StageScales {
  float of_token, of_rows[Stage::TILES][2];

  // `first`: slab of the turn; `block`: of k, the last one for what is beyond it and zero.
  __device__ __forceinline__ void load(const BlockSlabs& slabs, int first, int block, int num_blocks,
                                       int num_rows, const float* x_scales, const float* weight_scales) {
    static_assert(Stage::ROWS <= WARP_SIZE, "a lane has one token's");
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE % Stage::TILE_SLABS;
    const bool gated = slabs.a_slab < WARP_ROWS;
    const int rows_between = gated ? slabs.features : WARP_ROWS / 2;
    const int rows = gated ? 2 * slabs.features : slabs.features;
    block = min(block, num_blocks - 1);
    of_token = load_updated(x_scales + block * num_rows + min(lane, num_rows - 1));
#pragma unroll
    for (int tile = 0; tile < Stage::TILES; ++tile) {
      const int slab = min(first + tile * Stage::TILE_SLABS + warp, slabs.end - 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = slab * slabs.a_slab + lane / 4 + half * rows_between;
        of_rows[tile][half] = weight_scales[min(row, rows - 1) / STEP * num_blocks + block];
      }
    }
  }

  // Of one of this thread's tokens; all lanes of a warp call.
  __device__ __forceinline__ float of(int token) const {
    return __shfl_sync(FULL_WARP, of_token, token / 2 * 8 + threadIdx.x % 4 * 2 + token % 2);
  }
};

// This thread's sums of its warp group's stages, in its fold.
template <typename Stage>
struct SlabSums {
  static constexpr int SUMS = Stage::SUMS;
  float of_tiles[Stage::TILES][SUMS];

  // Add a stage's products to them. `offset`: of the stage in the ring, in 16 bytes.
  template <bool BLOCKS>
  __device__ __forceinline__ void add(unsigned long long weight, unsigned long long x, unsigned offset,
                                      int fold, Barrier* empty, const StageScales<Stage>& scales) {
    float products[Stage::TILES][Stage::COLUMNS / 2];
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < Stage::TILES; ++tile) {
#pragma unroll
      for (int k = 0; k < TILE_K / WGMMA_K; ++k) {
        const unsigned behind = offset + k * static_cast<unsigned>(DESCRIPTOR_STEP_K);
        wgmma_e4m3<Stage::COLUMNS>(products[tile],
                                   descriptor_behind(weight, behind + tile * (Stage::TILE_BYTES >> 4)),
                                   descriptor_behind(x, behind), k > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int tile = 0; tile < Stage::TILES; ++tile) hold_registers(products[tile]);
    if (threadIdx.x % WARP_SIZE == 0) barrier_arrive(empty);
    const auto product = [&](int tile, int i) {
      const float lower = products[tile][i], upper = products[tile][(Stage::FOLD - 1) * SUMS + i];
      return Stage::FOLD == 2 && fold == 1 ? upper : lower;
    };
    if constexpr (BLOCKS) {
#pragma unroll
      for (int token = 0; token < SUMS / 2; ++token) {  // of this thread's
        const float scale = scales.of(token);
#pragma unroll
        for (int tile = 0; tile < Stage::TILES; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int i = token / 2 * 4 + half * 2 + token % 2;
            of_tiles[tile][i] = fmaf(product(tile, i), scale * scales.of_rows[tile][half], of_tiles[tile][i]);
          }
        }
      }
    } else {
#pragma unroll
      for (int tile = 0; tile < Stage::TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) of_tiles[tile][i] += product(tile, i);
      }
    }
  }

  // As `SlabResults` takes them.
  __device__ __forceinline__ void leave(float4* parts, int part) const {
    float4* const to =
        parts + part * (Stage::TILES * (SUMS / 4) * Stage::OWNERS) + threadIdx.x % Stage::OWNERS;
#pragma unroll
    for (int i = 0; i < Stage::TILES * (SUMS / 4); ++i) {
      const float* const from = of_tiles[i / (SUMS / 4)] + i % (SUMS / 4) * 4;
      to[i * Stage::OWNERS] = make_float4(from[0], from[1], from[2], from[3]);
    }
  }
};

// A barrier of all warps that multiply.
__device__ __forceinline__ void consumers_sync() { named_barrier_wait<1, CONSUMERS>(); }

// out[m, n] = sum over k of values[m, k] * weight[n, k], times x_scales[m] * weight_scales[n] or, with
// BLOCKS, each 128 of k times x_scales[k / 128, m] * weight_scales[n / 128, k / 128], + bias[n], + out[m, n]
// if `accumulate`; if `gated`, silu(g) * u with g = out[m, n] and u = out[m, n + out_features / 2] of that.
// Sums of 128 of k in the tensor cores, of those in float32, rounded once.
//   in:  maps of x [num_rows, in_features] e4m3, num_rows <= MOST_ROWS, and of weight
//        [out_features, in_features] e4m3, as matrices of 2-byte elements; x_scales [num_rows] or
//        [ceil(in_features / 128), num_rows] float; weight_scales [out_features] or
//        [ceil(out_features / 128), ceil(in_features / 128)] float; bias [out_features] T or null
//   out: out [num_rows, out_features, or half of it if `gated`] T, rows `out_stride` apart; `gated` takes no
//        bias and does not accumulate
// Layout: row-major; in_features a multiple of 16. The map of x has boxes of num_rows rows, that of the
// weight of 16 or, gated, of 8 of both halves.
// Grid: any number of blocks, at most one a slab; they share the weight's slabs evenly.
// Block: 320 threads. Shared memory: `Plan.shared_bytes` in engine/ops/cuda/fp8/sm90_rows.py.
// Unit of work: all of k of up to Stage::SLABS slabs at a time. Two warp groups take stages by turns, and
// with FOLD 2 the upper and the lower half of a product do; in the end all threads add up what they have. The
// order of a result's sums depends on the weight and the grid.
template <typename T, int TILES, int FOLD, int MOST_ROWS, bool BLOCKS>
__global__ void __launch_bounds__(THREADS, 2) sm90_fp8_rows_kernel(SM90_FP8_ROWS_PARAMS(T)) {
  using Stage = RowsStage<TILES, FOLD, MOST_ROWS>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ Barrier full[RING_STAGES], empty[RING_STAGES];
  __shared__ float of_rows[Stage::SLABS * WARP_ROWS], of_tokens[MOST_ROWS];
  const BlockSlabs slabs(out_features, gated);
  const RowsRing ring = {shared_memory, full, empty, stages, ceil_div(in_features, FOLD * STEP)};
  const int warp = uniform(threadIdx.x / WARP_SIZE);
  if (threadIdx.x == 0) {
    prefetch_map(weight_map);
    prefetch_map(x_map);
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      barrier_init(&full[i], 2);
      barrier_init(&empty[i], GROUP_WARPS);
    }
    barrier_init_done();
  }
  __syncthreads();
  if (warp >= CONSUMER_WARPS) {
    if (warp == CONSUMER_WARPS) {
      copy_slabs<Stage>(ring, slabs, weight_map);
    } else {
      copy_rows<Stage>(ring, slabs, x_map, num_rows);
    }
    return;
  }

  const int group = warp / GROUP_WARPS, fold = warp % GROUP_WARPS / Stage::TILE_SLABS;
  const bool is_one_turn = slabs.end - slabs.begin <= Stage::SLABS;  // the ring is free after it
  float4* const parts = reinterpret_cast<float4*>(shared_memory + (is_one_turn ? 0 : stages * Stage::BYTES));
  const unsigned long long weight_descriptor = operand_descriptor(shared_memory);
  const unsigned long long x_descriptor = operand_descriptor(shared_memory + TILES * Stage::TILE_BYTES);
  SlabResults<T, Stage> results(slabs, bias, out, out_stride, num_rows, accumulate, gated);
  RingPosition at;
  if (group == 1) at.advance(stages);
  int step = group;
#pragma unroll 1
  for (int first = slabs.begin; first < slabs.end; first += Stage::SLABS) {
    results.template begin<BLOCKS>(first, weight_scales);
    wait_for_earlier_kernels();
    results.template fetch<BLOCKS>(x_scales);
    SlabSums<Stage> sums = {};
    StageScales<Stage> scales;
#pragma unroll 1
    for (; step < ring.steps; step += GROUPS) {
      if constexpr (BLOCKS) {
        scales.load(slabs, first, step * FOLD + fold, ceil_div(in_features, STEP), num_rows, x_scales,
                    weight_scales);
      }
      barrier_wait(&full[at.stage], at.parity);
      sums.template add<BLOCKS>(weight_descriptor, x_descriptor,
                                at.stage * static_cast<unsigned>(Stage::BYTES >> 4), fold, &empty[at.stage],
                                scales);
      at.advance(stages);
      at.advance(stages);
    }
    step -= ring.steps;
    consumers_sync();  // nobody needs the ring, or the parts before, any more
    results.share_scales(of_rows, of_tokens);
    sums.leave(parts, group * FOLD + fold);
    consumers_sync();
    results.store(parts, of_rows, of_tokens);
  }
}
