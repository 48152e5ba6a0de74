// nvcc: -fmad=true
//
// Attention of many queries over packed pages.
//
// A block has up to 256 rows, a row being one query under one query head of a KV head, and goes through the keys that they see,
// 16 to 64 at a time. The levels of those keys and values are expanded into shared memory as float16, which holds them exactly,
// in the order in which tensor cores want them; then each warp computes scores, softmax weights and sums of values for its own
// rows, all sums in registers. While one half of the warps expands the next keys, the other half multiplies.
//
// What makes this the attention of the decoded cache:
//   * Keys and values stay rotated. The query is rotated once, the sum of values is rotated back once.
//   * A query is rounded to float16 with a power of two of its own. Its scores are products with levels, times the key's scale.
//   * Weights are exp2(score - reference), the reference an integer that follows the greatest score of a row: it is raised only
//     when the score is 2^6 above it, so sums are seldom rescaled, and always by powers of two. Times the value's scale they are
//     rounded to float16, in a unit that puts the largest that are possible between 2^4 and 2^15: what underflows there is below
//     2^-29 of the largest weight of the row so far.
//   * Exact keys of the tail come first, in the same way: unrotated queries, keys and values as float16 with a power of two
//     per vector, which is exact for float16 and bfloat16. Their sum is rotated, the keys in codes are added, all is rotated back.
//   * A scale that is NaN, as in a page that nobody wrote or a token that could not be coded, meets only the rows that see it:
//     levels are finite whatever the bytes, and the score or weight of a key that a row does not see is replaced, not multiplied.
#include "cuda/attention/general.cuh"

#include <algorithm>

#include "cuda/codec/record.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/torch.cuh"
#include "cuda/common/wgmma.cuh"

namespace turboquant::cuda {

// How a block is cut: DIM channels (d rounded up), ROW_WARPS x COLUMN_WARPS warps with TILES tiles of 16 rows and a part of the
// value channels each, KEYS keys at a time. With two BUFFERS the next keys are expanded while these are multiplied; STAGED codes
// are copied to shared memory two steps ahead. HOPPER: products of warpgroups (common/wgmma.cuh), tiles of 64 rows for four warps.
template <int DIM, int TILES, int ROW_WARPS, int COLUMN_WARPS, int KEYS, int BUFFERS, bool STAGED, bool HOPPER = false>
struct Shape {
  static constexpr bool kHopper = HOPPER;
  static constexpr int kTileRows = HOPPER ? 64 : 16;
  static constexpr int kUnitRows = kTileRows * TILES;  // of warps that act together
  static constexpr bool kFull = DIM <= 256;  // channels between d and DIM are zeros that are multiplied like others
  static constexpr int kProduct = DIM % 64 ? 32 : 64;  // value channels of a product of warpgroups
  static constexpr int kDim = DIM, kTiles = TILES, kRowWarps = ROW_WARPS, kColumnWarps = COLUMN_WARPS, kKeys = KEYS;
  static constexpr int kBuffers = BUFFERS;
  static constexpr bool kStaged = STAGED;
  static constexpr int kWarps = ROW_WARPS * COLUMN_WARPS, kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * TILES * ROW_WARPS;
  static constexpr int kOctetsOfDim = DIM / 8;
  static constexpr int kGroups = DIM / 32;                       // of key channels
  static constexpr int kUnits = DIM / 16;                        // of value channels
  static constexpr int kWarpUnits = kUnits / COLUMN_WARPS;       // of them, those that a warp sums
  static constexpr int kOctets = KEYS / 8, kBlocks = KEYS / 16;  // of keys
  static constexpr int kFragments = KEYS * DIM / 8;              // words of 16 bytes that KEYS keys or values become
  static constexpr int kLaneRows = 2 * TILES;                    // rows that a lane holds a part of
  static constexpr int kExpansions = kFragments / kThreads;      // of them, made by one thread
  static_assert(kFragments % kThreads == 0 && kWarps % (KEYS / 8) == 0 && kWarps % kBlocks == 0);
  static_assert(kUnits % COLUMN_WARPS == 0);
};

namespace {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kNoReference = -1e30f;  // of a row that has seen no key
constexpr int kSlots = 4;               // steps of keys whose pages are known
constexpr int kStageRows = 4;           // queries that a warp prepares at once

struct Arguments {
  Attention a;
  RecordLayout layout;
  format::Split split;
  float norm;  // 1 / sqrt(block)
  int row_tiles;
  unsigned work_blocks, clear_blocks;
};

// Keys of a step, as far as they are not codes.
template <typename S>
struct Columns {
  float key_scale[S::kKeys], value_scale[S::kKeys];  // of a fragment's float16
  int position[S::kKeys];                            // -1: not a key
};

// The keys that a row sees: in codes those from max(first, sinks) to recent, in the tail those below sinks and from recent to end.
struct Seen {
  int first, sinks, recent, end;

  __device__ __forceinline__ int coded_begin() const { return max(first, sinks); }
  __device__ __forceinline__ int recent_begin() const { return max(first, recent); }
};

// Shared memory that is not as large as keys are.
template <typename S>
struct Constants {
  Columns<S> columns[S::kBuffers];
  Seen seen[S::kRows];
  float factor[S::kRows];  // from products with a row's float16 query to base-2 scores; in the end to outputs
  float shift[S::kRows];   // added to those scores
  uint4 table[2];          // of keys and values: levels of codes 8-15 and minus those of codes 0-7, see level_bytes
  uint8_t fives[32];       // 128 + level of 5-bit keys
  float hartley[format::kMaxBlocks];
  const uint8_t* tile[kSlots][S::kKeys / 16];  // the record's tiles that hold the keys of a step, null: no keys
};

__host__ __device__ constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

template <typename S>
struct SharedLayout {
  static constexpr int kQueries = round_up(sizeof(Constants<S>), 128);
  static constexpr int kKeys = kQueries + S::kRows * S::kDim * 2;
  static constexpr int kValues = kKeys + S::kBuffers * S::kFragments * 16;
  static constexpr int kStages = kValues + S::kBuffers * S::kFragments * 16;
  // Sums of a tile of every warp go through float32 rows over everything but the constants.
  static constexpr int kSumRows = 16 * S::kRowWarps;
  __host__ __device__ static constexpr int sum_stride(int d) { return d + 8; }
  static int bytes(int d, int stage_bytes) {
    return std::max(kStages + (S::kStaged ? 2 * stage_bytes : 0), kQueries + 4 * kSumRows * sum_stride(d));
  }
};

// ---- Small things -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((min(max(e, -126), 127) + 127) << 23); }

__device__ __forceinline__ int exponent_of(uint32_t bits) { return static_cast<int>(bits >> 23) - 127; }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) x += __shfl_xor_sync(0xffffffff, x, bit);
  return x;
}

__device__ __forceinline__ uint32_t halves(float low, float high) { return word_of_floats<__half>(low, high); }

// ---- From codes to float16 --------------------------------------------------------------------------------------------

// 128 + level of eight codes, a byte each, from their nibbles in this order. Tables of byte permutations have eight entries, so
// the positive levels, codes 8 to 15, and the negative ones with their sign changed are two; an entry of the other one is 0.
// Codes of 2 and 3 bits are counted from 6 and 4: then these are halves too.
__device__ __forceinline__ uint2 level_bytes(uint32_t nibbles, const uint4& table) {
  const uint32_t high = nibbles ^ 0x88888888;
  return {0x80808080 + select_bytes(table.x, table.y, high) - select_bytes(table.z, table.w, nibbles),
          0x80808080 + select_bytes(table.x, table.y, high >> 16) - select_bytes(table.z, table.w, nibbles >> 16)};
}

// The table that level_bytes reads, of codes of up to 4 bits; thread 0 to 15.
__device__ inline void fill_level_table(uint4* table, int bits, const int8_t* levels, int thread) {
  const int first = 8 - (1 << bits) / 2, code = thread - first;
  const int level = code >= 0 && code < 1 << bits ? format::level_of_code(bits, levels, code) : 0;
  reinterpret_cast<int8_t*>(table)[(thread + 8) % 16] = static_cast<int8_t>(thread < 8 ? -level : level);
}
__host__ __device__ constexpr uint32_t nibble_offset(int bits) {
  return bits == 2 ? 0x66666666 : bits == 3 ? 0x44444444 : 0;
}

// Two float16 levels from the bytes of level_bytes that `selector` names: 0x64__ is 1024 and a byte.
template <uint32_t SELECTOR>
__device__ __forceinline__ uint32_t level_halves(uint32_t bytes) {
  const uint32_t pair = select_bytes(bytes, 0x64646464, SELECTOR), offset = 0xE480E480;  // -(1024 + 128)
  const __half2 level = __hadd2(reinterpret_cast<const __half2&>(pair), reinterpret_cast<const __half2&>(offset));
  return reinterpret_cast<const uint32_t&>(level);
}

// Eight neighbouring channels.
__device__ __forceinline__ uint4 in_order(uint2 bytes) {
  return {level_halves<0x4140>(bytes.x), level_halves<0x4342>(bytes.x), level_halves<0x4140>(bytes.y),
          level_halves<0x4342>(bytes.y)};
}

// Octet `o` of a key: nibbles in `low`; in `high` two bits of 5-bit codes in each byte, or four more bytes. WHOLE: there are whole groups
// of 32 channels only (a branch here would wait for the octets before it, one by one).
template <int BITS, bool WHOLE>
__device__ __forceinline__ uint2 key_codes(const uint8_t* row, const uint8_t* plane, int octets, int o) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(row);
  if constexpr (BITS == 8) return reinterpret_cast<const uint2*>(row)[o];
  if constexpr (BITS == 4) return {words[o], 0};
  if constexpr (BITS == 3) return {spread_key_octet(words, octets, o).low, 0};
  if constexpr (BITS == 2) return {open_nibbles(reinterpret_cast<const uint16_t*>(row)[o], 2), 0};
  const uint32_t* high = reinterpret_cast<const uint32_t*>(plane);
  if (WHOLE || (o | 3) < octets) return {words[o], high[o / 4] >> 2 * (o % 4)};
  const uint32_t b = plane_key_octet(words, high, octets, o).high;
  return {words[o], spread_pairs(b)};
}

// Its levels. fives: 128 + level of 5-bit codes, null for the uniform grid
template <int BITS>
__device__ __forceinline__ uint4 key_levels(uint2 codes, const uint4& table, const uint8_t* fives) {
  if constexpr (BITS == 8) {
    return in_order({codes.x ^ 0x80808080, codes.y ^ 0x80808080});
  } else if constexpr (BITS == 5) {
    uint32_t even = (codes.x & 0x0F0F0F0F) | (codes.y << 4 & 0x10101010);
    uint32_t odd = (codes.x >> 4 & 0x0F0F0F0F) | (codes.y << 3 & 0x10101010);
    if (fives) {
      const auto look_up = [&](uint32_t codes) {
        return fives[codes & 31] | fives[codes >> 8 & 31] << 8 | fives[codes >> 16 & 31] << 16 |
               static_cast<uint32_t>(fives[codes >> 24]) << 24;
      };
      even = look_up(even), odd = look_up(odd);
    } else {  // 128 + 2 code - 31
      even = 2 * even + 0x61616161, odd = 2 * odd + 0x61616161;
    }
    return in_order({select_bytes(even, odd, 0x5140), select_bytes(even, odd, 0x7362)});
  } else {
    return in_order(level_bytes(codes.x + nibble_offset(BITS), table));
  }
}

// Codes of 16 channels, `unit`, of the four tokens that words of `lane` hold, a byte each: channel 16 unit + lane / 4 in the low
// half and the one eight channels on in the high half; those are two words at 8 bits.
template <int BITS>
__device__ __forceinline__ uint2 value_codes(const uint8_t* block, int d, int unit, int lane) {
  const auto word = [&](int byte) { return *reinterpret_cast<const uint32_t*>(block + byte); };
  if constexpr (BITS == 8) {
    const int chunk = unit / 2, in_chunk = min(4, d / 8 - 4 * chunk);
    const int at = 512 * chunk + 4 * in_chunk * lane + 8 * (unit % 2);
    return {word(at), word(at + 4)};
  } else if constexpr (BITS == 4) {
    const int chunk = unit / 4, in_chunk = min(4, d / 16 - 4 * chunk);
    return {word(512 * chunk + 4 * in_chunk * lane + 4 * (unit % 4)), 0};
  } else if constexpr (BITS == 3) {
    const int set = unit / 4, j = unit % 4, rest = d % 64 / 16;
    const int at = 384 * set + (set < d / 64 ? 12 : 4 * rest) * lane;
    if (set == d / 64 || j < 3) return {word(at + 4 * j) & 0x77777777, 0};
    return {(word(at) >> 3 & 0x11111111) | (word(at + 4) >> 2 & 0x22222222) | (word(at + 8) >> 1 & 0x44444444), 0};
  } else {
    const int n = unit / 2, units = d / 32, chunk = n / 4, in_chunk = min(4, units - 4 * chunk);
    uint32_t pairs;
    if (n < units) {
      pairs = word(512 * chunk + 4 * in_chunk * lane + 4 * (n % 4)) >> 4 * (unit % 2);
    } else {
      pairs = word(128 * units + 16 * (lane / 4 % 4) + 4 * (lane % 4)) >> 4 * (lane / 16);
    }
    return {(pairs & 0x03030303) | (pairs << 2 & 0x30303030), 0};
  }
}

// Their levels: the first two tokens of the first channel, its other two, and the same of the second channel.
template <int BITS>
__device__ __forceinline__ uint4 value_levels(uint2 codes, const uint4& table) {
  if constexpr (BITS == 8) return in_order({codes.x ^ 0x80808080, codes.y ^ 0x80808080});
  const uint2 bytes = level_bytes(codes.x + nibble_offset(BITS), table);
  return {level_halves<0x4240>(bytes.x), level_halves<0x4240>(bytes.y), level_halves<0x4341>(bytes.x),
          level_halves<0x4341>(bytes.y)};
}

// ---- Rows of float32 in shared memory, by one warp ----------------------------------------------------------------------

// Calls fn(row, unit) for all units of all rows, neighbouring lanes at neighbouring units.
template <typename Fn>
__device__ __forceinline__ void for_units(int rows, int units, int lane, Fn&& fn) {
  const int at_once = units < 32 ? 32 / units : 1, first = units < 32 ? lane % units : lane;
  const int row = units < 32 ? lane / units : 0;
  if (row >= at_once) return;
  for (int r = row; r < rows; r += at_once) {
    for (int u = first; u < units; u += 32) fn(r, u);
  }
}

__device__ __forceinline__ void load_shared(const float* x, float (&y)[8]) {
  const float4 low = reinterpret_cast<const float4*>(x)[0], high = reinterpret_cast<const float4*>(x)[1];
  y[0] = low.x, y[1] = low.y, y[2] = low.z, y[3] = low.w, y[4] = high.x, y[5] = high.y, y[6] = high.z, y[7] = high.w;
}
__device__ __forceinline__ void store_shared(const float (&y)[8], float* x) {
  reinterpret_cast<float4*>(x)[0] = make_float4(y[0], y[1], y[2], y[3]);
  reinterpret_cast<float4*>(x)[1] = make_float4(y[4], y[5], y[6], y[7]);
}

// core(y) of docs/format.md section 2 but for the factor 1 / sqrt(n), in place. `hartley`: row 1 of the m x m factor
__device__ __forceinline__ void transform_rows(float* rows, int stride, int count, format::Split split,
                                               const float* hartley, int lane) {
  const int d = split.blocks * split.block;
  for_units(count, d / 8, lane, [&](int r, int o) {
    float y[8];
    load_shared(rows + r * stride + 8 * o, y);
#pragma unroll
    for (int h = 1; h < 8; h *= 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if ((i & h) == 0) {
          const float p = y[i], q = y[i + h];
          y[i] = p + q, y[i + h] = p - q;
        }
      }
    }
    store_shared(y, rows + r * stride + 8 * o);
  });
#pragma unroll 1
  for (int h = 2; 4 * h < split.block; h *= 2) {  // in words of four channels
    __syncwarp();
    for_units(count, d / 8, lane, [&](int r, int u) {
      float4* low = reinterpret_cast<float4*>(rows + r * stride) + ((u & -h) * 2 + (u & (h - 1)));
      const float4 p = low[0], q = low[h];
      low[0] = make_float4(p.x + q.x, p.y + q.y, p.z + q.z, p.w + q.w);
      low[h] = make_float4(p.x - q.x, p.y - q.y, p.z - q.z, p.w - q.w);
    });
  }
  __syncwarp();
  if (split.blocks == 1) return;
  for_units(count, split.block, lane, [&](int r, int i) {
    float* y = rows + r * stride + i;
    float in[format::kMaxBlocks];
#pragma unroll
    for (int j = 0; j < format::kMaxBlocks; ++j) in[j] = j < split.blocks ? y[j * split.block] : 0;
#pragma unroll 1
    for (int b = 0; b < split.blocks; ++b) {
      float sum = 0;
      int entry = 0;
#pragma unroll
      for (int j = 0; j < format::kMaxBlocks; ++j) {
        sum += hartley[entry] * in[j];
        entry += b;
        if (entry >= split.blocks) entry -= split.blocks;
      }
      y[b * split.block] = sum;
    }
  });
  __syncwarp();
}

// ---- The block ----------------------------------------------------------------------------------------------------------

// Softmax of a lane's rows so far. Weights are exp2(score - reference); sums of values are in units of 2^unit.
template <typename S>
struct Softmax {
  float reference[S::kLaneRows], total[S::kLaneRows];  // total: what this lane has added up
  int unit = -1000, greatest_unit = -1000;

  __device__ __forceinline__ Softmax() {
#pragma unroll
    for (int i = 0; i < S::kLaneRows; ++i) reference[i] = kNoReference, total[i] = 0;
  }
};

template <typename S>
using Sums = float[S::kTiles][8 * S::kWarpUnits];  // fragments of eight channels after each other
template <typename S>
using Scores = float[S::kTiles][4 * S::kOctets];  // of eight keys

template <typename S>
class Block {
 public:
  __device__ __forceinline__ Block(const Arguments& x, uint8_t* shared, int sequence, int head, int first_row, int rows)
      : x_(x), a_(x.a), shared_(shared), constants_(*reinterpret_cast<Constants<S>*>(shared)), sequence_(sequence),
        head_(head), first_row_(first_row), rows_(rows), thread_(threadIdx.x), warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32), g_(lane_ / 4), t_(lane_ % 4), row_warp_(warp_ % S::kRowWarps),
        column_warp_(warp_ / S::kRowWarps) {}

  __device__ __forceinline__ void run() {
    prepare();
    __syncthreads();
    find_keys();
    Softmax<S> softmax;
    Sums<S> sums = {};
#pragma unroll 1
    for (exact_ = steps_[0] > 0; exact_ >= 0; --exact_) {
      const int steps = exact_ ? steps_[0] : steps_[1];
      if (steps > 0) {
        stage_queries();
        if (S::kHopper) publish_operands();
        __syncthreads();
        attend(steps, softmax, sums);
        __syncthreads();
      }
      if (!exact_) finish(softmax);
      exchange(sums);
    }
  }

 private:
  __device__ __forceinline__ uint4* queries() const {
    return reinterpret_cast<uint4*>(shared_ + SharedLayout<S>::kQueries);
  }
  __device__ __forceinline__ uint4* keys(int step) const {
    return reinterpret_cast<uint4*>(shared_ + SharedLayout<S>::kKeys) + step % S::kBuffers * S::kFragments;
  }
  __device__ __forceinline__ uint4* values(int step) const {
    return reinterpret_cast<uint4*>(shared_ + SharedLayout<S>::kValues) + step % S::kBuffers * S::kFragments;
  }
  __device__ __forceinline__ float* rows() const {
    return reinterpret_cast<float*>(shared_ + SharedLayout<S>::kQueries);
  }
  __device__ __forceinline__ Columns<S>& columns(int step) const { return constants_.columns[step % S::kBuffers]; }

  // The first row of the warps that act with this one, and row i of those that this lane holds a part of.
  __device__ __forceinline__ int unit_row() const { return (S::kHopper ? warp_ / 4 : row_warp_) * S::kUnitRows; }
  __device__ __forceinline__ int lane_row(int i) const {
    return unit_row() + i / 2 * S::kTileRows + (S::kHopper ? warp_ % 4 * 16 : 0) + i % 2 * 8 + g_;
  }

  // The token and query head of a row.
  struct Row {
    int64_t token;
    int head;
  };
  __device__ __forceinline__ Row row(int r) const {
    const int i = (first_row_ + r) / a_.group;
    return {first_query_ + i, head_ * a_.group + first_row_ + r - i * a_.group};
  }

  // ---- What does not change

  __device__ __forceinline__ void prepare() {
    first_query_ = a_.first_query(sequence_);
    const int first_position = a_.length(sequence_) - a_.num_queries(sequence_);
    for (int r = thread_; r < S::kRows; r += S::kThreads) {
      Seen seen{0, 0, 0, 0};
      const int position = first_position + (first_row_ + r) / a_.group;
      if (r < rows_ && position >= 0) {
        const Attention::Tail tail = a_.tail_of(sequence_);
        seen = {a_.first_visible(position), min(tail.sinks, position + 1), a_.recent(tail, position), position + 1};
      }
      constants_.seen[r] = seen;
    }
    if (thread_ < 16) {
      if (x_.layout.key_bits < 5) fill_level_table(&constants_.table[0], x_.layout.key_bits, a_.key_levels, thread_);
      if (x_.layout.value_bits < 5)
        fill_level_table(&constants_.table[1], x_.layout.value_bits, a_.value_levels, thread_);
    }
    if (thread_ < 32 && x_.layout.key_bits == 5) {
      constants_.fives[thread_] = static_cast<uint8_t>(128 + format::level_of_code(5, a_.key_levels, thread_));
    }
    if (thread_ < format::kMaxBlocks) {
      constants_.hartley[thread_] = thread_ < x_.split.blocks ? format::hartley(x_.split.blocks, thread_) : 0;
    }
  }

  // The keys that some row sees. Limits of all runs grow with the position, so the first and the last row know them.
  __device__ __forceinline__ void find_keys() {
    const Seen first = constants_.seen[0], last = constants_.seen[rows_ - 1];
    begin_ = first.coded_begin(), end_ = last.recent;
    aligned_begin_ = begin_ / S::kKeys * S::kKeys;
    steps_[1] = end_ > begin_ ? (end_ - aligned_begin_ + S::kKeys - 1) / S::kKeys : 0;
    steps_[0] = 0;
    const int64_t slot = a_.tail ? a_.tail_slots[sequence_] : -1;
    if (slot < 0 || slot >= a_.max_seqs) return;
    sinks_begin_ = first.first;
    sinks_count_ = max(last.sinks - sinks_begin_, 0);
    recent_begin_ = max(first.recent_begin(), a_.sink_tokens);
    exact_count_ = sinks_count_ + (a_.recent_window > 0 ? max(last.end - recent_begin_, 0) : 0);
    steps_[0] = (exact_count_ + S::kKeys - 1) / S::kKeys;
    tail_row_ = (slot * a_.kv_heads + head_) * (a_.sink_tokens + a_.ring);
  }

  // ---- Queries

  // Are the keys at hand without their center? Codes are; so are exact keys of float32, which float16 can round better then.
  __device__ __forceinline__ bool centered() const {
    return a_.channels.center && (!exact_ || a_.dtype == Dtype::kFloat32);
  }

  // Rows as float16, rotated for codes, unrotated for exact keys. Word ((16-row tile * groups + G) * 2 + i) * 32 + lane is what
  // tensor cores take as A from rows g and g + 8: channels 32 G + 8 t + 4 i and the next, then the two after these. Warpgroups
  // take blocks of eight rows and eight channels: word ((64-row tile * octets + octet) * 64 + row in the tile).
  __device__ __forceinline__ void stage_queries() {
    const int d = x_.layout.head_dim, octets = x_.layout.octets;
    float* scratch = reinterpret_cast<float*>(shared_ + SharedLayout<S>::kKeys) + warp_ * kStageRows * d;
    const bool rotated = !exact_;
    const format::Channels channels = a_.channels.of_head(head_, d);
    const float* center = centered() ? channels.center : nullptr;
    for (int first = kStageRows * warp_; first < S::kRows; first += kStageRows * S::kWarps) {
#pragma unroll
      for (int k = 0; k < kStageRows; ++k) {
        const int r = first + k;
        float dot = 0;
        for (int o = lane_; o < octets; o += 32) {
          float y[8] = {};
          if (r < rows_) {
            const Row at = row(r);
            load_floats_as<8>(a_.q, a_.dtype, at.token * a_.q_token_stride + at.head * a_.q_head_stride + 8 * o, y);
          }
          float other[8];
          if (center) {
            load_floats<8>(center + 8 * o, other);
#pragma unroll
            for (int i = 0; i < 8; ++i) dot += y[i] * other[i];
          }
          if (rotated) {
            load_floats<8>(a_.key_signs + 8 * o, other);
#pragma unroll
            for (int i = 0; i < 8; ++i) y[i] *= other[i];
            if (channels.inverse) {
              load_floats<8>(channels.inverse + 8 * o, other);
#pragma unroll
              for (int i = 0; i < 8; ++i) y[i] *= other[i];
            }
          }
          store_shared(y, scratch + k * d + 8 * o);
        }
        if (center) dot = warp_sum(dot);
        if (lane_ == 0) constants_.shift[r] = dot * a_.softmax_scale * kLog2E;
      }
      __syncwarp();
      if (rotated) transform_rows(scratch, d, kStageRows, x_.split, constants_.hartley, lane_);
#pragma unroll 1
      for (int k = 0; k < kStageRows; ++k) {
        const int r = first + k;
        uint32_t largest = 0;
        for (int c = lane_; c < d; c += 32) largest = max(largest, magnitude_bits(scratch[k * d + c]));
        largest = max_of_lanes(largest);
        const bool finite = largest < kInfinityBits;
        const int e = max(exponent_of(largest), -100);
        const float scale = a_.softmax_scale;
        const float up = !finite || scale == 0 ? 0 : copysignf(power_of_two(14 - e), scale);
        for (int o = lane_; o < S::kDim / 8; o += 32) {
          float y[8] = {};
          if (o < octets && up != 0) load_shared(scratch + k * d + 8 * o, y);
          const uint4 word = {halves(y[0] * up, y[1] * up), halves(y[2] * up, y[3] * up), halves(y[4] * up, y[5] * up),
                              halves(y[6] * up, y[7] * up)};
          if constexpr (S::kHopper) {
            queries()[(r / 64 * S::kOctetsOfDim + o) * 64 + r % 64] = word;
          } else {
            uint32_t* to =
                reinterpret_cast<uint32_t*>(queries() + (r / 16 * S::kGroups + o / 4) * 64 + r % 8 * 4 + o % 4);
            to += r % 16 / 8;
            to[0] = word.x, to[2] = word.y, to[128] = word.z, to[130] = word.w;
          }
        }
        if (lane_ == 0) {
          const float unit = power_of_two(e - 14) * (scale == 0 ? 1.0f : fabsf(scale) * kLog2E);
          constants_.factor[r] = !finite ? quiet_nan() : rotated ? unit * x_.norm : unit;
        }
      }
      __syncwarp();
    }
  }

  // ---- Keys and values of a step

  // Where the keys of `step` are, by the first threads; ready for others after a synchronisation.
  __device__ __forceinline__ const uint8_t* find_tile(int step, int i) const {
    const int shift = x_.layout.tile_shift;
    const int at = ((aligned_begin_ + step * S::kKeys) >> shift) + i, position = at << shift;
    if (position >= end_ || position + (1 << shift) <= begin_) return nullptr;
    const int64_t page = a_.block_table[int64_t{sequence_} * a_.max_pages + (position >> x_.layout.page_shift)];
    if (page < 0 || page >= a_.num_pages) return nullptr;
    const int number = (position & ((1 << x_.layout.page_shift) - 1)) >> shift;
    return a_.pages + (page * a_.kv_heads + head_) * x_.layout.record_bytes + number * x_.layout.tile_bytes;
  }
  __device__ __forceinline__ int tiles() const { return max(S::kKeys >> x_.layout.tile_shift, 1); }

  __device__ __forceinline__ uint8_t* stage(int step) const {
    return shared_ + SharedLayout<S>::kStages + step % 2 * tiles() * x_.layout.tile_bytes;
  }
  __device__ __forceinline__ void copy_codes(int step) {
    const int bytes = x_.layout.tile_bytes;
#pragma unroll 1
    for (int i = 0; i < tiles(); ++i) {
      const uint8_t* from = constants_.tile[step % kSlots][i];
      uint8_t* to = stage(step) + i * bytes;
      if (!from) continue;
#pragma unroll 1
      for (int b = 16 * thread_; b < bytes; b += 16 * S::kThreads) copy_async(to + b, from + b);
    }
  }

  // Key i of a step in its tile; no tile where there is no key.
  struct Place {
    const uint8_t* tile;
    int number;
  };
  __device__ __forceinline__ Place place(int step, int i) const {
    const int shift = x_.layout.tile_shift, mask = (1 << shift) - 1;
    if constexpr (S::kStaged) {
      return {stage(step) + (i >> shift) * x_.layout.tile_bytes, i & mask};
    } else {
      const int at = ((aligned_begin_ + step * S::kKeys) & mask) + i;
      return {constants_.tile[step % kSlots][at >> shift], at & mask};
    }
  }

  // Where octet o of a key is among the words of its step: as tensor cores take B for two steps over channels, or in blocks of
  // eight keys and eight channels for warpgroups.
  static __device__ __forceinline__ int key_word(int key, int o) {
    if (S::kHopper) return o * S::kKeys + key;
    return (o / 4 * S::kOctets + key / 8) * 32 + key % 8 * 4 + o % 4;
  }

  // Where there are no codes, beyond d or of a key that is none, those of another place are expanded: levels are finite, and
  // meet zeros or nothing. All codes are read before anything is stored, so that their reads need not wait for each other.
  template <int BITS, bool WHOLE = false>
  __device__ __forceinline__ void expand_keys(int step) {
    // Eight lanes that store at the same time store 128 neighbouring bytes.
    const int t = S::kHopper ? lane_ / 8 : t_, key = warp_ % S::kOctets * 8 + (S::kHopper ? lane_ % 8 : g_);
    const int first = 4 * (warp_ / S::kOctets) + t;
    constexpr int kStride = 4 * (S::kWarps / S::kOctets);
    const Place from = place(step, key);
    uint2 codes[S::kExpansions] = {};
    if (S::kStaged || from.tile) {
      const uint8_t* row = from.tile + from.number * x_.layout.key_row_bytes;
      const uint8_t* plane = from.tile + x_.layout.key_planes + from.number * x_.layout.key_plane_bytes;
#pragma unroll
      for (int k = 0; k < S::kExpansions; ++k) {
        codes[k] = key_codes<BITS, WHOLE>(row, plane, x_.layout.octets, min(first + k * kStride, x_.layout.octets - 1));
      }
    }
    const uint4 table = constants_.table[0];
    uint4* out = keys(step) + key_word(key, first);
    const auto put = [&](const uint8_t* fives) {
#pragma unroll
      for (int k = 0; k < S::kExpansions; ++k) {
        out[k * key_word(0, kStride)] = key_levels<BITS>(codes[k], table, fives);
      }
    };
    if (BITS == 5 && a_.key_levels) {
      put(constants_.fives);
    } else {
      put(nullptr);
    }
  }

  template <int BITS>
  __device__ __forceinline__ void expand_values(int step) {
    const int block = warp_ % S::kBlocks, first = warp_ / S::kBlocks;
    constexpr int kStride = S::kWarps / S::kBlocks;
    const Place from = place(step, 16 * block);
    uint2 codes[S::kExpansions] = {};
    if (S::kStaged || from.tile) {
      const uint8_t* bytes = from.tile + x_.layout.value_blocks + from.number / 16 * x_.layout.value_block_bytes;
#pragma unroll
      for (int k = 0; k < S::kExpansions; ++k) {
        codes[k] =
            value_codes<BITS>(bytes, x_.layout.head_dim, min(first + k * kStride, x_.layout.octets / 2 - 1), lane_);
      }
    }
    const uint4 table = constants_.table[1];
    uint4* out =
        values(step) + (S::kHopper ? (block * S::kOctetsOfDim + first) * 16 : (block * S::kUnits + first) * 32);
#pragma unroll
    for (int k = 0; k < S::kExpansions; ++k) {
      const uint4 word = value_levels<BITS>(codes[k], table);
      if constexpr (S::kHopper) {  // blocks of eight channels and eight keys
        uint32_t* to = reinterpret_cast<uint32_t*>(out + k * kStride * 16) + lane_;
        to[0] = word.x, to[S::kOctetsOfDim * 32] = word.y, to[32] = word.z, to[S::kOctetsOfDim * 32 + 32] = word.w;
      } else {
        out[k * kStride * 32 + lane_] = word;
      }
    }
  }

  __device__ __forceinline__ void expand_codes(int step) {
    if (thread_ < S::kKeys) {
      Columns<S>& to = columns(step);
      const Place from = place(step, thread_);
      const int position = aligned_begin_ + step * S::kKeys + thread_, shift = x_.layout.tile_shift;
      const int tile = S::kStaged ? thread_ >> shift : 0;
      const bool is_key = position >= begin_ && position < end_ && constants_.tile[step % kSlots][tile];
      float key = 0, value = 0;
      if (is_key) {
        key = __half2float(reinterpret_cast<const __half*>(from.tile + x_.layout.key_scales)[from.number]);
        value = __half2float(reinterpret_cast<const __half*>(from.tile + x_.layout.value_scales)[from.number]);
      }
      to.key_scale[thread_] = key * format::kLevelUnit;
      to.value_scale[thread_] = value * format::kLevelUnit;
      to.position[thread_] = is_key ? position : -1;
    }
    switch (x_.layout.key_bits) {
      case 2: expand_keys<2>(step); break;
      case 3: expand_keys<3>(step); break;
      case 4: expand_keys<4>(step); break;
      case 5:
        if (x_.layout.octets % 4 == 0) {
          expand_keys<5, true>(step);
        } else {
          expand_keys<5>(step);
        }
        break;
      default: expand_keys<8>(step); break;
    }
    switch (x_.layout.value_bits) {
      case 2: expand_values<2>(step); break;
      case 3: expand_values<3>(step); break;
      case 4: expand_values<4>(step); break;
      default: expand_values<8>(step); break;
    }
  }

  // The same from the tail, a vector at a time. One that is not finite becomes zeros with a scale of NaN.
  __device__ __forceinline__ void expand_exact(int step) {
    const int d = x_.layout.head_dim, octets = x_.layout.octets;
    Columns<S>& to = columns(step);
    for (int i = warp_; i < 2 * S::kKeys; i += S::kWarps) {
      const int key = i / 2, index = step * S::kKeys + key;
      const bool is_value = i % 2;
      const int position = index < sinks_count_ ? sinks_begin_ + index : recent_begin_ + index - sinks_count_;
      const bool is_key = index < exact_count_;
      const int row = format::tail_row(position, a_.sink_tokens, a_.ring);
      const int64_t from = ((tail_row_ + row) * 2 + is_value) * d;
      const float* center = !is_value && centered() ? a_.channels.center + int64_t{head_} * d : nullptr;
      const auto load = [&](int o, float (&y)[8]) {
        load_floats_as<8>(a_.tail, a_.dtype, from + 8 * o, y);
        if (!center) return;
        float c[8];
        load_floats<8>(center + 8 * o, c);
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] -= c[i];
      };
      uint32_t largest = 0;
      if (is_key) {
        for (int o = lane_; o < octets; o += 32) {
          float y[8];
          load(o, y);
#pragma unroll
          for (int c = 0; c < 8; ++c) largest = max(largest, magnitude_bits(y[c]));
        }
      }
      largest = max_of_lanes(largest);
      const bool finite = largest < kInfinityBits;
      const int e = max(exponent_of(largest), -100);
      const float up = power_of_two(14 - e);
      for (int o = lane_; o < S::kDim / 8; o += 32) {
        float y[8] = {};
        if (is_key && finite && o < octets) load(o, y);
#pragma unroll
        for (int c = 0; c < 8; ++c) y[c] *= up;
        if (!is_value) {
          keys(step)[key_word(key, o)] = {halves(y[0], y[1]), halves(y[2], y[3]), halves(y[4], y[5]),
                                          halves(y[6], y[7])};
        } else {
          uint4* block = S::kHopper ? values(step) + (key / 8 * S::kOctetsOfDim + o) * 8
                                    : values(step) + (key / 16 * S::kUnits + o / 2) * 32 + key % 8 / 2;
          const int half = S::kHopper ? key % 8 : 4 * (o % 2) + 2 * (key % 16 / 8) + key % 2;
#pragma unroll
          for (int c = 0; c < 8; ++c) {
            reinterpret_cast<__half*>(block + (S::kHopper ? c : 4 * c))[half] = __float2half_rn(y[c]);
          }
        }
      }
      if (lane_ == 0) {
        const float scale = !is_key ? 0 : finite ? power_of_two(e - 14) : quiet_nan();
        (is_value ? to.value_scale : to.key_scale)[key] = scale;
        if (!is_value) to.position[key] = is_key ? position : -1;
      }
    }
  }

  __device__ __forceinline__ void expand(int step) {
    if (exact_) {
      expand_exact(step);
    } else {
      expand_codes(step);
    }
    if (S::kHopper) publish_operands();
  }

  // ---- Steps

  __device__ __forceinline__ void attend(int steps, Softmax<S>& softmax, Sums<S>& sums) {
    constexpr int kFirst = S::kBuffers == 2 ? -1 : 0;  // the step before the first expands its keys
    if (!exact_) {
      for (int i = thread_; i < (kFirst + 3) * tiles(); i += S::kThreads) {
        constants_.tile[i / tiles()][i % tiles()] = find_tile(i / tiles(), i % tiles());
      }
      __syncthreads();
      if (S::kStaged) copy_codes(0);
    }
    // Warps that share a scheduler take turns.
    const bool expands_first = warp_ / 4 % 2 == 0;
#pragma unroll 1
    for (int step = kFirst; step < steps; ++step) {
      if (S::kStaged) wait_for_copies();
      __syncthreads();
      if (S::kStaged && !exact_) copy_codes(step + 2);
      const uint8_t* tile = nullptr;
      if (!exact_ && thread_ < tiles()) tile = find_tile(step + 3, thread_);
      if constexpr (S::kBuffers == 1) {
        expand(step);
        __syncthreads();
        multiply(step, softmax, sums);
      } else {
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          if ((half == 0) == expands_first) {
            if (step + 1 < steps) expand(step + 1);
          } else if (step >= 0) {
            multiply(step, softmax, sums);
          }
        }
      }
      if (!exact_ && thread_ < tiles()) constants_.tile[(step + 3) % kSlots][thread_] = tile;
    }
  }

  // ---- One step of a warp's rows

  // x, of tile i, becomes `instead` where a row does not see the key.
  __device__ __forceinline__ void hide(int i, int step, float (&x)[4 * S::kOctets], float instead) {
    const int2* positions = reinterpret_cast<const int2*>(columns(step).position);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Seen seen = constants_.seen[lane_row(2 * i + h)];
      const int begin = exact_ ? seen.first : seen.coded_begin(), recent = seen.recent_begin();
      const unsigned count = max((exact_ ? seen.sinks : seen.recent) - begin, 0);
      const unsigned recent_count = exact_ ? max(seen.end - recent, 0) : 0;
      const auto sees = [&](int position) {
        return static_cast<unsigned>(position - begin) < count ||
               static_cast<unsigned>(position - recent) < recent_count;
      };
#pragma unroll
      for (int o = 0; o < S::kOctets; ++o) {
        const int2 p = positions[4 * o + t_];
        float* pair = x + 4 * o + 2 * h;
        pair[0] = sees(p.x) ? pair[0] : instead;
        pair[1] = sees(p.y) ? pair[1] : instead;
      }
    }
  }

  __device__ __forceinline__ void multiply(int step, Softmax<S>& softmax, Sums<S>& sums) {
    const int first_row = unit_row();
    if (first_row >= rows_) return;
    const Columns<S>& column = columns(step);

    // Do all rows see all keys, or none any?
    bool hidden = true;
    if (!exact_) {
      const Seen first = constants_.seen[first_row], last = constants_.seen[min(first_row + S::kUnitRows, rows_) - 1];
      const int position = aligned_begin_ + step * S::kKeys;
      if (position + S::kKeys <= first.coded_begin() || position >= last.recent) return;
      hidden = position < last.coded_begin() || position + S::kKeys > first.recent;
    }
    uint32_t largest = 0;
    bool keys_only = true, finite = true;
#pragma unroll
    for (int i = 0; i < S::kKeys; i += 32) {
      if (S::kKeys % 32 == 0 || lane_ < S::kKeys) {
        const uint32_t bits = magnitude_bits(column.value_scale[i + lane_]);
        keys_only = keys_only && column.position[i + lane_] >= 0;
        finite = finite && bits < kInfinityBits;
        if (bits < kInfinityBits) largest = max(largest, bits);
      }
    }
    hidden = hidden || !__all_sync(0xffffffff, keys_only);
    finite = __all_sync(0xffffffff, finite);
    largest = max_of_lanes(largest);

    int unit = softmax.unit;  // of the sums from now on
    if (largest) {
      const int above = exponent_of(largest) - unit;
      if (above < 4 || above > 7) unit = max(exponent_of(largest) - 6, softmax.greatest_unit - 40);
      softmax.greatest_unit = max(softmax.greatest_unit, unit);
    }

    Scores<S> x;
    multiply_keys(step, x);
#pragma unroll
    for (int i = 0; i < S::kTiles; ++i) {
      // Warpgroups go on with the next tile's scores, or the last one's values, while they weigh this one.
      if constexpr (S::kHopper) {
        wait_for_products<S::kTiles - 1>();
        receive<4 * S::kOctets>(x[i]);
      }
      weigh(i, step, hidden, finite, unit, x[i], softmax, sums[i]);
      if constexpr (S::kHopper) multiply_values_of_tile(i, step, x[i], sums[i]);
    }
    softmax.unit = unit;
    if constexpr (S::kHopper) {
      wait_for_products<0>();
#pragma unroll
      for (int i = 0; i < S::kTiles; ++i) receive<S::kDim / 2>(sums[i]);
    } else {
      multiply_values(step, x, sums);
    }
  }

  // Tile i: x, products of queries and levels, become weights times values' scales. Sums follow the reference of the weights.
  __device__ __forceinline__ void weigh(int i, int step, bool hidden, bool finite, int unit, float (&x)[4 * S::kOctets],
                                        Softmax<S>& softmax, float (&sums)[8 * S::kWarpUnits]) {
    const Columns<S>& column = columns(step);

    // Scores: x * factor + shift, with base 2.
    float factor[2], shift[2], top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = lane_row(2 * i + h);
      factor[h] = constants_.factor[r], shift[h] = constants_.shift[r], top[h] = -INFINITY;
    }
#pragma unroll
    for (int o = 0; o < S::kOctets; ++o) {
      const float2 scale = reinterpret_cast<const float2*>(column.key_scale)[4 * o + t_];
      x[4 * o] *= scale.x, x[4 * o + 1] *= scale.y, x[4 * o + 2] *= scale.x, x[4 * o + 3] *= scale.y;
    }
    if (a_.soft_cap > 0) {
      const float cap = a_.soft_cap * kLog2E, inverse = 1 / cap;
#pragma unroll
      for (int k = 0; k < 4 * S::kOctets; ++k) {
        x[k] = cap * tanhf((x[k] * factor[k / 2 % 2] + shift[k / 2 % 2]) * inverse);
      }
      factor[0] = factor[1] = 1, shift[0] = shift[1] = 0;
    }
    if (hidden) hide(i, step, x, -INFINITY);

    // The reference.
#pragma unroll
    for (int o = 0; o < S::kOctets; ++o) {
#pragma unroll
      for (int h = 0; h < 2; ++h) top[h] = fmaxf(top[h], fmaxf(x[4 * o + 2 * h], x[4 * o + 2 * h + 1]));
    }
    bool changed = unit != softmax.unit;
    float raised[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffff, top[h], 1));
      top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffff, top[h], 2));
      const float score = top[h] * factor[h] + shift[h], reference = softmax.reference[2 * i + h];
      raised[h] = score > reference + 6 ? floorf(score) - 2 : reference;
      changed = changed || raised[h] != reference;
    }
    if (__any_sync(0xffffffff, changed)) {
      const float down = power_of_two(softmax.unit - unit);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float keep = exp2_fast(softmax.reference[2 * i + h] - raised[h]);
        softmax.total[2 * i + h] *= keep;
        softmax.reference[2 * i + h] = raised[h];
#pragma unroll
        for (int c = 0; c < 4 * S::kWarpUnits; ++c) sums[c / 2 * 4 + 2 * h + c % 2] *= keep * down;
      }
    }

    // Weights, and their products with the values' scales.
    const float inverse = power_of_two(-unit);
    shift[0] -= raised[0], shift[1] -= raised[1];
#pragma unroll
    for (int o = 0; o < S::kOctets; ++o) {
      float2 scale = reinterpret_cast<const float2*>(column.value_scale)[4 * o + t_];
      scale.x *= inverse, scale.y *= inverse;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* pair = x + 4 * o + 2 * h;
        pair[0] = exp2_fast(pair[0] * factor[h] + shift[h]), pair[1] = exp2_fast(pair[1] * factor[h] + shift[h]);
        softmax.total[2 * i + h] += pair[0] + pair[1];
        pair[0] *= scale.x, pair[1] *= scale.y;
      }
    }
    if (!finite) hide(i, step, x, 0);
  }

  // x = queries * levels of keys
  __device__ __forceinline__ void multiply_keys(int step, Scores<S>& x) {
    if constexpr (S::kHopper) {
      const uint64_t query = operand(queries() + unit_row() * S::kOctetsOfDim, 1024, 128);
      const uint64_t key = operand(keys(step), 16 * S::kKeys, 128);
      begin_products();
#pragma unroll
      for (int i = 0; i < S::kTiles; ++i) {
#pragma unroll
        for (int k = 0; k < S::kUnits; ++k) {
          product_of_operands<S::kKeys>(x[i], advance(query, i * 128 * S::kDim + k * 2048),
                                        advance(key, k * 32 * S::kKeys), k > 0);
        }
        commit_products();
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4 * S::kOctets * S::kTiles; ++i) x[i / (4 * S::kOctets)][i % (4 * S::kOctets)] = 0;
      const uint4* key = keys(step) + lane_;
      const uint4* query = queries() + row_warp_ * S::kTiles * S::kGroups * 64 + lane_;
#pragma unroll(S::kFull ? S::kGroups : 1)
      for (int group = 0; group < S::kGroups; ++group) {
        if (!S::kFull && 32 * group >= x_.layout.head_dim) break;
        uint4 q[S::kTiles][2];
#pragma unroll
        for (int i = 0; i < 2 * S::kTiles; ++i) q[i / 2][i % 2] = query[(i / 2 * S::kGroups + group) * 64 + i % 2 * 32];
#pragma unroll
        for (int o = 0; o < S::kOctets; ++o) {
          const uint4 k = key[(group * S::kOctets + o) * 32];
#pragma unroll
          for (int i = 0; i < S::kTiles; ++i) mma_halves(x[i] + 4 * o, q[i][0], k.x, k.y);
#pragma unroll
          for (int i = 0; i < S::kTiles; ++i) mma_halves(x[i] + 4 * o, q[i][1], k.z, k.w);
        }
      }
    }
  }

  // sums += weights * levels of values
  __device__ __forceinline__ void multiply_values_of_tile(int i, int step, const float (&x)[4 * S::kOctets],
                                                          float (&sums)[8 * S::kWarpUnits]) {
    const uint64_t value = operand(values(step), 128 * S::kOctetsOfDim, 128);
    uint4 p[S::kBlocks];
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) p[block] = weights(x + 8 * block);
    begin_products();
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
      for (int c = 0; c < S::kDim; c += S::kProduct) {
        product_of_registers<S::kProduct>(sums + c / 2, p[block],
                                          advance(value, block * 256 * S::kOctetsOfDim + c * 16));
      }
    }
    commit_products();
  }

  __device__ __forceinline__ void multiply_values(int step, const Scores<S>& x, Sums<S>& sums) {
    const uint4* value = values(step) + lane_ + column_warp_ * 32;
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
      uint4 p[S::kTiles];
#pragma unroll
      for (int i = 0; i < S::kTiles; ++i) p[i] = weights(x[i] + 8 * block);
#pragma unroll
      for (int c = 0; c < S::kWarpUnits; ++c) {
        if (!S::kFull && 16 * (c * S::kColumnWarps + column_warp_) >= x_.layout.head_dim) break;
        const uint4 v = value[(block * S::kUnits + c * S::kColumnWarps) * 32];
#pragma unroll
        for (int i = 0; i < S::kTiles; ++i) {
          mma_halves(sums[i] + 8 * c, p[i], v.x, v.y);
          mma_halves(sums[i] + 8 * c + 4, p[i], v.z, v.w);
        }
      }
    }
  }

  // Of sixteen keys, as A.
  static __device__ __forceinline__ uint4 weights(const float* x) {
    return {halves(x[0], x[1]), halves(x[2], x[3]), halves(x[4], x[5]), halves(x[6], x[7])};
  }

  // ---- Results

  // lse, and what turns sums into outputs, in `factor`.
  __device__ __forceinline__ void finish(Softmax<S>& softmax) {
#pragma unroll
    for (int i = 0; i < S::kLaneRows; ++i) {
      float total = softmax.total[i];
      total += __shfl_xor_sync(0xffffffff, total, 1);
      total += __shfl_xor_sync(0xffffffff, total, 2);
      const int r = lane_row(i);
      if (t_ != 0 || column_warp_ != 0 || r >= rows_) continue;
      const Row at = row(r);
      float top = softmax.reference[i], keep = 1;
      float& lse = a_.lse[at.token * a_.q_heads + at.head];
      if (total == 0) {  // no keys
        constants_.factor[r] = 0;
        lse = a_.sink_logits ? a_.sink_logits[at.head] : -INFINITY;
        continue;
      }
      if (a_.sink_logits) {  // one more score, without a value
        const float sink = a_.sink_logits[at.head] * kLog2E;
        top = fmaxf(top, sink);
        keep = exp2_fast(softmax.reference[i] - top);
        total = total * keep + exp2_fast(sink - top);
      }
      constants_.factor[r] = keep / total * power_of_two(softmax.unit) * x_.norm;
      lse = (top + log2f(total)) * kLn2;
    }
  }

  // Sums, a tile of each warp at a time, become rows of float32 in shared memory. Those of exact keys are rotated and taken
  // back; in the end they are rotated back and written.
  __device__ __forceinline__ void exchange(Sums<S>& sums) {
    const int d = x_.layout.head_dim, stride = SharedLayout<S>::sum_stride(d);
    constexpr int kWarpSums = SharedLayout<S>::kSumRows / S::kWarps;
    const auto for_sums = [&](Sums<S>& all, int tile, auto&& fn) {
#pragma unroll
      for (int i = 0; i < S::kTiles; ++i) {
        if (i != tile) continue;
#pragma unroll
        for (int c = 0; c < 4 * S::kWarpUnits; ++c) {
          const int channel = 16 * (c / 4 * S::kColumnWarps + column_warp_) + c / 2 % 2 * 8 + 2 * t_;
          float2* at = reinterpret_cast<float2*>(rows() + (16 * row_warp_ + c % 2 * 8 + g_) * stride + channel);
          if (channel < d) fn(all[i][2 * c], all[i][2 * c + 1], at);
        }
      }
    };
    float* mine = rows() + warp_ * kWarpSums * stride;
#pragma unroll 1
    for (int tile = 0; tile < S::kTiles; ++tile) {
      __syncthreads();
      for_sums(sums, tile, [](float& low, float& high, float2* at) { *at = {low, high}; });
      __syncthreads();
      if (exact_) {
        for (int r = 0; r < kWarpSums; ++r) {
          for (int c = lane_; c < d; c += 32) mine[r * stride + c] *= a_.value_signs[c] * x_.norm;
        }
        __syncwarp();
      }
      transform_rows(mine, stride, kWarpSums, x_.split, constants_.hartley, lane_);
      if (exact_) {
        __syncthreads();
        for_sums(sums, tile, [](float& low, float& high, float2* at) { low = at->x, high = at->y; });
        continue;
      }
      for (int r = 0; r < kWarpSums; ++r) {
        const int local = warp_ * kWarpSums + r,
                  from = local / S::kTileRows * S::kUnitRows + S::kTileRows * tile + local % S::kTileRows;
        if (from >= rows_) continue;
        const Row at = row(from);
        const float factor = constants_.factor[from];
        const int64_t to = (at.token * a_.q_heads + at.head) * d;
        for (int c = lane_; c < d; c += 32) {
          store_float(a_.out, a_.dtype, to + c, mine[r * stride + c] * (factor * a_.value_signs[c]));
        }
      }
    }
    __syncthreads();
  }

  const Arguments& x_;
  const Attention& a_;
  uint8_t* shared_;
  Constants<S>& constants_;
  int sequence_, head_, first_row_, rows_;
  int thread_, warp_, lane_, g_, t_, row_warp_, column_warp_;

  int64_t first_query_;
  int begin_, end_, aligned_begin_;  // keys in codes
  int sinks_begin_, sinks_count_, recent_begin_, exact_count_;
  int64_t tail_row_;
  int steps_[2];  // over keys in codes, over exact keys; see run
  int exact_;
};

// ---- Kernel and launch --------------------------------------------------------------------------------------------------

// Rows of tokens that belong to no sequence.
__device__ inline void clear_padding(const Attention& a, unsigned block, unsigned blocks) {
  const int first = min(max(a.query_begin[a.seqs], 0), a.tokens), d = a.record.head_dim;
  for (int64_t row = int64_t{first} * a.q_heads + block; row < int64_t{a.tokens} * a.q_heads; row += blocks) {
    for (int c = threadIdx.x; c < d; c += blockDim.x) store_float(a.out, a.dtype, row * d + c, 0);
    if (threadIdx.x == 0) a.lse[row] = -INFINITY;
  }
}

template <typename S>
__device__ __forceinline__ void run_block(const Arguments& x, uint8_t* shared) {
  if (blockIdx.x >= x.work_blocks) return clear_padding(x.a, blockIdx.x - x.work_blocks, x.clear_blocks);
  // Blocks that share keys are neighbours; those with the most keys come first.
  const unsigned tile = x.row_tiles - 1 - blockIdx.x % x.row_tiles, rest = blockIdx.x / x.row_tiles;
  const int head = static_cast<int>(rest % x.a.kv_heads), sequence = static_cast<int>(rest / x.a.kv_heads);
  const int64_t first_row = int64_t{tile} * S::kRows;
  const int64_t rows = int64_t{x.a.num_queries(sequence)} * x.a.group - first_row;
  if (rows <= 0) return;
  Block<S>(x, shared, sequence, head, static_cast<int>(first_row), static_cast<int>(min(rows, int64_t{S::kRows})))
      .run();
}

// Devices with products of warpgroups use nothing else for the shapes that have both.
template <typename S>
constexpr bool kCompiled = S::kHopper ? kWarpgroupProducts : !(S::kStaged && kWarpgroupProducts);

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1) general_kernel(const __grid_constant__ Arguments x) {
  extern __shared__ uint4 shared[];
  if constexpr (kCompiled<S>) run_block<S>(x, reinterpret_cast<uint8_t*>(shared));
}

// False where the device has too little shared memory for this shape.
template <typename S>
bool launch_shape(const Attention& a, Arguments& x, int most_shared, cudaStream_t stream) {
  const int tile_tokens = a.record.tile_tokens();
  if (S::kStaged && S::kKeys < tile_tokens) return false;
  const int bytes = SharedLayout<S>::bytes(x.layout.head_dim, S::kKeys / tile_tokens * x.layout.tile_bytes);
  if (bytes > most_shared) return false;
  const auto kernel = general_kernel<S>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "paged_attention");
  const int64_t rows = int64_t{std::min(a.max_q_len, a.tokens)} * a.group;
  x.row_tiles = static_cast<int>((rows + S::kRows - 1) / S::kRows);
  x.work_blocks = num_blocks(int64_t{x.row_tiles} * a.kv_heads * a.seqs, 1);
  x.clear_blocks = a.query_begin ? static_cast<unsigned>(std::min(a.tokens, 64)) : 0;
  kernel<<<num_blocks(int64_t{x.work_blocks} + x.clear_blocks, 1), S::kThreads, bytes, stream>>>(x);
  check_cuda(cudaGetLastError(), "paged_attention");
  return true;
}

template <bool HOPPER>
bool launch_large(const Attention& a, Arguments& x, int most_shared, cudaStream_t stream) {
  const int d = x.layout.head_dim;
  if (d <= 64)
    return launch_shape<Shape<64, HOPPER ? 1 : 2, HOPPER ? 16 : 8, 1, 64, 2, true, HOPPER>>(a, x, most_shared, stream);
  if (d <= 96) return launch_shape<Shape<96, 2, 8, 1, 64, 2, true, HOPPER>>(a, x, most_shared, stream);
  if (d <= 128) return launch_shape<Shape<128, 2, 8, 1, 64, 2, true, HOPPER>>(a, x, most_shared, stream);
  if (d <= 192) return launch_shape<Shape<192, 1, 8, 1, 32, 2, true, HOPPER>>(a, x, most_shared, stream);
  if (d <= 256) return launch_shape<Shape<256, 1, 8, 1, 32, 2, true, HOPPER>>(a, x, most_shared, stream);
  return false;
}

// A device of compute capability 9.0, and code for 9.0a.
bool has_warpgroup_products(int device) {
  int major = 0, minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "device attribute");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "device attribute");
  return major == 9 && minor == 0 && std::string(TURBOQUANT_CUDA_ARCHITECTURES).find("9.0a") != std::string::npos;
}

}  // namespace

void attend_general(const Attention& a, int device, cudaStream_t stream) {
  int most = 0;
  check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "device attribute");
  const format::Split split = format::split_dim(a.record.head_dim);
  int log_block = 0;
  while (1 << log_block < split.block) ++log_block;
  Arguments x{a, RecordLayout(a.record), split, block_norm(log_block), 0, 0, 0};
  const int d = a.record.head_dim;

  const bool done =
      has_warpgroup_products(device) ? launch_large<true>(a, x, most, stream) : launch_large<false>(a, x, most, stream);
  if (done) return;
  // Few rows and keys: for devices with less shared memory, and for large d.
  bool small = false;
  if (d <= 128) small = launch_shape<Shape<128, 2, 4, 1, 16, 2, false>>(a, x, most, stream);
  if (!small && d <= 256) small = launch_shape<Shape<256, 1, 2, 2, 16, 2, false>>(a, x, most, stream);
  if (!small) small = launch_shape<Shape<1024, 1, 1, 4, 16, 1, false>>(a, x, most, stream);
  STD_TORCH_CHECK(small, "paged_attention of head_dim ", d, " needs more shared memory than the ", most,
                  " bytes that a block has on this device: supported there are up to 256");
}

}  // namespace turboquant::cuda
