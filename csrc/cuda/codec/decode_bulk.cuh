// From stored codes to the operands of codec/decode_bulk.cu's products on integer tensor cores: levels on the left, butterflies on
// the right. A lane holds a quarter of the channels of two tokens, which byte permutations look up four at a time.
#pragma once

#include "cuda/codec/encode_bulk.cuh"
#include "cuda/common/mma.cuh"

namespace turboquant::cuda {

constexpr int kTokens = 16;               // of a warp: rows g and g + 8 of products, g = lane / 4
constexpr int kScaleBytes = 2 * kTokens;  // their scales
constexpr int kSetChannels = 64;          // of one product: a set

// ---- Channels ---------------------------------------------------------------------------------------------------------

// A set is two matrix products of 32 channels each, `half` the first or second word of their left operands, t = lane %
// 4. Codes arrive in words of eight: of keys, and dense rows, neighbours; of values, those that share a byte of four
// units.
//   keys:   channel bits 0, 1 = byte, 2 = product, 3 = half, 4, 5 = t
//   values: channel bits 3, 4 = byte, 5 = product, 0 = half, 1, 2 = t
__device__ __forceinline__ int channel_of_operand(bool values, int product, int half, int t, int byte) {
  return values ? half | t << 1 | byte << 3 | product << 5 : byte | product << 2 | half << 3 | t << 4;
}
// Column of the right operand (step, word): a lane's 8 neighbours of a step are two columns of four words.
__device__ __forceinline__ int channel_of_column(int step, int word, int column) {
  return column % 2 | word << 1 | column / 2 << 3 | step << 5;
}

// What a lane holds of the right operand (step, word), for both products: 1 or -1, as bytes. The sign of a byte is the
// parity of the bits that its channel and the column share: that of byte 0, and what bits 0 and 1 of the byte change.
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

// ---- Codes ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t load_word(const uint8_t* from) { return *reinterpret_cast<const uint32_t*>(from); }

// N words of shared memory, two or four of them at a time where N allows it.
template <int N>
__device__ __forceinline__ void load_words(const uint8_t* from, uint32_t* to) {
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

// Where a lane reads the codes of its tokens, in bytes from where those of 16 tokens start: found once for all tiles.
struct LaneReads {
  int codes, to_other, to_set, to_sets;  // of the first; to the other token or eight values, the next set, the next two
  int planes;                            // bytes of a token's fifth bits

  static __device__ __forceinline__ LaneReads of_keys(const RecordLayout& r, int g, int t) {
    const int bits = r.key_bits == 5 ? 4 : r.key_bits, row = r.key_row_bytes;
    return {g * row + (bits == 3 ? 12 * (t / 2) : 2 * bits * t), 8 * row, 8 * bits, 16 * bits, r.key_plane_bytes};
  }

  // The lane's channels are 2 t and 2 t + 1 of each eight; both tokens come together.
  static __device__ __forceinline__ LaneReads of_values(const RecordLayout& r, int sets, int g, int t) {
    const int bits = r.value_bits, words = bits == 2 && sets == 1 ? 2 : bits == 3 ? 3 : 4;
    return {4 * words * (8 * t + g / 2), 16 * words, bits == 2 ? 8 : 128 * bits, bits == 2 ? 512 : 256 * bits, 0};
  }

  // Codes of odd bits start in the middle of a word.
  static __device__ __forceinline__ LaneReads of_rows(int bits, int row_bytes, int g, int t) {
    return {g * row_bytes + (2 * bits * t & ~3), 8 * row_bytes, 8 * bits, 16 * bits, 0};
  }
};

// Words that hold the 16 codes of a lane of one token and set; of values, eight of both tokens.
template <Kind KIND, int BITS>
__host__ __device__ constexpr int read_words() {
  if (BITS == 8) return 4;
  if (KIND == Kind::kValues) return BITS;
  if (KIND == Kind::kKeys) return BITS == 5 ? 3 : BITS == 4 ? 2 : BITS == 3 ? 3 : 1;
  return (BITS + 1) / 2;  // those of odd bits start in the middle of a word
}

// The codes of a lane's two tokens as they are stored: [set][token][..], of values [set][eight of both tokens][..].
template <typename Traits, Kind KIND, int BITS>
struct StoredCodes {
  uint32_t word[Traits::kSets][2][read_words<KIND, BITS>()];

  // codes: those of 16 tokens, in shared memory.
  __device__ __forceinline__ StoredCodes(const LaneReads& reads, const uint8_t* codes, int key_row_bytes, int g,
                                         int t) {
#pragma unroll
    for (int h = 0; h < Traits::kSets; ++h) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint8_t* from = codes + (reads.codes + h / 2 * reads.to_sets + h % 2 * reads.to_set + i * reads.to_other);
        uint32_t* to = word[h][i];
        if constexpr (KIND == Kind::kRows && BITS == 8) {
          load_words<2>(from, to), load_words<2>(from + 8, to + 2);
        } else if constexpr (KIND == Kind::kRows && BITS == 3) {  // aligned to 4 bytes only
          to[0] = load_word(from), to[1] = load_word(from + 4);
        } else if constexpr (KIND == Kind::kKeys && BITS == 5) {  // a plane has the fifth bits
          load_words<2>(from, to);
          to[2] = load_word(codes + kTokens * key_row_bytes + (g + 8 * i) * reads.planes + 8 * h + 4 * (t / 2));
        } else {
          load_words<read_words<KIND, BITS>()>(from, to);
        }
      }
    }
  }
};

// Eight codes of up to four bits as nibbles. `fifth`: their fifth bits, those of codes 2 b and 2 b + 1 bits 6 and 7 of
// byte b, whose other bits mean nothing.
struct Codes {
  uint32_t low, fifth;
};

// 16 codes of a key.
template <int BITS>
__device__ __forceinline__ void open_key(const uint32_t* w, int t, Codes (&codes)[2]) {
  if constexpr (BITS >= 4) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      codes[n].low = w[n];
      if constexpr (BITS == 5) {
        codes[n].fifth = w[2] << (6 - 2 * n - 4 * (t % 2));
      }
    }
  } else if constexpr (BITS == 3) {
    // The uppermost bits of the nibbles of three words are the last eight codes.
    const uint32_t last = select_bits(0x88888888, w[2], select_bits(0x88888888, w[1], w[0] >> 1) >> 1) >> 1;
    codes[0].low = (t % 2 ? w[2] : w[0]) & 0x77777777;
    codes[1].low = (t % 2 ? last : w[1]) & 0x77777777;
  } else {
    codes[0].low = open_nibbles(w[0], 2), codes[1].low = open_nibbles(w[0] >> 16, 2);
  }
}

// The same of a dense row.
template <int BITS>
__device__ __forceinline__ void open_row(const uint32_t* w, int t, Codes (&codes)[2]) {
  const int shift = BITS % 2 ? 16 * (t % 2) : 0;
  if constexpr (BITS == 5) {
    const uint32_t first = __funnelshift_r(w[0], w[1], shift), second = __funnelshift_r(w[1], w[2], shift),
                   third = w[2] >> shift;
    const Octet a = octet_of_string(first | static_cast<uint64_t>(second) << 32, 5),
                b = octet_of_string(second >> 8 | static_cast<uint64_t>(third) << 24, 5);
    const auto spread = [](uint32_t b) { return b << 6 | b << 12 | b << 18 | b << 24; };
    codes[0] = {a.low, spread(a.high)}, codes[1] = {b.low, spread(b.high)};
  } else if constexpr (BITS == 4) {
    codes[0].low = w[0], codes[1].low = w[1];
  } else if constexpr (BITS == 3) {
    const uint32_t first = __funnelshift_r(w[0], w[1], shift), second = w[1] >> shift;
    codes[0].low = open_nibbles(first, 3);
    codes[1].low = open_nibbles(__funnelshift_r(first, second, 24), 3);
  } else if constexpr (BITS == 2) {
    codes[0].low = open_nibbles(w[0], 2), codes[1].low = open_nibbles(w[0] >> 16, 2);
  } else {
    const uint32_t first = w[0] >> shift;
    codes[0].low = nibbles_of_bits(first & 255), codes[1].low = nibbles_of_bits(first >> 8 & 255);
  }
}

// Values of both tokens: they are bytes b and b + 2 of words, b = g % 2. w: [8 codes][words]
template <int BITS>
__device__ __forceinline__ void open_values(const uint32_t (&w)[2][BITS], int g, Codes (&codes)[2][2]) {
  const uint32_t own = g % 2 ? 0x7351 : 0x6240;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const uint32_t first = select_bytes(w[n][0], w[n][1], own);
    if constexpr (BITS == 2) {
      codes[0][n].low = open_nibbles(first, 2), codes[1][n].low = open_nibbles(first >> 16, 2);
    } else {
      const uint32_t second = select_bytes(w[n][2], w[n][BITS - 1], own);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t x = select_bytes(first, second, i ? 0x7632 : 0x5410);
        if constexpr (BITS == 3) {
          // The last two codes are the uppermost bits of the other six: a product brings them to the last byte, and
          // nothing to those bits.
          x = select_bits(0x00777777, x, (x & 0x00888888) * (1 << 21 | 1 << 14 | 1 << 7));
        }
        codes[i][n].low = x;
      }
    }
  }
}

// ---- Levels -----------------------------------------------------------------------------------------------------------

// The levels of codes as bytes: eight of them, or four times eight.
struct LevelWords {
  uint32_t word[8];

  // levels: as `fill` leaves them.
  __device__ __forceinline__ explicit LevelWords(const int8_t (&levels)[32]) {
#pragma unroll
    for (int w = 0; w < 8; ++w) word[w] = reinterpret_cast<const uint32_t*>(levels)[w];
  }

  // Writes level `code` of 32 to shared memory.
  static __device__ __forceinline__ void fill(int8_t (&to)[32], const int8_t* levels, int bits, int code) {
    to[code] = static_cast<int8_t>(code < 1 << bits ? format::level_of_code(bits, levels, code) : 0);
  }

  // Of the four low nibbles.
  __device__ __forceinline__ uint32_t eight(int first, uint32_t nibbles) const {
    return select_bytes(word[first], word[first + 1], nibbles);
  }

  // Of codes 4 n to 4 n + 3. low: the lower three bits of all eight.
  template <int BITS>
  __device__ __forceinline__ uint32_t of(const Codes& codes, uint32_t low, int n) const {
    low >>= 16 * n;
    if constexpr (BITS <= 3) return eight(0, low);
    const uint32_t fourth = signs(codes.low << 4, codes.low, n);
    uint32_t bytes = select_bits(fourth, eight(2, low), eight(0, low));
    if constexpr (BITS == 5) {
      const uint32_t fifth = signs(codes.fifth << 1, codes.fifth, n);
      bytes = select_bits(fifth, select_bits(fourth, eight(6, low), eight(4, low)), bytes);
    }
    return bytes;
  }

 private:
  // Four bytes, 255 where a byte is negative, else 0: bytes 2 n of `even`, 2 n of `odd`, 2 n + 1 of `even`, 2 n + 1 of `odd`.
  static __device__ __forceinline__ uint32_t signs(uint32_t even, uint32_t odd, int n) {
    return select_bytes(even, odd, n ? 0xFBEA : 0xD9C8);
  }
};

// The left operands [set][product] of two tokens.
template <typename Traits>
using Operands = uint32_t[Traits::kSets][2][4];

// count: how many of the 16 tokens are there.
template <typename Traits, Kind KIND, int BITS>
__device__ __forceinline__ void put_levels(const StoredCodes<Traits, KIND, BITS>& stored, const LevelWords& table,
                                           int count, int g, int t, Operands<Traits>& a) {
#pragma unroll
  for (int h = 0; h < Traits::kSets; ++h) {
    Codes codes[2][2] = {};  // [token][half]
    if constexpr (BITS == 8) {
      // levels already
    } else if constexpr (KIND == Kind::kValues) {
      open_values<BITS>(stored.word[h], g, codes);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (KIND == Kind::kKeys) open_key<BITS>(stored.word[h][i], t, codes[i]);
        if constexpr (KIND == Kind::kRows) open_row<BITS>(stored.word[h][i], t, codes[i]);
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int token = r % 2, half = r / 2;
      uint32_t low = codes[token][half].low;
      if constexpr (BITS == 4 || BITS == 5) low &= 0x77777777;
      asm("" : "+r"(low));  // masked and then shifted, not both for each product
#pragma unroll
      for (int product = 0; product < 2; ++product) {
        if constexpr (BITS == 8) {
          // Those of tokens that are not there count for nothing either way. But words that were only loaded would stay
          // in registers as they came, and every product, of codes of all widths, would begin with moves.
          a[h][product][r] = g + 8 * token < count ? stored.word[h][token][2 * half + product] : 0;
        } else {
          a[h][product][r] = table.of<BITS>(codes[token][half], low, product);
        }
      }
    }
  }
}

}  // namespace turboquant::cuda
