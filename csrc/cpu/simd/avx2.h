// The verbs for AVX2 with FMA, F16C and BMI2: a vector is two registers. Included by cpu/simd.h only.
//
// simd/avx512.h says what each verb does; comments here say only how AVX2 gets there.
#pragma once

#include <immintrin.h>

namespace turboquant::cpu::TURBOQUANT_LEVEL {

constexpr int kUnroll = 16, kSums = 6;

struct Floats {
  __m256 a, b;
};
struct Ints {
  __m256i a, b;
};
struct Shorts {
  __m256i a, b;
};
struct Bytes {
  __m256i a, b;
};
struct Mask {
  __m256i a, b;
};

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store256(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

inline Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Ints broadcast(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Bytes broadcast(uint8_t x) {
  return {_mm256_set1_epi8(static_cast<char>(x)), _mm256_set1_epi8(static_cast<char>(x))};
}

inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Ints load(const int32_t* p) { return {load256(p), load256(p + 8)}; }
inline Shorts load(const int16_t* p) { return {load256(p), load256(p + 16)}; }
inline Bytes load(const uint8_t* p) { return {load256(p), load256(p + 32)}; }
template <int BYTES>
inline Ints load_integers(const uint8_t* p) {
  if constexpr (BYTES == 2) return {_mm256_cvtepu16_epi32(load128(p)), _mm256_cvtepu16_epi32(load128(p + 16))};
  if constexpr (BYTES == 1) {
    const __m128i bytes = load128(p);
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
  }
}
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline void store(int32_t* p, Ints x) { store256(p, x.a), store256(p + 8, x.b); }
inline void store(int16_t* p, Shorts x) { store256(p, x.a), store256(p + 16, x.b); }
inline void store(uint8_t* p, Bytes x) { store256(p, x.a), store256(p + 32, x.b); }

inline Floats load_float(const float* p) { return load(p); }
inline Floats load_float(const Half* p) { return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))}; }
inline Floats load_float(const BFloat16* p) {
  const auto eight = [](const BFloat16* q) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(q)), 16));
  };
  return {eight(p), eight(p + 8)};
}
inline Floats load_float(const int8_t* p) {
  const __m128i bytes = load128(p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t float_to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline void store_float(float* p, Floats x) { store(p, x); }
inline void store_float(Half* p, Floats x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, kNearest));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, kNearest));
}
inline void store_float(BFloat16* p, Floats x) {
  const auto rounded = [](__m256 f) {
    const __m256i bits = _mm256_castps_si256(f);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(f, f, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), _mm256_set1_epi32(0x7fc0), nan);
  };
  store256(p, _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded(x.a), rounded(x.b)), 0xD8));
}

inline Floats operator+(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats operator-(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats operator*(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats operator/(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Floats max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Floats min(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Ints max(Ints x, Ints y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline Floats abs(Floats x) {
  const __m256 keep = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, keep), _mm256_and_ps(x.b, keep)};
}
inline Floats add_product(Floats sum, Floats x, Floats y) {
  return {_mm256_fmadd_ps(x.a, y.a, sum.a), _mm256_fmadd_ps(x.b, y.b, sum.b)};
}
inline Ints operator+(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline Ints operator-(Ints x, Ints y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
template <int N>
inline Ints shift_left(Ints x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
inline Ints shift_right(Ints x) {
  return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)};
}
inline Ints operator&(Ints x, Ints y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline Bytes operator&(Bytes x, Bytes y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline Bytes operator|(Bytes x, Bytes y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline Bytes operator^(Bytes x, Bytes y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }

template <int OP>
inline Mask compare(Floats x, Floats y) {
  return {_mm256_castps_si256(_mm256_cmp_ps(x.a, y.a, OP)), _mm256_castps_si256(_mm256_cmp_ps(x.b, y.b, OP))};
}
inline Mask operator<(Floats x, Floats y) { return compare<_CMP_LT_OQ>(x, y); }
inline Mask operator<=(Floats x, Floats y) { return compare<_CMP_LE_OQ>(x, y); }
inline Mask is_nan(Floats x) { return compare<_CMP_UNORD_Q>(x, x); }
inline Mask operator<(Ints x, Ints y) { return {_mm256_cmpgt_epi32(y.a, x.a), _mm256_cmpgt_epi32(y.b, x.b)}; }
inline Mask operator&(Mask x, Mask y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline Mask operator|(Mask x, Mask y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline uint16_t mask_bits(Mask m) {
  const int low = _mm256_movemask_ps(_mm256_castsi256_ps(m.a)), high = _mm256_movemask_ps(_mm256_castsi256_ps(m.b));
  return static_cast<uint16_t>(low | high << 8);
}
inline bool any(Mask m) { return _mm256_movemask_epi8(_mm256_or_si256(m.a, m.b)) != 0; }
inline bool all(Mask m) { return _mm256_movemask_epi8(_mm256_and_si256(m.a, m.b)) == -1; }
inline Floats select(Mask m, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_castsi256_ps(m.a)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_castsi256_ps(m.b))};
}
inline Ints select(Mask m, Ints yes, Ints no) {
  return {_mm256_blendv_epi8(no.a, yes.a, m.a), _mm256_blendv_epi8(no.b, yes.b, m.b)};
}

inline Ints round_to_ints(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline Ints truncate_to_ints(Floats x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Floats as_floats(Ints x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline Ints as_ints(Floats x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }

template <int H>
inline Floats swap_lanes(Floats x) {
  if constexpr (H == 1) return {_mm256_permute_ps(x.a, 0xB1), _mm256_permute_ps(x.b, 0xB1)};
  if constexpr (H == 2) return {_mm256_permute_ps(x.a, 0x4E), _mm256_permute_ps(x.b, 0x4E)};
  if constexpr (H == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
  if constexpr (H == 8) return {x.b, x.a};
}
template <int H>
inline Floats butterfly(Floats x) {
  if constexpr (H == 8) return {_mm256_add_ps(x.a, x.b), _mm256_sub_ps(x.a, x.b)};
  constexpr int upper = H == 1 ? 0xAA : H == 2 ? 0xCC : 0xF0;
  const __m256 sign = _mm256_blend_ps(_mm256_set1_ps(1), _mm256_set1_ps(-1), upper);
  const Floats other = swap_lanes<H>(x);
  return {_mm256_fmadd_ps(x.a, sign, other.a), _mm256_fmadd_ps(x.b, sign, other.b)};
}

inline __m256 pair_sums(__m256 low, __m256 high) {
  const __m256 sums = _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xDD));
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sums), 0xD8));
}
inline __m256i pair_sums(__m256i low, __m256i high) {
  const __m256 l = _mm256_castsi256_ps(low), h = _mm256_castsi256_ps(high);
  const __m256i even = _mm256_castps_si256(_mm256_shuffle_ps(l, h, 0x88));
  const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(l, h, 0xDD));
  return _mm256_permute4x64_epi64(_mm256_add_epi32(even, odd), 0xD8);
}
inline __m256i sum_quads(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const __m256i cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}
inline void interleave_pairs(Floats x, Floats y, Floats& first, Floats& second) {
  const auto both = [](__m256 a, __m256 b) -> Floats {
    const __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
    const __m256d even = _mm256_unpacklo_pd(x, y), odd = _mm256_unpackhi_pd(x, y);
    return {_mm256_castpd_ps(_mm256_permute2f128_pd(even, odd, 0x20)),
            _mm256_castpd_ps(_mm256_permute2f128_pd(even, odd, 0x31))};
  };
  first = both(x.a, y.a), second = both(x.b, y.b);
}

ALWAYS_INLINE Ints sum_quads(const Ints& w, const Ints& x, const Ints& y, const Ints& z) {
  return {sum_quads(w.a, x.a, y.a, z.a), sum_quads(w.b, x.b, y.b, z.b)};
}
inline Ints pair_sums(Ints x, Ints y) { return {pair_sums(x.a, x.b), pair_sums(y.a, y.b)}; }
inline Floats pair_sums(Floats x, Floats y) { return {pair_sums(x.a, x.b), pair_sums(y.a, y.b)}; }

struct Table16 {
  __m256i v;
};
inline Table16 table16(const uint8_t* p) { return {_mm256_broadcastsi128_si256(load128(p))}; }
inline Bytes lookup(const Table16& t, Bytes index) {
  return {_mm256_shuffle_epi8(t.v, index.a), _mm256_shuffle_epi8(t.v, index.b)};
}
struct Table32 {
  __m256i low, high;
};
inline Table32 table32(const uint8_t* p) {
  return {_mm256_broadcastsi128_si256(load128(p)), _mm256_broadcastsi128_si256(load128(p + 16))};
}
inline Bytes lookup(const Table32& t, Bytes index) {
  const auto half = [&](__m256i i) {  // bit 4 of the index, moved to bit 7, chooses the table
    return _mm256_blendv_epi8(_mm256_shuffle_epi8(t.low, _mm256_and_si256(i, _mm256_set1_epi8(15))),
                              _mm256_shuffle_epi8(t.high, _mm256_and_si256(i, _mm256_set1_epi8(15))),
                              _mm256_slli_epi16(i, 3));
  };
  return {half(index.a), half(index.b)};
}

struct Table128 {
  uint8_t v[128];
};
inline Table128 table128(const uint8_t* p) {
  Table128 t;
  memcpy(t.v, p, sizeof t.v);
  return t;
}
inline Bytes lookup(const Table128& t, Bytes index) {
  uint8_t at[64], found[64];
  store(at, index);
  for (int i = 0; i < 64; ++i) found[i] = t.v[at[i]];
  return load(found);
}

template <int SHIFT>
inline Bytes field(Bytes x, Bytes mask) {
  if constexpr (SHIFT == 0) return x & mask;
  return Bytes{_mm256_srli_epi16(x.a, SHIFT), _mm256_srli_epi16(x.b, SHIFT)} & mask;
}

ALWAYS_INLINE Bytes load_quarters(const uint8_t* p, int64_t stride) {
  return {_mm256_inserti128_si256(_mm256_castsi128_si256(load128(p)), load128(p + stride), 1),
          _mm256_inserti128_si256(_mm256_castsi128_si256(load128(p + 2 * stride)), load128(p + 3 * stride), 1)};
}
ALWAYS_INLINE void load_quarters(const uint8_t* p, int64_t stride, Bytes (&x)[4]) {
  for (int i = 0; i < 4; ++i) x[i] = load_quarters(p + 16 * i, stride);
}
ALWAYS_INLINE Bytes repeat_sixteen(const uint8_t* p) {
  const __m256i x = _mm256_broadcastsi128_si256(load128(p));
  return {x, x};
}
inline Ints as_words(Bytes x) { return {x.a, x.b}; }
inline Bytes interleave_quarters(Bytes x) {
  const __m128i q0 = _mm256_castsi256_si128(x.a), q1 = _mm256_extracti128_si256(x.a, 1);
  const __m128i q2 = _mm256_castsi256_si128(x.b), q3 = _mm256_extracti128_si256(x.b, 1);
  const auto four = [](__m128i first, __m128i second) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi16(first, second)),
                                   _mm_unpackhi_epi16(first, second), 1);
  };
  return {four(_mm_unpacklo_epi8(q0, q1), _mm_unpacklo_epi8(q2, q3)),
          four(_mm_unpackhi_epi8(q0, q1), _mm_unpackhi_epi8(q2, q3))};
}
ALWAYS_INLINE Bytes load_words(const uint8_t* p, int64_t stride) {
  const auto two = [&](const uint8_t* q) {
    int32_t first, second;
    memcpy(&first, q, 4), memcpy(&second, q + stride, 4);
    return _mm256_inserti128_si256(_mm256_set1_epi32(first), _mm_set1_epi32(second), 1);
  };
  return {two(p), two(p + 2 * stride)};
}

template <int FIELD>
ALWAYS_INLINE Bytes plane_bits(Bytes x) {
  const __m256i bit = _mm256_slli_epi32(_mm256_setr_epi32(0x01010101, 0x04040404, 0x10101010, 0x40404040, 0x01010101,
                                                          0x04040404, 0x10101010, 0x40404040),
                                        FIELD);
  const auto sixteen = [&](__m256i v) {
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(v, bit), bit), _mm256_set1_epi8(16));
  };
  return {sixteen(x.a), sixteen(x.b)};
}

inline __m256i fourth_word(__m256i first, __m256i second, __m256i third) {
  const __m256i a = _mm256_and_si256(_mm256_srli_epi32(first, 3), _mm256_set1_epi32(0x11111111));
  const __m256i b = _mm256_and_si256(_mm256_srli_epi32(second, 2), _mm256_set1_epi32(0x22222222));
  const __m256i c = _mm256_and_si256(_mm256_srli_epi32(third, 1), _mm256_set1_epi32(0x44444444));
  return _mm256_or_si256(_mm256_or_si256(a, b), c);
}
inline void gather_three_bits(__m256i& a, __m256i& b, __m256i& c, __m256i& d) {
  const __m256i low = _mm256_unpacklo_epi32(a, b), high = _mm256_unpackhi_epi32(a, b);
  const __m256i low2 = _mm256_unpacklo_epi32(c, d), high2 = _mm256_unpackhi_epi32(c, d);
  a = _mm256_unpacklo_epi64(low, low2);
  b = _mm256_unpackhi_epi64(low, low2);
  c = _mm256_unpacklo_epi64(high, high2);
  d = fourth_word(a, b, c);
}
ALWAYS_INLINE void gather_three_bits(Bytes (&x)[4]) {
  gather_three_bits(x[0].a, x[1].a, x[2].a, x[3].a);
  gather_three_bits(x[0].b, x[1].b, x[2].b, x[3].b);
}
ALWAYS_INLINE Bytes append_three_bits(Bytes x) {
  const auto half = [](__m256i v) {
    const __m256i last =
        fourth_word(_mm256_shuffle_epi32(v, 0x00), _mm256_shuffle_epi32(v, 0x55), _mm256_shuffle_epi32(v, 0xAA));
    return _mm256_blend_epi32(v, last, 0x88);
  };
  return {half(x.a), half(x.b)};
}

template <int BITS>
struct CodeTable {
  Table16 v;  // the table, repeated
};
template <>
struct CodeTable<5> {
  Table32 v;
};
template <>
struct CodeTable<1> {
  __m256i zero, one;
};
template <int BITS>
inline CodeTable<BITS> code_table(const uint8_t* p) {
  uint8_t bytes[16];
  for (int i = 0; i < 16; ++i) bytes[i] = p[i % (1 << BITS)];
  return {table16(bytes)};
}
template <>
inline CodeTable<5> code_table<5>(const uint8_t* p) {
  return {table32(p)};
}
template <>
inline CodeTable<1> code_table<1>(const uint8_t* p) {
  return {_mm256_set1_epi8(static_cast<char>(p[0])), _mm256_set1_epi8(static_cast<char>(p[1]))};
}
template <int BITS, int FIRST>
ALWAYS_INLINE Bytes lookup_string(const CodeTable<BITS>& t, const Bytes& x) {
  if constexpr (format::as_width(BITS) == format::Width::k1) {
    uint8_t from[16], bit[16];
    for (int i = 0; i < 16; ++i)
      from[i] = static_cast<uint8_t>((FIRST + i) / 8), bit[i] = static_cast<uint8_t>(1 << i % 8);
    const __m256i f = table16(from).v, b = table16(bit).v;
    const auto half = [&](__m256i v) {
      const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(v, f), b), b);
      return _mm256_blendv_epi8(t.zero, t.one, set);
    };
    return {half(x.a), half(x.b)};
  } else {
    // Two codes lie within two bytes. These go to a word, a multiplication moves the codes to its top, and shifts bring
    // one code to the low bits of each byte.
    uint8_t from[16];
    int16_t up[8];
    for (int w = 0; w < 8; ++w) {
      const int bit = (FIRST + 2 * w) * BITS;
      from[2 * w] = static_cast<uint8_t>(bit / 8);
      from[2 * w + 1] = static_cast<uint8_t>(bit / 8 + 1);
      up[w] = static_cast<int16_t>(1 << (16 - 2 * BITS - bit % 8));
    }
    const __m256i f = table16(from).v, u = _mm256_broadcastsi128_si256(load128(up));
    const auto half = [&](__m256i v) {
      const __m256i y = _mm256_mullo_epi16(_mm256_shuffle_epi8(v, f), u);
      __m256i even = _mm256_srli_epi16(y, 16 - 2 * BITS);
      // The table of narrower codes is repeated, so that their upper bits do not matter.
      if constexpr (!format::fits_nibble(format::as_width(BITS))) even = _mm256_and_si256(even, _mm256_set1_epi16(31));
      return _mm256_or_si256(even, _mm256_and_si256(_mm256_srli_epi16(y, 8 - BITS), _mm256_set1_epi16(-256)));
    };
    return lookup(t.v, Bytes{half(x.a), half(x.b)});
  }
}

inline Shorts narrow(Ints x, Ints y) {
  const auto sixteen = [](Ints z) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(z.a, z.b), 0xD8); };
  return {sixteen(x), sixteen(y)};
}
inline Shorts keep_first(Shorts x, int n) {
  const __m256i count = _mm256_set1_epi16(static_cast<int16_t>(n));
  const __m256i lane = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm256_and_si256(x.a, _mm256_cmpgt_epi16(count, lane)),
          _mm256_and_si256(x.b, _mm256_cmpgt_epi16(count, _mm256_add_epi16(lane, _mm256_set1_epi16(16))))};
}
inline void store_bytes(uint8_t* p, Shorts x) {
  const __m256i low = _mm256_set1_epi16(255);
  const __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  store256(p, _mm256_permute4x64_epi64(bytes, 0xD8));
}
inline Ints multiply_add(Ints sum, Shorts x, Shorts y) {
  return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, y.b))};
}

// Byte shuffles look up rows of the tree of up to 8 boundaries. The row of 16 boundaries takes two of them.
template <int BITS>
struct Boundaries {
  __m256i row[BITS], last;
  explicit Boundaries(const int16_t* tree) {
    row[0] = _mm256_set1_epi16(tree[1]);
    for (int k = 1; k < BITS; ++k) row[k] = _mm256_broadcastsi128_si256(load128(tree + (1 << k)));
    last = _mm256_broadcastsi128_si256(load128(tree + 24));
  }
};
template <int BITS>
inline Shorts count_boundaries(const Boundaries<BITS>& b, Shorts u) {
  const auto sixteen = [&](__m256i x) {
    // The bytes of word `rank` are 2 rank and 2 rank + 1: the index is 0x202 rank + 0x100.
    const __m256i below = _mm256_cmpgt_epi16(b.row[0], x);
    __m256i index = _mm256_add_epi16(_mm256_set1_epi16(0x302), _mm256_and_si256(below, _mm256_set1_epi16(-0x202)));
    for (int k = 1; k < BITS; ++k) {
      __m256i boundary = _mm256_shuffle_epi8(b.row[k], index);
      if (k == 4) boundary = _mm256_blendv_epi8(_mm256_shuffle_epi8(b.last, index), boundary, below);
      const __m256i still = _mm256_and_si256(_mm256_cmpgt_epi16(boundary, x), _mm256_set1_epi16(-0x202));
      index = _mm256_add_epi16(_mm256_add_epi16(index, index), _mm256_add_epi16(still, _mm256_set1_epi16(0x102)));
    }
    return _mm256_and_si256(_mm256_srli_epi16(index, 1), _mm256_set1_epi16(127));
  };
  return {sixteen(u.a), sixteen(u.b)};
}

struct LevelTable {
  __m256i low, high;
};
inline LevelTable level_table(const int8_t* p) {
  return {_mm256_broadcastsi128_si256(load128(p)), _mm256_broadcastsi128_si256(load128(p + 16))};
}
inline Shorts lookup(const LevelTable& t, Shorts index) {
  const auto sixteen = [&](__m256i i) {  // the level arrives in the upper byte; bit 4 of the index chooses the table
    const __m256i upper = _mm256_slli_epi16(i, 8);
    const __m256i level = _mm256_blendv_epi8(_mm256_shuffle_epi8(t.low, upper), _mm256_shuffle_epi8(t.high, upper),
                                             _mm256_slli_epi16(i, 11));
    return _mm256_srai_epi16(level, 8);
  };
  return {sixteen(index.a), sixteen(index.b)};
}

// Packing joins codes two by two in words of 16, 32 and 64 bits; unpacking splits them in the other order.
struct BitLayout {
  __m256i pair, quad, gather, spread;
  explicit BitLayout(int bits) {
    alignas(16) uint8_t to[16], from[16];
    for (int i = 0; i < 16; ++i) {
      to[i] = static_cast<uint8_t>(i < 2 * bits ? i / bits * 8 + i % bits : 0x80);
      from[i] = static_cast<uint8_t>(i % 8 < bits ? i / 8 * bits + i % 8 : 0x80);
    }
    pair = _mm256_set1_epi16(static_cast<int16_t>(1 | 1 << (8 + bits)));
    quad = _mm256_set1_epi32(static_cast<int32_t>(1 | int64_t{1} << (16 + 2 * bits)));
    gather = _mm256_broadcastsi128_si256(load128(to)), spread = _mm256_broadcastsi128_si256(load128(from));
  }
};
inline void store_packed(uint8_t* p, const BitLayout& l, int bits, Bytes codes) {
  const __m128i move = _mm_cvtsi32_si128(32 - 4 * bits);
  const auto half = [&](uint8_t* to, __m256i x) {
    const __m256i quads = _mm256_madd_epi16(_mm256_maddubs_epi16(l.pair, x), l.quad);
    const __m256i none = _mm256_setzero_si256();
    const __m256i low = _mm256_blend_epi32(quads, none, 0xAA), high = _mm256_blend_epi32(none, quads, 0xAA);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_or_si256(low, _mm256_srl_epi64(high, move)), l.gather);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(bytes));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * bits), _mm256_extracti128_si256(bytes, 1));
  };
  half(p, codes.a);
  half(p + 4 * bits, codes.b);
}
inline Bytes load_packed(const uint8_t* p, const BitLayout& l, int bits) {
  const auto half = [&](const uint8_t* from) {
    const __m256i raw = _mm256_inserti128_si256(_mm256_castsi128_si256(load128(from)), load128(from + 2 * bits), 1);
    __m256i x = _mm256_shuffle_epi8(raw, l.spread);
    const auto split = [&](int width, __m256i low) {  // words of 2 * width bits: the upper half of the codes moves up
      const __m256i upper = _mm256_sll_epi64(_mm256_andnot_si256(low, x), _mm_cvtsi32_si128(width - width / 8 * bits));
      x = _mm256_or_si256(_mm256_and_si256(x, low), upper);
    };
    split(32, _mm256_set1_epi64x((int64_t{1} << 4 * bits) - 1));
    split(16, _mm256_set1_epi32((1 << 2 * bits) - 1));
    split(8, _mm256_set1_epi16(static_cast<int16_t>((1 << bits) - 1)));
    return x;
  };
  return {half(p), half(p + 4 * bits)};
}

// Levels become 16-bit integers, even and odd bytes apart, and meet 16-bit factors in the same order, so they need no
// bias.
constexpr int kLevelBias = 0;

struct Levels {
  __m256i even_a, odd_a, even_b, odd_b;
};
struct Factors {
  __m256i even_a, odd_a, even_b, odd_b;
};
struct Products {
  __m256i a, b;
};
ALWAYS_INLINE Levels widen(Bytes x) {
  const auto even = [](__m256i v) { return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8); };
  const auto odd = [](__m256i v) { return _mm256_srai_epi16(v, 8); };
  return {even(x.a), odd(x.a), even(x.b), odd(x.b)};
}
inline Products no_products() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
ALWAYS_INLINE void multiply_add(Products& sum, const Levels& l, const Factors& f) {
  const auto both = [](__m256i s, __m256i le, __m256i fe, __m256i lo, __m256i fo) {
    return _mm256_add_epi32(_mm256_add_epi32(s, _mm256_madd_epi16(le, fe)), _mm256_madd_epi16(lo, fo));
  };
  sum.a = both(sum.a, l.even_a, f.even_a, l.odd_a, f.odd_a);
  sum.b = both(sum.b, l.even_b, f.even_b, l.odd_b, f.odd_b);
}
inline Ints total(Products p) { return {p.a, p.b}; }
inline Products starting_from(Ints x) { return {x.a, x.b}; }

// A byte product needs one unsigned operand: the size of a level, whose sign the factor takes. The sum of two products
// fits 16 bits, even of -128.
ALWAYS_INLINE Ints multiply_add(Ints sum, Bytes levels, Bytes factors) {
  const auto half = [](__m256i s, __m256i l, __m256i f) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(l), _mm256_sign_epi8(f, l));
    return _mm256_add_epi32(s, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  };
  return {half(sum.a, levels.a, factors.a), half(sum.b, levels.b, factors.b)};
}

inline void make_factors(Factors* to, const int16_t (&f)[16]) {
  alignas(16) int16_t even[8], odd[8];
  for (int i = 0; i < 8; ++i) even[i] = f[2 * i], odd[i] = f[2 * i + 1];
  const __m256i e = _mm256_broadcastsi128_si256(load128(even)), o = _mm256_broadcastsi128_si256(load128(odd));
  *to = {e, o, e, o};
}

struct TokenFactors {
  __m256i even, odd;  // word q: factors of tokens (2q, 2q + 8) and (2q + 1, 2q + 9); the same in both halves
};
inline TokenFactors token_factors(Ints f) {
  // the low half of each word holds token t < 8, the high half token t + 8
  const __m256i both = _mm256_blend_epi16(f.a, _mm256_slli_epi32(f.b, 16), 0xAA);
  return {_mm256_permutevar8x32_epi32(both, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6)),
          _mm256_permutevar8x32_epi32(both, _mm256_setr_epi32(1, 3, 5, 7, 1, 3, 5, 7))};
}
ALWAYS_INLINE Factors spread(const TokenFactors& f, Ints quads) {
  return {_mm256_permutevar8x32_epi32(f.even, quads.a), _mm256_permutevar8x32_epi32(f.odd, quads.a),
          _mm256_permutevar8x32_epi32(f.even, quads.b), _mm256_permutevar8x32_epi32(f.odd, quads.b)};
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
