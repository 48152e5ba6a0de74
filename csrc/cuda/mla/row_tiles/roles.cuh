// Latent attention to codes with tables of levels: rows of queries are the long side of all products.
//
// Key tiles (mla/key_tiles) make operands of codes in registers, twice, for scores and for sums. That is cheap where a
// mask does it, on uniform grids. A level from a table takes several times as many instructions, so here codes are
// expanded once, to float16 in shared memory, where both products read them:
//   scores  [64 rows x channels] . [channels x 48 keys]
//   output  [64 rows x 48 keys] . [48 keys x 256 channels], by each warpgroup that sums
// A block has 64 rows, fewer rows take as long.
//
// Warpgroups have roles. One copies (copies), one computes scores and weights (scores), one or two expand and sum
// (sums, expander).
#pragma once

#include "cuda/mla/row_tiles/copies.cuh"
#include "cuda/mla/row_tiles/scores.cuh"
#include "cuda/mla/row_tiles/sums.cuh"

namespace turboquant::cuda::mla {

template <class S>
class RowRoles {
 public:
  static constexpr bool kCompiled = kWarpgroupProducts, kCopiesImage = true, kJoinsApart = true;

  explicit __device__ __forceinline__ RowRoles(const BlockView& block)
      : block_(block), barriers_(*reinterpret_cast<RowBarriers<S>*>(block.shared + block.plan.barriers)),
        copies_(block, barriers_) {}

  // By all threads, before barriers are used.
  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) barriers_.init();
    if (threadIdx.x < kLevelCodes) {
      const Latents& x = block_.call;
      reinterpret_cast<uint8_t*>(block_.shared + block_.plan.tables)[threadIdx.x] =
          level_table_byte(x.levels, x.record.width(), threadIdx.x);
    }
  }
  __device__ __forceinline__ uint64_t* prepared() const { return &barriers_.prepared; }

  // Units [0, units) of a segment, the first of which has `token` as its first. whole, part: see leave_part.
  // wait_for_image(): the rows are there.
  template <typename F>
  __device__ __forceinline__ void attend(const Segment& segment, int token, int units, bool whole, float* part,
                                         F&& wait_for_image) {
    const int group = threadIdx.x / kWarpgroup;
    if (group == 0) {
      leave_registers<S::kScoreRegisters>();
      wait_for_image();
      RowScores<S> scores(block_, barriers_);
      scores.attend(token, units, turn_);
      leave_part<S>(block_, whole, part, [&](float* to) { scores.leave(to); });
    } else if (group <= S::kSumGroups) {
      take_registers<S::kSumRegisters>();
      RowSums<S> sums(block_, barriers_);
      sums.attend(num_tiles(units), turn_, raw_);
      leave_part<S>(block_, whole, part, [&](float* to) { sums.leave(to); });
    } else {
      leave_registers<S::kCopyRegisters>();
      copies_.attend(segment, token, units, turn_, raw_);
      leave_part<S>(block_, whole, part, [](float*) {});
    }
    // Registers move back when every warp of those that sum has had them. Taken back earlier, they would be missing
    // there, and those warps would wait for ever.
    __syncthreads();
    if (group > 0 && group <= S::kSumGroups) {
      leave_registers<S::kRegisters>();
    } else {
      take_registers<S::kRegisters>();
    }
    turn_.count += num_tiles(units);
  }

 private:
  const BlockView block_;
  RowBarriers<S>& barriers_;
  RowCopies<S> copies_;
  TileTurn<S> turn_;
  RingPlace raw_;  // of the next tile
};

}  // namespace turboquant::cuda::mla
