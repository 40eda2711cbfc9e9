// Rows on their way between DRAM and a GPU, several tables in one call: a batch brings a hundred thousand of them, and
// ten tables one after another would each wake all threads for a tenth of that.
//
// A row in HBM keeps its slot in DRAM (held, so that it does not leave for SSD) and is newer than what lies there. The
// callers are the training thread and one that brings rows down behind it; they take care that no row is on both ways
// at once. No reader runs beside them: readers ask the GPU's owner first, who brings its rows down.
#pragma once

#include <functional>
#include <vector>

#include "rows/table.h"

namespace hotrow {

// Of arrays that several tables share, the part that is one table's.
struct TablePart {
  Table* table;
  size_t begin, end;
};

// Keys of several tables and where their rows are: slots, steps and count codes; kNoSlot where a key has no row in
// DRAM.
struct Sought {
  const std::vector<TablePart>& parts;
  const int64_t* keys;  // null: slots are known, and nothing else is asked
  uint32_t *slots, *steps, *counts;
  bool whole = false;  // the first row that is not there ends it
};

// Rows from number `begin` to `end`. With `out` they are copied too: out[(i - begin) * stride] is row i.
struct Segment {
  size_t begin, end;
  float* out = nullptr;
};

// Finds the rows of all segments in one run of the pool, the first ones first: done(s) is called, by one thread or
// another, as soon as all of segment s is there. Returns how many rows are not.
size_t seek_segments(const Sought& sought, const std::vector<Segment>& segments, size_t stride,
                     const std::function<void(size_t)>& done);

// The same for one.
size_t seek_rows(const Sought& sought, const Segment& segment, size_t stride = 0);

// Rows come back: rows[(i - begin) * stride] into slots[i], with its step and count code, for i from `begin` to `end`.
// What a snapshot still wants of them is captured first. Slots of kNoSlot and rows whose step is not above `clean` are
// passed over. Requires: slots unique.
void lower_rows(const std::vector<TablePart>& parts, const uint32_t* slots, const uint32_t* steps,
                const uint32_t* counts, uint32_t clean, size_t begin, size_t end, const float* rows, size_t stride);

// Keys that a device's cache lacks, one list a feature: `counts[f]` keys of tables[f] at keys[f * room], and the
// examples they are of. Their values come out as floats, `dim` of each, one behind another in the order of the lists,
// those on SSD alone by the policy (`late` counts them for each example); places[i] is where row i begins in a matrix
// whose rows are `width` long and whose column columns[f] is feature f's first. Returns how many there are.
struct MissingLists {
  std::vector<const Table*> tables;
  const int32_t* columns;
  const int32_t* counts;
  const int64_t* keys;
  const int32_t* examples;
  size_t room;
};
size_t read_missing(const MissingLists& lists, Cold policy, size_t width, float* out, int64_t* places, int64_t* keys,
                    uint32_t* late);

}  // namespace hotrow
