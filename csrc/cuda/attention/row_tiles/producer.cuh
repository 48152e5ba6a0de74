// The warpgroup that prepares tiles of keys and values in shared memory: float16 levels times scales from codes, or
// exact keys and values as they are.
//
// Both kinds of tiles have rows of 128 bytes with the swizzle of common/wgmma_swizzled.cuh:
//   keys           [channels / 64][keys][64 channels]
//   values, codes  [keys / 64][channels][64 keys]      (a word of a value block holds four tokens of a channel)
//   values, exact  [channels / 64][keys][64 channels]
// In tiles of codes the order of channels and of tokens is the one in which codes leave their words (expansion.cuh):
// queries and softmax weights follow it.
//
// The scales of a tile are divided by a power of two of their own before they are rounded to float16, one for keys and
// one for values. A scale that is not a number counts 0 here; consumers learn which key has it.
#pragma once

#include "cuda/attention/row_tiles/expansion.cuh"
#include "cuda/attention/row_tiles/work.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/wgmma_swizzled.cuh"

namespace turboquant::cuda::row_tiles {

// Barriers between the warps of a block
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// VALUES: the warps that prepare values, else those that prepare keys. Each kind goes through all tiles at its own pace.
// The first warp of the values also takes items of work and copies codes.
template <class S, bool VALUES>
class Producer {
  using Places = SharedLayout<S>;

 public:
  __device__ __forceinline__ Producer(const Attention& a, const Plan& plan, uint8_t* shared)
      : a_(a), plan_(plan), r_(plan.layout), shared_(shared), notes_(*reinterpret_cast<Notes*>(shared + Places::kNotes)),
        warp_(threadIdx.x / 32 % kStreamWarps), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    if (VALUES && warp_ == 0) {
      const WorkList<S> list(a_, plan_);
      run(&list);
    } else {
      run(nullptr);
    }
  }

 private:
  __device__ __forceinline__ void run(const WorkList<S>* list) {
    for (uint32_t i = 0;; ++i) {
      const int slot = i % kItems, phase = i / kItems % 2;
      if (list) {
        wait_barrier(&notes_.item_empty[slot], phase ^ 1);
        list->take(notes_.items[slot]);
        __syncwarp();
        if (lane_ == 0) arrive(&notes_.item_full[slot]);
      }
      wait_barrier(&notes_.item_full[slot], phase);
      const Item item = notes_.items[slot];
      __syncwarp();
      if (lane_ == 0) arrive(&notes_.item_empty[slot]);
      if (item.sequence < 0) return;
      prepare(item, list != nullptr);
    }
  }

  __device__ __forceinline__ void prepare(const Item& item, bool copies) {
    const int coded_end = min(item.end, item.coded_tiles), exact = max(item.begin, item.coded_tiles);
    if (item.begin < coded_end) prepare_codes(item, coded_end, copies);
    for (int tile = exact; tile < item.end; ++tile) copy_exact(item, (tile - item.coded_tiles) * S::kKeys);
  }

  // ---- Stages of tiles

  __device__ __forceinline__ int stage() const { return tiles_ % kTileStages; }
  __device__ __forceinline__ uint8_t* tile() const {
    return shared_ + (VALUES ? Places::kValues : Places::kKeys) + stage() * S::kTileBytes;
  }
  __device__ __forceinline__ uint64_t* full() const { return &(VALUES ? notes_.value_full : notes_.key_full)[stage()]; }
  __device__ __forceinline__ void wait_for_room() const {
    wait_barrier(&(VALUES ? notes_.value_empty : notes_.key_empty)[stage()], tiles_ / kTileStages % 2 ^ 1);
  }

  // ---- Codes: copies of tiles of records

  // Page ids of 32 tiles of records at a time, one for each lane; `number` counts from `first_token` on.
  __device__ __forceinline__ int page_id(const Item& item, int first_token, int number) const {
    const int token = first_token + (number << r_.tile_shift);
    const int visible = a_.first_visible(item.length - item.queries);
    if (token >= item.coded_end || token + (1 << r_.tile_shift) <= visible) return -1;
    return a_.block_table[int64_t{item.sequence} * a_.max_pages + (token >> r_.page_shift)];
  }

  // Starts to copy unit `unit` of the part.
  __device__ __forceinline__ void copy_unit(const Item& item, int first_token, int unit) {
    const int log_count = 6 - r_.tile_shift, count = 1 << log_count;  // tiles of the record in a unit
    const int number = unit << log_count;
    if (number % 32 == 0) {
      page_ = number == 0 ? page_id(item, first_token, lane_) : next_page_;
      next_page_ = page_id(item, first_token, number + 32 + lane_);
    }
    const int page = __shfl_sync(0xffffffff, page_, number % 32 + (lane_ & (count - 1)));
    const int slot = copied_ % plan_.raw_stages;
    wait_barrier(&notes_.raw_empty[slot], copied_ / plan_.raw_stages % 2 ^ 1);
    const bool here = lane_ < count && page >= 0 && page < a_.num_pages;
    const unsigned present = __ballot_sync(0xffffffff, here);
    if (lane_ == 0) {
      notes_.present[slot] = present;
      expect(&notes_.raw_full[slot], __popc(present) * r_.tile_bytes);
    }
    __syncwarp();
    if (here) {
      const int token = first_token + ((number + lane_) << r_.tile_shift);
      const int tile = (token & ((1 << r_.page_shift) - 1)) >> r_.tile_shift;
      const uint8_t* from = a_.pages + page * a_.page_stride + int64_t{item.head} * r_.record_bytes + tile * r_.tile_bytes;
      copy_bulk(raw(slot) + lane_ * r_.tile_bytes, from, r_.tile_bytes, &notes_.raw_full[slot]);
    }
    ++copied_;
  }
  __device__ __forceinline__ uint8_t* raw(int slot) const { return shared_ + plan_.raw + slot * plan_.raw_stride; }

  __device__ __forceinline__ void prepare_codes(const Item& item, int end, bool copies) {
    const int first = item.first + item.begin * S::kKeys, units = (end - item.begin) * S::kUnits;
    const Tables tables(VALUES ? notes_.value_table : notes_.key_table);
    int ahead = 0;
    if (copies) {
      for (; ahead < min(units, plan_.raw_stages - S::kUnits); ++ahead) copy_unit(item, first, ahead);
    }
    for (int t = item.begin; t < end; ++t, ++tiles_) {
      if (copies) {
        for (int k = 0; k < S::kUnits; ++k) {
          if (ahead < units) copy_unit(item, first, ahead++);
        }
      }
      const uint8_t* units_of_tile[S::kUnits];
      unsigned present[S::kUnits];
#pragma unroll
      for (int k = 0; k < S::kUnits; ++k) {
        const uint32_t n = read_ + k;
        const int slot = n % plan_.raw_stages;
        wait_barrier(&notes_.raw_full[slot], n / plan_.raw_stages % 2);
        units_of_tile[k] = raw(slot), present[k] = notes_.present[slot];
      }
      prepare_scales(item, item.first + t * S::kKeys, units_of_tile, present);
      wait_for_room();
      if (!VALUES && warp_ == 0 && lane_ == 0) notes_.info[stage()] = info_;
#pragma unroll 1
      for (int k = 0; k < S::kUnits; ++k) expand_unit(units_of_tile[k], k, tables);
      publish_operands();
      __syncwarp();
      if (lane_ == 0) {
        arrive(full());
#pragma unroll
        for (int k = 0; k < S::kUnits; ++k) arrive(&notes_.raw_empty[(read_ + k) % plan_.raw_stages]);
      }
      read_ += S::kUnits;
    }
  }

  __device__ __forceinline__ void expand_unit(const uint8_t* unit, int k, const Tables& tables) const {
    const auto expand_as = [&](auto kind) {
      if constexpr (VALUES) {
        expand_values<kind>(unit, k, tables);
      } else {
        expand_keys<kind>(unit, k, tables);
      }
    };
    switch (VALUES ? plan_.value_kind : plan_.key_kind) {
      case kPairs: return expand_as(std::integral_constant<Kind, kPairs>{});
      case kSpread: return expand_as(std::integral_constant<Kind, kSpread>{});
      case kNibbles: return expand_as(std::integral_constant<Kind, kNibbles>{});
      case kPlanes:
        if constexpr (!VALUES) expand_as(std::integral_constant<Kind, kPlanes>{});
        return;
      case kLevels: return expand_as(std::integral_constant<Kind, kLevels>{});
      default: return expand_as(std::integral_constant<Kind, kBytes>{});
    }
  }

  // ---- Scales

  __device__ __forceinline__ __half* scales() const {
    return reinterpret_cast<__half*>(shared_ + Places::kScales) + (kStreamWarps * VALUES + warp_) * S::kKeys;
  }

  // Scales of a tile, in the order of its places: divided by a power of two, and 0 for keys that nobody sees.
  __device__ __forceinline__ void prepare_scales(const Item& item, int first_token, const uint8_t* const (&units)[S::kUnits],
                                                 const unsigned (&present)[S::kUnits]) {
    constexpr int kEach = S::kKeys / 32;
    uint32_t key_bits[kEach], value_bits[kEach], most_key = 0, most_value = 0;
    const int visible = a_.first_visible(item.length - item.queries);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int s = i % 2 * 32 + token_at(lane_), token = first_token + i / 2 * 64 + s, tile = s >> r_.tile_shift;
      const uint8_t* base = units[i / 2] + tile * r_.tile_bytes;
      const int number = s & ((1 << r_.tile_shift) - 1);
      const bool exists = present[i / 2] >> tile & 1, seen = exists && token >= visible && token < item.coded_end;
      const uint32_t k = seen ? reinterpret_cast<const uint16_t*>(base + r_.key_scales)[number] : 0;
      const uint32_t v = seen ? reinterpret_cast<const uint16_t*>(base + r_.value_scales)[number] : 0;
      const bool bad = (k & 0x7C00) == 0x7C00 || (v & 0x7C00) == 0x7C00;
      info_.poison[i] = __ballot_sync(0xffffffff, bad);
      info_.absent[i] = __ballot_sync(0xffffffff, !exists && token >= visible && token < item.coded_end);
      key_bits[i] = bad ? 0 : k, value_bits[i] = bad ? 0 : v;
      most_key = max(most_key, key_bits[i] & 0x7FFF), most_value = max(most_value, value_bits[i] & 0x7FFF);
    }
    // A float16 below 2^(e - 14) has e - 1 or less in its exponent field.
    const auto exponent = [](uint32_t most) { return max(static_cast<int>(most >> 10), 1) - 14; };
    const int key_exponent = exponent(max_of_lanes(most_key)), value_exponent = exponent(max_of_lanes(most_value));
    const auto power = [](int e) { return __int_as_float((127 + e) << 23); };
    const float key_factor = power(-key_exponent) * step_of(static_cast<Kind>(plan_.key_kind));
    const float value_factor = power(-value_exponent) * step_of(static_cast<Kind>(plan_.value_kind));
    info_.key_factor = power(key_exponent), info_.value_exponent = value_exponent;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float scale = __half2float(__ushort_as_half(VALUES ? value_bits[i] : key_bits[i]));
      scales()[32 * i + lane_] = __float2half_rn(scale * (VALUES ? value_factor : key_factor));
    }
    __syncwarp();
  }

  // ---- Codes to operands

  __device__ __forceinline__ const uint8_t* group(const uint8_t* unit, int token) const {  // its tile of the record
    return unit + (token >> r_.tile_shift) * r_.tile_bytes;
  }

  // The keys of tokens 32 warp to 32 warp + 31 of unit k. A lane expands eight channels of a key at a time.
  template <Kind KIND>
  __device__ __forceinline__ void expand_keys(const uint8_t* unit, int k, const Tables& tables) const {
    constexpr int kOctets = S::kDim / 8, kSteps = 16 * kOctets / 32;
    uint8_t* const to = tile();
#pragma unroll 1
    for (int block = 0; block < 2; ++block) {  // of 16 tokens
      const uint8_t* from = group(unit, 32 * warp_ + 16 * block);
      const int number = (32 * warp_ + 16 * block) & ((1 << r_.tile_shift) - 1);  // of the first token in its tile
#pragma unroll 4
      for (int i = 0; i < kSteps; ++i) {
        const int index = 32 * i + lane_, token = index / kOctets, octet = index % kOctets;
        const uint8_t* row = from + (number + token) * r_.key_row_bytes;
        __half2 x[4];
        if constexpr (KIND == kBytes) {
          const uint2 w = *reinterpret_cast<const uint2*>(row + 8 * octet);
          expand_bytes(w.x, w.y, x);
        } else if constexpr (KIND == kPairs) {
          const uint32_t w = *reinterpret_cast<const uint32_t*>(row + octet / 2 * 4);
          expand<KIND>(w >> (octet % 2 * 2) & 0x33333333, 0, tables, x);
        } else if constexpr (KIND == kSpread) {
          const uint32_t* w = reinterpret_cast<const uint32_t*>(row + octet / 4 * 12);
          expand<KIND>(spread_word(w[0], w[1], w[2], octet % 4), 0, tables, x);
        } else {
          uint32_t plane = 0;
          if constexpr (KIND == kPlanes) {
            plane = *reinterpret_cast<const uint32_t*>(from + r_.key_planes + (number + token) * r_.key_plane_bytes + octet / 4 * 4);
            plane >>= octet % 4 * 2;
          }
          expand<KIND>(*reinterpret_cast<const uint32_t*>(row + 4 * octet), plane, tables, x);
        }
        const int place = 64 * k + 32 * warp_ + 4 * block + place_of(token);
        const __half2 scale = __half2half2(scales()[place]);
        uint4 word;
        word.x = as_word(__hmul2(x[0], scale)), word.y = as_word(__hmul2(x[1], scale));
        word.z = as_word(__hmul2(x[2], scale)), word.w = as_word(__hmul2(x[3], scale));
        *reinterpret_cast<uint4*>(to + octet / 8 * S::kKeys * kSwizzleRow + swizzled(place, octet % 8 * 16)) = word;
      }
    }
  }

  // Word j of four words of 3-bit codes, the last of which the other three hold in their spare bits.
  static __device__ __forceinline__ uint32_t spread_word(uint32_t w0, uint32_t w1, uint32_t w2, int j) {
    const uint32_t last = (w0 >> 3 & 0x11111111) | (w1 >> 2 & 0x22222222) | (w2 >> 1 & 0x44444444);
    return (j == 0 ? w0 : j == 1 ? w1 : j == 2 ? w2 : last) & 0x77777777;
  }

  // Half of the channels of unit k's values. A lane expands the words of its channels for 32 tokens at a time, of
  // which it has eight: a word of 16 bytes of a row. Lanes with odd g begin with the other 32 tokens, so that eight
  // lanes that store at once never meet in a bank.
  template <Kind KIND>
  __device__ __forceinline__ void expand_values(const uint8_t* unit, int k, const Tables& tables) const {
    constexpr int kWords = KIND == kBytes ? S::kDim / 8 : S::kDim / 16;  // words of a lane, of eight codes but for bytes
    const int g = lane_ / 4, q = lane_ % 4;
    uint8_t* const to = tile() + k * S::kDim * kSwizzleRow;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int p = half ^ (g & 1);
      const uint8_t* a = group(unit, 32 * p) + r_.value_blocks + ((32 * p & ((1 << r_.tile_shift) - 1)) >> 4) * r_.value_block_bytes;
      const uint8_t* b = group(unit, 32 * p + 16) + r_.value_blocks +
                         (((32 * p + 16) & ((1 << r_.tile_shift) - 1)) >> 4) * r_.value_block_bytes;
      const uint4 s = *reinterpret_cast<const uint4*>(scales() + 64 * k + 32 * p + 8 * q);
      const auto store = [&](int row, __half2 a0, __half2 a1, __half2 b0, __half2 b1) {
        uint4 word;
        word.x = as_word(__hmul2(a0, as_halves(s.x))), word.y = as_word(__hmul2(a1, as_halves(s.y)));
        word.z = as_word(__hmul2(b0, as_halves(s.z))), word.w = as_word(__hmul2(b1, as_halves(s.w)));
        *reinterpret_cast<uint4*>(to + swizzled(row + g, (4 * p + q) * 16)) = word;
      };
#pragma unroll
      for (int i = 0; i < kWords / kStreamWarps; ++i) {
        const int v = warp_ * (kWords / kStreamWarps) + i;
        if constexpr (KIND == kBytes) {
          __half2 x[2], y[2];
          expand_bytes(value_word<KIND>(a, v), x), expand_bytes(value_word<KIND>(b, v), y);
          store(8 * v, x[0], x[1], y[0], y[1]);
        } else {
          __half2 x[4], y[4];
          expand<KIND>(value_word<KIND>(a, v), 0, tables, x), expand<KIND>(value_word<KIND>(b, v), 0, tables, y);
          const int row = KIND == kPairs ? v / 2 * 32 + v % 2 * 8 : 16 * v;
          store(row, x[0], x[2], y[0], y[2]);
          store(row + (KIND == kPairs ? 16 : 8), x[1], x[3], y[1], y[3]);
        }
      }
    }
  }

  // Word v of the lane in a value block, as eight nibbles (or four bytes).
  template <Kind KIND>
  __device__ __forceinline__ uint32_t value_word(const uint8_t* block, int v) const {
    if constexpr (KIND == kSpread) {
      const uint32_t* w = reinterpret_cast<const uint32_t*>(block + v / 4 * format::kSpreadBytes + 12 * lane_);
      return spread_word(w[0], w[1], w[2], v % 4);
    } else {
      constexpr int kUnits = S::kDim / (KIND == kBytes ? 8 : KIND == kPairs ? 32 : 16);  // words of a lane in memory
      const int unit = KIND == kPairs ? v / 2 : v, chunk = unit / format::kChunkUnits;
      const int words = min(kUnits - format::kChunkUnits * chunk, format::kChunkUnits);
      const uint32_t w = *reinterpret_cast<const uint32_t*>(block + chunk * format::kChunkBytes + 4 * words * lane_ +
                                                            unit % format::kChunkUnits * 4);
      return KIND == kPairs ? w >> (v % 2 * 2) & 0x33333333 : w;
    }
  }

  // ---- Exact keys and values

  // The row of exact key i of an item, the key or its value; null: there is none.
  __device__ __forceinline__ const uint8_t* exact_row(const Item& item, int i) const {
    if (i >= item.exact) return nullptr;
    const int position = item.exact_key(i);
    if (position >= item.new_begin) {
      const int64_t token = item.first_query + position - item.new_begin;
      const int64_t at = VALUES ? token * a_.new_value_token_stride + item.head * a_.new_value_head_stride
                                : token * a_.new_key_token_stride + item.head * a_.new_key_head_stride;
      return static_cast<const uint8_t*>(VALUES ? a_.new_values : a_.new_keys) + 2 * at;
    }
    const uint32_t rows = a_.sink_tokens + a_.ring, row = format::tail_row(position, a_.sink_tokens, a_.ring);
    const auto slot = static_cast<uint32_t>(a_.tail_slots[item.sequence]);
    return static_cast<const uint8_t*>(a_.tail) +
           format::tail_vector_32(slot, item.head, a_.kv_heads, row, rows, VALUES ? 1 : 0) * (2 * S::kDim);
  }

  // Starts to copy the next tile: exact keys from number `first` on, or their values. The tile's barrier learns of the
  // copies' end by itself, so that the next tile's copies can follow at once. Eight lanes share a row.
  __device__ __forceinline__ void copy_exact(const Item& item, int first) {
    const int word = lane_ % 8, mine = lane_ / 8;
    wait_for_room();
    uint8_t* const to = tile();
#pragma unroll 4
    for (int i = 0; i < S::kKeys / (4 * kStreamWarps); ++i) {
      const int row = (i * kStreamWarps + warp_) * 4 + mine;
      const uint8_t* from = exact_row(item, first + row);
#pragma unroll
      for (int k = 0; k < S::kDim / 64; ++k) {
        copy_or_clear(to + k * S::kKeys * kSwizzleRow + swizzled(row, word * 16), from ? from + 16 * (word + k * 8) : nullptr);
      }
    }
    asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(shared_address(full())) : "memory");
    __syncwarp();
    if (lane_ == 0) arrive(full());
    ++tiles_;
  }
  // Copies 16 bytes, or writes zeros where there is nothing to copy.
  __device__ __forceinline__ void copy_or_clear(uint8_t* to, const uint8_t* from) const {
    const void* source = from ? from : a_.q;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(source), "r"(from ? 16 : 0)
                 : "memory");
  }

  const Attention& a_;
  const Plan& plan_;
  const RecordLayout& r_;
  uint8_t* const shared_;
  Notes& notes_;
  const int warp_, lane_;

  uint32_t tiles_ = 0;              // tiles prepared so far
  uint32_t copied_ = 0, read_ = 0;  // raw units copied and read so far
  int page_ = -1, next_page_ = -1;
  TileInfo info_;
};

}  // namespace turboquant::cuda::row_tiles
