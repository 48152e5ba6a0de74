// Scores of a unit of keys: products of codes, expanded to bytes in registers, with the queries' operands.
//   [16 tokens x channels] . [channels x 4 rows (high, low byte)]
#pragma once

#include "cuda/attention/split_kv/lane_tokens.cuh"
#include "cuda/attention/split_kv/queries.cuh"

namespace turboquant::cuda::split_kv {

template <int D, int N>
class KeyProducts {
  using X = SplitKvTraits<D, N>;

 public:
  explicit __device__ __forceinline__ KeyProducts(const BlockView& block) : block_(block) {}

  // Integer scores of the lane's rows for one of its two pairs of tokens, times the key scales. stage: its bytes.
  template <class Keys, class Queries, class Table>
  __device__ __forceinline__ void multiply(const Queries& queries, const uint8_t* stage, LaneTokens tokens, int pair,
                                           const Table& table, float (&score)[N][2]) const {
    constexpr format::CodeRow kRow{D, format::as_width(Keys::kBits)};
    constexpr int kKeyRow = kRow.row_bytes(), kPlaneRow = kRow.plane_bytes();
    const StageLayout& layout = block_.layout;
    const int g = block_.g, t = block_.t;
    int sums[N][Keys::kSets][4] = {};
    const uint8_t* row = stage + tokens.offset(g, kKeyRow, layout.next_keys);
    const uint8_t* plane = stage + layout.planes + tokens.offset(g, kPlaneRow, layout.next_planes);
    const uint8_t* scales = stage + layout.key_scales + tokens.offset(g, 2, layout.next_scales);
    if (pair) {
      row += tokens.pair_offset(kKeyRow, layout.next_keys);
      plane += tokens.pair_offset(kPlaneRow, layout.next_planes);
      scales += tokens.pair_offset(2, layout.next_scales);
    }
#pragma unroll
    for (int chunk = 0; chunk < X::Operands::kChunks; ++chunk) {
      typename Keys::Words x, y;
      typename Keys::Prepared p, q;
      Keys::load(row, plane, chunk, t, x);
      Keys::load(row + kKeyRow, plane + kPlaneRow, chunk, t, y);
      Keys::prepare(x, t, p);
      Keys::prepare(y, t, q);
      multiply_chunk<Keys, 0>(queries, p, q, chunk, table, sums);
    }
    const float2 k = __half22float2(*reinterpret_cast<const __half2*>(scales));
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int high = Keys::kWeight0 * sums[n][0][2 * i];
        int low = Keys::kWeight0 * sums[n][0][2 * i + 1] - queries.zero(n);
        if constexpr (Keys::kSets == 2) {
          high += Keys::kWeight1 * sums[n][1][2 * i], low += Keys::kWeight1 * sums[n][1][2 * i + 1];
        }
        score[n][i] = joined(high, low) * (i ? k.y : k.x);
      }
    }
  }

 private:
  // 256 high + low, which 32 bits hold for up to 516 channels of levels and bytes of up to 127.
  static __device__ __forceinline__ float joined(int high, int low) {
    if constexpr (D * 127 * kMostQuery <= INT32_MAX) return static_cast<float>(high * 256 + low);
    return static_cast<float>(high) * 256 + static_cast<float>(low);
  }

  // x, y: the prepared codes of the pair's two tokens.
  template <class Keys, int I, class Queries, class Table>
  __device__ __forceinline__ void multiply_chunk(const Queries& queries, const typename Keys::Prepared& x,
                                                 const typename Keys::Prepared& y, int chunk, const Table& table,
                                                 int (&sums)[N][Keys::kSets][4]) const {
    if constexpr (I < X::Operands::kFrags) {
      uint32_t a[4], minus[4];
      Keys::template expand<I>(x, y, table, a, minus);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const uint2 b = queries.operand(n, chunk * X::Operands::kFrags + I);
        mma_bytes<Keys::kMasks>(sums[n][Keys::set_of(I)], a, b);
        if constexpr (Keys::kTwoTables) mma_bytes(sums[n][0], minus, b);
      }
      multiply_chunk<Keys, I + 1>(queries, x, y, chunk, table, sums);
    }
  }

  const BlockView block_;
};

}  // namespace turboquant::cuda::split_kv
