// score, qjl_score: attention scores straight from packed standalone vectors and from sketches of their residuals. The
// query is rotated once and keys are never rotated back: <q, key> = <R (q / s), scale / 32 * levels> + <q, center>
// plus the sketch's estimate, where s are the scales of channels.
//
// The kernels read keys once, at the speed of memory, so expanding codes must cost next to nothing: levels are bytes,
// and tensor cores multiply bytes. A query coordinate becomes an integer in units of 2^-25 of the largest one's power
// of two, and its four bytes are four columns of the matrix product. Sums of 128 channels are exact integers, so this
// is as accurate as float32.
//
// There are two kernels: one for everything (score/general.cuh), and one for one query of 128 channels
// (score/one_query.cuh). Both prepare queries alike (score/queries.cuh).
//
// A warp takes 32 keys at a time: lane 4 g + t reads channels 32 t to 32 t + 31 of keys g, g + 8, g + 16 and g + 24 of
// each section of 128 channels, and these words become its fragments without any exchange between lanes.
#include <algorithm>

#include "calls/score.h"
#include "calls/sketch.h"
#include "choices/score.h"
#include "cuda/codec/arguments.cuh"
#include "cuda/common/device_facts.cuh"
#include "cuda/score/general.cuh"
#include "cuda/score/one_query.cuh"

namespace turboquant::cuda {
namespace {

using namespace scores;

// With fewer than kWorthwhile * kBlockKeys keys a block spends too much of its time on preparing queries.
constexpr int kWorthwhile = 32;

// Takes enough blocks to fill the device once, and more if each still has keys enough. Offsets in a block have 32 bits.
void share_keys(ScoreArguments& a, int64_t rows, int blocks_per_multiprocessor, const DeviceFacts& device) {
  const int64_t tiles = (a.keys + kBlockKeys - 1) / kBlockKeys;
  const int64_t resident = int64_t{blocks_per_multiprocessor} * device.multiprocessors;
  const int64_t addressable = (int64_t{1} << 30) / std::max({a.row_bytes, a.sketch_bytes, 1}) / kBlockKeys;
  const int64_t blocks = std::min(tiles, std::max(resident / rows, tiles / kWorthwhile + 1));
  const int64_t block_tiles = std::min((tiles + blocks - 1) / blocks, addressable);
  a.span = static_cast<int>(block_tiles * kBlockKeys);
  a.key_blocks = static_cast<int>((tiles + block_tiles - 1) / block_tiles);
}

template <int BITS, bool UNIFORM, bool SKETCH, int PAIRS>
void launch_general(ScoreArguments& a, int64_t batch, const Launch& launch, const DeviceFacts& device) {
  const int bytes = Layout(a, std::min(a.queries, 2 * PAIRS)).bytes();
  const auto kernel = score_kernel<BITS, UNIFORM, SKETCH, PAIRS>;
  if (bytes > kDefaultSharedBytes) {
    const int most = device.shared_per_block - kReservedSharedBytes;
    STD_TORCH_CHECK(bytes <= most, "scores of d = ", a.d, " and sketches of ", a.m, " bits take ", bytes,
                    " bytes of shared memory, supported on this device: ", most);
    allow_shared_memory(reinterpret_cast<const void*>(kernel), current_device().index, bytes);
  }

  a.query_blocks = static_cast<int>(divide_up(a.queries, 2 * PAIRS));
  const int64_t rows = batch * a.query_blocks;
  share_keys(a, rows, kBlocksPerMultiprocessor, device);
  kernel<<<num_blocks(rows * a.key_blocks, 1), kThreads, bytes, launch.stream()>>>(a);
}

template <int BITS, bool UNIFORM, bool SKETCH>
void launch_one_query(ScoreArguments& a, int64_t batch, const Launch& launch, const DeviceFacts& device) {
  share_keys(a, batch, one_query_blocks_per_multiprocessor(BITS), device);
  const dim3 grid(a.key_blocks, static_cast<unsigned>(batch));
  score_one_query_kernel<BITS, UNIFORM, SKETCH><<<grid, kThreads, 0, launch.stream()>>>(a);
}

// The kernels for one kind of keys whose rows are read in whole words.
template <int BITS, bool UNIFORM, bool SKETCH>
void launch_choice(ScoreArguments& a, int64_t batch, const ScoreChoice& choice, const Launch& launch,
                   const DeviceFacts& device) {
  constexpr format::Codes codes{format::as_width(BITS), UNIFORM ? format::Grid::kUniform : format::Grid::kLevels};
  if constexpr (has_one_query_kernel(BITS > 0, codes, SKETCH)) {
    if (choice.kernel == ScoreKernel::kOneQuery) {
      return launch_one_query<BITS, UNIFORM, SKETCH>(a, batch, launch, device);
    }
  }
  if constexpr (has_four_query_kernel(BITS > 0, SKETCH)) {
    if (choice.query_pairs == 2) return launch_general<BITS, UNIFORM, SKETCH, 2>(a, batch, launch, device);
  }
  launch_general<BITS, UNIFORM, SKETCH, 1>(a, batch, launch, device);
}

template <int BITS, bool UNIFORM = false>
void launch_bits(ScoreArguments& a, const ScoreFacts& call, const Launch& launch, const DeviceFacts& device) {
  const ScoreChoice choice = choose_score(call);
  if constexpr (BITS > 0) {
    if (!a.sign_bits) return launch_choice<BITS, UNIFORM, false>(a, call.batch, choice, launch, device);
  }
  launch_choice<BITS, UNIFORM, true>(a, call.batch, choice, launch, device);
}

// BITS = 0 stands for sketches without codes. Rows at any address have one kernel.
void launch_width(ScoreArguments& a, const ScoreFacts& call, const Launch& launch, const DeviceFacts& device) {
  if (!call.word_rows) return launch_general<kAnyRows, false, true, 1>(a, call.batch, launch, device);
  if (a.bits == 0) return launch_bits<0>(a, call, launch, device);
  switch (format::as_width(a.bits)) {
    case format::Width::k1: return launch_bits<1>(a, call, launch, device);
    case format::Width::k2: return launch_bits<2>(a, call, launch, device);
    case format::Width::k3: return launch_bits<3>(a, call, launch, device);
    case format::Width::k4: return launch_bits<4>(a, call, launch, device);
    case format::Width::k5:
      return a.levels ? launch_bits<5>(a, call, launch, device) : launch_bits<5, true>(a, call, launch, device);
    case format::Width::k8: return launch_bits<8>(a, call, launch, device);
  }
}

// Fills in the arguments that both ops share, and launches.
Tensor run(ScoreArguments& a, const Tensor& q, const ScoreShape& shape, const OptionalTensor& projection,
           const OptionalTensor& sign_bits, const OptionalTensor& norm, const char* name) {
  const int64_t d = q.size(q.dim() - 1);
  a.d = static_cast<int>(d);
  a.split = check_vector_dim(d, "q");
  for (int j = 0; j < a.split.blocks; ++j) a.hartley[j] = format::hartley(a.split.blocks, j);
  STD_TORCH_CHECK(shape.queries <= INT32_MAX, "q has ", shape.queries, " queries, supported: up to ", INT32_MAX);
  a.queries = static_cast<int>(shape.queries);
  a.keys = shape.keys;
  // Bytes of a load: all rows must start at a multiple of that.
  const int word = a.bits % 4 == 0 ? 16 : a.bits % 2 == 0 ? 8 : 4;
  bool words = a.bits == 0 || (d % kQuarter == 0 && a.row_bytes % word == 0 && aligned(a.packed, word));
  if (projection) {
    const Projection sketch(*projection, q, d);
    check_sketch(*sign_bits, *norm, q, shape, sketch.bytes());
    STD_TORCH_CHECK(sketch.rows <= 1 << 16, "projection has ", sketch.rows,
                    " rows, supported by scores on CUDA: up to ", 1 << 16);
    a.sign_bits = bytes_of(*sign_bits);
    a.norm = static_cast<const float*>(norm->data_ptr());
    a.projection = sketch.data;
    a.dense = sketch.dense;
    a.m = static_cast<int>(sketch.rows);
    a.sketch_bytes = a.m / 8;
    a.sketch_sections = (a.m + kSection - 1) / kSection;
    a.factor = sketch.factor;
    words = words && a.m % kQuarter == 0 && aligned(a.sign_bits, 4);
  }

  Tensor out = new_tensor(q, shape.out, ScalarType::Float);
  if (out.numel() == 0) return out;
  const Launch launch(q);
  const AlignedRows in(q, d == 128 ? word_bytes(4, q.element_size()) : 1);
  a.in_registers = d == 128 && aligned(a.signs, 16) && aligned(a.channels.center, 16) && aligned(a.projection, 16);
  a.q = in.data();
  a.q_rows = in.rows();
  a.q_dtype = dtype_of(q);
  a.out = static_cast<float*>(out.data_ptr());
  const format::Codes codes{format::as_width(a.bits), a.levels ? format::Grid::kLevels : format::Grid::kUniform};
  const ScoreFacts call{.has_codes = a.bits > 0,
                        .has_sketch = a.sign_bits != nullptr,
                        .dense_sketch = a.dense,
                        .codes = codes,
                        .sketch_bits = a.m,
                        .head_dim = d,
                        .batch = shape.batch,
                        .queries = a.queries,
                        .keys = a.keys,
                        .word_rows = words,
                        .aligned_constants = a.in_registers,
                        .four_query_bytes = Layout(a, kMaxQueries).bytes()};
  const DeviceFacts& device = device_of(q.get_device_index()).facts;
  launch_width(a, call, launch, device);
  launch.check(name);
  return out;
}

// -> float32 [..., queries, keys]
Tensor score(const ScoreCall& c) {
  const ScoreShape shape = check_score(c);
  const int64_t d = c.d();
  ScoreArguments a{};
  a.packed = bytes_of(c.packed);
  a.scale = static_cast<const __half*>(c.scale.data_ptr());
  a.signs = static_cast<const float*>(c.signs.data_ptr());
  a.levels = levels_data(c.levels);
  a.channels = channels_of(c.center, c.center ? static_cast<const float*>(c.center->data_ptr()) : nullptr, 1, d);
  a.bits = static_cast<int>(c.bits);
  a.row_bytes = static_cast<int>(format::dense_row_bytes(d, a.bits));
  a.sections = static_cast<int>((d + kSection - 1) / kSection);
  return run(a, c.q, shape, c.projection, c.sign_bits, c.residual_norm, "score");
}

// q: [..., queries, d], sign_bits: uint8 [..., keys, m / 8], norm: float32 [..., keys] -> float32 [..., queries, keys]
Tensor qjl_score(const Tensor& q, const Tensor& sign_bits, const Tensor& norm, const Tensor& projection) {
  const ScoreShape shape = checked_score_shape(q, sign_bits, "sign_bits");
  ScoreArguments a{};
  return run(a, q, shape, projection, sign_bits, norm, "qjl_score");
}

}  // namespace
}  // namespace turboquant::cuda

STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) {
  m.impl("score", turboquant::boxed<&turboquant::cuda::score>);
  m.impl("qjl_score", TORCH_BOX(&turboquant::cuda::qjl_score));
}
