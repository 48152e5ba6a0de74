// The ops cache_store and cache_load: vectors to the codes of page records, and back.
#pragma once

#include "cpu/kernels/record.h"
#include "cpu/kernels/vector_codec.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

inline void store_tokens(const StoredTokens& s, int64_t begin, int64_t end) {
  const format::Record& r = s.record;
  const format::Split split = format::split_dim(r.head_dim);
  const int d = r.head_dim, record_bytes = r.record_bytes();
  const BitLayout layout = code_row_layout(r.key_width());
  EncoderScratch scratch;
  dispatch_rows(s.dtype, d, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item / s.kv_heads, head = item % s.kv_heads, slot = s.slots[token];
      if (slot < 0) continue;
      uint8_t* record = s.pages + format::record_offset<int64_t>(slot / r.page_size, head, s.page_stride, record_bytes);
      const int number = static_cast<int>(slot % r.page_size);
      const auto encode = [&](const StoredTokens::Kind& kind, const format::Channels& channels) {
        const T* x = static_cast<const T*>(kind.x) + token * kind.token_stride + head * kind.head_stride;
        const int32_t greatest = load_row<true>(x, channels, d, scratch.y);
        return encode_row(scratch, split, kind.signs, kind.quantiser, greatest);
      };
      const uint16_t key_scale = encode(s.keys, s.channels.of_head(head, d));
      write_key(r, record, number, scratch.codes, layout);
      memcpy(record + r.key_scale(number), &key_scale, sizeof key_scale);
      const uint16_t value_scale = encode(s.values, {});
      visit_values(r, number, ValueWriter{record, scratch.codes});
      memcpy(record + r.value_scale(number), &value_scale, sizeof value_scale);
    }
  });
}

inline void load_tokens(const LoadedTokens& l, int64_t begin, int64_t end, void* k, void* v) {
  const format::Record& r = l.record;
  const format::Split split = format::split_dim(r.head_dim);
  const int d = r.head_dim, record_bytes = r.record_bytes();
  const BitLayout layout = code_row_layout(r.key_width());
  const Table32 key_levels = table32(reinterpret_cast<const uint8_t*>(l.key_levels));
  const Table32 value_levels = table32(reinterpret_cast<const uint8_t*>(l.value_levels));
  DecoderScratch scratch;
  memset(scratch.codes, 0, sizeof scratch.codes);
  dispatch_rows(l.dtype, d, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item % l.kv_heads, token = item / l.kv_heads % l.max_seq_len;
      const int64_t sequence = item / l.kv_heads / l.max_seq_len;
      T* key = static_cast<T*>(k) + item * d;
      T* value = static_cast<T*>(v) + item * d;
      if (token >= l.lengths[sequence]) {
        memset(key, 0, d * sizeof(T));
        memset(value, 0, d * sizeof(T));
        continue;
      }
      const int64_t page = l.block_table[sequence * l.table_stride + token / r.page_size];
      const uint8_t* record = l.pages + format::record_offset<int64_t>(page, head, l.page_stride, record_bytes);
      const int number = static_cast<int>(token % r.page_size);
      const auto scale = [&](int at) {
        uint16_t bits;
        memcpy(&bits, record + at, sizeof bits);
        return bits;
      };
      read_key(r, record, number, scratch.codes, layout);
      decode_row<T, true>(scratch, split, l.key_signs, l.channels.of_head(head, d), r.key_width(), key_levels,
                          scale(r.key_scale(number)), key);
      visit_values(r, number, ValueReader{record, scratch.codes});
      decode_row<T, true>(scratch, split, l.value_signs, {}, r.value_width(), value_levels,
                          scale(r.value_scale(number)), value);
    }
  });
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
