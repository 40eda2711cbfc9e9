// Admission: which keys get a row. The decision depends only on the batches committed so far, never on cache contents
// or clock time.
//
// Admission counts how often it has seen each key that has no row, in a count-min sketch per shard: four one-byte
// counters per key, all in one cache line, with conservative update. A key gets a row in the batch that raises its
// estimate to `after`. Until then it reads the initial row and its gradients are dropped. The sketch never decays, so
// an estimate can only be too high: a colliding key may be admitted early, never late.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hotrow {

struct AdmissionOptions {
  uint32_t after = 0;       // occurrences; 0 or 1: every key is admitted at once
  double probability = 1;   // that a key is admitted in a step; drawn by (seed, table, key, step)
  size_t sketch_bytes = 0;  // for `after`
};

class Admission {
 public:
  enum class Decision : uint8_t { kAdmit, kReject };

  Admission(const AdmissionOptions& options, uint64_t stream);

  // Decides whether a key without a row gets one, with `seen` occurrences in this batch. Changes nothing.
  Decision decide_admission(int64_t key, uint64_t hash, uint32_t seen, uint32_t step) const;
  // Counts the occurrences of a rejected key.
  void record_rejected(uint64_t hash, uint32_t seen);

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

}  // namespace hotrow
