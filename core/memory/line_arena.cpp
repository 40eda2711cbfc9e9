#include "memory/line_arena.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace hotrow {
namespace {

constexpr size_t kLinesPerPage = kPage / kLine;
constexpr uint8_t kWaiting = 0xff;
constexpr size_t kLeastWaiting = 16;  // pages

// Calls fn(page, lines of the block on that page) for every page of the block.
template <class Fn>
void for_each_page(size_t first_line, size_t lines, Fn fn) {
  for (size_t line = first_line, end = first_line + lines; line < end;) {
    size_t page = line / kLinesPerPage;
    size_t here = std::min(end, (page + 1) * kLinesPerPage) - line;
    fn(page, here);
    line += here;
  }
}

// A reader may still read a released block, so the thread sanitizer sees atomic stores. Fresh memory is zero already,
// but is cleared too: a page that is read before it is written faults twice, the second time with an interrupt of every
// core.
void clear(char* block, size_t lines) {
#if defined(__SANITIZE_THREAD__)
  auto words = reinterpret_cast<uint32_t*>(block);
  for (size_t i = 0; i < lines * kLine / sizeof(uint32_t); ++i) __atomic_store_n(&words[i], 0u, __ATOMIC_RELAXED);
#else
  std::memset(block, 0, lines * kLine);
#endif
}

}  // namespace

void LineArena::reserve(size_t lines) {
  std::lock_guard lock(mutex_);
  region_.commit((end_ + lines) * kLine);
  lines_on_page_.reserve((end_ + lines + kLinesPerPage - 1) / kLinesPerPage);
}

char* LineArena::allocate(size_t lines) {
  size_t first;
  {
    std::lock_guard lock(mutex_);
    auto hole =
        std::find_if(free_ranges_.begin(), free_ranges_.end(), [&](const FreeRange& h) { return h.lines >= lines; });
    if (hole != free_ranges_.end()) {
      first = hole->first;
      hole->first += lines;
      hole->lines -= lines;
      if (hole->lines == 0) free_ranges_.erase(hole);
    } else {
      region_.commit((end_ + lines) * kLine);
      lines_on_page_.resize((end_ + lines + kLinesPerPage - 1) / kLinesPerPage);
      first = end_;
      end_ += lines;
    }
    for_each_page(first, lines, [&](size_t page, size_t here) {
      uint8_t& lines_here = lines_on_page_[page];
      if (lines_here == kWaiting) {
        lines_here = 0;
        --dead_pages_;
      }
      live_pages_ += lines_here == 0;
      lines_here += here;
    });
  }
  char* block = region_.data() + first * kLine;
  clear(block, lines);
  return block;
}

void LineArena::release(char* block, size_t lines) {
  std::lock_guard lock(mutex_);
  const size_t first = (block - region_.data()) / kLine;
  for_each_page(first, lines, [&](size_t page, size_t here) {
    lines_on_page_[page] -= here;
    if (lines_on_page_[page] != 0) return;
    lines_on_page_[page] = kWaiting;
    --live_pages_;
    ++dead_pages_;
  });
  if (dead_pages_ > std::max(kLeastWaiting, live_pages_ / 128)) release_dead_pages();
  add_free_range(first, lines);
}

// Merges the range with its neighbours.
void LineArena::add_free_range(size_t first, size_t lines) {
  auto next = std::lower_bound(free_ranges_.begin(), free_ranges_.end(), first,
                               [](const FreeRange& h, size_t at) { return h.first < at; });
  const bool joins_next = next != free_ranges_.end() && next->first == first + lines;
  const bool joins_before = next != free_ranges_.begin() && std::prev(next)->first + std::prev(next)->lines == first;
  if (joins_before && joins_next) {
    std::prev(next)->lines += lines + next->lines;
    free_ranges_.erase(next);
  } else if (joins_before) {
    std::prev(next)->lines += lines;
  } else if (joins_next) {
    *next = {first, lines + next->lines};
  } else {
    try {
      free_ranges_.insert(next, {first, lines});
    } catch (const std::bad_alloc&) {
      // A release must not fail. The range's addresses are not reused; its memory is still returned to the system.
    }
  }
}

void LineArena::trim() {
  std::lock_guard lock(mutex_);
  release_dead_pages();
}

void LineArena::release_dead_pages() {
  for (size_t page = 0; page < lines_on_page_.size() && dead_pages_ > 0; ++page) {
    const size_t first = page;
    for (; page < lines_on_page_.size() && lines_on_page_[page] == kWaiting; ++page) lines_on_page_[page] = 0;
    if (page == first) continue;
    region_.discard(first * kPage, (page - first) * kPage);
    dead_pages_ -= page - first;
  }
}

}  // namespace hotrow
