// The warps that copy: one brings codes to raw slots, ahead of those who expand them, the other what is not expanded,
// raw channels and scales, to its place in the ring.
#pragma once

#include "cuda/mla/row_tiles/shape.cuh"

namespace turboquant::cuda::mla {

template <class S>
class RowCopies {
  static constexpr int kBatch = 32 / kTilePieces;  // tiles whose places in memory the lanes of a warp hold

 public:
  __device__ __forceinline__ RowCopies(const BlockView& block, RowBarriers<S>& barriers)
      : block_(block), barriers_(barriers) {}

  // Units [0, units) of a segment, the first of which has `token` as its first. raw: the slot of the first tile.
  __device__ __forceinline__ void attend(const Segment& segment, int token, int units, const TileTurn<S>& turn,
                                         RingPlace& raw) {
    const Attention& a = block_.call.a;
    token_ = token, pieces_ = units * kUnitPieces;
    end_ = a.new_begin(segment.work.length, segment.work.queries);
    table_ = a.block_table + segment.sequence * a.table_stride;
    publish_operands();  // what threads wrote here comes before what copies write
    const int warp = block_.warp % (kWarpgroup / 32);
    if (warp == 0) copy_codes(num_tiles(units), raw);
    if (warp == 1) copy_rest(num_tiles(units), turn);
  }

 private:
  // The record's tile that has piece p; null: there is none.
  __device__ __forceinline__ const uint8_t* tile_of(int p) const {
    const Latents& x = block_.call;
    const int token = token_ + p * kPieceKeys;
    const int page = p < pieces_ && token < end_ ? x.page_of(table_, token) : -1;
    return x.exists(page) ? x.tile_of(page, token) : nullptr;
  }
  // Whether a piece is the second half of it: segments begin with whole units.
  static __device__ __forceinline__ int half_of(int p) { return p % 2; }

  // f(tile, piece, place in memory or null): of all tiles, each by the lane that knows where the piece is. The block
  // table is read long before its use.
  template <typename F>
  __device__ __forceinline__ void for_pieces(int tiles, F&& f) const {
    const int lane = block_.lane, in_tile = lane % kTilePieces;
    const auto place_of_lane = [&](int first) {
      return lane < kBatch * kTilePieces ? tile_of(first * kTilePieces + lane) : nullptr;
    };
    const uint8_t *from = place_of_lane(0), *next_from = place_of_lane(kBatch);
    int in_batch = 0;
    for (int i = 0; i < tiles; ++i, ++in_batch) {
      if (in_batch == kBatch) from = next_from, next_from = place_of_lane(i + kBatch), in_batch = 0;
      f(i, lane / kTilePieces == in_batch, in_tile, from);
    }
  }

  __device__ __forceinline__ void copy_codes(int tiles, RingPlace& slot) const {
    const Plan& plan = block_.plan;
    const int codes = plan.planes / 2, planes = plan.ropes / 2 - codes;
    for_pieces(tiles, [&](int i, bool mine, int piece, const uint8_t* tile) {
      uint64_t* const arrived = &barriers_.arrived[slot.slot];
      wait_barrier(&barriers_.read[slot.slot], slot.phase ^ 1);
      const unsigned exist = __ballot_sync(0xffffffff, mine && tile);
      if (block_.lane == 0) {
        raw_notes(block_)[slot.slot] = exist >> i % kBatch * kTilePieces;
        expect(arrived, __popc(exist) * (codes + planes));
      }
      __syncwarp();
      if (mine && tile) {
        uint8_t* const to = raw_slot<S>(block_, slot.slot);
        const int half = half_of(i * kTilePieces + piece);
        copy_bulk(to + piece * codes, tile + half * codes, codes, arrived);
        if (planes > 0) {
          copy_bulk(to + kTilePieces * codes + piece * planes, tile + plan.planes + half * planes, planes, arrived);
        }
      }
      slot.advance(plan.raw_slots);
    });
  }

  __device__ __forceinline__ void copy_rest(int tiles, TileTurn<S> turn) const {
    const Plan& plan = block_.plan;
    const bool direct = block_.call.record.rope_dim == 64;  // rows have the swizzle of the ring already
    const int ropes = (plan.scales - plan.ropes) / 2, scales = kPieceKeys * 2;
    for_pieces(tiles, [&](int i, bool mine, int piece, const uint8_t* tile) {
      uint8_t* const to = block_.shared + (S::kPanels - 1) * S::kPanelBytes + turn.tile() * (kTileKeys * kSwizzleRow);
      uint64_t* const expanded = &barriers_.expanded[turn.tile()];
      wait_barrier(&barriers_.freed[turn.tile()], turn.phase() ^ 1);
      const unsigned exist = __ballot_sync(0xffffffff, mine && tile);
      if (!direct) fill_ropes(tile, i, to);
      if (block_.lane == 0) expect(expanded, __popc(exist) * (scales + (direct ? ropes : 0)));
      __syncwarp();
      if (mine && tile) {
        const int half = half_of(i * kTilePieces + piece);
        if (direct) {
          copy_bulk(to + piece * (kPieceKeys * kSwizzleRow), tile + plan.ropes + half * ropes, ropes, expanded);
        }
        copy_bulk(block_.shared + plan.token_scales + (turn.tile() * kTilePieces + piece) * scales,
                  tile + plan.scales + half * scales, scales, expanded);
      }
      ++turn.count;
    });
  }
  // Raw channels that are fewer than 64, filled up with zeros. tile: of the lane's piece.
  __device__ __forceinline__ void fill_ropes(const uint8_t* tile, int i, uint8_t* to) const {
    const int words = block_.call.record.rope_dim / 8;
#pragma unroll 1
    for (int piece = 0; piece < kTilePieces; ++piece, to += kPieceKeys * kSwizzleRow) {
      const auto from = reinterpret_cast<const uint8_t*>(
          __shfl_sync(0xffffffff, reinterpret_cast<uint64_t>(tile), i % kBatch * kTilePieces + piece));
      const int half = half_of(i * kTilePieces + piece);
#pragma unroll 1
      for (int k = 0; k < kPieceKeys * 8 / 32; ++k) {
        const int token = 4 * k + block_.lane / 8, word = block_.lane % 8;
        uint4 x{};
        if (word < words && from) {
          x = *reinterpret_cast<const uint4*>(
              from + block_.plan.ropes +
              ((half * kPieceKeys + token) * words + format::swapped_word(words, token, word)) * format::kLatentWord);
        }
        *reinterpret_cast<uint4*>(to + swizzled(token, word * 16)) = x;
      }
    }
    publish_operands();
    __syncwarp();
  }

  const BlockView block_;
  RowBarriers<S>& barriers_;

  // Of the segment: its first token here, its pieces, the end of its codes, and its row of the block table.
  int token_, pieces_, end_;
  const int32_t* table_;
};

}  // namespace turboquant::cuda::mla
