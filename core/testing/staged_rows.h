// Tables over a log, and the rows of a batch that is staged for a GPU, for the tests of device/.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "device/row_staging.h"
#include "plan/plan.h"
#include "testing/random.h"
#include "testing/tables.h"

namespace hotrow::testing {

using Tables = std::vector<std::shared_ptr<Table>>;

inline constexpr int kDim = 64;  // rows of 512 bytes: 20,000 of them are more than kDram
inline constexpr size_t kDram = size_t{8} << 20;
inline constexpr uint32_t kUntouched = 777;

// A table with a log; dram = 0: it never evicts.
inline std::shared_ptr<Table> over_log(size_t dram, const std::string& folder) {
  auto table = make_table(kDim, RuleKind::kAdagrad, dram);
  LogOptions options{folder, "t", static_cast<uint32_t>(table->width() * sizeof(float))};
  options.segment_bytes = size_t{1} << 18;
  options.buffer_bytes = size_t{1} << 15;
  table->attach(std::make_unique<Log>(options), dram != 0);
  return table;
}

inline std::vector<int64_t> keys_from(int64_t first, size_t count) {
  std::vector<int64_t> keys(count);
  for (size_t i = 0; i < count; ++i) keys[i] = (first + static_cast<int64_t>(i)) * 7919;
  return keys;
}

// The rows of a batch, in order of tables.
struct StagedRows {
  std::vector<TableRange> parts;
  std::vector<int64_t> keys;
  std::vector<uint32_t> slots, steps, counts;

  size_t size() const { return keys.size(); }
  const Table& table(size_t i) const {
    for (const TableRange& part : parts)
      if (i >= part.begin && i < part.end) return *part.table;
    throw std::logic_error("no table has this row");
  }
  size_t widest() const {
    int most = 0;
    for (const TableRange& part : parts) most = std::max(most, part.table->width());
    return static_cast<size_t>(most);
  }
  void add(Table& table, const std::vector<int64_t>& some) {
    parts.push_back({&table, keys.size(), keys.size() + some.size()});
    keys.insert(keys.end(), some.begin(), some.end());
    for (auto* each : {&slots, &steps, &counts}) each->resize(keys.size(), kUntouched);
  }
  RowLookup lookup(bool stop_at_first_miss = false) {
    return {parts, keys.data(), slots.data(), steps.data(), counts.data(), stop_at_first_miss};
  }
  size_t seek() { return lookup_rows(lookup(), {0, keys.size()}); }
  void copy(size_t begin, size_t end, float* out, size_t stride) {
    lookup_rows({parts, nullptr, slots.data(), nullptr, nullptr}, {begin, end, out}, stride);
  }
  void write_back(uint32_t last_clean_step, size_t begin, size_t end, const std::vector<float>& rows,
                  size_t stride) const {
    write_back_rows(parts, slots.data(), steps.data(), counts.data(), last_clean_step, begin, end,
                    rows.data() + begin * stride, stride);
  }
  // Sets new steps and counts, and returns new rows.
  std::vector<float> change(Random& random, size_t stride, uint32_t step) {
    for (uint32_t& each : steps) each = step;
    for (uint32_t& each : counts) each = static_cast<uint32_t>(random.below(1 << 16));
    return random.reals(size() * stride);
  }
  Row row(size_t i, const std::vector<float>& rows, size_t stride) const {
    const float* values = rows.data() + i * stride;
    return {{values, values + table(i).width()}, decode_count(static_cast<uint16_t>(counts[i])), steps[i]};
  }
};

inline Row row_at(const Table& table, uint32_t slot) {
  Row row{std::vector<float>(table.width()), 0, 0};
  int64_t key;
  table.read_slots(&slot, 1, row.values.data(), &key, &row.count, &row.last_step);
  return row;
}

// Tables of several widths, each with a row for every key.
inline Tables some_tables(Random& random, const std::vector<int64_t>& keys) {
  Tables tables = {make_table(3), make_table(8, RuleKind::kRowWiseAdagrad), make_table(17, RuleKind::kAdam),
                   make_table(1)};
  for (const auto& table : tables) {
    std::vector<uint64_t> counts(keys.size());
    std::vector<uint32_t> steps(keys.size());
    for (uint64_t& count : counts) count = random.below(4000);
    for (uint32_t& step : steps) step = static_cast<uint32_t>(random.below(100));
    const auto rows = random.reals(keys.size() * table->width());
    table->assign(keys.data(), keys.size(), rows.data(), table->width(), counts.data(), steps.data());
  }
  return tables;
}

// Parts of about the size at which work is split (256 rows), with empty parts at both ends and between. Keys of a part
// are distinct.
inline StagedRows some_lot(Random& random, const Tables& tables, const std::vector<int64_t>& keys) {
  constexpr size_t kSizes[] = {0, 700, 256, 0, 1, 257, 0};
  constexpr size_t kOf[] = {1, 0, 1, 0, 2, 3, 2};
  StagedRows lot;
  for (size_t part = 0; part < std::size(kSizes); ++part) {
    std::vector<int64_t> some = keys;
    for (size_t i = some.size(); i > 1; --i) std::swap(some[i - 1], some[random.below(i)]);
    some.resize(kSizes[part]);
    lot.add(*tables[kOf[part]], some);
  }
  return lot;
}

inline constexpr size_t kCuts[] = {0, 0, 5, 300, 700, 701, 956, 957, 1000, 1214};  // of some_lot's 1,214 rows

// Stages the missing rows of a batch through a plan.
inline StagedRows fetch_and_pin(Plan& plan, const Tables& tables, const std::vector<std::vector<int64_t>>& keys,
                                const std::vector<uint32_t>& seen, uint32_t step) {
  StagedRows lot;
  std::vector<JobInput> jobs;
  size_t at = 0;
  for (size_t t = 0; t < tables.size(); at += keys[t++].size()) {
    lot.add(*tables[t], keys[t]);
    jobs.push_back({tables[t],
                    {{keys[t].data(), keys[t].size(), nullptr, keys[t].size(), nullptr, Pooling::kNone,
                      seen.empty() ? nullptr : seen.data() + at}}});
  }
  plan.route(jobs);
  plan.fetch(step);
  plan.slot_metadata(lot.slots.data(), lot.steps.data(), lot.counts.data());
  return lot;
}

inline size_t evict_all(Table& table) {
  std::lock_guard lock(table.write_mutex());
  return table.tier()->evict(table.slots());
}

inline std::vector<uint32_t> find(const Table& table, const std::vector<int64_t>& keys) {
  std::vector<uint32_t> slots(keys.size());
  table.find(keys.data(), keys.size(), slots.data());
  return slots;
}

// Assigns many unpinned rows, enough to evict others.
inline void press(Table& table, int64_t first, size_t count) {
  for (size_t at = 0; at < count; at += 1000) {
    const auto keys = keys_from(first + static_cast<int64_t>(at), 1000);
    const std::vector<float> rows(keys.size() * table.width(), static_cast<float>(first));
    table.assign(keys.data(), keys.size(), rows.data(), table.width(), nullptr, nullptr);
  }
}

}  // namespace hotrow::testing
