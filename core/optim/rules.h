// The update rules, on one row: weights w[dim] followed by the rule's state, given the summed gradient g[dim].
//
// Each rule reads only float32 coefficients that Python computed once for the step (src/hotrow/optim.py has the list,
// the state layout and the same rule in plain torch, which is the oracle: the results agree bit for bit). Operations
// are written out in one order and never fused. Loops over i are independent element by element, so a compiler may
// vectorise them at any width without changing a bit; only sum_of_squares fixes an order, over eight lanes.
//
// Included by simd_kernels.cpp alone, once per instruction set.
#pragma once

#include <cmath>

namespace hotrow {

namespace {

// Eight floats at any address. The compiler uses one AVX register or two SSE registers; the operations are the same.
typedef float Lanes __attribute__((vector_size(32), aligned(4), may_alias));

inline __attribute__((always_inline)) Lanes& lanes(float* p) { return *reinterpret_cast<Lanes*>(p); }
inline __attribute__((always_inline)) const Lanes& lanes(const float* p) { return *reinterpret_cast<const Lanes*>(p); }

// Squares are summed over lanes i % 8, each in rising order, then lanes as a tree: ((0+4)+(2+6)) + ((1+5)+(3+7)).
template <int kDim>
inline __attribute__((always_inline)) float sum_of_squares(const float* g, int dim) {
  if constexpr (kDim) dim = kDim;
  Lanes sum = {};
  int i = 0;
  for (; i + 8 <= dim; i += 8) sum += lanes(g + i) * lanes(g + i);
  for (int j = 0; i + j < dim; ++j) sum[j] += g[i + j] * g[i + j];
  const float a = sum[0] + sum[4], b = sum[1] + sum[5], c = sum[2] + sum[6], d = sum[3] + sum[7];
  return (a + c) + (b + d);
}

struct Sgd {  // lr
  template <int kDim>
  static void apply(float* __restrict w, const float* __restrict g, int dim, const float* c) {
    if constexpr (kDim) dim = kDim;
    const float lr = c[0];
    for (int i = 0; i < dim; ++i) w[i] -= lr * g[i];
  }
};

struct Adagrad {  // lr, eps; state: sum[dim]
  template <int kDim>
  static void apply(float* __restrict w, const float* __restrict g, int dim, const float* c) {
    if constexpr (kDim) dim = kDim;
    const float lr = c[0], eps = c[1];
    float* __restrict sum = w + dim;
    for (int i = 0; i < dim; ++i) {
      sum[i] += g[i] * g[i];
      w[i] -= lr * g[i] / (std::sqrt(sum[i]) + eps);
    }
  }
};

struct RowWiseAdagrad {  // lr, eps; state: sum[1], the running sum of the mean square
  template <int kDim>
  static void apply(float* __restrict w, const float* __restrict g, int dim, const float* c) {
    if constexpr (kDim) dim = kDim;
    float sum = w[dim] + sum_of_squares<kDim>(g, dim) / static_cast<float>(dim);
    w[dim] = sum;
    const float step = c[0] / (std::sqrt(sum) + c[1]);
    for (int i = 0; i < dim; ++i) w[i] -= step * g[i];
  }
};

template <bool kDecay>
struct AdamRule {  // step size, 1 / sqrt(second bias), eps, b1, 1 - b1, b2, 1 - b2, kept share; state: m[dim], v[dim]
  template <int kDim>
  static void apply(float* __restrict w, const float* __restrict g, int dim, const float* c) {
    if constexpr (kDim) dim = kDim;
    const float step = c[0], unbias = c[1], eps = c[2], b1 = c[3], a1 = c[4], b2 = c[5], a2 = c[6], keep = c[7];
    float* __restrict m = w + dim;
    float* __restrict v = w + 2 * dim;
    for (int i = 0; i < dim; ++i) {
      m[i] = b1 * m[i] + a1 * g[i];
      v[i] = b2 * v[i] + a2 * g[i] * g[i];
      float kept = kDecay ? keep * w[i] : w[i];
      w[i] = kept - step * m[i] / (std::sqrt(v[i]) * unbias + eps);
    }
  }
};
using Adam = AdamRule<false>;
using AdamW = AdamRule<true>;

struct Ftrl {  // 1 / lr, beta, l1, l2; state: z[dim], n[dim]
  template <int kDim>
  static void apply(float* __restrict w, const float* __restrict g, int dim, const float* c) {
    if constexpr (kDim) dim = kDim;
    const float rate = c[0], beta = c[1], l1 = c[2], l2 = c[3];
    float* __restrict z = w + dim;
    float* __restrict n = w + 2 * dim;
    for (int i = 0; i < dim; ++i) {
      float old_root = std::sqrt(n[i]);
      n[i] += g[i] * g[i];
      float root = std::sqrt(n[i]);
      z[i] += g[i] - (root - old_root) * rate * w[i];
      float shrunk = z[i] > 0.0f ? z[i] - l1 : z[i] + l1;
      float value = -shrunk / ((beta + root) * rate + l2);
      w[i] = std::fabs(z[i]) <= l1 ? 0.0f : value;
    }
  }
};

}  // namespace
}  // namespace hotrow
