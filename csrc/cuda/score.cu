// score, qjl_score: attention scores straight from packed standalone vectors and from sketches of their residuals. The query is
// rotated once; keys are never rotated back: <q, key> = <R (q / s), scale / 32 * levels> + <q, center>, s the scales of channels, plus the sketch's estimate.
//
// Keys are read once, at the speed of memory, so expanding codes must cost next to nothing: levels are bytes, and tensor cores
// multiply bytes. A query coordinate becomes an integer in units of 2^-25 of the largest one's power of two, and its four bytes
// are four columns of the matrix product; sums of 128 channels are exact integers, so this is as accurate as float32.
//
// A warp takes 32 keys at a time: lane 4 g + t reads channels 32 t to 32 t + 31 of keys g, g + 8, g + 16 and g + 24 of each
// stretch of 128 channels, and these words become its fragments without any exchange between lanes.
#include <algorithm>

#include "codec.cuh"
#include "expand.cuh"
#include "qjl.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kTileKeys = 32;                   // of a warp at a time
constexpr int kBlockKeys = kWarps * kTileKeys;  // of a block at a time
constexpr int kStretch = 128;                   // channels, or bits of a sketch, of a step
constexpr int kGroup = 32;                      // of which a lane has this many
constexpr int kMaxQueries = 4;                  // of a block; each pair of them shares the columns of a product
constexpr int kBlocksPerSm = 2;
constexpr int kWorthwhile = 32;  // times kBlockKeys: keys that are worth the preparation of a query
constexpr int kPointBits = 25;   // of a coordinate after the point; sketches need room for a factor of 8

struct ScoreArguments {
  const void* q;
  Rows q_rows;  // batch * queries
  ScalarType q_dtype;
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

  bool in_registers;  // d = 128, and everything that a query meets allows 16-byte loads
};

// ---- Queries ------------------------------------------------------------------------------------------------------

// What a block knows of its queries, in shared memory: for the codes and for the sketch.
struct Side {
  uint32_t* columns;  // bytes of coordinates: [steps][4 products][queries][t][4 bytes of a coordinate][2 words]
  float* work;        // [queries][d] floats; dense projections: [queries][d + m]
  float* unit;        // [queries]: what 2^kPointBits stands for
  float* total;       // [queries]: <q, center> (codes), the sum of all coordinates (sketch)
};

// Columns, work and tables in dynamic shared memory.
struct Layout {
  int code_columns, sketch_columns, code_work, sketch_work;  // words
  __host__ __device__ Layout(const ScoreArguments& a, int queries)
      : code_columns(queries * a.steps * kStretch), sketch_columns(queries * a.sketch_steps * kStretch),
        code_work(a.bits ? queries * a.d : 0), sketch_work(a.sign_bits ? queries * (a.d + (a.dense ? a.m : 0)) : 0) {}
  __host__ __device__ int bytes() const {
    return 4 * (code_columns + sketch_columns + code_work + sketch_work) + kTableBytes;
  }
};

// q * factors * inverse -> y[d] in shared memory, by one warp; factors may be null. Returns this lane's part of <q, center>.
__device__ __forceinline__ float load_products(const ScoreArguments& a, int64_t from, const float* factors,
                                               const format::Channels& channels, float* y, int lane) {
  constexpr int kAhead = 4;  // loads that are under way together
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

// The same and then the transform, for the usual d = 128.
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

// Coordinates y[count] of one query as integers, cut into bytes and laid out as columns, by one warp. bits = 0: for a sketch.
// total: this lane's part of the side's total.
__device__ __forceinline__ void make_columns(const float* y, int count, int bits, int steps, int query, int queries,
                                             const Side& side, float total, int lane) {
  uint32_t amax = 0;
#pragma unroll 4
  for (int c = lane; c < count; c += 32) {
    amax = max(amax, __float_as_uint(y[c]) & 0x7FFFFFFF);
    if (bits == 0) total += y[c];
  }
#pragma unroll 1  // shuffles are long where the compiler does not know that all lanes are here
  for (int bit = 1; bit < 32; bit *= 2) {
    amax = max(amax, __shfl_xor_sync(0xffffffff, amax, bit));
    total += __shfl_xor_sync(0xffffffff, total, bit);
  }
  const int e = min(max(static_cast<int>(amax >> 23) - 127, -126), 126);
  const float down = power_of_two(-e);
  if (lane == 0) {
    side.unit[query] = amax < 0x7F800000 ? power_of_two(e) : __int_as_float(0x7FC00000);
    side.total[query] = total;
  }

#pragma unroll 1
  for (int i = lane; i < steps * 32; i += 32) {  // [step][t][word]
    const int step = i / 32, t = i / 8 % 4, word = i % 8;
    uint32_t bytes[4];  // of each channel, a balanced number in base 256
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int c =
          step * kStretch + t * kGroup + (bits ? channel_of_byte(bits, word, j) : channel_of_sketch_byte(word, j));
      int point = c < count ? __float2int_rn(y[c] * down * (1 << kPointBits)) : 0;
      if (bits == 0) point <<= shift_of_sketch_word(word);
      bytes[j] = (static_cast<uint32_t>(point) + 0x80808080) ^ 0x80808080;
    }
    // Four bytes of four channels, turned.
    const uint32_t low01 = select_bytes(bytes[0], bytes[1], 0x5140), low23 = select_bytes(bytes[2], bytes[3], 0x5140);
    const uint32_t high01 = select_bytes(bytes[0], bytes[1], 0x7362), high23 = select_bytes(bytes[2], bytes[3], 0x7362);
    uint32_t* to = side.columns + (((step * 4 + word / 2) * queries + query) * 16 + t * 4) * 2 + word % 2;
    to[0] = select_bytes(low01, low23, 0x5410), to[2] = select_bytes(low01, low23, 0x7632);
    to[4] = select_bytes(high01, high23, 0x5410), to[6] = select_bytes(high01, high23, 0x7632);
  }
}

// Everything that depends on the queries alone, by a whole block: warp w prepares query w % 4, for the codes where w < 4, else
// for the sketch. The caller synchronises.
template <int BITS, bool SKETCH>
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
  if (SKETCH && a.dense) {  // all warps share the rows of the projection
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
  make_columns(y, count, sketched ? 0 : BITS, sketched ? a.sketch_steps : a.steps, query, queries, side, total, lane);
}

// ---- Keys ---------------------------------------------------------------------------------------------------------

// WORDS words at `offset` of p. ALIGNED: one load, or WORDS of them; else only the aligned words that hold a byte before `end`.
template <int WORDS, bool ALIGNED>
__device__ __forceinline__ void load_words(const uint8_t* p, uint32_t offset, uint32_t end, uint32_t* word) {
  if constexpr (ALIGNED && WORDS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      const uint4 w = __ldg(reinterpret_cast<const uint4*>(p + offset) + i / 4);
      word[i] = w.x, word[i + 1] = w.y, word[i + 2] = w.z, word[i + 3] = w.w;
    }
  } else if constexpr (ALIGNED && WORDS == 2) {
    const uint2 w = __ldg(reinterpret_cast<const uint2*>(p + offset));
    word[0] = w.x, word[1] = w.y;
  } else if constexpr (ALIGNED) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) word[i] = __ldg(reinterpret_cast<const uint32_t*>(p + offset) + i);
  } else {
    const uint8_t *begin = p + offset, *stop = p + end;
    const unsigned shift = reinterpret_cast<uintptr_t>(begin) % 4;
    const uint8_t* base = begin - shift;
    const auto load = [&](int i) {
      return base + 4 * i < stop ? __ldg(reinterpret_cast<const uint32_t*>(base) + i) : 0;
    };
    uint32_t low = load(0);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const uint32_t high = load(i + 1);
      word[i] = __funnelshift_r(low, high, 8 * shift);
      low = high;
    }
  }
}

// What a block reads: its keys are rows 0 .. count - 1 from here.
template <int BITS, bool SKETCH, bool ALIGNED>
struct Keys {
  static constexpr int kWords = BITS ? BITS : 1;
  const uint8_t *codes, *bits;
  const __half* scales;
  const float* norms;
  int count, row_bytes, sketch_bytes, groups, sketch_groups;

  __device__ Keys(const ScoreArguments& a, int64_t first, int n)
      : codes(a.packed + first * a.row_bytes), bits(a.sign_bits + first * a.sketch_bytes), scales(a.scale + first),
        norms(a.norm + first), count(n), row_bytes(a.row_bytes), sketch_bytes(a.sketch_bytes),
        groups((a.d + kGroup - 1) / kGroup), sketch_groups((a.m + kGroup - 1) / kGroup) {}

  // Brings the keys of a few more turns of the block closer: they are read as soon as the queries are prepared.
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

  // What a lane holds of 32 keys: parts of four of them, and the constants of the two whose scores it writes.
  struct Part {
    uint32_t code[4][kWords], bit[4];
    __half scale[2];
    float norm[2];
  };

  // Keys from `key` on, clamped to the last, step `step`. A lane beyond the end of a row keeps what it has: it meets zeros.
  __device__ __forceinline__ void load(int key, int step, int g, int t, Part& part) const {
    const int group = 4 * step + t;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t row = min(key + 8 * r + g, count - 1);
      if constexpr (BITS > 0) {
        const uint32_t start = row * row_bytes;
        if (group < groups)
          load_words<BITS, ALIGNED>(codes, start + group * (4 * BITS), start + row_bytes, part.code[r]);
      }
      if constexpr (SKETCH) {
        const uint32_t start = row * sketch_bytes;
        if (group < sketch_groups) load_words<1, ALIGNED>(bits, start + group * 4, start + sketch_bytes, part.bit + r);
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

// Two bytes of a coordinate's four, for one row of a product: lanes with even t hold the lower two.
__device__ __forceinline__ float two_bytes(int low, int high) { return static_cast<float>(high * 256 + low); }

// Sums over all bytes for the two keys that this lane writes, from those of four keys in two lanes.
__device__ __forceinline__ void join_bytes(const float (&part)[4], int t, float (&sum)[2]) {
  const bool odd = t % 2;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float mine = odd ? part[2 * k + 1] : part[2 * k];
    const float theirs = __shfl_xor_sync(0xffffffff, odd ? part[2 * k] : part[2 * k + 1], 1);
    sum[k] = __fmaf_rn(odd ? mine : theirs, 65536.0f, odd ? theirs : mine);
  }
}

template <int BITS, bool SKETCH, int PAIRS, bool ALIGNED>
__global__ void __launch_bounds__(kThreads, ALIGNED ? kBlocksPerSm : 1)
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

  // Loads of the first keys are on their way while the queries are prepared.
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
  fill_table(table, BITS, a.levels);
  prepare_queries<BITS, SKETCH>(a, batch * a.queries + first_query, queries, codes, sketch);
  __syncthreads();
  const Expansion<BITS> expansion(table);

  // The column of products that this lane holds: byte g % 4 of query g / 4 of a pair; a query that is not there repeats another.
  // Scores that it writes: those of query t / 2.
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
  // One step of 32 keys: fetches the next one, adds this one up and writes the scores with the last. False where none follows.
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
            constexpr float unit = format::kLevelUnit / (1 << kPointBits);
            score = __fmaf_rn(code_sum[k] * unit * code_unit[pair], __half2float(now.scale[k]), shift[pair]);
          }
          if constexpr (SKETCH) {
            // sum of +-q = 2 (sum over bits that are 1) - (sum of all)
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

// ---- Host ---------------------------------------------------------------------------------------------------------

int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "device attribute");
  return value;
}

template <int BITS, bool SKETCH, int PAIRS, bool ALIGNED>
void launch_kernel(ScoreArguments& a, int64_t batch, const Launch& launch, int device) {
  const int bytes = Layout(a, std::min(a.queries, 2 * PAIRS)).bytes();
  const auto kernel = score_kernel<BITS, SKETCH, PAIRS, ALIGNED>;
  if (bytes > 48 << 10) {
    const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) - 1024;
    STD_TORCH_CHECK(bytes <= most, "scores of d = ", a.d, " and sketches of ", a.m, " bits take ", bytes,
                    " bytes of shared memory, supported on this device: ", most);
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "score");
  }

  // Enough blocks to fill the device once, more only where each still has keys enough; offsets in a block have 32 bits.
  a.query_blocks = (a.queries + 2 * PAIRS - 1) / (2 * PAIRS);
  const int64_t rows = batch * a.query_blocks, tiles = (a.keys + kBlockKeys - 1) / kBlockKeys;
  const int64_t resident = int64_t{kBlocksPerSm} * device_attribute(cudaDevAttrMultiProcessorCount, device);
  const int64_t addressable = (int64_t{1} << 30) / std::max({a.row_bytes, a.sketch_bytes, 1}) / kBlockKeys;
  const int64_t blocks = std::min(tiles, std::max(resident / rows, tiles / kWorthwhile + 1));
  const int64_t block_tiles = std::min((tiles + blocks - 1) / blocks, addressable);
  a.span = static_cast<int>(block_tiles * kBlockKeys);
  a.key_blocks = static_cast<int>((tiles + block_tiles - 1) / block_tiles);
  kernel<<<num_blocks(rows * a.key_blocks, 1), kThreads, bytes, launch.stream()>>>(a);
}

// Four queries at a time where registers allow it. Rows at any address share one kernel per width.
template <int BITS>
void launch_bits(ScoreArguments& a, int64_t batch, bool aligned, const Launch& launch, int device) {
  if (!aligned) return launch_kernel<BITS, true, 1, false>(a, batch, launch, device);
  const bool many = a.queries > 2 && Layout(a, 4).bytes() <= 48 << 10;
  if constexpr (BITS == 0) {
    if (many) return launch_kernel<0, true, 2, true>(a, batch, launch, device);
    return launch_kernel<0, true, 1, true>(a, batch, launch, device);
  } else {
    if (a.sign_bits) return launch_kernel<BITS, true, 1, true>(a, batch, launch, device);
    if (many) return launch_kernel<BITS, false, 2, true>(a, batch, launch, device);
    return launch_kernel<BITS, false, 1, true>(a, batch, launch, device);
  }
}

// Fills in what both ops share, and launches.
Tensor run(ScoreArguments& a, const Tensor& q, const ScoreShape& shape, const OptionalTensor& projection,
           const OptionalTensor& sign_bits, const OptionalTensor& norm, const char* name) {
  const int64_t d = q.size(q.dim() - 1);
  a.d = static_cast<int>(d);
  a.split = check_vector_dim(d, "q");
  STD_TORCH_CHECK(shape.queries <= INT32_MAX, "q has ", shape.queries, " queries, supported: up to ", INT32_MAX);
  a.queries = static_cast<int>(shape.queries);
  a.keys = shape.keys;
  const int word = a.bits % 4 == 0 ? 16 : a.bits == 2 ? 8 : 4;  // of a load, which all rows must start at a multiple of
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

  Tensor out = torch::stable::new_empty(q, shape.out, ScalarType::Float);
  if (out.numel() == 0) return out;
  const Launch launch(q);
  const AlignedRows in(q, d == 128 ? word_bytes(4, q.element_size()) : 1);
  a.in_registers = d == 128 && aligned(a.signs, 16) && aligned(a.channels.center, 16) && aligned(a.projection, 16);
  a.q = in.data();
  a.q_rows = in.rows();
  a.q_dtype = q.scalar_type();
  a.out = static_cast<float*>(out.data_ptr());
  const int device = q.get_device_index();
  switch (a.bits) {
    case 0: launch_bits<0>(a, shape.batch, words, launch, device); break;
    case 1: launch_bits<1>(a, shape.batch, words, launch, device); break;
    case 2: launch_bits<2>(a, shape.batch, words, launch, device); break;
    case 3: launch_bits<3>(a, shape.batch, words, launch, device); break;
    case 4: launch_bits<4>(a, shape.batch, words, launch, device); break;
    case 5: launch_bits<5>(a, shape.batch, words, launch, device); break;
    default: launch_bits<8>(a, shape.batch, words, launch, device); break;
  }
  launch.check(name);
  return out;
}

// q: [..., queries, d], packed: uint8 [..., keys, row_bytes], scale: float16 [..., keys], center: float32 [d] or [3, d],
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
  check_center(center, q, keys.d);
  const bool sketched = projection.has_value();
  STD_TORCH_CHECK(sign_bits.has_value() == sketched && residual_norm.has_value() == sketched,
                  "sign_bits, residual_norm and projection come together or not at all");

  ScoreArguments a{};
  a.packed = bytes_of(packed);
  a.scale = static_cast<const __half*>(scale.data_ptr());
  a.signs = static_cast<const float*>(signs.data_ptr());
  a.levels = levels_data(levels);
  a.channels = channels_of(center, center ? static_cast<const float*>(center->data_ptr()) : nullptr, 1, keys.d);
  a.bits = static_cast<int>(bits);
  a.row_bytes = keys.row_bytes;
  a.steps = static_cast<int>((keys.d + kStretch - 1) / kStretch);
  return run(a, q, shape, projection, sign_bits, residual_norm, "score");
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
  m.impl("score", TORCH_BOX(&turboquant::cuda::score));
  m.impl("qjl_score", TORCH_BOX(&turboquant::cuda::qjl_score));
}
