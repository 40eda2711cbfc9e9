#include "random/philox.h"

#include <unordered_set>

#include "testing/test.h"

namespace hotrow {
namespace {

// Random123's known-answer file, the lines of philox4x32 with 10 rounds.
TEST(philox_gives_the_published_answers) {
  CHECK((philox({0, 0, 0, 0}, 0) == Draws{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  CHECK((philox({~0u, ~0u, ~0u, ~0u}, ~0ull) == Draws{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  CHECK((philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822ull) ==
         Draws{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(a_draw_counts_the_key_in_its_low_words) {
  CHECK((draw(99, -2, 3, 4) == philox({0xfffffffeu, 0xffffffffu, 3, 4}, 99)));
  CHECK((draw(99, int64_t{5} << 32, 3, 4) == philox({0, 5, 3, 4}, 99)));
}

TEST(streams_of_one_table_and_tables_of_one_seed_are_apart) {
  std::unordered_set<uint64_t> seen;
  for (uint64_t seed = 0; seed < 4; ++seed)
    for (uint64_t table = 0; table < 100; ++table)
      for (Stream stream : {Stream::kInitial, Stream::kCount, Stream::kRounding, Stream::kAdmission})
        seen.insert(stream_key(seed, table * 1000, stream));
  CHECK_EQ(seen.size(), 4u * 100u * 4u);
}

}  // namespace
}  // namespace hotrow
