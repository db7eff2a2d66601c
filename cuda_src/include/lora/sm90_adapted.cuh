// Products on sm_90a that add what adapters have of each row: B passes through the ring as the weight does,
// and is multiplied with the sums with A half-way along k, while the ring fills up behind it.
#pragma once

#include "generated/sm90_adapted.cuh"
#include "linear/sm90_matmul.cuh"
#include "lora/lora_expand.cuh"

static_assert(LORA_RANKS == 16, "ranks are one mma's k");
constexpr int SLOTS_OF_STAGE = TILE_K / LORA_RANKS;  // a slot's B beside a column is LORA_RANKS elements
constexpr int LINE_COLUMNS = 64 / LORA_RANKS;        // of the product, whose B is one line of b_map

// The bits of all lanes.
__device__ __forceinline__ unsigned warp_or(unsigned bits) {
#pragma unroll
  for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) {
    bits |= __shfl_xor_sync(FULL_WARP, bits, offset);
  }
  return bits;
}

// The slots whose B this block multiplies, a bit each, and the barrier that says that they are known: a warp
// that multiplies finds them, which waits for nothing in this block, and all others ask for them.
struct OwnSlots {
  Barrier known;
  unsigned mask;

  // By one thread, before a barrier of the block.
  __device__ __forceinline__ void begin() {
    barrier_init(&known, 1);
    barrier_init_done();
  }
  // By one warp, once.
  __device__ __forceinline__ void tell(unsigned found) {
    if (threadIdx.x % WARP_SIZE != 0) return;
    mask = found;
    barrier_arrive(&known);
  }
  __device__ __forceinline__ unsigned ask() {
    barrier_wait(&known, 0);
    return *static_cast<volatile unsigned*>(&mask);
  }
};

// The adapters of a weight and what was multiplied with A; see sm90_adapted_matmul_kernel.
struct AdapterSums {
  const float* shrunk;
  const float* inverses;
  const float* factors;
  const int* ranks;
  const int* slots;
  int num_rows, num_slots, parts, slices;

  // Of slots below WARP_SIZE that rows name and that have an adapter of this weight, those of block `split`
  // of a cluster: which one depends on the slot alone. By a whole warp; adapters and slots are read without a
  // wait, as group_rows_kernel lets no kernel start before they are there.
  __device__ __forceinline__ unsigned find_own(int split, int splits) const {
    const int lane = threadIdx.x % WARP_SIZE;
    const int slot = min(lane, num_slots - 1);
    bool adapts = false;
#pragma unroll
    for (int part = 0; part < LORA_PARTS; ++part) {
      adapts |= load_updated(factors + slot * parts + min(part, parts - 1)) != 0.0f;
    }
    adapts &= lane < num_slots && load_updated(ranks + slot) > 0 && lane % splits == split;
    unsigned named = 0;
#pragma unroll
    for (int first = 0; first < WGMMA_M; first += WARP_SIZE) {
      const int of_row = first + lane < num_rows ? load_updated(slots + first + lane) : -1;
      if (of_row >= 0) named |= 1u << of_row;
    }
    return warp_or(named) & __ballot_sync(FULL_WARP, adapts);
  }
};

// Takes the lowest slot out of a mask.
__device__ __forceinline__ int take_slot(unsigned& mask) {
  const int slot = __ffs(static_cast<int>(mask)) - 1;
  mask &= mask - 1;
  return slot;
}

// Fills the ring of a product with adapters: half-way along k of each tile come stages of B, the same ones in
// all threads that copy or multiply. b_map: B as lines of 64 elements, in boxes of a tile's columns, of half
// of them if `gated`.
template <typename V, bool GATED>
struct AdaptedSteps {
  using T = typename V::T;
  static constexpr int BOX_COLUMNS = GATED ? V::TILE_N / 2 : V::TILE_N;
  static_assert(SLOTS_OF_STAGE * V::TILE_N * LORA_RANKS == V::WEIGHT_ELEMENTS, "B takes the weight's room");

  const TensorMap& b_map;
  OwnSlots& own;
  int out_features;

  template <typename Copy>
  __device__ __forceinline__ RingPosition operator()(const Work<1>& work, Barrier* empty,
                                                     const Copy& copy) const {
    RingPosition at;
    const int middle = work.num_steps / 2;
#pragma unroll 1
    for (int index = work.first; index < work.tiles_m * work.tiles_n; index += work.stride) {
      const int2 tile = work.tile(index);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const int end = half == 0 ? middle : work.num_steps;
#pragma unroll 1
        for (int step = half == 0 ? 0 : middle; step < end; ++step) {
          barrier_wait(&empty[at.stage], at.parity ^ 1);
          copy(tile, (work.first_step + step) * TILE_K, at.stage);
          at.advance(work.stages);
        }
        if (half == 1) continue;
#pragma unroll 1
        for (unsigned left = own.ask(); left != 0;) {
          barrier_wait(&empty[at.stage], at.parity ^ 1);
          copy_b(copy, tile, left, at.stage);
          at.advance(work.stages);
        }
      }
    }
    return at;
  }

  // A stage of B has no part of x.
  __device__ __forceinline__ void copy_b(const RowCopies<V>& copy, int2, unsigned& left, int stage) const {
#pragma unroll
    for (int i = 0; i < SLOTS_OF_STAGE; ++i) left &= left - 1;
    barrier_arrive(&copy.full[stage]);
  }
  __device__ __forceinline__ void copy_b(const WeightCopies<V>& copy, int2 tile, unsigned& left,
                                         int stage) const {
    const int count = min(__popc(left), SLOTS_OF_STAGE);
    barrier_arrive_expecting(&copy.full[stage], count * V::TILE_N * LORA_RANKS * sizeof(T));
    T* to = copy.ring + stage * V::STAGE_ELEMENTS + V::X_ELEMENTS;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int column = take_slot(left) * out_features + tile.y * BOX_COLUMNS;
#pragma unroll
      for (int part = 0; part < (GATED ? 2 : 1); ++part, to += BOX_COLUMNS * LORA_RANKS) {
        const int line = (column + part * (out_features / 2)) / LINE_COLUMNS;
        copy_box(to, b_map, line, 0, &copy.full[stage], copy.policy);
      }
    }
  }
};

// Of rows g and 8 + g of a warp the sums with A, as mma's first operand: of its four registers 0 and 2 are
// ranks 4 t to 4 t + 3 of row g, 1 and 3 those of row 8 + g. PARTS: of the columns that a warp group has.
template <typename T, int PARTS>
struct RowSums {
  int slots[2];       // -1: none
  unsigned named[2];  // the slots of the warp's rows, a bit each
  int ranks[2];
  float factors[2][PARTS];
  unsigned high[PARTS][4], low[PARTS][4];

  __device__ __forceinline__ void find_slots(const AdapterSums& sums, int row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      slots[half] = row + 8 * half < sums.num_rows ? load_updated(sums.slots + row + 8 * half) : -1;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) named[half] = warp_or(slots[half] >= 0 ? 1u << slots[half] : 0);
  }

  // Of the parts from `part` on. Adapters are read without a wait, as slots are.
  __device__ __forceinline__ void find_factors(const AdapterSums& sums, int part) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_adapted = slots[half] >= 0;
      ranks[half] = is_adapted ? load_updated(sums.ranks + slots[half]) : 0;
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        const float* const from = sums.factors + slots[half] * sums.parts + part + p;
        factors[half][p] = is_adapted ? load_updated(from) : 0.0f;
      }
    }
  }

  // Of the same parts: factor * the sum of the slices in their order, 0 without an adapter.
  __device__ __forceinline__ void load(const AdapterSums& sums, int row, int part) {
    constexpr int BATCH = 8 / PARTS;  // slices whose sums are under way at a time
    const int first = threadIdx.x % 4 * 4;
    const float* from[2][PARTS];
    float inverses[2];
    float4 totals[2][PARTS] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own_row = row + 8 * half;
      const bool is_normed = slots[half] >= 0 && sums.inverses != nullptr;
      inverses[half] = is_normed ? load_updated(sums.inverses + own_row) : 1.0f;
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        from[half][p] = sums.shrunk + (own_row * sums.parts + part + p) * LORA_RANKS + first;
      }
    }
    const long long stride = static_cast<long long>(sums.num_rows) * sums.parts * LORA_RANKS;
#pragma unroll 1
    for (int slice = 0; slice < sums.slices; slice += BATCH) {
      float4 loaded[BATCH][2][PARTS];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int p = 0; p < PARTS; ++p) {
            const bool is_there = slice + i < sums.slices && first < ranks[half] && factors[half][p] != 0.0f;
            const float4* const place = reinterpret_cast<const float4*>(from[half][p] + (slice + i) * stride);
            loaded[i][half][p] = is_there ? load_updated(place) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int p = 0; p < PARTS; ++p) {
            totals[half][p].x += loaded[i][half][p].x;
            totals[half][p].y += loaded[i][half][p].y;
            totals[half][p].z += loaded[i][half][p].z;
            totals[half][p].w += loaded[i][half][p].w;
          }
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        // Behind the slot's rank nothing was written.
        const float4 total = totals[half][p];
        const float values[4] = {total.x, total.y, total.z, total.w};
        const float scale = factors[half][p] * inverses[half];
        T highs[4], lows[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float value = first + i < ranks[half] ? values[i] * scale : 0.0f;
          split_sum(value, highs[i], lows[i]);
        }
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          high[p][2 * pair + half] = pack_elements(highs[2 * pair], highs[2 * pair + 1]);
          low[p][2 * pair + half] = pack_elements(lows[2 * pair], lows[2 * pair + 1]);
        }
      }
    }
  }

  static __device__ __forceinline__ unsigned pack_elements(T first, T second) {
    const Vec<T, 2> pair = {first, second};
    return __builtin_bit_cast(unsigned, pair);
  }
};

// The products with B of a warp's rows, in the layout of wgmma's sums.
template <typename V, bool GATED>
struct AdaptedColumns {
  using T = typename V::T;
  static constexpr int BLOCKS = V::WARPGROUP_N / 8;
  static constexpr int PARTS = GATED ? 2 : 1;
  static constexpr int PART_BLOCKS = BLOCKS / PARTS;
  static constexpr int SLOT_ELEMENTS = V::TILE_N * LORA_RANKS;

  // Of rows g, and of rows 8 + g: the products of the high elements of the sums with A, then of the low ones.
  float sums[2][BLOCKS][4];
  RowSums<T, PARTS> rows;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[half][j][i] = 0.0f;
      }
    }
  }

  // += those of a slot, whose B for the tile's columns begins at `b`. Both elements of a row's sums are rows
  // of one product, as few slots have rows in both halves.
  __device__ __forceinline__ void add_slot(const T* b, int slot, int warpgroup_n) {
    if (((rows.named[0] | rows.named[1]) >> slot & 1) == 0) return;
    const int lane = threadIdx.x % WARP_SIZE;
    const T* const own = b + (warpgroup_n * PART_BLOCKS * 8 + lane / 4) * LORA_RANKS + lane % 4 * 4;
    uint2 weights[BLOCKS];
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
      const int column = j / PART_BLOCKS * (V::TILE_N / PARTS) + j % PART_BLOCKS * 8;
      weights[j] = *reinterpret_cast<const uint2*>(own + column * LORA_RANKS);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if ((rows.named[half] >> slot & 1) == 0) continue;
      unsigned values[PARTS][4];
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const unsigned value = i % 2 == 0 ? rows.high[p][i + half] : rows.low[p][i - 1 + half];
          values[p][i] = rows.slots[half] == slot ? value : 0;
        }
      }
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) {
        mma_m16n8k16<T>(sums[half][j], values[j / PART_BLOCKS], {weights[j].x, weights[j].y});
      }
    }
  }

  // Rows without an adapter keep every bit.
  __device__ __forceinline__ void add_to(float (&product)[V::WARPGROUP_N / 2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (rows.slots[half] < 0) continue;
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) {
        product[4 * j + 2 * half] += sums[half][j][0] + sums[half][j][2];
        product[4 * j + 2 * half + 1] += sums[half][j][1] + sums[half][j][3];
      }
    }
  }
};
