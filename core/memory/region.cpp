#include "memory/region.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

namespace hotrow {
namespace {

constexpr size_t kSmallStep = size_t{64} << 10;
constexpr size_t kHugeFrom = size_t{4} << 20;

constexpr size_t kAddressSpace = size_t{96} << 40;  // of 128 TiB; the remainder is left to the rest of the program
std::atomic<size_t> taken_addresses{0};

size_t round_up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

void* reserve_range(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

}  // namespace

size_t machine_memory() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
}

Region::Region(size_t reserve, bool huge_pages) : huge_pages_(huge_pages) {
  // A region takes at most 1/32 of the address space that is left, so a further region can always be reserved.
  const size_t taken = taken_addresses.load(std::memory_order_relaxed);
  const size_t share = (kAddressSpace - std::min(kAddressSpace, taken)) / 32;
  for (size_t want = round_up(std::min(reserve, share), kHugePage) + kHugePage; want >= 2 * kHugePage; want /= 2) {
    void* p = reserve_range(want);
    if (!p) continue;
    // Align to a huge page and unmap both ends.
    auto start = reinterpret_cast<uintptr_t>(p);
    uintptr_t aligned = round_up(start, kHugePage);
    size_t usable = (want - (aligned - start)) / kHugePage * kHugePage;
    if (aligned != start) munmap(p, aligned - start);
    if (size_t tail = start + want - (aligned + usable)) munmap(reinterpret_cast<void*>(aligned + usable), tail);
    base_ = reinterpret_cast<char*>(aligned);
    reserved_ = usable;
    taken_addresses += usable;
    return;
  }
  throw std::bad_alloc();
}

Region::~Region() {
  munmap(base_, reserved_);
  taken_addresses -= reserved_;
}

void Region::use_small_pages() {
  huge_pages_ = false;
  madvise(base_, reserved_, MADV_NOHUGEPAGE);
}

size_t Region::rounded(size_t bytes) const {
  return std::max(committed_, round_up(bytes, huge_pages_ && bytes > kHugeFrom ? kHugePage : kSmallStep));
}

// Makes addresses accessible well ahead of use, because a system call per step would be slow. Only pages that are
// touched take memory.
void Region::commit(size_t bytes) {
  const size_t want = rounded(bytes);
  if (want <= committed_) return;
  if (want > reserved_) throw std::bad_alloc();
  if (want > open_) {
    const size_t ahead = std::min(reserved_, round_up(want + want / 4, kHugePage));
    if (!make_accessible(ahead) && !make_accessible(want)) throw std::bad_alloc();
  }
  committed_ = want;
}

bool Region::make_accessible(size_t bytes) {
  if (mprotect(base_ + open_, bytes - open_, PROT_READ | PROT_WRITE) != 0) return false;
  // From 4 MiB on, so that small tables do not take a huge page each.
  const size_t from = std::max(open_, kHugeFrom);
  if (huge_pages_ && bytes > from) madvise(base_ + from, bytes - from, MADV_HUGEPAGE);
  open_ = bytes;
  return true;
}

void Region::discard(size_t offset, size_t bytes) { madvise(base_ + offset, bytes, MADV_DONTNEED); }

}  // namespace hotrow
