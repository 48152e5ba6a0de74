// The packed format, in code: the only file that knows where a code lives. docs/format.md says the same in words.
//
// In the order of that page: the transform's constants (section 2), widths, grids and the arithmetic of one code
// (section 4), scale modes and the channels of a vector (section 5), and the geometry of dense rows, page records, the
// exact tail, records of latents and weights (sections 7 to 9, 12 and 13). Everything is constexpr and runs on host and
// device; no torch, no allocation.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#define TURBOQUANT_HD __host__ __device__ __forceinline__
#else
// Always inlined: the CPU kernels are compiled once per instruction set, and no copy for one may serve another.
#define TURBOQUANT_HD inline __attribute__((always_inline))
#endif

namespace turboquant::format {

constexpr int kVersion = 1;

// ---- Section 2: the transform -------------------------------------------------------------------------------------

constexpr int log2_of(int power_of_two) {
  int log = 0;
  while (1 << log < power_of_two) ++log;
  return log;
}

// head_dim = blocks * block: `blocks` is the odd factor m, `block` the power of two n.
struct Split {
  int blocks;
  int block;
  constexpr bool valid() const { return blocks > 0; }
  constexpr int log_block() const { return log2_of(block); }
};

constexpr int kMaxVectorDim = 4096;  // beyond it, the integer sums of an encoded vector would leave int32
constexpr int kMaxBlocks = 9;

// d as m * 2^k with m in {1, 3, 5, 7, 9}; {0, 0} when it has no such form or is too large.
TURBOQUANT_HD constexpr Split split_dim(int64_t d) {
  if (d < 2 || d > kMaxVectorDim) return {0, 0};
  int odd = static_cast<int>(d), block = 1;
  while (odd % 2 == 0) {
    odd /= 2;
    block *= 2;
  }
  return odd <= kMaxBlocks && block > 1 ? Split{odd, block} : Split{0, 0};
}

// Row 1 of the m x m discrete Hartley matrix, float32((cos t + sin t) / sqrt(m)), t = 2 pi j / m: M[b][j] is its entry
// (b * j) mod m.
TURBOQUANT_HD constexpr float hartley(int m, int index) {
  constexpr float k3[3] = {0.577350259f, 0.211324871f, -0.788675129f};
  constexpr float k5[5] = {0.44721359f, 0.563521981f, -0.0989378393f, -0.624668956f, -0.287128806f};
  constexpr float k7[7] = {0.377964467f,  0.531161547f,  0.284383118f, -0.176541582f,
                           -0.504526854f, -0.452593118f, -0.05984753f};
  constexpr float k9[9] = {0.333333343f, 0.469610691f,  0.386151969f,  0.122008465f, -0.199224159f,
                           -0.4272376f,  -0.455341816f, -0.270386517f, 0.041085612f};
  return m == 3 ? k3[index] : m == 5 ? k5[index] : m == 7 ? k7[index] : k9[index];
}

// ---- Section 4: codes and levels ----------------------------------------------------------------------------------

constexpr float kLevelUnit = 1.0f / 32;  // a vector decodes as scale * level * kLevelUnit
constexpr float kUnitsPerSigma = 4096;   // coordinates are compared with boundaries in units of 2^-12 sigma
constexpr uint16_t kNanScale = 0x7E00;   // float16 scale of a vector that holds a NaN or an infinity
constexpr float kMaxHalf = 65504;        // largest finite float16: scales are limited to it

// The widths of a code. A switch over them has no `default`: the compiler (-Werror=switch) then names every place that
// a new width needs. Kernels ask the traits below instead of comparing numbers.
enum class Width : int { k1 = 1, k2 = 2, k3 = 3, k4 = 4, k5 = 5, k8 = 8 };
constexpr int kMaxBits = 8;

// Which levels the codes of a vector stand for: a table of 2^bits levels (Lloyd-Max), or evenly spaced ones, which need
// no table.
enum class Grid : int { kLevels, kUniform };

// Width and grid of the codes of a vector. The type is structural, so that a kernel can take it as a template
// parameter.
struct Codes {
  Width width;
  Grid grid;
  constexpr bool operator==(const Codes&) const = default;
};

TURBOQUANT_HD constexpr int num_bits(Width w) { return static_cast<int>(w); }

// bits: one of the widths, see valid_width.
TURBOQUANT_HD constexpr Width as_width(int64_t bits) { return static_cast<Width>(bits); }

// Whether codes of that many bits exist.
TURBOQUANT_HD constexpr bool valid_width(int64_t bits) {
  if (bits < 0 || bits > kMaxBits) return false;
  switch (as_width(bits)) {
    case Width::k1:
    case Width::k2:
    case Width::k3:
    case Width::k4:
    case Width::k5:
    case Width::k8: return true;
  }
  return false;
}

// Whether a code is its own level, a signed byte. Such codes have no table of levels, only the uniform grid.
TURBOQUANT_HD constexpr bool levels_are_codes(Width w) {
  switch (w) {
    case Width::k8: return true;
    case Width::k1:
    case Width::k2:
    case Width::k3:
    case Width::k4:
    case Width::k5: break;
  }
  return false;
}

// Whether the uniform grid exists. (With one bit it would be the table of two levels.)
TURBOQUANT_HD constexpr bool has_uniform_grid(Width w) {
  switch (w) {
    case Width::k1: return false;
    case Width::k2:
    case Width::k3:
    case Width::k4:
    case Width::k5:
    case Width::k8: break;
  }
  return true;
}

// The largest width whose levels can be given as a table.
constexpr Width kWidestTable = Width::k5;
static_assert(!levels_are_codes(kWidestTable));

// Whether a code is held as a nibble and a fifth bit.
TURBOQUANT_HD constexpr bool has_fifth_bit(Width w) {
  switch (w) {
    case Width::k5: return true;
    case Width::k1:
    case Width::k2:
    case Width::k3:
    case Width::k4:
    case Width::k8: break;
  }
  return false;
}

// How the codes of one token share the bytes of a page record.
enum class Storage {
  kFields,  // every code has its own bits of one byte
  kSpread,  // nibbles; every fourth code has no nibble, its bits are the upper bits of three others
  kPlane,   // nibbles with the low four bits; the fifth bits are in a bit plane behind the rows
};

TURBOQUANT_HD constexpr bool is_spread(Width w) {
  switch (w) {
    case Width::k3: return true;
    case Width::k1:
    case Width::k2:
    case Width::k4:
    case Width::k5:
    case Width::k8: break;
  }
  return false;
}
TURBOQUANT_HD constexpr bool has_plane(Width w) { return has_fifth_bit(w); }
TURBOQUANT_HD constexpr Storage storage(Width w) {
  return is_spread(w) ? Storage::kSpread : has_plane(w) ? Storage::kPlane : Storage::kFields;
}

// Whether a code fits into four bits, so that eight codes fit into a 32-bit word of nibbles; and whether it uses all
// four.
TURBOQUANT_HD constexpr bool fits_nibble(Width w) { return num_bits(w) <= 4; }
TURBOQUANT_HD constexpr bool fills_nibble(Width w) { return num_bits(w) >= 4; }

// Bits of the field in which a record keeps a code, or the low bits of it: 4 where codes are spread or have a plane.
TURBOQUANT_HD constexpr int field_bits(Width w) { return storage(w) == Storage::kFields ? num_bits(w) : 4; }

// Boundaries of codes with a table are multiples of this many units (2^-8 sigma): 16-bit arithmetic then finds codes
// exactly.
constexpr int kTableGrain = 16;
TURBOQUANT_HD constexpr int boundary_grain(Width w) { return levels_are_codes(w) ? 1 : kTableGrain; }
constexpr float kMaxBoundary = 1 << 26;  // in grains: beyond every coordinate, and no product leaves int32

// The number of levels that a code can stand for: 2^bits, or 255 for the signed byte (0x80 is never written).
TURBOQUANT_HD constexpr int num_levels(Width w) { return levels_are_codes(w) ? 255 : 1 << num_bits(w); }
constexpr int kMaxByteLevel = 127;  // of the signed byte

// Level `rank` (0 = most negative) of the uniform grid.
TURBOQUANT_HD constexpr int uniform_level(Width w, int rank) {
  return levels_are_codes(w) ? rank - kMaxByteLevel : 2 * rank - ((1 << num_bits(w)) - 1);
}

// The code byte of a rank: ranks are codes, except that a signed byte is the level itself.
TURBOQUANT_HD constexpr uint8_t code_of_rank(Width w, int rank) {
  return static_cast<uint8_t>(levels_are_codes(w) ? rank - kMaxByteLevel : rank);
}

// The level of a code; `levels` (int8 [2^bits]) is null for the uniform grid.
TURBOQUANT_HD constexpr int level_of_code(Width w, const int8_t* levels, unsigned code) {
  if (levels_are_codes(w)) return static_cast<int8_t>(code);
  return levels ? levels[code] : 2 * static_cast<int>(code) - ((1 << num_bits(w)) - 1);
}

template <Width WIDTH>
using WidthConstant = std::integral_constant<Width, WIDTH>;

// fn(WidthConstant<w>) for a width known at run time.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <typename Fn>
TURBOQUANT_HD constexpr decltype(auto) with_width(Width w, Fn&& fn) {
  switch (w) {
    case Width::k1: return fn(WidthConstant<Width::k1>{});
    case Width::k2: return fn(WidthConstant<Width::k2>{});
    case Width::k3: return fn(WidthConstant<Width::k3>{});
    case Width::k4: return fn(WidthConstant<Width::k4>{});
    case Width::k5: return fn(WidthConstant<Width::k5>{});
    case Width::k8: break;
  }
  return fn(WidthConstant<Width::k8>{});
}

// ---- Section 5: vectors before their rotation -----------------------------------------------------------------------

// The property of a vector that its float16 scale preserves (step 7). The values are those that the ops take.
enum class ScaleMode : int { kNorm = 0, kPreserve = 1, kMse = 2, kUnbiased = 3 };
TURBOQUANT_HD constexpr bool valid_scale_mode(int64_t mode) { return mode >= 0 && mode <= 3; }

// A vector is stored relative to these: (x - center) * scale is rotated and coded, and decodes as y * inverse + center.
// float32 [d] each, or [heads, d]; null where there is none.
struct Channels {
  const float *center, *scale, *inverse;

  // From channel n on. (Written out: through a lambda, compilers spill a hundred bytes in the CUDA encoder.)
  TURBOQUANT_HD constexpr Channels from(int64_t n) const {
    return {center ? center + n : nullptr, scale ? scale + n : nullptr, inverse ? inverse + n : nullptr};
  }
  TURBOQUANT_HD constexpr Channels of_head(int64_t head, int64_t d) const { return from(head * d); }
};

// ---- Section 7: dense rows ----------------------------------------------------------------------------------------

TURBOQUANT_HD constexpr int64_t dense_row_bytes(int64_t d, int bits) { return (d * bits + 7) / 8; }

// ---- Section 8: page records --------------------------------------------------------------------------------------

constexpr int kMaxHeadDim = 1024;
constexpr int kMaxTile = 32;     // tokens of a tile
constexpr int kValueGroup = 16;  // tokens of a value block

// A value block is an operand of 8-bit tensor-core instructions: 32-bit words of four tokens, one word of a *unit* for
// each lane. Four units are a chunk, in which the words of a lane are neighbours. Spread codes are stored in sets of 64
// channels, of which three units hold all bits.
constexpr int kValueLanes = 32;
constexpr int kUnitBytes = 4 * kValueLanes;
constexpr int kChunkUnits = 4, kChunkBytes = kChunkUnits * kUnitBytes;
constexpr int kSpreadChannels = 64, kSpreadUnits = 3, kSpreadBytes = kSpreadUnits * kUnitBytes;

TURBOQUANT_HD constexpr bool valid_key_width(Width w) {
  switch (w) {
    case Width::k1: return false;
    case Width::k2:
    case Width::k3:
    case Width::k4:
    case Width::k5:
    case Width::k8: break;
  }
  return true;
}
TURBOQUANT_HD constexpr bool valid_value_width(Width w) { return valid_key_width(w) && !has_plane(w); }
TURBOQUANT_HD constexpr bool valid_key_bits(int64_t bits) {
  return valid_width(bits) && valid_key_width(as_width(bits));
}
TURBOQUANT_HD constexpr bool valid_value_bits(int64_t bits) {
  return valid_width(bits) && valid_value_width(as_width(bits));
}
TURBOQUANT_HD constexpr bool valid_page_size(int64_t n) { return n == 16 || n == 32 || n == 64 || n == 128; }
TURBOQUANT_HD constexpr bool valid_head_dim(int64_t d) {
  return d % 16 == 0 && d <= kMaxHeadDim && split_dim(d).valid();
}

TURBOQUANT_HD constexpr int round_up_4(int n) { return (n + 3) & ~3; }

// One contiguous run of a code's bits: `width` bits at `shift` of `byte` are bits `code_shift`.. of the code.
struct Piece {
  int32_t byte;
  uint8_t shift;
  uint8_t width;
  uint8_t code_shift;
};

// Where a code lives: one piece, or up to three for codes whose bits are spread over spare bits.
struct Pieces {
  Piece piece[3];
  int count;
};

TURBOQUANT_HD constexpr Pieces one_piece(int byte, int shift, int width) {
  return {{{byte, static_cast<uint8_t>(shift), static_cast<uint8_t>(width), 0}, {}, {}}, 1};
}

// The three bits of a code in bit `shift` of three bytes, `stride` apart.
TURBOQUANT_HD constexpr Pieces three_bits(int byte, int stride, int shift) {
  const auto s = static_cast<uint8_t>(shift);
  return {{{byte, s, 1, 0}, {byte + stride, s, 1, 1}, {byte + 2 * stride, s, 1, 2}}, 3};
}

// How the codes of one token lie in its row and, where they have one, in its plane: keys, and latents (section 12).
struct CodeRow {
  int channels;
  Width width;

  TURBOQUANT_HD constexpr int row_bytes() const {
    return has_plane(width) ? channels / 2 : round_up_4(channels * num_bits(width) / 8);
  }
  TURBOQUANT_HD constexpr int plane_bytes() const { return has_plane(width) ? round_up_4(channels / 8) : 0; }

  // row, plane: where those of the token begin
  TURBOQUANT_HD constexpr Pieces code(int row, int plane, int channel) const {
    if (storage(width) == Storage::kFields) {
      const int per_byte = 8 / num_bits(width);
      return one_piece(row + channel / per_byte, num_bits(width) * (channel % per_byte), num_bits(width));
    }
    // 3 and 5 bits: a group has `size` channels, 32 or at the end perhaps 16, and the nibbles of its codes are words of
    // as many bits. The channel is nibble i of word j.
    const int group = channel / 32, size = 32 * (group + 1) <= channels ? 32 : 16;
    const int j = channel % 32 / (size / 4), i = channel % 32 % (size / 4);
    if (is_spread(width)) {
      const int nibble = row + 12 * group + i / 2, word = size / 8;
      return j < 3 ? one_piece(nibble + j * word, 4 * (i % 2), 3) : three_bits(nibble, word, 4 * (i % 2) + 3);
    }
    Pieces p = one_piece(row + channel / 2, 4 * (channel % 2), 4);
    p.piece[1] = {plane + 4 * group + i / 2, static_cast<uint8_t>(2 * j + i % 2), 1, 4};
    p.count = 2;
    return p;
  }
};

// The geometry of a record. All offsets are bytes from the start of the record.
struct Record {
  int head_dim;
  int page_size;
  int key_bits;
  int value_bits;

  TURBOQUANT_HD constexpr Width key_width() const { return as_width(key_bits); }
  TURBOQUANT_HD constexpr Width value_width() const { return as_width(value_bits); }

  // Sizes -----------------------------------------------------------------------------------------------------------
  TURBOQUANT_HD constexpr int tile_tokens() const { return page_size < kMaxTile ? page_size : kMaxTile; }
  TURBOQUANT_HD constexpr CodeRow key_row() const { return {head_dim, key_width()}; }
  TURBOQUANT_HD constexpr int key_row_bytes() const { return key_row().row_bytes(); }
  TURBOQUANT_HD constexpr int key_plane_bytes() const { return key_row().plane_bytes(); }
  TURBOQUANT_HD constexpr int value_block_bytes() const {
    return is_spread(value_width())
               ? kSpreadBytes * (head_dim / kSpreadChannels) + kValueGroup / 2 * (head_dim % kSpreadChannels)
               : kValueGroup * head_dim * value_bits / 8;
  }

  // Sections of a tile ------------------------------------------------------------------------------------------------
  TURBOQUANT_HD constexpr int key_planes() const { return tile_tokens() * key_row_bytes(); }
  TURBOQUANT_HD constexpr int value_blocks() const { return key_planes() + tile_tokens() * key_plane_bytes(); }
  TURBOQUANT_HD constexpr int key_scales() const {
    return value_blocks() + tile_tokens() / kValueGroup * value_block_bytes();
  }
  TURBOQUANT_HD constexpr int value_scales() const { return key_scales() + 2 * tile_tokens(); }
  TURBOQUANT_HD constexpr int tile_bytes() const { return value_scales() + 2 * tile_tokens(); }
  TURBOQUANT_HD constexpr int record_bytes() const { return page_size / tile_tokens() * tile_bytes(); }
  TURBOQUANT_HD constexpr int tile_of(int token) const { return token / tile_tokens() * tile_bytes(); }
  // All bytes of a tile belong to one of its tokens, and each of them owns as many.
  TURBOQUANT_HD constexpr int token_bytes() const { return tile_bytes() / tile_tokens(); }

  TURBOQUANT_HD constexpr int key_scale(int token) const {
    return tile_of(token) + key_scales() + 2 * (token % tile_tokens());
  }
  TURBOQUANT_HD constexpr int value_scale(int token) const {
    return tile_of(token) + value_scales() + 2 * (token % tile_tokens());
  }

  // Codes -------------------------------------------------------------------------------------------------------------
  TURBOQUANT_HD constexpr Pieces key(int token, int channel) const {
    const int t = token % tile_tokens();
    return key_row().code(tile_of(token) + t * key_row_bytes(), tile_of(token) + key_planes() + t * key_plane_bytes(),
                          channel);
  }

  TURBOQUANT_HD constexpr Pieces value(int token, int channel) const {
    const int block = tile_of(token) + value_blocks() + token % tile_tokens() / kValueGroup * value_block_bytes();
    const int s = token % kValueGroup, q = s % 8 / 2, b = s % 2 + 2 * (s / 8);
    const int g = channel % 8, lane = 4 * g + q, octet = channel / 8;
    if (is_spread(value_width())) {
      const int set = channel / kSpreadChannels, full = head_dim / kSpreadChannels, j = channel / 16 % 4;
      const int start = block + kSpreadBytes * set, shift = 4 * (octet % 2);
      if (set == full) return one_piece(start + 4 * (head_dim % kSpreadChannels / 16) * lane + 4 * j + b, shift, 3);
      return j < kSpreadUnits ? one_piece(start + 4 * kSpreadUnits * lane + 4 * j + b, shift, 3)
                              : three_bits(start + 4 * kSpreadUnits * lane + b, 4, shift + 3);
    }
    const int per_byte = 8 / value_bits, units = head_dim / (8 * per_byte), unit = octet / per_byte;
    if (unit == units) {  // 2 bits, the last 16 channels: four channels of one token share a byte
      return one_piece(block + kUnitBytes * units + 16 * (g % 4) + 4 * q + b, 4 * (g / 4) + 2 * (octet % 2), 2);
    }
    const int chunk = unit / kChunkUnits, rest = units - kChunkUnits * chunk;
    const int words = rest < kChunkUnits ? rest : kChunkUnits;
    return one_piece(block + kChunkBytes * chunk + 4 * words * lane + 4 * (unit % kChunkUnits) + b,
                     value_bits * (octet % per_byte), value_bits);
  }
};

// Where the record of a page and a head begins in a cache uint8 [num_pages, kv_heads, record_bytes]. page_stride is the
// distance between pages, whose records lie one after the other; both distances are in bytes, or in any other unit.
template <typename T>
TURBOQUANT_HD constexpr T record_offset(T page, T head, T page_stride, T record_bytes) {
  return page * page_stride + head * record_bytes;
}
// The same for kernels, with factors of 32 bits.
TURBOQUANT_HD constexpr uint64_t record_offset_32(uint32_t page, uint32_t head, uint32_t page_stride,
                                                  uint32_t record_bytes) {
  return uint64_t{page} * page_stride + uint64_t{head} * record_bytes;
}

TURBOQUANT_HD constexpr unsigned read_code(const uint8_t* record, const Pieces& p) {
  unsigned code = 0;
  for (int i = 0; i < p.count; ++i) {
    const Piece& x = p.piece[i];
    code |= (record[x.byte] >> x.shift & ((1u << x.width) - 1)) << x.code_shift;
  }
  return code;
}

// Writes a code into bytes that its token owns (read-modify-write within the token only).
TURBOQUANT_HD constexpr void write_code(uint8_t* record, const Pieces& p, unsigned code) {
  for (int i = 0; i < p.count; ++i) {
    const Piece& x = p.piece[i];
    const unsigned mask = ((1u << x.width) - 1) << x.shift;
    record[x.byte] = static_cast<uint8_t>((record[x.byte] & ~mask) | (code >> x.code_shift << x.shift & mask));
  }
}

// ---- Section 9: the exact tail --------------------------------------------------------------------------------------

// The tail's rows are sinks, which hold the first positions, and a ring, which holds the last ones. No argument is
// negative. Ring: T, or what divides a T faster.
template <typename T, typename Ring>
TURBOQUANT_HD constexpr T tail_row(T position, T sink_tokens, const Ring& ring) {
  using Fast = decltype(T{} + 0u);  // int divides faster without its sign
  return position < sink_tokens ? position
                                : sink_tokens + static_cast<T>(static_cast<Fast>(position - sink_tokens) % ring);
}

// Where a row of a tail [max_seqs, kv_heads, rows, 2, d] begins; kind 0 is the key, 1 the value. stride is the distance
// between the entries of sequences, which are contiguous, and `vector` the size of d channels; both are in elements, or
// in any other unit.
template <typename T>
TURBOQUANT_HD constexpr T tail_offset(T slot, T stride, T head, T row, T rows, T vector, int kind) {
  return slot * stride + ((head * rows + row) * 2 + kind) * vector;
}
// The same for kernels, with factors of 32 bits.
TURBOQUANT_HD constexpr uint64_t tail_offset_32(uint32_t slot, uint32_t stride, uint32_t head, uint32_t row,
                                                uint32_t rows, uint32_t vector, int kind) {
  return uint64_t{slot} * stride + (uint64_t{head * rows + row} * 2 + kind) * vector;
}

// Whether a sequence of `length` tokens keeps this one; later tokens take the rows of the others.
TURBOQUANT_HD constexpr bool tail_keeps(int64_t position, int64_t length, int64_t sink_tokens, int64_t ring) {
  return position < sink_tokens || position >= length - ring;
}

// ---- Section 12: records of latents ---------------------------------------------------------------------------------

// Latent attention keeps one vector per token, which is both key and value of every query head, and a few raw channels
// beside it that carry the position.
constexpr int kMaxLatentDim = 512;
TURBOQUANT_HD constexpr bool valid_latent_dim(int64_t d) { return d == 128 || d == 256 || d == kMaxLatentDim; }
TURBOQUANT_HD constexpr bool valid_rope_dim(int64_t d) { return d == 0 || d == 32 || d == 64; }
TURBOQUANT_HD constexpr bool valid_latent_page_size(int64_t n) { return n == 32 || n == 64 || n == 128; }
TURBOQUANT_HD constexpr bool valid_latent_width(Width w) {
  switch (w) {
    case Width::k1:
    case Width::k2: return false;
    case Width::k3:
    case Width::k4:
    case Width::k5:
    case Width::k8: break;
  }
  return true;
}
TURBOQUANT_HD constexpr bool valid_latent_bits(int64_t bits) {
  return valid_width(bits) && valid_latent_width(as_width(bits));
}

constexpr int kRopeBytes = 2;  // of a raw channel, bfloat16 or float16

// Rows of codes and of raw channels are made of words of 16 bytes, and tokens have them in different orders: so the
// same word of neighbouring tokens is in different banks of shared memory, where a tile arrives as one piece.
constexpr int kLatentWord = 16;

// Where a token has word `word` of a row of `words` words, or which word is there: two words have changed places.
TURBOQUANT_HD constexpr int swapped_word(int words, int token, int word) {
  return words % 8 == 0 ? word ^ token % 8 : words % 4 == 0 ? word ^ token / 2 % 4 : word;
}
// The same for a byte of a row of `bytes` bytes.
TURBOQUANT_HD constexpr int swapped_byte(int bytes, int token, int byte) {
  return swapped_word(bytes / kLatentWord, token, byte / kLatentWord) * kLatentWord + byte % kLatentWord;
}

// The geometry of the record of a page. All offsets are bytes from the start of the record.
struct LatentRecord {
  int latent_dim;
  int rope_dim;
  int page_size;
  int bits;

  TURBOQUANT_HD constexpr Width width() const { return as_width(bits); }
  TURBOQUANT_HD constexpr CodeRow row() const { return {latent_dim, width()}; }
  TURBOQUANT_HD constexpr int row_bytes() const { return row().row_bytes(); }
  TURBOQUANT_HD constexpr int plane_bytes() const { return row().plane_bytes(); }
  TURBOQUANT_HD constexpr int rope_bytes() const { return kRopeBytes * rope_dim; }

  // Sections of a tile ------------------------------------------------------------------------------------------------
  static constexpr int kTileTokens = kMaxTile;  // pages have whole tiles
  TURBOQUANT_HD constexpr int planes() const { return kTileTokens * row_bytes(); }
  TURBOQUANT_HD constexpr int ropes() const { return planes() + kTileTokens * plane_bytes(); }
  TURBOQUANT_HD constexpr int scales() const { return ropes() + kTileTokens * rope_bytes(); }
  TURBOQUANT_HD constexpr int tile_bytes() const { return scales() + 2 * kTileTokens; }
  TURBOQUANT_HD constexpr int record_bytes() const { return page_size / kTileTokens * tile_bytes(); }
  TURBOQUANT_HD constexpr int tile_of(int token) const { return token / kTileTokens * tile_bytes(); }

  // Of one token ------------------------------------------------------------------------------------------------------
  TURBOQUANT_HD constexpr int row_of(int token) const { return tile_of(token) + token % kTileTokens * row_bytes(); }
  TURBOQUANT_HD constexpr int plane_of(int token) const {
    return tile_of(token) + planes() + token % kTileTokens * plane_bytes();
  }
  TURBOQUANT_HD constexpr int rope_of(int token) const {
    return tile_of(token) + ropes() + token % kTileTokens * rope_bytes();
  }
  TURBOQUANT_HD constexpr int raw_channel(int token, int channel) const {
    return rope_of(token) + swapped_byte(rope_bytes(), token, kRopeBytes * channel);
  }
  TURBOQUANT_HD constexpr int scale_of(int token) const {
    return tile_of(token) + scales() + 2 * (token % kTileTokens);
  }
  TURBOQUANT_HD constexpr Pieces code(int token, int channel) const {
    const int begin = row_of(token), end = begin + row_bytes();
    Pieces x = row().code(begin, plane_of(token), channel);
    for (int i = 0; i < x.count; ++i) {
      int32_t& byte = x.piece[i].byte;
      if (byte >= begin && byte < end) byte = begin + swapped_byte(row_bytes(), token, byte - begin);
    }
    return x;
  }
};

// Where a row of a tail of latents [max_seqs, rows, vector] begins; `vector` is latent_dim + rope_dim. stride is the
// distance between the entries of sequences; both are in elements, or in any other unit.
template <typename T>
TURBOQUANT_HD constexpr T latent_tail_offset(T slot, T stride, T row, T vector) {
  return slot * stride + row * vector;
}

// ---- Section 13: weights --------------------------------------------------------------------------------------------

// A weight [n, k] of a linear layer is stored in blocks of 16 rows (outputs) and `group` channels (inputs). The
// channels of a row in a block share a transform and a float16 scale. Where a format has multipliers, every 32 of them
// share one: a decoded channel is scale * kLevelUnit * (multiplier * kMultiplierUnit) * level.
constexpr int kWeightRows = 16;
constexpr int kSubChannels = 32;  // that share a multiplier
constexpr int kMultiplierCodes = 16;
constexpr int kMultiplierOffset = 12;          // a multiplier is its code and this: 12 .. 27
constexpr float kMultiplierUnit = 1.0f / 16;   // so that multipliers are 0.75 to 1.69
constexpr int kMultiplierOne = 16;             // is a multiplier of 1
constexpr int kMaxWeightGroups = 1 << 20;      // of a row: no offset in a row of blocks leaves int64, nor k int32
constexpr int64_t kMaxWeightRows = 1LL << 31;  // no number of rows leaves int64

TURBOQUANT_HD constexpr int multiplier(int code) { return code + kMultiplierOffset; }

TURBOQUANT_HD constexpr bool valid_weight_width(Width w) {
  switch (w) {
    case Width::k4:
    case Width::k8: return true;
    case Width::k1:
    case Width::k2:
    case Width::k3:
    case Width::k5: break;
  }
  return false;
}
TURBOQUANT_HD constexpr bool valid_weight_bits(int64_t bits) {
  return valid_width(bits) && valid_weight_width(as_width(bits));
}
TURBOQUANT_HD constexpr bool valid_weight_group(int64_t group) { return group == 64 || group == 128; }
// sub: channels that share a multiplier, 0 without multipliers. Codes that are levels are fine enough without them.
TURBOQUANT_HD constexpr bool valid_weight_sub(Width w, int64_t sub) {
  return sub == 0 || (sub == kSubChannels && !levels_are_codes(w));
}

// The geometry of a block. All offsets are bytes from its start.
//
// Codes are left operands of the tensor-core instruction m16n8k32 with 8-bit elements, whose rows are outputs. An
// operand takes the 16 rows and 32 channels (a step), and lane 4 g + t of a warp holds rows g and g + 8 of it. A block
// is chunks of 512 bytes, 16 for each lane, which hold one step or more; then its scales; then its multipliers.
struct WeightBlock {
  int group;
  int bits;
  int sub;  // 0: no multipliers

  TURBOQUANT_HD constexpr Width width() const { return as_width(bits); }
  TURBOQUANT_HD constexpr int subs() const { return sub ? group / sub : 0; }  // multipliers of a row

  // Sections ----------------------------------------------------------------------------------------------------------
  static constexpr int kStepChannels = 32;
  static constexpr int kLaneBytes = 16, kWarpBytes = 32 * kLaneBytes;  // of a chunk
  TURBOQUANT_HD constexpr int chunk_channels() const { return kWarpBytes * 8 / bits / kWeightRows; }
  TURBOQUANT_HD constexpr int chunks() const { return group / chunk_channels(); }
  TURBOQUANT_HD constexpr int scales() const { return chunks() * kWarpBytes; }
  TURBOQUANT_HD constexpr int multipliers() const { return scales() + 2 * kWeightRows; }
  TURBOQUANT_HD constexpr int multiplier_bytes() const { return subs() / 2; }  // of a row: two in a byte
  TURBOQUANT_HD constexpr int block_bytes() const { return multipliers() + kWeightRows * multiplier_bytes(); }

  // Of one row --------------------------------------------------------------------------------------------------------
  // row: 0 .. 15, channel: 0 .. group - 1
  TURBOQUANT_HD constexpr Pieces code(int row, int channel) const {
    const int g = row % 8, lower = row / 8;
    const int step = channel / kStepChannels, t = channel % 16 / 4, right = channel % kStepChannels / 16;
    const int chunk = channel / chunk_channels(), inside = step % (chunk_channels() / kStepChannels);
    const int lane = chunk * kWarpBytes + (4 * g + t) * kLaneBytes;
    // A word holds four channels of one row at 8 bits; at 4 bits those of the left half, then those of the right.
    if (levels_are_codes(width())) return one_piece(lane + 4 * (2 * right + lower) + channel % 4, 0, 8);
    const int nibble = 4 * right + channel % 4;
    return one_piece(lane + 4 * (2 * inside + lower) + nibble / 2, 4 * (nibble % 2), 4);
  }
  // Scales and multipliers of rows g and g + 8, which share the words of a lane, are neighbours.
  TURBOQUANT_HD constexpr int pair_order(int row) const { return row % 8 * 2 + row / 8; }
  TURBOQUANT_HD constexpr int scale(int row) const { return scales() + 2 * pair_order(row); }
  // s: channels 32 s .. 32 s + 31 of the group
  TURBOQUANT_HD constexpr Pieces multiplier_code(int row, int s) const {
    return one_piece(multipliers() + multiplier_bytes() * pair_order(row) + s / 2, 4 * (s % 2), 4);
  }
};

// Blocks of a weight [n, k] in a tensor uint8 [tiles, k / group, block_bytes]. Rows that fill the last tile have codes,
// scales and multiplier codes of 0.
TURBOQUANT_HD constexpr int64_t weight_tiles(int64_t n) { return (n + kWeightRows - 1) / kWeightRows; }

}  // namespace turboquant::format
