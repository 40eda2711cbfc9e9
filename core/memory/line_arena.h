// Cache-line blocks for the index, in a region that never moves.
//
// Index arrays grow by small steps and each old array dies whole. Blocks are carved from the end and never reused as
// addresses (a lock-free reader may still be looking at a dead one: it then reads zeros or stale entries, which its
// version check throws away); their memory goes back page by page, as soon as nothing on a page is alive. So RAM
// follows the live bytes, and only address space is spent: about six times the index's final size.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "memory/region.h"

namespace hotrow {

inline constexpr size_t kLine = 64;

class LineArena {
 public:
  explicit LineArena(size_t reserve) : region_(reserve, /*huge_pages=*/false) {}

  // Zeroed lines. Thread-safe.
  char* allocate(size_t lines);
  void release(char* block, size_t lines);

  // Bytes of pages that hold something alive.
  size_t resident() const { return live_pages_ * kPage; }

 private:
  Region region_;
  std::mutex mutex_;
  size_t end_ = 0;
  size_t live_pages_ = 0;
  std::vector<uint8_t> lines_on_page_;  // live lines per page, at most 64
};

}  // namespace hotrow
