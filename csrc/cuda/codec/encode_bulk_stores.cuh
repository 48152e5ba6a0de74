// Stores of the bulk encoder (encode_bulk.cuh): its codes in rows of keys, in value blocks and in dense rows.
#pragma once

#include "cuda/codec/encode_bulk_vectors.cuh"
#include "cuda/common/mma.cuh"

namespace turboquant::cuda {

// Stores words with an instruction for global memory: the compiler cannot prove that pages are global and would use a
// generic store.
template <int N>
__device__ __forceinline__ void put_words(uint8_t* to, const uint32_t (&word)[N]) {
  if constexpr (N == 4) {
    __stwb(reinterpret_cast<uint4*>(to), make_uint4(word[0], word[1], word[2], word[3]));
  } else if constexpr (N == 2) {
    __stwb(reinterpret_cast<uint2*>(to), make_uint2(word[0], word[1]));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) __stwb(reinterpret_cast<uint32_t*>(to) + i, word[i]);
  }
}

// Stores a group of 32 channels in the row of a key, and its fifth bits in the plane.
template <Width WIDTH>
__device__ __forceinline__ void put_key_group(const uint32_t* low, uint32_t high, int group, uint8_t* row,
                                              uint8_t* plane) {
  uint8_t* to = row + 4 * min(format::num_bits(WIDTH), 4) * group;
  if constexpr (WIDTH == Width::k4 || format::has_plane(WIDTH)) {
    put_words<4>(to, {low[0], low[1], low[2], low[3]});
    if constexpr (format::has_plane(WIDTH)) {
      put_words<1>(plane + 4 * group, {spread_pairs(high) | spread_pairs(high >> 8) << 2 |
                                       spread_pairs(high >> 16) << 4 | spread_pairs(high >> 24) << 6});
    }
  } else if constexpr (format::is_spread(WIDTH)) {
    uint32_t out[3];
#pragma unroll
    for (int j = 0; j < 3; ++j) out[j] = low[j] | (low[3] << (3 - j) & 0x88888888);
    put_words<3>(to, out);
  } else {
    static_assert(WIDTH == Width::k2, "no such keys");
    put_words<2>(to, {close_nibbles(low[0], 2) | close_nibbles(low[1], 2) << 16,
                      close_nibbles(low[2], 2) | close_nibbles(low[3], 2) << 16});
  }
}

// Stores a group of 32 channels in a dense row.
template <Width WIDTH>
__device__ __forceinline__ void put_dense_group(const uint32_t* low, uint32_t high, int group, uint8_t* row) {
  uint8_t* to = row + 4 * format::num_bits(WIDTH) * group;
  uint64_t string[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    string[i] = dense_string({low[i], format::has_fifth_bit(WIDTH) ? high >> 8 * i & 255 : 0}, WIDTH);
  }
  if constexpr (WIDTH == Width::k4) {
    put_words<4>(to, {low[0], low[1], low[2], low[3]});
  } else if constexpr (WIDTH == Width::k1) {
    put_words<1>(to, {static_cast<uint32_t>(string[0] | string[1] << 8 | string[2] << 16 | string[3] << 24)});
  } else if constexpr (WIDTH == Width::k2) {
    put_words<2>(to, {static_cast<uint32_t>(string[0] | string[1] << 16),
                      static_cast<uint32_t>(string[2] | string[3] << 16)});
  } else if constexpr (WIDTH == Width::k3) {
    put_words<3>(to, {static_cast<uint32_t>(string[0] | string[1] << 24),
                      static_cast<uint32_t>(string[1] >> 8 | string[2] << 16),
                      static_cast<uint32_t>(string[2] >> 16 | string[3] << 8)});
  } else {
    static_assert(WIDTH == Width::k5, "no such rows");
    put_words<5>(to, {static_cast<uint32_t>(string[0]), static_cast<uint32_t>(string[0] >> 32 | string[1] << 8),
                      static_cast<uint32_t>(string[1] >> 24 | string[2] << 16),
                      static_cast<uint32_t>(string[2] >> 16 | string[3] << 24), static_cast<uint32_t>(string[3] >> 8)});
  }
}

// Undoes the exchanges of rotate_lanes: a lane's octets, from two groups that are kLanes groups apart, become those of
// neighbouring groups.
template <typename Traits>
__device__ __forceinline__ void to_neighbours(uint32_t (&low)[8], int part) {
#pragma unroll
  for (int bit = Traits::kLanes / 2; bit > 0; bit /= 2) {
    const bool upper = part & bit;
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const uint32_t other = __shfl_xor_sync(0xffffffff, upper ? low[o] : low[o + 4], bit);
      low[o] = upper ? other : low[o];
      low[o + 4] = upper ? low[o + 4] : other;
    }
  }
}

// The bytes of a token in its value block. A lane has N words for even and N for odd channels (parity 0 and 1): channel
// g = 2 i + parity is byte i of word n, and byte b of word n of the block at kLaneBytes * (4 g + q) plus an offset.
template <typename Traits, Width WIDTH>
struct ValueWords {
  static constexpr int kCount = format::is_spread(WIDTH) ? format::kSpreadUnits : format::num_bits(WIDTH) / 2;
  static constexpr int kUnits = Traits::kDim * format::num_bits(WIDTH) / 64;
  static constexpr int kLaneBytes =
      4 * (format::is_spread(WIDTH) ? format::kSpreadUnits : std::min(format::kChunkUnits, kUnits));
  uint32_t even[kCount], odd[kCount];
};

// Stores the words of tokens that are a value block, in its order. The four tokens that share words are in four lanes,
// which transpose 4 x 4 bytes among them: a lane gets the words of i = its b.
template <typename Traits, Width WIDTH>
struct WholeBlock {
  using Words = ValueWords<Traits, WIDTH>;
  uint8_t* block;
  int number;  // of the lane's token

  __device__ __forceinline__ void put(Words& w, int offset) const {
    constexpr int near = Traits::kLanes,
                  far = Traits::kLanes == 4 ? 16 : 8 * Traits::kLanes;  // the lane of token ^ 1, token ^ 8
    const int q = value_q(number), b = value_b(number);
    const uint32_t first = b & 1 ? 0x3715 : 0x6240, second = b & 2 ? 0x3276 : 0x5410;
#pragma unroll
    for (int n = 0; n < Words::kCount; ++n) {
      w.even[n] = select_bytes(w.even[n], __shfl_xor_sync(0xffffffff, w.even[n], near), first);
      w.even[n] = select_bytes(w.even[n], __shfl_xor_sync(0xffffffff, w.even[n], far), second);
      w.odd[n] = select_bytes(w.odd[n], __shfl_xor_sync(0xffffffff, w.odd[n], near), first);
      w.odd[n] = select_bytes(w.odd[n], __shfl_xor_sync(0xffffffff, w.odd[n], far), second);
    }
    uint8_t* to = block + offset + Words::kLaneBytes * (8 * b + q);
    put_words(to, w.even);
    put_words(to + 4 * Words::kLaneBytes, w.odd);
  }
};

// Stores the words of any tokens, a byte at a time. First the lanes of as many neighbouring tokens as there are words
// exchange them, so that lane n of them has word n of each token: what they then store at once lies side by side.
template <typename Traits, Width WIDTH>
struct ScatteredTokens {
  using Words = ValueWords<Traits, WIDTH>;
  static constexpr int kTogether = Words::kCount == 3 ? 4 : Words::kCount;
  uint8_t* at[kTogether];  // of each token the first byte that it owns; null: it is not stored
  int own;                 // the lane's token among these

  // block: null if the lane's token is not stored. All lanes of the warp take part.
  __device__ __forceinline__ ScatteredTokens(uint8_t* block, int number, int lane)
      : own(lane / Traits::kLanes % kTogether) {
    if (block) block += Words::kLaneBytes * value_q(number) + value_b(number);
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      const int from = lane + (t - own) * Traits::kLanes;
      at[t] = reinterpret_cast<uint8_t*>(__shfl_sync(0xffffffff, reinterpret_cast<uint64_t>(block), from));
    }
  }

  __device__ __forceinline__ void put(const Words& w, int offset) const {
    uint32_t even[kTogether], odd[kTogether];
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      even[n] = n < Words::kCount ? w.even[n % Words::kCount] : 0;
      odd[n] = n < Words::kCount ? w.odd[n % Words::kCount] : 0;
    }
    exchange(even);
    exchange(odd);
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      if (at[t] == nullptr || own >= Words::kCount) continue;
      uint8_t* to = at[t] + offset + 4 * own;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        __stwb(to + Words::kLaneBytes * 8 * i, static_cast<uint8_t>(even[t] >> 8 * i));
        __stwb(to + Words::kLaneBytes * (8 * i + 4), static_cast<uint8_t>(odd[t] >> 8 * i));
      }
    }
  }

 private:
  // Word n of lane t becomes word t of lane n.
  __device__ __forceinline__ void exchange(uint32_t (&word)[kTogether]) const {
#pragma unroll
    for (int bit = 1; bit < kTogether; bit *= 2) {
      const bool upper = own & bit;
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        if (n & bit) continue;
        const uint32_t other = __shfl_xor_sync(0xffffffff, upper ? word[n] : word[n | bit], bit * Traits::kLanes);
        word[n] = upper ? other : word[n];
        word[n | bit] = upper ? word[n | bit] : other;
      }
    }
  }
};

// Stores a lane's codes in value blocks: eight words of LaneCodes::low, or 16 of 8-bit codes.
template <typename Traits, Width WIDTH, typename Tokens>
__device__ __forceinline__ void put_value(const uint32_t* codes, int part, const Tokens& tokens) {
  // Bytes with a channel of octet a in the low nibble and of octet b in the high one: of even channels, of odd
  // channels.
  const auto even = [](uint32_t a, uint32_t b) { return select_bits(0x0F0F0F0F, a, b << 4); };
  const auto odd = [](uint32_t a, uint32_t b) { return select_bits(0x0F0F0F0F, a >> 4, b); };
  using Words = ValueWords<Traits, WIDTH>;
  if constexpr (format::is_spread(WIDTH)) {  // a set of 64 channels
    uint32_t e[4], o[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      e[j] = even(codes[2 * j], codes[2 * j + 1]), o[j] = odd(codes[2 * j], codes[2 * j + 1]);
    }
    Words w;
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      w.even[j] = e[j] | (e[3] << (3 - j) & 0x88888888);
      w.odd[j] = o[j] | (o[3] << (3 - j) & 0x88888888);
    }
    tokens.put(w, format::kSpreadBytes * part);
  } else {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t* c = codes + (format::levels_are_codes(WIDTH) ? 8 : 4) * h;
      Words w;
      if constexpr (format::levels_are_codes(WIDTH)) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          w.even[n] = select_bytes(c[2 * n], c[2 * n + 1], 0x6420);
          w.odd[n] = select_bytes(c[2 * n], c[2 * n + 1], 0x7531);
        }
      } else if constexpr (WIDTH == Width::k4) {
        w = {{even(c[0], c[1]), even(c[2], c[3])}, {odd(c[0], c[1]), odd(c[2], c[3])}};
      } else {
        static_assert(WIDTH == Width::k2, "no such values");
        w = {{close_twos(even(c[0], c[1]), even(c[2], c[3]))}, {close_twos(odd(c[0], c[1]), odd(c[2], c[3]))}};
      }
      // A half of a lane is a group of 32 channels, whose words lie in a chunk.
      const int word = Traits::group(part, h) * Words::kCount;
      tokens.put(w, format::kChunkBytes * (word / format::kChunkUnits) + 4 * (word % format::kChunkUnits));
    }
  }
}

// Stores a group of 32 channels of 8-bit codes in a row, of a key or dense.
__device__ __forceinline__ void put_byte_group(const uint32_t* codes, int group, uint8_t* row) {
  put_words<4>(row + 32 * group, {codes[0], codes[1], codes[2], codes[3]});
  put_words<4>(row + 32 * group + 16, {codes[4], codes[5], codes[6], codes[7]});
}

}  // namespace turboquant::cuda
