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
constexpr int kMostThreads = 512;  // of a block

// Words of shared memory that a vector has: itself and its integers, unless lanes hold them, then a row of octets, and
// behind it the bytes of a dense row. The padding lets gather_block read the rows of neighbours from different banks.
template <typename Shape>
__host__ __device__ constexpr int vector_words(int d, bool dense) {
  return (Shape::kInRegisters ? d / 4 + (dense ? d / 4 : 0) : generic_words(d)) + 4;
}

// Encodes keys or values of some heads, or vectors, a token at a time for each group of lanes. A row or a block of
// codes passes through shared memory, so that memory is written in whole words. count: tokens that a block has at a
// time. Its other threads only help to fill the tables.
template <typename Shape>
__global__ void __launch_bounds__(kMostThreads)
    encode_any_kernel(const __grid_constant__ EncodeArguments a, const __grid_constant__ Shape shape,
                      const __grid_constant__ int count) {
  let_next_kernel_begin();  // the next kernel is usually paged_attention's
  extern __shared__ uint4 dynamic[];
  __shared__ SharedCodebook shared;
  __shared__ Token tokens[kBlockTokens];
  constexpr int kLanes = Shape::kLanes;
  const Kind kind = a.packed ? Kind::kRows : blockIdx.z == 0 ? Kind::kKeys : Kind::kValues;
  const int lane = threadIdx.x % kLanes, mine = threadIdx.x / kLanes, threads = count * kLanes;
  const RecordLayout& layout = a.layout;
  const EncodeSource& source = a.source[blockIdx.z];
  const Codebook& book = source.book;
  const int d = shape.d, octets = (d + 7) / 8, stride = vector_words<Shape>(d, kind == Kind::kRows);
  uint32_t* rows = reinterpret_cast<uint32_t*>(dynamic);
  uint32_t* row = rows + mine * stride;
  CandidateTable table(rows + count * stride, d);
  shared.fill(book, threadIdx.x, blockDim.x);
  __syncthreads();
  if constexpr (Shape::kInRegisters) {
    table.fill(shared, book, 0, blockDim.x);
    __syncthreads();
  }
  if (mine >= count) return;

  const auto encode_tokens = [&](int head, int64_t first) {
    const format::Channels channels = source.channels.of_head(head, source.channel_stride);
    const int64_t token = first + mine;
    const bool exists = token < a.tokens;
    const uint8_t* from = source.data + (exists ? token : 0) * source.token_stride + head * source.head_stride;
    const Token to = kind != Kind::kRows && exists ? a.pages.token(a.slots[token], head, layout) : Token{};
    if (lane == 0) tokens[mine] = to;
    uint16_t scale;
    if constexpr (Shape::kInRegisters) {
      const auto load = [&](auto& v) { v.load(shape, from, a.dtype, 0, source.signs, channels, lane); };
      LaneVector<Shape::kLanes> v;
      load(v);
      scale = encode_in_lanes(v, load, shape, lane, shared, table, threads, book, a.constants, row);
    } else {
      float* y = reinterpret_cast<float*>(row);
      load_generic(y, d, from, a.dtype, 0, source.signs, channels, lane);
      const GenericCodes codes = encode_generic(y, y + generic_stride(d), shape, lane, shared, book, a.constants);
      for (int o = lane; o < octets; o += kLanes) {
        write_octet(row, octets, book.width, o, codes.octet(o, d, shared, book.width));
      }
      scale = codes.scale;
    }
    __syncwarp();
    uint8_t* dense = reinterpret_cast<uint8_t*>(row + (2 * octets + 3) / 4 * 4);
    if (kind == Kind::kRows) {
      const int bits = format::num_bits(book.width);
      for (int o = lane; o < octets; o += kLanes) {
        const uint64_t string = dense_string({row[o], row[octets + o]}, book.width);
        for (int i = 0; i < min(bits, a.row_bytes - o * bits); ++i) dense[o * bits + i] = string >> 8 * i;
      }
      __syncwarp();
    }

    if (a.tail.data && to.tile) {
      const int64_t kept = a.tail.row(token);
      const int bytes = d * element_size(a.dtype);
      if (kept >= 0) {
        copy_bytes(from, a.tail.at(kept, head, kind == Kind::kValues, bytes), bytes, lane, kLanes);
      }
    }
    if (kind == Kind::kRows) {
      const int64_t number = token * a.heads + head;
      if (exists && lane == 0) a.scale[number] = scale;
      if (exists) {
        copy_bytes(dense, a.packed + number * a.row_bytes, a.row_bytes, lane, kLanes);
      }
    } else if (kind == Kind::kKeys) {
      if (to.tile) {
        store_key(row, to, layout, lane, kLanes);
        if (lane == 0) *to.key_scale(layout) = scale;
      }
    } else {
      // The 16 tokens of a whole value block are put together before they are stored; otherwise every token stores the
      // bytes that it owns.
      __syncthreads();  // tokens[0] is there for all warps
      const bool together = to.tile && to.tile == tokens[0].tile && to.number == tokens[0].number + mine;
      if (to.tile && lane == 0) *to.value_scale(layout) = scale;
      if (__syncthreads_and(together && count == kBlockTokens && tokens[0].number % kBlockTokens == 0)) {
        uint32_t* image = rows + kBlockTokens * stride + (Shape::kInRegisters ? CandidateTable::room(d) : 0);
        gather_block(rows, stride, image, {d, book.width}, threadIdx.x, threads);
        __syncthreads();
        copy_bytes(reinterpret_cast<const uint8_t*>(image), tokens[0].value_block(layout), layout.value_block_bytes,
                   threadIdx.x, threads);
      } else if (to.tile) {
        store_value(row, to, layout, lane, kLanes);
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
  const int64_t heads = std::min(int64_t{a.heads}, kMaxGridY), multiprocessors = current_device().facts.multiprocessors;
  const int64_t vectors = a.tokens * a.heads;
  with_vector_shape(split, [&]<typename Shape>(const Shape& shape) {
    // A block of 16 tokens can put a value block together. Smaller blocks encode few vectors sooner, on more
    // multiprocessors. Where tables are filled, each of these has a multiprocessor of its own, and more threads.
    constexpr bool kTable = Shape::kInRegisters;
    const bool few = kTable ? vectors * a.sources <= kBlockTokens * multiprocessors : vectors < choices::kFewVectors;
    const int64_t wanted = !few ? kBlockTokens : kTable ? divide_up(vectors * a.sources, multiprocessors) : 4;
    const int stride = vector_words<Shape>(shape.d, a.packed), table = kTable ? CandidateTable::room(shape.d) : 0;
    const int count = times_in_block(stride, wanted, table);
    const int image = !a.packed && count == kBlockTokens ? a.layout.value_block_bytes : 0;
    const int threads = kTable && few ? kMostThreads : count * Shape::kLanes;
    // A block that encodes several times fills its tables once, so there are not many more than fit at once.
    const int64_t blocks = multiprocessors * (kTable ? kMostThreads : 4 * kMostThreads) / threads;
    const dim3 grid(static_cast<unsigned>(
                        std::clamp<int64_t>(blocks / (a.sources * heads), 1, divide_up(a.tokens, count))),
                    static_cast<unsigned>(heads), static_cast<unsigned>(a.sources));
    encode_any_kernel<<<grid, threads, 4 * (table + count * stride) + image, stream>>>(a, shape, count);
  });
}

}  // namespace turboquant::cuda
