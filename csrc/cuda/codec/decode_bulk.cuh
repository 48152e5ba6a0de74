// Turns stored codes into the operands of the products of codec/decode_bulk_spans.cuh on integer tensor cores: levels
// are the left operand, butterflies the right one. A lane holds a quarter of the channels of two tokens; byte
// permutations look up the levels of four channels at a time.
#pragma once

#include "cuda/codec/dispatch.cuh"
#include "cuda/codec/record.cuh"
#include "cuda/common/mma.cuh"

namespace turboquant::cuda {

constexpr int kTokens = 16;               // of a warp: a lane has rows g and g + 8 of the products, g = lane / 4
constexpr int kScaleBytes = 2 * kTokens;  // the scales of these tokens
constexpr int kSetChannels = 64;          // a set: the channels of one product

// ---- Channels -------------------------------------------------------------------------------------------------------

// A set is two matrix products of 32 channels each; `half` is the first or second word of their left operands, and
// t = lane % 4. Codes arrive eight to a word: in keys and dense rows, these are neighbours; in values, they are the
// channels that share a byte in four units.
//   keys:   channel bits 0, 1 = byte, 2 = product, 3 = half, 4, 5 = t
//   values: channel bits 3, 4 = byte, 5 = product, 0 = half, 1, 2 = t
__device__ __forceinline__ int channel_of_operand(bool values, int product, int half, int t, int byte) {
  return values ? half | t << 1 | byte << 3 | product << 5 : byte | product << 2 | half << 3 | t << 4;
}
// The channel of a column of the right operand (step, word): a lane's 8 neighbours of a step are two columns of four
// words.
__device__ __forceinline__ int channel_of_column(int step, int word, int column) {
  return column % 2 | word << 1 | column / 2 << 3 | step << 5;
}

// A lane's part of the right operand (step, word) for both products, bytes of 1 or -1. The sign of a byte is the parity
// of the bits that its channel and the column share: the parity for byte 0, flipped where bits 0 and 1 of the byte's
// number demand it.
__device__ __forceinline__ uint4 butterfly_operand(bool values, int step, int word, int lane) {
  const int n = channel_of_column(step, word, lane / 4), t = lane % 4;
  const auto flips = [n](int channel, uint32_t bytes) { return __popc(channel & n) & 1 ? bytes : 0; };
  const uint32_t own = 0x01010101 ^ flips(channel_of_operand(values, 0, 0, t, 0), 0xFEFEFEFE) ^
                       flips(channel_of_operand(values, 0, 0, 0, 1), 0xFE00FE00) ^
                       flips(channel_of_operand(values, 0, 0, 0, 2), 0xFEFE0000);
  const uint32_t half = flips(channel_of_operand(values, 0, 1, 0, 0), 0xFEFEFEFE),
                 product = flips(channel_of_operand(values, 1, 0, 0, 0), 0xFEFEFEFE);
  return make_uint4(own, own ^ half, own ^ product, own ^ half ^ product);
}

// ---- Codes ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t load_word(const uint8_t* from) { return *reinterpret_cast<const uint32_t*>(from); }

// Loads N words of shared memory, two or four of them at a time where N allows it.
template <int N>
__device__ __forceinline__ void load_shared_words(const uint8_t* from, uint32_t* to) {
  if constexpr (N == 4) {
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  } else if constexpr (N == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    to[0] = x.x, to[1] = x.y;
  } else {
#pragma unroll
    for (int n = 0; n < N; ++n) to[n] = load_word(from + 4 * n);
  }
}

// Where a lane reads the codes of its tokens, in bytes from the start of the codes of 16 tokens: computed once for all
// spans.
struct LaneReads {
  int codes;     // of the first token
  int to_other;  // distance to the codes of the other token, or to the next eight values
  int to_set;    // distance to the next set
  int to_sets;   // distance to the set after that
  int planes;    // bytes of a token's fifth bits

  static __device__ __forceinline__ LaneReads of_keys(const RecordLayout& r, int g, int t) {
    const Width width = r.key_width();
    const int bits = format::has_plane(width) ? 4 : r.key_bits, row = r.key_row_bytes;
    return {g * row + (format::is_spread(width) ? 12 * (t / 2) : 2 * bits * t), 8 * row, 8 * bits, 16 * bits,
            r.key_plane_bytes};
  }

  // The lane's channels are 2 t and 2 t + 1 of each eight; one word has both tokens. A set has `bits` units: two sets
  // of 2-bit codes share a chunk.
  static __device__ __forceinline__ LaneReads of_values(const RecordLayout& r, int sets, int g, int t) {
    const Width width = r.value_width();
    const int bits = r.value_bits;
    const bool shared = width == Width::k2;
    const int words = shared && sets == 1 ? 2 : format::is_spread(width) ? format::kSpreadUnits : format::kChunkUnits;
    return {4 * words * (8 * t + g / 2), 16 * words, shared ? 8 : format::kUnitBytes * bits,
            shared ? format::kChunkBytes : 2 * format::kUnitBytes * bits, 0};
  }

  // Codes of an odd number of bits start in the middle of a word.
  static __device__ __forceinline__ LaneReads of_rows(int bits, int row_bytes, int g, int t) {
    return {g * row_bytes + (2 * bits * t & ~3), 8 * row_bytes, 8 * bits, 16 * bits, 0};
  }
};

// The number of words that hold the 16 codes of a lane's token and set; of values, eight codes of both tokens.
template <Kind KIND, Width WIDTH>
__host__ __device__ constexpr int lane_words() {
  constexpr int bits = format::num_bits(WIDTH);
  if (format::levels_are_codes(WIDTH)) return 4;
  if (KIND == Kind::kValues) return bits;
  if (KIND == Kind::kRows) return (bits + 1) / 2;  // codes of an odd number of bits start in the middle of a word
  switch (format::storage(WIDTH)) {
    case format::Storage::kFields: return bits / 2;
    case format::Storage::kSpread: return 3;  // the words of a group: the lane has half of its codes
    case format::Storage::kPlane: return 3;   // nibbles, and a word of the plane
  }
  return 0;
}

// A lane's part of 16 bytes of 8-bit values, four codes of each of four tokens: those of its two tokens, which are
// bytes b and b + 2 of each word, b = g % 2.
__device__ __forceinline__ void load_byte_values(const uint8_t* from, int g, uint32_t& first, uint32_t& second) {
  const uint32_t own = g % 2 ? 0x7351 : 0x6240;
  const uint4 x = *reinterpret_cast<const uint4*>(from);
  const uint32_t low = select_bytes(x.x, x.y, own), high = select_bytes(x.z, x.w, own);
  first = select_bytes(low, high, 0x5410), second = select_bytes(low, high, 0x7632);
}

// The codes of a lane's two tokens in their stored form: [set][token][..], of values [set][eight codes of both
// tokens][..]. Values of 8 bits are put in order: [set][half][2 token + product].
template <typename Traits, Kind KIND, Width WIDTH>
struct StoredCodes {
  uint32_t word[Traits::kSets][2][lane_words<KIND, WIDTH>()];

  // codes: of 16 tokens, in shared memory.
  __device__ __forceinline__ StoredCodes(const LaneReads& reads, const uint8_t* codes, int key_row_bytes, int g,
                                         int t) {
#pragma unroll
    for (int h = 0; h < Traits::kSets; ++h) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint8_t* from = codes + (reads.codes + h / 2 * reads.to_sets + h % 2 * reads.to_set + i * reads.to_other);
        uint32_t* to = word[h][i];
        if constexpr (KIND == Kind::kRows && format::levels_are_codes(WIDTH)) {  // rows are aligned to 8 bytes only
          load_shared_words<2>(from, to), load_shared_words<2>(from + 8, to + 2);
        } else if constexpr (KIND == Kind::kValues && format::levels_are_codes(WIDTH)) {
          load_byte_values(from, g, to[0], to[2]), load_byte_values(from + format::kChunkBytes, g, to[1], to[3]);
        } else if constexpr (KIND == Kind::kRows && WIDTH == Width::k3) {  // aligned to 4 bytes only
          to[0] = load_word(from), to[1] = load_word(from + 4);
        } else if constexpr (KIND == Kind::kKeys && format::has_plane(WIDTH)) {
          load_shared_words<2>(from, to);
          to[2] = load_word(codes + kTokens * key_row_bytes + (g + 8 * i) * reads.planes + 8 * h + 4 * (t / 2));
        } else {
          load_shared_words<lane_words<KIND, WIDTH>()>(from, to);
        }
      }
    }
  }
};

// Eight codes: nibbles of the low bits, and fifth bits, where bits 6 and 7 of byte b belong to codes 2 b and 2 b + 1
// and the other bits may be anything.
struct EightCodes {
  uint32_t low, fifth;
};

// 16 codes of a key.
template <Width WIDTH>
__device__ __forceinline__ void open_key(const uint32_t* w, int t, EightCodes (&codes)[2]) {
  if constexpr (WIDTH == Width::k4 || format::has_plane(WIDTH)) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      codes[n].low = w[n];
      if constexpr (format::has_plane(WIDTH)) {
        codes[n].fifth = w[2] << (6 - 2 * n - 4 * (t % 2));
      }
    }
  } else if constexpr (format::is_spread(WIDTH)) {
    // The uppermost bits of the nibbles of three words are the last eight codes.
    const uint32_t last = select_bits(0x88888888, w[2], select_bits(0x88888888, w[1], w[0] >> 1) >> 1) >> 1;
    codes[0].low = (t % 2 ? w[2] : w[0]) & 0x77777777;
    codes[1].low = (t % 2 ? last : w[1]) & 0x77777777;
  } else {
    static_assert(WIDTH == Width::k2, "no such keys");
    codes[0].low = open_nibbles(w[0], 2), codes[1].low = open_nibbles(w[0] >> 16, 2);
  }
}

// The same of a dense row.
template <Width WIDTH>
__device__ __forceinline__ void open_row(const uint32_t* w, int t, EightCodes (&codes)[2]) {
  const int shift = format::num_bits(WIDTH) % 2 ? 16 * (t % 2) : 0;
  if constexpr (WIDTH == Width::k5) {
    const uint32_t first = __funnelshift_r(w[0], w[1], shift), second = __funnelshift_r(w[1], w[2], shift),
                   third = w[2] >> shift;
    const Octet a = octet_of_string(first | static_cast<uint64_t>(second) << 32, WIDTH),
                b = octet_of_string(second >> 8 | static_cast<uint64_t>(third) << 24, WIDTH);
    const auto spread = [](uint32_t b) { return b << 6 | b << 12 | b << 18 | b << 24; };
    codes[0] = {a.low, spread(a.high)}, codes[1] = {b.low, spread(b.high)};
  } else if constexpr (WIDTH == Width::k4) {
    codes[0].low = w[0], codes[1].low = w[1];
  } else if constexpr (WIDTH == Width::k3) {
    const uint32_t first = __funnelshift_r(w[0], w[1], shift), second = w[1] >> shift;
    codes[0].low = open_nibbles(first, 3);
    codes[1].low = open_nibbles(__funnelshift_r(first, second, 24), 3);
  } else if constexpr (WIDTH == Width::k2) {
    codes[0].low = open_nibbles(w[0], 2), codes[1].low = open_nibbles(w[0] >> 16, 2);
  } else {
    static_assert(WIDTH == Width::k1, "no such rows");
    const uint32_t first = w[0] >> shift;
    codes[0].low = nibbles_of_bits(first & 255), codes[1].low = nibbles_of_bits(first >> 8 & 255);
  }
}

// 16 values of both tokens, which are bytes b and b + 2 of words, b = g % 2. w: [eight codes][words]
template <Width WIDTH>
__device__ __forceinline__ void open_values(const uint32_t (&w)[2][format::num_bits(WIDTH)], int g,
                                            EightCodes (&codes)[2][2]) {
  static_assert(WIDTH == Width::k2 || WIDTH == Width::k3 || WIDTH == Width::k4, "no such values");
  const uint32_t own = g % 2 ? 0x7351 : 0x6240;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const uint32_t first = select_bytes(w[n][0], w[n][1], own);
    if constexpr (WIDTH == Width::k2) {
      codes[0][n].low = open_nibbles(first, 2), codes[1][n].low = open_nibbles(first >> 16, 2);
    } else {
      const uint32_t second = select_bytes(w[n][2], w[n][format::num_bits(WIDTH) - 1], own);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t x = select_bytes(first, second, i ? 0x7632 : 0x5410);
        if constexpr (format::is_spread(WIDTH)) {
          // The last two codes are the uppermost bits of the other six. The product moves these bits into the last byte
          // and leaves the bits below it alone.
          x = select_bits(0x00777777, x, (x & 0x00888888) * (1 << 21 | 1 << 14 | 1 << 7));
        }
        codes[i][n].low = x;
      }
    }
  }
}

// ---- Levels ---------------------------------------------------------------------------------------------------------

// The levels of codes as bytes, up to 32 of them.
struct LevelWords {
  uint32_t word[8];

  // levels: written by `fill`.
  __device__ __forceinline__ explicit LevelWords(const int8_t (&levels)[32]) {
#pragma unroll
    for (int w = 0; w < 8; ++w) word[w] = reinterpret_cast<const uint32_t*>(levels)[w];
  }

  // Writes level `code` of 32 to shared memory.
  static __device__ __forceinline__ void fill(int8_t (&to)[32], const int8_t* levels, Width width, int code) {
    to[code] =
        static_cast<int8_t>(code < 1 << format::num_bits(width) ? format::level_of_code(width, levels, code) : 0);
  }

  // The levels of the four low nibbles, out of the eight levels that start at word `first`.
  __device__ __forceinline__ uint32_t eight(int first, uint32_t nibbles) const {
    return select_bytes(word[first], word[first + 1], nibbles);
  }

  // The levels of codes 4 n to 4 n + 3. low: the lower three bits of all eight codes.
  template <Width WIDTH>
  __device__ __forceinline__ uint32_t of(const EightCodes& codes, uint32_t low, int n) const {
    constexpr int kLevels = format::num_levels(WIDTH);
    low >>= 16 * n;
    if constexpr (kLevels <= 8) return eight(0, low);
    const uint32_t fourth = signs(codes.low << 4, codes.low, n);
    uint32_t bytes = select_bits(fourth, eight(2, low), eight(0, low));
    if constexpr (kLevels > 16) {
      const uint32_t fifth = signs(codes.fifth << 1, codes.fifth, n);
      bytes = select_bits(fifth, select_bits(fourth, eight(6, low), eight(4, low)), bytes);
    }
    return bytes;
  }

 private:
  // Four bytes, 255 where a byte is negative, else 0: bytes 2 n of `even`, 2 n of `odd`, 2 n + 1 of `even`, 2 n + 1 of
  // `odd`.
  static __device__ __forceinline__ uint32_t signs(uint32_t even, uint32_t odd, int n) {
    return select_bytes(even, odd, n ? 0xFBEA : 0xD9C8);
  }
};

// The left operands [set][product] of two tokens.
template <typename Traits>
using Operands = uint32_t[Traits::kSets][2][4];

// count: how many of the 16 tokens exist.
template <typename Traits, Kind KIND, Width WIDTH>
__device__ __forceinline__ void put_levels(const StoredCodes<Traits, KIND, WIDTH>& stored, const LevelWords& table,
                                           int count, int g, int t, Operands<Traits>& a) {
#pragma unroll
  for (int h = 0; h < Traits::kSets; ++h) {
    EightCodes codes[2][2] = {};  // [token][half]
    if constexpr (format::levels_are_codes(WIDTH)) {
      // nothing to open
    } else if constexpr (KIND == Kind::kValues) {
      open_values<WIDTH>(stored.word[h], g, codes);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (KIND == Kind::kKeys) open_key<WIDTH>(stored.word[h][i], t, codes[i]);
        if constexpr (KIND == Kind::kRows) open_row<WIDTH>(stored.word[h][i], t, codes[i]);
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int token = r % 2, half = r / 2;
      uint32_t low = codes[token][half].low;
      if constexpr (format::fills_nibble(WIDTH) && !format::levels_are_codes(WIDTH)) low &= 0x77777777;
      asm("" : "+r"(low));  // one mask for both products
#pragma unroll
      for (int product = 0; product < 2; ++product) {
        if constexpr (KIND == Kind::kValues && format::levels_are_codes(WIDTH)) {
          a[h][product][r] = stored.word[h][half][2 * token + product];
        } else if constexpr (format::levels_are_codes(WIDTH)) {
          // The selection gives each operand a register of its own; the values of missing tokens are not used either
          // way. Without it, loaded words would stay in the registers of the load, and the products, which serve codes
          // of all widths, would begin with moves.
          a[h][product][r] = g + 8 * token < count ? stored.word[h][token][2 * half + product] : 0;
        } else {
          a[h][product][r] = table.of<WIDTH>(codes[token][half], low, product);
        }
      }
    }
  }
}

}  // namespace turboquant::cuda
