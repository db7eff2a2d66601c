// The clamped SwiGLU of gpt-oss.
#pragma once

#include "common.cuh"
#include "generated/swiglu.cuh"

// (up + 1) * gate / (1 + exp(-SWIGLU_ALPHA * gate)) of a gate that is at most SWIGLU_LIMIT and an up within
// it; NaN stays NaN.
__device__ __forceinline__ float clamped_swiglu(float gate, float up) {
  gate = gate > SWIGLU_LIMIT ? SWIGLU_LIMIT : gate;
  up = up > SWIGLU_LIMIT ? SWIGLU_LIMIT : up < -SWIGLU_LIMIT ? -SWIGLU_LIMIT : up;
  return (up + 1.0f) * (gate / (1.0f + expf(-SWIGLU_ALPHA * gate)));
}
