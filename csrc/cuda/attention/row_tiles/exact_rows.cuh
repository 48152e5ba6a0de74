// Exact keys or values of an item, copied to a tile of shared memory: rows of 128 bytes with the swizzle that products
// read, [channels / 64][keys][64 channels].
#pragma once

#include "cuda/attention/row_tiles/shape.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/boxes.cuh"
#include "cuda/common/wgmma_swizzled.cuh"

namespace turboquant::cuda::row_tiles {

// Row by row. Eight lanes share a row, and a warp copies four at once.
template <class S, bool VALUES>
struct ExactRows {
  const Attention& a;

  // The row of exact key i of an item, the key or its value.
  __device__ __forceinline__ const uint8_t* row(const Item& item, int i) const {
    const int position = item.exact_key(i);
    if (position >= item.new_begin) {
      const int token = item.first_query + position - item.new_begin;
      return static_cast<const uint8_t*>(a.new_row(token, item.head, VALUES));
    }
    const int row = format::tail_row(position, a.sink_tokens, a.ring), rows = a.sink_tokens + a.ring;
    const int64_t at = format::tail_offset<int64_t>(a.tail_slot(item.sequence), a.tail_stride, item.head, row, rows,
                                                    a.record.head_dim, VALUES);
    return static_cast<const uint8_t*>(a.tail) + 2 * at;
  }

  // Starts to copy the lane's word of every 64 channels of a row. to: the word's place in the row; from: the word, null
  // where there is nothing to copy
  __device__ __forceinline__ void copy(uint8_t* to, const uint8_t* from) const {
    const int words = from ? ceil_div(a.record.head_dim - 8 * word(), 64) : 0;  // the others are padding
#pragma unroll
    for (int k = 0; k < S::kDim / 64; ++k) {
      copy_or_clear(to + k * S::kKeys * kSwizzleRow, k < words ? from + 128 * k : a.q, k < words);
    }
  }
  static __device__ __forceinline__ int word() { return threadIdx.x % 8; }
  static __device__ __forceinline__ uint8_t* place(uint8_t* tile, int row) { return tile + swizzled(row, 16 * word()); }
};

// The call's own tokens from `token` on, by the tensor memory accelerator. One thread starts it. map: of OwnMaps
template <class S>
__device__ __forceinline__ void copy_own_tile(uint8_t* to, const CUtensorMap& map, int head, int token,
                                              uint64_t* barrier) {
  expect(barrier, S::kTileBytes);
#pragma unroll
  for (int k = 0; k < S::kDim / 64; ++k) copy_box(to + k * S::kKeys * kSwizzleRow, map, 64 * k, head, token, barrier);
}

}  // namespace turboquant::cuda::row_tiles
