// Low-rank adapters of several models beside one product: see engine/formats/lora.py. Groups of rows, and
// products of elements that products.cu does not take.

#include "common.cuh"
#include "generated/lora.cuh"

// Calls visit(row) for the rows of a slot in their order; -1: for none. staged [LORA_STAGED]: shared memory.
template <typename Visit>
__device__ __forceinline__ void for_each_row_of(int slot, const int* slots, int num_rows, int* staged,
                                                Visit visit) {
  for (int first = 0; first < num_rows; first += LORA_STAGED) {
    const int count = min(static_cast<int>(LORA_STAGED), num_rows - first);
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) staged[i] = load_updated(slots + first + i);
    __syncthreads();
    for (int i = 0; slot >= 0 && i < count; ++i) {
      if (staged[i] == slot) visit(first + i);
    }
  }
}

// groups = the rows with an adapter sorted by slot, and tiles of at most LORA_ROWS of them that share a slot.
//   in:  slots [num_rows] int, below num_slots; below 0: no adapter
//   out: groups [num_rows + 3 * num_tiles] int: the sorted rows; of each tile its slot, the place of its
//        first row and its number of rows, 0 for a tile that is not needed
// Layout: contiguous.
// Grid: one block. Block: at least num_slots threads. Shared memory: none dynamic.
// Unit of work: a thread a slot, which looks at all rows.
__global__ void __launch_bounds__(LORA_SLOTS) group_rows_kernel(GROUP_ROWS_PARAMS) {
  __shared__ int staged[LORA_STAGED];
  __shared__ int row_starts[LORA_SLOTS + 1];
  __shared__ int tile_starts[LORA_SLOTS + 1];
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const int slot = threadIdx.x;
  const bool is_slot = slot < num_slots;
  int* const tiles = groups + num_rows;
  int count = 0;
  for_each_row_of(is_slot ? slot : -1, slots, num_rows, staged, [&](int) { ++count; });
  if (is_slot) {
    row_starts[slot + 1] = count;
    tile_starts[slot + 1] = ceil_div(count, static_cast<int>(LORA_ROWS));
  }
  __syncthreads();
  if (slot == 0) {
    row_starts[0] = tile_starts[0] = 0;
    for (int i = 0; i < num_slots; ++i) {
      row_starts[i + 1] += row_starts[i];
      tile_starts[i + 1] += tile_starts[i];
    }
  }
  __syncthreads();
  const int begin = is_slot ? row_starts[slot] : 0;
  int place = begin;
  for_each_row_of(is_slot ? slot : -1, slots, num_rows, staged, [&](int row) { groups[place++] = row; });
  const int last_tile = is_slot ? tile_starts[slot + 1] : 0;
  for (int tile = is_slot ? tile_starts[slot] : 0, done = 0; tile < last_tile; ++tile, done += LORA_ROWS) {
    tiles[3 * tile] = slot;
    tiles[3 * tile + 1] = begin + done;
    tiles[3 * tile + 2] = min(static_cast<int>(LORA_ROWS), count - done);
  }
  for (int tile = tile_starts[num_slots] + threadIdx.x; tile < num_tiles; tile += blockDim.x) {
    tiles[3 * tile] = tiles[3 * tile + 1] = tiles[3 * tile + 2] = 0;
  }
}

// shrunk[row, p, r] = factors[slot, p] * sum over k of x[row, k] * a[slot, p, r, k], for r below the slot's
// rank.
//   in:  x [num_rows, width] T; a [slots, parts, max_rank, width] T; factors [slots, parts] float;
//        ranks [slots] int; groups of group_rows_kernel
//   out: shrunk [num_rows, parts, max_rank] float; only rows with an adapter are written
// Layout: row-major; 16-byte loads where addresses allow them.
// Grid: tiles, parts, blocks of LORA_RANKS of the ranks. Block: LORA_SHRINK_WARPS warps. Shared memory: none.
// Unit of work: a tile by LORA_RANKS ranks of a part; a warp LORA_WARP_RANKS of them. The order of a row's
// sums depends on the width alone.
template <typename T>
__global__ void __launch_bounds__(LORA_SHRINK_WARPS* WARP_SIZE)
    lora_shrink_any_kernel(LORA_SHRINK_ANY_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  static_assert(LORA_RANKS == LORA_SHRINK_WARPS * LORA_WARP_RANKS, "the warps share a block's ranks");
  static_assert(LORA_ROWS <= WARP_SIZE, "a lane knows each row of a tile");
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int* const tile = groups + num_rows + 3 * blockIdx.x;
  const int count = load_updated(tile + 2);
  if (count == 0) return;
  const int slot = load_updated(tile), begin = load_updated(tile + 1);
  const int part = blockIdx.y;
  const int rank = load_updated(ranks + slot);
  const int first = blockIdx.z * LORA_RANKS + warp * LORA_WARP_RANKS;
  if (first >= rank) return;

  const int of_lane = lane < count ? load_updated(groups + begin + lane) : 0;
  int rows[LORA_ROWS];
#pragma unroll
  for (int i = 0; i < LORA_ROWS; ++i) rows[i] = __shfl_sync(FULL_WARP, of_lane, i);
  const float factor = load_updated(factors + slot * parts + part);
  const T* const matrix = a + (static_cast<long long>(slot * parts + part) * max_rank + first) * width;
  float sums[LORA_WARP_RANKS][LORA_ROWS] = {};
  for (int k = lane * CHUNK; factor != 0.0f && k < width; k += WARP_SIZE * CHUNK) {
    float weights[LORA_WARP_RANKS][CHUNK] = {};
#pragma unroll
    for (int j = 0; j < LORA_WARP_RANKS; ++j) {
      if (first + j < rank) {
        load_updated_floats(matrix + static_cast<long long>(j) * width + k, width - k, weights[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < LORA_ROWS; ++i) {
      if (i >= count) continue;
      float values[CHUNK];
      load_updated_floats(x + static_cast<long long>(rows[i]) * width + k, width - k, values);
#pragma unroll
      for (int j = 0; j < LORA_WARP_RANKS; ++j) {
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) sums[j][i] += weights[j][c] * values[c];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < LORA_ROWS; ++i) {
    if (i >= count) continue;
    float* const target = shrunk + (static_cast<long long>(rows[i]) * parts + part) * max_rank + first;
#pragma unroll
    for (int j = 0; j < LORA_WARP_RANKS; ++j) {
      const float total = warp_sum(sums[j][i]);
      if (lane == 0 && first + j < rank) target[j] = factor * total;
    }
  }
}

// out[row, n] += sum over r of shrunk[row, p, r] * b[slot, n, r], rounded once; p is the part that n is in.
//   in:  shrunk [num_rows, parts, max_rank] float; b [slots, features, max_rank] T, 0 from the slot's rank
//   on;
//        ranks [slots] int; groups of group_rows_kernel; part 1 begins at feature `second`, part 2 at `third`
//   out: out [num_rows, features] T, which is added to; only rows with an adapter are written
// Layout: row-major; max_rank is a multiple of CHUNK; 16-byte loads where addresses allow them.
// Grid: tiles, blocks of LORA_FEATURES features. Block: LORA_FEATURES threads. Shared memory: none dynamic.
// Unit of work: a thread a feature of all rows of a tile; LORA_STAGE ranks at a time are in shared memory.
template <typename T>
__global__ void __launch_bounds__(LORA_FEATURES) lora_expand_any_kernel(LORA_EXPAND_ANY_PARAMS(T)) {
  ASSERT_ELEMENT(T);
  static_assert(LORA_STAGE % CHUNK == 0, "a stage is whole chunks");
  __shared__ float staged[LORA_ROWS][LORA_PARTS][LORA_STAGE];
  __shared__ int rows[LORA_ROWS];
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const int* const tile = groups + num_rows + 3 * blockIdx.x;
  const int count = load_updated(tile + 2);
  if (count == 0) return;
  const int slot = load_updated(tile), begin = load_updated(tile + 1);
  const int rank = load_updated(ranks + slot);
  if (rank == 0) return;
  if (threadIdx.x < count) rows[threadIdx.x] = load_updated(groups + begin + threadIdx.x);
  const int feature = blockIdx.y * LORA_FEATURES + threadIdx.x;
  const int part = (feature >= second) + (feature >= third);
  const T* const weights = b + (static_cast<long long>(slot) * features + feature) * max_rank;
  float sums[LORA_ROWS] = {};
  for (int base = 0; base < rank; base += LORA_STAGE) {
    __syncthreads();
    for (int i = threadIdx.x; i < count * parts * LORA_STAGE; i += LORA_FEATURES) {
      const int r = i % LORA_STAGE, p = i / LORA_STAGE % parts, row = i / LORA_STAGE / parts;
      const long long source = (static_cast<long long>(rows[row]) * parts + p) * max_rank + base + r;
      staged[row][p][r] = base + r < rank ? load_updated(shrunk + source) : 0.0f;
    }
    __syncthreads();
    if (feature >= features) continue;
    for (int r = 0; r < LORA_STAGE && base + r < rank; r += CHUNK) {
      float values[CHUNK];
      load_updated_floats(weights + base + r, max_rank - base - r, values);
#pragma unroll
      for (int i = 0; i < LORA_ROWS; ++i) {
        if (i >= count) continue;
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) sums[i] += staged[i][part][r + c] * values[c];
      }
    }
  }
  if (feature >= features) return;
#pragma unroll
  for (int i = 0; i < LORA_ROWS; ++i) {
    if (i >= count) continue;
    T* const target = out + static_cast<long long>(rows[i]) * features + feature;
    *target = from_float<T>(to_float(load_updated(target)) + sums[i]);
  }
}
