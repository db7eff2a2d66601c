// Product of a few e4m3 rows by an e4m3 weight, bound by reading the weight once: the ring and the epilogue
// of decode_product.cuh, whose 2-byte elements are pairs of e4m3 here.

#include "fp8/fp8_product.cuh"
#include "generated/fp8_decode.cuh"

// Registers for a block of the attention or of the quantising that run between products beside this one's,
// except where sums of blocks need them all. Of products themselves one block has a multiprocessor's shared
// memory: were there room for two, those of the next one could meet wherever attention leaves room first.
template <int TOKENS, int UNITS, bool BLOCKS>
constexpr int MIN_BLOCKS = BLOCKS && TOKENS > 1 && UNITS > 4 ? 1 : 2;

// out[m, n] = sum over k of y[m, k] * weight[n, k], times the scales, + bias[n], + out[m, n] if `accumulate`;
// if `gated`, g / (1 + exp(-g)) * u with g = out[m, n] and u = out[m, n + out_features / 2] of that. Scales
// as of `sm90_fp8_matmul_kernel`. Of a single row (TOKENS = 1) y is x or, with `norm`,
// x / sqrt(mean(x^2) + eps) * norm rounded to T, in e4m3 as `quantize_rows_kernel` makes it; of several rows
// what that has made. Elements are multiplied as __half, which is exact; sums in float32, rounded once.
//   in:  x [1, in_features] T and norm [in_features] T or null; or values [num_rows, in_features] e4m3 and
//        x_scales [1 or ceil(in_features / 128), num_rows] float; weight [out_features, in_features] e4m3;
//        weight_scales [out_features] or [ceil(out_features / 128), ceil(in_features / 128)] float; bias
//        [out_features] T or null
//   out: out [num_rows, out_features, or half of it if `gated`] Out (T or float), rows `out_stride` apart;
//        `gated` takes no bias and does not accumulate
// Layout: row-major; inputs 16-byte aligned, in_features a multiple of 16, out and its rows aligned to two
// elements; with BLOCKS and `gated` half of out_features is a multiple of 8.
// Grid: any number of blocks; they share the weight's units of 8 rows (gated: 8 gates and their ups) evenly.
// Block: 256 threads.
// Shared memory: `Fp8DecodeTile.shared_bytes` in engine/ops/cuda/fp8/decode.py.
// Unit of work: as of `matmul_decode_kernel`; a warp's step is 128 of k, and 16 bytes of a row are what lane
// t has as elements 2t, 2t+1, 2t+8, 2t+9 of four instructions.
template <typename T, typename Out, int TOKENS, int UNITS, int STAGES, bool BLOCKS>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS<TOKENS, UNITS, BLOCKS>)
    fp8_decode_kernel(FP8_DECODE_PARAMS(T, Out)) {
  using V = Variant<T, Out, TOKENS, UNITS, STAGES, HALVES>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ float sums_of_squares[WARPS], maxima[WARPS];
  const int pairs = in_features / 2;
  const BlockUnits<UNITS> units(out_features, gated);
  const WarpSteps<V> steps(pairs);
  uint4* const ring = reinterpret_cast<uint4*>(shared_memory);
  unsigned char* const behind = shared_memory + STAGES * V::LOADS * THREADS * sizeof(uint4);
  const RowPlaces<V> places(steps.count);
  uint4* const y = reinterpret_cast<uint4*>(behind + warp_of_thread() * places.warp_bytes);
  float* const step_scales =
      reinterpret_cast<float*>(behind + WARPS * places.warp_bytes) + warp_of_thread() * steps.count;
  constexpr int PARTIAL_FLOATS = UNITS * PARTIAL_PAIRS<V> * 2;
  const int warp_floats = V::RESIDENT ? places.warp_bytes / static_cast<int>(sizeof(float)) : PARTIAL_FLOATS;
  float* const partial = reinterpret_cast<float*>(behind + (V::RESIDENT ? places.code_bytes : 0));

  DecodeProducer<V> producer(ring, units, steps.count, reinterpret_cast<const T*>(values),
                             reinterpret_cast<const T*>(weight), num_rows, pairs, gated);
  producer.fill_weights();
  float row_scale = 1.0f;
  if constexpr (V::RESIDENT) {
    RowQuantizer<T, BLOCKS> quantizer(norm, y, step_scales, sums_of_squares, maxima, steps.count, in_features,
                                      eps, static_scale);
    quantizer.load_gains();
    let_next_kernel_start();
    wait_for_earlier_kernels();
    row_scale = quantizer.load_row(x);
    __syncwarp();  // y is there for all lanes
  } else {
    let_next_kernel_start();
    wait_for_earlier_kernels();
    producer.fill_x();
  }

  Fp8Consumer<V, BLOCKS> consumer(units, x_scales, weight_scales, step_scales, row_scale, num_rows,
                                  in_features);
#pragma unroll 1
  for (int tile = 0; tile < units.num_tiles; ++tile) {
    const int tile_unit = units.begin + tile * units.a_tile;
    typename fp8_epilogue<V>::type epilogue(units, bias, out, V::RESIDENT ? warp_floats : out_stride,
                                            num_rows, accumulate, gated);
    epilogue.fetch(tile_unit);

    consumer.begin(tile_unit, gated);
#pragma unroll 1
    for (int step = 0; step < steps.count; ++step) {
      consumer.take_step(ring, y, step);
      producer.refill();
      consumer.advance();
    }

    if (tile > 0) __syncthreads();  // the partial sums of the tile before may still be in use
    consumer.share_sums(partial + warp_of_thread() * warp_floats);
    __syncthreads();
    epilogue.store(tile_unit, partial);
  }
}
