// Matrix product for the few rows of a decode step, bound by reading the weight once; with the norm before it
// and the activation or the residual stream behind it.

#include "common.cuh"
#include "generated/matmul_decode.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"

constexpr int THREADS = WARPS * WARP_SIZE;

// A multiprocessor has room for the blocks of the next kernels, which fill their rings while this one runs.
template <int TOKENS, int UNITS>
constexpr int MIN_BLOCKS = UNITS > 6     ? 1
                           : TOKENS <= 8 ? 3
                                         : 2;

template <typename T>
struct pair_of {
  using type = __half2;
};
template <>
struct pair_of<__nv_bfloat16> {
  using type = __nv_bfloat162;
};

template <typename Pair>
__device__ __forceinline__ unsigned multiply_pair(unsigned a, unsigned b) {
  const Pair product = __hmul2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const unsigned&>(product);
}

// sum + the squares of eight elements.
template <typename T>
__device__ __forceinline__ float add_squares(float sum, const uint4& raw) {
  const Vec<T, SEGMENT> values = reinterpret_cast<const Vec<T, SEGMENT>&>(raw);
#pragma unroll
  for (int e = 0; e < SEGMENT; ++e) sum = fmaf(to_float(values[e]), to_float(values[e]), sum);
  return sum;
}

// Products of eight elements and eight others, rounded to T.
template <typename T>
__device__ __forceinline__ uint4 multiply_elements(const uint4& a, const uint4& b) {
  using Pair = typename pair_of<T>::type;
  return make_uint4(multiply_pair<Pair>(a.x, b.x), multiply_pair<Pair>(a.y, b.y),
                    multiply_pair<Pair>(a.z, b.z), multiply_pair<Pair>(a.w, b.w));
}

// out[m, n] = sum over k of y[m, k] * weight[n, k], + bias[n], + out[m, n] if accumulate;
// gated: with g = out[m, n] and u = out[m, n + out_features / 2] of that, g / (1 + exp(-g)) * u instead.
// y is x, or where norm is given x / sqrt(mean(x^2) + eps) * norm. In T with the range of a float, x * norm
// is rounded to T and the sums are divided by the root, so that nothing waits for it; else y is rounded to T.
//
// x [num_rows, in_features] T, norm [in_features] T or null, weight [out_features, in_features] T, bias
// [out_features] T or null, out [num_rows, out_features] Out (T or float), gated [num_rows, out_features /
// 2]; num_rows <= TOKENS; sums in float32. A gated product has no bias and does not accumulate. Layout:
// row-major; x, norm and weight 16-byte aligned, in_features a multiple of 8, out and its rows aligned to two
// elements. Grid: any number of blocks; they divide the weight's units of 8 rows (gated: 8 gates and their 8
// ups) evenly among them. Block: 256 threads. Shared: `DecodeTile.shared_bytes` in
// engine/ops/cuda/linear/decode.py.
//
// Unit of work: a block's warps take every eighth step of k each, of UNITS units at a time (a tile), and are
// added in order at its end, so the order of a row's sums depends on in_features, UNITS and HALVES alone. A
// lane copies just the weights that it will feed to the tensor cores, through a ring of its own, so that no
// barrier delays the stream: the k of an instruction may be in any order that is the same for x and weight,
// and 16 bytes of a row are what lane t needs as elements 2t, 2t+1, 2t+8, 2t+9 of two instructions. One row
// of y (TOKENS = 1) stays in shared memory; more rows of x travel through the ring, once a tile, and meet the
// norm on their way to the tensor cores, for T with the range of a float alone.
template <typename T, typename Out, int TOKENS, int UNITS, int STAGES, int HALVES>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS<TOKENS, UNITS>)
    matmul_decode_kernel(MATMUL_DECODE_PARAMS(T, Out)) {
  constexpr bool RESIDENT = TOKENS == 1;
  constexpr bool SCALES_SUMS = has_float_range<T>;
  constexpr int GROUPS = ceil_div(TOKENS, 8);  // of 8 tokens
  constexpr int MMAS_M = ceil_div(TOKENS, 16);
  constexpr int CHAINS = UNITS * MMAS_M >= 4 ? 1 : 2;  // independent sums that hide the latency of an mma
  constexpr int STEP_K = HALVES * HALF_K;              // elements of each row that a warp takes at a time
  constexpr int STEP_VECTORS = STEP_K / SEGMENT;
  constexpr int LOADS = HALVES * (UNITS + (RESIDENT ? 0 : GROUPS));
  constexpr int ITEMS = ceil_div(UNITS * GROUPS * WARP_SIZE, THREADS);
  static_assert(sizeof(T) == 2, "tensor cores take bfloat16 or float16");
  static_assert(TOKENS == 1 || TOKENS == 8 || TOKENS % 16 == 0,
                "an mma has 16 rows of x, of which 8 may be left out");
  static_assert(STAGES >= 2, "copies need a stage to run ahead in");
  using Vector = Vec<T, SEGMENT>;

  extern __shared__ __align__(128) unsigned char shared_memory[];
  uint4* const ring = reinterpret_cast<uint4*>(shared_memory);
  float2* const partial = reinterpret_cast<float2*>(ring + STAGES * LOADS * THREADS);
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int lane_row = lane / 4;  // of a unit, and of 8 tokens
  const int lane_k = lane % 4 * SEGMENT;

  const int features = gated ? out_features / 2 : out_features;
  const int units_a_tile = gated ? UNITS / 2 : UNITS;
  const int num_units = ceil_div(features, UNIT);
  const int block = blockIdx.x;
  const int units_a_block = num_units / static_cast<int>(gridDim.x);
  const int one_more = num_units - units_a_block * static_cast<int>(gridDim.x);  // blocks with one more
  const int units_begin = block * units_a_block + min(block, one_more);
  const int units_end = units_begin + units_a_block + (block < one_more ? 1 : 0);
  const int num_tiles = gated ? ceil_div(units_end - units_begin, UNITS / 2 + (UNITS == 1))
                              : ceil_div(units_end - units_begin, UNITS);
  const int steps = ceil_div(in_features, STEP_K * WARPS);
  // Where the lane's elements of a step begin.
  auto k_of = [&](int step, int half) { return (step * WARPS + warp) * STEP_K + half * HALF_K + lane_k; };

  // This warp's vectors of norm and of y: those of its steps one after another, zeros beyond in_features.
  const int vectors = steps * STEP_VECTORS;
  uint4* const gains =
      reinterpret_cast<uint4*>(partial + WARPS * UNITS * GROUPS * WARP_SIZE) + warp * vectors;
  uint4* const y = gains + WARPS * vectors;  // of one resident row
  __shared__ float sums_of_squares[WARPS][TOKENS];
  auto k_of_vector = [&](int v) {
    return (v / STEP_VECTORS * WARPS + warp) * STEP_K + v % STEP_VECTORS * SEGMENT;
  };

  // The copies run ahead of the products and have their own place in the sequence of tiles and steps.
  constexpr unsigned COPY_BYTES = THREADS * sizeof(uint4);  // of all threads
  const unsigned lane_ring = shared_address(ring + threadIdx.x);
  int load_tile = 0;
  int load_step = 0;
  int load_slot = 0;
  const T* load_from = weight;  // this lane's row of the tile's first unit, from its first element on
  int load_units = 0;           // units of the tile in which this lane has a row
  const long long unit_elements = static_cast<long long>(UNIT) * in_features;
  const unsigned long long policy = evict_first_policy();
  auto load_weight = [&] {
    if (load_step == 0) {
      const int unit = units_begin + load_tile * units_a_tile;
      const int row = unit * UNIT + lane_row;
      load_from = weight + static_cast<long long>(row) * in_features + k_of(0, 0);
      load_units = min(min(units_end - unit, units_a_tile), ceil_div(features - row, UNIT));
    }
    const int k = load_step * WARPS * STEP_K;
    const T* from = load_from + k;
    const int left = in_features - k - k_of(0, 0);
    const unsigned to = lane_ring + load_slot * LOADS * COPY_BYTES;
    int unit = 0;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      if (u > 0) {
        const bool first_up = u == UNITS / 2 && gated;
        from =
            first_up ? load_from + k + static_cast<long long>(features) * in_features : from + unit_elements;
        unit = first_up ? 0 : unit + 1;
      }
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        const int element = half * HALF_K;
        copy_async_16(to + (u * HALVES + half) * COPY_BYTES, from + element,
                      unit < load_units && element < left, policy);
      }
    }
  };
  auto load_x = [&](int slot, int step) {
    const int k = k_of(step, 0);
    const T* from = x + lane_row * in_features + k;
    const unsigned to = lane_ring + (slot * LOADS + UNITS * HALVES) * COPY_BYTES;
#pragma unroll
    for (int i = 0; i < GROUPS * HALVES; ++i) {
      const int element = i % HALVES * HALF_K;
      const int group = i / HALVES;
      copy_async_16(to + i * COPY_BYTES, from + group * 8 * in_features + element,
                    group * 8 + lane_row < num_rows && k + element < in_features);
    }
  };
  auto advance_load = [&] {
    load_slot = load_slot + 1 == STAGES ? 0 : load_slot + 1;
    if (++load_step == steps) {
      load_step = 0;
      ++load_tile;
    }
  };

  // Of a token, once every warp's sum of squares is there.
  auto inverse_rms = [&](int token) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums_of_squares[w][token];
    return rsqrtf(__fdividef(sum, in_features) + eps);
  };

  // Groups of copies are committed also where empty, because the waits count them.
  if (norm != nullptr) {
#pragma unroll 1
    for (int v = lane; v < vectors; v += WARP_SIZE) {
      const bool valid = k_of_vector(v) < in_features;
      copy_async_16(gains + v, valid ? norm + k_of_vector(v) : norm, valid);
    }
  }
  copy_async_commit();
#pragma unroll 1
  for (int stage = 0; stage < STAGES; ++stage) {
    if (load_tile < num_tiles) load_weight();
    copy_async_commit();
    advance_load();
  }
  let_next_kernel_start();
  wait_for_earlier_kernels();

  if constexpr (RESIDENT) {
    constexpr int BATCH = 2;  // loads in flight
    if (norm != nullptr) copy_async_wait<STAGES>();
    float squares = 0.0f;
#pragma unroll 1
    for (int first = lane; first < vectors; first += BATCH * WARP_SIZE) {
      uint4 raw[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int k = k_of_vector(first + i * WARP_SIZE);
        raw[i] = make_uint4(0, 0, 0, 0);
        if (k < in_features) load_past_l1(raw[i], x + k);
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int v = first + i * WARP_SIZE;
        if (v >= vectors) break;
        if (norm != nullptr) {
          squares = add_squares<T>(squares, raw[i]);
          if (SCALES_SUMS) raw[i] = multiply_elements<T>(raw[i], gains[v]);
        }
        y[v] = raw[i];
      }
    }
    if (norm != nullptr) {
      squares = warp_sum(squares);
      if (lane == 0) sums_of_squares[warp][0] = squares;
      if constexpr (!SCALES_SUMS) {
        __syncthreads();
        const float scale = inverse_rms(0);
        for (int v = lane; v < vectors; v += WARP_SIZE) {
          const Vector gain = reinterpret_cast<const Vector&>(gains[v]);
          Vector values = reinterpret_cast<const Vector&>(y[v]);
#pragma unroll
          for (int e = 0; e < SEGMENT; ++e) {
            values[e] = from_float<T>(to_float(values[e]) * scale * to_float(gain[e]));
          }
          y[v] = reinterpret_cast<const uint4&>(values);
        }
      }
    }
  } else {
    int step = 0;
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) {
      if (stage < num_tiles * steps) load_x(stage, step);
      copy_async_commit();
      step = step + 1 == steps ? 0 : step + 1;
    }
    if (norm != nullptr) copy_async_wait<2 * STAGES>();
  }
  __syncwarp();  // y and gains are there for all lanes

  float sums[CHAINS][UNITS][MMAS_M][4];
  auto multiply = [&](const uint4* weights, const uint4(&tokens)[GROUPS]) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const uint4 w = weights[u * HALVES * THREADS];
#pragma unroll
      for (int i = 0; i < MMAS_M; ++i) {
        const uint4 low = tokens[i * 2];
        const uint4 high = i * 2 + 1 < GROUPS ? tokens[min(i * 2 + 1, GROUPS - 1)] : make_uint4(0, 0, 0, 0);
        mma_m16n8k16<T>(sums[0][u][i], {low.x, high.x, low.y, high.y}, {w.x, w.y});
        mma_m16n8k16<T>(sums[CHAINS - 1][u][i], {low.z, high.z, low.w, high.w}, {w.z, w.w});
      }
    }
  };
  int slot = 0;
  float squares[GROUPS] = {};  // of this lane's elements of x, taken from the first tile's steps
  auto take_step = [&](int step, bool is_first_tile) {
    copy_async_wait<STAGES - 1>();
    const uint4* const stage = ring + slot * LOADS * THREADS + threadIdx.x;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      uint4 tokens[GROUPS];
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        if constexpr (RESIDENT) {
          tokens[i] = y[(step * HALVES + half) * 4 + lane % 4];  // for all 8 rows; only the first is stored
        } else {
          tokens[i] = stage[((UNITS + i) * HALVES + half) * THREADS];
          if (SCALES_SUMS && norm != nullptr) {
            if (is_first_tile) squares[i] = add_squares<T>(squares[i], tokens[i]);
            tokens[i] = multiply_elements<T>(tokens[i], gains[(step * HALVES + half) * 4 + lane % 4]);
          }
        }
      }
      multiply(stage + half * THREADS, tokens);
    }
    if (load_tile < num_tiles) {
      load_weight();
      if constexpr (!RESIDENT) load_x(load_slot, load_step);
    }
    copy_async_commit();
    advance_load();
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  };

#pragma unroll 1
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int tile_unit = units_begin + tile * units_a_tile;

    // What the sums are added to is fetched now, so that it is there when they are.
    Vec<Out, 2> before[ITEMS];
    Vec<T, 2> offset[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item = i * THREADS + threadIdx.x;
      const int u = item / WARP_SIZE / GROUPS;
      const int token = item / WARP_SIZE % GROUPS * 8 + lane_row;
      const int column = (tile_unit + u) * UNIT + lane % 4 * 2;
      before[i] = {from_float<Out>(0.0f), from_float<Out>(0.0f)};
      offset[i] = {from_float<T>(0.0f), from_float<T>(0.0f)};
      if (u >= units_a_tile || tile_unit + u >= units_end || token >= num_rows || column >= features)
        continue;
      if (bias != nullptr) offset[i] = {bias[column], bias[column + 1]};
      if (accumulate) {
        load_past_l1(reinterpret_cast<typename Vec<Out, 2>::Raw&>(before[i]),
                     out + token * features + column);
      }
    }

#pragma unroll
    for (int i = 0; i < CHAINS * UNITS * MMAS_M * 4; ++i) (&sums[0][0][0][0])[i] = 0.0f;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) take_step(step, tile == 0);

    if (tile > 0) __syncthreads();  // the partial sums of the tile before may still be in use
    if constexpr (!RESIDENT && SCALES_SUMS) {
      if (norm != nullptr && tile == 0) {
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
          squares[i] += __shfl_xor_sync(FULL_WARP, squares[i], 1);
          squares[i] += __shfl_xor_sync(FULL_WARP, squares[i], 2);
          if (lane % 4 == 0) sums_of_squares[warp][i * 8 + lane_row] = squares[i];
        }
      }
    }
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        float2 pair = make_float2(sums[0][u][i / 2][i % 2 * 2], sums[0][u][i / 2][i % 2 * 2 + 1]);
        if constexpr (CHAINS > 1) {
          pair.x += sums[1][u][i / 2][i % 2 * 2];
          pair.y += sums[1][u][i / 2][i % 2 * 2 + 1];
        }
        if (i * 8 + lane_row < num_rows) partial[((warp * UNITS + u) * GROUPS + i) * WARP_SIZE + lane] = pair;
      }
    }
    __syncthreads();
    auto total = [&](int item) {
      float2 sum = partial[item];
#pragma unroll
      for (int w = 1; w < WARPS; ++w) {
        const float2 other = partial[w * UNITS * GROUPS * WARP_SIZE + item];
        sum.x += other.x;
        sum.y += other.y;
      }
      return sum;
    };
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item = i * THREADS + threadIdx.x;
      const int u = item / WARP_SIZE / GROUPS;
      const int token = item / WARP_SIZE % GROUPS * 8 + lane_row;
      const int column = (tile_unit + u) * UNIT + lane % 4 * 2;
      if (u >= units_a_tile || tile_unit + u >= units_end || token >= num_rows || column >= features)
        continue;
      const float scale = SCALES_SUMS && norm != nullptr ? inverse_rms(token) : 1.0f;
      float2 result = total(item);
      result.x *= scale;
      result.y *= scale;
      if (gated) {
        float2 up = total(item + units_a_tile * GROUPS * WARP_SIZE);
        up.x *= scale;
        up.y *= scale;
        result.x = up.x * __fdividef(result.x, 1.0f + __expf(-result.x));
        result.y = up.y * __fdividef(result.y, 1.0f + __expf(-result.y));
      } else {
        result.x += to_float(offset[i][0]) + to_float(before[i][0]);
        result.y += to_float(offset[i][1]) + to_float(before[i][1]);
      }
      const Vec<Out, 2> pair = {from_float<Out>(result.x), from_float<Out>(result.y)};
      pair.store(out + token * features + column);
    }
  }
}
