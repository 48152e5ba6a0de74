// Encodes and decodes weights in blocks (docs/format.md section 13), and takes their codes apart.
#pragma once

#include "cpu/kernels/vector_codec.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

// A row of a block: its codes and its multiplier codes.
constexpr int kMostSubs = 4;
struct WeightRow {
  const uint8_t* codes;  // [group]
  uint16_t scale;
  uint8_t multipliers[kMostSubs];
};

// Four channels that are neighbours share two bytes, or have one each.
template <format::Width WIDTH>
inline void put_weight_row(const format::WeightBlock& b, uint8_t* block, int row, const WeightRow& from) {
  const format::WeightBlock of{b.group, format::num_bits(WIDTH), b.sub};
  for (int c = 0; c < b.group; c += 4) {
    uint8_t* to = block + of.code(row, c).piece[0].byte;
    const uint8_t* code = from.codes + c;
    if constexpr (format::levels_are_codes(WIDTH)) {
      memcpy(to, code, 4);
    } else {
      to[0] = static_cast<uint8_t>(code[0] | code[1] << 4), to[1] = static_cast<uint8_t>(code[2] | code[3] << 4);
    }
  }
  memcpy(block + of.scale(row), &from.scale, sizeof from.scale);
  for (int s = 0; s < of.subs(); ++s) format::write_code(block, of.multiplier_code(row, s), from.multipliers[s]);
}
template <format::Width WIDTH>
inline void take_weight_row(const format::WeightBlock& b, const uint8_t* block, int row, uint8_t* codes,
                            uint16_t* scale, uint8_t* multipliers) {
  const format::WeightBlock of{b.group, format::num_bits(WIDTH), b.sub};
  for (int c = 0; c < b.group; c += 4) {
    const uint8_t* from = block + of.code(row, c).piece[0].byte;
    if constexpr (format::levels_are_codes(WIDTH)) {
      memcpy(codes + c, from, 4);
    } else {
      for (int i = 0; i < 4; ++i) codes[c + i] = from[i / 2] >> i % 2 * 4 & 15;
    }
  }
  memcpy(scale, block + of.scale(row), sizeof *scale);
  for (int s = 0; s < of.subs(); ++s) {
    multipliers[s] = static_cast<uint8_t>(format::read_code(block, of.multiplier_code(row, s)));
  }
}

// Calls fn(block number, tile, group, rows of the weight in the tile) for blocks [begin, end).
template <typename Fn>
inline void for_each_block(const WeightBlocks& w, int64_t begin, int64_t end, Fn&& fn) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t tile = i / w.groups, rest = w.n - tile * format::kWeightRows;
    fn(i, tile, i % w.groups, static_cast<int>(rest < format::kWeightRows ? rest : format::kWeightRows));
  }
}

// ---- Encoding with multipliers --------------------------------------------------------------------------------------

// Of every 32 channels under one step, or with the multiplier that they have chosen: lane i, and lanes 4 l + i, are
// those of channels 32 i to 32 i + 31.
struct SubSums {
  Floats dot, square;
};

// Lane 4l + i becomes the sum of lanes i, 4 + i, 8 + i and 12 + i.
inline Ints sum_quarters(Ints x) {
  x = x + as_ints(swap_lanes<4>(as_floats(x)));
  return x + as_ints(swap_lanes<8>(as_floats(x)));
}

// A and B of every 32 channels under one step.
template <int BITS, int SUBS>
inline SubSums sums_of_subs(const EncoderScratch& s, const Boundaries<BITS>& boundaries, const LevelTable& levels) {
  const Ints zero = broadcast(0);
  Ints dots[kMostSubs] = {zero, zero, zero, zero}, squares[kMostSubs] = {zero, zero, zero, zero};
#pragma GCC unroll kUnroll
  for (int i = 0; i < SUBS; ++i) {
    const int c = format::kSubChannels * i;
    const Shorts high = load(s.high + c), level = lookup(levels, count_boundaries(boundaries, high));
    dots[i] = multiply_add(shift_left<4>(multiply_add(zero, high, level)), load(s.low + c), level);
    squares[i] = multiply_add(zero, level, level);
  }
  return {to_floats(sum_quarters(sum_quads(dots[0], dots[1], dots[2], dots[3]))) *
              broadcast(1 / format::kUnitsPerSigma),
          to_floats(sum_quarters(sum_quads(squares[0], squares[1], squares[2], squares[3])))};
}

// Codes with a table of levels. Chooses the candidate and a multiplier for every 32 channels, leaves the codes in
// s.codes, and returns the scale before the power of two is put back.
template <format::Width WIDTH, int SUBS>
inline float search_multipliers(EncoderScratch& s, const Quantiser& q, float over, float r, uint8_t* multipliers) {
  constexpr int kBits = format::num_bits(WIDTH);
  using Tree = Boundaries<kBits>;
  const LevelTable levels = level_table(q.levels);
  float best_dot = 0, best_square = 1, best_merit = -1;
  int best = 0;
  for (int first = 0; first < q.num_steps; first += format::kMultiplierCodes) {
    SubSums chosen{broadcast(0.0f), broadcast(0.0f)};
    Floats best_gain = broadcast(-kInfinity);
    Ints chosen_code = broadcast(0);
    for (int m = 0; m < format::kMultiplierCodes; ++m) {
      const SubSums sums = sums_of_subs<kBits, SUBS>(s, Tree(q.boundaries + kTreeNodes * (first + m)), levels);
      const Floats step = broadcast(q.steps[first + m]);
      const Floats gain = step * (broadcast(2.0f) * sums.dot - step * sums.square);
      const Mask better = best_gain < gain;
      best_gain = select(better, gain, best_gain);
      chosen_code = select(better, broadcast(m), chosen_code);
      chosen = {select(better, sums.dot, chosen.dot), select(better, sums.square, chosen.square)};
    }
    const Floats by = to_floats(chosen_code + broadcast(format::kMultiplierOffset));
    float dots[16], squares[16], dot = 0, square = 0;
    store(dots, by * chosen.dot);
    store(squares, (by * by) * chosen.square);
    for (int i = 0; i < SUBS; ++i) dot = i ? dot + dots[i] : dots[i], square = i ? square + squares[i] : squares[i];
    const float merit = dot > 0 ? dot * dot / square : 0;
    if (!(merit > best_merit)) continue;
    best = first, best_dot = dot, best_square = square, best_merit = merit;
    int32_t codes[16];
    store(codes, chosen_code);
    for (int i = 0; i < SUBS; ++i) multipliers[i] = static_cast<uint8_t>(codes[i]);
  }
  for (int i = 0; i < SUBS; ++i) {
    const Tree boundaries(q.boundaries + kTreeNodes * (best + multipliers[i]));
    const int c = format::kSubChannels * i;
    store_bytes(s.codes + c, count_boundaries(boundaries, load(s.high + c)));
  }
  return best_dot > 0 ? r * over * (best_dot / best_square) : 0;
}

// load_row has filled s.y and returned `greatest`.
template <format::Width WIDTH>
inline WeightRow encode_weight_row(EncoderScratch& s, const WeightEncoder& e, int32_t greatest) {
  const format::WeightBlock& b = e.blocks.block;
  const format::Split split{1, b.group};
  WeightRow row{s.codes, 0, {}};
  if constexpr (!format::levels_are_codes(WIDTH)) {
    if (b.sub && greatest < kNotFinite) {
      const Normalised v = normalise_row(s, split, e.signs, e.quantiser.units, greatest);
      const auto search = b.group == 128 ? search_multipliers<WIDTH, 4> : search_multipliers<WIDTH, 2>;
      const float scale = search(s, e.quantiser, e.over, v.r, row.multipliers);
      row.scale = finished_scale(scale, v.e, greatest);
      return row;
    }
  }
  row.scale = encode_row(s, split, e.signs, e.quantiser, greatest);
  return row;
}

inline void encode_weight(const WeightEncoder& e, int64_t begin, int64_t end, uint8_t* packed) {
  const format::WeightBlock& b = e.blocks.block;
  EncoderScratch s;
  dispatch_dtype<ElementTypes>(e.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    format::with_width(b.width(), [&](auto width) {
      for_each_block(e.blocks, begin, end, [&](int64_t i, int64_t tile, int64_t group, int rows) {
        uint8_t* block = packed + i * b.block_bytes();
        if (rows < format::kWeightRows) memset(block, 0, b.block_bytes());
        const format::Channels channels{nullptr, e.channel_scale ? e.channel_scale + group * b.group : nullptr,
                                        nullptr};
        const T* x = static_cast<const T*>(e.w) + tile * format::kWeightRows * e.stride + group * b.group;
        for (int row = 0; row < rows; ++row) {
          const int32_t greatest = load_row<true>(x + row * e.stride, channels, b.group, s.y);
          put_weight_row<width.value>(b, block, row, encode_weight_row<width.value>(s, e, greatest));
        }
      });
    });
  });
}

// ---- Decoding -------------------------------------------------------------------------------------------------------

inline void decode_weight(const WeightDecoder& w, const uint8_t* packed, int64_t begin, int64_t end, void* out) {
  const format::WeightBlock& b = w.blocks.block;
  const int64_t k = w.blocks.groups * b.group;
  const bool looked_up = !format::levels_are_codes(b.width());
  const Table32 table = table32(reinterpret_cast<const uint8_t*>(w.levels));
  DecoderScratch s;
  dispatch_dtype<ElementTypes>(w.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    format::with_width(b.width(), [&](auto width) {
      for_each_block(w.blocks, begin, end, [&](int64_t i, int64_t tile, int64_t group, int rows) {
        const float* inverse = w.channel_inverse ? w.channel_inverse + group * b.group : nullptr;
        T* to = static_cast<T*>(out) + tile * format::kWeightRows * k + group * b.group;
        for (int row = 0; row < rows; ++row, to += k) {
          uint16_t scale;
          uint8_t multipliers[kMostSubs] = {};
          take_weight_row<width.value>(b, packed + i * b.block_bytes(), row, s.codes, &scale, multipliers);
          for (int c = 0; c < b.group && looked_up; c += 64) store(s.levels + c, lookup(table, load(s.codes + c)));
          const int8_t* level = reinterpret_cast<const int8_t*>(looked_up ? s.levels : s.codes);
          const float unit = half_to_float(scale) * format::kLevelUnit;
          for (int c = 0; c < b.group; c += 16) {
            const int m = multipliers[c / format::kSubChannels];
            const float by = static_cast<float>(format::multiplier(m)) * format::kMultiplierUnit;
            store(s.y + c, broadcast(b.sub ? unit * by : unit) * load_float(level + c));
          }
          rotate_back(s.y, w.signs, {1, b.group});
          for (int c = 0; c < b.group; c += 16) {
            const Floats v = load(s.y + c);
            store_float(to + c, inverse ? v * load(inverse + c) : v);
          }
        }
      });
    });
  });
}

// ---- Codes one by one -----------------------------------------------------------------------------------------------

inline void pack_weight(const WeightBlocks& w, const WeightCodes& from, int64_t begin, int64_t end, uint8_t* packed) {
  const format::WeightBlock& b = w.block;
  format::with_width(b.width(), [&](auto width) {
    for_each_block(w, begin, end, [&](int64_t i, int64_t tile, int64_t group, int rows) {
      uint8_t* block = packed + i * b.block_bytes();
      if (rows < format::kWeightRows) memset(block, 0, b.block_bytes());
      for (int row = 0; row < rows; ++row) {
        const int64_t vector = (tile * format::kWeightRows + row) * w.groups + group;
        WeightRow of{from.codes + vector * b.group, from.scale[vector], {}};
        for (int s = 0; s < b.subs() && s < kMostSubs; ++s) of.multipliers[s] = from.multipliers[vector * b.subs() + s];
        put_weight_row<width.value>(b, block, row, of);
      }
    });
  });
}

inline void unpack_weight(const WeightBlocks& w, const uint8_t* packed, int64_t begin, int64_t end,
                          const WeightCodes& to) {
  const format::WeightBlock& b = w.block;
  format::with_width(b.width(), [&](auto width) {
    for_each_block(w, begin, end, [&](int64_t i, int64_t tile, int64_t group, int rows) {
      for (int row = 0; row < rows; ++row) {
        const int64_t vector = (tile * format::kWeightRows + row) * w.groups + group;
        take_weight_row<width.value>(b, packed + i * b.block_bytes(), row, to.codes + vector * b.group,
                                     to.scale + vector, to.multipliers + vector * b.subs());
      }
    });
  });
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
