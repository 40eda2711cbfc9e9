// A table with an SSD tier: scanning the rows there, prefetching them, and clearing the table.
#include <algorithm>
#include <cstring>

#include "table/table.h"
#include "tiering/compaction_thread.h"

namespace hotrow {

void Table::scan_cold(uint32_t shard, std::vector<RecordHead>& heads, std::vector<float>& rows) const {
  heads.clear();
  rows.clear();
  if (!tier_ || !tier_->evicts()) return;
  std::vector<RecordAddress> places;
  tier_->index().places(shard, places);
  const uint32_t record_bytes = tier_->log().record_bytes();
  std::vector<char> records(places.size() * record_bytes);
  tier_->log().read(places.data(), places.size(), records.data());
  for (size_t i = 0; i < places.size(); ++i) {
    RecordHead head;
    const char* record = records.data() + i * record_bytes;
    std::memcpy(&head, record, sizeof(head));
    if (expired(hash_key(head.key), head, record + sizeof(head))) continue;
    heads.push_back(head);
    rows.resize(rows.size() + floats());
    load_row(record + sizeof(head), rows.data() + rows.size() - floats());
  }
}

size_t Table::prefetch(const int64_t* keys, size_t count) {
  if (!tier_ || !tier_->evicts()) return 0;
  const size_t part = bulk_part();
  size_t came = 0;
  UniqueKeys unique_keys;
  for (size_t at = 0; at < count; at += part) {
    unique_keys.build({{keys + at, std::min(part, count - at)}});
    const Promoted promoted = promote(unique_keys);
    came += promoted.rows;
    if (promoted.out_of_slots) break;  // pinned rows fill DRAM; the other rows are read when they are needed
  }
  return came;
}

void Table::mark_used(const int64_t* keys, size_t count) {
  if (!tier_ || !tier_->evicts()) return;
  std::vector<uint32_t> slots(count);
  std::lock_guard lock(write_mutex_);
  find(keys, count, slots.data());
  for (uint32_t slot : slots)
    if (slot != kNoSlot) tier_->slot_state().warm(slot);
}

Table::Promoted Table::promote(const UniqueKeys& unique_keys, uint8_t tag) {
  if (!tier_ || !tier_->evicts()) return {};
  std::vector<uint32_t> slots(unique_keys.size());
  FetchedRows fetched;
  if (find_unique(unique_keys, slots.data())) tier_->fetch_unlocked(unique_keys, slots.data(), fetched);
  if (fetched.unique.empty() && !tag) return {};

  std::lock_guard lock(write_mutex_);
  find_unique(unique_keys, slots.data());  // again: with the mutex held no row moves
  for (uint32_t slot : slots)
    if (tag && slot != kNoSlot) tier_->protect(slot, tag);
  // A record address permanently names one version of one row: if the key still has this address, the record that was
  // read is current. Expiry is decided now. plan_insert and insert see only these keys as missing.
  std::vector<uint32_t> wanted(unique_keys.size(), 0u), coming;
  for (size_t n = 0; n < fetched.unique.size(); ++n) {
    const uint32_t u = fetched.unique[n];
    const uint64_t hash = unique_keys.hashes()[u];
    if (slots[u] != kNoSlot || !tier_->index().contains(hash, fetched.places[n])) continue;
    RecordHead head;
    const char* record = fetched.records.data() + n * tier_->log().record_bytes();
    std::memcpy(&head, record, sizeof(head));
    if (expired(hash, head, record + sizeof(head))) continue;
    wanted[u] = kNoSlot;
    coming.push_back(u);
  }
  if (coming.empty()) return {};
  tier_->unprotected_only =
      !options_.frozen;  // a read-only table gets its rows this way, so it may evict protected ones
  try {
    InsertPlan inserts = plan_insert(unique_keys.hashes(), wanted.data(), unique_keys.cuts(), &fetched);
    reserve_memory(inserts);
    insert(std::move(inserts), unique_keys.keys(), unique_keys.hashes(), wanted.data(), &fetched);
    tier_->unprotected_only = false;
  } catch (const BudgetExceeded&) {
    tier_->unprotected_only = false;
    recharge_budget();
    return {0, true};
  } catch (...) {
    tier_->unprotected_only = false;
    recharge_budget();
    throw;
  }
  for (uint32_t u : coming) {
    if (tag)
      tier_->protect(wanted[u], tag);
    else
      tier_->slot_state().warm(wanted[u]);  // otherwise the next batch would evict it first
  }
  tier_->counters.prefetched += coming.size();
  tier_->restore_free_reserve();
  return {coming.size(), false};
}

void Table::clear_index() {
  for (ShardIndex& index : shards_) {
    ShardWriteScope guard(index);
    if (index.entries) index_memory_.release(reinterpret_cast<char*>(index.entries), index.lines);
    index.entries = nullptr;
    index.lines = index.rows = index.deleted = 0;
    index.slot_bits = kMinSlotBits;
  }
}

void Table::clear() {
  std::unique_ptr<Log> log;
  bool evicts = false, cache_only = false;
  // The compaction thread takes the write mutex inside its own mutex, so compaction is paused before this thread takes
  // the write mutex.
  CompactionThread::CompactionPause away(tier_.get());
  {
    std::lock_guard lock(write_mutex_);
    if (tier_) {
      if (tier_->snapshot_active()) throw std::logic_error("clear: the table is being saved");
      // Opens the new log before closing the old one: if the disk fails, the table keeps its tier.
      log = std::make_unique<Log>(tier_->log().options());
      evicts = tier_->evicts();
      cache_only = tier_->cache_only();
      budget_->remove(this);
      away.dismiss();
      tier_.reset();
    }
    clear_index();
    std::memset(headers_.data(), 0, (slots_ + 3) / 4 * sizeof(HeaderGroup));
    if (evicts && slots_) {
      rows_.discard(0, rows_.committed());
      headers_.discard(0, headers_.committed());
    }
    free_.clear();
    std::fill(blocks_.begin(), blocks_.end(), SlotBlock{});
    __atomic_store_n(&slots_, uint64_t{0}, __ATOMIC_RELAXED);
    __atomic_store_n(&live_, uint64_t{0}, __ATOMIC_RELAXED);
    erase_epoch_.fetch_add(1, std::memory_order_acq_rel);
    ++generation_;
    expiry_ = Expiry();
    changes_.clear();  // the caller of clear() knows that all published rows are gone
    if (admission_) std::fill(admission_->counters().begin(), admission_->counters().end(), 0);
    if (evicts) {
      budget_->uncharge(charged_);
      charged_ = 0;
    } else {
      recharge_budget();
    }
  }
  if (log) attach(std::move(log), evicts, cache_only);
}

}  // namespace hotrow
