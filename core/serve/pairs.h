// The interaction of a DLRM tower, for serving: [lead, dot products of all pairs of vectors], each row's side by side,
// straight from where the vectors lie. torch takes four calls for it (stack, bmm, index_select, cat), half of a small
// tower's time, and computes every product twice.
#pragma once

#include <cstddef>
#include <vector>

namespace hotrow::serve {

struct Strided {
  const float* data;
  size_t stride;  // in floats, from row to row
};

// Whether `count` vectors of `dim` floats can be paired.
bool can_pair(size_t count, size_t dim);

// out[row] = lead[row] (lead_width floats, none where data is null), then the pairs. Results do not depend on threads.
void pair_dots(const std::vector<Strided>& vectors, size_t dim, Strided lead, size_t lead_width, size_t rows,
               float* out);

}  // namespace hotrow::serve
