// linear_packed for few columns: one pass over the weights for every block of columns.
//
// Warps stream units of weights (stream.cuh). With few tiles of columns all warps of a block have equally many units,
// wherever a slab ends. Sums of slabs that several warps share are added at the end, in a fixed order, and so
// are those of several blocks that share slabs: the last one to arrive adds all of them.
// The first copies may begin while the previous kernel still runs, because that kernel does not write weights.
#pragma once

#include "cuda/attention/counters.cuh"
#include "cuda/linear/columns.cuh"
#include "cuda/linear/stream.cuh"

namespace turboquant::cuda::linear {

template <Codes CODES, Subs SUBS, int TILES, bool ONE_COLUMN>
class Block : UnitStream<CODES, SUBS, TILES, ONE_COLUMN> {
  using Stream = UnitStream<CODES, SUBS, TILES, ONE_COLUMN>;
  using Stream::columns, Stream::copy_from_, Stream::copy_left_, Stream::lane_, Stream::shared_, Stream::warp_;
  using typename Stream::Expand, typename Stream::Sums;

 public:
  __device__ __forceinline__ Block(const Call& a, const Plan& p, uint8_t* shared) : Stream(p, shared), a_(a), p_(p) {
    part_ = blockIdx.x;
    first_group_ = p.groups_of_part.begin(part_), groups_ = p.groups_of_part.begin(part_ + 1) - first_group_;
    first_slab_ = p.slabs_of_block.begin(blockIdx.y), slabs_ = p.slabs_of_block.begin(blockIdx.y + 1) - first_slab_;
    const int first = first_of(warp_);
    units_ = first_of(warp_ + 1) - first;
    slab_ = small_quotient(first, groups_), group_ = first - slab_ * groups_;
    copy_slab_ = slab_, to_copy_ = units_;
    begin_copies(group_);
  }

  __device__ __forceinline__ void run() {
    // In a graph weights and constants may be read before the previous kernel has ended.
    const bool early = p_.early == Early::kRing;
    if (!early) {
      if (p_.early == Early::kPrefetch) prefetch();
      wait_for_previous_kernel();
    }
    const uint32_t levels = Expand::load(a_.levels);
    this->init_barriers();
    // Activations would have to wait behind all weights that were asked for before them.
    const int first = early && warp_ % 2 == 0;
    if (first) this->fill(0, follow());
    if (early) wait_for_previous_kernel();
    prepare_columns([&] {
#pragma unroll 1
      for (int i = first; i < p_.slots; ++i) this->fill(i, follow());
    });
    this->expand_ = Expand(levels);
    let_next_kernel_begin();  // which begins to fill its ring: not before this one has its activations
    stream();
  }

 private:
  static constexpr bool kEven = has_even_shares(TILES, kWarpgroupProducts);

  // The units of the block are a list, ordered by slabs and then by groups of channels, of which a warp has neighbours:
  // the end of a slab, whole slabs, the beginning of one. This is the first of a warp's.
  __device__ __forceinline__ int first_of(int warp) const {
    if constexpr (kEven) return slabs_ * groups_ * warp / kWarps;
    if (p_.warps_k == 1) return Share(slabs_, kWarps).begin(warp) * groups_;
    const int slab = small_quotient(warp, p_.warps_k), k = warp - slab * p_.warps_k;
    // Rounded up: who has nothing follows those who have something.
    const int group = small_quotient(k * groups_ + p_.warps_k - 1, p_.warps_k);
    return slab < slabs_ ? slab * groups_ + group : slabs_ * groups_;
  }
  // Behind the last warp that has units of a slab which this one begins.
  __device__ __forceinline__ int end_of(int slab) const {
    if constexpr (kEven) return small_quotient((slab + 1) * groups_ * kWarps - 1, slabs_ * groups_) + 1;
    return warp_ + p_.warps_k;
  }

  // slab, group: counted from the block's first ones
  __device__ __forceinline__ const uint8_t* unit(int slab, int group) const {
    return a_.packed + (int64_t{first_slab_ + slab} * a_.groups + first_group_ + group) * p_.unit_bytes;
  }

  // ---- Copies

  // What the stream goes on with behind a slab: the next one.
  __device__ __forceinline__ auto follow() {
    return [this] {
      ++copy_slab_;
      begin_copies(0);
    };
  }
  __device__ __forceinline__ void begin_copies(int group) {
    copy_left_ = min(groups_ - group, to_copy_), to_copy_ -= copy_left_;
    if (copy_left_ > 0) copy_from_ = unit(copy_slab_, group);
  }

  // Brings what the ring will hold into the L2 cache.
  __device__ __forceinline__ void prefetch() const {
    if (lane_ != 0) return;
    int slab = slab_, group = group_, left = min(units_, p_.slots * p_.chunk);
    for (; left > 0; ++slab, group = 0) {
      const int units = min(groups_ - group, left);
      prefetch_bytes(unit(slab, group), units * p_.unit_bytes);
      left -= units;
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
      const int bytes = groups_ * r.bytes();
      // Not by a bulk copy, which would wait for those of the ring.
#pragma unroll 1
      for (int i = 16 * threadIdx.x; i < bytes; i += 16 * blockDim.x) copy_async(columns() + i, from + i);
      meanwhile();
      wait_for_copies();
    } else {
      Quantiser<splits_channels(CODES), CallColumns>(a_, r, columns(), first_group_, first_group_ + groups_, of)
          .run(warp_, kWarps, meanwhile);
    }
    __syncthreads();
  }

  // ---- Products and results

  // All units of the warp.
  __device__ __forceinline__ void stream() {
    bool meets = kEven || p_.warps_k > 1;  // warps wait for each other's sums, once
    int slab = slab_, group = group_, left = units_;
#pragma unroll 1
    for (; left > 0; ++slab, group = 0) {
      const int units = min(groups_ - group, left);
      left -= units;
      Sums y = {};
      this->multiply(kHeaderBytes + group * p_.record.bytes(), units, y, follow());
      if (group > 0) {
        this->leave(y, sums_of(warp_));
        continue;
      }
      if (units < groups_) {  // others go on with the slab, and this was the warp's last one
        const int end = end_of(slab);
        __syncthreads();
        meets = false;
        add_others(y, end);
      }
      finish(first_slab_ + slab, y);
    }
    if (!meets) return;
    if (units_ == 0 && (kEven || warp_ < slabs_ * p_.warps_k)) {  // whoever adds does not ask who has nothing
      const Sums none = {};
      this->leave(none, sums_of(warp_));
    }
    __syncthreads();
  }

  // Adds the sums of warps before `end`, which go on with this warp's slab: four at a time, which are loaded together,
  // and without code for those that are left.
  __device__ __forceinline__ void add_others(Sums& y, int end) const {
#pragma unroll 1
    for (int other = warp_ + 1; other < end; other += 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool exists = other + j < end;
        const float4* const sums = sums_of(exists ? other + j : other);
        this->add(y, [&](int i) {
          const float4 x = sums[i];
          return exists ? x : make_float4(0, 0, 0, 0);
        });
      }
    }
  }

  // Where a lane of a warp leaves its sums of a slab that another one begins.
  __device__ __forceinline__ float4* sums_of(int warp) const {
    return reinterpret_cast<float4*>(shared_ + p_.join + warp * p_.join_stride) + lane_;
  }

  __device__ __forceinline__ void finish(int slab, Sums& y) {
    const int block = computed_here(blockIdx.z);
    if (p_.parts > 1) {
      const int64_t slabs = p_.slabs, at = int64_t{block} * p_.parts * slabs + slab;
      float4* parts = reinterpret_cast<float4*>(p_.partial) + at * 32 * TILES + lane_;
      const int64_t stride = slabs * 32 * TILES;
      this->leave(y, parts + part_ * stride);
      __threadfence();
      __syncwarp();
      int last = 0;
      if (lane_ == 0) last = count_arrival(p_.arrivals + int64_t{block} * slabs + slab, p_.parts);
      if (!__shfl_sync(0xffffffff, last, 0)) return;
      __threadfence();
#pragma unroll
      for (int i = 0; i < TILES; ++i) y[i][0] = y[i][1] = y[i][2] = y[i][3] = 0;
      for (int part = 0; part < p_.parts; ++part) {
        this->add(y, [&](int i) { return __ldcg(parts + part * stride + i); });
      }
    }
    const int64_t first = int64_t{block} * p_.record.columns;
    const int columns = static_cast<int>(min(a_.columns - first, int64_t{p_.record.columns}));
    const int64_t before = first * a_.n;
    this->store_slab(slab, a_.n, y, a_.bias, a_.y, a_.dtype,
                     [&](int c) { return c < columns ? before + c * a_.n : int64_t{-1}; });
  }

  const Call& a_;
  const Plan& p_;
  int part_;
  int first_slab_, slabs_, first_group_, groups_;  // of the block
  int slab_, group_, units_;                       // of the warp: where its units begin, and how many there are
  int copy_slab_, to_copy_;                        // of the stream's next copy; units of the slabs behind it
};

// Which kernels there are. With up to two tiles of columns a kernel for units without multipliers is faster by a tenth
// than one for both. Without products of warpgroups nobody measured it: one kernel of two tiles serves both, there is
// none for one column, and the library is smaller.
constexpr Subs subs_of(Codes codes, bool sub, int tiles, bool warpgroup_products) {
  if (codes == Codes::kBytes) return Subs::kNone;  // which have no multipliers
  if (tiles > (warpgroup_products ? 2 : 1)) return Subs::kEither;
  return sub ? Subs::kAll : Subs::kNone;
}

template <Codes CODES, Subs SUBS, int TILES, bool ONE_COLUMN>
__global__ void __maxnreg__(most_registers(TILES))
    linear_kernel(const __grid_constant__ Call a, const __grid_constant__ Plan p) {
  constexpr bool kHasSubs = SUBS == subs_of(CODES, SUBS != Subs::kNone, TILES, kWarpgroupProducts);
  if constexpr (TILES <= kMostTiles && kHasSubs && (!ONE_COLUMN || kWarpgroupProducts)) {
    extern __shared__ uint4 dynamic[];
    Block<CODES, SUBS, TILES, ONE_COLUMN> block(a, p, reinterpret_cast<uint8_t*>(dynamic));
    block.run();
  }
}

}  // namespace turboquant::cuda::linear
