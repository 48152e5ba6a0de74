// The C++ side of the packed format for the tests, which compare it with torch_turboquant/format.py place by place.
// No torch in here: csrc/format.h and the scalar kernels are plain C++.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#define TURBOQUANT_LEVEL portable
#include "choices/attention.h"
#include "cpu/kernels/hadamard.h"
#include "cpu/kernels/pack.h"
#include "format.h"

namespace py = pybind11;
namespace format = turboquant::format;
namespace cpu = turboquant::cpu::portable;

using Place = std::tuple<int, int, int, int>;  // byte, shift, width, code_shift
using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

static void require(bool condition, const char* text) {
  if (!condition) throw std::invalid_argument(text);
}

static std::vector<Place> places(const format::Pieces& pieces) {
  std::vector<Place> list;
  for (int i = 0; i < pieces.count; ++i) {
    const format::Piece& p = pieces.piece[i];
    list.emplace_back(p.byte, p.shift, p.width, p.code_shift);
  }
  return list;
}

static format::Width width(int bits) {
  require(format::valid_width(bits), "no such width");
  return format::as_width(bits);
}

static format::Record record(int head_dim, int page_size, int key_bits, int value_bits) {
  require(format::valid_head_dim(head_dim) && format::valid_page_size(page_size) && format::valid_key_bits(key_bits) &&
              format::valid_value_bits(value_bits),
          "no such record");
  return {head_dim, page_size, key_bits, value_bits};
}

static format::LatentRecord latent_record(int latent_dim, int rope_dim, int page_size, int bits) {
  require(format::valid_latent_dim(latent_dim) && format::valid_rope_dim(rope_dim) &&
              format::valid_latent_page_size(page_size) && format::valid_latent_bits(bits),
          "no such record");
  return {latent_dim, rope_dim, page_size, bits};
}

static void check_place(const format::Record& r, int token, int channel) {
  require(token >= 0 && token < r.page_size && channel >= 0 && channel < r.head_dim, "no such token or channel");
}

// A copy of x, changed by fn(float*, Split).
template <typename Fn>
static Floats transformed(const Floats& x, Fn&& fn) {
  require(x.ndim() == 1 && format::split_dim(x.shape(0)).valid(), "x must be [d] with a valid d");
  Floats out(x.shape(0));
  std::copy(x.data(), x.data() + x.size(), out.mutable_data());
  fn(out.mutable_data(), format::split_dim(x.shape(0)));
  return out;
}

PYBIND11_MODULE(turboquant_native, m) {
  m.attr("VERSION") = format::kVersion;
  m.attr("MAX_VECTOR_DIM") = format::kMaxVectorDim;
  m.attr("MAX_HEAD_DIM") = format::kMaxHeadDim;
  m.attr("MAX_TILE") = format::kMaxTile;
  m.attr("VALUE_GROUP") = format::kValueGroup;
  m.attr("LEVEL_UNIT") = format::kLevelUnit;
  m.attr("UNITS_PER_SIGMA") = format::kUnitsPerSigma;
  m.attr("NAN_SCALE") = format::kNanScale;
  m.attr("MAX_HALF") = format::kMaxHalf;

  // Section 2: (m, n), or (0, 0) where the transform does not exist.
  m.def("split_dim", [](int64_t d) {
    const format::Split s = format::split_dim(d);
    return std::make_tuple(s.blocks, s.block);
  });
  m.def("hartley", [](int blocks, int index) {
    require((blocks == 3 || blocks == 5 || blocks == 7 || blocks == 9) && index >= 0 && index < blocks,
            "no such entry");
    return format::hartley(blocks, index);
  });
  m.def("rotate", [](const Floats& x, const Floats& signs) {
    require(signs.ndim() == 1 && signs.size() == x.size(), "signs must be [d]");
    return transformed(x, [&](float* y, format::Split s) { cpu::rotate(y, signs.data(), s); });
  });
  m.def("rotate_back", [](const Floats& x, const Floats& signs) {
    require(signs.ndim() == 1 && signs.size() == x.size(), "signs must be [d]");
    return transformed(x, [&](float* y, format::Split s) { cpu::rotate_back(y, signs.data(), s); });
  });
  m.def("tree_sum", [](const Floats& x) {
    float sum = 0;
    transformed(x, [&](float* y, format::Split s) { sum = cpu::tree_sum(y, s); });
    return sum;
  });

  // Section 4; levels: a list of 2^bits integers, or None for the uniform grid.
  m.def("valid_width", &format::valid_width);
  m.def("valid_scale_mode", &format::valid_scale_mode);
  m.def("storage", [](int bits) {
    switch (format::storage(width(bits))) {
      case format::Storage::kFields: return "fields";
      case format::Storage::kSpread: return "spread";
      case format::Storage::kPlane: return "plane";
    }
    throw std::invalid_argument("no such storage");
  });
  m.def("has_uniform_grid", [](int bits) { return format::has_uniform_grid(width(bits)); });
  m.def("boundary_grain", [](int bits) { return format::boundary_grain(width(bits)); });
  m.def("num_levels", [](int bits) { return format::num_levels(width(bits)); });
  m.def("uniform_level", [](int bits, int rank) { return format::uniform_level(width(bits), rank); });
  m.def("code_of_rank", [](int bits, int rank) { return format::code_of_rank(width(bits), rank); });
  m.def("level_of_code", [](int bits, const std::optional<std::vector<int8_t>>& levels, unsigned code) {
    require(format::valid_width(bits) && code < 1u << bits, "no such code");
    require(!levels || levels->size() == size_t{1} << bits, "levels must have 2^bits entries");
    return format::level_of_code(width(bits), levels ? levels->data() : nullptr, code);
  });

  // Section 7: uint8 [d] <-> uint8 [dense_row_bytes]
  m.def("dense_row_bytes", &format::dense_row_bytes);
  m.def("pack_row", [](const Bytes& codes, int bits) {
    require(codes.ndim() == 1 && bits >= 1 && bits <= 8, "codes must be [d], bits 1 to 8");
    Bytes packed(format::dense_row_bytes(codes.size(), bits));
    cpu::pack(codes.data(), packed.mutable_data(), 1, codes.size(), bits);
    return packed;
  });
  m.def("unpack_row", [](const Bytes& packed, int64_t d, int bits) {
    require(bits >= 1 && bits <= 8 && packed.size() == format::dense_row_bytes(d, bits), "packed has the wrong size");
    Bytes codes(d);
    cpu::unpack(packed.data(), codes.mutable_data(), 1, d, bits);
    return codes;
  });

  // Of a call on an H200 that split-KV takes all or a part of: few_queries and split_kv_queries of the choice.
  m.def("split_kv_queries", [](int head_dim, int64_t group, int64_t max_q_len, int64_t seqs, int64_t tokens) {
    using namespace turboquant;
    const AttentionShape shape{.head_dim = head_dim,
                               .keys = choices::kUniform4,
                               .values = choices::kUniform4,
                               .kv_heads = 1,
                               .group = group,
                               .max_q_len = max_q_len,
                               .seqs = seqs,
                               .tokens = tokens,
                               .room = 100'000,
                               .dtype = Dtype::kBFloat16,
                               .has_exact = true};
    const DeviceFacts h200{9, 0, 132, 227 << 10, 228 << 10, true};
    const AttentionChoice choice = choose_attention(shape, h200);
    require(choice.kernel == AttentionKernel::kSplitKvAndRowTiles || choice.kernel == AttentionKernel::kSplitKv,
            "the call has no row tiles and is not split-KV's alone");
    return std::tuple(choice.few_queries, choice.split_kv_queries);
  });

  // Section 8, with the names of torch_turboquant.format.
  m.def("valid_key_bits", &format::valid_key_bits);
  m.def("valid_value_bits", &format::valid_value_bits);
  m.def("valid_page_size", &format::valid_page_size);
  m.def("valid_head_dim", &format::valid_head_dim);
  using R = format::Record;
  py::class_<R>(m, "Record")
      .def(py::init(&record), py::arg("head_dim"), py::arg("page_size"), py::arg("key_bits"), py::arg("value_bits"))
      .def_readonly("head_dim", &R::head_dim)
      .def_readonly("page_size", &R::page_size)
      .def_readonly("key_bits", &R::key_bits)
      .def_readonly("value_bits", &R::value_bits)
      .def_property_readonly("tile_tokens", &R::tile_tokens)
      .def_property_readonly("key_row_bytes", &R::key_row_bytes)
      .def_property_readonly("key_plane_bytes", &R::key_plane_bytes)
      .def_property_readonly("value_block_bytes", &R::value_block_bytes)
      .def_property_readonly("key_planes", &R::key_planes)
      .def_property_readonly("value_blocks", &R::value_blocks)
      .def_property_readonly("key_scales", &R::key_scales)
      .def_property_readonly("value_scales", &R::value_scales)
      .def_property_readonly("tile_bytes", &R::tile_bytes)
      .def_property_readonly("record_bytes", &R::record_bytes)
      .def("key_scale", [](const R& r, int token) { return check_place(r, token, 0), r.key_scale(token); })
      .def("value_scale", [](const R& r, int token) { return check_place(r, token, 0), r.value_scale(token); })
      .def("key", [](const R& r, int t, int c) { return check_place(r, t, c), places(r.key(t, c)); })
      .def("value", [](const R& r, int t, int c) { return check_place(r, t, c), places(r.value(t, c)); });

  // Section 12
  m.def("valid_latent_dim", &format::valid_latent_dim);
  m.def("valid_rope_dim", &format::valid_rope_dim);
  m.def("valid_latent_page_size", &format::valid_latent_page_size);
  m.def("valid_latent_bits", &format::valid_latent_bits);
  using L = format::LatentRecord;
  const auto check = [](const L& r, int token, int channel) {
    require(token >= 0 && token < r.page_size && channel >= 0 && channel < r.latent_dim, "no such token or channel");
  };
  py::class_<L>(m, "LatentRecord")
      .def(py::init(&latent_record), py::arg("latent_dim"), py::arg("rope_dim"), py::arg("page_size"), py::arg("bits"))
      .def_property_readonly("row_bytes", &L::row_bytes)
      .def_property_readonly("plane_bytes", &L::plane_bytes)
      .def_property_readonly("tile_bytes", &L::tile_bytes)
      .def_property_readonly("record_bytes", &L::record_bytes)
      .def("scale", [check](const L& r, int t) { return check(r, t, 0), r.scale_of(t); })
      .def("rope",
           [check](const L& r, int t, int c) {
             require(c >= 0 && c < r.rope_dim, "no such raw channel");
             return check(r, t, 0), r.raw_channel(t, c);
           })
      .def("code", [check](const L& r, int t, int c) { return check(r, t, c), places(r.code(t, c)); });
  m.def("latent_tail_offset", &format::latent_tail_offset<int64_t>);

  // First bytes of a record, in 64 and in 32 bits, and of a tail's row, counted in vectors.
  m.def("record_offset", &format::record_offset<int64_t>);
  m.def("record_offset_32", &format::record_offset_32);
  m.def("tail_row", &format::tail_row<int64_t, int64_t>);
  m.def("tail_offset", &format::tail_offset<int64_t>);
  m.def("tail_offset_32", &format::tail_offset_32);

  // Codes of one token of a record (uint8 [record_bytes]), by the places above; which: "key" or "value".
  const auto place = [](const R& r, const std::string& which, int t, int c) {
    require(which == "key" || which == "value", "which is key or value");
    return which == "key" ? r.key(t, c) : r.value(t, c);
  };
  m.def("read_codes", [place](const R& r, const Bytes& bytes, const std::string& which, int token) {
    require(bytes.size() == r.record_bytes(), "bytes must be [record_bytes]");
    check_place(r, token, 0);
    Bytes codes(r.head_dim);
    for (int c = 0; c < r.head_dim; ++c) {
      codes.mutable_data()[c] = static_cast<uint8_t>(format::read_code(bytes.data(), place(r, which, token, c)));
    }
    return codes;
  });
  m.def("write_codes", [place](const R& r, const Bytes& bytes, const std::string& which, int token,
                               const Bytes& codes) {
    require(bytes.size() == r.record_bytes() && codes.size() == r.head_dim, "bytes [record_bytes], codes [head_dim]");
    check_place(r, token, 0);
    Bytes out(bytes.size());
    std::copy(bytes.data(), bytes.data() + bytes.size(), out.mutable_data());
    for (int c = 0; c < r.head_dim; ++c) {
      format::write_code(out.mutable_data(), place(r, which, token, c), codes.data()[c]);
    }
    return out;
  });
}
