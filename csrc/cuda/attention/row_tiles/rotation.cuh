// The rotation of rows (docs/format.md section 2) of D channels, a multiple of 64 to which a head_dim is padded.
//
// Four lanes share a row: element 2 j + h of lane t is channel 8 j + 2 t + h. Padding lies behind the last block of n
// channels, so butterflies may include it: they never leave a block. How many stages there are and which m x m factor
// follows is known at run time, so that one kernel serves all head_dims of its D.
#pragma once

#include "cuda/codec/transform.cuh"

namespace turboquant::cuda::row_tiles {

// A lane's elements of a block, if a head_dim of m blocks is padded to d channels; 0: none is.
constexpr int block_elements(int m, int d) {
  for (const int block : {16, 32, 64}) {
    if (m * block <= d && m * block > d - 64) return block / 4;
  }
  return 0;
}

// Butterflies between channels H apart, in a lane, where blocks are larger than that.
template <int D, int H>
__device__ __forceinline__ void stages(float (&y)[D / 4], int block) {
  if constexpr (2 * H <= D) {
    if (block <= H) return;
    lane_butterflies<H / 4, H / 2>(y);
    stages<D, 2 * H>(y, block);
  }
}

// The m x m factor, if this is the head_dim's m.
template <int D, int M>
__device__ __forceinline__ void mix(float (&y)[D / 4], int blocks) {
  constexpr int kEach = block_elements(M, D);
  if constexpr (kEach > 0) {
    if (blocks == M) mix_blocks<M, kEach>(y);
  }
}

// core(y) of a head_dim above D - 64, in place. norm: 1 / sqrt(n). All lanes of the warp take part.
template <int D>
__device__ __forceinline__ void rotate_row(float (&y)[D / 4], format::Split split, float norm, int t) {
  butterflies<HadamardTraits<D / 16, 4, 4, 2>>(y, t);
  stages<D, 16>(y, split.block);
#pragma unroll
  for (int i = 0; i < D / 4; ++i) y[i] *= norm;
  mix<D, 3>(y, split.blocks), mix<D, 5>(y, split.blocks), mix<D, 7>(y, split.blocks), mix<D, 9>(y, split.blocks);
}

}  // namespace turboquant::cuda::row_tiles
