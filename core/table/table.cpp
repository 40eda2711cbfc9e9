#include "table/table.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "memory/racing_store.h"
#include "table/key_chunks.h"
#include "tiering/compaction_thread.h"

namespace hotrow {
namespace {

constexpr size_t kIndexBytes = 5, kIndexGrowth = 8;  // bytes a row; factor of address space that its growth uses up

int row_width(const TableOptions& options) {
  if (options.type == RowType::kByte && !options.frozen) throw std::invalid_argument("rows of type int8 are read-only");
  if (options.frozen && !options.state.empty()) throw std::invalid_argument("read-only rows have no optimizer state");
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
constexpr size_t kAhead = 16;

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
  CompactionThread::shared().remove(tier_.get());
  budget_->remove(this);
  budget_->uncharge(charged_);
}

void Table::attach(std::unique_ptr<Log> log, bool evicts, bool cache_only) {
  std::unique_lock lock(write_mutex_);
  if (tier_) throw std::logic_error("table '" + options_.name + "' has a log already");
  if (log->options().row_bytes != view_.row_bytes) throw std::logic_error("the log is for rows of another width");
  if (log->options().row_type != static_cast<uint32_t>(options_.type))
    throw std::logic_error("the log is for rows of another type");
  if (evicts && slots_ != 0) throw std::logic_error("an SSD tier must be attached before the table's first row");
  auto tier = std::make_unique<SsdTier>(*this, std::move(log), evicts, cache_only);
  if (!evicts && slots_ != 0) {
    const size_t bytes = slots_ * SlotState::kBytes;
    if (!budget_->try_charge(bytes)) throw_budget_exceeded(0, bytes);
    budget_->uncharge(bytes);
    tier->slot_state().commit(slots_);
    tier->mark_all_dirty();
  }
  tier_ = std::move(tier);
  if (evicts) {
    rows_.use_small_pages();
    headers_.use_small_pages();
    budget_->add(this);
  }
  recharge_budget();
  lock.unlock();  // the compaction thread takes a table's mutex inside its own
  CompactionThread::shared().add(tier_.get());
}

size_t Table::reclaimable() const { return tier_ ? tier_->active_slabs() * tier_->slab_bytes() : 0; }

bool Table::release_some_memory() {
  if (!tier_ || !tier_->evicts()) return false;
  const auto give = [&] { return tier_->release_slab() || tier_->trim(); };
  if (write_mutex_.held_by_this_thread()) return give();
  if (!write_mutex_.try_lock()) return false;
  std::lock_guard lock(write_mutex_, std::adopt_lock);
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
  if (options_.initial_type == RowType::kFloat) return;
  static thread_local std::vector<uint32_t> words;
  words.resize(words_of(options_.initial_type, options_.dim));
  encode_row(options_.initial_type, out, options_.dim, words.data());
  kernels().decode(options_.initial_type, reinterpret_cast<const char*>(words.data()), options_.dim, out);
}

void Table::write_initial_row(int64_t key, float* row) const {
  write_initial_values(key, row);
  float* state = row + options_.dim;
  for (const StatePart& part : options_.state) state = std::fill_n(state, part.width, part.initial);
}

// Writes directly into the slot; the thread sanitizer sees atomic stores.
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
  if (options_.type == RowType::kFloat) return store_words(row, values, floats * sizeof(float));
  static thread_local std::vector<uint32_t> words;
  words.resize(words_of(options_.type, options_.dim));
  encode_row(options_.type, values, options_.dim, words.data());
  store_words(row, words.data(), words.size() * sizeof(float));
  if (floats > options_.dim)
    store_words(row + words.size() * sizeof(float), values + options_.dim, (floats - options_.dim) * sizeof(float));
}

// Decodes all floats() of a row without a concurrent writer.
void Table::load_row(const char* row, float* out) const {
  kernels().decode(options_.type, row, options_.dim, out);
  const size_t values = words_of(options_.type, options_.dim) * sizeof(float);
  std::memcpy(out + options_.dim, row + values, view_.row_bytes - values);
}

void Table::require_trainable(const char* what) const {
  if (options_.frozen)
    throw std::invalid_argument("table '" + options_.name + "' is only read (values=\"" + name_of(options_.type) +
                                "\"): " + what +
                                ". Read it in eval() mode or under torch.no_grad(); to train, make the table without "
                                "values= and load a checkpoint");
}

void Table::throw_budget_exceeded(uint64_t rows, size_t bytes) const {
  throw BudgetExceeded("table '" + options_.name + "' needs " + readable(bytes) + " for " + std::to_string(rows) +
                       " new rows, but dram=" + readable(budget_->limit()) + " has " +
                       readable(budget_->limit() - std::min(budget_->limit(), budget_->used())) +
                       " left; nothing was changed. Raise dram=, or keep smaller rows (dim, optimizer state)");
}

size_t Table::memory_bytes() const {
  size_t bytes =
      index_memory_.resident() + (admission_ ? admission_->bytes() : 0) + (tier_ ? tier_->memory_bytes() : 0);
  bytes += changes_.bytes();
  if (!tier_ || !tier_->evicts()) bytes += rows_.committed() + headers_.committed();
  return bytes;
}

void Table::recharge_budget() {
  const size_t now = memory_bytes();
  if (now < charged_) budget_->uncharge(charged_ - now);
  if (now > charged_) budget_->charge(now - charged_);
  charged_ = now;
  promised_slots_ = 0;
  if (tier_) tier_->release_reserved_slots();
}

size_t Table::find_unique(const UniqueKeys& unique_keys, uint32_t* slots) const {
  std::atomic<size_t> missing{0};
  const auto& cuts = unique_keys.cuts();
  ThreadPool::shared().run(static_cast<int>(cuts.size()) - 1, [&](int range) {
    missing += kernels().find({view_, unique_keys.keys() + cuts[range], unique_keys.hashes() + cuts[range],
                               cuts[range + 1] - cuts[range], slots + cuts[range]});
  });
  return missing;
}

size_t Table::find(const int64_t* keys, const uint64_t* hashes, size_t count, uint32_t* slots) const {
  return kernels().find({view_, keys, hashes, count, slots});
}

uint64_t Table::erase(const int64_t* keys, size_t count) {
  std::lock_guard lock(write_mutex_);
  free_.reserve(free_.size() + std::min<uint64_t>(count, live_));
  uint64_t erased = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t hash = hash_key(keys[i]);
    uint32_t slot;
    if (kernels().find({view_, &keys[i], &hash, 1, &slot}) == 0) {
      erase_slot(hash, slot);
      ++erased;
    } else if (tier_ && tier_->evicts() && tier_->erase_cold(keys[i], hash)) {
      if (changes_.on()) changes_.mark_removed(keys[i]);
      ++erased;
    }
  }
  __atomic_store_n(&live_, live_ - erased, __ATOMIC_RELAXED);
  if (erased) erase_epoch_.fetch_add(1, std::memory_order_acq_rel);
  return erased;
}

void Table::erase_slot(uint64_t hash, uint32_t slot) {
  if (tier_) tier_->detach_slot(slot);
  if (changes_.on()) changes_.mark_removed(view_.headers[slot / 4].key[slot % 4]);
  ShardIndex& index = shards_[shard_of(hash)];
  ShardWriteScope guard(index);
  ShardWriter(index, view_.headers, index_memory_).erase(hash, slot);
  view_.headers[slot / 4].stamp[slot % 4] = 0;
  if (!tier_ || tier_->slot_state().pins(slot) == 0) free_.push_back(slot);  // otherwise the last unpin frees it
}

void Table::start_tracking_changes(bool all) {
  std::lock_guard lock(write_mutex_);
  changes_.begin();
  for (uint64_t slot = 0; all && slot < slots_; ++slot) {
    const auto one = static_cast<uint32_t>(slot);
    if (view_.headers[slot / 4].stamp[slot % 4] != 0) track_changed(&one, 1);
  }
  std::vector<RecordHead> heads;
  std::vector<float> rows;
  for (uint32_t shard = 0; all && shard < kShards; ++shard) {
    scan_cold(shard, heads, rows);
    for (const RecordHead& head : heads) changes_.mark_removed(head.key);  // recorded by key: a row on SSD has no slot
  }
  recharge_budget();
}

void Table::stop_tracking_changes() {
  std::lock_guard lock(write_mutex_);
  changes_.end();
  recharge_budget();
}

std::vector<int64_t> Table::take_changes() {
  std::lock_guard lock(write_mutex_);
  std::vector<int64_t> keys = changes_.take();
  recharge_budget();
  return keys;
}

void Table::track_changed(const uint32_t* slots, size_t count) {
  if (!changes_.on()) return;
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count && slots[i + kAhead] != kNoSlot) __builtin_prefetch(&view_.headers[slots[i + kAhead] / 4]);
    if (slots[i] != kNoSlot) changes_.mark_changed(slots[i], view_.headers[slots[i] / 4].key[slots[i] % 4]);
  }
}

void Table::unpin_from_device(const uint32_t* slots, size_t count) {
  if (!tier_ || !tier_->evicts()) return;
  std::lock_guard lock(write_mutex_);
  for (size_t i = 0; i < count; ++i)
    if (slots[i] != kNoSlot) tier_->unpin(&slots[i], 1);
}

void Table::slots_occupied(const uint32_t* slots, size_t count, bool* alive) const {
  for (size_t i = 0; i < count; ++i) alive[i] = view_.headers[slots[i] / 4].stamp[slots[i] % 4] != 0;
}

uint64_t Table::scan(uint64_t start, size_t most, std::vector<uint32_t>& live) const {
  live.clear();
  const uint64_t end = slots();
  for (; start < end && live.size() < most; ++start)
    if (view_.headers[start / 4].stamp[start % 4] != 0) live.push_back(static_cast<uint32_t>(start));
  return start;
}

MemoryReport Table::memory() const {
  std::lock_guard lock(write_mutex_);
  MemoryReport report{};
  report.rows = live_;
  report.slots = slots_;
  report.payload_bytes = live_ * view_.row_bytes;
  report.row_bytes = rows_.committed();
  report.header_bytes = headers_.committed();
  report.index_bytes = index_memory_.resident() + shards_.size() * sizeof(ShardIndex);
  if (tier_ && tier_->evicts()) {
    report.row_bytes = tier_->active_slabs() * SsdTier::kSlabSlots * view_.row_bytes;
    report.header_bytes = tier_->active_slabs() * SsdTier::kSlabSlots * kHeaderBytes;
  }
  if (tier_) {
    report.tier_bytes = tier_->memory_bytes();
    if (tier_->evicts()) report.tier_bytes -= report.row_bytes + report.header_bytes;
  }
  if (admission_) report.sketch_bytes = admission_->bytes();
  report.total_bytes =
      report.row_bytes + report.header_bytes + report.index_bytes + report.tier_bytes + report.sketch_bytes;
  return report;
}

}  // namespace hotrow
