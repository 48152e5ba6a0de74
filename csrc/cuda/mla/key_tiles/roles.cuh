// Latent attention to codes of uniform grids: keys are the long side of all products (64 x 16 of warpgroups), rows of
// queries the short one, so that 16 heads waste nothing:
//   scores  [64 tokens x channels] . [channels x rows]
//   output  [64 channels x tokens] . [tokens x rows]
// Codes become the left operand in registers, as subnormal float16 numbers, with one mask for two codes
// (expansion.cuh). The same bytes in shared memory serve both products: ldmatrix gives a lane neighbouring channels of
// a token, and with transposition the same channels of neighbouring tokens.
//
// Warpgroups have roles. One computes scores and weights, one or two others sum weighted latents of the unit before,
// and one of their warps copies the units ahead. So tensor cores, integer instructions and copies overlap. The parts:
//   ring  copies of pages    scores  products and weights    values  sums of weighted latents
#pragma once

#include "cuda/mla/key_tiles/scores.cuh"
#include "cuda/mla/key_tiles/values.cuh"

namespace turboquant::cuda::mla {

template <class S>
class KeyRoles {
 public:
  static constexpr bool kCompiled = kWarpgroupProducts, kCopiesImage = true, kJoinsApart = true;

  explicit __device__ __forceinline__ KeyRoles(const BlockView& block) : block_(block) {}

  // By all threads, before barriers are used.
  __device__ __forceinline__ void begin() const {
    if (threadIdx.x != 0) return;
    constexpr int kValueWarps = S::kValueThreads / 32;
    for (int i = 0; i < kMaxStages; ++i) {
      init_barrier(block_.arrived(i), kUnitTiles), init_barrier(block_.freed(i), kValueWarps);
    }
    for (int i = 0; i < kWeightBuffers; ++i) {
      init_barrier(block_.weighed(i), kWarpgroup), init_barrier(block_.weights_read(i), kValueWarps);
    }
    init_barrier(block_.prepared(), 1);
  }
  __device__ __forceinline__ uint64_t* prepared() const { return block_.prepared(); }

  // Units [0, units) of a segment, the first of which has `token` as its first. whole, part: see leave_part.
  // wait_for_image(): the rows are there.
  template <typename F>
  __device__ __forceinline__ void attend(const Segment& segment, int token, int units, bool whole, float* part,
                                         F&& wait_for_image) {
    if (threadIdx.x >= kWarpgroup) {
      const BlockView own = block_.own();
      Ring ring(own);
      ring.begin(segment, token, units, turn_.stage);
      take_registers<S::kValueRegisters>();
      ValueGroup<S> values(own, ring);
      values.attend(units, turn_);
      leave_part<S>(block_, whole, part, [&](float* to) { values.leave(to); });
    } else {
      leave_registers<S::kScoreRegisters>();
      wait_for_image();
      ScoreGroup<S> scores(block_.own());
      scores.attend(token, units, turn_);
      leave_part<S>(block_, whole, part, [&](float* to) { scores.leave(to); });
    }
    turn_.skip(units, block_.plan.stages);
    // Registers move back when every warp of the others has had them. Taken back earlier, they would be missing
    // there, and those warps would wait for ever.
    __syncthreads();
    if (threadIdx.x >= kWarpgroup) {
      leave_registers<S::kRegisters>();
    } else {
      take_registers<S::kRegisters>();
    }
  }

 private:
  const BlockView block_;
  Turn turn_;
};

}  // namespace turboquant::cuda::mla
