// The kernels that decode vectors of every length, dtype and width (codec/lanes.cuh, codec/generic.cuh): keys and
// values from page records, or vectors from dense rows. choices/codec.h says which calls have a faster one.
#include "cuda/codec/bulk.cuh"
#include "cuda/codec/dispatch.cuh"
#include "cuda/codec/generic.cuh"
#include "cuda/codec/lanes.cuh"
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kMostWarps = 4;  // of a block

// Decodes keys or values of one head, or vectors, a token for each group of lanes.
template <typename Shape>
__global__ void __launch_bounds__(32 * kMostWarps)
    decode_any_kernel(const __grid_constant__ DecodeArguments a, const __grid_constant__ Shape shape) {
  extern __shared__ uint4 dynamic[];
  __shared__ float table[32];
  const Kind kind = a.packed ? Kind::kRows : blockIdx.z == 0 ? Kind::kKeys : Kind::kValues;
  const int head = blockIdx.y, lanes = Shape::kLanes, lane = threadIdx.x % lanes, mine = threadIdx.x / lanes;
  const RecordLayout& layout = a.layout;
  const DecodeSource& source = a.source[blockIdx.z];
  const Width width = source.width;
  const int d = shape.d, bits = format::num_bits(width);
  fill_levels(table, source.levels, width, threadIdx.x, blockDim.x);

  const int64_t number = int64_t{blockIdx.x} * (blockDim.x / lanes) + mine, sequence = number / a.max_length,
                position = number % a.max_length;
  const bool exists = sequence < a.seqs;
  Token from{};
  if (kind != Kind::kRows) {
    const int64_t page = position >> layout.page_shift;
    if (exists && position < a.lengths[sequence] && page < a.max_pages) {
      from = a.pages.token(a.table[sequence * a.table_stride + page], position & ((1 << layout.page_shift) - 1), head,
                           layout);
    }
  }
  const bool stored = kind == Kind::kRows ? exists : from.tile != nullptr;
  __syncthreads();

  float* y = reinterpret_cast<float*>(dynamic) + mine * generic_words(d);
  uint32_t* row = reinterpret_cast<uint32_t*>(y) + generic_stride(d);  // and room to read past a dense row
  float scale = 0;
  if (stored) {
    const uint16_t* scale_at;
    if (kind == Kind::kRows) {
      copy_bytes(a.packed + number * a.row_bytes, reinterpret_cast<uint8_t*>(row), a.row_bytes, lane, lanes);
      scale_at = a.scale + number;
    } else if (kind == Kind::kKeys) {
      load_key(row, from, layout, lane, lanes);
      scale_at = from.key_scale(layout);
    } else {
      load_value(row, from, layout, lane, lanes);
      scale_at = from.value_scale(layout);
    }
    scale = __half2float(__ushort_as_half(*scale_at));
  }
  __syncwarp();
  for (int o = lane; 8 * o < d; o += lanes) {
    const Octet octet = !stored               ? Octet{0, 0}
                        : kind == Kind::kRows ? read_octet(row, o * bits, width)
                        : kind == Kind::kKeys ? key_octet(row, row + layout.key_row_bytes / 4, layout.octets, width, o)
                                              : ValueLayout{d, width}.octet(row, o);
    put_generic_octet(y, d, o, octet, width, table, scale);
  }
  const int64_t at = (number * a.heads + head) * d;
  const format::Channels channels = source.channels.of_head(head, d);
  if constexpr (Shape::kInRegisters) {
    __syncwarp();
    store_from_lanes(y, shape, source.signs, channels, source.out, a.dtype, at, stored, lane);
  } else if (stored) {
    store_generic(y, shape, source.signs, channels, source.out, a.dtype, at, true, lane);
  }
  if (exists && !stored) {
    const float zeros[2] = {};
    for (int i = 2 * lane; i < d; i += 2 * lanes) store_floats_as<2>(zeros, source.out, a.dtype, at + i);
  }
}

}  // namespace

void launch_decode_any(const DecodeArguments& a, format::Split split, cudaStream_t stream) {
  const int64_t tokens = a.seqs * a.max_length;
  with_vector_shape(split, [&](const auto& shape) {
    const VectorBlock block(shape.d, shape.kLanes, kMostWarps);
    const dim3 grid(num_blocks(tokens, block.vectors), a.heads, a.sources);
    decode_any_kernel<<<grid, shape.kLanes * block.vectors, block.shared_bytes, stream>>>(a, shape);
  });
}

}  // namespace turboquant::cuda
