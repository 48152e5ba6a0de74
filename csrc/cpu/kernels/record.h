// Reads and writes the codes of one token in a page record (docs/format.md section 8), eight channels at a time: a word
// of 64 bits holds the codes of eight neighbouring channels, a byte each. csrc/format.h says the same code by code.
#pragma once

#include "cpu/kernels/bit_string.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

constexpr uint64_t kEachByte = 0x0101010101010101;

template <int BYTES = 8>
inline uint64_t load_word(const uint8_t* p) {
  uint64_t word = 0;
  memcpy(&word, p, BYTES);
  return word;
}
template <int BYTES = 8>
inline void store_word(uint8_t* p, uint64_t word) {
  memcpy(p, &word, BYTES);
}

// ---- Keys -----------------------------------------------------------------------------------------------------------

// Calls fn for the four words of each group of channels: 8 bytes each, or 4 in a last group of 16 channels.
template <int BYTES>
struct WordOf {
  static constexpr int kBytes = BYTES;
};
template <typename Fn>
inline void key_groups(int d, Fn&& fn) {
  for (int c = 0; c + 32 <= d; c += 32) fn(WordOf<8>{}, c);
  if (d % 32) fn(WordOf<4>{}, d / 32 * 32);
}

// Spread codes: the bits of the fourth word are the top bits of the nibbles of the other three.
inline void join_three_bits(const uint8_t* codes, int d, uint8_t* nibbles) {
  key_groups(d, [&](auto word, int c) {
    constexpr int n = word.kBytes;
    const uint64_t last = load_word<n>(codes + c + 3 * n);
    for (int j = 0; j < 3; ++j) {
      store_word<n>(nibbles + c / 4 * 3 + n * j, load_word<n>(codes + c + n * j) | (last >> j & kEachByte) << 3);
    }
  });
}
inline void split_three_bits(const uint8_t* nibbles, int d, uint8_t* codes) {
  key_groups(d, [&](auto word, int c) {
    constexpr int n = word.kBytes;
    uint64_t last = 0;
    for (int j = 0; j < 3; ++j) {
      const uint64_t x = load_word<n>(nibbles + c / 4 * 3 + n * j);
      store_word<n>(codes + c + n * j, x & 7 * kEachByte);
      last |= (x >> 3 & kEachByte) << j;
    }
    store_word<n>(codes + c + 3 * n, last);
  });
}

// The plane of five-bit codes: bit 4 of each code, two channels of each of the four words in a byte.
inline void join_planes(const uint8_t* codes, int d, uint8_t* plane) {
  key_groups(d, [&](auto word, int c) {
    constexpr int n = word.kBytes;
    uint64_t bits = 0;
    for (int j = 0; j < 4; ++j) {
      const uint64_t top = load_word<n>(codes + c + n * j) >> 4 & kEachByte;
      bits |= ((top | top >> 7) & 0x0003000300030003) << 2 * j;
    }
    bits = (bits | bits >> 8) & 0x0000FFFF0000FFFF;
    store_word<4>(plane + c / 8, bits | bits >> 16);
  });
}
inline void add_planes(const uint8_t* plane, int d, uint8_t* codes) {
  key_groups(d, [&](auto word, int c) {
    constexpr int n = word.kBytes;
    uint64_t bits = load_word<4>(plane + c / 8);
    bits = (bits | bits << 16) & 0x0000FFFF0000FFFF;
    bits = (bits | bits << 8) & 0x00FF00FF00FF00FF;
    for (int j = 0; j < 4; ++j) {
      const uint64_t two = bits >> 2 * j & 0x0003000300030003;
      uint8_t* at = codes + c + n * j;
      store_word<n>(at, load_word<n>(at) | ((two | two << 7) & kEachByte) << 4);
    }
  });
}

// A row of a key or a latent is a dense row of codes, or of nibbles where codes are spread or have a plane.
inline BitLayout code_row_layout(format::Width w) { return BitLayout(format::field_bits(w)); }

// codes: [channels], padded to 64. Writes the bytes of this row and plane only. layout: code_row_layout(r.width)
inline void write_row(const format::CodeRow& r, uint8_t* row, uint8_t* plane, const uint8_t* codes,
                      const BitLayout& layout) {
  const int d = r.channels, row_bytes = r.row_bytes();
  alignas(64) uint8_t nibbles[format::kMaxHeadDim + 64];
  const int bits = format::field_bits(r.width);
  switch (format::storage(r.width)) {
    case format::Storage::kSpread:
      join_three_bits(codes, d, nibbles);
      memset(nibbles + d / 4 * 3, 0, 4);  // a row may end in two bytes of padding
      return pack_row(nibbles, row, 2 * row_bytes, bits, layout, row + row_bytes);
    case format::Storage::kPlane:
      join_planes(codes, d, plane);
      for (int c = 0; c < d; c += 64) store(nibbles + c, load(codes + c) & broadcast(uint8_t{15}));
      return pack_row(nibbles, row, d, bits, layout, row + row_bytes);
    case format::Storage::kFields: return pack_row(codes, row, d, bits, layout, row + row_bytes);
  }
}

// codes: [channels rounded up to 64]. May read the bytes between the row and `end`. layout: code_row_layout(r.width)
inline void read_row(const format::CodeRow& r, const uint8_t* row, const uint8_t* plane, uint8_t* codes,
                     const BitLayout& layout, const uint8_t* end) {
  const int d = r.channels, bits = format::field_bits(r.width);
  if (format::is_spread(r.width)) {
    alignas(64) uint8_t nibbles[format::kMaxHeadDim + 64];
    unpack_row(row, nibbles, 2 * r.row_bytes(), bits, layout, end);
    split_three_bits(nibbles, d, codes);
  } else {
    unpack_row(row, codes, d, bits, layout, end);
    if (format::has_plane(r.width)) add_planes(plane, d, codes);
  }
}

inline void write_key(const format::Record& r, uint8_t* record, int token, const uint8_t* codes,
                      const BitLayout& layout) {
  const int t = token % r.tile_tokens();
  uint8_t* tile = record + r.tile_of(token);
  write_row(r.key_row(), tile + t * r.key_row_bytes(), tile + r.key_planes() + t * r.key_plane_bytes(), codes, layout);
}
inline void read_key(const format::Record& r, const uint8_t* record, int token, uint8_t* codes,
                     const BitLayout& layout) {
  const int t = token % r.tile_tokens();
  const uint8_t* tile = record + r.tile_of(token);
  read_row(r.key_row(), tile + t * r.key_row_bytes(), tile + r.key_planes() + t * r.key_plane_bytes(), codes, layout,
           record + r.record_bytes());
}

// ---- Values ---------------------------------------------------------------------------------------------------------

// Calls a visitor for the words of a token in its value block. Byte g of a word (one channel of each of some octets)
// lies g * `distance` bytes behind `at`. The visitor joins or splits the codes of these octets.
constexpr int kLaneBytes = 4 * format::kSpreadUnits;  // of a set of spread codes
template <typename Visitor>
inline void visit_values(const format::Record& r, int token, Visitor&& visit) {
  const int d = r.head_dim, t = token % r.tile_tokens(), s = t % format::kValueGroup, q = s % 8 / 2;
  const int block =
      r.tile_of(token) + r.value_blocks() + t / format::kValueGroup * r.value_block_bytes() + s % 2 + 2 * (s / 8);
  const auto spread_sets = [&](auto width) {
    constexpr int kSet = format::kSpreadChannels;
    const int sets = d / kSet, words = d % kSet / 16, rest = block + format::kSpreadBytes * sets + 4 * words * q;
    for (int set = 0; set < sets; ++set) {
      visit.three_bits(kSet * set, block + format::kSpreadBytes * set + kLaneBytes * q);
    }
    for (int j = 0; j < words; ++j) visit.octets(width, 2, kSet * sets + 16 * j, rest + 4 * j, 16 * words);
  };
  const auto units = [&](auto width) {
    constexpr int fields = 8 / format::num_bits(width.value);
    const int count = d / (8 * fields);
    for (int first = 0; first < count; first += format::kChunkUnits) {
      const int words = count - first < format::kChunkUnits ? count - first : format::kChunkUnits;
      for (int u = 0; u < words; ++u) {
        const int at = block + format::kUnitBytes * first + 4 * words * q + 4 * u;
        visit.octets(width, fields, 8 * fields * (first + u), at, 16 * words);
      }
    }
    if (d % (8 * fields)) visit.last_sixteen(d - 16, block + format::kUnitBytes * count + 4 * q);
  };
  format::with_width(r.value_width(), [&](auto width) {
    if constexpr (format::valid_value_width(width.value)) {
      if constexpr (format::is_spread(width.value)) {
        spread_sets(width);
      } else {
        units(width);
      }
    }
  });
}

struct ValueWriter {
  uint8_t* record;
  const uint8_t* codes;

  void scatter(uint64_t word, int at, int distance, int bytes = 8) {
    for (int g = 0; g < bytes; ++g) record[at + g * distance] = static_cast<uint8_t>(word >> 8 * g);
  }
  // `fields` octets from channel c share bytes.
  template <typename Width>
  void octets(Width, int fields, int c, int at, int distance) {
    uint64_t word = 0;
    for (int e = 0; e < fields; ++e) word |= load_word(codes + c + 8 * e) << format::field_bits(Width::value) * e;
    scatter(word, at, distance);
  }
  // 64 channels: the bits of the last 16 are the top bits of the nibbles of the others.
  void three_bits(int c, int at) {
    const uint64_t last = load_word(codes + c + 48) | load_word(codes + c + 56) << 4;
    for (int j = 0; j < format::kSpreadUnits; ++j) {
      const uint64_t word = load_word(codes + c + 16 * j) | load_word(codes + c + 16 * j + 8) << 4;
      scatter(word | (last >> j & 0x11 * kEachByte) << 3, at + 4 * j, 4 * kLaneBytes);
    }
  }
  // 16 channels of 2 bits: four of them share a byte.
  void last_sixteen(int c, int at) {
    const uint64_t word = load_word(codes + c) | load_word(codes + c + 8) << 2;
    scatter(word | word >> 28, at, 16, 4);
  }
};

struct ValueReader {
  const uint8_t* record;
  uint8_t* codes;

  uint64_t gather(int at, int distance, int bytes = 8) {
    uint64_t word = 0;
    for (int g = 0; g < bytes; ++g) word |= static_cast<uint64_t>(record[at + g * distance]) << 8 * g;
    return word;
  }
  // The bits of a field that are above its code are ignored.
  template <typename Width>
  void octets(Width, int fields, int c, int at, int distance) {
    const uint64_t word = gather(at, distance), mask = ((1 << format::num_bits(Width::value)) - 1) * kEachByte;
    for (int e = 0; e < fields; ++e) store_word(codes + c + 8 * e, word >> format::field_bits(Width::value) * e & mask);
  }
  void three_bits(int c, int at) {
    uint64_t last = 0;
    for (int j = 0; j < format::kSpreadUnits; ++j) {
      const uint64_t word = gather(at + 4 * j, 4 * kLaneBytes);
      store_word(codes + c + 16 * j, word & 7 * kEachByte);
      store_word(codes + c + 16 * j + 8, word >> 4 & 7 * kEachByte);
      last |= (word >> 3 & 0x11 * kEachByte) << j;
    }
    store_word(codes + c + 48, last & 7 * kEachByte);
    store_word(codes + c + 56, last >> 4 & 7 * kEachByte);
  }
  void last_sixteen(int c, int at) {
    const uint64_t half = gather(at, 16, 4), word = half | half << 28;
    store_word(codes + c, word & 3 * kEachByte);
    store_word(codes + c + 8, word >> 2 & 3 * kEachByte);
  }
};

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
