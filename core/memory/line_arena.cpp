#include "memory/line_arena.h"

#include <algorithm>
#include <new>

namespace hotrow {
namespace {

constexpr size_t kLinesPerPage = kPage / kLine;
constexpr uint8_t kWaiting = 0xff;
constexpr size_t kLeastWaiting = 16;  // pages

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
    uint8_t& lines_here = lines_on_page_[page];
    if (lines_here == kWaiting) {
      lines_here = 0;
      --waiting_;
    }
    live_pages_ += lines_here == 0;
    lines_here += here;
  });
  return block;
}

void LineArena::release(char* block, size_t lines) {
  std::lock_guard lock(mutex_);
  for_each_page((block - region_.data()) / kLine, lines, [&](size_t page, size_t here) {
    lines_on_page_[page] -= here;
    if (lines_on_page_[page] != 0) return;
    lines_on_page_[page] = kWaiting;
    --live_pages_;
    ++waiting_;
  });
  if (waiting_ > std::max(kLeastWaiting, live_pages_ / 128)) give_back();
  try {
    dead_[lines].push_back(block);
  } catch (const std::bad_alloc&) {
    // Its addresses are lost to us, its memory is not; a release must not fail.
  }
}

void LineArena::trim() {
  std::lock_guard lock(mutex_);
  give_back();
}

void LineArena::give_back() {
  for (size_t page = 0; page < lines_on_page_.size() && waiting_ > 0; ++page) {
    const size_t first = page;
    for (; page < lines_on_page_.size() && lines_on_page_[page] == kWaiting; ++page) lines_on_page_[page] = 0;
    if (page == first) continue;
    region_.discard(first * kPage, (page - first) * kPage);
    waiting_ -= page - first;
  }
}

}  // namespace hotrow
