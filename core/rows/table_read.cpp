// Reading rows by key, for evaluation and serving: nothing is created, counted or locked.
//
// Keys are looked for in DRAM; those without a slot there go to the tier, which looks at both indexes in one version of
// their shard, because a row may just be on its way from one to the other. What is on SSD alone is read from there, or
// answered by a policy at once. In a frozen table a row that is read gets warmer, so that what is asked for stays in
// DRAM; a table that is trained leaves that to its batches.
#include <algorithm>
#include <array>
#include <atomic>
#include <stdexcept>

#include "rows/table.h"
#include "threads/pool.h"

namespace hotrow {
namespace {

constexpr size_t kChunk = 4096;  // keys of one task

// Calls fn(begin, end, hashes of those keys) over [0, count) in fixed chunks.
template <class Fn>
void for_chunks(const int64_t* keys, const uint64_t* hashes, size_t count, Fn fn) {
  Pool::shared().run(static_cast<int>((count + kChunk - 1) / kChunk), [&](int task) {
    const size_t begin = task * kChunk, end = std::min(count, begin + kChunk);
    if (hashes) return fn(begin, end, hashes + begin);
    std::array<uint64_t, kChunk> own;
    for (size_t i = begin; i < end; ++i) own[i - begin] = hash_key(keys[i]);
    fn(begin, end, own.data());
  });
}

}  // namespace

void Table::read(const int64_t* keys, const uint64_t* hashes, size_t count, float* out, bool* found) const {
  for_chunks(keys, hashes, count, [&](size_t begin, size_t end, const uint64_t* chunk_hashes) {
    read_chunk(keys + begin, chunk_hashes, end - begin, Cold::kWait, out + begin * options_.dim,
               found ? found + begin : nullptr, nullptr);
  });
}

size_t Table::read_warm(const int64_t* keys, const uint64_t* hashes, size_t count, Cold policy, float* out,
                        uint8_t* late) const {
  std::atomic<size_t> total{0};
  for_chunks(keys, hashes, count, [&](size_t begin, size_t end, const uint64_t* chunk_hashes) {
    const size_t some =
        read_chunk(keys + begin, chunk_hashes, end - begin, policy, out + begin * options_.dim, nullptr, late + begin);
    if (some) total.fetch_add(some, std::memory_order_relaxed);
  });
  return total;
}

// At most kChunk keys. Returns how many were answered by the policy.
size_t Table::read_chunk(const int64_t* keys, const uint64_t* hashes, size_t count, Cold policy, float* out,
                         bool* found, uint8_t* late) const {
  std::array<uint32_t, kChunk> slots;
  const bool evicts = tier_ && tier_->evicts();
  kernels().read({{view_, keys, hashes, count, slots.data()}, options_.dim, out, options_.type});
  std::vector<uint32_t> absent;
  for (size_t i = 0; i < count; ++i) {
    const bool here = slots[i] != kNoSlot;
    if (found) found[i] = here;
    if (here && evicts && options_.frozen) tier_->marks().warm_beside(slots[i]);
    if (here) continue;
    if (evicts)
      absent.push_back(static_cast<uint32_t>(i));
    else
      write_initial_values(keys[i], out + i * options_.dim);
  }
  if (absent.empty()) return 0;
  if (policy != Cold::kWait) return tier_->answer(keys, hashes, absent, policy, out, late);
  tier_->read(keys, hashes, absent, out, found);
  return 0;
}

void Table::read_raw(const int64_t* keys, size_t count, uint32_t* out, bool* found) const {
  if (!options_.frozen) throw std::logic_error("read_raw: rows that are trained have their own way to a GPU");
  for_chunks(keys, nullptr, count, [&](size_t begin, size_t end, const uint64_t* hashes) {
    std::array<uint32_t, kChunk> slots;
    auto* words = reinterpret_cast<float*>(out + begin * width_);  // copied as words, whatever they are
    kernels().read({{view_, keys + begin, hashes, end - begin, slots.data()}, width_, words, RowType::kFloat});
    for (size_t i = begin; i < end; ++i) {
      found[i] = slots[i - begin] != kNoSlot;
      if (found[i] && tier_ && tier_->evicts()) tier_->marks().warm_beside(slots[i - begin]);
    }
  });
}

size_t Table::cold(const int64_t* keys, size_t count, bool* cold) const {
  if (!tier_ || !tier_->evicts()) {
    if (cold) std::fill_n(cold, count, false);
    return 0;
  }
  std::atomic<size_t> total{0};
  for_chunks(keys, nullptr, count, [&](size_t begin, size_t end, const uint64_t* hashes) {
    std::array<uint32_t, kChunk> slots;
    size_t some = 0;
    const bool all = kernels().find({view_, keys + begin, hashes, end - begin, slots.data()}) == 0;
    if (cold) std::fill(cold + begin, cold + end, false);
    for (size_t i = begin; i < end && !all; ++i) {
      if (slots[i - begin] != kNoSlot || !tier_->holds_any(hashes[i - begin])) continue;
      if (cold) cold[i] = true;
      ++some;
    }
    if (some) total.fetch_add(some, std::memory_order_relaxed);
  });
  return total;
}

void Table::set_default_row(std::vector<float> row) {
  if (row.size() != static_cast<size_t>(options_.dim))
    throw std::invalid_argument("table '" + options_.name + "' has dim " + std::to_string(options_.dim) +
                                " but its default row has " + std::to_string(row.size()) + " values");
  default_row_ = std::move(row);
}

}  // namespace hotrow
