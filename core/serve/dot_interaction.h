// The dot interaction of a DLRM tower, for serving. Output row: [lead, dot products of all pairs of vectors], computed
// from the vectors in place. torch needs four calls for it (stack, bmm, index_select, cat), half of a small tower's
// time, and computes every product twice.
#pragma once

#include <cstddef>
#include <vector>

namespace hotrow::serve {

struct StridedVectors {
  const float* data;
  size_t stride;  // in floats, from row to row
};

// Whether `count` vectors of `dim` floats are supported.
bool supports_dot_interaction(size_t count, size_t dim);

// out[row] = lead[row] (lead_width floats, none where data is null), then the pairs. Results do not depend on threads.
void dot_interaction(const std::vector<StridedVectors>& vectors, size_t dim, StridedVectors lead, size_t lead_width,
                     size_t rows, float* out);

}  // namespace hotrow::serve
