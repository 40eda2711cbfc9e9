#include "rowserver/row_service.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "kernels/row_kernels.h"

namespace hotrow {
namespace {

constexpr uint32_t kBlock = 16384;  // rows that are pooled or encoded at once, so that scratch memory stays small

// As many bags as have at most kBlock keys together, at least one.
uint32_t bags_of_block(const uint32_t* offsets, uint32_t bags) {
  const uint32_t* end = std::upper_bound(offsets + 1, offsets + bags + 1, offsets[0] + kBlock);
  return std::max(1u, static_cast<uint32_t>(end - offsets - 1));
}

// Pools rows as the store's own reads do: the same kernel, in the order of the keys.
void pool(const float* rows, uint32_t pooling, const uint32_t* offsets, uint32_t bags, int dim, float* out,
          RowService::Scratch& scratch) {
  const uint32_t count = offsets[bags] - offsets[0];
  uint32_t* positions = scratch.positions.resize(count);
  std::iota(positions, positions + count, 0u);
  uint32_t* begins = scratch.begins.resize(size_t{bags} + 1);
  for (uint32_t bag = 0; bag <= bags; ++bag) begins[bag] = offsets[bag] - offsets[0];
  PoolArgs args{};
  args.rows = reinterpret_cast<const char*>(rows);
  args.row_bytes = static_cast<size_t>(dim) * sizeof(float);
  args.inverse = positions;
  args.dim = dim;
  args.pooling = static_cast<Pooling>(pooling);
  args.offsets = begins;
  args.bag_end = bags;
  args.out = out;
  args.out_stride = static_cast<size_t>(dim);
  kernels().pool(args);
}

}  // namespace
namespace {
}

RowService::RowService(std::vector<std::shared_ptr<Table>> tables, int64_t publication, size_t history_entries,
                       size_t history_bytes)
    : tables_(std::move(tables)),
      history_(history_entries, history_bytes),
      publication_(publication),
      oldest_(publication) {
  for (const auto& table : tables_) dims_.push_back(table->dim());
}

RowService::Reply RowService::read(const ParsedLookup& lookup, int64_t publication, char* out, Scratch& scratch) const {
  if (cutting_over_.load(std::memory_order_acquire)) const std::lock_guard wait(entry_);
  const std::shared_lock shared(gate_);
  const int64_t current = publication_.load(std::memory_order_relaxed), oldest = history_.oldest(current);
  if (publication > current) return {RowError::kBehind, current, oldest};
  if (!history_.reaches(publication, current)) return {RowError::kTooNew, current, oldest};
  auto* found = lookup.want_found ? reinterpret_cast<bool*>(out + answer_bytes(lookup, dims_) - lookup.count) : nullptr;
  const int64_t* keys = lookup.keys;
  const uint32_t* offsets = lookup.offsets.data();
  const bool encode = lookup.wire != RowType::kFloat;
  for (size_t i = 0; i < lookup.tables.size(); ++i) {
    const uint32_t table = lookup.tables[i].table;
    const int dim = dims_[table], words = words_of(lookup.wire, dim);
    for (uint32_t left = answer_rows(lookup, i); left > 0;) {  // of the answer's rows
      const uint32_t count = lookup.pooled ? bags_of_block(offsets, left) : encode ? std::min(left, kBlock) : left;
      const uint32_t read = lookup.pooled ? offsets[count] - offsets[0] : count;  // rows of the table
      auto* answer = encode ? scratch.answer.resize(size_t{count} * dim) : reinterpret_cast<float*>(out);
      auto* rows = lookup.pooled ? scratch.rows.resize(size_t{read} * dim) : answer;
      tables_[table]->read(keys, nullptr, read, rows, found);
      if (publication < current) {
        history_.restore(publication, table, keys, read, rows, found);
        restored_.fetch_add(read, std::memory_order_relaxed);
      }
      if (lookup.pooled) {
        pool(rows, lookup.bags[i].pooling, offsets, count, dim, answer, scratch);
        offsets += count;
      }
      auto* encoded = reinterpret_cast<uint32_t*>(out);
      if (encode)
        for (size_t row = 0; row < count; ++row)
          encode_row(lookup.wire, answer + row * dim, dim, encoded + row * words);
      out += size_t{count} * words * sizeof(uint32_t);
      keys += read;
      left -= count;
      if (found) found += read;
    }
    if (lookup.pooled) ++offsets;  // the end of its last bag
  }
  lookups_.fetch_add(1, std::memory_order_relaxed);
  keys_.fetch_add(lookup.count, std::memory_order_relaxed);
  return {RowError::kNone, publication, oldest};
}

bool RowService::is_cold(const ParsedLookup& lookup) const {
  if (cutting_over_.load(std::memory_order_acquire)) const std::lock_guard wait(entry_);
  const std::shared_lock shared(gate_);
  const int64_t* keys = lookup.keys;
  for (const TableKeys& part : lookup.tables) {
    if (tables_[part.table]->on_ssd(keys, part.keys, nullptr)) return true;
    keys += part.keys;
  }
  return false;
}

std::vector<ChangedRows> RowService::prepare(const std::vector<Change>& changes) const {
  std::vector<ChangedRows> before;
  for (const Change& change : changes) {
    const int dim = dims_.at(change.table);
    std::vector<float> rows(change.keys.size() * dim);
    std::vector<uint8_t> found(change.keys.size());
    tables_[change.table]->read(change.keys.data(), nullptr, change.keys.size(), rows.data(),
                                reinterpret_cast<bool*>(found.data()));
    before.emplace_back(change.table, dim, change.keys, std::move(rows), std::move(found));
  }
  return before;
}

void RowService::begin_cut_over() {
  cutting_over_.store(true, std::memory_order_release);
  entry_.lock();
  gate_.lock();
}

void RowService::end_cut_over(int64_t publication, std::vector<ChangedRows>* before) {
  const int64_t previous = publication_.load(std::memory_order_relaxed);
  if (before && publication > previous)
    history_.add(publication, previous, std::move(*before));
  else
    history_.clear();
  publication_.store(publication, std::memory_order_release);
  oldest_.store(history_.oldest(publication), std::memory_order_release);
  history_entries_.store(history_.entries(), std::memory_order_relaxed);
  history_bytes_.store(history_.bytes(), std::memory_order_relaxed);
  abandon_cut_over();
}

void RowService::abandon_cut_over() {
  cutting_over_.store(false, std::memory_order_release);
  gate_.unlock();
  entry_.unlock();
}

void RowService::replace_tables(std::vector<std::shared_ptr<Table>> tables) {
  if (tables.size() != tables_.size()) throw std::invalid_argument("replace_tables: another number of tables");
  for (size_t i = 0; i < tables.size(); ++i)
    if (tables[i]->dim() != dims_[i]) throw std::invalid_argument("replace_tables: a table has another dim");
  tables_ = std::move(tables);
}

RowService::Figures RowService::figures() const {
  return {lookups_.load(std::memory_order_relaxed), keys_.load(std::memory_order_relaxed),
          restored_.load(std::memory_order_relaxed), history_entries_.load(std::memory_order_relaxed),
          history_bytes_.load(std::memory_order_relaxed)};
}

}  // namespace hotrow
