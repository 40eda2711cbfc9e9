// Products of small matrices in tiles: c[m][n] (+)= sum over k of a[m * am + k * ak] * b[k][n].
//
// Lanes run along n. A block of kBlockRows rows by two vectors of sums stays in registers; an element of `a` is read
// once and used for both vectors. So `a` may have any strides: rows of keys are used where they are, transposed or not.
//
// Included by attention_kernels.cpp alone, once per instruction set.
#pragma once

#include "attention/simd_vector.h"

namespace hotrow {
namespace {

struct Left {
  const float* data;
  size_t row, column;  // strides in floats
};

template <int Rows, int Vectors, bool Add>
HOTROW_INLINE void multiply_block(size_t depth, const float* a, size_t am, size_t ak, const float* b, size_t ldb,
                                  float* c, size_t ldc) {
  Vec sums[Rows][Vectors];
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) sums[m][v] = Add ? load(c + m * ldc + v * kLanes) : Vec{};
  for (size_t k = 0; k < depth; ++k) {
    Vec right[Vectors];
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) right[v] = load(b + k * ldb + v * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < Rows; ++m) {
      const Vec left = all(a[m * am + k * ak]);
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) sums[m][v] += left * right[v];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) store(c + m * ldc + v * kLanes, sums[m][v]);
}

template <int Rows, int Vectors, bool Add>
HOTROW_INLINE size_t multiply_rows(size_t m, size_t rows, size_t depth, Left a, const float* b, size_t ldb, float* c,
                                   size_t ldc) {
  for (; m + Rows <= rows; m += Rows)
    multiply_block<Rows, Vectors, Add>(depth, a.data + m * a.row, a.row, a.column, b, ldb, c + m * ldc, ldc);
  return m;
}

// Over `Vectors` vectors of columns.
template <int Vectors, bool Add>
__attribute__((noinline)) void multiply(size_t rows, size_t depth, Left a, const float* b, size_t ldb, float* c,
                                        size_t ldc) {
  size_t m = multiply_rows<kBlockRows, Vectors, Add>(0, rows, depth, a, b, ldb, c, ldc);
  if constexpr (kBlockRows == 8) m = multiply_rows<4, Vectors, Add>(m, rows, depth, a, b, ldb, c, ldc);
  m = multiply_rows<2, Vectors, Add>(m, rows, depth, a, b, ldb, c, ldc);
  multiply_rows<1, Vectors, Add>(m, rows, depth, a, b, ldb, c, ldc);
}

// c[m][:columns] += a b, for any number of columns. Requires: rows <= 64; `b` has rows of whole vectors, ldb floats
// each.
void multiply_add_columns(size_t rows, size_t columns, size_t depth, Left a, const float* b, size_t ldb, float* c,
                          size_t ldc) {
  size_t n = 0;
  for (; n + 2 * kLanes <= columns; n += 2 * kLanes) multiply<2, true>(rows, depth, a, b + n, ldb, c + n, ldc);
  for (; n + kLanes <= columns; n += kLanes) multiply<1, true>(rows, depth, a, b + n, ldb, c + n, ldc);
  if (n == columns) return;
  alignas(64) float rest[64 * kLanes];
  multiply<1, false>(rows, depth, a, b + n, ldb, rest, kLanes);
  for (size_t m = 0; m < rows; ++m)
    for (size_t i = 0; n + i < columns; ++i) c[m * ldc + n + i] += rest[m * kLanes + i];
}

}  // namespace
}  // namespace hotrow
