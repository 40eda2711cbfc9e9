// Reads rows by key, for evaluation and serving. Creates nothing, counts nothing and takes no lock.
//
// Keys are looked up in DRAM first. A key without a slot there goes to the SSD tier, which looks into both indexes at
// one version of the key's shard, because the row may be moving between them. A row that is only on SSD is read from
// there, or answered by a policy without waiting. In a read-only table a read raises the row's heat, so that requested
// rows stay in DRAM; in a trained table only batches raise it.
#include <algorithm>
#include <array>
#include <atomic>
#include <stdexcept>

#include "table/key_chunks.h"
#include "table/table.h"

namespace hotrow {

void Table::read(const int64_t* keys, const uint64_t* hashes, size_t count, float* out, bool* found) const {
  for_hashed_chunks(keys, hashes, count, [&](size_t begin, size_t end, const uint64_t* chunk_hashes) {
    read_chunk(keys + begin, chunk_hashes, end - begin, ColdReadPolicy::kWait, out + begin * options_.dim,
               found ? found + begin : nullptr, nullptr);
  });
}

size_t Table::read_without_io(const int64_t* keys, const uint64_t* hashes, size_t count, ColdReadPolicy policy,
                              float* out, uint8_t* late) const {
  std::atomic<size_t> total{0};
  for_hashed_chunks(keys, hashes, count, [&](size_t begin, size_t end, const uint64_t* chunk_hashes) {
    const size_t some =
        read_chunk(keys + begin, chunk_hashes, end - begin, policy, out + begin * options_.dim, nullptr, late + begin);
    if (some) total.fetch_add(some, std::memory_order_relaxed);
  });
  return total;
}

// At most kChunk keys. Returns how many were answered by the policy.
size_t Table::read_chunk(const int64_t* keys, const uint64_t* hashes, size_t count, ColdReadPolicy policy, float* out,
                         bool* found, uint8_t* late) const {
  std::array<uint32_t, kChunk> slots;
  const bool evicts = tier_ && tier_->evicts();
  kernels().read({{view_, keys, hashes, count, slots.data()}, options_.dim, out, options_.type});
  std::vector<uint32_t> absent;
  for (size_t i = 0; i < count; ++i) {
    const bool here = slots[i] != kNoSlot;
    if (found) found[i] = here;
    if (here && evicts && options_.frozen) tier_->slot_state().warm_concurrently(slots[i]);
    if (here) continue;
    if (evicts)
      absent.push_back(static_cast<uint32_t>(i));
    else
      write_initial_values(keys[i], out + i * options_.dim);
  }
  if (absent.empty()) return 0;
  if (policy != ColdReadPolicy::kWait) return tier_->read_without_io(keys, hashes, absent, policy, out, late);
  tier_->read(keys, hashes, absent, out, found);
  return 0;
}

void Table::read_from_dram(const int64_t* keys, const uint64_t* hashes, size_t count, float* out,
                           uint32_t* slots) const {
  for_hashed_chunks(keys, hashes, count, [&](size_t begin, size_t end, const uint64_t* chunk_hashes) {
    kernels().read({{view_, keys + begin, chunk_hashes, end - begin, slots + begin},
                    options_.dim,
                    out + begin * options_.dim,
                    options_.type});
  });
}

void Table::read_encoded(const int64_t* keys, size_t count, uint32_t* out, bool* found) const {
  if (!options_.frozen)
    throw std::logic_error("read_encoded: only read-only tables; trained rows are staged through a Plan");
  for_hashed_chunks(keys, nullptr, count, [&](size_t begin, size_t end, const uint64_t* hashes) {
    std::array<uint32_t, kChunk> slots;
    auto* words = reinterpret_cast<float*>(out + begin * width_);  // copied as 4-byte words, whatever the row type
    kernels().read({{view_, keys + begin, hashes, end - begin, slots.data()}, width_, words, RowType::kFloat});
    for (size_t i = begin; i < end; ++i) {
      found[i] = slots[i - begin] != kNoSlot;
      if (found[i] && tier_ && tier_->evicts()) tier_->slot_state().warm_concurrently(slots[i - begin]);
    }
  });
}

size_t Table::on_ssd(const int64_t* keys, size_t count, bool* flags) const {
  if (!tier_ || !tier_->evicts()) {
    if (flags) std::fill_n(flags, count, false);
    return 0;
  }
  std::atomic<size_t> total{0};
  for_hashed_chunks(keys, nullptr, count, [&](size_t begin, size_t end, const uint64_t* hashes) {
    std::array<uint32_t, kChunk> slots;
    size_t some = 0;
    const bool all = kernels().find({view_, keys + begin, hashes, end - begin, slots.data()}) == 0;
    if (flags) std::fill(flags + begin, flags + end, false);
    for (size_t i = begin; i < end && !all; ++i) {
      if (slots[i - begin] != kNoSlot || !tier_->may_hold(hashes[i - begin])) continue;
      if (flags) flags[i] = true;
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
