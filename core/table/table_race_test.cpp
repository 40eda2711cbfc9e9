// Readers beside a writer: a row that is read is whole and belongs to its key, whatever the writer does to it, its slot
// or its shard's index. Run it under the thread and address sanitizers too.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "plan/plan.h"
#include "testing/random.h"
#include "testing/tables.h"
#include "testing/test.h"
#include "testing/threads.h"

namespace hotrow {
namespace {

using testing::Random;

constexpr auto kTime = std::chrono::milliseconds(600);
constexpr int kDim = 24;
constexpr int64_t kKeys = 3000;
constexpr float kStride = 4096;  // values of key k lie in [k * kStride, (k + 1) * kStride), where integers are exact
constexpr int64_t kOwnable = 4000;
static_assert(kKeys <= kOwnable && kOwnable * 4096 < (1 << 24));

// Runs `write` until the time is up, and `read` in two other threads. Each thread has its own random source.
template <class Write, class Read>
void race(Write write, Read read) {
  testing::WithThreads threads(3);
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (uint64_t seed : {1, 2})
    readers.emplace_back([&, seed] {
      Random random(seed);
      while (!stop) read(random);
    });
  Random random(3);
  for (const auto end = std::chrono::steady_clock::now() + kTime; std::chrono::steady_clock::now() < end;)
    write(random);
  stop = true;
  for (auto& reader : readers) reader.join();
}

// All values of a row are one number, which tells the key that it was written for.
void assign(Table& table, const std::vector<int64_t>& keys, Random& random) {
  std::vector<float> rows;
  for (int64_t key : keys)
    rows.insert(rows.end(), kDim, static_cast<float>(key) * kStride + static_cast<float>(1 + random.below(1000)));
  table.assign(keys.data(), keys.size(), rows.data(), kDim, nullptr, nullptr);
}

std::vector<int64_t> some_keys(Random& random, size_t most) {
  std::vector<int64_t> keys;
  int64_t key = static_cast<int64_t>(random.below(20));
  for (size_t i = 0; i < most && key < kKeys; ++i, key += 1 + static_cast<int64_t>(random.below(2 * kKeys / most)))
    keys.push_back(key);
  return keys;
}

// A gradient of -1 at learning rate 1: the values of each updated row rise by its number of occurrences.
void add_one(Plan& plan, const std::shared_ptr<Table>& table, const std::vector<int64_t>& keys) {
  std::vector<float> gradient(keys.size() * kDim, -1.0f);
  plan.route({{table, {{keys.data(), keys.size(), nullptr, keys.size(), nullptr, Pooling::kSum}}}});
  plan.fetch();
  plan.update({{gradient.data(), keys.size(), kDim, kDim}}, {}, {{{{1.0f}, 0, 0}}, 1, 1});
}

TEST(a_row_read_beside_a_writer_is_whole_and_its_keys_own) {
  auto table = testing::make_table(kDim, RuleKind::kSgd, 0, {InitialKind::kConstant, -1, 0});
  Plan plan;
  std::atomic<int> torn{0}, foreign{0}, reads{0};
  race(
      [&](Random& random) {
        const auto keys = some_keys(random, 1 + random.below(200));
        switch (random.below(6)) {
          case 0:
            table->erase(keys.data(), keys.size());
            break;
          case 1:
          case 2:
            assign(*table, keys, random);
            break;
          case 3: {
            std::vector<uint32_t> slots(keys.size());
            table->find_or_create(keys.data(), keys.size(), slots.data());
            break;
          }
          default:
            add_one(plan, table, keys);
        }
      },
      [&](Random& random) {
        const auto keys = some_keys(random, 100);
        std::vector<float> out(keys.size() * kDim);
        table->read(keys.data(), nullptr, keys.size(), out.data(), nullptr);
        for (size_t i = 0; i < keys.size(); ++i) {
          const float* row = out.data() + i * kDim;
          for (int d = 1; d < kDim; ++d) torn += row[d] != row[0];
          const bool inserts = row[0] >= -1 && row[0] < kStride;  // never assigned since it was created
          foreign += !inserts && static_cast<int64_t>(row[0] / kStride) != keys[i];
        }
        ++reads;
      });
  CHECK_EQ(torn.load(), 0);
  CHECK_EQ(foreign.load(), 0);
  CHECK(reads > 100);
}

// Rows that stay while a writer makes their shards grow with others (and, with `erases`, shrink again). `count_missed`
// is given the table and the keys, and returns how many it missed.
template <class CountMissed>
void grow_beside(bool erases, CountMissed count_missed) {
  auto table = testing::make_table(kDim);
  Random setup(4);
  const auto stay = some_keys(setup, 500);
  assign(*table, stay, setup);
  int64_t next = kKeys;
  std::atomic<int> lost{0};
  race(
      [&](Random&) {
        std::vector<int64_t> inserts(2000);
        for (int64_t& key : inserts) key = next++;
        std::vector<uint32_t> slots(inserts.size());
        table->find_or_create(inserts.data(), inserts.size(), slots.data());
        if (erases && next % 40000 < 20000) table->erase(inserts.data(), inserts.size());
      },
      [&](Random&) { lost += count_missed(*table, stay); });
  CHECK_EQ(lost.load(), 0);
}

TEST(a_row_that_stays_is_always_read_while_its_shard_grows) {
  grow_beside(true, [](const Table& table, const std::vector<int64_t>& stay) {
    std::vector<float> out(stay.size() * kDim);
    std::vector<char> found(stay.size());
    table.read(stay.data(), nullptr, stay.size(), out.data(), reinterpret_cast<bool*>(found.data()));
    return static_cast<int>(std::count(found.begin(), found.end(), 0));
  });
}

TEST(a_row_that_stays_is_always_found_while_its_shard_grows) {
  grow_beside(false, [](const Table& table, const std::vector<int64_t>& stay) {
    std::vector<uint32_t> slots(stay.size());
    table.find(stay.data(), stay.size(), slots.data());
    return static_cast<int>(std::count(slots.begin(), slots.end(), kNoSlot));
  });
}

TEST(writers_of_one_table_take_turns) {
  auto table = testing::make_table(kDim, RuleKind::kSgd, 0, {InitialKind::kZeros, 0, 0});
  std::vector<std::thread> writers;
  for (int w = 0; w < 3; ++w)
    writers.emplace_back([&] {
      Plan plan;
      std::vector<int64_t> keys(500);
      for (int64_t i = 0; i < 500; ++i) keys[i] = i;
      for (int round = 0; round < 40; ++round) add_one(plan, table, keys);
    });
  for (auto& writer : writers) writer.join();
  for (const auto& [key, row] : testing::rows_of(*table)) {
    CHECK(row.values == std::vector<float>(kDim, 120.0f));
    CHECK_EQ(row.count, 120u);
  }
}

}  // namespace
}  // namespace hotrow
