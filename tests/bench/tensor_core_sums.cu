// D = A B^T of 64 x 64 results by several tensor-core instructions, to compare them bit by bit.
#include "common.cuh"
#include "generated/tensor_core_sums.cuh"
#include "ptx/mma.cuh"
#include "ptx/sm90.cuh"

constexpr int SIZE = 64;  // rows of A and of B, and elements along k of a tile

// Element (row, k) of a tile as wgmma wants it: rows of 128 bytes, segments of 16 XORed with the row
// modulo 8.
__device__ __forceinline__ int swizzled(int row, int k) {
  return row * SIZE + ((k / 8) ^ (row % 8)) * 8 + k % 8;
}

// By WAY: 0 wgmma m64n64k16; 1 the same with A and B exchanged; 2 mma m16n8k16; 3 exchanged; 4 each k16 in
// another order; 5 each k32 cut into k16 as `matmul_decode_kernel` does; 6 as 2 with a zero after every sum;
// 7 the four k16 of a tile from the last to the first.
//   in:  a, b [64, k] T, k a multiple of 64
//   out: out [64, 64] float
// Grid: 1. Block: 128 threads. Shared memory: the two tiles.
template <typename T, int WAY>
__global__ void __launch_bounds__(128) tensor_core_sums_kernel(TENSOR_CORE_SUMS_PARAMS(T)) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  T* const tile_a = reinterpret_cast<T*>(shared_memory);
  T* const tile_b = tile_a + SIZE * SIZE;
  const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
  constexpr bool EXCHANGED = WAY == 1 || WAY == 3;
  float sums[SIZE / 2] = {};
  for (int first = 0; first < k; first += SIZE) {
    __syncthreads();
    for (int i = threadIdx.x; i < SIZE * SIZE; i += 128) {
      const int row = i / SIZE, column = i % SIZE;
      tile_a[swizzled(row, column)] = (EXCHANGED ? b : a)[row * k + first + column];
      tile_b[swizzled(row, column)] = (EXCHANGED ? a : b)[row * k + first + column];
    }
    __syncthreads();
    if constexpr (WAY <= 1) {
      fence_shared_for_async();
      __syncthreads();
      const unsigned long long descriptor_a = operand_descriptor(tile_a),
                               descriptor_b = operand_descriptor(tile_b);
      wgmma_fence();
      for (int step = 0; step < 4; ++step) {
        wgmma<T, SIZE>(sums, descriptor_a + step * DESCRIPTOR_STEP_K, descriptor_b + step * DESCRIPTOR_STEP_K,
                       first + step > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
    } else {
      for (int i = 0; i < 4; ++i) {
        const int step = WAY == 7 ? 3 - i : i;
        // The k of this lane's pairs: low and high of a fragment.
        int low = step * 16 + 2 * t, high = low + 8;
        if (WAY == 4) low = step * 16 + 4 * t, high = low + 2;
        if (WAY == 5) low = step / 2 * 32 + 8 * t + step % 2 * 4, high = low + 2;
        const auto pair = [&](const T* tile, int row, int element) {
          return *reinterpret_cast<const unsigned*>(tile + swizzled(row, element));
        };
        const int row = warp * 16 + g;
        const unsigned fragment_a[4] = {pair(tile_a, row, low), pair(tile_a, row + 8, low),
                                        pair(tile_a, row, high), pair(tile_a, row + 8, high)};
        for (int column = 0; column < SIZE / 8; ++column) {
          const unsigned fragment_b[2] = {pair(tile_b, column * 8 + g, low),
                                          pair(tile_b, column * 8 + g, high)};
          float part[4] = {sums[column * 4], sums[column * 4 + 1], sums[column * 4 + 2],
                           sums[column * 4 + 3]};
          mma_m16n8k16<T>(part, fragment_a, fragment_b);
          if (WAY == 6) mma_m16n8k16<T>(part, {0, 0, 0, 0}, fragment_b);
          for (int e = 0; e < 4; ++e) sums[column * 4 + e] = part[e];
        }
      }
    }
  }
  for (int i = 0; i < SIZE / 2; ++i) {
    const int row = warp * 16 + g + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * t + i % 2;
    out[EXCHANGED ? column * SIZE + row : row * SIZE + column] = sums[i];
  }
}
