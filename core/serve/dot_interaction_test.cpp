#include "serve/dot_interaction.h"

#include <vector>

#include "testing/test.h"

namespace hotrow::serve {
namespace {

float value(size_t row, size_t vector, size_t d) {
  return static_cast<float>(static_cast<int>((row * 131 + vector * 17 + d * 7) % 29) - 14) * 0.37f;
}

// The plain reference, summed in the same order.
std::vector<float> plainly(size_t count, size_t dim, size_t rows, size_t lead) {
  std::vector<float> out;
  for (size_t row = 0; row < rows; ++row) {
    for (size_t d = 0; d < lead; ++d) out.push_back(value(row, 99, d));
    for (size_t i = 0; i < count; ++i)
      for (size_t j = 0; j < i; ++j) {
        float sum = 0;
        for (size_t d = 0; d < dim; ++d) sum += value(row, j, d) * value(row, i, d);
        out.push_back(sum);
      }
  }
  return out;
}

TEST(pairs_are_the_plain_dot_products_behind_the_lead) {
  for (size_t count : {2, 3, 8, 9, 27, 64})
    for (size_t dim : {1, 5, 16, 128})
      for (size_t rows : {0, 1, 3, 300}) {
        if (!supports_dot_interaction(count, dim)) continue;
        const size_t stride = count * dim + 3, lead = dim == 5 ? 0 : 4;
        std::vector<float> pooled(rows * stride + 1), leads(rows * (lead + 1) + 1);
        std::vector<StridedVectors> vectors;
        for (size_t n = 0; n < count; ++n) vectors.push_back({pooled.data() + n * dim, stride});
        for (size_t row = 0; row < rows; ++row) {
          for (size_t n = 0; n < count; ++n)
            for (size_t d = 0; d < dim; ++d) pooled[row * stride + n * dim + d] = value(row, n, d);
          for (size_t d = 0; d < lead; ++d) leads[row * (lead + 1) + d] = value(row, 99, d);
        }
        std::vector<float> out(rows * (lead + count * (count - 1) / 2));
        dot_interaction(vectors, dim, {lead ? leads.data() : nullptr, lead + 1}, lead, rows, out.data());
        CHECK(out == plainly(count, dim, rows, lead));
      }
}

TEST(what_does_not_fit_is_refused) {
  CHECK(!supports_dot_interaction(1, 16) && !supports_dot_interaction(65, 1) && !supports_dot_interaction(64, 129) &&
        supports_dot_interaction(64, 128));
  CHECK_THROWS(std::invalid_argument, dot_interaction({{nullptr, 1}}, 4, {nullptr, 0}, 0, 1, nullptr));
}

}  // namespace
}  // namespace hotrow::serve
