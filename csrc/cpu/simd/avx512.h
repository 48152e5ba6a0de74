// The verbs for AVX-512 with BW, DQ, VL, VNNI and VBMI: a vector is one register. Included by cpu/simd.h only.
#pragma once

#include <immintrin.h>

namespace turboquant::cpu::TURBOQUANT_LEVEL {

constexpr int kUnroll = 16;  // of loops over the vectors of a row, which then stay in registers
constexpr int kSums = 12;    // Floats that stay in registers beside the operands of their sums

struct Floats {
  __m512 v;
};
struct Ints {
  __m512i v;
};
struct Shorts {
  __m512i v;
};
struct Bytes {
  __m512i v;
};
struct Mask {
  __mmask16 v;
};

inline Floats broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Ints broadcast(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Bytes broadcast(uint8_t x) { return {_mm512_set1_epi8(static_cast<char>(x))}; }

inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Ints load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline Shorts load(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
// Sixteen integers of BYTES bytes, 1 or 2.
template <int BYTES>
inline Ints load_integers(const uint8_t* p) {
  if constexpr (BYTES == 2) return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  if constexpr (BYTES == 1) return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }
inline void store(int32_t* p, Ints x) { _mm512_storeu_si512(p, x.v); }
inline void store(int16_t* p, Shorts x) { _mm512_storeu_si512(p, x.v); }
inline void store(uint8_t* p, Bytes x) { _mm512_storeu_si512(p, x.v); }

// Loads sixteen elements of a storage type as float32, and stores them with one rounding to nearest even.
inline Floats load_float(const float* p) { return load(p); }
inline Floats load_float(const Half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Floats load_float(const BFloat16* p) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
}
inline Floats load_float(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t float_to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline void store_float(float* p, Floats x) { store(p, x); }
inline void store_float(Half* p, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_float(BFloat16* p, Floats x) {
  const __m512i bits = _mm512_castps_si512(x.v), one = _mm512_set1_epi32(1);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i half = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  const __m512i up = _mm512_mask_add_epi32(half, odd, half, one);
  const __mmask16 number = _mm512_cmp_ps_mask(x.v, x.v, _CMP_ORD_Q);
  const __m512i rounded = _mm512_mask_srli_epi32(_mm512_set1_epi32(0x7fc0), number, up, 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}

inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }  // a > b ? a : b
inline Ints max(Ints a, Ints b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }  // a < b ? a : b
inline Floats abs(Floats a) { return {_mm512_abs_ps(a.v)}; }
inline Floats add_product(Floats sum, Floats a, Floats b) { return {_mm512_fmadd_ps(a.v, b.v, sum.v)}; }
inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
template <int N>
inline Ints shift_left(Ints a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
inline Ints shift_right(Ints a) {  // keeps the sign
  return {_mm512_srai_epi32(a.v, N)};
}
inline Ints operator&(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Bytes operator&(Bytes a, Bytes b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Bytes operator|(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
inline Bytes operator^(Bytes a, Bytes b) { return {_mm512_xor_si512(a.v, b.v)}; }

inline Mask operator<(Floats a, Floats b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline Mask operator<=(Floats a, Floats b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
inline Mask is_nan(Floats a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
inline Mask operator<(Ints a, Ints b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
inline Mask operator&(Mask a, Mask b) { return {static_cast<__mmask16>(a.v & b.v)}; }
inline Mask operator|(Mask a, Mask b) { return {static_cast<__mmask16>(a.v | b.v)}; }
inline uint16_t mask_bits(Mask m) { return m.v; }  // bit i: lane i
inline bool any(Mask m) { return m.v != 0; }
inline bool all(Mask m) { return m.v == 0xFFFF; }
inline Floats select(Mask m, Floats yes, Floats no) { return {_mm512_mask_mov_ps(no.v, m.v, yes.v)}; }
inline Ints select(Mask m, Ints yes, Ints no) { return {_mm512_mask_mov_epi32(no.v, m.v, yes.v)}; }

inline Ints round_to_ints(Floats x) { return {_mm512_cvtps_epi32(x.v)}; }      // nearest, ties to even
inline Ints truncate_to_ints(Floats x) { return {_mm512_cvttps_epi32(x.v)}; }  // towards zero; must fit
inline Floats to_floats(Ints x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline Floats as_floats(Ints x) { return {_mm512_castsi512_ps(x.v)}; }
inline Ints as_ints(Floats x) { return {_mm512_castps_si512(x.v)}; }

// Lane i gets lane i ^ H.
template <int H>
inline Floats swap_lanes(Floats x) {
  if constexpr (H == 1) return {_mm512_permute_ps(x.v, 0xB1)};
  if constexpr (H == 2) return {_mm512_permute_ps(x.v, 0x4E)};
  if constexpr (H == 4) return {_mm512_shuffle_f32x4(x.v, x.v, 0xB1)};
  if constexpr (H == 8) return {_mm512_shuffle_f32x4(x.v, x.v, 0x4E)};
}

// Lane i becomes a + b of the pair (i, i ^ H) where bit H of i is clear, and a - b where it is set. A fused product by
// 1 or -1 gives the sum or the difference itself, rounded once.
template <int H>
inline Floats butterfly(Floats x) {
  constexpr int upper = H == 1 ? 0xAAAA : H == 2 ? 0xCCCC : H == 4 ? 0xF0F0 : 0xFF00;
  const __m512 sign = _mm512_mask_blend_ps(static_cast<__mmask16>(upper), _mm512_set1_ps(1), _mm512_set1_ps(-1));
  return {_mm512_fmadd_ps(x.v, sign, swap_lanes<H>(x).v)};
}

// The eight sums of neighbouring lanes of a, then those of b.
inline Ints pair_sums(Ints a, Ints b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return {_mm512_add_epi32(_mm512_permutex2var_epi32(a.v, even, b.v), _mm512_permutex2var_epi32(a.v, odd, b.v))};
}
inline Floats pair_sums(Floats a, Floats b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return {_mm512_add_ps(_mm512_permutex2var_ps(a.v, even, b.v), _mm512_permutex2var_ps(a.v, odd, b.v))};
}

// Pairs of lanes by turns: a's first, b's first, a's second, and so on, sixteen lanes in each result.
inline void interleave_pairs(Floats a, Floats b, Floats& first, Floats& second) {
  const __m512i low = _mm512_setr_epi32(0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23);
  first = {_mm512_permutex2var_ps(a.v, low, b.v)};
  second = {_mm512_permutex2var_ps(a.v, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b.v)};
}

// Lane 4l + i becomes the sum of lanes 4l .. 4l + 3 of the i-th argument.
ALWAYS_INLINE Ints sum_quads(Ints a, Ints b, Ints c, Ints d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a.v, b.v), _mm512_unpackhi_epi32(a.v, b.v));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c.v, d.v), _mm512_unpackhi_epi32(c.v, d.v));
  return {_mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))};
}
// Loads 16 bytes for each quarter, `stride` apart.
ALWAYS_INLINE Bytes load_quarters(const uint8_t* p, int64_t stride) {
  const auto at = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * stride)); };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(at(0)), at(1), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(at(2)), at(3), 1);
  return {_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)};
}
// Loads four such vectors from neighbouring 16 bytes: x[i] = load_quarters(p + 16 i, stride).
ALWAYS_INLINE void load_quarters(const uint8_t* p, int64_t stride, Bytes (&x)[4]) {
  const __m512i a = load(p).v, b = load(p + stride).v, c = load(p + 2 * stride).v, d = load(p + 3 * stride).v;
  const __m512i ab = _mm512_shuffle_i32x4(a, b, 0x44), cd = _mm512_shuffle_i32x4(c, d, 0x44);
  const __m512i ab2 = _mm512_shuffle_i32x4(a, b, 0xEE), cd2 = _mm512_shuffle_i32x4(c, d, 0xEE);
  x[0] = {_mm512_shuffle_i32x4(ab, cd, 0x88)};
  x[1] = {_mm512_shuffle_i32x4(ab, cd, 0xDD)};
  x[2] = {_mm512_shuffle_i32x4(ab2, cd2, 0x88)};
  x[3] = {_mm512_shuffle_i32x4(ab2, cd2, 0xDD)};
}
// Loads 16 bytes for every quarter.
ALWAYS_INLINE Bytes repeat_sixteen(const uint8_t* p) {
  return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Ints as_words(Bytes x) { return {x.v}; }
// Byte i of all four quarters becomes word i.
inline Bytes interleave_quarters(Bytes x) {
  alignas(64) uint8_t from[64];
  for (int i = 0; i < 64; ++i) from[i] = static_cast<uint8_t>(16 * (i % 4) + i / 4);
  return {_mm512_permutexvar_epi8(_mm512_load_si512(from), x.v)};
}
// Loads 4 bytes for each quarter, `stride` apart, and repeats them four times.
ALWAYS_INLINE Bytes load_words(const uint8_t* p, int64_t stride) {
  int32_t w[4];
  for (int i = 0; i < 4; ++i) memcpy(&w[i], p + i * stride, 4);
  const __m512i word = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return {_mm512_permutexvar_epi32(word, _mm512_castsi128_si512(_mm_setr_epi32(w[0], w[1], w[2], w[3])))};
}

// A table of 16 bytes for 64 look-ups at once. Indices are below 16.
struct Table16 {
  __m512i v;
};
inline Table16 table16(const uint8_t* p) {
  return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Bytes lookup(const Table16& t, Bytes index) { return {_mm512_shuffle_epi8(t.v, index.v)}; }

// A table of 32 bytes. Indices are below 32.
struct Table32 {
  __m512i v;
};
inline Table32 table32(const uint8_t* p) {
  return {_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Bytes lookup(const Table32& t, Bytes index) { return {_mm512_permutexvar_epi8(index.v, t.v)}; }

// A table of 128 bytes. Indices are below 128.
struct Table128 {
  __m512i low, high;
};
inline Table128 table128(const uint8_t* p) { return {_mm512_loadu_si512(p), _mm512_loadu_si512(p + 64)}; }
inline Bytes lookup(const Table128& t, Bytes index) { return {_mm512_permutex2var_epi8(t.low, index.v, t.high)}; }

// A field of every byte: its bits from SHIFT on, as far as `mask` says.
template <int SHIFT>
inline Bytes field(Bytes x, Bytes mask) {
  if constexpr (SHIFT == 0) return {_mm512_and_si512(x.v, mask.v)};
  return {_mm512_and_si512(_mm512_srli_epi16(x.v, SHIFT), mask.v)};
}

// The top bits of 5-bit codes. x: load_words of the plane. Bit 2j + FIELD of byte k of a quarter belongs to byte 4j +
// k, where it becomes bit 4.
template <int FIELD>
ALWAYS_INLINE Bytes plane_bits(Bytes x) {
  const __m512i bit =
      _mm512_slli_epi32(_mm512_broadcast_i32x4(_mm_setr_epi32(0x01010101, 0x04040404, 0x10101010, 0x40404040)), FIELD);
  return {_mm512_maskz_set1_epi8(_mm512_test_epi8_mask(x.v, bit), 16)};
}

// Three-bit codes are three words of nibbles whose top bits hold a fourth word. Each quarter of x[i] holds the three
// words of one group, and four bytes of anything. Afterwards x[j] holds word j of the four groups; top bits of nibbles
// are left as they are.
ALWAYS_INLINE void gather_three_bits(Bytes (&x)[4]) {
  const __m512i low = _mm512_unpacklo_epi32(x[0].v, x[1].v), high = _mm512_unpackhi_epi32(x[0].v, x[1].v);
  const __m512i low2 = _mm512_unpacklo_epi32(x[2].v, x[3].v), high2 = _mm512_unpackhi_epi32(x[2].v, x[3].v);
  x[0] = {_mm512_unpacklo_epi64(low, low2)};
  x[1] = {_mm512_unpackhi_epi64(low, low2)};
  x[2] = {_mm512_unpacklo_epi64(high, high2)};
  x[3] = {_mm512_and_si512(_mm512_srli_epi32(x[0].v, 3), _mm512_set1_epi32(0x11111111))};
  // 0xF8: first | (second & third)
  x[3] = {_mm512_ternarylogic_epi32(x[3].v, _mm512_srli_epi32(x[1].v, 2), _mm512_set1_epi32(0x22222222), 0xF8)};
  x[3] = {_mm512_ternarylogic_epi32(x[3].v, _mm512_srli_epi32(x[2].v, 1), _mm512_set1_epi32(0x44444444), 0xF8)};
}
// Makes the fourth word of one group in every quarter and puts it behind the other three.
ALWAYS_INLINE Bytes append_three_bits(Bytes x) {
  const __m512i second = _mm512_shuffle_epi32(x.v, static_cast<_MM_PERM_ENUM>(0x55));
  const __m512i third = _mm512_shuffle_epi32(x.v, static_cast<_MM_PERM_ENUM>(0xAA));
  const __m512i first = _mm512_shuffle_epi32(x.v, static_cast<_MM_PERM_ENUM>(0x00));
  __m512i last = _mm512_and_si512(_mm512_srli_epi32(first, 3), _mm512_set1_epi32(0x11111111));
  last = _mm512_ternarylogic_epi32(last, _mm512_srli_epi32(second, 2), _mm512_set1_epi32(0x22222222), 0xF8);
  last = _mm512_ternarylogic_epi32(last, _mm512_srli_epi32(third, 1), _mm512_set1_epi32(0x44444444), 0xF8);
  return {_mm512_mask_mov_epi32(x.v, 0x8888, last)};
}

// Dense rows of 1, 3 and 5 bits are bit strings. Each quarter of x begins with one, whose codes FIRST .. FIRST + 15 are
// looked up. FIRST is a multiple of 16.
template <int BITS>
struct CodeTable {
  __m512i v;  // the table, repeated
};
template <int BITS>
inline CodeTable<BITS> code_table(const uint8_t* p) {  // p: [2^BITS]
  uint8_t bytes[64];
  for (int i = 0; i < 64; ++i) bytes[i] = p[i % (1 << BITS)];
  return {_mm512_loadu_si512(bytes)};
}
template <int BITS, int FIRST>
ALWAYS_INLINE Bytes lookup_string(const CodeTable<BITS>& t, Bytes x) {
  // Eight codes are BITS bytes. These go to a quadword, and then each code to the low bits of a byte. The bits above
  // the code only choose another copy of the table.
  uint8_t from[16];
  uint64_t down = 0;
  for (int i = 0; i < 16; ++i) {
    const int byte = (FIRST + i / 8 * 8) * BITS / 8 + i % 8;
    from[i] = static_cast<uint8_t>(byte < 16 ? byte : 15);
  }
  for (int k = 0; k < 8; ++k) down |= static_cast<uint64_t>(BITS * k) << 8 * k;
  const __m512i eights = _mm512_shuffle_epi8(x.v, table16(from).v);
  const __m512i codes = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(static_cast<int64_t>(down)), eights);
  return {_mm512_permutexvar_epi8(codes, t.v)};
}

// -- Sixteen-bit lanes, for the counts and products of an encoder.

// The lanes of a, then those of b, which must fit 16 bits.
inline Shorts narrow(Ints a, Ints b) {
  const __m256i low = _mm512_cvtepi32_epi16(a.v), high = _mm512_cvtepi32_epi16(b.v);
  return {_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)};
}
// Keeps the first n lanes, n < 32, and makes the others zero.
inline Shorts keep_first(Shorts x, int n) { return {_mm512_maskz_mov_epi16((1u << n) - 1, x.v)}; }
// Stores the low bytes of all lanes.
inline void store_bytes(uint8_t* p, Shorts x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi16_epi8(x.v));
}
// Lane i of the sum gains a[2i] * b[2i] + a[2i + 1] * b[2i + 1].
inline Ints multiply_add(Ints sum, Shorts a, Shorts b) { return {_mm512_dpwssd_epi32(sum.v, a.v, b.v)}; }

// 2^BITS - 1 boundaries as a search tree: tree[1] is the middle one, tree[2] and tree[3] are those of its halves, and
// so on. Reads 64 elements.
template <int BITS>
struct Boundaries {
  __m512i row[BITS];
  explicit Boundaries(const int16_t* tree) {
    row[0] = _mm512_set1_epi16(tree[1]);
    for (int k = 1; k < BITS; ++k) row[k] = _mm512_loadu_si512(tree + (1 << k));
  }
};
// The number of boundaries that are <= u.
template <int BITS>
inline Shorts count_boundaries(const Boundaries<BITS>& b, Shorts u) {
  const __m512i one = _mm512_set1_epi16(1);
  __m512i rank = _mm512_maskz_mov_epi16(_mm512_cmple_epi16_mask(b.row[0], u.v), one);
  for (int k = 1; k < BITS; ++k) {
    const __mmask32 upper = _mm512_cmple_epi16_mask(_mm512_permutexvar_epi16(rank, b.row[k]), u.v);
    rank = _mm512_add_epi16(rank, rank);
    rank = _mm512_mask_add_epi16(rank, upper, rank, one);
  }
  return {rank};
}

// A table of 32 signed bytes. Indices are below 32.
struct LevelTable {
  __m512i v;
};
inline LevelTable level_table(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Shorts lookup(const LevelTable& t, Shorts index) { return {_mm512_permutexvar_epi16(index.v, t.v)}; }

// -- Dense bit strings, 1 to 7 bits: 64 codes are 8 * bits bytes.

struct BitLayout {
  __m512i pair, quad, shift, gather;  // packing: weights of codes, shifts of words, indices of the bytes that remain
  __m512i spread, offset, mask;       // unpacking: bytes of each word, first bits of its codes, bits of a code
  explicit BitLayout(int bits) {
    alignas(64) uint8_t to[64], from[64], at[64];
    for (int i = 0; i < 64; ++i) {
      to[i] = static_cast<uint8_t>(i < 8 * bits ? i / bits * 8 + i % bits : 7);
      from[i] = static_cast<uint8_t>(i / 8 * bits + (i % 8 < bits ? i % 8 : 0));
      at[i] = static_cast<uint8_t>(i % 8 * bits);
    }
    pair = _mm512_set1_epi16(static_cast<int16_t>(1 | 1 << (8 + bits)));
    quad = _mm512_set1_epi32(static_cast<int32_t>(1 | int64_t{1} << (16 + 2 * bits)));
    shift = _mm512_set1_epi64(32 - 4 * bits);
    gather = _mm512_load_si512(to), spread = _mm512_load_si512(from), offset = _mm512_load_si512(at);
    mask = _mm512_set1_epi8(static_cast<char>((1 << bits) - 1));
  }
};
// Writes 64 bytes, of which 8 * bits count.
inline void store_packed(uint8_t* p, const BitLayout& l, int /*bits*/, Bytes codes) {
  const __m512i pairs = _mm512_maddubs_epi16(l.pair, codes.v), quads = _mm512_madd_epi16(pairs, l.quad);
  const __m512i low = _mm512_and_si512(quads, _mm512_set1_epi64(0xFFFFFFFF));
  const __m512i high = _mm512_andnot_si512(_mm512_set1_epi64(0xFFFFFFFF), quads);
  const __m512i words = _mm512_or_si512(low, _mm512_srlv_epi64(high, l.shift));
  _mm512_storeu_si512(p, _mm512_permutexvar_epi8(l.gather, words));
}
// Reads 64 bytes, of which 8 * bits count.
inline Bytes load_packed(const uint8_t* p, const BitLayout& l, int /*bits*/) {
  const __m512i words = _mm512_permutexvar_epi8(l.spread, _mm512_loadu_si512(p));
  return {_mm512_and_si512(_mm512_multishift_epi64_epi8(l.offset, words), l.mask)};
}

// -- Levels times 16-bit factors: the inner loop of every score and every sum of values.
//
// A byte product needs one unsigned operand, so levels are stored with kLevelBias added, and a factor is two signed
// bytes, 256 * high + low. The caller subtracts kLevelBias * sum of factors, which the bias adds.
constexpr int kLevelBias = 128;

struct Levels {
  __m512i v;
};
struct Factors {  // of 64 levels
  __m512i high, low;
};
struct Products {
  __m512i high, low;
};
ALWAYS_INLINE Levels widen(Bytes levels) { return {levels.v}; }
inline Products no_products() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
// Lane i gains the products of levels 4i .. 4i + 3 with their factors.
ALWAYS_INLINE void multiply_add(Products& sum, Levels levels, const Factors& factors) {
  sum.high = _mm512_dpbusd_epi32(sum.high, levels.v, factors.high);
  sum.low = _mm512_dpbusd_epi32(sum.low, levels.v, factors.low);
}
inline Ints total(Products p) { return {_mm512_add_epi32(_mm512_slli_epi32(p.high, 8), p.low)}; }
inline Products starting_from(Ints x) { return {_mm512_setzero_si512(), x.v}; }

// Lane i gains the products of levels 4i .. 4i + 3 with factors that are signed bytes, -127 and more.
ALWAYS_INLINE Ints multiply_add(Ints sum, Bytes levels, Bytes factors) {
  return {_mm512_dpbusd_epi32(sum.v, levels.v, factors.v)};
}

// The factors of the sixteen bytes of every quarter.
inline void make_factors(Factors* to, const int16_t (&f)[16]) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(f));
  const __m256i high = _mm256_srai_epi16(_mm256_add_epi16(x, _mm256_set1_epi16(128)), 8);
  *to = {_mm512_broadcast_i32x4(_mm256_cvtepi16_epi8(high)), _mm512_broadcast_i32x4(_mm256_cvtepi16_epi8(x))};
}

// Sixteen factors, one per token of a value block, as four words. Word q is of the four tokens 2q, 2q + 1, 2q + 8 and
// 2q + 9, which share a word of codes. spread() repeats these words in the order of `quads`.
struct TokenFactors {
  __m128i high, low;
};
inline TokenFactors token_factors(Ints f) {
  const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(f.v, _mm512_set1_epi32(128)), 8);
  const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
  return {_mm_shuffle_epi8(_mm512_cvtepi32_epi8(high), order), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(f.v), order)};
}
ALWAYS_INLINE Factors spread(const TokenFactors& f, Ints quads) {
  return {_mm512_permutexvar_epi32(quads.v, _mm512_castsi128_si512(f.high)),
          _mm512_permutexvar_epi32(quads.v, _mm512_castsi128_si512(f.low))};
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
