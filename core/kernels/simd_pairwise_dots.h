// Dot products of all pairs of vectors, for the dot interaction of a tower (serve/dot_interaction.h).
//
// Included by simd_kernels.cpp alone, once per instruction set; its rules hold here too.
#pragma once

#include <cstring>

#include "kernels/row_kernels.h"

namespace hotrow {
namespace {

using Float8 = float __attribute__((vector_size(32), aligned(4), may_alias));

// Computes four rows of the triangle by eight columns at a time. The vectors are transposed, so that columns are
// adjacent.
void pairwise_dots(const PairwiseDotsArgs& args) {
  constexpr size_t kRows = 4, kColumns = 8;
  const size_t count = args.count, dim = args.dim, wide = (count + kColumns - 1) / kColumns * kColumns;
  alignas(64) float turned[kMaxInteractionFloats];
  alignas(64) float triangle[kRows][kMaxInteractionVectors];
  std::memset(turned, 0, dim * wide * sizeof(float));
  for (size_t row = args.begin; row < args.end; ++row) {
    for (size_t n = 0; n < count; ++n) {
      const float* vector = args.vectors[n] + row * args.strides[n];
      for (size_t d = 0; d < dim; ++d) turned[d * wide + n] = vector[d];
    }
    float* out = args.out + row * args.out_stride;
    for (size_t i = 0; i < count; i += kRows) {
      for (size_t j = 0; j < i + kRows && j < wide; j += kColumns) {
        Float8 sums[kRows] = {};
        for (size_t d = 0; d < dim; ++d) {
          const float* line = turned + d * wide;
          const Float8 columns = *reinterpret_cast<const Float8*>(line + j);
          for (size_t k = 0; k < kRows; ++k) sums[k] += columns * line[i + k];
        }
        for (size_t k = 0; k < kRows; ++k) *reinterpret_cast<Float8*>(triangle[k] + j) = sums[k];
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
