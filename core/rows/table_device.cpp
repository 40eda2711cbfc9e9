// Rows that are on a GPU for a while: they come back here, whole, by slot.
//
// A row in HBM keeps its slot in DRAM (held, so that it does not leave for SSD) and is newer than what lies there. All
// calls are the training thread's; no reader runs beside them, because readers ask the GPU's owner first, who brings
// its rows down.
#include <cstring>

#include "rows/table.h"
#include "threads/pool.h"

namespace hotrow {
namespace {

constexpr size_t kRowsPerTask = 256;

template <class Fn>
void for_rows(size_t count, Fn fn) {
  Pool::shared().run(static_cast<int>((count + kRowsPerTask - 1) / kRowsPerTask), [&](int task) {
    for (size_t i = task * kRowsPerTask, end = std::min(count, i + kRowsPerTask); i < end; ++i) fn(i);
  });
}

}  // namespace

void Table::lower(const uint32_t* slots, size_t count, const float* rows, size_t stride, const uint32_t* steps,
                  const uint32_t* counts, uint32_t clean) {
  std::lock_guard lock(writer_);
  auto comes = [&](size_t i) { return slots[i] != kNoSlot && steps[i] > clean; };
  if (tier_) {
    std::vector<uint32_t> changed;
    for (size_t i = 0; i < count; ++i)
      if (comes(i)) changed.push_back(slots[i]);
    tier_->touch(changed.data(), changed.size());
  }
  for_rows(count, [&](size_t i) {
    if (!comes(i)) return;
    HeaderGroup& group = view_.headers[slots[i] / 4];
    const uint32_t lane = slots[i] % 4;
    if (rows) std::memcpy(view_.rows + size_t{slots[i]} * view_.row_bytes, rows + i * stride, view_.row_bytes);
    group.stamp[lane] = stamp_of(steps[i]);
    group.count[lane] = static_cast<uint16_t>(counts[i]);
  });
}

void Table::unhold(const uint32_t* slots, size_t count) {
  if (!tier_ || !tier_->evicts()) return;
  std::lock_guard lock(writer_);
  for (size_t i = 0; i < count; ++i)
    if (slots[i] != kNoSlot) tier_->unpin(&slots[i], 1);
}

void Table::alive(const uint32_t* slots, size_t count, bool* alive) const {
  for_rows(count, [&](size_t i) { alive[i] = view_.headers[slots[i] / 4].stamp[slots[i] % 4] != 0; });
}

}  // namespace hotrow
