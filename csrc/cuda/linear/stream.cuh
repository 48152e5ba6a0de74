// What kernels of few columns have in common: a warp streams units (16 rows, one group of channels) that lie behind
// each other in memory through a ring in shared memory, filled by bulk copies, and multiplies them with columns that
// the thread block has there.
//
// A product of tensor cores has room for eight columns. One column, of units with multipliers, takes all of them
// (ONE_COLUMN): two neighbours hold the same step of 32 channels and are zero in all other steps, and the sums of the
// first are read. So the sums of all steps, which need multipliers of their own, wait in one accumulator, and are added
// when the stream of a slab ends.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/device.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/linear/call.cuh"
#include "cuda/linear/operands.cuh"

namespace turboquant::cuda::linear {

// The most tiles of columns that a thread block has on this architecture (most_tiles in plan.cuh). Shared memory of
// compute capability 7.5 has no room for more; where warpgroups multiply, more columns take two blocks or another
// kernel.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kMostTiles = 2;
#else
constexpr int kMostTiles = kWarpgroupProducts ? 4 : 8;
#endif

template <Codes CODES, Subs SUBS, int TILES, bool ONE_COLUMN = false>
class UnitStream {
  static_assert(!ONE_COLUMN || (SUBS == Subs::kAll && TILES == 1));

 protected:
  static constexpr bool kSub = SUBS != Subs::kNone;
  using T = Traits<CODES>;
  // With one tile of columns a second product costs less than making one operand of two words; without multipliers,
  // too, since sums are subtracted once for each unit. (Two tiles and multipliers, 16 tokens of a layer: two operands
  // 67 us, one 63.)
  static constexpr int kOperands = CODES == Codes::kLloyd && (TILES == 1 || SUBS == Subs::kNone) ? 2 : 1;
  using Expand = Expansion<CODES, kOperands>;
  using Sums = float[TILES][4];  // of 16 rows and all columns, as a tensor core leaves them

  __device__ __forceinline__ UnitStream(const StreamPlan& s, uint8_t* shared) : s_(s), shared_(shared) {
    lane_ = threadIdx.x % 32, warp_ = threadIdx.x / 32;
    ring_ = shared_ + s.ring + warp_ * s.ring_stride;
    barriers_ = reinterpret_cast<uint64_t*>(shared_) + warp_ * s.slots;
  }

  __device__ __forceinline__ uint8_t* columns() const { return shared_ + kHeaderBytes; }

  // Before the first copy.
  __device__ __forceinline__ void init_barriers() const {
    if (lane_ == 0) {
#pragma unroll 1
      for (int i = 0; i < s_.slots; ++i) init_barrier(barriers_ + i, 1);
      barriers_ready();
    }
    __syncwarp();
  }

  // Starts the next copy of the stream, into a slot; nothing where the stream has ended. follow: sets copy_from_ and
  // copy_left_ to the units that follow those of a slab, if there are any.
  template <typename F>
  __device__ __forceinline__ void fill(int slot, const F& follow) {
    if (copy_left_ == 0) return;
    const int units = min(copy_left_, s_.chunk);
    const Run run[1] = {{ring_ + slot * s_.chunk * s_.unit_bytes, copy_from_, units * s_.unit_bytes}};
    fill_slot(barriers_ + slot, run);
    copy_left_ -= units, copy_from_ += units * s_.unit_bytes;
    if (copy_left_ == 0) follow();
  }

  // Adds the products of the stream's next `left` units, whose first group has its columns at `record`, and fills what
  // they leave of the ring.
  template <typename F>
  __device__ __forceinline__ void multiply(int record, int left, Sums& y, const F& follow) {
    const RecordOfColumns& r = s_.record;
    const int facts_at = r.group / kHalfChannels * kHalfBytes + 4 * (lane_ / 4);
    const int slot_bytes = s_.chunk * s_.unit_bytes;
    Reader at;
    at.pair = record + RecordOfColumns::kPairBytes * (lane_ % 4);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const int column = min(kTileColumns * i + lane_ / 4, r.columns - 1);
      at.operand[i] = record + r.operands() + column * kHalfChannels + 16 * (lane_ % 4);
    }
    if constexpr (ONE_COLUMN) {
      // Lanes of a step that a group of 64 channels does not have read what follows, and multiply it by 0.
      at.pair = record;
      at.operand[0] = record + r.operands() + step_ / 2 * kHalfChannels + 16 * (lane_ % 4) + step_ % 2 * 8;
    }
#pragma unroll 1
    while (left > 0) {
      wait_slot(barriers_ + slot_, phase_);
      at.codes = static_cast<int>(ring_ - shared_) + slot_ * slot_bytes + 16 * lane_;
      at.facts = at.codes - 16 * lane_ + facts_at;
      const int units = min(left, s_.chunk);
      left -= units;
      if (r.group == 2 * kHalfChannels) {
        multiply_units<2>(at, units, y);
      } else {
        multiply_units<1>(at, units, y);
      }
      __syncwarp();
      fill(slot_, follow);
      if (++slot_ == s_.slots) slot_ = 0, phase_ ^= 1;
    }
    if constexpr (ONE_COLUMN) {
#pragma unroll
      for (int j = 0; j < 4; j += 2) y[0][j] = sum_of_lanes<4>(y[0][j]);
    }
  }

  // Sums that wait in memory for another warp. `leave` writes those of a lane from `to` on, 32 lanes side by side.
  // `add` adds some that were left: load(i) reads what was written to to[i].
  static __device__ __forceinline__ void leave(const Sums& y, float4* to) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) to[32 * i] = make_float4(y[i][0], y[i][1], y[i][2], y[i][3]);
  }
  template <typename F>
  static __device__ __forceinline__ void add(Sums& y, const F& load) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const float4 x = load(32 * i);
      y[i][0] += x.x, y[i][1] += x.y, y[i][2] += x.z, y[i][3] += x.w;
    }
  }

  // Stores the results of a slab, plus the bias of each row. y: of `dtype`, as bias, which is null or has an entry for
  // each of the `rows` rows. place_of(c): where in y the results of column c begin, or -1 if there is no such column.
  template <typename F>
  __device__ __forceinline__ void store_slab(int slab, int64_t rows, const Sums& sums, const void* bias, void* y,
                                             Dtype dtype, const F& place_of) const {
    const int lane = computed_here(lane_);  // the stream's loops have no registers for places of results
    const int64_t first = int64_t{slab} * 16 + lane / 4;
    const bool exists[2] = {first < rows, first + 8 < rows};
    with_float_type(dtype, [&](auto tag) {  // asked once for all results: less code on the way than for each
      using X = typename decltype(tag)::type;
      float more[2] = {};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (bias && exists[j]) more[j] = static_cast<float>(static_cast<const X*>(bias)[first + 8 * j]);
      }
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int64_t at = place_of(kTileColumns * i + 2 * (lane % 4) + c);
          if (at < 0) continue;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            if (exists[j]) {
              static_cast<X*>(y)[at + first + 8 * j] = static_cast<X>(fmaf(sums[i][2 * j + c], kUnit, more[j]));
            }
          }
        }
      }
    });
  }

  static constexpr float kUnit = format::kLevelUnit / T::kWeight * (kSub ? format::kMultiplierUnit : 1);  // of results
  static constexpr int kHalfBytes = 16 * kHalfChannels * T::kBits / 8;  // codes of a unit's 64 channels
  static constexpr int kTileBytes = kTileColumns / 2 * RecordOfColumns::kPairBytes;

  const StreamPlan& s_;
  uint8_t *shared_, *ring_;
  uint64_t* barriers_;
  Expand expand_;
  int lane_, warp_;
  const uint8_t* copy_from_ = nullptr;  // the next copy, and how many units of its slab are left
  int copy_left_ = 0;

 private:
  // Where a lane reads, in shared memory: places that move on with every unit.
  struct Reader {
    int codes, facts;    // of the unit: codes; scales and multipliers
    int operand[TILES];  // of the columns, in the first half of the group
    int pair;            // of the columns of the first tile: units

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
  __device__ __forceinline__ void multiply_units(Reader& at, int units, float (&y)[TILES][4]) const {
    const int unit_bytes = s_.unit_bytes, record_bytes = s_.record.bytes(),
              half_bytes = s_.record.columns * kHalfChannels;
#pragma unroll 1
    for (; units > 0; --units, at.advance(unit_bytes, record_bytes)) {
      if constexpr (ONE_COLUMN) {
        multiply_one_column<HALVES>(at, y);
      } else {
        multiply_unit<HALVES>(at, half_bytes, y);
      }
    }
  }

  // 16 bits of codes of multipliers for each of the lane's rows.
  template <int HALVES>
  __device__ __forceinline__ uint32_t multiplier_codes(const Reader& at) const {
    if (SUBS == Subs::kEither && !s_.has_subs) {
      return 0x11111111 * (format::kMultiplierOne - format::kMultiplierOffset);
    }
    if constexpr (!kSub) return 0;
    if constexpr (HALVES == 2) return shared<uint32_t>(at.facts + 32);
    const uint32_t both = shared<uint16_t>(at.facts + 32 - 2 * (lane_ / 4));
    return (both & 0xFF) | (both & 0xFF00) << 8;
  }

  template <int HALVES>
  __device__ __forceinline__ void multiply_unit(const Reader& at, int half_bytes, float (&y)[TILES][4]) const {
    const uint32_t scale_word = shared<uint32_t>(at.facts);
    const Multipliers multipliers(multiplier_codes<HALVES>(at));
    Products plain[TILES] = {};  // sums of products without multipliers
    int sums[TILES][4] = {};
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
        uint32_t operand[kOperands][4];
        if constexpr (CODES == Codes::kBytes) {
          const uint4 x = w[step * (T::kBits / 8)];
          operand[0][0] = x.x, operand[0][1] = x.y, operand[0][2] = x.z, operand[0][3] = x.w;
        } else {
          expand_(step ? w[0].z : w[0].x, step ? w[0].w : w[0].y, operand);
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          Products of_step = {};
          Products& to = kSub ? of_step : plain[i];
#pragma unroll
          for (int o = 0; o < kOperands; ++o) {
            mma_bytes(to[o], operand[o], step ? make_uint2(b[i].z, b[i].w) : make_uint2(b[i].x, b[i].y));
          }
          if constexpr (kSub) {
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i][j] += difference(to, j) * multipliers(2 * half + step, j >= 2);
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
        const int sum = kSub ? sums[i][j] : difference(plain[i], j);
        y[i][j] = fmaf(static_cast<float>(sum) * (j % 2 ? unit.y : unit.x), j / 2 ? scale.y : scale.x, y[i][j]);
      }
    }
  }

  template <int HALVES>
  __device__ __forceinline__ void multiply_one_column(const Reader& at, float (&y)[TILES][4]) const {
    const uint32_t scale_word = shared<uint32_t>(at.facts), codes = multiplier_codes<HALVES>(at);
    const uint2 b = shared<uint2>(at.operand[0]);
    const float unit = shared<float>(at.pair);
    Products sums = {};
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const uint4 w = shared<uint4>(at.codes + half * kHalfBytes);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t operand[kOperands][4];
        expand_(step ? w.z : w.x, step ? w.w : w.y, operand);
        const uint32_t own = is_step_[2 * half + step];
        const uint2 column = make_uint2(multiplied(b.x, own), multiplied(b.y, own));
#pragma unroll
        for (int o = 0; o < kOperands; ++o) mma_bytes(sums[o], operand[o], column);
      }
    }
    const int2 multipliers = multipliers_of(lane_ % 4, codes);
    const float2 scale = __half22float2(reinterpret_cast<const __half2&>(scale_word));
    y[0][0] = fmaf(static_cast<float>(difference(sums, 0) * multipliers.x) * unit, scale.x, y[0][0]);
    y[0][2] = fmaf(static_cast<float>(difference(sums, 2) * multipliers.y) * unit, scale.y, y[0][2]);
  }

  using Products = int[kOperands][4];
  static __device__ __forceinline__ int difference(const Products& of, int j) {
    return kOperands == 2 ? of[0][j] - of[kOperands - 1][j] : of[0][j];
  }

  int slot_ = 0;  // of the ring, that is read next
  uint32_t phase_ = 0;
  // ONE_COLUMN: the step of the operand that the lane loads, and for each step, 1 if it is that, 0 if not.
  const int step_ = threadIdx.x % 32 / 8;
  const uint32_t is_step_[4] = {step_ == 0, step_ == 1, step_ == 2, step_ == 3};
};

}  // namespace turboquant::cuda::linear
