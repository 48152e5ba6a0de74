// linear_experts: products with those weights that a router has chosen for each token (docs/format.md section 13).
//
// Pairs of a token and an expert are put into the order of their experts. A piece is some pairs of one expert, no more
// than linear_packed multiplies at once. The pieces of a turn are computed together: threads share first the pieces,
// whose activations become integers, then parts of a few tiles of each piece. Some pieces have one pair and others
// hundreds, so a thread takes the next part when it is done with its last one. A turn has as many pairs as memory of a
// bounded size holds, and its results are copied to y, where the pairs of a token are neighbours.
#include <algorithm>
#include <vector>

#include "cpu/linear/products.h"

namespace turboquant::cpu {
namespace {

// Of the pairs in the order of their experts.
struct Piece {
  int64_t expert, first, count;
};

class ExpertsProduct {
 public:
  // The call has been checked, y is [tokens, choices, n] and not empty.
  ExpertsProduct(const ExpertsCall& c, const ExpertsShape& of, const Levels& levels, const float* signs,
                 const Tensor& y)
      : call_(c), of_(of), signs_(signs), y_(y), row_bytes_(of.weight.n * static_cast<int64_t>(y.element_size())),
        weights_(of.weight, levels), of_piece_(tokens_at_once(of.weight, of.pairs())),
        of_turn_(std::min(of.pairs(), of_piece_ + kTurnBytes / (input_bytes(of.weight) + row_bytes_))),
        inputs_(of.weight, of_turn_), results_(of_turn_ * row_bytes_) {}

  void run() {
    const std::vector<int64_t> ends = put_in_order();
    int64_t pair = 0;
    for (int64_t expert = 0; expert < of_.experts; ++expert) {
      while (pair < ends[static_cast<size_t>(expert)]) {
        const int64_t count = std::min(of_piece_, ends[static_cast<size_t>(expert)] - pair);
        if (pair + count - turn_ > of_turn_) multiply(pair);
        pieces_.push_back({expert, pair, count});
        pair += count;
      }
    }
    multiply(pair);
  }

 private:
  static constexpr int64_t kTurnBytes = 32 << 20;

  // Fills order_, and the results of pairs whose expert does not exist with zeros. Returns where the pairs of each
  // expert end.
  std::vector<int64_t> put_in_order() {
    const int64_t* chosen = data_of<int64_t>(call_.experts);
    const auto exists = [&](int64_t pair) { return chosen[pair] >= 0 && chosen[pair] < of_.experts; };
    std::vector<int64_t> ends(static_cast<size_t>(of_.experts)), next;
    for (int64_t pair = 0; pair < of_.pairs(); ++pair) {
      if (exists(pair)) {
        ++ends[static_cast<size_t>(chosen[pair])];
      } else {
        std::memset(element(y_, pair * of_.weight.n), 0, row_bytes_);
      }
    }
    int64_t total = 0;
    for (int64_t& end : ends) next.push_back(total), end = total += end;
    order_.resize(static_cast<size_t>(total));
    for (int64_t pair = 0; pair < of_.pairs(); ++pair) {
      if (exists(pair)) order_[static_cast<size_t>(next[static_cast<size_t>(chosen[pair])]++)] = pair;
    }
    return ends;
  }

  // The pieces of this turn, whose last pair is before `end`; the next turn begins there.
  void multiply(int64_t end) {
    const int64_t pieces = static_cast<int64_t>(pieces_.size()), tiles = of_.weight.tiles();
    for_each_dynamically(pieces, [&](int64_t i) { prepare(pieces_[static_cast<size_t>(i)]); });
    // A part of one pair is worth taking, and one of a hundred pairs is a small share of a thread's work.
    const int64_t most = 16 + (1 << 18) / (of_.weight.k * format::kWeightRows), parts = (tiles + most - 1) / most;
    for_each_dynamically(pieces * parts, [&](int64_t i) {
      const int64_t begin = i % parts * most;
      multiply_tiles(pieces_[static_cast<size_t>(i / parts)], begin, std::min(begin + most, tiles));
    });
    for (int64_t pair = turn_; pair < end; ++pair) {
      std::memcpy(element(y_, order_[static_cast<size_t>(pair)] * of_.weight.n), result(pair), row_bytes_);
    }
    pieces_.clear();
    turn_ = end;
  }

  void prepare(const Piece& p) const {
    for (int64_t i = 0; i < p.count; ++i) {
      const int64_t token = order_[static_cast<size_t>(p.first + i)] / of_.choices;
      const ActivationRows row{.x = element(call_.x, token * call_.x.stride(0)),
                               .dtype = dtype_of(call_.x),
                               .count = 1,
                               .stride = 0,
                               .signs = signs_,
                               .channel_inverse = nullptr};
      kernels().linear_inputs(weights_.of(nullptr), row, inputs_of(p), i);
    }
  }

  void multiply_tiles(const Piece& p, int64_t begin, int64_t end) const {
    const LinearWeight weight = weights_.of(data_of<uint8_t>(call_.packed) + p.expert * of_.weight_bytes());
    const LinearOutputs outputs{.y = result(p.first),
                                .bias = call_.bias ? element(*call_.bias, p.expert * of_.weight.n) : nullptr,
                                .dtype = dtype_of(call_.x)};
    kernels().linear_tiles(weight, inputs_of(p), begin, end, outputs);
  }

  LinearInputs inputs_of(const Piece& p) const { return inputs_.part(p.first - turn_, p.count); }
  uint8_t* result(int64_t pair) const { return results_.as<uint8_t>() + (pair - turn_) * row_bytes_; }

  const ExpertsCall& call_;
  const ExpertsShape& of_;
  const float* const signs_;
  const Tensor y_;
  const int64_t row_bytes_;  // of a result
  const ProductWeights weights_;
  const int64_t of_piece_, of_turn_;  // the most pairs
  const InputMemory inputs_;          // of the pairs of a turn
  const Scratch results_;
  std::vector<int64_t> order_;  // token * choices + choice of each pair that has an expert
  std::vector<Piece> pieces_;   // of this turn
  int64_t turn_ = 0;            // its first pair
};

Tensor linear_experts(const ExpertsCall& c) {
  const ExpertsShape of = check_experts(c);
  const Levels levels(of.weight.block.width(), checked_levels(c.levels, c.x, c.bits, "levels"));
  const float* signs = checked_signs(c.signs, "signs");
  Tensor y = new_experts_result(c, of);
  if (y.numel() > 0) ExpertsProduct(c, of, levels, signs, y).run();
  return y;
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) {
  using namespace turboquant;
  m.impl("linear_experts", boxed<&cpu::linear_experts, kLinearExperts>);
}
