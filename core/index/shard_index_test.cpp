// One shard on its own, driven as Table drives it, against std::unordered_map.
#include "index/shard_index.h"

#include <cmath>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kernels/row_kernels.h"
#include "testing/random.h"
#include "testing/test.h"

namespace hotrow {
namespace {

constexpr uint32_t kShard = 613;

uint64_t unshift(uint64_t x, int by) {
  for (uint64_t known = x >> by; known; known >>= by) x ^= known;
  return x;
}

// The inverse of hash_key, so that a test can choose the hash.
int64_t key_with_hash(uint64_t hash) {
  constexpr uint64_t kInverse1 = 0x319642B2D24D8EC3ull, kInverse2 = 0x96DE1B173F119089ull;
  uint64_t x = unshift(hash, 31) * kInverse1;
  x = unshift(x, 27) * kInverse2;
  const auto key = static_cast<int64_t>(unshift(x, 30) - kGolden);
  CHECK_EQ(hash_key(key), hash);
  return key;
}

int64_t key_in_shard(testing::Random& random) {
  return key_with_hash((random.bits() >> kShardBits) | uint64_t{kShard} << (64 - kShardBits));
}

// Same shard, same line at any size, same tag: only bits 44 to 53 differ, which only the comparison of whole keys uses.
int64_t colliding_key(uint64_t which) {
  return key_with_hash(uint64_t{kShard} << (64 - kShardBits) | which << 44 | 0x5a5a5a5aull << 12 | 0xabc);
}

class Shard {
 public:
  explicit Shard(size_t most_slots)
      : headers_(most_slots / 4 * sizeof(HeaderGroup) + kPage), arena_(size_t{1} << 30), shards_(kShards) {
    headers_.commit(most_slots / 4 * sizeof(HeaderGroup) + kPage);
  }

  uint32_t find(int64_t key) {
    const uint64_t hash = hash_key(key);
    uint32_t slot;
    kernels().find({{shards_.data(), groups(), nullptr, 0}, &key, &hash, 1, &slot});
    return slot;
  }
  void insert(int64_t key, uint32_t slot) {
    slots_ = std::max<uint64_t>(slots_, slot + 1);
    groups()[slot / 4].key[slot % 4] = key;
    ShardWriteScope guard(index());
    if (ShardWriter::full(index(), 1, slots_)) rebuild(std::max(least_bits_, slot_bits_for(slots_)));
    writer().insert(hash_key(key), slot);
  }
  void erase(int64_t key, uint32_t slot) {
    ShardWriteScope guard(index());
    writer().erase(hash_key(key), slot);
  }
  // From here on the index uses at least `slot_bits`.
  void rebuild(uint32_t slot_bits) {
    writer().rebuild(lines_for(kShard, index().rows + 1), slot_bits);
    least_bits_ = slot_bits;
    ++rebuilds;
  }
  ShardIndex& index() { return shards_[kShard]; }
  // Address space that the index has used up so far, in lines.
  size_t lines_spent() {
    char* here = arena_.allocate(1);
    if (!first_) first_ = here;
    return (here - first_) / kLine;
  }

  int rebuilds = 0;

 private:
  HeaderGroup* groups() { return reinterpret_cast<HeaderGroup*>(headers_.data()); }
  ShardWriter writer() { return {index(), groups(), arena_}; }

  Region headers_;
  LineArena arena_;
  std::vector<ShardIndex> shards_;
  uint64_t slots_ = 0;
  uint32_t least_bits_ = kMinSlotBits;
  char* first_ = nullptr;
};

using Oracle = std::unordered_map<int64_t, uint32_t>;

void check_same(Shard& shard, const Oracle& oracle, const std::vector<int64_t>& keys) {
  CHECK_EQ(shard.index().rows, oracle.size());
  for (int64_t key : keys) {
    auto found = oracle.find(key);
    CHECK_EQ(shard.find(key), found == oracle.end() ? kNoSlot : found->second);
  }
}

// Random inserts and erases of `keys`; rising for the first half, falling for the second, so that lines fill and empty.
void churn(Shard& shard, const std::vector<int64_t>& keys, int operations, uint32_t slot_step) {
  testing::Random random(7);
  Oracle oracle;
  std::vector<uint32_t> free;
  uint32_t slots = 0;
  for (int i = 0; i < operations; ++i) {
    const int64_t key = keys[random.below(keys.size())];
    const bool grow = random.below(100) < (i < operations / 2 ? 70 : 30);
    auto found = oracle.find(key);
    CHECK_EQ(shard.find(key), found == oracle.end() ? kNoSlot : found->second);
    if (grow && found == oracle.end()) {
      if (free.empty()) free.push_back(slot_step * slots++);
      shard.insert(key, free.back());
      oracle[key] = free.back();
      free.pop_back();
    } else if (!grow && found != oracle.end()) {
      shard.erase(key, found->second);
      free.push_back(found->second);
      oracle.erase(found);
    }
    if (i % (operations / 8) == 0) check_same(shard, oracle, keys);
  }
  check_same(shard, oracle, keys);
}

TEST(random_inserts_and_erases_match_a_map) {
  testing::Random random(1);
  std::vector<int64_t> keys;
  for (int i = 0; i < 5000; ++i) keys.push_back(key_in_shard(random));
  Shard shard(keys.size());
  churn(shard, keys, 100000, 1);
  CHECK(shard.rebuilds > 10);
}

TEST(keys_of_one_line_and_one_tag_match_a_map) {
  std::vector<int64_t> keys;
  for (uint64_t which = 0; which < 400; ++which) keys.push_back(colliding_key(which));
  Shard shard(keys.size());
  churn(shard, keys, 20000, 1);
  CHECK(shard.rebuilds > 5);
}

TEST(slots_that_need_more_bits_match_a_map) {
  testing::Random random(2);
  std::vector<int64_t> keys;
  for (int i = 0; i < 3000; ++i) keys.push_back(key_in_shard(random));
  Shard shard(keys.size() * 4096);
  churn(shard, keys, 30000, 4096);  // a slot number of 8 million at the end
  CHECK(shard.index().slot_bits > kMinSlotBits);
}

TEST(slots_of_all_32_bits_leave_no_tag_and_still_match) {
  testing::Random random(3);
  Shard shard(1000);
  Oracle oracle;
  std::vector<int64_t> keys;
  for (uint32_t slot = 0; slot < 500; ++slot) {
    keys.push_back(key_in_shard(random));
    if (slot == 250) shard.rebuild(32);
    shard.insert(keys.back(), slot);
    oracle[keys.back()] = slot;
  }
  CHECK_EQ(shard.index().slot_bits, 32u);
  keys.push_back(key_in_shard(random));
  check_same(shard, oracle, keys);
  for (uint32_t slot = 0; slot < 500; slot += 2) {
    shard.erase(keys[slot], slot);
    oracle.erase(keys[slot]);
  }
  check_same(shard, oracle, keys);
}

TEST(erasing_from_full_lines_keeps_later_keys_reachable) {
  Shard shard(200);
  Oracle oracle;
  std::vector<int64_t> keys;
  for (uint32_t which = 0; which < 100; ++which) {  // seven lines, of which the first ones are full
    keys.push_back(colliding_key(which));
    shard.insert(keys.back(), which);
    oracle[keys.back()] = which;
  }
  for (uint32_t which = 0; which < 60; ++which) {
    shard.erase(keys[which], which);
    oracle.erase(keys[which]);
    check_same(shard, oracle, keys);
  }
  CHECK(shard.index().deleted > 0);
  for (uint32_t which = 0; which < 60; ++which) {  // into the tombstones
    shard.insert(keys[which], which);
    oracle[keys[which]] = which;
    check_same(shard, oracle, keys);
  }
}

TEST(a_shard_that_was_emptied_is_empty) {
  testing::Random random(4);
  Shard shard(2000);
  std::vector<int64_t> keys;
  for (uint32_t slot = 0; slot < 2000; ++slot) shard.insert(keys.emplace_back(key_in_shard(random)), slot);
  for (uint32_t slot = 0; slot < 2000; ++slot) shard.erase(keys[slot], slot);
  check_same(shard, {}, keys);
}

// Expiry replaces rows for months: tombstones must not make the index run out of address space.
TEST(steady_churn_does_not_eat_the_address_space) {
  testing::Random random(5);
  constexpr uint32_t kRows = 3000;
  Shard shard(kRows);
  std::vector<int64_t> keys;
  for (uint32_t slot = 0; slot < kRows; ++slot) shard.insert(keys.emplace_back(key_in_shard(random)), slot);
  const size_t spent = shard.lines_spent();
  for (uint32_t i = 0; i < 20 * kRows; ++i) {
    const uint32_t slot = i % kRows;
    shard.erase(keys[slot], slot);
    shard.insert(keys[slot] = key_in_shard(random), slot);
  }
  CHECK(shard.lines_spent() - spent < 4 * shard.index().lines);
}

TEST(lines_hold_their_rows_between_76_and_93_percent_full) {
  for (uint32_t shard = 0; shard < kShards; shard += 37)
    for (uint64_t rows = 0; rows < 3000; rows = rows + 1 + rows / 7) {
      const uint32_t lines = lines_for(shard, rows);
      ShardIndex index;
      index.lines = lines;
      CHECK(lines >= 1);
      CHECK(!ShardWriter::full(index, rows, 0));
      const double fill = static_cast<double>(rows) / (lines * double{kEntriesPerLine});
      if (rows > 500) CHECK(fill > 0.72 && fill <= 0.93);
    }
}

TEST(shards_do_not_all_grow_at_the_same_size) {
  std::unordered_set<uint32_t> sizes;
  for (uint32_t shard = 0; shard < kShards; ++shard) sizes.insert(lines_for(shard, 10000));
  CHECK(sizes.size() > 50);
}

TEST(slot_bits_leave_room_to_grow) {
  CHECK_EQ(slot_bits_for(0), uint32_t{kMinSlotBits});
  for (uint64_t slots : {1ull << 19, 1ull << 20, 1ull << 24, 3ull << 28, 1ull << 31}) {
    const uint32_t bits = slot_bits_for(slots);
    CHECK(bits == 32 || slots * 3 / 2 + kFirstSlotCode < (1ull << bits));
  }
  CHECK_EQ(slot_bits_for(0xfffffff0ull), 32u);
}

}  // namespace
}  // namespace hotrow
