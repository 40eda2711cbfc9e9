#include "policy/expiry.h"

#include <algorithm>
#include <cmath>

#include "kernels/row_kernels.h"

namespace hotrow {

bool Expiry::is_expired(uint32_t shard, uint32_t last_step, uint64_t count, const RowValues& values) const {
  if (!any_) return false;
  if (last_step < rules_.cutoff || last_step < cap_cutoffs_[shard]) return true;
  if (last_step < rules_.count_cutoff && count < rules_.min_count) return true;
  if (last_step >= rules_.norm_cutoff) return false;
  static thread_local std::vector<float> floats;
  floats.resize(values.dim);
  kernels().decode(values.type, values.row, values.dim, floats.data());
  double squares = 0;
  for (float value : floats) squares += double{value} * double{value};
  return std::sqrt(squares) < double{rules_.min_norm};
}

uint32_t Expiry::min_unexpired_step(uint32_t shard) const {
  return std::max(std::max(rules_.cutoff, cap_cutoffs_[shard]), std::max(rules_.count_cutoff, rules_.norm_cutoff));
}

void Expiry::raise_cutoffs(const SweepRules& rules) {
  rules_.cutoff = std::max(rules_.cutoff, rules.cutoff);
  rules_.count_cutoff = std::max(rules_.count_cutoff, rules.count_cutoff);
  rules_.norm_cutoff = std::max(rules_.norm_cutoff, rules.norm_cutoff);
  rules_.min_count = rules.min_count;
  rules_.min_norm = rules.min_norm;
  rules_.max_rows = rules.max_rows;
  any_ = true;
}

void Expiry::cap(uint32_t shard, uint32_t cutoff) {
  cap_cutoffs_[shard] = std::max(cap_cutoffs_[shard], cutoff);
  any_ = true;
}

void Expiry::restore(const SweepRules& rules, std::vector<uint32_t> caps) {
  rules_ = rules;
  cap_cutoffs_ = std::move(caps);
  any_ = rules_.cutoff || rules_.count_cutoff || rules_.norm_cutoff ||
         std::any_of(cap_cutoffs_.begin(), cap_cutoffs_.end(), [](uint32_t c) { return c != 0; });
}

}  // namespace hotrow
