// linear_packed for up to 64 columns: one pass over the weights.
//
// A warp streams units (16 rows, one group of channels) that lie behind each other in memory through a ring in shared
// memory, filled by bulk copies. Warps of a block take other rows or other channels of the same rows; the latter add
// their sums at the end, in a fixed order, and so do blocks that share rows: the last one to arrive adds all of them.
// The first copies may begin while the previous kernel still runs, because that kernel does not write weights.
#pragma once

#include "cuda/attention/counters.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/device.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/linear/call.cuh"
#include "cuda/linear/columns.cuh"
#include "cuda/linear/operands.cuh"

namespace turboquant::cuda::linear {

template <Codes CODES, bool SUB, int TILES>
class Block {
  using T = Traits<CODES>;

 public:
  __device__ __forceinline__ Block(const Call& a, const Plan& p, uint8_t* shared) : a_(a), p_(p), shared_(shared) {
    lane_ = threadIdx.x % 32, warp_ = threadIdx.x / 32;
    part_ = blockIdx.x;
    first_group_ = p.groups_of_part.begin(part_), end_group_ = p.groups_of_part.begin(part_ + 1);
    const int slab = p.slabs_of_block.begin(blockIdx.y);
    end_slab_ = p.slabs_of_block.begin(blockIdx.y + 1);
    const int row = static_cast<int>(__fdividef(warp_ + 0.5f, static_cast<float>(p.warps_k)));  // small numbers
    k_ = warp_ - row * p.warps_k;
    slab_ = row < p.warps_rows ? slab + row : end_slab_;
    barrier_ = 1 + row;
    const Share& share = p.groups_of_warp[end_group_ - first_group_ - p.groups_of_part.each];
    begin_ = first_group_ + share.begin(k_), end_ = first_group_ + share.begin(k_ + 1);
    copy_slab_ = slab_, copy_left_ = slab_ < end_slab_ ? end_ - begin_ : 0;
    copy_from_ = unit(slab_, begin_);
    ring_ = shared_ + p.ring + warp_ * p.slots * p.chunk * p.unit_bytes;
    barriers_ = reinterpret_cast<uint64_t*>(shared_) + warp_ * p.slots;
  }

  __device__ __forceinline__ void run() {
    // In a graph weights and constants may be read before the previous kernel has ended.
    const bool early = p_.early == Early::kRing;
    if (!early) {
      if (p_.early == Early::kPrefetch) prefetch();
      wait_for_previous_kernel();
    }
    expand_ = Expansion<CODES>(a_.levels);
    if (lane_ == 0) {
#pragma unroll 1
      for (int i = 0; i < p_.slots; ++i) init_barrier(barriers_ + i, 1);
      barriers_ready();
    }
    __syncwarp();
    // Activations would have to wait behind all weights that were asked for before them.
    const int first = early && warp_ % 2 == 0;
    if (first) fill(0);
    if (early) wait_for_previous_kernel();
    prepare_columns([&] {
#pragma unroll 1
      for (int i = first; i < p_.slots; ++i) fill(i);
    });
    let_next_kernel_begin();  // which begins to fill its ring: not before this one has its activations
    stream();
  }

 private:
  static constexpr int kWarps = num_warps(TILES);

  __device__ __forceinline__ const uint8_t* unit(int slab, int group) const {
    return a_.packed + (int64_t{slab} * a_.groups + group) * p_.unit_bytes;
  }
  __device__ __forceinline__ uint8_t* columns() const { return shared_ + header_bytes(TILES); }

  // ---- Copies

  // Starts the next copy of the warp's stream, into a slot; nothing where the stream has ended.
  __device__ __forceinline__ void fill(int slot) {
    if (copy_left_ == 0) return;
    const int units = min(copy_left_, p_.chunk);
    const Run run[1] = {{ring_ + slot * p_.chunk * p_.unit_bytes, copy_from_, units * p_.unit_bytes}};
    fill_slot(barriers_ + slot, run);
    copy_left_ -= units, copy_from_ += units * p_.unit_bytes;
    if (copy_left_ == 0) {
      copy_slab_ += p_.warps_rows;
      if (copy_slab_ < end_slab_) copy_left_ = end_ - begin_, copy_from_ = unit(copy_slab_, begin_);
    }
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
    const int64_t first = int64_t{blockIdx.z} * r.columns;
    if (p_.records) {
      const uint8_t* from = p_.records + (int64_t{blockIdx.z} * a_.groups + first_group_) * r.bytes();
      const int bytes = (end_group_ - first_group_) * r.bytes();
      // Not by a bulk copy, which would wait for those of the ring.
#pragma unroll 1
      for (int i = 16 * threadIdx.x; i < bytes; i += 16 * blockDim.x) copy_async(columns() + i, from + i);
      meanwhile();
      wait_for_copies();
    } else if (r.group == 2 * kHalfChannels) {
      Quantiser<CODES, 2>(a_, r, columns(), first_group_, end_group_, first).run(warp_, kWarps, meanwhile);
    } else {
      Quantiser<CODES, 1>(a_, r, columns(), first_group_, end_group_, first).run(warp_, kWarps, meanwhile);
    }
    __syncthreads();
  }

  // ---- Products

  // All rows of the warp.
  __device__ __forceinline__ void stream() {
    const RecordOfColumns& r = p_.record;
    const int facts_at = r.group / kHalfChannels * kHalfBytes + 4 * (lane_ / 4);
    const int slot_bytes = p_.chunk * p_.unit_bytes, record = header_bytes(TILES) + (begin_ - first_group_) * r.bytes();
    int slot = 0;
    uint32_t phase = 0;
#pragma unroll 1
    for (int slab = slab_; slab < end_slab_; slab += p_.warps_rows) {
      float y[TILES][4] = {};
      Reader at;
      at.pair = record + RecordOfColumns::kPairBytes * (lane_ % 4);
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        const int column = min(kTileColumns * i + lane_ / 4, r.columns - 1);
        at.operand[i] = record + r.operands() + column * kHalfChannels + 16 * (lane_ % 4);
      }
#pragma unroll 1
      for (int left = end_ - begin_; left > 0;) {
        wait_slot(barriers_ + slot, phase);
        at.codes = static_cast<int>(ring_ - shared_) + slot * slot_bytes + 16 * lane_;
        at.facts = at.codes - 16 * lane_ + facts_at;
        const int units = min(left, p_.chunk);
        left -= units;
        if (r.group == 2 * kHalfChannels) {
          multiply<2>(at, units, y);
        } else {
          multiply<1>(at, units, y);
        }
        __syncwarp();
        fill(slot);
        if (++slot == p_.slots) slot = 0, phase ^= 1;
      }
      finish(slab, y);
    }
  }

  // Where a lane reads, in shared memory: places that move on with every unit.
  struct Reader {
    int codes, facts;    // of the unit: codes; scales and multipliers
    int operand[TILES];  // of the columns, in the first half of the group
    int pair;            // of the columns of the first tile: units and corrections

    __device__ __forceinline__ void advance(int unit_bytes, int record_bytes) {
      codes += unit_bytes, facts += unit_bytes, pair += record_bytes;
#pragma unroll
      for (int i = 0; i < TILES; ++i) operand[i] += record_bytes;
    }
  };
  template <typename Word>
  __device__ __forceinline__ const Word& shared(int at) const {
    return *reinterpret_cast<const Word*>(shared_ + at);
  }

  // Adds the products of `units` neighbouring units. HALVES: of a unit, 64 channels each.
  template <int HALVES>
  __device__ __forceinline__ void multiply(Reader& at, int units, float (&y)[TILES][4]) const {
    const int unit_bytes = p_.unit_bytes, record_bytes = p_.record.bytes(),
              half_bytes = p_.record.columns * kHalfChannels;
#pragma unroll 1
    for (; units > 0; --units, at.advance(unit_bytes, record_bytes)) multiply_unit<HALVES>(at, half_bytes, y);
  }

  template <int HALVES>
  __device__ __forceinline__ void multiply_unit(const Reader& at, int half_bytes, float (&y)[TILES][4]) const {
    const uint32_t scale_word = shared<uint32_t>(at.facts);
    uint32_t codes = 0;
    if constexpr (SUB) {
      if constexpr (HALVES == 2) {
        codes = shared<uint32_t>(at.facts + 32);
      } else {
        const uint32_t both = shared<uint16_t>(at.facts + 32 - 2 * (lane_ / 4));
        codes = (both & 0xFF) | (both & 0xFF00) << 8;
      }
    }
    const Multipliers multipliers(codes);
    int sums[TILES][4];
    if constexpr (!SUB) {
#pragma unroll
      for (int i = 0; i < TILES; ++i) correct(at, 0, i, sums[i]);
    }
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      uint4 b[TILES];
#pragma unroll
      for (int i = 0; i < TILES; ++i) b[i] = shared<uint4>(at.operand[i] + half * half_bytes);
      uint4 w[T::kBits / 4];
#pragma unroll
      for (int i = 0; i < T::kBits / 4; ++i) {
        w[i] = shared<uint4>(at.codes + half * kHalfBytes + 512 * i);
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t operand[T::kOperands][4];
        if constexpr (CODES == Codes::kBytes) {
          const uint4 x = w[step * (T::kBits / 8)];
          operand[0][0] = x.x, operand[0][1] = x.y, operand[0][2] = x.z, operand[0][3] = x.w;
        } else {
          expand_(step ? w[0].z : w[0].x, step ? w[0].w : w[0].y, operand);
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          int d[4];
          if constexpr (SUB) correct(at, 2 * half + step, i, d);
          int (&to)[4] = SUB ? d : sums[i];
#pragma unroll
          for (int o = 0; o < T::kOperands; ++o) {
            mma_bytes(to, operand[o], step ? make_uint2(b[i].z, b[i].w) : make_uint2(b[i].x, b[i].y));
          }
          if constexpr (SUB) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const int product = d[j] * multipliers(2 * half + step, j >= 2);
              sums[i][j] = half + step == 0 ? product : sums[i][j] + product;
            }
          }
        }
      }
    }
    const float2 scale = __half22float2(reinterpret_cast<const __half2&>(scale_word));
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const float2 unit = shared<float2>(at.pair + i * kTileBytes);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        y[i][j] = fmaf(static_cast<float>(sums[i][j]) * (j % 2 ? unit.y : unit.x), j / 2 ? scale.y : scale.x, y[i][j]);
      }
    }
  }

  // What the sums of tile i begin with: those of 32 channels (SUB: of step `step`) or of the group.
  __device__ __forceinline__ void correct(const Reader& at, int step, int i, int (&d)[4]) const {
    int4 c{};
    if constexpr (T::kCorrected) c = shared<int4>(at.pair + ((1 + step) * TILES + i) * kTileBytes);
    d[0] = c.x, d[1] = c.y, d[2] = c.z, d[3] = c.w;
  }

  // ---- Results

  __device__ __forceinline__ void finish(int slab, float (&y)[TILES][4]) {
    if (p_.warps_k > 1) {
      // The ring has been read. All warps of these rows meet here.
      float4* mine = reinterpret_cast<float4*>(ring_) + lane_;
#pragma unroll
      for (int i = 0; i < TILES; ++i) mine[32 * i] = make_float4(y[i][0], y[i][1], y[i][2], y[i][3]);
      sync_threads(barrier_, 32 * p_.warps_k);
      if (k_ != 0) return;
      const int stride = p_.slots * p_.chunk * p_.unit_bytes / 16;
#pragma unroll 4
      for (int other = 1; other < p_.warps_k; ++other) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) add(y[i], mine[other * stride + 32 * i]);
      }
    }
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
        for (int i = 0; i < TILES; ++i) add(y[i], __ldcg(parts + part * stride + 32 * i));
      }
    }
    store(slab, y);
  }

  static __device__ __forceinline__ void add(float (&y)[4], const float4& x) {
    y[0] += x.x, y[1] += x.y, y[2] += x.z, y[3] += x.w;
  }

  __device__ __forceinline__ void store(int slab, const float (&y)[TILES][4]) const {
    constexpr float kUnit = format::kLevelUnit / T::kWeight * (SUB ? format::kMultiplierUnit : 1);
    const int64_t first = int64_t{blockIdx.z} * p_.record.columns;
    const int64_t columns = min(a_.columns - first, int64_t{p_.record.columns});
    with_float_type(a_.dtype, [&](auto tag) {
      using Element = typename decltype(tag)::type;
      auto* const to = static_cast<Element*>(a_.y);
      const auto* const bias = static_cast<const Element*>(a_.bias);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const int64_t row = int64_t{slab} * 16 + lane_ / 4 + 4 * j;
        if (row >= a_.n) continue;
        const float more = bias ? static_cast<float>(bias[row]) : 0;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int64_t column = kTileColumns * i + 2 * (lane_ % 4) + c;
            if (column < columns) {
              to[(first + column) * a_.n + row] = static_cast<Element>(fmaf(y[i][j + c], kUnit, more));
            }
          }
        }
      }
    });
  }

  static constexpr int kHalfBytes = 16 * kHalfChannels * T::kBits / 8;  // codes of a unit's 64 channels
  static constexpr int kTileBytes = kTileColumns / 2 * RecordOfColumns::kPairBytes;

  const Call& a_;
  const Plan& p_;
  uint8_t *shared_, *ring_;
  uint64_t* barriers_;
  Expansion<CODES> expand_;
  int lane_, warp_, part_;
  int barrier_;                  // where the warps meet that share a slab
  int k_;                        // which of the warps that share a slab
  int slab_, end_slab_;          // of the warp, in steps of warps_rows; of the block
  int first_group_, end_group_;  // of the block
  int begin_, end_;              // groups of the warp
  int copy_slab_, copy_left_;    // the stream's next copy: its slab, and how many units of it are left
  const uint8_t* copy_from_;
};

// The most tiles of columns that a launch on this architecture has. Shared memory of compute capability 7.5 has no room
// for more (launch.cu); where warpgroups multiply, more tokens take tiles of another kernel (choices/linear.h).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kMostTiles = 2;
#else
constexpr int kMostTiles = kWarpgroupProducts ? 4 : 8;
#endif

template <Codes CODES, bool SUB, int TILES>
__global__ void __launch_bounds__(32 * num_warps(TILES), 1)
    linear_kernel(const __grid_constant__ Call a, const __grid_constant__ Plan p) {
  if constexpr (TILES <= kMostTiles) {
    extern __shared__ uint4 dynamic[];
    Block<CODES, SUB, TILES> block(a, p, reinterpret_cast<uint8_t*>(dynamic));
    block.run();
  }
}

}  // namespace turboquant::cuda::linear
