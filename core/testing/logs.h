// Logs for tests: small, with records whose values follow from key and stamp, so that any record can be checked alone;
// and a plain map of the rows that should be live.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "hash/hash.h"
#include "log/log.h"
#include "testing/random.h"
#include "testing/test.h"

namespace hotrow::testing {

// 4 records a block, 16 in the buffer, 60 in a segment.
inline LogOptions small_log(const std::string& folder, uint32_t row_bytes = 1000) {
  LogOptions options;
  options.folder = folder;
  options.table = "user";
  options.row_bytes = row_bytes;
  options.segment_bytes = 64 << 10;
  options.buffer_bytes = 16 << 10;
  options.depth = 16;
  return options;
}

inline RecordHead head_of(int64_t key, uint32_t stamp) { return {key, stamp, static_cast<uint16_t>(key * 7), 0}; }

inline std::vector<char> values_of(int64_t key, uint32_t stamp, uint32_t row_bytes) {
  std::vector<char> values(row_bytes);
  uint64_t state = hash_int(static_cast<uint64_t>(key), stamp);
  for (char& value : values) value = static_cast<char>((state = state * kGolden + 1) >> 56);
  return values;
}

inline RecordAddress append(Log& log, int64_t key, uint32_t stamp, bool alive = true) {
  return log.append(head_of(key, stamp), values_of(key, stamp, log.options().row_bytes).data(), alive);
}

inline bool is_record(const char* record, int64_t key, uint32_t stamp, uint32_t row_bytes) {
  const RecordHead head = head_of(key, stamp);
  const std::vector<char> values = values_of(key, stamp, row_bytes);
  return std::memcmp(record, &head, sizeof(head)) == 0 &&
         std::memcmp(record + sizeof(head), values.data(), row_bytes) == 0;
}

// key -> stamp, as a snapshot or a log has them.
using Stamps = std::map<int64_t, uint32_t>;

inline Stamps rows_of(const std::string& folder, size_t most = 37) {
  SnapshotReader reader(folder);
  Stamps stamps;
  std::vector<RecordHead> heads;
  std::vector<char> values;
  std::vector<RecordAddress> places;
  RecordAddress last = 0;
  while (const size_t count = reader.next(most, heads, values, places)) {
    CHECK(count <= most && heads.size() == count && places.size() == count);
    for (size_t i = 0; i < count; ++i) {
      const auto expected = values_of(heads[i].key, heads[i].stamp, reader.row_bytes());
      CHECK(std::memcmp(values.data() + i * reader.row_bytes(), expected.data(), expected.size()) == 0);
      CHECK(stamps.empty() || places[i] > last);
      last = places[i];
      CHECK(stamps.emplace(heads[i].key, heads[i].stamp).second);
    }
  }
  CHECK_EQ(stamps.size(), reader.rows());
  return stamps;
}

// A log and a map of the rows that it must hold.
class ReferenceLog {
 public:
  struct Row {
    RecordAddress place;
    uint32_t stamp;
  };

  explicit ReferenceLog(LogOptions options) : log_(std::make_unique<Log>(std::move(options))) {}
  Log& log() { return *log_; }
  const std::map<int64_t, Row>& rows() const { return rows_; }

  void put(int64_t key) {
    const uint32_t stamp = stamp_ + 1;
    const RecordAddress place = append(*log_, key, stamp);
    stamp_ = stamp;
    const auto found = rows_.find(key);
    if (found != rows_.end()) log_->mark_dead(found->second.place);
    rows_[key] = {place, stamp};
  }
  void erase(int64_t key) {
    const auto found = rows_.find(key);
    if (found == rows_.end()) return;
    log_->mark_dead(found->second.place);
    CHECK(!log_->alive(found->second.place));
    rows_.erase(found);
  }
  // Rewrites a segment's live records, as the table does.
  void compact(uint64_t segment) {
    const std::vector<RecordAddress> places = log_->live_places(segment);
    std::vector<char> records(places.size() * log_->record_bytes());
    log_->read(places.data(), places.size(), records.data());
    for (size_t i = 0; i < places.size(); ++i) {
      RecordHead head;
      std::memcpy(&head, records.data() + i * log_->record_bytes(), sizeof(head));
      Row& row = rows_.at(head.key);
      CHECK_EQ(row.place, places[i]);
      row.place = log_->append(head, records.data() + i * log_->record_bytes() + sizeof(head));
      log_->mark_dead(places[i]);
    }
  }
  Stamps stamps() const {
    Stamps stamps;
    for (const auto& [key, row] : rows_) stamps[key] = row.stamp;
    return stamps;
  }
  // Reads every row, in a random order.
  void check(Random& random) const {
    std::vector<std::pair<int64_t, Row>> all(rows_.begin(), rows_.end());
    for (size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[random.below(i)]);
    std::vector<RecordAddress> places;
    for (const auto& [key, row] : all) places.push_back(row.place);
    std::vector<char> records(all.size() * log_->record_bytes());
    log_->read(places.data(), places.size(), records.data());
    for (size_t i = 0; i < all.size(); ++i) {
      CHECK(log_->alive(all[i].second.place));
      CHECK(is_record(records.data() + i * log_->record_bytes(), all[i].first, all[i].second.stamp,
                      log_->options().row_bytes));
    }
    CHECK_EQ(log_->report().live, all.size());
  }
  // Replaces the log by a new one that starts from a snapshot with the same rows.
  void reopen(LogOptions options, const std::string& snapshot) {
    log_.reset();
    log_ = std::make_unique<Log>(std::move(options));
    log_->import_snapshot(snapshot);
    SnapshotReader reader(snapshot);
    std::vector<RecordHead> heads;
    std::vector<char> values;
    std::vector<RecordAddress> places;
    rows_.clear();
    while (reader.next(100, heads, values, places))
      for (size_t i = 0; i < heads.size(); ++i) rows_[heads[i].key] = {places[i], heads[i].stamp};
  }

 private:
  std::unique_ptr<Log> log_;
  std::map<int64_t, Row> rows_;
  uint32_t stamp_ = 0;
};

}  // namespace hotrow::testing
