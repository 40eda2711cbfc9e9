// The update rules again, element by element, written as plainly as possible. The kernels must agree bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "optim/rule_kind.h"
#include "rows/row_type.h"

namespace hotrow::testing {

// Over lanes i % 8, then the lanes as a tree: the one order that the rules fix.
inline float naive_sum_of_squares(const std::vector<float>& g) {
  float lane[8] = {};
  for (size_t i = 0; i < g.size(); ++i) lane[i % 8] += g[i] * g[i];
  const float a = lane[0] + lane[4], b = lane[1] + lane[5], c = lane[2] + lane[6], d = lane[3] + lane[7];
  return (a + c) + (b + d);
}

// Coefficients that a rule could get at some step; eight for every rule.
inline std::vector<float> some_coefficients(RuleKind rule) {
  switch (rule) {
    case RuleKind::kSgd:
      return {0.1f};
    case RuleKind::kAdagrad:
    case RuleKind::kRowWiseAdagrad:
      return {0.05f, 1e-8f};
    case RuleKind::kAdam:
      return {0.01f, 1.7f, 1e-8f, 0.9f, 0.1f, 0.999f, 0.001f, 1.0f};
    case RuleKind::kAdamW:
      return {0.01f, 1.7f, 1e-8f, 0.9f, 0.1f, 0.999f, 0.001f, 0.995f};
    default:
      return {10.0f, 1.0f, 0.3f, 0.01f};  // FTRL: 1 / lr, beta, l1, l2
  }
}

// Rounds a value to a multiple of its type's last place: down, or up with the probability of the fraction that is cut
// off. As many of the lowest `bits` decide as are cut off.
inline float naive_round(RowType type, float value, uint32_t bits) {
  const bool bfloat = type == RowType::kBFloat;
  const int digits = bfloat ? 7 : 10, lowest = bfloat ? -126 : -14, cut = bfloat ? 16 : 13;
  const double size = std::fabs(double{value}), largest = bfloat ? 0x1.fep127 : 65504.0;
  int exponent = 0;
  std::frexp(size, &exponent);
  const double place = std::ldexp(1.0, std::max(exponent - 1, lowest) - digits);
  const double whole = std::floor(size / place), steps = std::ldexp(1.0, cut);
  const double part = std::floor((size / place - whole) * steps);
  const double up = part + (bits & ((1u << cut) - 1)) >= steps;
  return static_cast<float>(std::copysign(std::min((whole + up) * place, largest), double{value}));
}

// `row` has the values, then the state.
inline void naive_rule(RuleKind rule, std::vector<float>& row, const std::vector<float>& g,
                       const std::vector<float>& c) {
  const size_t dim = g.size();
  float step = 0;
  if (rule == RuleKind::kRowWiseAdagrad) {
    row[dim] += naive_sum_of_squares(g) / static_cast<float>(dim);
    step = c[0] / (std::sqrt(row[dim]) + c[1]);
  }
  for (size_t i = 0; i < dim; ++i) {
    float& w = row[i];
    if (rule == RuleKind::kSgd) w = w - c[0] * g[i];
    if (rule == RuleKind::kRowWiseAdagrad) w = w - step * g[i];
    if (rule == RuleKind::kAdagrad) {
      float& sum = row[dim + i];
      sum = sum + g[i] * g[i];
      w = w - c[0] * g[i] / (std::sqrt(sum) + c[1]);
    }
    if (rule == RuleKind::kAdam || rule == RuleKind::kAdamW) {
      float &m = row[dim + i], &v = row[2 * dim + i];
      m = c[3] * m + c[4] * g[i];
      v = c[5] * v + c[6] * g[i] * g[i];
      w = c[7] * w - c[0] * m / (std::sqrt(v) * c[1] + c[2]);
    }
    if (rule == RuleKind::kFtrl) {
      float &z = row[dim + i], &n = row[2 * dim + i];
      const float old_root = std::sqrt(n);
      n = n + g[i] * g[i];
      const float root = std::sqrt(n);
      z = z + (g[i] - (root - old_root) * c[0] * w);
      const float shrunk = z > 0 ? z - c[2] : z + c[2];
      w = std::fabs(z) <= c[2] ? 0.0f : -shrunk / ((c[1] + root) * c[0] + c[3]);
    }
  }
}

}  // namespace hotrow::testing
