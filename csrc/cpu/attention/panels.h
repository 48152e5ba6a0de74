// Value blocks in the order in which attention reads them. No torch: tests/native uses it too.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/kernels.h"

namespace turboquant::cpu {

// The value block as attention reads it, panel by panel (kernels.h): which tokens and channels every word holds, found by
// asking format.h for every code of a block.
class PanelMap {
 public:
  explicit PanelMap(const format::Record& record) {
    format::Record r = record;
    if (r.value_bits == 3) r.value_bits = 4;  // spread to nibbles, three-bit blocks have the layout of four-bit ones
    const int bits = r.value_bits, panels = r.value_block_bytes() / 64, fields = 8 / bits;
    quad_of_.assign(panels * 16, -1);
    words_.resize(r.head_dim * 4);
    for (int t = 0; t < format::kValueGroup; ++t) {
      for (int c = 0; c < r.head_dim; ++c) {
        const format::Piece piece = r.value(t, c).piece[0];
        const int byte = piece.byte - r.value_blocks(), field = piece.shift / bits;
        int word = byte / 4;
        if (record.value_bits == 3 && c < r.head_dim / 64 * 64) {  // four words of sixteen lanes become four panels
          word = word / 64 * 64 + word % 4 * 16 + word % 64 / 4;
        }
        quad_of_[word] = t % 8 / 2;
        words_[c * 4 + t % 8 / 2] = (word / 16 * fields + field) * 16 + word % 16;
      }
    }
    for (int p = 0; p < panels; ++p) {
      const auto begin = quad_of_.begin() + 16 * p;
      int pattern = 0;
      while (16 * pattern < static_cast<int>(quads_.size()) &&
             !std::equal(begin, begin + 16, quads_.begin() + 16 * pattern))
        ++pattern;
      if (16 * pattern == static_cast<int>(quads_.size())) quads_.insert(quads_.end(), begin, begin + 16);
      pattern_.push_back(pattern);
    }
    panels_ = {panels, static_cast<int>(quads_.size() / 16), quads_.data(), pattern_.data(), fields, words_.data()};
  }
  PanelMap(const PanelMap&) = delete;
  const ValuePanels& get() const { return panels_; }

 private:
  std::vector<int32_t> quad_of_, quads_, pattern_, words_;
  ValuePanels panels_;
};

}  // namespace turboquant::cpu
