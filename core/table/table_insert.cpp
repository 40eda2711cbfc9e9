// Inserts rows into DRAM: a key without a slot gets one, filled with the initial row, assigned values or a record from
// SSD.
#include <algorithm>
#include <array>
#include <cstring>

#include "index/unique_keys.h"
#include "memory/racing_store.h"
#include "table/key_chunks.h"
#include "table/table.h"

namespace hotrow {
namespace {

constexpr size_t kAhead = 16;
constexpr size_t kBulkPart = 16384, kLeastPart = 256;  // keys

// How many slots a shard with this many rows takes at a time. Few, because on average half a block per shard is unused.
uint32_t block_size(uint32_t rows) { return rows < 128 ? 4 : 8; }

// Prefetches the index line that a key's entry will go to. Inlined, because GCC drops calls of functions that only
// prefetch.
inline __attribute__((always_inline)) void prefetch_line(const std::vector<ShardIndex>& shards, uint64_t hash) {
  const ShardIndex& index = shards[shard_of(hash)];
  if (index.lines)
    __builtin_prefetch(index.entries + size_t{ShardIndex::line_of(hash, index.lines)} * kEntriesPerLine, 1);
}

// Prefetches the slot that its row will go to.
inline __attribute__((always_inline)) void prefetch_slot(const RowView& view, uint32_t slot) {
  const char* row = view.rows + size_t{slot} * view.row_bytes;
  __builtin_prefetch(row, 1);
  __builtin_prefetch(row + view.row_bytes - 1, 1);
  __builtin_prefetch(&view.headers[slot / 4].key[slot % 4], 1);
}

// Scratch memory of a bulk call, kept per thread: allocating it for every call would cost as much as creating the rows.
struct Scratch {
  UniqueKeys unique_keys;
  std::vector<uint32_t> slots;

  static Scratch& of_keys(const int64_t* keys, size_t count) {
    static thread_local Scratch scratch;
    scratch.unique_keys.build({{keys, count}});
    scratch.slots.resize(scratch.unique_keys.size());
    return scratch;
  }
};

}  // namespace

Table::InsertPlan Table::plan_insert(const uint64_t* hashes, const uint32_t* slots, const std::vector<size_t>& cuts,
                                     const FetchedRows* fetched, const Admission::Decision* decisions) {
  InsertPlan inserts;
  inserts.more.assign(kShards, 0);
  std::vector<uint32_t> arrived;
  if (fetched && !fetched->unique.empty()) {
    arrived.assign(cuts.back(), kFresh);
    for (uint32_t n = 0; n < fetched->unique.size(); ++n) arrived[fetched->unique[n]] = n;
  }
  const int ranges = static_cast<int>(cuts.size()) - 1;
  inserts.cuts.assign(cuts.size(), 0);
  ThreadPool::shared().run(ranges, [&](int range) {
    inserts.cuts[range + 1] = std::count(slots + cuts[range], slots + cuts[range + 1], kNoSlot);
  });
  for (int range = 0; range < ranges; ++range) inserts.cuts[range + 1] += inserts.cuts[range];
  if (inserts.cuts.back() == 0) return inserts;
  inserts.at.resize(inserts.cuts.back());
  if (!arrived.empty() || decisions) inserts.from.resize(inserts.at.size());
  ThreadPool::shared().run(ranges, [&](int range) {
    size_t n = inserts.cuts[range];
    for (size_t i = cuts[range]; i < cuts[range + 1]; ++i) {
      if (slots[i] != kNoSlot) continue;
      uint32_t from = arrived.empty() ? kFresh : arrived[i];
      if (from == kFresh && decisions && decisions[i] == Admission::Decision::kReject) from = kRejected;
      if (!inserts.from.empty()) inserts.from[n] = from;
      inserts.at[n++] = static_cast<uint32_t>(i);
      inserts.more[shard_of(hashes[i])] += from != kRejected;
    }
  });

  if (tier_ && tier_->evicts()) {
    tier_->ensure_free_slots(inserts.at.size());
    promised_slots_ = inserts.at.size();
  }
  plan_slots(inserts, hashes);
  const uint64_t slots_after = inserts.slots_after;
  if (slots_after >= kNoSlot - kFirstSlotCode)
    throw BudgetExceeded("table '" + options_.name + "' would pass 4 billion rows in one process; use more ranks");
  size_t rebuilds = 0;
  size_t growth = 0;  // lines of the index; during a rebuild the old and the new array exist together
  for (uint32_t shard = 0; shard < kShards; ++shard)
    if (uint32_t more = inserts.more[shard]; more && ShardWriter::full(shards_[shard], more, slots_after)) {
      growth += lines_for(shard, uint64_t{shards_[shard].rows} + more);
      ++rebuilds;
    }
  inserts.index_lines = growth;
  const size_t row_bytes = slots_after * view_.row_bytes, header_bytes = (slots_after + 3) / 4 * sizeof(HeaderGroup);
  if (row_bytes > rows_.reserved() || header_bytes > headers_.reserved() ||
      index_memory_.address_space_used() + growth * kLine > index_memory_.reserved())
    throw BudgetExceeded("table '" + options_.name + "' exceeds its reserved address space; use fewer tables in one " +
                         "process, or more ranks");
  const size_t index_bytes = index_memory_.resident() + growth * kLine + rebuilds * kPage;
  size_t need = rows_.rounded(row_bytes) + headers_.rounded(header_bytes) + index_bytes;
  if (admission_) need += admission_->bytes();
  need += changes_.bytes();
  if (tier_)
    need = tier_->evicts()
               ? index_bytes + changes_.bytes() + tier_->memory_bytes()
               : need + tier_->memory_bytes() + (slots_after - slots_) * SlotState::kBytes + (size_t{3} << 16);
  if (need > charged_) {
    if (tier_ && tier_->evicts())
      budget_->charge(need - charged_);  // small; restore_free_reserve() evicts rows for it
    else if (!budget_->try_charge(need - charged_))
      throw_budget_exceeded(inserts.at.size(), need - charged_);
    charged_ = need;
  }
  return inserts;
}

// Plans which slots beyond slots_ the new keys will take: the next ones of their shard's block, or a new block.
void Table::plan_slots(InsertPlan& inserts, const uint64_t* hashes) const {
  inserts.slots_after = slots_;
  if (inserts.at.size() <= free_.size()) return;
  const int ranges = static_cast<int>(inserts.cuts.size()) - 1;
  std::vector<uint32_t> left(kShards);  // of each shard's block
  for (uint32_t shard = 0; shard < kShards; ++shard) left[shard] = blocks_[shard].end - blocks_[shard].next;
  inserts.first.assign(ranges + 1, 0);
  ThreadPool::shared().run(ranges, [&](int range) {
    uint64_t more = 0;
    for (size_t n = std::max(inserts.cuts[range], free_.size()); n < inserts.cuts[range + 1]; ++n) {
      const uint32_t shard = shard_of(hashes[inserts.at[n]]);
      if (left[shard] == 0) more += left[shard] = block_size(shards_[shard].rows);
      --left[shard];
    }
    inserts.first[range + 1] = more;
  });
  inserts.first[0] = slots_;
  for (int range = 0; range < ranges; ++range) inserts.first[range + 1] += inserts.first[range];
  inserts.slots_after = inserts.first.back();
}

// Takes slots for the new keys: freed slots first, then as planned. Ranges share no shard, so they run in parallel.
void Table::take_slots(const InsertPlan& inserts, const uint64_t* hashes, uint32_t* slots) {
  const size_t freed = std::min(free_.size(), inserts.at.size());
  for (size_t n = 0; n < freed; ++n) {
    slots[inserts.at[n]] = free_.back();
    free_.pop_back();
  }
  if (freed == inserts.at.size()) return;
  ThreadPool::shared().run(static_cast<int>(inserts.cuts.size()) - 1, [&](int range) {
    auto next = static_cast<uint32_t>(inserts.first[range]);
    for (size_t n = std::max(inserts.cuts[range], freed); n < inserts.cuts[range + 1]; ++n) {
      const uint32_t shard = shard_of(hashes[inserts.at[n]]);
      SlotBlock& block = blocks_[shard];
      if (block.next == block.end) {
        block.next = next;
        block.end = next += block_size(shards_[shard].rows);
      }
      slots[inserts.at[n]] = block.next++;
    }
  });
  __atomic_store_n(&slots_, inserts.slots_after, __ATOMIC_RELAXED);
}

void Table::reserve_memory(const InsertPlan& inserts) {
  if (inserts.at.empty()) return;
  rows_.commit(inserts.slots_after * view_.row_bytes);
  headers_.commit((inserts.slots_after + 3) / 4 * sizeof(HeaderGroup));
  index_memory_.reserve(inserts.index_lines);
  if (tier_) tier_->slot_state().commit(inserts.slots_after);
}

void Table::insert(InsertPlan inserts, const int64_t* keys, const uint64_t* hashes, uint32_t* slots,
                   const FetchedRows* fetched) {
  if (inserts.at.empty()) return;
  const size_t record_bytes = view_.row_bytes + sizeof(RecordHead);
  take_slots(inserts, hashes, slots);
  ThreadPool::shared().run(static_cast<int>(inserts.cuts.size()) - 1, [&](int range) {
    for (size_t n = inserts.cuts[range], end = inserts.cuts[range + 1]; n < end; ++n) {
      if (n + kAhead < end) {
        const uint32_t ahead = inserts.at[n + kAhead];
        prefetch_line(shards_, hashes[ahead]);
        prefetch_slot(view_, slots[ahead]);
      }
      const uint32_t i = inserts.at[n], slot = slots[i], lane = slot % 4;
      const uint32_t shard = shard_of(hashes[i]), from = inserts.from.empty() ? kFresh : inserts.from[n];
      char* row = view_.rows + size_t{slot} * view_.row_bytes;
      HeaderGroup& group = view_.headers[slot / 4];
      __atomic_store_n(&group.key[lane], keys[i], __ATOMIC_RELAXED);
      if (from >= kRejected) {
        store_initial(keys[i], row);
        if (assigned_) store_row(row, assigned_->of(i), assigned_->floats);
        group.stamp[lane] = from == kFresh ? stamp_of(expiry_.min_unexpired_step(shard)) : 0;
        group.count[lane] = 0;
        if (tier_) tier_->slot_state().reset(slot, from == kFresh ? tier_->epoch() : kClean, kNoAddress);
        if (from == kRejected) continue;
      } else {
        RecordHead head;
        const char* record = fetched->records.data() + from * record_bytes;
        std::memcpy(&head, record, sizeof(head));
        store_words(row, record + sizeof(head), width_ * sizeof(float));
        group.stamp[lane] = head.stamp;
        group.count[lane] = head.count;
        tier_->slot_state().reset(slot, kClean, fetched->places[from]);
      }
      ShardIndex& index = shards_[shard];
      ShardWriteScope guard(index);
      ShardWriter writer(index, view_.headers, index_memory_);
      uint32_t& more = inserts.more[shard];
      if (ShardWriter::full(index, more, slots_))
        writer.rebuild(lines_for(shard, uint64_t{index.rows} + more), slot_bits_for(slots_));
      --more;
      writer.insert(hashes[i], slot);
      if (from < kRejected) tier_->index().erase(hashes[i], fetched->places[from]);
    }
  });
  const size_t created =
      inserts.from.empty() ? inserts.at.size() : std::count(inserts.from.begin(), inserts.from.end(), kFresh);
  __atomic_store_n(&live_, live_ + created, __ATOMIC_RELAXED);
  if (changes_.on())
    for (size_t n = 0; n < inserts.at.size(); ++n) {
      const uint32_t i = inserts.at[n];
      changes_.slot_reused(slots[i]);
      if (inserts.from.empty() || inserts.from[n] == kFresh) changes_.mark_changed(slots[i], keys[i]);
    }
  recharge_budget();
}

// Requires: the write mutex. If it throws, the table is unchanged.
void Table::create(const UniqueKeys& unique_keys, uint32_t* slots) {
  const size_t missing = find_unique(unique_keys, slots);
  FetchedRows fetched;
  try {
    if (tier_ && tier_->evicts() && missing) {
      // Pins the found rows, so that ensure_free_slots does not evict them.
      tier_->pin_found(slots, unique_keys.size());
      try {
        tier_->fetch(unique_keys, slots, fetched);
        tier_->ensure_free_slots(missing);
      } catch (...) {
        tier_->unpin_found(slots, unique_keys.size());
        throw;
      }
      tier_->unpin_found(slots, unique_keys.size());
    }
    InsertPlan inserts = plan_insert(unique_keys.hashes(), slots, unique_keys.cuts(), &fetched);
    reserve_memory(inserts);
    insert(std::move(inserts), unique_keys.keys(), unique_keys.hashes(), slots, &fetched);
  } catch (...) {
    recharge_budget();
    throw;
  }
}

// A table over SSD inserts many keys in parts: they may not fit into DRAM at once.
size_t Table::bulk_part() const {
  if (!budget_->limit()) return kBulkPart;
  return std::clamp(budget_->limit() / 4 / (view_.row_bytes + kHeaderBytes), kLeastPart, kBulkPart);
}

void Table::find_or_create(const int64_t* keys, size_t count, uint32_t* slots) {
  require_trainable("a lookup cannot create its rows");
  create_in_parts(keys, count, slots);
}

void Table::create_in_parts(const int64_t* keys, size_t count, uint32_t* slots) {
  const size_t part = tier_ && tier_->evicts() ? bulk_part() : std::max<size_t>(count, 1);
  for (size_t at = 0; at < count; at += part)
    create_some(keys + at, std::min(part, count - at), slots ? slots + at : nullptr);
}

void Table::create_some(const int64_t* keys, size_t count, uint32_t* slots) {
  auto& [unique_keys, unique] = Scratch::of_keys(keys, count);
  std::lock_guard lock(write_mutex_);
  create(unique_keys, unique.data());
  if (slots)
    for_chunks(count, [&, unique = unique.data()](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) slots[i] = unique[unique_keys.inverse()[i]];
    });
  if (tier_ && tier_->evicts()) tier_->restore_free_reserve();
}

void Table::assign(const int64_t* keys, size_t count, const float* rows, int row_floats, const uint64_t* counts,
                   const uint32_t* last_steps) {
  if (const size_t part = bulk_part(); tier_ && tier_->evicts() && count > part) {
    if (Scratch::of_keys(keys, count).unique_keys.size() != count)
      throw std::invalid_argument("assign: duplicate keys; give each key once");
    for (size_t at = 0; at < count; at += part)
      assign(keys + at, std::min(part, count - at), rows + at * row_floats, row_floats, counts ? counts + at : nullptr,
             last_steps ? last_steps + at : nullptr);
    return;
  }
  auto& [unique_keys, slots] = Scratch::of_keys(keys, count);
  if (unique_keys.size() != count)
    throw std::invalid_argument("assign: " + std::to_string(count - unique_keys.size()) +
                                " duplicate keys; give each key once");
  std::lock_guard lock(write_mutex_);
  // Raised before and after, so that a copy that was made meanwhile is known to be old.
  assign_epoch_.fetch_add(1, std::memory_order_acq_rel);
  const AssignedRows assigned{unique_keys, rows, row_floats};
  assigned_ = &assigned;
  try {
    create(unique_keys, slots.data());
  } catch (...) {
    assigned_ = nullptr;
    throw;
  }
  assigned_ = nullptr;
  if (tier_) tier_->mark_dirty(slots.data(), slots.size());
  track_changed(slots.data(), slots.size());
  const auto& cuts = unique_keys.cuts();
  ThreadPool::shared().run(static_cast<int>(cuts.size()) - 1, [&](int range) {
    for (size_t u = cuts[range]; u < cuts[range + 1]; ++u) {
      const uint32_t from = unique_keys.run()[unique_keys.run_begin()[u]], slot = slots[u], lane = slot % 4;
      ShardWriteScope guard(shards_[shard_of(unique_keys.hashes()[u])]);
      store_row(view_.rows + size_t{slot} * view_.row_bytes, rows + size_t{from} * row_floats, row_floats);
      HeaderGroup& group = view_.headers[slot / 4];
      if (counts) {
        group.count[lane] =
            add_count(0, counts[from], [&] { return draw(count_stream_, unique_keys.keys()[u], 0, 0)[0]; });
      }
      const uint32_t step = last_steps ? last_steps[from] : step_of(group.stamp[lane]);
      group.stamp[lane] = stamp_of(std::max(step, expiry_.min_unexpired_step(shard_of(unique_keys.hashes()[u]))));
    }
  });
  assign_epoch_.fetch_add(1, std::memory_order_acq_rel);
}

}  // namespace hotrow
