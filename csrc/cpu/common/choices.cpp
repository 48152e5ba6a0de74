// Which CUDA kernel takes a call, as a C function for torch_turboquant/choices.py. It is in the CPU library, because
// the answer needs neither a GPU nor the CUDA library.
//
// A call is described by facts, int64 numbers in the order in which `choose_..` below reads them; Python gives them in
// the same order. Names and reasons are literals: nothing is allocated, and any thread may ask.
#include <cstdint>
#include <string_view>

#include "choices/attention.h"
#include "choices/codec.h"
#include "choices/linear.h"
#include "choices/mla.h"
#include "choices/score.h"

namespace turboquant {
namespace {

// Sums and products of sizes within these limits stay far below 2^63.
constexpr int64_t kMostVectors = int64_t{1} << 40;
constexpr int64_t kMostHeads = 65535;  // the CUDA kernels' own limit: the second dimension of a grid
constexpr int64_t kMostStride = int64_t{1} << 60;

// Reads facts one after the other. After a fact that no call has, valid() is false and the rest read as their least
// values.
class Facts {
 public:
  Facts(const int64_t* facts, int count) : next_(facts), end_(facts + count) {}

  int64_t number(int64_t least, int64_t most) {
    const int64_t value = next_ == end_ ? most : *next_;
    valid_ = valid_ && next_ != end_ && least <= value && value <= most;
    if (next_ != end_) ++next_;
    return valid_ ? value : least;
  }
  int integer(int least, int most) { return static_cast<int>(number(least, most)); }
  bool flag() { return number(0, 1) == 1; }
  int64_t vectors() { return number(1, kMostVectors); }
  int64_t heads() { return number(1, kMostHeads); }

  int vector_dim() {
    const int d = integer(2, format::kMaxVectorDim);
    require(format::split_dim(d).valid());
    return d;
  }
  Dtype dtype() {
    const auto t = static_cast<Dtype>(integer(0, INT8_MAX));
    require(t == Dtype::kFloat32 || t == Dtype::kFloat16 || t == Dtype::kBFloat16);
    return t;
  }
  format::Width width() {
    const int64_t bits = number(1, format::kMaxBits);
    require(format::valid_width(bits));
    return format::as_width(valid_ ? bits : 1);
  }
  format::Codes codes() {  // bits, and whether their grid is uniform
    const format::Width w = width();
    const bool uniform = flag();
    require(uniform ? format::has_uniform_grid(w) : !format::levels_are_codes(w));
    return {w, uniform ? format::Grid::kUniform : format::Grid::kLevels};
  }
  EncodeSourceShape source() {
    return {.width = width(),
            .candidates = integer(1, INT32_MAX),
            .token_stride = number(0, kMostStride),
            .head_stride = number(0, kMostStride)};
  }
  DeviceFacts device() {
    return {.major = integer(1, 1000),
            .minor = integer(0, 1000),
            .multiprocessors = integer(1, 1 << 20),
            .shared_per_block = integer(1, 1 << 30),
            .shared_per_multiprocessor = integer(1, 1 << 30),
            .warpgroup_products = flag()};
  }

  void require(bool condition) { valid_ = valid_ && condition; }
  bool valid() const { return valid_ && next_ == end_; }

 private:
  const int64_t *next_, *end_;
  bool valid_ = true;
};

const char* name(AttentionKernel kernel) {
  switch (kernel) {
    case AttentionKernel::kSplitKv: return "split_kv";
    case AttentionKernel::kKeyTiles: return "key_tiles";
    case AttentionKernel::kRowTiles: return "row_tiles";
    case AttentionKernel::kSplitKvAndKeyTiles: return "split_kv+key_tiles";
    case AttentionKernel::kSplitKvAndRowTiles: return "split_kv+row_tiles";
    case AttentionKernel::kGeneral: break;
  }
  return "general";
}

const char* name(CodecKernel kernel) {
  switch (kernel) {
    case CodecKernel::kBulk: return "bulk";
    case CodecKernel::kStep: return "step";
    case CodecKernel::kGeneric: break;
  }
  return "generic";
}

const char* name(LatentKernel kernel) {
  switch (kernel) {
    case LatentKernel::kKeyTiles: return "key_tiles";
    case LatentKernel::kRowTiles: return "row_tiles";
    case LatentKernel::kWarpTiles: return "warp_tiles";
    case LatentKernel::kGeneral: break;
  }
  return "general";
}

const char* name(LatentStoreKernel kernel) { return kernel == LatentStoreKernel::kStep ? "step" : "table"; }

const char* name(LinearKernel kernel) {
  switch (kernel) {
    case LinearKernel::kCodes: return "codes";
    case LinearKernel::kTiles: return "tiles";
    case LinearKernel::kDecoded: break;
  }
  return "decoded";
}

const char* name(ExpertsKernel kernel) {
  switch (kernel) {
    case ExpertsKernel::kCodes: return "codes";
    case ExpertsKernel::kTiles: return "tiles";
    case ExpertsKernel::kOneByOne: break;
  }
  return "one_by_one";
}

const char* name(ScoreKernel kernel) {
  switch (kernel) {
    case ScoreKernel::kOneQuery: return "one_query";
    case ScoreKernel::kGeneral: break;
  }
  return "general";
}

const char* name(SketchKernel kernel) {
  switch (kernel) {
    case SketchKernel::kDenseTiles: return "dense_tiles";
    case SketchKernel::kDense: return "dense";
    case SketchKernel::kBulk: return "bulk";
    case SketchKernel::kLanes: return "lanes";
    case SketchKernel::kGeneral: break;
  }
  return "general";
}

struct Answer {
  const char *kernel, *reason;
};

template <typename Choice>
Answer answer(const Choice& choice) {
  return {name(choice.kernel), choice.reason};
}

constexpr Answer kBadFacts{nullptr, "a size or a fact of the device is not supported"};

// Every function below reads all facts before it chooses. (The members of a braced list are evaluated in order.)

Answer choose_attention(Facts& facts, const DeviceFacts& device) {
  const AttentionShape shape{.head_dim = facts.vector_dim(),
                             .keys = facts.codes(),
                             .values = facts.codes(),
                             .kv_heads = facts.heads(),
                             .group = facts.heads(),
                             .max_q_len = facts.integer(1, INT32_MAX),
                             .seqs = facts.integer(1, INT32_MAX),
                             .tokens = facts.integer(1, INT32_MAX),
                             .room = facts.integer(1, INT32_MAX),
                             .dtype = facts.dtype(),
                             .has_exact = facts.flag()};
  return facts.valid() ? answer(turboquant::choose_attention(shape, device)) : kBadFacts;
}

Answer choose_latents(Facts& facts, const DeviceFacts& device) {
  const LatentShape shape{.latent_dim = facts.integer(1, INT32_MAX),
                          .codes = facts.codes(),
                          .dtype = facts.dtype(),
                          .rope_dtype = facts.dtype(),
                          .rows = facts.integer(1, INT32_MAX)};
  facts.require(format::valid_latent_dim(shape.latent_dim) && format::valid_latent_width(shape.codes.width));
  return facts.valid() ? answer(turboquant::choose_latents(shape, device)) : kBadFacts;
}

Answer choose_latent_store(Facts& facts, const DeviceFacts& device) {
  const LatentStoreShape shape{.latent_dim = facts.integer(1, INT32_MAX),
                               .width = facts.width(),
                               .candidates = facts.integer(1, INT32_MAX),
                               .dtype = facts.dtype(),
                               .transforms = facts.flag(),
                               .rotated_tail = facts.flag(),
                               .tokens = facts.vectors()};
  facts.require(format::valid_latent_dim(shape.latent_dim) && format::valid_latent_width(shape.width));
  return facts.valid() ? answer(turboquant::choose_latent_store(shape, device)) : kBadFacts;
}

Answer choose_encode(Facts& facts, const DeviceFacts& device) {
  const EncodeShape shape{.head_dim = facts.vector_dim(),
                          .dtype = facts.dtype(),
                          .tokens = facts.vectors(),
                          .heads = facts.heads(),
                          .source = facts.source()};
  return facts.valid() ? answer(turboquant::choose_encode(shape, device)) : kBadFacts;
}

Answer choose_decode(Facts& facts, const DeviceFacts& device) {
  const DecodeShape shape{.head_dim = facts.vector_dim(),
                          .dtype = facts.dtype(),
                          .vectors = facts.vectors(),
                          .aligned = facts.flag()};
  return facts.valid() ? answer(turboquant::choose_decode(shape, device)) : kBadFacts;
}

Answer choose_store(Facts& facts, const DeviceFacts& device) {
  const StoreShape shape{.head_dim = facts.vector_dim(),
                         .dtype = facts.dtype(),
                         .tokens = facts.vectors(),
                         .heads = facts.heads(),
                         .keys = facts.source(),
                         .values = facts.source(),
                         .num_pages = facts.vectors(),
                         .tile_bytes = facts.integer(1, INT32_MAX),
                         .has_tail = facts.flag(),
                         .tail_aligned = facts.flag(),
                         .tail_seqs = facts.number(0, kMostVectors),
                         .tail_max_seqs = facts.number(0, kMostVectors)};
  return facts.valid() ? answer(turboquant::choose_store(shape, device)) : kBadFacts;
}

Answer choose_load(Facts& facts, const DeviceFacts& device) {
  const LoadShape shape{.head_dim = facts.vector_dim(),
                        .dtype = facts.dtype(),
                        .seqs = facts.vectors(),
                        .max_length = facts.vectors(),
                        .heads = facts.heads()};
  facts.require(shape.max_length <= kMostVectors / shape.seqs);
  return facts.valid() ? answer(turboquant::choose_load(shape, device)) : kBadFacts;
}

// The choice between the kernels of score asks nothing about the device, and four_query_bytes decides only how many
// queries a block of the general kernel takes.
Answer choose_score(Facts& facts, const DeviceFacts&) {
  ScoreFacts call{.has_codes = facts.flag(), .has_sketch = facts.flag(), .dense_sketch = facts.flag()};
  facts.require(call.has_codes || call.has_sketch);
  call.codes = facts.codes();  // any, if there are none
  call.sketch_bits = facts.number(0, kMostVectors);
  call.head_dim = facts.vector_dim();
  call.batch = facts.vectors();
  call.queries = facts.vectors();
  call.keys = facts.vectors();
  call.word_rows = facts.flag();
  call.aligned_constants = facts.flag();
  return facts.valid() ? answer(turboquant::choose_score(call)) : kBadFacts;
}

Answer choose_sketch(Facts& facts, const DeviceFacts& device) {
  const SketchFacts call{.dense = facts.flag(),
                         .head_dim = facts.vector_dim(),
                         .vectors = facts.vectors(),
                         .dtype = facts.dtype()};
  return facts.valid() ? answer(turboquant::choose_sketch(call, device)) : kBadFacts;
}

Answer choose_linear(Facts& facts, const DeviceFacts& device) {
  const LinearShape call{.tokens = facts.vectors(), .n = facts.vectors(), .k = facts.vectors(), .dtype = facts.dtype()};
  return facts.valid() ? answer(turboquant::choose_linear(call, device)) : kBadFacts;
}

Answer choose_experts(Facts& facts, const DeviceFacts& device) {
  const ExpertsFacts call{.pairs = facts.vectors(),
                          .experts = facts.number(1, kMostExperts),
                          .k = facts.vectors(),
                          .dtype = facts.dtype(),
                          .captured = facts.flag()};
  return facts.valid() ? answer(turboquant::choose_experts(call, device)) : kBadFacts;
}

struct Op {
  std::string_view name;
  Answer (*choose)(Facts&, const DeviceFacts&);
};
constexpr Op kOps[] = {
    {"paged_attention", choose_attention},
    {"mla_attention", choose_latents},
    {"mla_store", choose_latent_store},
    {"encode", choose_encode},
    {"decode", choose_decode},
    {"cache_store", choose_store},
    {"cache_load", choose_load},
    {"score", choose_score},
    {"qjl_sketch", choose_sketch},
    {"linear_packed", choose_linear},
    {"linear_experts", choose_experts},
};

Answer choose(std::string_view op, Facts facts, Facts device_facts) {
  const DeviceFacts device = device_facts.device();
  if (!device_facts.valid()) return kBadFacts;
  for (const Op& known : kOps) {
    if (known.name == op) return known.choose(facts, device);
  }
  return {nullptr, "this op has no choice of kernels"};
}

}  // namespace
}  // namespace turboquant

// The kernel's name, and through `reason` the condition that decided; null, and what is wrong, for bad input.
// facts: int64 [count], device_facts: int64 [6], the members of DeviceFacts
extern "C" __attribute__((visibility("default"))) const char* turboquant_choose_kernel(const char* op,
                                                                                       const int64_t* facts, int count,
                                                                                       const int64_t* device_facts,
                                                                                       const char** reason) {
  const turboquant::Answer answer = turboquant::choose(op, {facts, count}, {device_facts, 6});
  *reason = answer.reason;
  return answer.kernel;
}
