// The exact keys and values of a sequence, those of its tail (docs/format.md section 9) and the call's own, step by
// step, from their own dtype to float16 in shared memory. A step's keys are the visible sinks and then the visible
// recent tokens, without a gap.
#pragma once

#include "cuda/attention/general/block_context.cuh"
#include "cuda/attention/general/half_scale.cuh"
#include "cuda/attention/general/operand_layout.cuh"

namespace turboquant::cuda::general {

// Which exact keys the rows of a block see, numbered without a gap.
struct ExactKeys {
  int count;
  // Undefined where there are none.
  int sinks_begin, sinks;  // position of the first visible sink, and how many there are
  int recent_begin;        // position of the first visible recent token

  // From what the first and the last row see.
  __device__ __forceinline__ void select(const Attention& a, int sequence, const VisibleKeys& first,
                                         const VisibleKeys& last) {
    count = 0;
    const int64_t slot = a.tail_slot(sequence);
    if ((slot < 0 || slot >= a.max_seqs) && !a.new_keys) return;
    sinks_begin = first.first;
    sinks = max(last.sinks - sinks_begin, 0);
    recent_begin = max(first.recent_begin(), a.new_keys ? last.sinks : a.sink_tokens);
    count = sinks + (a.recent_window > 0 || a.new_keys ? max(last.end - recent_begin, 0) : 0);
  }

  // The position of a key; -1 where there is none.
  __device__ __forceinline__ int position(int number) const {
    if (number >= count) return -1;
    return number < sinks ? sinks_begin + number : recent_begin + number - sinks;
  }
};

// The exact key or value of a position. new_begin: the first position of the call's own tokens.
__device__ __forceinline__ const void* exact_vector(const Arguments& x, const WorkItem& work, int position,
                                                    int new_begin, bool is_value) {
  const Attention& a = x.a;
  if (position >= new_begin) return a.new_row(work.first_query + position - new_begin, work.kv_head, is_value);
  const int rows = a.sink_tokens + a.ring, row = format::tail_row(position, a.sink_tokens, a.ring);
  const int64_t from = format::tail_offset<int64_t>(a.tail_slot(work.sequence), a.tail_stride, work.kv_head, row, rows,
                                                    x.layout.head_dim, is_value);
  return static_cast<const uint8_t*>(a.tail) + from * element_size(a.dtype);
}

// Octet o of it, less the center if there is one. center: of the head, or null
__device__ __forceinline__ void load_exact(const Arguments& x, const void* vector, const float* center, int o,
                                           float (&y)[8]) {
  load_floats_as<8>(vector, x.a.dtype, 8 * o, y);
  if (!center) return;
  float c[8];
  load_floats<8>(center + 8 * o, c);
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] -= c[i];
}

template <typename S>
class ExactTail {
 public:
  __device__ __forceinline__ explicit ExactTail(const BlockContext<S>& block) : block_(block) {}

  // The keys that some row sees, from what the first and the last row see; the caller synchronises.
  __device__ __forceinline__ void select(const VisibleKeys& first, const VisibleKeys& last) {
    const Attention& a = block_.a;
    const int sequence = block_.work.sequence;
    keys_.select(a, sequence, first, last);
    if (keys_.count > 0 && block_.thread.index == 0) {
      block_.shared.constants().new_begin = a.new_begin(a.length(sequence), a.num_queries(sequence));
    }
  }
  __device__ __forceinline__ int steps() const { return (keys_.count + S::kKeys - 1) / S::kKeys; }

  // A vector with an infinity or a NaN becomes zeros with a scale of NaN.
  __device__ __forceinline__ void expand(int step) const {
    if constexpr (S::kDim <= 256) {
      expand_several(step);
    } else {
      for (int i = block_.thread.warp; i < 2 * S::kKeys; i += S::kWarps) expand_vector(step, i / 2, i % 2);
    }
  }

  // The position of a step's key; -1 where there is none.
  __device__ __forceinline__ int position(int step, int key) const { return keys_.position(step * S::kKeys + key); }

 private:
  // A warp takes as many vectors at a time as it has lanes for their octets, and loads kLoads times as many before it
  // waits for the first: a step's vectors would otherwise be waited for one after the other.
  __device__ __forceinline__ void expand_several(int step) const {
    constexpr int kLanes = S::kChannelOctets <= 8 ? 8 : S::kChannelOctets <= 16 ? 16 : 32;  // of a vector
    constexpr int kVectors = 32 / kLanes, kLoads = 4, kAtOnce = kVectors * S::kWarps;
    const Attention& a = block_.a;
    const int d = block_.x.layout.head_dim, octets = block_.x.layout.octets, o = block_.thread.lane % kLanes;
    const int mine = block_.thread.warp * kVectors + block_.thread.lane / kLanes;
    const int new_begin = block_.shared.constants().new_begin;
    const float* of_keys = block_.x.centered(true) ? a.channels.center + int64_t{block_.work.kv_head} * d : nullptr;
#pragma unroll 1
    for (int first = 0; first < 2 * S::kKeys; first += kLoads * kAtOnce) {
      float y[kLoads][8];
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        const int i = first + n * kAtOnce + mine, place = i < 2 * S::kKeys ? position(step, i / 2) : -1;
#pragma unroll
        for (float& x : y[n]) x = 0;
        if (place < 0 || o >= octets) continue;
        const void* vector = exact_vector(block_.x, block_.work, place, new_begin, i % 2);
        load_exact(block_.x, vector, i % 2 ? nullptr : of_keys, o, y[n]);
      }
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        const int i = first + n * kAtOnce + mine;
        uint32_t largest = 0;
#pragma unroll
        for (const float x : y[n]) largest = max(largest, magnitude_bits(x));
#pragma unroll
        for (int bit = 1; bit < kLanes; bit *= 2) largest = max(largest, __shfl_xor_sync(0xffffffff, largest, bit));
        if (i < 2 * S::kKeys) put(step, i / 2, i % 2, position(step, i / 2), largest, o, y[n], o == 0);
      }
    }
  }

  // Octet o of a vector whose largest magnitude has the bits `largest` to shared memory; `leads` also writes what
  // belongs to the whole vector.
  __device__ __forceinline__ void put(int step, int key, bool is_value, int place, uint32_t largest, int o,
                                      float (&y)[8], bool leads) const {
    const bool finite = largest < kInfinityBits;
    const int e = half_exponent(largest);
    const float up = finite ? clamped_power_of_two(kHalfExponent - e) : 0;
#pragma unroll
    for (float& x : y) x = finite ? x * up : 0;
    if (o < S::kChannelOctets) {
      if (!is_value) {
        block_.shared.keys(step)[OperandLayout<S>::key_word(key, o)] = {halves(y[0], y[1]), halves(y[2], y[3]),
                                                                        halves(y[4], y[5]), halves(y[6], y[7])};
      } else {
        OperandLayout<S>::store_value(block_.shared.values(step), key, o, y);
      }
    }
    if (leads) {
      KeyScalars<S>& to = block_.shared.scalars(step);
      const float scale = place < 0 ? 0 : finite ? clamped_power_of_two(e - kHalfExponent) : quiet_nan();
      (is_value ? to.value_scale : to.key_scale)[key] = scale;
      if (!is_value) to.position[key] = place;
    }
  }

  // A warp takes a vector of any length.
  __device__ __forceinline__ void expand_vector(int step, int key, bool is_value) const {
    const Attention& a = block_.a;
    const int d = block_.x.layout.head_dim, octets = block_.x.layout.octets, lane = block_.thread.lane;
    const int place = position(step, key), new_begin = block_.shared.constants().new_begin;
    const bool exists = place >= 0;
    const void* vector = exists ? exact_vector(block_.x, block_.work, place, new_begin, is_value) : nullptr;
    const float* center =
        !is_value && block_.x.centered(true) ? a.channels.center + int64_t{block_.work.kv_head} * d : nullptr;
    uint32_t largest = 0;
    if (exists) {
      for (int o = lane; o < octets; o += 32) {
        float y[8];
        load_exact(block_.x, vector, center, o, y);
#pragma unroll
        for (int c = 0; c < 8; ++c) largest = max(largest, magnitude_bits(y[c]));
      }
    }
    largest = max_of_lanes(largest);
    for (int o = lane; o < S::kChannelOctets; o += 32) {
      float y[8] = {};
      if (exists && o < octets) load_exact(block_.x, vector, center, o, y);
      put(step, key, is_value, place, largest, o, y, o == 0);
    }
  }

  const BlockContext<S>& block_;
  ExactKeys keys_;
};

}  // namespace turboquant::cuda::general
