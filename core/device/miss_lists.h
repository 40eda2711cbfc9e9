// Reads the rows that a GPU cache lacks, for all features of a batch in one call. The GPU wrote the lists of missing
// keys.
#pragma once

#include <cstdint>
#include <vector>

#include "table/table.h"

namespace hotrow {

// The keys that a GPU cache lacks, one list per feature: counts[f] keys of tables[f], and the example of each key. List
// f begins at f * capacity, or with `starts` at starts[f].
struct MissLists {
  std::vector<const Table*> tables;
  const int32_t* columns;
  const int32_t* counts;
  const int64_t* keys;
  const int32_t* examples;
  size_t capacity;
  const int32_t* starts = nullptr;
};
// Reads their values as floats into out, dim of each, contiguous in the order of the lists. Rows that are only on SSD
// follow the policy, and late[example] counts those that it answered. places[i] is where row i begins in a matrix with
// `width` floats per example, of which feature f's begin at columns[f]; keys[i] is row i's key. Returns how many rows.
size_t read_misses(const MissLists& lists, ColdReadPolicy policy, size_t width, float* out, int64_t* places,
                   int64_t* keys, uint32_t* late);

}  // namespace hotrow
