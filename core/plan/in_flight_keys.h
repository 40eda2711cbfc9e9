// Which keys the batches in flight have: for each key the last batch that was routed with it.
//
// The owner of a row may send it ahead of its batch's turn. That is useful only if no earlier batch in flight will
// change the row, because a changed row is sent again. This map tells which keys earlier batches in flight have. It is
// a prediction: whether a row has changed is decided on the batch's turn, by its header (plan_ahead.cpp).
//
// One map per table. Batches are noted in order, with rising numbers. Entries of batches that are done are dropped when
// a map has to grow, so it stays as large as the batches in flight: 8 bytes an entry, a quarter to a half full. An
// entry has 32 bits of the key's hash. Of a million keys, some two share these with one of 10,000 others; such a row
// may wait for its turn although nothing changes it.
//
// Threads: one for each table at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "index/unique_keys.h"

namespace hotrow {

class InFlightKeys {
 public:
  // Batch number `batch` (from 1) has `tables` tables; batches up to `done` are no longer in flight.
  void begin(uint64_t batch, uint64_t done, size_t tables) {
    batch_ = batch;
    done_ = done;
    if (maps_.size() < tables) maps_.resize(tables);
  }

  // Notes the batch's keys of one table. previous[u] is the last batch that was noted with unique key u; 0: none that
  // is in flight.
  void note(size_t table, const UniqueKeys& keys, uint64_t* previous) {
    Map& map = maps_[table];
    if (2 * (map.used + keys.size()) > map.entries.size()) rebuild(map, keys.size());
    const size_t mask = map.entries.size() - 1;
    for (size_t u = 0; u < keys.size(); ++u) {
      if (u + kAhead < keys.size()) __builtin_prefetch(&map.entries[tag_of(keys.hashes()[u + kAhead]) & mask], 1);
      const uint32_t tag = tag_of(keys.hashes()[u]);
      size_t at = tag & mask;
      while (map.entries[at].batch != 0 && map.entries[at].tag != tag) at = (at + 1) & mask;
      Entry& entry = map.entries[at];
      map.used += entry.batch == 0;
      previous[u] = entry.batch == 0 ? 0 : number_of(entry);
      entry = {tag, static_cast<uint32_t>(batch_)};
    }
  }

  size_t bytes() const {
    size_t total = 0;
    for (const Map& map : maps_) total += map.entries.size() * sizeof(Entry);
    return total;
  }

 private:
  static constexpr size_t kAhead = 16;  // keys whose entry is prefetched

  struct Entry {
    uint32_t tag;    // of the key
    uint32_t batch;  // the low half of its number; 0: the entry is empty
  };
  struct Map {
    std::vector<Entry> entries;
    size_t used = 0;
  };

  static uint32_t tag_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 16); }

  // The whole number of an entry's batch: the last one up to batch_ with this low half.
  uint64_t number_of(const Entry& entry) const {
    return batch_ - static_cast<uint32_t>(static_cast<uint32_t>(batch_) - entry.batch);
  }

  void rebuild(Map& map, size_t more) const {
    std::vector<Entry> before;
    std::swap(before, map.entries);
    const auto in_flight = [&](const Entry& entry) { return entry.batch != 0 && number_of(entry) > done_; };
    const size_t kept = std::count_if(before.begin(), before.end(), in_flight);
    size_t capacity = 64;
    while (capacity < 4 * (kept + more)) capacity *= 2;
    map.entries.assign(capacity, Entry{0, 0});
    map.used = kept;
    for (const Entry& entry : before) {
      if (!in_flight(entry)) continue;
      size_t at = entry.tag & (capacity - 1);
      while (map.entries[at].batch != 0) at = (at + 1) & (capacity - 1);
      map.entries[at] = entry;
    }
  }

  std::vector<Map> maps_;
  uint64_t batch_ = 0, done_ = 0;
};

}  // namespace hotrow
