// How far a token is behind the most probable one: (maximum - logit) / temperature, in nats.
//
// Filters see distances in whole steps of 2^-27 (a key of 32 bits, finer than float32 tells probabilities
// apart), and probability mass in whole steps of 2^-40 of the most probable token's, so that sums do not
// depend on their order. engine/ops/cpu/sampling.py is the same in NumPy.
#pragma once

constexpr float KEY_STEPS = 134217728.0f;       // 2^27
constexpr float MASS_STEPS = 1099511627776.0f;  // 2^40

// Keys end at this distance, beyond which a token weighs less than a mass step.
constexpr float MAX_DISTANCE = 32.0f;
constexpr unsigned LAST_KEY = 0xffffffffu;

// Gumbel noise from 23 bits lies between -2.82 and 16.64: no token this far behind can win.
constexpr float REACH = 20.0f;

__device__ __forceinline__ float distance_of(float logit, float maximum, float temperature) {
  return __fdiv_rn(maximum - logit, temperature);
}

// For distances below MAX_DISTANCE.
__device__ __forceinline__ unsigned key_of(float distance) { return __float2uint_rz(distance * KEY_STEPS); }

__device__ __forceinline__ unsigned long long mass_of(unsigned key) {
  return __float2ull_rz(expf(-__uint2float_rn(key) * (1.0f / KEY_STEPS)) * MASS_STEPS);
}
