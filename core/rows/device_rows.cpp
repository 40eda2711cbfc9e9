#include "rows/device_rows.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "memory/stream_copy.h"
#include "threads/pool.h"

namespace hotrow {
namespace {

constexpr size_t kRowsPerTask = 256;
constexpr size_t kAhead = 8;
constexpr size_t kMissingPerTask = 128;  // a request waits for them
constexpr size_t kFewRows = 256;

inline __attribute__((always_inline)) void prefetch_row(const char* row, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
}

// Runs fn(table, from, to) over the rows from `begin` to `end`, in pieces that lie inside one table.
template <class Fn>
void for_pieces(const std::vector<TablePart>& parts, size_t begin, size_t end, Fn fn) {
  std::vector<TablePart> pieces;
  for (const TablePart& part : parts)
    for (size_t at = std::max(part.begin, begin), last = std::min(part.end, end); at < last; at += kRowsPerTask)
      pieces.push_back({part.table, at, std::min(last, at + kRowsPerTask)});
  Pool::shared().run(static_cast<int>(pieces.size()),
                     [&](int p) { fn(*pieces[p].table, pieces[p].begin, pieces[p].end); });
}

// Rows whose slots are known.
void copy_task(const Table& table, const uint32_t* slots, size_t from, size_t to, float* out, size_t stride) {
  const RowView view = table.view();
  auto row = [&](size_t i) { return view.rows + size_t{slots[i]} * view.row_bytes; };
  for (size_t i = from; i < to; ++i) {
    if (i + kAhead < to) prefetch_row(row(i + kAhead), view.row_bytes);
    stream_copy(out + (i - from) * stride, row(i), view.row_bytes);
  }
  finish_stream_copies();
}

// Returns how many are not there.
size_t seek_task(const Table& table, const Sought& sought, size_t from, size_t to, float* out, size_t stride) {
  const RowView view = table.view();
  uint32_t* slots = sought.slots;
  std::array<uint64_t, kRowsPerTask> hashes;
  for (size_t i = from; i < to; ++i) hashes[i - from] = hash_key(sought.keys[i]);
  const size_t none = kernels().find({view, sought.keys + from, hashes.data(), to - from, slots + from});
  auto row = [&](size_t i) { return view.rows + size_t{slots[i]} * view.row_bytes; };
  auto ask = [&](size_t i) {
    if (i >= to || slots[i] == kNoSlot) return;
    __builtin_prefetch(&view.headers[slots[i] / 4]);
    if (out) prefetch_row(row(i), view.row_bytes);
  };
  const size_t ahead = out ? kAhead : 4 * kAhead;
  for (size_t i = from; i < from + ahead; ++i) ask(i);
  for (size_t i = from; i < to; ++i) {
    ask(i + ahead);
    if (slots[i] == kNoSlot) continue;
    const HeaderGroup& group = view.headers[slots[i] / 4];
    sought.steps[i] = step_of(group.stamp[slots[i] % 4]);
    sought.counts[i] = group.count[slots[i] % 4];
    if (out) stream_copy(out + (i - from) * stride, row(i), view.row_bytes);
  }
  finish_stream_copies();
  return none;
}

}  // namespace

size_t seek_segments(const Sought& sought, const std::vector<Segment>& segments, size_t stride,
                     const std::function<void(size_t)>& done) {
  struct Task {
    const Table* table;
    size_t from, to, segment;
  };
  std::vector<Task> tasks;
  std::vector<std::atomic<int>> left(segments.size());
  for (size_t s = 0; s < segments.size(); ++s)
    for (const TablePart& part : sought.parts)
      for (size_t at = std::max(part.begin, segments[s].begin), last = std::min(part.end, segments[s].end); at < last;
           at += kRowsPerTask) {
        tasks.push_back({part.table, at, std::min(last, at + kRowsPerTask), s});
        left[s].fetch_add(1, std::memory_order_relaxed);
      }
  std::atomic<size_t> absent{0};
  auto over = [&] { return sought.whole && absent.load(std::memory_order_relaxed) != 0; };
  Pool::shared().run(static_cast<int>(tasks.size()), [&](int t) {
    if (over()) return;
    const Task& task = tasks[t];
    const Segment& segment = segments[task.segment];
    float* out = segment.out ? segment.out + (task.from - segment.begin) * stride : nullptr;
    if (!sought.keys)
      copy_task(*task.table, sought.slots, task.from, task.to, out, stride);
    else if (size_t none = seek_task(*task.table, sought, task.from, task.to, out, stride))
      absent.fetch_add(none, std::memory_order_relaxed);
    if (left[task.segment].fetch_sub(1, std::memory_order_acq_rel) == 1 && !over() && done) done(task.segment);
  });
  return absent;
}

size_t seek_rows(const Sought& sought, const Segment& segment, size_t stride) {
  return seek_segments(sought, {segment}, stride, nullptr);
}

void lower_rows(const std::vector<TablePart>& parts, const uint32_t* slots, const uint32_t* steps,
                const uint32_t* counts, uint32_t clean, size_t begin, size_t end, const float* rows, size_t stride) {
  auto comes = [&](size_t i) { return slots[i] != kNoSlot && steps[i] > clean; };
  std::vector<std::unique_lock<Writer>> locks;
  std::vector<uint32_t> changed;
  std::vector<TablePart> ordered = parts;  // locks in the order in which plans take them
  std::sort(ordered.begin(), ordered.end(),
            [](const TablePart& a, const TablePart& b) { return &a.table->writer() < &b.table->writer(); });
  for (const TablePart& part : ordered) {
    const size_t from = std::max(part.begin, begin), to = std::min(part.end, end);
    if (from >= to || !(part.table->tier() || part.table->notes_changes())) continue;
    locks.emplace_back(part.table->writer());
    changed.clear();
    for (size_t i = from; i < to; ++i)
      if (comes(i)) changed.push_back(slots[i]);
    if (part.table->tier()) part.table->tier()->touch(changed.data(), changed.size());
    part.table->note_changed(changed.data(), changed.size());
  }
  for_pieces(parts, begin, end, [&](const Table& table, size_t from, size_t to) {
    const RowView view = table.view();
    auto row = [&](size_t i) { return view.rows + size_t{slots[i]} * view.row_bytes; };
    auto ask = [&](size_t i) {  // for what is not written as whole lines
      if (i >= to || !comes(i)) return;
      __builtin_prefetch(&view.headers[slots[i] / 4], 1);
      __builtin_prefetch(row(i), 1);
      __builtin_prefetch(row(i) + view.row_bytes - 1, 1);
    };
    for (size_t i = from; i < from + kAhead; ++i) ask(i);
    for (size_t i = from; i < to; ++i) {
      ask(i + kAhead);
      if (!comes(i)) continue;
      HeaderGroup& group = view.headers[slots[i] / 4];
      stream_copy(row(i), rows + (i - begin) * stride, view.row_bytes);
      group.stamp[slots[i] % 4] = stamp_of(steps[i]);
      group.count[slots[i] % 4] = static_cast<uint16_t>(counts[i]);
    }
    finish_stream_copies();
  });
}

size_t read_missing(const MissingLists& lists, Cold policy, size_t width, float* out, int64_t* places, int64_t* keys,
                    uint32_t* late) {
  const size_t features = lists.tables.size();
  std::vector<size_t> begins(features + 1, 0);
  for (size_t f = 0; f < features; ++f) begins[f + 1] = begins[f] + static_cast<size_t>(lists.counts[f]);
  struct Piece {
    size_t feature, from, to;  // of the feature's list
  };
  std::vector<Piece> pieces;
  for (size_t f = 0; f < features; ++f)
    for (size_t at = 0, count = begins[f + 1] - begins[f]; at < count; at += kMissingPerTask)
      pieces.push_back({f, at, std::min(count, at + kMissingPerTask)});
  auto work = [&](int p) {
    const auto [f, from, to] = pieces[p];
    const Table& table = *lists.tables[f];
    const int32_t* examples = lists.examples + f * lists.room;
    std::array<uint8_t, kMissingPerTask> waits{};
    const size_t some = table.read_warm(lists.keys + f * lists.room + from, nullptr, to - from, policy,
                                        out + (begins[f] + from) * static_cast<size_t>(table.dim()), waits.data());
    for (size_t i = from; i < to; ++i) {
      keys[begins[f] + i] = lists.keys[f * lists.room + i];
      places[begins[f] + i] = static_cast<int64_t>(examples[i] * width + static_cast<size_t>(lists.columns[f]));
      if (some && waits[i - from]) std::atomic_ref(late[examples[i]]).fetch_add(1, std::memory_order_relaxed);
    }
  };
  if (begins[features] <= kFewRows)  // waking the others takes longer
    for (size_t p = 0; p < pieces.size(); ++p) work(static_cast<int>(p));
  else
    Pool::shared().run(static_cast<int>(pieces.size()), work);
  return begins[features];
}

void Table::unhold(const uint32_t* slots, size_t count) {
  if (!tier_ || !tier_->evicts()) return;
  std::lock_guard lock(writer_);
  for (size_t i = 0; i < count; ++i)
    if (slots[i] != kNoSlot) tier_->unpin(&slots[i], 1);
}

void Table::alive(const uint32_t* slots, size_t count, bool* alive) const {
  for (size_t i = 0; i < count; ++i) alive[i] = view_.headers[slots[i] / 4].stamp[slots[i] % 4] != 0;
}

}  // namespace hotrow
