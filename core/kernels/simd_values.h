// Loads of row values as floats, from any row type. A writer may change the row at the same time: the caller checks the
// shard's version afterwards (simd_lookup.h).
//
// Included by simd_kernels.cpp alone, once per instruction set; its rules hold here too.
#pragma once

#include <cstring>

#include "kernels/simd_common.h"
#include "rows/row_type.h"

namespace hotrow {
namespace {

HOTROW_INLINE void copy_concurrent(float* to, const char* from, int dim) {
#if defined(__SANITIZE_THREAD__)
  auto source = reinterpret_cast<const uint32_t*>(from);
  for (int i = 0; i < dim; ++i) {
    uint32_t word = __atomic_load_n(&source[i], __ATOMIC_RELAXED);
    std::memcpy(to + i, &word, sizeof(word));
  }
#else
  std::memcpy(to, from, static_cast<size_t>(dim) * sizeof(float));
#endif
}

// Loads of a row that a writer may be changing; the sanitizer sees atomic loads.
HOTROW_INLINE uint32_t word_at(const char* row, int word) {
#if defined(__SANITIZE_THREAD__)
  return __atomic_load_n(reinterpret_cast<const uint32_t*>(row) + word, __ATOMIC_RELAXED);
#else
  uint32_t bits;
  std::memcpy(&bits, row + word * sizeof(bits), sizeof(bits));
  return bits;
#endif
}

HOTROW_INLINE float float_at(const char* row, int word) {
  const uint32_t bits = word_at(row, word);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

HOTROW_INLINE uint32_t half_at(const char* row, int i) {
#if defined(__SANITIZE_THREAD__)
  return word_at(row, i / 2) >> (i % 2 * 16) & 0xffff;
#else
  uint16_t half;
  std::memcpy(&half, row + i * sizeof(half), sizeof(half));
  return half;
#endif
}

HOTROW_INLINE uint32_t byte_at(const char* row, int i) {
#if defined(__SANITIZE_THREAD__)
  return word_at(row, i / 4) >> (i % 4 * 8) & 0xff;
#else
  return static_cast<unsigned char>(row[i]);
#endif
}

// Branch-free, so that it vectorises, and without subnormal floats, so that no FPU mode changes it: a half below 2^-14
// gets the exponent of 2^-14, and then 2^-14 is subtracted.
HOTROW_INLINE float float_of_half(uint32_t half) {
  const uint32_t size = half & 0x7fff, exponent = size & 0x7c00;
  const uint32_t low = exponent == 0 ? ~0u : 0, high = exponent == 0x7c00 ? ~0u : 0;
  const uint32_t bits = (size << 13) + (112u << 23) + (high & (112u << 23)) + (low & (1u << 23));
  const uint32_t taken_bits = low & 0x38800000u;
  float value, taken;
  std::memcpy(&value, &bits, sizeof(value));
  std::memcpy(&taken, &taken_bits, sizeof(taken));
  value -= taken;
  uint32_t result;
  std::memcpy(&result, &value, sizeof(result));
  result |= (half & 0x8000) << 16;
  std::memcpy(&value, &result, sizeof(value));
  return value;
}

HOTROW_INLINE float float_of_bfloat(uint32_t bfloat) {
  const uint32_t bits = bfloat << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Value i of a row, for types that need no scale.
template <RowType kType>
HOTROW_INLINE float value_at(const char* row, int i) {
  if constexpr (kType == RowType::kHalf) return float_of_half(half_at(row, i));
  if constexpr (kType == RowType::kBFloat) return float_of_bfloat(half_at(row, i));
  return float_at(row, i);
}

HOTROW_INLINE void read_values(RowType type, float* __restrict to, const char* from, int dim) {
  if (type == RowType::kHalf) {
    for (int i = 0; i < dim; ++i) to[i] = value_at<RowType::kHalf>(from, i);
  } else if (type == RowType::kBFloat) {
    for (int i = 0; i < dim; ++i) to[i] = value_at<RowType::kBFloat>(from, i);
  } else if (type == RowType::kByte) {
    const float scale = float_at(from, (dim + 3) / 4), bias = float_at(from, (dim + 3) / 4 + 1);
    for (int i = 0; i < dim; ++i) to[i] = static_cast<float>(static_cast<int32_t>(byte_at(from, i))) * scale + bias;
  } else {
    copy_concurrent(to, from, dim);
  }
}

void decode(RowType type, const char* row, int dim, float* out) { read_values(type, out, row, dim); }

template <int kDim, RowType kType = RowType::kFloat>
HOTROW_INLINE void add_row(float* __restrict out, const char* row, float weight, bool weighted, bool first, int dim) {
  if constexpr (kDim) dim = kDim;
  auto value = [row](int i) __attribute__((always_inline)) { return value_at<kType>(row, i); };
  if (first && !weighted)
    for (int i = 0; i < dim; ++i) out[i] = value(i);
  else if (first)
    for (int i = 0; i < dim; ++i) out[i] = weight * value(i);
  else if (!weighted)
    for (int i = 0; i < dim; ++i) out[i] += value(i);
  else
    for (int i = 0; i < dim; ++i) out[i] += weight * value(i);
}

}  // namespace
}  // namespace hotrow
