// What outlives a batch: admission and expiry, and snapshots of a table's rows.
//
// A snapshot's folder holds the log's form of the rows (log.h) and STATE: the sketch's counters and the cutoffs of the
// last sweep, which decide about rows as much as the rows themselves.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>

#include "rows/housekeeper.h"
#include "rows/table.h"
#include "threads/pool.h"

namespace hotrow {
namespace {

constexpr char kStateMagic[8] = {'H', 'O', 'T', 'R', 'O', 'W', 'S', 'T'};
constexpr uint32_t kStateVersion = 1;
constexpr uint32_t kCaptureSlots = 2048;  // between two chances for the trainer to take the lock
constexpr auto kCapturePause = std::chrono::microseconds(100);

template <class T>
void put(std::vector<char>& out, const T& value) {
  const size_t at = out.size();
  out.resize(at + sizeof(T));
  std::memcpy(out.data() + at, &value, sizeof(T));
}

template <class T>
T get(const char*& at, const char* end, const std::string& path) {
  if (static_cast<size_t>(end - at) < sizeof(T)) throw CorruptFile(path + " is corrupt: it is too short");
  T value;
  std::memcpy(&value, at, sizeof(T));
  at += sizeof(T);
  return value;
}

}  // namespace

void Table::set_admission(const AdmissionOptions& options) {
  refuse_if_frozen("admission is for rows that are trained");
  std::lock_guard lock(writer_);
  auto admission = std::make_unique<Admission>(
      options,
      stream_key(options_.seed, hash_bytes(options_.name.data(), options_.name.size(), 0), Stream::kAdmission));
  if (!budget_->try_take(admission->bytes())) refuse(0, admission->bytes());
  budget_->give_back(admission->bytes());
  admission_ = std::move(admission);
  settle();
}

uint64_t Table::sweep(const SweepRules& rules, uint64_t elsewhere) {
  refuse_if_frozen("expiry is for rows that are trained");
  std::lock_guard lock(writer_);
  expiry_.harden(rules);
  if (rules.max_rows && live_ + elsewhere > rules.max_rows) cap_rows(rules.max_rows, elsewhere);
  uint64_t erased = erase_expired();
  if (changes_.on()) erased += drop_expired_cold();
  __atomic_store_n(&live_, live_ - erased, __ATOMIC_RELAXED);
  if (erased) erase_epoch_.fetch_add(1, std::memory_order_acq_rel);
  return erased;
}

// Rows in DRAM that have expired; live_ is left to the caller. Returns how many.
uint64_t Table::erase_expired() {
  free_.reserve(free_.size() + live_);
  uint64_t erased = 0;
  const uint64_t end = slots_;
  for (uint64_t slot = 0; slot < end; ++slot) {
    const HeaderGroup& group = view_.headers[slot / 4];
    const uint32_t lane = slot % 4;
    if (group.stamp[lane] == 0) continue;
    const uint64_t hash = hash_key(group.key[lane]);
    if (!expiry_.removes(shard_of(hash), step_of(group.stamp[lane]), decode_count(group.count[lane]),
                         values_of(view_.rows + slot * view_.row_bytes)))
      continue;
    erase_slot(hash, static_cast<uint32_t>(slot));
    ++erased;
  }
  return erased;
}

// Rows on SSD that have just expired. A sweep leaves them there to be met, but whoever publishes must be told of them
// at the same step whatever tier they are in, so they are read for it, and go at once. Returns how many.
uint64_t Table::drop_expired_cold() {
  if (!tier_ || !tier_->evicts()) return 0;
  uint64_t dropped = 0;
  std::vector<int64_t> gone;
  for (uint32_t shard = 0; shard < kShards; ++shard) {
    tier_->drop_expired(shard, gone);
    for (int64_t key : gone) changes_.note_gone(key);
    dropped += gone.size();
  }
  return dropped;
}

uint64_t Table::staying(const SweepRules& rules) {
  std::lock_guard lock(writer_);
  expiry_.harden(rules);
  uint64_t total = 0;
  for (const auto& of_shard : steps_staying()) total += of_shard.size();
  return total;
}

// The last steps of rows that have not expired, by shard; those on SSD are read for it.
Table::StepsByShard Table::steps_staying() const {
  StepsByShard steps(kShards);
  auto note = [&](int64_t key, uint32_t stamp, uint16_t count, const RowValues& values) {
    const uint32_t shard = shard_of(hash_key(key));
    if (!expiry_.removes(shard, step_of(stamp), decode_count(count), values)) steps[shard].push_back(step_of(stamp));
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

// Each shard keeps its share of the newest rows, once the table as a whole is over the cap. Only rows that have not
// expired count, on SSD too: they are read, but only when there may be too many (live_ counts expired ones on SSD).
void Table::cap_rows(uint64_t max_rows, uint64_t elsewhere) {
  const uint64_t share = std::max<uint64_t>(1, max_rows / kShards);
  StepsByShard steps = steps_staying();
  uint64_t total = elsewhere;
  for (const auto& of_shard : steps) total += of_shard.size();
  if (total <= max_rows) return;
  for (uint32_t shard = 0; shard < kShards; ++shard) {
    if (steps[shard].size() <= share) continue;
    // The smallest step of which no more than `share` rows are at least as new.
    auto nth = steps[shard].begin() + static_cast<std::ptrdiff_t>(share);
    std::nth_element(steps[shard].begin(), nth, steps[shard].end(), std::greater<>());
    expiry_.cap(shard, *nth + 1);
  }
}

void Table::scan_cold(uint32_t shard, std::vector<RecordHead>& heads, std::vector<float>& rows) const {
  heads.clear();
  rows.clear();
  if (!tier_ || !tier_->evicts()) return;
  std::vector<Place> places;
  tier_->cold().places(shard, places);
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

// --- prefetch and clear
// -----------------------------------------------------------------------------------------------

size_t Table::prefetch(const int64_t* keys, size_t count) {
  if (!tier_ || !tier_->evicts()) return 0;
  const size_t part = bulk_part();
  size_t came = 0;
  Grouping grouping;
  for (size_t at = 0; at < count; at += part) {
    grouping.build({{keys + at, std::min(part, count - at)}});
    const Brought brought = bring(grouping);
    came += brought.rows;
    if (brought.short_of_room) break;  // batches hold the rest of DRAM: what did not come up is read when it is needed
  }
  return came;
}

void Table::warm(const int64_t* keys, size_t count) {
  if (!tier_ || !tier_->evicts()) return;
  std::vector<uint32_t> slots(count);
  std::lock_guard lock(writer_);
  find(keys, count, slots.data());
  for (uint32_t slot : slots)
    if (slot != kNoSlot) tier_->marks().warm(slot);
}

Table::Brought Table::bring(const Grouping& grouping, uint8_t tag) {
  if (!tier_ || !tier_->evicts()) return {};
  std::vector<uint32_t> slots(grouping.size());
  Arrivals arrivals;
  if (find_unique(grouping, slots.data())) tier_->look_up(grouping, slots.data(), arrivals);
  if (arrivals.unique.empty() && !tag) return {};

  std::lock_guard lock(writer_);
  find_unique(grouping, slots.data());  // again: now nobody moves them
  for (uint32_t slot : slots)
    if (tag && slot != kNoSlot) tier_->keep(slot, tag);
  // A place names one version of one row for ever: if the key still has it, what was read is still the row. Whether it
  // has expired is for the rules of this moment to say. As prepare and insert see it, nothing else is missing.
  std::vector<uint32_t> wanted(grouping.size(), 0u), coming;
  for (size_t n = 0; n < arrivals.unique.size(); ++n) {
    const uint32_t u = arrivals.unique[n];
    const uint64_t hash = grouping.hashes()[u];
    if (slots[u] != kNoSlot || !tier_->cold().contains(hash, arrivals.places[n])) continue;
    RecordHead head;
    const char* record = arrivals.records.data() + n * tier_->log().record_bytes();
    std::memcpy(&head, record, sizeof(head));
    if (expired(hash, head, record + sizeof(head))) continue;
    wanted[u] = kNoSlot;
    coming.push_back(u);
  }
  if (coming.empty()) return {};
  tier_->modest = !options_.frozen;  // where rows are only read, this is how a table comes to have any
  try {
    Fresh fresh = prepare(grouping.hashes(), wanted.data(), grouping.cuts(), &arrivals);
    commit(fresh);
    insert(std::move(fresh), grouping.keys(), grouping.hashes(), wanted.data(), &arrivals);
    tier_->modest = false;
  } catch (const BudgetExceeded&) {
    tier_->modest = false;
    settle();
    return {0, true};
  } catch (...) {
    tier_->modest = false;
    settle();
    throw;
  }
  for (uint32_t u : coming) {
    if (tag)
      tier_->keep(wanted[u], tag);
    else
      tier_->marks().warm(wanted[u]);  // or the next batch's room would be made by throwing it out again
  }
  tier_->counters.prefetched += coming.size();
  tier_->rebalance();
  return {coming.size(), false};
}

void Table::clear_index() {
  for (ShardIndex& index : shards_) {
    ShardGuard guard(index);
    if (index.entries) index_memory_.release(reinterpret_cast<char*>(index.entries), index.lines);
    index.entries = nullptr;
    index.lines = index.rows = index.deleted = 0;
    index.slot_bits = kMinSlotBits;
  }
}

void Table::clear() {
  std::unique_ptr<Log> log;
  bool evicts = false, drops = false;
  // Compaction waits for the writer's lock inside the housekeeper's, so it is kept away before that is taken.
  Housekeeper::Away away(tier_.get());
  {
    std::lock_guard lock(writer_);
    if (tier_) {
      if (tier_->snapshot_active()) throw std::logic_error("clear: the table is being saved");
      // The new log before the old one goes: where the disk refuses, the table keeps its tier for the next try.
      log = std::make_unique<Log>(tier_->log().options());
      evicts = tier_->evicts();
      drops = tier_->drops();
      budget_->leave(this);
      away.stay();
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
    changes_.drop();  // whoever clears a table knows that nothing is left of what was published
    if (admission_) std::fill(admission_->counters().begin(), admission_->counters().end(), 0);
    if (evicts) {
      budget_->give_back(charged_);
      charged_ = 0;
    } else {
      settle();
    }
  }
  if (log) attach(std::move(log), evicts, drops);
}

// --- snapshots
// --------------------------------------------------------------------------------------------------------

void Table::begin_snapshot() {
  std::lock_guard lock(writer_);
  if (!tier_) throw std::logic_error("table '" + options_.name + "' has no log to take a snapshot with");
  if (tier_->snapshot_active()) throw std::logic_error("table '" + options_.name + "' is being saved already");
  snapshot_state_ = save_state();
  tier_->begin_snapshot();
}

Table::SnapshotStats Table::finish_snapshot(const std::string& folder, const std::string& previous) {
  for (bool more = true; more;) {
    {
      std::lock_guard lock(writer_);
      more = tier_->capture(kCaptureSlots);
      settle();
    }
    std::this_thread::sleep_for(kCapturePause);
  }
  LiveSet set;
  uint64_t written;
  {
    std::lock_guard lock(writer_);
    tier_->log().seal();
    set = std::move(tier_->snapshot_set());
    written = tier_->snapshot_written();
  }
  SnapshotStats stats{};
  stats.rows = set.live();
  stats.rows_written = written;
  stats.bytes_written = written * tier_->log().record_bytes();
  stats.bytes_copied = tier_->log().publish(set, folder, previous);
  write_state(folder, snapshot_state_);
  std::lock_guard lock(writer_);
  tier_->end_snapshot(false);
  snapshot_state_ = {};
  settle();
  return stats;
}

void Table::abandon_snapshot() {
  std::lock_guard lock(writer_);
  if (tier_) tier_->end_snapshot(true);
  snapshot_state_ = {};
}

void Table::load_snapshot(const std::string& folder) {
  if (size() != 0) throw std::logic_error("load_snapshot: the table is not empty");
  SnapshotReader reader(folder);
  if (reader.row_type() != static_cast<uint32_t>(options_.type))
    throw std::invalid_argument(
        "table '" + options_.name + "' has rows of type " + name_of(options_.type) + " but " + folder + " has " +
        (reader.row_type() < kRowTypes ? name_of(static_cast<RowType>(reader.row_type())) : "an unknown type") +
        "; use the values= or dtype= that it was saved with");
  if (reader.row_bytes() != view_.row_bytes)
    throw std::invalid_argument("table '" + options_.name + "' has rows of " + std::to_string(view_.row_bytes) +
                                " bytes but " + folder + " has " + std::to_string(reader.row_bytes()) +
                                "; use the dim and the optimizer that it was saved with");
  std::vector<RecordHead> heads;
  std::vector<char> values;
  std::vector<Place> places;
  constexpr size_t kPart = 32768;
  if (tier_ && tier_->evicts()) {
    std::lock_guard lock(writer_);
    tier_->log().adopt(folder);
    while (reader.next(kPart, heads, values, places)) {
      for (size_t i = 0; i < heads.size(); ++i) tier_->cold().insert(hash_key(heads[i].key), places[i]);
      __atomic_store_n(&live_, live_ + heads.size(), __ATOMIC_RELAXED);
      settle();
      if (budget_->limit() && budget_->used() > budget_->limit())
        throw BudgetExceeded("table '" + options_.name + "' has " + std::to_string(reader.rows()) + " rows in " +
                             folder +
                             ", and the index of so many does not fit into dram=; raise it (16 bytes a row at most)");
    }
  } else {
    if (tier_) {
      std::lock_guard lock(writer_);
      tier_->loading = true;
      tier_->log().adopt(folder);
    }
    while (reader.next(kPart, heads, values, places)) {
      std::vector<int64_t> keys(heads.size());
      for (size_t i = 0; i < heads.size(); ++i) keys[i] = heads[i].key;
      std::vector<uint32_t> slots(heads.size());
      create_in_parts(keys.data(), keys.size(), slots.data());
      std::lock_guard lock(writer_);
      for (size_t i = 0; i < heads.size(); ++i) {
        const uint32_t slot = slots[i];
        ShardGuard guard(shards_[shard_of(hash_key(keys[i]))]);
        std::memcpy(view_.rows + size_t{slot} * view_.row_bytes, values.data() + i * view_.row_bytes, view_.row_bytes);
        view_.headers[slot / 4].stamp[slot % 4] = heads[i].stamp;
        view_.headers[slot / 4].count[slot % 4] = heads[i].count;
        if (tier_) tier_->marks().reset(slot, kClean, places[i]);
      }
    }
    std::lock_guard lock(writer_);
    if (tier_) tier_->loading = false;
  }
  load_state(folder);
}

// --- STATE
// ------------------------------------------------------------------------------------------------------------

std::vector<char> Table::save_state() const {
  std::vector<char> out(kStateMagic, kStateMagic + sizeof(kStateMagic));
  put(out, kStateVersion);
  put(out, expiry_.rules());
  for (uint32_t cutoff : expiry_.cap_cutoffs()) put(out, cutoff);
  const uint64_t counters = admission_ ? admission_->counters().size() : 0;
  put(out, counters);
  if (counters) out.insert(out.end(), admission_->counters().begin(), admission_->counters().end());
  put(out, uint64_t{notes_.size()});
  out.insert(out.end(), notes_.begin(), notes_.end());
  put(out, hash_bytes(out.data(), out.size(), 0));
  return out;
}

void Table::write_state(const std::string& folder, const std::vector<char>& state) const {
  files().replace(folder + "/STATE", state.data(), state.size());
}

void Table::load_state(const std::string& folder, uint32_t begin, uint32_t end_shard) {
  const std::string path = folder + "/STATE";
  if (!files().exists(path)) throw CorruptFile(path + " is missing; the snapshot is not complete");
  const std::vector<char> bytes = files().read_all(path);
  if (bytes.size() < sizeof(kStateMagic) + sizeof(uint64_t)) throw CorruptFile(path + " is corrupt: it is too short");
  uint64_t checksum;
  std::memcpy(&checksum, bytes.data() + bytes.size() - sizeof(checksum), sizeof(checksum));
  if (std::memcmp(bytes.data(), kStateMagic, sizeof(kStateMagic)) != 0 ||
      checksum != hash_bytes(bytes.data(), bytes.size() - sizeof(checksum), 0))
    throw CorruptFile(path + " is corrupt: its checksum does not fit");
  const char *at = bytes.data() + sizeof(kStateMagic), *end = bytes.data() + bytes.size() - sizeof(checksum);
  if (get<uint32_t>(at, end, path) != kStateVersion) throw CorruptFile(path + " is of another version");
  const auto rules = get<SweepRules>(at, end, path);
  std::vector<uint32_t> caps(kShards);
  for (uint32_t& cutoff : caps) cutoff = get<uint32_t>(at, end, path);
  const auto counters = get<uint64_t>(at, end, path);
  if (counters > static_cast<uint64_t>(end - at)) throw CorruptFile(path + " is corrupt: it is too short");
  const char* sketch = at;
  at += counters;
  const auto words = get<uint64_t>(at, end, path);
  if (words != static_cast<uint64_t>(end - at)) throw CorruptFile(path + " is corrupt: it is too short");
  std::lock_guard lock(writer_);
  for (uint32_t shard = 0; shard < kShards; ++shard)
    if (shard < begin || shard >= end_shard) caps[shard] = expiry_.cap_cutoffs()[shard];
  expiry_.restore(rules, std::move(caps));
  notes_.assign(at, words);
  if (admission_ && counters == admission_->counters().size())
    std::memcpy(admission_->counters().data() + counters / kShards * begin, sketch + counters / kShards * begin,
                counters / kShards * (end_shard - begin));
  else if (admission_ && counters)
    throw std::invalid_argument("table '" + options_.name + "' has a sketch of " +
                                std::to_string(admission_->counters().size()) + " bytes but " + folder + " has " +
                                std::to_string(counters) + "; use the admission that it was saved with");
  // A table over SSD keeps expired rows until they are met, and so do its snapshots; in DRAM nobody would notice them.
  const uint64_t erased = expiry_.any() ? erase_expired() : 0;
  __atomic_store_n(&live_, live_ - erased, __ATOMIC_RELAXED);
  if (erased) erase_epoch_.fetch_add(1, std::memory_order_acq_rel);
}

}  // namespace hotrow
