// Pooled lookups: vectors of bags, beside rows that are read one by one and added in the order of the keys.
#include <algorithm>
#include <cstring>

#include "rowserver/row_client.h"
#include "rowserver/row_service.h"
#include "testing/random.h"
#include "testing/row_servers.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::Keys;
using testing::Random;
using testing::row_of;
using testing::ServedRows;

struct Bags {
  std::vector<uint32_t> offsets{0};
  Keys keys;
};

Bags random_bags(Random& random, size_t count, size_t longest, size_t keys) {
  Bags bags;
  for (size_t bag = 0; bag < count; ++bag) {
    const size_t length = random.below(static_cast<uint32_t>(longest + 1));
    for (size_t i = 0; i < length; ++i)
      bags.keys.push_back(static_cast<int64_t>(random.below(static_cast<uint32_t>(keys))));
    bags.offsets.push_back(static_cast<uint32_t>(bags.keys.size()));
  }
  return bags;
}

std::vector<float> pooled_by_hand(const Bags& bags, Pooling pooling, int64_t publication, uint32_t table, int dim) {
  std::vector<float> out;
  for (size_t bag = 0; bag + 1 < bags.offsets.size(); ++bag) {
    const uint32_t begin = bags.offsets[bag], end = bags.offsets[bag + 1];
    std::vector<float> sum(dim, 0.0f);
    for (uint32_t i = begin; i < end; ++i) {
      const auto row = row_of(publication, table, bags.keys[i], dim);
      for (int d = 0; d < dim; ++d) sum[d] += row[d];
    }
    if (pooling == Pooling::kMean && end > begin)
      for (float& value : sum) value /= static_cast<float>(end - begin);
    out.insert(out.end(), sum.begin(), sum.end());
  }
  return out;
}

std::vector<int64_t> payload_of(const Bags& bags, Pooling pooling, uint32_t table, size_t& bytes) {
  std::vector<char> head;
  const auto count = static_cast<uint32_t>(bags.keys.size()), rows = static_cast<uint32_t>(bags.offsets.size() - 1);
  write_pooled_head({table, count}, {static_cast<uint32_t>(pooling), rows}, bags.offsets.data(), RowType::kFloat, head);
  bytes = head.size() + bags.keys.size() * sizeof(int64_t);
  std::vector<int64_t> payload((bytes + 7) / 8);
  std::memcpy(payload.data(), head.data(), head.size());
  if (count)
    std::memcpy(reinterpret_cast<char*>(payload.data()) + head.size(), bags.keys.data(), count * sizeof(int64_t));
  return payload;
}

bool are_close(const std::vector<float>& a, const float* b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (std::abs(a[i] - b[i]) > 1e-5f * std::max(1.0f, std::abs(a[i]))) return false;
  return true;
}

TEST(pooled_lookups_read_bags_at_a_publication) {
  const std::vector<int> dims{8, 5};
  constexpr size_t kKeys = 100;
  ServedRows rows(dims, kKeys, 8);
  rows.publish({{0, testing::keys_from(0, kKeys)}, {1, testing::keys_from(0, kKeys)}});
  Random random(1);
  RowService::Scratch scratch;
  for (int round = 0; round < 200; ++round) {
    const uint32_t table = random.below(2);
    const auto pooling = random.below(2) ? Pooling::kSum : Pooling::kMean;
    const Bags bags = random_bags(random, random.below(20), 1 + random.below(30), kKeys);
    size_t bytes;
    const auto payload = payload_of(bags, pooling, table, bytes);
    ParsedLookup lookup;
    parse_lookup(reinterpret_cast<const char*>(payload.data()), bytes, dims, lookup);
    CHECK(lookup.pooled && lookup.count == bags.keys.size());
    const size_t size = answer_bytes(lookup, dims);
    CHECK_EQ(size, (bags.offsets.size() - 1) * static_cast<size_t>(dims[table]) * sizeof(float));
    for (const int64_t publication : {1, 2}) {
      std::vector<float> out(size / sizeof(float) + 1);
      const auto reply = rows.service->read(lookup, publication, reinterpret_cast<char*>(out.data()), scratch);
      CHECK(reply.error == RowError::kNone);
      CHECK(are_close(pooled_by_hand(bags, pooling, publication, table, dims[table]), out.data()));
    }
  }
}

TEST(many_bags_are_pooled_in_blocks) {
  const std::vector<int> dims{4};
  ServedRows rows(dims, 1000);
  Random random(2);
  const Bags bags = random_bags(random, 3000, 30, 1000);
  CHECK(bags.keys.size() > 40000);
  size_t bytes;
  const auto payload = payload_of(bags, Pooling::kSum, 0, bytes);
  ParsedLookup lookup;
  parse_lookup(reinterpret_cast<const char*>(payload.data()), bytes, dims, lookup);
  std::vector<float> out(answer_bytes(lookup, dims) / sizeof(float));
  RowService::Scratch scratch;
  CHECK(rows.service->read(lookup, 1, reinterpret_cast<char*>(out.data()), scratch).error == RowError::kNone);
  CHECK(are_close(pooled_by_hand(bags, Pooling::kSum, 1, 0, 4), out.data()));
}

TEST(random_changes_of_pooled_lookups_are_refused_or_consistent) {
  const std::vector<int> dims{4, 3};
  Random random(3);
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    const Bags bags = random_bags(random, random.below(6), 4, 50);
    size_t bytes;
    auto payload = payload_of(bags, Pooling::kSum, random.below(2), bytes);
    auto* data = reinterpret_cast<char*>(payload.data());
    for (uint32_t change = 0; change < 1 + random.below(3) && bytes; ++change)
      data[random.below(static_cast<uint32_t>(bytes))] = static_cast<char>(random.below(256));
    ParsedLookup lookup;
    try {
      parse_lookup(data, bytes, dims, lookup);
    } catch (const std::invalid_argument&) {
      ++refused;
      continue;
    }
    size_t keys = 0;
    const uint32_t* offsets = lookup.offsets.data();
    for (size_t i = 0; i < lookup.tables.size() && lookup.pooled; ++i) {
      CHECK(offsets[0] == 0 && offsets[lookup.bags[i].bags] == lookup.tables[i].keys);
      CHECK(std::is_sorted(offsets, offsets + lookup.bags[i].bags + 1));
      offsets += lookup.bags[i].bags + 1;
    }
    for (const TableKeys& table : lookup.tables) keys += table.keys;
    CHECK(keys == lookup.count);
    CHECK(reinterpret_cast<const char*>(lookup.keys + lookup.count) == data + bytes);
  }
  CHECK(refused > 5000);
}

}  // namespace
}  // namespace hotrow
