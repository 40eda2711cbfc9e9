#include "rows/cold_tier.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "rows/table.h"

namespace hotrow {
namespace {

constexpr size_t kIndexReserve = size_t{1} << 40;
constexpr size_t kEvictedTogether = 64;  // rows

size_t most_marked(const Region& headers) { return headers.reserved() / (sizeof(HeaderGroup) / 4); }

}  // namespace

ColdTier::ColdTier(Table& table, std::unique_ptr<Log> log, bool evicts, bool drops)
    : table_(table),
      log_(std::move(log)),
      evicts_(evicts),
      drops_(drops),
      cold_(kIndexReserve),
      marks_(most_marked(table.headers_)) {}

// --- coming back
// ------------------------------------------------------------------------------------------------------

void ColdTier::fetch(const Grouping& grouping, const uint32_t* slots, Arrivals& arrivals) {
  find_records(grouping, slots, arrivals, true);
}

void ColdTier::look_up(const Grouping& grouping, const uint32_t* slots, Arrivals& arrivals) const {
  while (true) try {
      return const_cast<ColdTier*>(this)->find_records(grouping, slots, arrivals, false);
    } catch (const std::out_of_range&) {
      // A segment was dropped between the lookup and the read: look again.
    }
}

ColdIndex::Candidates ColdTier::candidates(uint64_t hash) const {
  const ShardIndex& shard = table_.shards_[shard_of(hash)];
  while (true) {
    const uint32_t before = __atomic_load_n(&shard.version, __ATOMIC_ACQUIRE);
    if (before & 1) continue;  // a row is being moved
    ColdIndex::Candidates found = cold_.find(hash);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (__atomic_load_n(&shard.version, __ATOMIC_RELAXED) == before) return found;
  }
}

void ColdTier::find_records(const Grouping& grouping, const uint32_t* slots, Arrivals& arrivals, bool locked) {
  arrivals.unique.clear();
  arrivals.places.clear();
  std::vector<uint32_t> asked;  // unique keys with candidates left, and the next one's number
  std::vector<Place> first;     // their first candidates; nearly always the only ones
  for (uint32_t u = 0; u < grouping.size(); ++u) {
    if (slots[u] != kNoSlot) continue;
    if (auto found = candidates(grouping.hashes()[u]); found.count) {
      asked.push_back(u);
      first.push_back(found.place[0]);
    }
  }
  const uint32_t record_bytes = log_->record_bytes();
  std::vector<char> records;
  std::vector<Place> places;
  arrivals.records.clear();
  for (int round = 0; !asked.empty(); ++round) {
    places.clear();
    if (round == 0)
      places.swap(first);
    else if (!locked)
      break;  // candidates may have changed since; whoever is in no hurry asks again
    else
      for (uint32_t u : asked) places.push_back(candidates(grouping.hashes()[u]).place[round]);
    records.resize(places.size() * record_bytes);
    log_->read(places.data(), places.size(), records.data());
    size_t left = 0;
    for (size_t i = 0; i < asked.size(); ++i) {
      RecordHead head;
      const char* record = records.data() + i * record_bytes;
      std::memcpy(&head, record, sizeof(head));
      if (head.key == grouping.keys()[asked[i]]) {
        const uint64_t hash = grouping.hashes()[asked[i]];
        if (locked && table_.expired(hash, head, record + sizeof(head))) {
          drop_cold(hash, places[i]);
          __atomic_store_n(&table_.live_, table_.live_ - 1, __ATOMIC_RELAXED);
          continue;
        }
        arrivals.unique.push_back(asked[i]);
        arrivals.places.push_back(places[i]);
        arrivals.records.insert(arrivals.records.end(), record, record + record_bytes);
      } else if (round + 1 < candidates(grouping.hashes()[asked[i]]).count) {
        asked[left++] = asked[i];
      }
    }
    asked.resize(left);
  }
}

// A row may be on its way from one tier to the other, so both are looked at in one version of the shard.
bool ColdTier::look(int64_t key, uint64_t hash, float* out, ColdIndex::Candidates& candidates) const {
  const ShardIndex& shard = table_.shards_[shard_of(hash)];
  while (true) {
    const uint32_t version = __atomic_load_n(&shard.version, __ATOMIC_ACQUIRE);
    if (version & 1) continue;
    uint32_t slot;
    kernels().read({{table_.view_, &key, &hash, 1, &slot}, table_.dim(), out, table_.options_.type});
    if (slot != kNoSlot) return true;
    candidates = cold_.find(hash);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (__atomic_load_n(&shard.version, __ATOMIC_RELAXED) == version) break;
  }
  table_.write_initial_values(key, out);
  return false;
}

void ColdTier::read(const int64_t* keys, const uint64_t* hashes, const std::vector<uint32_t>& absent, float* out,
                    bool* found) const {
  const int dim = table_.dim();
  const uint32_t record_bytes = log_->record_bytes();
  std::vector<uint32_t> left = absent;
  ColdIndex::Candidates candidates;
  while (!left.empty()) {
    std::vector<Place> places;
    std::vector<uint32_t> asked, of;  // keys that may be on SSD; whose place it is
    for (uint32_t i : left) {
      const bool here = look(keys[i], hashes[i], out + size_t{i} * dim, candidates);
      if (here) {
        if (found) found[i] = true;
      } else if (candidates.count) {
        asked.push_back(i);
        places.insert(places.end(), candidates.place, candidates.place + candidates.count);
        of.insert(of.end(), candidates.count, i);
      }
    }
    std::vector<char> records(places.size() * record_bytes);
    try {
      log_->read(places.data(), places.size(), records.data());
    } catch (const std::out_of_range&) {
      left = std::move(asked);  // a segment was dropped in between: what was in it has moved
      continue;
    }
    for (size_t p = 0; p < places.size(); ++p) {
      RecordHead head;
      const char* record = records.data() + p * record_bytes;
      std::memcpy(&head, record, sizeof(head));
      const char* values = record + sizeof(head);
      if (head.key != keys[of[p]]) continue;
      if (table_.expired(hashes[of[p]], head, values)) continue;
      kernels().decode(table_.options_.type, values, dim, out + size_t{of[p]} * dim);
      if (found) found[of[p]] = true;
    }
    return;
  }
}

size_t ColdTier::answer(const int64_t* keys, const uint64_t* hashes, const std::vector<uint32_t>& absent, Cold policy,
                        float* out, uint8_t* late) const {
  const int dim = table_.dim();
  size_t answered = 0;
  ColdIndex::Candidates candidates;
  for (uint32_t i : absent) {
    if (look(keys[i], hashes[i], out + size_t{i} * dim, candidates) || !candidates.count) continue;
    late[i] = 1;
    ++answered;
    if (policy == Cold::kDefault) std::copy_n(table_.default_row().data(), dim, out + size_t{i} * dim);
  }
  return answered;
}

// --- making room
// ------------------------------------------------------------------------------------------------------

size_t ColdTier::slab_bytes() const {
  return size_t{kSlabSlots} * (table_.view_.row_bytes + sizeof(HeaderGroup) / 4 + SlotMarks::kBytes);
}

bool ColdTier::grow_slab() {
  Budget& budget = *table_.budget_;
  if (!budget.try_take(slab_bytes(), budget.reserve())) return false;
  uint64_t slab = std::find(active_.begin(), active_.end(), false) - active_.begin();
  const uint64_t first = slab * kSlabSlots, end = first + kSlabSlots;
  try {
    if (end * table_.view_.row_bytes > table_.rows_.reserved() || end >= kNoSlot - kFirstSlotCode)
      throw std::bad_alloc();
    table_.rows_.commit(end * table_.view_.row_bytes);
    table_.headers_.commit((end + 3) / 4 * sizeof(HeaderGroup));
    marks_.commit(end);
    table_.free_.reserve(table_.free_.size() + kSlabSlots);
    if (slab == active_.size()) active_.push_back(true);
  } catch (...) {
    budget.give_back(slab_bytes());
    throw;
  }
  active_[slab] = true;
  ++active_slabs_;
  table_.charged_ += slab_bytes();
  if (end > table_.slots_) __atomic_store_n(&table_.slots_, end, __ATOMIC_RELAXED);
  for (uint64_t slot = end; slot-- > first;) {
    marks_.reset(static_cast<uint32_t>(slot), kClean, kNoPlace);
    table_.free_.push_back(static_cast<uint32_t>(slot));
  }
  return true;
}

void ColdTier::claim(size_t rows) {
  claimed_ = rows + held_;
  while (active_slabs_ * kSlabSlots < claimed_ && (grow_slab() || table_.budget_->reclaim(table_))) {
  }
}

void ColdTier::make_room(size_t rows) {
  while (table_.free_.size() < rows) {
    if (grow_slab()) continue;
    const size_t want = rows - table_.free_.size();
    if (evict(std::max<size_t>(want, active_slabs_ * kSlabSlots / 64)) >= want) continue;
    if (!modest && table_.free_.size() < rows) evict(rows - table_.free_.size(), true);
    if (table_.free_.size() >= rows) break;
    if (!modest && trim()) continue;
    if (modest || !table_.budget_->reclaim(table_)) {
      const size_t more = (rows - table_.free_.size() + kSlabSlots - 1) / kSlabSlots;
      table_.refuse(rows, more * slab_bytes() + table_.budget_->reserve());
    }
  }
}

bool ColdTier::trim() {
  if (log_->trim() == 0) return false;
  table_.settle();
  return true;
}

// The hand goes round at most four times: a row is at most 3 warm.
size_t ColdTier::evict(size_t want, bool all) {
  std::array<uint32_t, kEvictedTogether> victims;
  size_t evicted = 0, count = 0;
  const uint64_t slots = table_.slots_;
  for (uint64_t looked = 0; looked < 4 * slots && evicted + count < want; ++looked) {
    if (hand_ >= slots) hand_ = 0;
    const auto slot = static_cast<uint32_t>(hand_++);
    if (slot % kSlabSlots == 0 && !active_[slot / kSlabSlots]) {
      hand_ += kSlabSlots - 1;
      looked += kSlabSlots - 1;
      continue;
    }
    // The hand is where this group began: what is in it goes, or it would be chosen twice. Before its warmth is looked
    // at, because readers may have changed that since.
    if (count && victims[0] == slot) {
      evict_slots(victims.data(), count);
      evicted += count;
      count = 0;
    }
    if (table_.view_.headers[slot / 4].stamp[slot % 4] == 0 || marks_.pins(slot) || (!all && kept(slot))) continue;
    if (marks_.heat(slot)) {
      marks_.cool(slot);
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

// A few at a time, so that their lines of both indexes are on the way while the rows are appended.
void ColdTier::evict_slots(const uint32_t* slots, size_t count) {
  if (drops_) {
    for (size_t i = 0; i < count; ++i) drop(slots[i]);
    return;
  }
  const HeaderGroup* headers = table_.view_.headers;
  std::array<uint64_t, kEvictedTogether> hashes;
  std::array<RecordHead, kEvictedTogether> heads;
  std::array<const void*, kEvictedTogether> values;
  std::array<uint32_t, kEvictedTogether> dirty;
  std::array<Place, kEvictedTogether> places;
  size_t dirty_count = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t slot = slots[i], lane = slot % 4;
    const HeaderGroup& group = headers[slot / 4];
    hashes[i] = hash_key(group.key[lane]);
    const ShardIndex& index = table_.shards_[shard_of(hashes[i])];
    __builtin_prefetch(index.entries + size_t{ShardIndex::line_of(hashes[i], index.lines)} * kEntriesPerLine, 1);
    __builtin_prefetch(cold_.line(hashes[i]), 1);
    if (marks_.epoch(slot) == kClean) continue;
    heads[dirty_count] = {group.key[lane], group.stamp[lane], group.count[lane], 0};
    values[dirty_count] = table_.view_.rows + size_t{slot} * table_.view_.row_bytes;
    dirty[dirty_count++] = static_cast<uint32_t>(i);
  }
  for (size_t i = 0; i < count && dirty_count < count; ++i)
    if (marks_.epoch(slots[i]) == kClean) move_down(slots[i], hashes[i], marks_.place(slots[i]));
  for (size_t done = 0; done < dirty_count;) {
    const size_t end = done + log_->append(&heads[done], &values[done], dirty_count - done, &places[done]);
    for (; done < end; ++done) {
      const uint32_t slot = slots[dirty[done]];
      if (wanted(slot)) {
        snapshot_->set.set(places[done]);
        ++snapshot_->written;
      }
      ++counters.evicted_dirty;
      move_down(slot, hashes[dirty[done]], places[done]);
    }
  }
}

// From index to index, now that the row's copy has a place.
void ColdTier::move_down(uint32_t slot, uint64_t hash, Place place) {
  ++counters.evicted;
  {
    ShardIndex& index = table_.shards_[shard_of(hash)];
    ShardGuard guard(index);
    cold_.insert(hash, place);
    ShardWriter(index, table_.view_.headers, table_.index_memory_).erase(hash, slot);
  }
  table_.view_.headers[slot / 4].stamp[slot % 4] = 0;
  marks_.reset(slot, kClean, kNoPlace);
  table_.free_.push_back(slot);
}

// Out of the index and nowhere else.
void ColdTier::drop(uint32_t slot) {
  ++counters.evicted;
  const uint64_t hash = hash_key(table_.view_.headers[slot / 4].key[slot % 4]);
  {
    ShardIndex& index = table_.shards_[shard_of(hash)];
    ShardGuard guard(index);
    ShardWriter(index, table_.view_.headers, table_.index_memory_).erase(hash, slot);
  }
  __atomic_store_n(&table_.live_, table_.live_ - 1, __ATOMIC_RELAXED);
  table_.view_.headers[slot / 4].stamp[slot % 4] = 0;
  marks_.reset(slot, kClean, kNoPlace);
  table_.free_.push_back(slot);
}

bool ColdTier::release_slab() {
  if (claimed_ && (active_slabs_ - 1) * kSlabSlots < claimed_) return false;
  for (uint64_t slab = active_.size(); slab-- > 0;) {
    if (!active_[slab]) continue;
    const auto first = static_cast<uint32_t>(slab * kSlabSlots);
    bool pinned = false;
    for (uint32_t slot = first; slot < first + kSlabSlots && !pinned; ++slot) pinned = marks_.pins(slot) != 0;
    if (pinned) continue;
    if (table_.promised_) {
      const auto here = std::count_if(table_.free_.begin(), table_.free_.end(),
                                      [&](uint32_t slot) { return slot / kSlabSlots == slab; });
      if (table_.free_.size() - static_cast<size_t>(here) < table_.promised_) continue;
    }
    for (uint32_t slot = first; slot < first + kSlabSlots; ++slot)
      if (table_.view_.headers[slot / 4].stamp[slot % 4] != 0) evict_slots(&slot, 1);
    std::erase_if(table_.free_, [&](uint32_t slot) { return slot / kSlabSlots == slab; });
    active_[slab] = false;
    --active_slabs_;
    table_.rows_.discard(first * table_.view_.row_bytes, kSlabSlots * table_.view_.row_bytes);
    table_.headers_.discard(first / 4 * sizeof(HeaderGroup), kSlabSlots / 4 * sizeof(HeaderGroup));
    marks_.discard(first, kSlabSlots);
    table_.charged_ -= slab_bytes();
    table_.budget_->give_back(slab_bytes());
    return true;
  }
  return false;
}

void ColdTier::rebalance() {
  Budget& budget = *table_.budget_;
  while (budget.limit() && budget.used() + budget.reserve() / 2 > budget.limit()) {
    if (!(active_slabs_ > 1 && release_slab()) && !budget.reclaim(table_)) break;
    table_.settle();
  }
}

// --- changes
// ----------------------------------------------------------------------------------------------------------

Place ColdTier::append(uint32_t slot, bool alive) {
  const HeaderGroup& group = table_.view_.headers[slot / 4];
  const uint32_t lane = slot % 4;
  return log_->append({group.key[lane], group.stamp[lane], group.count[lane], 0},
                      table_.view_.rows + size_t{slot} * table_.view_.row_bytes, alive);
}

void ColdTier::capture_slot(uint32_t slot, bool changes) {
  const Place place = append(slot, !changes);
  snapshot_->set.set(place);
  ++snapshot_->written;
  if (!changes) marks_.set_place(slot, place);
  marks_.set_epoch(slot, changes ? epoch_ : kClean);
}

void ColdTier::touch(const uint32_t* slots, size_t count) {
  constexpr size_t kAhead = 16;
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      marks_.prefetch(slots[i + kAhead]);
      __builtin_prefetch(&table_.view_.headers[slots[i + kAhead] / 4]);
    }
    const uint32_t slot = slots[i];
    marks_.warm(slot);
    const uint8_t epoch = marks_.epoch(slot);
    if (epoch == epoch_) continue;
    if (table_.view_.headers[slot / 4].stamp[slot % 4] == 0) continue;  // a key that was not admitted
    if (epoch == kClean) {
      log_->kill(marks_.place(slot));
      marks_.set_place(slot, kNoPlace);
      marks_.set_epoch(slot, epoch_);
    } else {
      capture_slot(slot, true);
    }
  }
}

void ColdTier::forget(uint32_t slot) {
  if (wanted(slot)) capture_slot(slot, true);
  if (marks_.epoch(slot) == kClean && marks_.place(slot) != kNoPlace) log_->kill(marks_.place(slot));
  marks_.reset(slot, kClean, kNoPlace);
}

bool ColdTier::erase_cold(int64_t key, uint64_t hash) {
  const auto candidates = cold_.find(hash);
  std::vector<char> record(log_->record_bytes());
  for (int i = 0; i < candidates.count; ++i) {
    RecordHead head;
    log_->read(&candidates.place[i], 1, record.data());
    std::memcpy(&head, record.data(), sizeof(head));
    if (head.key != key) continue;
    drop_cold(hash, candidates.place[i]);
    if (!table_.expired(hash, head, record.data() + sizeof(head))) return true;
    __atomic_store_n(&table_.live_, table_.live_ - 1, __ATOMIC_RELAXED);  // it had gone, and was met only now
    return false;
  }
  return false;
}

void ColdTier::drop_expired(uint32_t shard, std::vector<int64_t>& gone) {
  gone.clear();
  std::vector<Place> places;
  cold_.places(shard, places);
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

void ColdTier::drop_cold(uint64_t hash, Place place) {
  {
    ShardGuard guard(table_.shards_[shard_of(hash)]);
    cold_.erase(hash, place);
  }
  log_->kill(place);
}

void ColdTier::mark_all_dirty() { marks_.set_all(table_.slots_, epoch_); }

// Tags go round, so that one is used again long after its batch has ended. Should that take more batches in flight than
// there are tags, rows are kept a little longer.
uint8_t ColdTier::begin_waiting() {
  last_tag_ = last_tag_ + 1 == kTags ? 1 : last_tag_ + 1;
  ++waiting_[last_tag_];
  return last_tag_;
}

void ColdTier::pin(const uint32_t* slots, size_t count) {
  for (size_t i = 0; i < count; ++i) held_ += marks_.pins(slots[i])++ == 0;
}

void ColdTier::unpin(const uint32_t* slots, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    uint8_t& pins = marks_.pins(slots[i]);
    // A slot whose row was erased meanwhile, or never admitted, waited for its last holder.
    if (--pins != 0) continue;
    --held_;
    if (table_.view_.headers[slots[i] / 4].stamp[slots[i] % 4] == 0) table_.free_.push_back(slots[i]);
  }
}

void ColdTier::pin_found(const uint32_t* slots, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (slots[i] != kNoSlot) pin(&slots[i], 1);
}

void ColdTier::unpin_found(const uint32_t* slots, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (slots[i] != kNoSlot) unpin(&slots[i], 1);
}

// --- snapshots
// --------------------------------------------------------------------------------------------------------

void ColdTier::begin_snapshot() {
  snapshot_ = Snapshot{log_->begin_snapshot(), epoch_, 0, table_.slots_, 0};
  epoch_ = 3 - epoch_;
}

bool ColdTier::capture(uint32_t slots) {
  const uint64_t end = std::min<uint64_t>(snapshot_->end, snapshot_->cursor + slots);
  for (; snapshot_->cursor < end; ++snapshot_->cursor) {
    const auto slot = static_cast<uint32_t>(snapshot_->cursor);
    if (evicts_ && !active_[slot / kSlabSlots]) continue;
    if (wanted(slot) && table_.view_.headers[slot / 4].stamp[slot % 4] != 0) capture_slot(slot, false);
  }
  return snapshot_->cursor < snapshot_->end;
}

void ColdTier::end_snapshot(bool abandoned) {
  if (!snapshot_) return;
  if (abandoned)
    for (uint64_t slot = 0; slot < table_.slots_; ++slot) {
      if (evicts_ && !active_[slot / kSlabSlots]) continue;
      if (wanted(static_cast<uint32_t>(slot))) marks_.set_epoch(static_cast<uint32_t>(slot), epoch_);
    }
  snapshot_.reset();
  log_->end_snapshot();
}

// --- compaction
// -------------------------------------------------------------------------------------------------------

size_t ColdTier::compact(size_t most_records) {
  std::vector<Place> places;
  {
    std::lock_guard lock(table_.writer_);
    if (loading) return 0;
    if (compacting_.empty()) {
      const int64_t segment = log_->worst();
      if (segment >= 0) compacting_ = log_->live_places(segment);
      log_->drop_dead();
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
    return places.size() * record_bytes;  // all of it died and was dropped meanwhile
  }
  std::lock_guard lock(table_.writer_);
  for (size_t i = 0; i < places.size(); ++i) {
    if (!log_->alive(places[i])) continue;
    RecordHead head;
    const char* record = records.data() + i * record_bytes;
    std::memcpy(&head, record, sizeof(head));
    const uint64_t hash = hash_key(head.key);
    uint32_t slot;
    const bool hot = kernels().find({table_.view_, &head.key, &hash, 1, &slot}) == 0;
    const Place fresh = log_->append(head, record + sizeof(head), true);
    if (hot && marks_.place(slot) == places[i]) {
      marks_.set_place(slot, fresh);
    } else if (cold_.contains(hash, places[i])) {
      ShardGuard guard(table_.shards_[shard_of(hash)]);
      cold_.replace(hash, places[i], fresh);
    } else {
      log_->kill(fresh);  // nobody's: cannot happen, and would be harmless
    }
    log_->kill(places[i]);
  }
  if (compacting_.empty()) log_->drop_dead();
  return places.size() * record_bytes;
}

size_t ColdTier::compact_quietly(size_t most_records) noexcept {
  try {
    return compact(most_records);
  } catch (...) {
    ++counters.compaction_errors;
    return 0;
  }
}

size_t ColdTier::holds() const {
  const size_t slabs = evicts_ ? active_slabs_ * slab_bytes() : marks_.committed();
  return slabs + cold_.bytes() + log_->report().ram_bytes;
}

TierReport ColdTier::report() const {
  TierReport report = counters;
  report.cold_rows = cold_.rows();
  report.cold_index_bytes = cold_.bytes();
  report.marks_bytes = evicts_ ? active_slabs_ * kSlabSlots * SlotMarks::kBytes : marks_.committed();
  report.log = log_->report();
  return report;
}

}  // namespace hotrow
