#include "index/unique_keys.h"

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "hash/hash.h"
#include "testing/random.h"
#include "testing/test.h"
#include "testing/threads.h"

namespace hotrow {
namespace {

using Keys = std::vector<int64_t>;

// Cuts `keys` into spans of the given lengths; the last span takes the rest.
std::vector<KeySpan> spans_of(const Keys& keys, const std::vector<size_t>& lengths = {}) {
  std::vector<KeySpan> spans;
  size_t at = 0;
  for (size_t length : lengths) {
    length = std::min(length, keys.size() - at);
    spans.push_back({keys.data() + at, length});
    at += length;
  }
  spans.push_back({keys.data() + at, keys.size() - at});
  return spans;
}

void check_against_a_map(const UniqueKeys& unique_keys, const Keys& keys) {
  std::map<int64_t, std::vector<uint32_t>> positions;
  for (size_t i = 0; i < keys.size(); ++i) positions[keys[i]].push_back(static_cast<uint32_t>(i));
  CHECK_EQ(unique_keys.positions(), keys.size());
  CHECK_EQ(unique_keys.size(), positions.size());
  CHECK_EQ(unique_keys.run_begin()[0], 0u);
  for (size_t u = 0; u < unique_keys.size(); ++u) {
    CHECK_EQ(unique_keys.hashes()[u], hash_key(unique_keys.keys()[u]));
    const uint32_t *begin = unique_keys.run() + unique_keys.run_begin()[u],
                   *end = unique_keys.run() + unique_keys.run_begin()[u + 1];
    CHECK(positions[unique_keys.keys()[u]] == std::vector<uint32_t>(begin, end));  // in batch order
  }
  for (size_t i = 0; i < keys.size(); ++i) CHECK_EQ(unique_keys.keys()[unique_keys.inverse()[i]], keys[i]);
}

void check_partitions(const UniqueKeys& unique_keys, const Keys& keys) {
  std::set<uint32_t> before;
  std::map<int64_t, size_t> first;
  for (size_t i = 0; i < keys.size(); ++i) first.emplace(keys[i], i);
  CHECK_EQ(unique_keys.cuts().front(), 0u);
  for (size_t part = 0; part + 1 < unique_keys.cuts().size(); ++part) {
    std::set<uint32_t> here;
    for (size_t u = unique_keys.cuts()[part]; u < unique_keys.cuts()[part + 1]; ++u) {
      here.insert(shard_of(unique_keys.hashes()[u]));
      if (u > unique_keys.cuts()[part]) CHECK(first[unique_keys.keys()[u - 1]] < first[unique_keys.keys()[u]]);
    }
    for (uint32_t shard : here) CHECK(before.insert(shard).second);  // no shard is in two partitions
  }
}

TEST(groups_of_any_size_match_a_map) {
  testing::Random random(1);
  UniqueKeys unique_keys;  // reused, as a plan does: an earlier batch must not affect the result
  for (size_t size : {8193, 0, 1, 2, 15, 8191, 8192, 16385, 100000, 7, 0}) {
    for (uint64_t variety : {uint64_t{3}, size / 4 + 1, uint64_t{1} << 60}) {
      const Keys keys = random.keys(size, variety);
      unique_keys.build(spans_of(keys));
      check_against_a_map(unique_keys, keys);
      check_partitions(unique_keys, keys);
    }
  }
}

TEST(equal_keys_make_one_run) {
  UniqueKeys unique_keys;
  for (size_t size : {1, 8192, 8193, 100000}) {
    const Keys keys(size, -5);
    unique_keys.build(spans_of(keys));
    CHECK_EQ(unique_keys.size(), 1u);
    check_against_a_map(unique_keys, keys);
  }
}

TEST(several_spans_are_one_sequence) {
  testing::Random random(2);
  UniqueKeys unique_keys;
  for (size_t size : {0, 1, 100, 20000})
    for (const auto& lengths : std::vector<std::vector<size_t>>{{0}, {size / 3, 0, size / 2}, {0, 1, size}}) {
      const Keys keys = random.keys(size, size / 2 + 1);
      unique_keys.build(spans_of(keys, lengths));
      check_against_a_map(unique_keys, keys);
    }
  unique_keys.build({});
  CHECK_EQ(unique_keys.size(), 0u);
}

TEST(keys_that_fill_one_partition_alone_match_a_map) {
  Keys keys;
  for (int64_t key = 0; keys.size() < 20000; ++key)
    if (shard_of(hash_key(key)) < 64) keys.push_back(key % 3 ? key : keys.empty() ? 0 : keys.back());
  UniqueKeys unique_keys;
  unique_keys.build(spans_of(keys));
  check_against_a_map(unique_keys, keys);
  check_partitions(unique_keys, keys);
}

TEST(unique_keys_are_the_same_for_any_number_of_threads) {
  testing::Random random(3);
  const Keys keys = random.keys(50000, 9000);
  UniqueKeys one;
  {
    testing::WithThreads threads(1);
    one.build(spans_of(keys, {20000}));
  }
  for (int count : {2, 3, 4}) {
    testing::WithThreads threads(count);
    UniqueKeys many;
    many.build(spans_of(keys, {20000}));
    CHECK(many.cuts() == one.cuts());
    CHECK(std::equal(one.keys(), one.keys() + one.size(), many.keys()));
    CHECK(std::equal(one.inverse(), one.inverse() + one.positions(), many.inverse()));
    CHECK(std::equal(one.run(), one.run() + one.positions(), many.run()));
    CHECK(std::equal(one.run_begin(), one.run_begin() + one.size() + 1, many.run_begin()));
  }
}

}  // namespace
}  // namespace hotrow
