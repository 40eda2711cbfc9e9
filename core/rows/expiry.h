// Which keys may have a row, and which rows may stay. Both follow from the batches committed so far: never from what a
// cache holds or what a clock says.
//
// Admission counts the sightings of keys without a row in a sketch: per shard a count-min of four byte counters a key,
// all in one cache line, raised conservatively. A key gets its row in the batch that brings its estimate to `after`;
// until then it reads the initial row and learns nothing. The sketch forgets nothing, so its estimates only err
// upwards: a key may come in early when it collides, never late.
//
// Expiry is a set of rules that a sweep hardens at a step: a row whose last step is before `cutoff` goes, one with
// fewer sightings than `min_count` goes when its last step is before `count_cutoff`, one with a norm below `min_norm`
// when it is before `norm_cutoff`. Cutoffs only rise, and a row that is not touched does not change, so whether a row
// on SSD has expired can be told when it is met, from its record alone: sweeps never read the SSD for it. A cap on rows
// sets a cutoff of its own for every shard. For the same reason a row that is made or set between two sweeps counts as
// updated at `oldest`, so that it lives until the next sweep on every tier.
#pragma once

#include <cstdint>
#include <vector>

#include "hash/hash.h"
#include "rows/row_type.h"

namespace hotrow {

struct AdmissionOptions {
  uint32_t after = 0;       // sightings; 0 or 1: every key at once
  double probability = 1;   // of a sighting's key being admitted at once; drawn by (seed, table, key, step)
  size_t sketch_bytes = 0;  // for `after`
};

class Admission {
 public:
  enum class Verdict : uint8_t { kAdmit, kRefuse };

  Admission(const AdmissionOptions& options, uint64_t stream);

  // Whether a key without a row gets one, with `seen` sightings in this batch. Changes nothing.
  Verdict judge(int64_t key, uint64_t hash, uint32_t seen, uint32_t step) const;
  // Notes the sightings of a key that was refused.
  void note(uint64_t hash, uint32_t seen);

  const AdmissionOptions& options() const { return options_; }
  size_t bytes() const { return counters_.size(); }
  std::vector<uint8_t>& counters() { return counters_; }
  const std::vector<uint8_t>& counters() const { return counters_; }

 private:
  struct Cells {
    size_t at[4];
  };
  Cells cells(uint64_t hash) const;
  uint32_t estimate(uint64_t hash) const;

  const AdmissionOptions options_;
  const uint64_t stream_;
  size_t lines_per_shard_ = 0;
  std::vector<uint8_t> counters_;
};

struct SweepRules {
  uint32_t cutoff = 0, count_cutoff = 0, norm_cutoff = 0;  // steps; 0: off
  uint64_t min_count = 0;
  float min_norm = 0;
  uint64_t max_rows = 0;  // 0: no cap
};

// A row's values, where a rule may want their norm.
struct RowValues {
  const char* row;
  int dim;
  RowType type = RowType::kFloat;
};

class Expiry {
 public:
  Expiry() : cap_cutoffs_(kShards, 0) {}

  bool removes(uint32_t shard, uint32_t last_step, uint64_t count, const RowValues& values) const;
  // The earliest last step that no rule looks at.
  uint32_t oldest(uint32_t shard) const;
  bool any() const { return any_; }
  void harden(const SweepRules& rules);  // the cutoffs
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
