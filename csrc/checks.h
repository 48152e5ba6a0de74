// Argument checks shared by both backends: each says what was given and what is supported. Everything here looks at
// shapes, dtypes and devices only, so that it never synchronises with a device. The CPU ops check values, too, before
// they write anything. Integers of a raw op can be anything: no sum or product of them is formed before they are
// bounded.
#pragma once

#include <algorithm>
#include <cctype>
#include <cfloat>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "dtype.h"
#include "format.h"

namespace turboquant {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

static_assert(static_cast<int>(Dtype::kFloat16) == static_cast<int>(ScalarType::Half) &&
              static_cast<int>(Dtype::kFloat32) == static_cast<int>(ScalarType::Float) &&
              static_cast<int>(Dtype::kBFloat16) == static_cast<int>(ScalarType::BFloat16));

// torch's own number of a dtype, which the C functions take and give. Tensor::scalar_type() translates it by asking for
// the numbers of one dtype after the other, which takes longer than all else that is asked about a tensor.
inline int32_t dtype_number(ScalarType t) {
  static const int32_t floats[] = {aoti_torch_dtype_float16(), aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16()};
  static const int32_t integers[] = {aoti_torch_dtype_uint8(), aoti_torch_dtype_int8(), aoti_torch_dtype_int32(),
                                     aoti_torch_dtype_int64()};
  switch (t) {
    case ScalarType::Half: return floats[0];
    case ScalarType::Float: return floats[1];
    case ScalarType::BFloat16: return floats[2];
    case ScalarType::Byte: return integers[0];
    case ScalarType::Char: return integers[1];
    case ScalarType::Int: return integers[2];
    case ScalarType::Long: return integers[3];
    default: break;
  }
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(t));
}
inline int32_t dtype_number(const Tensor& t) {
  int32_t number = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &number));
  return number;
}

// The dtype of a checked floating-point tensor, also as ScalarType.
inline Dtype dtype_of(ScalarType t) { return static_cast<Dtype>(t); }
inline Dtype dtype_of(const Tensor& t) {
  const int32_t number = dtype_number(t);
  if (number == dtype_number(ScalarType::BFloat16)) return Dtype::kBFloat16;
  return number == dtype_number(ScalarType::Half) ? Dtype::kFloat16 : Dtype::kFloat32;
}
inline ScalarType float_type_of(const Tensor& t) { return static_cast<ScalarType>(dtype_of(t)); }

inline std::string dtype_name(ScalarType t) {
  switch (t) {
    case ScalarType::Float: return "float32";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Double: return "float64";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    case ScalarType::ComplexHalf: return "complex32";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: break;
  }
  std::string name = torch::headeronly::toString(t);  // the others are called as in Python, but for capitals
  for (char& c : name) c = static_cast<char>(std::tolower(c));
  return name;
}

template <typename Sizes>
std::string shape_text(const Sizes& sizes) {
  std::string s = "[";
  for (int64_t n : sizes) s += (s.size() > 1 ? ", " : "") + std::to_string(n);
  return s + "]";
}
inline std::string shape_text(const Tensor& t) { return shape_text(t.sizes()); }

// The integers first .. last, as a message names them.
inline std::string range_text(int64_t first, int64_t last) {
  if (first >= last) return first == last ? std::to_string(first) : "none";
  return std::to_string(first) + " to " + std::to_string(last);
}

// torch hands on a None that a raw op was given for a tensor, as a tensor that nothing can be asked.
inline void check_defined(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.defined(), name, " must be a tensor, got None");
}

inline void check_dtype(const Tensor& t, const char* name, std::initializer_list<ScalarType> allowed) {
  check_defined(t, name);
  const int32_t number = dtype_number(t);
  for (ScalarType a : allowed) {
    if (number == dtype_number(a)) return;
  }
  std::string names;
  for (ScalarType a : allowed) names += (names.empty() ? "" : ", ") + dtype_name(a);
  STD_TORCH_CHECK(false, name, " has dtype ", dtype_name(t.scalar_type()), ", supported: ", names);
}

inline void check_float(const Tensor& t, const char* name) {
  check_dtype(t, name, {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16});
}

inline void check_output_dtype(ScalarType t) {
  STD_TORCH_CHECK(t == ScalarType::Float || t == ScalarType::Half || t == ScalarType::BFloat16, "dtype is ",
                  dtype_name(t), ", supported: float32, float16, bfloat16");
}

// torch's numbers of a tensor's device.
struct DeviceNumbers {
  int32_t type = 0, index = 0;
  bool operator==(const DeviceNumbers&) const = default;
};
inline DeviceNumbers numbers_of_device(const Tensor& t) {
  DeviceNumbers device;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &device.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &device.index));
  return device;
}

// All tensors of a call live on the device of the first.
inline void check_device(const Tensor& t, const Tensor& first, const char* name) {
  check_defined(t, name);
  STD_TORCH_CHECK(
      numbers_of_device(t) == numbers_of_device(first), name,
      " is on another device than the first tensor of the call: all tensors of a call must be on one device");
}

// `shape` entries of -1 stand for any size.
inline void check_shape(const Tensor& t, const char* name, std::initializer_list<int64_t> shape) {
  const auto sizes = t.sizes();
  const auto fits = [](int64_t want, int64_t size) { return want < 0 || size == want; };
  if (sizes.size() == shape.size() && std::equal(shape.begin(), shape.end(), sizes.begin(), fits)) return;
  std::string want;
  for (int64_t n : shape) want += (want.empty() ? "" : ", ") + (n < 0 ? std::string("any") : std::to_string(n));
  STD_TORCH_CHECK(false, name, " has shape ", shape_text(t), ", expected [", want, "]");
}

inline void check_contiguous(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
}

// The elements of an entry of the first dimension.
inline int64_t entry_size(const Tensor& t) {
  int64_t n = 1;
  for (int64_t i = 1; i < t.dim(); ++i) n *= t.size(i);
  return n;
}
// The elements from an entry of a checked tensor to the next; 0 where there are none.
inline int64_t entry_stride(const Tensor& t) {
  if (t.numel() == 0) return 0;
  return t.size(0) > 1 ? t.stride(0) : entry_size(t);
}

// Entries of the first dimension are contiguous, and lie at any distance from each other: they may be the part of one
// layer in an allocation for all layers.
inline void check_entries(const Tensor& t, const char* name) {
  if (t.is_contiguous()) return;
  bool dense = true;
  int64_t n = 1;
  for (int64_t i = t.dim() - 1; i > 0; n *= t.size(i--)) dense = dense && (t.size(i) == 1 || t.stride(i) == n);
  STD_TORCH_CHECK(dense, name, " must be contiguous behind its first dimension");
  STD_TORCH_CHECK(t.size(0) <= 1 || t.stride(0) >= n, name, " has stride ", t.stride(0),
                  " in its first dimension, supported: ", n, " and more, so that entries are apart");
}

inline void check_unit_last_stride(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() >= 1, name, " has shape [], expected one dimension or more");
  // strides of a tensor without elements mean nothing
  STD_TORCH_CHECK(t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1 || t.numel() == 0, name,
                  " must have stride 1 in its last dimension");
}

// A constant of the call: exact dtype and shape, contiguous, on the call's device.
inline void check_constant(const Tensor& t, const Tensor& first, const char* name, ScalarType dtype,
                           std::initializer_list<int64_t> shape) {
  check_device(t, first, name);
  check_dtype(t, name, {dtype});
  check_shape(t, name, shape);
  check_contiguous(t, name);
}

inline format::Split check_vector_dim(int64_t d, const char* name) {
  const format::Split split = format::split_dim(d);
  STD_TORCH_CHECK(split.valid(), "the last dimension of ", name, " is ", d,
                  ", supported: m * 2^k with m in {1, 3, 5, 7, 9} and k >= 1, up to ", format::kMaxVectorDim);
  return split;
}

// Codes of a dense row: their bits can be counted.
inline void check_row_codes(int64_t d) {
  constexpr int64_t most = (INT64_MAX - 7) / format::kMaxBits;
  STD_TORCH_CHECK(d >= 1 && d <= most, "d is ", d, ", supported: 1 to ", most);
}

inline void check_codec_bits(int64_t bits) {
  STD_TORCH_CHECK(format::valid_width(bits), "bits is ", bits, ", supported: 1, 2, 3, 4, 5, 8");
}

inline void check_scale_mode(int64_t mode, const char* name) {
  STD_TORCH_CHECK(format::valid_scale_mode(mode), name, " is ", mode,
                  ", supported: 0 (norm), 1 (preserve), 2 (mse), 3 (unbiased)");
}

// `levels`: int8 [2^bits], or absent for the uniform grid (2 bits and more).
inline void check_levels(const OptionalTensor& levels, const Tensor& first, int64_t bits, const char* name) {
  if (!levels) {
    STD_TORCH_CHECK(format::has_uniform_grid(format::as_width(bits)), name, " is needed at ", bits,
                    " bit: the uniform grid starts at 2 bits");
    return;
  }
  STD_TORCH_CHECK(!format::levels_are_codes(format::as_width(bits)), name, " must be absent at ", bits,
                  " bits: 8-bit codes are the uniform signed grid");
  check_constant(*levels, first, name, ScalarType::Char, {int64_t{1} << bits});
}

inline void check_steps(const Tensor& steps, const Tensor& first, const char* name) {
  check_constant(steps, first, name, ScalarType::Float, {-1});
  STD_TORCH_CHECK(steps.size(0) >= 1 && steps.size(0) <= 64, name, " has ", steps.size(0),
                  " candidates, supported: 1 to 64");
}

inline format::Record check_record(int64_t head_dim, int64_t page_size, int64_t key_bits, int64_t value_bits) {
  STD_TORCH_CHECK(format::valid_head_dim(head_dim), "head_dim is ", head_dim,
                  ", supported in page records: multiples of 16 up to ", format::kMaxHeadDim,
                  " of the form m * 2^k with m in {1, 3, 5, 7, 9}");
  STD_TORCH_CHECK(format::valid_page_size(page_size), "page_size is ", page_size, ", supported: 16, 32, 64, 128");
  STD_TORCH_CHECK(format::valid_key_bits(key_bits), "key_bits is ", key_bits, ", supported: 2, 3, 4, 5, 8");
  STD_TORCH_CHECK(format::valid_value_bits(value_bits), "value_bits is ", value_bits, ", supported: 2, 3, 4, 8");
  return {static_cast<int>(head_dim), static_cast<int>(page_size), static_cast<int>(key_bits),
          static_cast<int>(value_bits)};
}

// uint8 [num_pages, num_kv_heads, record_bytes], pages at any distance
inline void check_cache(const Tensor& cache, const Tensor& first, const format::Record& record) {
  check_device(cache, first, "cache");
  check_dtype(cache, "cache", {ScalarType::Byte});
  check_shape(cache, "cache", {-1, -1, record.record_bytes()});
  check_entries(cache, "cache");
}

// int32 [seqs, max_pages], rows at any distance
inline void check_block_table(const Tensor& table, const Tensor& first, int64_t seqs) {
  check_device(table, first, "block_table");
  check_dtype(table, "block_table", {ScalarType::Int});
  check_shape(table, "block_table", {seqs, -1});
  check_unit_last_stride(table, "block_table");
}

// int32 or int64 [count]
inline void check_slots(const Tensor& slots, const Tensor& first, const char* name, int64_t count) {
  check_device(slots, first, name);
  check_dtype(slots, name, {ScalarType::Int, ScalarType::Long});
  check_shape(slots, name, {count});
  check_contiguous(slots, name);
}

// int32 or int64 [seqs], at any distance from each other: they may be a column of a block table
inline void check_tail_slots(const Tensor& slots, const Tensor& first, int64_t seqs) {
  check_device(slots, first, "tail_slots");
  check_dtype(slots, "tail_slots", {ScalarType::Int, ScalarType::Long});
  check_shape(slots, "tail_slots", {seqs});
}

// k, v: [tokens, kv_heads, d], or of a batch [batch, kv_heads, new, d], of one dtype, stride 1 in the last dimension
inline void check_kv(const Tensor& k, const Tensor& v, bool of_batch) {
  check_float(k, "k");
  of_batch ? check_shape(k, "k", {-1, -1, -1, -1}) : check_shape(k, "k", {-1, -1, -1});
  check_unit_last_stride(k, "k");
  check_device(v, k, "v");
  check_dtype(v, "v", {k.scalar_type()});
  of_batch ? check_shape(v, "v", {k.size(0), k.size(1), k.size(2), k.size(3)})
           : check_shape(v, "v", {k.size(0), k.size(1), k.size(2)});
  check_unit_last_stride(v, "v");
}

// Keys or values of tokens by their strides: [tokens, heads, d], or [batch, heads, new, d].
struct TokenRows {
  int64_t tokens, heads, d, token_stride, head_stride;
  bool even;  // whether all tokens lie at equal distances; otherwise token_stride has no meaning

  explicit TokenRows(const Tensor& t)
      : tokens(t.size(0)), heads(t.size(1)), d(t.size(t.dim() - 1)), token_stride(t.stride(0)),
        head_stride(t.stride(1)), even(true) {
    if (t.dim() == 3) return;
    const int64_t batch = t.size(0), count = t.size(2);
    tokens = batch * count;
    if (count > 1) token_stride = t.stride(2), even = batch <= 1 || t.stride(0) == count * t.stride(2);
  }
};

// center: float32 [kv_heads, d] of a cache's keys or [d] of standalone vectors; or [3, ...]: centers, scales, inverse
// scales.
inline void check_center(const OptionalTensor& center, const Tensor& first, int64_t kv_heads, int64_t d) {
  if (!center) return;
  if (center->dim() == 3) return check_constant(*center, first, "center", ScalarType::Float, {3, kv_heads, d});
  check_constant(*center, first, "center", ScalarType::Float, {kv_heads, d});
}
inline void check_center(const OptionalTensor& center, const Tensor& first, int64_t d) {
  if (!center) return;
  if (center->dim() == 2) return check_constant(*center, first, "center", ScalarType::Float, {3, d});
  check_constant(*center, first, "center", ScalarType::Float, {d});
}

// data: of a checked `center` of `heads` heads of d channels (1 head: standalone vectors), or of a copy of it; null:
// none
inline format::Channels channels_of(const OptionalTensor& center, const float* data, int64_t heads, int64_t d) {
  if (!center || center->numel() == heads * d) return {data, nullptr, nullptr};
  return {data, data + heads * d, data + 2 * heads * d};
}

// ---- Shapes [..., x] that must agree in their leading dimensions ----------------------------------------------------

// The sizes of all but the last `drop` dimensions, followed by `tail`.
inline std::vector<int64_t> leading_shape(const Tensor& t, int64_t drop, std::initializer_list<int64_t> tail) {
  std::vector<int64_t> shape;
  for (int64_t i = 0; i + drop < t.dim(); ++i) shape.push_back(t.size(i));
  shape.insert(shape.end(), tail);
  return shape;
}

// A contiguous tensor of one dtype on the call's device, shaped as `like` without its last `drop` dimensions, then
// `tail`.
inline void check_beside(const Tensor& t, const Tensor& like, const char* name, ScalarType dtype, int64_t drop,
                         std::initializer_list<int64_t> tail) {
  check_device(t, like, name);
  check_dtype(t, name, {dtype});
  check_contiguous(t, name);
  const std::vector<int64_t> want = leading_shape(like, drop, tail);
  bool same = t.dim() == static_cast<int64_t>(want.size());
  std::string text;
  for (size_t i = 0; i < want.size(); ++i) {
    same = same && t.size(static_cast<int64_t>(i)) == want[i];
    text += (i ? ", " : "") + std::to_string(want[i]);
  }
  STD_TORCH_CHECK(same, name, " has shape ", shape_text(t), ", expected [", text, "]");
}

// ---- Dense rows and standalone vectors ------------------------------------------------------------------------------

inline void check_pack_bits(int64_t bits) {
  STD_TORCH_CHECK(bits >= 1 && bits <= format::kMaxBits, "bits is ", bits, ", supported: 1 to 8");
}

// codes: uint8 [..., d], d >= 1; returns d.
inline int64_t check_codes(const Tensor& codes) {
  check_dtype(codes, "codes", {ScalarType::Byte});
  STD_TORCH_CHECK(codes.dim() >= 1 && codes.size(codes.dim() - 1) >= 1, "codes has shape ", shape_text(codes),
                  ", expected [..., d] with d >= 1");
  check_contiguous(codes, "codes");
  check_row_codes(codes.size(codes.dim() - 1));
  return codes.size(codes.dim() - 1);
}

// packed: uint8 [..., dense_row_bytes(d, bits)]; returns the bytes of a row.
inline int64_t check_packed_rows(const Tensor& packed, int64_t d, int64_t bits) {
  check_row_codes(d);
  check_dtype(packed, "packed", {ScalarType::Byte});
  const int64_t row_bytes = format::dense_row_bytes(d, static_cast<int>(bits));
  STD_TORCH_CHECK(packed.dim() >= 1 && packed.size(packed.dim() - 1) == row_bytes, "packed has shape ",
                  shape_text(packed), ", expected [..., ", row_bytes, "] for d = ", d, " at ", bits, " bits");
  check_contiguous(packed, "packed");
  return row_bytes;
}

// Checks the arguments of encode except for its codebook: x [..., d] with its rotation and center. Returns the split of
// d.
inline format::Split check_encode(const Tensor& x, const Tensor& signs, int64_t bits, int64_t scale_mode,
                                  const OptionalTensor& center) {
  check_float(x, "x");
  check_unit_last_stride(x, "x");
  const int64_t d = x.size(x.dim() - 1);
  const format::Split split = check_vector_dim(d, "x");
  check_codec_bits(bits);
  check_scale_mode(scale_mode, "scale_mode");
  check_constant(signs, x, "signs", ScalarType::Float, {d});
  check_center(center, x, d);
  return split;
}

// Checks rows of codes with a float16 scale each and one rotation. Returns d, the length of signs.
inline int64_t check_dense_vectors(const Tensor& packed, const Tensor& scale, const Tensor& signs, int64_t bits) {
  check_defined(signs, "signs");
  STD_TORCH_CHECK(signs.dim() == 1, "signs has shape ", shape_text(signs), ", expected [d]");
  const int64_t d = signs.size(0);
  check_vector_dim(d, "signs");
  check_packed_rows(packed, d, bits);
  check_constant(signs, packed, "signs", ScalarType::Float, {d});
  check_beside(scale, packed, "scale", ScalarType::Half, 1, {});
  return d;
}

inline void check_group(int64_t d, int64_t group, int64_t bits) {
  STD_TORCH_CHECK(group == 32 || group == 64, "group is ", group, ", supported: 32, 64");
  STD_TORCH_CHECK(bits == 2 || bits == 4, "bits is ", bits, ", supported: 2, 4");
  STD_TORCH_CHECK(d >= group && d % group == 0, "d is ", d, ", supported: multiples of the group of ", group);
  check_row_codes(d);
}

// ---- Scores ---------------------------------------------------------------------------------------------------------

// q: [..., queries, d] and a packed side [..., keys, x]: the same leading dimensions, flattened to `batch`.
struct ScoreShape {
  int64_t batch = 1, queries, keys;
  std::vector<int64_t> out;  // [..., queries, keys]
};

inline ScoreShape checked_score_shape(const Tensor& q, const Tensor& packed, const char* packed_name) {
  check_float(q, "q");
  check_unit_last_stride(q, "q");
  check_defined(packed, packed_name);
  bool same = q.dim() >= 2 && packed.dim() == q.dim();
  for (int64_t i = 0; same && i + 2 < q.dim(); ++i) same = q.size(i) == packed.size(i);
  STD_TORCH_CHECK(same, "q has shape ", shape_text(q), " and ", packed_name, " ", shape_text(packed),
                  ", expected [..., queries, d] and [..., keys, bytes] with the same leading dimensions");
  ScoreShape s;
  s.queries = q.size(q.dim() - 2);
  s.keys = packed.size(packed.dim() - 2);
  s.out = leading_shape(q, 2, {s.queries, s.keys});
  for (int64_t i = 0; i + 2 < q.dim(); ++i) s.batch *= q.size(i);
  return s;
}

// ---- Attention ------------------------------------------------------------------------------------------------------

// seq_lens: int32 [seqs], cu_seqlens_q: int32 [seqs + 1] or absent (one new token per sequence). Returns seqs.
inline int64_t check_batch(const Tensor& seq_lens, const OptionalTensor& cu_seqlens_q, const Tensor& first,
                           int64_t tokens) {
  check_constant(seq_lens, first, "seq_lens", ScalarType::Int, {-1});
  const int64_t seqs = seq_lens.size(0);
  if (cu_seqlens_q) {
    check_constant(*cu_seqlens_q, first, "cu_seqlens_q", ScalarType::Int, {seqs + 1});
  } else {
    STD_TORCH_CHECK(seqs == tokens, "without cu_seqlens_q every sequence has one new token, but there are ", seqs,
                    " sequences and ", tokens, " tokens");
  }
  return seqs;
}

// The rows of a tail are the sinks, then those of the ring.
inline void check_sinks(int64_t sink_tokens, int64_t rows) {
  STD_TORCH_CHECK(sink_tokens >= 0 && sink_tokens <= rows && rows > 0, "sink_tokens is ", sink_tokens,
                  " but the tail has ", rows, " rows: supported are 1 row and more, and 0 to rows sinks");
}

// Storing the call's own tokens overwrites no row of the ring that one of its queries reads.
inline void check_ring_has_room(int64_t rows, int64_t recent_window, int64_t max_q_len) {
  const uint64_t ring = static_cast<uint64_t>(rows);
  const uint64_t needed = static_cast<uint64_t>(recent_window) + static_cast<uint64_t>(max_q_len) - 1;
  STD_TORCH_CHECK(ring >= needed, "the tail has room for ", ring,
                  " recent tokens, needed: recent_window + max_q_len - 1 = ", needed);
}

// A query reads the rows of its window from the ring, without those of the call's own tokens if these are given (as the
// argument `beside`). Otherwise the call's own tokens have been stored, in rows that earlier tokens may have had.
// Without a window the tail may be sinks alone.
inline void check_ring(int64_t rows, int64_t recent_window, int64_t max_q_len, bool own_given, const char* beside) {
  if (recent_window == 0) return;
  if (!own_given) return check_ring_has_room(rows, recent_window, max_q_len);
  const uint64_t ring = static_cast<uint64_t>(rows), window = static_cast<uint64_t>(recent_window);
  STD_TORCH_CHECK(ring + 1 >= window, "the tail has room for ", ring, " recent tokens, needed beside ", beside,
                  ": recent_window - 1 = ", window - 1);
}

// It is used as float32.
inline void check_softmax_scale(double scale) {
  STD_TORCH_CHECK(std::abs(scale) <= FLT_MAX, "softmax_scale is ", scale,
                  ", supported: numbers that are finite in float32");
}

// What an _out variant of attention writes: out like q, in words of so many bytes; lse float32 of q's rows.
inline void check_out_and_lse(const Tensor& out, const OptionalTensor& lse, const Tensor& q, uintptr_t word_bytes) {
  check_constant(out, q, "out", q.scalar_type(), {q.size(0), q.size(1), q.size(2)});
  const uintptr_t behind = reinterpret_cast<uintptr_t>(out.data_ptr()) % word_bytes;
  STD_TORCH_CHECK(behind == 0, "out must be memory that starts at a multiple of ", word_bytes,
                  " bytes, got one that starts ", behind, " bytes behind it");
  if (lse) check_constant(*lse, q, "lse", ScalarType::Float, {q.size(0), q.size(1)});
}

// tail: [max_seqs, kv_heads, sink_tokens + ring, 2, d] of the dtype of `first`, entries at any distance; tail_slots:
// of the sequences
inline void check_tail(const Tensor& tail, const OptionalTensor& tail_slots, const Tensor& first, int64_t seqs,
                       int64_t kv_heads, int64_t d, int64_t sink_tokens) {
  check_device(tail, first, "tail");
  check_dtype(tail, "tail", {first.scalar_type()});
  check_shape(tail, "tail", {-1, kv_heads, -1, 2, d});
  check_entries(tail, "tail");
  check_sinks(sink_tokens, tail.size(2));
  STD_TORCH_CHECK(tail_slots.has_value(), "tail needs tail_slots");
  check_tail_slots(*tail_slots, first, seqs);
}

// out_a, out_b: [..., d] of one dtype, lse_a, lse_b: float32 [...]
inline void check_merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  check_float(out_a, "out_a");
  check_contiguous(out_a, "out_a");
  STD_TORCH_CHECK(out_a.dim() >= 1 && out_a.size(out_a.dim() - 1) >= 1, "out_a has shape ", shape_text(out_a),
                  ", expected [..., d] with d >= 1");
  check_beside(out_b, out_a, "out_b", out_a.scalar_type(), 0, {});
  check_beside(lse_a, out_a, "lse_a", ScalarType::Float, 1, {});
  check_beside(lse_b, out_a, "lse_b", ScalarType::Float, 1, {});
}

}  // namespace turboquant
