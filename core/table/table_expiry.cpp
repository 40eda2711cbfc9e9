// Admission of keys and expiry of rows, in all tiers of a table.
#include <algorithm>
#include <functional>

#include "table/table.h"

namespace hotrow {

void Table::set_admission(const AdmissionOptions& options) {
  require_trainable("admission needs a table that is trained");
  std::lock_guard lock(write_mutex_);
  auto admission = std::make_unique<Admission>(
      options,
      stream_key(options_.seed, hash_bytes(options_.name.data(), options_.name.size(), 0), Stream::kAdmission));
  if (!budget_->try_charge(admission->bytes())) throw_budget_exceeded(0, admission->bytes());
  budget_->uncharge(admission->bytes());
  admission_ = std::move(admission);
  recharge_budget();
}

uint64_t Table::sweep(const SweepRules& rules, uint64_t rows_on_other_ranks) {
  require_trainable("expiry needs a table that is trained");
  std::lock_guard lock(write_mutex_);
  expiry_.raise_cutoffs(rules);
  if (rules.max_rows && live_ + rows_on_other_ranks > rules.max_rows) cap_rows(rules.max_rows, rows_on_other_ranks);
  uint64_t erased = erase_expired_in_dram();
  if (changes_.on()) erased += drop_expired_cold();
  __atomic_store_n(&live_, live_ - erased, __ATOMIC_RELAXED);
  if (erased) erase_epoch_.fetch_add(1, std::memory_order_acq_rel);
  return erased;
}

// Removes expired rows from DRAM; the caller updates live_. Returns how many.
uint64_t Table::erase_expired_in_dram() {
  free_.reserve(free_.size() + live_);
  uint64_t erased = 0;
  const uint64_t end = slots_;
  for (uint64_t slot = 0; slot < end; ++slot) {
    const HeaderGroup& group = view_.headers[slot / 4];
    const uint32_t lane = slot % 4;
    if (group.stamp[lane] == 0) continue;
    const uint64_t hash = hash_key(group.key[lane]);
    if (!expiry_.is_expired(shard_of(hash), step_of(group.stamp[lane]), decode_count(group.count[lane]),
                            values_of(view_.rows + slot * view_.row_bytes)))
      continue;
    erase_slot(hash, static_cast<uint32_t>(slot));
    ++erased;
  }
  return erased;
}

// Removes expired rows from SSD. Without publications a sweep leaves them until they are next read. When changes are
// tracked, the publisher must see the removal at the same step whatever tier the row is in, so the SSD is read now.
uint64_t Table::drop_expired_cold() {
  if (!tier_ || !tier_->evicts()) return 0;
  uint64_t dropped = 0;
  std::vector<int64_t> gone;
  for (uint32_t shard = 0; shard < kShards; ++shard) {
    tier_->drop_expired(shard, gone);
    for (int64_t key : gone) changes_.mark_removed(key);
    dropped += gone.size();
  }
  return dropped;
}

uint64_t Table::count_surviving(const SweepRules& rules) {
  std::lock_guard lock(write_mutex_);
  expiry_.raise_cutoffs(rules);
  uint64_t total = 0;
  for (const auto& of_shard : surviving_steps()) total += of_shard.size();
  return total;
}

// The last steps of unexpired rows, by shard. Reads the rows on SSD.
Table::LastStepsByShard Table::surviving_steps() const {
  LastStepsByShard steps(kShards);
  auto note = [&](int64_t key, uint32_t stamp, uint16_t count, const RowValues& values) {
    const uint32_t shard = shard_of(hash_key(key));
    if (!expiry_.is_expired(shard, step_of(stamp), decode_count(count), values)) steps[shard].push_back(step_of(stamp));
  };
  for (uint64_t slot = 0; slot < slots_; ++slot) {
    const HeaderGroup& group = view_.headers[slot / 4];
    if (group.stamp[slot % 4])
      note(group.key[slot % 4], group.stamp[slot % 4], group.count[slot % 4],
           values_of(view_.rows + slot * view_.row_bytes));
  }
  std::vector<RecordHead> heads;
  std::vector<float> rows;
  for (uint32_t shard = 0; shard < kShards && tier_ && tier_->evicts(); ++shard) {
    scan_cold(shard, heads, rows);
    for (size_t i = 0; i < heads.size(); ++i)
      note(heads[i].key, heads[i].stamp, heads[i].count,
           {reinterpret_cast<const char*>(rows.data() + i * floats()), options_.dim});
  }
  return steps;
}

// When the whole table exceeds the cap, each shard keeps its share of the newest rows. Only unexpired rows count, in
// DRAM and on SSD. The SSD is read for that, but only if there may be too many rows (live_ includes expired rows on
// SSD).
void Table::cap_rows(uint64_t max_rows, uint64_t rows_on_other_ranks) {
  const uint64_t share = std::max<uint64_t>(1, max_rows / kShards);
  LastStepsByShard steps = surviving_steps();
  uint64_t total = rows_on_other_ranks;
  for (const auto& of_shard : steps) total += of_shard.size();
  if (total <= max_rows) return;
  for (uint32_t shard = 0; shard < kShards; ++shard) {
    if (steps[shard].size() <= share) continue;
    // The smallest cutoff that at most `share` rows survive.
    auto nth = steps[shard].begin() + static_cast<std::ptrdiff_t>(share);
    std::nth_element(steps[shard].begin(), nth, steps[shard].end(), std::greater<>());
    expiry_.cap(shard, *nth + 1);
  }
}

}  // namespace hotrow
