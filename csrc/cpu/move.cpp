// cache_move: copies the codes and scales of tokens from slot to slot, byte by byte.
#include "calls/move.h"

#include <algorithm>

#include "cpu/cache/batch.h"
#include "cpu/common/torch.h"

namespace turboquant::cpu {
namespace {

// The slots of all heads, [kv_heads, n]: sources, and targets of which no head has the same one twice.
struct Slots {
  std::vector<int64_t> from, to;

  Slots(const MoveCall& c, int64_t num_slots)
      : from(checked_slots(c.sources, 1, "sources", num_slots)), to(checked_slots(c.targets, 1, "targets", num_slots)) {
    std::vector<int64_t> used;
    for (int64_t head = 0; head < c.kv_heads(); ++head) {
      used.clear();
      for (int64_t i = head * c.count(); i < (head + 1) * c.count(); ++i) {
        if (moves(i)) used.push_back(to[i]);
      }
      std::sort(used.begin(), used.end());
      const auto twice = std::adjacent_find(used.begin(), used.end());
      STD_TORCH_CHECK(twice == used.end(), "targets holds slot ", twice == used.end() ? 0 : *twice,
                      " twice for KV head ", head, ": a slot has room for one token");
    }
  }
  bool moves(int64_t i) const { return from[i] >= 0 && to[i] >= 0; }
};

void cache_move(const MoveCall& c) {
  const format::Record record = check_move(c);
  const int64_t pages = std::min(c.cache.size(0), INT64_MAX / c.page_size);  // of no heads there can be many
  const Slots slots(c, pages * c.page_size);
  const Tensor moved = new_moved_tokens(c, record.token_bytes());
  uint8_t* cache = data_of<uint8_t>(c.cache);
  const int64_t stride = entry_stride(c.cache);
  const auto for_each = [&](const std::vector<int64_t>& of, auto&& copy) {
    parallel_for(c.kv_heads() * c.count(), 64, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (!slots.moves(i)) continue;
        const int64_t page = of[i] / record.page_size, head = i / c.count();
        uint8_t* at = cache + format::record_offset<int64_t>(page, head, stride, record.record_bytes());
        copy(at, static_cast<int>(of[i] % record.page_size), data_of<uint8_t>(moved) + i * record.token_bytes());
      }
    });
  };
  // All tokens are read before one is written, so that a slot may be a source and a target.
  for_each(slots.from, [&](const uint8_t* at, int token, uint8_t* to) { kernels().take_token(record, at, token, to); });
  for_each(slots.to, [&](uint8_t* at, int token, const uint8_t* of) { kernels().put_token(record, at, token, of); });
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) {
  using namespace turboquant;
  m.impl("cache_move", boxed<&cpu::cache_move>);
}
