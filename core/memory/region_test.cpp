#include "memory/region.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "testing/residency.h"
#include "testing/test.h"

namespace hotrow {
namespace {

constexpr size_t kReserve = size_t{64} << 20;

TEST(a_region_grows_in_place_and_keeps_what_it_holds) {
  for (bool huge : {false, true}) {
    Region region(kReserve, huge);
    char* base = region.data();
    CHECK_EQ(reinterpret_cast<uintptr_t>(base) % kHugePage, 0u);
    size_t filled = 0;
    for (size_t bytes : {size_t{1}, size_t{70000}, size_t{3} << 20, (size_t{5} << 20) + 1, size_t{9} << 20}) {
      const size_t promised = region.rounded(bytes);
      region.commit(bytes);
      CHECK_EQ(region.committed(), promised);
      CHECK(region.committed() >= bytes);
      CHECK(region.data() == base);
      CHECK(std::all_of(base, base + filled, [](char c) { return c == 7; }));
      CHECK(std::all_of(base + filled, base + region.committed(), [](char c) { return c == 0; }));
      std::fill(base + filled, base + region.committed(), 7);
      filled = region.committed();
    }
  }
}

TEST(a_region_never_shrinks) {
  Region region(kReserve);
  region.commit(1 << 20);
  const size_t before = region.committed();
  region.commit(1);
  CHECK_EQ(region.committed(), before);
  CHECK_EQ(region.rounded(1), before);
}

TEST(a_region_that_is_full_says_so_and_stays_usable) {
  Region region(kReserve);
  region.commit(100);
  const size_t before = region.committed();
  CHECK_THROWS(std::bad_alloc, region.commit(region.reserved() + 1));
  CHECK_EQ(region.committed(), before);
  region.commit(region.reserved());
  region.data()[region.reserved() - 1] = 1;
}

TEST(reserving_takes_no_memory_and_discarding_gives_it_back) {
  Region region(kReserve, /*huge_pages=*/false);
  region.commit(100 * kPage);
  CHECK_EQ(testing::resident_pages(region.data(), region.committed()), 0u);
  std::fill(region.data(), region.data() + 100 * kPage, 7);
  CHECK_EQ(testing::resident_pages(region.data(), 100 * kPage), 100u);
  region.discard(10 * kPage, 20 * kPage);
  CHECK_EQ(testing::resident_pages(region.data(), 100 * kPage), 80u);
  CHECK_EQ(region.data()[10 * kPage - 1], 7);
  CHECK_EQ(region.data()[30 * kPage], 7);
  CHECK(std::all_of(region.data() + 10 * kPage, region.data() + 30 * kPage, [](char c) { return c == 0; }));
}

}  // namespace
}  // namespace hotrow
