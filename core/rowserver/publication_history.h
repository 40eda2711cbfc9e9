// The values that rows had before recent publications, so that a lookup can read at an earlier one.
//
// Each entry undoes one publication: the keys that it set or removed, with their values before. Undoing the entries
// after publication P, newest first, turns current rows into those of P. Old entries are dropped when there are more
// than `most_entries` or more than `most_bytes`; the newest is always kept.
//
// Threads: any number call `restore`; `add` and `clear` must be alone (the row server's gate, held exclusively).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace hotrow {

// The rows of one table before a publication changed them.
class ChangedRows {
 public:
  // values: [keys, dim], as a read gave them (initial values where `found` is 0). Requires: keys are unique.
  ChangedRows(uint32_t table, int dim, const std::vector<int64_t>& keys, std::vector<float> values,
              std::vector<uint8_t> found);

  uint32_t table() const { return table_; }
  size_t bytes() const;
  // Puts the old values of those of the keys that changed into rows [count, dim]; `found` may be null.
  void restore(const int64_t* keys, size_t count, float* rows, bool* found) const;

 private:
  uint32_t table_;
  int dim_;
  uint64_t mask_;
  std::vector<int64_t> keys_;   // by place: open addressing over the keys' hashes
  std::vector<uint32_t> rows_;  // by place: the number of the row, or kEmpty
  std::vector<float> values_;
  std::vector<uint8_t> found_;
};

class PublicationHistory {
 public:
  PublicationHistory(size_t most_entries, size_t most_bytes) : most_entries_(most_entries), most_bytes_(most_bytes) {}

  // Publication `number` followed `previous` and changed these rows. Requires: number > previous, which is the number
  // of the last add() since clear(), if there was one.
  void add(int64_t number, int64_t previous, std::vector<ChangedRows> tables);
  void clear();
  // The oldest publication that can be read while `current` is in service.
  int64_t oldest(int64_t current) const { return entries_.empty() ? current : entries_.front().previous; }
  // Whether the rows of `publication` can be read while `current` is in service. One that was never in service by
  // itself, because a cut-over took several at once, cannot.
  bool reaches(int64_t publication, int64_t current) const;
  // Turns current rows of a table into those of `publication`. Requires: reaches(publication).
  void restore(int64_t publication, uint32_t table, const int64_t* keys, size_t count, float* rows, bool* found) const;

  size_t entries() const { return entries_.size(); }
  size_t bytes() const { return bytes_; }

 private:
  struct Entry {
    int64_t number, previous;
    std::vector<ChangedRows> tables;
    size_t bytes;
  };
  const size_t most_entries_, most_bytes_;
  std::deque<Entry> entries_;  // oldest first
  size_t bytes_ = 0;
};

}  // namespace hotrow
