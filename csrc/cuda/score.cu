// score, qjl_score: attention scores straight from packed standalone vectors and from sketches of their residuals. The
// query is rotated once and keys are never rotated back: <q, key> = <R (q / s), scale / 32 * levels> + <q, center>
// plus the sketch's estimate, where s are the scales of channels.
//
// The kernels read keys once, at the speed of memory, so expanding codes must cost next to nothing: levels are bytes,
// and tensor cores multiply bytes. A query coordinate becomes an integer in units of 2^-25 of the largest one's power
// of two, and its four bytes are four columns of the matrix product. Sums of 128 channels are exact integers, so this
// is as accurate as float32.
//
// There are two kernels: one for everything, and one for one query of 128 channels, which knows most sizes when it is
// compiled (choices/score.h).
//
// A warp takes 32 keys at a time: lane 4 g + t reads channels 32 t to 32 t + 31 of keys g, g + 8, g + 16 and g + 24 of
// each stretch of 128 channels, and these words become its fragments without any exchange between lanes.
#include <algorithm>

#include "calls/score.h"
#include "calls/sketch.h"
#include "choices/score.h"
#include "cuda/codec/arguments.cuh"
#include "cuda/codec/transform_shared.cuh"
#include "cuda/common/device_facts.cuh"
#include "cuda/score/operands.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kTileKeys = kOneQueryLeastKeys;   // of a warp at a time
constexpr int kBlockKeys = kWarps * kTileKeys;  // of a block at a time
constexpr int kStretch = 128;                   // channels, or bits of a sketch, that a step takes
constexpr int kGroup = 32;                      // neighbouring channels of a stretch that a lane has
constexpr int kMaxQueries = 4;                  // of a block; each pair of them shares the columns of a product
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kWorthwhile =
    32;  // times kBlockKeys: with fewer keys a block spends too much of its time on preparing queries
constexpr int one_query_blocks_per_multiprocessor(int bits) { return bits == 0 ? 4 : 2; }
constexpr int kPointBits = 25;  // fraction bits of a coordinate; sketches need room for a factor of 8 above

struct ScoreArguments {
  const void* q;
  Rows q_rows;  // batch * queries
  Dtype q_dtype;
  int queries, d;
  format::Split split;
  int64_t keys;
  int key_blocks, query_blocks;
  int span;  // keys of a block
  float* out;

  const uint8_t* packed;  // codes: rows of row_bytes; null without codes
  const __half* scale;
  const float* signs;
  const int8_t* levels;
  format::Channels channels;  // [d]
  int bits, row_bytes, steps;

  const uint8_t* sign_bits;  // sketches: rows of sketch_bytes; null without them
  const float* norm;
  const float* projection;
  bool dense;
  int m, sketch_bytes, sketch_steps;
  float factor;

  bool in_registers;  // d = 128, and signs, center and projection allow 16-byte loads
};

// ---- Queries ------------------------------------------------------------------------------------------------------

// A block's queries in shared memory, prepared for the products with codes or with sketches.
struct Side {
  uint32_t* columns;  // bytes of coordinates: [steps][4 products][queries][t][4 bytes of a coordinate][2 words]
  float* work;        // [queries][d] floats; dense projections: [queries][d + m]
  float* unit;        // [queries]: the value of 2^kPointBits
  float* total;       // [queries]: <q, center> for codes, the sum of all coordinates for sketches
};

// The sizes of columns, work and tables in dynamic shared memory.
struct Layout {
  int code_columns, sketch_columns, code_work, sketch_work;  // words
  __host__ __device__ Layout(const ScoreArguments& a, int queries)
      : code_columns(queries * a.steps * kStretch), sketch_columns(queries * a.sketch_steps * kStretch),
        code_work(a.bits ? queries * a.d : 0), sketch_work(a.sign_bits ? queries * (a.d + (a.dense ? a.m : 0)) : 0) {}
  __host__ __device__ int bytes() const {
    return 4 * (code_columns + sketch_columns + code_work + sketch_work) + kTableBytes;
  }
};

// q * factors * inverse -> y[d] in shared memory, by one warp; factors may be null. Returns this lane's part of <q,
// center>.
__device__ __forceinline__ float load_products(const ScoreArguments& a, int64_t from, const float* factors,
                                               const format::Channels& channels, float* y, int lane) {
  constexpr int kAhead = 4;  // loads that are in flight together
  float sum = 0;
#pragma unroll 1
  for (int base = lane; base < a.d; base += 32 * kAhead) {
    float x[kAhead], factor[kAhead], other[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int c = base + 32 * i;
      x[i] = c < a.d ? load_float(a.q, a.q_dtype, from + c) : 0;
      factor[i] = factors && c < a.d ? factors[c] : 1;
      if (channels.inverse && c < a.d) factor[i] *= channels.inverse[c];
      other[i] = channels.center && c < a.d ? channels.center[c] : 0;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (base + 32 * i < a.d) y[base + 32 * i] = __fmul_rn(x[i], factor[i]);
      sum = __fmaf_rn(x[i], other[i], sum);
    }
  }
  return sum;
}

// The same, followed by the transform, for d = 128.
__device__ __forceinline__ float rotate_in_registers(const ScoreArguments& a, int64_t from, const float* signs,
                                                     const format::Channels& channels, float* y, int lane) {
  using Traits = HadamardTraits<1, 7, 32, 4>;
  float x[4], sign[4], mean[4] = {}, inverse[4] = {1, 1, 1, 1}, sum = 0;
  load_as<Traits>(a.q, a.q_dtype, from, lane, x);
  load<Traits>(signs, lane, sign);
  if (channels.center) load<Traits>(channels.center, lane, mean);
  if (channels.inverse) load<Traits>(channels.inverse, lane, inverse);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = __fmaf_rn(x[i], mean[i], sum);
    x[i] = __fmul_rn(x[i], __fmul_rn(sign[i], inverse[i]));
  }
  transform<Traits>(x, lane);
  *reinterpret_cast<float4*>(y + 4 * lane) = make_float4(x[0], x[1], x[2], x[3]);
  __syncwarp();
  return sum;
}

// The exponent of the largest coordinate from the bits of its magnitude, limited to what power_of_two takes
// (prescale_exponent is limited further), and its power of two, or NaN if a coordinate is not finite.
__device__ __forceinline__ int coordinate_exponent(uint32_t amax) {
  return min(max(static_cast<int>(amax >> 23) - 127, -126), 126);
}
__device__ __forceinline__ float unit_of(uint32_t amax) {
  return amax < kInfinityBits ? power_of_two(coordinate_exponent(amax)) : quiet_nan();
}

// Writes word `word` of group t of a step of the columns, from coordinates y[count]: y * down becomes an integer,
// which is cut into bytes. bits = 0: for a sketch.
__device__ __forceinline__ void make_column(const float* y, int count, float down, int bits, bool uniform, int step,
                                            int t, int word, int query, int queries, uint32_t* columns) {
  uint32_t bytes[4];  // of each channel: signed digits in base 256
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int c = step * kStretch + t * kGroup +
                  (bits ? channel_of_byte(bits, uniform, word, j) : channel_of_sketch_byte(word, j));
    int point = c < count ? __float2int_rn(y[c] * down * (1 << kPointBits)) : 0;
    point <<= bits ? shift_of_byte(bits, uniform, j) : shift_of_sketch_word(word);
    bytes[j] = (static_cast<uint32_t>(point) + 0x80808080) ^ 0x80808080;
  }
  // Transposes four bytes of four channels.
  const uint32_t low01 = select_bytes(bytes[0], bytes[1], 0x5140), low23 = select_bytes(bytes[2], bytes[3], 0x5140);
  const uint32_t high01 = select_bytes(bytes[0], bytes[1], 0x7362), high23 = select_bytes(bytes[2], bytes[3], 0x7362);
  uint32_t* to = columns + (((step * 4 + word / 2) * queries + query) * 16 + t * 4) * 2 + word % 2;
  to[0] = select_bytes(low01, low23, 0x5410), to[2] = select_bytes(low01, low23, 0x7632);
  to[4] = select_bytes(high01, high23, 0x5410), to[6] = select_bytes(high01, high23, 0x7632);
}

// Makes all columns of one query, by one warp. bits = 0: for a sketch. total: this lane's part of Side::total
__device__ __forceinline__ void make_columns(const float* y, int count, int bits, bool uniform, int steps, int query,
                                             int queries, const Side& side, float total, int lane) {
  uint32_t amax = 0;
#pragma unroll 4
  for (int c = lane; c < count; c += 32) {
    amax = max(amax, magnitude_bits(y[c]));
    if (bits == 0) total += y[c];
  }
#pragma unroll 1  // unrolled shuffles are long, because the compiler does not know that all lanes are here
  for (int bit = 1; bit < 32; bit *= 2) {
    amax = max(amax, __shfl_xor_sync(0xffffffff, amax, bit));
    total += __shfl_xor_sync(0xffffffff, total, bit);
  }
  const float down = power_of_two(-coordinate_exponent(amax));
  if (lane == 0) side.unit[query] = unit_of(amax), side.total[query] = total;
#pragma unroll 1
  for (int i = lane; i < steps * 32; i += 32) {  // [step][t][word]
    make_column(y, count, down, bits, uniform, i / 32, i / 8 % 4, i % 8, query, queries, side.columns);
  }
}

// Prepares all that depends on the queries alone, by a whole block: warp w prepares query w % 4, for codes if w < 4,
// else for sketches. The caller synchronises.
template <int BITS, bool UNIFORM, bool SKETCH>
__device__ __forceinline__ void prepare_queries(const ScoreArguments& a, int64_t first_row, int queries,
                                                const Side& codes, const Side& sketch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, query = warp % kMaxQueries;
  const bool sketched = SKETCH && (BITS == 0 || warp >= kMaxQueries), dense = sketched && a.dense;
  const bool mine = query < queries && (sketched ? warp >= kMaxQueries && a.sign_bits : warp < kMaxQueries);
  const Side side = sketched ? sketch : codes;
  const int stride = dense ? a.d + a.m : a.d, count = sketched ? a.m : a.d;
  float *y = side.work + query * stride, total = 0;
  if (mine) {
    const float* factors = !sketched ? a.signs : dense ? nullptr : a.projection;
    const format::Channels channels = sketched ? format::Channels{} : a.channels;
    const int64_t from = a.q_rows(first_row + query);
    if (a.in_registers && !dense) {
      total = rotate_in_registers(a, from, factors, channels, y, lane);
    } else {
      total = load_products(a, from, factors, channels, y, lane);
      if (!dense) transform_shared(y, a.split, lane);
    }
  }
  if (SKETCH && a.dense) {  // all warps divide the rows of the projection
    __syncthreads();
#pragma unroll 1
    for (int i = warp; i < a.m; i += kWarps) {
      float sum[kMaxQueries] = {};
#pragma unroll 4
      for (int c = lane; c < a.d; c += 32) {
        const float s = __ldg(a.projection + int64_t{i} * a.d + c);
#pragma unroll
        for (int k = 0; k < kMaxQueries; ++k) {
          if (k < queries) sum[k] = __fmaf_rn(s, sketch.work[k * (a.d + a.m) + c], sum[k]);
        }
      }
#pragma unroll
      for (int k = 0; k < kMaxQueries; ++k) {
#pragma unroll 1
        for (int bit = 1; bit < 32; bit *= 2) sum[k] += __shfl_xor_sync(0xffffffff, sum[k], bit);
        if (k < queries) sketch.work[k * (a.d + a.m) + a.d + i] = sum[k];
      }
    }
    __syncthreads();
    if (dense) y += a.d;
  }
  if (!mine) return;
  make_columns(y, count, sketched ? 0 : BITS, UNIFORM, sketched ? a.sketch_steps : a.steps, query, queries, side, total,
               lane);
}

// ---- Keys ---------------------------------------------------------------------------------------------------------

// Loads WORDS words at p + offset, which is a multiple of 4 bytes or of the size of a vector load, with as few loads
// as WORDS allows.
template <int WORDS>
__device__ __forceinline__ void load_aligned_words(const uint8_t* p, uint32_t offset, uint32_t* word) {
  if constexpr (WORDS % 4 == 0) {
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
}

// The last word of rows at any address, assembled byte by byte, because memory behind the last byte may not exist.
struct LastWord {
  const uint8_t* at;
  uint32_t bytes;

  LastWord() = default;
  __device__ __forceinline__ explicit LastWord(const uint8_t* end)
      : at(end - reinterpret_cast<uintptr_t>(end) % 4), bytes(0) {
#pragma unroll 1
    for (const uint8_t* p = at; p < end; ++p) bytes |= static_cast<uint32_t>(__ldg(p)) << 8 * (p - at);
  }
};

// Loads WORDS words at any address, from aligned words and, at the end of the rows, `last`.
template <int WORDS>
__device__ __forceinline__ void load_unaligned_words(const uint8_t* p, uint32_t offset, uint32_t* word,
                                                     const LastWord& last) {
  const uint8_t* begin = p + offset;
  const unsigned shift = reinterpret_cast<uintptr_t>(begin) % 4;
  const uint8_t* base = begin - shift;
  const auto load = [&](int i) {
    return base + 4 * i < last.at ? __ldg(reinterpret_cast<const uint32_t*>(base) + i) : last.bytes;
  };
  uint32_t low = load(0);
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const uint32_t high = load(i + 1);
    word[i] = __funnelshift_r(low, high, 8 * shift);
    low = high;
  }
}

// The keys of a block: rows 0 to count - 1 from these addresses.
template <int BITS, bool SKETCH, bool ALIGNED>
struct Keys {
  static constexpr int kWords = BITS ? BITS : 1;
  const uint8_t *codes, *bits;
  const __half* scales;
  const float* norms;
  int count, row_bytes, sketch_bytes, groups, sketch_groups;
  LastWord last_code, last_bit;

  __device__ Keys(const ScoreArguments& a, int64_t first, int n)
      : codes(a.packed + first * a.row_bytes), bits(a.sign_bits + first * a.sketch_bytes), scales(a.scale + first),
        norms(a.norm + first), count(n), row_bytes(a.row_bytes), sketch_bytes(a.sketch_bytes),
        groups((a.d + kGroup - 1) / kGroup), sketch_groups((a.m + kGroup - 1) / kGroup) {
    if constexpr (!ALIGNED) {
      last_code = LastWord(codes + static_cast<uint32_t>(count * row_bytes));
      last_bit = LastWord(bits + static_cast<uint32_t>(count * sketch_bytes));
    }
  }

  // Prefetches to L2 the keys of the next three iterations, which the block reads as soon as its queries are prepared.
  __device__ __forceinline__ void prefetch() const {
    const int64_t begin = kBlockKeys, end = min(count, 4 * kBlockKeys);
    if constexpr (BITS > 0) prefetch_lines(codes + begin * row_bytes, codes + end * row_bytes);
    if constexpr (SKETCH) prefetch_lines(bits + begin * sketch_bytes, bits + end * sketch_bytes);
  }
  static __device__ __forceinline__ void prefetch_lines(const uint8_t* begin, const uint8_t* end) {
#pragma unroll 1
    for (const uint8_t* p = begin + 128 * threadIdx.x; p < end; p += 128 * kThreads) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
    }
  }

  // A lane's part of 32 keys: parts of four keys, and the constants of the two keys whose scores the lane writes.
  struct Part {
    uint32_t code[4][kWords], bit[4];
    __half scale[2];
    float norm[2];
  };

  template <int WORDS>
  static __device__ __forceinline__ void load_part(const uint8_t* rows, uint32_t offset, uint32_t* word,
                                                   const LastWord& last) {
    if constexpr (ALIGNED) {
      load_aligned_words<WORDS>(rows, offset, word);
    } else {
      load_unaligned_words<WORDS>(rows, offset, word, last);
    }
  }

  // Loads step `step` of the keys from `key` on; beyond the last key, that one. A lane beyond the end of a row keeps
  // its words, which are multiplied by zeros.
  __device__ __forceinline__ void load(int key, int step, int g, int t, Part& part) const {
    const int group = 4 * step + t;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t row = min(key + 8 * r + g, count - 1);
      if constexpr (BITS > 0) {
        if (group < groups) load_part<BITS>(codes, row * row_bytes + group * (4 * BITS), part.code[r], last_code);
      }
      if constexpr (SKETCH) {
        if (group < sketch_groups) load_part<1>(bits, row * sketch_bytes + group * 4, part.bit + r, last_bit);
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t row = min(key + 8 * (2 * k + t % 2) + g, count - 1);
      if constexpr (BITS > 0) part.scale[k] = __ldg(scales + row);
      if constexpr (SKETCH) part.norm[k] = sketch_groups ? __ldg(norms + row) : 0;
    }
  }
};

// Adds the products of keys 2 h and 2 h + 1; levels: two words for each of a lane's four keys.
template <bool UNSIGNED>
__device__ __forceinline__ void add_levels(int (&sums)[4], const uint32_t (&levels)[4][2], int h, uint2 column) {
  mma_bytes<UNSIGNED>(sums, {levels[2 * h][0], levels[2 * h + 1][0], levels[2 * h][1], levels[2 * h + 1][1]}, column);
}

// The factor from a sum of bytes to the product, for coordinates in units of Side::unit.
template <typename Codes>
constexpr float kCodeUnit = format::kLevelUnit / (1 << kPointBits) / (1 << Codes::kPlace);

// Joins two of a coordinate's four bytes. Lanes with even t hold the lower two, the others the upper two.
__device__ __forceinline__ float two_bytes(int low, int high) { return static_cast<float>(high * 256 + low); }

// The sums over all four bytes for the two keys that this lane writes, from two neighbouring lanes' sums of four keys.
__device__ __forceinline__ void join_bytes(const float (&part)[4], int t, float (&sum)[2]) {
  const bool odd = t % 2;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float mine = odd ? part[2 * k + 1] : part[2 * k];
    const float theirs = __shfl_xor_sync(0xffffffff, odd ? part[2 * k] : part[2 * k + 1], 1);
    sum[k] = __fmaf_rn(odd ? mine : theirs, 65536.0f, odd ? theirs : mine);
  }
}

template <int BITS, bool UNIFORM, bool SKETCH, int PAIRS, bool ALIGNED>
__global__ void __launch_bounds__(kThreads, ALIGNED ? kBlocksPerMultiprocessor : 1)
    score_kernel(const __grid_constant__ ScoreArguments a) {
  extern __shared__ uint4 shared[];
  __shared__ float constants[4 * kMaxQueries];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  const int64_t rest = blockIdx.x / a.key_blocks, batch = rest / a.query_blocks;
  const int first_query = static_cast<int>(rest % a.query_blocks) * (2 * PAIRS);
  const int queries = min(2 * PAIRS, a.queries - first_query);
  const int64_t first_key = int64_t{blockIdx.x % a.key_blocks} * a.span;
  const Keys<BITS, SKETCH, ALIGNED> keys(a, batch * a.keys + first_key,
                                         static_cast<int>(min(int64_t{a.span}, a.keys - first_key)));
  const int steps = max(a.steps, a.sketch_steps);

  // The loads of the first keys are in flight while the queries are prepared.
  typename Keys<BITS, SKETCH, ALIGNED>::Part first{}, second{};
  int key = warp * kTileKeys, step = 0;
  if (key < keys.count) keys.load(key, 0, g, t, first);
  keys.prefetch();

  const Layout layout(a, queries);
  uint32_t* words = reinterpret_cast<uint32_t*>(shared);
  int8_t* table = reinterpret_cast<int8_t*>(words);
  words += kTableBytes / 4;
  const Side codes{words, reinterpret_cast<float*>(words) + layout.code_columns + layout.sketch_columns, constants,
                   constants + kMaxQueries};
  const Side sketch{words + layout.code_columns, codes.work + layout.code_work, constants + 2 * kMaxQueries,
                    constants + 3 * kMaxQueries};
  if constexpr (Expansion<BITS, UNIFORM>::kHasTable) fill_level_table(table, format::as_width(BITS), a.levels);
  prepare_queries<BITS, UNIFORM, SKETCH>(a, batch * a.queries + first_query, queries, codes, sketch);
  __syncthreads();
  using Codes = Expansion<BITS, UNIFORM>;
  const Codes expansion(table);

  // In a product this lane holds the column of byte g % 4 of query g / 4 of a pair (a missing query repeats the last
  // one), and it writes the scores of query t / 2.
  const uint2 *code_column[PAIRS], *sketch_column[PAIRS];
  float code_unit[PAIRS], shift[PAIRS], sketch_unit[PAIRS], minus_total[PAIRS];
  float* out[PAIRS];
#pragma unroll
  for (int p = 0; p < PAIRS; ++p) {
    const int column = min(2 * p + g / 4, queries - 1) * 16 + t * 4 + g % 4, query = min(2 * p + t / 2, queries - 1);
    code_column[p] = reinterpret_cast<const uint2*>(codes.columns) + column;
    sketch_column[p] = reinterpret_cast<const uint2*>(sketch.columns) + column;
    code_unit[p] = codes.unit[query], shift[p] = codes.total[query];
    sketch_unit[p] = sketch.unit[query], minus_total[p] = -sketch.total[query];
    const int64_t row = batch * a.queries + first_query + 2 * p + t / 2;
    out[p] = 2 * p + t / 2 < queries ? a.out + row * a.keys + first_key : nullptr;
  }

  float code_part[PAIRS][4] = {}, sketch_part[PAIRS][4] = {};
  // One step of 32 keys: issues the loads of the next step, sums this one, and writes the scores after the last step.
  // Returns whether another one follows.
  const auto advance = [&](const auto& now, auto& next) {
    const bool last = step + 1 == steps;
    const int next_key = last ? key + kBlockKeys : key, next_step = last ? 0 : step + 1;
    if (next_key < keys.count) keys.load(next_key, next_step, g, t, next);

    if constexpr (BITS > 0) {
      if (!SKETCH || step < a.steps) {
        int plus[PAIRS][2][4] = {}, minus[PAIRS][2][4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t p[4][2], n[4][2];
#pragma unroll
          for (int r = 0; r < 4; ++r) expansion.levels(now.code[r], i, p[r], n[r]);
#pragma unroll
          for (int pair = 0; pair < PAIRS; ++pair) {
            const uint2 b = code_column[pair][(step * 4 + i) * queries * 16];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              add_levels<Codes::kUnsigned>(plus[pair][h], p, h, b);
              if constexpr (Codes::kSigned) add_levels<Codes::kUnsigned>(minus[pair][h], n, h, b);
            }
          }
        }
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const int *x = plus[pair][r / 2] + r % 2 * 2, *y = minus[pair][r / 2] + r % 2 * 2;
            code_part[pair][r] += two_bytes(Codes::kTimes * x[0] - y[0], Codes::kTimes * x[1] - y[1]);
          }
        }
      }
    }
    if constexpr (SKETCH) {
      if (step < a.sketch_steps) {
        int sums[2][PAIRS][2][4] = {};  // over bits 0-3 and 4-7 of every byte
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t even = 0x01010101u << 2 * i, odd = 0x02020202u << 2 * i;
#pragma unroll
          for (int pair = 0; pair < PAIRS; ++pair) {
            const uint2 b = sketch_column[pair][(step * 4 + i) * queries * 16];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const uint32_t x = now.bit[2 * h], y = now.bit[2 * h + 1];
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
        [[maybe_unused]] float code_sum[2], sketch_sum[2];
        if constexpr (BITS > 0) join_bytes(code_part[pair], t, code_sum);
        if constexpr (SKETCH) join_bytes(sketch_part[pair], t, sketch_sum);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float score = 0;
          if constexpr (BITS > 0) {
            constexpr float unit = kCodeUnit<Codes>;
            score = __fmaf_rn(code_sum[k] * unit * code_unit[pair], __half2float(now.scale[k]), shift[pair]);
          }
          if constexpr (SKETCH) {
            // The sum of +-q is twice the sum over bits that are 1, less the sum over all.
            constexpr float unit = 2.0f / 128 / (1 << kPointBits);
            const float sum = __fmaf_rn(sketch_sum[k] * unit, sketch_unit[pair], minus_total[pair]);
            const float estimate = a.factor * now.norm[k] * sum;
            score = ALIGNED || a.sketch_steps ? score + estimate : score;
          }
          const int row = key + 8 * (2 * k + t % 2) + g;
          if (out[pair] && row < keys.count) out[pair][row] = score;
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) code_part[pair][r] = sketch_part[pair][r] = 0;
      }
    }
    key = next_key, step = next_step;
    return key < keys.count;
  };
  if (key >= keys.count) return;
  while (advance(first, second) && advance(second, first)) {
  }
}

// ---- One query of 128 channels ------------------------------------------------------------------------------------

// A lane's part of 32 keys: parts of keys g, g + 8, g + 16 and g + 24, and the constants of key g + 8 t, whose score
// it writes.
template <int BITS, bool SKETCH>
struct OneQueryPart {
  uint32_t code[4][BITS ? BITS : 1], bit[4];
  __half scale;
  float norm;
};

// Their addresses.
template <int BITS, bool SKETCH>
struct OneQueryKeys {
  static constexpr int kRow = BITS * kOneQueryDim / 8, kSketchRow = kOneQueryDim / 8;  // bytes
  const uint8_t *codes, *bits;
  const __half* scale;
  const float* norm;

  __device__ __forceinline__ OneQueryKeys(const ScoreArguments& a, int64_t row, int g, int t)
      : codes(a.packed + (row + g) * kRow + t * (4 * BITS)), bits(a.sign_bits + (row + g) * kSketchRow + t * 4),
        scale(a.scale + row + 8 * t + g), norm(a.norm + row + 8 * t + g) {}

  __device__ __forceinline__ void advance(int keys) {
    codes += int64_t{keys} * kRow, bits += int64_t{keys} * kSketchRow, scale += keys, norm += keys;
  }
  __device__ __forceinline__ void load(OneQueryPart<BITS, SKETCH>& part) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if constexpr (BITS > 0) load_aligned_words<BITS>(codes, 8 * r * kRow, part.code[r]);
      if constexpr (SKETCH) load_aligned_words<1>(bits, 8 * r * kSketchRow, part.bit + r);
    }
    if constexpr (BITS > 0) part.scale = __ldg(scale);
    if constexpr (SKETCH) part.norm = __ldg(norm);
  }
};

// Keeps the compiler from computing x again in every iteration.
template <typename T>
__device__ __forceinline__ void keep(T& x) {
  if constexpr (std::is_same_v<T, float>) {
    asm volatile("" : "+f"(x));
  } else {
    asm volatile("" : "+r"(x));
  }
}

// The sum of key g + 8 t of 32. Lanes with even t hold the lower two bytes of a coordinate, odd ones the upper two;
// lane t + 2 holds the same sums as lane t, so that each of the two converts half of them. weight: the value of 1 in
// this lane's bytes
__device__ __forceinline__ float sum_of_key(const int (&sums)[2][4], int times, int less, int t, float weight) {
  int both[4];  // bytes, of keys g + 8 r
#pragma unroll
  for (int r = 0; r < 4; ++r) both[r] = times * (sums[r / 2][r % 2 * 2 + 1] * 256 + sums[r / 2][r % 2 * 2]) - less;
  const int even = t < 2 ? both[0] : both[2], odd = t < 2 ? both[1] : both[3];
  const float mine = static_cast<float>(t % 2 ? odd : even) * weight;
  const float theirs = static_cast<float>(t % 2 ? even : odd) * weight;
  return mine + __shfl_xor_sync(0xffffffff, theirs, 1);
}

// One query, d = 128, at least 32 keys, and structured sketches of 128 bits or none. The scores are the same to the
// bit as those of the kernel above.
template <int BITS, bool UNIFORM, bool SKETCH>
__global__ void __launch_bounds__(kThreads, one_query_blocks_per_multiprocessor(BITS))
    score_one_query_kernel(const __grid_constant__ ScoreArguments a) {
  using Codes = Expansion<BITS, UNIFORM>;
  __shared__ alignas(16) float work[2][kOneQueryDim];
  __shared__ alignas(16) uint32_t columns[2][kOneQueryDim];
  __shared__ float units[2], totals[2];
  __shared__ alignas(16) int8_t table[32];
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  // A block's keys are rows 0 to count - 1 from first_key, at least 32: the last block may repeat some keys of the
  // block before it.
  const int64_t batch = blockIdx.y, first_key = min(int64_t{blockIdx.x} * a.span, a.keys - kTileKeys);
  const int count = static_cast<int>(min(int64_t{a.span}, a.keys - first_key)), last = count - kTileKeys;
  const int64_t first_row = batch * a.keys + first_key;

  // The loads for the query are issued first, then those of keys. Warp 0 prepares the query for codes, the next warp
  // for sketches.
  using Traits = HadamardTraits<1, 7, 32, 4>;
  const bool sketched = SKETCH && warp == (BITS ? 1 : 0), prepares = warp == 0 || sketched;
  const bool full = a.q_dtype == Dtype::kFloat32,
             fills = BITS > 0 && format::fits_nibble(format::as_width(BITS)) && warp == kWarps - 1;
  float x[4], factor[4], mean[4] = {}, inverse[4] = {1, 1, 1, 1};
  uint4 words{};
  int level = 0;
  if (prepares) {
    const uint8_t* q = static_cast<const uint8_t*>(a.q) + (a.q_rows(batch) + 4 * lane) * (full ? 4 : 2);
    if (full) {
      words = __ldg(reinterpret_cast<const uint4*>(q));
    } else {
      const uint2 half = __ldg(reinterpret_cast<const uint2*>(q));
      words.x = half.x, words.y = half.y;
    }
    load<Traits>(sketched ? a.projection : a.signs, lane, factor);
    if (!sketched && a.channels.center) load<Traits>(a.channels.center, lane, mean);
    if (!sketched && a.channels.inverse) load<Traits>(a.channels.inverse, lane, inverse);
  }
  if (fills && lane < 1 << BITS) level = format::level_of_code(format::as_width(BITS), a.levels, lane);

  int key = warp * kTileKeys, row = min(key, last);
  OneQueryKeys<BITS, SKETCH> keys(a, first_row + row, g, t);
  OneQueryPart<BITS, SKETCH> part[2];
  if (key < count) keys.load(part[0]);
  float* out = a.out + first_row + row + 8 * t + g;

  if (fills) table[lane] = static_cast<int8_t>(level);
  if (prepares) {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w}, half[2] = {words.x, words.y};
    if (full) {
      floats_of_words<float>(word, x);
    } else if (a.q_dtype == Dtype::kFloat16) {
      floats_of_words<__half>(half, x);
    } else {
      floats_of_words<__nv_bfloat16>(half, x);
    }
    float total = 0, *y = work[sketched];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      total = __fmaf_rn(x[i], mean[i], total);
      x[i] = __fmul_rn(x[i], __fmul_rn(factor[i], inverse[i]));
    }
    transform<Traits>(x, lane);
    *reinterpret_cast<float4*>(y + 4 * lane) = make_float4(x[0], x[1], x[2], x[3]);
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) amax = max(amax, magnitude_bits(x[i]));
    amax = max_of_lanes(amax);
    __syncwarp();
    make_column(y, kOneQueryDim, power_of_two(-coordinate_exponent(amax)), sketched ? 0 : BITS, UNIFORM, 0, lane / 8,
                lane % 8, 0, 1, columns[sketched]);
    if (sketched || a.channels.center) {  // else the total is 0
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (sketched) total += y[lane + 32 * i];
      }
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2) total += __shfl_xor_sync(0xffffffff, total, bit);
    }
    if (lane == 0) units[sketched] = unit_of(amax), totals[sketched] = total;
  }
  __syncthreads();
  if (key >= count) return;

  // In a product this lane holds the column of byte g % 4 of a coordinate.
  Codes expansion(table);
  expansion.add_minus();
  if constexpr (Codes::kTwoParts) keep(expansion.minus_low), keep(expansion.minus_high);
  uint2 code_column[4], sketch_column[4];
  int start[4] = {}, less = 0;  // added to every sum at its start; subtracted from it at its end
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = i * 16 + t * 4 + g % 4;
    if constexpr (BITS > 0) code_column[i] = reinterpret_cast<const uint2*>(columns[0])[at];
    if constexpr (SKETCH) sketch_column[i] = reinterpret_cast<const uint2*>(columns[1])[at];
    if constexpr (Codes::kSigned) {
      constexpr uint32_t x = Codes::kConstant;
      mma_bytes<Codes::kUnsigned>(start, {x, x, x, x}, code_column[i]);
    }
  }
  if constexpr (Codes::kTimes > 1) {
    less = start[1] * 256 + start[0];
#pragma unroll
    for (int k = 0; k < 4; ++k) start[k] = 0;
  }
  float code_weight = (t % 2 ? 65536 : 1) * kCodeUnit<Codes>;
  float sketch_weight = (t % 2 ? 65536 : 1) * (2.0f / 8 / (1 << kPointBits));
  keep(code_weight), keep(sketch_weight);
  const float code_unit = units[0], shift = totals[0], sketch_unit = units[1], minus_total = -totals[1];

  // One iteration: issues the loads of the next 32 keys, sums these and writes their scores. Returns whether another
  // one follows. The last 32 keys of a block may overlap others, whose scores are then written twice.
  const auto advance = [&](const auto& now, auto& next) {
    key += kBlockKeys;
    const int step = min(key, last) - row;
    keys.advance(step);
    if (key < count) keys.load(next);

    float score = 0;
    if constexpr (BITS > 0) {
      int sums[2][4];
#pragma unroll
      for (int k = 0; k < 8; ++k) sums[k / 4][k % 4] = start[k % 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t p[4][2], n[4][2];
#pragma unroll
        for (int r = 0; r < 4; ++r) expansion.levels(now.code[r], i, p[r], n[r]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          add_levels<Codes::kUnsigned>(sums[h], p, h, code_column[i]);
          if constexpr (Codes::kSigned && Codes::kTimes == 1) add_levels<false>(sums[h], n, h, code_column[i]);
        }
      }
      const float sum = sum_of_key(sums, Codes::kTimes, less, t, code_weight);
      score = __fmaf_rn(sum * code_unit, __half2float(now.scale), shift);
    }
    if constexpr (SKETCH) {
      int sums[2][4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t even = 0x01010101u << 2 * (i % 2), odd = 0x02020202u << 2 * (i % 2);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t x = now.bit[2 * h] >> i / 2 * 4, y = now.bit[2 * h + 1] >> i / 2 * 4;
          mma_bytes<true>(sums[h], {x & even, y & even, x & odd, y & odd}, sketch_column[i]);
        }
      }
      // The sum of +-q is twice the sum over bits that are 1, less the sum over all.
      const float sum = sum_of_key(sums, 1, 0, t, sketch_weight);
      const float estimate = a.factor * now.norm * __fmaf_rn(sum, sketch_unit, minus_total);
      score = score + estimate;
    }
    *out = score;
    out += step, row += step;
    return key < count;
  };
  while (advance(part[0], part[1]) && advance(part[1], part[0])) {
  }
}

// ---- Host ---------------------------------------------------------------------------------------------------------

// Takes enough blocks to fill the device once, and more if each still has keys enough. Offsets in a block have 32 bits.
void share_keys(ScoreArguments& a, int64_t rows, int blocks_per_multiprocessor, const DeviceFacts& device) {
  const int64_t tiles = (a.keys + kBlockKeys - 1) / kBlockKeys;
  const int64_t resident = int64_t{blocks_per_multiprocessor} * device.multiprocessors;
  const int64_t addressable = (int64_t{1} << 30) / std::max({a.row_bytes, a.sketch_bytes, 1}) / kBlockKeys;
  const int64_t blocks = std::min(tiles, std::max(resident / rows, tiles / kWorthwhile + 1));
  const int64_t block_tiles = std::min((tiles + blocks - 1) / blocks, addressable);
  a.span = static_cast<int>(block_tiles * kBlockKeys);
  a.key_blocks = static_cast<int>((tiles + block_tiles - 1) / block_tiles);
}

template <int BITS, bool UNIFORM, bool SKETCH, int PAIRS, bool ALIGNED>
void launch_general(ScoreArguments& a, int64_t batch, const Launch& launch, const DeviceFacts& device) {
  const int bytes = Layout(a, std::min(a.queries, 2 * PAIRS)).bytes();
  const auto kernel = score_kernel<BITS, UNIFORM, SKETCH, PAIRS, ALIGNED>;
  if (bytes > kDefaultSharedBytes) {
    const int most = device.shared_per_block - kReservedSharedBytes;
    STD_TORCH_CHECK(bytes <= most, "scores of d = ", a.d, " and sketches of ", a.m, " bits take ", bytes,
                    " bytes of shared memory, supported on this device: ", most);
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "score");
  }

  a.query_blocks = (a.queries + 2 * PAIRS - 1) / (2 * PAIRS);
  const int64_t rows = batch * a.query_blocks;
  share_keys(a, rows, kBlocksPerMultiprocessor, device);
  kernel<<<num_blocks(rows * a.key_blocks, 1), kThreads, bytes, launch.stream()>>>(a);
}

template <int BITS, bool UNIFORM, bool SKETCH>
void launch_one_query(ScoreArguments& a, int64_t batch, const Launch& launch, const DeviceFacts& device) {
  share_keys(a, batch, one_query_blocks_per_multiprocessor(BITS), device);
  const dim3 grid(a.key_blocks, static_cast<unsigned>(batch));
  score_one_query_kernel<BITS, UNIFORM, SKETCH><<<grid, kThreads, 0, launch.stream()>>>(a);
}

// The kernels for one kind of keys whose rows are read in whole words.
template <int BITS, bool UNIFORM, bool SKETCH>
void launch_choice(ScoreArguments& a, int64_t batch, const ScoreChoice& choice, const Launch& launch,
                   const DeviceFacts& device) {
  constexpr format::Codes codes{format::as_width(BITS), UNIFORM ? format::Grid::kUniform : format::Grid::kLevels};
  if constexpr (has_one_query_kernel(BITS > 0, codes, SKETCH)) {
    if (choice.kernel == ScoreKernel::kOneQuery) {
      return launch_one_query<BITS, UNIFORM, SKETCH>(a, batch, launch, device);
    }
  }
  if constexpr (has_four_query_kernel(BITS > 0, SKETCH)) {
    if (choice.query_pairs == 2) return launch_general<BITS, UNIFORM, SKETCH, 2, true>(a, batch, launch, device);
  }
  launch_general<BITS, UNIFORM, SKETCH, 1, true>(a, batch, launch, device);
}

// Rows at any address share one kernel per width, with and without sketches.
template <int BITS, bool UNIFORM = false>
void launch_bits(ScoreArguments& a, const ScoreFacts& call, const Launch& launch, const DeviceFacts& device) {
  const ScoreChoice choice = choose_score(call);
  if (!call.word_rows) return launch_general<BITS, UNIFORM, true, 1, false>(a, call.batch, launch, device);
  if constexpr (BITS > 0) {
    if (!a.sign_bits) return launch_choice<BITS, UNIFORM, false>(a, call.batch, choice, launch, device);
  }
  launch_choice<BITS, UNIFORM, true>(a, call.batch, choice, launch, device);
}

// BITS = 0 stands for sketches without codes.
void launch_width(ScoreArguments& a, const ScoreFacts& call, const Launch& launch, const DeviceFacts& device) {
  if (a.bits == 0) return launch_bits<0>(a, call, launch, device);
  switch (format::as_width(a.bits)) {
    case format::Width::k1: return launch_bits<1>(a, call, launch, device);
    case format::Width::k2: return launch_bits<2>(a, call, launch, device);
    case format::Width::k3: return launch_bits<3>(a, call, launch, device);
    case format::Width::k4: return launch_bits<4>(a, call, launch, device);
    case format::Width::k5:
      return a.levels ? launch_bits<5>(a, call, launch, device) : launch_bits<5, true>(a, call, launch, device);
    case format::Width::k8: return launch_bits<8>(a, call, launch, device);
  }
}

// Fills in the arguments that both ops share, and launches.
Tensor run(ScoreArguments& a, const Tensor& q, const ScoreShape& shape, const OptionalTensor& projection,
           const OptionalTensor& sign_bits, const OptionalTensor& norm, const char* name) {
  const int64_t d = q.size(q.dim() - 1);
  a.d = static_cast<int>(d);
  a.split = check_vector_dim(d, "q");
  STD_TORCH_CHECK(shape.queries <= INT32_MAX, "q has ", shape.queries, " queries, supported: up to ", INT32_MAX);
  a.queries = static_cast<int>(shape.queries);
  a.keys = shape.keys;
  // Bytes of a load: all rows must start at a multiple of that.
  const int word = a.bits % 4 == 0 ? 16 : a.bits % 2 == 0 ? 8 : 4;
  bool words = a.bits == 0 || (d % kGroup == 0 && a.row_bytes % word == 0 && aligned(a.packed, word));
  if (projection) {
    const Projection sketch(*projection, q, d);
    check_sketch(*sign_bits, *norm, q, shape, sketch.bytes());
    STD_TORCH_CHECK(sketch.rows <= 1 << 16, "projection has ", sketch.rows,
                    " rows, supported by scores on CUDA: up to ", 1 << 16);
    a.sign_bits = bytes_of(*sign_bits);
    a.norm = static_cast<const float*>(norm->data_ptr());
    a.projection = sketch.data;
    a.dense = sketch.dense;
    a.m = static_cast<int>(sketch.rows);
    a.sketch_bytes = a.m / 8;
    a.sketch_steps = (a.m + kStretch - 1) / kStretch;
    a.factor = sketch.factor;
    words = words && a.m % kGroup == 0 && aligned(a.sign_bits, 4);
  }

  Tensor out = new_tensor(q, shape.out, ScalarType::Float);
  if (out.numel() == 0) return out;
  const Launch launch(q);
  const AlignedRows in(q, d == 128 ? word_bytes(4, q.element_size()) : 1);
  a.in_registers = d == 128 && aligned(a.signs, 16) && aligned(a.channels.center, 16) && aligned(a.projection, 16);
  a.q = in.data();
  a.q_rows = in.rows();
  a.q_dtype = dtype_of(q);
  a.out = static_cast<float*>(out.data_ptr());
  const format::Codes codes{format::as_width(a.bits), a.levels ? format::Grid::kLevels : format::Grid::kUniform};
  const ScoreFacts call{.has_codes = a.bits > 0,
                        .has_sketch = a.sign_bits != nullptr,
                        .dense_sketch = a.dense,
                        .codes = codes,
                        .sketch_bits = a.m,
                        .head_dim = d,
                        .batch = shape.batch,
                        .queries = a.queries,
                        .keys = a.keys,
                        .word_rows = words,
                        .aligned_constants = a.in_registers,
                        .four_query_bytes = Layout(a, kMaxQueries).bytes()};
  const DeviceFacts& device = device_of(q.get_device_index()).facts;
  launch_width(a, call, launch, device);
  launch.check(name);
  return out;
}

// -> float32 [..., queries, keys]
Tensor score(const ScoreCall& c) {
  const ScoreShape shape = check_score(c);
  const int64_t d = c.d();
  ScoreArguments a{};
  a.packed = bytes_of(c.packed);
  a.scale = static_cast<const __half*>(c.scale.data_ptr());
  a.signs = static_cast<const float*>(c.signs.data_ptr());
  a.levels = levels_data(c.levels);
  a.channels = channels_of(c.center, c.center ? static_cast<const float*>(c.center->data_ptr()) : nullptr, 1, d);
  a.bits = static_cast<int>(c.bits);
  a.row_bytes = static_cast<int>(format::dense_row_bytes(d, a.bits));
  a.steps = static_cast<int>((d + kStretch - 1) / kStretch);
  return run(a, c.q, shape, c.projection, c.sign_bits, c.residual_norm, "score");
}

// q: [..., queries, d], sign_bits: uint8 [..., keys, m / 8], norm: float32 [..., keys] -> float32 [..., queries, keys]
Tensor qjl_score(const Tensor& q, const Tensor& sign_bits, const Tensor& norm, const Tensor& projection) {
  const ScoreShape shape = checked_score_shape(q, sign_bits, "sign_bits");
  ScoreArguments a{};
  return run(a, q, shape, projection, sign_bits, norm, "qjl_score");
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  m.impl("score", turboquant::boxed<&turboquant::cuda::score>);
  m.impl("qjl_score", TORCH_BOX(&turboquant::cuda::qjl_score));
}
