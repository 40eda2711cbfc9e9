// Tables for tests: short constructors, and a table's rows as a plain map.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "table/table.h"

namespace hotrow::testing {

inline std::vector<StatePart> state_of(RuleKind rule, int dim) {
  switch (rule) {
    case RuleKind::kAdagrad:
      return {{dim, 0.125f}};
    case RuleKind::kRowWiseAdagrad:
      return {{1, 0.5f}};
    case RuleKind::kAdam:
    case RuleKind::kAdamW:
    case RuleKind::kFtrl:
      return {{dim, 0.0f}, {dim, 0.0f}};
    default:
      return {};
  }
}

inline std::shared_ptr<Table> make_table(int dim, RuleKind rule = RuleKind::kSgd, size_t dram = 0,
                                         Initial initial = {InitialKind::kUniform, -1, 1},
                                         const std::string& name = "t") {
  return std::make_shared<Table>(TableOptions{name, dim, rule, state_of(rule, dim), initial, 42},
                                 std::make_shared<Budget>(dram));
}

// Rows of 16-bit values, rounded stochastically.
inline std::shared_ptr<Table> make_typed_table(RowType type, int dim, RuleKind rule, size_t dram = 0) {
  return std::make_shared<Table>(
      TableOptions{"t", dim, rule, state_of(rule, dim), {InitialKind::kUniform, -1, 1}, 42, false, type, type},
      std::make_shared<Budget>(dram));
}

struct Row {
  std::vector<float> values;  // with the optimizer's state
  uint64_t count = 0;
  uint32_t last_step = 0;
  bool operator==(const Row&) const = default;
};
using Rows = std::map<int64_t, Row>;

inline Row initial_row(const Table& table, int64_t key) {
  Row row{std::vector<float>(table.floats()), 0, 0};
  table.write_initial_row(key, row.values.data());
  return row;
}

// Everything a table holds, through scan and read_slots.
inline Rows rows_of(const Table& table) {
  Rows rows;
  std::vector<uint32_t> live;
  for (uint64_t at = 0; at < table.slots();) {
    at = table.scan(at, 1000, live);
    std::vector<float> values(live.size() * table.floats());
    std::vector<int64_t> keys(live.size());
    std::vector<uint64_t> counts(live.size());
    std::vector<uint32_t> steps(live.size());
    table.read_slots(live.data(), live.size(), values.data(), keys.data(), counts.data(), steps.data());
    for (size_t i = 0; i < live.size(); ++i) {
      const float* row = values.data() + i * table.floats();
      rows[keys[i]] = {{row, row + table.floats()}, counts[i], steps[i]};
    }
  }
  return rows;
}

// Equal bit for bit: unlike ==, tells -0 from 0 and holds for NaN.
inline bool same_bits(const Rows& a, const Rows& b) {
  if (a.size() != b.size()) return false;
  for (auto i = a.begin(), j = b.begin(); i != a.end(); ++i, ++j) {
    const Row &x = i->second, &y = j->second;
    if (i->first != j->first || x.count != y.count || x.last_step != y.last_step) return false;
    if (x.values.size() != y.values.size()) return false;
    if (std::memcmp(x.values.data(), y.values.data(), x.values.size() * sizeof(float))) return false;
  }
  return true;
}

}  // namespace hotrow::testing
