// The verbs in plain C++: a vector is an array. For any machine, and the definition that the other sets are tested
// against. Included by cpu/simd.h only; simd/avx512.h says what each verb does.
#pragma once

namespace turboquant::cpu::TURBOQUANT_LEVEL {

constexpr int kUnroll = 1;  // a vector is a loop already
constexpr int kSums = 3;

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
template <int BYTES>
inline Ints load_integers(const uint8_t* p) {
  return lanes<Ints>([&](int i) { return BYTES == 2 ? p[2 * i] | p[2 * i + 1] << 8 : p[i]; });
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
// May be rounded once or twice: for estimates only.
inline Floats add_product(const Floats& sum, const Floats& a, const Floats& b) { return sum + a * b; }
// Additions are unsigned, because sums may wrap on their way to a result that fits.
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

// Rounds to nearest, ties to even. NaN and numbers that do not fit an int32 become the least int32, as on x86. To add
// and subtract 2^23 rounds smaller numbers without a call to the library; from 2^23 on floats are integers.
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

inline void interleave_pairs(const Floats& a, const Floats& b, Floats& first, Floats& second) {
  const auto from = [&](int start) {
    return lanes<Floats>([&](int i) { return (i & 2 ? b : a).v[start + i / 4 * 2 + i % 2]; });
  };
  first = from(0), second = from(8);
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
struct Table128 {
  uint8_t v[128];
};
inline Table128 table128(const uint8_t* p) {
  return lanes<Table128>([&](int i) { return p[i]; });
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
inline Bytes repeat_sixteen(const uint8_t* p) { return load_quarters(p, 0); }
inline Ints as_words(const Bytes& x) { return load_lanes<Ints>(x.v); }
inline Bytes interleave_quarters(const Bytes& x) {
  return lanes<Bytes>([&](int i) { return x.v[16 * (i % 4) + i / 4]; });
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

// Eight codes are one 64-bit word: packing joins them two by two, unpacking splits them in the other order.
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

// Even and odd bytes are apart, and each of the 32 words has a sum, so that compilers vectorise every loop.
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
ALWAYS_INLINE Ints multiply_add(const Ints& sum, const Bytes& levels, const Bytes& factors) {
  int32_t product[64];
  for (int i = 0; i < 64; ++i) product[i] = static_cast<int8_t>(levels.v[i]) * static_cast<int8_t>(factors.v[i]);
  return lanes<Ints>([&](int i) {
    const int32_t* p = product + 4 * i;
    return sum.v[i] + (p[0] + p[1]) + (p[2] + p[3]);
  });
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

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
