// The kernel that decodes many vectors of 64, 128 or 256 channels (tiles.cuh): from page records, or from dense rows.
//
// A warp takes 32, 16 or 8 neighbouring tokens of one head, a lane 64 channels. Nibbles become bytes of levels by
// permutations, and bytes become numbers as the low bits of a float. What is decoded leaves through shared memory, a
// vector at a time.
#include "tiles.cuh"

#include <algorithm>

#include "tile_launch.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kWarps = 4, kBlocks = 4;  // of a block, of a multiprocessor

// ---- Codes of 64 neighbouring channels ------------------------------------------------------------------------------

template <int WORDS>
__device__ __forceinline__ void get_words(const uint8_t* from, uint32_t* word) {  // 8-byte aligned
#pragma unroll
  for (int i = 0; i < WORDS; i += 2) {
    const uint2 w = __ldg(reinterpret_cast<const uint2*>(from) + i / 2);
    word[i] = w.x, word[i + 1] = w.y;
  }
}

// What a lane reads of a vector: on its way while the vector before is decoded.
struct Fetched {
  uint32_t word[16];
  uint16_t scale;
  bool there;  // is something stored?

  // 64 codes of a row that starts at `row`; plane: 5-bit keys only.
  __device__ __forceinline__ void get_row(int bits, const uint8_t* row, const uint8_t* plane) {
    switch (bits) {
      case 1: return get_words<2>(row, word);
      case 2: return get_words<4>(row, word);
      case 3: return get_words<6>(row, word);
      case 4: return get_words<8>(row, word);
      case 8: return get_words<16>(row, word);
      default: break;
    }
    get_words<8>(row, word);
    get_words<2>(plane ? plane : row + 32, word + 8);
  }

  // A value of at most four bits from its block. The four tokens that share words are those of four lanes, which read a
  // quarter of their words each.
  template <typename Traits>
  __device__ __forceinline__ void get_value(int bits, int part, const uint8_t* block, int number) {
    const int q = value_q(number), b = value_b(number);
    if (bits == 4) {
      const uint8_t* from = block + 512 * part + 16 * (8 * b + q);
      const uint4 e = __ldg(reinterpret_cast<const uint4*>(from)), o = __ldg(reinterpret_cast<const uint4*>(from + 64));
      word[0] = e.x, word[1] = e.y, word[2] = e.z, word[3] = e.w;
      word[4] = o.x, word[5] = o.y, word[6] = o.z, word[7] = o.w;
    } else if (bits == 3) {
#pragma unroll
      for (int i = 0; i < 6; ++i) {
        word[i] =
            __ldg(reinterpret_cast<const uint32_t*>(block + 384 * part + 12 * (8 * b + 4 * (i / 3) + q) + 4 * (i % 3)));
      }
    } else {
      constexpr int words = Traits::kDim < 128 ? Traits::kDim / 32 : 4;
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const int group = 2 * part + g;
        const uint8_t* from = block + 512 * (group / 4) + 4 * (group % 4) + 4 * words * (8 * b + q);
        word[2 * g] = __ldg(reinterpret_cast<const uint32_t*>(from));
        word[2 * g + 1] = __ldg(reinterpret_cast<const uint32_t*>(from + 16 * words));
      }
    }
  }
};

// The codes: octet j in low[j], its fifth bits in bits 8 (j % 4) and up of high[j / 4].
struct OpenedCodes {
  uint32_t low[8], high[2];

  __device__ __forceinline__ void open_key(int bits, const uint32_t* word) {
    if (bits >= 4) {
#pragma unroll
      for (int o = 0; o < 8; ++o) low[o] = word[o];
      if (bits == 5) {
        const auto collect = [](uint32_t w) { return (w & 3) | (w >> 6 & 0x0C) | (w >> 12 & 0x30) | (w >> 18 & 0xC0); };
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          const uint32_t w = word[8 + g];
          high[g] = collect(w) | collect(w >> 2) << 8 | collect(w >> 4) << 16 | collect(w >> 6) << 24;
        }
      }
    } else if (bits == 3) {
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const uint32_t* w = word + 3 * g;
#pragma unroll
        for (int j = 0; j < 3; ++j) low[4 * g + j] = w[j] & 0x77777777;
        low[4 * g + 3] = (w[0] >> 3 & 0x11111111) | (w[1] >> 2 & 0x22222222) | (w[2] >> 1 & 0x44444444);
      }
    } else {
#pragma unroll
      for (int o = 0; o < 8; ++o) low[o] = open_nibbles(word[o / 2] >> 16 * (o % 2) & 0xFFFF, 2);
    }
  }

  __device__ __forceinline__ void open_dense(int bits, const uint32_t* word) {
    if (bits == 1) {
#pragma unroll
      for (int o = 0; o < 8; ++o) low[o] = nibbles_of_bits(word[o / 4] >> 8 * (o % 4) & 255);
    } else if (bits == 3) {
#pragma unroll
      for (int o = 0; o < 8; ++o) {
        const int bit = 24 * o, w = bit / 32;
        low[o] = open_nibbles(__funnelshift_r(word[w], word[w + 1], bit % 32) & 0xFFFFFF, 3);
      }
    } else if (bits == 5) {
      high[0] = high[1] = 0;
#pragma unroll
      for (int o = 0; o < 8; ++o) {
        const int bit = 40 * o, w = bit / 32;
        const uint64_t string =
            __funnelshift_r(word[w], word[w + 1], bit % 32) | static_cast<uint64_t>(word[w + 1] >> bit % 32) << 32;
        const Octet octet = octet_of_string(string, 5);
        low[o] = octet.low;
        high[o / 4] |= octet.high << 8 * (o % 4);
      }
    } else {
      open_key(bits, word);  // the same
    }
  }

  // Lanes transpose 4 x 4 bytes: all of the warp take part.
  template <typename Traits>
  __device__ __forceinline__ void open_value(int bits, const uint32_t* word, int number) {
    const int b = value_b(number);
    if (bits == 4) {
#pragma unroll
      for (int u = 0; u < 4; ++u) open_unit(own<Traits>(word[u], b), own<Traits>(word[4 + u], b), low + 2 * u);
    } else if (bits == 3) {
      uint32_t w[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int j = 0; j < 3; ++j) w[h][j] = own<Traits>(word[3 * h + j], b);
        w[h][3] = (w[h][0] >> 3 & 0x11111111) | (w[h][1] >> 2 & 0x22222222) | (w[h][2] >> 1 & 0x44444444);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        open_unit(w[0][j], w[1][j], low + 2 * j);
        low[2 * j] &= 0x77777777, low[2 * j + 1] &= 0x77777777;
      }
    } else {
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const uint32_t even = own<Traits>(word[2 * g], b), odd = own<Traits>(word[2 * g + 1], b);
#pragma unroll
        for (int j = 0; j < 4; ++j) low[4 * g + j] = (even >> 2 * j & 0x03030303) | (odd >> 2 * j & 0x03030303) << 4;
      }
    }
  }

  // rotate_tile wants the second half first in some lanes. word: the codes of 8 bits.
  __device__ __forceinline__ void turn(bool second_first, int bits, uint32_t* word) {
    const auto swap = [&](uint32_t& a, uint32_t& b) {
      const uint32_t first = second_first ? b : a;
      b = second_first ? a : b;
      a = first;
    };
    if (bits == 8) {
#pragma unroll
      for (int i = 0; i < 8; ++i) swap(word[i], word[i + 8]);
    } else {
#pragma unroll
      for (int o = 0; o < 4; ++o) swap(low[o], low[o + 4]);
      swap(high[0], high[1]);
    }
  }

 private:
  static __device__ __forceinline__ void open_unit(uint32_t even, uint32_t odd, uint32_t* two) {
    two[0] = (even & 0x0F0F0F0F) | (odd << 4 & 0xF0F0F0F0);
    two[1] = (even >> 4 & 0x0F0F0F0F) | (odd & 0xF0F0F0F0);
  }
  // The bytes of the lane's token from the word of four tokens that it read.
  template <typename Traits>
  static __device__ __forceinline__ uint32_t own(uint32_t word, int b) {
    constexpr int near = Traits::kLanes, far = Traits::kLanes == 4 ? 16 : 8 * Traits::kLanes;
    word = permute(word, __shfl_xor_sync(0xffffffff, word, near), b & 1 ? 0x3715 : 0x6240);
    return permute(word, __shfl_xor_sync(0xffffffff, word, far), b & 2 ? 0x3276 : 0x5410);
  }
};

// ---- Numbers --------------------------------------------------------------------------------------------------------

// The levels of codes as bytes, 128 added: eight of them, or four times eight.
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
        word[w] |= static_cast<uint32_t>(format::level_of_code(bits, levels, code) + 128) << 8 * b;
      }
    }
  }

  // Of the four low nibbles.
  __device__ __forceinline__ uint32_t eight(int first, uint32_t nibbles) const {
    return permute(word[first], word[first + 1], nibbles);
  }
};

// 255 where a selector's nibble is 1, 0 where it is 0.
__device__ __forceinline__ uint32_t mask_of(uint32_t nibbles) { return permute(0xFF00, 0, nibbles); }
__device__ __forceinline__ uint32_t choose(uint32_t mask, uint32_t one, uint32_t zero) {
  return (one & mask) | (zero & ~mask);
}

// y = unit * level, exact. BITS: 3 for all up to 3.
template <int BITS>
__device__ __forceinline__ void put_numbers(const uint32_t* word, const OpenedCodes& codes, const LevelTable& table,
                                            float unit, float (&y)[64]) {
#pragma unroll
  for (int o = 0; o < 8; ++o) {
    uint32_t bytes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (BITS == 8) {
        bytes[i] = word[2 * o + i] ^ 0x80808080;
      } else if constexpr (BITS == 3) {
        bytes[i] = table.eight(0, codes.low[o] >> 16 * i);
      } else {
        const uint32_t x = codes.low[o], low = (x & 0x77777777) >> 16 * i,
                       upper = mask_of((x >> 3 & 0x11111111) >> 16 * i);
        bytes[i] = choose(upper, table.eight(2, low), table.eight(0, low));
        if constexpr (BITS == 5) {
          const uint32_t fifth = mask_of(nibbles_of_bits(codes.high[o / 4] >> 8 * (o % 4) & 255) >> 16 * i);
          bytes[i] = choose(fifth, choose(upper, table.eight(6, low), table.eight(4, low)), bytes[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float biased = __uint_as_float(permute(bytes[i / 4], 0x4B000000, 0x7440 | i % 4));  // 2^23 + byte
      y[8 * o + i] = __fmul_rn(unit, __fsub_rn(biased, 8388608.0f + 128.0f));
    }
  }
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

template <typename Traits, typename T>
__global__ void __launch_bounds__(32 * kWarps, kBlocks) load_tile_kernel(const __grid_constant__ LoadTileArguments a) {
  constexpr int kTokens = kTileTokens<Traits>, kLanes = Traits::kLanes;
  __shared__ alignas(16) float factors[2][Traits::kDim];
  __shared__ alignas(16) uint32_t rows[kWarps][Traits::kVectors * kStageStride<Traits>];
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int part = lane % kLanes, vector = lane / kLanes;

  // Signs times 1 / sqrt(n).
  for (int i = threadIdx.x; i < a.sources * Traits::kDim; i += 32 * kWarps) {
    factors[i / Traits::kDim][i % Traits::kDim] =
        __fmul_rn(a.source[i / Traits::kDim].signs[i % Traits::kDim], block_norm(Traits::kLogDim));
  }
  __syncthreads();

  // Neighbouring warps take keys and values in turn, neighbouring heads, then the next tile.
  const int s = warp % a.sources;
  const LoadTileSource& source = a.source[s];
  const int bits = source.bits;
  const LevelTable levels(source.levels, bits);
  const int warps = kWarps / a.sources, item = blockIdx.x * warps + warp / a.sources, items_on = gridDim.x * warps;
  int tile = item / a.heads, head = item % a.heads;
  const int tiles_on = items_on / a.heads, heads_on = items_on % a.heads;

  // Starts reading the lane's vector of a tile.
  const auto fetch = [&](Fetched& f) {
    const int in_sequence = tile % a.tiles_of_sequence, sequence = tile / a.tiles_of_sequence;
    const int number = token_of_vector<Traits>(vector, in_sequence % kPasses<Traits>);
    const int64_t position = int64_t{in_sequence / kPasses<Traits>} * kTokens + number;
    f.scale = 0;
    f.there = false;
    if (tile >= a.tiles || position >= a.max_length) return;
    if (a.packed) {
      f.there = true;
      f.get_row(bits, a.packed + position * a.row_bytes + 8 * bits * part, nullptr);
      f.scale = a.scale[position];
      return;
    }
    // Beyond the end of a sequence its last block is read all the same, since lanes share it.
    const int64_t page = position >> a.layout.page_shift, begin = position / format::kValueGroup * format::kValueGroup;
    const int length = a.lengths[sequence];
    if (begin >= length || page >= a.max_pages) return;
    const Token from = a.pages.token(a.table[sequence * a.max_pages + page],
                                     static_cast<int>(position) & ((1 << a.layout.page_shift) - 1), head, a.layout);
    if (!from.tile) return;
    f.there = position < length;
    if (s == 0) {
      f.get_row(bits, from.key_row(a.layout) + 8 * (bits == 5 ? 4 : bits) * part, from.key_plane(a.layout) + 8 * part);
      f.scale = *from.key_scale(a.layout);
    } else {
      f.get_value<Traits>(bits, part, from.value_block(a.layout), number);
      f.scale = *from.value_scale(a.layout);
    }
  };

  Fetched fetched;
  fetch(fetched);
#pragma unroll 1
  while (tile < a.tiles) {
    const int sequence = tile / a.tiles_of_sequence, in_sequence = tile % a.tiles_of_sequence,
              pass = in_sequence % kPasses<Traits>;
    const int64_t begin = int64_t{in_sequence / kPasses<Traits>} * kTokens;
    const int from_head = head;
    OpenedCodes codes;
    if (a.packed) {
      codes.open_dense(bits, fetched.word);
    } else if (s == 0) {
      codes.open_key(bits, fetched.word);
    } else {
      codes.open_value<Traits>(bits, fetched.word, token_of_vector<Traits>(vector, pass));
    }
    codes.turn(turned(part), bits, fetched.word);
    const float unit = __fmul_rn(__half2float(__ushort_as_half(fetched.scale)), format::kLevelUnit);
    const bool there = fetched.there;
    float y[64];
    switch (bits) {
      case 8: put_numbers<8>(fetched.word, codes, levels, unit, y); break;
      case 5: put_numbers<5>(fetched.word, codes, levels, unit, y); break;
      case 4: put_numbers<4>(fetched.word, codes, levels, unit, y); break;
      default: put_numbers<3>(fetched.word, codes, levels, unit, y); break;
    }
    tile += tiles_on;
    head += heads_on;
    if (head >= a.heads) {
      head -= a.heads;
      ++tile;
    }
    fetch(fetched);
    rotate_tile<Traits, true>(y, part);

    const format::Channels channels = source.channels.of_head(from_head, Traits::kDim);
    uint32_t* row = rows[warp] + vector * kStageStride<Traits>;
    put_rotated<Traits>(y, factors[s], channels, part, reinterpret_cast<T*>(row));
    if (!there) {
#pragma unroll 1
      for (int h = 0; h < 2; ++h) {
        uint4* to = reinterpret_cast<uint4*>(row + 16 * Traits::group(part, h));
        to[0] = to[1] = to[2] = to[3] = make_uint4(0, 0, 0, 0);
      }
    }
    // Lane v sees to vector v.
    const int64_t own = begin + token_of_vector<Traits>(lane, pass);
    uint8_t* to = static_cast<uint8_t*>(source.out) +
                  ((sequence * a.max_length + own) * a.heads + from_head) * (2 * Traits::kDim);
    WarpRows<Traits>::send(rows[warp], to, lane < Traits::kVectors && own < a.max_length, lane);
  }
}

// ---- Host side ------------------------------------------------------------------------------------------------------

template <int LOG_N, typename T>
bool launch_dim(LoadTileArguments a, cudaStream_t stream) {
  using Traits = TileTraits<LOG_N>;
  const int64_t of_sequence = (a.max_length + kTileTokens<Traits> - 1) / kTileTokens<Traits> * kPasses<Traits>;
  const int64_t items = a.seqs * of_sequence * a.heads;
  if (items > INT32_MAX / 2) return false;
  int device = 0, multiprocessors = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  if (items * a.sources < multiprocessors * kWarps) return false;
  const int64_t blocks = std::min<int64_t>(multiprocessors * kBlocks, (items * a.sources + kWarps - 1) / kWarps);
  a.tiles_of_sequence = static_cast<int>(of_sequence);
  a.tiles = static_cast<int>(a.seqs * of_sequence);
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
