// Allocates runs of cache lines for the index, from a region that never moves.
//
// Index arrays grow in small steps, and each old array is released whole. A released range merges with its neighbours
// and is reused by the next array that fits: reusing touched memory costs a fifth of a fresh page. Pages without a live
// line are returned to the system in groups (at most 1/128 of the live pages are kept back), because each return
// interrupts every core. A released array stays readable: a lock-free reader may still read zeros or other entries
// there, and its version check discards them.
//
// reserve() commits memory for later allocations, so that they cannot fail in the middle of a change.
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

  // Makes sure that `lines` more lines can be allocated without failing.
  void reserve(size_t lines);
  // Zeroed lines. Thread-safe.
  char* allocate(size_t lines);
  void release(char* block, size_t lines);

  // Returns every page without a live line to the system. Used by tests.
  void trim();

  // Bytes of pages with a live line, and of dead pages that were not returned yet.
  size_t resident() const { return (live_pages_ + dead_pages_) * kPage; }
  size_t reserved() const { return region_.reserved(); }
  size_t address_space_used() const { return end_ * kLine; }

 private:
  void release_dead_pages();
  void add_free_range(size_t first, size_t lines);

  struct FreeRange {
    size_t first, lines;
  };

  Region region_;
  std::mutex mutex_;
  size_t end_ = 0;
  size_t live_pages_ = 0;
  size_t dead_pages_ = 0;               // pages without a live line that were not returned yet
  std::vector<uint8_t> lines_on_page_;  // live lines per page, at most 64; kWaiting: in dead_pages_
  // Released lines for reuse, by address. One array instead of nodes: long-lived nodes would occupy the gaps that the
  // caller's large temporaries leave in the heap, and those would never fit there again.
  std::vector<FreeRange> free_ranges_;
};

}  // namespace hotrow
