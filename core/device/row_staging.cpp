#include "device/row_staging.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "memory/stream_copy.h"
#include "threads/thread_pool.h"

namespace hotrow {
namespace {

constexpr size_t kRowsPerTask = 256;
constexpr size_t kAhead = 8;

inline __attribute__((always_inline)) void prefetch_row(const char* row, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
}

// Runs fn(table, from, to) over the rows [begin, end), in chunks that lie inside one table.
template <class Fn>
void for_pieces(const std::vector<TableRange>& parts, size_t begin, size_t end, Fn fn) {
  std::vector<TableRange> pieces;
  for (const TableRange& part : parts)
    for (size_t at = std::max(part.begin, begin), last = std::min(part.end, end); at < last; at += kRowsPerTask)
      pieces.push_back({part.table, at, std::min(last, at + kRowsPerTask)});
  ThreadPool::shared().run(static_cast<int>(pieces.size()),
                           [&](int p) { fn(*pieces[p].table, pieces[p].begin, pieces[p].end); });
}

// Copies rows whose slots are known.
void copy_task(const Table& table, const uint32_t* slots, size_t from, size_t to, float* out, size_t stride) {
  const RowView view = table.view();
  auto row = [&](size_t i) { return view.rows + size_t{slots[i]} * view.row_bytes; };
  for (size_t i = from; i < to; ++i) {
    if (i + kAhead < to) prefetch_row(row(i + kAhead), view.row_bytes);
    stream_copy(out + (i - from) * stride, row(i), view.row_bytes);
  }
  finish_stream_copies();
}

// Looks up and copies rows of one task. Returns how many are missing.
size_t lookup_task(const Table& table, const RowLookup& lookup, size_t from, size_t to, float* out, size_t stride) {
  const RowView view = table.view();
  uint32_t* slots = lookup.slots;
  std::array<uint64_t, kRowsPerTask> hashes;
  for (size_t i = from; i < to; ++i) hashes[i - from] = hash_key(lookup.keys[i]);
  const size_t none = kernels().find({view, lookup.keys + from, hashes.data(), to - from, slots + from});
  auto row = [&](size_t i) { return view.rows + size_t{slots[i]} * view.row_bytes; };
  auto prefetch_slot = [&](size_t i) {
    if (i >= to || slots[i] == kNoSlot) return;
    __builtin_prefetch(&view.headers[slots[i] / 4]);
    if (out) prefetch_row(row(i), view.row_bytes);
  };
  const size_t ahead = out ? kAhead : 4 * kAhead;
  for (size_t i = from; i < from + ahead; ++i) prefetch_slot(i);
  for (size_t i = from; i < to; ++i) {
    prefetch_slot(i + ahead);
    if (slots[i] == kNoSlot) continue;
    const HeaderGroup& group = view.headers[slots[i] / 4];
    lookup.steps[i] = step_of(group.stamp[slots[i] % 4]);
    lookup.counts[i] = group.count[slots[i] % 4];
    if (out) stream_copy(out + (i - from) * stride, row(i), view.row_bytes);
  }
  finish_stream_copies();
  return none;
}

}  // namespace

size_t lookup_ranges(const RowLookup& lookup, const std::vector<RowRange>& ranges, size_t stride,
                     const std::function<void(size_t)>& done) {
  struct Task {
    const Table* table;
    size_t from, to, range;
  };
  std::vector<Task> tasks;
  std::vector<std::atomic<int>> left(ranges.size());
  for (size_t s = 0; s < ranges.size(); ++s)
    for (const TableRange& part : lookup.parts)
      for (size_t at = std::max(part.begin, ranges[s].begin), last = std::min(part.end, ranges[s].end); at < last;
           at += kRowsPerTask) {
        tasks.push_back({part.table, at, std::min(last, at + kRowsPerTask), s});
        left[s].fetch_add(1, std::memory_order_relaxed);
      }
  std::atomic<size_t> absent{0};
  auto over = [&] { return lookup.stop_at_first_miss && absent.load(std::memory_order_relaxed) != 0; };
  ThreadPool::shared().run(static_cast<int>(tasks.size()), [&](int t) {
    if (over()) return;
    const Task& task = tasks[t];
    const RowRange& range = ranges[task.range];
    float* out = range.out ? range.out + (task.from - range.begin) * stride : nullptr;
    if (!lookup.keys)
      copy_task(*task.table, lookup.slots, task.from, task.to, out, stride);
    else if (size_t none = lookup_task(*task.table, lookup, task.from, task.to, out, stride))
      absent.fetch_add(none, std::memory_order_relaxed);
    if (left[task.range].fetch_sub(1, std::memory_order_acq_rel) == 1 && !over() && done) done(task.range);
  });
  return absent;
}

size_t lookup_rows(const RowLookup& lookup, const RowRange& range, size_t stride) {
  return lookup_ranges(lookup, {range}, stride, nullptr);
}

void write_back_rows(const std::vector<TableRange>& parts, const uint32_t* slots, const uint32_t* steps,
                     const uint32_t* counts, uint32_t last_clean_step, size_t begin, size_t end, const float* rows,
                     size_t stride) {
  auto is_dirty = [&](size_t i) { return slots[i] != kNoSlot && steps[i] > last_clean_step; };
  std::vector<std::unique_lock<OwnerMutex>> locks;
  std::vector<uint32_t> changed;
  std::vector<TableRange> ordered = parts;  // locks in the order in which plans take them
  std::sort(ordered.begin(), ordered.end(),
            [](const TableRange& a, const TableRange& b) { return &a.table->write_mutex() < &b.table->write_mutex(); });
  for (const TableRange& part : ordered) {
    const size_t from = std::max(part.begin, begin), to = std::min(part.end, end);
    if (from >= to || !(part.table->tier() || part.table->tracks_changes())) continue;
    locks.emplace_back(part.table->write_mutex());
    changed.clear();
    for (size_t i = from; i < to; ++i)
      if (is_dirty(i)) changed.push_back(slots[i]);
    if (part.table->tier()) part.table->tier()->mark_dirty(changed.data(), changed.size());
    part.table->track_changed(changed.data(), changed.size());
  }
  for_pieces(parts, begin, end, [&](const Table& table, size_t from, size_t to) {
    const RowView view = table.view();
    auto row = [&](size_t i) { return view.rows + size_t{slots[i]} * view.row_bytes; };
    auto prefetch_slot = [&](size_t i) {  // for what is not written as whole lines
      if (i >= to || !is_dirty(i)) return;
      __builtin_prefetch(&view.headers[slots[i] / 4], 1);
      __builtin_prefetch(row(i), 1);
      __builtin_prefetch(row(i) + view.row_bytes - 1, 1);
    };
    for (size_t i = from; i < from + kAhead; ++i) prefetch_slot(i);
    for (size_t i = from; i < to; ++i) {
      prefetch_slot(i + kAhead);
      if (!is_dirty(i)) continue;
      HeaderGroup& group = view.headers[slots[i] / 4];
      stream_copy(row(i), rows + (i - begin) * stride, view.row_bytes);
      group.stamp[slots[i] % 4] = stamp_of(steps[i]);
      group.count[slots[i] % 4] = static_cast<uint16_t>(counts[i]);
    }
    finish_stream_copies();
  });
}

}  // namespace hotrow
