// The op linear_packed: tokens times a packed weight, straight from its codes.
//
// Activations become signed bytes, rotated and with a unit per token and group, in the order in which a slab of the
// weight holds its codes. A *pair* is rows g and g + 8 of a slab, whose codes of a chunk are 64 neighbouring bytes; its
// 16 words belong to the two rows by turns. Products are exact in int32 up to the multiplier or the end of a group.
#pragma once

#include "cpu/kernels/weight_codec.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

constexpr int kPairs = 8;  // of a slab
constexpr int kPairBytes = 64;
static_assert(kPairs * kPairBytes == format::WeightBlock::kWarpBytes);

constexpr int linear_fields(format::Width w) { return 8 / format::num_bits(w); }  // codes of a byte

// Of a group: parts that have an integer sum of their own. A chunk with two multipliers is one part, because different
// words belong to its two steps.
inline int linear_parts(const format::WeightBlock& b) { return b.sub ? b.chunks() : 1; }

// [chunks * fields] vectors of bytes, then what the bias of levels adds to the sums of each part, negated: [parts].
inline int64_t linear_factor_bytes(const format::WeightBlock& b) {
  return 64 * (b.chunks() * linear_fields(b.width()) + (kLevelBias ? linear_parts(b) : 0));
}

// ---- Activations ----------------------------------------------------------------------------------------------------

// The bytes of one rotated vector. Returns their unit: 0 for a zero vector, NaN for one with a NaN or an infinity.
inline float linear_integers(const float* y, int d, int8_t* to) {
  Ints most = broadcast(0);
  for (int c = 0; c < d; c += 16) most = max(most, as_ints(abs(load(y + c))));
  const int32_t bits = greatest(most);
  if (bits >= kNotFinite || bits == 0) {
    memset(to, 0, d);
    return bits ? __builtin_nanf("") : 0.0f;
  }
  const float amax = bits_to_float(static_cast<uint32_t>(bits));
  const int e = scale_exponent(amax);
  const float down = power_of_two(-e), inverse = 127 / (amax * down);
  for (int c = 0; c < d; c += 32) {
    const auto integers = [&](int at) { return round_to_ints((load(y + at) * broadcast(down)) * broadcast(inverse)); };
    store_bytes(reinterpret_cast<uint8_t*>(to + c), narrow(integers(c), integers(c + 16)));
  }
  return (amax * down / 127) * power_of_two(e);
}

inline void linear_inputs(const LinearWeight& w, const ActivationRows& rows, const LinearInputs& inputs,
                          int64_t first) {
  const format::WeightBlock& b = w.blocks.block;
  const int64_t bytes = linear_factor_bytes(b);
  const int vectors = b.chunks() * linear_fields(b.width()), parts = linear_parts(b), of_part = vectors / parts;
  alignas(64) float y[format::kMaxVectorDim];
  alignas(64) int8_t integers[format::kMaxVectorDim];
  dispatch_dtype<ElementTypes>(rows.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t r = 0; r < rows.count; ++r) {
      const T* x = static_cast<const T*>(rows.x) + r * rows.stride;
      for (int64_t group = 0; group < w.blocks.groups; ++group, x += b.group) {
        const float* inverse = rows.channel_inverse ? rows.channel_inverse + group * b.group : nullptr;
        for (int c = 0; c < b.group; c += 16) {
          const Floats v = load_float(x + c), scaled = inverse ? v * load(inverse + c) : v;
          store(y + c, scaled * load(rows.signs + c));
        }
        transform(y, {1, b.group}, block_norm(b.group));
        const int64_t place = group * inputs.count + first + r;
        inputs.unit[place] = linear_integers(y, b.group, integers);
        int8_t* to = static_cast<int8_t*>(inputs.factors) + place * bytes;
        for (int i = 0; i < 64 * vectors; ++i) to[i] = integers[w.channels[i]];
        if (kLevelBias == 0) continue;
        int32_t* correction = reinterpret_cast<int32_t*>(to + 64 * vectors);
        for (int p = 0; p < parts; ++p) {
          Ints sum = broadcast(0);
          const Bytes ones = broadcast(uint8_t{1});
          for (int i = 0; i < of_part; ++i) {
            sum = multiply_add(sum, ones, load(reinterpret_cast<const uint8_t*>(to + 64 * (of_part * p + i))));
          }
          store(correction + 16 * p, broadcast(0) - shift_left<7>(sum));
        }
      }
    }
  });
}
static_assert(kLevelBias == 0 || kLevelBias == 1 << 7);

// ---- Products -------------------------------------------------------------------------------------------------------

// The levels of the codes of one field of a byte, as products take them.
template <format::Width WIDTH>
struct WeightLevels {
  Table16 table;
  explicit WeightLevels(const int8_t* levels) {
    uint8_t bytes[16];
    for (int i = 0; i < 16; ++i) bytes[i] = level_byte(levels[i]);
    table = table16(bytes);
  }
  template <int FIELD>
  Bytes of(const Bytes& x) const {
    return lookup(table, field<4 * FIELD>(x, broadcast(uint8_t{15})));
  }
};
template <format::Width WIDTH>
  requires(format::levels_are_codes(WIDTH))
struct WeightLevels<WIDTH> {
  explicit WeightLevels(const int8_t*) {}
  template <int FIELD>
  Bytes of(const Bytes& x) const {
    return kLevelBias ? x ^ broadcast(static_cast<uint8_t>(kLevelBias)) : x;
  }
};

// What an integer sum of each word of a slab is multiplied with: [parts][pairs][4], the words of a pair repeat.
template <bool SUB>
inline void slab_scales(const format::WeightBlock& b, const uint8_t* block, int slab, float* to) {
  const int first = slab * format::WeightBlock::kSlabRows;
  const Half* halves = reinterpret_cast<const Half*>(block + b.scale(first));
  const Floats scale =
      load_float(halves) * broadcast(SUB ? format::kLevelUnit * format::kMultiplierUnit : format::kLevelUnit);
  Floats low, high;
  if constexpr (!SUB) {
    interleave_pairs(scale, scale, low, high);
    store(to, low);
    store(to + 16, high);
    return;
  }
  const uint8_t* codes = block + b.multiplier_code(first, 0).piece[0].byte;
  int32_t words[format::WeightBlock::kSlabRows];
  for (int i = 0; i < format::WeightBlock::kSlabRows; ++i) {
    words[i] = b.multiplier_bytes() == 2 ? codes[2 * i] | codes[2 * i + 1] << 8 : codes[i];
  }
  Ints word = load(words);
  for (int part = 0; part < b.chunks(); ++part, word = shift_right<8>(word)) {
    const auto scaled = [&](Ints x) {
      return scale * to_floats((x & broadcast(15)) + broadcast(format::kMultiplierOffset));
    };
    interleave_pairs(scaled(word), scaled(shift_right<4>(word)), low, high);
    store(to + 32 * part, low);
    store(to + 32 * part + 16, high);
  }
}

// Adds the products of one group to the sums of `count` tokens, PAIRS pairs at once. sums: [count, kPairs, 16]
template <format::Width WIDTH, bool SUB, int CHUNKS, int PAIRS>
ALWAYS_INLINE void add_pairs(const uint8_t* codes, const float* scales, const WeightLevels<WIDTH>& levels,
                             const uint8_t* factors, int64_t factor_bytes, const float* unit, int count, float* sums) {
  constexpr int kFields = linear_fields(WIDTH), kVectors = CHUNKS * kFields, kParts = SUB ? CHUNKS : 1;
  constexpr int kOfPart = kVectors / kParts;
  Bytes level[PAIRS][kVectors];
  Floats scale[PAIRS][kParts];
#pragma GCC unroll kUnroll
  for (int p = 0; p < PAIRS; ++p) {
#pragma GCC unroll kUnroll
    for (int c = 0; c < CHUNKS; ++c) {
      const Bytes x = load(codes + c * format::WeightBlock::kWarpBytes + p * kPairBytes);
      level[p][kFields * c] = levels.template of<0>(x);
      if constexpr (kFields == 2) level[p][2 * c + 1] = levels.template of<1>(x);
    }
#pragma GCC unroll kUnroll
    for (int i = 0; i < kParts; ++i) scale[p][i] = broadcast_four(scales + 32 * i + 4 * p);
  }
  for (int t = 0; t < count; ++t, factors += factor_bytes, sums += kPairs * 16) {
    const Floats u = broadcast(unit[t]);
#pragma GCC unroll kUnroll
    for (int p = 0; p < PAIRS; ++p) {
      Floats sum = broadcast(0.0f);
#pragma GCC unroll kUnroll
      for (int i = 0; i < kParts; ++i) {
        Ints dot = broadcast(0);
        if constexpr (kLevelBias != 0) dot = load(reinterpret_cast<const int32_t*>(factors + 64 * (kVectors + i)));
#pragma GCC unroll kUnroll
        for (int v = 0; v < kOfPart; ++v) {
          dot = multiply_add(dot, level[p][kOfPart * i + v], load(factors + 64 * (kOfPart * i + v)));
        }
        const Floats part = to_floats(dot) * scale[p][i];
        sum = i ? sum + part : part;
      }
      store(sums + 16 * p, load(sums + 16 * p) + sum * u);
    }
  }
}

// Rows of a slab from the sums of its words: [16].
inline void slab_rows(const float* sums, float* rows) {
  for (int p = 0; p < kPairs; ++p) {
    Floats x = load(sums + 16 * p);
    x = x + swap_lanes<8>(x);
    x = x + swap_lanes<4>(x);
    x = x + swap_lanes<2>(x);
    float lane[16];
    store(lane, x);
    rows[p] = lane[0], rows[p + kPairs] = lane[1];
  }
}

template <format::Width WIDTH, bool SUB, int CHUNKS>
inline void linear_slab(const LinearWeight& w, const WeightLevels<WIDTH>& levels, const LinearInputs& in, int64_t slab,
                        int64_t token, int count, float* sums) {
  constexpr int kAtOnce = kUnroll > 1 ? 2 : 1;
  const format::WeightBlock b = w.blocks.block;
  const int64_t bytes = linear_factor_bytes(b), block_bytes = b.block_bytes();
  constexpr int kSlabs = format::kWeightRows / format::WeightBlock::kSlabRows;
  const int inside = static_cast<int>(slab % kSlabs);
  const uint8_t* block = w.packed + slab / kSlabs * w.blocks.groups * block_bytes;
  const uint8_t* factors = static_cast<const uint8_t*>(in.factors) + token * bytes;
  const float* unit = in.unit + token;
  memset(sums, 0, sizeof(float) * 16 * kPairs * count);
  alignas(64) float scales[32 * CHUNKS];
  for (int64_t group = 0; group < w.blocks.groups; ++group) {
    const uint8_t* codes = block + inside * b.slab_bytes();
    slab_scales<SUB>(b, block, inside, scales);
    if (group + 1 < w.blocks.groups) prefetch(codes + block_bytes, b.slab_bytes());
    for (int p = 0; p < kPairs; p += kAtOnce) {
      add_pairs<WIDTH, SUB, CHUNKS, kAtOnce>(codes + p * kPairBytes, scales + 4 * p, levels, factors, bytes, unit,
                                             count, sums + 16 * p);
    }
    block += block_bytes, factors += in.count * bytes, unit += in.count;
  }
}

template <format::Width WIDTH, bool SUB, int CHUNKS>
inline void linear_slabs_of(const LinearWeight& w, const LinearInputs& in, int64_t begin, int64_t end,
                            const LinearOutputs& out) {
  constexpr int kRows = format::WeightBlock::kSlabRows;
  const WeightLevels<WIDTH> levels(w.levels);
  alignas(64) float sums[kLinearTokens * kPairs * 16], rows[kRows];
  dispatch_dtype<ElementTypes>(out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* bias = static_cast<const T*>(out.bias);
    for (int64_t slab = begin; slab < end; ++slab) {
      const int64_t first = slab * kRows, rest = w.blocks.n - first;
      const int64_t count = rest < kRows ? rest : kRows;
      const Floats add = bias ? load_some<false>(bias + first, count) : broadcast(0.0f);
      for (int64_t token = 0; token < in.count; token += kLinearTokens) {
        const int64_t left = in.count - token;
        const int tokens = static_cast<int>(left < kLinearTokens ? left : kLinearTokens);
        linear_slab<WIDTH, SUB, CHUNKS>(w, levels, in, slab, token, tokens, sums);
        for (int t = 0; t < tokens; ++t) {
          slab_rows(sums + t * kPairs * 16, rows);
          const Floats y = bias ? load(rows) + add : load(rows);
          store_some<false>(static_cast<T*>(out.y) + (token + t) * w.blocks.n + first, y, count);
        }
      }
    }
  });
}

inline void linear_slabs(const LinearWeight& w, const LinearInputs& in, int64_t begin, int64_t end,
                         const LinearOutputs& out) {
  const format::WeightBlock& b = w.blocks.block;
  const bool wide = b.group == 128;
  if (format::levels_are_codes(b.width())) {
    return wide ? linear_slabs_of<format::Width::k8, false, 4>(w, in, begin, end, out)
                : linear_slabs_of<format::Width::k8, false, 2>(w, in, begin, end, out);
  }
  constexpr auto kNibble = format::Width::k4;
  if (b.sub) {
    return wide ? linear_slabs_of<kNibble, true, 2>(w, in, begin, end, out)
                : linear_slabs_of<kNibble, true, 1>(w, in, begin, end, out);
  }
  return wide ? linear_slabs_of<kNibble, false, 2>(w, in, begin, end, out)
              : linear_slabs_of<kNibble, false, 1>(w, in, begin, end, out);
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
