// Matrix product for the few rows of a decode step, bound by reading the weight once; with the norm before it
// and the activation or the residual stream behind it.

#include "common.cuh"
#include "copy.cuh"
#include "mma.cuh"

namespace {

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP_SIZE;
constexpr int UNIT = 8;     // rows of the weight that one tensor-core instruction takes
constexpr int STEP_K = 32;  // elements of each row that a warp takes at a time, 16 bytes a lane

}  // namespace

// out[m, n] = sum over k of y[m, k] * weight[n, k], + bias[n], + out[m, n] if accumulate;
// gated: with g = out[m, n] and u = out[m, n + out_features / 2] of that, g / (1 + exp(-g)) * u instead.
// y is x, or where norm is given x / sqrt(mean(x^2) + eps) * norm, rounded to T.
//
// x [num_rows, in_features] T, norm [in_features] T or null, weight [out_features, in_features] T, bias
// [out_features] T or null, out [num_rows, out_features] Out (T or float), gated [num_rows, out_features /
// 2]; num_rows <= TOKENS; sums in float32. Layout: row-major; x, norm and weight 16-byte aligned, in_features
// a multiple of 8, out and its rows aligned to two elements. Grid: any number of blocks; they divide the
// weight's units of 8 rows (gated: 8 gates and their 8 ups) evenly among them. Block: 256 threads. Shared:
// see `Shared` in engine/ops/cuda/decode.py. Unit of work: a block's warps each take every eighth 64 elements
// of k of UNITS units at a time (a tile), and are added in order at its end, so a row's sums depend on
// in_features alone. A lane copies just the weights that it will feed to the tensor cores, through a ring of
// its own, so that no barrier delays the stream: the instruction's k may be in any order that is the same for
// x, and 16 bytes of a row are what lane t needs as elements 2t, 2t+1, 2t+8, 2t+9 of two instructions.
// RESIDENT: y is kept whole in shared memory; else x travels through the ring, once a tile, and norm is null.
template <typename T, typename Out, int TOKENS, int UNITS, int STAGES, bool RESIDENT>
__global__ void __launch_bounds__(THREADS)
    matmul_decode_kernel(const T* x, const T* __restrict__ norm, const T* __restrict__ weight,
                         const T* __restrict__ bias, Out* out, int num_rows, int out_features,
                         int in_features, float eps, int accumulate, int gated) {
  constexpr int GROUPS = TOKENS / 8;  // of 8 tokens
  constexpr int MMAS_M = ceil_div(TOKENS, 16);
  constexpr int CHAINS = UNITS * MMAS_M >= 4 ? 1 : 2;  // independent sums that hide the latency of an mma
  constexpr int LOADS = UNITS + (RESIDENT ? 0 : GROUPS);
  constexpr int ITEMS = ceil_div(UNITS * GROUPS * WARP_SIZE, THREADS);
  static_assert(sizeof(T) == 2, "tensor cores take bfloat16 or float16");
  static_assert(TOKENS == 8 || TOKENS % 16 == 0, "an mma has 16 rows of x, of which 8 may be left out");
  static_assert(STAGES >= 2, "copies need a stage to run ahead in");

  extern __shared__ __align__(128) unsigned char shared_memory[];
  uint4* const ring = reinterpret_cast<uint4*>(shared_memory);
  float2* const partial = reinterpret_cast<float2*>(ring + STAGES * LOADS * THREADS);
  uint4* const resident = reinterpret_cast<uint4*>(partial + WARPS * UNITS * GROUPS * WARP_SIZE);

  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int lane_row = lane / 4;  // of a unit, and of 8 tokens
  const int lane_k = lane % 4 * SEGMENT;

  const int features = gated ? out_features / 2 : out_features;
  const int units_a_tile = gated ? UNITS / 2 : UNITS;
  const int num_units = ceil_div(features, UNIT);
  const int units_begin = static_cast<int>(static_cast<long long>(num_units) * blockIdx.x / gridDim.x);
  const int units_end = static_cast<int>(static_cast<long long>(num_units) * (blockIdx.x + 1) / gridDim.x);
  const int num_tiles = ceil_div(units_end - units_begin, units_a_tile);
  const int steps = ceil_div(in_features, 2 * STEP_K * WARPS) * 2;
  auto step_k = [&](int step) { return (step / 2 * WARPS + warp) * 2 * STEP_K + step % 2 * STEP_K; };

  // The copies run ahead of the products and have their own place in the sequence of tiles and steps.
  int load_tile = 0;
  int load_step = 0;
  int load_slot = 0;
  const T* load_from = weight;
  int load_units = 0;  // that this lane has a row in
  auto start_tile = [&] {
    const int unit = units_begin + load_tile * units_a_tile;
    const int row = unit * UNIT + lane_row;
    load_from = weight + static_cast<long long>(row) * in_features;
    load_units = min(min(units_end - unit, units_a_tile), (features - row + UNIT - 1) / UNIT);
  };
  auto load_x = [&](int slot, int k) {
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      const int token = i * 8 + lane_row;
      const bool valid = token < num_rows && k < in_features;
      const T* from = x + (valid ? static_cast<long long>(token) * in_features + k : 0);
      copy_async_16(ring + (slot * LOADS + UNITS + i) * THREADS + threadIdx.x, from, valid);
    }
  };
  auto load_weight = [&] {
    if (load_step == 0) start_tile();
    const int k = step_k(load_step) + lane_k;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const int unit = u < units_a_tile ? u : u - units_a_tile;
      const long long row = unit * UNIT + (u < units_a_tile ? 0 : features);
      const bool valid = unit < load_units && k < in_features;
      copy_async_16(ring + (load_slot * LOADS + u) * THREADS + threadIdx.x,
                    valid ? load_from + row * in_features + k : weight, valid);
    }
  };
  auto advance_load = [&] {
    load_slot = load_slot + 1 == STAGES ? 0 : load_slot + 1;
    if (++load_step == steps) {
      load_step = 0;
      ++load_tile;
    }
  };

  const int vectors = steps * WARPS * STEP_K / SEGMENT;  // of y's row, with the zeros that fill the last step
  uint4* const gains = resident + vectors * num_rows;
  if (RESIDENT && norm != nullptr) {
    for (int v = threadIdx.x; v < vectors; v += THREADS) {
      const bool valid = v * SEGMENT < in_features;
      copy_async_16(gains + v, valid ? norm + v * SEGMENT : norm, valid);
    }
  }
  copy_async_commit();
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    if (load_tile < num_tiles) load_weight();
    copy_async_commit();
    advance_load();
  }
  let_next_kernel_start();
  wait_for_earlier_kernels();

  if constexpr (RESIDENT) {
    float squares[TOKENS] = {};
    for (int v = threadIdx.x; v < vectors; v += THREADS) {
      Vec<T, SEGMENT> values[TOKENS];
#pragma unroll
      for (int m = 0; m < TOKENS; ++m) {
        uint4& raw = reinterpret_cast<uint4&>(values[m]);
        raw = make_uint4(0, 0, 0, 0);
        if (m < num_rows && v * SEGMENT < in_features) {
          load_l2(raw, x + static_cast<long long>(m) * in_features + v * SEGMENT);
        }
      }
#pragma unroll
      for (int m = 0; m < TOKENS; ++m) {
        if (m >= num_rows) break;
        resident[v / 4 * 4 * num_rows + m * 4 + v % 4] = reinterpret_cast<const uint4&>(values[m]);
        if (norm == nullptr) continue;
#pragma unroll
        for (int e = 0; e < SEGMENT; ++e)
          squares[m] = fmaf(to_float(values[m][e]), to_float(values[m][e]), squares[m]);
      }
    }
    if (norm != nullptr) {
      float* const sums = reinterpret_cast<float*>(partial);
#pragma unroll
      for (int m = 0; m < TOKENS; ++m) {
        if (m >= num_rows) break;
        squares[m] = warp_sum(squares[m]);
        if (lane == 0) sums[m * WARPS + warp] = squares[m];
      }
      copy_async_wait<STAGES>();
      __syncthreads();
#pragma unroll
      for (int m = 0; m < TOKENS; ++m) {
        if (m >= num_rows) break;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += sums[m * WARPS + w];
        squares[m] = rsqrtf(sum / in_features + eps);
      }
      for (int v = threadIdx.x; v < vectors; v += THREADS) {
        const Vec<T, SEGMENT> gain = reinterpret_cast<const Vec<T, SEGMENT>&>(gains[v]);
#pragma unroll
        for (int m = 0; m < TOKENS; ++m) {
          if (m >= num_rows) break;
          uint4& slot = resident[v / 4 * 4 * num_rows + m * 4 + v % 4];
          Vec<T, SEGMENT> values = reinterpret_cast<const Vec<T, SEGMENT>&>(slot);
#pragma unroll
          for (int e = 0; e < SEGMENT; ++e) {
            values[e] = from_float<T>(to_float(values[e]) * squares[m] * to_float(gain[e]));
          }
          slot = reinterpret_cast<const uint4&>(values);
        }
      }
    }
    __syncthreads();
  } else {
    int step = 0;
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      if (stage < num_tiles * steps) load_x(stage, step_k(step) + lane_k);
      copy_async_commit();
      step = step + 1 == steps ? 0 : step + 1;
    }
  }

  int slot = 0;
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int tile_unit = units_begin + tile * units_a_tile;

    // What the sums are added to is fetched now, so that it is there when they are.
    float2 offsets[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item = i * THREADS + threadIdx.x;
      const int unit = tile_unit + item / WARP_SIZE / GROUPS;
      const int token = item / WARP_SIZE % GROUPS * 8 + lane_row;
      const int column = unit * UNIT + lane % 4 * 2;
      offsets[i] = make_float2(0.0f, 0.0f);
      if (token >= num_rows || unit >= units_end || column >= features) continue;
      if (bias != nullptr) offsets[i] = make_float2(to_float(bias[column]), to_float(bias[column + 1]));
      if (accumulate) {
        Vec<Out, 2> old;
        load_l2(reinterpret_cast<typename Vec<Out, 2>::Raw&>(old),
                out + static_cast<long long>(token) * features + column);
        offsets[i].x += to_float(old[0]);
        offsets[i].y += to_float(old[1]);
      }
    }

    float sums[CHAINS][UNITS][MMAS_M][4] = {};
    for (int step = 0; step < steps; ++step) {
      copy_async_wait<STAGES - 1>();
      const uint4* const stage = ring + slot * LOADS * THREADS + threadIdx.x;
      uint4 tokens[MMAS_M * 2];
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        if constexpr (RESIDENT) {
          const int token = min(i * 8 + lane_row, num_rows - 1);  // what has no token is not stored
          tokens[i] = resident[(step_k(step) / STEP_K * num_rows + token) * 4 + lane % 4];
        } else {
          tokens[i] = stage[(UNITS + i) * THREADS];
        }
      }
      if constexpr (GROUPS == 1) tokens[1] = make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        const uint4 w = stage[u * THREADS];
#pragma unroll
        for (int i = 0; i < MMAS_M; ++i) {
          const uint4& low = tokens[i * 2];
          const uint4& high = tokens[i * 2 + 1];
          mma_m16n8k16<T>(sums[0][u][i], {low.x, high.x, low.y, high.y}, {w.x, w.y});
          mma_m16n8k16<T>(sums[CHAINS - 1][u][i], {low.z, high.z, low.w, high.w}, {w.z, w.w});
        }
      }
      if (load_tile < num_tiles) {
        load_weight();
        if constexpr (!RESIDENT) load_x(load_slot, step_k(load_step) + lane_k);
      }
      copy_async_commit();
      advance_load();
      slot = slot + 1 == STAGES ? 0 : slot + 1;
    }

    if (tile > 0) __syncthreads();  // the partial sums of the tile before may still be in use
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        float2 pair;
        pair.x = sums[0][u][i / 2][i % 2 * 2];
        pair.y = sums[0][u][i / 2][i % 2 * 2 + 1];
        if constexpr (CHAINS > 1) {
          pair.x += sums[1][u][i / 2][i % 2 * 2];
          pair.y += sums[1][u][i / 2][i % 2 * 2 + 1];
        }
        if (i * 8 + lane_row < num_rows) partial[((warp * UNITS + u) * GROUPS + i) * WARP_SIZE + lane] = pair;
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item = i * THREADS + threadIdx.x;
      const int u = item / WARP_SIZE / GROUPS;
      const int token = item / WARP_SIZE % GROUPS * 8 + lane_row;
      const int column = (tile_unit + u) * UNIT + lane % 4 * 2;
      if (u >= units_a_tile || token >= num_rows || tile_unit + u >= units_end || column >= features)
        continue;
      auto total = [&](int first) {
        float2 sum = partial[first];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) {
          const float2 other = partial[w * UNITS * GROUPS * WARP_SIZE + first];
          sum.x += other.x;
          sum.y += other.y;
        }
        return sum;
      };
      float2 result = total(item);
      if (gated) {
        const float2 up = total(item + units_a_tile * GROUPS * WARP_SIZE);
        result.x = up.x * (result.x / (1.0f + expf(-result.x)));
        result.y = up.y * (result.y / (1.0f + expf(-result.y)));
      } else {
        result.x += offsets[i].x;
        result.y += offsets[i].y;
      }
      const Vec<Out, 2> pair = {from_float<Out>(result.x), from_float<Out>(result.y)};
      pair.store(out + static_cast<long long>(token) * features + column);
    }
  }
}
