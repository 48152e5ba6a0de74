// The kernel that decodes many vectors of 64, 128 or 256 channels: from page records, or from dense rows.
//
// Under the scale of a vector its numbers are small integers, and six stages of butterflies only add and subtract them:
// |sum| <= 2^13, times the 11 bits of a float16 scale, is a float32 number, so nothing is rounded (format.md section 6).
// Integer tensor cores do these stages for 64 channels at a time, as products with a matrix of 1 and -1. Integers do the
// seventh, and scale * sum rounds once, as the format's seventh stage does. What comes after that is in floats: an
// eighth stage, the factor 1 / sqrt(n), signs, channels.
//
// A warp takes 16 neighbouring tokens of one head. Levels are the left operand of the products: a lane holds a quarter
// of the channels of two tokens, looked up four at a time by byte permutations. Channels are numbered so that it gets 8
// neighbours of the result, which leave from its registers.
#include "tiles.cuh"

#include <algorithm>

#include "mma.cuh"
#include "tile_launch.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kWarps = 4;         // of a block
constexpr int kTokens = 16;       // of a warp: rows g and g + 8 of products, g = lane / 4
constexpr int kSetChannels = 64;  // of one product: a set

template <int LOG_N>
struct LoadTraits {
  static constexpr int kLogDim = LOG_N, kDim = 1 << LOG_N, kSets = kDim / kSetChannels;
  static constexpr int kBlocks = kDim <= 128 ? 4 : 3;  // of a multiprocessor: more would have too few registers
};

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

// What a lane holds of the right operand (step, word), for both products: 1 or -1, as bytes.
__device__ __forceinline__ uint4 butterfly_operand(bool values, int step, int word, int lane) {
  uint32_t out[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    for (int byte = 0; byte < 4; ++byte) {
      const int k = channel_of_operand(values, i / 2, i % 2, lane % 4, byte),
                n = channel_of_column(step, word, lane / 4);
      out[i] |= (__popc(k & n) & 1 ? 0xFFu : 1u) << 8 * byte;
    }
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// ---- Codes ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t load_word(const uint8_t* from) {
  return __ldg(reinterpret_cast<const uint32_t*>(from));
}
__device__ __forceinline__ uint2 load_pair(const uint8_t* from) { return __ldg(reinterpret_cast<const uint2*>(from)); }
__device__ __forceinline__ uint4 load_four(const uint8_t* from) { return __ldg(reinterpret_cast<const uint4*>(from)); }

// What a lane reads of its two tokens: on its way while the tokens before are decoded.
template <typename Traits>
struct Fetched {
  uint32_t word[Traits::kSets][2][4];  // [set][token][..]; of values both tokens together
  uint16_t scale[2];
  bool there[2];  // is something stored, and asked for?

  // The lane's 16 codes of token i in set h, whose codes start at `row`, their fifth bits at `plane`.
  __device__ __forceinline__ void get_key(int bits, const uint8_t* row, const uint8_t* plane, int h, int i, int t) {
    uint32_t (&w)[4] = word[h][i];
    if (bits == 8) {
      const uint4 x = load_four(row + 16 * t);
      w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
    } else if (bits >= 4) {
      const uint2 x = load_pair(row + 8 * t);
      w[0] = x.x, w[1] = x.y;
      if (bits == 5) w[2] = load_word(plane + 4 * (t / 2));
    } else if (bits == 3) {
#pragma unroll
      for (int n = 0; n < 3; ++n) w[n] = load_word(row + 12 * (t / 2) + 4 * n);
    } else {
      w[0] = load_word(row + 4 * t);
    }
  }

  // The same of a dense row, which starts at a multiple of 8 bytes.
  __device__ __forceinline__ void get_dense(int bits, const uint8_t* row, int h, int i, int t) {
    uint32_t (&w)[4] = word[h][i];
    if (bits == 8) {
      const uint2 x = load_pair(row + 16 * t), y = load_pair(row + 16 * t + 8);
      w[0] = x.x, w[1] = x.y, w[2] = y.x, w[3] = y.y;
    } else if (bits == 4) {
      const uint2 x = load_pair(row + 8 * t);
      w[0] = x.x, w[1] = x.y;
    } else {
      const uint8_t* from = row + (2 * bits * t & ~3);
      w[0] = load_word(from);
      if (bits == 3 || bits == 5) w[1] = load_word(from + 4);
      if (bits == 5) w[2] = load_word(from + 8);
    }
  }

  // Values of at most four bits, of both tokens, from their block. The lane's channels are 2 t and 2 t + 1 of each eight.
  __device__ __forceinline__ void get_value(int bits, const uint8_t* block, int h, int g, int t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t (&w)[4] = word[h][i];
      const int lane = 4 * (2 * t + i) + g / 2;
      if (bits == 4) {
        const uint4 x = load_four(block + 512 * h + 16 * lane);
        w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
      } else if (bits == 3) {
#pragma unroll
        for (int n = 0; n < 3; ++n) w[n] = load_word(block + 384 * h + 12 * lane + 4 * n);
      } else {
        constexpr int words = Traits::kSets == 1 ? 2 : 4;
        const uint2 x = load_pair(block + 512 * (h / 2) + 4 * words * lane + 8 * (h % 2));
        w[0] = x.x, w[1] = x.y;
      }
    }
  }
};

// Eight codes of up to four bits as nibbles; `fifth`: their fifth bits, as nibbles.
struct Codes {
  uint32_t low, fifth;
};

__device__ __forceinline__ void open_key(int bits, const uint32_t (&w)[4], int t, Codes (&codes)[2]) {
  if (bits >= 4) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      codes[n].low = w[n];
      const uint32_t pairs = w[2] >> (4 * (t % 2) + 2 * n) & 0x03030303;
      codes[n].fifth = (pairs | pairs << 3) & 0x11111111;
    }
  } else if (bits == 3) {
    const uint32_t last = (w[0] >> 3 & 0x11111111) | (w[1] >> 2 & 0x22222222) | (w[2] >> 1 & 0x44444444);
    codes[0].low = (t % 2 ? w[2] : w[0]) & 0x77777777;
    codes[1].low = t % 2 ? last : w[1] & 0x77777777;
  } else {
    codes[0].low = open_nibbles(w[0] & 0xFFFF, 2), codes[1].low = open_nibbles(w[0] >> 16, 2);
  }
}

__device__ __forceinline__ void open_dense(int bits, const uint32_t (&w)[4], int t, Codes (&codes)[2]) {
  if (bits == 4) {
    codes[0].low = w[0], codes[1].low = w[1];
    return;
  }
  const int shift = bits % 2 ? 16 * (t % 2) : 0;
  const uint32_t first = __funnelshift_r(w[0], w[1], shift), second = __funnelshift_r(w[1], w[2], shift);
  if (bits == 5) {
    const uint32_t third = w[2] >> shift;
    const Octet a = octet_of_string(first | static_cast<uint64_t>(second) << 32, 5),
                b = octet_of_string(second >> 8 | static_cast<uint64_t>(third) << 24, 5);
    codes[0] = {a.low, nibbles_of_bits(a.high)}, codes[1] = {b.low, nibbles_of_bits(b.high)};
  } else if (bits == 3) {
    codes[0].low = open_nibbles(first & 0xFFFFFF, 3);
    codes[1].low = open_nibbles(__funnelshift_r(first, second, 24) & 0xFFFFFF, 3);
  } else if (bits == 2) {
    codes[0].low = open_nibbles(w[0] & 0xFFFF, 2), codes[1].low = open_nibbles(w[0] >> 16, 2);
  } else {
    codes[0].low = nibbles_of_bits(first & 255), codes[1].low = nibbles_of_bits(first >> 8 & 255);
  }
}

// Values of both tokens: they are bytes b and b + 2 of words, b = g % 2.
template <typename Fetch>
__device__ __forceinline__ void open_value(int bits, const Fetch& f, int h, int g, Codes (&codes)[2][2]) {
  const uint32_t own = g % 2 ? 0x7351 : 0x6240;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const uint32_t* w = f.word[h][n];
    const uint32_t first = permute(w[0], w[1], own);
    if (bits == 2) {
      codes[0][n].low = open_nibbles(first & 0xFFFF, 2), codes[1][n].low = open_nibbles(first >> 16, 2);
      continue;
    }
    const uint32_t second = permute(w[2], w[3], own);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t x = permute(first, second, i ? 0x7632 : 0x5410);
      if (bits == 3) {
        const uint32_t last = (x >> 3 & 0x11) | (x >> 10 & 0x22) | (x >> 17 & 0x44);
        x = (x & 0x00777777) | last << 24;
      }
      codes[i][n].low = x;
    }
  }
}

// ---- Levels -----------------------------------------------------------------------------------------------------------

// The levels of codes as bytes: eight of them, or four times eight.
struct LevelTable {
  uint32_t word[8];

  __device__ __forceinline__ LevelTable(const int8_t* levels, int bits) {
    if (bits == 8) return;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      word[w] = 0;
      if (w > 0 && 4 * w >= 1 << bits) continue;
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int code = min(4 * w + b, (1 << bits) - 1);
        word[w] |= static_cast<uint32_t>(format::level_of_code(bits, levels, code) & 255) << 8 * b;
      }
    }
  }

  // Of the four low nibbles.
  __device__ __forceinline__ uint32_t eight(int first, uint32_t nibbles) const {
    return permute(word[first], word[first + 1], nibbles);
  }

  // Of codes 4 n to 4 n + 3. BITS: 3 for all up to 3.
  template <int BITS>
  __device__ __forceinline__ uint32_t of(const Codes& codes, int n) const {
    if constexpr (BITS == 3) return eight(0, codes.low >> 16 * n);
    const uint32_t low = (codes.low & 0x77777777) >> 16 * n;
    const uint32_t upper = mask_of((codes.low >> 3 & 0x11111111) >> 16 * n);
    uint32_t bytes = choose(upper, eight(2, low), eight(0, low));
    if constexpr (BITS == 5) {
      bytes = choose(mask_of(codes.fifth >> 16 * n), choose(upper, eight(6, low), eight(4, low)), bytes);
    }
    return bytes;
  }

 private:
  // 255 where a selector's nibble is 1, 0 where it is 0.
  static __device__ __forceinline__ uint32_t mask_of(uint32_t nibbles) { return permute(0xFF00, 0, nibbles); }
  static __device__ __forceinline__ uint32_t choose(uint32_t mask, uint32_t one, uint32_t zero) {
    return (one & mask) | (zero & ~mask);
  }
};

// The left operands [set][product] of two tokens.
template <typename Traits>
using Operands = uint32_t[Traits::kSets][2][4];

template <int BITS, typename Traits>
__device__ __forceinline__ void put_levels(const Fetched<Traits>& f, const LevelTable& table, int bits, bool dense,
                                           bool values, int g, int t, Operands<Traits>& a) {
#pragma unroll
  for (int h = 0; h < Traits::kSets; ++h) {
    Codes codes[2][2] = {};  // [token][half]
    if constexpr (BITS != 8) {
      if (BITS != 5 && values) {
        open_value(bits, f, h, g, codes);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (dense) {
            open_dense(bits, f.word[h][i], t, codes[i]);
          } else {
            open_key(bits, f.word[h][i], t, codes[i]);
          }
        }
      }
    }
#pragma unroll
    for (int product = 0; product < 2; ++product) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int token = r % 2, half = r / 2;
        if constexpr (BITS == 8) {
          a[h][product][r] = f.word[h][token][2 * half + product];
        } else {
          a[h][product][r] = table.of<BITS>(codes[token][half], product);
        }
      }
    }
  }
}

// ---- Tiles ----------------------------------------------------------------------------------------------------------

// A tile: neighbouring tokens of a sequence and a head. Neighbouring warps take neighbouring heads, then the next tile.
struct Place {
  int64_t sequence;
  int tile, head;

  __device__ __forceinline__ Place(int item, int heads, int tiles)
      : sequence(item / heads / tiles), tile(item / heads % tiles), head(item % heads) {}

  // `on`: the place of as many items from the start. Without a division.
  __device__ __forceinline__ void advance(const Place& on, int heads, int tiles) {
    head += on.head;
    tile += on.tile;
    sequence += on.sequence;
    if (head >= heads) head -= heads, ++tile;
    if (tile >= tiles) tile -= tiles, ++sequence;
  }
};

template <typename Traits>
__device__ __forceinline__ void fetch_dense(const LoadTileArguments& a, int64_t begin, int bits, int g, int t,
                                            Fetched<Traits>& f) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t position = begin + g + 8 * i;
    f.there[i] = position < a.max_length;
    if (!f.there[i]) continue;
    const uint8_t* row = a.packed + position * a.row_bytes;
#pragma unroll
    for (int h = 0; h < Traits::kSets; ++h) f.get_dense(bits, row + 8 * bits * h, h, i, t);
    f.scale[i] = a.scale[position];
  }
}

// Tokens of a tile are those of a value block, and share a page. Beyond the end of a sequence, or of what is asked for,
// the block is read all the same, since lanes share its words.
template <typename Traits>
__device__ __forceinline__ void fetch_page(const LoadTileArguments& a, const Place& place, bool values, int bits, int g,
                                           int t, Fetched<Traits>& f) {
  const int64_t begin = int64_t{place.tile} * kTokens, page = begin >> a.layout.page_shift;
  const int64_t length = min(int64_t{a.lengths[place.sequence]}, a.max_length);
  if (begin >= length || page >= a.max_pages) return;
  const Token from = a.pages.token(a.table[place.sequence * a.max_pages + page],
                                   static_cast<int>(begin) & ((1 << a.layout.page_shift) - 1), place.head, a.layout);
  if (!from.tile) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) f.there[i] = begin + g + 8 * i < length;
  if (values) {
    const uint8_t* block = from.value_block(a.layout);
#pragma unroll
    for (int h = 0; h < Traits::kSets; ++h) f.get_value(bits, block, h, g, t);
    const uint16_t* scale = from.value_scale(a.layout) + g;
    f.scale[0] = scale[0], f.scale[1] = scale[8];
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Token own{from.tile, from.number + g + 8 * i};
    const uint8_t *row = own.key_row(a.layout), *plane = own.key_plane(a.layout);
#pragma unroll
    for (int h = 0; h < Traits::kSets; ++h) {
      f.get_key(bits, row + 8 * (bits == 5 ? 4 : bits) * h, plane + 8 * h, h, i, t);
    }
    f.scale[i] = *own.key_scale(a.layout);
  }
}

// ---- Numbers --------------------------------------------------------------------------------------------------------

constexpr float kMiddle = 12582912.0f;  // 1.5 * 2^23: an integer added to its bits is a number added to it

// Sums of the two columns of (step, word) for both tokens, in the bits of numbers above kMiddle: [set][2 token +
// column]. Up to seven stages of butterflies. butterfly: the right operand.
template <typename Traits>
__device__ __forceinline__ void add_up(const Operands<Traits>& operands, const uint4& butterfly, const int (&middle)[4],
                                       int (&sum)[Traits::kSets][4]) {
#pragma unroll
  for (int h = 0; h < Traits::kSets; ++h) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[h][i] = h % 2 ? 0 : middle[i];
    mma_bytes(sum[h], operands[h][0], make_uint2(butterfly.x, butterfly.y));
    mma_bytes(sum[h], operands[h][1], make_uint2(butterfly.z, butterfly.w));
  }
#pragma unroll
  for (int h = 0; h + 1 < Traits::kSets; h += 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int p = sum[h][i], q = sum[h + 1][i];
      sum[h][i] = p + q, sum[h + 1][i] = p - q;
    }
  }
}

// y of a lane is [set][8 token + channel], the channels neighbours.
template <typename Traits>
using Numbers = float[Traits::kSets][16];

// y * factor, of shared memory; from: of the first set.
template <typename Traits>
__device__ __forceinline__ void multiply_shared(Numbers<Traits>& y, const float* from) {
#pragma unroll
  for (int h = 0; h < Traits::kSets; ++h) {
#pragma unroll
    for (int k = 0; k < 8; k += 4) {
      const float4 f = *reinterpret_cast<const float4*>(from + kSetChannels * h + k);
#pragma unroll
      for (int i = k; i < 16; i += 8) {
        y[h][i] = __fmul_rn(y[h][i], f.x), y[h][i + 1] = __fmul_rn(y[h][i + 1], f.y);
        y[h][i + 2] = __fmul_rn(y[h][i + 2], f.z), y[h][i + 3] = __fmul_rn(y[h][i + 3], f.w);
      }
    }
  }
}

// fn(number, that of its channel), of global memory.
template <typename Traits, typename Fn>
__device__ __forceinline__ void with_channels(Numbers<Traits>& y, const float* from, Fn&& fn) {
#pragma unroll
  for (int h = 0; h < Traits::kSets; ++h) {
    float c[8];
    load_floats<8>(from + kSetChannels * h, c);
#pragma unroll
    for (int i = 0; i < 16; ++i) y[h][i] = fn(y[h][i], c[i % 8]);
  }
}

// One vector, of which each lane holds what the butterflies of the format want: rare. y: its levels times its scale, [d]
// in shared memory; row: [d]. All of the warp take part.
template <typename Traits, typename T>
__device__ __forceinline__ void put_plainly(float* y, const float* factors, const format::Channels& channels, int lane,
                                            T* row) {
#pragma unroll 1
  for (int h = 1; h < Traits::kDim; h *= 2) {
#pragma unroll
    for (int n = lane; n < Traits::kDim / 2; n += 32) {
      const int c = n / h * 2 * h + n % h;
      const float p = y[c], q = y[c + h];
      y[c] = __fadd_rn(p, q), y[c + h] = __fsub_rn(p, q);
    }
    __syncwarp();
  }
#pragma unroll 1
  for (int c = 2 * lane; c < Traits::kDim; c += 64) {
    float z[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      z[i] = __fmul_rn(y[c + i], factors[c + i]);
      if (channels.inverse) z[i] = __fmul_rn(z[i], channels.inverse[c + i]);
      if (channels.center) z[i] = __fadd_rn(z[i], channels.center[c + i]);
    }
    *reinterpret_cast<uint32_t*>(row + c) = word_of_floats<T>(z[0], z[1]);
  }
  __syncwarp();
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

template <typename Traits, typename T>
__global__ void __launch_bounds__(32 * kWarps, Traits::kBlocks)
    load_tile_kernel(const __grid_constant__ LoadTileArguments a) {
  constexpr int kSets = Traits::kSets, kDim = Traits::kDim;
  __shared__ alignas(16) float factors[2][kDim];
  __shared__ uint4 butterflies[2][8][32];  // [source][4 step + word][lane]
  __shared__ float numbers[kWarps][kDim];
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  // Signs times 1 / sqrt(n).
  for (int i = threadIdx.x; i < a.sources * kDim; i += 32 * kWarps) {
    factors[i / kDim][i % kDim] = __fmul_rn(a.source[i / kDim].signs[i % kDim], block_norm(Traits::kLogDim));
  }
  for (int i = warp; i < 8 * a.sources; i += kWarps) {
    butterflies[i / 8][i % 8][lane] = butterfly_operand(i >= 8, i / 4 % 2, i % 4, lane);
  }
  __syncthreads();

  // Neighbouring warps take keys and values in turn.
  const int s = warp % a.sources;
  const bool values = s == 1;
  const LoadTileSource& source = a.source[s];
  const int bits = source.bits;
  const LevelTable levels(source.levels, bits);
  const int warps = kWarps / a.sources, tiles = a.tiles_of_sequence;
  Place place(blockIdx.x * warps + warp / a.sources, a.heads, tiles);
  const Place on(gridDim.x * warps, a.heads, tiles);

  // Starts reading the lane's tokens of a tile.
  const auto fetch = [&](Fetched<Traits>& f) {
    f.scale[0] = f.scale[1] = 0;
    f.there[0] = f.there[1] = false;
    if (place.sequence >= a.seqs) return;
    if (a.packed) {
      fetch_dense<Traits>(a, int64_t{place.tile} * kTokens, bits, g, t, f);
    } else {
      fetch_page<Traits>(a, place, values, bits, g, t, f);
    }
  };

  int middle[4];  // in registers: what sums start from
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    middle[i] = __float_as_int(kMiddle);
    asm("" : "+r"(middle[i]));
  }
  Fetched<Traits> fetched;
  fetch(fetched);
#pragma unroll 1
  while (place.sequence < a.seqs) {
    const Place from = place;
    const int64_t begin = int64_t{from.tile} * kTokens;
    Operands<Traits> operands;
    switch (bits) {
      case 8: put_levels<8>(fetched, levels, bits, a.packed, values, g, t, operands); break;
      case 5: put_levels<5>(fetched, levels, bits, a.packed, values, g, t, operands); break;
      case 4: put_levels<4>(fetched, levels, bits, a.packed, values, g, t, operands); break;
      default: put_levels<3>(fetched, levels, bits, a.packed, values, g, t, operands); break;
    }
    float unit[2], offset[2];
    bool there[2], exists[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unit[i] = __fmul_rn(__half2float(__ushort_as_half(fetched.scale[i])), format::kLevelUnit);
      offset[i] = __fmul_rn(unit[i], -kMiddle);
      there[i] = fetched.there[i];
      exists[i] = begin + g + 8 * i < a.max_length;
    }
    // Token g, and the way to g + 8.
    T* first = static_cast<T*>(source.out) + ((from.sequence * a.max_length + begin + g) * a.heads + from.head) * kDim;
    const int64_t to_second = int64_t{a.heads} * (8 * kDim);
    place.advance(on, a.heads, tiles);
    fetch(fetched);

#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int channel = 32 * step + 8 * t;  // the lane's first of a set
      Numbers<Traits> y;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        int sum[kSets][4];
        add_up<Traits>(operands, butterflies[s][4 * step + w][lane], middle, sum);
#pragma unroll
        for (int h = 0; h < kSets; ++h) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {  // unit * (kMiddle + sum) - unit * kMiddle
            y[h][i / 2 * 8 + 2 * w + i % 2] = __fmaf_rn(__int_as_float(sum[h][i]), unit[i / 2], offset[i / 2]);
          }
        }
      }
#pragma unroll
      for (int h = 0; h + 2 < kSets; ++h) {  // the eighth stage
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const float p = y[h][i], q = y[h + 2][i];
          y[h][i] = __fadd_rn(p, q), y[h + 2][i] = __fsub_rn(p, q);
        }
      }
      multiply_shared<Traits>(y, factors[s] + channel);
      if (source.channels.center) {  // scales never come alone
        const format::Channels channels = source.channels.of_head(from.head, kDim);
        if (channels.inverse) {
          with_channels<Traits>(y, channels.inverse + channel, [](float a, float b) { return __fmul_rn(a, b); });
        }
        with_channels<Traits>(y, channels.center + channel, [](float a, float b) { return __fadd_rn(a, b); });
      }
#pragma unroll
      for (int h = 0; h < kSets; ++h) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t word[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) word[k] = word_of_floats<T>(y[h][8 * i + 2 * k], y[h][8 * i + 2 * k + 1]);
          if (exists[i]) {
            __stwb(reinterpret_cast<uint4*>(first + i * to_second + kSetChannels * h + channel),
                   make_uint4(word[0], word[1], word[2], word[3]));
          }
        }
      }
    }

    // Rare: tokens that are not there are zeros. And which zero or NaN a sum gives depends, where scales are zero,
    // negative, infinite or NaN, on how it is made: such tokens go through the butterflies as they are.
    bool odd[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) odd[i] = there[i] && !(unit[i] > 0 && unit[i] < INFINITY);
    if (!__any_sync(0xffffffff, !there[0] || !there[1] || odd[0] || odd[1])) continue;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      T* own = first + i * to_second;
      if (!(i ? there[1] : there[0]) && (i ? exists[1] : exists[0])) {
#pragma unroll 1
        for (int n = 8 * t; n < kDim; n += 32) *reinterpret_cast<uint4*>(own + n) = make_uint4(0, 0, 0, 0);
      }
#pragma unroll 1
      for (uint32_t left = __ballot_sync(0xffffffff, i ? odd[1] : odd[0]); left; left &= left - 1) {
        const int one = __ffs(left) - 1;  // a lane of the token: each of its four puts its numbers there
        if (one % 4) continue;
        float* y = numbers[warp];
        if (g == one / 4) {
#pragma unroll
          for (int n = 0; n < 4 * kSets; ++n) {
            const int h = n / 4, product = n / 2 % 2, half = n % 2;
            const uint32_t bytes = i ? operands[h][product][2 * half + 1] : operands[h][product][2 * half];
#pragma unroll
            for (int byte = 0; byte < 4; ++byte) {
              y[kSetChannels * h + channel_of_operand(values, product, half, t, byte)] =
                  __fmul_rn(i ? unit[1] : unit[0], static_cast<float>(static_cast<int8_t>(bytes >> 8 * byte)));
            }
          }
        }
        __syncwarp();
        put_plainly<Traits>(y, factors[s], source.channels.of_head(from.head, kDim), lane,
                            own + (one / 4 - g) * (int64_t{a.heads} * kDim));
      }
    }
  }
}

// ---- Host side ------------------------------------------------------------------------------------------------------

template <int LOG_N, typename T>
bool launch_dim(LoadTileArguments a, cudaStream_t stream) {
  using Traits = LoadTraits<LOG_N>;
  const int64_t of_sequence = (a.max_length + kTokens - 1) / kTokens, items = a.seqs * of_sequence * a.heads;
  if (items > INT32_MAX / 2) return false;
  int device = 0, multiprocessors = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  if (items * a.sources < multiprocessors * kWarps) return false;
  const int64_t blocks =
      std::min<int64_t>(multiprocessors * Traits::kBlocks, (items * a.sources + kWarps - 1) / kWarps);
  a.tiles_of_sequence = static_cast<int>(of_sequence);
  load_tile_kernel<Traits, T><<<static_cast<unsigned>(blocks), 32 * kWarps, 0, stream>>>(a);
  return true;
}

}  // namespace

bool launch_load_tiles(const LoadTileArguments& a, format::Split split, cudaStream_t stream) {
  if (!a.packed && a.source[1].bits == 8) return false;
  return dispatch_tiles(a.dtype, split, [&](auto log_d, auto tag) {
    return launch_dim<log_d, typename decltype(tag)::type>(a, stream);
  });
}

}  // namespace turboquant::cuda
