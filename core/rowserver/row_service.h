// RowService: the rows of a row server, and the lookups in them at a named publication.
//
// A lookup holds the gate shared, so it sees one publication. A cut-over holds it exclusively: the caller changes the
// tables between begin_cut_over() and end_cut_over(). Cut-overs have priority over new lookups.
//
// Threads: any number call `read`; one at a time cuts over.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "memory/buffer.h"
#include "rowserver/publication_history.h"
#include "rowserver/row_protocol.h"
#include "table/table.h"

namespace hotrow {

class RowService {
 public:
  struct Reply {
    RowError error = RowError::kNone;
    int64_t publication = 0, oldest = 0;
  };
  struct Scratch {  // of one thread
    Buffer<float> rows, answer;
    Buffer<uint32_t> positions, begins;
  };

  RowService(std::vector<std::shared_ptr<Table>> tables, int64_t publication, size_t history_entries,
             size_t history_bytes);

  const std::vector<int>& dims() const { return dims_; }
  int64_t publication() const { return publication_.load(std::memory_order_acquire); }
  int64_t oldest() const { return oldest_.load(std::memory_order_acquire); }

  // From now on lookups are refused: other rows took their place. Connections may keep the object for a while.
  void retire() { retired_.store(true, std::memory_order_release); }
  // How many connections may read these rows.
  std::atomic<uint32_t>& connections() { return connections_; }
  bool is_retired() const { return retired_.load(std::memory_order_acquire); }

  // Writes the answer's payload (answer_bytes()) to `out`, or returns an error and leaves `out` undefined.
  Reply read(const ParsedLookup& lookup, int64_t publication, char* out, Scratch& scratch) const;
  // Whether a row of the lookup is on SSD only, or may be. Reads memory alone.
  bool is_cold(const ParsedLookup& lookup) const;

  // A changed table's keys; their current rows are kept for the history by prepare().
  struct Change {
    uint32_t table;
    std::vector<int64_t> keys;
  };
  // Reads the rows that a publication will change. Call it beside lookups, before begin_cut_over().
  std::vector<ChangedRows> prepare(const std::vector<Change>& changes) const;
  void begin_cut_over();
  // `publication` is in service from now on. With `before`, it followed the one in service and changed these rows;
  // without, or if its number is not larger, everything may have changed and the history begins anew.
  void end_cut_over(int64_t publication, std::vector<ChangedRows>* before);
  // Nothing has changed.
  void abandon_cut_over();
  // Other tables of the same dims, inside a cut-over.
  void replace_tables(std::vector<std::shared_ptr<Table>> tables);

  struct Figures {
    uint64_t lookups, keys, restored;
    size_t history_entries, history_bytes;
  };
  Figures figures() const;

 private:
  std::vector<std::shared_ptr<Table>> tables_;
  std::vector<int> dims_;
  PublicationHistory history_;
  mutable std::mutex entry_;  // held by a cut-over from before it waits for the gate, so that lookups let it pass
  mutable std::shared_mutex gate_;
  std::atomic<bool> cutting_over_{false}, retired_{false};
  std::atomic<int64_t> publication_, oldest_;
  std::atomic<uint32_t> connections_{0};
  mutable std::atomic<uint64_t> lookups_{0}, keys_{0}, restored_{0};
  std::atomic<size_t> history_entries_{0}, history_bytes_{0};
};

}  // namespace hotrow
