#include "policy/admission.h"

#include <algorithm>

#include "hash/hash.h"
#include "memory/line_arena.h"
#include "random/philox.h"

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

Admission::Decision Admission::decide_admission(int64_t key, uint64_t hash, uint32_t seen, uint32_t step) const {
  if (options_.after > 1 && estimate(hash) + seen < options_.after) return Decision::kReject;
  if (options_.probability < 1) {
    const double draw01 = draw(stream_, key, step, 0)[0] * 0x1p-32;
    if (draw01 >= options_.probability) return Decision::kReject;
  }
  return Decision::kAdmit;
}

void Admission::record_rejected(uint64_t hash, uint32_t seen) {
  if (options_.after <= 1) return;
  const uint32_t raised = std::min<uint32_t>(255, estimate(hash) + seen);
  for (size_t at : cells(hash).at) counters_[at] = std::max<uint8_t>(counters_[at], static_cast<uint8_t>(raised));
}

}  // namespace hotrow
