// Encodes and decodes a vector (docs/format.md sections 4 to 6), for the standalone codec and for the paged cache.
//
// After rotation and scaling to length sqrt(d), coordinates become integers u in units of 2^-12 sigma. Finding a code
// is then an integer comparison and every sum over channels that decides anything is an integer sum. All of it takes
// 16-bit lanes: u is 16 * high + low, boundaries of up to 5 bits are multiples of 16 and meet `high` alone.
#pragma once

#include "cpu/kernels/rows.h"
#include "cpu/kernels/transform.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

constexpr int kMaxRow = format::kMaxVectorDim + 64;  // vectors are padded to whole registers

// The stages of a vector in the encoder. Channels behind d are zero.
struct EncoderScratch {
  alignas(64) float y[kMaxRow];
  int16_t high[kMaxRow + 64], low[kMaxRow + 128];  // unequal sizes, so that they do not share sets of the L1 cache
  uint8_t codes[kMaxRow];
};

// y = (x - center) * scale. Returns the bits of max |y|, which are above those of finite numbers if there is a NaN or
// an infinity.
template <bool WHOLE, typename T>
inline int32_t load_row(const T* x, const format::Channels& channels, int d, float* y) {
  Ints most = broadcast(0);
  for (int c = 0; c < d; c += 16) {
    Floats v = load_some<WHOLE>(x + c, d - c);
    if (channels.center) v = v - load_some<WHOLE>(channels.center + c, d - c);
    if (channels.scale) v = v * load_some<WHOLE>(channels.scale + c, d - c);
    most = max(most, as_ints(abs(v)));
    store(y + c, v);
  }
  return greatest(most);
}

// The sums A and B of a candidate.
struct Sums {
  int32_t dot, square;
};

// The sums of all lanes of two vectors.
inline Sums sum_both(Ints a, Ints b) {
  const Ints zero = broadcast(0);
  Ints x = pair_sums(a, b);
  for (int i = 0; i < 3; ++i) x = pair_sums(x, zero);
  int32_t lane[16];
  store(lane, x);
  return {lane[0], lane[1]};
}

// A and B of one candidate. level(c) stores 32 codes from channel c on and returns their levels.
template <typename Level>
inline Sums sum_levels(const EncoderScratch& s, int d, Level&& level) {
  Ints high = broadcast(0), low = broadcast(0), square = broadcast(0);
  for (int c = 0; c < d; c += 32) {
    Shorts l = level(c);
    if (d - c < 32) l = keep_first(l, d - c);
    high = multiply_add(high, load(s.high + c), l);
    low = multiply_add(low, load(s.low + c), l);
    square = multiply_add(square, l, l);
  }
  return sum_both(shift_left<4>(high) + low, square);
}

// Codes with a table of levels: by the search tree.
template <format::Width WIDTH>
inline Sums quantise(EncoderScratch& s, int d, const Quantiser& q, int step, float) {
  constexpr int kBits = format::num_bits(WIDTH);
  const Boundaries<kBits> boundaries(q.boundaries + kTreeNodes * step);
  const LevelTable levels = level_table(q.levels);
  return sum_levels(s, d, [&](int c) {
    const Shorts rank = count_boundaries(boundaries, load(s.high + c));
    store_bytes(s.codes + c, rank);
    return lookup(levels, rank);
  });
}

// Codes that are levels have 254 boundaries: a level is guessed by a division and corrected until the boundaries on
// both sides agree. Boundaries do not decrease, so it does not matter where the search starts. k: the factor that makes
// y a coordinate.
template <format::Width WIDTH>
  requires(format::levels_are_codes(WIDTH))
inline Sums quantise(EncoderScratch& s, int d, const Quantiser& q, int step, float k) {
  constexpr int kMost = format::kMaxByteLevel;
  const float size = q.steps[step], widest = 1 << 20;  // beyond it all boundaries but 0 are out of reach
  const float half = size * (format::kUnitsPerSigma / 2);
  const Floats units = broadcast(half < widest ? half : widest);
  const Floats guess = broadcast(k / (size * format::kUnitsPerSigma)), factor = broadcast(k);
  const Ints one = broadcast(1), top = broadcast(kMost), bottom = broadcast(-kMost);
  const auto above = [&](Ints level) { return round_to_ints(to_floats(level + level + one) * units); };
  const auto sixteen = [&](const float* y) {
    const Floats coordinate = load(y);
    const Ints u = round_to_ints(coordinate * factor), next = u + one;
    Ints level = round_to_ints(min(max(coordinate * guess, broadcast(float{-kMost})), broadcast(float{kMost})));
    for (;;) {
      const Mask up = (above(level) < next) & (level < top);
      if (!any(up)) break;
      level = select(up, level + one, level);
    }
    for (;;) {
      const Mask down = (u < above(level - one)) & (bottom < level);
      if (!any(down)) break;
      level = select(down, level - one, level);
    }
    return level;
  };
  return sum_levels(s, d, [&](int c) {
    const Shorts level = narrow(sixteen(s.y + c), sixteen(s.y + c + 16));
    store_bytes(s.codes + c, level);
    return level;
  });
}

// Leaves the codes of the candidate with the least squared error; ties keep the smaller step. Returns its scale before
// the power of two is put back, 0 for degenerate levels. r: the vector's length.
template <format::Width WIDTH>
inline float search(EncoderScratch& s, int d, const Quantiser& q, float r, float k) {
  float best_a = 0, best_b = 0, best_merit = -1;
  int best = 0;
  for (int step = 0; step < q.num_steps; ++step) {
    const Sums sums = quantise<WIDTH>(s, d, q, step, k);
    const float a = static_cast<float>(sums.dot) * (1 / format::kUnitsPerSigma), b = static_cast<float>(sums.square);
    const float merit = sums.dot > 0 ? a * a / b : 0;
    if (merit > best_merit) best = step, best_a = a, best_b = b, best_merit = merit;
  }
  if (best + 1 < q.num_steps) quantise<WIDTH>(s, d, q, best, k);
  if (!(best_a > 0)) return 0;
  switch (q.scale_mode) {
    case format::ScaleMode::kNorm: return r * q.over * q.steps[best];
    case format::ScaleMode::kPreserve: return r * 32 / __builtin_sqrtf(best_b);
    case format::ScaleMode::kMse: return r * q.over * (best_a / best_b);
    case format::ScaleMode::kUnbiased: break;
  }
  return r * q.times / best_a;
}

// What is known of a vector when its coordinates are integers: its length r, the factor k that makes y a coordinate,
// and the exponent e of the power of two that it was divided by.
struct Normalised {
  float r, k;
  int e;
};

// Rotates s.y and leaves the coordinates u in s.high and s.low. greatest: the bits of max |y|, finite
inline Normalised normalise_row(EncoderScratch& s, format::Split split, const float* signs, float units,
                                int32_t greatest) {
  const int d = split.blocks * split.block, padded = (d + 63) / 64 * 64;
  const int e = scale_exponent(bits_to_float(static_cast<uint32_t>(greatest)));
  const Floats down = broadcast(power_of_two(-e));
  for (int c = 0; c < d; c += 16) {
    const Floats v = load(s.y + c) * down;
    store(s.y + c, signs ? v * load_some<false>(signs + c, d - c) : v);
  }
  if (signs) transform(s.y, split, 1.0f);
  alignas(64) float squares[kMaxRow];
  for (int c = 0; c < d; c += 16) {
    const Floats v = load(s.y + c);
    store(squares + c, v * v);
  }
  const float length = __builtin_sqrtf(tree_sum(squares, split));

  for (int c = d; c < padded; ++c) s.y[c] = 0;
  const float k = greatest ? units / length : 0;
  for (int c = 0; c < d; c += 32) {
    const Ints u = round_to_ints(load(s.y + c) * broadcast(k)), v = round_to_ints(load(s.y + c + 16) * broadcast(k));
    store(s.high + c, narrow(shift_right<4>(u), shift_right<4>(v)));
    store(s.low + c, narrow(u & broadcast(15), v & broadcast(15)));
  }
  return {signs ? length * block_norm(split.block) : length, k, e};
}

// The scale as it is stored. scale: before the power of two is put back
inline uint16_t finished_scale(float scale, int e, int32_t greatest) {
  scale = scale * power_of_two(e);
  scale = scale < format::kMaxHalf ? scale : format::kMaxHalf;
  return float_to_half(greatest ? scale : 0);
}

constexpr int32_t kNotFinite = 0x7F800000;  // the bits of infinity, which those of finite numbers are below

// load_row has filled s.y and returned `greatest`. Leaves the codes in s.codes and returns the float16 scale.
// signs: null without a rotation
inline uint16_t encode_row(EncoderScratch& s, format::Split split, const float* signs, const Quantiser& q,
                           int32_t greatest) {
  const int d = split.blocks * split.block, padded = (d + 63) / 64 * 64;
  if (greatest >= kNotFinite) {
    memset(s.codes, 0, padded);
    return format::kNanScale;
  }
  const Normalised row = normalise_row(s, split, signs, q.units, greatest);
  float scale = 0;
  format::with_width(q.width, [&](auto width) { scale = search<width.value>(s, d, q, row.r, row.k); });
  for (int c = d; c < padded; ++c) s.codes[c] = 0;
  return finished_scale(scale, row.e, greatest);
}

// ---- Decoding ------------------------------------------------------------------------------------------------------

struct DecoderScratch {
  alignas(64) float y[kMaxRow];
  uint8_t codes[kMaxRow], levels[kMaxRow];
};

// s.codes: [d], padded to 64 with any codes -> s.y, the vector without its signs. levels: unless codes are levels;
// rotated: whether codes stand for rotated channels
inline void rotate_codes(DecoderScratch& s, format::Split split, bool rotated, format::Width width,
                         const Table32& levels, uint16_t scale) {
  const int d = split.blocks * split.block;
  const bool looked_up = !format::levels_are_codes(width);
  for (int c = 0; c < d && looked_up; c += 64) store(s.levels + c, lookup(levels, load(s.codes + c)));
  const int8_t* level = reinterpret_cast<const int8_t*>(looked_up ? s.levels : s.codes);
  const Floats unit = broadcast(half_to_float(scale) * format::kLevelUnit);
  for (int c = 0; c < d; c += 16) store(s.y + c, unit * load_float(level + c));
  if (rotated) transform(s.y, split, block_norm(split.block));
}

// Decodes s.codes to the vector itself. signs: null without a rotation; out: [d]
template <typename T, bool WHOLE>
inline void decode_row(DecoderScratch& s, format::Split split, const float* signs, const format::Channels& channels,
                       format::Width width, const Table32& levels, uint16_t scale, T* out) {
  const int d = split.blocks * split.block;
  rotate_codes(s, split, signs != nullptr, width, levels, scale);
  for (int c = 0; c < d; c += 16) {
    Floats v = load(s.y + c);
    if (signs) v = v * load_some<WHOLE>(signs + c, d - c);
    if (channels.inverse) v = v * load_some<WHOLE>(channels.inverse + c, d - c);
    if (channels.center) v = v + load_some<WHOLE>(channels.center + c, d - c);
    store_some<WHOLE>(out + c, v, d - c);
  }
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
