// The history against plain maps: whatever was published, restoring a kept publication gives exactly its rows.
#include "rowserver/publication_history.h"

#include <deque>
#include <map>
#include <set>

#include "testing/random.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::Random;

constexpr int kDims[] = {3, 7};
struct Value {
  std::vector<float> values;
  bool found;
  bool operator==(const Value&) const = default;
};
using State = std::map<int64_t, Value>;  // of one table; a key without an entry has never been set
struct Model {
  State tables[2];
};

Value initial(int table, int64_t key) {
  return {std::vector<float>(kDims[table], static_cast<float>(key % 1000) * 0.5f - 1), false};
}

Value read(const Model& model, int table, int64_t key) {
  const auto found = model.tables[table].find(key);
  return found == model.tables[table].end() ? initial(table, key) : found->second;
}

// Sets and removes random rows, and returns what was there before.
std::vector<ChangedRows> change(Model& model, Random& random, size_t most) {
  std::vector<ChangedRows> before;
  for (int table = 0; table < 2; ++table) {
    if (random.below(4) == 0) continue;
    std::set<int64_t> unique;
    for (size_t i = random.below(most + 1); i > 0; --i) unique.insert(random.key(60));
    const std::vector<int64_t> keys(unique.begin(), unique.end());
    std::vector<float> values;
    std::vector<uint8_t> found;
    for (const int64_t key : keys) {
      const Value old = read(model, table, key);
      values.insert(values.end(), old.values.begin(), old.values.end());
      found.push_back(old.found);
      if (random.below(5) == 0)
        model.tables[table].erase(key);
      else
        model.tables[table][key] = {random.reals(static_cast<size_t>(kDims[table])), true};
    }
    before.emplace_back(static_cast<uint32_t>(table), kDims[table], keys, std::move(values), std::move(found));
  }
  return before;
}

// Rows of `publication`, by reading the newest and undoing. Keys repeat.
bool restores(const PublicationHistory& history, int64_t publication, const Model& now, const Model& then,
              Random& random, bool want_found) {
  for (int table = 0; table < 2; ++table) {
    const auto keys = random.keys(40, 80);
    std::vector<float> rows;
    std::vector<char> found;
    for (const int64_t key : keys) {
      const Value value = read(now, table, key);
      rows.insert(rows.end(), value.values.begin(), value.values.end());
      found.push_back(value.found);
    }
    history.restore(publication, static_cast<uint32_t>(table), keys.data(), keys.size(), rows.data(),
                    want_found ? reinterpret_cast<bool*>(found.data()) : nullptr);
    for (size_t i = 0; i < keys.size(); ++i) {
      const Value expected = read(then, table, keys[i]);
      const float* row = rows.data() + i * kDims[table];
      if (std::vector<float>(row, row + kDims[table]) != expected.values) return false;
      if (want_found && static_cast<bool>(found[i]) != expected.found) return false;
    }
  }
  return true;
}

TEST(every_kept_publication_restores_exactly) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    const size_t most_entries = 1 + random.below(12), most_bytes = random.below(3) ? size_t{1} << 30 : 8000;
    PublicationHistory history(most_entries, most_bytes);
    Model now;
    int64_t number = static_cast<int64_t>(random.below(1000));
    std::map<int64_t, Model> all{{number, now}};
    for (int round = 0; round < 60; ++round) {
      const int64_t previous = number;
      number += 1 + static_cast<int64_t>(random.below(4) == 0 ? random.below(5) : 0);  // some cut-overs take several
      history.add(number, previous, change(now, random, random.below(30)));
      all[number] = now;
      CHECK(history.entries() >= 1 && history.entries() <= most_entries);
      CHECK(history.entries() == 1 || history.bytes() <= most_bytes);
      const int64_t oldest = history.oldest(number);
      for (const auto& [publication, then] : all) {
        CHECK_EQ(history.reaches(publication, number), publication >= oldest);
        if (publication >= oldest) CHECK(restores(history, publication, now, then, random, random.below(2)));
      }
      for (int64_t between = oldest - 2; between < number + 3; ++between)
        CHECK_EQ(history.reaches(between, number), between >= oldest && all.count(between));
    }
  }
}

TEST(the_oldest_publications_are_dropped_by_count_and_by_bytes) {
  const auto one = [](size_t keys) {
    std::vector<int64_t> unique;
    for (size_t i = 0; i < keys; ++i) unique.push_back(static_cast<int64_t>(i));
    std::vector<ChangedRows> changed;
    changed.emplace_back(0, 4, unique, std::vector<float>(keys * 4), std::vector<uint8_t>(keys));
    return changed;
  };
  PublicationHistory counted(3, size_t{1} << 30);
  CHECK_EQ(counted.oldest(10), 10);
  CHECK(counted.reaches(10, 10) && !counted.reaches(9, 10));
  for (int64_t number = 11; number <= 20; ++number) {
    counted.add(number, number - 1, one(5));
    CHECK_EQ(counted.entries(), std::min<size_t>(3, static_cast<size_t>(number - 10)));
    CHECK_EQ(counted.oldest(number), std::max<int64_t>(10, number - 3));
  }
  counted.clear();
  CHECK(counted.entries() == 0 && counted.bytes() == 0 && counted.oldest(20) == 20);

  PublicationHistory single(8, size_t{1} << 30);
  single.add(1, 0, one(1000));
  const size_t bytes = single.bytes();
  CHECK(bytes >= 1000 * (8 + 4 * 4 + 1));
  PublicationHistory bounded(100, 3 * bytes);
  for (int64_t number = 1; number <= 10; ++number) {
    bounded.add(number, number - 1, one(1000));
    CHECK_EQ(bounded.entries(), std::min<size_t>(3, static_cast<size_t>(number)));
    CHECK_EQ(bounded.bytes(), bounded.entries() * bytes);
  }
  bounded.add(11, 10, one(100'000));  // alone larger than the bound: the newest is kept
  CHECK(bounded.entries() == 1 && bounded.oldest(11) == 10);
  bounded.add(12, 11, one(1));
  CHECK(bounded.entries() == 1 && bounded.oldest(12) == 11 && bounded.bytes() < bytes);

  PublicationHistory none(0, 0);
  none.add(1, 0, one(1));
  CHECK(none.entries() == 1 && none.oldest(1) == 0);
}

}  // namespace
}  // namespace hotrow
