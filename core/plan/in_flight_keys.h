// Which keys the batches in flight have: for each key the last batch that was routed with it.
//
// The owner of a row may send it ahead of its batch's turn. That is useful only if no earlier batch in flight will
// change the row, because a changed row is sent again. This map tells which keys earlier batches in flight have. It is
// a prediction: whether a row has changed is decided on the batch's turn, by its header (plan_ahead.cpp).
//
// One map per table. Batches are noted in order, with rising numbers. Entries of batches that are done are dropped when
// a map has to grow, so it stays as large as the batches in flight: 16 bytes an entry, a quarter to a half full.
//
// Threads: one for each table at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "hash/hash.h"
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
      if (u + kAhead < keys.size()) __builtin_prefetch(&map.entries[keys.hashes()[u + kAhead] & mask], 1);
      size_t at = keys.hashes()[u] & mask;
      while (map.entries[at].batch != 0 && map.entries[at].key != keys.keys()[u]) at = (at + 1) & mask;
      Entry& entry = map.entries[at];
      map.used += entry.batch == 0;
      previous[u] = entry.batch;
      entry = {keys.keys()[u], batch_};
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
    int64_t key;
    uint64_t batch;  // 0: the entry is empty
  };
  struct Map {
    std::vector<Entry> entries;
    size_t used = 0;
  };

  void rebuild(Map& map, size_t more) const {
    std::vector<Entry> before;
    std::swap(before, map.entries);
    const auto in_flight = [&](const Entry& entry) { return entry.batch > done_; };
    const size_t kept = std::count_if(before.begin(), before.end(), in_flight);
    size_t capacity = 64;
    while (capacity < 4 * (kept + more)) capacity *= 2;
    map.entries.assign(capacity, Entry{0, 0});
    map.used = kept;
    for (const Entry& entry : before) {
      if (!in_flight(entry)) continue;
      size_t at = hash_key(entry.key) & (capacity - 1);
      while (map.entries[at].batch != 0) at = (at + 1) & (capacity - 1);
      map.entries[at] = entry;
    }
  }

  std::vector<Map> maps_;
  uint64_t batch_ = 0, done_ = 0;
};

}  // namespace hotrow
