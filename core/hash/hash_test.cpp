#include "hash/hash.h"

#include <cstring>
#include <unordered_set>
#include <vector>

#include "testing/random.h"
#include "testing/test.h"

namespace hotrow {
namespace {

uint64_t hash_text(const char* text, uint64_t seed = 0) { return hash_bytes(text, std::strlen(text), seed); }

// The buffer of xxHash's own self-test.
std::vector<unsigned char> sanity_buffer(size_t size) {
  std::vector<unsigned char> bytes(size);
  uint64_t state = 2654435761u;
  for (unsigned char& byte : bytes) {
    byte = static_cast<unsigned char>(state >> 56);
    state *= 11400714785074694797ull;
  }
  return bytes;
}

TEST(hash_of_well_known_texts_is_xxh64) {
  CHECK_EQ(hash_text(""), 0xEF46DB3751D8E999ull);
  CHECK_EQ(hash_text("a"), 0xD24EC4F1A98C6E5Bull);
  CHECK_EQ(hash_text("abc"), 0x44BC2CF5AD770999ull);
}

TEST(hash_of_published_vectors_is_xxh64) {
  struct Vector {
    size_t size;
    uint64_t plain, seeded;
  };
  constexpr Vector kVectors[] = {{0, 0xEF46DB3751D8E999ull, 0xAC75FDA2929B17EFull},
                                 {1, 0xE934A84ADB052768ull, 0x5014607643A9B4C3ull},
                                 {14, 0x8282DCC4994E35C8ull, 0xC3BD6BF63DEB6DF0ull},
                                 {222, 0xB641AE8CB691C174ull, 0x20CB8AB7AE10C14Aull}};
  const auto bytes = sanity_buffer(222);
  for (const Vector& vector : kVectors) {
    CHECK_EQ(hash_bytes(bytes.data(), vector.size, 0), vector.plain);
    CHECK_EQ(hash_bytes(bytes.data(), vector.size, 2654435761u), vector.seeded);
  }
}

TEST(hash_does_not_depend_on_where_the_bytes_lie) {
  const auto bytes = sanity_buffer(100);
  for (size_t size = 0; size <= bytes.size(); ++size) {
    const uint64_t want = hash_bytes(bytes.data(), size, 7);
    for (size_t shift = 1; shift < 8; ++shift) {
      std::vector<unsigned char> moved(shift + size);
      if (size) std::memcpy(moved.data() + shift, bytes.data(), size);
      CHECK_EQ(hash_bytes(moved.data() + shift, size, 7), want);
    }
  }
}

TEST(integers_and_keys_never_collide) {
  std::unordered_set<uint64_t> ints, keys;
  for (int64_t x = -50000; x < 50000; ++x) {
    ints.insert(hash_int(static_cast<uint64_t>(x), 3));
    keys.insert(hash_key(x));
  }
  CHECK_EQ(ints.size(), 100000u);
  CHECK_EQ(keys.size(), 100000u);
}

TEST(a_cross_tells_its_sides_apart) {
  testing::Random random(1);
  for (int i = 0; i < 1000; ++i) {
    const uint64_t a = random.bits(), b = random.bits();
    CHECK(cross(a, b) != cross(b, a));
  }
}

TEST(neighbouring_keys_spread_evenly_over_the_shards) {
  std::vector<int> rows(kShards);
  for (int64_t key = 0; key < 100 * kShards; ++key) ++rows[shard_of(hash_key(key))];
  double chi_square = 0;
  for (int n : rows) chi_square += (n - 100.0) * (n - 100.0) / 100.0;
  // 1,023 degrees of freedom: a mean of 1,023 and a standard deviation of 45.
  CHECK(chi_square > 1023 - 5 * 45 && chi_square < 1023 + 5 * 45);
}

}  // namespace
}  // namespace hotrow
