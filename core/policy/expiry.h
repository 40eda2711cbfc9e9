// Expiry: which rows are removed. The decision depends only on the batches committed so far.
//
// A sweep sets cutoffs (in steps). A row is expired if its last update is before `cutoff`; or if it is before
// `count_cutoff` and the row was seen fewer than `min_count` times; or if it is before `norm_cutoff` and its norm is
// below `min_norm`. A cap on the number of rows adds a cutoff per shard. Cutoffs never fall and an untouched row never
// changes, so a record alone tells whether its row has expired: rows on SSD are checked when they are next read, and a
// sweep does not read the SSD. For the same reason a row created or assigned between two sweeps gets
// `min_unexpired_step` as its last step: it survives until the next sweep in every tier.
#pragma once

#include <cstdint>
#include <vector>

#include "hash/hash.h"
#include "rows/row_type.h"

namespace hotrow {

struct SweepRules {
  uint32_t cutoff = 0, count_cutoff = 0, norm_cutoff = 0;  // steps; 0: off
  uint64_t min_count = 0;
  float min_norm = 0;
  uint64_t max_rows = 0;  // 0: no cap
};

// A row's values, for rules that need their norm.
struct RowValues {
  const char* row;
  int dim;
  RowType type = RowType::kFloat;
};

class Expiry {
 public:
  Expiry() : cap_cutoffs_(kShards, 0) {}

  bool is_expired(uint32_t shard, uint32_t last_step, uint64_t count, const RowValues& values) const;
  // The smallest last step that no rule removes.
  uint32_t min_unexpired_step(uint32_t shard) const;
  bool any() const { return any_; }
  void raise_cutoffs(const SweepRules& rules);  // cutoffs only rise
  void cap(uint32_t shard, uint32_t cutoff);

  const SweepRules& rules() const { return rules_; }
  const std::vector<uint32_t>& cap_cutoffs() const { return cap_cutoffs_; }
  void restore(const SweepRules& rules, std::vector<uint32_t> caps);

 private:
  SweepRules rules_;
  std::vector<uint32_t> cap_cutoffs_;
  bool any_ = false;
};

}  // namespace hotrow
