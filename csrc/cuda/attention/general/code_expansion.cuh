// The keys and values of a step from codes to float16 in shared memory, by all threads of a block.
#pragma once

#include "cuda/attention/general/operand_layout.cuh"
#include "cuda/attention/general/page_stages.cuh"

namespace turboquant::cuda::general {

// Where there are no codes, beyond d or of a key that does not exist, the codes of another place are expanded: every
// level is finite, and its products are with zeros or are masked. All codes are read before anything is stored, so
// that the reads do not wait for each other.
template <typename S>
class CodeExpansion {
 public:
  __device__ __forceinline__ explicit CodeExpansion(const BlockContext<S>& block) : block_(block) {}

  __device__ __forceinline__ void expand(const PageStages<S>& pages, int step) const {
    expand_scalars(pages, step);
    expand_keys(pages, step);
    expand_values(pages, step);
  }

 private:
  using Layout = OperandLayout<S>;
  using Width = format::Width;

  __device__ __forceinline__ void expand_scalars(const PageStages<S>& pages, int step) const {
    const int key = block_.thread.index;
    if (key >= S::kKeys) return;
    const RecordLayout& layout = block_.x.layout;
    KeyScalars<S>& to = block_.shared.scalars(step);
    const Token from = pages.token(step, key);
    const bool exists = pages.exists(step, key);
    float key_scale = 0, value_scale = 0;
    if (exists) {
      key_scale = __half2float(__ushort_as_half(*from.key_scale(layout)));
      value_scale = __half2float(__ushort_as_half(*from.value_scale(layout)));
    }
    to.key_scale[key] = key_scale * format::kLevelUnit;
    to.value_scale[key] = value_scale * format::kLevelUnit;
    to.position[key] = exists ? pages.position(step) + key : -1;
  }

  __device__ __forceinline__ void expand_keys(const PageStages<S>& pages, int step) const {
    switch (block_.a.record.key_width()) {
      case Width::k2: return expand_keys_of<Width::k2>(pages, step);
      case Width::k3: return expand_keys_of<Width::k3>(pages, step);
      case Width::k4: return expand_keys_of<Width::k4>(pages, step);
      case Width::k5:
        if (block_.x.layout.octets % 4 == 0) return expand_keys_of<Width::k5, true>(pages, step);
        return expand_keys_of<Width::k5>(pages, step);
      case Width::k8: return expand_keys_of<Width::k8>(pages, step);
      case Width::k1: return;  // no width of keys
    }
  }
  __device__ __forceinline__ void expand_values(const PageStages<S>& pages, int step) const {
    switch (block_.a.record.value_width()) {
      case Width::k2: return expand_values_of<Width::k2>(pages, step);
      case Width::k3: return expand_values_of<Width::k3>(pages, step);
      case Width::k4: return expand_values_of<Width::k4>(pages, step);
      case Width::k8: return expand_values_of<Width::k8>(pages, step);
      case Width::k1:
      case Width::k5: return;  // no widths of values
    }
  }

  // A warp expands some octets of eight keys.
  template <Width WIDTH, bool WHOLE = false>
  __device__ __forceinline__ void expand_keys_of(const PageStages<S>& pages, int step) const {
    const RecordLayout& layout = block_.x.layout;
    const int warp = block_.thread.warp, lane = block_.thread.lane;
    // Eight lanes that store at the same time store 128 neighbouring bytes.
    const int t = S::kHopper ? lane / 8 : block_.thread.t;
    const int key = warp % S::kKeyOctets * 8 + (S::kHopper ? lane % 8 : block_.thread.g);
    const int first = 4 * (warp / S::kKeyOctets) + t;
    constexpr int kStride = 4 * (S::kWarps / S::kKeyOctets);
    const Token from = pages.token(step, key);
    uint2 codes[S::kThreadWords] = {};
    if (S::kStaged || from.tile) {
      const uint8_t *row = from.key_row(layout), *plane = from.key_plane(layout);
#pragma unroll
      for (int k = 0; k < S::kThreadWords; ++k) {
        codes[k] = key_codes<WIDTH, WHOLE>(row, plane, layout.octets, min(first + k * kStride, layout.octets - 1));
      }
    }
    const LevelTables& levels = block_.shared.constants().levels;
    const uint4 table = levels.keys;
    uint4* out = block_.shared.keys(step) + Layout::key_word(key, first);
    const auto store = [&](const uint8_t* plane_table) {
#pragma unroll
      for (int k = 0; k < S::kThreadWords; ++k) {
        out[k * Layout::key_word(0, kStride)] = key_levels<WIDTH>(codes[k], table, plane_table);
      }
    };
    if (format::has_plane(WIDTH) && block_.a.key_levels) {
      store(levels.plane_keys);
    } else {
      store(nullptr);
    }
  }

  // A warp expands some slices of 16 channels of a value block.
  template <Width WIDTH>
  __device__ __forceinline__ void expand_values_of(const PageStages<S>& pages, int step) const {
    const RecordLayout& layout = block_.x.layout;
    const int warp = block_.thread.warp, lane = block_.thread.lane;
    const int block = warp % S::kValueBlocks, first = warp / S::kValueBlocks;
    constexpr int kStride = S::kWarps / S::kValueBlocks;
    const Token from = pages.token(step, format::kValueGroup * block);
    uint2 codes[S::kThreadWords] = {};
    if (S::kStaged || from.tile) {
      const uint8_t* bytes = from.value_block(layout);
#pragma unroll
      for (int k = 0; k < S::kThreadWords; ++k) {
        codes[k] = value_codes<WIDTH>(bytes, layout.head_dim, min(first + k * kStride, layout.octets / 2 - 1), lane);
      }
    }
    const uint4 table = block_.shared.constants().levels.values;
    uint4* out = block_.shared.values(step) + Layout::value_slice(block, first);
#pragma unroll
    for (int k = 0; k < S::kThreadWords; ++k) {
      Layout::store_values(out + k * kStride * Layout::kSliceWords, lane, value_levels<WIDTH>(codes[k], table));
    }
  }

  const BlockContext<S>& block_;
};

}  // namespace turboquant::cuda::general
