// The events that are chosen for each candidate, against all scores in double, sorted.
#include "search/similar_events.h"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "testing/test.h"

namespace hotrow {
namespace {

std::vector<int64_t> best(const float* candidate, const float* events, size_t count, size_t dim, size_t keep) {
  std::vector<std::pair<double, int64_t>> scores(count);
  for (size_t event = 0; event < count; ++event) {
    double score = 0;
    for (size_t i = 0; i < dim; ++i) score += static_cast<double>(candidate[i]) * events[event * dim + i];
    scores[event] = {-score, static_cast<int64_t>(event)};
  }
  std::sort(scores.begin(), scores.end());
  std::vector<int64_t> found;
  for (size_t i = 0; i < std::min(keep, count); ++i) found.push_back(scores[i].second);
  std::sort(found.begin(), found.end());
  return found;
}

TEST(similar_events_are_the_largest_inner_products) {
  if (!has_similar_events()) return;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  struct Size {
    size_t rows, events, dim, keep;
  };
  for (const Size size : {Size{20, 3000, 64, 100}, Size{5, 300, 7, 10}, Size{17, 1000, 33, 1}, Size{9, 40, 64, 39},
                          Size{3, 900, 100, 500}, Size{1, 16, 4, 3}, Size{2, 5, 3, 8}, Size{1, 1, 1, 1}}) {
    std::vector<float> candidates(size.rows * size.dim), events(size.events * size.dim);
    for (float& value : candidates) value = normal(random);
    for (float& value : events) value = normal(random);
    const auto rows = static_cast<int64_t>(size.rows), length = static_cast<int64_t>(size.events);
    std::vector<int64_t> index(size.rows * size.keep), counts(size.rows);
    const SimilarInputs in{candidates.data(), events.data(), size.dim, size.dim, &rows,
                           &length,           nullptr,       1,        size.dim, size.keep};
    similar_events(in, index.data(), counts.data());
    for (size_t row = 0; row < size.rows; ++row) {
      const auto wanted = best(candidates.data() + row * size.dim, events.data(), size.events, size.dim, size.keep);
      CHECK_EQ(counts[row], static_cast<int64_t>(wanted.size()));
      CHECK(std::equal(wanted.begin(), wanted.end(), index.begin() + static_cast<ptrdiff_t>(row * size.keep)));
    }
  }
}

}  // namespace
}  // namespace hotrow
