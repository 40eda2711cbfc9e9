// Compaction: live records of a mostly dead segment are appended again, so that the segment can be removed.
#include <algorithm>
#include <cstring>
#include <mutex>

#include "table/table.h"
#include "tiering/ssd_tier.h"

namespace hotrow {

size_t SsdTier::compact(size_t most_records) {
  std::vector<RecordAddress> places;
  {
    std::lock_guard lock(table_.write_mutex_);
    if (loading) return 0;
    if (compacting_.empty()) {
      const int64_t segment = log_->pick_for_compaction();
      if (segment >= 0) compacting_ = log_->live_places(segment);
      log_->remove_dead_segments();
    }
    const size_t count = std::min(most_records, compacting_.size());
    places.assign(compacting_.end() - count, compacting_.end());
    compacting_.resize(compacting_.size() - count);
  }
  if (places.empty()) return 0;
  const uint32_t record_bytes = log_->record_bytes();
  std::vector<char> records(places.size() * record_bytes);
  try {
    log_->read(places.data(), places.size(), records.data());
  } catch (const std::out_of_range&) {
    return places.size() * record_bytes;  // all records died and the segment was removed
  }
  std::lock_guard lock(table_.write_mutex_);
  for (size_t i = 0; i < places.size(); ++i) {
    if (!log_->alive(places[i])) continue;
    RecordHead head;
    const char* record = records.data() + i * record_bytes;
    std::memcpy(&head, record, sizeof(head));
    const uint64_t hash = hash_key(head.key);
    uint32_t slot;
    const bool hot = kernels().find({table_.view_, &head.key, &hash, 1, &slot}) == 0;
    const RecordAddress moved = log_->append(head, record + sizeof(head), true);
    if (hot && slot_state_.place(slot) == places[i]) {
      slot_state_.set_place(slot, moved);
    } else if (index_.contains(hash, places[i])) {
      ShardWriteScope guard(table_.shards_[shard_of(hash)]);
      index_.replace(hash, places[i], moved);
    } else {
      log_->mark_dead(moved);  // not in any index: cannot happen, and would be harmless
    }
    log_->mark_dead(places[i]);
  }
  if (compacting_.empty()) log_->remove_dead_segments();
  return places.size() * record_bytes;
}

size_t SsdTier::compact_quietly(size_t most_records) noexcept {
  try {
    return compact(most_records);
  } catch (...) {
    ++counters.compaction_errors;
    return 0;
  }
}

}  // namespace hotrow
