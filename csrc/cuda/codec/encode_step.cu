// The kernel for few vectors (codec/encode_bulk.cuh has that for many): the keys and values of a decode step into page records.
//
// Such a launch is over before its instructions are in a cache, so what counts is how many there are on the way through, and how
// many of them wait for each other. A warp holds a vector, four channels in a lane, one block keys or values:
//
// * Parameters are few, and lie in two lines of the constant cache: what of them is not there yet arrives at once.
// * Everything that is read is on its way before the first of it is waited for.
// * One candidate, the usual case, has a kernel of its own, in which no warp waits for another.
// * Where the tiles have tables, boundaries of a candidate are compared with two coordinates at once: 16-bit integers below
//   2^15 - 2^10 have the order of the float16 numbers of the same bits. A true comparison is 65535 in 16 bits, which chooses the
//   boundary that decides the next bit of a magnitude, and four magnitudes make the selector of a byte permutation, which looks
//   up levels.
// * A candidate's sums end in the lane of its number, so that lanes divide for all candidates at once; the lane whose merit
//   is greatest stores the scale.
// * What a record keeps of four channels is put together by shuffles and leaves from registers.
//
// The bytes are those of codec/generic.cuh.
#include <cuda_fp16.h>

#include "cuda/codec/bulk.cuh"
#include "cuda/codec/encode_bulk.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kWarps = 8;   // of a block: one block on a multiprocessor is on its way sooner than two
constexpr int kUnroll = 4;  // candidates whose waits overlap
static_assert(kMostCandidates % kUnroll == 0);
constexpr int kMostBoundaries = 16;
constexpr uint32_t kBeyond = 0x7C00;  // no coordinate is there

template <int LOG_N>
using FewTraits = HadamardTraits<1, LOG_N, (1 << LOG_N) / 4 < 32 ? (1 << LOG_N) / 4 : 32, 4>;

// ---- Parameters -------------------------------------------------------------------------------------------------------

// Keys or values.
struct FewSource {
  const uint8_t* data;
  const float* signs;
  const float *center, *factor;  // [heads, d], null where there is none
  const int8_t* levels;          // [2^bits], null for the uniform grid
  const float* steps;            // [num_steps]
  uint32_t token_stride, head_stride;
  uint16_t section, scales;  // of a tile: planes of keys or blocks of values, and scales
  uint8_t bits, num_steps, scale_mode;
};

// As Tail.
struct FewTail {
  uint8_t* data;
  const int64_t* slots;
  const int32_t *lengths, *begins;
  int seqs, rows, sink_tokens;
  uint32_t max_seqs;
};

// What of TileArguments is needed, as narrow as it comes. On sm_90, 48 bytes end a line of 64.
struct FewArguments {
  const int64_t* slots;
  uint8_t* pages;
  uint32_t tokens, heads, num_pages, record_bytes, tile_bytes;
  uint8_t page_shift, tile_shift, has_tail;
  alignas(16) FewSource source[2];
  FewTail tail;
};
static_assert(sizeof(FewSource) == 64 && offsetof(FewArguments, source) == 48);

// encode_constants of 2^LOG_N channels: what the compiler knows needs no parameter.
template <int LOG_N>
struct FewConstants {
  static constexpr double root() {
    double r = LOG_N % 2 ? 1.41421356237309504880 : 1.0;
    for (int i = 0; i < LOG_N / 2; ++i) r *= 2;
    return r;
  }
  static constexpr bool kPowerOfTwo = LOG_N % 2 == 0;
  static constexpr float kUnits = static_cast<float>(format::kUnitsPerSigma * root());
  static constexpr float kNorm = static_cast<float>(1 / root());
  static constexpr float kOverRoot = static_cast<float>(32 / root());
  static constexpr float kTimesRoot = static_cast<float>(32 * root());
};

// ---- Codebooks --------------------------------------------------------------------------------------------------------

// The positive half of a candidate, as in SharedCodebook, for comparisons of pairs: both halves of a word alike, in grains.
struct PairBoundaries {
  uint32_t at[kMostBoundaries];
};
struct PairLevels {
  uint8_t of[kMostBoundaries];
};

// Entry j of candidate s: read first, written to shared memory later.
struct PairEntry {
  int below, above;
  float step;
  bool has_level, has_boundary;

  __device__ __forceinline__ PairEntry(const FewSource& source, int s, int j) {
    const int half = 1 << (source.bits - 1);
    const bool given = source.levels;
    has_level = s < source.num_steps && j < half, has_boundary = s < source.num_steps && j + 1 < half;
    below = 2 * j + 1, above = below + 2;
    const int8_t* levels = source.levels + (half + j);
    step = __ldg(source.steps + (s < source.num_steps ? s : 0));
    if (given && has_level) below = __ldg(levels);
    if (given && has_boundary) above = __ldg(levels + 1);
  }
  __device__ __forceinline__ uint32_t boundary() const {
    const float units = __fmul_rn(step, format::kUnitsPerSigma / 2 / format::boundary_grain(1));
    const float at = rintf(__fmul_rn(static_cast<float>(below + above), units));
    return (has_boundary ? static_cast<uint32_t>(fminf(at, kBeyond)) : kBeyond) * 0x10001;
  }
  __device__ __forceinline__ uint8_t level() const { return static_cast<uint8_t>(has_level ? below : 0); }
};

// ---- Codes of four channels -------------------------------------------------------------------------------------------

// Four neighbouring coordinates, in pairs.
struct Quad {
  uint32_t cell[2];      // of u or ~u, in grains
  uint32_t size[2];      // |u|, the low 16 bits
  uint32_t over;         // |u| >> 16, bytes
  uint32_t negative[2];  // 65535 where u < 0

  Quad() = default;
  __device__ __forceinline__ Quad(const float* y, float k) {
    constexpr float kInteger = 0x1.8p23f;  // added to a small number, it leaves the nearest integer in the low bits
    uint32_t grain[4], whole[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float u = __fsub_rn(__fadd_rn(__fmul_rn(y[i], k), kInteger), kInteger);
      grain[i] = __float_as_uint(__fmaf_rd(u, 1.0f / 16, kInteger));
      whole[i] = __float_as_uint(__fadd_rn(fabsf(u), 0x1p23f));
    }
    over = select_bytes(select_bytes(whole[0], whole[1], 0x62), select_bytes(whole[2], whole[3], 0x62), 0x5410) &
           0x01010101;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const uint32_t pair = select_bytes(grain[2 * p], grain[2 * p + 1], 0x5410);
      negative[p] = select_bytes(pair, pair, 0xBB99);
      cell[p] = pair ^ negative[p];
      size[p] = select_bytes(whole[2 * p], whole[2 * p + 1], 0x5410);
    }
  }

  // Nibbles of all ones where u < 0.
  __device__ __forceinline__ uint32_t negative_nibbles() const {
    const uint32_t x = (negative[0] & 0x000F000F) | (negative[1] & 0x0F000F00);
    return (x & 0x0F0F) | (x >> 12 & 0xF0F0);
  }
};

// Levels of four magnitudes, nibbles of `selector`.
struct QuadLevels {
  uint4 word;

  template <bool WIDE>
  __device__ __forceinline__ uint32_t of(uint32_t selector) const {
    if constexpr (!WIDE) return select_bytes(word.x, word.y, selector);
    const uint32_t upper = select_bytes(0x80808080, 0x80808080, selector), low = selector & 0x7777;  // 255 or 128
    return (select_bytes(word.z, word.w, low) & upper) | (select_bytes(word.x, word.y, low) & ~upper);
  }
};

// Where a tile keeps the codes of a lane: what is known before its token is. lane: of its vector, quad q holds channels
// 4 LANES q + 4 lane and up.
struct FewTarget {
  int at;           // of token 0
  int shift, mask;  // tokens of a row of keys, or of a block of values
  int pitch;        // between those
  int stride;       // of a value's bytes
  int quad;         // to the next quad
  bool is_owner;

  // In a key's row octet halves are 16 bits; of three bits, bit planes are words.
  template <int D, int LANES>
  static __device__ __forceinline__ FewTarget of_key(int bits, int lane) {
    const int j = lane / 2 % 4, at = bits == 3 ? lane / 8 * 12 + 4 * j + lane % 2 * 2 : bits == 2 ? lane : 2 * lane;
    const int low = min(bits, 4);  // without fifth bits
    return {at, 0, 0, D / 8 * low, 0, LANES / 2 * low, bits != 3 || j < 3};
  }

  // A value's token owns bytes that lie apart. Lanes with the same channel set share them out.
  template <int D, int LANES>
  static __device__ __forceinline__ FewTarget of_value(int bits, int lane, int section) {
    static_assert(format::kValueGroup == 16);
    const bool two = bits == 2;
    const int set = two ? 512 * (lane / 32) + 4 * (lane / 8 % 4) : 128 * bits * (lane / 16) + 4 * (lane / 4 % 4);
    const int stride = bits == 3 ? 12 : two && D < 128 ? D / 8 : 16;
    const bool is_owner = bits == 4 || (bits == 3 ? lane / 4 % 4 < 3 : !(lane & 4));
    return {section + set + stride * (16 * (lane & 1) + 4 * (lane & 2)),
            4,
            15,
            2 * D * bits,
            stride,
            LANES == 32 ? 256 * bits
            : two       ? 8
                        : 128 * bits,
            is_owner};
  }

  __device__ __forceinline__ uint32_t of_token(uint32_t number) const {
    const int inner = number & mask;
    return at + (number >> shift) * pitch + value_b(inner) + stride * value_q(inner);
  }
};

// codes: low nibbles. high: fifth bits.
__device__ __forceinline__ void put_few_key(uint32_t codes, uint32_t high, int bits, int lane, bool stored, uint8_t* to,
                                            uint8_t* plane) {
  if (bits >= 4) {
    if (stored) *reinterpret_cast<uint16_t*>(to) = codes;
    if (bits == 4) return;
    const int j = lane / 2 % 4;
    uint32_t both = ((high & 3) | (high & 12) << 6) << 2 * j;
    both |= __shfl_xor_sync(0xffffffff, both, 2);
    both |= __shfl_xor_sync(0xffffffff, both, 4);
    if (stored && j == 0) *reinterpret_cast<uint16_t*>(plane + lane / 8 * 4 + lane % 2 * 2) = both;
  } else if (bits == 3) {
    const uint32_t last = __shfl_sync(0xffffffff, codes, threadIdx.x % 32 | 6);
    codes |= last << (3 - lane / 2 % 4) & 0x8888;
    if (stored) *reinterpret_cast<uint16_t*>(to) = codes;
  } else {
    codes = (codes & 0x0303) | (codes >> 2 & 0x0C0C);
    if (stored) *to = codes | codes >> 4;
  }
}

__device__ __forceinline__ void put_few_value(uint32_t codes, int bits, int lane, bool stored, uint8_t* to, int step) {
  uint32_t x = (codes | codes << 8) & 0x00FF00FF;
  x = (x | x << 4) & 0x0F0F0F0F;  // byte i: channel i
  x <<= bits == 2 ? lane & 6 : 2 * (lane & 2);
  x |= __shfl_xor_sync(0xffffffff, x, 2);
  if (bits != 4) {
    const int own = threadIdx.x % 32;
    const uint32_t other = __shfl_sync(0xffffffff, x, bits == 3 ? own | 12 : own ^ 4);
    x |= bits == 3 ? other << (3 - lane / 4 % 4) & 0x88888888 : other;
  }
  x >>= 8 * (lane & 2);
  if (stored) to[0] = x, to[step] = x >> 8;
}

// ---- Rotation ---------------------------------------------------------------------------------------------------------

// tree(y * y)
template <typename Traits>
__device__ __forceinline__ float sum_of_squares(const float (&y)[Traits::kPerLane]) {
  float square[Traits::kPerLane];
#pragma unroll
  for (int i = 0; i < Traits::kPerLane; ++i) square[i] = __fmul_rn(y[i], y[i]);
  return tree_sum<Traits>(square);
}

// A vector's length and what makes units of its coordinates, from the sum of their squares: root(squares) and
// divide(kUnits, length). The reciprocal of the root is within two units of the length's reciprocal, which saves asking for
// one: quotients are the same for all lengths, unless kUnits is a power of two.
template <typename Constants>
struct LengthAndUnits {
  float length, k;

  __device__ __forceinline__ explicit LengthAndUnits(float squares) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(squares));
    const float y = __fmul_rn(squares, r);
    length = __fmaf_rn(__fmaf_rn(-y, y, squares), __fmul_rn(r, 0.5f), y);
    if constexpr (Constants::kPowerOfTwo) {
      k = divide(Constants::kUnits, length);
    } else {
      r = __fmaf_rn(r, __fmaf_rn(-length, r, 1), r);
      const float q = __fmul_rn(Constants::kUnits, r);
      k = __fmaf_rn(r, __fmaf_rn(-length, q, Constants::kUnits), q);
    }
  }
};

// ---- Candidates -------------------------------------------------------------------------------------------------------

// The boundary that decides bit STEPS - 1 - K of magnitudes whose upper bits are in `set`; M of them are left to choose by,
// the rest is in I.
template <int STEPS, int K, int M = K, int I = 0>
__device__ __forceinline__ uint32_t deciding(const uint32_t (&boundary)[1 << STEPS], const uint32_t (&set)[STEPS]) {
  if constexpr (M == 0) {
    return boundary[((2 * I + 1) << (STEPS - 1 - K)) - 1];
  } else {
    const uint32_t below = deciding<STEPS, K, M - 1, I>(boundary, set);
    const uint32_t above = deciding<STEPS, K, M - 1, I | 1 << (K - M)>(boundary, set);
    return (above & set[M - 1]) | (below & ~set[M - 1]);
  }
}

// Magnitudes of two coordinates, in the low bits of halves.
template <int STEPS, int K = 0>
__device__ __forceinline__ uint32_t magnitudes(uint32_t cell, const uint32_t (&boundary)[1 << STEPS],
                                               uint32_t (&set)[STEPS]) {
  const uint32_t at = deciding<STEPS, K>(boundary, set);
  set[K] = __hge2_mask(reinterpret_cast<const __half2&>(cell), reinterpret_cast<const __half2&>(at));
  const uint32_t bit = set[K] & 0x10001u << (STEPS - 1 - K);
  if constexpr (K + 1 == STEPS) {
    return bit;
  } else {
    return bit | magnitudes<STEPS, K + 1>(cell, boundary, set);
  }
}

// What a candidate makes of the coordinates of a lane. WIDE: 16 boundaries instead of 8.
template <typename Traits, bool WIDE>
struct Tried {
  static constexpr int kQuads = Traits::kChunks;
  uint32_t dot = 0, squares = 0;
  uint32_t selector[kQuads];

  // first: of the boundaries, read before.
  __device__ __forceinline__ Tried(const Quad (&quads)[kQuads], const PairBoundaries& book, const QuadLevels& levels,
                                   const uint4 (&first)[2]) {
    constexpr int kSteps = WIDE ? 4 : 3;
    uint32_t boundary[1 << kSteps];
#pragma unroll
    for (int j = 0; j < (1 << kSteps) / 4; ++j) {
      const uint4 four = j < 2 ? first[j % 2] : reinterpret_cast<const uint4*>(book.at)[j];
      boundary[4 * j] = four.x, boundary[4 * j + 1] = four.y, boundary[4 * j + 2] = four.z,
                   boundary[4 * j + 3] = four.w;
    }
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      uint32_t set[2][kSteps];
      uint32_t x = magnitudes<kSteps>(quads[q].cell[0], boundary, set[0]) |
                   magnitudes<kSteps>(quads[q].cell[1], boundary, set[1]) << 8;
      x |= x >> 12;  // the second channels of pairs between the first ones
      selector[q] = x;
      const uint32_t level = levels.of<WIDE>(x);
      squares = __dp4a(level, level, squares);
      dot = __dp2a_lo(quads[q].size[0], level, dot);
      dot = __dp2a_hi(quads[q].size[1], level, dot);
      if constexpr (Traits::kDim > 128) dot += __dp4a(quads[q].over, level, 0u) << 16;
    }
  }
};

// Tries all of them; sums end in the lane of the candidate's number.
template <typename Traits, bool WIDE>
struct Candidates {
  static constexpr int kLanes = Traits::kLanes, kQuads = Traits::kChunks;
  int dot = 0, squares = 0;

  __device__ __forceinline__ Candidates(const Quad (&quads)[kQuads], const PairBoundaries* books,
                                        const QuadLevels& levels, int steps, int lane,
                                        uint16_t (*selectors)[kQuads][32], int own) {
#pragma unroll 1
    for (int first = 0; first < steps; first += kUnroll) {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {  // books have that many
        const int s = first + i;
        const uint4* book = reinterpret_cast<const uint4*>(books[s].at);
        const Tried<Traits, WIDE> tried(quads, books[s], levels, {book[0], book[1]});
#pragma unroll
        for (int q = 0; q < kQuads; ++q) selectors[s][q][own] = static_cast<uint16_t>(tried.selector[q]);
        const int all_d = sum_of_lanes<kLanes>(static_cast<int>(tried.dot));
        const int all_b = sum_of_lanes<kLanes>(static_cast<int>(tried.squares));
        if (lane == s) dot = all_d, squares = all_b;
      }
    }
    if (lane >= steps) dot = squares = 0;
  }
};

// Fit::scale with constants that compilers know.
template <typename Constants>
__device__ __forceinline__ uint16_t few_scale(const Fit& fit, int mode, float length, int e) {
  const float r = __fmul_rn(length, Constants::kNorm), over = __fmul_rn(r, Constants::kOverRoot);
  const float above = mode == 2 ? fit.a : __fmul_rn(r, mode == 1 ? 32 : Constants::kTimesRoot);
  float below = mode == 2 ? fit.b : fit.a;
  if (mode == 1) below = root(fit.b);
  const float quotient = divide(above, below);
  float scale = mode == 0 ? fit.step : quotient;
  scale = mode % 2 == 0 ? __fmul_rn(over, scale) : scale;
  scale = fminf(__fmul_rn(scale, power_of_two(e)), format::kMaxHalf);
  return fit.a > 0 ? __half_as_ushort(__float2half_rn(scale)) : 0;
}

// ---- The exact tail ---------------------------------------------------------------------------------------------------

// Where a token is kept: read first, worked out later. slot: -1 if it has no sequence.
struct FewPlace {
  int64_t slot = -1;
  int length, from_end;  // its distance to the sequence's end

  FewPlace() = default;
  __device__ __forceinline__ FewPlace(const FewTail& tail, int token) {
    int s = token, end = token + 1;
    if (tail.begins) {  // the last sequence that begins at or before the token
      int high = tail.seqs;
      s = 0;
      while (high - s > 1) {
        const int middle = (s + high) / 2;
        (tail.begins[middle] <= token ? s : high) = middle;
      }
      end = tail.begins[s + 1];
    }
    if (s >= tail.seqs || token >= end) return;
    slot = __ldg(tail.slots + s), length = __ldg(tail.lengths + s), from_end = end - token;
  }

  // Null where it is not kept.
  __device__ __forceinline__ uint8_t* at(const FewTail& tail, uint32_t heads, uint32_t head, int kind,
                                         int bytes) const {
    const int64_t position = int64_t{length} - from_end;
    const int ring = tail.rows - tail.sink_tokens;
    if (static_cast<uint64_t>(slot) >= tail.max_seqs || position < 0) return nullptr;
    if (!format::tail_keeps(position, length, tail.sink_tokens, ring)) return nullptr;
    const uint32_t row = format::tail_row<int>(static_cast<int>(position), tail.sink_tokens, ring);
    const uint32_t sequence = static_cast<uint32_t>(slot) * heads + head;
    return tail.data + ((uint64_t{sequence} * static_cast<uint32_t>(tail.rows) + row) * 2 + kind) * bytes;
  }
};

// ---- The kernel -------------------------------------------------------------------------------------------------------

// What the candidates need in shared memory, and with one candidate every warp for itself.
template <int QUADS, bool SEARCH>
struct FewShared {
  PairBoundaries boundaries[SEARCH ? kMostCandidates : kWarps];
  PairLevels levels[SEARCH ? 1 : kWarps];
  float step[kMostCandidates];
  uint16_t selectors[SEARCH ? kWarps : 1][kMostCandidates][QUADS][32];
};

template <typename Traits, typename T, bool SEARCH>
__global__ void __launch_bounds__(32 * kWarps) few_kernel(const __grid_constant__ FewArguments a) {
  let_next_kernel_begin();
  constexpr int kLanes = Traits::kLanes, kQuads = Traits::kChunks, kVectors = 32 / kLanes;  // of a warp
  constexpr int kPerLane = Traits::kPerLane, kDim = Traits::kDim;
  using Constants = FewConstants<Traits::kLogBlock>;
  __shared__ __align__(16) FewShared<kQuads, SEARCH> shared;
  unsigned thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // read once
  const int kind = blockIdx.z, warp = thread / 32, lane = thread % kLanes, own = thread % 32;
  const uint32_t head = blockIdx.y;
  const FewSource& source = a.source[kind];
  const uint32_t token = blockIdx.x * (kWarps * kVectors) + thread / kLanes;
  const bool exists = token < a.tokens;

  // All loads are under way before the first of them is waited for.
  const uint32_t readable = exists ? token : 0;
  const uint8_t* from = source.data + uint64_t{readable} * source.token_stride + uint64_t{head} * source.head_stride;
  uint32_t word[kQuads][2];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const uint2 w = __ldg(reinterpret_cast<const uint2*>(from) + lane + 32 * q);
    word[q][0] = w.x, word[q][1] = w.y;
  }
  const int64_t slot = __ldg(a.slots + readable);
  float signs[kPerLane], center[kPerLane] = {}, factor[kPerLane] = {};
  load<Traits>(source.signs, lane, signs);
  if (source.center) load<Traits>(source.center + head * kDim, lane, center);
  if (source.factor) load<Traits>(source.factor + head * kDim, lane, factor);
  const int number_s = SEARCH ? thread / kMostBoundaries : 0, number_j = thread % kMostBoundaries;
  const PairEntry entry(source, number_s, number_j);
  FewPlace place;
  if (a.has_tail) place = FewPlace(a.tail, static_cast<int>(token));

  // While they are waited for, what can be known.
  const int bits = source.bits;
  const FewTarget target = kind == 0 ? FewTarget::of_key<kDim, kLanes>(bits, lane)
                                     : FewTarget::of_value<kDim, kLanes>(bits, lane, source.section);

  float x[kPerLane], y[kPerLane];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) floats_of_words<T>(word[q], x + 4 * q);
  if (source.center) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = __fsub_rn(x[i], center[i]);
  }
  if (source.factor) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = __fmul_rn(x[i], factor[i]);
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) y[i] = x[i] = __fmul_rn(x[i], signs[i]);

  butterflies<Traits>(y, lane);
  // While shuffles are waited for, the book and the token's place.
  if constexpr (SEARCH) {
    if (number_s < kMostCandidates) {  // there are more threads than entries
      shared.boundaries[number_s].at[number_j] = entry.boundary();
      if (number_j == 0) shared.step[number_s] = entry.step;
      if (number_s == 0) shared.levels[0].of[number_j] = entry.level();
    }
  } else {  // two lanes write the same
    shared.boundaries[warp].at[number_j] = entry.boundary();
    shared.levels[warp].of[number_j] = entry.level();
  }
  __syncwarp();

  // The token's place in its page, as Pages::token has it.
  const uint64_t page = static_cast<uint64_t>(slot >> a.page_shift);
  const bool stored = exists && page < a.num_pages;
  const uint32_t offset = static_cast<uint32_t>(slot) & ((1u << a.page_shift) - 1);
  const uint32_t number = offset & ((1u << a.tile_shift) - 1);
  const uint64_t tile =
      uint64_t{static_cast<uint32_t>(page) * a.heads + head} * a.record_bytes + (offset >> a.tile_shift) * a.tile_bytes;
  uint64_t codes_at = tile + target.of_token(number), scale_at = tile + source.scales + 2 * number;
  asm volatile("" : "+l"(codes_at), "+l"(scale_at));  // nothing of this is left for later
  const int mode = source.scale_mode;
  float squares = sum_of_squares<Traits>(y);
  LengthAndUnits<Constants> scaled(squares);  // while lanes are asked

  // As in rotate_vector, a power of two is taken out only where the vector needs it.
  int e = 0;
  bool finite = true, zero = false;
  if (!__all_sync(0xffffffff, squares >= 0x1p-60f && squares <= 0x1p100f)) [[unlikely]] {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      y[i] = x[i];
      asm volatile("" : "+f"(y[i]));  // nothing of this is done before
      largest = max(largest, magnitude_bits(y[i]));
    }
    largest = max_of_lanes<kLanes>(largest);
    finite = largest < kInfinityBits;
    e = prescale_exponent(largest);
    const float down = power_of_two(-e);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) y[i] = finite ? __fmul_rn(y[i], down) : 0.0f;
    butterflies<Traits>(y, lane);
    squares = sum_of_squares<Traits>(y);
    zero = squares == 0;
    if (zero) squares = 1;  // all coordinates are zero, whatever they are multiplied by
    scaled = LengthAndUnits<Constants>(squares);
  }
  // What a warp wrote for itself is read while the coordinates are still to come.
  const PairBoundaries* boundaries = shared.boundaries + (SEARCH ? 0 : warp);
  const uint4* first_from = reinterpret_cast<const uint4*>(boundaries->at);
  const uint4* levels_from = reinterpret_cast<const uint4*>(shared.levels[SEARCH ? 0 : warp].of);
  uint4 first[2];
  QuadLevels levels;
  if constexpr (!SEARCH) first[0] = first_from[0], first[1] = first_from[1], levels.word = *levels_from;
  Quad quads[kQuads];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) quads[q] = Quad(y + 4 * q, scaled.k);

  if constexpr (SEARCH) {
    __syncthreads();
    levels.word = *levels_from;
  }
  uint32_t selector[kQuads];
  int dot, level_squares, kept = 0;
  float step = entry.step;
  if constexpr (SEARCH) {
    const auto keep = [&](const auto& tried) { dot = tried.dot, level_squares = tried.squares; };
    if (bits < 5) {
      keep(Candidates<Traits, false>(quads, boundaries, levels, source.num_steps, lane, shared.selectors[warp], own));
    } else {
      keep(Candidates<Traits, true>(quads, boundaries, levels, source.num_steps, lane, shared.selectors[warp], own));
    }
    step = shared.step[lane % kMostCandidates];
  } else {
    const auto keep = [&](const auto& tried) {
      dot = tried.dot, level_squares = tried.squares;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) selector[q] = tried.selector[q];
    };
    if (bits < 5) [[likely]] {
      keep(Tried<Traits, false>(quads, *boundaries, levels, first));
    } else {
      keep(Tried<Traits, true>(quads, *boundaries, levels, first));
    }
    dot = sum_of_lanes<kLanes>(dot), level_squares = sum_of_lanes<kLanes>(level_squares);
  }
  Fit fit;
  if constexpr (SEARCH) {
    fit = Fit::of_sums(dot, level_squares, step);
    const float quotient = divide(__fmul_rn(fit.a, fit.a), fit.b);
    const float merit = fit.a > 0 ? quotient : 0;  // 0 where there is no candidate
    const uint32_t most = max_of_lanes<kLanes>(__float_as_uint(merit));
    const uint32_t all = __ballot_sync(0xffffffff, __float_as_uint(merit) == most);
    kept = __ffs(all >> (own - lane)) - 1;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) selector[q] = shared.selectors[warp][kept][q][own];
  }

  const uint32_t half = 1 << (bits - 1), ones = 2 * half - 1;
  const bool codes_stored = stored && target.is_owner;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const uint32_t negative = quads[q].negative_nibbles();
    uint32_t codes = (selector[q] + (half & 15) * 0x1111) ^ (negative & (ones & 15) * 0x1111);
    codes = finite ? codes & 0xFFFF : 0;
    if (kind == 0) {
      const uint32_t high = (~negative & 1) | (~negative >> 3 & 2) | (~negative >> 6 & 4) | (~negative >> 9 & 8);
      put_few_key(codes, finite ? high : 0, bits, lane, codes_stored, a.pages + codes_at + q * target.quad,
                  a.pages + tile + source.section + number * (kDim / 8) + q * (kLanes / 2));
    } else {
      put_few_value(codes, bits, lane, codes_stored, a.pages + codes_at + q * target.quad, 4 * target.stride);
    }
  }
  // The sums are asked for after the codes, which leave in the meantime.
  if constexpr (!SEARCH) fit = Fit::of_sums(dot, level_squares, step);
  uint16_t scale = few_scale<Constants>(fit, mode, scaled.length, e);
  if (zero) scale = 0;
  if (!finite) scale = format::kNanScale;
  if (stored && lane == kept) *reinterpret_cast<uint16_t*>(a.pages + scale_at) = scale;
  if (a.has_tail && stored) {
    uint8_t* to = place.at(a.tail, a.heads, head, kind, 2 * kDim);
    if (!to) return;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      reinterpret_cast<uint2*>(to)[lane + 32 * q] = make_uint2(word[q][0], word[q][1]);
    }
  }
}

// ---- Host side --------------------------------------------------------------------------------------------------------

// False where a number needs more room than it has here.
bool few_arguments(const TileArguments& a, FewArguments& few) {
  const auto fits = [](int64_t n) { return n >= 0 && n <= INT32_MAX; };
  if (!fits(a.tokens) || !fits(a.pages.num_pages * a.heads) || a.layout.tile_bytes > UINT16_MAX) return false;
  few = {a.slots,
         a.pages.data,
         static_cast<uint32_t>(a.tokens),
         static_cast<uint32_t>(a.heads),
         static_cast<uint32_t>(a.pages.num_pages),
         static_cast<uint32_t>(a.layout.record_bytes),
         static_cast<uint32_t>(a.layout.tile_bytes),
         static_cast<uint8_t>(a.layout.page_shift),
         static_cast<uint8_t>(a.layout.tile_shift),
         a.tail.data != nullptr,
         {},
         {}};
  for (int kind = 0; kind < 2; ++kind) {
    const TileSource& source = a.source[kind];
    const Codebook& book = source.book;
    if (book.bits > 5 || book.num_steps > kMostCandidates) return false;
    if (!fits(source.token_stride) || !fits(source.head_stride)) return false;
    few.source[kind] = {source.data,
                        source.signs,
                        source.channels.center,
                        source.channels.scale,
                        book.levels,
                        book.steps,
                        static_cast<uint32_t>(source.token_stride),
                        static_cast<uint32_t>(source.head_stride),
                        static_cast<uint16_t>(kind == 0 ? a.layout.key_planes : a.layout.value_blocks),
                        static_cast<uint16_t>(kind == 0 ? a.layout.key_scales : a.layout.value_scales),
                        static_cast<uint8_t>(book.bits),
                        static_cast<uint8_t>(book.num_steps),
                        static_cast<uint8_t>(book.scale_mode)};
  }
  if (a.tail.data) {
    const Tail& tail = a.tail;
    if (!fits(tail.seqs) || !fits(tail.max_seqs * a.heads) || reinterpret_cast<uintptr_t>(tail.data) % 8) return false;
    few.tail = {tail.data,
                tail.slots,
                tail.lengths,
                tail.begins,
                static_cast<int>(tail.seqs),
                tail.rows,
                tail.sink_tokens,
                static_cast<uint32_t>(tail.max_seqs)};
  }
  return true;
}

}  // namespace

bool launch_encode_step(const TileArguments& a, format::Split split, cudaStream_t stream) {
  FewArguments few;
  if (!few_arguments(a, few)) return false;
  const bool search = few.source[0].num_steps > 1 || few.source[1].num_steps > 1;
  return dispatch_tiles(a.dtype, split, [&](auto log_d, auto tag) {
    using Traits = FewTraits<log_d>;
    using T = typename decltype(tag)::type;
    const dim3 grid(num_blocks(a.tokens, kWarps * 32 / Traits::kLanes), static_cast<unsigned>(a.heads), 2);
    const auto kernel = search ? few_kernel<Traits, T, true> : few_kernel<Traits, T, false>;
    kernel<<<grid, 32 * kWarps, 0, stream>>>(few);
    return true;
  });
}

}  // namespace turboquant::cuda
