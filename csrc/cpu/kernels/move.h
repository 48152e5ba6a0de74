// The op cache_move: the bytes that a token owns in its record, one after the other, and back.
#pragma once

#include "cpu/kernels/record.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

// Calls copy(place in the record, place among the token's bytes, count) for everything that a token owns, in a fixed
// order: row and plane of its key, its value byte by byte, its two scales.
template <typename Copy>
class TokenBytes {
 public:
  explicit TokenBytes(Copy copy) : copy_(copy) {}

  void visit(const format::Record& r, int token) {
    const int tile = r.tile_of(token), t = token % r.tile_tokens();
    add(tile + t * r.key_row_bytes(), r.key_row_bytes());
    add(tile + r.key_planes() + t * r.key_plane_bytes(), r.key_plane_bytes());
    visit_values(r, token, *this);
    add(r.key_scale(token), sizeof(uint16_t));
    add(r.value_scale(token), sizeof(uint16_t));
  }

  // What visit_values calls.
  template <typename Width>
  void octets(Width, int, int, int at, int distance) {
    add_apart(at, distance, 8);
  }
  void three_bits(int, int at) {
    for (int j = 0; j < format::kSpreadUnits; ++j) add_apart(at + 4 * j, 4 * kLaneBytes, 8);
  }
  void last_sixteen(int, int at) { add_apart(at, 16, 4); }

 private:
  void add(int place, int count) {
    copy_(place, done_, count);
    done_ += count;
  }
  void add_apart(int place, int distance, int count) {
    for (int g = 0; g < count; ++g) add(place + g * distance, 1);
  }

  Copy copy_;
  int done_ = 0;
};

// bytes: [token_bytes]
inline void take_token(const format::Record& r, const uint8_t* record, int token, uint8_t* bytes) {
  TokenBytes([=](int place, int at, int count) { memcpy(bytes + at, record + place, count); }).visit(r, token);
}
inline void put_token(const format::Record& r, uint8_t* record, int token, const uint8_t* bytes) {
  TokenBytes([=](int place, int at, int count) { memcpy(record + place, bytes + at, count); }).visit(r, token);
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
