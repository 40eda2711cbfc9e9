#include "tiering/ssd_tier.h"

#include <algorithm>
#include <cstring>

#include "table/table.h"

namespace hotrow {
namespace {

constexpr size_t kIndexReserve = size_t{1} << 40;

size_t max_slots(const Region& headers) { return headers.reserved() / kHeaderBytes; }

}  // namespace

SsdTier::SsdTier(Table& table, std::unique_ptr<Log> log, bool evicts, bool cache_only)
    : table_(table),
      log_(std::move(log)),
      evicts_(evicts),
      cache_only_(cache_only),
      index_(kIndexReserve),
      slot_state_(max_slots(table.headers_)) {}

RecordAddress SsdTier::append(uint32_t slot, bool alive) {
  const HeaderGroup& group = table_.view_.headers[slot / 4];
  const uint32_t lane = slot % 4;
  return log_->append({group.key[lane], group.stamp[lane], group.count[lane], 0},
                      table_.view_.rows + size_t{slot} * table_.view_.row_bytes, alive);
}

void SsdTier::mark_dirty(const uint32_t* slots, size_t count) {
  constexpr size_t kAhead = 16;
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      slot_state_.prefetch(slots[i + kAhead]);
      __builtin_prefetch(&table_.view_.headers[slots[i + kAhead] / 4]);
    }
    const uint32_t slot = slots[i];
    slot_state_.warm(slot);
    const uint8_t epoch = slot_state_.epoch(slot);
    if (epoch == epoch_) continue;
    if (table_.view_.headers[slot / 4].stamp[slot % 4] == 0) continue;  // a rejected key
    if (epoch == kClean) {
      log_->mark_dead(slot_state_.place(slot));
      slot_state_.set_place(slot, kNoAddress);
      slot_state_.set_epoch(slot, epoch_);
    } else {
      capture_slot(slot, true);
    }
  }
}

void SsdTier::detach_slot(uint32_t slot) {
  if (needs_capture(slot)) capture_slot(slot, true);
  if (slot_state_.epoch(slot) == kClean && slot_state_.place(slot) != kNoAddress)
    log_->mark_dead(slot_state_.place(slot));
  slot_state_.reset(slot, kClean, kNoAddress);
}

bool SsdTier::erase_cold(int64_t key, uint64_t hash) {
  const auto candidates = index_.find(hash);
  std::vector<char> record(log_->record_bytes());
  for (int i = 0; i < candidates.count; ++i) {
    RecordHead head;
    log_->read(&candidates.place[i], 1, record.data());
    std::memcpy(&head, record.data(), sizeof(head));
    if (head.key != key) continue;
    drop_cold(hash, candidates.place[i]);
    if (!table_.expired(hash, head, record.data() + sizeof(head))) return true;
    __atomic_store_n(&table_.live_, table_.live_ - 1, __ATOMIC_RELAXED);  // it had expired; live_ still counted it
    return false;
  }
  return false;
}

void SsdTier::drop_expired(uint32_t shard, std::vector<int64_t>& gone) {
  gone.clear();
  std::vector<RecordAddress> places;
  index_.places(shard, places);
  const uint32_t record_bytes = log_->record_bytes();
  std::vector<char> records(places.size() * record_bytes);
  log_->read(places.data(), places.size(), records.data());
  for (size_t i = 0; i < places.size(); ++i) {
    RecordHead head;
    const char* record = records.data() + i * record_bytes;
    std::memcpy(&head, record, sizeof(head));
    const uint64_t hash = hash_key(head.key);
    if (!table_.expired(hash, head, record + sizeof(head))) continue;
    drop_cold(hash, places[i]);
    gone.push_back(head.key);
  }
}

void SsdTier::drop_cold(uint64_t hash, RecordAddress place) {
  {
    ShardWriteScope guard(table_.shards_[shard_of(hash)]);
    index_.erase(hash, place);
  }
  log_->mark_dead(place);
}

void SsdTier::mark_all_dirty() { slot_state_.set_all(table_.slots_, epoch_); }

// Tags are reused in turn. If more batches are in flight than there are tags, some rows stay protected longer than
// needed.
uint8_t SsdTier::acquire_protect_tag() {
  last_tag_ = last_tag_ + 1 == kTags ? 1 : last_tag_ + 1;
  ++batches_by_tag_[last_tag_];
  return last_tag_;
}

void SsdTier::pin(const uint32_t* slots, size_t count) {
  for (size_t i = 0; i < count; ++i) pinned_slots_ += slot_state_.pins(slots[i])++ == 0;
}

void SsdTier::unpin(const uint32_t* slots, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    uint8_t& pins = slot_state_.pins(slots[i]);
    // The slot of an erased row or a rejected key is freed with its last pin.
    if (--pins != 0) continue;
    --pinned_slots_;
    if (table_.view_.headers[slots[i] / 4].stamp[slots[i] % 4] == 0) table_.free_.push_back(slots[i]);
  }
}

void SsdTier::pin_found(const uint32_t* slots, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (slots[i] != kNoSlot) pin(&slots[i], 1);
}

void SsdTier::unpin_found(const uint32_t* slots, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (slots[i] != kNoSlot) unpin(&slots[i], 1);
}

size_t SsdTier::memory_bytes() const {
  const size_t slabs = evicts_ ? active_slabs_ * slab_bytes() : slot_state_.committed();
  return slabs + index_.bytes() + log_->report().ram_bytes;
}

TierReport SsdTier::report() const {
  TierReport report = counters;
  report.cold_rows = index_.rows();
  report.cold_index_bytes = index_.bytes();
  report.marks_bytes = evicts_ ? active_slabs_ * kSlabSlots * SlotState::kBytes : slot_state_.committed();
  report.log = log_->report();
  return report;
}

}  // namespace hotrow
