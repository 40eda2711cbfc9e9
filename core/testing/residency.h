// Counts the pages of a range that take memory, by asking the kernel.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "memory/region.h"

namespace hotrow::testing {

// Requires: `start` is on a page boundary and the range is mapped.
inline size_t resident_pages(char* start, size_t bytes) {
  std::vector<unsigned char> pages((bytes + kPage - 1) / kPage);
  if (mincore(start, bytes, pages.data()) != 0) return ~size_t{0};
  return static_cast<size_t>(std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1; }));
}

}  // namespace hotrow::testing
