// Attention to exact keys, those of the tail and the call's own, up to 16 in a unit: 0-7 in the unit's first stage and
// 8-15 in its second, on tensor cores.
//
// A row again has two columns, so that its results lie where those of codes do. A weight is the sum of two elements of
// the tail's type; a query is of that type already, and its second column is never read. The output of a row is rotated
// at the end, so that it adds to the sums of codes.
#pragma once

#include "cuda/attention/split_kv/queries.cuh"
#include "cuda/attention/split_kv/softmax.cuh"

namespace turboquant::cuda::split_kv {

// A unit of exact keys. Key j of it, 0 to 15, is in the first stage below 8 and in the second one from 8 on.
struct ExactUnit {
  const uint8_t* shared;
  int stages[kUnitStages];
  int per_stage, stride;  // keys of a stage; bytes from one key to the next
  int first, left;        // its first key among the exact keys of the segment, and how many of them are left from there

  __device__ __forceinline__ ExactUnit(const BlockView& block, const Segment& segment, int unit,
                                       const int (&from)[kUnitStages])
      : shared(block.shared), stages{from[0], from[1]}, per_stage(block.layout.exact_keys),
        stride(block.layout.exact_stride), first(unit * kUnitStages * per_stage), left(segment.work.exact() - first) {
    static_assert(kUnitStages == 2);
  }

  __device__ __forceinline__ bool holds(int j) const { return j % 8 < per_stage && j / 8 * per_stage + j % 8 < left; }
  // The row of key j, the key and then its value. Where no key is held, the stage may contain anything, NaN too: there,
  // another key's row is read, with weight 0.
  __device__ __forceinline__ const uint8_t* row(int j) const {
    return shared + (holds(j) ? (j < 8 ? stages[0] : stages[1]) + j % 8 * stride : stages[0]);
  }
};

template <int D, int N>
class ExactTail {
  using X = SplitKvTraits<D, N>;
  using Rows = QueryRows<D, X::kRows>;

 public:
  explicit __device__ __forceinline__ ExactTail(const BlockView& block) : block_(block) {}

  // The unit's stages have arrived.
  __device__ __forceinline__ void attend(const Rows& rows, const Segment& segment, const ExactUnit& unit,
                                         RunningSoftmax<D, N>& softmax) const {
    // A loop, so that its code exists once (kernel.cuh says why). What registers hold of a row is chosen by branches.
#pragma unroll 1
    for (int n = 0; n < N; n += kAtOnce) {
      float dot[kAtOnce][4] = {}, score[kAtOnce][2], scale[kAtOnce], most[kAtOnce], top[kAtOnce], p[kAtOnce][2];
      Visible visible[kAtOnce];
      multiply_keys(rows, n, unit, dot);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        scale[k] = score_scale(block_.call, block_.rows()[4 * (n + k) + block_.t]);
        visible[k] = scores(rows, segment, unit, n + k, scale[k], dot[k], score[k]);
        most[k] = over_tokens(fmaxf(score[k][0], score[k][1]), [](float x, float y) { return fmaxf(x, y); });
      }
      with_index<0, N / kAtOnce>(n / kAtOnce, [&](auto step) {
        for_each<kAtOnce>([&](auto k) {
          constexpr int i = step * kAtOnce + k;
          if (__any_sync(0xffffffff, (most[k] - softmax.max[i]) * scale[k] > 16)) {
            softmax.template rescale<i>(most[k], scale[k]);
          }
          top[k] = softmax.max[i];
        });
      });
      uint32_t weight[kAtOnce][2];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          p[k][h] = score[k][h] == -INFINITY ? 0 : exp2_fast((score[k][h] - top[k]) * scale[k]);
          weight[k][h] = transposed(split(p[k][h] * kDown));
        }
      }
      float y[kAtOnce][2 * X::kTiles];  // channel 8 e + g of row t
      multiply_values(unit, visible, weight, y);
      rotate_columns(y);
      // In units of the sums of codes, which Join scales at the end.
      constexpr float kFactor = block_norm(RowLanes<D>::kLog) / (kDown * format::kLevelUnit);
      with_index<0, N / kAtOnce>(n / kAtOnce, [&](auto step) {
        for_each<kAtOnce>([&](auto k) {
          constexpr int i = step * kAtOnce + k;
          softmax.total[i] += p[k][0], softmax.total[i] += p[k][1];
#pragma unroll
          for (int e = 0; e < 2 * X::kTiles; ++e) {
            const float factor = kFactor * block_.plan.codes.value_inverses[e % 2];
            softmax.sums[e / 2][i][e % 2] = fmaf(y[k][e], factor, softmax.sums[e / 2][i][e % 2]);
          }
        });
      });
    }
  }

 private:
  // What follows from the lane is computed anew here or kept in registers, whichever spills less: the addresses of keys
  // are kept where four groups of rows share them, and then the places of scores are not.
  static constexpr bool kManyRows = N >= 4;
  // Groups of four rows that are attended to at once, because each waits for exchanges between lanes. Blocks of 16 rows
  // gained nothing, and sums of more channels leave too few registers.
  static constexpr int kAtOnce = N == 2 && D <= 128 ? 2 : 1;
  static constexpr float kDown = 1.0f / 16;  // weights go up to 2^16, which is beyond float16

  // Which of its keys g and g + 8 the row of each lane sees, as ballots of the warp; hidden: the lane's row does not
  // see a key that is held.
  struct Visible {
    unsigned seen[2];
    bool hidden;
  };

  // Products of the keys with the queries of groups n, n + 1 and so on.
  __device__ __forceinline__ void multiply_keys(const Rows& rows, int n, const ExactUnit& unit,
                                                float (&dot)[kAtOnce][4]) const {
    const int lane = kManyRows ? block_.lane : lane_computed_here(block_.lane);
    const uint8_t* query = rows.raw() + ((4 * n + lane % 8 / 2) * D + lane / 8 * 8) * kExactElementBytes;
    const uint8_t* keys = unit.row(lane % 16) + lane / 16 * 8 * kExactElementBytes;
#pragma unroll
    for (int c = 0; c < D; c += 32) {
      uint4 q[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) q[k] = load_tiles(query + (4 * k * D + c) * kExactElementBytes);
      const uint4 key = load_tiles(keys + c * kExactElementBytes);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) multiply(dot[k], key, q[k].x, q[k].y);
      if (c + 16 >= D) continue;
      const uint4 next = load_tiles(keys + (c + 16) * kExactElementBytes);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) multiply(dot[k], next, q[k].z, q[k].w);
    }
  }

  // Scores of row 4 n + t for keys g and g + 8, in units of the integer scores, so that one running maximum serves
  // both. scale: the row's score_scale.
  __device__ __forceinline__ Visible scores(const Rows& rows, const Segment& segment, const ExactUnit& unit, int n,
                                            float scale, const float (&dot)[4], float (&score)[2]) const {
    const Attention& a = block_.call;
    const int lane = kManyRows ? lane_computed_here(block_.lane) : block_.lane, g = lane / 4, t = lane % 4;
    RowPlace place;
    const bool real = rows.find(segment, 4 * n + t, place);
    const QueryRow& row = block_.rows()[4 * n + t];
    const bool capped = a.soft_cap > 0;
    Visible visible{{}, false};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int j = 8 * h + g, k = segment.work.exact_key(unit.first + h * unit.per_stage + g);
      score[h] = dot[2 * h] * a.softmax_scale;
      if (capped) score[h] = a.soft_cap * tanh_fast(__fdividef(score[h], a.soft_cap));
      score[h] = capped ? score[h] * kLog2E : __fdividef(score[h] * kLog2E - row.shift, scale);
      const bool sees = real && unit.holds(j) && k >= a.first_visible(place.position) && k <= place.position &&
                        (k < segment.work.sinks || k >= row.end);
      if (!sees) score[h] = -INFINITY;
      visible.seen[h] = __ballot_sync(0xffffffff, sees), visible.hidden |= real && unit.holds(j) && !sees;
    }
    return visible;
  }

  // Sums of weighted values. Weight 0 times an infinite value or a NaN is NaN: where such a value may belong to a key
  // that a row does not see, each row is multiplied once more alone, with keys that it sees in place of the others.
  __device__ __forceinline__ void multiply_values(const ExactUnit& unit, const Visible (&visible)[kAtOnce],
                                                  const uint32_t (&weight)[kAtOnce][2],
                                                  float (&y)[kAtOnce][2 * X::kTiles]) const {
    const int lane = lane_computed_here(block_.lane);
    const uint8_t* values = unit.row(lane % 8 + lane / 16 * 8) + (D + lane / 8 % 2 * 8) * kExactElementBytes;
#pragma unroll
    for (int i = 0; i < X::kTiles; ++i) {
      const uint4 tile = load_transposed(values + 16 * i * kExactElementBytes);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        float d[4] = {};
        multiply(d, tile, weight[k][0], weight[k][1]);
        y[k][2 * i] = d[0] + d[1], y[k][2 * i + 1] = d[2] + d[3];
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (!__any_sync(0xffffffff, visible[k].hidden)) continue;
      float spoiled = 0;  // stays 0 if all sums are finite
#pragma unroll
      for (int e = 0; e < 2 * X::kTiles; ++e) spoiled = fmaf(y[k][e], 0, spoiled);
      if (!__any_sync(0xffffffff, spoiled != 0)) continue;
      float* scratch = block_.join() + block_.warp * D;  // free until Join::warps, which waits for all warps
#pragma unroll 1
      for (int r = 0; r < 4; ++r) {
        __syncwarp();
        multiply_alone(r, unit, visible[k], weight[k], scratch);
        __syncwarp();
#pragma unroll
        for (int e = 0; e < 2 * X::kTiles; ++e) y[k][e] = lane % 4 == r ? scratch[8 * e + lane / 4] : y[k][e];
      }
    }
  }

  // The tail is of either 16-bit type. Only `multiply` and `split` know which one, so that all other code exists once.
  __device__ __forceinline__ void multiply(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) const {
    if (block_.call.dtype == Dtype::kBFloat16) {
      mma_floats<__nv_bfloat16>(d, a, b0, b1);
    } else {
      mma_floats<__half>(d, a, b0, b1);
    }
  }
  // x as an element of the tail's type beside the element that holds the rest of x.
  __device__ __forceinline__ uint32_t split(float x) const {
    return block_.call.dtype == Dtype::kBFloat16 ? split_as<__nv_bfloat16>(x) : split_as<__half>(x);
  }
  template <typename T>
  static __device__ __forceinline__ uint32_t split_as(float x) {
    float kept[2];
    floats_of_words<T>({word_of_floats<T>(x, 0)}, kept);
    return word_of_floats<T>(x, x - kept[0]);
  }

  // Rotates the columns of a product's output as values were rotated, without the factor 1 / sqrt(n). y: channel 8 e +
  // g of row t.
  __device__ __forceinline__ void rotate_columns(float (&y)[kAtOnce][2 * X::kTiles]) const {
    using Columns = HadamardTraits<RowLanes<D>::kSplit.blocks, RowLanes<D>::kLog, 8, 1>;
#pragma unroll
    for (int e = 0; e < 2 * X::kTiles; ++e) {
      const float sign = block_.signs()[D + 8 * e + block_.g];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) y[k][e] *= sign;
    }
#pragma unroll
    for (int bit = 1; bit < 8; bit *= 2) {
      const float side = block_.g & bit ? -1.0f : 1.0f;
#pragma unroll
      for (int e = 0; e < 2 * X::kTiles; ++e) {
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          y[k][e] = fmaf(side, y[k][e], __shfl_xor_sync(0xffffffff, y[k][e], 4 * bit));
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      lane_butterflies<1, Columns::kChunks>(y[k]);
      mix_blocks<Columns>(y[k]);
    }
  }

  // The output of row r of the product, over the keys that it sees only, to scratch [D].
  __device__ __forceinline__ void multiply_alone(int r, const ExactUnit& unit, const Visible& visible,
                                                 const uint32_t (&weight)[2], float* scratch) const {
    const int lane = lane_computed_here(block_.lane), g = lane / 4;
    const auto sees = [&](int j) {
      return ((j < 8 ? visible.seen[0] : visible.seen[1]) >> (4 * (j % 8) + r) & 1) != 0;
    };
    int some = 0;
    while (some < 16 && !sees(some)) ++some;
    const int j = lane % 8 + lane / 16 * 8;
    const uint8_t* values = unit.row(some == 16 || sees(j) ? j : some) + (D + lane / 8 % 2 * 8) * kExactElementBytes;
#pragma unroll 1
    for (int i = 0; i < X::kTiles; ++i) {
      float d[4] = {};
      multiply(d, load_transposed(values + 16 * i * kExactElementBytes), weight[0], weight[1]);
      if (block_.t != r) continue;
      scratch[16 * i + g] = some == 16 ? 0 : d[0] + d[1], scratch[16 * i + 8 + g] = some == 16 ? 0 : d[2] + d[3];
    }
  }

  const BlockView block_;
};

}  // namespace turboquant::cuda::split_kv
