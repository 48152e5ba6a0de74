// Sizes of the kernel whose rows of queries are the long side of products (mla/row_tiles/roles.cuh), and how its
// warpgroups count.
//
// A tile is 48 keys, expanded to float16. Two tiles of 512 channels fit into shared memory beside 64 rows of queries,
// and products of 48 keys read those rows less often than products of 32 would. A piece is 16 keys, a step of the
// products with weights.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/wgmma_swizzled.cuh"
#include "cuda/mla/levels.cuh"
#include "cuda/mla/shape.cuh"

namespace turboquant::cuda::mla {

constexpr int kPieceKeys = 16;
constexpr int kTilePieces = 3;
constexpr int kTileKeys = kTilePieces * kPieceKeys;
constexpr int kUnitPieces = kUnitTokens / kPieceKeys;
constexpr int kMostRawSlots = 4;
constexpr int kSumsBarrier = 2;  // named barriers, of each warpgroup that sums

// R: channels of a latent.
template <int R>
struct RowShape {
  static constexpr int kLatent = R, kRows = 64;
  static constexpr UnitCosts kCosts = costs_of_units(8);
  static constexpr bool kKeepsWhole = true;  // see leave_part

  // One warpgroup computes scores, others expand codes and sum weighted latents, 256 channels each, and one copies.
  static constexpr int kSumChannels = 256, kSumGroups = R / kSumChannels;
  static constexpr int kThreads = (2 + kSumGroups) * kWarpgroup;
  static constexpr int kWarps = kThreads / 32, kSumWarps = kSumGroups * kWarpgroup / 32;
  static constexpr int kBlocks = 1;  // per multiprocessor

  // Registers of a thread: at the beginning, and while warpgroups have their roles.
  static_assert(kSumGroups == 2);
  static constexpr int kRegisters = 65536 / kThreads, kScoreRegisters = 112, kSumRegisters = 184, kCopyRegisters = 32;

  // The ring of tiles, in shared memory from its start: [panels][keys][64 channels] of float16, in rows of 128 bytes
  // with the swizzle of common/wgmma_swizzled.cuh. The last panel has raw channels.
  static constexpr int kTiles = 2, kRingKeys = kTiles * kTileKeys;
  static constexpr int kPanels = R / 64 + 1, kPanelBytes = kRingKeys * kSwizzleRow;
  static constexpr int kRingBytes = kPanels * kPanelBytes;
  static constexpr int kQueryPanel = kRows * kSwizzleRow;  // of queries, in panels like those of the ring

  static constexpr int kWeightBytes = kTilePieces * kWarpgroup * 16;  // of a buffer
  static constexpr int kPart = kPartHead + R;
};

// A tile's number among all of the block, which all warpgroups count alike, and what follows from it.
template <class S>
struct TileTurn {
  uint32_t count = 0;

  __device__ __forceinline__ int tile() const { return count % S::kTiles; }
  __device__ __forceinline__ uint32_t phase() const { return count / S::kTiles & 1; }
  __device__ __forceinline__ int buffer() const { return count % kWeightBuffers; }
  __device__ __forceinline__ uint32_t buffer_phase() const { return count / kWeightBuffers & 1; }
};
__device__ __forceinline__ int num_tiles(int units) { return ceil_div(units * kUnitPieces, kTilePieces); }

// Barriers of a block, and what has happened when their phase ends.
template <class S>
struct RowBarriers {
  uint64_t arrived[kMostRawSlots];                // a tile's codes are in the raw slot
  uint64_t read[kMostRawSlots];                   // warps that expand have read them
  uint64_t expanded[S::kTiles];                   // the tile's levels, raw channels and scales are in the ring
  uint64_t freed[S::kTiles];                      // products have read the tile
  uint64_t weighed[kWeightBuffers][kTilePieces];  // the weights of a piece are there
  uint64_t weights_read[kWeightBuffers];          // warps that sum have read them
  uint64_t prepared;                              // the image of the queries has arrived

  __device__ __forceinline__ void init() {
    for (uint64_t& x : arrived) init_barrier(&x, 1);
    for (uint64_t& x : read) init_barrier(&x, S::kSumWarps);
    for (uint64_t& x : expanded) init_barrier(&x, S::kSumWarps + 1);  // and the warp that copies the rest
    for (uint64_t& x : freed) init_barrier(&x, S::kSumWarps);
    for (auto& of_buffer : weighed) {
      for (uint64_t& x : of_buffer) init_barrier(&x, kWarpgroup / 32);
    }
    for (uint64_t& x : weights_read) init_barrier(&x, S::kSumWarps);
    init_barrier(&prepared, 1);
  }
};

// What those who sum need to know of a buffer of weights beside them: whether references of a warp's rows have moved,
// and the factors of their sums.
struct Factors {
  float of_row[64];
  int moved[kWarpgroup / 32];
};

// Where everything is in `shared_limit` bytes of shared memory.
template <class S>
Plan plan_of_row_tiles(const format::LatentRecord& r, int shared_limit) {
  int next = S::kRingBytes;
  const auto place = [&](int& at, int bytes) { at = next, next += round_up(bytes, 128); };
  Plan p{};
  p.half_queries = true;
  p.level_kind = level_kind_of(r.width(), false);
  p.planes = r.planes(), p.ropes = r.ropes(), p.scales = r.scales(), p.tile_bytes = r.tile_bytes();
  p.query_bytes = S::kRows * (S::kLatent + 64) * 2;
  p.image_bytes = round_up(p.query_bytes + RowTable::bytes(S::kRows), 128);
  place(p.queries, p.image_bytes);
  p.rows = p.queries + p.query_bytes;
  place(p.weights, kWeightBuffers * S::kWeightBytes);
  place(p.factors, kWeightBuffers * sizeof(Factors));
  place(p.token_scales, S::kRingKeys * sizeof(__half));
  place(p.tables, kLevelCodes);
  place(p.barriers, sizeof(RowBarriers<S>));
  place(p.notes, sizeof(Notes));
  place(p.raw_notes, kMostRawSlots * sizeof(uint32_t));
  p.raw = next;
  p.raw_bytes = kTilePieces * r.ropes() / 2;  // the codes of a tile; a tile of the record has two pieces
  p.raw_slots = std::min((shared_limit - next) / p.raw_bytes, kMostRawSlots);
  p.bytes = next + p.raw_slots * p.raw_bytes;
  return p;
}

// A raw slot: the rows of a tile's codes, then their planes. And which of its pieces there are, a bit for each.
template <class S>
__device__ __forceinline__ uint8_t* raw_slot(const BlockView& block, int slot) {
  return block.shared + block.plan.raw + slot * block.plan.raw_bytes;
}
__device__ __forceinline__ uint32_t* raw_notes(const BlockView& block) {
  return reinterpret_cast<uint32_t*>(block.shared + block.plan.raw_notes);
}

}  // namespace turboquant::cuda::mla
