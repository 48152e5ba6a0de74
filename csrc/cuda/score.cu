// score, qjl_score: attention scores straight from packed standalone vectors and from sketches of their residuals. The query is
// rotated once; keys are never rotated back: <q, key> = <R q, scale / 32 * levels> + <q, center>, plus the sketch's estimate.
//
// Keys are read once, at the speed of memory, so expanding codes must cost next to nothing: levels are bytes, and tensor cores
// multiply bytes. A query coordinate becomes a 31-bit integer in units of the largest one's power of two, and its four bytes
// are four columns of the matrix product; sums of 128 channels are exact integers, so this is as accurate as float32.
//
// A warp takes 32 keys at a time: lane 4 g + t reads channels 32 t to 32 t + 31 of keys g, g + 8, g + 16 and g + 24 of each
// stretch of 128 channels, and these words become its fragments without any exchange between lanes.
#include "codec.cuh"
#include "mma.cuh"
#include "qjl.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kTileKeys = 32;   // of a warp at a time
constexpr int kStretch = 128;   // channels, or bits of a sketch, of a step
constexpr int kGroup = 32;      // of which a lane has this many
constexpr int kMaxQueries = 4;  // of a block; each pair of them shares the columns of a product
constexpr int kBlocksPerSm = 2;
constexpr int kTilesPerWarp = 32;  // at least, where there are more blocks than the device holds at a time

// ---- From codes to bytes of levels --------------------------------------------------------------------------------

// A lane's 32 codes are BITS words. Product i = 0..3 of a step takes eight of them, as two words of four bytes each: `levels`
// returns them in up to two parts whose sum is the level; byte j of word w = 2 i, 2 i + 1 belongs to channel(w, j).
//
// Up to 4 bits a code is brought into a nibble, and a byte permutation looks eight of them up. It has tables of eight bytes
// only, so 4-bit levels come in two parts: the positive ones, and the negative ones with their sign changed (`minus`).
template <int BITS>
struct Expansion {
  static constexpr bool kSigned = BITS == 4;
  uint32_t low, high;              // levels 0-3 and 4-7; at 4 bits those of the codes 8-11 and 12-15
  uint32_t minus_low, minus_high;  // at 4 bits: codes 0-3 and 4-7, sign changed

  __device__ __forceinline__ explicit Expansion(const int8_t* table) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(table);
    low = words[kSigned ? 2 : 0], high = words[kSigned ? 3 : 1];
    if constexpr (kSigned) minus_low = __vneg4(words[0]), minus_high = __vneg4(words[1]);
  }

  static __host__ __device__ constexpr int channel(int word, int byte) {
    const int i = word / 2, nibble = word % 2 * 4 + byte;
    switch (BITS) {
      case 1: return 4 * nibble + i;
      case 2: return 16 * (i / 2) + 2 * nibble + i % 2;
      case 3:
        return i < 3        ? 10 * i + nibble + nibble / 3
               : nibble < 6 ? 10 * (nibble % 3) + 3 + 4 * (nibble / 3)
                            : 24 + nibble;
      default: return 8 * i + nibble;
    }
  }

  // Eight codes of product i as nibbles whose unused bits are 0.
  static __device__ __forceinline__ uint32_t nibbles(const uint32_t (&w)[BITS], int i) {
    if constexpr (BITS == 1) return w[0] >> i & 0x11111111;
    if constexpr (BITS == 2) return w[i / 2] >> 2 * (i % 2) & 0x33333333;
    if constexpr (BITS == 4) return w[i];
    if constexpr (BITS == 3) {
      // Stretches of ten codes start at bits 0, 30 and 60. In each, codes 0, 4 and 8 are nibbles already; shifted by one bit
      // codes 1, 5 and 9 are, and by two bits 2 and 6. What is left, and codes 30 and 31, is the fourth word.
      const uint32_t ten[3] = {w[0], __funnelshift_r(w[0], w[1], 30), __funnelshift_r(w[1], w[2], 28)};
      if (i < 3) {
        const uint32_t x = (ten[i] & 0x0F00F00F) | (ten[i] << 1 & 0xF00F00F0);
        return ((x & 0xFF0FF0FF) | (ten[i] << 2 & 0x00F00F00)) & 0x77777777;
      }
      return (ten[0] >> 9 & 0x00007007) | (ten[1] >> 5 & 0x00070070) | (ten[2] >> 1 & 0x00700700) |
             (w[2] >> 2 & 0x07000000) | (w[2] >> 1 & 0x70000000);
    }
  }

  __device__ __forceinline__ void levels(const uint32_t (&w)[BITS], int i, uint32_t (&plus)[2],
                                         uint32_t (&minus)[2]) const {
    const uint32_t n = nibbles(w, i);
    if constexpr (kSigned) {
      // Codes of the other half have their top bit set: they select the sign of a table byte, which is 0.
      const uint32_t p = n ^ 0x88888888;
      plus[0] = select_bytes(low, high, p), plus[1] = select_bytes(low, high, p >> 16);
      minus[0] = select_bytes(minus_low, minus_high, n), minus[1] = select_bytes(minus_low, minus_high, n >> 16);
    } else {
      plus[0] = select_bytes(low, high, n), plus[1] = select_bytes(low, high, n >> 16);
    }
  }
};

// 5 bits: a table of all pairs of codes in shared memory.
template <>
struct Expansion<5> {
  static constexpr bool kSigned = false;
  const uint16_t* pairs;  // [1024]

  __device__ __forceinline__ explicit Expansion(const int8_t* table)
      : pairs(reinterpret_cast<const uint16_t*>(table + 32)) {}
  static __host__ __device__ constexpr int channel(int word, int byte) { return 4 * word + byte; }
  __device__ __forceinline__ void levels(const uint32_t (&w)[5], int i, uint32_t (&plus)[2], uint32_t (&)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t pair[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int bit = 40 * i + 20 * h + 10 * k, word = bit / 32, next = word < 4 ? word + 1 : word;
        pair[k] = pairs[__funnelshift_r(w[word], w[next], bit % 32) & 1023];
      }
      plus[h] = pair[0] | pair[1] << 16;
    }
  }
};

// 8 bits: codes are levels.
template <>
struct Expansion<8> {
  static constexpr bool kSigned = false;
  __device__ __forceinline__ explicit Expansion(const int8_t*) {}
  static __host__ __device__ constexpr int channel(int word, int byte) { return 4 * word + byte; }
  __device__ __forceinline__ void levels(const uint32_t (&w)[8], int i, uint32_t (&plus)[2], uint32_t (&)[2]) const {
    plus[0] = w[2 * i], plus[1] = w[2 * i + 1];
  }
};

// No codes, only sketches.
template <>
struct Expansion<0> {
  __device__ __forceinline__ explicit Expansion(const int8_t*) {}
  static __host__ __device__ constexpr int channel(int, int) { return 0; }
};

constexpr int kTableBytes = 32 + 2048;

// The table that Expansion reads, in shared memory; the caller synchronises.
template <int BITS>
__device__ void fill_table(int8_t* table, const int8_t* levels, int thread) {
  if constexpr (BITS > 0 && BITS < 8) {
    for (int c = thread; c < 32; c += kThreads) {
      table[c] = c < 1 << BITS ? static_cast<int8_t>(format::level_of_code(BITS, levels, c)) : 0;
    }
  }
  if constexpr (BITS == 5) {
    for (int c = thread; c < 1024; c += kThreads) {
      table[32 + 2 * c] = static_cast<int8_t>(format::level_of_code(5, levels, c & 31));
      table[33 + 2 * c] = static_cast<int8_t>(format::level_of_code(5, levels, c >> 5));
    }
  }
}

// Bits of a sketch: bit k of the four bytes of a lane's word makes a word of bytes 0 or 2^k, so that one operation expands four
// bits. Query coordinates carry the factor 2^(3 - k mod 4), and the products of bits 0-3 count 16 times: together 2^7.
struct SketchExpansion {
  static __host__ __device__ constexpr int channel(int word, int byte) { return 8 * byte + word; }
  static __host__ __device__ constexpr int shift(int word) { return 3 - word % 4; }
};

// ---- Queries ------------------------------------------------------------------------------------------------------

// Largest magnitude 2^(e + 1) becomes 2^(kPointBits + 1) in units; two bits more than float32 has, and room for the factors of a sketch.
constexpr int kPointBits = 26;

struct Side {         // of codes or of sketches, all in shared memory
  uint32_t* columns;  // bytes of the queries: [steps][4 products][queries][t][4 bytes of a coordinate][2 words]
  float* work;        // [queries][d]: rotated queries; dense projections: [queries][d + m]
  float* unit;        // [queries]: what a coordinate of 2^kPointBits stands for
  float* total;       // [queries]: the sum of all coordinates (sketch), or <q, center> (codes)
};

struct ScoreArguments {
  const void* q;
  Rows q_rows;  // batch * queries
  ScalarType q_dtype;
  int queries, d;
  format::Split split;
  int64_t keys;
  int key_blocks, query_blocks;

  const uint8_t* packed;  // codes: rows of row_bytes; null without codes
  const __half* scale;
  const float* signs;
  const int8_t* levels;
  const float* center;  // or null
  int row_bytes, steps;
  bool vector_loads;  // rows allow the loads that BITS words take

  const uint8_t* sign_bits;  // sketches: rows of m / 8 bytes; null without them
  const float* norm;
  const float* projection;
  bool dense, word_loads;
  int m, sketch_steps;
  float factor;

  float* out;
};

__device__ __forceinline__ float load_query(const ScoreArguments& a, int64_t at) {
  if (a.q_dtype == ScalarType::BFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(a.q)[at]);
  if (a.q_dtype == ScalarType::Half) return __half2float(static_cast<const __half*>(a.q)[at]);
  return static_cast<const float*>(a.q)[at];
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) x += __shfl_xor_sync(0xffffffff, x, bit);
  return x;
}

// Coordinates y[count] of one query as integers, cut into bytes and laid out as columns. By one warp.
template <typename Map, bool SKETCH>
__device__ void make_columns(const float* y, int count, int steps, int query, int queries, const Side& side, int lane) {
  uint32_t amax = 0;
  for (int c = lane; c < count; c += 32) amax = max(amax, __float_as_uint(y[c]) & 0x7FFFFFFF);
  amax = group_max<32>(amax);
  const int e = max(static_cast<int>(amax >> 23), 1) - 127;
  if (lane == 0) side.unit[query] = amax < 0x7F800000 ? ldexpf(1, e) : __int_as_float(0x7FC00000);

  for (int quad = lane; quad < steps * 32; quad += 32) {  // [step][t][word]
    const int step = quad / 32, t = quad / 8 % 4, word = quad % 8;
    uint32_t bytes[4];  // of each channel, a balanced number in base 256
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int c = step * kStretch + t * kGroup + Map::channel(word, j);
      int point = c < count ? __float2int_rn(ldexpf(y[c], kPointBits - e)) : 0;
      if constexpr (SKETCH) point <<= SketchExpansion::shift(word);
      bytes[j] = (static_cast<uint32_t>(point) + 0x80808080) ^ 0x80808080;
    }
    uint32_t* to = side.columns + (((step * 4 + word / 2) * queries + query) * 16 + t * 4) * 2 + word % 2;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      to[2 * k] = (bytes[0] >> 8 * k & 255) | (bytes[1] >> 8 * k & 255) << 8 | (bytes[2] >> 8 * k & 255) << 16 |
                  (bytes[3] >> 8 * k & 255) << 24;
    }
  }
}

// Everything that depends on the queries alone. Warp w prepares query w % 4: for the codes where w < 4, else for the sketch.
template <int BITS, bool SKETCH>
__device__ void prepare_queries(const ScoreArguments& a, int64_t first_row, int queries, const Side& codes,
                                const Side& sketch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, query = warp % kMaxQueries;
  if (BITS > 0 && warp < kMaxQueries && query < queries) {
    float* y = codes.work + query * a.d;
    const int64_t from = a.q_rows(first_row + query);
    float shift = 0;
    for (int c = lane; c < a.d; c += 32) {
      const float x = load_query(a, from + c);
      if (a.center) shift = __fmaf_rn(x, a.center[c], shift);
      y[c] = __fmul_rn(x, a.signs[c]);
    }
    shift = warp_sum(shift);
    if (lane == 0) codes.total[query] = shift;
    transform_shared(y, a.split, lane);
    make_columns<Expansion<BITS>, false>(y, a.d, a.steps, query, queries, codes, lane);
  }
  if constexpr (SKETCH) {
    const bool mine = warp >= kMaxQueries && query < queries;
    float* y = sketch.work + query * (a.dense ? a.d + a.m : a.d);
    if (mine) {
      const int64_t from = a.q_rows(first_row + query);
      for (int c = lane; c < a.d; c += 32) y[c] = __fmul_rn(load_query(a, from + c), a.dense ? 1.0f : a.projection[c]);
      if (!a.dense) transform_shared(y, a.split, lane);
    }
    if (a.dense) {  // all warps share the rows of the projection
      __syncthreads();
      for (int i = warp; i < a.m; i += kWarps) {
        float sum[kMaxQueries] = {};
        for (int c = lane; c < a.d; c += 32) {
          const float s = __ldg(a.projection + int64_t{i} * a.d + c);
          for (int k = 0; k < queries; ++k) sum[k] = __fmaf_rn(s, sketch.work[k * (a.d + a.m) + c], sum[k]);
        }
        for (int k = 0; k < queries; ++k) {
          const float total = warp_sum(sum[k]);
          if (lane == 0) sketch.work[k * (a.d + a.m) + a.d + i] = total;
        }
      }
      __syncthreads();
      y += a.d;
    }
    if (mine) {
      float total = 0;
      for (int c = lane; c < a.m; c += 32) total += y[c];
      total = warp_sum(total);
      if (lane == 0) sketch.total[query] = total;
      make_columns<SketchExpansion, true>(y, a.m, a.sketch_steps, query, queries, sketch, lane);
    }
  }
}

// ---- Keys ---------------------------------------------------------------------------------------------------------

// WORDS words from p + offset of a row of row_bytes bytes at p; only words that hold a byte of the row are read.
template <int WORDS>
__device__ __forceinline__ void load_words(const uint8_t* p, int offset, int row_bytes, bool vector, uint32_t* word) {
  if (vector) {
    if (offset >= row_bytes) {  // short rows leave lanes without a word
#pragma unroll
      for (int i = 0; i < WORDS; ++i) word[i] = 0;
    } else if constexpr (WORDS % 4 == 0) {
#pragma unroll
      for (int i = 0; i < WORDS; i += 4) {
        const uint4 w = __ldg(reinterpret_cast<const uint4*>(p + offset) + i / 4);
        word[i] = w.x, word[i + 1] = w.y, word[i + 2] = w.z, word[i + 3] = w.w;
      }
    } else if constexpr (WORDS == 2) {
      const uint2 w = __ldg(reinterpret_cast<const uint2*>(p + offset));
      word[0] = w.x, word[1] = w.y;
    } else {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) word[i] = __ldg(reinterpret_cast<const uint32_t*>(p + offset) + i);
    }
    return;
  }
  // Rows at any address: aligned words, shifted.
  const uint8_t *begin = p + offset, *end = p + row_bytes;
  const unsigned shift = reinterpret_cast<uintptr_t>(begin) % 4;
  const uint8_t* base = begin - shift;
  const auto load = [&](int i) { return base + 4 * i < end ? __ldg(reinterpret_cast<const uint32_t*>(base) + i) : 0; };
  uint32_t low = load(0);
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const uint32_t high = load(i + 1);
    word[i] = __funnelshift_r(low, high, 8 * shift);
    low = high;
  }
}

template <int BITS, bool SKETCH>
struct KeyWords {
  static constexpr int kWords = BITS ? BITS : 1;
  uint32_t code[4][kWords];  // of keys g, g + 8, g + 16, g + 24
  uint32_t bits[4];
  float scale[2], norm[2];  // of the keys whose scores this lane writes

  // Key 8 r + g of tile `tile` (clamped to the last key), step `step`.
  __device__ __forceinline__ void load(const ScoreArguments& a, int64_t first_key, int64_t tile, int step, int g,
                                       int t) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t key = first_key + min(tile * kTileKeys + 8 * r + g, a.keys - 1);
      const int group = 4 * step + t;
      if constexpr (BITS > 0) {
        load_words<BITS>(a.packed + key * a.row_bytes, group * (4 * BITS), a.row_bytes, a.vector_loads, code[r]);
      }
      if constexpr (SKETCH) {
        load_words<1>(a.sign_bits + key * (a.m / 8), group * 4, a.m / 8, a.word_loads, bits + r);
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int64_t key = first_key + min(tile * kTileKeys + 8 * (2 * k + t % 2) + g, a.keys - 1);
      if constexpr (BITS > 0) scale[k] = __half2float(__ldg(a.scale + key));
      if constexpr (SKETCH) norm[k] = __ldg(a.norm + key);
    }
  }
};

// Two bytes of a coordinate's four, for one row of a product: lanes with even t hold the lower two.
__device__ __forceinline__ float two_bytes(int low, int high) { return static_cast<float>(high * 256 + low); }

// Sums over all bytes for the two keys that this lane writes, from those of four keys in two lanes.
__device__ __forceinline__ void join_bytes(const float (&part)[4], int t, float (&sum)[2]) {
  const bool odd = t % 2;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float mine = odd ? part[2 * k + 1] : part[2 * k];
    const float theirs = __shfl_xor_sync(0xffffffff, odd ? part[2 * k] : part[2 * k + 1], 1);
    const float low = odd ? theirs : mine, high = odd ? mine : theirs;
    sum[k] = __fmaf_rn(high, 65536.0f, low);
  }
}

template <int BITS, bool SKETCH, int PAIRS>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) score_kernel(const __grid_constant__ ScoreArguments a) {
  extern __shared__ uint4 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  const int key_block = blockIdx.x % a.key_blocks;
  const int64_t rest = blockIdx.x / a.key_blocks, batch = rest / a.query_blocks;
  const int first_query = static_cast<int>(rest % a.query_blocks) * (2 * PAIRS);
  const int queries = min(2 * PAIRS, a.queries - first_query);
  const int64_t first_key = batch * a.keys, tiles = (a.keys + kTileKeys - 1) / kTileKeys;

  // Loads of the first keys are on their way while the queries are prepared.
  KeyWords<BITS, SKETCH> words;
  int64_t tile = int64_t{key_block} * kWarps + warp;
  if (tile < tiles) words.load(a, first_key, tile, 0, g, t);

  __shared__ float units[4 * kMaxQueries];
  uint32_t* columns = reinterpret_cast<uint32_t*>(shared);
  Side codes{columns, nullptr, units, units + kMaxQueries};
  columns += a.steps * queries * kStretch;
  Side sketch{columns, nullptr, units + 2 * kMaxQueries, units + 3 * kMaxQueries};
  columns += a.sketch_steps * queries * kStretch;
  int8_t* table = reinterpret_cast<int8_t*>(columns);
  codes.work = reinterpret_cast<float*>(table + kTableBytes);
  sketch.work = codes.work + (BITS ? queries * a.d : 0);
  fill_table<BITS>(table, a.levels, threadIdx.x);
  prepare_queries<BITS, SKETCH>(a, batch * a.queries + first_query, queries, codes, sketch);
  __syncthreads();
  const Expansion<BITS> expansion(table);

  // The column that this lane holds: byte g % 4 of query g / 4 of a pair; a query that is not there repeats another.
  int column[PAIRS];
#pragma unroll
  for (int p = 0; p < PAIRS; ++p) column[p] = min(2 * p + g / 4, queries - 1) * 16 + t * 4 + g % 4;
  const int steps = max(a.steps, a.sketch_steps);

  int step = 0;
  float code_part[PAIRS][4] = {}, sketch_part[PAIRS][4] = {};
  while (tile < tiles) {
    KeyWords<BITS, SKETCH> next;
    const bool last = step + 1 == steps;
    const int64_t next_tile = last ? tile + int64_t{a.key_blocks} * kWarps : tile;
    const int next_step = last ? 0 : step + 1;
    if (next_tile < tiles) next.load(a, first_key, next_tile, next_step, g, t);

    if constexpr (BITS > 0) {
      if (step < a.steps) {
        int plus[PAIRS][2][4] = {}, minus[PAIRS][2][4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t p[4][2], n[4][2];
#pragma unroll
          for (int r = 0; r < 4; ++r) expansion.levels(words.code[r], i, p[r], n[r]);
#pragma unroll
          for (int pair = 0; pair < PAIRS; ++pair) {
            const uint2 b = reinterpret_cast<const uint2*>(codes.columns)[(step * 4 + i) * queries * 16 + column[pair]];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              mma_bytes(plus[pair][h], {p[2 * h][0], p[2 * h + 1][0], p[2 * h][1], p[2 * h + 1][1]}, b);
              if constexpr (Expansion<BITS>::kSigned) {
                mma_bytes(minus[pair][h], {n[2 * h][0], n[2 * h + 1][0], n[2 * h][1], n[2 * h + 1][1]}, b);
              }
            }
          }
        }
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const int *x = plus[pair][r / 2] + r % 2 * 2, *y = minus[pair][r / 2] + r % 2 * 2;
            code_part[pair][r] += two_bytes(x[0] - y[0], x[1] - y[1]);
          }
        }
      }
    }
    if constexpr (SKETCH) {
      if (step < a.sketch_steps) {
        int sums[2][PAIRS][2][4] = {};  // of bits 0-3 and 4-7 of every byte
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t even = 0x01010101u << 2 * i, odd = 0x02020202u << 2 * i;
#pragma unroll
          for (int pair = 0; pair < PAIRS; ++pair) {
            const uint2 b =
                reinterpret_cast<const uint2*>(sketch.columns)[(step * 4 + i) * queries * 16 + column[pair]];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const uint32_t x = words.bits[2 * h], y = words.bits[2 * h + 1];
              mma_bytes<true>(sums[i / 2][pair][h], {x & even, y & even, x & odd, y & odd}, b);
            }
          }
        }
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const int *x = sums[0][pair][r / 2] + r % 2 * 2, *y = sums[1][pair][r / 2] + r % 2 * 2;
            sketch_part[pair][r] += two_bytes(16 * x[0] + y[0], 16 * x[1] + y[1]);
          }
        }
      }
    }

    if (last) {
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        const int query = 2 * pair + t / 2;
        float code_sum[2], sketch_sum[2];
        if constexpr (BITS > 0) join_bytes(code_part[pair], t, code_sum);
        if constexpr (SKETCH) join_bytes(sketch_part[pair], t, sketch_sum);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int64_t key = tile * kTileKeys + 8 * (2 * k + t % 2) + g;
          if (query < queries && key < a.keys) {
            float score = 0;
            if constexpr (BITS > 0) {
              constexpr float unit = format::kLevelUnit / (1 << kPointBits);
              score = __fmaf_rn(code_sum[k] * unit * codes.unit[query], words.scale[k], codes.total[query]);
            }
            if constexpr (SKETCH) {
              // sum of +-q = 2 (sum over bits that are 1) - (sum of all)
              constexpr float unit = 2.0f / 128 / (1 << kPointBits);
              const float sum = __fmaf_rn(sketch_sum[k] * unit, sketch.unit[query], -sketch.total[query]);
              score = __fmaf_rn(a.factor * words.norm[k], sum, score);
            }
            a.out[(batch * a.queries + first_query + query) * a.keys + key] = score;
          }
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) code_part[pair][r] = sketch_part[pair][r] = 0;
      }
    }
    words = next;
    tile = next_tile;
    step = next_step;
  }
}

// ---- Host ---------------------------------------------------------------------------------------------------------

// q: [..., queries, d] and a packed side [..., keys, x]: the same leading dimensions, flattened to `batch`.
struct ScoreShape {
  int64_t batch = 1, queries, keys;
  std::vector<int64_t> out;  // [..., queries, keys]
};

ScoreShape checked_score_shape(const Tensor& q, const Tensor& packed, const char* packed_name) {
  check_float(q, "q");
  check_unit_last_stride(q, "q");
  bool same = q.dim() >= 2 && packed.dim() == q.dim();
  for (int64_t i = 0; same && i + 2 < q.dim(); ++i) same = q.size(i) == packed.size(i);
  STD_TORCH_CHECK(same, "q has shape ", shape_text(q), " and ", packed_name, " ", shape_text(packed),
                  ", expected [..., queries, d] and [..., keys, bytes] with the same leading dimensions");
  ScoreShape s;
  s.queries = q.size(q.dim() - 2);
  s.keys = packed.size(packed.dim() - 2);
  s.out = leading_shape(q, 2, {s.queries, s.keys});
  for (int64_t i = 0; i + 2 < q.dim(); ++i) s.batch *= q.size(i);
  return s;
}

// The stored sketch of the keys that `shape` describes: sign_bits uint8 [..., keys, m / 8], norm float32 [..., keys].
void check_sketch_of(const Projection& sketch, const Tensor& sign_bits, const Tensor& norm, const Tensor& q,
                     const ScoreShape& shape) {
  check_device(sign_bits, q, "sign_bits");
  check_dtype(sign_bits, "sign_bits", {ScalarType::Byte});
  check_contiguous(sign_bits, "sign_bits");
  const int64_t dims = q.dim();
  bool same =
      sign_bits.dim() == dims && sign_bits.size(dims - 1) == sketch.bytes() && sign_bits.size(dims - 2) == shape.keys;
  for (int64_t i = 0; same && i + 2 < dims; ++i) same = sign_bits.size(i) == q.size(i);
  STD_TORCH_CHECK(same, "sign_bits has shape ", shape_text(sign_bits), ", expected [..., ", shape.keys, ", ",
                  sketch.bytes(), "] with the leading dimensions of q");
  check_device(norm, q, "the residual norm");
  check_dtype(norm, "the residual norm", {ScalarType::Float});
  check_contiguous(norm, "the residual norm");
  same = norm.dim() == dims - 1 && norm.size(dims - 2) == shape.keys;
  for (int64_t i = 0; same && i + 2 < dims; ++i) same = norm.size(i) == q.size(i);
  STD_TORCH_CHECK(same, "the residual norm has shape ", shape_text(norm), ", expected [..., ", shape.keys,
                  "] with the leading dimensions of q");
}

int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "device attribute");
  return value;
}

template <int BITS, bool SKETCH, int PAIRS>
void launch_score(ScoreArguments& a, int64_t batch, int device, const Launch& launch) {
  const int queries = a.queries < 2 * PAIRS ? a.queries : 2 * PAIRS;
  const int64_t floats = queries * (int64_t{a.steps + a.sketch_steps} * kStretch + (BITS ? a.d : 0) +
                                    (SKETCH ? a.d + (a.dense ? a.m : 0) : 0));
  const int64_t bytes = 4 * floats + kTableBytes;
  if (PAIRS > 1 && bytes > 48 << 10) return launch_score<BITS, SKETCH, 1>(a, batch, device, launch);
  if (bytes > 48 << 10) {
    const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) - 1024;
    STD_TORCH_CHECK(bytes <= most, "d = ", a.d, " with sketches of ", a.m, " bits takes ", bytes,
                    " bytes of shared memory, supported on this device: ", most);
    check_cuda(cudaFuncSetAttribute(score_kernel<BITS, SKETCH, PAIRS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes)),
               "score");
  }

  // Enough blocks to fill the device, or as many as keep their keys worth the preparation of the queries.
  const int64_t per_block = int64_t{kWarps} * kTileKeys, most = num_blocks(a.keys, per_block);
  const int64_t resident = int64_t{kBlocksPerSm} * device_attribute(cudaDevAttrMultiProcessorCount, device);
  a.query_blocks = (a.queries + 2 * PAIRS - 1) / (2 * PAIRS);
  const int64_t rows = batch * a.query_blocks;
  int64_t blocks = rows < resident ? resident / rows : 1;
  const int64_t worthwhile = num_blocks(a.keys, per_block * kTilesPerWarp);
  if (blocks < worthwhile) blocks = worthwhile;
  a.key_blocks = static_cast<int>(blocks < most ? blocks : most);
  score_kernel<BITS, SKETCH, PAIRS>
      <<<num_blocks(rows * a.key_blocks, 1), kThreads, static_cast<size_t>(bytes), launch.stream()>>>(a);
}

template <int BITS, bool SKETCH>
void launch_queries(ScoreArguments& a, int64_t batch, int device, const Launch& launch) {
  if (a.queries > 2) return launch_score<BITS, SKETCH, 2>(a, batch, device, launch);
  return launch_score<BITS, SKETCH, 1>(a, batch, device, launch);
}

template <int BITS>
void launch_bits(ScoreArguments& a, int64_t batch, int device, const Launch& launch) {
  if (a.sign_bits) return launch_queries<BITS, true>(a, batch, device, launch);
  if constexpr (BITS > 0) return launch_queries<BITS, false>(a, batch, device, launch);
}

// Fills in what both ops share and launches. a: the sides that there are, already filled in.
Tensor run(ScoreArguments& a, const Tensor& q, const ScoreShape& shape, const OptionalTensor& projection,
           const OptionalTensor& sign_bits, const OptionalTensor& norm, int64_t bits, const char* name) {
  const int64_t d = q.size(q.dim() - 1);
  a.d = static_cast<int>(d);
  a.split = check_vector_dim(d, "q");
  STD_TORCH_CHECK(shape.queries <= INT32_MAX, "q has ", shape.queries, " queries, supported: up to ", INT32_MAX);
  a.queries = static_cast<int>(shape.queries);
  a.keys = shape.keys;
  if (projection) {
    const Projection sketch(*projection, q, d);
    check_sketch_of(sketch, *sign_bits, *norm, q, shape);
    STD_TORCH_CHECK(sketch.rows <= 1 << 16, "projection has ", sketch.rows,
                    " rows, supported by scores on CUDA: up to ", 1 << 16);
    a.sign_bits = bytes_of(*sign_bits);
    a.norm = static_cast<const float*>(norm->data_ptr());
    a.projection = sketch.data;
    a.dense = sketch.dense;
    a.m = static_cast<int>(sketch.rows);
    a.word_loads = a.m % kGroup == 0 && aligned(a.sign_bits, 4);
    a.sketch_steps = (a.m + kStretch - 1) / kStretch;
    a.factor = sketch.factor;
  }

  Tensor out = torch::stable::new_empty(q, shape.out, ScalarType::Float);
  if (out.numel() == 0) return out;
  const Launch launch(q);
  const AlignedRows in(q, 1);
  a.q = in.data();
  a.q_rows = in.rows();
  a.q_dtype = q.scalar_type();
  a.out = static_cast<float*>(out.data_ptr());
  const int device = q.get_device_index();
  switch (bits) {
    case 0: launch_bits<0>(a, shape.batch, device, launch); break;
    case 1: launch_bits<1>(a, shape.batch, device, launch); break;
    case 2: launch_bits<2>(a, shape.batch, device, launch); break;
    case 3: launch_bits<3>(a, shape.batch, device, launch); break;
    case 4: launch_bits<4>(a, shape.batch, device, launch); break;
    case 5: launch_bits<5>(a, shape.batch, device, launch); break;
    default: launch_bits<8>(a, shape.batch, device, launch); break;
  }
  launch.check(name);
  return out;
}

// q: [..., queries, d], packed: uint8 [..., keys, row_bytes], scale: float16 [..., keys], center: float32 [d],
// sign_bits: uint8 [..., keys, m / 8], residual_norm: float32 [..., keys], projection as in qjl.cuh -> float32 [..., queries, keys]
Tensor score(const Tensor& q, const Tensor& packed, const Tensor& scale, const Tensor& signs,
             const OptionalTensor& levels, int64_t bits, const OptionalTensor& center, const OptionalTensor& sign_bits,
             const OptionalTensor& residual_norm, const OptionalTensor& projection) {
  check_codec_bits(bits);
  const ScoreShape shape = checked_score_shape(q, packed, "packed");
  check_device(packed, q, "packed");
  const DenseVectors keys = checked_dense_vectors(packed, scale, signs, levels, bits);
  STD_TORCH_CHECK(q.size(q.dim() - 1) == keys.d, "q has shape ", shape_text(q), ", expected [..., ", keys.d,
                  "] as signs say");
  if (center) check_constant(*center, q, "center", ScalarType::Float, {keys.d});
  const bool sketched = projection.has_value();
  STD_TORCH_CHECK(sign_bits.has_value() == sketched && residual_norm.has_value() == sketched,
                  "sign_bits, residual_norm and projection come together or not at all");

  ScoreArguments a{};
  a.packed = bytes_of(packed);
  a.scale = static_cast<const __half*>(scale.data_ptr());
  a.signs = static_cast<const float*>(signs.data_ptr());
  a.levels = levels_data(levels);
  a.center = center ? static_cast<const float*>(center->data_ptr()) : nullptr;
  a.row_bytes = keys.row_bytes;
  a.steps = static_cast<int>((keys.d + kStretch - 1) / kStretch);
  const int word = bits % 4 == 0 ? 16 : bits == 2 ? 8 : 4;  // what a lane loads at a time
  a.vector_loads = keys.d % kGroup == 0 && a.row_bytes % word == 0 && aligned(a.packed, word);
  return run(a, q, shape, projection, sign_bits, residual_norm, bits, "score");
}

// q: [..., queries, d], sign_bits: uint8 [..., keys, m / 8], norm: float32 [..., keys] -> float32 [..., queries, keys]
Tensor qjl_score(const Tensor& q, const Tensor& sign_bits, const Tensor& norm, const Tensor& projection) {
  const ScoreShape shape = checked_score_shape(q, sign_bits, "sign_bits");
  ScoreArguments a{};
  return run(a, q, shape, projection, sign_bits, norm, 0, "qjl_score");
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  m.impl("score", TORCH_BOX(&turboquant::cuda::score));
  m.impl("qjl_score", TORCH_BOX(&turboquant::cuda::qjl_score));
}
