// Staging rows for a GPU and writing them back, compared with single-row reads of each table.
#include "device/row_staging.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>

#include "plan/plan.h"
#include "testing/random.h"
#include "testing/staged_rows.h"
#include "testing/tables.h"
#include "testing/temp_folder.h"
#include "testing/test.h"
#include "testing/threads.h"

namespace hotrow {
namespace {

using testing::evict_all;
using testing::fetch_and_pin;
using testing::find;
using testing::kCuts;
using testing::kDim;
using testing::kDram;
using testing::keys_from;
using testing::kUntouched;
using testing::over_log;
using testing::press;
using testing::Row;
using testing::row_at;
using testing::Rows;
using testing::some_lot;
using testing::some_tables;
using testing::StagedRows;
using testing::Tables;

TEST(looked_up_rows_are_the_ones_each_table_finds) {
  testing::Random random(1);
  const auto keys = keys_from(0, 800);
  const Tables tables = some_tables(random, keys);
  for (int threads : {1, 4}) {
    testing::WithThreads with(threads);
    StagedRows lot = some_lot(random, tables, keys);
    for (int64_t& key : lot.keys)
      if (random.below(3) == 0)  // an absent key, often the same one
        key = static_cast<int64_t>(static_cast<uint64_t>(random.key(50)) * 7919 + 1);
    const size_t absent = lot.seek();
    size_t expected = 0;
    for (size_t i = 0; i < lot.size(); ++i) {
      CHECK_EQ(lot.slots[i], find(lot.table(i), {lot.keys[i]})[0]);
      if (lot.slots[i] == kNoSlot) {
        ++expected;
        continue;
      }
      const Row row = row_at(lot.table(i), lot.slots[i]);
      CHECK_EQ(lot.steps[i], row.last_step);
      CHECK_EQ(decode_count(static_cast<uint16_t>(lot.counts[i])), row.count);
    }
    CHECK_EQ(absent, expected);
    CHECK(expected > 100);
  }
  StagedRows nothing;
  CHECK_EQ(nothing.seek(), 0u);
}

TEST(copied_rows_are_whole_and_start_at_the_range) {
  testing::Random random(2);
  const auto keys = keys_from(0, 800);
  const Tables tables = some_tables(random, keys);
  StagedRows lot = some_lot(random, tables, keys);
  CHECK_EQ(lot.seek(), 0u);
  const size_t stride = lot.widest() + 3;
  for (int threads : {1, 4}) {
    testing::WithThreads with(threads);
    for (size_t c = 0; c + 1 < std::size(kCuts); ++c) {
      const size_t begin = kCuts[c], end = kCuts[c + 1];
      std::vector<float> out((end - begin + 1) * stride, -7.0f);  // and one more row, which must not be written
      lot.copy(begin, end, out.data(), stride);
      std::vector<float> expected(out.size(), -7.0f);
      for (size_t i = begin; i < end; ++i) {
        const Row row = row_at(lot.table(i), lot.slots[i]);
        std::copy(row.values.begin(), row.values.end(),
                  expected.begin() + static_cast<ptrdiff_t>((i - begin) * stride));
      }
      CHECK(out == expected);
      StagedRows again = lot;
      std::fill(out.begin(), out.end(), -7.0f);
      CHECK_EQ(lookup_rows(again.lookup(), {begin, end, out.data()}, stride), 0u);
      CHECK(out == expected && again.slots == lot.slots && again.steps == lot.steps && again.counts == lot.counts);
    }
  }
}

TEST(ranges_are_complete_when_done_is_called) {
  testing::Random random(7);
  const auto keys = keys_from(0, 800);
  const Tables tables = some_tables(random, keys);
  StagedRows known = some_lot(random, tables, keys);
  known.seek();
  const size_t stride = known.widest();
  for (int threads : {1, 4})
    for (int run = 0; run < 20; ++run) {
      testing::WithThreads with(threads);
      StagedRows lot = known;
      for (uint32_t& slot : lot.slots) slot = kUntouched;
      std::vector<float> rows(lot.size() * stride, -7.0f);
      std::vector<RowRange> ranges;
      for (size_t c = 0; c + 1 < std::size(kCuts); ++c)
        ranges.push_back({kCuts[c], kCuts[c + 1], c % 2 ? rows.data() + kCuts[c] * stride : nullptr});
      std::mutex mutex;
      std::multiset<size_t> finished;
      CHECK_EQ(lookup_ranges(lot.lookup(true), ranges, stride,
                             [&](size_t s) {
                               bool there = true;
                               for (size_t i = ranges[s].begin; i < ranges[s].end; ++i) {
                                 const Row row = row_at(lot.table(i), known.slots[i]);
                                 there &= lot.slots[i] == known.slots[i];
                                 if (ranges[s].out)
                                   there &= std::equal(row.values.begin(), row.values.end(), rows.begin() + i * stride);
                               }
                               std::lock_guard lock(mutex);
                               CHECK(there);
                               finished.insert(s);
                             }),
               0u);
      CHECK((finished == std::multiset<size_t>{1, 2, 3, 4, 5, 6, 7, 8}));  // the first is empty
    }
}

TEST(a_missing_row_stops_a_lookup_with_stop_at_first_miss) {
  testing::Random random(8);
  const auto keys = keys_from(0, 800);
  const Tables tables = some_tables(random, keys);
  for (int threads : {1, 4}) {
    testing::WithThreads with(threads);
    StagedRows lot = some_lot(random, tables, keys);
    lot.keys[320] = 5;  // unseen, in the fourth
    std::vector<RowRange> ranges;
    for (size_t c = 0; c + 1 < std::size(kCuts); ++c) ranges.push_back({kCuts[c], kCuts[c + 1]});
    std::atomic<bool> third{false};
    CHECK_EQ(lookup_ranges(lot.lookup(true), ranges, 0, [&](size_t s) { third = third || s == 3; }), 1u);
    CHECK(!third);
    std::atomic<int> finished{0};
    CHECK_EQ(lookup_ranges(lot.lookup(), ranges, 0, [&](size_t) { ++finished; }), 1u);
    CHECK_EQ(finished.load(), 8);
  }
}

TEST(written_back_rows_are_the_ones_with_a_slot_and_a_newer_step) {
  testing::Random random(3);
  const auto keys = keys_from(0, 800);
  for (int threads : {1, 4}) {
    testing::WithThreads with(threads);
    const Tables tables = some_tables(random, keys);
    std::vector<Rows> expected;
    for (const auto& table : tables) expected.push_back(testing::rows_of(*table));
    StagedRows lot = some_lot(random, tables, keys);
    lot.seek();
    const size_t stride = lot.widest() + 3;
    const auto rows = lot.change(random, stride, 0);
    constexpr uint32_t kClean = 50;
    size_t came = 0;
    for (size_t i = 0; i < lot.size(); ++i) {
      lot.steps[i] = kClean - 1 + static_cast<uint32_t>(random.below(3));  // before, at and after it
      if (random.below(5) == 0) lot.slots[i] = kNoSlot;
      if (lot.slots[i] == kNoSlot || lot.steps[i] <= kClean) continue;
      for (size_t t = 0; t < tables.size(); ++t)
        if (tables[t].get() == &lot.table(i)) expected[t][lot.keys[i]] = lot.row(i, rows, stride);
      ++came;
    }
    CHECK(came > 200);
    for (size_t c = 0; c + 1 < std::size(kCuts); ++c) lot.write_back(kClean, kCuts[c], kCuts[c + 1], rows, stride);
    for (size_t t = 0; t < tables.size(); ++t) CHECK(testing::same_bits(testing::rows_of(*tables[t]), expected[t]));
    StagedRows again = lot;
    again.seek();
    for (size_t i = 0; i < lot.size(); ++i)
      if (lot.slots[i] != kNoSlot && lot.steps[i] > kClean) CHECK_EQ(again.counts[i], lot.counts[i]);  // the exact code
  }
}

TEST(a_snapshot_keeps_rows_as_they_were_before_a_write_back) {
  for (size_t dram : {size_t{0}, kDram}) {
    testing::TempFolder folder;
    auto table = over_log(dram, folder / "rows");
    auto plain = testing::make_table(kDim, RuleKind::kAdagrad);  // the same table without a log
    testing::Random random(4);
    Plan plan;
    StagedRows lot = fetch_and_pin(plan, {plain, table}, {keys_from(0, 300), keys_from(0, 3000)}, {}, 1);
    plan.pin_for_device();
    plan.commit_device_update();
    const size_t stride = lot.widest();
    lot.write_back(0, 0, lot.size(), lot.change(random, stride, 1), stride);
    std::string previous;
    for (uint32_t save = 0; save < 3; ++save) {
      const Rows expected = testing::rows_of(*table);
      CHECK_EQ(expected.size(), 3000u);
      table->begin_snapshot();
      const auto rows = lot.change(random, stride, 2 + save);
      const size_t before = save == 0 ? lot.size() : 300 + 500 * size_t{save};  // others stay as they are
      for (size_t i = before; i < lot.size(); ++i) lot.steps[i] = 1;
      lot.write_back(1, 0, 450, rows, stride);  // a range that ends within the second table
      const std::string to = folder / ("snapshot" + std::to_string(save));
      Table::SnapshotStats stats{};
      std::thread saver([&] { stats = table->finish_snapshot(to, previous); });
      for (size_t at = 450; at < lot.size(); at += 400)
        lot.write_back(1, at, std::min(lot.size(), at + 400), rows, stride);
      saver.join();
      CHECK_EQ(stats.rows, expected.size());
      // This save must write the rows that were written back during the previous save.
      CHECK_EQ(stats.rows_written, save == 2 ? 500u : 3000u);
      auto loaded = over_log(0, folder / ("loaded" + std::to_string(save)));
      loaded->load_snapshot(to);
      CHECK(testing::same_bits(testing::rows_of(*loaded), expected));
      const Rows now = testing::rows_of(*table);
      for (size_t i = 300; i < before; ++i) CHECK(now.at(lot.keys[i]) == lot.row(i, rows, stride));
      previous = to;
    }
  }
}

TEST(only_rows_that_were_written_back_are_written_by_the_next_snapshot) {
  testing::TempFolder folder;
  auto table = over_log(0, folder / "rows");
  testing::Random random(8);
  Plan plan;
  StagedRows lot = fetch_and_pin(plan, {table}, {keys_from(0, 1000)}, {}, 1);
  plan.commit_device_update();
  table->begin_snapshot();
  CHECK_EQ(table->finish_snapshot(folder / "a", "").rows_written, 1000u);
  const size_t stride = lot.widest();
  lot.write_back(1, 100, 150, lot.change(random, stride, 2), stride);
  lot.write_back(2, 0, 1000, lot.change(random, stride, 2), stride);  // none is newer
  table->begin_snapshot();
  CHECK_EQ(table->finish_snapshot(folder / "b", folder / "a").rows_written, 50u);
}

// Plans lock tables by address; a write-back to several tables must not hold a higher lock while it waits.
TEST(write_back_locks_several_tables_in_the_order_of_plans) {
  testing::TempFolder folder;
  Tables tables{over_log(0, folder / "a"), over_log(0, folder / "b")};
  if (&tables[0]->write_mutex() < &tables[1]->write_mutex()) std::swap(tables[0], tables[1]);
  Plan plan;
  StagedRows lot = fetch_and_pin(plan, tables, {keys_from(0, 10), keys_from(50, 10)}, {}, 1);
  plan.pin_for_device();
  plan.commit_device_update();
  testing::Random random(3);
  const auto rows = lot.change(random, lot.widest(), 2);
  tables[1]->write_mutex().lock();
  std::thread behind([&] { lot.write_back(1, 0, lot.size(), rows, lot.widest()); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const bool free = tables[0]->write_mutex().try_lock();
  if (free) tables[0]->write_mutex().unlock();
  tables[1]->write_mutex().unlock();
  behind.join();
  CHECK(free);
}

TEST(rows_are_written_back_beside_evictions) {
  testing::TempFolder folder;
  auto table = over_log(kDram, folder / "rows");
  testing::Random random(7);
  Plan plan;
  StagedRows lot = fetch_and_pin(plan, {table}, {keys_from(0, 1000)}, {}, 1);
  plan.pin_for_device();
  plan.commit_device_update();
  const size_t stride = lot.widest();
  std::vector<float> rows;
  std::thread behind([&] {
    for (uint32_t step = 1; step <= 30; ++step) {
      rows = lot.change(random, stride, step);
      for (size_t at = 0; at < lot.size(); at += 300)
        lot.write_back(step - 1, at, std::min(lot.size(), at + 300), rows, stride);
    }
  });
  press(*table, 100000, 20000);
  behind.join();
  CHECK(table->tier()->report().evicted > 1000);
  CHECK(find(*table, lot.keys) == lot.slots);
  for (size_t i = 0; i < lot.size(); ++i) CHECK(row_at(*table, lot.slots[i]) == lot.row(i, rows, stride));
  table->unpin_from_device(lot.slots.data(), lot.size());
  evict_all(*table);
  const auto others = keys_from(100000, 20000);
  std::vector<float> values(others.size() * kDim);
  std::vector<char> found(others.size());
  table->read(others.data(), nullptr, others.size(), values.data(), reinterpret_cast<bool*>(found.data()));
  CHECK(std::all_of(found.begin(), found.end(), [](char each) { return each != 0; }));
  CHECK(std::all_of(values.begin(), values.end(), [](float each) { return each == 100000.0f; }));
}

}  // namespace
}  // namespace hotrow
