// linear_packed for up to 64 columns: one pass over the weights.
//
// Warps stream units of weights (stream.cuh). Those of a block take other rows or other channels of the same rows; the
// latter add their sums at the end, in a fixed order, and so do blocks that share rows: the last one to arrive adds all
// of them.
// The first copies may begin while the previous kernel still runs, because that kernel does not write weights.
#pragma once

#include "cuda/attention/counters.cuh"
#include "cuda/linear/columns.cuh"
#include "cuda/linear/stream.cuh"

namespace turboquant::cuda::linear {

template <Codes CODES, Subs SUBS, int TILES>
class Block : UnitStream<CODES, SUBS, TILES> {
  using Stream = UnitStream<CODES, SUBS, TILES>;
  using Stream::columns, Stream::copy_from_, Stream::copy_left_, Stream::k_, Stream::lane_, Stream::ring_, Stream::row_,
      Stream::warp_;
  using typename Stream::Sums;

 public:
  __device__ __forceinline__ Block(const Call& a, const Plan& p, uint8_t* shared) : Stream(p, shared), a_(a), p_(p) {
    part_ = blockIdx.x;
    first_group_ = p.groups_of_part.begin(part_), end_group_ = p.groups_of_part.begin(part_ + 1);
    const int slab = p.slabs_of_block.begin(blockIdx.y);
    end_slab_ = p.slabs_of_block.begin(blockIdx.y + 1);
    slab_ = row_ < p.warps_rows ? slab + row_ : end_slab_;
    const Share& share = p.groups_of_warp[end_group_ - first_group_ - p.groups_of_part.each];
    begin_ = first_group_ + share.begin(k_), end_ = first_group_ + share.begin(k_ + 1);
    copy_slab_ = slab_, copy_left_ = slab_ < end_slab_ ? end_ - begin_ : 0;
    copy_from_ = unit(slab_, begin_);
  }

  __device__ __forceinline__ void run() {
    // In a graph weights and constants may be read before the previous kernel has ended.
    const bool early = p_.early == Early::kRing;
    if (!early) {
      if (p_.early == Early::kPrefetch) prefetch();
      wait_for_previous_kernel();
    }
    this->expand_ = Expansion<CODES>(a_.levels);
    this->init_barriers();
    // Activations would have to wait behind all weights that were asked for before them.
    const int first = early && warp_ % 2 == 0;
    if (first) this->fill(0, follow());
    if (early) wait_for_previous_kernel();
    prepare_columns([&] {
#pragma unroll 1
      for (int i = first; i < p_.slots; ++i) this->fill(i, follow());
    });
    let_next_kernel_begin();  // which begins to fill its ring: not before this one has its activations
    stream();
  }

 private:
  static constexpr int kWarps = num_warps(TILES);

  __device__ __forceinline__ const uint8_t* unit(int slab, int group) const {
    return a_.packed + (int64_t{slab} * a_.groups + group) * p_.unit_bytes;
  }

  // ---- Copies

  // What the stream goes on with behind a slab: the warp's next one.
  __device__ __forceinline__ auto follow() {
    return [this] {
      copy_slab_ += p_.warps_rows;
      if (copy_slab_ < end_slab_) copy_left_ = end_ - begin_, copy_from_ = unit(copy_slab_, begin_);
    };
  }

  // Brings what the ring will hold into the L2 cache.
  __device__ __forceinline__ void prefetch() const {
    if (lane_ != 0 || begin_ == end_) return;
    int room = p_.slots * p_.chunk;
    for (int slab = slab_; slab < end_slab_ && room > 0; slab += p_.warps_rows) {
      const int units = min(end_ - begin_, room);
      prefetch_bytes(unit(slab, begin_), units * p_.unit_bytes);
      room -= units;
    }
  }

  // ---- Columns

  // meanwhile: runs while activations are on their way
  template <typename F>
  __device__ __forceinline__ void prepare_columns(const F& meanwhile) {
    const RecordOfColumns& r = p_.record;
    const CallColumns of{a_, int64_t{blockIdx.z} * r.columns, r.columns};
    if (p_.records) {
      const uint8_t* from = p_.records + (int64_t{blockIdx.z} * a_.groups + first_group_) * r.bytes();
      const int bytes = (end_group_ - first_group_) * r.bytes();
      // Not by a bulk copy, which would wait for those of the ring.
#pragma unroll 1
      for (int i = 16 * threadIdx.x; i < bytes; i += 16 * blockDim.x) copy_async(columns() + i, from + i);
      meanwhile();
      wait_for_copies();
    } else {
      Quantiser<CODES, CallColumns>(a_, r, columns(), first_group_, end_group_, of).run(warp_, kWarps, meanwhile);
    }
    __syncthreads();
  }

  // ---- Products and results

  // All rows of the warp.
  __device__ __forceinline__ void stream() {
    const int record = header_bytes(TILES) + (begin_ - first_group_) * p_.record.bytes();
#pragma unroll 1
    for (int slab = slab_; slab < end_slab_; slab += p_.warps_rows) {
      Sums y = {};
      this->multiply(record, end_ - begin_, y, follow());
      finish(slab, y);
    }
  }

  __device__ __forceinline__ void finish(int slab, Sums& y) {
    // The ring has been read: a thread block that shares channels among its warps has one slab for each.
    const int stride = p_.slots * p_.chunk * p_.unit_bytes / 16;
    if (p_.warps_k > 1 && !this->join_warps(reinterpret_cast<float4*>(ring_), stride, y)) return;
    if (p_.parts > 1) {
      const int64_t slabs = p_.slabs, at = int64_t{blockIdx.z} * p_.parts * slabs + slab;
      float4* parts = reinterpret_cast<float4*>(p_.partial) + at * 32 * TILES + lane_;
      const int64_t stride = slabs * 32 * TILES;
#pragma unroll
      for (int i = 0; i < TILES; ++i) parts[part_ * stride + 32 * i] = make_float4(y[i][0], y[i][1], y[i][2], y[i][3]);
      __threadfence();
      __syncwarp();
      int last = 0;
      if (lane_ == 0) last = count_arrival(p_.arrivals + int64_t{blockIdx.z} * slabs + slab, p_.parts);
      if (!__shfl_sync(0xffffffff, last, 0)) return;
      __threadfence();
#pragma unroll
      for (int i = 0; i < TILES; ++i) y[i][0] = y[i][1] = y[i][2] = y[i][3] = 0;
      for (int part = 0; part < p_.parts; ++part) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) this->add(y[i], __ldcg(parts + part * stride + 32 * i));
      }
    }
    const int64_t first = int64_t{blockIdx.z} * p_.record.columns;
    const int64_t columns = min(a_.columns - first, int64_t{p_.record.columns});
    this->store_slab(slab, a_.n, y, a_.bias, a_.y, a_.dtype,
                     [&](int c) { return c < columns ? (first + c) * a_.n : int64_t{-1}; });
  }

  const Call& a_;
  const Plan& p_;
  int part_;
  int slab_, end_slab_;          // of the warp, in steps of warps_rows; of the block
  int first_group_, end_group_;  // of the block
  int begin_, end_;              // groups of the warp
  int copy_slab_;                // of the stream's next copy
};

template <Codes CODES, Subs SUBS, int TILES>
__global__ void __launch_bounds__(32 * num_warps(TILES), 1)
    linear_kernel(const __grid_constant__ Call a, const __grid_constant__ Plan p) {
  if constexpr (TILES <= kMostTiles) {
    extern __shared__ uint4 dynamic[];
    Block<CODES, SUBS, TILES> block(a, p, reinterpret_cast<uint8_t*>(dynamic));
    block.run();
  }
}

}  // namespace turboquant::cuda::linear
