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

// The best multiplier code of 32 channels under one candidate, and their sums with it.
struct SubChoice {
  int code;
  float gain, dot, square;
};

// The sums of all lanes of four vectors.
inline void sum_four(const Ints (&x)[kMostSubs], int32_t (&to)[kMostSubs]) {
  Ints sums = sum_quads(x[0], x[1], x[2], x[3]);
  sums = sums + as_ints(swap_lanes<4>(as_floats(sums)));
  sums = sums + as_ints(swap_lanes<8>(as_floats(sums)));
  int32_t lane[16];
  store(lane, sums);
  memcpy(to, lane, sizeof to);
}

// A and B of every 32 channels under one step.
template <int BITS>
inline void sums_of_subs(const EncoderScratch& s, int subs, const Boundaries<BITS>& boundaries,
                         const LevelTable& levels, int32_t (&dot)[kMostSubs], int32_t (&square)[kMostSubs]) {
  const Ints zero = broadcast(0);
  Ints dots[kMostSubs] = {zero, zero, zero, zero}, squares[kMostSubs] = {zero, zero, zero, zero};
  for (int i = 0; i < subs; ++i) {
    const int c = format::kSubChannels * i;
    const Shorts high = load(s.high + c), level = lookup(levels, count_boundaries(boundaries, high));
    dots[i] = multiply_add(shift_left<4>(multiply_add(zero, high, level)), load(s.low + c), level);
    squares[i] = multiply_add(zero, level, level);
  }
  sum_four(dots, dot);
  sum_four(squares, square);
}

// Codes with a table of levels. Chooses the candidate and a multiplier for every 32 channels, leaves the codes in
// s.codes, and returns the scale before the power of two is put back.
template <format::Width WIDTH>
inline float search_multipliers(EncoderScratch& s, int d, const Quantiser& q, float over, float r,
                                uint8_t* multipliers) {
  constexpr int kBits = format::num_bits(WIDTH);
  using Tree = Boundaries<kBits>;
  const LevelTable levels = level_table(q.levels);
  const int subs = d / format::kSubChannels;
  float best_dot = 0, best_square = 1, best_merit = -1;
  int best = 0;
  for (int first = 0; first < q.num_steps; first += format::kMultiplierCodes) {
    SubChoice choice[kMostSubs];
    for (int i = 0; i < subs; ++i) choice[i] = {-1, 0, 0, 0};
    for (int m = 0; m < format::kMultiplierCodes; ++m) {
      const Tree boundaries(q.boundaries + kTreeNodes * (first + m));
      const float step = q.steps[first + m];
      int32_t dots[kMostSubs], squares[kMostSubs];
      sums_of_subs<kBits>(s, subs, boundaries, levels, dots, squares);
      for (int i = 0; i < subs; ++i) {
        const float dot = static_cast<float>(dots[i]) * (1 / format::kUnitsPerSigma);
        const float square = static_cast<float>(squares[i]), gain = step * (2 * dot - step * square);
        if (choice[i].code < 0 || gain > choice[i].gain) choice[i] = {m, gain, dot, square};
      }
    }
    float dot = 0, square = 0;
    for (int i = 0; i < subs; ++i) {
      const float by = static_cast<float>(format::multiplier(choice[i].code));
      const float a = by * choice[i].dot, b = by * by * choice[i].square;
      dot = i ? dot + a : a, square = i ? square + b : b;
    }
    const float merit = dot > 0 ? dot * dot / square : 0;
    if (!(merit > best_merit)) continue;
    best = first, best_dot = dot, best_square = square, best_merit = merit;
    for (int i = 0; i < subs; ++i) multipliers[i] = static_cast<uint8_t>(choice[i].code);
  }
  for (int i = 0; i < subs; ++i) {
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
      const float scale = search_multipliers<WIDTH>(s, b.group, e.quantiser, e.over, v.r, row.multipliers);
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
        for (int s = 0; s < b.subs(); ++s) of.multipliers[s] = from.multipliers[vector * b.subs() + s];
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
