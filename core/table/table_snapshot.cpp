// Snapshots of a table's rows.
//
// A snapshot folder has the rows in the log's form (log.h) and STATE: the sketch's counters and the cutoffs of the last
// sweep. A resumed run needs both to make the same admission and expiry decisions.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "table/table.h"

namespace hotrow {
namespace {

constexpr char kStateMagic[8] = {'H', 'O', 'T', 'R', 'O', 'W', 'S', 'T'};
constexpr uint32_t kStateVersion = 1;
constexpr uint32_t kCaptureSlots = 2048;  // slots per step; the trainer can take the mutex between steps
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

void Table::begin_snapshot() {
  std::lock_guard lock(write_mutex_);
  if (!tier_) throw std::logic_error("table '" + options_.name + "' has no log to take a snapshot with");
  if (tier_->snapshot_active()) throw std::logic_error("table '" + options_.name + "' is being saved already");
  snapshot_state_ = save_state();
  tier_->begin_snapshot();
}

Table::SnapshotStats Table::finish_snapshot(const std::string& folder, const std::string& previous) {
  for (bool more = true; more;) {
    {
      std::lock_guard lock(write_mutex_);
      more = tier_->capture(kCaptureSlots);
      recharge_budget();
    }
    std::this_thread::sleep_for(kCapturePause);
  }
  LiveSet set;
  uint64_t written;
  {
    std::lock_guard lock(write_mutex_);
    tier_->log().seal();
    set = std::move(tier_->snapshot_set());
    written = tier_->snapshot_written();
  }
  SnapshotStats stats{};
  stats.rows = set.live();
  stats.rows_written = written;
  stats.bytes_written = written * tier_->log().record_bytes();
  stats.bytes_copied = tier_->log().export_snapshot(set, folder, previous);
  write_state(folder, snapshot_state_);
  std::lock_guard lock(write_mutex_);
  tier_->end_snapshot(false);
  snapshot_state_ = {};
  recharge_budget();
  return stats;
}

void Table::abandon_snapshot() {
  std::lock_guard lock(write_mutex_);
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
  std::vector<RecordAddress> places;
  constexpr size_t kPart = 32768;
  if (tier_ && tier_->evicts()) {
    std::lock_guard lock(write_mutex_);
    tier_->log().import_snapshot(folder);
    while (reader.next(kPart, heads, values, places)) {
      for (size_t i = 0; i < heads.size(); ++i) tier_->index().insert(hash_key(heads[i].key), places[i]);
      __atomic_store_n(&live_, live_ + heads.size(), __ATOMIC_RELAXED);
      recharge_budget();
      if (budget_->limit() && budget_->used() > budget_->limit())
        throw BudgetExceeded("table '" + options_.name + "' has " + std::to_string(reader.rows()) + " rows in " +
                             folder + ", and their index does not fit into dram=; raise it (16 bytes a row at most)");
    }
  } else {
    if (tier_) {
      std::lock_guard lock(write_mutex_);
      tier_->loading = true;
      tier_->log().import_snapshot(folder);
    }
    while (reader.next(kPart, heads, values, places)) {
      std::vector<int64_t> keys(heads.size());
      for (size_t i = 0; i < heads.size(); ++i) keys[i] = heads[i].key;
      std::vector<uint32_t> slots(heads.size());
      create_in_parts(keys.data(), keys.size(), slots.data());
      std::lock_guard lock(write_mutex_);
      for (size_t i = 0; i < heads.size(); ++i) {
        const uint32_t slot = slots[i];
        ShardWriteScope guard(shards_[shard_of(hash_key(keys[i]))]);
        std::memcpy(view_.rows + size_t{slot} * view_.row_bytes, values.data() + i * view_.row_bytes, view_.row_bytes);
        view_.headers[slot / 4].stamp[slot % 4] = heads[i].stamp;
        view_.headers[slot / 4].count[slot % 4] = heads[i].count;
        if (tier_) tier_->slot_state().reset(slot, kClean, places[i]);
      }
    }
    std::lock_guard lock(write_mutex_);
    if (tier_) tier_->loading = false;
  }
  load_state(folder);
}

// --- STATE ---

std::vector<char> Table::save_state() const {
  std::vector<char> out(kStateMagic, kStateMagic + sizeof(kStateMagic));
  put(out, kStateVersion);
  put(out, expiry_.rules());
  for (uint32_t cutoff : expiry_.cap_cutoffs()) put(out, cutoff);
  const uint64_t counters = admission_ ? admission_->counters().size() : 0;
  put(out, counters);
  if (counters) out.insert(out.end(), admission_->counters().begin(), admission_->counters().end());
  put(out, uint64_t{user_state_.size()});
  out.insert(out.end(), user_state_.begin(), user_state_.end());
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
    throw CorruptFile(path + " is corrupt: its checksum does not match");
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
  std::lock_guard lock(write_mutex_);
  for (uint32_t shard = 0; shard < kShards; ++shard)
    if (shard < begin || shard >= end_shard) caps[shard] = expiry_.cap_cutoffs()[shard];
  expiry_.restore(rules, std::move(caps));
  user_state_.assign(at, words);
  if (admission_ && counters == admission_->counters().size())
    std::memcpy(admission_->counters().data() + counters / kShards * begin, sketch + counters / kShards * begin,
                counters / kShards * (end_shard - begin));
  else if (admission_ && counters)
    throw std::invalid_argument("table '" + options_.name + "' has a sketch of " +
                                std::to_string(admission_->counters().size()) + " bytes but " + folder + " has " +
                                std::to_string(counters) + "; use the admission that it was saved with");
  // A table over SSD keeps expired rows until they are read, and so do its snapshots. In DRAM nothing would remove
  // them.
  const uint64_t erased = expiry_.any() ? erase_expired_in_dram() : 0;
  __atomic_store_n(&live_, live_ - erased, __ATOMIC_RELAXED);
  if (erased) erase_epoch_.fetch_add(1, std::memory_order_acq_rel);
}

}  // namespace hotrow
