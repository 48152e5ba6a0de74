// A call of cache_move: its arguments and their checks, which both backends share.
#pragma once

#include "calls/boxed.h"
#include "checks.h"
#include "memory.h"

namespace turboquant {

// The arguments of cache_move in the order of its schema (csrc/ops.cpp).
struct MoveCall {
  Tensor cache;             // uint8 [num_pages, kv_heads, record_bytes], any stride of pages, written
  Tensor sources, targets;  // int32 or int64 [kv_heads, n]: slots of every head; -1: leave this one out
  int64_t head_dim, page_size, key_bits, value_bits;

  int64_t kv_heads() const { return cache.size(1); }
  int64_t count() const { return sources.size(1); }  // of a head
};

// Checks everything that can be checked without reading values. Returns the geometry of the cache's records.
inline format::Record check_move(const MoveCall& c) {
  const format::Record record = check_record(c.head_dim, c.page_size, c.key_bits, c.value_bits);
  check_cache(c.cache, c.cache, record);
  const auto check = [&](const Tensor& slots, const char* name, int64_t count) {
    check_device(slots, c.cache, name);
    check_dtype(slots, name, {ScalarType::Int, ScalarType::Long});
    check_shape(slots, name, {c.kv_heads(), count});
    check_contiguous(slots, name);
  };
  check(c.sources, "sources", -1);
  check(c.targets, "targets", c.count());
  Arguments memory;
  memory.writes(c.cache, "cache");
  memory.reads(c.sources, "sources");
  memory.reads(c.targets, "targets");
  memory.check();
  return record;
}

// What is between reading and writing: the codes and scales of all tokens of a call.
inline Tensor new_moved_tokens(const MoveCall& c, int64_t token_bytes) {
  return new_tensor(c.cache, {c.kv_heads(), c.count(), token_bytes}, ScalarType::Byte, "the work space");
}

}  // namespace turboquant
