#include "device/miss_lists.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "threads/thread_pool.h"

namespace hotrow {
namespace {

constexpr size_t kMissesPerTask = 128;  // a request waits for them
constexpr size_t kFewRows = 256;

}  // namespace

size_t read_misses(const MissLists& lists, ColdReadPolicy policy, size_t width, float* out, int64_t* places,
                   int64_t* keys, uint32_t* late) {
  const size_t features = lists.tables.size();
  std::vector<size_t> begins(features + 1, 0);
  for (size_t f = 0; f < features; ++f) begins[f + 1] = begins[f] + static_cast<size_t>(lists.counts[f]);
  struct Piece {
    size_t feature, from, to;  // of the feature's list
  };
  std::vector<Piece> pieces;
  for (size_t f = 0; f < features; ++f)
    for (size_t at = 0, count = begins[f + 1] - begins[f]; at < count; at += kMissesPerTask)
      pieces.push_back({f, at, std::min(count, at + kMissesPerTask)});
  auto work = [&](int p) {
    const auto [f, from, to] = pieces[p];
    const Table& table = *lists.tables[f];
    const size_t start = lists.starts ? static_cast<size_t>(lists.starts[f]) : f * lists.capacity;
    const int32_t* examples = lists.examples + start;
    std::array<uint8_t, kMissesPerTask> waits{};
    const size_t some =
        table.read_without_io(lists.keys + start + from, nullptr, to - from, policy,
                              out + (begins[f] + from) * static_cast<size_t>(table.dim()), waits.data());
    for (size_t i = from; i < to; ++i) {
      keys[begins[f] + i] = lists.keys[start + i];
      places[begins[f] + i] = static_cast<int64_t>(examples[i] * width + static_cast<size_t>(lists.columns[f]));
      if (some && waits[i - from]) std::atomic_ref(late[examples[i]]).fetch_add(1, std::memory_order_relaxed);
    }
  };
  if (begins[features] <= kFewRows)  // waking other threads takes longer
    for (size_t p = 0; p < pieces.size(); ++p) work(static_cast<int>(p));
  else
    ThreadPool::shared().run(static_cast<int>(pieces.size()), work);
  return begins[features];
}

}  // namespace hotrow
