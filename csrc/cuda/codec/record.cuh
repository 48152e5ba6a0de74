// Stores and loads the codes of tokens in page records (docs/format.md section 8): the layout of csrc/format.h, a word
// at a time instead of a code at a time.
//
// Both directions pass through shared memory. There a token is a row of octets (codec/codebook.cuh), and its part of a
// record consists of whole words: the words of a key row, and for values *fragments*, the four bytes that one token
// owns in four words of its value block.
#pragma once

#include "cuda/codec/codebook.cuh"

namespace turboquant::cuda {

// ---- Records --------------------------------------------------------------------------------------------------------

// The numbers of a format::Record, computed on the host. Page and tile sizes are powers of two, hence shifts.
struct RecordLayout {
  int head_dim, octets, key_bits, value_bits;
  int page_shift, tile_shift;
  int record_bytes, tile_bytes;
  int key_row_bytes, key_plane_bytes, value_block_bytes;
  int key_planes, value_blocks, key_scales, value_scales;  // sections of a tile

  RecordLayout() = default;
  explicit RecordLayout(const format::Record& r)
      : head_dim(r.head_dim), octets(r.head_dim / 8), key_bits(r.key_bits), value_bits(r.value_bits),
        page_shift(format::log2_of(r.page_size)), tile_shift(format::log2_of(r.tile_tokens())),
        record_bytes(r.record_bytes()), tile_bytes(r.tile_bytes()), key_row_bytes(r.key_row_bytes()),
        key_plane_bytes(r.key_plane_bytes()), value_block_bytes(r.value_block_bytes()), key_planes(r.key_planes()),
        value_blocks(r.value_blocks()), key_scales(r.key_scales()), value_scales(r.value_scales()) {}

  __host__ __device__ constexpr Width key_width() const { return format::as_width(key_bits); }
  __host__ __device__ constexpr Width value_width() const { return format::as_width(value_bits); }
};

// A token of one head: its tile and its number in the tile. `tile` is null for a slot that holds no token.
struct Token {
  uint8_t* tile;
  int number;

  __device__ __forceinline__ uint8_t* key_row(const RecordLayout& r) const { return tile + number * r.key_row_bytes; }
  __device__ __forceinline__ uint8_t* key_plane(const RecordLayout& r) const {
    return tile + r.key_planes + number * r.key_plane_bytes;
  }
  __device__ __forceinline__ uint8_t* value_block(const RecordLayout& r) const {
    return tile + r.value_blocks + static_cast<unsigned>(number) / format::kValueGroup * r.value_block_bytes;
  }
  __device__ __forceinline__ uint16_t* key_scale(const RecordLayout& r) const {
    return reinterpret_cast<uint16_t*>(tile + r.key_scales) + number;
  }
  __device__ __forceinline__ uint16_t* value_scale(const RecordLayout& r) const {
    return reinterpret_cast<uint16_t*>(tile + r.value_scales) + number;
  }
};

// The pages of all heads. Slots and page numbers cannot be checked without synchronising with the device, so those out
// of range give no token instead of an error.
struct Pages {
  uint8_t* data;  // [num_pages, kv_heads, record_bytes]
  int64_t num_pages;
  uint32_t page_stride;  // in bytes
  int kv_heads;

  __device__ __forceinline__ Token token(int64_t page, int offset, int head, const RecordLayout& r) const {
    if (page < 0 || page >= num_pages) return {nullptr, 0};
    uint8_t* record = data + format::record_offset_32(static_cast<uint32_t>(page), head, page_stride, r.record_bytes);
    return {record + (offset >> r.tile_shift) * r.tile_bytes, offset & ((1 << r.tile_shift) - 1)};
  }
  __device__ __forceinline__ Token token(int64_t slot, int head, const RecordLayout& r) const {
    return token(slot >> r.page_shift, static_cast<int>(slot) & ((1 << r.page_shift) - 1), head, r);
  }
};

// The sequence of a token: the last one that begins at or before it. begins: [seqs + 1]
template <typename T>
__device__ __forceinline__ T sequence_of(const int32_t* begins, T seqs, T token) {
  T low = 0, high = seqs;
  while (high - low > 1) {
    const T middle = (low + high) / 2;
    (begins[middle] <= token ? low : high) = middle;
  }
  return low;
}

// Slots of tokens or sequences, int32 or int64.
struct Slots {
  const void* data;
  bool wide;

  // In halves of 32 bits, because that takes fewer registers.
  __device__ __forceinline__ int64_t operator[](int64_t i) const {
    const int32_t* at = static_cast<const int32_t*>(data) + (wide ? 2 * i : i);
    const int32_t low = at[0];
    return wide ? int64_t{at[wide]} << 32 | static_cast<uint32_t>(low) : low;
  }
};

// The exact tail. The row of a token, if it has one, follows from its sequence and position.
struct Tail {
  uint8_t* data;           // [max_seqs, kv_heads, sink_tokens + ring, 2, d]; null: no tail
  uint32_t stride;         // from one of the max_seqs entries to the next, in bytes
  Slots slots;             // [seqs]
  int64_t slot_stride;     // from one of them to the next, in elements
  const int32_t* lengths;  // [seqs]
  const int32_t* begins;   // [seqs + 1]; null: one token per sequence
  int64_t seqs, max_seqs;
  int rows, sink_tokens;

  // The key (kind 0) or value (1) of a row as `row` finds it, `bytes` long.
  __device__ __forceinline__ uint8_t* at(int64_t row, int head, int kind, int bytes) const {
    const uint32_t slot = static_cast<uint32_t>(row >> 32);
    return data + format::tail_offset_32(slot, stride, head, static_cast<uint32_t>(row), rows, bytes, kind);
  }

  // The row of `token`, with its slot in the upper 32 bits; -1 if the tail does not keep it.
  __device__ __forceinline__ int64_t row(int64_t token) const {
    if (seqs == 0) return -1;
    int64_t s = token, end = token + 1;
    if (begins) s = sequence_of(begins, seqs, token), end = begins[s + 1];
    if (s >= seqs || token >= end) return -1;
    const int64_t slot = slots[s * slot_stride], length = lengths[s], position = length - end + token;
    const int ring = rows - sink_tokens;
    if (slot < 0 || slot >= max_seqs || position < 0) return -1;
    if (!format::tail_keeps(position, length, sink_tokens, ring)) return -1;
    return slot << 32 | format::tail_row<int>(static_cast<int>(position), sink_tokens, ring);
  }
};

// ---- Rows of octets in shared memory --------------------------------------------------------------------------------

// Word `o` of a row is Octet::low of octet o; Octet::high follows `octets` words later, if codes do not fit nibbles.
__device__ __forceinline__ void write_octet(uint32_t* row, int octets, Width width, int o, Octet octet) {
  row[o] = octet.low;
  if (!format::fits_nibble(width)) row[octets + o] = octet.high;
}

// ---- Keys -----------------------------------------------------------------------------------------------------------

// Word w of a key row whose codes are spread: the bits of the last quarter of a group lie over the nibbles of the other
// three.
__device__ __forceinline__ uint32_t spread_key_word(const uint32_t* row, int octets, int w) {
  const int j = w % 3, o = w / 3 * 4;
  if (o + 4 <= octets) return row[o + j] | (row[o + 3] << (3 - j) & 0x88888888);
  const uint32_t last = row[o + 1] >> 16;
  if (j == 1) return (row[o + 1] & 0xFFFF) | (last << 1 & 0x8888);
  return row[o] | (last << 3 & 0x8888) | (last << 18 & 0x88880000);
}

// Word w of a key row, from the octets of the key.
__device__ __forceinline__ uint32_t key_word(const uint32_t* row, int octets, Width width, int w) {
  switch (width) {
    case Width::k8: return row[w % 2 * octets + w / 2];
    case Width::k2: return close_nibbles(row[2 * w], 2) | close_nibbles(row[2 * w + 1], 2) << 16;
    case Width::k3: return spread_key_word(row, octets, w);
    case Width::k4:
    case Width::k5: break;  // nibbles; the plane has the fifth bits
    case Width::k1: break;  // no width of keys
  }
  return row[w];
}

// The four pairs of bits 0 to 7, each in a byte of its own.
__device__ __forceinline__ uint32_t spread_pairs(uint32_t b) {
  return (b & 3) | (b & 0x0C) << 6 | (b & 0x30) << 12 | (b & 0xC0) << 18;
}

// Word `group` of a key plane: the fifth bits.
__device__ __forceinline__ uint32_t plane_word(const uint32_t* row, int octets, int group) {
  const uint32_t* high = row + octets + 4 * group;
  if (4 * group + 4 <= octets)
    return spread_pairs(high[0]) | spread_pairs(high[1]) << 2 | spread_pairs(high[2]) << 4 | spread_pairs(high[3]) << 6;
  return spread_pairs(high[0] & 15) | spread_pairs(high[0] >> 4) << 2 | spread_pairs(high[1] & 15) << 4 |
         spread_pairs(high[1] >> 4) << 6;
}

// Octet o of a key with a plane, and of a key whose codes are spread, from the words of its row and plane. The last
// group may have two octets instead of four.
__device__ __forceinline__ Octet plane_key_octet(const uint32_t* row, const uint32_t* plane, int octets, int o) {
  const int j = o % 4;
  if (o - j + 4 <= octets) {
    const uint32_t pairs = plane[o / 4] >> 2 * j & 0x03030303;
    return {row[o], (pairs | pairs >> 6 | pairs >> 12 | pairs >> 18) & 255};
  }
  const uint32_t pairs = plane[o / 4] >> 4 * j;  // quarters 2 j and 2 j + 1 of four channels each
  return {row[o], (pairs & 3) | (pairs >> 6 & 0x0C) | (pairs & 0x0C) << 2 | (pairs >> 4 & 0xC0)};
}
// Three words hold four words of eight 3-bit codes each, as nibbles: the top bits of their nibbles are the bits of the
// fourth word.
__device__ __forceinline__ uint32_t fourth_spread_word(uint32_t w0, uint32_t w1, uint32_t w2) {
  return (w0 >> 3 & 0x11111111) | (w1 >> 2 & 0x22222222) | (w2 >> 1 & 0x44444444);
}
__device__ __forceinline__ void spread_three_bits(const uint32_t (&w)[3], uint32_t (&codes)[4]) {
  codes[3] = fourth_spread_word(w[0], w[1], w[2]);
#pragma unroll
  for (int j = 0; j < 3; ++j) codes[j] = w[j] & 0x77777777;
}
__device__ __forceinline__ Octet spread_key_octet(const uint32_t* row, int octets, int o) {
  const int j = o % 4, first = o - j, whole = first + 4 <= octets;
  const uint32_t* word = row + first / 4 * 3;
  if (whole) {
    if (j < 3) return {word[j] & 0x77777777, 0};
    return {fourth_spread_word(word[0], word[1], word[2]), 0};
  }
  if (j == 0) return {word[0] & 0x77777777, 0};
  const uint32_t last = (word[0] >> 3 & 0x1111) | (word[0] >> 18 & 0x2222) | (word[1] >> 1 & 0x4444);
  return {(word[1] & 0x7777) | last << 16, 0};
}

// Octet o of a key, from the words of its row and plane.
__device__ __forceinline__ Octet key_octet(const uint32_t* row, const uint32_t* plane, int octets, Width width, int o) {
  switch (width) {
    case Width::k8: return {row[2 * o], row[2 * o + 1]};
    case Width::k4: return {row[o], 0};
    case Width::k2: return {open_nibbles(row[o / 2] >> 16 * (o % 2) & 0xFFFF, 2), 0};
    case Width::k5: return plane_key_octet(row, plane, octets, o);
    case Width::k3: break;
    case Width::k1: break;  // no width of keys
  }
  return spread_key_octet(row, octets, o);
}

// ---- Values ---------------------------------------------------------------------------------------------------------

// A token of a value block owns byte b of words whose place depends on q; the four tokens that share a word differ in b
// only.
__device__ __forceinline__ int value_q(unsigned token) { return token % 8 / 2; }
__device__ __forceinline__ int value_b(unsigned token) { return token % 2 + 2 * (token / 8 % 2); }
__device__ __forceinline__ int value_token(int q, int b) { return 2 * q + b % 2 + 8 * (b / 2); }

// Byte b of word[i] becomes byte i of word[b].
__device__ __forceinline__ void transpose_bytes(uint32_t (&word)[4]) {
  const uint32_t a = __byte_perm(word[0], word[1], 0x5140), b = __byte_perm(word[2], word[3], 0x5140);
  const uint32_t c = __byte_perm(word[0], word[1], 0x7362), d = __byte_perm(word[2], word[3], 0x7362);
  word[0] = __byte_perm(a, b, 0x5410);
  word[1] = __byte_perm(a, b, 0x7632);
  word[2] = __byte_perm(c, d, 0x5410);
  word[3] = __byte_perm(c, d, 0x7632);
}

// Bytes of four 2-bit codes each, from two words in which the codes are nibbles.
__device__ __forceinline__ uint32_t close_twos(uint32_t a, uint32_t b) {
  return (a & 0x03030303) | (a >> 2 & 0x0C0C0C0C) | (b << 4 & 0x30303030) | (b << 2 & 0xC0C0C0C0);
}

// The bytes that a token owns in a value block, as fragments of four bytes. Fragment f belongs to the channels n = f /
// 2 that share a word, and holds half of their g: byte i is g = 2 i + f % 2 (8 bits: g = 4 (f % 2) + i).
struct ValueLayout {
  int d;
  Width width;

  static constexpr uint32_t kEven = 0x0F0F0F0F, kOdd = 0xF0F0F0F0;

  __host__ __device__ constexpr int fragments() const {
    return format::Record{d, 16, 4, format::num_bits(width)}.value_block_bytes() / (4 * format::kValueGroup);
  }

  // Byte i of a fragment is byte at + i * step + q * q_step + b of the block.
  struct FragmentPlace {
    int at, step, q_step;
  };
  __device__ __forceinline__ FragmentPlace place(int f) const {
    using namespace format;
    const int h = f % 2, n = f / 2;
    if (is_spread(width)) {
      const int set = n / kSpreadUnits, sets = d / kSpreadChannels, rest = d % kSpreadChannels / 16;
      if (set < sets) return {kSpreadBytes * set + 4 * (n % kSpreadUnits) + 48 * h, 96, 12};
      return {kSpreadBytes * sets + 4 * (n - sets * kSpreadUnits) + 16 * rest * h, 32 * rest, 4 * rest};
    }
    const int units = d * num_bits(width) / 64;
    if (n == units) return {kUnitBytes * units, 16, 4};
    const int words = min(kChunkUnits, units - n / kChunkUnits * kChunkUnits);
    const bool bytes = levels_are_codes(width);
    return {kChunkBytes * (n / kChunkUnits) + 4 * (n % kChunkUnits) + (bytes ? 64 : 16) * words * h,
            (bytes ? 16 : 32) * words, 4 * words};
  }

  // Fragment f of a token from its row of octets.
  __device__ __forceinline__ uint32_t fragment(const uint32_t* row, int f) const {
    const int h = f % 2, n = f / 2;
    switch (width) {
      case Width::k8: return row[h * (d / 8) + n];
      case Width::k4: return pair(row, n, h);
      case Width::k3: return spread_fragment(row, n, h);
      case Width::k2: break;
      case Width::k1:
      case Width::k5: break;  // no widths of values
    }
    if (n < d / 32) {
      return close_twos(pair(row, 2 * n, h), pair(row, 2 * n + 1, h));
    }
    const auto spread = [](uint32_t x) { return (x & 3) | (x & 0x30) << 4 | (x & 0x300) << 8 | (x & 0x3000) << 12; };
    const uint32_t a = row[4 * n], b = row[4 * n + 1];
    return spread(a) | spread(b) << 2 | spread(a >> 16) << 4 | spread(b >> 16) << 6;
  }

  // Octet o of a token from its row of fragments.
  __device__ __forceinline__ Octet octet(const uint32_t* row, int o) const {
    switch (width) {
      case Width::k8: return {row[2 * o], row[2 * o + 1]};
      case Width::k4: return {half_pair(row[o & ~1], row[o | 1], o % 2), 0};
      case Width::k3: return spread_octet(row, o);
      case Width::k2: break;
      case Width::k1:
      case Width::k5: break;  // no widths of values
    }
    const int n = o / 4;
    if (n < d / 32) {
      const int shift = 2 * (o % 4);
      return {(row[2 * n] >> shift & 0x03030303) | (row[2 * n + 1] >> shift & 0x03030303) << 4, 0};
    }
    const auto close = [](uint32_t x) { return (x & 3) | (x >> 4 & 0x30) | (x >> 8 & 0x300) | (x >> 12 & 0x3000); };
    const uint32_t both = row[2 * n] >> 2 * (o % 4);
    return {close(both) | close(both >> 4) << 16, 0};
  }

 private:
  // The same two of codes that are spread over sets of 64 channels.
  __device__ __forceinline__ uint32_t spread_fragment(const uint32_t* row, int n, int h) const {
    const int set = n / 3, j = n % 3;
    if (set >= d / format::kSpreadChannels) return pair(row, n + d / format::kSpreadChannels, h);
    return pair(row, 4 * set + j, h) | (pair(row, 4 * set + 3, h) << (3 - j) & 0x88888888);
  }
  __device__ __forceinline__ Octet spread_octet(const uint32_t* row, int o) const {
    const int set = o / 8, j = o / 2 % 4;
    if (j < 3 || set >= d / format::kSpreadChannels) {
      const uint32_t* word = row + 2 * (3 * set + j);
      return {half_pair(word[0], word[1], o % 2) & 0x77777777, 0};
    }
    uint32_t even = 0, odd = 0;
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      even |= (row[2 * (3 * set + k)] >> 3 & 0x11111111) << k;
      odd |= (row[2 * (3 * set + k) + 1] >> 3 & 0x11111111) << k;
    }
    return {half_pair(even, odd, o % 2), 0};
  }

  // The even or odd channels (h) of two octets, codes of the first octet in the low nibbles of the bytes; and back.
  static __device__ __forceinline__ uint32_t pair(const uint32_t* row, int p, int h) {
    const uint32_t a = row[2 * p], b = row[2 * p + 1];
    return h ? (a >> 4 & kEven) | (b & kOdd) : (a & kEven) | (b << 4 & kOdd);
  }
  static __device__ __forceinline__ uint32_t half_pair(uint32_t even, uint32_t odd, int second) {
    return second ? (even >> 4 & kEven) | (odd & kOdd) : (even & kEven) | (odd << 4 & kOdd);
  }
};

// ---- Between shared memory and records ------------------------------------------------------------------------------

// Stores the plane of a key or a latent from its row of octets.
__device__ __forceinline__ void store_plane(const uint32_t* row, const Token& to, const RecordLayout& r, int lane,
                                            int lanes) {
  uint32_t* out = reinterpret_cast<uint32_t*>(to.key_plane(r));
  for (int w = lane; w < r.key_plane_bytes / 4; w += lanes) out[w] = plane_word(row, r.octets, w);
}
// Loads it behind the row of codes.
__device__ __forceinline__ void load_plane(uint32_t* row, const Token& from, const RecordLayout& r, int lane,
                                           int lanes) {
  const uint32_t* in = reinterpret_cast<const uint32_t*>(from.key_plane(r));
  for (int w = lane; w < r.key_plane_bytes / 4; w += lanes) row[r.key_row_bytes / 4 + w] = in[w];
}

// Stores a token's row of octets in its record, by `lanes` lanes.
__device__ __forceinline__ void store_key(const uint32_t* row, const Token& to, const RecordLayout& r, int lane,
                                          int lanes) {
  uint32_t* out = reinterpret_cast<uint32_t*>(to.key_row(r));
  if (r.key_row_bytes % 16 == 0) {
    for (int w = 4 * lane; w < r.key_row_bytes / 4; w += 4 * lanes) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) word[i] = key_word(row, r.octets, r.key_width(), w + i);
      *reinterpret_cast<uint4*>(out + w) = make_uint4(word[0], word[1], word[2], word[3]);
    }
  } else {
    for (int w = lane; w < r.key_row_bytes / 4; w += lanes) out[w] = key_word(row, r.octets, r.key_width(), w);
  }
  store_plane(row, to, r, lane, lanes);
}

// Stores a token's fragments byte by byte: other tokens own the rest of each word.
__device__ __forceinline__ void store_value(const uint32_t* row, const Token& to, const RecordLayout& r, int lane,
                                            int lanes) {
  const ValueLayout values{r.head_dim, r.value_width()};
  uint8_t* block = to.value_block(r);
  for (int f = lane; f < values.fragments(); f += lanes) {
    const uint32_t fragment = values.fragment(row, f);
    const ValueLayout::FragmentPlace place = values.place(f);
    uint8_t* out = block + place.at + value_q(to.number) * place.q_step + value_b(to.number);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i * place.step] = static_cast<uint8_t>(fragment >> 8 * i);
  }
}

// Puts the value block of 16 neighbouring tokens together from their rows.
__device__ __forceinline__ void gather_block(const uint32_t* rows, int stride, uint32_t* block, ValueLayout values,
                                             int thread, int threads) {
  for (int i = thread; i < 4 * values.fragments(); i += threads) {
    const int q = i % 4, f = i / 4;
    uint32_t word[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) word[b] = values.fragment(rows + value_token(q, b) * stride, f);
    transpose_bytes(word);
    const ValueLayout::FragmentPlace place = values.place(f);
#pragma unroll
    for (int g = 0; g < 4; ++g) block[(place.at + g * place.step + q * place.q_step) / 4] = word[g];
  }
}

// Loads a token's key row, and behind it its plane, as the record has them.
__device__ __forceinline__ void load_key(uint32_t* row, const Token& from, const RecordLayout& r, int lane, int lanes) {
  const uint32_t* in = reinterpret_cast<const uint32_t*>(from.key_row(r));
  for (int w = lane; w < r.key_row_bytes / 4; w += lanes) row[w] = in[w];
  load_plane(row, from, r, lane, lanes);
}

// Loads a token's fragments from its value block. Byte by byte is fast enough: the tokens that share a word are read at
// the same time, from the cache.
__device__ __forceinline__ void load_value(uint32_t* row, const Token& from, const RecordLayout& r, int lane,
                                           int lanes) {
  const ValueLayout values{r.head_dim, r.value_width()};
  const uint8_t* block = from.value_block(r);
  for (int f = lane; f < values.fragments(); f += lanes) {
    const ValueLayout::FragmentPlace place = values.place(f);
    const uint8_t* in = block + place.at + value_q(from.number) * place.q_step + value_b(from.number);
    uint32_t fragment = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) fragment |= static_cast<uint32_t>(in[i * place.step]) << 8 * i;
    row[f] = fragment;
  }
}

}  // namespace turboquant::cuda
