// Where the activations of linear_packed belong. No torch: tests/native uses it too.
#pragma once

#include <vector>

#include "format.h"

namespace turboquant::cpu {

// The channel of every byte of factors (kernels/linear.h), [chunks, t, fields, 16]: that of the code which it meets, in
// a word of row 0 or 8 of a block. The constructor asks format.h.
class LinearMap {
 public:
  explicit LinearMap(const format::WeightBlock& b) : channels_(static_cast<size_t>(2 * b.group)) {
    constexpr int kLane = format::WeightBlock::kLaneBytes, kLanes = 4;
    const int fields = 8 / b.bits;
    for (int row : {0, 8}) {
      for (int c = 0; c < b.group; ++c) {
        const format::Piece piece = b.code(row, c).piece[0];
        const int chunk = piece.byte / format::WeightBlock::kWarpBytes, field = piece.shift / b.bits;
        const int t = piece.byte % format::WeightBlock::kWarpBytes / kLane;
        channels_[static_cast<size_t>(((chunk * kLanes + t) * fields + field) * kLane + piece.byte % kLane)] =
            static_cast<uint8_t>(c);
      }
    }
  }
  const uint8_t* get() const { return channels_.data(); }

 private:
  std::vector<uint8_t> channels_;
};

}  // namespace turboquant::cpu
