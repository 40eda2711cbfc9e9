// Cache-line blocks for the index, in a region that never moves.
//
// Index arrays grow by small steps and each old array dies whole. Its memory goes back page by page, as soon as nothing
// on a page is alive; its addresses stay readable (a lock-free reader may still be looking: it then reads zeros or
// other entries, which its version check throws away) and serve the next array of the same size. So RAM follows the
// live bytes, and address space is spent only by growth: about six times the index's final size.
//
// reserve() takes memory for allocations to come, so that those cannot fail half-way through a change.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "memory/region.h"

namespace hotrow {

inline constexpr size_t kLine = 64;

class LineArena {
 public:
  explicit LineArena(size_t reserve) : region_(reserve, /*huge_pages=*/false) {}

  // Makes sure that `lines` more lines can be allocated without failing.
  void reserve(size_t lines);
  // Zeroed lines. Thread-safe.
  char* allocate(size_t lines);
  void release(char* block, size_t lines);

  // Bytes of pages that hold something alive.
  size_t resident() const { return live_pages_ * kPage; }
  size_t reserved() const { return region_.reserved(); }
  size_t spent() const { return end_ * kLine; }

 private:
  Region region_;
  std::mutex mutex_;
  size_t end_ = 0;
  size_t live_pages_ = 0;
  std::vector<uint8_t> lines_on_page_;         // live lines per page, at most 64
  std::map<size_t, std::vector<char*>> dead_;  // blocks for reuse, by their number of lines
};

}  // namespace hotrow
