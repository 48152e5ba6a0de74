// The kernel for many vectors (tiles.cuh): keys and values into page records, or vectors into dense rows.
//
// As many blocks as the device holds at once build their tables and then share out the tiles, a tile being neighbouring tokens of
// one head. Warps work on their own: while a warp encodes one tile, the next one is on its way into shared memory.
#include "tiles.cuh"

#include <algorithm>
#include <atomic>

#include "tile_launch.cuh"

namespace turboquant::cuda {
namespace {

// Tokens of a tile: those of a warp, 16 at least, which make a value block.
template <typename Traits>
constexpr int tile_tokens() {
  return std::max(32 / Traits::kLanes, format::kValueGroup);
}

// Warps of a block by the registers that a lane needs.
template <typename Traits>
constexpr int most_warps() {
  return Traits::kPerLane <= 64 ? 20 : Traits::kPerLane <= 96 ? 16 : Traits::kPerLane <= 128 ? 12 : 8;
}

// What a warp does next: a tile (its number and head), the source, the pass (a tile of long vectors takes several).
template <typename Traits>
struct TileStep {
  static constexpr int kPasses = tile_tokens<Traits>() * Traits::kLanes / 32;
  int tile, head, source, pass;

  // To the next one of a warp, tiles of all warps lying in between.
  __device__ __forceinline__ void next(int sources, int heads, int tiles_on, int heads_on) {
    if (kPasses > 1 && ++pass < kPasses) return;
    pass = 0;
    if (++source < sources) return;
    source = 0;
    tile += tiles_on;
    head += heads_on;
    if (head >= heads) {
      head -= heads;
      ++tile;
    }
  }
};

// Shared memory in words: signs and tables of the block, then what each warp has to itself.
struct TileMemory {
  int signs, tables[2], warps;  // where they begin
  int rows, sums;               // in a warp's part; it begins with the staged vectors
  int row_stride, sum_words, warp_words;

  template <typename Traits>
  static TileMemory of(const TileArguments& a, int element_size, bool search) {
    TileMemory m{};
    int words = 0, row = 0;
    const auto take = [&words](int n) {
      const int begin = words;
      words += (n + 3) / 4 * 4;
      return begin;
    };
    m.signs = take(a.sources * SignRows<Traits>::kWords);
    for (int s = 0; s < a.sources; ++s) {
      const Codebook& book = a.source[s].book;
      const TilePlan plan(Traits::kDim, book, search);
      m.tables[s] = take(plan.words());
      row = std::max(row, tile_row_words(kind_of(a, s), Traits::kDim, book.bits));
      m.sum_words = std::max(m.sum_words, plan.bin_sum_words());
    }
    m.warps = words;
    words = 0;
    m.row_stride = turboquant::cuda::row_stride(row);
    take(32 * stage_stride<Traits>(element_size));
    const int row_words = tile_tokens<Traits>() * m.row_stride;
    m.rows = take(row_words);
    // Rows are written when the sums are done with.
    m.sums = m.rows;
    if (shares_sums<Traits>()) take(std::max(0, m.sum_words - row_words));
    else m.sums = take(m.sum_words);
    m.warp_words = words;
    return m;
  }

  template <typename Traits>
  __host__ __device__ static constexpr bool shares_sums() {
    return TileStep<Traits>::kPasses == 1;
  }
  __host__ __device__ static RowKind kind_of(const TileArguments& a, int source) {
    return a.packed ? RowKind::kDense : source == 0 ? RowKind::kKey : RowKind::kValue;
  }
};

// Token t of the tile, from the lane that looks after it.
__device__ __forceinline__ Token token_of(const Token& mine, int t) {
  const auto tile = __shfl_sync(0xffffffff, reinterpret_cast<unsigned long long>(mine.tile), t);
  return {reinterpret_cast<uint8_t*>(tile), __shfl_sync(0xffffffff, mine.number, t)};
}
__device__ __forceinline__ uint8_t* pointer_of(uint8_t* mine, int t) {
  return reinterpret_cast<uint8_t*>(__shfl_sync(0xffffffff, reinterpret_cast<unsigned long long>(mine), t));
}

// `words` words of every token's row to where the token's lane says, four lanes for each token; `to` may be null.
__device__ __forceinline__ void store_rows(const uint32_t* rows, int stride, uint8_t* to, int words, int tokens, int lane) {
  const uint32_t* from = rows + lane / 4 * stride;
  if (words % 4 == 0) {
    for (int t = lane / 4; t < tokens; t += 8, from += 8 * stride) {
      uint8_t* out = pointer_of(to, t);
      if (!out) continue;
      for (int w = lane % 4 * 4; w < words; w += 16) {
        *reinterpret_cast<uint4*>(out + 4 * w) = *reinterpret_cast<const uint4*>(from + w);
      }
    }
  } else {
    for (int t = lane / 4; t < tokens; t += 8, from += 8 * stride) {
      uint8_t* out = pointer_of(to, t);
      if (!out) continue;
      for (int w = lane % 4; w < words; w += 4) *reinterpret_cast<uint32_t*>(out + 4 * w) = from[w];
    }
  }
}

// Rows of chunks (ValueChunks) to the tokens' value blocks: as whole words where 16 tokens make a block, else byte by byte.
__device__ __forceinline__ void store_values(const uint32_t* rows, int stride, const Token& to, const RecordLayout& layout, int lane,
                                             int tokens) {
  const ValueChunks chunks{layout.head_dim, layout.value_bits};
  const int count = chunks.count();
  for (int begin = 0; begin < tokens; begin += format::kValueGroup) {
    const Token first = token_of(to, begin);
    const bool together = to.tile && to.tile == first.tile && to.number == first.number + lane - begin;
    const unsigned all = __ballot_sync(0xffffffff, together) >> begin & 0xFFFF;
    const uint32_t* block_rows = rows + begin * stride;
    if (all == 0xFFFF && first.number % format::kValueGroup == 0) {
      uint8_t* block = first.value_block(layout);
      for (int item = lane; item < 8 * count; item += 32) {
        const int q = item % 4, h = item / 4 % 2, chunk = item / 8;
        uint32_t word[4][4];  // [byte b][unit]
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const uint4 w = *reinterpret_cast<const uint4*>(block_rows + value_token(q, b) * stride + 8 * chunk + 4 * h);
          word[b][0] = w.x, word[b][1] = w.y, word[b][2] = w.z, word[b][3] = w.w;
        }
        uint32_t out[4][4];  // [i][unit]: g = 2 i + h
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          uint32_t column[4] = {word[0][u], word[1][u], word[2][u], word[3][u]};
          transpose_bytes(column);
#pragma unroll
          for (int i = 0; i < 4; ++i) out[i][u] = column[i];
        }
        const int words = chunks.words(chunk);
        uint8_t* at = block + chunks.begin(chunk) + 4 * words * (4 * h + q);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t* to_words = reinterpret_cast<uint32_t*>(at + 32 * words * i);
          if (words == 4) {
            *reinterpret_cast<uint4*>(to_words) = make_uint4(out[i][0], out[i][1], out[i][2], out[i][3]);
          } else {
            to_words[0] = out[i][0];
            if (words > 1) to_words[1] = out[i][1];
            if (words > 2) to_words[2] = out[i][2];
          }
        }
      }
      if (chunks.tail() && lane < 4) {
        uint32_t column[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) column[b] = block_rows[value_token(lane, b) * stride + chunks.row_words() - 1];
        transpose_bytes(column);
#pragma unroll
        for (int i = 0; i < 4; ++i) *reinterpret_cast<uint32_t*>(block + 128 * chunks.units() + 16 * i + 4 * lane) = column[i];
      }
    } else {
      for (int t = lane / 4; t < format::kValueGroup; t += 8) {
        const Token of = token_of(to, begin + t);
        if (!of.tile) continue;
        const uint32_t* row = block_rows + t * stride;
        const int q = value_q(of.number);
        uint8_t* block = of.value_block(layout) + value_b(of.number);
        for (int item = lane % 4; item < 8 * count; item += 4) {
          const int unit = item % 4, h = item / 4 % 2, chunk = item / 8, words = chunks.words(chunk);
          if (unit >= words) continue;
          uint8_t* at = block + chunks.begin(chunk) + 4 * words * (4 * h + q) + 4 * unit;
          const uint32_t word = row[8 * chunk + 4 * h + unit];
#pragma unroll
          for (int i = 0; i < 4; ++i) at[32 * words * i] = static_cast<uint8_t>(word >> 8 * i);
        }
        if (chunks.tail()) block[128 * chunks.units() + 16 * (lane % 4) + 4 * q] = row[chunks.row_words() - 1] >> 8 * (lane % 4);
      }
    }
  }
}

template <typename Traits, bool SEARCH>
__global__ void __launch_bounds__(32 * most_warps<Traits>(), 1)
    tile_kernel(const __grid_constant__ TileArguments a, const __grid_constant__ TileMemory memory) {
  constexpr int kTokens = tile_tokens<Traits>(), kVectors = 32 / Traits::kLanes, kPasses = TileStep<Traits>::kPasses;
  extern __shared__ uint4 dynamic[];
  __shared__ SharedCodebook books[2];
  uint32_t* words = reinterpret_cast<uint32_t*>(dynamic);
  const int threads = blockDim.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = lane % Traits::kLanes, mine = lane / Traits::kLanes;
  uint32_t* stage = words + memory.warps + warp * memory.warp_words;
  uint32_t* rows = stage + memory.rows;
  uint32_t* sums = stage + memory.sums;

  // The first tile is on its way while the tables are made.
  const int warps = threads / 32, tiles = static_cast<int>((a.tokens + kTokens - 1) / kTokens);
  const int tiles_on = gridDim.x * warps / a.heads, heads_on = gridDim.x * warps % a.heads;
  const bool wide = a.dtype == ScalarType::Float;
  const auto start_copies = [&](const TileStep<Traits>& step) {
    if (step.tile >= tiles) return;
    const TileSource& source = a.source[step.source];
    const int64_t first = int64_t{step.tile} * kTokens + step.pass * kVectors;
    const int count = a.tokens - first < kVectors ? static_cast<int>(a.tokens - first) : kVectors;
    const uint8_t* from = source.data + first * source.token_stride + step.head * source.head_stride;
    if (wide) {
      stage_vectors<Traits, 4>(stage, from, source.token_stride, count, lane);
    } else {
      stage_vectors<Traits, 2>(stage, from, source.token_stride, count, lane);
    }
  };
  const int item = blockIdx.x * warps + warp;
  TileStep<Traits> step{item / a.heads, item % a.heads, 0, 0};
  start_copies(step);

  for (int s = 0; s < a.sources; ++s) {
    books[s].fill(a.source[s].book, threadIdx.x, threads);
    SignRows<Traits>::fill(words + memory.signs + s * SignRows<Traits>::kWords, a.source[s].signs, threadIdx.x, threads);
  }
  const auto clear_sums = [&] {
    for (int i = 4 * lane; i < memory.sum_words; i += 128) *reinterpret_cast<uint4*>(sums + i) = make_uint4(0, 0, 0, 0);
    __syncwarp();
  };
  if constexpr (SEARCH) clear_sums();
  __syncthreads();
  bool near[2] = {true, true};
  for (int s = 0; s < a.sources; ++s) {
    const TilePlan plan(Traits::kDim, a.source[s].book, SEARCH);
    fill_tables(words + memory.tables[s], plan, books[s], threadIdx.x, threads);
    for (int i = 0; i < plan.steps && plan.inner > 0; ++i) {
      near[s] = near[s] && books[s].boundary[(i + 1) * plan.inner - 1] < TilePlan::kNear;
    }
  }
  __syncthreads();

  while (step.tile < tiles) {
    const int64_t first = int64_t{step.tile} * kTokens;
    const int head = step.head;
    // Lane t looks after token t of the tile.
    const int64_t token = first + lane;
    const bool exists = lane < kTokens && token < a.tokens;
    Token to{nullptr, 0};
    if (exists && !a.packed) to = a.pages.token(a.slots[token], head, a.layout);

#pragma unroll 1
    for (int s = 0; s < a.sources; ++s) {
      const TileSource& source = a.source[s];
      const Codebook& book = source.book;
      const RowKind kind = TileMemory::kind_of(a, s);
      const float* center = source.center ? source.center + head * source.center_stride : nullptr;
      const uint32_t* signs = words + memory.signs + s * SignRows<Traits>::kWords + part * SignRows<Traits>::kStride;
      const TableBook with{&books[s], words + memory.tables[s], book.bits, book.scale_mode};
      const TilePlan plan(Traits::kDim, book, SEARCH);
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        wait_for_copies();
        float y[Traits::kPerLane];
        const Rotated v = rotate_vector<Traits>(y, part, [&](float (&y)[Traits::kPerLane]) {
          const uint32_t* staged = stage + lane * stage_stride<Traits>(2);
          if (a.dtype == ScalarType::BFloat16) {
            read_staged<Traits, __nv_bfloat16>(staged, signs, y);
          } else if (a.dtype == ScalarType::Half) {
            read_staged<Traits, __half>(staged, signs, y);
          } else {
            read_staged<Traits, float>(stage + lane * stage_stride<Traits>(4), signs, y);
          }
          if (center) subtract_center<Traits>(center, signs, part, y);
        });
        __syncwarp();
        step.next(a.sources, a.heads, tiles_on, heads_on);
        start_copies(step);

        const bool zero = v.length == 0;
        const float k = zero ? 0.0f : __fdiv_rn(a.constants.units, v.length);
        LaneOctets<Traits> octets;
        Fit fit;
        if constexpr (SEARCH) {
          fit = encode_search<Traits>(y, k, with, plan, near[s], sums + lane, octets);
          __syncwarp();
        } else {
          fit = encode_single<Traits>(y, k, with, octets);
        }
        uint16_t scale = zero ? 0 : fit.scale(book.scale_mode, v.length, v.exponent, a.constants);
        const int number = pass * kVectors + mine;
        uint32_t* row = rows + number * memory.row_stride;
        write_row<Traits>(octets, kind, book.bits, part, row);
        __syncwarp();
        if (!v.finite) {
          scale = format::kNanScale;
          for (int i = part; i < memory.row_stride; i += Traits::kLanes) row[i] = 0;
        }

        uint16_t* scale_to;
        if (kind == RowKind::kDense) {
          const int64_t t = first + number;
          scale_to = t < a.tokens ? a.scale + t * a.heads + head : nullptr;
        } else {
          const Token of = Traits::kLanes == 1 ? to : token_of(to, number);
          scale_to = !of.tile ? nullptr : kind == RowKind::kKey ? of.key_scale(a.layout) : of.value_scale(a.layout);
        }
        if (scale_to && part == 0) *scale_to = scale;
        if constexpr (SEARCH && !TileMemory::shares_sums<Traits>()) clear_sums();
      }

      __syncwarp();
      if (kind == RowKind::kDense) {
        uint8_t* out = exists ? a.packed + (token * a.heads + head) * a.row_bytes : nullptr;
        store_rows(rows, memory.row_stride, out, a.row_bytes / 4, kTokens, lane);
      } else if (kind == RowKind::kKey) {
        store_rows(rows, memory.row_stride, to.tile ? to.key_row(a.layout) : nullptr, a.layout.key_row_bytes / 4, kTokens, lane);
        if (a.layout.key_plane_bytes) {
          store_rows(rows + a.layout.key_row_bytes / 4, memory.row_stride, to.tile ? to.key_plane(a.layout) : nullptr,
                     a.layout.key_plane_bytes / 4, kTokens, lane);
        }
      } else {
        store_values(rows, memory.row_stride, to, a.layout, lane, kTokens);
      }
      if (a.tail.data) {
        const int64_t kept = to.tile ? a.tail.row(token) : -1;
        const int bytes = Traits::kDim * (wide ? 4 : 2);
        for (unsigned left = __ballot_sync(0xffffffff, kept >= 0); left; left &= left - 1) {
          const int t = __ffs(left) - 1;
          copy_bytes(source.data + (first + t) * source.token_stride + head * source.head_stride,
                     a.tail.at(__shfl_sync(0xffffffff, kept, t), head, s, bytes), bytes, lane, 32);
        }
      }
      __syncwarp();
      if constexpr (SEARCH && TileMemory::shares_sums<Traits>()) clear_sums();
    }
  }
}

// ---- Host side --------------------------------------------------------------------------------------------------------

constexpr int kMostDevices = 64;
constexpr int kLeastWarps = 4;  // fewer hide too little of what each of them waits for

struct DeviceLimits {
  int multiprocessors, shared_bytes;
};
DeviceLimits limits_of(int device) {
  DeviceLimits l{};
  check_cuda(cudaDeviceGetAttribute(&l.multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&l.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  return l;
}

template <typename Traits, bool SEARCH>
bool launch_tile_kernel(const TileArguments& a, cudaStream_t stream) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const DeviceLimits limits = limits_of(device);
  const TileMemory memory = TileMemory::of<Traits>(a, a.dtype == ScalarType::Float ? 4 : 2, SEARCH);
  const int available = limits.shared_bytes - static_cast<int>(2 * sizeof(SharedCodebook)) - 1024;
  const int warps = std::min(most_warps<Traits>(), (available / 4 - memory.warps) / memory.warp_words);
  if (warps < kLeastWarps) return false;
  const int64_t items = (a.tokens + tile_tokens<Traits>() - 1) / tile_tokens<Traits>() * a.heads;
  if (items > INT32_MAX / 2) return false;
  if (items * a.sources < int64_t{limits.multiprocessors} * warps) return false;

  const int bytes = 4 * (memory.warps + warps * memory.warp_words);
  static std::atomic<int> allowed[kMostDevices];  // shared memory that was asked for already
  if (device >= kMostDevices || allowed[device].load() < bytes) {
    check_cuda(cudaFuncSetAttribute(tile_kernel<Traits, SEARCH>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "cudaFuncSetAttribute");
    if (device < kMostDevices) allowed[device].store(bytes);
  }
  const int64_t blocks = std::min<int64_t>(limits.multiprocessors, (items + warps - 1) / warps);
  tile_kernel<Traits, SEARCH><<<static_cast<unsigned>(blocks), 32 * warps, bytes, stream>>>(a, memory);
  return true;
}

template <int M, int LOG_N>
bool launch_dim(const TileArguments& a, cudaStream_t stream) {
  using Traits = TileTraits<M, LOG_N>;
  bool search = false;
  for (int s = 0; s < a.sources; ++s) {
    const Codebook& book = a.source[s].book;
    if (book.bits > 5 || TilePlan(Traits::kDim, book, true).bins() > TilePlan::kMostBins) return false;
    search = search || book.num_steps > 1;
  }
  return search ? launch_tile_kernel<Traits, true>(a, stream) : launch_tile_kernel<Traits, false>(a, stream);
}

}  // namespace

bool launch_tiles(const TileArguments& a, format::Split split, cudaStream_t stream) {
  switch (split.blocks * split.block) {  // the head dimensions of today's models
    case 64: return launch_dim<1, 6>(a, stream);
    case 80: return launch_dim<5, 4>(a, stream);
    case 96: return launch_dim<3, 5>(a, stream);
    case 112: return launch_dim<7, 4>(a, stream);
    case 128: return launch_dim<1, 7>(a, stream);
    case 160: return launch_dim<5, 5>(a, stream);
    case 192: return launch_dim<3, 6>(a, stream);
    case 256: return launch_dim<1, 8>(a, stream);
    case 512: return launch_dim<1, 9>(a, stream);
    default: return false;
  }
}

}  // namespace turboquant::cuda
