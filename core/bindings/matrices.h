// Matrices of floats as Python passes them: by address. The Python caller has checked the addresses.
#pragma once

#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "plan/plan.h"

namespace hotrow::bindings {

using MatrixTuple = std::tuple<Address, size_t, size_t, size_t>;  // data, rows, columns, stride

inline std::vector<Matrix> matrices(const std::vector<MatrixTuple>& tuples) {
  std::vector<Matrix> result;
  for (const auto& [data, rows, columns, stride] : tuples) result.push_back({at<float>(data), rows, columns, stride});
  return result;
}

}  // namespace hotrow::bindings
