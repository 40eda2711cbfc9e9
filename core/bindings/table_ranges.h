// Table ranges (device/row_staging.h) as Python passes them.
#pragma once

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>
#include <vector>

#include "device/row_staging.h"

namespace hotrow::bindings {

using TableRangeTuples = std::vector<std::tuple<std::shared_ptr<Table>, size_t, size_t>>;  // table, begin, end

inline std::vector<TableRange> table_ranges(const TableRangeTuples& tuples) {
  std::vector<TableRange> parts;
  for (const auto& [table, begin, end] : tuples) parts.push_back({table.get(), begin, end});
  return parts;
}

}  // namespace hotrow::bindings
