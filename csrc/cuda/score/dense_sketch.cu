// Sketches with a dense projection on tensor cores, from sm_80 on; qjl.cu has the kernel for older devices.
//
// The format sums products of float32 in an order of its own, but only the signs of these sums are stored, and few sums
// are so close to zero that the order or the precision decides their sign. So tensor cores multiply pairs of bfloat16
// whose sum is nearly the float32 number, and sums that may be one of those few are computed again by a warp, in the
// order of the format.
//
// The bound for such a sum, in units of |vector| |row of the projection|, which is at least the sum of all magnitudes
// (Cauchy and Schwarz):
//   * Two bfloat16 numbers hold 16 bits of a float32 number and leave at most 2^-18 of it, and so does the product of
//     the two lower ones, which is left out: 3 * 2^-18 together.
//   * The format's sum is off by 2^-24 for each of its levels, blocks and products: at most 23 * 2^-24.
//   * Of tensor cores we assume as little as score/sketch_bulk.cu does: a product of 16 channels adds four elements at a
//     time to the sum so far, and truncates each of them, the sum and the result to 24 bits of the largest one, all in
//     one direction. That is 24 * 2^-23 for 16 channels and each pair of parts that is multiplied.
// For 128 channels of bfloat16 that is 5.8 * 2^-20, and of random sums, whose standard deviation is 1 / sqrt(d) of that
// unit, 0.05% are within it.
#include "cuda/score/dense_sketch.cuh"

#include <algorithm>
#include <bit>

#include "cuda/codec/codebook.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

// A tile of vectors times a tile of rows of the projection, kChannels channels at a time. SPLIT: vectors are two
// bfloat16 numbers per channel, too; else they are bfloat16.
template <bool SPLIT>
struct Tile {
  static constexpr int kWarps = 8, kThreads = 32 * kWarps, kBlocks = 2;  // blocks of a multiprocessor
#ifdef V128
  static constexpr int kVectors = SPLIT ? 64 : 128, kRows = 128, kChannels = 128;
#else
  static constexpr int kVectors = 64, kRows = 128, kChannels = 128;
#endif
  static constexpr int kParts = SPLIT ? 2 : 1;  // of a vector's channel
  // A warp has 32 vectors and kOwnRows rows.
  static constexpr int kRowWarps = kWarps / (kVectors / 32), kOwnRows = kRows / kRowWarps;
  static constexpr int kWords = kRows / 32;       // of 32 signs of a vector
  static constexpr int kChunks = kChannels / 8;   // of 16 bytes, of a row in shared memory
  static constexpr int kSharedBytes = (2 * kRows + kParts * kVectors) * kChannels * 2;

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
};

// What a block notes about its vectors and rows.
template <typename T>
struct Notes {
  int64_t start[T::kVectors];               // where vectors begin, in elements; -1: there are no more
  float down[T::kVectors];                  // the power of two of each vector that the format multiplies it by
  float length[T::kVectors];                // -1 of zeros; NaN where all sums are to be computed again
  bool broken[T::kVectors];                 // has a NaN or an infinity
  float square[T::kRows];                   // of the length of each row
  float bound[T::kRows];                    // sums up to length * bound are computed again
};

// The signs of sums take the place of the vectors in shared memory.
template <typename T>
struct Signs {
  uint32_t positive[T::kVectors][T::kWords];  // or zero
  uint32_t doubts[T::kVectors][T::kWords];    // is computed again
};

// The sum of d products in the order of the format: neighbours in pairs, pairs of these, ..., block after block. Sixteen
// lanes have eight channels each at a time, for which f(channel, products) is called; all of them have the result.
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
#pragma unroll
      for (int h = 1; h < 8; h *= 2) {
#pragma unroll
        for (int k = 0; k < 8; k += 2 * h) x[k] = __fadd_rn(x[k], x[k + h]);
      }
      sum = x[0];
#pragma unroll
      for (int bit = 1; bit < kSumLanes; bit *= 2) {
        if (bit < lanes) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, bit));
      }
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

// Notes a vector, by sixteen lanes. stores: its norm, too
template <typename T>
__device__ __forceinline__ void note_vector(const Dense& a, int64_t first, int v, int lane, bool stores,
                                            Notes<T>& notes) {
  const bool real = notes.start[v] >= 0;
  const int64_t start = real ? notes.start[v] : notes.start[0];
  uint32_t most = 0;
  float sum = sum_in_order(a.blocks, a.n, lane, [&](int c, float (&x)[8]) {
    load_floats_as<8>(a.vectors, a.dtype, start + c, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) most = max(most, magnitude_bits(x[i])), x[i] = __fmul_rn(x[i], x[i]);
  });
  most = max_of_lanes<kSumLanes>(most);
  // Within these bounds the power of two changes no rounding that matters, as in qjl.cu.
  const bool plain = sum >= 0x1p-60f && sum <= 0x1p100f;
  const float down = power_of_two(-prescale_exponent(most)), up = power_of_two(prescale_exponent(most));
  float norm = __fsqrt_rn(sum);
  if (!__all_sync(0xffffffff, plain)) {
    sum = sum_in_order(a.blocks, a.n, lane, [&](int c, float (&x)[8]) {
      load_floats_as<8>(a.vectors, a.dtype, start + c, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(x[i], down), x[i] = __fmul_rn(x[i], x[i]);
    });
    norm = most < kInfinityBits ? __fmul_rn(__fsqrt_rn(sum), up) : quiet_nan();
  }
  if (lane % kSumLanes != 0) return;
  notes.down[v] = down, notes.broken[v] = most >= kInfinityBits;
  notes.length[v] = !real || most == 0 ? -1.0f : plain ? norm : quiet_nan();
  if (stores && real) a.norms[first + v] = norm;
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

// Channels base to base + width of all vectors, and zeros where there are no vectors or channels.
template <bool SPLIT, typename T>
__device__ __forceinline__ void load_vectors(const Dense& a, int base, int width, const Notes<T>& notes, uint4* to) {
  constexpr int kSteps = T::kVectors * T::kChunks / T::kThreads, kVectorsAtOnce = T::kThreads / T::kChunks;
  const int chunk = threadIdx.x % T::kChunks;
  if (8 * chunk >= round_up(width, 16)) return;  // nobody multiplies them
#pragma unroll 4
  for (int k = 0; k < kSteps; ++k) {
    const int v = threadIdx.x / T::kChunks + k * kVectorsAtOnce, at = T::place(v, chunk);
    const bool there = notes.start[v] >= 0 && 8 * chunk < width;
    const int64_t from = notes.start[v] + base + 8 * chunk;
    if constexpr (SPLIT) {
      float x[8] = {};
      if (there) load_floats_as<8>(a.vectors, a.dtype, from, x);
      split_floats(x, to[at], to[at + T::kVectors * T::kChunks]);
    } else {
      to[at] = there ? __ldg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(a.vectors) + from))
                     : make_uint4(0, 0, 0, 0);
    }
  }
}

// The same channels of the rows of the projection from row `first` on, and the sums of their squares so far.
template <typename T>
__device__ __forceinline__ void load_projection(const Dense& a, int first, int base, int width, Notes<T>& notes,
                                                uint4* to) {
  constexpr int kSteps = T::kRows * T::kChunks / T::kThreads, kRowsAtOnce = T::kThreads / T::kChunks;
  const int chunk = threadIdx.x % T::kChunks;
#pragma unroll 4
  for (int k = 0; k < kSteps; ++k) {
    const int r = threadIdx.x / T::kChunks + k * kRowsAtOnce, at = T::place(r, chunk);
    float p[8] = {}, square = 0;
    if (first + r < a.m && 8 * chunk < width) {
      load_floats<8>(a.projection + int64_t{first + r} * a.d + base + 8 * chunk, p);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) square = fmaf(p[i], p[i], square);
    square = sum_of_lanes<T::kChunks>(square);
    if (chunk == 0) notes.square[r] = base ? notes.square[r] + square : square;
    split_floats(p, to[at], to[at + T::kRows * T::kChunks]);
  }
}

// Notes up to where sums of rows are in doubt.
template <typename T>
__device__ __forceinline__ void note_rows(const Dense& a, Notes<T>& notes) {
  constexpr int kProducts = 1 + T::kParts;  // of the parts of 16 channels
  const float of_tensor_cores = static_cast<float>(round_up(a.d, 16) / 16 * kProducts * 24) * 0x1p-23f;
  const float unit = 1.01f * (of_tensor_cores + 3 * 0x1p-18f + 23 * 0x1p-24f);
  if (threadIdx.x >= T::kRows) return;
  const float square = notes.square[threadIdx.x];
  // Numbers of other sizes may leave what bfloat16 and sums of float32 can hold.
  const bool plain = square >= 0x1p-100f && square <= 0x1p100f;
  notes.bound[threadIdx.x] = plain ? unit * sqrtf(square) : INFINITY;
}

// Adds the products of `width` channels to a warp's sums.
template <bool SPLIT, typename T>
__device__ __forceinline__ void multiply(const uint4* vectors, const uint4* rows, int width, int first_vector,
                                         int first_row, int lane, float (&sums)[2][T::kOwnRows / 8][4]) {
  const int row_of_lane = lane % 8 + lane / 16 * 8;  // of two tiles of eight rows
#pragma unroll 1
  for (int k = 0; 16 * k < width; ++k) {
    uint4 x[T::kParts][2];
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[part][i] = load_tiles(vectors + part * T::kVectors * T::kChunks +
                                T::place(first_vector + 16 * i + lane % 16, 2 * k + lane / 16));
      }
    }
#pragma unroll
    for (int j = 0; j < T::kOwnRows / 8; j += 2) {
      const int at = T::place(first_row + 8 * j + row_of_lane, 2 * k + lane / 8 % 2);
      const uint4 high = load_tiles(rows + at), low = load_tiles(rows + at + T::kRows * T::kChunks);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mma_floats<__nv_bfloat16>(sums[i][j], x[0][i], low.x, low.y);
        mma_floats<__nv_bfloat16>(sums[i][j + 1], x[0][i], low.z, low.w);
        if constexpr (SPLIT) {
          mma_floats<__nv_bfloat16>(sums[i][j], x[1][i], high.x, high.y);
          mma_floats<__nv_bfloat16>(sums[i][j + 1], x[1][i], high.z, high.w);
        }
        mma_floats<__nv_bfloat16>(sums[i][j], x[0][i], high.x, high.y);
        mma_floats<__nv_bfloat16>(sums[i][j + 1], x[0][i], high.z, high.w);
      }
    }
  }
}

// Notes the signs of a warp's sums, and which of them are in doubt.
template <typename T>
__device__ __forceinline__ void note_signs(const float (&sums)[2][T::kOwnRows / 8][4], int first_vector, int first_row,
                                           int lane, const Notes<T>& notes, Signs<T>& out) {
  const int t = lane % 4;
#pragma unroll
  for (int word = 0; word < T::kOwnRows / 32; ++word) {
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
template <typename T>
__device__ __forceinline__ void settle_doubts(const Dense& a, int first_row, int warp, int lane, const Notes<T>& notes,
                                              Signs<T>& of) {
  constexpr int kOwnWords = T::kVectors * T::kWords / T::kWarps;
  static_assert(kOwnWords % 32 == 0);
#pragma unroll 1
  for (int from = warp * kOwnWords; from < (warp + 1) * kOwnWords; from += 32) {
    const int mine = from + lane;
    const bool real = notes.start[mine / T::kWords] >= 0 && !notes.broken[mine / T::kWords];
    unsigned some = __ballot_sync(0xffffffff, real && of.doubts[mine / T::kWords][mine % T::kWords]);
    while (some) {
      const int word = from + __ffs(static_cast<int>(some)) - 1, v = word / T::kWords;
      some &= some - 1;
      uint32_t doubts = of.doubts[v][word % T::kWords], positive = of.positive[v][word % T::kWords];
      while (doubts) {
        const int bit = __ffs(static_cast<int>(doubts)) - 1, row = first_row + word % T::kWords * 32 + bit;
        doubts &= doubts - 1;
        if (row >= a.m) break;
        const float* p = a.projection + int64_t{row} * a.d;
        const float sum = sum_in_order(a.blocks, a.n, lane, [&](int c, float (&x)[8]) {
          float q[8];
          load_floats_as<8>(a.vectors, a.dtype, notes.start[v] + c, x), load_floats<8>(p + c, q);
#pragma unroll
          for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(__fmul_rn(x[i], notes.down[v]), q[i]);
        });
        positive = (positive & ~(1u << bit)) | static_cast<uint32_t>(sum >= 0) << bit;
      }
      __syncwarp();
      if (lane == 0) of.positive[v][word % T::kWords] = positive;
    }
  }
}

template <typename T>
__device__ __forceinline__ void store_signs(const Dense& a, int64_t first, int first_row, const Notes<T>& notes,
                                            const Signs<T>& of) {
  const int row_bytes = a.m / 8, bytes = min(T::kRows, a.m - first_row) / 8;
  const int count = static_cast<int>(min(int64_t{T::kVectors}, a.rows.count - first));
  uint8_t* out = a.bits + first * row_bytes + first_row / 8;
  if (row_bytes % 4 == 0) {
    for (int i = threadIdx.x; i < count * T::kWords; i += T::kThreads) {
      const int v = i / T::kWords, word = i % T::kWords;
      if (4 * word >= bytes) continue;
      *reinterpret_cast<uint32_t*>(out + int64_t{v} * row_bytes + 4 * word) =
          notes.broken[v] ? 0 : of.positive[v][word];
    }
    return;
  }
  for (int i = threadIdx.x; i < count * T::kRows / 8; i += T::kThreads) {
    const int v = i / (T::kRows / 8), byte = i % (T::kRows / 8);
    if (byte >= bytes) continue;
    out[int64_t{v} * row_bytes + byte] =
        notes.broken[v] ? 0 : static_cast<uint8_t>(of.positive[v][byte / 4] >> byte % 4 * 8);
  }
}

// A block has neighbouring items, each a tile of vectors and one of rows, of which it keeps those of up to kChannels
// channels in shared memory while only the vectors change.
template <bool SPLIT>
__global__ void __launch_bounds__(Tile<SPLIT>::kThreads, Tile<SPLIT>::kBlocks)
    dense_tile_kernel(const __grid_constant__ Dense a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  // choose_sketch asks
  using T = Tile<SPLIT>;
  extern __shared__ uint4 dynamic[];
  uint4 *rows = dynamic, *vectors = dynamic + 2 * T::kRows * T::kChunks;
  Signs<T>& signs = *reinterpret_cast<Signs<T>*>(vectors);
  __shared__ Notes<T> notes;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const int first_vector = warp / T::kRowWarps * 32, first_own_row = warp % T::kRowWarps * T::kOwnRows;

  const int64_t vector_tiles = (a.rows.count + T::kVectors - 1) / T::kVectors;
  const int64_t items = vector_tiles * ((a.m + T::kRows - 1) / T::kRows);
  const int64_t each = (items + gridDim.x - 1) / gridDim.x, end = min(items, (blockIdx.x + 1) * each);
  int held = -1;  // the tile of rows that is in shared memory as a whole
#pragma unroll 1
  for (int64_t item = blockIdx.x * each; item < end; ++item) {
    const int row_tile = static_cast<int>(item / vector_tiles), first_row = row_tile * T::kRows;
    const int64_t first = item % vector_tiles * T::kVectors;
    __syncthreads();  // the signs of the item before are stored
    if (threadIdx.x < T::kVectors) {
      const int64_t vector = first + threadIdx.x;
      notes.start[threadIdx.x] = vector < a.rows.count ? a.rows(vector) : -1;
    }
    float sums[2][T::kOwnRows / 8][4] = {};
    const bool kept = held == row_tile;
#pragma unroll 1
    for (int base = 0; base < a.d; base += T::kChannels) {
      const int width = min(T::kChannels, a.d - base);
      __syncthreads();
      load_vectors<SPLIT>(a, base, width, notes, vectors);
      if (!kept) load_projection(a, first_row, base, width, notes, rows);
      if (base == 0) {
#pragma unroll 1
        for (int v = threadIdx.x / kSumLanes; v < T::kVectors; v += T::kThreads / kSumLanes) {
          note_vector(a, first, v, lane, row_tile == 0, notes);
        }
      }
      __syncthreads();
      multiply<SPLIT, T>(vectors, rows, width, first_vector, first_own_row, lane, sums);
    }
    if (!kept) note_rows(a, notes);
    if (a.d <= T::kChannels) held = row_tile;
    __syncthreads();
    note_signs<T>(sums, first_vector, first_own_row, lane, notes, signs);
    __syncthreads();
    settle_doubts<T>(a, first_row, warp, lane, notes, signs);
    __syncthreads();
    store_signs<T>(a, first, first_row, notes, signs);
  }
#endif
}

}  // namespace

void launch_dense_sketch(const void* x, const Rows& rows, Dtype dtype, format::Split split, const float* projection,
                         int m, uint8_t* bits, float* norms, const DeviceFacts& facts, int device,
                         cudaStream_t stream) {
  const Dense a{x, rows, dtype, projection, m, split.blocks * split.block, split.blocks, split.block, bits, norms};
  const auto launch = [&](auto split_vectors) {
    constexpr bool kSplit = decltype(split_vectors)::value;
    using T = Tile<kSplit>;
    const auto kernel = dense_tile_kernel<kSplit>;
    allow_shared_memory(reinterpret_cast<const void*>(kernel), device, T::kSharedBytes);
    const int64_t items = divide_up(rows.count, T::kVectors) * divide_up(m, T::kRows);
    const int64_t blocks = std::min<int64_t>(items, int64_t{facts.multiprocessors} * T::kBlocks);
    kernel<<<static_cast<unsigned>(blocks), T::kThreads, T::kSharedBytes, stream>>>(a);
  };
  if (dtype == Dtype::kBFloat16) return launch(std::false_type{});
  launch(std::true_type{});
}

}  // namespace turboquant::cuda
