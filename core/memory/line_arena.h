// Cache-line blocks for the index, in a region that never moves.
//
// Index arrays grow by small steps and each old array dies whole. The hole it leaves joins its neighbours and serves
// the next array that fits: memory that was touched is used again, which costs a fifth of what a fresh page costs.
// Pages on which nothing is alive go back together, some at a time (at most 1/128 of the live ones wait), because
// giving one back interrupts every core. A dead array's addresses stay readable (a lock-free reader may still be
// looking: it then reads zeros or other entries, which its version check throws away).
//
// reserve() takes memory for allocations to come, so that those cannot fail half-way through a change.
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

  // Gives back every page on which nothing is alive.
  void trim();

  // Bytes of pages that hold something alive, or wait to be given back.
  size_t resident() const { return (live_pages_ + waiting_) * kPage; }
  size_t reserved() const { return region_.reserved(); }
  size_t spent() const { return end_ * kLine; }

 private:
  void give_back();
  void add_hole(size_t first, size_t lines);

  struct Hole {
    size_t first, lines;
  };

  Region region_;
  std::mutex mutex_;
  size_t end_ = 0;
  size_t live_pages_ = 0;
  size_t waiting_ = 0;                  // pages that are dead and not given back
  std::vector<uint8_t> lines_on_page_;  // live lines per page, at most 64; kWaiting for a dead one that waits
  // Dead lines for reuse, by address. One array, not a node each: nodes that live long would sit in the gaps that the
  // caller's large temporaries leave in the heap, and those would never fit there again.
  std::vector<Hole> holes_;
};

}  // namespace hotrow
