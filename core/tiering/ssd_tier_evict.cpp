// Takes slots from the budget in slabs and, when the budget is spent, evicts rows by the CLOCK algorithm.
#include <algorithm>
#include <array>

#include "table/table.h"
#include "tiering/ssd_tier.h"

namespace hotrow {
namespace {

constexpr size_t kEvictedTogether = 64;  // rows

}  // namespace

size_t SsdTier::slab_bytes() const {
  return size_t{kSlabSlots} * (table_.view_.row_bytes + kHeaderBytes + SlotState::kBytes);
}

bool SsdTier::grow_slab() {
  Budget& budget = *table_.budget_;
  if (!budget.try_charge(slab_bytes(), budget.free_reserve())) return false;
  uint64_t slab = std::find(active_.begin(), active_.end(), false) - active_.begin();
  const uint64_t first = slab * kSlabSlots, end = first + kSlabSlots;
  try {
    if (end * table_.view_.row_bytes > table_.rows_.reserved() || end >= kNoSlot - kFirstSlotCode)
      throw std::bad_alloc();
    table_.rows_.commit(end * table_.view_.row_bytes);
    table_.headers_.commit((end + 3) / 4 * sizeof(HeaderGroup));
    slot_state_.commit(end);
    table_.free_.reserve(table_.free_.size() + kSlabSlots);
    if (slab == active_.size()) active_.push_back(true);
  } catch (...) {
    budget.uncharge(slab_bytes());
    throw;
  }
  active_[slab] = true;
  ++active_slabs_;
  table_.charged_ += slab_bytes();
  if (end > table_.slots_) __atomic_store_n(&table_.slots_, end, __ATOMIC_RELAXED);
  for (uint64_t slot = end; slot-- > first;) {
    slot_state_.reset(static_cast<uint32_t>(slot), kClean, kNoAddress);
    table_.free_.push_back(static_cast<uint32_t>(slot));
  }
  return true;
}

void SsdTier::reserve_slots(size_t rows) {
  reserved_slots_ = rows + pinned_slots_;
  while (active_slabs_ * kSlabSlots < reserved_slots_ && (grow_slab() || table_.budget_->reclaim(table_))) {
  }
}

void SsdTier::ensure_free_slots(size_t rows) {
  while (table_.free_.size() < rows) {
    if (grow_slab()) continue;
    const size_t want = rows - table_.free_.size();
    if (evict(std::max<size_t>(want, active_slabs_ * kSlabSlots / 64)) >= want) continue;
    if (!unprotected_only && table_.free_.size() < rows) evict(rows - table_.free_.size(), true);
    if (table_.free_.size() >= rows) break;
    if (!unprotected_only && trim()) continue;
    if (unprotected_only || !table_.budget_->reclaim(table_)) {
      const size_t more = (rows - table_.free_.size() + kSlabSlots - 1) / kSlabSlots;
      table_.throw_budget_exceeded(rows, more * slab_bytes() + table_.budget_->free_reserve());
    }
  }
}

bool SsdTier::trim() {
  if (log_->trim() == 0) return false;
  table_.recharge_budget();
  return true;
}

// The hand makes at most four rounds, because heat is at most 3.
size_t SsdTier::evict(size_t want, bool all) {
  std::array<uint32_t, kEvictedTogether> victims;
  size_t evicted = 0, count = 0;
  const uint64_t slots = table_.slots_;
  for (uint64_t looked = 0; looked < 4 * slots && evicted + count < want; ++looked) {
    if (clock_hand_ >= slots) clock_hand_ = 0;
    const auto slot = static_cast<uint32_t>(clock_hand_++);
    if (slot % kSlabSlots == 0 && !active_[slot / kSlabSlots]) {
      clock_hand_ += kSlabSlots - 1;
      looked += kSlabSlots - 1;
      continue;
    }
    // The hand is back where this group of victims began. Evict the group now, or a slot would be chosen twice. This
    // precedes the heat check, because readers may have raised the heat since.
    if (count && victims[0] == slot) {
      evict_slots(victims.data(), count);
      evicted += count;
      count = 0;
    }
    if (table_.view_.headers[slot / 4].stamp[slot % 4] == 0 || slot_state_.pins(slot) || (!all && is_protected(slot)))
      continue;
    if (slot_state_.heat(slot)) {
      slot_state_.cool(slot);
      continue;
    }
    victims[count++] = slot;
    if (count < victims.size()) continue;
    evict_slots(victims.data(), count);
    evicted += count;
    count = 0;
  }
  evict_slots(victims.data(), count);
  return evicted + count;
}

// Evicts a group at a time: the index lines of all its rows are prefetched while rows are appended.
void SsdTier::evict_slots(const uint32_t* slots, size_t count) {
  if (cache_only_) {
    for (size_t i = 0; i < count; ++i) discard(slots[i]);
    return;
  }
  const HeaderGroup* headers = table_.view_.headers;
  std::array<uint64_t, kEvictedTogether> hashes;
  std::array<RecordHead, kEvictedTogether> heads;
  std::array<const void*, kEvictedTogether> values;
  std::array<uint32_t, kEvictedTogether> dirty;
  std::array<RecordAddress, kEvictedTogether> places;
  size_t dirty_count = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t slot = slots[i], lane = slot % 4;
    const HeaderGroup& group = headers[slot / 4];
    hashes[i] = hash_key(group.key[lane]);
    const ShardIndex& index = table_.shards_[shard_of(hashes[i])];
    __builtin_prefetch(index.entries + size_t{ShardIndex::line_of(hashes[i], index.lines)} * kEntriesPerLine, 1);
    __builtin_prefetch(index_.line(hashes[i]), 1);
    if (slot_state_.epoch(slot) == kClean) continue;
    heads[dirty_count] = {group.key[lane], group.stamp[lane], group.count[lane], 0};
    values[dirty_count] = table_.view_.rows + size_t{slot} * table_.view_.row_bytes;
    dirty[dirty_count++] = static_cast<uint32_t>(i);
  }
  for (size_t i = 0; i < count && dirty_count < count; ++i)
    if (slot_state_.epoch(slots[i]) == kClean) demote(slots[i], hashes[i], slot_state_.place(slots[i]));
  for (size_t done = 0; done < dirty_count;) {
    const size_t end = done + log_->append(&heads[done], &values[done], dirty_count - done, &places[done]);
    for (; done < end; ++done) {
      const uint32_t slot = slots[dirty[done]];
      if (needs_capture(slot)) {
        snapshot_->set.set(places[done]);
        ++snapshot_->written;
      }
      ++counters.evicted_dirty;
      demote(slot, hashes[dirty[done]], places[done]);
    }
  }
}

// Moves a row from the DRAM index to the SSD index; its record is in the log.
void SsdTier::demote(uint32_t slot, uint64_t hash, RecordAddress place) {
  ++counters.evicted;
  {
    ShardIndex& index = table_.shards_[shard_of(hash)];
    ShardWriteScope guard(index);
    index_.insert(hash, place);
    ShardWriter(index, table_.view_.headers, table_.index_memory_).erase(hash, slot);
  }
  table_.view_.headers[slot / 4].stamp[slot % 4] = 0;
  slot_state_.reset(slot, kClean, kNoAddress);
  table_.free_.push_back(slot);
}

// Removes a row from DRAM without writing it anywhere.
void SsdTier::discard(uint32_t slot) {
  ++counters.evicted;
  const uint64_t hash = hash_key(table_.view_.headers[slot / 4].key[slot % 4]);
  {
    ShardIndex& index = table_.shards_[shard_of(hash)];
    ShardWriteScope guard(index);
    ShardWriter(index, table_.view_.headers, table_.index_memory_).erase(hash, slot);
  }
  __atomic_store_n(&table_.live_, table_.live_ - 1, __ATOMIC_RELAXED);
  table_.view_.headers[slot / 4].stamp[slot % 4] = 0;
  slot_state_.reset(slot, kClean, kNoAddress);
  table_.free_.push_back(slot);
}

bool SsdTier::release_slab() {
  if (reserved_slots_ && (active_slabs_ - 1) * kSlabSlots < reserved_slots_) return false;
  for (uint64_t slab = active_.size(); slab-- > 0;) {
    if (!active_[slab]) continue;
    const auto first = static_cast<uint32_t>(slab * kSlabSlots);
    bool pinned = false;
    for (uint32_t slot = first; slot < first + kSlabSlots && !pinned; ++slot) pinned = slot_state_.pins(slot) != 0;
    if (pinned) continue;
    if (table_.promised_slots_) {
      const auto here = std::count_if(table_.free_.begin(), table_.free_.end(),
                                      [&](uint32_t slot) { return slot / kSlabSlots == slab; });
      if (table_.free_.size() - static_cast<size_t>(here) < table_.promised_slots_) continue;
    }
    for (uint32_t slot = first; slot < first + kSlabSlots; ++slot)
      if (table_.view_.headers[slot / 4].stamp[slot % 4] != 0) evict_slots(&slot, 1);
    std::erase_if(table_.free_, [&](uint32_t slot) { return slot / kSlabSlots == slab; });
    active_[slab] = false;
    --active_slabs_;
    table_.rows_.discard(first * table_.view_.row_bytes, kSlabSlots * table_.view_.row_bytes);
    table_.headers_.discard(first / 4 * sizeof(HeaderGroup), kSlabSlots / 4 * sizeof(HeaderGroup));
    slot_state_.discard(first, kSlabSlots);
    table_.charged_ -= slab_bytes();
    table_.budget_->uncharge(slab_bytes());
    return true;
  }
  return false;
}

void SsdTier::restore_free_reserve() {
  Budget& budget = *table_.budget_;
  while (budget.limit() && budget.used() + budget.free_reserve() / 2 > budget.limit()) {
    if (!(active_slabs_ > 1 && release_slab()) && !budget.reclaim(table_)) break;
    table_.recharge_budget();
  }
}

}  // namespace hotrow
