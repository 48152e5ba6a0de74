// Reading and writing the codes of one token in a page record (docs/format.md section 8), eight channels at a time: a word of
// 64 bits holds the codes of eight neighbouring channels, a byte each. csrc/format.h says the same place by place.
#pragma once

#include "cpu/kernels/bit_string.h"
#include "cpu/kernels/vector_codec.h"

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

// ---- Keys ------------------------------------------------------------------------------------------------------------

// Calls fn for the four words of each group of channels: 8 bytes each, or 4 in a last group of 16 channels.
template <typename Fn>
inline void key_groups(int d, Fn&& fn) {
  for (int c = 0; c + 32 <= d; c += 32) fn(Bits<8>{}, c);
  if (d % 32) fn(Bits<4>{}, d / 32 * 32);
}

// Three bits: the fourth word's bits are the top bits of the nibbles of the other three.
inline void join_three_bits(const uint8_t* codes, int d, uint8_t* nibbles) {
  key_groups(d, [&](auto word, int c) {
    constexpr int n = word.kBits;
    const uint64_t last = load_word<n>(codes + c + 3 * n);
    for (int j = 0; j < 3; ++j) {
      store_word<n>(nibbles + c / 4 * 3 + n * j, load_word<n>(codes + c + n * j) | (last >> j & kEachByte) << 3);
    }
  });
}
inline void split_three_bits(const uint8_t* nibbles, int d, uint8_t* codes) {
  key_groups(d, [&](auto word, int c) {
    constexpr int n = word.kBits;
    uint64_t last = 0;
    for (int j = 0; j < 3; ++j) {
      const uint64_t x = load_word<n>(nibbles + c / 4 * 3 + n * j);
      store_word<n>(codes + c + n * j, x & 7 * kEachByte);
      last |= (x >> 3 & kEachByte) << j;
    }
    store_word<n>(codes + c + 3 * n, last);
  });
}

// Five bits: bit 4 of each code, two channels of each of the four words in a byte.
inline void join_planes(const uint8_t* codes, int d, uint8_t* plane) {
  key_groups(d, [&](auto word, int c) {
    constexpr int n = word.kBits;
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
    constexpr int n = word.kBits;
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

// Key rows of 3 and 5 bits are dense rows of nibbles; the others are dense rows as they are.
inline int key_row_bits(int bits) { return bits == 3 || bits == 5 ? 4 : bits; }

// codes: [d], padded to 64. Touches the token's bytes only.
inline void write_key(const format::Record& r, uint8_t* record, int token, const uint8_t* codes,
                      const BitLayout& layout) {
  const int d = r.head_dim, t = token % r.tile_tokens(), row_bytes = r.key_row_bytes();
  uint8_t* tile = record + r.tile_of(token);
  uint8_t* row = tile + t * row_bytes;
  alignas(64) uint8_t nibbles[format::kMaxHeadDim + 64];
  if (r.key_bits == 3) {
    join_three_bits(codes, d, nibbles);
    memset(nibbles + d / 4 * 3, 0, 4);  // a row may end in two bytes of padding
    pack_row(nibbles, row, 2 * row_bytes, 4, layout, row + row_bytes);
  } else if (r.key_bits == 5) {
    join_planes(codes, d, tile + r.key_planes() + t * r.key_plane_bytes());
    for (int c = 0; c < d; c += 64) store(nibbles + c, load(codes + c) & broadcast(uint8_t{15}));
    pack_row(nibbles, row, d, 4, layout, row + row_bytes);
  } else {
    pack_row(codes, row, d, r.key_bits, layout, row + row_bytes);
  }
}

// codes: [d rounded up to 64]. Bytes of the record behind the row may be read.
inline void read_key(const format::Record& r, const uint8_t* record, int token, uint8_t* codes,
                     const BitLayout& layout) {
  const int d = r.head_dim, t = token % r.tile_tokens(), row_bytes = r.key_row_bytes();
  const uint8_t* end = record + r.record_bytes();
  const uint8_t* tile = record + r.tile_of(token);
  const uint8_t* row = tile + t * row_bytes;
  if (r.key_bits == 3) {
    alignas(64) uint8_t nibbles[format::kMaxHeadDim + 64];
    unpack_row(row, nibbles, 2 * row_bytes, 4, layout, end);
    split_three_bits(nibbles, d, codes);
  } else {
    unpack_row(row, codes, d, key_row_bits(r.key_bits), layout, end);
    if (r.key_bits == 5) add_planes(tile + r.key_planes() + t * r.key_plane_bytes(), d, codes);
  }
}

// ---- Values ----------------------------------------------------------------------------------------------------------

// Calls fn(octets, place, distance, bytes) for the words of a token in its value block: byte g of the word (one channel of
// each of some octets) lies `distance` * g behind `place`. A visitor joins or splits the codes of those octets.
template <typename Visitor>
inline void visit_values(const format::Record& r, int token, Visitor&& visit) {
  const int d = r.head_dim, t = token % r.tile_tokens(), s = t % format::kValueGroup, q = s % 8 / 2;
  const int block =
      r.tile_of(token) + r.value_blocks() + t / format::kValueGroup * r.value_block_bytes() + s % 2 + 2 * (s / 8);
  if (r.value_bits == 3) {
    for (int set = 0; set < d / 64; ++set) visit.three_bits(64 * set, block + 384 * set + 12 * q);
    const int words = d % 64 / 16, rest = block + 384 * (d / 64) + 4 * words * q;
    for (int j = 0; j < words; ++j) visit.octets(Bits<4>{}, 2, d / 64 * 64 + 16 * j, rest + 4 * j, 16 * words);
    return;
  }
  const auto units = [&](auto bits) {
    constexpr int fields = 8 / bits.kBits;
    const int count = d / (8 * fields);
    for (int first = 0; first < count; first += 4) {
      const int words = count - first < 4 ? count - first : 4;
      for (int u = 0; u < words; ++u) {
        visit.octets(bits, fields, 8 * fields * (first + u), block + 128 * first + 4 * words * q + 4 * u, 16 * words);
      }
    }
    if (d % (8 * fields)) visit.last_sixteen(d - 16, block + 128 * count + 4 * q);
  };
  if (r.value_bits == 8) return units(Bits<8>{});
  if (r.value_bits == 4) return units(Bits<4>{});
  units(Bits<2>{});
}

struct ValueWriter {
  uint8_t* record;
  const uint8_t* codes;

  void scatter(uint64_t word, int place, int distance, int bytes = 8) {
    for (int g = 0; g < bytes; ++g) record[place + g * distance] = static_cast<uint8_t>(word >> 8 * g);
  }
  // `fields` octets from channel c share bytes.
  template <typename Width>
  void octets(Width, int fields, int c, int place, int distance) {
    uint64_t word = 0;
    for (int e = 0; e < fields; ++e) word |= load_word(codes + c + 8 * e) << Width::kBits * e;
    scatter(word, place, distance);
  }
  // 64 channels: the bits of the last 16 are the top bits of the nibbles of the others.
  void three_bits(int c, int place) {
    const uint64_t last = load_word(codes + c + 48) | load_word(codes + c + 56) << 4;
    for (int j = 0; j < 3; ++j) {
      const uint64_t word = load_word(codes + c + 16 * j) | load_word(codes + c + 16 * j + 8) << 4;
      scatter(word | (last >> j & 0x11 * kEachByte) << 3, place + 4 * j, 48);
    }
  }
  // 16 channels of 2 bits: four of them share a byte.
  void last_sixteen(int c, int place) {
    const uint64_t word = load_word(codes + c) | load_word(codes + c + 8) << 2;
    scatter(word | word >> 28, place, 16, 4);
  }
};

struct ValueReader {
  const uint8_t* record;
  uint8_t* codes;

  uint64_t gather(int place, int distance, int bytes = 8) {
    uint64_t word = 0;
    for (int g = 0; g < bytes; ++g) word |= static_cast<uint64_t>(record[place + g * distance]) << 8 * g;
    return word;
  }
  template <typename Width>
  void octets(Width, int fields, int c, int place, int distance) {
    const uint64_t word = gather(place, distance), mask = ((1 << Width::kBits) - 1) * kEachByte;
    for (int e = 0; e < fields; ++e) store_word(codes + c + 8 * e, word >> Width::kBits * e & mask);
  }
  void three_bits(int c, int place) {
    uint64_t last = 0;
    for (int j = 0; j < 3; ++j) {
      const uint64_t word = gather(place + 4 * j, 48);
      store_word(codes + c + 16 * j, word & 7 * kEachByte);
      store_word(codes + c + 16 * j + 8, word >> 4 & 7 * kEachByte);
      last |= (word >> 3 & 0x11 * kEachByte) << j;
    }
    store_word(codes + c + 48, last & 7 * kEachByte);
    store_word(codes + c + 56, last >> 4 & 7 * kEachByte);
  }
  void last_sixteen(int c, int place) {
    const uint64_t half = gather(place, 16, 4), word = half | half << 28;
    store_word(codes + c, word & 3 * kEachByte);
    store_word(codes + c + 8, word >> 2 & 3 * kEachByte);
  }
};

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
