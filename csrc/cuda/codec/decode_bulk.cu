// The kernel that decodes many vectors of 64, 128 or 256 channels: from page records, or from dense rows.
//
// Under the scale of a vector its numbers are small integers, and six stages of butterflies only add and subtract them:
// |sum| <= 2^13, times the 11 bits of a float16 scale, is a float32 number, so nothing is rounded (format.md section 6).
// Integer tensor cores do these stages for 64 channels at a time, as products with a matrix of 1 and -1. Integers do the
// seventh, and scale * sum rounds once, as the format's seventh stage does. What comes after that is in floats: an
// eighth stage, the factor 1 / sqrt(n), signs, channels.
//
// A warp takes 16 neighbouring tokens of one head. While it decodes them, the codes of the next ones are copied to shared
// memory: loads into registers that take long would hold up the short ones, which are counted together with them. Levels
// are the left operand of the products (codec/decode_bulk.cuh). Channels are numbered so that a lane gets 8 neighbours of the
// result. They go to shared memory first, because memory takes whole vectors faster than parts of them.
#include "cuda/codec/decode_bulk.cuh"

#include <algorithm>

#include "cuda/codec/bulk.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

template <int LOG_N>
struct LoadTraits {
  static constexpr int kLogDim = LOG_N, kDim = 1 << LOG_N, kSets = kDim / kSetChannels;
  static constexpr int kWarps = kDim <= 128 ? 4 : 2,
                       kBlocks = 4;  // of a block, of a multiprocessor: registers for no more

  // Between the staged vectors of a tile: two of them, of which eight lanes write 64 bytes each, meet different banks.
  static constexpr int kStageBytes = 2 * kDim + 64;
  static constexpr int kChunks = kDim / 8, kTogether = 32 / kChunks;  // of 16 bytes in a vector; vectors of a store

  // What arrives: codes of up to 8 bits, or of 4 and then the fifth ones, and scales.
  static constexpr int kScales = kTokens * kDim, kSlotBytes = kScales + kScaleBytes;
};

// ---- Tiles ----------------------------------------------------------------------------------------------------------

// A tile: neighbouring tokens of a sequence and a head. Neighbouring warps take neighbouring heads, then the next tile.
struct Place {
  int sequence, tile, head;

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

// What leads to the page of a tile: asked for while codes become levels, and looked at after that.
struct PageAhead {
  int page, length;

  __device__ __forceinline__ PageAhead(const LoadTileArguments& a, const Place& place) : page(-1), length(0) {
    const int number = place.tile * kTokens >> a.layout.page_shift;
    if (place.sequence >= static_cast<int>(a.seqs) || number >= a.max_pages) return;
    length = a.lengths[place.sequence];
    page = a.table[int64_t{place.sequence} * a.max_pages + number];
  }
};

// What is copied of each tile: codes, fifth bits and scales, in one run of bytes each.
struct TileRuns {
  int codes, planes;                         // bytes
  int from_codes, from_planes, from_scales;  // of pages: in a tile of a record

  static __device__ __forceinline__ TileRuns of_pages(const RecordLayout& r, bool values) {
    if (values) return {r.value_block_bytes, 0, r.value_blocks, 0, r.value_scales};
    return {kTokens * r.key_row_bytes, kTokens * r.key_plane_bytes, 0, r.key_planes, r.key_scales};
  }
  static __device__ __forceinline__ TileRuns of_rows(int row_bytes) { return {kTokens * row_bytes, 0, 0, 0, 0}; }
};

// Starts copying a tile of dense rows into the warp's slot. Returns how many there are, up to 16.
template <typename Traits>
__device__ __forceinline__ int fetch_dense(const LoadTileArguments& a, int begin, const TileRuns& runs, int lane,
                                           uint8_t* slot, uint64_t* barrier) {
  const uint8_t *rows = a.packed + int64_t{begin} * a.row_bytes,
                *scales = reinterpret_cast<const uint8_t*>(a.scale + begin);
  const int count = static_cast<int>(min(a.max_length - begin, int64_t{kTokens}));
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(rows) | reinterpret_cast<uintptr_t>(scales);
  const bool whole = count == kTokens && addresses % 16 == 0;
  if (!whole) {  // the last tile, or, of tensors at such addresses, all
#pragma unroll 1
    for (int i = lane; i < count * a.row_bytes / 8; i += 32) {
      reinterpret_cast<uint2*>(slot)[i] = reinterpret_cast<const uint2*>(rows)[i];
    }
    if (lane < count) reinterpret_cast<uint16_t*>(slot + Traits::kScales)[lane] = a.scale[begin + lane];
    __syncwarp();
  }
  fill_slot(barrier, {{slot, rows, whole ? runs.codes : 0}, {slot + Traits::kScales, scales, whole ? kScaleBytes : 0}});
  return count;
}

// The same of a page. Tokens of a tile are those of a value block, and share a page. Beyond the end of a sequence, or of
// what is asked for, codes are copied all the same. Returns how many tokens are there.
template <typename Traits>
__device__ __forceinline__ int fetch_page(const LoadTileArguments& a, const Place& place, const PageAhead& ahead,
                                          const TileRuns& runs, uint8_t* slot, uint64_t* barrier) {
  const int begin = place.tile * kTokens, count = min(ahead.length, static_cast<int>(a.max_length)) - begin;
  const Token from =
      a.pages.token(count > 0 ? ahead.page : -1, begin & ((1 << a.layout.page_shift) - 1), place.head, a.layout);
  const auto run = [&](int to, int at, int bytes) {  // a tile has two of each
    return Run{slot + to, from.tile + (at + (from.number ? bytes : 0)), from.tile ? bytes : 0};
  };
  fill_slot(barrier, {run(0, runs.from_codes, runs.codes), run(runs.codes, runs.from_planes, runs.planes),
                      run(Traits::kScales, runs.from_scales, kScaleBytes)});
  return from.tile ? count : 0;
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

// Vectors of a tile, staged in shared memory, to where they belong: whole ones, or halves of them, in one store.
template <typename Traits>
__device__ __forceinline__ void put_staged(const uint8_t* staged, void* out, const Place& place,
                                           const LoadTileArguments& a, int lane) {
  const int first = lane / Traits::kChunks, at = 16 * (lane % Traits::kChunks);
  const int begin = place.tile * kTokens, left = static_cast<int>(a.max_length) - begin;
  const uint8_t* from = staged + first * Traits::kStageBytes + at;
  uint8_t* to = static_cast<uint8_t*>(out) + at +
                ((int64_t{place.sequence} * a.max_length + begin + first) * a.heads + place.head) * (2 * Traits::kDim);
  const int64_t on = int64_t{a.heads} * (2 * Traits::kDim * Traits::kTogether);
#pragma unroll
  for (int k = 0; k < kTokens; k += Traits::kTogether) {
    if (k + first < left) {
      __stwb(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(from + k * Traits::kStageBytes));
    }
    to += on;
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
__global__ void __launch_bounds__(32 * Traits::kWarps, Traits::kBlocks)
    load_tile_kernel(const __grid_constant__ LoadTileArguments a) {
  constexpr int kSets = Traits::kSets, kDim = Traits::kDim, kWarps = Traits::kWarps;
  __shared__ alignas(16) float factors[2][kDim];
  __shared__ uint4 butterflies[2][8][32];  // [source][4 step + word][lane]
  __shared__ alignas(16) int8_t level_bytes[2][32];
  __shared__ alignas(16) uint8_t stages[kWarps][kTokens * Traits::kStageBytes];
  __shared__ alignas(16) uint8_t slots[kWarps][Traits::kSlotBytes];
  __shared__ uint64_t barriers[kWarps];
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  uint8_t *staged = stages[warp], *slot = slots[warp];
  uint64_t* barrier = barriers + warp;
  if (lane == 0) init_barrier(barrier, 1);
  barriers_ready();
  __syncwarp();

  // Neighbouring warps take keys and values in turn.
  const int s = warp % a.sources;
  const bool values = s == 1;
  const LoadTileSource& source = a.source[s];
  const int bits = source.bits;
  const int warps = kWarps / a.sources, tiles = a.tiles_of_sequence, seqs = static_cast<int>(a.seqs);
  const Kind kind = a.packed ? Kind::kRows : values ? Kind::kValues : Kind::kKeys;
  const LaneReads reads = a.packed ? LaneReads::of_rows(bits, a.row_bytes, g, t)
                          : values ? LaneReads::of_values(a.layout, kSets, g, t)
                                   : LaneReads::of_keys(a.layout, g, t);
  Place place(blockIdx.x * warps + warp / a.sources, a.heads, tiles);
  const Place on(gridDim.x * warps, a.heads, tiles);
  const TileRuns runs = a.packed ? TileRuns::of_rows(a.row_bytes) : TileRuns::of_pages(a.layout, values);
  // Starts copying a tile. Returns how many tokens are there.
  const auto fetch = [&](const Place& place, const PageAhead& ahead) {
    if (place.sequence >= seqs) return 0;
    return a.packed ? fetch_dense<Traits>(a, place.tile * kTokens, runs, lane, slot, barrier)
                    : fetch_page<Traits>(a, place, ahead, runs, slot, barrier);
  };

  int middle[4];  // in registers: what sums start from
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    middle[i] = __float_as_int(kMiddle);
    asm("" : "+r"(middle[i]));
  }
  uint32_t phase = 0;
  int coming = fetch(place, PageAhead(a, place));
  Place next = place;
  next.advance(on, a.heads, tiles);

  // Meanwhile: signs times 1 / sqrt(n), matrices, levels.
  for (int i = threadIdx.x; i < a.sources * kDim; i += 32 * kWarps) {
    factors[i / kDim][i % kDim] = __fmul_rn(a.source[i / kDim].signs[i % kDim], block_norm(Traits::kLogDim));
  }
  for (int i = warp; i < 8 * a.sources; i += kWarps) {
    butterflies[i / 8][i % 8][lane] = butterfly_operand(i >= 8, i / 4 % 2, i % 4, lane);
  }
  if (warp < a.sources) LevelWords::fill(level_bytes[warp], a.source[warp].levels, a.source[warp].bits, lane);
  __syncthreads();

#pragma unroll 1
  for (; place.sequence < seqs; place = next, next.advance(on, a.heads, tiles)) {
    const PageAhead ahead(a, next);
    const int count = coming;
    wait_slot(barrier, phase);
    phase ^= 1;
    Operands<Traits> operands;
    const LevelWords levels(level_bytes[s]);  // anew for every tile: registers are rare
    dispatch_codes(kind, bits, [&]<Kind KIND, int BITS>() {
      const StoredCodes<Traits, KIND, BITS> stored(reads, slot, a.layout.key_row_bytes, g, t);
      put_levels(stored, levels, count, g, t, operands);
    });
    float unit[2], offset[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const __half scale = reinterpret_cast<const __half*>(slot + Traits::kScales)[g + 8 * i];
      unit[i] = g + 8 * i < count ? __fmul_rn(__half2float(scale), format::kLevelUnit) : 0.0f;
      offset[i] = __fmul_rn(unit[i], -kMiddle);
    }
    __syncwarp();
    coming = fetch(next, ahead);

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
        const format::Channels channels = source.channels.of_head(place.head, kDim);
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
          *reinterpret_cast<uint4*>(staged + (g + 8 * i) * Traits::kStageBytes + 2 * (kSetChannels * h + channel)) =
              make_uint4(word[0], word[1], word[2], word[3]);
        }
      }
    }
    __syncwarp();
    put_staged<Traits>(staged, source.out, place, a, lane);
    __syncwarp();

    // Rare: tokens that are not there are zeros. And which zero or NaN a sum gives depends, where scales are zero,
    // negative, infinite or NaN, on how it is made: such tokens go through the butterflies as they are.
    bool there[2], odd[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      there[i] = g + 8 * i < count;
      odd[i] = there[i] && !(unit[i] > 0 && unit[i] < INFINITY);
    }
    if (!__any_sync(0xffffffff, !there[0] || !there[1] || odd[0] || odd[1])) continue;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int position = place.tile * kTokens + g + 8 * i;
      T* own = static_cast<T*>(source.out) +
               ((int64_t{place.sequence} * a.max_length + position) * a.heads + place.head) * kDim;
      if (!(i ? there[1] : there[0]) && position < static_cast<int>(a.max_length)) {
#pragma unroll 1
        for (int n = 8 * t; n < kDim; n += 32) *reinterpret_cast<uint4*>(own + n) = make_uint4(0, 0, 0, 0);
      }
#pragma unroll 1
      for (uint32_t left = __ballot_sync(0xffffffff, i ? odd[1] : odd[0]); left; left &= left - 1) {
        const int one = __ffs(left) - 1;  // a lane of the token: each of its four puts its numbers there
        if (one % 4) continue;
        float* y = reinterpret_cast<float*>(staged);
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
        put_plainly<Traits>(y, factors[s], source.channels.of_head(place.head, kDim), lane,
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
  // The kernel counts items and positions with 32 bits.
  if (items > INT32_MAX / 2 || a.max_length > INT32_MAX - kTokens) return false;
  int device = 0, multiprocessors = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  if (items * a.sources < multiprocessors * Traits::kWarps) return false;
  const int64_t blocks =
      std::min<int64_t>(multiprocessors * Traits::kBlocks, (items * a.sources + Traits::kWarps - 1) / Traits::kWarps);
  a.tiles_of_sequence = static_cast<int>(of_sequence);
  load_tile_kernel<Traits, T><<<static_cast<unsigned>(blocks), 32 * Traits::kWarps, 0, stream>>>(a);
  return true;
}

}  // namespace

bool launch_decode_bulk(const LoadTileArguments& a, format::Split split, cudaStream_t stream) {
  if (!a.packed && a.source[1].bits == 8) return false;
  return dispatch_tiles(a.dtype, split, [&](auto log_d, auto tag) {
    return launch_dim<log_d, typename decltype(tag)::type>(a, stream);
  });
}

}  // namespace turboquant::cuda
