// Sketches with a dense projection on tensor cores, from sm_80 on; qjl.cu has the kernel for older devices.
//
// The format sums products of float32 in an order of its own, but only the signs of these sums are stored, and few sums
// are so close to zero that the order or the precision decides their sign. So tensor cores multiply pairs of bfloat16
// whose sum is nearly the float32 number, and sums that may be one of those few are computed again in the order of the
// format.
//
// The bound for such a sum, in units of |vector| |row of the projection|, which is at least the sum of all magnitudes
// (Cauchy and Schwarz):
//   * Two bfloat16 numbers hold 16 bits of a float32 number and leave at most 2^-18 of it, and so does the product of
//     the two lower ones, which is left out: 3 * 2^-18 together.
//   * The format's sum is off by 2^-24 for each of its levels, blocks and products: at most 23 * 2^-24.
//   * Of tensor cores we assume as little as score/sketch_bulk.cu does: a product of 16 channels adds four elements at
//     a time to the sum so far, and truncates each of them, the sum and the result to 24 bits of the largest one, all
//     in one direction. That is 24 * 2^-23 for each pair of parts of 16 channels that is multiplied. Sums of 128
//     channels begin at 0, so that it does not grow with the channels, and are then added in float32.
// With 128 channels of bfloat16 that is 2^-14.1. The standard deviation of a random sum is 1 / sqrt(d) of the unit, so
// 0.05% of them are within the bound; with 1,536 channels 0.2%.
#include "cuda/score/dense_sketch.cuh"

#include <algorithm>

#include "cuda/codec/codebook.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace dense_sketch {

// A tile of vectors times a tile of rows of the projection, kChannels channels at a time.
struct Tile {
  static constexpr int kWarps = 8, kThreads = 32 * kWarps, kBlocks = 2;  // blocks of a multiprocessor
  static constexpr int kVectors = 64, kRows = 128, kChannels = 128;
  // A warp has 32 vectors and kOwnRows rows.
  static constexpr int kRowWarps = kWarps / (kVectors / 32), kOwnRows = kRows / kRowWarps;
  static constexpr int kWords = kRows / 32;      // of 32 signs of a vector
  static constexpr int kChunks = kChannels / 8;  // of 16 bytes, of a row in shared memory
  // Both have a second part, the lower bfloat16 numbers; that of bfloat16 vectors is not used.
  static constexpr int kSharedBytes = 2 * (kRows + kVectors) * kChannels * 2;

  // The place of 16 bytes of a row: neighbouring rows have them in different banks.
  static __device__ __forceinline__ int place(int row, int chunk) { return row * kChunks + (chunk ^ row % 8); }
};

constexpr int kSumLanes = 16;  // lanes that compute a sum in the order of the format

// What a call is about.
struct Dense {
  const void* vectors;  // rows of d elements of `dtype`
  Rows rows;
  Dtype dtype;
  const float* projection;  // [m, d]
  int m, d, blocks, n;      // d = blocks * n
  uint8_t* bits;            // [rows, m / 8]
  float* norms;             // [rows]

  // Whether vectors are two bfloat16 numbers per channel.
  __device__ __forceinline__ bool split() const { return dtype != Dtype::kBFloat16; }
};

// What a block notes about its vectors and rows.
struct Notes {
  int64_t start[Tile::kVectors];  // where vectors begin, in elements; -1: there are no more
  float down[Tile::kVectors];     // the power of two of each vector that the format multiplies it by
  float length[Tile::kVectors];   // -1 of zeros; NaN where all sums are to be computed again
  bool broken[Tile::kVectors];    // has a NaN or an infinity
  float square[Tile::kRows];      // of the length of each row
  float bound[Tile::kRows];       // sums up to length * bound are computed again
};

// The signs of sums take the place of the vectors in shared memory.
struct Signs {
  uint32_t positive[Tile::kVectors][Tile::kWords];  // or zero
  uint32_t doubts[Tile::kVectors][Tile::kWords];    // is computed again
};

// The sum of neighbours in pairs, pairs of these, .., of eight numbers in each of `lanes` neighbouring lanes, a power
// of two up to kSumLanes; all of them have the result.
__device__ __forceinline__ float pairwise_sum(float (&x)[8], int lanes) {
#pragma unroll
  for (int h = 1; h < 8; h *= 2) {
#pragma unroll
    for (int k = 0; k < 8; k += 2 * h) x[k] = __fadd_rn(x[k], x[k + h]);
  }
  float sum = x[0];
#pragma unroll
  for (int bit = 1; bit < kSumLanes; bit *= 2) {
    const float other = __shfl_xor_sync(0xffffffff, sum, bit);
    if (bit < lanes) sum = __fadd_rn(sum, other);
  }
  return sum;
}

// The sum of d products in the order of the format: pairwise in a block, block after block. Sixteen lanes have eight
// channels each at a time, for which f(channel, products) is called; all of them have the result.
template <typename F>
__device__ __forceinline__ float sum_in_order(int blocks, int n, int lane, F&& f) {
  constexpr int kLevels = 6;  // of sums of 128 channels: n <= 4096
  const int lanes = min(kSumLanes, n / 8);
  float total = 0;
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    float waiting[kLevels], sum = 0;  // sums without a right neighbour yet, as the digits of a binary counter
#pragma unroll 1
    for (int i = 0; 8 * i * lanes < n; ++i) {
      float x[8];
      f(block * n + 8 * (i * lanes + lane % lanes), x);
      sum = pairwise_sum(x, lanes);
#pragma unroll
      for (int level = 0; level < kLevels; ++level) {
        if (!(i >> level & 1)) {
          waiting[level] = sum;
          break;
        }
        sum = __fadd_rn(waiting[level], sum);
      }
    }
    total = block ? __fadd_rn(total, sum) : sum;
  }
  return total;
}

// Eight floats as two times eight bfloat16 numbers, whose sums are nearly these.
__device__ __forceinline__ void split_floats(const float* x, uint4& high, uint4& low) {
  uint32_t h[4], l[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    h[i] = word_of_floats<__nv_bfloat16>(x[2 * i], x[2 * i + 1]);
    l[i] = word_of_floats<__nv_bfloat16>(x[2 * i] - __uint_as_float(h[i] << 16),
                                         x[2 * i + 1] - __uint_as_float(h[i] & 0xFFFF0000));
  }
  high = make_uint4(h[0], h[1], h[2], h[3]), low = make_uint4(l[0], l[1], l[2], l[3]);
}

// Notes vector v of a tile, whose largest magnitude is `most`, and stores its norm if it should.
__device__ __forceinline__ void note_vector(const Dense& a, int64_t first, int v, uint32_t most, float norm,
                                            bool stores, Notes& notes) {
  const bool real = first + v < a.rows.count, broken = most >= kInfinityBits;
  notes.start[v] = real ? a.rows(first + v) : -1;
  notes.down[v] = power_of_two(-prescale_exponent(most)), notes.broken[v] = broken;
  // Sums over vectors of other lengths may leave what bfloat16 and float32 can hold.
  const bool plain = norm >= 0x1p-30f && norm <= 0x1p50f;
  notes.length[v] = !real || most == 0 ? -1.0f : plain ? norm : quiet_nan();
  if (stores && real) a.norms[first + v] = broken ? quiet_nan() : norm;
}

// Eight channels of the vectors that a thread copies: chunk threadIdx.x % kChunks of vectors threadIdx.x / kChunks,
// kAtOnce further, and so on.
struct OwnChannels {
  static constexpr int kAtOnce = Tile::kThreads / Tile::kChunks, kSteps = Tile::kVectors / kAtOnce;
  uint4 words[kSteps][2];  // as they are in memory; of 16 bits only the first four

  static __device__ __forceinline__ int vector(int k) { return threadIdx.x / Tile::kChunks + k * kAtOnce; }

  // The channels from `base` on of vectors from `first` on, zeros where there are no vectors or channels.
  __device__ __forceinline__ void load(const Dense& a, int64_t first, int base) {
    const int c = base + 8 * (threadIdx.x % Tile::kChunks);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      words[k][0] = words[k][1] = make_uint4(0, 0, 0, 0);
      if (first + vector(k) >= a.rows.count || c >= a.d) continue;
      const bool full = a.dtype == Dtype::kFloat32;
      const int64_t at = (a.rows(first + vector(k)) + c) * (full ? 4 : 2);
      const auto* from = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(a.vectors) + at);
      words[k][0] = __ldg(from);
      if (full) words[k][1] = __ldg(from + 1);
    }
  }

  // Stores them to shared memory. Notes vectors, too, whose norm needs no other channels and no power of two; returns
  // those of the thread that are left, a bit for each. whole: these are the vectors' only channels
  __device__ __forceinline__ unsigned store(const Dense& a, int64_t first, bool whole, bool stores_norms, uint4* to,
                                            Notes& notes) const {
    unsigned left = (1u << kSteps) - 1;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint4 &w = words[k][0], &z = words[k][1];
      const uint32_t low[4] = {w.x, w.y, w.z, w.w}, high[4] = {z.x, z.y, z.z, z.w};
      float x[8];
      if (a.dtype == Dtype::kBFloat16) {
        floats_of_words<__nv_bfloat16>(low, x);
      } else if (a.dtype == Dtype::kFloat16) {
        floats_of_words<__half>(low, x);
      } else {
        floats_of_words<float>(low, x), floats_of_words<float>(high, x + 4);
      }
      uint4* at = to + Tile::place(vector(k), threadIdx.x % Tile::kChunks);
      uint4 rest;
      split_floats(x, at[0], rest);
      if (a.split()) at[Tile::kVectors * Tile::kChunks] = rest;
      if (!whole) continue;

      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) most = max(most, magnitude_bits(x[i])), x[i] = __fmul_rn(x[i], x[i]);
      most = max_of_lanes<kSumLanes>(most);
      const float sum = pairwise_sum(x, a.d / 8);
      // Within these bounds the power of two changes no rounding that matters, as in qjl.cu.
      const bool plain = (sum >= 0x1p-60f && sum <= 0x1p100f) || threadIdx.x % kSumLanes * 8 >= a.d;
      if (!__all_sync(0xffffffff, plain)) continue;
      left &= ~(1u << k);
      if (threadIdx.x % kSumLanes == 0) {
        note_vector(a, first, vector(k), most, __fsqrt_rn(sum), stores_norms, notes);
      }
    }
    return left;
  }
};
static_assert(kSumLanes == Tile::kChunks);

// Notes vectors of a tile, sixteen lanes each. left: of those of a thread, a bit for each. stores: norms, too
__device__ __forceinline__ void note_vectors(const Dense& a, int64_t first, unsigned left, bool stores, Notes& notes) {
  const int lane = threadIdx.x % kSumLanes;
#pragma unroll 1
  for (int k = 0; left >> k; ++k) {
    if (!(left >> k & 1)) continue;
    const int v = OwnChannels::vector(k);
    const int64_t start = a.rows(first + v < a.rows.count ? first + v : first);
    uint32_t most = 0;
#pragma unroll 1
    for (int c = 8 * lane; c < a.d; c += 8 * kSumLanes) {
      float x[8];
      load_floats_as<8>(a.vectors, a.dtype, start + c, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) most = max(most, magnitude_bits(x[i]));
    }
    most = max_of_lanes<kSumLanes>(most);
    const float down = power_of_two(-prescale_exponent(most)), up = power_of_two(prescale_exponent(most));
    const float sum = sum_in_order(a.blocks, a.n, lane, [&](int c, float (&x)[8]) {
      load_floats_as<8>(a.vectors, a.dtype, start + c, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(x[i], down), x[i] = __fmul_rn(x[i], x[i]);
    });
    if (lane == 0) note_vector(a, first, v, most, __fmul_rn(__fsqrt_rn(sum), up), stores, notes);
  }
}

// Channels base to base + width of the rows of the projection from row `first` on, and the sums of their squares.
__device__ __forceinline__ void load_projection(const Dense& a, int first, int base, int width, Notes& notes,
                                                uint4* to) {
  constexpr int kSteps = Tile::kRows * Tile::kChunks / Tile::kThreads, kRowsAtOnce = Tile::kThreads / Tile::kChunks;
  const int chunk = threadIdx.x % Tile::kChunks;
#pragma unroll 4
  for (int k = 0; k < kSteps; ++k) {
    const int r = threadIdx.x / Tile::kChunks + k * kRowsAtOnce, at = Tile::place(r, chunk);
    float p[8] = {}, square = 0;
    if (first + r < a.m && 8 * chunk < width) {
      load_floats<8>(a.projection + int64_t{first + r} * a.d + base + 8 * chunk, p);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) square = fmaf(p[i], p[i], square);
    square = sum_of_lanes<Tile::kChunks>(square);
    if (chunk == 0) notes.square[r] = base ? notes.square[r] + square : square;
    split_floats(p, to[at], to[at + Tile::kRows * Tile::kChunks]);
  }
}

// Notes up to where sums of rows are in doubt.
__device__ __forceinline__ void note_rows(const Dense& a, Notes& notes) {
  const int chunks = ceil_div(a.d, Tile::kChannels), products = Tile::kChannels / 16 * (a.split() ? 3 : 2);
  const float unit = 1.01f * (static_cast<float>(products * 24 + chunks) * 0x1p-23f + 3 * 0x1p-18f + 23 * 0x1p-24f);
  if (threadIdx.x >= Tile::kRows) return;
  const float square = notes.square[threadIdx.x];
  // Numbers of other sizes may leave what bfloat16 and sums of float32 can hold.
  const bool plain = square >= 0x1p-100f && square <= 0x1p100f;
  notes.bound[threadIdx.x] = plain ? unit * sqrtf(square) : INFINITY;
}

// Adds the products of `width` channels to a warp's sums.
__device__ __forceinline__ void multiply(bool split, const uint4* vectors, const uint4* rows, int width,
                                         int first_vector, int first_row, int lane,
                                         float (&sums)[2][Tile::kOwnRows / 8][4]) {
  const int row_of_lane = lane % 8 + lane / 16 * 8;  // of two tiles of eight rows
  float own[2][Tile::kOwnRows / 8][4] = {};          // of these channels
#pragma unroll 1
  for (int k = 0; 16 * k < width; ++k) {
    uint4 x[2], rest[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4* at = vectors + Tile::place(first_vector + 16 * i + lane % 16, 2 * k + lane / 16);
      x[i] = load_tiles(at);
      if (split) rest[i] = load_tiles(at + Tile::kVectors * Tile::kChunks);
    }
#pragma unroll
    for (int j = 0; j < Tile::kOwnRows / 8; j += 2) {
      const int at = Tile::place(first_row + 8 * j + row_of_lane, 2 * k + lane / 8 % 2);
      const uint4 high = load_tiles(rows + at), low = load_tiles(rows + at + Tile::kRows * Tile::kChunks);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mma_floats<__nv_bfloat16>(own[i][j], x[i], low.x, low.y);
        mma_floats<__nv_bfloat16>(own[i][j + 1], x[i], low.z, low.w);
        if (split) {
          mma_floats<__nv_bfloat16>(own[i][j], rest[i], high.x, high.y);
          mma_floats<__nv_bfloat16>(own[i][j + 1], rest[i], high.z, high.w);
        }
        mma_floats<__nv_bfloat16>(own[i][j], x[i], high.x, high.y);
        mma_floats<__nv_bfloat16>(own[i][j + 1], x[i], high.z, high.w);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kOwnRows / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[i][j][e] += own[i][j][e];
    }
  }
}

// Notes the signs of a warp's sums, and which of them are in doubt.
__device__ __forceinline__ void note_signs(const float (&sums)[2][Tile::kOwnRows / 8][4], int first_vector,
                                           int first_row, int lane, const Notes& notes, Signs& out) {
  const int t = lane % 4;
#pragma unroll
  for (int word = 0; word < Tile::kOwnRows / 32; ++word) {
    float2 bound[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      bound[j] = *reinterpret_cast<const float2*>(&notes.bound[first_row + 32 * word + 8 * j + 2 * t]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int v = first_vector + 16 * (i / 2) + 8 * (i % 2) + lane / 4;
      const float length = notes.length[v];
      uint32_t signs = 0, doubts = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float *of = sums[i / 2][4 * word + j] + 2 * (i % 2), x = of[0], y = of[1];
        signs |= (static_cast<uint32_t>(x >= 0) | static_cast<uint32_t>(y >= 0) << 1) << 8 * j;
        doubts |= (static_cast<uint32_t>(!(fabsf(x) > length * bound[j].x)) |
                   static_cast<uint32_t>(!(fabsf(y) > length * bound[j].y)) << 1)
                  << 8 * j;
      }
      signs <<= 2 * t, doubts <<= 2 * t;
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) {
        signs |= __shfl_xor_sync(0xffffffff, signs, bit), doubts |= __shfl_xor_sync(0xffffffff, doubts, bit);
      }
      if (t == 0) out.positive[v][first_row / 32 + word] = signs, out.doubts[v][first_row / 32 + word] = doubts;
    }
  }
}

// Computes the sums again that are in doubt. The warps of a block share the words of 32 sums.
__device__ __forceinline__ void settle_doubts(const Dense& a, int first_row, int warp, int lane, const Notes& notes,
                                              Signs& of) {
  constexpr int kOwnWords = Tile::kVectors * Tile::kWords / Tile::kWarps;
  static_assert(kOwnWords % 32 == 0);
#pragma unroll 1
  for (int from = warp * kOwnWords; from < (warp + 1) * kOwnWords; from += 32) {
    const int mine = from + lane;
    const bool real = notes.start[mine / Tile::kWords] >= 0 && !notes.broken[mine / Tile::kWords];
    unsigned some = __ballot_sync(0xffffffff, real && of.doubts[mine / Tile::kWords][mine % Tile::kWords]);
    while (some) {
      const int word = from + __ffs(static_cast<int>(some)) - 1, v = word / Tile::kWords;
      some &= some - 1;
      uint32_t doubts = of.doubts[v][word % Tile::kWords], positive = of.positive[v][word % Tile::kWords];
      const int first = first_row + word % Tile::kWords * 32;
      if (first + 32 > a.m) doubts &= (1u << max(a.m - first, 0)) - 1;
      while (doubts) {  // two at a time, each by half of the lanes
        const uint32_t rest = doubts & (doubts - 1);
        const int bit = __ffs(static_cast<int>(lane >= kSumLanes && rest ? rest : doubts)) - 1;
        doubts = rest & (rest - 1);
        const float* p = a.projection + int64_t{first + bit} * a.d;
        const float sum = sum_in_order(a.blocks, a.n, lane, [&](int c, float (&x)[8]) {
          float q[8];
          load_floats_as<8>(a.vectors, a.dtype, notes.start[v] + c, x), load_floats<8>(p + c, q);
#pragma unroll
          for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(__fmul_rn(x[i], notes.down[v]), q[i]);
        });
        const uint32_t mask = 1u << bit, now = sum >= 0 ? mask : 0;
        const uint32_t other_mask = __shfl_xor_sync(0xffffffff, mask, kSumLanes);
        const uint32_t other = __shfl_xor_sync(0xffffffff, now, kSumLanes);
        positive = (positive & ~(mask | other_mask)) | now | other;
      }
      __syncwarp();
      if (lane == 0) of.positive[v][word % Tile::kWords] = positive;
    }
  }
}

__device__ __forceinline__ void store_signs(const Dense& a, int64_t first, int first_row, const Notes& notes,
                                            const Signs& of) {
  const int row_bytes = a.m / 8, bytes = min(Tile::kRows, a.m - first_row) / 8;
  const int count = static_cast<int>(min(int64_t{Tile::kVectors}, a.rows.count - first));
  uint8_t* out = a.bits + first * row_bytes + first_row / 8;
  if (row_bytes % 4 == 0) {
    for (int i = threadIdx.x; i < count * Tile::kWords; i += Tile::kThreads) {
      const int v = i / Tile::kWords, word = i % Tile::kWords;
      if (4 * word >= bytes) continue;
      *reinterpret_cast<uint32_t*>(out + int64_t{v} * row_bytes + 4 * word) =
          notes.broken[v] ? 0 : of.positive[v][word];
    }
    return;
  }
  for (int i = threadIdx.x; i < count * Tile::kRows / 8; i += Tile::kThreads) {
    const int v = i / (Tile::kRows / 8), byte = i % (Tile::kRows / 8);
    if (byte >= bytes) continue;
    out[int64_t{v} * row_bytes + byte] =
        notes.broken[v] ? 0 : static_cast<uint8_t>(of.positive[v][byte / 4] >> byte % 4 * 8);
  }
}

// A block has neighbouring items, each a tile of vectors and one of rows. Rows of up to kChannels channels stay in
// shared memory while only the vectors change; of longer ones, the vectors' notes stay while only the rows change. The
// vectors' next channels are on their way to registers while these are multiplied.
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) dense_tile_kernel(const __grid_constant__ Dense a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  // choose_sketch asks
  extern __shared__ uint4 dynamic[];
  uint4 *rows = dynamic, *vectors = dynamic + 2 * Tile::kRows * Tile::kChunks;
  Signs& signs = *reinterpret_cast<Signs*>(vectors);
  __shared__ Notes notes;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const int first_vector = warp / Tile::kRowWarps * 32, first_own_row = warp % Tile::kRowWarps * Tile::kOwnRows;

  const bool short_rows = a.d <= Tile::kChannels;
  const int64_t vector_tiles = (a.rows.count + Tile::kVectors - 1) / Tile::kVectors;
  const int row_tiles = ceil_div(a.m, Tile::kRows);
  const int64_t items = vector_tiles * row_tiles, each = (items + gridDim.x - 1) / gridDim.x;
  const int64_t begin = blockIdx.x * each, end = min(items, begin + each);
  if (begin >= end) return;
  int64_t tile = short_rows ? begin % vector_tiles : begin / row_tiles;
  int row_tile = static_cast<int>(short_rows ? begin / vector_tiles : begin % row_tiles);
  OwnChannels own;
  own.load(a, tile * Tile::kVectors, 0);
  bool new_rows = true, new_vectors = true;
#pragma unroll 1
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = tile * Tile::kVectors;
    const int first_row = row_tile * Tile::kRows;
    const bool stores_norms = row_tile == 0;
    float sums[2][Tile::kOwnRows / 8][4] = {};
#pragma unroll 1
    for (int base = 0; base < a.d; base += Tile::kChannels) {
      const int width = min(Tile::kChannels, a.d - base);
      __syncthreads();  // what was in shared memory is used up
      const bool noting = base == 0 && new_vectors;
      const unsigned left = own.store(a, first, noting && short_rows && a.blocks == 1, stores_norms, vectors, notes);
      if (new_rows) load_projection(a, first_row, base, width, notes, rows);
      if (noting) note_vectors(a, first, left, stores_norms, notes);
      __syncthreads();
      int64_t next = tile;
      if (base + Tile::kChannels >= a.d) {
        if (short_rows) {
          if (++tile == vector_tiles) tile = 0, ++row_tile;
        } else if (++row_tile == row_tiles) {
          row_tile = 0, ++tile;
        }
        next = tile;
      }
      if (item + 1 < end || base + Tile::kChannels < a.d) {
        own.load(a, next * Tile::kVectors, base + Tile::kChannels < a.d ? base + Tile::kChannels : 0);
      }
      multiply(a.split(), vectors, rows, width, first_vector, first_own_row, lane, sums);
    }
    if (new_rows) note_rows(a, notes);
    new_rows = !short_rows || row_tile * Tile::kRows != first_row, new_vectors = tile * Tile::kVectors != first;
    __syncthreads();
    note_signs(sums, first_vector, first_own_row, lane, notes, signs);
    __syncthreads();
    settle_doubts(a, first_row, warp, lane, notes, signs);
    __syncthreads();
    store_signs(a, first, first_row, notes, signs);
  }
#endif
}

}  // namespace dense_sketch

void launch_dense_sketch(const void* x, const Rows& rows, Dtype dtype, format::Split split, const float* projection,
                         int m, uint8_t* bits, float* norms, const DeviceFacts& facts, int device,
                         cudaStream_t stream) {
  using namespace dense_sketch;
  const Dense a{x, rows, dtype, projection, m, split.blocks * split.block, split.blocks, split.block, bits, norms};
  allow_shared_memory(reinterpret_cast<const void*>(dense_tile_kernel), device, Tile::kSharedBytes);
  const int64_t items = divide_up(rows.count, Tile::kVectors) * divide_up(m, Tile::kRows);
  const int64_t blocks = std::min<int64_t>(items, int64_t{facts.multiprocessors} * Tile::kBlocks);
  dense_tile_kernel<<<static_cast<unsigned>(blocks), Tile::kThreads, Tile::kSharedBytes, stream>>>(a);
}

}  // namespace turboquant::cuda
