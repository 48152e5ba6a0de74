// The keys and values of a step from codes to float16 in shared memory, by all threads of a block.
#pragma once

#include "cuda/attention/general/operand_layout.cuh"
#include "cuda/attention/general/page_stages.cuh"

namespace turboquant::cuda::general {

// Where there are no codes, beyond d or of a key that does not exist, the codes of another place are expanded: every level is
// finite, and its products are with zeros or are masked. All codes are read before anything is stored, so that the reads
// do not wait for each other.
template <typename S>
class CodeExpansion {
 public:
  __device__ __forceinline__ explicit CodeExpansion(const BlockContext<S>& block) : block_(block) {}

  __device__ __forceinline__ void expand(const PageStages<S>& pages, int step) const {
    expand_scalars(pages, step);
    switch (block_.x.layout.key_bits) {
      case 2: expand_keys<2>(pages, step); break;
      case 3: expand_keys<3>(pages, step); break;
      case 4: expand_keys<4>(pages, step); break;
      case 5:
        if (block_.x.layout.octets % 4 == 0) {
          expand_keys<5, true>(pages, step);
        } else {
          expand_keys<5>(pages, step);
        }
        break;
      default: expand_keys<8>(pages, step); break;
    }
    switch (block_.x.layout.value_bits) {
      case 2: expand_values<2>(pages, step); break;
      case 3: expand_values<3>(pages, step); break;
      case 4: expand_values<4>(pages, step); break;
      default: expand_values<8>(pages, step); break;
    }
  }

 private:
  using Layout = OperandLayout<S>;
  using Place = typename PageStages<S>::Place;

  __device__ __forceinline__ void expand_scalars(const PageStages<S>& pages, int step) const {
    const int key = block_.thread.index;
    if (key >= S::kKeys) return;
    const RecordLayout& layout = block_.x.layout;
    KeyScalars<S>& to = block_.shared.scalars(step);
    const Place from = pages.place(step, key);
    const bool exists = pages.exists(step, key);
    float key_scale = 0, value_scale = 0;
    if (exists) {
      key_scale = __half2float(reinterpret_cast<const __half*>(from.tile + layout.key_scales)[from.number]);
      value_scale = __half2float(reinterpret_cast<const __half*>(from.tile + layout.value_scales)[from.number]);
    }
    to.key_scale[key] = key_scale * format::kLevelUnit;
    to.value_scale[key] = value_scale * format::kLevelUnit;
    to.position[key] = exists ? pages.position(step) + key : -1;
  }

  // A warp expands some octets of eight keys.
  template <int BITS, bool WHOLE = false>
  __device__ __forceinline__ void expand_keys(const PageStages<S>& pages, int step) const {
    const RecordLayout& layout = block_.x.layout;
    const int warp = block_.thread.warp, lane = block_.thread.lane;
    // Eight lanes that store at the same time store 128 neighbouring bytes.
    const int t = S::kHopper ? lane / 8 : block_.thread.t;
    const int key = warp % S::kKeyOctets * 8 + (S::kHopper ? lane % 8 : block_.thread.g);
    const int first = 4 * (warp / S::kKeyOctets) + t;
    constexpr int kStride = 4 * (S::kWarps / S::kKeyOctets);
    const Place from = pages.place(step, key);
    uint2 codes[S::kThreadWords] = {};
    if (S::kStaged || from.tile) {
      const uint8_t* row = from.tile + from.number * layout.key_row_bytes;
      const uint8_t* plane = from.tile + layout.key_planes + from.number * layout.key_plane_bytes;
#pragma unroll
      for (int k = 0; k < S::kThreadWords; ++k) {
        codes[k] = key_codes<BITS, WHOLE>(row, plane, layout.octets, min(first + k * kStride, layout.octets - 1));
      }
    }
    const LevelTables& levels = block_.shared.constants().levels;
    const uint4 table = levels.keys;
    uint4* out = block_.shared.keys(step) + Layout::key_word(key, first);
    const auto store = [&](const uint8_t* fives) {
#pragma unroll
      for (int k = 0; k < S::kThreadWords; ++k) {
        out[k * Layout::key_word(0, kStride)] = key_levels<BITS>(codes[k], table, fives);
      }
    };
    if (BITS == 5 && block_.a.key_levels) {
      store(levels.fives);
    } else {
      store(nullptr);
    }
  }

  // A warp expands some chunks of 16 channels of a value block.
  template <int BITS>
  __device__ __forceinline__ void expand_values(const PageStages<S>& pages, int step) const {
    const RecordLayout& layout = block_.x.layout;
    const int warp = block_.thread.warp, lane = block_.thread.lane;
    const int block = warp % S::kValueBlocks, first = warp / S::kValueBlocks;
    constexpr int kStride = S::kWarps / S::kValueBlocks;
    const Place from = pages.place(step, 16 * block);
    uint2 codes[S::kThreadWords] = {};
    if (S::kStaged || from.tile) {
      const uint8_t* bytes = from.tile + layout.value_blocks + from.number / 16 * layout.value_block_bytes;
#pragma unroll
      for (int k = 0; k < S::kThreadWords; ++k) {
        codes[k] = value_codes<BITS>(bytes, layout.head_dim, min(first + k * kStride, layout.octets / 2 - 1), lane);
      }
    }
    const uint4 table = block_.shared.constants().levels.values;
    uint4* out = block_.shared.values(step) + Layout::value_chunk(block, first);
#pragma unroll
    for (int k = 0; k < S::kThreadWords; ++k) {
      Layout::store_values(out + k * kStride * Layout::kChunkWords, lane, value_levels<BITS>(codes[k], table));
    }
  }

  const BlockContext<S>& block_;
};

}  // namespace turboquant::cuda::general
