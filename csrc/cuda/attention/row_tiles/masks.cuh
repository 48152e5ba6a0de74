// What rows see of a tile of keys, where not all of them see all of it.
//
// Tiles at the borders are few, and to fetch an instruction takes longer than to run it. So what a row sees becomes
// bits first, from the ends of ranges, and two instructions for each score are left.
#pragma once

#include "cuda/attention/row_tiles/columns.cuh"
#include "cuda/attention/row_tiles/shape.cuh"

namespace turboquant::cuda::row_tiles {

// Of an item, what the two rows i = 0 and 1 of a thread see: bits of the thread's columns.
template <class S>
struct RowMasks {
  int t;            // the thread's number among the four that share a row
  int position[2];  // of the rows' queries; rows that do not exist: of the last one
  int first[2];     // of codes a row sees keys [first, end). Exact keys: sinks from `first` on, others from `end` on
  int end[2];

  // Excludes the keys that a row does not see. A row that sees a key with a scale that is not a number becomes NaN.
  // tile: the number of the tile's first exact key, else its position
  template <bool EXACT>
  __device__ __forceinline__ void apply(const Item& item, int tile, const TileInfo& info,
                                        float (&scores)[S::kScores]) const {
    uint32_t seen[2], poison = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (EXACT) {
        seen[i] = seen_exact(item, i, tile);
      } else {
        seen[i] = columns().template range<true>(first[i] - tile, end[i] - tile);
      }
    }
    if ((!EXACT || (S::kGathered && tile < item.older.tiles * S::kKeys)) && info.special) {
      uint32_t absent = 0;
#pragma unroll
      for (int w = 0; w < S::kKeys / 32; ++w) {
        if (!EXACT) poison |= columns().of(info.poison[w]) << 8 * w;
        absent |= columns().of(info.absent[w]) << 8 * w;
      }
      seen[0] &= ~absent, seen[1] &= ~absent;
    }
#pragma unroll
    for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float& x = scores[4 * n + k];
        const uint32_t bit = 1u << (2 * n + k % 2);
        if (!EXACT && poison & bit) x = NAN;
        x = seen[k / 2] & bit ? x : -INFINITY;
      }
    }
  }

  // Whether row i sees exact key `number` of the item; all threads of the row learn it.
  __device__ __forceinline__ bool sees_exact(const Item& item, int i, int number) const {
    const int tile = number & -S::kKeys, n = number - tile;  // one of the row's four threads has this column
    return any_of_quad(n % 8 / 2 == t && (seen_exact(item, i, tile) >> (n / 8 * 2 + n % 2) & 1));
  }

 private:
  __device__ __forceinline__ ThreadColumns<S::kKeys> columns() const { return {t}; }

  // Which of the thread's columns of row i are keys that it sees, where `tile` is the number of the first exact key.
  __device__ __forceinline__ uint32_t seen_exact(const Item& item, int i, int tile) const {
    const auto range = [&](int from, int to) { return columns().template range<false>(from, to); };
    const auto sees_tail = [&](int sinks, int recent, int exact, int number) {
      const int others = sinks - recent - number;  // key k behind sinks is number k + others
      return range(first[i] - number, min(sinks, position[i] + 1) - number) |
             range(max(sinks - number, end[i] + others), min(exact - number, position[i] + 1 + others));
    };
    if (S::kGathered && tile < first_own(item)) {
      const auto& older = item.older;
      const int coded = older.tiles * S::kKeys, origin = older.first + tile;
      if (tile < coded) return range(max(first[i], older.tail.sinks) - origin, end[i] - origin);
      return sees_tail(older.sinks, older.tail_begin, older.copies, tile - coded);
    }
    if (S::kPrompts || (S::kChunks && tile >= first_own(item))) {
      const int origin = own_origin(item) + tile;
      return range(first[i] - origin, position[i] + 1 - origin);
    }
    return sees_tail(item.sinks, item.recent, item.exact, tile);
  }
  static __device__ __forceinline__ bool any_of_quad(int x) {
    x |= __shfl_xor_sync(0xffffffff, x, 1);
    return (x | __shfl_xor_sync(0xffffffff, x, 2)) != 0;
  }
  // Where a block only copies, keys of the tail have tiles of their own, and own keys begin behind these: the number of
  // the first one, and the position that number 0 would have among them.
  static __device__ __forceinline__ int first_own(const Item& item) {
    if constexpr (S::kChunks) return static_cast<const Task&>(item).tail_tiles * S::kKeys;
    if constexpr (S::kGathered) return (item.older.tiles + item.older.copies_tiles) * S::kKeys;
    return 0;
  }
  static __device__ __forceinline__ int own_origin(const Item& item) {
    if constexpr (S::kChunks) return static_cast<const Task&>(item).own_first - first_own(item);
    return item.recent - first_own(item);
  }
};

}  // namespace turboquant::cuda::row_tiles
