// What all parts of the kernel of latent attention share, some of it with the host that launches it: sizes that are
// known when it is compiled, where everything of a block lies in shared memory, the numbers of segments, and, at the
// end, the instructions that several parts issue.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/attention/roles.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/softmax_math.cuh"
#include "cuda/codec/transform.cuh"
#include "cuda/mla/call.cuh"

namespace turboquant::cuda::mla {

using namespace roles;

// How codes become operands (mla/key_tiles/expansion.cuh). All are of uniform grids.
enum class OperandKind : int {
  kNibbles,  // 4 bits
  kPlanes,   // 5 bits: nibbles, and a plane of fifth bits
  kBytes,    // 8 bits
};

// How codes become levels of float16 (mla/levels.cuh). The first three have a table of levels.
enum class LevelKind : int { kThreeBits, kFourBits, kFiveBits, kUniformFour, kUniformFive, kBytes };

inline LevelKind level_kind_of(format::Width width, bool uniform) {
  if (format::is_spread(width)) return LevelKind::kThreeBits;
  if (format::has_plane(width)) return uniform ? LevelKind::kUniformFive : LevelKind::kFiveBits;
  if (!format::fits_nibble(width)) return LevelKind::kBytes;
  return uniform ? LevelKind::kUniformFour : LevelKind::kFourBits;
}
__host__ __device__ constexpr bool has_plane(LevelKind kind) {
  return kind == LevelKind::kFiveBits || kind == LevelKind::kUniformFive;
}

constexpr int kMostRegisters = 256;  // a thread has fewer: 255 at most
constexpr int kTileTokens = format::LatentRecord::kTileTokens;
constexpr int kUnitTiles = kUnitTokens / kTileTokens;
constexpr int kMaxStages = 8;
constexpr int kImageRows = 8;       // that a block prepares: the columns of a core matrix
constexpr int kJoinWarps = 8;       // of a block of the kernel that joins parts
constexpr int kMostJoinBlocks = 8;  // that join a row in it, a cluster
constexpr int kFewParts = 8;        // that a warp of the kernel that joins parts adds up in a moment
constexpr int kMostOfWarp = 16;     // parts that a warp adds up where few segments have more, which get several warps
constexpr int kExactPerUnit = 8;    // exact keys that take as long as a unit of codes, if there are some 70 of them

// The kernel that prepares queries attends to the exact keys of a sequence that has at most so many of them, and at
// most so many queries (few_exact.cuh).
constexpr int kExactApart = 8;

// What units of a kernel cost (attention/schedule.cuh), where the end of a segment takes as long as `end` of them.
constexpr UnitCosts costs_of_units(int end) { return {2, 1, end, kExactApart}; }
constexpr int kMostOfEnd = 16;  // no kernel's end of a segment takes longer

constexpr int kReadBarrier = 4;  // a named barrier, of all threads; those of roles have smaller numbers

// A partial result of a row: its maximum (base 2), its denominator, what its sums are too large by, and its sums.
constexpr int kPartHead = 4;
enum Part : int {
  kContinued,    // of a segment that began in another block
  kOpened,       // of one that began here
  kExact,        // exact keys, of a segment that began in another block
  kExactOpened,  // and of one that began here
  kParts
};

// How the lanes of a warp hold a latent: four neighbouring channels at a time.
template <int R>
using RowRotation = HadamardTraits<1,
                                   R == 512   ? 9
                                   : R == 256 ? 8
                                              : 7,
                                   32, 4>;

// The blocks that share a segment: `blocks` of them from `first` on. The last of them, from `exact` on, have its exact
// keys, or none has (-1).
struct SharedBy {
  int first, blocks, exact;

  __device__ __forceinline__ int exact_blocks() const { return exact < 0 ? 0 : first + blocks - exact; }
  // Where block `block` of them has left its part.
  __device__ __forceinline__ Part part_of_codes(int block) const { return block == first ? kOpened : kContinued; }
  __device__ __forceinline__ Part part_of_exact(int block) const { return block == first ? kExactOpened : kExact; }
};

// A segment with many parts, whose rows have a block each where they are joined. sequence: -1 stands for none.
struct LongSegment {
  int sequence, block;
  SharedBy shared;
};

// Sizes that depend on how codes are stored. R: channels of a latent.
template <int R, OperandKind KIND>
struct Codes {
  static constexpr OperandKind kKind = KIND;
  static constexpr int kRowBytes = KIND == OperandKind::kBytes ? R : R / 2;
  static constexpr int kPlaneBytes = KIND == OperandKind::kPlanes ? R / 8 : 0;
  static constexpr int kChunks = kRowBytes / 16;  // of 16 bytes in a row of codes
  static constexpr int kChunkChannels = R / kChunks;
};
// level = level_step * code - level_offset. Signed bytes are levels.
__device__ __forceinline__ float level_step(OperandKind kind) { return kind == OperandKind::kBytes ? 1 : 2; }
__device__ __forceinline__ float level_offset(OperandKind kind) {
  return kind == OperandKind::kBytes ? 0 : kind == OperandKind::kPlanes ? 31 : 15;
}

// f(Codes) for a kind known at run time. Little else depends on the kind, so that one kernel has all other code once.
template <int R, typename F>
__device__ __forceinline__ void with_codes(OperandKind kind, F&& f) {
  if (kind == OperandKind::kNibbles) {
    f(Codes<R, OperandKind::kNibbles>{});
  } else if (kind == OperandKind::kPlanes) {
    f(Codes<R, OperandKind::kPlanes>{});
  } else {
    f(Codes<R, OperandKind::kBytes>{});
  }
}

// R: channels of a latent. ROWS: query rows of a block.
template <int R, int ROWS>
struct Shape {
  static constexpr int kLatent = R, kRows = ROWS;
  static constexpr int kRowTiles = ROWS / 8;              // a product's columns are eight rows each
  static constexpr bool kKeepsWhole = R * ROWS <= 16384;  // see leave_part; with more sums registers do not suffice
  static constexpr UnitCosts kCosts = costs_of_units(ROWS == 16 ? 7 : ROWS == 32 ? 8 : 12);

  // One warpgroup computes scores, one or two sum weighted latents, each its part of the channels.
  static constexpr int kValueGroups = R * ROWS > 8192 && R == 512 ? 2 : 1;
  static constexpr int kValueThreads = kValueGroups * kWarpgroup;
  static constexpr int kThreads = kWarpgroup + kValueThreads;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kBlocks = R * ROWS <= 8192 ? 2 : 1;  // per multiprocessor

  // Registers of a thread: at the beginning, and while warpgroups have their roles.
  static constexpr int kRegisters = std::min(65536 / (kBlocks * kThreads) / 8 * 8, kMostRegisters);
  static constexpr int kMoved = kRegisters == kMostRegisters ? 0 : 16;  // from the warpgroup of scores to the others
  static constexpr int kScoreRegisters = kRegisters - kMoved, kValueRegisters = kRegisters + kMoved / kValueGroups;

  static constexpr int kByteStep = 64 * ROWS;  // bytes of 32 channels of all queries, each channel two bytes
  static constexpr int kQueryBytes = R / 32 * kByteStep;
  static constexpr int kSums = R / 64 / kValueGroups;  // products of 64 channels of a value warpgroup

  static constexpr int kStepBytes = 32 * ROWS;  // of 16 raw channels of all queries, or weights of 16 tokens
  static constexpr int kWeightBytes = kUnitTokens / 16 * kStepBytes;
  static constexpr int kPart = kPartHead + R;
};

// What scores need to know of the rows of a block: arrays one behind the other.
struct RowTable {
  float *scale, *start;  // of a sum of products with codes: the factor, and what is added then
  float* shift;          // the score of the center, base 2
  int *first, *end;      // the keys that a row sees from codes

  __host__ __device__ static constexpr int bytes(int rows) { return 5 * 4 * rows; }

  __device__ __forceinline__ RowTable(uint8_t* memory, int rows)
      : scale(reinterpret_cast<float*>(memory)), start(scale + rows), shift(start + rows),
        first(reinterpret_cast<int*>(shift + rows)), end(first + rows) {}

  __device__ __forceinline__ bool exists(int row) const { return first[row] >= 0; }
};

// Whether running totals of scores are in shared memory, because registers have no room for them.
__host__ __device__ constexpr bool totals_in_memory(int rows) { return rows == 64; }

// Shared memory of a block, in bytes from its start, and what else all blocks need to know. Key tiles and row tiles
// divide it differently.
struct Plan {
  bool half_queries;                      // float16, not integers
  Divisor grid;                           // blocks
  int planes, ropes, scales, tile_bytes;  // of a tile of the record
  int queries, rows, weights, factors, barriers, notes, bytes;
  // Of key tiles: the ring of units.
  OperandKind kind;
  int copy_bytes;  // of a tile; tile_bytes is a multiple of 128
  int stages, unit_bytes, exchange, totals;
  // How row tiles and warp tiles expand codes, and where the tables for it are.
  LevelKind level_kind;
  int tables;
  // Of row tiles: raw slots, as many bytes each, and what is noted of them; scales of the tokens in the ring.
  int raw, raw_bytes, raw_slots, raw_notes, token_scales;

  int query_bytes, image_bytes;  // of an image: the queries, and the table of rows behind them
  uint8_t* images;               // [numbers of segments, image_bytes]
  float* parts;                  // [grid, kParts, ROWS, kPart]
  float* exact_parts;            // [seqs, few_rows, kPart]: of few exact keys
  int few_rows;                  // rows of a sequence, at most, whose exact keys may be few; 0 without exact keys
  int image_blocks;              // of the kernel that prepares queries; those behind them attend to few exact keys
  uint32_t* arrivals;            // [grid], 0 between launches
  SharedBy* segments;            // [numbers of segments], where another kernel joins all parts; else null
  LongSegment* long_segments;    // [num_long]: element i is the one that begins in the most_parts blocks from
                                 // i * most_parts on: no two do, because each has more parts than that
  int most_parts, num_long;
  int row_blocks;  // of each sequence, in numbers of segments; 0: numbers follow the tokens

  // Floats of a row in the memory by which warps exchange: the denominators and the sums of weights of four warps; then
  // its state, which lasts for a segment: the reference of its weights, and the largest score.
  static constexpr int kExchanged = 2 * 4, kState = 2;
  // Floats of a buffer of factors: one for each row, and whether any is not 1. Two rows' are read at once.
  __host__ __device__ static constexpr int factors_of(int rows) { return rows + 2; }

  Plan() = default;
  // Of key tiles; others have plan_of_row_tiles and plan_of_warp_tiles (shape.cuh in their folders).
  Plan(const format::LatentRecord& r, int block_rows, int shared_limit) {
    half_queries = false;
    kind = format::has_plane(r.width())     ? OperandKind::kPlanes
           : format::fits_nibble(r.width()) ? OperandKind::kNibbles
                                            : OperandKind::kBytes;
    planes = r.planes(), ropes = r.ropes(), scales = r.scales();
    copy_bytes = r.tile_bytes(), tile_bytes = round_up(copy_bytes, 128), unit_bytes = kUnitTiles * tile_bytes;
    query_bytes = block_rows * (r.latent_dim + r.rope_dim) * 2;
    image_bytes = round_up(query_bytes + RowTable::bytes(block_rows), 128);
    const int weight_bytes = kWeightBuffers * block_rows * kUnitTokens * 2;
    const int factor_bytes = round_up(kWeightBuffers * factors_of(block_rows) * 4, 128);
    const int exchange_bytes = (kExchanged + kState) * block_rows * 4;
    const int total_bytes = totals_in_memory(block_rows) ? block_rows / 8 * kWarpgroup * 16 : 0;
    const int barrier_bytes =
        round_up((2 * kMaxStages + 2 * kWeightBuffers + 1) * 8, alignof(Segment));  // notes come next
    const int fixed = image_bytes + weight_bytes + factor_bytes + exchange_bytes + total_bytes + barrier_bytes + 256;
    stages = std::min((shared_limit - fixed) / unit_bytes, kMaxStages);
    queries = stages * unit_bytes;
    rows = queries + query_bytes;
    weights = queries + image_bytes;
    factors = weights + weight_bytes;
    exchange = factors + factor_bytes;
    totals = exchange + exchange_bytes;
    barriers = totals + total_bytes;
    notes = barriers + barrier_bytes;
    bytes = notes + 256;
  }
};

// What the threads of a block tell each other about its work.
struct Notes {
  BlockShare share;
  int flag;
};
static_assert(sizeof(Notes) <= 256);

// Of a power of two, as the rows of a block are.
__device__ __forceinline__ int log2_of(int rows) { return 31 - __clz(rows); }

// The number of the first segment of a sequence; its other blocks of `rows` rows have those that follow. Where one
// sequence has many queries and others few, numbers follow the tokens: there are up to tokens * q_heads / rows + seqs.
__device__ __forceinline__ int first_segment(const Plan& plan, const Attention& a, int rows, int sequence) {
  if (plan.row_blocks > 0) return sequence * plan.row_blocks;
  return static_cast<int>(int64_t{a.first_query(sequence)} * a.q_heads >> log2_of(rows)) + sequence;
}
// The sequence of a number: the last one whose first number is not above it.
__device__ __forceinline__ int sequence_of_segment(const Plan& plan, const Attention& a, int rows, int number) {
  if (plan.row_blocks > 0) return quotient(number, plan.row_blocks);
  int low = 0, high = a.seqs - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_segment(plan, a, rows, middle) <= number) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// A thread's view of its block.
struct BlockView {
  const Latents& call;
  const Plan& plan;
  uint8_t* shared;
  int warp, lane, g, t;

  __device__ __forceinline__ BlockView(const Latents& x, const Plan& p, uint8_t* memory)
      : call(x), plan(p), shared(memory), warp(threadIdx.x / 32), lane(threadIdx.x % 32), g(lane / 4), t(lane % 4) {}

  // The same view, of a number that the compiler does not know to be the thread's. It keeps what follows from it in
  // registers then, where it would read the thread's number anew for each use, which takes 30 clocks. (An unsigned
  // number makes the loops of 64 rows 6% slower.)
  __device__ __forceinline__ BlockView own() const {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return BlockView(*this, thread);
  }
  __device__ __forceinline__ int thread() const { return 32 * warp + lane; }

  __device__ __forceinline__ uint8_t* queries() const { return shared + plan.queries; }
  // Where the sums of a whole segment are, in place of what they were computed from.
  __device__ __forceinline__ float* whole_part() const { return reinterpret_cast<float*>(shared); }
  __device__ __forceinline__ uint8_t* weights() const { return shared + plan.weights; }
  template <class S>
  __device__ __forceinline__ RowTable rows() const {
    return RowTable(shared + plan.rows, S::kRows);
  }
  __device__ __forceinline__ float* factors() const { return reinterpret_cast<float*>(shared + plan.factors); }
  __device__ __forceinline__ float* exchange() const { return reinterpret_cast<float*>(shared + plan.exchange); }
  __device__ __forceinline__ float4* totals() const { return reinterpret_cast<float4*>(shared + plan.totals); }
  __device__ __forceinline__ float* references(int rows) const { return exchange() + Plan::kExchanged * rows; }
  __device__ __forceinline__ Notes& notes() const { return *reinterpret_cast<Notes*>(shared + plan.notes); }

  // Barriers: stage `i` has arrived; it has been read; weights `i` are there; weights `i` have been read; the image of
  // the rows has arrived.
  __device__ __forceinline__ uint64_t* arrived(int i) const { return barriers() + i; }
  __device__ __forceinline__ uint64_t* freed(int i) const { return barriers() + kMaxStages + i; }
  __device__ __forceinline__ uint64_t* weighed(int i) const { return barriers() + 2 * kMaxStages + i; }
  __device__ __forceinline__ uint64_t* weights_read(int i) const {
    return barriers() + 2 * kMaxStages + kWeightBuffers + i;
  }
  __device__ __forceinline__ uint64_t* prepared() const { return barriers() + 2 * kMaxStages + 2 * kWeightBuffers; }

 private:
  __device__ __forceinline__ BlockView(const BlockView& other, int thread)
      : call(other.call), plan(other.plan), shared(other.shared), warp(thread / 32), lane(thread % 32), g(lane / 4),
        t(lane % 4) {}
  __device__ __forceinline__ uint64_t* barriers() const { return reinterpret_cast<uint64_t*>(shared + plan.barriers); }
};

// leave(part): what a warp has of a partial result. whole: it is all that the segment has, and stays in shared memory,
// when every warp has read what is there. (The two calls are apart, because stores to an address that may be in either
// memory take more registers.)
template <class S, typename F>
__device__ __forceinline__ void leave_part(const BlockView& block, bool whole, float* part, F&& leave) {
  if (S::kKeepsWhole && whole) {
    sync_threads(kReadBarrier, S::kThreads);
    leave(block.whole_part());
  } else {
    leave(part);
  }
}

// The scale of a token that a row may not see: whatever it is, a weight of 0 stays 0.
__device__ __forceinline__ float finite_or_0(float scale) { return fabsf(scale) <= format::kMaxHalf ? scale : 0; }

// Leaves 16 rows of sums of a warp in a partial result. Element 4 j + 2 i + h of sums is row g + 8 i and place 2 t + h
// of octet j: channel t or t + 4 (attention/row_tiles/expansion.cuh). to: row g, from the first channel on. ROW: floats
// from one row to the next. unit: what sums are multiplied by.
template <int CHANNELS, int ROW>
__device__ __forceinline__ void leave_sums(const float* sums, float* to, int t, float unit) {
#pragma unroll
  for (int j = 0; j < CHANNELS / 8; j += 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* x = sums + 4 * j + 2 * i;
      float y[4] = {x[0], x[1], x[4], x[5]};  // of channel t of four fours of channels
      transpose_quad(y, t);
      *reinterpret_cast<float4*>(to + i * 8 * ROW + 8 * j + 4 * t) = {y[0] * unit, y[1] * unit, y[2] * unit,
                                                                      y[3] * unit};
    }
  }
}
// Four 8 x 8 matrices of 16-bit elements from an address in shared memory (common/mma.cuh).
template <bool TRANSPOSED = false>
__device__ __forceinline__ uint4 load_matrices(uint32_t row) {
  uint4 x;
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(row));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(row));
  }
  return x;
}
// Two of them, transposed, from the addresses of lanes 0 to 15.
__device__ __forceinline__ uint2 load_two_matrices(uint32_t row) {
  uint2 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(row));
  return x;
}

}  // namespace turboquant::cuda::mla
