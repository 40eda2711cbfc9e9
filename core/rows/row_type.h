// The bytes of a row: its values, of one of these types, then the optimizer state as floats if the row is trained.
//
//   kFloat   dim floats
//   kHalf    dim IEEE halfs, then zeros up to a multiple of 4 bytes
//   kByte    dim codes 0 to 255, zeros up to a multiple of 4 bytes, then two floats, scale and bias:
//            value = code * scale + bias; bias is the smallest value, scale the span over 255 (0 if all are equal).
//            Only for read-only tables (TableOptions::frozen).
//   kBFloat  dim bfloat16s (the upper halves of floats), then zeros up to a multiple of 4 bytes
//
// Assigned and initial values are rounded to nearest even. An update computes with floats and rounds stochastically
// (kernels/simd_stochastic_rounding.h): rounding to nearest would lose every update below half of a value's last place.
//
// The same bytes are stored in DRAM, in the segments on SSD (docs/formats/segments.md: the numbers are part of the
// format) and in HBM (kernels/rows/layout.py, kernels/rows/quantize.py), so moving a row never converts it. Reads
// convert to float, with the same bits in every kernel variant and in numpy.
//
// Threads: functions of their arguments.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotrow {

enum class RowType : uint32_t { kFloat = 0, kHalf = 1, kByte = 2, kBFloat = 3 };
inline constexpr uint32_t kRowTypes = 4;

const char* name_of(RowType type);  // "fp32", "fp16", "int8", "bf16"

// Words of 4 bytes that `dim` values take. Always inlined: it is compiled once per instruction set.
inline __attribute__((always_inline)) int words_of(RowType type, int dim) {
  switch (type) {
    case RowType::kHalf:
    case RowType::kBFloat:
      return (dim + 1) / 2;
    case RowType::kByte:
      return (dim + 3) / 4 + 2;
    default:
      return dim;
  }
}

uint16_t half_of(float value);  // infinity beyond 65,519
uint16_t bfloat_of(float value);
// `dim` values as a row of words_of(type, dim) words. Requires: values are finite.
void encode_row(RowType type, const float* values, int dim, uint32_t* row);

}  // namespace hotrow
