#include "rows/row_header.h"

#include <cmath>
#include <vector>

#include "testing/random.h"
#include "testing/test.h"

namespace hotrow {
namespace {

constexpr uint64_t kMostCount = uint64_t{kCountMantissa} << kCountMaxExponent;

auto draws(uint32_t bits) {
  return [bits] { return bits; };
}
uint32_t never() {
  CHECK(!"an exact count was rounded");
  return 0;
}

TEST(counts_are_exact_up_to_4095) {
  uint16_t one_by_one = 0;
  for (uint64_t n = 0; n <= kCountMantissa; ++n) {
    CHECK_EQ(decode_count(one_by_one), n);
    CHECK_EQ(decode_count(add_count(0, n, never)), n);
    if (n < kCountMantissa) one_by_one = add_count(one_by_one, 1, never);
  }
}

TEST(a_large_count_is_one_of_its_two_neighbours) {
  testing::Random random(1);
  for (int i = 0; i < 100000; ++i) {
    const uint64_t n = random.below(uint64_t{1} << (1 + random.below(27)));
    const uint64_t low = decode_count(add_count(0, n, draws(~0u))), high = decode_count(add_count(0, n, draws(0)));
    CHECK(low <= n && n <= high);
    CHECK(static_cast<double>(high - low) <= static_cast<double>(n) / 2048);
    const uint64_t drawn = decode_count(add_count(0, n, draws(static_cast<uint32_t>(random.bits()))));
    CHECK(drawn == low || drawn == high);
  }
}

TEST(counts_never_fall_and_keep_their_order) {
  testing::Random random(2);
  for (int i = 0; i < 200000; ++i) {
    const auto code = add_count(0, random.below(uint64_t{1} << (1 + random.below(28))), draws(0));
    const uint64_t few = random.below(5000), more = few + random.below(5000);
    const auto bits = static_cast<uint32_t>(random.bits());
    const auto small = add_count(code, few, draws(bits)), large = add_count(code, more, draws(0));
    CHECK(decode_count(small) >= decode_count(code));
    CHECK(decode_count(large) >= decode_count(small));
    CHECK((large >= small) == (decode_count(large) >= decode_count(small)));  // codes sort like their counts
  }
}

TEST(rounded_counts_are_right_on_average) {
  testing::Random random(3);
  constexpr int kRows = 128, kSightings = 100000;
  double sum = 0;
  for (int row = 0; row < kRows; ++row) {
    uint16_t code = 0;
    for (int i = 0; i < kSightings; ++i)
      code = add_count(code, 1, [&] { return static_cast<uint32_t>(random.bits()); });
    const double count = static_cast<double>(decode_count(code));
    CHECK(std::fabs(count / kSightings - 1) < 0.04);
    sum += count;
  }
  CHECK(std::fabs(sum / kRows / kSightings - 1) < 0.003);
}

TEST(counts_stop_at_their_largest) {
  for (uint32_t bits : {0u, ~0u}) {
    CHECK_EQ(decode_count(add_count(0, kMostCount, draws(bits))), kMostCount);
    CHECK_EQ(decode_count(add_count(0, kMostCount + (1 << 15), draws(bits))), kMostCount);
    CHECK_EQ(decode_count(add_count(0, uint64_t{1} << 60, draws(bits))), kMostCount);
    CHECK_EQ(decode_count(add_count(0xffff, 1u << 20, draws(bits))), kMostCount);
  }
}

TEST(the_kernels_count_draws_from_the_row_and_the_step) {
  const uint64_t stream = stream_key(4, 5, Stream::kCount);
  for (uint32_t step = 0; step < 100; ++step)
    CHECK_EQ(add_count_slow(0, 5001, stream, -3, step), add_count(0, 5001, draws(draw(stream, -3, step, 0)[0])));
}

}  // namespace
}  // namespace hotrow
