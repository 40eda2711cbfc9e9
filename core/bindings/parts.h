// Tables with the part of shared arrays that is theirs, as Python gives them.
#pragma once

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>
#include <vector>

#include "rows/device_rows.h"

namespace hotrow::bindings {

using Parts = std::vector<std::tuple<std::shared_ptr<Table>, size_t, size_t>>;  // table, begin, end

inline std::vector<TablePart> parts_of(const Parts& tuples) {
  std::vector<TablePart> parts;
  for (const auto& [table, begin, end] : tuples) parts.push_back({table.get(), begin, end});
  return parts;
}

}  // namespace hotrow::bindings
