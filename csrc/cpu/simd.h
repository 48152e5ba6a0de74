// The verbs that the CPU kernels are written in, once per instruction set: AVX-512, AVX2, and plain C++ (any machine, and
// what defines the others). The only file with intrinsics.
//
// Sizes do not depend on the machine: Floats and Ints are always 16 lanes, Shorts 32, Bytes 64. So every level adds the
// same lanes in the same order, and all levels give the same bits, not just the same bytes of a cache.
//
// Included by the level_*.cpp files only, which name their level; everything lives in that level's own namespace, because
// an inline function compiled for AVX-512 must never be the copy that the linker keeps for the others. Hence no standard
// library here: its templates would be shared.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(TURBOQUANT_AVX512) || defined(TURBOQUANT_AVX2)
#include <immintrin.h>
#endif

namespace turboquant::cpu::TURBOQUANT_LEVEL {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// Verbs whose arguments must stay in registers, and what compilers think has no effect.
#define ALWAYS_INLINE [[gnu::always_inline]] inline

// Asks for the cache lines of [p, p + bytes), which will be read soon.
ALWAYS_INLINE void prefetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i);
}

constexpr float kInfinity = __builtin_inff();

inline float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

// ---- AVX-512: F, BW, DQ, VL, VNNI, VBMI --------------------------------------------------------------------------

#if defined(TURBOQUANT_AVX512)

constexpr int kUnroll = 16;  // loops over a row's vectors, which stay in registers

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
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }
inline void store(int32_t* p, Ints x) { _mm512_storeu_si512(p, x.v); }
inline void store(int16_t* p, Shorts x) { _mm512_storeu_si512(p, x.v); }
inline void store(uint8_t* p, Bytes x) { _mm512_storeu_si512(p, x.v); }

// Sixteen numbers of a storage type as float32, and back with one rounding to nearest even.
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

// Lane i: a + b of the pair (i, i ^ H) where bit H of i is clear, a - b where it is set. A fused product by 1 or -1 is the
// sum or the difference itself, rounded once.
template <int H>
inline Floats butterfly(Floats x) {
  constexpr int upper = H == 1 ? 0xAAAA : H == 2 ? 0xCCCC : H == 4 ? 0xF0F0 : 0xFF00;
  const __m512 sign = _mm512_mask_blend_ps(static_cast<__mmask16>(upper), _mm512_set1_ps(1), _mm512_set1_ps(-1));
  return {_mm512_fmadd_ps(x.v, sign, swap_lanes<H>(x).v)};
}

// The eight sums of neighbours of a, then those of b.
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

// Lane 4l + i: the sum of lanes 4l .. 4l + 3 of the i-th argument.
ALWAYS_INLINE Ints sum_quads(Ints a, Ints b, Ints c, Ints d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a.v, b.v), _mm512_unpackhi_epi32(a.v, b.v));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c.v, d.v), _mm512_unpackhi_epi32(c.v, d.v));
  return {_mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))};
}
// Four times 16 bytes, `stride` apart.
ALWAYS_INLINE Bytes load_quarters(const uint8_t* p, int64_t stride) {
  const auto at = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * stride)); };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(at(0)), at(1), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(at(2)), at(3), 1);
  return {_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)};
}
// The same for four runs of 16 bytes that follow each other: x[i] = load_quarters(p + 16 i, stride).
ALWAYS_INLINE void load_quarters(const uint8_t* p, int64_t stride, Bytes (&x)[4]) {
  const __m512i a = load(p).v, b = load(p + stride).v, c = load(p + 2 * stride).v, d = load(p + 3 * stride).v;
  const __m512i ab = _mm512_shuffle_i32x4(a, b, 0x44), cd = _mm512_shuffle_i32x4(c, d, 0x44);
  const __m512i ab2 = _mm512_shuffle_i32x4(a, b, 0xEE), cd2 = _mm512_shuffle_i32x4(c, d, 0xEE);
  x[0] = {_mm512_shuffle_i32x4(ab, cd, 0x88)};
  x[1] = {_mm512_shuffle_i32x4(ab, cd, 0xDD)};
  x[2] = {_mm512_shuffle_i32x4(ab2, cd2, 0x88)};
  x[3] = {_mm512_shuffle_i32x4(ab2, cd2, 0xDD)};
}
// Four times 4 bytes, `stride` apart, each repeated four times.
ALWAYS_INLINE Bytes load_words(const uint8_t* p, int64_t stride) {
  int32_t w[4];
  for (int i = 0; i < 4; ++i) memcpy(&w[i], p + i * stride, 4);
  const __m512i word = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return {_mm512_permutexvar_epi32(word, _mm512_castsi128_si512(_mm_setr_epi32(w[0], w[1], w[2], w[3])))};
}

// A table of 16 bytes, looked up 64 times at once; indices below 16.
struct Table16 {
  __m512i v;
};
inline Table16 table16(const uint8_t* p) {
  return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Bytes lookup(const Table16& t, Bytes index) { return {_mm512_shuffle_epi8(t.v, index.v)}; }

// A table of 32 bytes; indices below 32.
struct Table32 {
  __m512i v;
};
inline Table32 table32(const uint8_t* p) {
  return {_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Bytes lookup(const Table32& t, Bytes index) { return {_mm512_permutexvar_epi8(index.v, t.v)}; }

// The low or high N bits of every byte's nibbles ...: fields of bytes.
template <int SHIFT>
inline Bytes field(Bytes x, Bytes mask) {
  if constexpr (SHIFT == 0) return {_mm512_and_si512(x.v, mask.v)};
  return {_mm512_and_si512(_mm512_srli_epi16(x.v, SHIFT), mask.v)};
}

// The top bits of 5-bit codes, from the plane's four bytes of each quarter (load_words): bit 2j + FIELD of byte k belongs to
// byte 4j + k of the quarter. It becomes bit 4.
template <int FIELD>
ALWAYS_INLINE Bytes plane_bits(Bytes x) {
  const __m512i bit =
      _mm512_slli_epi32(_mm512_broadcast_i32x4(_mm_setr_epi32(0x01010101, 0x04040404, 0x10101010, 0x40404040)), FIELD);
  return {_mm512_maskz_set1_epi8(_mm512_test_epi8_mask(x.v, bit), 16)};
}

// Three-bit codes are three words of nibbles whose top bits hold a fourth. x: in every quarter of x[i] the three words of one
// group, and anything. Afterwards x[j] holds word j of the four groups, top bits left as they are.
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
// The same of one group in every quarter, which keeps its place: word 3 comes last.
ALWAYS_INLINE Bytes append_three_bits(Bytes x) {
  const __m512i second = _mm512_shuffle_epi32(x.v, static_cast<_MM_PERM_ENUM>(0x55));
  const __m512i third = _mm512_shuffle_epi32(x.v, static_cast<_MM_PERM_ENUM>(0xAA));
  const __m512i first = _mm512_shuffle_epi32(x.v, static_cast<_MM_PERM_ENUM>(0x00));
  __m512i last = _mm512_and_si512(_mm512_srli_epi32(first, 3), _mm512_set1_epi32(0x11111111));
  last = _mm512_ternarylogic_epi32(last, _mm512_srli_epi32(second, 2), _mm512_set1_epi32(0x22222222), 0xF8);
  last = _mm512_ternarylogic_epi32(last, _mm512_srli_epi32(third, 1), _mm512_set1_epi32(0x44444444), 0xF8);
  return {_mm512_mask_mov_epi32(x.v, 0x8888, last)};
}

// Dense rows of 1, 3 and 5 bits are bit strings: each quarter of x begins with one, of which codes FIRST .. FIRST + 15 are
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
  // Eight codes are BITS bytes: those go to a quadword, then each code to the bottom of its byte. The bits above it only
  // choose another copy of the table.
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

// -- Sixteen-bit lanes: what an encoder counts and multiplies.

// The low halves of a's lanes, then of b's; the numbers fit.
inline Shorts narrow(Ints a, Ints b) {
  const __m256i low = _mm512_cvtepi32_epi16(a.v), high = _mm512_cvtepi32_epi16(b.v);
  return {_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)};
}
// Only the first n lanes, n < 32; zero behind them.
inline Shorts keep_first(Shorts x, int n) { return {_mm512_maskz_mov_epi16((1u << n) - 1, x.v)}; }
// The low bytes of all lanes.
inline void store_bytes(uint8_t* p, Shorts x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi16_epi8(x.v));
}
// Lane i of the sum gains a[2i] * b[2i] + a[2i + 1] * b[2i + 1].
inline Ints multiply_add(Ints sum, Shorts a, Shorts b) { return {_mm512_dpwssd_epi32(sum.v, a.v, b.v)}; }

// 2^BITS - 1 boundaries as a search tree: tree[1] is the middle one, those of its halves are tree[2] and tree[3], and so
// on. Reads 64 numbers.
template <int BITS>
struct Boundaries {
  __m512i row[BITS];
  explicit Boundaries(const int16_t* tree) {
    row[0] = _mm512_set1_epi16(tree[1]);
    for (int k = 1; k < BITS; ++k) row[k] = _mm512_loadu_si512(tree + (1 << k));
  }
};
// How many boundaries are <= u.
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

// A table of 32 signed bytes; indices below 32.
struct LevelTable {
  __m512i v;
};
inline LevelTable level_table(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Shorts lookup(const LevelTable& t, Shorts index) { return {_mm512_permutexvar_epi16(index.v, t.v)}; }

// -- Dense bit strings, 1 to 7 bits: 64 codes are 8 * bits bytes.

struct BitLayout {
  __m512i pair, quad, shift, gather;  // packing: weights of codes, how far words move, which bytes remain
  __m512i spread, offset, mask;       // unpacking: bytes of each word, first bits of its codes
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
// A byte product needs one unsigned operand, so levels are stored with kLevelBias added, and a factor is two signed bytes,
// 256 * high + low. What the bias adds, kLevelBias * sum of factors, is for the caller to take away.
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

// The factors of the sixteen bytes of every quarter.
inline void make_factors(Factors* to, const int16_t (&f)[16]) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(f));
  const __m256i high = _mm256_srai_epi16(_mm256_add_epi16(x, _mm256_set1_epi16(128)), 8);
  *to = {_mm512_broadcast_i32x4(_mm256_cvtepi16_epi8(high)), _mm512_broadcast_i32x4(_mm256_cvtepi16_epi8(x))};
}

// Sixteen factors, one per token of a value block, as four words of the four tokens (2q, 2q + 1, 2q + 8, 2q + 9) that share
// a word of codes; spread() repeats them word by word.
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

// ---- AVX2, with FMA and F16C -------------------------------------------------------------------------------------

#elif defined(TURBOQUANT_AVX2)

constexpr int kUnroll = 16;

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
  if constexpr (BITS == 1) {
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
    // Two codes lie within two bytes: those go to a word, whose top they reach by a multiplication. From there one goes to
    // the bottom of each byte.
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
      if constexpr (BITS == 5) even = _mm256_and_si256(even, _mm256_set1_epi16(31));  // else the table is repeated
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

// A row of the tree has up to 8 boundaries, which byte shuffles look up, or 16, for which there are two.
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

// Codes are joined two by two in 16, 32 and 64-bit words, and torn apart in the other order.
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
    const auto tear = [&](int width, __m256i low) {  // words of 2 * width bits: the upper half of the codes moves up
      const __m256i upper = _mm256_sll_epi64(_mm256_andnot_si256(low, x), _mm_cvtsi32_si128(width - width / 8 * bits));
      x = _mm256_or_si256(_mm256_and_si256(x, low), upper);
    };
    tear(32, _mm256_set1_epi64x((int64_t{1} << 4 * bits) - 1));
    tear(16, _mm256_set1_epi32((1 << 2 * bits) - 1));
    tear(8, _mm256_set1_epi16(static_cast<int16_t>((1 << bits) - 1)));
    return x;
  };
  return {half(p), half(p + 4 * bits)};
}

// Levels become 16-bit numbers, even and odd bytes apart, and meet 16-bit factors in the same order: no bias.
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

// ---- Plain C++ ---------------------------------------------------------------------------------------------------

#else

constexpr int kUnroll = 1;  // a vector is a loop already

struct Floats {
  float v[16];
};
struct Ints {
  int32_t v[16];
};
struct Shorts {
  int16_t v[32];
};
struct Bytes {
  uint8_t v[64];
};
struct Mask {
  bool v[16];
};

// A vector whose lane i is fn(i).
template <typename Vector, typename Fn>
inline Vector lanes(Fn&& fn) {
  Vector x;
  constexpr int n = static_cast<int>(sizeof(x.v) / sizeof(x.v[0]));
  for (int i = 0; i < n; ++i) x.v[i] = fn(i);
  return x;
}

inline Floats broadcast(float x) {
  return lanes<Floats>([&](int) { return x; });
}
inline Ints broadcast(int32_t x) {
  return lanes<Ints>([&](int) { return x; });
}
inline Bytes broadcast(uint8_t x) {
  return lanes<Bytes>([&](int) { return x; });
}

template <typename Vector, typename T>
inline Vector load_lanes(const T* p) {
  Vector x;
  memcpy(x.v, p, sizeof x.v);
  return x;
}
inline Floats load(const float* p) { return load_lanes<Floats>(p); }
inline Ints load(const int32_t* p) { return load_lanes<Ints>(p); }
inline Shorts load(const int16_t* p) { return load_lanes<Shorts>(p); }
inline Bytes load(const uint8_t* p) { return load_lanes<Bytes>(p); }
inline void store(float* p, const Floats& x) { memcpy(p, x.v, sizeof x.v); }
inline void store(int32_t* p, const Ints& x) { memcpy(p, x.v, sizeof x.v); }
inline void store(int16_t* p, const Shorts& x) { memcpy(p, x.v, sizeof x.v); }
inline void store(uint8_t* p, const Bytes& x) { memcpy(p, x.v, sizeof x.v); }

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return bits_to_float(sign | 0x7F800000 | fraction << 13 | (fraction ? 0x400000 : 0));
  if (exponent == 0) {  // zero and subnormals: fraction * 2^-24, exactly
    const float x = static_cast<float>(fraction) * (1.0f / (1 << 24));
    return bits_to_float(float_to_bits(x) | sign);
  }
  return bits_to_float(sign | (exponent + 112) << 23 | fraction << 13);
}
inline uint16_t float_to_half(float f) {
  const uint32_t bits = float_to_bits(f), sign = bits >> 16 & 0x8000, x = bits & 0x7FFFFFFF;
  if (x > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00 | (x >> 13 & 0x1FF));
  if (x >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);  // 65520 and more round to infinity
  if (x < 0x38800000) {  // below 2^-14: adding 1/2 leaves the rounded multiple of 2^-24 in the last bits
    return static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(x) + 0.5f) - 0x3F000000));
  }
  return static_cast<uint16_t>(sign | (x - 0x38000000 + 0xFFF + (x >> 13 & 1)) >> 13);
}
inline uint16_t float_to_bfloat16(float f) {
  const uint32_t x = float_to_bits(f);
  return static_cast<uint16_t>(f != f ? 0x7FC0 : (x + 0x7FFF + (x >> 16 & 1)) >> 16);
}
inline Floats load_float(const float* p) { return load(p); }
inline Floats load_float(const Half* p) {
  return lanes<Floats>([&](int i) { return half_to_float(p[i].bits); });
}
inline Floats load_float(const BFloat16* p) {
  return lanes<Floats>([&](int i) { return bits_to_float(static_cast<uint32_t>(p[i].bits) << 16); });
}
inline Floats load_float(const int8_t* p) {
  return lanes<Floats>([&](int i) { return static_cast<float>(p[i]); });
}
inline void store_float(float* p, const Floats& x) { store(p, x); }
inline void store_float(Half* p, const Floats& x) {
  for (int i = 0; i < 16; ++i) p[i].bits = float_to_half(x.v[i]);
}
inline void store_float(BFloat16* p, const Floats& x) {
  for (int i = 0; i < 16; ++i) p[i].bits = float_to_bfloat16(x.v[i]);
}

inline Floats operator+(const Floats& a, const Floats& b) {
  return lanes<Floats>([&](int i) { return a.v[i] + b.v[i]; });
}
inline Floats operator-(const Floats& a, const Floats& b) {
  return lanes<Floats>([&](int i) { return a.v[i] - b.v[i]; });
}
inline Floats operator*(const Floats& a, const Floats& b) {
  return lanes<Floats>([&](int i) { return a.v[i] * b.v[i]; });
}
inline Floats operator/(const Floats& a, const Floats& b) {
  return lanes<Floats>([&](int i) { return a.v[i] / b.v[i]; });
}
inline Floats max(const Floats& a, const Floats& b) {
  return lanes<Floats>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Floats min(const Floats& a, const Floats& b) {
  return lanes<Floats>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Ints max(const Ints& a, const Ints& b) {
  return lanes<Ints>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Floats abs(const Floats& a) {
  return lanes<Floats>([&](int i) { return __builtin_fabsf(a.v[i]); });
}
// Unsigned inside: sums may wrap on their way to a result that fits.
inline Ints operator+(const Ints& a, const Ints& b) {
  return lanes<Ints>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) + b.v[i]); });
}
inline Ints operator-(const Ints& a, const Ints& b) {
  return lanes<Ints>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) - b.v[i]); });
}
template <int N>
inline Ints shift_left(const Ints& a) {
  return lanes<Ints>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << N); });
}
template <int N>
inline Ints shift_right(const Ints& a) {
  return lanes<Ints>([&](int i) { return a.v[i] >> N; });
}
inline Ints operator&(const Ints& a, const Ints& b) {
  return lanes<Ints>([&](int i) { return a.v[i] & b.v[i]; });
}
inline Bytes operator&(const Bytes& a, const Bytes& b) {
  return lanes<Bytes>([&](int i) { return a.v[i] & b.v[i]; });
}
inline Bytes operator|(const Bytes& a, const Bytes& b) {
  return lanes<Bytes>([&](int i) { return a.v[i] | b.v[i]; });
}
inline Bytes operator^(const Bytes& a, const Bytes& b) {
  return lanes<Bytes>([&](int i) { return a.v[i] ^ b.v[i]; });
}

inline Mask operator<(const Floats& a, const Floats& b) {
  return lanes<Mask>([&](int i) { return a.v[i] < b.v[i]; });
}
inline Mask operator<=(const Floats& a, const Floats& b) {
  return lanes<Mask>([&](int i) { return a.v[i] <= b.v[i]; });
}
inline Mask is_nan(const Floats& a) {
  return lanes<Mask>([&](int i) { return a.v[i] != a.v[i]; });
}
inline Mask operator<(const Ints& a, const Ints& b) {
  return lanes<Mask>([&](int i) { return a.v[i] < b.v[i]; });
}
inline Mask operator&(const Mask& a, const Mask& b) {
  return lanes<Mask>([&](int i) { return a.v[i] && b.v[i]; });
}
inline Mask operator|(const Mask& a, const Mask& b) {
  return lanes<Mask>([&](int i) { return a.v[i] || b.v[i]; });
}
inline uint16_t mask_bits(const Mask& m) {
  int bits = 0;
  for (int i = 0; i < 16; ++i) bits |= m.v[i] << i;
  return static_cast<uint16_t>(bits);
}
inline bool any(const Mask& m) {
  bool found = false;
  for (bool lane : m.v) found |= lane;
  return found;
}
inline bool all(const Mask& m) {
  bool every = true;
  for (bool lane : m.v) every &= lane;
  return every;
}
inline Floats select(const Mask& m, const Floats& yes, const Floats& no) {
  return lanes<Floats>([&](int i) { return m.v[i] ? yes.v[i] : no.v[i]; });
}
inline Ints select(const Mask& m, const Ints& yes, const Ints& no) {
  return lanes<Ints>([&](int i) { return m.v[i] ? yes.v[i] : no.v[i]; });
}

// Nearest, ties to even; what does not fit an int32, and NaN, becomes the least int32, as on x86. Adding and taking away
// 1.5 * 2^23 rounds numbers below 2^22 without a call to the library; from 2^23 on floats are integers.
inline int32_t round_to_int(float x) {
  const float big = __builtin_copysignf(8388608.0f, x), rounded = (x + big) - big;
  const float whole = __builtin_fabsf(x) < 8388608.0f ? rounded : x;
  const bool fits = (whole >= -2147483648.0f) & (whole < 2147483648.0f);
  const int32_t number = static_cast<int32_t>(fits ? whole : 0.0f);
  return fits ? number : INT32_MIN;
}
inline Ints round_to_ints(const Floats& x) {
  return lanes<Ints>([&](int i) { return round_to_int(x.v[i]); });
}
inline Ints truncate_to_ints(const Floats& x) {
  return lanes<Ints>([&](int i) { return static_cast<int32_t>(x.v[i]); });
}
inline Floats to_floats(const Ints& x) {
  return lanes<Floats>([&](int i) { return static_cast<float>(x.v[i]); });
}
inline Floats as_floats(const Ints& x) {
  Floats y;
  memcpy(y.v, x.v, sizeof y.v);
  return y;
}
inline Ints as_ints(const Floats& x) {
  Ints y;
  memcpy(y.v, x.v, sizeof y.v);
  return y;
}

template <int H>
inline Floats swap_lanes(const Floats& x) {
  return lanes<Floats>([&](int i) { return x.v[i ^ H]; });
}
template <int H>
inline Floats butterfly(const Floats& x) {
  return lanes<Floats>([&](int i) { return i & H ? x.v[i ^ H] - x.v[i] : x.v[i] + x.v[i ^ H]; });
}

template <typename Vector>
inline Vector pair_sums(const Vector& a, const Vector& b) {
  return lanes<Vector>([&](int i) { return i < 8 ? a.v[2 * i] + a.v[2 * i + 1] : b.v[2 * i - 16] + b.v[2 * i - 15]; });
}

inline Ints sum_quads(const Ints& a, const Ints& b, const Ints& c, const Ints& d) {
  const Ints* x[4] = {&a, &b, &c, &d};
  return lanes<Ints>([&](int i) {
    const int32_t* v = x[i % 4]->v + i / 4 * 4;
    return v[0] + v[1] + v[2] + v[3];
  });
}
struct Table16 {
  uint8_t v[16];
};
inline Table16 table16(const uint8_t* p) {
  return lanes<Table16>([&](int i) { return p[i]; });
}
struct Table32 {
  uint8_t v[32];
};
inline Table32 table32(const uint8_t* p) {
  return lanes<Table32>([&](int i) { return p[i]; });
}
template <typename Table>
inline Bytes lookup(const Table& t, const Bytes& index) {
  return lanes<Bytes>([&](int i) { return t.v[index.v[i]]; });
}

template <int SHIFT>
inline Bytes field(const Bytes& x, const Bytes& mask) {
  return lanes<Bytes>([&](int i) { return x.v[i] >> SHIFT & mask.v[i]; });
}

inline Bytes load_quarters(const uint8_t* p, int64_t stride) {
  Bytes x;
  for (int i = 0; i < 4; ++i) memcpy(x.v + 16 * i, p + i * stride, 16);
  return x;
}
inline void load_quarters(const uint8_t* p, int64_t stride, Bytes (&x)[4]) {
  for (int i = 0; i < 4; ++i) x[i] = load_quarters(p + 16 * i, stride);
}
inline Bytes load_words(const uint8_t* p, int64_t stride) {
  Bytes x;
  for (int i = 0; i < 16; ++i) memcpy(x.v + 4 * i, p + i / 4 * stride, 4);
  return x;
}

template <int FIELD>
inline Bytes plane_bits(const Bytes& x) {
  return lanes<Bytes>([&](int i) { return (x.v[i] >> (2 * (i / 4 % 4) + FIELD) & 1) << 4; });
}

inline uint32_t fourth_word(uint32_t first, uint32_t second, uint32_t third) {
  return (first >> 3 & 0x11111111) | (second >> 2 & 0x22222222) | (third >> 1 & 0x44444444);
}
inline Bytes append_three_bits(const Bytes& x) {
  uint32_t w[16];
  memcpy(w, x.v, sizeof w);
  for (int l = 0; l < 16; l += 4) w[l + 3] = fourth_word(w[l], w[l + 1], w[l + 2]);
  return load(reinterpret_cast<const uint8_t*>(w));
}
inline void gather_three_bits(Bytes (&x)[4]) {
  uint32_t in[4][16], out[4][16];
  for (int i = 0; i < 4; ++i) {
    x[i] = append_three_bits(x[i]);
    memcpy(in[i], x[i].v, sizeof in[i]);
  }
  for (int i = 0; i < 4; ++i) {
    for (int l = 0; l < 16; ++l) out[l % 4][l / 4 * 4 + i] = in[i][l];
  }
  for (int j = 0; j < 4; ++j) memcpy(x[j].v, out[j], sizeof out[j]);
}

template <int BITS>
struct CodeTable {
  uint8_t v[1 << BITS];
};
template <int BITS>
inline CodeTable<BITS> code_table(const uint8_t* p) {
  return lanes<CodeTable<BITS> >([&](int i) { return p[i]; });
}
template <int BITS, int FIRST>
ALWAYS_INLINE Bytes lookup_string(const CodeTable<BITS>& t, const Bytes& x) {
  Bytes y;
  for (int i = 0; i < 64; i += 8) {
    const uint8_t* p = x.v + i / 16 * 16 + (FIRST + i % 16) * BITS / 8;
    uint64_t codes = p[0];  // eight of them
    for (int k = 1; k < BITS; ++k) codes |= static_cast<uint64_t>(p[k]) << 8 * k;
    for (int k = 0; k < 8; ++k) y.v[i + k] = t.v[codes >> k * BITS & ((1 << BITS) - 1)];
  }
  return y;
}

inline Shorts narrow(const Ints& a, const Ints& b) {
  return lanes<Shorts>([&](int i) { return static_cast<int16_t>(i < 16 ? a.v[i] : b.v[i - 16]); });
}
inline Shorts keep_first(const Shorts& x, int n) {
  return lanes<Shorts>([&](int i) { return i < n ? x.v[i] : 0; });
}
inline void store_bytes(uint8_t* p, const Shorts& x) {
  for (int i = 0; i < 32; ++i) p[i] = static_cast<uint8_t>(x.v[i]);
}
inline Ints multiply_add(const Ints& sum, const Shorts& a, const Shorts& b) {
  return sum + lanes<Ints>([&](int i) { return a.v[2 * i] * b.v[2 * i] + a.v[2 * i + 1] * b.v[2 * i + 1]; });
}

template <int BITS>
struct Boundaries {
  int16_t v[1 << BITS];
  explicit Boundaries(const int16_t* tree) { memcpy(v, tree, sizeof v); }
};
template <int BITS>
inline Shorts count_boundaries(const Boundaries<BITS>& b, const Shorts& u) {
  Shorts rank = {};
  for (int k = 1; k < 1 << BITS; ++k) {
    for (int i = 0; i < 32; ++i) rank.v[i] = static_cast<int16_t>(rank.v[i] + (b.v[k] <= u.v[i]));
  }
  return rank;
}

struct LevelTable {
  int8_t v[32];
};
inline LevelTable level_table(const int8_t* p) {
  return lanes<LevelTable>([&](int i) { return p[i]; });
}
inline Shorts lookup(const LevelTable& t, const Shorts& index) {
  return lanes<Shorts>([&](int i) { return t.v[index.v[i]]; });
}

// Eight codes are one 64-bit word: joined two by two, and torn apart in the other order.
struct BitLayout {
  explicit BitLayout(int) {}
};
inline void store_packed(uint8_t* p, const BitLayout&, int bits, const Bytes& codes) {
  uint64_t words[8];
  memcpy(words, codes.v, sizeof words);
  for (int k = 0; k < 8; ++k) {
    uint64_t x = words[k];
    x = (x & 0x00FF00FF00FF00FF) | (x & 0xFF00FF00FF00FF00) >> (8 - bits);
    x = (x & 0x0000FFFF0000FFFF) | (x & 0xFFFF0000FFFF0000) >> (16 - 2 * bits);
    x = (x & 0x00000000FFFFFFFF) | (x & 0xFFFFFFFF00000000) >> (32 - 4 * bits);
    memcpy(p + k * bits, &x, sizeof x);
  }
}
inline Bytes load_packed(const uint8_t* p, const BitLayout&, int bits) {
  const uint64_t low4 = (uint64_t{1} << 4 * bits) - 1;
  const uint64_t low2 = ((uint64_t{1} << 2 * bits) - 1) * 0x0000000100000001;
  const uint64_t low1 = ((uint64_t{1} << bits) - 1) * 0x0001000100010001;
  uint64_t words[8];
  for (int k = 0; k < 8; ++k) {
    uint64_t x;
    memcpy(&x, p + k * bits, sizeof x);
    x &= (uint64_t{1} << 8 * bits) - 1;
    x = (x & low4) | (x & ~low4) << (32 - 4 * bits);
    x = (x & low2) | (x & ~low2) << (16 - 2 * bits);
    words[k] = (x & low1) | (x & ~low1) << (8 - bits);
  }
  Bytes codes;
  memcpy(codes.v, words, sizeof words);
  return codes;
}

constexpr int kLevelBias = 0;

// Even and odd bytes apart, and a sum for each of the 32 words, so that every loop is one that compilers vectorise.
struct Levels {
  int16_t even[32], odd[32];
};
struct Factors {
  int16_t even[32], odd[32];
};
struct Products {
  int32_t v[32];
};
ALWAYS_INLINE Levels widen(const Bytes& x) {
  Levels l;
  for (int i = 0; i < 32; ++i) {
    l.even[i] = static_cast<int8_t>(x.v[2 * i]);
    l.odd[i] = static_cast<int8_t>(x.v[2 * i + 1]);
  }
  return l;
}
inline Products no_products() { return {}; }
ALWAYS_INLINE void multiply_add(Products& sum, const Levels& l, const Factors& f) {
  for (int i = 0; i < 32; ++i) sum.v[i] += l.even[i] * f.even[i];
  for (int i = 0; i < 32; ++i) sum.v[i] += l.odd[i] * f.odd[i];
}
inline Ints total(const Products& p) {
  return lanes<Ints>([&](int i) { return p.v[2 * i] + p.v[2 * i + 1]; });
}
inline Products starting_from(const Ints& x) {
  return lanes<Products>([&](int i) { return i % 2 ? 0 : x.v[i / 2]; });
}
inline void make_factors(Factors* to, const int16_t (&f)[16]) {
  for (int i = 0; i < 32; ++i) to->even[i] = f[2 * i % 16], to->odd[i] = f[2 * i % 16 + 1];
}

struct TokenFactors {
  int16_t v[16];
};
inline TokenFactors token_factors(const Ints& f) {
  return lanes<TokenFactors>([&](int i) { return static_cast<int16_t>(f.v[2 * (i / 4) + i % 2 + 4 * (i & 2)]); });
}
ALWAYS_INLINE Factors spread(const TokenFactors& f, const Ints& quads) {
  Factors to;
  for (int i = 0; i < 32; ++i) {
    const int16_t* quad = f.v + 4 * quads.v[i / 2] + i % 2 * 2;
    to.even[i] = quad[0], to.odd[i] = quad[1];
  }
  return to;
}

#endif

// ---- In words of the above ---------------------------------------------------------------------------------------

inline Ints lane_numbers() {
  const int32_t number[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(number);
}

inline float first_lane(Floats x) {
  float lane[16];
  store(lane, x);
  return lane[0];
}

// Sum and maximum of all lanes, always by the same tree.
inline float sum_lanes(Floats x) {
  const Floats zero = broadcast(0.0f);
  for (int n = 16; n > 1; n /= 2) x = pair_sums(x, zero);
  return first_lane(x);
}
inline float greatest(Floats x) {
  x = max(x, swap_lanes<8>(x));
  x = max(x, swap_lanes<4>(x));
  x = max(x, swap_lanes<2>(x));
  return first_lane(max(x, swap_lanes<1>(x)));
}

inline float least(Floats x) {
  x = min(x, swap_lanes<8>(x));
  x = min(x, swap_lanes<4>(x));
  x = min(x, swap_lanes<2>(x));
  return first_lane(min(x, swap_lanes<1>(x)));
}
inline int32_t greatest(Ints x) {
  x = max(x, as_ints(swap_lanes<8>(as_floats(x))));
  x = max(x, as_ints(swap_lanes<4>(as_floats(x))));
  x = max(x, as_ints(swap_lanes<2>(as_floats(x))));
  x = max(x, as_ints(swap_lanes<1>(as_floats(x))));
  int32_t lane[16];
  store(lane, x);
  return lane[0];
}

// 2^e for |e| <= 126, exactly.
inline float power_of_two(int e) { return bits_to_float(static_cast<uint32_t>(e + 127) << 23); }

// The exponent e of x, so that x * 2^-e is near 1: limited to 2^+-100, where such a product stays a normal number.
inline int scale_exponent(float x) {
  const int e = static_cast<int>(float_to_bits(x) >> 23 & 255) - 127;
  return e < -100 ? -100 : e > 100 ? 100 : e;
}

// 2^n for -126 <= n <= 127.
inline Floats power_of_two(Ints n) { return as_floats(shift_left<23>(n + broadcast(127))); }

// e^x for x <= 88, within 2 units in the last place; 0 below -87.3; NaN stays.
ALWAYS_INLINE Floats exp(Floats x) {
  const Mask tiny = x < broadcast(-87.3f);
  x = max(broadcast(-87.3f), x);
  const Ints n = round_to_ints(x * broadcast(1.44269504f));
  const Floats f = to_floats(n);
  const Floats r = (x - f * broadcast(0.693359375f)) - f * broadcast(-2.12194440e-4f);
  Floats p = broadcast(1.9875691500e-4f);
  p = p * r + broadcast(1.3981999507e-3f);
  p = p * r + broadcast(8.3334519073e-3f);
  p = p * r + broadcast(4.1665795894e-2f);
  p = p * r + broadcast(1.6666665459e-1f);
  p = p * r + broadcast(5.0000001201e-1f);
  const Floats e = ((p * r) * r + r) + broadcast(1.0f);
  return select(tiny, broadcast(0.0f), e * power_of_two(n));
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
