// The kernel that encodes many vectors (codec/encode_bulk.cuh): keys and values into page records, or vectors into
// dense rows.
//
// The grid is as many blocks as the device holds at once. Each block builds its tables; its warps then take spans, a
// span being neighbouring tokens of one head, each warp of keys or of values. While a warp encodes one span, it copies
// the next into shared memory. Codes are stored from registers.
#include "cuda/codec/encode_bulk.cuh"
#include "cuda/codec/encode_bulk_stores.cuh"

#include "choices/codec.h"
#include "cuda/codec/bulk.cuh"
#include "cuda/common/device_facts.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

// Shared memory in words: table and signs of each source, then the stage of each warp.
template <typename Traits, bool SEARCH>
constexpr int kSourceWords = choices::encode_source_words(Traits::kDim, SEARCH);
template <typename Traits>
constexpr int kStageWords = choices::encode_stage_words(Traits::kDim);
static_assert(sizeof(SharedCodebook) == choices::kSharedCodebookBytes);

// How the sources of a launch are rounded.
enum class Rounding {
  kOne,     // by a table of one candidate
  kSearch,  // by a table of up to eight
  kBytes,   // to 8-bit codes, which have no table
};

// Which spans a warp takes, in steps of as many vectors as it has registers for (kPasses). Items are dealt to
// multiprocessors first, so that the last ones, fewer than there are warps, spread over all of them. All tokens of a
// head come before those of the next one: its records are a small part of the cache, so that bytes of scattered tokens
// meet others of their sectors in the L2 cache.
template <typename Traits>
class Items {
 public:
  __device__ __forceinline__ Items(const EncodeArguments& a, int warp, int warps) : heads_(a.heads) {
    passes_ = (static_cast<int>(a.tokens) + kSpanTokens<Traits> - 1) / kSpanTokens<Traits> * kPasses<Traits>;
    const int item = warp / a.sources * gridDim.x + blockIdx.x, on = gridDim.x * (warps / a.sources);
    pass_ = item % passes_, head = item / passes_;
    passes_on_ = on % passes_, heads_on_ = on / passes_;
  }
  // The first comparison is always true. With it, the compiler finds registers for all variables of the loop.
  __device__ __forceinline__ bool any_left() const { return pass_ < passes_ && head < heads_; }
  // The first token of the span, and the place in it of one of the warp's vectors.
  __device__ __forceinline__ int first_token() const { return pass_ / kPasses<Traits> * kSpanTokens<Traits>; }
  __device__ __forceinline__ int number(int vector) const {
    return token_of_vector<Traits>(vector, pass_ % kPasses<Traits>);
  }
  __device__ __forceinline__ void advance() {
    pass_ += passes_on_;
    head += heads_on_;
    if (pass_ >= passes_) {
      pass_ -= passes_;
      ++head;
    }
  }

  int head;

 private:
  int pass_, passes_, passes_on_, heads_on_;
  const int heads_;
};

// Where a lane stores its part of a vector and, if it is the first one, the scale.
template <typename Traits>
struct Target {
  Kind kind;
  bool exists;   // the vector
  Token to;      // of the pages; its tile is null if the token has no slot
  int64_t slot;  // of the pages
  int64_t row;   // of dense rows
  int number;    // the token's, in its span
  int part, vector, lane;

  // All lanes of the warp take part.
  template <Width WIDTH>
  __device__ __forceinline__ void store_value(const EncodeArguments& a, const uint32_t* codes, uint16_t scale) const {
    uint8_t* block = to.tile ? to.value_block(a.layout) : nullptr;
    // Whether the tokens are those of a value block, in its order.
    const int64_t begin = slot - number % format::kValueGroup;
    const int64_t common = __shfl_sync(0xffffffff, begin, lane - vector % format::kValueGroup * Traits::kLanes - part);
    if (__all_sync(0xffffffff, to.tile && begin == common && begin % format::kValueGroup == 0)) {
      put_value<Traits, WIDTH>(codes, part, WholeBlock<Traits, WIDTH>{block, to.number});
    } else {
      put_value<Traits, WIDTH>(codes, part, ScatteredTokens<Traits, WIDTH>(block, to.number, lane));
    }
    if (to.tile && part == 0) __stwb(to.value_scale(a.layout), scale);
  }

  __device__ __forceinline__ void store_bytes(const EncodeArguments& a, const uint32_t* codes, uint16_t scale) const {
    if (kind == Kind::kValues) return store_value<Width::k8>(a, codes, scale);
    if (kind == Kind::kKeys ? !to.tile : !exists) return;
    uint8_t* at = kind == Kind::kKeys ? to.key_row(a.layout) : a.packed + row * a.row_bytes;
#pragma unroll
    for (int h = 0; h < 2; ++h) put_byte_group(codes + 8 * h, Traits::group(part, h), at);
    if (part == 0) __stwb(kind == Kind::kKeys ? to.key_scale(a.layout) : a.scale + row, scale);
  }

  // Codes of up to 5 bits.
  __device__ __forceinline__ void store(const EncodeArguments& a, Width width, LaneCodes& codes, uint16_t scale) const {
    dispatch_codes(kind, width, [&]<Kind KIND, Width WIDTH>() {
      if constexpr (format::levels_are_codes(WIDTH)) {
        // has a kernel of its own
      } else if constexpr (KIND == Kind::kValues) {
        if constexpr (format::is_spread(WIDTH)) to_neighbours<Traits>(codes.low, part);
        store_value<WIDTH>(a, codes.low, scale);
      } else if constexpr (KIND == Kind::kKeys) {
        if (!to.tile) return;
        uint8_t *at = to.key_row(a.layout), *plane = to.key_plane(a.layout);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          put_key_group<WIDTH>(codes.low + 4 * h, codes.high[h], Traits::group(part, h), at, plane);
        }
        if (part == 0) __stwb(to.key_scale(a.layout), scale);
      } else if (exists) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          put_dense_group<WIDTH>(codes.low + 4 * h, codes.high[h], Traits::group(part, h),
                                 a.packed + row * a.row_bytes);
        }
        if (part == 0) a.scale[row] = scale;
      }
    });
  }
};

template <typename Traits, typename T, Rounding ROUNDING>
__device__ __forceinline__ void encode_all(const EncodeArguments& a) {
  constexpr bool SEARCH = ROUNDING == Rounding::kSearch, BYTES = ROUNDING == Rounding::kBytes;
  static_assert(Traits::kLanes * kSignStride + kTableWords<Traits, SEARCH> == kSourceWords<Traits, SEARCH> &&
                Traits::kVectors * kStageStride<Traits> == kStageWords<Traits>);
  constexpr int kLanes = Traits::kLanes;
  // Loading the slot before its vector is encoded hides the latency, but takes registers, which are short elsewhere.
  constexpr bool kSlotFirst = !SEARCH && kLanes == 2;
  extern __shared__ uint4 dynamic[];
  __shared__ SharedCodebook books[2];
  __shared__ alignas(16) uint32_t levels[2][4];
  __shared__ ByteBook byte_books[BYTES ? 2 : 1];
  uint32_t* words = reinterpret_cast<uint32_t*>(dynamic);
  const int threads = blockDim.x, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int part = lane % kLanes, vector = lane / kLanes;

  // Of two neighbouring warps one takes keys and one values, so that every scheduler has as many of both. After each
  // span they swap, because values take longer.
  int next = (warp + warp / 4) % a.sources;
  uint32_t* stage = words + a.sources * kSourceWords<Traits, SEARCH> + warp * kStageWords<Traits>;

  const int tokens = static_cast<int>(a.tokens);
  Items<Traits> items(a, warp, threads / 32);
  const auto start_copies = [&] {
    if (!items.any_left()) return;
    const EncodeSource& from = a.source[next];
    const uint32_t stride = static_cast<uint32_t>(from.token_stride);
    const int first = items.first_token() + items.number(0);
    const uint8_t* rows = from.data + uint64_t{static_cast<uint32_t>(first)} * stride +
                          uint64_t{static_cast<uint32_t>(items.head)} * static_cast<uint32_t>(from.head_stride);
    start_rows<Traits>(stage, rows, stride, tokens - first, lane, [](int v) { return token_of_vector<Traits>(v, 0); });
  };
  // The first vectors of all warps keep memory busy for longer than tables of one candidate take, and would delay the
  // loads of the tables and of the kernel's code. So their copies are issued after the tables, unless these have
  // several candidates.
  if constexpr (SEARCH) start_copies();
  // Each quarter of the threads loads one thing: the codebooks and the signs of both sources. So the block waits for
  // memory only once.
  const int quarter = threads / 4, role = warp / (quarter / 32), t = role % 2;
  if (t < a.sources && role < 2) books[t].fill(a.source[t].book, threadIdx.x % quarter, quarter);
  if (t < a.sources && role >= 2) {
    fill_signs<Traits>(words + t * kSourceWords<Traits, SEARCH> + kTableWords<Traits, SEARCH>, a.source[t].signs,
                       threadIdx.x % quarter, quarter);
  }
  __syncthreads();
  for (int t = 0; t < a.sources; ++t) {
    const Codebook& book = a.source[t].book;
    if constexpr (BYTES) {
      for (int s = warp; s < book.num_steps; s += threads / 32) byte_books[t].fill(books[t], s, lane);
    } else {
      fill_code_table<Traits, SEARCH>(words + t * kSourceWords<Traits, SEARCH>, books[t], book.width, book.num_steps,
                                      threadIdx.x, threads);
      fill_level_bytes(levels[t], books[t], threadIdx.x);
    }
  }
  if constexpr (!SEARCH) start_copies();
  __syncthreads();

#pragma unroll 1
  while (items.any_left()) {
    const int now = next, from_head = items.head, number = items.number(vector);
    const int token = items.first_token() + number;
    const bool exists = token < tokens;
    int64_t slot = kSlotFirst && exists && !a.packed ? a.slots[token] : -1;
    const EncodeSource& source = a.source[now];
    const int part_of_token = a.first + now;  // 0: the key, 1: the value
    const Kind kind = a.packed ? Kind::kRows : part_of_token == 0 ? Kind::kKeys : Kind::kValues;
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
    items.advance();
    start_copies();

    const bool zero = v.length == 0;
    const float factor = zero ? 0.0f : divide(a.constants.units, v.length);
    const float k[2] = {is_negated<Traits>(part, 0) ? -factor : factor, is_negated<Traits>(part, 1) ? -factor : factor};
    LaneCodes codes;
    uint32_t byte_codes[BYTES ? 16 : 1];
    Fit fit;
    if constexpr (BYTES) {
      fit = encode_bytes<Traits>(y, k, v.finite, byte_books[now], source.book.num_steps, byte_codes);
    } else {
      const TableBook with{&books[now], reinterpret_cast<const uint8_t*>(table), levels[now], source.book.width,
                           source.book.num_steps};
      const bool wide = format::has_fifth_bit(source.book.width);
      if constexpr (SEARCH) {
        fit = wide ? encode_search<Traits, true>(y, k, part, v.finite, with, codes)
                   : encode_search<Traits, false>(y, k, part, v.finite, with, codes);
      } else {
        fit = wide ? encode_single<Traits, true>(y, k, v.finite, with, codes)
                   : encode_single<Traits, false>(y, k, v.finite, with, codes);
      }
    }
    if (!kSlotFirst && exists && !a.packed) slot = a.slots[token];
    uint16_t scale = zero ? 0 : fit.scale(source.book.scale_mode, v.length, v.exponent, a.constants);
    if (!v.finite) scale = format::kNanScale;

    const Token to = a.packed ? Token{} : a.pages.token(slot, from_head, a.layout);
    const Target<Traits> target{kind,   exists, to,     slot, int64_t{token} * a.heads + from_head,
                                number, part,   vector, lane};
    if constexpr (BYTES) {
      target.store_bytes(a, byte_codes, scale);
    } else {
      target.store(a, source.book.width, codes, scale);
    }
    if (a.tail.data && to.tile) {
      const int64_t kept = a.tail.row(token);
      constexpr int bytes = 2 * Traits::kDim;
      if (kept >= 0) {
        copy_bytes(source.data + int64_t{token} * source.token_stride + from_head * source.head_stride,
                   a.tail.at(kept, from_head, part_of_token, bytes), bytes, part, kLanes);
      }
    }
  }
}

// Whether a device of the architecture that is compiled has the shared memory for a launch.
template <typename Traits, bool SEARCH>
constexpr bool kFitsDevice =
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    choices::encode_warps(Traits::kDim, SEARCH, 1, {.shared_per_block = 64 << 10}) >= choices::kLeastWarps;
#else
    true;
#endif

template <typename Traits, typename T, Rounding ROUNDING>
__global__ void __launch_bounds__(32 * choices::kMostWarps, 1)
    encode_bulk_kernel(const __grid_constant__ EncodeArguments a) {
  if constexpr (kFitsDevice<Traits, ROUNDING == Rounding::kSearch>) encode_all<Traits, T, ROUNDING>(a);
}

// ---- Host side ------------------------------------------------------------------------------------------------------

template <typename Traits, typename T, Rounding ROUNDING>
void launch(const EncodeArguments& a, cudaStream_t stream) {
  constexpr bool SEARCH = ROUNDING == Rounding::kSearch;
  const Device& device = current_device();
  const int warps = choices::encode_warps(Traits::kDim, SEARCH, a.sources, device.facts);
  const int bytes = choices::encode_shared_bytes(Traits::kDim, SEARCH, a.sources, warps);
  const auto kernel = encode_bulk_kernel<Traits, T, ROUNDING>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), device.index, bytes);
  kernel<<<static_cast<unsigned>(device.facts.multiprocessors), 32 * warps, bytes, stream>>>(a);
}

}  // namespace

void launch_encode_bulk(const EncodeArguments& a, int head_dim, cudaStream_t stream) {
  // Kernels for both would add 1.1 MB to the library.
  if (a.sources == 2 && choices::encodes_apart(a.source[0].book.width, a.source[1].book.width)) {
    for (int t = 0; t < a.sources; ++t) {
      EncodeArguments one = a;
      one.source[0] = a.source[t], one.sources = 1, one.first = t;
      launch_encode_bulk(one, head_dim, stream);
    }
    return;
  }
  bool search = false;
  for (int t = 0; t < a.sources; ++t) {
    search = search || choices::searches_table(a.source[t].book.width, a.source[t].book.num_steps);
  }
  const bool bytes = format::levels_are_codes(a.source[0].book.width);
  dispatch_bulk(a.dtype, head_dim, [&](auto log_d, auto tag) {
    using Traits = EncodeTraits<log_d>;
    using T = typename decltype(tag)::type;
    if (bytes) return launch<Traits, T, Rounding::kBytes>(a, stream);
    search ? launch<Traits, T, Rounding::kSearch>(a, stream) : launch<Traits, T, Rounding::kOne>(a, stream);
  });
}

}  // namespace turboquant::cuda
