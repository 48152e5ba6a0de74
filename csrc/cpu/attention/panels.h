// Value blocks in the order in which attention reads them. No torch: tests/native uses it too.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "cpu/kernels.h"

namespace turboquant::cpu {

// The value block as attention reads it, panel by panel (kernels.h): the tokens and channels of every word. The
// constructor finds them by asking format.h for every code of a block.
class PanelMap {
 public:
  explicit PanelMap(const format::Record& record) {
    const bool spread = format::is_spread(record.value_width());
    const int bits = format::field_bits(record.value_width());
    format::Record r = record;
    r.value_bits = bits;  // expanded to nibbles, spread blocks have the layout of four-bit ones
    const int panels = r.value_block_bytes() / 64, fields = 8 / bits;
    quad_of_.assign(panels * 16, -1);
    words_.resize(r.head_dim * 4);
    for (int t = 0; t < format::kValueGroup; ++t) {
      for (int c = 0; c < r.head_dim; ++c) {
        const format::Piece piece = r.value(t, c).piece[0];
        const int byte = piece.byte - r.value_blocks(), field = piece.shift / bits;
        int word = byte / 4;
        constexpr int kSet = format::kSpreadChannels;
        if (spread && c < r.head_dim / kSet * kSet) {  // four words of sixteen lanes become four panels
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
    // Kernels have room for no more; no supported geometry needs them.
    if (16 * kMaxPatterns < static_cast<int>(quads_.size())) throw std::length_error("too many patterns of panels");
    panels_ = {.panels = panels,
               .patterns = static_cast<int>(quads_.size() / 16),
               .quads = quads_.data(),
               .pattern = pattern_.data(),
               .fields = fields,
               .words = words_.data()};
  }
  PanelMap(const PanelMap&) = delete;
  const ValuePanels& get() const { return panels_; }

 private:
  std::vector<int32_t> quad_of_, quads_, pattern_, words_;
  ValuePanels panels_;
};

// The levels of latents as attention reads them (kernels/mla.h): bytes, in panels of 16 channels of one quad of tokens.
class LatentPanelMap {
 public:
  explicit LatentPanelMap(int latent_dim) {
    const int of_quad = latent_dim / 16;
    for (int quad = 0; quad < kQuads; ++quad) {
      quads_.insert(quads_.end(), 16, quad);
      pattern_.insert(pattern_.end(), of_quad, quad);
    }
    for (int c = 0; c < latent_dim; ++c) {
      for (int quad = 0; quad < kQuads; ++quad) words_.push_back((quad * of_quad + c / 16) * 16 + c % 16);
    }
    panels_ = {.panels = kQuads * of_quad,
               .patterns = kQuads,
               .quads = quads_.data(),
               .pattern = pattern_.data(),
               .fields = 1,
               .words = words_.data()};
  }
  LatentPanelMap(const LatentPanelMap&) = delete;
  const ValuePanels& get() const { return panels_; }

 private:
  static constexpr int kQuads = kGroupTokens / 4;
  static_assert(kQuads <= kMaxPatterns);
  std::vector<int32_t> quads_, pattern_, words_;
  ValuePanels panels_;
};

// The panels of a geometry, made once per process: a decode step calls with the same few geometries again and again.
inline const PanelMap& panel_map(const format::Record& r) {
  static std::mutex mutex;
  static std::map<std::tuple<int, int, int, int>, std::unique_ptr<PanelMap>> maps;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<PanelMap>& map = maps[{r.head_dim, r.page_size, r.key_bits, r.value_bits}];
  if (!map) map = std::make_unique<PanelMap>(r);
  return *map;
}

}  // namespace turboquant::cpu
