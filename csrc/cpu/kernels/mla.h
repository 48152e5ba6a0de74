// The ops mla_store, mla_load and mla_attention: latents to the codes of page records, back, and attention from them.
//
// A latent is key and value at once. As a key, its row of codes is multiplied as it is. A value is multiplied channel
// by channel for four tokens at once, and rows do not lie in that order. So the levels of each block of keys are
// written out once as panels of bytes, from which all queries read: models have 16 heads and more, beside whose
// products this costs little.
#pragma once

#include "cpu/kernels/attention.h"
#include "cpu/kernels/record.h"
#include "cpu/kernels/vector_codec.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

// Calls fn with a raw channel of this dtype.
template <typename Fn>
inline void dispatch_rope(Dtype dtype, Fn&& fn) {
  dtype == Dtype::kFloat16 ? fn(Half{}) : fn(BFloat16{});
}

inline uint8_t* record_of(uint8_t* pages, int64_t page, int64_t stride) { return pages + page * stride; }
inline const uint8_t* record_of(const uint8_t* pages, int64_t page, int64_t stride) { return pages + page * stride; }

// A row whose words have changed places, in their order; or the other way round, which is the same.
inline void swap_words(const uint8_t* from, uint8_t* to, int bytes, int token) {
  constexpr int kWord = format::kLatentWord;
  for (int at = 0; at < bytes; at += kWord) memcpy(to + format::swapped_byte(bytes, token, at), from + at, kWord);
}

constexpr int kMaxRowBytes = 512, kMaxRopeBytes = 128;  // of a latent's codes, of its raw channels

template <typename From, typename To>
inline void convert(const From* from, To* to, int count) {
  for (int c = 0; c < count; c += 16) store_float(to + c, load_float(from + c));
}

inline void store_latents(const StoredLatents& s, int64_t begin, int64_t end) {
  const format::LatentRecord& r = s.record;
  const format::Split split = format::split_dim(r.latent_dim);
  const BitLayout layout = code_row_layout(r.width());
  EncoderScratch scratch;
  dispatch_rows(s.dtype, r.latent_dim, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = s.slots[token];
      if (slot < 0) continue;
      uint8_t* record = record_of(s.pages, slot / r.page_size, s.page_stride);
      const int number = static_cast<int>(slot % r.page_size);
      const T* x = static_cast<const T*>(s.latent) + token * s.latent_stride;
      const int32_t greatest = load_row<true>(x, s.channels, r.latent_dim, scratch.y);
      const uint16_t scale = encode_row(scratch, split, s.signs, s.quantiser, greatest);
      alignas(64) uint8_t row[kMaxRowBytes];
      write_row(r.row(), row, record + r.plane_of(number), scratch.codes, layout);
      swap_words(row, record + r.row_of(number), r.row_bytes(), number);
      memcpy(record + r.scale_of(number), &scale, sizeof scale);
      const T* rope = static_cast<const T*>(s.rope) + token * s.rope_stride;
      dispatch_rope(s.rope_dtype, [&](auto raw) {
        using Raw = decltype(raw);
        alignas(64) Raw channels[kMaxRopeBytes / sizeof(Raw)];
        convert(rope, channels, r.rope_dim);
        swap_words(reinterpret_cast<const uint8_t*>(channels), record + r.rope_of(number), r.rope_bytes(), number);
      });
    }
  });
}

inline void load_latents(const LoadedLatents& l, int64_t begin, int64_t end, void* latent, void* rope) {
  const format::LatentRecord& r = l.record;
  const format::Split split = format::split_dim(r.latent_dim);
  const BitLayout layout = code_row_layout(r.width());
  const Table32 levels = table32(reinterpret_cast<const uint8_t*>(l.levels));
  DecoderScratch scratch;
  memset(scratch.codes, 0, sizeof scratch.codes);
  dispatch_rows(l.dtype, r.latent_dim, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item % l.max_seq_len, sequence = item / l.max_seq_len;
      T* to = static_cast<T*>(latent) + item * r.latent_dim;
      T* raw_to = static_cast<T*>(rope) + item * r.rope_dim;
      if (token >= l.lengths[sequence]) {
        memset(to, 0, r.latent_dim * sizeof(T));
        memset(raw_to, 0, r.rope_dim * sizeof(T));
        continue;
      }
      const int64_t page = l.block_table[sequence * l.table_stride + token / r.page_size];
      const uint8_t* record = record_of(l.pages, page, l.page_stride);
      const int number = static_cast<int>(token % r.page_size);
      uint16_t scale;
      memcpy(&scale, record + r.scale_of(number), sizeof scale);
      alignas(64) uint8_t row[kMaxRowBytes];
      swap_words(record + r.row_of(number), row, r.row_bytes(), number);
      read_row(r.row(), row, record + r.plane_of(number), scratch.codes, layout, row + sizeof row);
      decode_row<T, true>(scratch, split, l.signs, l.channels, r.width(), levels, scale, to);
      dispatch_rope(l.rope_dtype, [&](auto raw) {
        using Raw = decltype(raw);
        alignas(64) Raw channels[kMaxRopeBytes / sizeof(Raw)];
        swap_words(record + r.rope_of(number), reinterpret_cast<uint8_t*>(channels), r.rope_bytes(), number);
        convert(channels, raw_to, r.rope_dim);
      });
    }
  });
}

// ---- Attention ------------------------------------------------------------------------------------------------------

struct LatentScratch {
  uint8_t* values;   // [kGroups, 16 d]: levels in panels
  uint8_t* rows;     // [16, d]: levels of sixteen tokens
  uint8_t* keys;     // [kBlockTokens, row_bytes]: rows of codes, their words in order
  uint8_t* codes;    // [d]
  float* ropes;      // [kBlockTokens, rope_dim]
  Factors* weights;  // [kQueriesAtOnce, patterns, kGroups]
};
inline int64_t attend_latents_scratch_bytes(const LatentKeys& k) {
  const int64_t d = k.record.latent_dim;
  return kBlockTokens * d + kGroupTokens * d + kBlockTokens * k.record.row_bytes() + d +
         kBlockTokens * k.record.rope_dim * sizeof(float) + weight_bytes(k.attended);
}
inline LatentScratch latent_scratch(const LatentKeys& k, void* memory) {
  const int64_t d = k.record.latent_dim;
  LatentScratch s;
  s.values = static_cast<uint8_t*>(memory);
  s.rows = s.values + kBlockTokens * d;
  s.keys = s.rows + kGroupTokens * d;
  s.codes = s.keys + kBlockTokens * k.record.row_bytes();
  s.ropes = reinterpret_cast<float*>(s.codes + d);
  s.weights = reinterpret_cast<Factors*>(s.ropes + kBlockTokens * k.record.rope_dim);
  return s;
}

// Tokens t of a quad are those whose weights share factors, see token_factors: 2q, 2q + 1, 2q + 8, 2q + 9.
inline int place_in_quads(int t) { return 4 * (t % 8 / 2) + t % 2 + 2 * (t / 8); }

struct LatentBlocks {
  const LatentKeys& keys;
  const int32_t* block_table;
  LatentScratch scratch;
  BitLayout layout;
  Table32 levels;

  int key_bits() const { return keys.record.bits; }
  int value_bits() const { return format::kMaxBits; }

  struct Address {
    const uint8_t* record;
    int token;  // in the page
  };
  Address address(int64_t key) const {
    const int64_t page = block_table[key / keys.record.page_size];
    return {record_of(keys.pages, page, keys.page_stride), static_cast<int>(key % keys.record.page_size)};
  }

  // rows: of codes of these tokens. Their levels as panels: 16 channels of one quad each, quads one after the
  // other.
  void expand(const Address& at, const uint8_t* rows, uint8_t* to) const {
    const format::LatentRecord& r = keys.record;
    const int d = r.latent_dim;
    for (int t = 0; t < kGroupTokens; ++t) {
      uint8_t* row = scratch.rows + place_in_quads(t) * d;
      uint8_t* codes = format::levels_are_codes(r.width()) ? row : scratch.codes;
      const int token = at.token + t;
      read_row(r.row(), rows + t * r.row_bytes(), at.record + r.plane_of(token), codes, layout,
               rows + kGroupTokens * r.row_bytes());
      for (int c = 0; codes != row && c < d; c += 64) store(row + c, lookup(levels, load(codes + c)));
    }
    for (int quad = 0; quad < 4; ++quad) {
      for (int c = 0; c < d; c += 16, to += 64) {
        store(to, interleave_quarters(load_quarters(scratch.rows + 4 * quad * d + c, d)));
      }
    }
  }

  Block find(int64_t begin, int64_t first, int64_t end) const {
    const format::LatentRecord& r = keys.record;
    Block b = seen_groups(begin, first, end);
    for (int g = b.first_group; g < b.end_group; ++g) {
      const Address at = address(begin + g * kGroupTokens);
      uint8_t* rows = scratch.keys + g * kGroupTokens * r.row_bytes();
      for (int t = 0; t < kGroupTokens; ++t) {
        swap_words(at.record + r.row_of(at.token + t), rows + t * r.row_bytes(), r.row_bytes(), at.token + t);
      }
      b.keys[g] = {rows, r.row_bytes(), at.record + r.plane_of(at.token), r.plane_bytes()};
      b.key_scales[g] = b.value_scales[g] = reinterpret_cast<const Half*>(at.record + r.scale_of(at.token));
      uint8_t* values = scratch.values + g * kGroupTokens * r.latent_dim;
      expand(at, rows, values);
      b.values[g] = values;
      float* ropes = scratch.ropes + g * kGroupTokens * r.rope_dim;
      dispatch_rope(keys.rope_dtype, [&](auto raw) {
        using Raw = decltype(raw);
        for (int t = 0; t < kGroupTokens; ++t) {
          alignas(64) Raw channels[kMaxRopeBytes / sizeof(Raw)];
          const int token = at.token + t;
          swap_words(at.record + r.rope_of(token), reinterpret_cast<uint8_t*>(channels), r.rope_bytes(), token);
          convert(channels, ropes + t * r.rope_dim, r.rope_dim);
        }
      });
      b.ropes[g] = ropes;
    }
    return b;
  }

  Ahead ahead(int64_t begin, int64_t end) const {
    const format::LatentRecord& r = keys.record;
    Ahead a = {};
    a.key_bytes = kGroupTokens * r.row_bytes();
    a.value_bytes = kGroupTokens * r.rope_bytes();
    for (int g = 0; g < kGroups && begin + g * kGroupTokens < end; ++g) {
      const Address at = address(begin + g * kGroupTokens);
      a.keys[g] = at.record + r.row_of(at.token);
      a.values[g] = at.record + r.rope_of(at.token);
    }
    return a;
  }
};

inline void attend_latents(const LatentKeys& k, const int32_t* block_table, int64_t begin, int64_t end,
                           const QueryRows& rows, const PartialRows& out, void* scratch) {
  const LatentBlocks blocks{k, block_table, latent_scratch(k, scratch), code_row_layout(k.record.width()),
                            table32(reinterpret_cast<const uint8_t*>(k.attended.key_levels))};
  const Span span{k.attended, begin, end, rows, out, blocks.scratch.weights};
  format::with_width(k.record.width(), [&](auto width) {
    if constexpr (format::valid_latent_width(width.value)) {
      attend_codes<Layout{width.value, false}, Layout{format::Width::k8, false}>(span, blocks);
    }
  });
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
