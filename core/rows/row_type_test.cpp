// Values in the types of rows: against plain arithmetic, over all halfs and random floats.
#include "rows/row_type.h"

#include <bit>
#include <cmath>
#include <vector>

#include "kernels/row_kernels.h"
#include "testing/random.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::Random;

// A half's value from its parts.
double plain(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const double size = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  return half & 0x8000 ? -size : size;
}

std::vector<float> decoded(RowType type, const std::vector<uint32_t>& row, int dim) {
  std::vector<float> values(dim);
  kernels().decode(type, reinterpret_cast<const char*>(row.data()), dim, values.data());
  return values;
}

TEST(every_half_reads_as_the_number_it_is_and_is_written_back_as_itself) {
  std::vector<uint32_t> row(32768);
  for (uint32_t half = 0; half < 65536; ++half) row[half / 2] |= half << (half % 2 * 16);
  const auto values = decoded(RowType::kHalf, row, 65536);
  for (uint32_t half = 0; half < 65536; ++half) {
    if ((half & 0x7c00) == 0x7c00) {
      CHECK((half & 0x3ff) ? std::isnan(values[half]) : std::isinf(values[half]));
      continue;
    }
    CHECK_EQ(static_cast<double>(values[half]), plain(static_cast<uint16_t>(half)));
    CHECK_EQ(std::signbit(values[half]), (half & 0x8000) != 0);
    CHECK_EQ(half_of(values[half]), half);
  }
}

TEST(a_float_becomes_the_nearest_half_and_the_even_one_of_two) {
  for (uint32_t half = 0; half < 0x7bff; ++half) {
    const double low = plain(static_cast<uint16_t>(half)), high = plain(static_cast<uint16_t>(half + 1));
    const auto middle = static_cast<float>((low + high) / 2);  // exact
    CHECK_EQ(half_of(middle), half + (half & 1));
    CHECK_EQ(half_of(std::nextafterf(middle, 0)), half);
    CHECK_EQ(half_of(std::nextafterf(middle, INFINITY)), half + 1);
    CHECK_EQ(half_of(-middle), 0x8000 | (half + (half & 1)));
  }
  CHECK_EQ(half_of(65519.996f), 0x7bff);
  CHECK_EQ(half_of(65520.0f), 0x7c00);
  CHECK_EQ(half_of(1e-30f), 0);
}

TEST(a_bfloat_is_the_upper_half_of_the_nearest_float_and_the_even_one_of_two) {
  auto value = [](uint32_t bfloat) { return std::bit_cast<float>(bfloat << 16); };
  for (uint32_t bfloat = 0; bfloat < 0x7f7f; ++bfloat) {
    const float middle = std::bit_cast<float>(bfloat << 16 | 0x8000);
    CHECK_EQ(bfloat_of(value(bfloat)), bfloat);
    CHECK_EQ(bfloat_of(middle), bfloat + (bfloat & 1));
    CHECK_EQ(bfloat_of(std::nextafterf(middle, 0)), bfloat);
    CHECK_EQ(bfloat_of(std::nextafterf(middle, INFINITY)), bfloat + 1);
    CHECK_EQ(bfloat_of(-middle), 0x8000 | (bfloat + (bfloat & 1)));
  }
  CHECK(std::isnan(value(bfloat_of(std::bit_cast<float>(0x7f800001u)))));
  std::vector<uint32_t> row(2);
  const std::vector<float> some{1.0f, -0.5f, 3.140625f};
  encode_row(RowType::kBFloat, some.data(), 3, row.data());
  CHECK(decoded(RowType::kBFloat, row, 3) == some);
}

TEST(int8_values_are_off_by_half_a_step_at_most_and_equal_ones_are_exact) {
  Random random(7);
  for (int dim : {1, 3, 4, 16, 33}) {
    std::vector<float> values(dim);
    for (float& value : values) value = static_cast<float>(random.below(2000)) / 700.0f - 1.0f;
    std::vector<uint32_t> row(words_of(RowType::kByte, dim), ~0u);
    encode_row(RowType::kByte, values.data(), dim, row.data());
    const auto scale = std::bit_cast<float>(row[row.size() - 2]), bias = std::bit_cast<float>(row.back());
    const auto read = decoded(RowType::kByte, row, dim);
    for (int i = 0; i < dim; ++i) {
      CHECK(std::abs(read[i] - values[i]) <= scale * 0.5001f + 1e-6f);
      const auto code = static_cast<float>(reinterpret_cast<const uint8_t*>(row.data())[i]);
      CHECK_EQ(std::bit_cast<uint32_t>(read[i]), std::bit_cast<uint32_t>(code * scale + bias));
    }
    const std::vector<float> equal(dim, -0.3f);
    encode_row(RowType::kByte, equal.data(), dim, row.data());
    CHECK(decoded(RowType::kByte, row, dim) == equal);
  }
}

}  // namespace
}  // namespace hotrow
