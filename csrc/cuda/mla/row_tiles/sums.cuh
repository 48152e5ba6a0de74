// A warpgroup that expands tiles and sums weighted latents: 64 rows x 256 channels, over the keys of a tile, 16 in each
// product. As soon as a piece of a tile has been summed, that of a later tile is expanded to its place. A warpgroup
// expands the channels that it sums, so that a barrier of its own is enough before it does.
//
// Lane (g, t) of warp w has two rows, 16 w + g and 16 w + g + 8. Of each it has places 2 t and 2 t + 1 of every eight,
// which are channels t and t + 4 (attention/row_tiles/expansion.cuh).
#pragma once

#include "cuda/mla/row_tiles/expander.cuh"

namespace turboquant::cuda::mla {

template <class S>
class RowSums {
  static constexpr int kSums = S::kSumChannels / 2;
  static constexpr int kWidth = 128;  // channels of a product: the registers at the start of the kernel limit it

 public:
  __device__ __forceinline__ RowSums(const BlockView& block, RowBarriers<S>& barriers)
      : block_(block), barriers_(barriers), group_(block.warp / 4 - 1) {}

  // `tiles` tiles of a segment. raw: the slot of the first one's codes.
  __device__ __forceinline__ void attend(int tiles, const TileTurn<S>& turn, RingPlace& raw) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums_[i] = 0;
    receive<kSums>(sums_);
    switch (block_.plan.level_kind) {
      case LevelKind::kThreeBits: return attend_as<LevelKind::kThreeBits>(tiles, turn, raw);
      case LevelKind::kFourBits: return attend_as<LevelKind::kFourBits>(tiles, turn, raw);
      case LevelKind::kFiveBits: return attend_as<LevelKind::kFiveBits>(tiles, turn, raw);
      case LevelKind::kUniformFour:
      case LevelKind::kUniformFive:
      case LevelKind::kBytes: return;  // key tiles have them
    }
  }

  // The sums of a partial result [ROWS, kPart].
  __device__ __forceinline__ void leave(float* part) const {
    const int row = 16 * (block_.warp % 4) + block_.g;
    leave_sums<S::kSumChannels, S::kPart>(sums_, part + row * S::kPart + kPartHead + group_ * S::kSumChannels, block_.t,
                                          format::kLevelUnit);
  }

 private:
  // First as many tiles as the ring has are expanded, then one for each that is summed, then the last ones are summed.
  template <LevelKind KIND>
  __device__ __forceinline__ void attend_as(int tiles, TileTurn<S> turn, RingPlace& raw) {
    const Expander<S, KIND> expander(block_, block_.warp - kWarpgroup / 32);
    TileTurn<S> next = turn;
    int i = 0;
    for (; i < min(tiles, S::kTiles); ++i, ++next.count) {
      begin_tile(raw);
      for (int p = 0; p < kTilePieces; ++p) expand_piece(expander, next, raw, p);
      end_tile(next, raw);
    }
    for (; i < tiles; ++i, ++turn.count, ++next.count) {
      begin_sum(turn);
      begin_tile(raw);
      for_each<kTilePieces>([&](auto p) {
        wait_for_products<kTilePieces - 1 - p>();
        if constexpr (p == kTilePieces - 1) leave_tile(turn);
        sync_threads(kSumsBarrier + group_, kWarpgroup);  // all four warps have read the piece
        expand_piece(expander, next, raw, p);
      });
      end_tile(next, raw);
      receive<kSums>(sums_);
    }
    for (; turn.count != next.count; ++turn.count) {
      begin_sum(turn);
      wait_for_products<0>();
      leave_tile(turn);
      receive<kSums>(sums_);
    }
  }

  // ---- A tile that is summed

  // Begins its products, one commit for each piece.
  __device__ __forceinline__ void begin_sum(const TileTurn<S>& turn) {
    const int buffer = turn.buffer(), warp = block_.warp % 4;
    const uint4* from =
        reinterpret_cast<const uint4*>(block_.weights() + buffer * S::kWeightBytes) + threadIdx.x % kWarpgroup;
    const uint8_t* keys = block_.shared + group_ * (S::kSumChannels / 64 * S::kPanelBytes);
    const uint64_t operand = swizzled_columns(keys + turn.tile() * (kTileKeys * kSwizzleRow), S::kPanelBytes);
    for_each<kTilePieces>([&](auto s) {
      wait_barrier(&barriers_.weighed[buffer][s], turn.buffer_phase());
      if constexpr (s == 0) {
        const Factors& factors = reinterpret_cast<const Factors*>(block_.shared + block_.plan.factors)[buffer];
        if (factors.moved[warp]) rescale(factors.of_row + 16 * warp + block_.g);
      }
      const uint4 weight = from[s * kWarpgroup];
      const uint32_t a[4] = {weight.x, weight.y, weight.z, weight.w};
      begin_products();
      for_each<S::kSumChannels / kWidth>([&](auto part) {
        multiply_registers<kWidth, __half, true>(
            sums_ + part * (kWidth / 2), a,
            operand + (part * (kWidth / 64 * S::kPanelBytes) + s * (kPieceKeys * kSwizzleRow)) / 16, true);
      });
      commit_products();
    });
    __syncwarp();
    if (block_.lane == 0) arrive(&barriers_.weights_read[buffer]);
  }
  // Its products are done.
  __device__ __forceinline__ void leave_tile(const TileTurn<S>& turn) const {
    if (block_.lane == 0) arrive(&barriers_.freed[turn.tile()]);
  }

  // ---- A tile that is expanded

  __device__ __forceinline__ void begin_tile(const RingPlace& raw) const {
    wait_barrier(&barriers_.arrived[raw.slot], raw.phase);
  }
  template <class Expander>
  __device__ __forceinline__ void expand_piece(const Expander& expander, const TileTurn<S>& turn, const RingPlace& raw,
                                               int p) const {
    expander.expand(raw_slot<S>(block_, raw.slot), turn.tile(), p, raw_notes(block_)[raw.slot] >> p & 1);
  }
  __device__ __forceinline__ void end_tile(const TileTurn<S>& turn, RingPlace& raw) const {
    publish_operands();
    __syncwarp();
    if (block_.lane == 0) arrive(&barriers_.read[raw.slot]), arrive(&barriers_.expanded[turn.tile()]);
    raw.advance(block_.plan.raw_slots);
  }

  // factor: of the lane's first row
  __device__ __forceinline__ void rescale(const float* factor) {
    const float by[2] = {factor[0], factor[8]};
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums_[i] *= by[i / 2 % 2];
  }

  const BlockView block_;
  RowBarriers<S>& barriers_;
  const int group_;  // of the warpgroups that sum
  float sums_[kSums];
};

}  // namespace turboquant::cuda::mla
