// pack, unpack: dense little-endian bit strings of codes, 1 to 8 bits (docs/format.md section 7).
//
// Rows of whole bytes follow each other without a gap, so the whole tensor is one bit string: a thread turns 16 codes
// (16 bytes) into 2 * bits bytes or back. Rows that end inside a byte take a slower kernel. A code too large for its
// bits cannot be reported without synchronising with the device: its upper bits are dropped.
#include "cuda/common/torch.cuh"

namespace turboquant::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 16;     // codes that a thread moves at a time
constexpr int kPerThread = 2;  // chunks of a thread, so that several loads are in flight
constexpr int kBlockCodes = kThreads * kPerThread * kChunk;

// 16 codes as 128 bits, low part first.
struct Bits128 {
  uint64_t low, high;
};

// Four codes, one in each byte -> 4 * BITS bits; upper bits of a byte are dropped.
template <int BITS>
__device__ __forceinline__ uint32_t squeeze(uint32_t bytes) {
  if constexpr (BITS == 8) return bytes;
  constexpr uint32_t even = 0x00010001u * ((1u << BITS) - 1), pair = (1u << 2 * BITS) - 1;
  bytes = (bytes & even) | (bytes & even << 8) >> (8 - BITS);
  return (bytes & pair) | (bytes & pair << 16) >> (16 - 2 * BITS);
}

// The inverse; bits above the 4 * BITS lowest are ignored.
template <int BITS>
__device__ __forceinline__ uint32_t spread(uint32_t bits) {
  if constexpr (BITS == 8) return bits;
  constexpr uint32_t even = 0x00010001u * ((1u << BITS) - 1), pair = (1u << 2 * BITS) - 1;
  bits = (bits & pair) | (bits << (16 - 2 * BITS) & pair << 16);
  return (bits & even) | (bits << (8 - BITS) & even << 8);
}

// 16 codes -> 16 * BITS bits
template <int BITS>
__device__ __forceinline__ Bits128 squeeze(uint4 codes) {
  const uint64_t low = squeeze<BITS>(codes.x) | uint64_t{squeeze<BITS>(codes.y)} << 4 * BITS;
  const uint64_t high = squeeze<BITS>(codes.z) | uint64_t{squeeze<BITS>(codes.w)} << 4 * BITS;
  if constexpr (BITS == 8) {
    return {low, high};
  } else {
    return {low | high << 8 * BITS, high >> (64 - 8 * BITS)};
  }
}

template <int BITS>
__device__ __forceinline__ uint4 spread(Bits128 string) {
  const auto four = [&](int i) {  // codes 4 i .. 4 i + 3
    const int bit = 4 * BITS * i;
    if (bit >= 64) return static_cast<uint32_t>(string.high >> (bit - 64));
    const uint64_t carried = bit > 0 && bit + 4 * BITS > 64 ? string.high << (64 - bit) : 0;
    return static_cast<uint32_t>(string.low >> bit | carried);
  };
  return {spread<BITS>(four(0)), spread<BITS>(four(1)), spread<BITS>(four(2)), spread<BITS>(four(3))};
}

// codes: uint8 [count], count * BITS a multiple of 8 -> packed: [count * BITS / 8], 16-byte aligned
template <int BITS>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const uint8_t* codes, int64_t count, bool codes_aligned, uint8_t* packed) {
  // Packed bytes go through shared memory, so that they are stored 16 at a time whatever the width.
  __shared__ alignas(16) uint16_t staged[kBlockCodes / 16 * BITS];
  const int64_t first = int64_t{blockIdx.x} * kBlockCodes;

  uint4 chunk[kPerThread];
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t at = first + (k * kThreads + threadIdx.x) * kChunk;
    if (codes_aligned && at + kChunk <= count) {
      chunk[k] = __ldg(reinterpret_cast<const uint4*>(codes + at));
    } else {
      uint32_t word[4] = {};
#pragma unroll
      for (int i = 0; i < kChunk; ++i) word[i / 4] |= (at + i < count ? codes[at + i] : 0u) << 8 * (i % 4);
      chunk[k] = {word[0], word[1], word[2], word[3]};
    }
  }
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const Bits128 string = squeeze<BITS>(chunk[k]);
    uint16_t* to = staged + (k * kThreads + threadIdx.x) * BITS;
#pragma unroll
    for (int i = 0; i < BITS; i += BITS % 2 ? 1 : 2) {
      const uint32_t part = static_cast<uint32_t>((i < 4 ? string.low : string.high) >> 16 * (i % 4));
      if constexpr (BITS % 2) {
        to[i] = static_cast<uint16_t>(part);
      } else {
        *reinterpret_cast<uint32_t*>(to + i) = part;
      }
    }
  }
  __syncthreads();

  const int64_t start = first / 8 * BITS, bytes = count * BITS / 8 - start;  // from this block's codes to the end
  const uint8_t* from = reinterpret_cast<const uint8_t*>(staged);
  for (int at = 16 * threadIdx.x; at < kBlockCodes / 8 * BITS && at < bytes; at += 16 * kThreads) {
    if (at + 16 <= bytes) {
      __stwb(reinterpret_cast<uint4*>(packed + start + at), *reinterpret_cast<const uint4*>(from + at));
    } else {
      for (int i = at; i < bytes; ++i) packed[start + i] = from[i];
    }
  }
}

// packed: [count * BITS / 8] -> codes: [count], 16-byte aligned
template <int BITS>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const uint8_t* packed, int64_t count, bool packed_aligned, uint8_t* codes) {
  constexpr int kWords = (BITS + 1) / 2;  // of a chunk, which starts at a word or in its middle
  const int64_t first = int64_t{blockIdx.x} * kBlockCodes, bytes = count * BITS / 8;

  uint32_t word[kPerThread][4] = {};
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t at = first + (k * kThreads + threadIdx.x) * kChunk;
    const int64_t byte = at / 8 * BITS, start = byte & ~int64_t{3};
    if (packed_aligned && start + 4 * kWords <= bytes) {
      const uint32_t* from = reinterpret_cast<const uint32_t*>(packed + start);
      if constexpr (BITS == 8) {
        const uint4 w = __ldg(reinterpret_cast<const uint4*>(from));
        word[k][0] = w.x, word[k][1] = w.y, word[k][2] = w.z, word[k][3] = w.w;
      } else if constexpr (BITS == 4) {
        const uint2 w = __ldg(reinterpret_cast<const uint2*>(from));
        word[k][0] = w.x, word[k][1] = w.y;
      } else {
#pragma unroll
        for (int i = 0; i < kWords; ++i) word[k][i] = __ldg(from + i);
      }
      if constexpr (BITS % 2) {
        const unsigned shift = 8 * static_cast<unsigned>(byte - start);  // 0 or 16
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          word[k][i] = __funnelshift_r(word[k][i], i + 1 < 4 ? word[k][i + 1] : 0, shift);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2 * BITS; ++i) word[k][i / 4] |= (byte + i < bytes ? packed[byte + i] : 0u) << 8 * (i % 4);
    }
  }
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t at = first + (k * kThreads + threadIdx.x) * kChunk;
    const uint4 chunk =
        spread<BITS>({word[k][0] | uint64_t{word[k][1]} << 32, word[k][2] | uint64_t{word[k][3]} << 32});
    if (at + kChunk <= count) {
      __stwb(reinterpret_cast<uint4*>(codes + at), chunk);
    } else {
      const uint32_t part[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if (at + i < count) codes[at + i] = static_cast<uint8_t>(part[i / 4] >> 8 * (i % 4));
      }
    }
  }
}

// Rows that end inside a byte, one thread per packed byte.
__global__ void __launch_bounds__(kThreads)
    pack_rows_kernel(const uint8_t* codes, int64_t rows, int64_t d, int bits, uint8_t* packed) {
  const int64_t row_bytes = format::dense_row_bytes(d, bits), i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= rows * row_bytes) return;
  const int64_t row = i / row_bytes, bit = i % row_bytes * 8;
  unsigned byte = 0;
  for (int64_t c = bit / bits; c < d && c * bits < bit + 8; ++c) {
    const unsigned code = codes[row * d + c] & ((1u << bits) - 1);
    const int shift = static_cast<int>(c * bits - bit);
    byte |= shift < 0 ? code >> -shift : code << shift;
  }
  packed[i] = static_cast<uint8_t>(byte);
}

// One thread per code.
__global__ void __launch_bounds__(kThreads)
    unpack_rows_kernel(const uint8_t* packed, int64_t rows, int64_t d, int bits, uint8_t* codes) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= rows * d) return;
  const int64_t row = i / d, bit = i % d * bits;
  const uint8_t* from = packed + row * format::dense_row_bytes(d, bits) + bit / 8;
  unsigned pair = from[0];
  if (bit % 8 + bits > 8) pair |= from[1] << 8;
  codes[i] = static_cast<uint8_t>(pair >> bit % 8 & ((1u << bits) - 1));
}

// Calls fn(std::integral_constant<int, bits>) for 1 to 8 bits.
template <int BITS = 1, typename Fn>
void dispatch_bits(int64_t bits, Fn&& fn) {
  if constexpr (BITS <= 8) {
    if (bits == BITS) return fn(std::integral_constant<int, BITS>{});
    dispatch_bits<BITS + 1>(bits, fn);
  }
}

// codes: uint8 [..., d], contiguous -> uint8 [..., dense_row_bytes(d, bits)]
Tensor pack(const Tensor& codes, int64_t bits) {
  check_pack_bits(bits);
  const int64_t d = check_codes(codes), row_bytes = format::dense_row_bytes(d, bits), count = codes.numel();
  Tensor packed = new_tensor(codes, leading_shape(codes, 1, {row_bytes}), ScalarType::Byte);
  if (count == 0) return packed;

  const Launch launch(codes);
  uint8_t* out = static_cast<uint8_t*>(packed.data_ptr());
  if (d * bits % 8) {
    pack_rows_kernel<<<num_blocks(packed.numel(), kThreads), kThreads, 0, launch.stream()>>>(bytes_of(codes), count / d,
                                                                                             d, static_cast<int>(bits),
                                                                                             out);
  } else {
    dispatch_bits(bits, [&](auto width) {
      pack_kernel<width>
          <<<num_blocks(count, kBlockCodes), kThreads, 0, launch.stream()>>>(bytes_of(codes), count,
                                                                             aligned(codes.data_ptr(), 16), out);
    });
  }
  launch.check("pack");
  return packed;
}

// packed: uint8 [..., dense_row_bytes(d, bits)], contiguous -> uint8 [..., d]
Tensor unpack(const Tensor& packed, int64_t bits, int64_t d) {
  check_pack_bits(bits);
  check_packed_rows(packed, d, bits);
  Tensor codes = new_tensor(packed, leading_shape(packed, 1, {d}), ScalarType::Byte);
  const int64_t count = codes.numel();
  if (count == 0) return codes;

  const Launch launch(packed);
  uint8_t* out = static_cast<uint8_t*>(codes.data_ptr());
  if (d * bits % 8) {
    unpack_rows_kernel<<<num_blocks(count, kThreads), kThreads, 0, launch.stream()>>>(bytes_of(packed), count / d, d,
                                                                                      static_cast<int>(bits), out);
  } else {
    dispatch_bits(bits, [&](auto width) {
      unpack_kernel<width>
          <<<num_blocks(count, kBlockCodes), kThreads, 0, launch.stream()>>>(bytes_of(packed), count,
                                                                             aligned(packed.data_ptr(), 16), out);
    });
  }
  launch.check("unpack");
  return codes;
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  m.impl("pack", TORCH_BOX(&turboquant::cuda::pack));
  m.impl("unpack", TORCH_BOX(&turboquant::cuda::unpack));
}
