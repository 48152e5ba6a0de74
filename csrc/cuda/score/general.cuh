// The general kernel of scores: any number of queries and channels, codes and sketches, or one of them. There is one
// for each width of rows that are read in whole words, and one for all others (kAnyRows).
#pragma once

#include "cuda/score/queries.cuh"

namespace turboquant::cuda::scores {

// The last word of rows at any address, assembled byte by byte, because memory behind the last byte may not exist.
struct LastWord {
  const uint8_t* at;
  uint32_t bytes;

  LastWord() = default;
  __device__ __forceinline__ explicit LastWord(const uint8_t* end)
      : at(end - reinterpret_cast<uintptr_t>(end) % 4), bytes(0) {
#pragma unroll 1
    for (const uint8_t* p = at; p < end; ++p) bytes |= static_cast<uint32_t>(__ldg(p)) << 8 * (p - at);
  }
};

// Loads `count` words, WORDS at most, at any address, from aligned words and, at the end of the rows, `last`.
template <int WORDS>
__device__ __forceinline__ void load_unaligned_words(const uint8_t* p, uint32_t offset, int count, uint32_t* word,
                                                     const LastWord& last) {
  const uint8_t* begin = p + offset;
  const unsigned shift = reinterpret_cast<uintptr_t>(begin) % 4;
  const uint8_t* base = begin - shift;
  const auto load = [&](int i) {
    return base + 4 * i < last.at ? __ldg(reinterpret_cast<const uint32_t*>(base) + i) : last.bytes;
  };
  uint32_t low = load(0);
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    if (i >= count) break;
    const uint32_t high = load(i + 1);
    word[i] = __funnelshift_r(low, high, 8 * shift);
    low = high;
  }
}

// In place of a width: codes of any width, or none, in rows at any address.
constexpr int kAnyRows = -1;

// The keys of a block: rows 0 to count - 1 from these addresses. BITS: of a code; 0: there are none.
template <int BITS, bool SKETCH>
struct Keys {
  static constexpr bool kAligned = BITS != kAnyRows;
  static constexpr int kWords = BITS > 0 ? BITS : kAligned ? 1 : 8;
  const uint8_t *codes, *bits;
  const __half* scales;
  const float* norms;
  int bits_of_code, count, row_bytes, sketch_bytes, quarters, sketch_quarters;
  LastWord last_code, last_bit;

  __device__ Keys(const ScoreArguments& a, int64_t first, int n)
      : codes(a.packed + first * a.row_bytes), bits(a.sign_bits + first * a.sketch_bytes), scales(a.scale + first),
        norms(a.norm + first), bits_of_code(kAligned ? BITS : a.bits), count(n), row_bytes(a.row_bytes),
        sketch_bytes(a.sketch_bytes), quarters((a.d + kQuarter - 1) / kQuarter),
        sketch_quarters((a.m + kQuarter - 1) / kQuarter) {
    if constexpr (!kAligned) {
      last_code = LastWord(codes + static_cast<uint32_t>(count * row_bytes));
      last_bit = LastWord(bits + static_cast<uint32_t>(count * sketch_bytes));
    }
  }

  // Prefetches to L2 the keys of the next three iterations, which the block reads as soon as its queries are prepared.
  __device__ __forceinline__ void prefetch() const {
    const int64_t begin = kBlockKeys, end = min(count, 4 * kBlockKeys);
    if (bits_of_code > 0) prefetch_lines(codes + begin * row_bytes, codes + end * row_bytes);
    if constexpr (SKETCH) prefetch_lines(bits + begin * sketch_bytes, bits + end * sketch_bytes);
  }
  static __device__ __forceinline__ void prefetch_lines(const uint8_t* begin, const uint8_t* end) {
#pragma unroll 1
    for (const uint8_t* p = begin + 128 * threadIdx.x; p < end; p += 128 * kThreads) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
    }
  }

  // A lane's part of 32 keys: parts of four keys, and the constants of the two keys whose scores the lane writes.
  struct Part {
    uint32_t code[4][kWords], bit[4];
    __half scale[2];
    float norm[2];
  };

  template <int WORDS>
  static __device__ __forceinline__ void load_part(const uint8_t* rows, uint32_t offset, int count, uint32_t* word,
                                                   const LastWord& last) {
    if constexpr (kAligned) {
      load_aligned_words<WORDS>(rows, offset, word);
    } else {
      load_unaligned_words<WORDS>(rows, offset, count, word, last);
    }
  }

  // Loads a section of the keys from `key` on; beyond the last key, that one. A lane beyond the end of a row keeps its
  // words, which are multiplied by zeros.
  __device__ __forceinline__ void load(int key, int section, int g, int t, Part& part) const {
    const int quarter = 4 * section + t;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t row = min(key + 8 * r + g, count - 1);
      if (bits_of_code > 0 && quarter < quarters) {
        load_part<kWords>(codes, row * row_bytes + quarter * (4 * bits_of_code), bits_of_code, part.code[r], last_code);
      }
      if constexpr (SKETCH) {
        if (quarter < sketch_quarters) load_part<1>(bits, row * sketch_bytes + quarter * 4, 1, part.bit + r, last_bit);
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t row = min(key + 8 * (2 * k + t % 2) + g, count - 1);
      if (bits_of_code > 0) part.scale[k] = __ldg(scales + row);
      if constexpr (SKETCH) part.norm[k] = sketch_quarters ? __ldg(norms + row) : 0;
    }
  }
};

// Joins two of a coordinate's four bytes. Lanes with even t hold the lower two, the others the upper two.
__device__ __forceinline__ float two_bytes(int low, int high) { return static_cast<float>(high * 256 + low); }

// Adds a section of four keys, expanded to levels, to `part`: one product of a pair of queries for each of them.
// column: of each pair, [sections][4][queries][4 t][4 bytes]
template <typename Codes, int PAIRS, int WORDS>
__device__ __forceinline__ void add_codes(const Codes& expansion, const uint32_t (&code)[4][WORDS], int section,
                                          int queries, const uint2* const (&column)[PAIRS], float (&part)[PAIRS][4]) {
  int plus[PAIRS][2][4] = {}, minus[PAIRS][2][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t p[4][2], n[4][2];
#pragma unroll
    for (int r = 0; r < 4; ++r) expansion.levels(code[r], i, p[r], n[r]);
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      const uint2 b = column[pair][(section * 4 + i) * queries * 16];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        add_levels<Codes::kUnsigned>(plus[pair][h], p, h, b);
        if constexpr (Codes::kSigned) add_levels<Codes::kUnsigned>(minus[pair][h], n, h, b);
      }
    }
  }
#pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int *x = plus[pair][r / 2] + r % 2 * 2, *y = minus[pair][r / 2] + r % 2 * 2;
      part[pair][r] += two_bytes(Codes::kTimes * x[0] - y[0], Codes::kTimes * x[1] - y[1]);
    }
  }
}

// The same for codes of `bits` bits, which are the first words of `code`. table: of any grid; 5-bit codes of the
// uniform grid are looked up like others.
template <int PAIRS>
__device__ __forceinline__ void add_any_codes(int bits, const int8_t* table, const uint32_t (&code)[4][8], int section,
                                              int queries, const uint2* const (&column)[PAIRS],
                                              float (&part)[PAIRS][4]) {
  const auto add = [&]<int BITS>() {
    uint32_t first[4][BITS];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int i = 0; i < BITS; ++i) first[r][i] = code[r][i];
    }
    add_codes(Expansion<BITS>(table), first, section, queries, column, part);
  };
  switch (format::as_width(bits)) {
    case format::Width::k1: return add.template operator()<1>();
    case format::Width::k2: return add.template operator()<2>();
    case format::Width::k3: return add.template operator()<3>();
    case format::Width::k4: return add.template operator()<4>();
    case format::Width::k5: return add.template operator()<5>();
    case format::Width::k8: return add.template operator()<8>();
  }
}

// The sums over all four bytes for the two keys that this lane writes, from two neighbouring lanes' sums of four keys.
__device__ __forceinline__ void join_bytes(const float (&part)[4], int t, float (&sum)[2]) {
  const bool odd = t % 2;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float mine = odd ? part[2 * k + 1] : part[2 * k];
    const float theirs = __shfl_xor_sync(0xffffffff, odd ? part[2 * k] : part[2 * k + 1], 1);
    sum[k] = __fmaf_rn(odd ? mine : theirs, 65536.0f, odd ? theirs : mine);
  }
}

template <int BITS, bool UNIFORM, bool SKETCH, int PAIRS>
__global__ void __launch_bounds__(kThreads, BITS != kAnyRows ? kBlocksPerMultiprocessor : 1)
    score_kernel(const __grid_constant__ ScoreArguments a) {
  extern __shared__ uint4 shared[];
  __shared__ float constants[4 * kMaxQueries];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  const int64_t rest = blockIdx.x / a.key_blocks, batch = rest / a.query_blocks;
  const int first_query = static_cast<int>(rest % a.query_blocks) * (2 * PAIRS);
  const int queries = min(2 * PAIRS, a.queries - first_query);
  const int64_t first_key = int64_t{blockIdx.x % a.key_blocks} * a.span;
  const Keys<BITS, SKETCH> keys(a, batch * a.keys + first_key,
                                static_cast<int>(min(int64_t{a.span}, a.keys - first_key)));
  const int sections = max(a.sections, a.sketch_sections);

  // The loads of the first keys are in flight while the queries are prepared.
  typename Keys<BITS, SKETCH>::Part first{}, second{};
  int key = warp * kTileKeys, section = 0;
  if (key < keys.count) keys.load(key, 0, g, t, first);
  keys.prefetch();

  const Layout layout(a, queries);
  uint32_t* words = reinterpret_cast<uint32_t*>(shared);
  int8_t* table = reinterpret_cast<int8_t*>(words);
  words += kTableBytes / 4;
  const Side codes{words, reinterpret_cast<float*>(words) + layout.code_columns + layout.sketch_columns, constants,
                   constants + kMaxQueries};
  const Side sketch{words + layout.code_columns, codes.work + layout.code_work, constants + 2 * kMaxQueries,
                    constants + 3 * kMaxQueries};
  const bool has_codes = keys.bits_of_code > 0;
  using Codes = Expansion<BITS == kAnyRows ? 0 : BITS, UNIFORM>;  // of any rows: see add_any_codes
  const bool has_table =
      BITS == kAnyRows ? has_codes && !format::levels_are_codes(format::as_width(a.bits)) : Codes::kHasTable;
  if (has_table) fill_level_table(table, format::as_width(keys.bits_of_code), a.levels);
  prepare_queries<SKETCH>(a, keys.bits_of_code, UNIFORM, batch * a.queries + first_query, queries, codes, sketch);
  __syncthreads();
  const Codes expansion(table);

  // In a product this lane holds the column of byte g % 4 of query g / 4 of a pair (a missing query repeats the last
  // one), and it writes the scores of query t / 2.
  const uint2 *code_column[PAIRS], *sketch_column[PAIRS];
  float code_unit[PAIRS], shift[PAIRS], sketch_unit[PAIRS], minus_total[PAIRS];
  float* out[PAIRS];
#pragma unroll
  for (int p = 0; p < PAIRS; ++p) {
    const int column = min(2 * p + g / 4, queries - 1) * 16 + t * 4 + g % 4, query = min(2 * p + t / 2, queries - 1);
    code_column[p] = reinterpret_cast<const uint2*>(codes.columns) + column;
    sketch_column[p] = reinterpret_cast<const uint2*>(sketch.columns) + column;
    code_unit[p] = codes.unit[query], shift[p] = codes.total[query];
    sketch_unit[p] = sketch.unit[query], minus_total[p] = -sketch.total[query];
    const int64_t row = batch * a.queries + first_query + 2 * p + t / 2;
    out[p] = 2 * p + t / 2 < queries ? a.out + row * a.keys + first_key : nullptr;
  }

  float code_part[PAIRS][4] = {}, sketch_part[PAIRS][4] = {};
  // One section of 32 keys: issues the loads of the next one, sums this one, and writes the scores after the last one.
  // Returns whether another one follows.
  const auto advance = [&](const auto& now, auto& next) {
    const bool last = section + 1 == sections;
    const int next_key = last ? key + kBlockKeys : key, next_section = last ? 0 : section + 1;
    if (next_key < keys.count) keys.load(next_key, next_section, g, t, next);

    if (has_codes && (!SKETCH || section < a.sections)) {
      if constexpr (BITS == kAnyRows) {
        add_any_codes(a.bits, table, now.code, section, queries, code_column, code_part);
      } else if constexpr (BITS > 0) {
        add_codes(expansion, now.code, section, queries, code_column, code_part);
      }
    }
    if constexpr (SKETCH) {
      if (section < a.sketch_sections) {
        int sums[2][PAIRS][2][4] = {};  // over bits 0-3 and 4-7 of every byte
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t even = 0x01010101u << 2 * i, odd = 0x02020202u << 2 * i;
#pragma unroll
          for (int pair = 0; pair < PAIRS; ++pair) {
            const uint2 b = sketch_column[pair][(section * 4 + i) * queries * 16];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const uint32_t x = now.bit[2 * h], y = now.bit[2 * h + 1];
              mma_bytes<true>(sums[i / 2][pair][h], {x & even, y & even, x & odd, y & odd}, b);
            }
          }
        }
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const int *x = sums[0][pair][r / 2] + r % 2 * 2, *y = sums[1][pair][r / 2] + r % 2 * 2;
            sketch_part[pair][r] += two_bytes(16 * x[0] + y[0], 16 * x[1] + y[1]);
          }
        }
      }
    }

    if (last) {
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        [[maybe_unused]] float code_sum[2], sketch_sum[2];
        if (has_codes) join_bytes(code_part[pair], t, code_sum);
        if constexpr (SKETCH) join_bytes(sketch_part[pair], t, sketch_sum);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float score = 0;
          if (has_codes) {
            constexpr float unit = kCodeUnit<Codes>;
            score = __fmaf_rn(code_sum[k] * unit * code_unit[pair], __half2float(now.scale[k]), shift[pair]);
          }
          if constexpr (SKETCH) {
            // The sum of +-q is twice the sum over bits that are 1, less the sum over all.
            constexpr float unit = 2.0f / 128 / (1 << kPointBits);
            const float sum = __fmaf_rn(sketch_sum[k] * unit, sketch_unit[pair], minus_total[pair]);
            const float estimate = a.factor * now.norm[k] * sum;
            score = BITS != kAnyRows || a.sketch_sections ? score + estimate : score;
          }
          const int row = key + 8 * (2 * k + t % 2) + g;
          if (out[pair] && row < keys.count) out[pair][row] = score;
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) code_part[pair][r] = sketch_part[pair][r] = 0;
      }
    }
    key = next_key, section = next_section;
    return key < keys.count;
  };
  if (key >= keys.count) return;
  while (advance(first, second) && advance(second, first)) {
  }
}

}  // namespace turboquant::cuda::scores
