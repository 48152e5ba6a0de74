// group_encode, group_decode: affine quantisation of groups of channels, scale and zero per group (docs/format.md
// section 10). The paper-form baseline for values.
#include "cpu/common/torch.h"
#include "cpu/kernels.h"

namespace turboquant::cpu {
namespace {

GroupRows group_rows(Dtype dtype, int64_t group, int64_t bits, int64_t count, int64_t d) {
  return {.dtype = dtype, .group = static_cast<int>(group), .bits = static_cast<int>(bits), .count = count, .d = d};
}

// x: [..., d] float, stride 1 in the last dimension -> packed [..., row_bytes], scale and zero float16 [..., d / group]
std::tuple<Tensor, Tensor, Tensor> group_encode(const Tensor& x, int64_t group, int64_t bits) {
  check_float(x, "x");
  check_unit_last_stride(x, "x");
  const int64_t d = x.size(x.dim() - 1);
  check_group(d, group, bits);

  const int64_t row_bytes = format::dense_row_bytes(d, bits), groups = d / group;
  Tensor packed = new_tensor(x, leading_shape(x, 1, {row_bytes}), ScalarType::Byte);
  Tensor scale = new_tensor(x, leading_shape(x, 1, {groups}), ScalarType::Half);
  Tensor zero = new_tensor(x, leading_shape(x, 1, {groups}), ScalarType::Half);
  uint8_t* packed_out = data_of<uint8_t>(packed);
  uint16_t* scale_out = data_of<uint16_t>(scale);
  uint16_t* zero_out = data_of<uint16_t>(zero);
  const Rows rows(x);
  parallel_for(rows.count(), row_grain(d, 4), [&](int64_t begin, int64_t end) {
    rows.runs(begin, end, [&](int64_t first, int64_t count, int64_t offset, int64_t stride) {
      const GroupRows some = group_rows(dtype_of(x), group, bits, count, d);
      kernels().group_encode(some, element(x, offset), stride, packed_out + first * row_bytes,
                             scale_out + first * groups, zero_out + first * groups);
    });
  });
  return {packed, scale, zero};
}

// packed: uint8 [..., row_bytes], scale and zero float16 [..., d / group] -> [..., d] of `dtype`
Tensor group_decode(const Tensor& packed, const Tensor& scale, const Tensor& zero, int64_t group, int64_t bits,
                    int64_t d, ScalarType dtype) {
  check_group(d, group, bits);
  check_output_dtype(dtype);
  const int64_t row_bytes = check_packed_rows(packed, d, bits), groups = d / group;
  check_beside(scale, packed, "scale", ScalarType::Half, 1, {groups});
  check_beside(zero, packed, "zero", ScalarType::Half, 1, {groups});
  const uint16_t* scales = data_of<uint16_t>(scale);
  const uint16_t* zeros = data_of<uint16_t>(zero);

  Tensor out = new_tensor(packed, leading_shape(packed, 1, {d}), dtype);
  const uint8_t* in = data_of<uint8_t>(packed);
  parallel_for(packed.numel() / row_bytes, row_grain(d, 2), [&](int64_t begin, int64_t end) {
    kernels().group_decode(group_rows(dtype_of(dtype), group, bits, end - begin, d), in + begin * row_bytes,
                           scales + begin * groups, zeros + begin * groups, element(out, begin * d));
  });
  return out;
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) {
  m.impl("group_encode", TORCH_BOX(&turboquant::cpu::group_encode));
  m.impl("group_decode", TORCH_BOX(&turboquant::cpu::group_decode));
}
