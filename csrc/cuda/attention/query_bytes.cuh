// How a query is rounded where its products with codes are products of bytes: to 16 bits, a high and a low byte.
#pragma once

namespace turboquant::cuda {

constexpr float kMostQuery = 127 * 256;  // what the largest channel of a query becomes: its high byte is 127
constexpr float kLeastQuery = 1e-30f;    // queries of no larger channel count as 0

}  // namespace turboquant::cuda
