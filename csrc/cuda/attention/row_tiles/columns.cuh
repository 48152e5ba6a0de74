// Which columns of a row of scores are certain keys of a tile, as bits: bit 2 n + h stands for the thread's column
// (n, h), see consumer.cuh.
#pragma once

#include <cstdint>

namespace turboquant::cuda::row_tiles {

// KEYS: of a tile
template <int KEYS>
struct ThreadColumns {
  int t;  // the thread's number among the four that share a row

  // Keys [begin, end) of the tile. CODED: in the order of codes (token_at).
  template <bool CODED>
  __device__ __forceinline__ uint32_t range(int begin, int end) const {
    return keys_before<CODED>(end) & ~keys_before<CODED>(begin);
  }
  // Of bits for 32 places of the tile those of the thread's columns: two of each eight.
  __device__ __forceinline__ uint32_t of(uint32_t places) const {
    const uint32_t own = places >> 2 * t & 0x03030303;
    return (own | own >> 6 | own >> 12 | own >> 18) & 0xFF;
  }

 private:
  template <bool CODED>
  __device__ __forceinline__ uint32_t keys_before(int end) const {
    if constexpr (!CODED) {
      end = min(max(end, 0), KEYS);
      return low_bits(end / 8 * 2 + min(max(end % 8 - 2 * t, 0), 2));
    }
    uint32_t bits = 0;
#pragma unroll
    for (int w = 0; w < KEYS / 32; ++w) {
      // Of 32 tokens column (n, h) is token 16 (t / 2) + t % 2 + 2 n + 8 h.
      const int left = end - 32 * w - t / 2 * 16 - t % 2 + 1;
      const uint32_t even = low_bits(2 * min(max(left >> 1, 0), 4)),
                     odd = low_bits(2 * min(max((left - 8) >> 1, 0), 4));
      bits |= (even & 0x55 | odd & 0xAA) << 8 * w;
    }
    return bits;
  }
  static __device__ __forceinline__ uint32_t low_bits(int count) { return count < 32 ? (1u << count) - 1 : ~0u; }
};

}  // namespace turboquant::cuda::row_tiles
