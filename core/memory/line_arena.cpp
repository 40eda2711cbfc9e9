#include "memory/line_arena.h"

#include <algorithm>

namespace hotrow {
namespace {

constexpr size_t kLinesPerPage = kPage / kLine;

// Calls fn(page, lines of the block on that page) for every page that the block touches.
template <class Fn>
void for_each_page(size_t first_line, size_t lines, Fn fn) {
  for (size_t line = first_line, end = first_line + lines; line < end;) {
    size_t page = line / kLinesPerPage;
    size_t here = std::min(end, (page + 1) * kLinesPerPage) - line;
    fn(page, here);
    line += here;
  }
}

}  // namespace

char* LineArena::allocate(size_t lines) {
  std::lock_guard lock(mutex_);
  size_t first = end_;
  region_.commit((first + lines) * kLine);
  end_ += lines;
  lines_on_page_.resize((end_ + kLinesPerPage - 1) / kLinesPerPage);
  for_each_page(first, lines, [&](size_t page, size_t here) {
    live_pages_ += lines_on_page_[page] == 0;
    lines_on_page_[page] += here;
  });
  return region_.data() + first * kLine;
}

void LineArena::release(char* block, size_t lines) {
  std::lock_guard lock(mutex_);
  size_t first = (block - region_.data()) / kLine;
  size_t dead_from = 0, dead = 0;  // a run of dead pages, given back in one call
  for_each_page(first, lines, [&](size_t page, size_t here) {
    lines_on_page_[page] -= here;
    if (lines_on_page_[page] != 0) return;
    if (dead == 0) dead_from = page;
    ++dead;
  });
  // Only the first and last page of a block can be shared, so the dead ones are one run.
  if (dead) region_.discard(dead_from * kPage, dead * kPage);
  live_pages_ -= dead;
}

}  // namespace hotrow
