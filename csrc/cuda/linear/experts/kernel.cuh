// linear_experts for any number of pairs: each piece is one pass over the weight of its expert.
//
// The slabs of all pieces lie behind each other, and thread blocks have equal shares of them, one thread block for each
// multiprocessor. A thread block quantises the columns of a piece, multiplies its slabs of that piece, and goes on with
// the next piece. The stream of weights (stream.cuh) does not stop there: rings fill with units of the next piece
// meanwhile.
#pragma once

#include "cuda/linear/columns.cuh"
#include "cuda/linear/experts/arrange_few.cuh"
#include "cuda/linear/experts/call.cuh"
#include "cuda/linear/stream.cuh"

namespace turboquant::cuda::linear::experts {

// The columns of a piece, whose rows of x are those of their tokens.
struct PieceColumns {
  const Call& a;
  const int* pairs;
  int count;

  __device__ __forceinline__ bool exists(int column) const { return column < count; }
  __device__ __forceinline__ int64_t offset(int column) const {
    return offset_of(quotient(pairs[column], a.pairs.choices), a.x_stride);
  }
};

// One kernel for units with multipliers and without takes less code than two.
constexpr Subs subs_of_experts(Codes codes) { return codes == Codes::kBytes ? Subs::kNone : Subs::kEither; }

template <Codes CODES, int TILES>
class Block : UnitStream<CODES, subs_of_experts(CODES), TILES> {
  using Stream = UnitStream<CODES, subs_of_experts(CODES), TILES>;
  using Stream::columns, Stream::copy_from_, Stream::copy_left_, Stream::lane_, Stream::shared_, Stream::warp_;
  using typename Stream::Expand, typename Stream::Sums;

 public:
  __device__ __forceinline__ Block(const Call& a, const Plan& p, uint8_t* shared)
      : Stream(p, shared), a_(a), p_(p), arranged_(a.arranged) {
    row_ = small_quotient(warp_, p.warps_k), k_ = warp_ - row_ * p.warps_k;
    begin_ = p.groups_of_warp.begin(k_), end_ = p.groups_of_warp.begin(k_ + 1);
    pairs_ = reinterpret_cast<int*>(shared + p.pairs);
  }

  __device__ __forceinline__ void run() {
    this->init_barriers();
    wait_for_previous_kernel();
    let_next_kernel_begin();
    this->expand_ = Expand(Expand::load(a_.levels));
    if (p_.arranged > 0) {
      uint8_t* const memory = shared_ + p_.arranged;
      arrange_few(a_.pairs.chosen, a_.pairs.count, a_.pairs.experts, p_.record.columns, memory);
      arranged_ = few_in(memory, a_.pairs.count);
    }
    take_share(*arranged_.totals);
    next_segment_of_copies();
    bool filled = false;
    for (int at = first_; at < last_;) {
      const Segment s = segment(at);
      const Piece piece = arranged_.pieces[s.piece];
      prepare_columns(piece, [&] {
        if (filled) return;
        filled = true;
#pragma unroll 1
        for (int i = 0; i < p_.slots; ++i) this->fill(i, follow());
      });
      multiply(s, piece);
      at += s.end - s.begin;
    }
    for (int i = arranged_.totals[1] + static_cast<int>(blockIdx.x); i < a_.pairs.count;
         i += static_cast<int>(gridDim.x)) {
      clear_results(arranged_.order[i], a_.y, a_.dtype, a_.n);
    }
  }

 private:
  // Neighbouring slabs of a piece.
  struct Segment {
    int piece, begin, end;
  };

  // ---- The share of the block

  // If thread blocks can be shared by pieces without leaving more than an eighth of them idle, none has two of them.
  __device__ __forceinline__ void take_share(int pieces) {
    const int blocks = gridDim.x, block = blockIdx.x;
    first_ = last_ = 0;
    if (pieces == 0) return;
    const int each = quotient(blocks, pieces);
    if (8 * each * pieces >= 7 * blocks) {
      const int piece = quotient(block, each), part = block - piece * each;
      if (piece < pieces) set_share(piece * p_.slabs, Share(p_.slabs, each), part);
    } else {
      set_share(0, Share(pieces * p_.slabs, blocks), block);
    }
  }
  __device__ __forceinline__ void set_share(int from, const Share& share, int of) {
    first_ = from + share.begin(of), last_ = from + share.begin(of + 1);
  }

  // What begins with slab `at` of all pieces.
  __device__ __forceinline__ Segment segment(int at) const {
    const int piece = quotient(at, p_.slabs), begin = at - piece * p_.slabs;
    return {piece, begin, min(p_.slabs, begin + last_ - at)};
  }

  // ---- Copies

  // What the stream goes on with behind a slab: the warp's next one, of this piece or of another.
  __device__ __forceinline__ auto follow() {
    return [this] {
      copy_slab_ += p_.warps_rows;
      if (copy_slab_ < copy_end_) {
        begin_copies();
      } else {
        next_segment_of_copies();
      }
    };
  }
  __device__ __forceinline__ void begin_copies() {
    copy_left_ = end_ - begin_;
    copy_from_ = copy_weight_ + (int64_t{copy_slab_} * a_.groups + begin_) * p_.unit_bytes;
  }
  // The next segment of which the warp has a slab, if there is one; the first call begins with the first.
  __device__ __forceinline__ void next_segment_of_copies() {
    if (row_ >= p_.warps_rows) return;
    for (int at = copy_first_ < 0 ? first_ : copy_first_; at < last_;) {
      const Segment s = segment(at);
      at += s.end - s.begin;
      copy_first_ = at, copy_slab_ = s.begin + row_, copy_end_ = s.end;
      if (copy_slab_ >= copy_end_) continue;
      copy_weight_ = a_.packed + arranged_.pieces[s.piece].expert * a_.weight_bytes;
      begin_copies();
      return;
    }
  }

  // ---- Columns

  // meanwhile: runs while activations are on their way
  template <typename F>
  __device__ __forceinline__ void prepare_columns(const Piece& piece, const F& meanwhile) {
    const RecordOfColumns& r = p_.record;
    __syncthreads();  // the columns of the previous piece have been read
    const int column = threadIdx.x;
    if (column < piece.count) pairs_[column] = arranged_.order[piece.first + column];
    __syncthreads();
    const PieceColumns of{a_, pairs_, piece.count};
    Quantiser<splits_channels(CODES), PieceColumns>(a_, r, columns(), 0, a_.groups, of).run(warp_, kWarps, meanwhile);
    __syncthreads();
  }

  // ---- Products and results

  __device__ __forceinline__ void multiply(const Segment& s, const Piece& piece) {
    if (row_ >= p_.warps_rows) return;
    const int record = kHeaderBytes + begin_ * p_.record.bytes();
#pragma unroll 1
    for (int slab = s.begin + row_; slab < s.end; slab += p_.warps_rows) {
      Sums y = {};
      Stream::multiply(record, end_ - begin_, y, follow());
      if (p_.warps_k > 1) {
        const bool has_all = join_warps(y);
        sync_warps_of_slab();  // sums have been read, others may take their place
        if (!has_all) continue;
      }
      const int element_bytes = a_.dtype == Dtype::kFloat32 ? 4 : 2;
      const void* const bias =
          a_.bias ? static_cast<const uint8_t*>(a_.bias) + piece.expert * a_.n * element_bytes : nullptr;
      this->store_slab(slab, a_.n, y, bias, a_.y, a_.dtype,
                       [&](int c) { return c < piece.count ? pairs_[c] * a_.n : int64_t{-1}; });
    }
  }

  // Adds the sums of the warps that share a slab; the first of them goes on with all.
  __device__ __forceinline__ bool join_warps(Sums& y) const {
    constexpr int kStride = 32 * TILES;
    float4* const own = reinterpret_cast<float4*>(shared_ + p_.join) + warp_ * kStride + lane_;
    this->leave(y, own);
    sync_warps_of_slab();
    if (k_ != 0) return false;
#pragma unroll 4
    for (int other = 1; other < p_.warps_k; ++other) {
      this->add(y, [&](int i) { return own[other * kStride + i]; });
    }
    return true;
  }
  __device__ __forceinline__ void sync_warps_of_slab() const { sync_threads(1 + row_, 32 * p_.warps_k); }

  const Call& a_;
  const Plan& p_;
  Arrangement arranged_;
  int* pairs_;                        // [columns]: of the piece
  int first_, last_;                  // slabs of all pieces that the block has
  int row_, k_;                       // which slab of those at a time is the warp's, and which share of its groups
  int begin_, end_;                   // groups of the warp
  int copy_first_ = -1;               // where the segment after that of the copies begins
  int copy_slab_ = 0, copy_end_ = 0;  // of the stream's next copy; of its segment
  const uint8_t* copy_weight_ = nullptr;
};

template <Codes CODES, int TILES>
__global__ void __launch_bounds__(32 * kWarps, 1)
    experts_kernel(const __grid_constant__ Call a, const __grid_constant__ Plan p) {
  if constexpr (has_kernel(TILES, kWarpgroupProducts) && TILES <= kMostTiles) {
    extern __shared__ uint4 dynamic[];
    Block<CODES, TILES> block(a, p, reinterpret_cast<uint8_t*>(dynamic));
    block.run();
  }
}

}  // namespace turboquant::cuda::linear::experts
