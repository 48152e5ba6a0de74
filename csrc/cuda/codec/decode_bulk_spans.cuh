// How kernels decode many vectors of 64, 128 or 256 channels: from page records, or from dense rows
// (codec/decode_bulk.cu), or the older tokens of a call of attention (attention/row_tiles/gather.cuh).
//
// Before its scale is applied, a vector consists of small integers, and six stages of butterflies only add and subtract
// them: |sum| <= 2^13, times the 11 bits of a float16 scale, fits float32, so nothing is rounded (format.md section 6).
// Integer tensor cores do these stages for 64 channels at a time, as products with a matrix of 1 and -1. Integer
// additions do the seventh stage, and scale * sum rounds once, as the format's seventh stage does. The rest is float32:
// an eighth stage, the factor 1 / sqrt(n), signs, channels.
//
// A warp takes a *span* at a time, 16 neighbouring tokens of one head. While it decodes them, asynchronous copies bring
// the next codes to shared memory; loads into registers would delay it, because long global loads share a scoreboard
// with short shared-memory loads. Levels are the left operand of the products (codec/decode_bulk.cuh). Channels are
// numbered so that a lane gets 8 neighbours of the result. Results pass through shared memory, because stores of whole
// vectors are faster than stores of parts of them.
#pragma once

#include <type_traits>

#include "choices/codec.h"
#include "cuda/codec/bulk.cuh"
#include "cuda/codec/decode_bulk.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/device.cuh"

namespace turboquant::cuda {

template <int LOG_N>
struct DecodeTraits {
  static constexpr int kLogDim = LOG_N, kDim = 1 << LOG_N, kSets = kDim / kSetChannels;
  // Warps of a block, and blocks of a multiprocessor, which has registers for no more.
  static constexpr int kWarps = choices::decode_warps(kDim), kBlocks = 4;
  static_assert(kTokens == choices::kDecodeSpanTokens);

  // Bytes between the result vectors of a span: eight lanes write 64 bytes to each of two vectors, in different banks.
  static constexpr int kResultBytes = 2 * kDim + 64;
  static constexpr int kChunks = kDim / 8,
                       kTogether = 32 / kChunks;  // chunks of 16 bytes; vectors that one store writes

  // A stage holds codes of up to 8 bits (or of 4 bits, and the fifth bits), and then scales.
  static constexpr int kScales = kTokens * kDim, kStageBytes = kScales + kScaleBytes;
};

// ---- Spans ----------------------------------------------------------------------------------------------------------

// All spans of all sequences, up to max_length tokens each. Neighbouring warps take neighbouring heads, then the next
// span of the sequence.
class AllSpans {
 public:
  struct Span {
    int sequence, number, head;
  };

  // warps: of the grid, that share the spans
  __device__ __forceinline__ AllSpans(const DecodeArguments& a, int warps)
      : a_(a), spans_(a.spans_of_sequence), on_(at(warps)) {}
  __device__ __forceinline__ Span at(int item) const {
    return {item / a_.heads / spans_, item / a_.heads % spans_, item % a_.heads};
  }
  // Moves on by as many items as the grid has warps; avoids a division.
  __device__ __forceinline__ void advance(Span& span) const {
    span.head += on_.head;
    span.number += on_.number;
    span.sequence += on_.sequence;
    if (span.head >= a_.heads) span.head -= a_.heads, ++span.number;
    if (span.number >= spans_) span.number -= spans_, ++span.sequence;
  }
  __device__ __forceinline__ bool exists(const Span& span) const { return span.sequence < static_cast<int>(a_.seqs); }
  __device__ __forceinline__ int begin(const Span& span) const { return span.number * kTokens; }
  // The end of its sequence's tokens, which is loaded as far ahead as its page is.
  __device__ __forceinline__ int load_end(const Span& span) const { return a_.lengths[span.sequence]; }
  __device__ __forceinline__ int end(const Span&, int loaded) const {
    return min(loaded, static_cast<int>(a_.max_length));
  }
  // Vectors of the result that are written: zeros for tokens that do not exist.
  __device__ __forceinline__ int stored(const Span& span) const {
    return static_cast<int>(a_.max_length) - begin(span);
  }
  // The vector of the result of its first token
  __device__ __forceinline__ int64_t row(const Span& span) const {
    return (int64_t{span.sequence} * a_.max_length + begin(span)) * a_.heads + span.head;
  }
  // count: of its tokens that exist
  __device__ __forceinline__ void note(const Span&, int /* count */) const {}

 private:
  const DecodeArguments& a_;
  const int spans_;
  const Span on_;
};

// The page of a span: loaded while codes become levels, and used after that.
struct PageAhead {
  int page, end;

  template <class Spans>
  __device__ __forceinline__ PageAhead(const DecodeArguments& a, const Spans& spans, const typename Spans::Span& span)
      : page(-1), end(0) {
    if (!spans.exists(span)) return;
    const int number = spans.begin(span) >> a.layout.page_shift;
    if (number >= a.max_pages) return;
    end = spans.load_end(span);
    page = a.table[span.sequence * a.table_stride + number];
  }
};

// The copies of a span: one run of bytes each for codes, planes and scales.
struct SpanRuns {
  int codes, planes;                         // bytes of a run
  int from_codes, from_planes, from_scales;  // first bytes in a tile of a record

  static __device__ __forceinline__ SpanRuns of_pages(const RecordLayout& r, bool values) {
    if (values) {
      return {.codes = r.value_block_bytes,
              .planes = 0,
              .from_codes = r.value_blocks,
              .from_planes = 0,
              .from_scales = r.value_scales};
    }
    return {.codes = kTokens * r.key_row_bytes,
            .planes = kTokens * r.key_plane_bytes,
            .from_codes = 0,
            .from_planes = r.key_planes,
            .from_scales = r.key_scales};
  }
  static __device__ __forceinline__ SpanRuns of_rows(int row_bytes) { return {kTokens * row_bytes, 0, 0, 0, 0}; }
};

// Issues the copies of a span of dense rows into the warp's stage. Returns how many rows exist, up to 16.
template <typename Traits>
__device__ __forceinline__ int fetch_dense(const DecodeArguments& a, int begin, const SpanRuns& runs, int lane,
                                           uint8_t* stage, uint64_t* barrier) {
  const uint8_t *rows = a.packed + int64_t{begin} * a.row_bytes,
                *scales = reinterpret_cast<const uint8_t*>(a.scale + begin);
  const int count = static_cast<int>(min(a.max_length - begin, int64_t{kTokens}));
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(rows) | reinterpret_cast<uintptr_t>(scales);
  const bool whole = count == kTokens && addresses % 16 == 0;
  if (!whole) {  // the last span, or every span if the tensors are not aligned
#pragma unroll 1
    for (int i = lane; i < count * a.row_bytes / 8; i += 32) {
      reinterpret_cast<uint2*>(stage)[i] = reinterpret_cast<const uint2*>(rows)[i];
    }
    if (lane < count) reinterpret_cast<uint16_t*>(stage + Traits::kScales)[lane] = a.scale[begin + lane];
    __syncwarp();
  }
  fill_slot(barrier,
            {{stage, rows, whole ? runs.codes : 0}, {stage + Traits::kScales, scales, whole ? kScaleBytes : 0}});
  return count;
}

// The same for pages. The tokens of a span are those of a value block, and share a page. Codes beyond the end of the
// sequence or of the result are copied, too. Returns how many tokens exist.
template <typename Traits, class Spans>
__device__ __forceinline__ int fetch_page(const DecodeArguments& a, const Spans& spans,
                                          const typename Spans::Span& span, const PageAhead& ahead,
                                          const SpanRuns& runs, uint8_t* stage, uint64_t* barrier) {
  const int begin = spans.begin(span), count = spans.end(span, ahead.end) - begin;
  const Token from =
      a.pages.token(count > 0 ? ahead.page : -1, begin & ((1 << a.layout.page_shift) - 1), span.head, a.layout);
  const auto run = [&](int to, int at, int bytes) {  // a tile may have two of each run
    return Run{stage + to, from.tile + (at + (from.number ? bytes : 0)), from.tile ? bytes : 0};
  };
  fill_slot(barrier, {run(0, runs.from_codes, runs.codes), run(runs.codes, runs.from_planes, runs.planes),
                      run(Traits::kScales, runs.from_scales, kScaleBytes)});
  return from.tile ? count : 0;
}

// ---- Arithmetic -----------------------------------------------------------------------------------------------------

constexpr float kMiddle = 12582912.0f;  // 1.5 * 2^23: adding an integer to its bits adds it to the float

// Up to seven stages of butterflies: sums of the two columns of (step, word) for both tokens, as the bits of kMiddle +
// sum: [set][2 token + column]. butterfly: the right operand.
template <typename Traits>
__device__ __forceinline__ void add_up(const Operands<Traits>& operands, const uint4& butterfly, const int (&middle)[4],
                                       int (&sum)[Traits::kSets][4]) {
#pragma unroll
  for (int h = 0; h < Traits::kSets; ++h) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[h][i] = h % 2 ? 0 : middle[i];
    mma_bytes(sum[h], operands[h][0], make_uint2(butterfly.x, butterfly.y));
    mma_bytes(sum[h], operands[h][1], make_uint2(butterfly.z, butterfly.w));
  }
#pragma unroll
  for (int h = 0; h + 1 < Traits::kSets; h += 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int p = sum[h][i], q = sum[h + 1][i];
      sum[h][i] = p + q, sum[h + 1][i] = p - q;
    }
  }
}

// A lane's part of the results: [set][8 token + channel], the channels are neighbours.
template <typename Traits>
using Numbers = float[Traits::kSets][16];

// Half of the lane's results, before factors and signs: butterflies of levels, times the scale. butterflies: of that
// half, [word][lane]; unit: scales of the lane's tokens; offset: unit * -kMiddle, which is in all sums.
template <typename Traits>
__device__ __forceinline__ void rotate_back(const Operands<Traits>& operands, const uint4 (*butterflies)[32],
                                            const int (&middle)[4], const float (&unit)[2], const float (&offset)[2],
                                            int lane, Numbers<Traits>& y) {
  constexpr int kSets = Traits::kSets;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    int sum[kSets][4];
    add_up<Traits>(operands, butterflies[w][lane], middle, sum);
#pragma unroll
    for (int h = 0; h < kSets; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[h][i / 2 * 8 + 2 * w + i % 2] = __fmaf_rn(__int_as_float(sum[h][i]), unit[i / 2], offset[i / 2]);
      }
    }
  }
#pragma unroll
  for (int h = 0; h + 2 < kSets; ++h) {  // the eighth stage
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float p = y[h][i], q = y[h + 2][i];
      y[h][i] = __fadd_rn(p, q), y[h + 2][i] = __fsub_rn(p, q);
    }
  }
}

// Multiplies y by factors in shared memory; from: the factors of the first set.
template <typename Traits>
__device__ __forceinline__ void multiply_shared(Numbers<Traits>& y, const float* from) {
#pragma unroll
  for (int h = 0; h < Traits::kSets; ++h) {
#pragma unroll
    for (int k = 0; k < 8; k += 4) {
      const float4 f = *reinterpret_cast<const float4*>(from + kSetChannels * h + k);
#pragma unroll
      for (int i = k; i < 16; i += 8) {
        y[h][i] = __fmul_rn(y[h][i], f.x), y[h][i + 1] = __fmul_rn(y[h][i + 1], f.y);
        y[h][i + 2] = __fmul_rn(y[h][i + 2], f.z), y[h][i + 3] = __fmul_rn(y[h][i + 3], f.w);
      }
    }
  }
}

// y = fn(y, constant of its channel), with constants in global memory; from: the constants of the first set.
template <typename Traits, typename Fn>
__device__ __forceinline__ void with_channels(Numbers<Traits>& y, const float* from, Fn&& fn) {
#pragma unroll
  for (int h = 0; h < Traits::kSets; ++h) {
    float c[8];
    load_floats<8>(from + kSetChannels * h, c);
#pragma unroll
    for (int i = 0; i < 16; ++i) y[h][i] = fn(y[h][i], c[i % 8]);
  }
}

// Rounds y and puts it into the span's results in shared memory. channel: its first of a set; g: its first token.
template <typename Traits, typename T>
__device__ __forceinline__ void put_result(const Numbers<Traits>& y, int channel, int g, uint8_t* result) {
#pragma unroll
  for (int h = 0; h < Traits::kSets; ++h) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t word[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) word[k] = word_of_floats<T>(y[h][8 * i + 2 * k], y[h][8 * i + 2 * k + 1]);
      *reinterpret_cast<uint4*>(result + (g + 8 * i) * Traits::kResultBytes + 2 * (kSetChannels * h + channel)) =
          make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
}

// Stores the vectors of a span from shared memory: whole vectors, or halves of them, in one store instruction.
// to_vector: the first one of the result; on: from one to the next, in vectors
template <typename Traits>
__device__ __forceinline__ void store_result(const uint8_t* result, void* out, int64_t to_vector, int on, int stored,
                                             int lane) {
  const int first = lane / Traits::kChunks, at = 16 * (lane % Traits::kChunks);
  const uint8_t* from = result + first * Traits::kResultBytes + at;
  uint8_t* to = static_cast<uint8_t*>(out) + at + (to_vector + int64_t{first} * on) * (2 * Traits::kDim);
  const int64_t step = int64_t{on} * (2 * Traits::kDim * Traits::kTogether);
#pragma unroll
  for (int k = 0; k < kTokens; k += Traits::kTogether) {
    if (k + first < stored) {
      __stwb(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(from + k * Traits::kResultBytes));
    }
    to += step;
  }
}

// Decodes one vector in the format's own order of operations, which is rarely needed. y: its levels times its scale,
// [d] in shared memory; row: [d]. All lanes of the warp take part.
template <typename Traits, typename T>
__device__ __forceinline__ void store_in_order(float* y, const float* factors, const format::Channels& channels,
                                               int lane, T* row) {
#pragma unroll 1
  for (int h = 1; h < Traits::kDim; h *= 2) {
#pragma unroll
    for (int n = lane; n < Traits::kDim / 2; n += 32) {
      const int c = n / h * 2 * h + n % h;
      const float p = y[c], q = y[c + h];
      y[c] = __fadd_rn(p, q), y[c + h] = __fsub_rn(p, q);
    }
    __syncwarp();
  }
#pragma unroll 1
  for (int c = 2 * lane; c < Traits::kDim; c += 64) {
    float z[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      z[i] = __fmul_rn(y[c + i], factors[c + i]);
      if (channels.inverse) z[i] = __fmul_rn(z[i], channels.inverse[c + i]);
      if (channels.center) z[i] = __fadd_rn(z[i], channels.center[c + i]);
    }
    *reinterpret_cast<uint32_t*>(row + c) = word_of_floats<T>(z[0], z[1]);
  }
  __syncwarp();
}

// Tokens that do not exist are zeros. For scales that are zero, negative, infinite or NaN, the sign of zero and the NaN
// payload of a sum depend on the order of operations, so these odd tokens take the format's own order. row: the span's
// first vector of `out`; there, odd: of the lane's tokens, g and g + 8; y: [d] in shared memory. All lanes of the warp
// take part.
template <typename Traits, typename T>
__device__ __forceinline__ void store_rare(T* out, int64_t row, int heads, int stored, const bool (&there)[2],
                                           const bool (&odd)[2], const Operands<Traits>& operands,
                                           const float (&unit)[2], bool values, const float* factors,
                                           const format::Channels& channels, int lane, float* y) {
  constexpr int kDim = Traits::kDim, kSets = Traits::kSets;
  const int g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int token = g + 8 * i;
    T* own = out + (row + int64_t{token} * heads) * kDim;
    if (!(i ? there[1] : there[0]) && token < stored) {
#pragma unroll 1
      for (int n = 8 * t; n < kDim; n += 32) *reinterpret_cast<uint4*>(own + n) = make_uint4(0, 0, 0, 0);
    }
#pragma unroll 1
    for (uint32_t left = __ballot_sync(0xffffffff, i ? odd[1] : odd[0]); left; left &= left - 1) {
      const int one = __ffs(left) - 1;  // a lane of the token; each of its four lanes writes its part of y
      if (one % 4) continue;
      if (g == one / 4) {
#pragma unroll
        for (int n = 0; n < 4 * kSets; ++n) {
          const int h = n / 4, product = n / 2 % 2, half = n % 2;
          const uint32_t bytes = i ? operands[h][product][2 * half + 1] : operands[h][product][2 * half];
#pragma unroll
          for (int byte = 0; byte < 4; ++byte) {
            y[kSetChannels * h + channel_of_operand(values, product, half, t, byte)] =
                __fmul_rn(i ? unit[1] : unit[0], static_cast<float>(static_cast<int8_t>(bytes >> 8 * byte)));
          }
        }
      }
      __syncwarp();
      store_in_order<Traits>(y, factors, channels, lane, own + (one / 4 - g) * (int64_t{heads} * kDim));
    }
  }
}

// ---- All together ---------------------------------------------------------------------------------------------------

// Decodes spans: a block of 32 * Traits::kWarps threads, some of all that the grid has. Every block calls it once.
// make(warps): the spans, of which each of so many warps takes every `warps`th one
template <typename Traits, typename T, typename F>
__device__ __forceinline__ void decode_spans(const DecodeArguments& a, const F& make) {
  constexpr int kSets = Traits::kSets, kDim = Traits::kDim, kWarps = Traits::kWarps;
  __shared__ alignas(16) float factors[2][kDim];
  __shared__ uint4 butterflies[2][8][32];  // [source][4 step + word][lane]
  __shared__ alignas(16) int8_t level_bytes[2][32];
  __shared__ alignas(16) uint8_t results[kWarps][kTokens * Traits::kResultBytes];
  __shared__ alignas(16) uint8_t stages[kWarps][Traits::kStageBytes];
  __shared__ uint64_t barriers[kWarps];
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  uint8_t *result = results[warp], *stage = stages[warp];
  uint64_t* barrier = barriers + warp;
  if (lane == 0) init_barrier(barrier, 1);
  barriers_ready();
  __syncwarp();

  // Neighbouring warps alternate between keys and values.
  const int s = warp % a.sources;
  const bool values = s == 1;
  const DecodeSource& source = a.source[s];
  const Width width = source.width;
  const int warps = kWarps / a.sources;
  const Kind kind = a.packed ? Kind::kRows : values ? Kind::kValues : Kind::kKeys;
  const LaneReads reads = a.packed ? LaneReads::of_rows(format::num_bits(width), a.row_bytes, g, t)
                          : values ? LaneReads::of_values(a.layout, kSets, g, t)
                                   : LaneReads::of_keys(a.layout, g, t);
  const auto spans = make(static_cast<int>(gridDim.x) * warps);
  using Spans = std::remove_cv_t<decltype(spans)>;
  using Span = typename Spans::Span;
  Span span = spans.at(blockIdx.x * warps + warp / a.sources);
  const SpanRuns runs = a.packed ? SpanRuns::of_rows(a.row_bytes) : SpanRuns::of_pages(a.layout, values);
  // Issues the copies of a span. Returns how many tokens exist.
  const auto fetch = [&](const Span& span, const PageAhead& ahead) {
    if (!spans.exists(span)) return 0;
    return a.packed ? fetch_dense<Traits>(a, spans.begin(span), runs, lane, stage, barrier)
                    : fetch_page<Traits>(a, spans, span, ahead, runs, stage, barrier);
  };

  int middle[4];  // the start of sums, kept in registers
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    middle[i] = __float_as_int(kMiddle);
    asm("" : "+r"(middle[i]));
  }
  uint32_t phase = 0;
  int fetched = fetch(span, PageAhead(a, spans, span));
  Span next = span;
  spans.advance(next);

  // While the copies arrive: signs times 1 / sqrt(n), matrices, levels.
  for (int i = threadIdx.x; i < a.sources * kDim; i += 32 * kWarps) {
    factors[i / kDim][i % kDim] = __fmul_rn(a.source[i / kDim].signs[i % kDim], block_norm(Traits::kLogDim));
  }
  for (int i = warp; i < 8 * a.sources; i += kWarps) {
    butterflies[i / 8][i % 8][lane] = butterfly_operand(i >= 8, i / 4 % 2, i % 4, lane);
  }
  if (warp < a.sources) LevelWords::fill(level_bytes[warp], a.source[warp].levels, a.source[warp].width, lane);
  __syncthreads();

#pragma unroll 1
  for (; spans.exists(span); span = next, spans.advance(next)) {
    const PageAhead ahead(a, spans, next);
    const int count = fetched;
    if (lane == 0 && !values) spans.note(span, count);
    wait_slot(barrier, phase);
    phase ^= 1;
    Operands<Traits> operands;
    const LevelWords levels(level_bytes[s]);  // read again for every span, because registers are short
    dispatch_codes(kind, width, [&]<Kind KIND, Width WIDTH>() {
      const StoredCodes<Traits, KIND, WIDTH> stored(reads, stage, a.layout.key_row_bytes, g, t);
      put_levels(stored, levels, count, g, t, operands);
    });
    float unit[2], offset[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const __half scale = reinterpret_cast<const __half*>(stage + Traits::kScales)[g + 8 * i];
      unit[i] = g + 8 * i < count ? __fmul_rn(__half2float(scale), format::kLevelUnit) : 0.0f;
      offset[i] = __fmul_rn(unit[i], -kMiddle);
    }
    __syncwarp();
    fetched = fetch(next, ahead);

#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int channel = 32 * step + 8 * t;  // the lane's first of a set
      Numbers<Traits> y;
      rotate_back<Traits>(operands, butterflies[s] + 4 * step, middle, unit, offset, lane, y);
      multiply_shared<Traits>(y, factors[s] + channel);
      const format::Channels channels = source.channels.of_head(span.head, kDim);
      if (channels.inverse) {
        with_channels<Traits>(y, channels.inverse + channel, [](float a, float b) { return __fmul_rn(a, b); });
      }
      if (channels.center) {
        with_channels<Traits>(y, channels.center + channel, [](float a, float b) { return __fadd_rn(a, b); });
      }
      put_result<Traits, T>(y, channel, g, result);
    }
    __syncwarp();
    const int64_t row = spans.row(span);
    const int stored = spans.stored(span);
    store_result<Traits>(result, source.out, row, a.heads, stored, lane);
    __syncwarp();

    bool there[2], odd[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      there[i] = g + 8 * i < count;
      odd[i] = there[i] && !(unit[i] > 0 && unit[i] < INFINITY);
    }
    if (!__any_sync(0xffffffff, !there[0] || !there[1] || odd[0] || odd[1])) continue;
    store_rare<Traits>(static_cast<T*>(source.out), row, a.heads, stored, there, odd, operands, unit, values,
                       factors[s], source.channels.of_head(span.head, kDim), lane, reinterpret_cast<float*>(result));
  }
}

}  // namespace turboquant::cuda
