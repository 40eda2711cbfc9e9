// A table on its own, one thread: against a map of rows.
#include "table/table.h"

#include <algorithm>
#include <set>
#include <stdexcept>

#include "testing/random.h"
#include "testing/tables.h"
#include "testing/test.h"
#include "testing/threads.h"

namespace hotrow {
namespace {

using testing::make_table;
using testing::Row;
using testing::Rows;
using testing::rows_of;

std::vector<int64_t> distinct(std::vector<int64_t> keys) {
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  return keys;
}

std::vector<uint32_t> create(Table& table, const std::vector<int64_t>& keys) {
  std::vector<uint32_t> slots(keys.size());
  table.find_or_create(keys.data(), keys.size(), slots.data());
  return slots;
}

std::vector<uint32_t> find(const Table& table, const std::vector<int64_t>& keys) {
  std::vector<uint32_t> slots(keys.size());
  table.find(keys.data(), keys.size(), slots.data());
  return slots;
}

// Reads agree with the map for keys that have a row and for keys that have none.
void check_reads(const Table& table, const Rows& oracle, const std::vector<int64_t>& keys) {
  std::vector<float> values(keys.size() * table.dim());
  std::vector<char> found(keys.size());
  table.read(keys.data(), nullptr, keys.size(), values.data(), reinterpret_cast<bool*>(found.data()));
  const auto slots = find(table, keys);
  for (size_t i = 0; i < keys.size(); ++i) {
    auto row = oracle.find(keys[i]);
    const bool here = row != oracle.end();
    const Row want = here ? row->second : testing::initial_row(table, keys[i]);
    CHECK_EQ(static_cast<bool>(found[i]), here);
    CHECK_EQ(slots[i] != kNoSlot, here);
    CHECK(std::equal(want.values.begin(), want.values.begin() + table.dim(), values.begin() + i * table.dim()));
  }
}

TEST(random_operations_match_a_map_of_rows) {
  constexpr uint64_t kVariety = 4000;
  testing::Random random(1);
  auto table = make_table(5, RuleKind::kRowWiseAdagrad);
  Rows oracle;
  for (int round = 0; round < 300; ++round) {
    const auto keys = random.keys(random.below(400), kVariety);
    const auto unique = distinct(keys);
    const bool whole = random.below(2), counted = random.below(2);
    const int floats = whole ? table->width() : table->dim();
    switch (random.below(4)) {
      case 0:
        create(*table, keys);
        for (int64_t key : keys) oracle.emplace(key, testing::initial_row(*table, key));
        break;
      case 1: {
        const auto values = random.reals(unique.size() * floats);
        std::vector<uint64_t> counts(unique.size(), 17);
        std::vector<uint32_t> steps(unique.size(), round);
        table->assign(unique.data(), unique.size(), values.data(), floats, counted ? counts.data() : nullptr,
                      counted ? steps.data() : nullptr);
        for (size_t i = 0; i < unique.size(); ++i) {
          Row& row = oracle.emplace(unique[i], testing::initial_row(*table, unique[i])).first->second;
          std::copy_n(values.begin() + i * floats, floats, row.values.begin());
          if (counted) row.count = 17, row.last_step = round;
        }
        break;
      }
      case 2: {
        uint64_t erased = 0;
        for (int64_t key : keys) erased += oracle.erase(key);
        CHECK_EQ(table->erase(keys.data(), keys.size()), erased);
        break;
      }
      default:
        check_reads(*table, oracle, keys);
    }
    CHECK_EQ(table->size(), oracle.size());
    if (round % 20 == 0) CHECK(rows_of(*table) == oracle);
  }
  CHECK(rows_of(*table) == oracle);
  check_reads(*table, oracle, random.keys(2000, kVariety * 2));
}

TEST(many_rows_are_found_while_the_table_grows) {
  testing::Random random(2);
  auto table = make_table(1);
  std::set<int64_t> oracle;
  for (int round = 0; round < 12; ++round) {
    const auto keys = random.keys(20000, uint64_t{1} << 40);
    const auto slots = create(*table, keys);
    oracle.insert(keys.begin(), keys.end());
    CHECK_EQ(table->size(), oracle.size());
    CHECK(find(*table, keys) == slots);
  }
  const std::vector<int64_t> all(oracle.begin(), oracle.end());
  const auto slots = find(*table, all);
  CHECK_EQ(std::set<uint32_t>(slots.begin(), slots.end()).size(), all.size());
  CHECK(!std::count(slots.begin(), slots.end(), kNoSlot));
}

TEST(slots_are_the_same_for_any_number_of_threads) {
  testing::Random random(3);
  const auto keys = random.keys(60000, 40000), gone = random.keys(5000, 40000), more = random.keys(60000, 100000);
  std::vector<std::vector<uint32_t>> slots;
  for (int count : {1, 2, 4}) {
    testing::WithThreads threads(count);
    auto table = make_table(3);
    create(*table, keys);
    table->erase(gone.data(), gone.size());
    slots.push_back(create(*table, keys));
    // More rows than freed slots: the first take those, the others new ones.
    table->erase(gone.data(), gone.size());
    table->find_or_create(more.data(), more.size(), nullptr);
    const auto found = find(*table, more);
    CHECK_EQ(std::set<uint32_t>(found.begin(), found.end()).size(), distinct(more).size());
    slots.back().insert(slots.back().end(), found.begin(), found.end());
  }
  CHECK(slots[0] == slots[1] && slots[0] == slots[2]);
}

TEST(erased_slots_are_used_again) {
  auto table = make_table(4);
  const std::vector<int64_t> keys = testing::Random(4).keys(3000, uint64_t{1} << 50);
  create(*table, keys);
  const uint64_t slots = table->slots(), epoch = table->erase_epoch();
  CHECK_EQ(table->erase(keys.data(), keys.size()), keys.size());
  CHECK_EQ(table->erase(keys.data(), keys.size()), 0u);
  CHECK(table->erase_epoch() > epoch);
  CHECK(rows_of(*table).empty());
  create(*table, keys);
  CHECK_EQ(table->slots(), slots);
}

TEST(a_row_that_comes_back_is_new) {
  auto table = make_table(3, RuleKind::kAdam);
  const int64_t key = -7;
  const std::vector<float> values(table->width(), 9.0f);
  const uint64_t count = 100;
  const uint32_t step = 5;
  table->assign(&key, 1, values.data(), table->width(), &count, &step);
  CHECK_EQ(rows_of(*table)[key].count, 100u);
  table->erase(&key, 1);
  create(*table, {key});
  CHECK(rows_of(*table)[key] == testing::initial_row(*table, key));
}

TEST(assign_refuses_a_key_given_twice_and_changes_nothing) {
  auto table = make_table(2);
  const std::vector<int64_t> keys = {1, 2, 1};
  const std::vector<float> values(6, 1.0f);
  CHECK_THROWS(std::invalid_argument, table->assign(keys.data(), 3, values.data(), 2, nullptr, nullptr));
  CHECK_EQ(table->size(), 0u);
}

TEST(first_values_depend_on_seed_table_and_key_alone) {
  testing::Random random(5);
  const auto keys = distinct(random.keys(500, 1 << 20));
  const std::vector<int64_t> reversed(keys.rbegin(), keys.rend());
  auto a = make_table(6), b = make_table(6), other = make_table(6, RuleKind::kSgd, 0, a->options().initial, "other");
  create(*a, keys);
  for (int64_t key : reversed) create(*b, {key});
  create(*other, keys);
  CHECK(rows_of(*a) == rows_of(*b));
  CHECK(rows_of(*a) != rows_of(*other));
}

TEST(a_scan_in_small_pieces_sees_each_row_once) {
  auto table = make_table(2);
  const auto keys = testing::Random(6).keys(1000, 5000);
  create(*table, keys);
  table->erase(keys.data(), 300);
  std::vector<uint32_t> live, all;
  for (uint64_t at = 0; at < table->slots();) {
    at = table->scan(at, 7, live);
    CHECK(live.size() <= 7);
    all.insert(all.end(), live.begin(), live.end());
  }
  CHECK_EQ(all.size(), table->size());
  CHECK(std::is_sorted(all.begin(), all.end()));
}

}  // namespace
}  // namespace hotrow
