// The kernel for many vectors (codec/encode_bulk.cuh): keys and values into page records, or vectors into dense rows.
//
// As many blocks as the device holds at once build their tables and then share out the tiles, a tile being the
// neighbouring tokens of one head that a warp holds at a time. Warps work on their own, each on keys or on values:
// while a warp encodes one tile, the next one is on its way into shared memory. What is packed leaves from registers.
#include "cuda/codec/encode_bulk.cuh"

#include <algorithm>
#include <atomic>

#include "cuda/codec/bulk.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kMostWarps = 16;  // of a block: as many as have the registers that they need

template <typename Traits>
constexpr int kStageWords = Traits::kVectors * kStageStride<Traits>;

// Shared memory in words: table and signs of each source, then what each warp stages.
template <typename Traits, bool SEARCH>
constexpr int kSourceWords = kTableWords<Traits, SEARCH> + Traits::kLanes * kSignStride;

template <typename Traits, typename T, bool SEARCH>
__global__ void __launch_bounds__(32 * kMostWarps, 1) tile_kernel(const __grid_constant__ TileArguments a) {
  constexpr int kTokens = kTileTokens<Traits>, kLanes = Traits::kLanes;
  // Whether a slot is on its way while its vector is encoded, or asked for after: where registers are short.
  constexpr bool kSlotFirst = !SEARCH && kLanes == 2;
  extern __shared__ uint4 dynamic[];
  __shared__ SharedCodebook books[2];
  __shared__ alignas(16) uint32_t levels[2][4];
  uint32_t* words = reinterpret_cast<uint32_t*>(dynamic);
  const int threads = blockDim.x, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int part = lane % kLanes, vector = lane / kLanes;

  // Of two neighbouring warps one takes keys and one values, every scheduler as many of both; then they change over,
  // since values take longer.
  int next = (warp + warp / 4) % a.sources;
  const int warps = threads / 32 / a.sources;
  uint32_t* stage = words + a.sources * kSourceWords<Traits, SEARCH> + warp * kStageWords<Traits>;

  const int tokens = static_cast<int>(a.tokens);
  const int tiles = (tokens + kTokens - 1) / kTokens * kPasses<Traits>;
  // The last tiles, fewer than there are warps, go to all multiprocessors.
  const int item = warp / a.sources * gridDim.x + blockIdx.x, items_on = gridDim.x * warps;
  int tile = item / a.heads, head = item % a.heads;
  const int tiles_on = items_on / a.heads, heads_on = items_on % a.heads;
  const auto start_copies = [&] {
    if (tile >= tiles) return;
    const TileSource& from = a.source[next];
    const uint32_t stride = static_cast<uint32_t>(from.token_stride);
    const int first = tile / kPasses<Traits> * kTokens + token_of_vector<Traits>(0, tile % kPasses<Traits>);
    const uint8_t* rows = from.data + uint64_t{static_cast<uint32_t>(first)} * stride +
                          uint64_t{static_cast<uint32_t>(head)} * static_cast<uint32_t>(from.head_stride);
    start_rows<Traits>(stage, rows, stride, tokens - first, lane, [](int v) { return token_of_vector<Traits>(v, 0); });
  };
  // The first vectors of all warps keep memory busy for longer than tables of one candidate take, and would hold up what those
  // wait for, the kernel's code included. So they come after the tables, if these are not those of several candidates.
  if constexpr (SEARCH) start_copies();
  // What comes from memory, a quarter of the threads asks for each, so that all wait once.
  const int quarter = threads / 4, asked = warp / (quarter / 32), t = asked % 2;
  if (t < a.sources && asked < 2) books[t].fill(a.source[t].book, threadIdx.x % quarter, quarter);
  if (t < a.sources && asked >= 2) {
    fill_signs<Traits>(words + t * kSourceWords<Traits, SEARCH> + kTableWords<Traits, SEARCH>, a.source[t].signs,
                       threadIdx.x % quarter, quarter);
  }
  __syncthreads();
  for (int t = 0; t < a.sources; ++t) {
    const Codebook& book = a.source[t].book;
    fill_table<Traits, SEARCH>(words + t * kSourceWords<Traits, SEARCH>, books[t], book.bits, book.num_steps,
                               threadIdx.x, threads);
    fill_level_bytes(levels[t], books[t], threadIdx.x);
  }
  if constexpr (!SEARCH) start_copies();
  __syncthreads();

#pragma unroll 1
  while (tile < tiles) {
    const int now = next, from_head = head, number = token_of_vector<Traits>(vector, tile % kPasses<Traits>);
    const int token = tile / kPasses<Traits> * kTokens + number;
    const bool exists = token < tokens;
    int64_t slot = kSlotFirst && exists && !a.packed ? a.slots[token] : -1;
    const TileSource& source = a.source[now];
    const Kind kind = a.packed ? Kind::kRows : now == 0 ? Kind::kKeys : Kind::kValues;
    const uint32_t* table = words + now * kSourceWords<Traits, SEARCH>;
    const uint32_t* signs = table + kTableWords<Traits, SEARCH> + part * kSignStride;

    wait_for_copies();
    __syncwarp();
    float y[64];
    const Rotated v = rotate_vector<Traits>(y, part, [&](float (&y)[64]) {
      const uint32_t* staged = stage + vector * kStageStride<Traits> + 32 * part;
      if (source.channels.center) {
        const auto channels = source.channels.from(from_head * source.channel_stride + 64 * part);
        read_staged<T, true>(staged, signs, channels, y);
      } else {
        read_staged<T, false>(staged, signs, {}, y);
      }
    });
    __syncwarp();
    next = a.sources - 1 - now;
    tile += tiles_on;
    head += heads_on;
    if (head >= a.heads) {
      head -= a.heads;
      ++tile;
    }
    start_copies();

    const bool zero = v.length == 0;
    const float factor = zero ? 0.0f : divide(a.constants.units, v.length);
    const float k[2] = {is_negated<Traits>(part, 0) ? -factor : factor, is_negated<Traits>(part, 1) ? -factor : factor};
    const TableBook with{&books[now], reinterpret_cast<const uint8_t*>(table), levels[now], source.book.bits,
                         source.book.num_steps};
    LaneCodes codes;
    Fit fit;
    const bool wide = source.book.bits == 5;
    if constexpr (SEARCH) {
      fit = wide ? encode_search<Traits, true>(y, k, part, v.finite, with, codes)
                 : encode_search<Traits, false>(y, k, part, v.finite, with, codes);
    } else {
      fit = wide ? encode_single<Traits, true>(y, k, v.finite, with, codes)
                 : encode_single<Traits, false>(y, k, v.finite, with, codes);
    }
    if (!kSlotFirst && exists && !a.packed) slot = a.slots[token];
    uint16_t scale = zero ? 0 : fit.scale(source.book.scale_mode, v.length, v.exponent, a.constants);
    if (!v.finite) scale = format::kNanScale;

    const Token to = a.packed ? Token{} : a.pages.token(slot, from_head, a.layout);
    dispatch_codes(kind, source.book.bits, [&]<Kind KIND, int BITS>() {
      if constexpr (BITS == 8) {
        // other kernels' codes
      } else if constexpr (KIND == Kind::kKeys) {
        if (!to.tile) return;
        uint8_t *row = to.key_row(a.layout), *plane = to.key_plane(a.layout);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          put_key_group<BITS>(codes.low + 4 * h, codes.high[h], Traits::group(part, h), row, plane);
        }
        if (part == 0) __stwb(to.key_scale(a.layout), scale);
      } else if constexpr (KIND == Kind::kValues) {
        // Are the tokens those of a value block, in its order?
        const int64_t begin = slot - number % format::kValueGroup;
        const int64_t common = __shfl_sync(0xffffffff, begin, lane - vector % format::kValueGroup * kLanes - part);
        const bool together = __all_sync(0xffffffff, to.tile && begin == common && begin % format::kValueGroup == 0);
        if constexpr (BITS == 3) to_neighbours<Traits>(codes.low, part);
        if (together) {
          put_value<Traits, BITS, true>(codes.low, part, to.value_block(a.layout), to.number);
        } else if (to.tile) {
          put_value<Traits, BITS, false>(codes.low, part, to.value_block(a.layout), to.number);
        }
        if (to.tile && part == 0) __stwb(to.value_scale(a.layout), scale);
      } else if (exists) {
        const int64_t row = int64_t{token} * a.heads + from_head;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          put_dense_group<BITS>(codes.low + 4 * h, codes.high[h], Traits::group(part, h), a.packed + row * a.row_bytes);
        }
        if (part == 0) a.scale[row] = scale;
      }
    });
    if (a.tail.data && to.tile) {
      const int64_t kept = a.tail.row(token);
      constexpr int bytes = 2 * Traits::kDim;
      if (kept >= 0) {
        copy_bytes(source.data + int64_t{token} * source.token_stride + from_head * source.head_stride,
                   a.tail.at(kept, from_head, now, bytes), bytes, part, kLanes);
      }
    }
  }
}

// ---- Host side ------------------------------------------------------------------------------------------------------

constexpr int kMostDevices = 64;
// As many of keys as of values on each scheduler. Fewer hide too little of what each of them waits for.
constexpr int kLeastWarps = 8;

struct DeviceLimits {
  int multiprocessors, shared_bytes;
};
DeviceLimits limits_of(int device) {
  DeviceLimits l{};
  check_cuda(cudaDeviceGetAttribute(&l.multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&l.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "cudaDeviceGetAttribute");
  return l;
}

template <typename Traits, typename T, bool SEARCH>
bool launch_tile_kernel(const TileArguments& a, cudaStream_t stream) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const DeviceLimits limits = limits_of(device);
  const int fixed = 4 * a.sources * kSourceWords<Traits, SEARCH>, own = 4 * kStageWords<Traits>;
  const int available = limits.shared_bytes - static_cast<int>(2 * sizeof(SharedCodebook)) - 1024;
  const int warps = std::min(kMostWarps, (available - fixed) / own) / kLeastWarps * kLeastWarps;
  if (warps < kLeastWarps) return false;
  const int64_t items =
      (a.tokens + kTileTokens<Traits> - 1) / kTileTokens<Traits> * kPasses<Traits> * a.heads * a.sources;
  if (2 * items < int64_t{limits.multiprocessors} * warps || std::max(items, a.tokens) > INT32_MAX / 2) return false;
  for (int s = 0; s < a.sources; ++s) {
    if (std::max(a.source[s].token_stride, a.source[s].head_stride) > INT32_MAX) return false;
  }

  const int bytes = fixed + warps * own;
  static std::atomic<int> allowed[kMostDevices];  // shared memory that was asked for already
  if (device >= kMostDevices || allowed[device].load() < bytes) {
    check_cuda(cudaFuncSetAttribute(tile_kernel<Traits, T, SEARCH>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "cudaFuncSetAttribute");
    if (device < kMostDevices) allowed[device].store(bytes);
  }
  tile_kernel<Traits, T, SEARCH><<<static_cast<unsigned>(limits.multiprocessors), 32 * warps, bytes, stream>>>(a);
  return true;
}

template <int LOG_N, typename T>
bool launch_dim(const TileArguments& a, cudaStream_t stream) {
  using Traits = TileTraits<LOG_N>;
  bool search = false;
  for (int s = 0; s < a.sources; ++s) {
    const Codebook& book = a.source[s].book;
    if (book.bits > 5 || book.num_steps > kMostCandidates) return false;
    search = search || book.num_steps > 1;
  }
  if (!search) return launch_tile_kernel<Traits, T, false>(a, stream);
  // Several candidates need |u| < 2^16.
  if constexpr (Traits::kDim <= 128) return launch_tile_kernel<Traits, T, true>(a, stream);
  return false;
}

}  // namespace

bool launch_encode_bulk(const TileArguments& a, format::Split split, cudaStream_t stream) {
  return dispatch_tiles(a.dtype, split, [&](auto log_d, auto tag) {
    return launch_dim<log_d, typename decltype(tag)::type>(a, stream);
  });
}

}  // namespace turboquant::cuda
