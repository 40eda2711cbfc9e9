#include "rows/expiry.h"

#include <algorithm>
#include <cmath>

#include "memory/line_arena.h"
#include "random/philox.h"
#include "rows/kernels.h"

namespace hotrow {

Admission::Admission(const AdmissionOptions& options, uint64_t stream) : options_(options), stream_(stream) {
  if (options_.after > 1) {
    lines_per_shard_ = std::max<size_t>(1, options_.sketch_bytes / kLine / kShards);
    counters_.assign(lines_per_shard_ * kShards * kLine, 0);
  }
}

// One line of the key's shard, four different bytes in it.
Admission::Cells Admission::cells(uint64_t hash) const {
  const size_t line = shard_of(hash) * lines_per_shard_ +
                      static_cast<size_t>((((hash >> 22) & 0xffffffffull) * lines_per_shard_) >> 32);
  Cells cells;
  uint64_t bits = mix64(hash);
  for (int i = 0; i < 4; ++i, bits >>= 4) cells.at[i] = line * kLine + i * 16 + (bits & 15);
  return cells;
}

uint32_t Admission::estimate(uint64_t hash) const {
  const Cells c = cells(hash);
  return std::min(std::min(counters_[c.at[0]], counters_[c.at[1]]), std::min(counters_[c.at[2]], counters_[c.at[3]]));
}

Admission::Verdict Admission::judge(int64_t key, uint64_t hash, uint32_t seen, uint32_t step) const {
  if (options_.after > 1 && estimate(hash) + seen < options_.after) return Verdict::kRefuse;
  if (options_.probability < 1) {
    const double draw01 = draw(stream_, key, step, 0)[0] * 0x1p-32;
    if (draw01 >= options_.probability) return Verdict::kRefuse;
  }
  return Verdict::kAdmit;
}

void Admission::note(uint64_t hash, uint32_t seen) {
  if (options_.after <= 1) return;
  const uint32_t raised = std::min<uint32_t>(255, estimate(hash) + seen);
  for (size_t at : cells(hash).at) counters_[at] = std::max<uint8_t>(counters_[at], static_cast<uint8_t>(raised));
}

bool Expiry::removes(uint32_t shard, uint32_t last_step, uint64_t count, const RowValues& values) const {
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

uint32_t Expiry::oldest(uint32_t shard) const {
  return std::max(std::max(rules_.cutoff, cap_cutoffs_[shard]), std::max(rules_.count_cutoff, rules_.norm_cutoff));
}

void Expiry::harden(const SweepRules& rules) {
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
