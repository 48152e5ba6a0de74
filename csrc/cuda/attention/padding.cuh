// The results of tokens behind the last sequence, which belong to no sequence and see no keys.
#pragma once

#include "cuda/attention/call.cuh"

namespace turboquant::cuda {

// Fills them: 0 in out, -inf in lse. This is thread `thread` of the `threads` that share the work. Word: what `out` is
// written in; it is aligned to words, and a row of it is whole words.
template <typename Word>
__device__ __forceinline__ void clear_padding(const Attention& a, int row_words, int64_t thread, int64_t threads) {
  const int used = a.query_begin ? min(max(a.query_begin[a.seqs], 0), a.tokens) : min(a.seqs, a.tokens);
  const int64_t first = int64_t{used} * a.q_heads, last = int64_t{a.tokens} * a.q_heads;
#pragma unroll 1
  for (int64_t i = first + thread; i < last; i += threads) a.lse[i] = -INFINITY;
  Word* out = static_cast<Word*>(a.out);
#pragma unroll 1
  for (int64_t i = first * row_words + thread; i < last * row_words; i += threads) out[i] = 0;
}

}  // namespace turboquant::cuda
