// Where the tokens of a call are stored: pages by slot, rows of the tail by sequence and position.
#pragma once

#include "cpu/cache/batch.h"

namespace turboquant::cpu {

struct Destinations {
  std::vector<int64_t> slot;      // [tokens], page * page_size + offset, -1: none
  std::vector<int64_t> sequence;  // [tokens], -1 when the token does not enter the tail
  std::vector<int64_t> position;  // [tokens]
};

inline Destinations checked_destinations(const Tensor& slot_mapping, int64_t tokens, int64_t num_slots) {
  std::vector<int64_t> slots = checked_slots(slot_mapping, entry_stride(slot_mapping), "slot_mapping", num_slots);
  const std::vector<int64_t> none(tokens, -1);
  return {.slot = std::move(slots), .sequence = none, .position = none};
}

// Marks the tokens that enter the tail: sinks, and the last `ring` of each sequence. tail_slots: [seqs]
inline void enter_tail(Destinations& to, const Batch& batch, const std::vector<int64_t>& tail_slots,
                       int64_t sink_tokens, int64_t ring) {
  for (int64_t s = 0; s < batch.count; ++s) {
    if (tail_slots[s] < 0) continue;
    for (int64_t i = 0; i < batch.queries(s); ++i) {
      const int64_t token = batch.query_begin[s] + i, position = batch.position(s, i);
      const bool kept = format::tail_keeps(position, batch.length[s], sink_tokens, ring);
      if (position < 0 || to.slot[token] < 0 || !kept) continue;
      to.sequence[token] = s;
      to.position[token] = position;
    }
  }
}

}  // namespace turboquant::cpu
