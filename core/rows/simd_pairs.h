// The pairs of a tower's vectors, compiled once per instruction set: simd_kernels.cpp alone includes this, and its
// rules hold here too.
#pragma once

#include <cstring>

#include "rows/kernels.h"

namespace hotrow {
namespace {

using Eight = float __attribute__((vector_size(32), aligned(4), may_alias));

// Four rows of the triangle by eight columns at a time; the vectors lie turned, so that columns are side by side.
void pair_dots(const PairArgs& args) {
  constexpr size_t kRows = 4, kColumns = 8;
  const size_t count = args.count, dim = args.dim, wide = (count + kColumns - 1) / kColumns * kColumns;
  alignas(64) float turned[kMostPairedFloats];
  alignas(64) float triangle[kRows][kMostPaired];
  std::memset(turned, 0, dim * wide * sizeof(float));
  for (size_t row = args.begin; row < args.end; ++row) {
    for (size_t n = 0; n < count; ++n) {
      const float* vector = args.vectors[n] + row * args.strides[n];
      for (size_t d = 0; d < dim; ++d) turned[d * wide + n] = vector[d];
    }
    float* out = args.out + row * args.out_stride;
    for (size_t i = 0; i < count; i += kRows) {
      for (size_t j = 0; j < i + kRows && j < wide; j += kColumns) {
        Eight sums[kRows] = {};
        for (size_t d = 0; d < dim; ++d) {
          const float* line = turned + d * wide;
          const Eight columns = *reinterpret_cast<const Eight*>(line + j);
          for (size_t k = 0; k < kRows; ++k) sums[k] += columns * line[i + k];
        }
        for (size_t k = 0; k < kRows; ++k) *reinterpret_cast<Eight*>(triangle[k] + j) = sums[k];
      }
      for (size_t k = 0; k < kRows && i + k < count; ++k) {
        std::memcpy(out, triangle[k], (i + k) * sizeof(float));
        out += i + k;
      }
    }
  }
}

}  // namespace
}  // namespace hotrow
