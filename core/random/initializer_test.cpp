#include "random/initializer.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "random/philox.h"
#include "testing/test.h"

namespace hotrow {
namespace {

constexpr uint64_t kStream = 12345;

std::vector<float> values_of(const Initial& initial, int64_t key, int dim) {
  std::vector<float> row(dim + 1, 777.0f);
  write_initial(initial, kStream, key, row.data(), dim);
  CHECK_EQ(row.back(), 777.0f);  // nothing is written behind the row
  row.pop_back();
  return row;
}

std::vector<float> many(const Initial& initial, int keys, int dim) {
  std::vector<float> all;
  for (int key = 0; key < keys; ++key) {
    const auto row = values_of(initial, key, dim);
    all.insert(all.end(), row.begin(), row.end());
  }
  return all;
}

double mean_power(const std::vector<float>& values, double center, int power) {
  double sum = 0;
  for (float value : values) sum += std::pow(value - center, power);
  return sum / static_cast<double>(values.size());
}

TEST(zeros_and_constants_are_what_they_say) {
  CHECK(values_of({InitialKind::kZeros, 3, 4}, 5, 7) == std::vector<float>(7, 0.0f));
  CHECK(values_of({InitialKind::kConstant, -0.25f, 4}, 5, 7) == std::vector<float>(7, -0.25f));
}

TEST(a_wider_row_begins_with_the_narrower_one) {
  for (InitialKind kind : {InitialKind::kUniform, InitialKind::kNormal}) {
    const auto wide = values_of({kind, -1, 1}, -9, 23);
    for (int dim = 1; dim < 23; ++dim) {
      const auto narrow = values_of({kind, -1, 1}, -9, dim);
      CHECK(std::equal(narrow.begin(), narrow.end(), wide.begin()));
    }
  }
}

TEST(uniform_values_stay_in_their_range_and_fill_it_evenly) {
  const auto values = many({InitialKind::kUniform, -0.5f, 1.5f}, 20000, 10);
  CHECK(*std::min_element(values.begin(), values.end()) >= -0.5f);
  CHECK(*std::max_element(values.begin(), values.end()) < 1.5f);
  std::vector<int> bins(20);
  for (float value : values) ++bins[static_cast<int>((value + 0.5f) * 10.0f)];
  for (int n : bins) CHECK(std::abs(n - 10000) < 5 * 98);  // five standard deviations
  CHECK(std::fabs(mean_power(values, 0, 1) - 0.5) < 0.007);
  CHECK(std::fabs(mean_power(values, 0.5, 2) - 1.0 / 3) < 0.004);
}

// Found by search: the first element of these rows draws 24 ones, the largest fraction there is.
TEST(uniform_values_stay_below_the_upper_bound_at_the_largest_draw) {
  constexpr int64_t kLargest = 82400021;
  CHECK_EQ(draw(kStream, kLargest, 0, 0)[0] >> 8, 0xffffffu);
  CHECK(values_of({InitialKind::kUniform, 1.0f, 2.0f}, kLargest, 1)[0] < 2.0f);
  CHECK(values_of({InitialKind::kUniform, -0.05f, 0.05f}, kLargest, 1)[0] < 0.05f);
}

// Element i of a row comes from word i % 4 of block i / 4, however many blocks are computed side by side.
double fraction(int64_t key, int i) {
  return (draw(kStream, key, 0, static_cast<uint32_t>(i / 4))[i % 4] >> 8) * 0x1p-24;
}

TEST(uniform_values_are_the_fractions_that_their_words_draw) {
  for (int64_t key : {int64_t{0}, int64_t{-1}, int64_t{1} << 40})
    for (int dim : {1, 4, 15, 16, 17, 50}) {
      const auto got = values_of({InitialKind::kUniform, -0.5f, 1.5f}, key, dim);
      for (int i = 0; i < dim; ++i) CHECK_EQ(got[i], -0.5f + 2.0f * static_cast<float>(fraction(key, i)));
    }
}

TEST(normal_values_agree_with_libm) {
  constexpr int kDim = 38;
  double worst = 0;
  for (int64_t key = -5000; key < 5000; ++key) {
    const auto got = values_of({InitialKind::kNormal, 0, 1}, key, kDim);
    for (int i = 0; i < kDim; i += 2) {
      const double radius = std::sqrt(-2 * std::log(1 - fraction(key, i))), angle = 2 * M_PI * fraction(key, i + 1);
      const double want[] = {radius * std::cos(angle), radius * std::sin(angle)};
      for (int j : {0, 1})
        worst = std::max(worst, std::fabs(got[i + j] - want[j]) / std::max(std::fabs(want[j]), 1e-6));
    }
  }
  CHECK(worst < 8 * 0x1p-24);  // four roundings of the last bit: log, root, cosine, product
}

TEST(normal_values_are_normally_distributed) {
  auto values = many({InitialKind::kNormal, 2.0f, 0.5f}, 20000, 10);
  CHECK(std::fabs(mean_power(values, 0, 1) - 2.0) < 0.006);
  CHECK(std::fabs(mean_power(values, 2, 2) - 0.25) < 0.004);
  CHECK(std::fabs(mean_power(values, 2, 3)) < 0.006);
  CHECK(std::fabs(mean_power(values, 2, 4) - 3 * 0.0625) < 0.01);
  std::sort(values.begin(), values.end());
  double distance = 0;  // Kolmogorov-Smirnov
  for (size_t i = 0; i < values.size(); ++i) {
    const double below = 0.5 * std::erfc(-(values[i] - 2.0) / 0.5 / std::sqrt(2.0));
    distance = std::max(distance, std::fabs(below - (i + 0.5) / static_cast<double>(values.size())));
  }
  CHECK(distance < 1.95 / std::sqrt(static_cast<double>(values.size())));  // 0.1% level
}

TEST(rows_of_different_keys_and_streams_are_different) {
  const Initial initial{InitialKind::kUniform, -1, 1};
  CHECK(values_of(initial, 1, 8) != values_of(initial, 2, 8));
  CHECK(values_of(initial, 1, 8) != values_of(initial, int64_t{1} << 32, 8));
  std::vector<float> other(8);
  write_initial(initial, kStream + 1, 1, other.data(), 8);
  CHECK(values_of(initial, 1, 8) != other);
}

}  // namespace
}  // namespace hotrow
