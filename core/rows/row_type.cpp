#include "rows/row_type.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace hotrow {
namespace {

void encode_bytes(const float* values, int dim, uint32_t* row) {
  const auto [low, high] = std::minmax_element(values, values + dim);
  const float bias = *low, scale = (*high - bias) / 255.0f;
  const float divisor = scale > 0 ? scale : 1.0f;
  auto* codes = reinterpret_cast<uint8_t*>(row);
  for (int i = 0; i < dim; ++i) {
    const float share = (values[i] - bias) / divisor + 0.5f;
    codes[i] = static_cast<uint8_t>(std::min(std::max(share, 0.0f), 255.0f));
  }
  float* ends = reinterpret_cast<float*>(row) + (dim + 3) / 4;
  ends[0] = scale;
  ends[1] = bias;
}

}  // namespace

const char* name_of(RowType type) {
  switch (type) {
    case RowType::kHalf:
      return "fp16";
    case RowType::kByte:
      return "int8";
    case RowType::kBFloat:
      return "bf16";
    default:
      return "fp32";
  }
}

uint16_t half_of(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (size >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);  // 65,536 and above
  if (size >= 0x38800000) {                                             // 2^-14 and above
    const uint32_t moved = size - (112u << 23);
    return static_cast<uint16_t>(sign | (moved + 0xfff + (moved >> 13 & 1)) >> 13);
  }
  if (size < 0x33000000) return static_cast<uint16_t>(sign);  // below 2^-25
  const uint32_t shift = 126 - (size >> 23), mantissa = (size & 0x7fffff) | 0x800000;
  const uint32_t whole = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), tie = 1u << (shift - 1);
  return static_cast<uint16_t>(sign | (whole + (rest > tie || (rest == tie && (whole & 1)))));
}

uint16_t bfloat_of(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN stays one
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void encode_row(RowType type, const float* values, int dim, uint32_t* row) {
  std::memset(row, 0, words_of(type, dim) * sizeof(uint32_t));
  if (type == RowType::kHalf)
    for (int i = 0; i < dim; ++i) reinterpret_cast<uint16_t*>(row)[i] = half_of(values[i]);
  else if (type == RowType::kBFloat)
    for (int i = 0; i < dim; ++i) reinterpret_cast<uint16_t*>(row)[i] = bfloat_of(values[i]);
  else if (type == RowType::kByte)
    encode_bytes(values, dim, row);
  else
    std::memcpy(row, values, dim * sizeof(float));
}

}  // namespace hotrow
