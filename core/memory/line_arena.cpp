#include "memory/line_arena.h"

#include <algorithm>
#include <new>

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

// A reader of a dead block may be looking, so these are stores that it may race with.
void clear(char* block, size_t lines) {
  auto words = reinterpret_cast<uint32_t*>(block);
  for (size_t i = 0; i < lines * kLine / sizeof(uint32_t); ++i) __atomic_store_n(&words[i], 0u, __ATOMIC_RELAXED);
}

}  // namespace

void LineArena::reserve(size_t lines) {
  std::lock_guard lock(mutex_);
  region_.commit((end_ + lines) * kLine);
  lines_on_page_.reserve((end_ + lines + kLinesPerPage - 1) / kLinesPerPage);
}

char* LineArena::allocate(size_t lines) {
  std::lock_guard lock(mutex_);
  auto dead = dead_.find(lines);
  char* block;
  if (dead != dead_.end() && !dead->second.empty()) {
    block = dead->second.back();
    dead->second.pop_back();
    clear(block, lines);
  } else {
    region_.commit((end_ + lines) * kLine);
    lines_on_page_.resize((end_ + lines + kLinesPerPage - 1) / kLinesPerPage);
    block = region_.data() + end_ * kLine;
    end_ += lines;
  }
  for_each_page((block - region_.data()) / kLine, lines, [&](size_t page, size_t here) {
    live_pages_ += lines_on_page_[page] == 0;
    lines_on_page_[page] += here;
  });
  return block;
}

void LineArena::release(char* block, size_t lines) {
  std::lock_guard lock(mutex_);
  size_t dead_from = 0, dead_pages = 0;
  for_each_page((block - region_.data()) / kLine, lines, [&](size_t page, size_t here) {
    lines_on_page_[page] -= here;
    if (lines_on_page_[page] != 0) return;
    if (dead_pages == 0) dead_from = page;
    ++dead_pages;
  });
  // Only the first and last page of a block can be shared, so the dead ones are one run.
  if (dead_pages) region_.discard(dead_from * kPage, dead_pages * kPage);
  live_pages_ -= dead_pages;
  try {
    dead_[lines].push_back(block);
  } catch (const std::bad_alloc&) {
    // Its addresses are lost to us, its memory is not; a release must not fail.
  }
}

}  // namespace hotrow
