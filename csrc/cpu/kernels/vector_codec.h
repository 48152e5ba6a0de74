// Encoding and decoding of vectors (docs/format.md sections 4 to 6), shared by the standalone codec and the paged cache.
//
// After rotation and scaling to length sqrt(d), coordinates become integers u in units of 2^-12 sigma. Finding a code is
// then an integer comparison and every sum over channels that decides anything is an integer sum. All of it takes 16-bit
// lanes: u is 16 * high + low, boundaries of up to 5 bits are multiples of 16 and meet `high` alone.
#pragma once

#include "cpu/kernels/rows.h"
#include "cpu/kernels/transform.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

constexpr int kMaxRow = format::kMaxVectorDim + 64;  // vectors are padded to whole registers

// One vector on its way through the encoder. Channels behind d are zero.
struct EncoderScratch {
  alignas(64) float y[kMaxRow];
  int16_t high[kMaxRow + 64],
      low[kMaxRow + 128];  // of unequal size, so that they do not share places in the first cache
  uint8_t codes[kMaxRow];
};

// y = (x - center) * scale; returns the bits of max |y|: above those of any finite number if there is a NaN or an infinity.
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

// The candidate's codes and the sums A and B.
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

// A and B of one candidate whose level(c) gives 32 levels, and codes.
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

// Levels of up to 5 bits: by the search tree.
template <int BITS>
inline Sums quantise(EncoderScratch& s, int d, const Quantiser& q, int step, float) {
  const Boundaries<BITS> boundaries(q.boundaries + 64 * step);
  const LevelTable levels = level_table(q.levels);
  return sum_levels(s, d, [&](int c) {
    const Shorts rank = count_boundaries(boundaries, load(s.high + c));
    store_bytes(s.codes + c, rank);
    return lookup(levels, rank);
  });
}

// Levels of 8 bits: 254 boundaries, so a level is guessed by a division and corrected until the boundaries on both sides
// agree. They do not decrease, so it does not matter where the search starts. k: what makes y a coordinate.
template <>
inline Sums quantise<8>(EncoderScratch& s, int d, const Quantiser& q, int step, float k) {
  const float size = q.steps[step], widest = 1 << 20;  // beyond it all boundaries but 0 are out of reach
  const float half = size * (format::kUnitsPerSigma / 2);
  const Floats units = broadcast(half < widest ? half : widest);
  const Floats guess = broadcast(k / (size * format::kUnitsPerSigma)), factor = broadcast(k);
  const Ints one = broadcast(1), top = broadcast(127), bottom = broadcast(-127);
  const auto above = [&](Ints level) { return round_to_ints(to_floats(level + level + one) * units); };
  const auto sixteen = [&](const float* y) {
    const Floats coordinate = load(y);
    const Ints u = round_to_ints(coordinate * factor), next = u + one;
    Ints level = round_to_ints(min(max(coordinate * guess, broadcast(-127.0f)), broadcast(127.0f)));
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

// Leaves the codes of the candidate with the least squared error; ties keep the smaller step. Returns its scale before the
// power of two is put back, 0 for degenerate levels. r: the vector's length.
template <int BITS>
inline float search(EncoderScratch& s, int d, const Quantiser& q, float r, float k) {
  float best_a = 0, best_b = 0, best_merit = -1;
  int best = 0;
  for (int step = 0; step < q.num_steps; ++step) {
    const Sums sums = quantise<BITS>(s, d, q, step, k);
    const float a = static_cast<float>(sums.dot) * (1 / format::kUnitsPerSigma), b = static_cast<float>(sums.square);
    const float merit = sums.dot > 0 ? a * a / b : 0;
    if (merit > best_merit) best = step, best_a = a, best_b = b, best_merit = merit;
  }
  if (best + 1 < q.num_steps) quantise<BITS>(s, d, q, best, k);
  if (!(best_a > 0)) return 0;
  switch (q.scale_mode) {
    case 0: return r * q.over * q.steps[best];
    case 1: return r * 32 / __builtin_sqrtf(best_b);
    case 2: return r * q.over * (best_a / best_b);
    default: return r * q.times / best_a;
  }
}

// Calls fn(Bits<BITS>{}) for a codec's width.
template <int BITS>
struct Bits {
  static constexpr int kBits = BITS;
};
template <typename Fn>
inline void dispatch_bits(int bits, Fn&& fn) {
  switch (bits) {
    case 1: return fn(Bits<1>{});
    case 2: return fn(Bits<2>{});
    case 3: return fn(Bits<3>{});
    case 4: return fn(Bits<4>{});
    case 5: return fn(Bits<5>{});
    default: return fn(Bits<8>{});
  }
}

// s.y: what load_row left there, `greatest` what it returned. Leaves the codes in s.codes; returns the float16 scale.
inline uint16_t encode_row(EncoderScratch& s, format::Split split, const float* signs, const Quantiser& q,
                           int32_t greatest) {
  const int d = split.blocks * split.block, padded = (d + 63) / 64 * 64;
  if (greatest >= 0x7F800000) {
    memset(s.codes, 0, padded);
    return format::kNanScale;
  }
  const int e = scale_exponent(bits_to_float(static_cast<uint32_t>(greatest)));
  const Floats down = broadcast(power_of_two(-e));
  for (int c = 0; c < d; c += 16) store(s.y + c, load(s.y + c) * down * load_some<false>(signs + c, d - c));
  transform(s.y, split, 1.0f);
  alignas(64) float squares[kMaxRow];
  for (int c = 0; c < d; c += 16) {
    const Floats v = load(s.y + c);
    store(squares + c, v * v);
  }
  const float length = __builtin_sqrtf(tree_sum(squares, split));

  for (int c = d; c < padded; ++c) s.y[c] = 0;
  const float k = greatest ? q.units / length : 0;
  for (int c = 0; c < d; c += 32) {
    const Ints u = round_to_ints(load(s.y + c) * broadcast(k)), v = round_to_ints(load(s.y + c + 16) * broadcast(k));
    store(s.high + c, narrow(shift_right<4>(u), shift_right<4>(v)));
    store(s.low + c, narrow(u & broadcast(15), v & broadcast(15)));
  }
  const float r = length * block_norm(split.block);
  float scale = 0;
  dispatch_bits(q.bits, [&](auto b) { scale = search<b.kBits>(s, d, q, r, k); });
  scale = scale * power_of_two(e);
  scale = scale < format::kMaxHalf ? scale : format::kMaxHalf;
  for (int c = d; c < padded; ++c) s.codes[c] = 0;
  return float_to_half(greatest ? scale : 0);
}

// ---- Decoding ------------------------------------------------------------------------------------------------------

struct DecoderScratch {
  alignas(64) float y[kMaxRow];
  uint8_t codes[kMaxRow], levels[kMaxRow];
};

// s.codes: [d], padded to 64 with any codes -> s.y, the vector without its signs. levels: of codes up to 5 bits
inline void rotate_codes(DecoderScratch& s, format::Split split, int bits, const Table32& levels, uint16_t scale) {
  const int d = split.blocks * split.block;
  for (int c = 0; c < d && bits < 8; c += 64) store(s.levels + c, lookup(levels, load(s.codes + c)));
  const int8_t* level = reinterpret_cast<const int8_t*>(bits < 8 ? s.levels : s.codes);
  const Floats unit = broadcast(half_to_float(scale) * format::kLevelUnit);
  for (int c = 0; c < d; c += 16) store(s.y + c, unit * load_float(level + c));
  transform(s.y, split, block_norm(split.block));
}

// The same to the vector itself; out: [d].
template <typename T, bool WHOLE>
inline void decode_row(DecoderScratch& s, format::Split split, const float* signs, const format::Channels& channels,
                       int bits, const Table32& levels, uint16_t scale, T* out) {
  const int d = split.blocks * split.block;
  rotate_codes(s, split, bits, levels, scale);
  for (int c = 0; c < d; c += 16) {
    Floats v = load(s.y + c) * load_some<WHOLE>(signs + c, d - c);
    if (channels.inverse) v = v * load_some<WHOLE>(channels.inverse + c, d - c);
    if (channels.center) v = v + load_some<WHOLE>(channels.center + c, d - c);
    store_some<WHOLE>(out + c, v, d - c);
  }
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
