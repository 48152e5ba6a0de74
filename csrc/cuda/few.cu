// The kernel for few vectors (tiles.cuh has that for many): the keys and values of a decode step into page records.
//
// Such a launch is over before its instructions are in a cache, so what counts is how many there are on the way through, and how
// many of them wait for each other. A warp holds a vector, four channels in a lane, one block keys or values:
//
// * Everything that is read is on its way before the first of it is waited for.
// * Where the tiles have tables, boundaries of a candidate are compared with two coordinates at once: 16-bit integers below
//   2^15 - 2^10 have the order of the float16 numbers of the same bits. A true comparison is 65535 in 16 bits, sums of which
//   stay apart after one multiplication, and four counts make the selector of a byte permutation, which looks up levels.
// * A candidate's sums end in the lane of its number, so that lanes divide for all candidates at once; the lane whose merit
//   is greatest stores the scale.
// * What a record keeps of four channels is put together by shuffles and leaves from registers.
//
// The bytes are those of any.cuh.
#include <cuda_fp16.h>

#include "tile_launch.cuh"
#include "tiles.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kWarps = 8;   // of a block: one block on a multiprocessor is on its way sooner than two
constexpr int kUnroll = 4;  // candidates whose waits overlap
constexpr int kMostBoundaries = 16;
constexpr uint32_t kBeyond = 0x7C00;  // no coordinate is there

template <int LOG_N>
using FewTraits = HadamardTraits<1, LOG_N, (1 << LOG_N) / 4 < 32 ? (1 << LOG_N) / 4 : 32, 4>;

// ---- Codebooks --------------------------------------------------------------------------------------------------------

// The positive half, as in SharedCodebook, for comparisons of pairs.
struct PairBook {
  uint32_t boundary[kMostCandidates][kMostBoundaries];  // both halves alike, in grains
  float step[kMostCandidates];
  uint8_t level[kMostBoundaries];
};

// Entry i of the book: read first, written to shared memory later.
struct PairEntry {
  int below, above;
  float step;
  bool has_level, has_boundary;

  __device__ __forceinline__ PairEntry(const Codebook& book, int i) {
    const int s = static_cast<unsigned>(i) / kMostBoundaries, j = i % kMostBoundaries, half = 1 << (book.bits - 1);
    has_level = s < book.num_steps && j < half, has_boundary = s < book.num_steps && j + 1 < half;
    below = 2 * j + 1, above = below + 2, step = 0;
    if (has_level) step = __ldg(book.steps + s);
    if (book.levels) {
      if (has_level) below = __ldg(book.levels + half + j);
      if (has_boundary) above = __ldg(book.levels + half + j + 1);
    }
  }
  __device__ __forceinline__ void put(PairBook& book, int i) const {
    const int s = static_cast<unsigned>(i) / kMostBoundaries, j = i % kMostBoundaries;
    const float units = __fmul_rn(step, format::kUnitsPerSigma / 2 / format::boundary_grain(1));
    const float at = rintf(__fmul_rn(static_cast<float>(below + above), units));
    const uint32_t bits = has_boundary ? static_cast<uint32_t>(fminf(at, kBeyond)) : kBeyond;
    if (s >= kMostCandidates) return;  // more threads than entries
    book.boundary[s][j] = bits * 0x10001;
    if (j == 0) book.step[s] = step;
    if (s == 0) book.level[j] = static_cast<uint8_t>(has_level ? below : 0);
  }
};
static_assert(32 * kWarps >= kMostCandidates * kMostBoundaries);

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
    over = permute(permute(whole[0], whole[1], 0x62), permute(whole[2], whole[3], 0x62), 0x5410) & 0x01010101;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const uint32_t pair = permute(grain[2 * p], grain[2 * p + 1], 0x5410);
      negative[p] = permute(pair, pair, 0xBB99);
      cell[p] = pair ^ negative[p];
      size[p] = permute(whole[2 * p], whole[2 * p + 1], 0x5410);
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
    if constexpr (!WIDE) return permute(word.x, word.y, selector);
    const uint32_t upper = permute(0x80808080, 0x80808080, selector), low = selector & 0x7777;  // 255 or 128
    return (permute(word.z, word.w, low) & upper) | (permute(word.x, word.y, low) & ~upper);
  }
};

// What a record keeps of four channels of a key: octet halves are 16 bits. lane: of its vector, quad q holds channels 128 q
// + 4 lane and up. codes: low nibbles. high: fifth bits.
__device__ __forceinline__ void put_few_key(uint32_t codes, uint32_t high, int bits, int lane, int quad, uint8_t* row,
                                            uint8_t* plane) {
  const int place = lane + 32 * quad, j = lane / 2 % 4;
  if (bits == 3) {
    const uint32_t last = __shfl_sync(0xffffffff, codes, threadIdx.x % 32 | 6);
    codes |= last << (3 - j) & 0x8888;
    if (row && j < 3) *reinterpret_cast<uint16_t*>(row + place / 8 * 12 + 4 * j + place % 2 * 2) = codes;
    return;
  }
  if (bits == 2) {
    codes = (codes & 0x0303) | (codes >> 2 & 0x0C0C);
    if (row) row[place] = codes | codes >> 4;
    return;
  }
  if (row) *reinterpret_cast<uint16_t*>(row + 2 * place) = codes;
  if (bits == 5) {
    uint32_t both = ((high & 3) | (high & 12) << 6) << 2 * j;
    both |= __shfl_xor_sync(0xffffffff, both, 2);
    both |= __shfl_xor_sync(0xffffffff, both, 4);
    if (row && j == 0) *reinterpret_cast<uint16_t*>(plane + place / 8 * 4 + place % 2 * 2) = both;
  }
}

// The same of a value, whose token owns bytes that lie apart. block: null where there is no token.
template <int D>
__device__ __forceinline__ void put_few_value(uint32_t codes, int bits, int lane, int quad, uint8_t* block,
                                              int number) {
  const int place = lane + 32 * quad;
  uint32_t x = (codes | codes << 8) & 0x00FF00FF;
  x = (x | x << 4) & 0x0F0F0F0F;  // byte i: channel i
  x <<= bits == 2 ? lane & 6 : 2 * (lane & 2);
  x |= __shfl_xor_sync(0xffffffff, x, 2);
  uint8_t* to = block + value_b(number);
  int stride = 16;
  bool owner = true;
  if (bits == 4) {
    to += 512 * (place / 16) + 4 * (place / 4 % 4);
  } else if (bits == 3) {
    const int j = lane / 4 % 4;
    x |= __shfl_sync(0xffffffff, x, threadIdx.x % 32 | 12) << (3 - j) & 0x88888888;
    to += 384 * (place / 16) + 4 * j, stride = 12, owner = j < 3;
  } else {
    x |= __shfl_xor_sync(0xffffffff, x, 4);
    to += 512 * (place / 32) + 4 * (place / 8 % 4), stride = D < 128 ? D / 8 : 16, owner = !(lane & 4);
  }
  // Lanes with the same channel set share out its bytes.
  x >>= 8 * (lane & 2);
  to += stride * (16 * (lane & 1) + 4 * (lane & 2) + value_q(number));
  if (block && owner) to[0] = x, to[4 * stride] = x >> 8;
}

// ---- Rotation ---------------------------------------------------------------------------------------------------------

// Butterflies; returns tree(y * y).
template <typename Traits>
__device__ __forceinline__ float rotate_few(float (&y)[Traits::kPerLane], int lane) {
  butterflies<Traits>(y, lane);
  float square[Traits::kPerLane];
#pragma unroll
  for (int i = 0; i < Traits::kPerLane; ++i) square[i] = __fmul_rn(y[i], y[i]);
  return tree_sum<Traits>(square);
}

// __fsqrt_rn where x is far from the ends of the range: it asks whether it is.
__device__ __forceinline__ float root(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  const float y = __fmul_rn(x, r);
  return __fmaf_rn(__fmaf_rn(-y, y, x), __fmul_rn(r, 0.5f), y);
}

// ---- The kernel -------------------------------------------------------------------------------------------------------

// Tries the candidates on the coordinates of a warp's vectors. WIDE: 16 boundaries instead of 8.
template <typename Traits, bool WIDE>
struct Candidates {
  static constexpr int kLanes = Traits::kLanes, kQuads = Traits::kChunks;
  int dot = 0, squares = 0;        // of the candidate of the lane's number
  uint32_t selector[kQuads] = {};  // of the last one

  __device__ __forceinline__ Candidates(const Quad (&quads)[kQuads], const PairBook& book, int steps, int lane,
                                        uint16_t (*selectors)[kQuads][32], int own) {
    const QuadLevels levels{*reinterpret_cast<const uint4*>(book.level)};
#pragma unroll kUnroll
    for (int s = 0; s < steps; ++s) {
      const uint4* boundaries = reinterpret_cast<const uint4*>(book.boundary[s]);
      uint32_t count[kQuads][2] = {};
#pragma unroll
      for (int j = 0; j < (WIDE ? 4 : 2); ++j) {
        const uint4 four = boundaries[j];
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
#pragma unroll
          for (int p = 0; p < 2; ++p) {
            const auto reached = [&](uint32_t boundary) {
              return __hge2_mask(reinterpret_cast<const __half2&>(quads[q].cell[p]),
                                 reinterpret_cast<const __half2&>(boundary));
            };
            count[q][p] += reached(four.x) + reached(four.y) + reached(four.z) + reached(four.w);
          }
        }
      }
      uint32_t d = 0, b = 0;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        // -65537 times a sum of 65535 in 16 bits are the counts; the second pair's go between those of the first.
        uint32_t x = (count[q][0] + 256 * count[q][1]) * -65537u;
        x += x >> 12;
        selector[q] = x;
        selectors[s][q][own] = static_cast<uint16_t>(x);
        const uint32_t level = levels.of<WIDE>(x);
        b = __dp4a(level, level, b);
        d = __dp2a_lo(quads[q].size[0], level, d);
        d = __dp2a_hi(quads[q].size[1], level, d);
        if constexpr (Traits::kDim > 128) d += __dp4a(quads[q].over, level, 0u) << 16;
      }
      const int all_d = sum_of_lanes<kLanes>(static_cast<int>(d)), all_b = sum_of_lanes<kLanes>(static_cast<int>(b));
      if (lane == s) dot = all_d, squares = all_b;
    }
  }
};

template <typename Traits, typename T>
__global__ void __launch_bounds__(32 * kWarps) few_kernel(const __grid_constant__ TileArguments a) {
  let_next_kernel_begin();
  constexpr int kLanes = Traits::kLanes, kQuads = Traits::kChunks, kVectors = 32 / kLanes;  // of a warp
  constexpr int kPerLane = Traits::kPerLane;
  __shared__ __align__(16) PairBook book;
  __shared__ uint16_t selectors[kWarps][kMostCandidates][kQuads][32];
  unsigned thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // read once
  const int kind = blockIdx.z, head = blockIdx.y, warp = thread / 32, lane = thread % kLanes;
  const TileSource& source = a.source[kind];
  const int token = blockIdx.x * (kWarps * kVectors) + thread / kLanes;
  const bool exists = token < a.tokens;

  // All loads are under way before the first of them is waited for.
  const uint8_t* from = source.data + (exists ? token : 0) * source.token_stride + head * source.head_stride;
  uint32_t word[kQuads][2];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const uint2 w = __ldg(reinterpret_cast<const uint2*>(from) + lane + 32 * q);
    word[q][0] = w.x, word[q][1] = w.y;
  }
  float signs[kPerLane], center[kPerLane] = {}, factor[kPerLane] = {};
  load<Traits>(source.signs, lane, signs);
  const format::Channels channels = source.channels.of_head(head, source.channel_stride);
  if (channels.center) load<Traits>(channels.center, lane, center);
  if (channels.scale) load<Traits>(channels.scale, lane, factor);
  const PairEntry entry(source.book, thread);
  const int64_t slot = exists ? __ldg(a.slots + token) : -1;

  float x[kPerLane], y[kPerLane];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) floats_of_words<T>(word[q], x + 4 * q);
  if (channels.center) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = __fsub_rn(x[i], center[i]);
  }
  if (channels.scale) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = __fmul_rn(x[i], factor[i]);
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) y[i] = x[i] = __fmul_rn(x[i], signs[i]);

  float squares = rotate_few<Traits>(y, lane);
  entry.put(book, thread);
  const Token to = a.pages.token(slot, head, a.layout);

  // As in rotate_vector, a power of two is taken out only where the vector needs it.
  int e = 0;
  bool finite = true;
  if (!__all_sync(0xffffffff, squares >= 0x1p-60f && squares <= 0x1p100f)) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      y[i] = x[i];
      asm volatile("" : "+f"(y[i]));  // nothing of this is done before
      largest = max(largest, __float_as_uint(y[i]) & 0x7FFFFFFF);
    }
    largest = max_of_lanes<kLanes>(largest);
    finite = largest < 0x7F800000;
    e = min(max(static_cast<int>(largest >> 23) - 127, -100), 100);
    const float down = power_of_two(-e);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) y[i] = finite ? __fmul_rn(y[i], down) : 0.0f;
    squares = rotate_few<Traits>(y, lane);
  }
  const bool zero = squares == 0;
  const float length = zero ? 0 : root(squares), k = zero ? 0 : divide(a.constants.units, length);
  Quad quads[kQuads];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) quads[q] = Quad(y + 4 * q, k);

  __syncthreads();
  const int bits = source.book.bits, steps = source.book.num_steps, own = thread % 32;
  int dot, level_squares;
  uint32_t selector[kQuads];
  const auto keep = [&](const auto& tried) {
    dot = tried.dot, level_squares = tried.squares;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) selector[q] = tried.selector[q];
  };
  if (bits < 5) {
    keep(Candidates<Traits, false>(quads, book, steps, lane, selectors[warp], own));
  } else {
    keep(Candidates<Traits, true>(quads, book, steps, lane, selectors[warp], own));
  }
  const Fit fit = Fit::of_sums(dot, level_squares, book.step[lane % kMostCandidates]);
  int kept = 0;
  if (steps > 1) {
    const float quotient = divide(__fmul_rn(fit.a, fit.a), fit.b);
    const float merit = fit.a > 0 ? quotient : 0;  // 0 where there is no candidate
    const uint32_t most = max_of_lanes<kLanes>(__float_as_uint(merit));
    const uint32_t all = __ballot_sync(0xffffffff, __float_as_uint(merit) == most);
    kept = __ffs(all >> (own - lane)) - 1;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) selector[q] = selectors[warp][kept][q][own];
  }

  const uint32_t half = 1 << (bits - 1), ones = 2 * half - 1;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const uint32_t negative = quads[q].negative_nibbles();
    uint32_t codes = (selector[q] + (half & 15) * 0x1111) ^ (negative & (ones & 15) * 0x1111);
    codes = finite ? codes & 0xFFFF : 0;
    if (kind == 0) {
      const uint32_t high = (~negative & 1) | (~negative >> 3 & 2) | (~negative >> 6 & 4) | (~negative >> 9 & 8);
      put_few_key(codes, finite ? high : 0, bits, lane, q, to.tile ? to.key_row(a.layout) : nullptr,
                  to.key_plane(a.layout));
    } else {
      put_few_value<Traits::kDim>(codes, bits, lane, q, to.tile ? to.value_block(a.layout) : nullptr, to.number);
    }
  }
  if (to.tile && lane == kept) {
    uint16_t scale = zero ? 0 : fit.scale(source.book.scale_mode, length, e, a.constants);
    if (!finite) scale = format::kNanScale;
    *(kind == 0 ? to.key_scale(a.layout) : to.value_scale(a.layout)) = scale;
  }
  if (a.tail.data && to.tile) {
    const int64_t row = a.tail.row(token);
    if (row >= 0) copy_bytes(from, a.tail.at(row, head, kind, 2 * Traits::kDim), 2 * Traits::kDim, lane, kLanes);
  }
}

}  // namespace

bool launch_few(const TileArguments& a, format::Split split, cudaStream_t stream) {
  if (a.tokens > INT32_MAX) return false;
  for (const TileSource& source : a.source) {
    if (source.book.bits > 5 || source.book.num_steps > kMostCandidates) return false;
  }
  return dispatch_tiles(a.dtype, split, [&](auto log_d, auto tag) {
    using Traits = FewTraits<log_d>;
    const dim3 grid(num_blocks(a.tokens, kWarps * 32 / Traits::kLanes), static_cast<unsigned>(a.heads), 2);
    few_kernel<Traits, typename decltype(tag)::type><<<grid, 32 * kWarps, 0, stream>>>(a);
    return true;
  });
}

}  // namespace turboquant::cuda
