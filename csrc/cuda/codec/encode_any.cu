// The kernels that encode vectors of every length, dtype and width (codec/lanes.cuh, codec/generic.cuh): keys and
// values into page records, or vectors into dense rows. choices/codec.h says which calls have a faster one.
#include <algorithm>

#include "choices/codec.h"
#include "cuda/codec/bulk.cuh"
#include "cuda/codec/dispatch.cuh"
#include "cuda/codec/generic.cuh"
#include "cuda/codec/lanes.cuh"
#include "cuda/common/device_facts.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kBlockTokens = format::kValueGroup;  // tokens of a value block
constexpr int64_t kMaxGridY = 65535;
constexpr int kBlocks = 16;  // per multiprocessor, at most: more of them encode one after the other

// Words between the vectors of a block; the padding lets gather_block read their rows of octets from different banks.
__host__ __device__ constexpr int vector_stride(int d) { return generic_words(d) + 4; }

// Encodes keys or values of some heads, or vectors, a token at a time for each group of lanes, or (ROOM 0) for each
// warp. A row or a block of codes passes through shared memory, so that memory is written in whole words.
template <int ROOM, typename Shape>
__global__ void __launch_bounds__((ROOM ? kVectorLanes : 32) * kBlockTokens)
    encode_any_kernel(const __grid_constant__ EncodeArguments a, const __grid_constant__ Shape shape) {
  let_next_kernel_begin();  // the next kernel is usually paged_attention's
  extern __shared__ uint4 dynamic[];
  __shared__ SharedCodebook shared;
  __shared__ Token tokens[kBlockTokens];
  const Kind kind = a.packed ? Kind::kRows : blockIdx.z == 0 ? Kind::kKeys : Kind::kValues;
  const int lanes = lanes_of(shape), lane = threadIdx.x % lanes, mine = threadIdx.x / lanes, count = blockDim.x / lanes;
  const RecordLayout& layout = a.layout;
  const EncodeSource& source = a.source[blockIdx.z];
  const Codebook& book = source.book;
  const int d = shape.d, stride = vector_stride(d);
  uint32_t* rows = reinterpret_cast<uint32_t*>(dynamic);
  uint32_t* row = rows + mine * stride;
  float* y = reinterpret_cast<float*>(row);
  shared.fill(book, threadIdx.x, blockDim.x);

  const auto encode_tokens = [&](int head, int64_t first) {
    const format::Channels channels = source.channels.of_head(head, source.channel_stride);
    const int64_t token = first + mine;
    const bool exists = token < a.tokens;
    const uint8_t* from = source.data + (exists ? token : 0) * source.token_stride + head * source.head_stride;
    const Token to = kind != Kind::kRows && exists ? a.pages.token(a.slots[token], head, layout) : Token{};
    if (lane == 0) tokens[mine] = to;
    uint16_t scale;
    const auto write_codes = [&](auto&& octet) {
      if (kind != Kind::kRows) {
        for (int o = lane; o < layout.octets; o += lanes) write_octet(row, layout.octets, book.width, o, octet(o));
        return;
      }
      const int bits = format::num_bits(book.width);
      for (int o = lane; 8 * o < d; o += lanes) {
        const uint64_t string = dense_string(octet(o), book.width);
        uint8_t* bytes = reinterpret_cast<uint8_t*>(row) + o * bits;
        for (int i = 0; i < min(bits, a.row_bytes - o * bits); ++i) bytes[i] = string >> 8 * i;
      }
    };
    if constexpr (ROOM > 0) {
      const auto load = [&](auto& v) { v.load(shape, from, a.dtype, 0, source.signs, channels, lane); };
      LaneVector<ROOM> v;
      load(v);
      __syncthreads();
      const ByteCodes codes = encode_in_lanes(v, load, shape, lane, shared, book, a.constants,
                                              reinterpret_cast<uint8_t*>(y + generic_stride(d)));
      __syncwarp();
      write_codes([&](int o) { return codes.octet(o, book.width); });
      scale = codes.scale;
    } else {
      load_generic(y, d, from, a.dtype, 0, source.signs, channels, lane);
      __syncthreads();
      const GenericCodes codes = encode_generic(y, y + generic_stride(d), shape, lane, shared, book, a.constants);
      write_codes([&](int o) { return codes.octet(o, d, shared, book.width); });
      scale = codes.scale;
    }

    if (a.tail.data && to.tile) {
      const int64_t kept = a.tail.row(token);
      const int bytes = d * element_size(a.dtype);
      if (kept >= 0) {
        copy_bytes(from, a.tail.at(kept, head, kind == Kind::kValues, bytes), bytes, lane, lanes);
      }
    }
    __syncwarp();
    if (kind == Kind::kRows) {
      const int64_t number = token * a.heads + head;
      if (exists && lane == 0) a.scale[number] = scale;
      if (exists) {
        copy_bytes(reinterpret_cast<const uint8_t*>(row), a.packed + number * a.row_bytes, a.row_bytes, lane, lanes);
      }
    } else if (kind == Kind::kKeys) {
      if (to.tile) {
        store_key(row, to, layout, lane, lanes);
        if (lane == 0) *to.key_scale(layout) = scale;
      }
    } else {
      // The 16 tokens of a whole value block are put together before they are stored; otherwise every token stores the
      // bytes that it owns.
      const bool together = to.tile && to.tile == tokens[0].tile && to.number == tokens[0].number + mine;
      if (to.tile && lane == 0) *to.value_scale(layout) = scale;
      if (__syncthreads_and(together && count == kBlockTokens && tokens[0].number % kBlockTokens == 0)) {
        uint32_t* image = rows + kBlockTokens * stride;
        gather_block(rows, stride, image, {d, book.width}, threadIdx.x, blockDim.x);
        __syncthreads();
        copy_bytes(reinterpret_cast<const uint8_t*>(image), tokens[0].value_block(layout), layout.value_block_bytes,
                   threadIdx.x, blockDim.x);
      } else if (to.tile) {
        store_value(row, to, layout, lane, lanes);
      }
    }
    __syncthreads();  // before rows and tokens are written again
  };
  for (int head = blockIdx.y; head < a.heads; head += gridDim.y) {
    for (int64_t first = int64_t{blockIdx.x} * count; first < a.tokens; first += int64_t{gridDim.x} * count) {
      encode_tokens(head, first);
    }
  }
}

}  // namespace

void launch_encode_any(const EncodeArguments& a, format::Split split, cudaStream_t stream) {
  const int64_t vectors = a.tokens * a.heads;
  const int d = split.blocks * split.block, stride = vector_stride(d);
  // One block puts a value block together; few vectors are encoded sooner by smaller blocks on more multiprocessors.
  const int at_once = generic_warps(stride, vectors < choices::kFewVectors ? 4 : kBlockTokens);
  const int image = !a.packed && at_once == kBlockTokens ? a.layout.value_block_bytes : 0;
  // A block that encodes several times fills its tables once.
  const int64_t heads = std::min(int64_t{a.heads}, kMaxGridY);
  const int64_t most = int64_t{kBlocks} * current_device().facts.multiprocessors / (a.sources * heads) + 1;
  const dim3 grid(static_cast<unsigned>(std::min(int64_t{num_blocks(a.tokens, at_once)}, most)),
                  static_cast<unsigned>(heads), static_cast<unsigned>(a.sources));
  with_vector_shape(split, vectors, [&](const auto& shape, auto room) {
    encode_any_kernel<room><<<grid, lanes_of(shape) * at_once, 4 * at_once * stride + image, stream>>>(a, shape);
  });
}

}  // namespace turboquant::cuda
