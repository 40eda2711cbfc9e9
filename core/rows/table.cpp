#include "rows/table.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "rows/grouping.h"
#include "rows/housekeeper.h"
#include "threads/pool.h"

namespace hotrow {
namespace {

constexpr size_t kChunk = 4096;  // keys of one task of a bulk read
constexpr size_t kHeaderBytes = sizeof(HeaderGroup) / 4;
constexpr size_t kIndexBytes = 5, kIndexGrowth = 8;  // bytes a row, and how much more address space its growth spends

int row_width(const TableOptions& options) {
  if (options.type == RowType::kByte && !options.frozen)
    throw std::invalid_argument("rows of type int8 can only be read");
  if (options.frozen && !options.state.empty()) throw std::invalid_argument("rows that are only read have no state");
  int width = words_of(options.type, options.dim);
  for (const StatePart& part : options.state) width += part.width;
  return width;
}

// Rows of one table that could ever fit into this machine's memory.
size_t most_rows(const TableOptions& options) {
  return machine_memory() / (row_width(options) * sizeof(float) + kHeaderBytes) + (size_t{1} << 20);
}

uint64_t table_id(const std::string& name) { return hash_bytes(name.data(), name.size(), 0); }

std::string readable(size_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof(text), unit ? "%.1f%s" : "%.0f%s", value, units[unit]);
  return text;
}

// Stores of row values that a racing reader may load: plain, except for the thread sanitizer.
void store_values(char* to, const float* from, size_t count) {
#if defined(__SANITIZE_THREAD__)
  for (size_t i = 0; i < count; ++i) {
    uint32_t word;
    std::memcpy(&word, from + i, sizeof(word));
    __atomic_store_n(reinterpret_cast<uint32_t*>(to) + i, word, __ATOMIC_RELAXED);
  }
#else
  std::memcpy(to, from, count * sizeof(float));
#endif
}

constexpr size_t kAhead = 16;
constexpr size_t kBulkPart = 16384, kLeastPart = 256;  // keys

// Slots that a shard of this many rows takes at a time. Small, because on average half a block per shard is unused.
uint32_t block_size(uint32_t rows) { return rows < 128 ? 4 : 8; }

// Asks for the index line that a key's entry will go to. Inlined, because GCC drops calls of functions that only
// prefetch.
inline __attribute__((always_inline)) void prefetch_line(const std::vector<ShardIndex>& shards, uint64_t hash) {
  const ShardIndex& index = shards[shard_of(hash)];
  if (index.lines)
    __builtin_prefetch(index.entries + size_t{ShardIndex::line_of(hash, index.lines)} * kEntriesPerLine, 1);
}

// The same for the slot that its row will go to.
inline __attribute__((always_inline)) void prefetch_slot(const RowView& view, uint32_t slot) {
  const char* row = view.rows + size_t{slot} * view.row_bytes;
  __builtin_prefetch(row, 1);
  __builtin_prefetch(row + view.row_bytes - 1, 1);
  __builtin_prefetch(&view.headers[slot / 4].key[slot % 4], 1);
}

// Scratch of a bulk call. Kept by the thread: fresh memory for every call would cost as much as the rows it creates.
struct Scratch {
  Grouping grouping;
  std::vector<uint32_t> slots;

  static Scratch& of_keys(const int64_t* keys, size_t count) {
    static thread_local Scratch scratch;
    scratch.grouping.build({{keys, count}});
    scratch.slots.resize(scratch.grouping.size());
    return scratch;
  }
};

// Runs fn(begin, end) over [0, count) in fixed chunks.
template <class Fn>
void for_chunks(size_t count, Fn fn) {
  Pool::shared().run(static_cast<int>((count + kChunk - 1) / kChunk),
                     [&](int task) { fn(task * kChunk, std::min(count, (task + size_t{1}) * kChunk)); });
}

}  // namespace

Table::Table(TableOptions options, std::shared_ptr<Budget> budget)
    : options_(std::move(options)),
      width_(row_width(options_)),
      initial_stream_(stream_key(options_.seed, table_id(options_.name), Stream::kInitial)),
      count_stream_(stream_key(options_.seed, table_id(options_.name), Stream::kCount)),
      rounding_stream_(stream_key(options_.seed, table_id(options_.name), Stream::kRounding)),
      budget_(std::move(budget)),
      rows_(most_rows(options_) * width_ * sizeof(float)),
      headers_(most_rows(options_) * kHeaderBytes),
      index_memory_(most_rows(options_) * kIndexBytes * kIndexGrowth),
      shards_(kShards),
      view_{shards_.data(), reinterpret_cast<HeaderGroup*>(headers_.data()), rows_.data(),
            static_cast<size_t>(width_) * sizeof(float)},
      blocks_(kShards),
      default_row_(options_.dim) {}

Table::~Table() {
  Housekeeper::shared().leave(tier_.get());
  budget_->leave(this);
  budget_->give_back(charged_);
}

void Table::attach(std::unique_ptr<Log> log, bool evicts, bool drops) {
  std::unique_lock lock(writer_);
  if (tier_) throw std::logic_error("table '" + options_.name + "' has a log already");
  if (log->options().row_bytes != view_.row_bytes) throw std::logic_error("the log is for rows of another width");
  if (log->options().row_type != static_cast<uint32_t>(options_.type))
    throw std::logic_error("the log is for rows of another type");
  if (evicts && slots_ != 0) throw std::logic_error("an SSD tier is given to a table before its first row");
  auto tier = std::make_unique<ColdTier>(*this, std::move(log), evicts, drops);
  if (!evicts && slots_ != 0) {
    const size_t bytes = slots_ * SlotMarks::kBytes;
    if (!budget_->try_take(bytes)) refuse(0, bytes);
    budget_->give_back(bytes);
    tier->marks().commit(slots_);
    tier->mark_all_dirty();
  }
  tier_ = std::move(tier);
  if (evicts) {
    rows_.use_small_pages();
    headers_.use_small_pages();
    budget_->join(this);
  }
  settle();
  lock.unlock();  // the housekeeper takes a table's lock inside its own
  Housekeeper::shared().join(tier_.get());
}

size_t Table::reclaimable() const { return tier_ ? tier_->active_slabs() * tier_->slab_bytes() : 0; }

bool Table::give_back_some() {
  if (!tier_ || !tier_->evicts()) return false;
  const auto give = [&] { return tier_->release_slab() || tier_->trim(); };
  if (writer_.mine()) return give();
  if (!writer_.try_lock()) return false;
  std::lock_guard lock(writer_, std::adopt_lock);
  return give();
}

void Table::find(const int64_t* keys, size_t count, uint32_t* slots) const {
  for_chunks(count, [&](size_t begin, size_t end) {
    std::array<uint64_t, kChunk> hashes;
    for (size_t i = begin; i < end; ++i) hashes[i - begin] = hash_key(keys[i]);
    kernels().find({view_, keys + begin, hashes.data(), end - begin, slots + begin});
  });
}

void Table::read_slots(const uint32_t* slots, size_t count, float* rows, int64_t* keys, uint64_t* counts,
                       uint32_t* last_steps) const {
  for_chunks(count, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const HeaderGroup& group = view_.headers[slots[i] / 4];
      const uint32_t lane = slots[i] % 4;
      load_row(view_.rows + size_t{slots[i]} * view_.row_bytes, rows + i * floats());
      keys[i] = group.key[lane];
      counts[i] = decode_count(group.count[lane]);
      last_steps[i] = step_of(group.stamp[lane]);
    }
  });
}

void Table::write_initial_values(int64_t key, float* out) const {
  write_initial(options_.initial, initial_stream_, key, out, options_.dim);
  if (options_.drawn == RowType::kFloat) return;
  static thread_local std::vector<uint32_t> words;
  words.resize(words_of(options_.drawn, options_.dim));
  encode_row(options_.drawn, out, options_.dim, words.data());
  kernels().decode(options_.drawn, reinterpret_cast<const char*>(words.data()), options_.dim, out);
}

void Table::write_initial_row(int64_t key, float* row) const {
  write_initial_values(key, row);
  float* state = row + options_.dim;
  for (const StatePart& part : options_.state) state = std::fill_n(state, part.width, part.initial);
}

// Straight into the slot, except that the thread sanitizer is to see atomic stores.
void Table::store_initial(int64_t key, char* row) const {
#if !defined(__SANITIZE_THREAD__)
  if (options_.type == RowType::kFloat) return write_initial_row(key, reinterpret_cast<float*>(row));
#endif
  static thread_local std::vector<float> values;
  values.resize(floats());
  write_initial_row(key, values.data());
  store_row(row, values.data(), floats());
}

// The first `floats` of a row, in its type.
void Table::store_row(char* row, const float* values, int floats) const {
  if (options_.type == RowType::kFloat) return store_values(row, values, floats);
  static thread_local std::vector<uint32_t> words;
  words.resize(words_of(options_.type, options_.dim));
  encode_row(options_.type, values, options_.dim, words.data());
  store_values(row, reinterpret_cast<const float*>(words.data()), words.size());
  if (floats > options_.dim)
    store_values(row + words.size() * sizeof(float), values + options_.dim, floats - options_.dim);
}

// All floats() of a row that nobody changes.
void Table::load_row(const char* row, float* out) const {
  kernels().decode(options_.type, row, options_.dim, out);
  const size_t values = words_of(options_.type, options_.dim) * sizeof(float);
  std::memcpy(out + options_.dim, row + values, view_.row_bytes - values);
}

void Table::refuse_if_frozen(const char* what) const {
  if (options_.frozen)
    throw std::invalid_argument("table '" + options_.name + "' is only read (values=\"" + name_of(options_.type) +
                                "\"): " + what +
                                ". Read it in eval() mode or under torch.no_grad(); to train, make the table without "
                                "values= and load a checkpoint");
}

void Table::refuse(uint64_t rows, size_t bytes) const {
  throw BudgetExceeded("table '" + options_.name + "' needs " + readable(bytes) + " for " + std::to_string(rows) +
                       " new rows, but dram=" + readable(budget_->limit()) + " has " +
                       readable(budget_->limit() - std::min(budget_->limit(), budget_->used())) +
                       " left; nothing was changed. Raise dram=, or keep smaller rows (dim, optimizer state)");
}

Table::Fresh Table::prepare(const uint64_t* hashes, const uint32_t* slots, const std::vector<size_t>& cuts,
                            const Arrivals* arrivals, const Admission::Verdict* verdicts) {
  Fresh fresh;
  fresh.more.assign(kShards, 0);
  std::vector<uint32_t> arrived;
  if (arrivals && !arrivals->unique.empty()) {
    arrived.assign(cuts.back(), kFresh);
    for (uint32_t n = 0; n < arrivals->unique.size(); ++n) arrived[arrivals->unique[n]] = n;
  }
  const int ranges = static_cast<int>(cuts.size()) - 1;
  fresh.cuts.assign(cuts.size(), 0);
  Pool::shared().run(ranges, [&](int range) {
    fresh.cuts[range + 1] = std::count(slots + cuts[range], slots + cuts[range + 1], kNoSlot);
  });
  for (int range = 0; range < ranges; ++range) fresh.cuts[range + 1] += fresh.cuts[range];
  if (fresh.cuts.back() == 0) return fresh;
  fresh.at.resize(fresh.cuts.back());
  if (!arrived.empty() || verdicts) fresh.from.resize(fresh.at.size());
  Pool::shared().run(ranges, [&](int range) {
    size_t n = fresh.cuts[range];
    for (size_t i = cuts[range]; i < cuts[range + 1]; ++i) {
      if (slots[i] != kNoSlot) continue;
      uint32_t from = arrived.empty() ? kFresh : arrived[i];
      if (from == kFresh && verdicts && verdicts[i] == Admission::Verdict::kRefuse) from = kRefused;
      if (!fresh.from.empty()) fresh.from[n] = from;
      fresh.at[n++] = static_cast<uint32_t>(i);
      fresh.more[shard_of(hashes[i])] += from != kRefused;
    }
  });

  if (tier_ && tier_->evicts()) {
    tier_->make_room(fresh.at.size());
    promised_ = fresh.at.size();
  }
  plan_slots(fresh, hashes);
  const uint64_t slots_after = fresh.slots_after;
  if (slots_after >= kNoSlot - kFirstSlotCode)
    throw BudgetExceeded("table '" + options_.name + "' would pass 4 billion rows in one process; use more ranks");
  size_t rebuilds = 0;
  size_t growth = 0;  // lines of the index; an old array lives beside its successor for a moment
  for (uint32_t shard = 0; shard < kShards; ++shard)
    if (uint32_t more = fresh.more[shard]; more && ShardWriter::full(shards_[shard], more, slots_after)) {
      growth += lines_for(shard, uint64_t{shards_[shard].rows} + more);
      ++rebuilds;
    }
  fresh.index_lines = growth;
  const size_t row_bytes = slots_after * view_.row_bytes, header_bytes = (slots_after + 3) / 4 * sizeof(HeaderGroup);
  if (row_bytes > rows_.reserved() || header_bytes > headers_.reserved() ||
      index_memory_.spent() + growth * kLine > index_memory_.reserved())
    throw BudgetExceeded("table '" + options_.name + "' outgrows the address space it was given; use fewer tables in " +
                         "one process, or more ranks");
  const size_t index_bytes = index_memory_.resident() + growth * kLine + rebuilds * kPage;
  size_t need = rows_.rounded(row_bytes) + headers_.rounded(header_bytes) + index_bytes;
  if (admission_) need += admission_->bytes();
  need += changes_.bytes();
  if (tier_)
    need = tier_->evicts() ? index_bytes + changes_.bytes() + tier_->holds()
                           : need + tier_->holds() + (slots_after - slots_) * SlotMarks::kBytes + (size_t{3} << 16);
  if (need > charged_) {
    if (tier_ && tier_->evicts())
      budget_->take(need - charged_);  // small, and made up for by rebalance()
    else if (!budget_->try_take(need - charged_))
      refuse(fresh.at.size(), need - charged_);
    charged_ = need;
  }
  return fresh;
}

// Which slots beyond slots_ the fresh keys will take: the next of their shard's block, or of a new block.
void Table::plan_slots(Fresh& fresh, const uint64_t* hashes) const {
  fresh.slots_after = slots_;
  if (fresh.at.size() <= free_.size()) return;
  const int ranges = static_cast<int>(fresh.cuts.size()) - 1;
  std::vector<uint32_t> left(kShards);  // of each shard's block
  for (uint32_t shard = 0; shard < kShards; ++shard) left[shard] = blocks_[shard].end - blocks_[shard].next;
  fresh.first.assign(ranges + 1, 0);
  Pool::shared().run(ranges, [&](int range) {
    uint64_t more = 0;
    for (size_t n = std::max(fresh.cuts[range], free_.size()); n < fresh.cuts[range + 1]; ++n) {
      const uint32_t shard = shard_of(hashes[fresh.at[n]]);
      if (left[shard] == 0) more += left[shard] = block_size(shards_[shard].rows);
      --left[shard];
    }
    fresh.first[range + 1] = more;
  });
  fresh.first[0] = slots_;
  for (int range = 0; range < ranges; ++range) fresh.first[range + 1] += fresh.first[range];
  fresh.slots_after = fresh.first.back();
}

size_t Table::holds() const {
  size_t bytes = index_memory_.resident() + (admission_ ? admission_->bytes() : 0) + (tier_ ? tier_->holds() : 0);
  bytes += changes_.bytes();
  if (!tier_ || !tier_->evicts()) bytes += rows_.committed() + headers_.committed();
  return bytes;
}

// Slots for the fresh keys: freed ones for the first, then as planned. Ranges share no shard, so they need not wait.
void Table::take_slots(const Fresh& fresh, const uint64_t* hashes, uint32_t* slots) {
  const size_t freed = std::min(free_.size(), fresh.at.size());
  for (size_t n = 0; n < freed; ++n) {
    slots[fresh.at[n]] = free_.back();
    free_.pop_back();
  }
  if (freed == fresh.at.size()) return;
  Pool::shared().run(static_cast<int>(fresh.cuts.size()) - 1, [&](int range) {
    auto next = static_cast<uint32_t>(fresh.first[range]);
    for (size_t n = std::max(fresh.cuts[range], freed); n < fresh.cuts[range + 1]; ++n) {
      const uint32_t shard = shard_of(hashes[fresh.at[n]]);
      SlotBlock& block = blocks_[shard];
      if (block.next == block.end) {
        block.next = next;
        block.end = next += block_size(shards_[shard].rows);
      }
      slots[fresh.at[n]] = block.next++;
    }
  });
  __atomic_store_n(&slots_, fresh.slots_after, __ATOMIC_RELAXED);
}

void Table::commit(const Fresh& fresh) {
  if (fresh.at.empty()) return;
  rows_.commit(fresh.slots_after * view_.row_bytes);
  headers_.commit((fresh.slots_after + 3) / 4 * sizeof(HeaderGroup));
  index_memory_.reserve(fresh.index_lines);
  if (tier_) tier_->marks().commit(fresh.slots_after);
}

void Table::insert(Fresh fresh, const int64_t* keys, const uint64_t* hashes, uint32_t* slots,
                   const Arrivals* arrivals) {
  if (fresh.at.empty()) return;
  const size_t record_bytes = view_.row_bytes + sizeof(RecordHead);
  take_slots(fresh, hashes, slots);
  Pool::shared().run(static_cast<int>(fresh.cuts.size()) - 1, [&](int range) {
    for (size_t n = fresh.cuts[range], end = fresh.cuts[range + 1]; n < end; ++n) {
      if (n + kAhead < end) {
        const uint32_t ahead = fresh.at[n + kAhead];
        prefetch_line(shards_, hashes[ahead]);
        prefetch_slot(view_, slots[ahead]);
      }
      const uint32_t i = fresh.at[n], slot = slots[i], lane = slot % 4;
      const uint32_t shard = shard_of(hashes[i]), from = fresh.from.empty() ? kFresh : fresh.from[n];
      char* row = view_.rows + size_t{slot} * view_.row_bytes;
      HeaderGroup& group = view_.headers[slot / 4];
      __atomic_store_n(&group.key[lane], keys[i], __ATOMIC_RELAXED);
      if (from >= kRefused) {
        store_initial(keys[i], row);
        if (given_) store_row(row, given_->of(i), given_->floats);
        group.stamp[lane] = from == kFresh ? stamp_of(expiry_.oldest(shard)) : 0;
        group.count[lane] = 0;
        if (tier_) tier_->marks().reset(slot, from == kFresh ? tier_->epoch() : kClean, kNoPlace);
        if (from == kRefused) continue;
      } else {
        RecordHead head;
        const char* record = arrivals->records.data() + from * record_bytes;
        std::memcpy(&head, record, sizeof(head));
        store_values(row, reinterpret_cast<const float*>(record + sizeof(head)), width_);
        group.stamp[lane] = head.stamp;
        group.count[lane] = head.count;
        tier_->marks().reset(slot, kClean, arrivals->places[from]);
      }
      ShardIndex& index = shards_[shard];
      ShardGuard guard(index);
      ShardWriter writer(index, view_.headers, index_memory_);
      uint32_t& more = fresh.more[shard];
      if (ShardWriter::full(index, more, slots_))
        writer.rebuild(lines_for(shard, uint64_t{index.rows} + more), slot_bits_for(slots_));
      --more;
      writer.insert(hashes[i], slot);
      if (from < kRefused) tier_->cold().erase(hashes[i], arrivals->places[from]);
    }
  });
  const size_t created =
      fresh.from.empty() ? fresh.at.size() : std::count(fresh.from.begin(), fresh.from.end(), kFresh);
  __atomic_store_n(&live_, live_ + created, __ATOMIC_RELAXED);
  if (changes_.on())
    for (size_t n = 0; n < fresh.at.size(); ++n) {
      const uint32_t i = fresh.at[n];
      changes_.moved_in(slots[i]);
      if (fresh.from.empty() || fresh.from[n] == kFresh) changes_.note(slots[i], keys[i]);
    }
  settle();
}

void Table::settle() {
  const size_t now = holds();
  if (now < charged_) budget_->give_back(charged_ - now);
  if (now > charged_) budget_->take(now - charged_);
  charged_ = now;
  promised_ = 0;
  if (tier_) tier_->unclaim();
}

// Requires: the writer lock. A failure leaves the table as it was.
void Table::create(const Grouping& grouping, uint32_t* slots) {
  const size_t missing = find_unique(grouping, slots);
  Arrivals arrivals;
  try {
    if (tier_ && tier_->evicts() && missing) {
      // What make_room evicts must not be what was just found.
      tier_->pin_found(slots, grouping.size());
      try {
        tier_->fetch(grouping, slots, arrivals);
        tier_->make_room(missing);
      } catch (...) {
        tier_->unpin_found(slots, grouping.size());
        throw;
      }
      tier_->unpin_found(slots, grouping.size());
    }
    Fresh fresh = prepare(grouping.hashes(), slots, grouping.cuts(), &arrivals);
    commit(fresh);
    insert(std::move(fresh), grouping.keys(), grouping.hashes(), slots, &arrivals);
  } catch (...) {
    settle();
    throw;
  }
}

// A table over SSD takes many keys in parts: not all of them may fit into DRAM at once.
size_t Table::bulk_part() const {
  if (!budget_->limit()) return kBulkPart;
  return std::clamp(budget_->limit() / 4 / (view_.row_bytes + kHeaderBytes), kLeastPart, kBulkPart);
}

void Table::find_or_create(const int64_t* keys, size_t count, uint32_t* slots) {
  refuse_if_frozen("a row cannot be created by asking for it");
  create_in_parts(keys, count, slots);
}

void Table::create_in_parts(const int64_t* keys, size_t count, uint32_t* slots) {
  const size_t part = tier_ && tier_->evicts() ? bulk_part() : std::max<size_t>(count, 1);
  for (size_t at = 0; at < count; at += part)
    create_some(keys + at, std::min(part, count - at), slots ? slots + at : nullptr);
}

void Table::create_some(const int64_t* keys, size_t count, uint32_t* slots) {
  auto& [grouping, unique] = Scratch::of_keys(keys, count);
  std::lock_guard lock(writer_);
  create(grouping, unique.data());
  if (slots)
    for_chunks(count, [&, unique = unique.data()](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) slots[i] = unique[grouping.inverse()[i]];
    });
  if (tier_ && tier_->evicts()) tier_->rebalance();
}

size_t Table::find_unique(const Grouping& grouping, uint32_t* slots) const {
  std::atomic<size_t> missing{0};
  const auto& cuts = grouping.cuts();
  Pool::shared().run(static_cast<int>(cuts.size()) - 1, [&](int range) {
    missing += kernels().find({view_, grouping.keys() + cuts[range], grouping.hashes() + cuts[range],
                               cuts[range + 1] - cuts[range], slots + cuts[range]});
  });
  return missing;
}

void Table::assign(const int64_t* keys, size_t count, const float* rows, int row_floats, const uint64_t* counts,
                   const uint32_t* last_steps) {
  if (const size_t part = bulk_part(); tier_ && tier_->evicts() && count > part) {
    if (Scratch::of_keys(keys, count).grouping.size() != count)
      throw std::invalid_argument("assign: duplicate keys; give each key once");
    for (size_t at = 0; at < count; at += part)
      assign(keys + at, std::min(part, count - at), rows + at * row_floats, row_floats, counts ? counts + at : nullptr,
             last_steps ? last_steps + at : nullptr);
    return;
  }
  auto& [grouping, slots] = Scratch::of_keys(keys, count);
  if (grouping.size() != count)
    throw std::invalid_argument("assign: " + std::to_string(count - grouping.size()) +
                                " duplicate keys; give each key once");
  std::lock_guard lock(writer_);
  const Given given{grouping, rows, row_floats};
  given_ = &given;
  try {
    create(grouping, slots.data());
  } catch (...) {
    given_ = nullptr;
    throw;
  }
  given_ = nullptr;
  if (tier_) tier_->touch(slots.data(), slots.size());
  note_changed(slots.data(), slots.size());
  const auto& cuts = grouping.cuts();
  Pool::shared().run(static_cast<int>(cuts.size()) - 1, [&](int range) {
    for (size_t u = cuts[range]; u < cuts[range + 1]; ++u) {
      const uint32_t from = grouping.run()[grouping.run_begin()[u]], slot = slots[u], lane = slot % 4;
      ShardGuard guard(shards_[shard_of(grouping.hashes()[u])]);
      store_row(view_.rows + size_t{slot} * view_.row_bytes, rows + size_t{from} * row_floats, row_floats);
      HeaderGroup& group = view_.headers[slot / 4];
      if (counts) {
        group.count[lane] =
            add_count(0, counts[from], [&] { return draw(count_stream_, grouping.keys()[u], 0, 0)[0]; });
      }
      const uint32_t step = last_steps ? last_steps[from] : step_of(group.stamp[lane]);
      group.stamp[lane] = stamp_of(std::max(step, expiry_.oldest(shard_of(grouping.hashes()[u]))));
    }
  });
}

uint64_t Table::erase(const int64_t* keys, size_t count) {
  std::lock_guard lock(writer_);
  free_.reserve(free_.size() + std::min<uint64_t>(count, live_));
  uint64_t erased = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t hash = hash_key(keys[i]);
    uint32_t slot;
    if (kernels().find({view_, &keys[i], &hash, 1, &slot}) == 0) {
      erase_slot(hash, slot);
      ++erased;
    } else if (tier_ && tier_->evicts() && tier_->erase_cold(keys[i], hash)) {
      if (changes_.on()) changes_.note_gone(keys[i]);
      ++erased;
    }
  }
  __atomic_store_n(&live_, live_ - erased, __ATOMIC_RELAXED);
  if (erased) erase_epoch_.fetch_add(1, std::memory_order_acq_rel);
  return erased;
}

void Table::erase_slot(uint64_t hash, uint32_t slot) {
  if (tier_) tier_->forget(slot);
  if (changes_.on()) changes_.note_gone(view_.headers[slot / 4].key[slot % 4]);
  ShardIndex& index = shards_[shard_of(hash)];
  ShardGuard guard(index);
  ShardWriter(index, view_.headers, index_memory_).erase(hash, slot);
  view_.headers[slot / 4].stamp[slot % 4] = 0;
  if (!tier_ || tier_->marks().pins(slot) == 0) free_.push_back(slot);  // else its last holder frees it
}

void Table::begin_changes(bool all) {
  std::lock_guard lock(writer_);
  changes_.begin();
  for (uint64_t slot = 0; all && slot < slots_; ++slot) {
    const auto one = static_cast<uint32_t>(slot);
    if (view_.headers[slot / 4].stamp[slot % 4] != 0) note_changed(&one, 1);
  }
  std::vector<RecordHead> heads;
  std::vector<float> rows;
  for (uint32_t shard = 0; all && shard < kShards; ++shard) {
    scan_cold(shard, heads, rows);
    for (const RecordHead& head : heads) changes_.note_gone(head.key);  // from its slot; it is on SSD
  }
  settle();
}

void Table::end_changes() {
  std::lock_guard lock(writer_);
  changes_.end();
  settle();
}

std::vector<int64_t> Table::take_changes() {
  std::lock_guard lock(writer_);
  std::vector<int64_t> keys = changes_.take();
  settle();
  return keys;
}

void Table::note_changed(const uint32_t* slots, size_t count) {
  if (!changes_.on()) return;
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count && slots[i + kAhead] != kNoSlot) __builtin_prefetch(&view_.headers[slots[i + kAhead] / 4]);
    if (slots[i] != kNoSlot) changes_.note(slots[i], view_.headers[slots[i] / 4].key[slots[i] % 4]);
  }
}

uint64_t Table::scan(uint64_t start, size_t most, std::vector<uint32_t>& live) const {
  live.clear();
  const uint64_t end = slots();
  for (; start < end && live.size() < most; ++start)
    if (view_.headers[start / 4].stamp[start % 4] != 0) live.push_back(static_cast<uint32_t>(start));
  return start;
}

MemoryReport Table::memory() const {
  std::lock_guard lock(writer_);
  MemoryReport report{};
  report.rows = live_;
  report.slots = slots_;
  report.payload_bytes = live_ * view_.row_bytes;
  report.row_bytes = rows_.committed();
  report.header_bytes = headers_.committed();
  report.index_bytes = index_memory_.resident() + shards_.size() * sizeof(ShardIndex);
  if (tier_ && tier_->evicts()) {
    report.row_bytes = tier_->active_slabs() * ColdTier::kSlabSlots * view_.row_bytes;
    report.header_bytes = tier_->active_slabs() * ColdTier::kSlabSlots * kHeaderBytes;
  }
  if (tier_) {
    report.tier_bytes = tier_->holds();
    if (tier_->evicts()) report.tier_bytes -= report.row_bytes + report.header_bytes;
  }
  if (admission_) report.sketch_bytes = admission_->bytes();
  report.total_bytes =
      report.row_bytes + report.header_bytes + report.index_bytes + report.tier_bytes + report.sketch_bytes;
  return report;
}

}  // namespace hotrow
