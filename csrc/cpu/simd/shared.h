// Verbs that every set has in common, because they are written in verbs of the set. Included by cpu/simd.h only.
#pragma once

namespace turboquant::cpu::TURBOQUANT_LEVEL {

inline Ints lane_numbers() {
  const int32_t number[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(number);
}

inline float first_lane(Floats x) {
  float lane[16];
  store(lane, x);
  return lane[0];
}

// The sum, the maximum and the minimum of all lanes, always by the same tree.
inline float sum_lanes(Floats x) {
  const Floats zero = broadcast(0.0f);
  for (int n = 16; n > 1; n /= 2) x = pair_sums(x, zero);
  return first_lane(x);
}
inline float greatest(Floats x) {
  x = max(x, swap_lanes<8>(x));
  x = max(x, swap_lanes<4>(x));
  x = max(x, swap_lanes<2>(x));
  return first_lane(max(x, swap_lanes<1>(x)));
}

inline float least(Floats x) {
  x = min(x, swap_lanes<8>(x));
  x = min(x, swap_lanes<4>(x));
  x = min(x, swap_lanes<2>(x));
  return first_lane(min(x, swap_lanes<1>(x)));
}
inline int32_t greatest(Ints x) {
  x = max(x, as_ints(swap_lanes<8>(as_floats(x))));
  x = max(x, as_ints(swap_lanes<4>(as_floats(x))));
  x = max(x, as_ints(swap_lanes<2>(as_floats(x))));
  x = max(x, as_ints(swap_lanes<1>(as_floats(x))));
  int32_t lane[16];
  store(lane, x);
  return lane[0];
}

// 2^e for |e| <= 126, exactly.
inline float power_of_two(int e) { return bits_to_float(static_cast<uint32_t>(e + 127) << 23); }

// The exponent e of x, so that x * 2^-e is near 1. It is limited to +-100, where such a product stays a normal number.
inline int scale_exponent(float x) {
  const int e = static_cast<int>(float_to_bits(x) >> 23 & 255) - 127;
  return e < -100 ? -100 : e > 100 ? 100 : e;
}

// 2^n for -126 <= n <= 127.
inline Floats power_of_two(Ints n) { return as_floats(shift_left<23>(n + broadcast(127))); }

// e^x for x <= 88, within 2 units in the last place. 0 below -87.3; NaN stays NaN.
ALWAYS_INLINE Floats exp(Floats x) {
  const Mask tiny = x < broadcast(-87.3f);
  x = max(broadcast(-87.3f), x);
  const Ints n = round_to_ints(x * broadcast(1.44269504f));
  const Floats f = to_floats(n);
  const Floats r = (x - f * broadcast(0.693359375f)) - f * broadcast(-2.12194440e-4f);
  Floats p = broadcast(1.9875691500e-4f);
  p = p * r + broadcast(1.3981999507e-3f);
  p = p * r + broadcast(8.3334519073e-3f);
  p = p * r + broadcast(4.1665795894e-2f);
  p = p * r + broadcast(1.6666665459e-1f);
  p = p * r + broadcast(5.0000001201e-1f);
  const Floats e = ((p * r) * r + r) + broadcast(1.0f);
  return select(tiny, broadcast(0.0f), e * power_of_two(n));
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
