// What the kernels of attention over packed sequences share: where heads lie in rows of qkv, and sequences in
// rows.
#pragma once

#include "attention/attention.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// Rows [tokens, (num_heads + 2 * num_kv_heads) * head_dim]: queries, then keys, then values.
struct PackedHeads {
  int num_heads;
  int num_kv_heads;
  int head_dim;

  __device__ __forceinline__ int group() const { return num_heads / num_kv_heads; }
  __device__ __forceinline__ long long row() const {
    return static_cast<long long>(num_heads + 2 * num_kv_heads) * head_dim;
  }
  __device__ __forceinline__ long long result_row() const {
    return static_cast<long long>(num_heads) * head_dim;
  }
  // Where a head begins in a row.
  __device__ __forceinline__ int query(int head) const { return head * head_dim; }
  __device__ __forceinline__ int key(int kv_head) const { return (num_heads + kv_head) * head_dim; }
  __device__ __forceinline__ int value(int kv_head) const {
    return (num_heads + num_kv_heads + kv_head) * head_dim;
  }
};

// The sequence of a block of a grid with `tiles` blocks along x for each sequence.
struct PackedSequence {
  int begin;   // its first row
  int length;  // its tokens
  int tile;    // the block's number among those of its sequence

  __device__ __forceinline__ PackedSequence(const int* cu_seqlens, int tiles) {
    const int sequence = blockIdx.x / tiles;
    begin = cu_seqlens[sequence];
    length = cu_seqlens[sequence + 1] - begin;
    tile = blockIdx.x % tiles;
  }
};

// One past the last query that sees a key.
__device__ __forceinline__ int query_end_of(int key, int length, int window) {
  return min(static_cast<long long>(key) + window, static_cast<long long>(length));
}
