// Finds, gathers and writes back DRAM rows for a GPU, for several tables in one call. A batch moves about 100,000 rows;
// ten separate calls would each wake all pool threads for a tenth of the work.
//
// A row in HBM keeps its DRAM slot, pinned so that it is not evicted to SSD. The DRAM copy is stale until the row is
// written back.
//
// Threads: the training thread and one write-back thread. They never move the same row in both directions at once. No
// reader runs beside them: before a read, the HBM tier writes its rows back.
#pragma once

#include <functional>
#include <vector>

#include "table/table.h"

namespace hotrow {

// One table's range in arrays that several tables share.
struct TableRange {
  Table* table;
  size_t begin, end;
};

// Keys of several tables, and output arrays for each row's slot, last step and count code (kNoSlot: no row in DRAM).
struct RowLookup {
  const std::vector<TableRange>& parts;
  const int64_t* keys;  // null: the slots are known; steps and counts are not read
  uint32_t *slots, *steps, *counts;
  bool stop_at_first_miss = false;  // stop when a row is missing
};

// Rows [begin, end). With `out` they are copied too: row i to out[(i - begin) * stride].
struct RowRange {
  size_t begin, end;
  float* out = nullptr;
};

// Looks up the rows of all ranges in one call of the thread pool, earlier ranges first. done(r) is called on a pool
// thread as soon as all rows of range r are done. Returns how many rows are missing.
size_t lookup_ranges(const RowLookup& lookup, const std::vector<RowRange>& ranges, size_t stride,
                     const std::function<void(size_t)>& done);

// The same for one range.
size_t lookup_rows(const RowLookup& lookup, const RowRange& range, size_t stride = 0);

// Stores rows[(i - begin) * stride] into slots[i] with its step and count code. Skips i where the slot is kNoSlot or
// the step is <= last_clean_step. Captures rows that a running snapshot still needs first. Requires: slots are unique.
void write_back_rows(const std::vector<TableRange>& parts, const uint32_t* slots, const uint32_t* steps,
                     const uint32_t* counts, uint32_t last_clean_step, size_t begin, size_t end, const float* rows,
                     size_t stride);

}  // namespace hotrow
