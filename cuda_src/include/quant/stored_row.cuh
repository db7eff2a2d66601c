// Which row of a stored matrix a row of the result is.
#pragma once

// The stored row that row `row` of the result is, or -1: `row` itself without `ids`, else ids[row], where a
// negative id -1 - n stands for sampled[n] if `sampled` is given.
__device__ __forceinline__ long long stored_row(const int* ids, const int* sampled, long long row,
                                                int num_stored) {
  if (ids == nullptr) return row;
  int id = ids[row];
  if (id < 0 && sampled != nullptr) id = sampled[-1 - id];
  return 0 <= id && id < num_stored ? id : -1;
}
