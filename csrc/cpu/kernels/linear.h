// The op linear_packed: tokens times a packed weight, straight from its codes.
//
// Activations become signed bytes, rotated and with a unit per token and group. Codes are read half a block at a time:
// rows g and g + 8 for four values of g, whose words of one t are a vector when those of the four g are put together
// (load_quarters). A word of it holds four channels of one row, so that a lane of a sum belongs to one row and, at 4
// bits, to one of the two steps of a chunk. Sums are exact in int32 up to their multiplier.
#pragma once

#include "cpu/kernels/dot_products.h"
#include "cpu/kernels/weight_codec.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

constexpr int kWords = 4;  // values of t: vectors of half a block and a chunk
constexpr int kHalfBytes = 256;
// Tiles that share the activations of a group while these are close. With few tokens memory limits, and a single run of
// it is read faster than four.
constexpr int kTilesAtOnce = 4, kFewTokens = 8;
// Processors fetch ahead by themselves, but not far enough. So a block is prefetched while the twelfth before it is
// multiplied, which takes longer than memory does. Twelve blocks fit into the innermost cache.
constexpr int kBlocksAhead = 12;
static_assert(2 * kHalfBytes == format::WeightBlock::kWarpBytes);

constexpr int linear_fields(format::Width w) { return 8 / format::num_bits(w); }  // codes of a byte

// Of a chunk: for every t and field the sixteen bytes that meet each quarter of a vector, then what the bias of levels
// adds to the four lanes of a quarter, negated.
constexpr int factor_bytes_of_chunk(format::Width w) { return 16 * (kWords * linear_fields(w) + (kLevelBias ? 1 : 0)); }
inline int64_t linear_factor_bytes(const format::WeightBlock& b) {
  return b.chunks() * factor_bytes_of_chunk(b.width());
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
  const int of_chunk = factor_bytes_of_chunk(b.width()), of_fields = 16 * kWords * linear_fields(b.width());
  alignas(64) float y[128];
  alignas(64) int8_t integers[128] = {};  // of a group
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
        uint8_t* to = static_cast<uint8_t*>(inputs.factors) + place * bytes;
        const uint8_t* channel = w.channels;
        const Table128 table = table128(reinterpret_cast<const uint8_t*>(integers));
        for (int c = 0; c < b.chunks(); ++c, to += of_chunk, channel += of_fields) {
          Ints sum = broadcast(0);
          for (int i = 0; i < of_fields; i += 64) {
            const Bytes x = lookup(table, load(channel + i));
            store(to + i, x);
            sum = multiply_add(sum, broadcast(uint8_t{1}), x);
          }
          if constexpr (kLevelBias != 0) {
            int32_t negated[16];
            store(negated, broadcast(0) - shift_left<7>(sum_quarters(sum)));
            memcpy(to + of_fields, negated, 16);
          }
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

// The format again, as constants of the kernels: a division in each block would take longer than its scales.
template <format::Width WIDTH, bool SUB, int CHUNKS>
constexpr format::WeightBlock block_of() {
  constexpr int kBits = format::num_bits(WIDTH);
  return {CHUNKS * format::WeightBlock{0, kBits, 0}.chunk_channels(), kBits, SUB ? format::kSubChannels : 0};
}

// What the sums of a block are multiplied with: [chunks][halves][16], lanes as of the sums.
template <format::Width WIDTH, bool SUB, int CHUNKS>
inline void block_scales(const uint8_t* block, float* to) {
  constexpr format::WeightBlock b = block_of<WIDTH, SUB, CHUNKS>();
  Half halves[format::kWeightRows];  // a block may be at any address
  memcpy(halves, block + b.scales(), sizeof halves);
  const Floats scale =
      load_float(halves) * broadcast(SUB ? format::kLevelUnit * format::kMultiplierUnit : format::kLevelUnit);
  Floats low, high;
  if constexpr (SUB) {
    Ints word = load_integers<CHUNKS>(block + b.multipliers());
    for (int c = 0; c < CHUNKS; ++c, word = shift_right<8>(word)) {
      const auto scaled = [&](Ints x) {
        return scale * to_floats((x & broadcast(15)) + broadcast(format::kMultiplierOffset));
      };
      interleave_pairs(scaled(word), scaled(shift_right<4>(word)), low, high);
      store(to + 32 * c, low), store(to + 32 * c + 16, high);
    }
  } else {
    interleave_pairs(scale, scale, low, high);
    for (int c = 0; c < CHUNKS; ++c) store(to + 32 * c, low), store(to + 32 * c + 16, high);
  }
}

// The levels of half a block and a chunk.
template <format::Width WIDTH>
struct HalfLevels {
  static constexpr int kFields = linear_fields(WIDTH);
  Bytes of[kWords * kFields];
  HalfLevels(const uint8_t* codes, const WeightLevels<WIDTH>& levels) {
    Bytes x[kWords];
    load_quarters(codes, 64, x);
#pragma GCC unroll kUnroll
    for (int t = 0; t < kWords; ++t) {
      of[kFields * t] = levels.template of<0>(x[t]);
      if constexpr (kFields == 2) of[2 * t + 1] = levels.template of<1>(x[t]);
    }
  }
};

// Adds the products of a chunk of a block to the sums of TOKENS tokens. factors: of the chunk, `stride` bytes from one
// token to the next; sums: [TOKENS, 2, 16]
template <format::Width WIDTH, int TOKENS>
ALWAYS_INLINE void add_chunk(const HalfLevels<WIDTH>& low, const HalfLevels<WIDTH>& high, const float* scales,
                             const uint8_t* factors, int64_t stride, const float* unit, float* sums) {
  constexpr int kVectors = kWords * linear_fields(WIDTH);
  Ints dots[2][TOKENS];
#pragma GCC unroll kUnroll
  for (int t = 0; t < TOKENS; ++t) {
    Ints start = broadcast(0);
    if constexpr (kLevelBias != 0) start = as_words(repeat_sixteen(factors + t * stride + 16 * kVectors));
    dots[0][t] = dots[1][t] = start;
  }
#pragma GCC unroll kUnroll
  for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll kUnroll
    for (int t = 0; t < TOKENS; ++t) {
      const Bytes factor = repeat_sixteen(factors + t * stride + 16 * v);
      dots[0][t] = multiply_add(dots[0][t], low.of[v], factor);
      dots[1][t] = multiply_add(dots[1][t], high.of[v], factor);
    }
  }
#pragma GCC unroll kUnroll
  for (int t = 0; t < TOKENS; ++t) {
    float* to = sums + 32 * t;
    const Floats u = broadcast(unit[t]);
    store(to, load(to) + (to_floats(dots[0][t]) * load(scales)) * u);
    store(to + 16, load(to + 16) + (to_floats(dots[1][t]) * load(scales + 16)) * u);
  }
}

// Adds the products of a block to the sums of `count` tokens. sums: [count, 2, 16]
template <format::Width WIDTH, bool SUB, int CHUNKS>
inline void add_block(const uint8_t* block, const WeightLevels<WIDTH>& levels, const uint8_t* factors,
                      const float* unit, int count, float* sums) {
  constexpr int kOfChunk = factor_bytes_of_chunk(WIDTH), kStride = CHUNKS * kOfChunk;
  alignas(64) float scales[32 * CHUNKS];
  block_scales<WIDTH, SUB, CHUNKS>(block, scales);
  for (int c = 0; c < CHUNKS; ++c) {
    const uint8_t* codes = block + c * format::WeightBlock::kWarpBytes;
    const HalfLevels<WIDTH> low(codes, levels), high(codes + kHalfBytes, levels);
    const uint8_t* of_chunk = factors + c * kOfChunk;
    in_fours(count, [&]<int TOKENS>(int t) __attribute__((always_inline)) {
      add_chunk<WIDTH, TOKENS>(low, high, scales + 32 * c, of_chunk + t * kStride, kStride, unit + t, sums + 32 * t);
    });
  }
}

// The rows of a tile from the sums of its halves.
inline void tile_rows(const float* sums, float* rows) {
  for (int half = 0; half < 2; ++half) {
    const Floats x = load(sums + 16 * half);
    float lane[16];
    store(lane, x + swap_lanes<2>(x));
    for (int i = 0; i < 4; ++i) rows[4 * half + i] = lane[4 * i], rows[8 + 4 * half + i] = lane[4 * i + 1];
  }
}

template <format::Width WIDTH, bool SUB, int CHUNKS>
inline void linear_tiles_of(const LinearWeight& w, const LinearInputs& in, int64_t begin, int64_t end,
                            const LinearOutputs& out) {
  constexpr int kRows = format::kWeightRows, kBytes = CHUNKS * factor_bytes_of_chunk(WIDTH);
  constexpr int64_t block_bytes = block_of<WIDTH, SUB, CHUNKS>().block_bytes();
  const int64_t groups = w.blocks.groups;
  const WeightLevels<WIDTH> levels(w.levels);
  alignas(64) float sums[kTilesAtOnce][kLinearTokens * 32], rows[kRows];
  for (int64_t next, first = begin; first < end; first = next) {
    const int at_once = in.count > kFewTokens ? kTilesAtOnce : 1;
    next = first + at_once;
    next = next < end ? next : end;
    const int64_t ahead = kBlocksAhead / at_once * block_bytes;
    for (int64_t token = 0; token < in.count; token += kLinearTokens) {
      const int64_t left = in.count - token;
      const int count = static_cast<int>(left < kLinearTokens ? left : kLinearTokens);
      for (int64_t tile = first; tile < next; ++tile) memset(sums[tile - first], 0, sizeof(float) * 32 * count);
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t place = group * in.count + token;
        const uint8_t* factors = static_cast<const uint8_t*>(in.factors) + place * kBytes;
        for (int64_t tile = first; tile < next; ++tile) {
          const uint8_t* block = w.packed + (tile * groups + group) * block_bytes;
          prefetch(block + ahead, block_bytes);
          add_block<WIDTH, SUB, CHUNKS>(block, levels, factors, in.unit + place, count, sums[tile - first]);
        }
      }
      dispatch_dtype<ElementTypes>(out.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        const T* bias = static_cast<const T*>(out.bias);
        for (int64_t tile = first; tile < next; ++tile) {
          const int64_t row = tile * kRows, rest = w.blocks.n - row;
          const Floats add = bias ? load_some<false>(bias + row, rest) : broadcast(0.0f);
          for (int t = 0; t < count; ++t) {
            tile_rows(sums[tile - first] + 32 * t, rows);
            const Floats y = bias ? load(rows) + add : load(rows);
            store_some<false>(static_cast<T*>(out.y) + (token + t) * w.blocks.n + row, y, rest);
          }
        }
      });
    }
  }
}

inline void linear_tiles(const LinearWeight& w, const LinearInputs& in, int64_t begin, int64_t end,
                         const LinearOutputs& out) {
  const format::WeightBlock& b = w.blocks.block;
  const bool wide = b.group == 128;
  if (format::levels_are_codes(b.width())) {
    return wide ? linear_tiles_of<format::Width::k8, false, 4>(w, in, begin, end, out)
                : linear_tiles_of<format::Width::k8, false, 2>(w, in, begin, end, out);
  }
  constexpr auto kNibble = format::Width::k4;
  if (b.sub) {
    return wide ? linear_tiles_of<kNibble, true, 2>(w, in, begin, end, out)
                : linear_tiles_of<kNibble, true, 1>(w, in, begin, end, out);
  }
  return wide ? linear_tiles_of<kNibble, false, 2>(w, in, begin, end, out)
              : linear_tiles_of<kNibble, false, 1>(w, in, begin, end, out);
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
