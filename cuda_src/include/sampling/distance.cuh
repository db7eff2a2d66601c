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
constexpr float MAX_NOISE = 16.64f;
constexpr float REACH = 20.0f;

__device__ __forceinline__ float distance_of(float logit, float maximum, float temperature) {
  return __fdiv_rn(maximum - logit, temperature);
}

// For distances below MAX_DISTANCE.
__device__ __forceinline__ unsigned key_of(float distance) { return __float2uint_rz(distance * KEY_STEPS); }

// A whole number of mass steps, at most 2^40, as 13, 13 and 15 bits, the lowest first.
struct Mass {
  unsigned places[3];
};

__device__ __forceinline__ Mass mass_of(unsigned key) {
  const float steps = expf(-__uint2float_rn(key) * (1.0f / KEY_STEPS)) * MASS_STEPS;
  const unsigned high = __float2uint_rz(steps * 0x1p-26f);
  const float below_high = steps - __uint2float_rn(high) * 0x1p26f;  // exact, as are the products
  const unsigned middle = __float2uint_rz(below_high * 0x1p-13f);
  return {{__float2uint_rz(below_high - __uint2float_rn(middle) * 0x1p13f), middle, high}};
}
