// The warps that prepare tiles of keys and values in shared memory: float16 levels times scales from codes, or exact
// keys and values as they are. A tile has 64 keys.
//
// Tiles of codes are laid out as units.cuh says. Exact keys and exact values have rows of 128 bytes with the same
// swizzle, [channels / 64][keys][64 channels].
//
// The scales of a tile are divided by a power of two of their own before they are rounded to float16, one for keys and
// one for values. A scale that is not a number counts 0 here; consumers learn which key has it.
#pragma once

#include "cuda/attention/row_tiles/exact_rows.cuh"
#include "cuda/attention/row_tiles/units.cuh"
#include "cuda/attention/row_tiles/work.cuh"
#include "cuda/common/async_copy.cuh"

namespace turboquant::cuda::row_tiles {

// VALUES: the warps that prepare values, else those that prepare keys. The warps of a kind take tiles of codes in turn:
// a tile is one warp's, because most of the time goes into steps that wait for each other, which several warps would
// only repeat. Of a tile of exact keys or values every warp of the kind copies its rows. Warps of values also copy
// codes, a unit for each tile that they prepare, and the first of them takes items of work.
template <class S, bool VALUES>
class Producer : UnitExpander<S> {
  using Base = UnitExpander<S>;
  using Base::exponent_of, Base::power_of_two, Base::not_finite, Base::r_, Base::lane_, Base::half_bytes_, Base::scale_;

 public:
  __device__ __forceinline__ Producer(const Attention& a, const Plan& plan, uint8_t* shared)
      : Base(plan), a_(a), plan_(plan), shared_(shared), notes_(*reinterpret_cast<Notes*>(shared + plan.notes)),
        warp_(threadIdx.x / 32 % S::kStreamWarps) {}

  __device__ __forceinline__ void run(GatheredRows gathered) {
    WorkList<S> list(a_, plan_, gathered, leads());
    for (uint32_t i = 0;; ++i) {
      const int slot = i % kItems, phase = i / kItems % 2;
      // While the first warp finds the list, another one describes an item that nobody takes. So these instructions,
      // which take longer to fetch than to run, have been fetched when the list is found.
      const bool rehearses = VALUES && warp_ == 1 && i == 0;
      if (leads() || rehearses) {
        wait_barrier(&notes_.item_empty[slot], phase ^ 1);
        if (list.take(rehearses ? notes_.rehearsed : notes_.items[slot], rehearses) && !rehearses) {
          arrive(&notes_.item_full[slot]);
        }
        __syncwarp();
      }
      wait_barrier(&notes_.item_full[slot], phase);
      const Item& item = notes_.items[slot];
      if (item.sequence < 0) return;
      const int coded_end = min(item.end, item.coded_tiles), exact = max(item.begin, item.coded_tiles);
      if (item.begin < coded_end) prepare_codes(item, coded_end);
      for (int tile = exact; tile < item.end; ++tile, stage_.advance(stages())) {
        copy_exact(item, (tile - item.coded_tiles) * S::kKeys);
      }
      __syncwarp();
      if (lane_ == 0) arrive(&notes_.item_empty[slot]);
    }
  }

 private:
  __device__ __forceinline__ bool leads() const { return VALUES && warp_ == 0; }

  // ---- Stages of tiles

  __device__ __forceinline__ uint8_t* tile() const {
    return shared_ + ((VALUES ? plan_.key_stages : 0) + stage_.slot) * S::kTileBytes;
  }
  __device__ __forceinline__ uint64_t* full() const {
    return &(VALUES ? notes_.value_full : notes_.key_full)[stage_.slot];
  }
  __device__ __forceinline__ void wait_for_room() const {
    wait_barrier(&(VALUES ? notes_.value_empty : notes_.key_empty)[stage_.slot], stage_.phase ^ 1);
  }
  __device__ __forceinline__ int stages() const { return VALUES ? plan_.value_stages : plan_.key_stages; }

  // ---- Codes: copies of tiles of records

  // Tiles of the record are found for 32 at a time, one for each lane: those of this warp's units from `unit` on. Page
  // ids are loaded one batch ahead.
  __device__ __forceinline__ int token_of_lane(int first_token, int unit) const {
    const int log_count = 6 - r_.tile_shift, tile = lane_ & ((1 << log_count) - 1);
    return first_token + (unit + (lane_ >> log_count) * S::kStreamWarps) * kUnitKeys + (tile << r_.tile_shift);
  }
  __device__ __forceinline__ int page_id(const Item& item, int token) const {
    const int visible = a_.first_visible(item.length - item.queries);
    if (token >= item.coded_end || token + (1 << r_.tile_shift) <= visible) return -1;
    return a_.block_table[item.sequence * a_.table_stride + (token >> r_.page_shift)];
  }
  // first: whether it is the part's first batch.
  __device__ __forceinline__ void find_batch(const Item& item, int first_token, int unit, bool first) {
    const int token = token_of_lane(first_token, unit), units = 32 >> (6 - r_.tile_shift);
    const int page = first ? page_id(item, token) : next_page_;
    next_page_ = page_id(item, token + units * S::kStreamWarps * kUnitKeys);
    const int tile = (token & ((1 << r_.page_shift) - 1)) >> r_.tile_shift;
    const bool exists = page >= 0 && page < a_.num_pages;
    from_ = exists ? a_.pages + page * a_.page_stride + int64_t{item.head} * r_.record_bytes + tile * r_.tile_bytes
                   : nullptr;
    existing_ = __ballot_sync(0xffffffff, exists);
  }

  // Starts to copy unit `unit` of the part, number `number` of those that this warp copies.
  __device__ __forceinline__ void copy_unit(const Item& item, int first_token, int unit, int number) {
    const int log_count = 6 - r_.tile_shift, count = 1 << log_count;  // tiles of the record in a unit
    const int lane = (number << log_count) % 32;                      // that has the unit's first tile
    if (lane == 0) find_batch(item, first_token, unit, number == 0);
    const int slot = copied_.slot;
    wait_barrier(&notes_.raw_empty[slot], copied_.phase ^ 1);
    const unsigned present = existing_ >> lane & ((1 << count) - 1);
    if (lane_ == 0) {
      notes_.present[slot] = present;
      expect(&notes_.raw_full[slot], __popc(present) * r_.tile_bytes);
    }
    __syncwarp();
    const int mine = lane_ - lane;
    if (mine >= 0 && mine < count && from_) {
      copy_bulk(raw(slot) + mine * r_.tile_bytes, from_, r_.tile_bytes, &notes_.raw_full[slot]);
    }
    copied_.advance(plan_.raw_stages, S::kStreamWarps);
  }
  __device__ __forceinline__ uint8_t* raw(int slot) const { return shared_ + plan_.raw + slot * plan_.raw_stride; }

  __device__ __forceinline__ void prepare_codes(const Item& item, int end) {
    constexpr int kTurns = S::kStreamWarps;
    const int first = item.first + item.begin * S::kKeys, units = end - item.begin;
    const Tables tables(VALUES ? notes_.value_table : notes_.key_table);
    // All keys of these units are seen by some row.
    const int visible = a_.first_visible(item.length - item.queries);
    const int inside_begin = ceil_div(max(visible - first, 0), kUnitKeys);
    const int inside_end = (item.coded_end - first) / kUnitKeys;
    // At its tile t a warp of values copies unit t + ahead, in the place of unit t - kTurns, which it has read itself:
    // nobody is waited for long, and the place's barrier is at most one phase behind.
    const int ahead = plan_.raw_stages - kTurns;
    const int mine = (warp_ - turn_ + kTurns) % kTurns;  // this warp's first tile of the part
    int copied = (mine + ahead) % kTurns, copies = 0;
    if constexpr (VALUES) {
      copied_ = read_, copied_.advance(plan_.raw_stages, copied);
      for (; copied < min(mine + ahead, units); copied += kTurns) copy_unit(item, first, copied, copies++);
    }
    stage_.advance(stages(), mine), read_.advance(plan_.raw_stages, mine);
    int t = mine;
    for (; t < units; t += kTurns, stage_.advance(stages(), kTurns), read_.advance(plan_.raw_stages, kTurns)) {
      if (VALUES && copied < units) copy_unit(item, first, copied, copies++), copied += kTurns;
      const int slot = read_.slot;
      // First until the unit that had this place before has been read. As long as it is not even copied, raw_full is
      // two phases behind, and a wait by parity would end at once (lay_out says why raw_empty is not).
      wait_barrier(&notes_.raw_empty[slot], read_.phase ^ 1);
      wait_barrier(&notes_.raw_full[slot], read_.phase);
      prepare_scales(item, first + t * S::kKeys, t >= inside_begin && t < inside_end, raw(slot), notes_.present[slot]);
      wait_for_room();
      if (!VALUES && lane_ == 0) {
        TileInfo& to = notes_.info[stage_.slot];
        to.key_factor = info_.key_factor, to.value_exponent = info_.value_exponent, to.special = info_.special;
        for (int i = 0; i < 2; ++i) to.poison[i] = info_.poison[i], to.absent[i] = info_.absent[i];
      }
      Base::template expand_unit<VALUES>(VALUES ? plan_.value_kind : plan_.key_kind, raw(slot), scales(), tables,
                                         tile());
      publish_operands();
      __syncwarp();
      // In this order, so that whoever has seen the tile knows that its codes have been read.
      if (lane_ == 0) arrive(&notes_.raw_empty[slot]);
      if (lane_ < kTurns) arrive(full());  // for all warps of this kind
    }
    stage_.retreat(stages(), t - units), read_.retreat(plan_.raw_stages, t - units), turn_ = (turn_ + units) % kTurns;
  }

  // ---- Scales

  __device__ __forceinline__ __half* scales() const {
    return reinterpret_cast<__half*>(shared_ + plan_.scales) + (VALUES * S::kStreamWarps + warp_) * kUnitKeys;
  }

  // Scales of a tile, in the order of its places: divided by a power of two, and 0 for keys that nobody sees. Warps of
  // keys read both scales of a key and note what consumers need to know.
  __device__ __forceinline__ void prepare_scales(const Item& item, int first_token, bool inside, const uint8_t* unit,
                                                 unsigned present) {
    uint32_t keys[2] = {}, values[2];
    bool bad = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint8_t* from = unit + scale_ + i * half_bytes_;
      if constexpr (!VALUES) keys[i] = *reinterpret_cast<const uint16_t*>(from);
      values[i] = *reinterpret_cast<const uint16_t*>(from + r_.value_scales - r_.key_scales);
      bad |= not_finite(keys[i]) || not_finite(values[i]);
    }
    info_.special = !inside || present != (1u << (kUnitKeys >> r_.tile_shift)) - 1 || __any_sync(0xffffffff, bad);
    if (info_.special) exclude(item, first_token, present, keys, values);
    const int value_exponent = exponent_of(max_of_lanes(max(values[0] & 0x7FFF, values[1] & 0x7FFF)));
    float factor;
    if constexpr (VALUES) {
      factor = power_of_two(-value_exponent) * step_of(plan_.value_kind);
    } else {
      const int e = exponent_of(max_of_lanes(max(keys[0] & 0x7FFF, keys[1] & 0x7FFF)));
      factor = power_of_two(-e) * step_of(plan_.key_kind);
      info_.key_factor = power_of_two(e), info_.value_exponent = value_exponent;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float scale = __half2float(__ushort_as_half(VALUES ? values[i] : keys[i]));
      scales()[32 * i + lane_] = __float2half_rn(scale * factor);
    }
    __syncwarp();
  }

  // Notes which keys of a tile do not exist or have a scale that is not a number; their scales and those of keys that
  // nobody sees become 0.
  __device__ __forceinline__ void exclude(const Item& item, int first_token, unsigned present, uint32_t (&keys)[2],
                                          uint32_t (&values)[2]) {
    const int visible = a_.first_visible(item.length - item.queries);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int s = 32 * i + token_at(lane_), token = first_token + s;
      const bool exists = present >> (s >> r_.tile_shift) & 1, seen = token >= visible && token < item.coded_end;
      const bool bad = seen && exists && (not_finite(keys[i]) || not_finite(values[i]));
      info_.poison[i] = __ballot_sync(0xffffffff, bad), info_.absent[i] = __ballot_sync(0xffffffff, seen && !exists);
      if (bad || !seen || !exists) keys[i] = values[i] = 0;
    }
  }

  // ---- Exact keys and values

  // Starts to copy this warp's rows of the next tile: exact keys from number `first` on, or their values. The tile's
  // barrier learns of the copies' end by itself, so that the next tile's copies can follow at once. The warps of the
  // kind take four rows each in turn.
  __device__ __forceinline__ void copy_exact(const Item& item, int first) {
    const ExactRows<S, VALUES> rows{a_};
    const int mine = 4 * warp_ + lane_ / 8, left = item.exact - first;
    const bool fresh = first >= item.sinks && item.exact_key(first) >= item.new_begin;
    const int64_t stride = 2 * (VALUES ? a_.new_value_token_stride : a_.new_key_token_stride);
    constexpr int kStep = 4 * S::kStreamWarps;  // rows
    wait_for_room();
    uint8_t* const to = tile();
    if (fresh) {  // all of them are this call's own tokens
      const uint8_t* from = rows.row(item, first) + mine * stride + 16 * rows.word();
#pragma unroll
      for (int i = 0; i < S::kKeys / kStep; ++i, from += kStep * stride) {
        rows.copy(rows.place(to, mine + i * kStep), mine + i * kStep < left ? from : nullptr);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < S::kKeys / kStep; ++i) {
        const int row = mine + i * kStep;
        rows.copy(rows.place(to, row), row < left ? rows.row(item, first + row) + 16 * rows.word() : nullptr);
      }
    }
    arrive_after_copies(full());
    __syncwarp();
    if (lane_ == 0) arrive(full());
  }

  const Attention& a_;
  const Plan& plan_;
  uint8_t* const shared_;
  Notes& notes_;
  const int warp_;

  RingPlace stage_;                // the next tile
  RingPlace read_;                 // and raw unit
  int turn_ = 0;                   // the warp that prepares them
  RingPlace copied_;               // of the next raw unit that this warp copies
  const uint8_t* from_ = nullptr;  // the lane's tile of the record in the current batch; null: there is none
  unsigned existing_ = 0;          // which lanes have one
  int next_page_ = -1;
  TileInfo info_;
};

}  // namespace turboquant::cuda::row_tiles
