// Rows on their way to a GPU and back: against what each table says of one row at a time.
#include "rows/device_rows.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include "rows/plan.h"
#include "testing/folder.h"
#include "testing/random.h"
#include "testing/tables.h"
#include "testing/test.h"
#include "testing/threads.h"

namespace hotrow {
namespace {

using testing::Row;
using testing::Rows;
using Tables = std::vector<std::shared_ptr<Table>>;

constexpr int kDim = 64;  // rows of 512 bytes: 20,000 of them are more than kDram
constexpr size_t kDram = size_t{8} << 20;
constexpr uint32_t kUntouched = 777;

// A table with a log below it; dram = 0: no row leaves for it.
std::shared_ptr<Table> over_log(size_t dram, const std::string& folder) {
  auto table = testing::make_table(kDim, RuleKind::kAdagrad, dram);
  LogOptions options{folder, "t", static_cast<uint32_t>(table->width() * sizeof(float))};
  options.segment_bytes = size_t{1} << 18;
  options.buffer_bytes = size_t{1} << 15;
  table->attach(std::make_unique<Log>(options), dram != 0);
  return table;
}

std::vector<int64_t> keys_from(int64_t first, size_t count) {
  std::vector<int64_t> keys(count);
  for (size_t i = 0; i < count; ++i) keys[i] = (first + static_cast<int64_t>(i)) * 7919;
  return keys;
}

// A batch's rows: all tables' one after another.
struct Lot {
  std::vector<TablePart> parts;
  std::vector<int64_t> keys;
  std::vector<uint32_t> slots, steps, counts;

  size_t size() const { return keys.size(); }
  const Table& table(size_t i) const {
    for (const TablePart& part : parts)
      if (i >= part.begin && i < part.end) return *part.table;
    throw std::logic_error("nobody's");
  }
  size_t widest() const {
    int most = 0;
    for (const TablePart& part : parts) most = std::max(most, part.table->width());
    return static_cast<size_t>(most);
  }
  void add(Table& table, const std::vector<int64_t>& some) {
    parts.push_back({&table, keys.size(), keys.size() + some.size()});
    keys.insert(keys.end(), some.begin(), some.end());
    for (auto* each : {&slots, &steps, &counts}) each->resize(keys.size(), kUntouched);
  }
  Sought sought(bool whole = false) { return {parts, keys.data(), slots.data(), steps.data(), counts.data(), whole}; }
  size_t seek() { return seek_rows(sought(), {0, keys.size()}); }
  void copy(size_t begin, size_t end, float* out, size_t stride) {
    seek_rows({parts, nullptr, slots.data(), nullptr, nullptr}, {begin, end, out}, stride);
  }
  void lower(uint32_t clean, size_t begin, size_t end, const std::vector<float>& rows, size_t stride) const {
    lower_rows(parts, slots.data(), steps.data(), counts.data(), clean, begin, end, rows.data() + begin * stride,
               stride);
  }
  // New steps and counts, and rows to go with them.
  std::vector<float> change(testing::Random& random, size_t stride, uint32_t step) {
    for (uint32_t& each : steps) each = step;
    for (uint32_t& each : counts) each = static_cast<uint32_t>(random.below(1 << 16));
    return random.reals(size() * stride);
  }
  Row row(size_t i, const std::vector<float>& rows, size_t stride) const {
    const float* values = rows.data() + i * stride;
    return {{values, values + table(i).width()}, decode_count(static_cast<uint16_t>(counts[i])), steps[i]};
  }
};

Row row_at(const Table& table, uint32_t slot) {
  Row row{std::vector<float>(table.width()), 0, 0};
  int64_t key;
  table.read_slots(&slot, 1, row.values.data(), &key, &row.count, &row.last_step);
  return row;
}

// Tables of several widths, each with a row for every key.
Tables some_tables(testing::Random& random, const std::vector<int64_t>& keys) {
  Tables tables = {testing::make_table(3), testing::make_table(8, RuleKind::kRowWiseAdagrad),
                   testing::make_table(17, RuleKind::kAdam), testing::make_table(1)};
  for (const auto& table : tables) {
    std::vector<uint64_t> counts(keys.size());
    std::vector<uint32_t> steps(keys.size());
    for (uint64_t& count : counts) count = random.below(4000);
    for (uint32_t& step : steps) step = static_cast<uint32_t>(random.below(100));
    const auto rows = random.reals(keys.size() * table->width());
    table->assign(keys.data(), keys.size(), rows.data(), table->width(), counts.data(), steps.data());
  }
  return tables;
}

// Parts as work is cut (256 rows) and around it, empty ones first, between and last. Keys of a part are distinct.
Lot some_lot(testing::Random& random, const Tables& tables, const std::vector<int64_t>& keys) {
  constexpr size_t kSizes[] = {0, 700, 256, 0, 1, 257, 0};
  constexpr size_t kOf[] = {1, 0, 1, 0, 2, 3, 2};
  Lot lot;
  for (size_t part = 0; part < std::size(kSizes); ++part) {
    std::vector<int64_t> some = keys;
    for (size_t i = some.size(); i > 1; --i) std::swap(some[i - 1], some[random.below(i)]);
    some.resize(kSizes[part]);
    lot.add(*tables[kOf[part]], some);
  }
  return lot;
}

constexpr size_t kCuts[] = {0, 0, 5, 300, 700, 701, 956, 957, 1000, 1214};  // of some_lot's 1,214 rows

// Through a plan, as a batch's missing rows go up.
Lot lift(Plan& plan, const Tables& tables, const std::vector<std::vector<int64_t>>& keys,
         const std::vector<uint32_t>& seen, uint32_t step) {
  Lot lot;
  std::vector<JobInput> jobs;
  size_t at = 0;
  for (size_t t = 0; t < tables.size(); at += keys[t++].size()) {
    lot.add(*tables[t], keys[t]);
    jobs.push_back({tables[t],
                    {{keys[t].data(), keys[t].size(), nullptr, keys[t].size(), nullptr, Pooling::kNone,
                      seen.empty() ? nullptr : seen.data() + at}}});
  }
  plan.route(jobs);
  plan.fetch(step);
  plan.places(lot.slots.data(), lot.steps.data(), lot.counts.data());
  return lot;
}

size_t evict_all(Table& table) {
  std::lock_guard lock(table.writer());
  return table.tier()->evict(table.slots());
}

std::vector<uint32_t> find(const Table& table, const std::vector<int64_t>& keys) {
  std::vector<uint32_t> slots(keys.size());
  table.find(keys.data(), keys.size(), slots.data());
  return slots;
}

// Rows of keys that nobody holds, many enough to need the slots of others.
void press(Table& table, int64_t first, size_t count) {
  for (size_t at = 0; at < count; at += 1000) {
    const auto keys = keys_from(first + static_cast<int64_t>(at), 1000);
    const std::vector<float> rows(keys.size() * table.width(), static_cast<float>(first));
    table.assign(keys.data(), keys.size(), rows.data(), table.width(), nullptr, nullptr);
  }
}

TEST(sought_rows_are_the_ones_each_table_finds) {
  testing::Random random(1);
  const auto keys = keys_from(0, 800);
  const Tables tables = some_tables(random, keys);
  for (int threads : {1, 4}) {
    testing::WithThreads with(threads);
    Lot lot = some_lot(random, tables, keys);
    for (int64_t& key : lot.keys)
      if (random.below(3) == 0)  // nobody's, and often the same
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
  Lot nothing;
  CHECK_EQ(nothing.seek(), 0u);
}

TEST(copied_rows_are_whole_and_lie_from_the_start_of_the_piece) {
  testing::Random random(2);
  const auto keys = keys_from(0, 800);
  const Tables tables = some_tables(random, keys);
  Lot lot = some_lot(random, tables, keys);
  CHECK_EQ(lot.seek(), 0u);
  const size_t stride = lot.widest() + 3;
  for (int threads : {1, 4}) {
    testing::WithThreads with(threads);
    for (size_t c = 0; c + 1 < std::size(kCuts); ++c) {
      const size_t begin = kCuts[c], end = kCuts[c + 1];
      std::vector<float> out((end - begin + 1) * stride, -7.0f);  // and one more, which nobody writes
      lot.copy(begin, end, out.data(), stride);
      std::vector<float> expected(out.size(), -7.0f);
      for (size_t i = begin; i < end; ++i) {
        const Row row = row_at(lot.table(i), lot.slots[i]);
        std::copy(row.values.begin(), row.values.end(),
                  expected.begin() + static_cast<ptrdiff_t>((i - begin) * stride));
      }
      CHECK(out == expected);
      Lot again = lot;
      std::fill(out.begin(), out.end(), -7.0f);
      CHECK_EQ(seek_rows(again.sought(), {begin, end, out.data()}, stride), 0u);
      CHECK(out == expected && again.slots == lot.slots && again.steps == lot.steps && again.counts == lot.counts);
    }
  }
}

TEST(segments_are_whole_when_they_are_said_to_be_done) {
  testing::Random random(7);
  const auto keys = keys_from(0, 800);
  const Tables tables = some_tables(random, keys);
  Lot known = some_lot(random, tables, keys);
  known.seek();
  const size_t stride = known.widest();
  for (int threads : {1, 4})
    for (int run = 0; run < 20; ++run) {
      testing::WithThreads with(threads);
      Lot lot = known;
      for (uint32_t& slot : lot.slots) slot = kUntouched;
      std::vector<float> rows(lot.size() * stride, -7.0f);
      std::vector<Segment> segments;
      for (size_t c = 0; c + 1 < std::size(kCuts); ++c)
        segments.push_back({kCuts[c], kCuts[c + 1], c % 2 ? rows.data() + kCuts[c] * stride : nullptr});
      std::mutex mutex;
      std::multiset<size_t> finished;
      CHECK_EQ(seek_segments(lot.sought(true), segments, stride,
                             [&](size_t s) {
                               bool there = true;
                               for (size_t i = segments[s].begin; i < segments[s].end; ++i) {
                                 const Row row = row_at(lot.table(i), known.slots[i]);
                                 there &= lot.slots[i] == known.slots[i];
                                 if (segments[s].out)
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

TEST(a_row_that_is_not_there_ends_a_search_for_the_whole) {
  testing::Random random(8);
  const auto keys = keys_from(0, 800);
  const Tables tables = some_tables(random, keys);
  for (int threads : {1, 4}) {
    testing::WithThreads with(threads);
    Lot lot = some_lot(random, tables, keys);
    lot.keys[320] = 5;  // unseen, in the fourth
    std::vector<Segment> segments;
    for (size_t c = 0; c + 1 < std::size(kCuts); ++c) segments.push_back({kCuts[c], kCuts[c + 1]});
    std::atomic<bool> third{false};
    CHECK_EQ(seek_segments(lot.sought(true), segments, 0, [&](size_t s) { third = third || s == 3; }), 1u);
    CHECK(!third);
    std::atomic<int> finished{0};
    CHECK_EQ(seek_segments(lot.sought(), segments, 0, [&](size_t) { ++finished; }), 1u);
    CHECK_EQ(finished.load(), 8);
  }
}

TEST(lowered_rows_are_the_ones_with_a_slot_and_a_newer_step) {
  testing::Random random(3);
  const auto keys = keys_from(0, 800);
  for (int threads : {1, 4}) {
    testing::WithThreads with(threads);
    const Tables tables = some_tables(random, keys);
    std::vector<Rows> expected;
    for (const auto& table : tables) expected.push_back(testing::rows_of(*table));
    Lot lot = some_lot(random, tables, keys);
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
    for (size_t c = 0; c + 1 < std::size(kCuts); ++c) lot.lower(kClean, kCuts[c], kCuts[c + 1], rows, stride);
    for (size_t t = 0; t < tables.size(); ++t) CHECK(testing::same_bits(testing::rows_of(*tables[t]), expected[t]));
    Lot again = lot;
    again.seek();
    for (size_t i = 0; i < lot.size(); ++i)
      if (lot.slots[i] != kNoSlot && lot.steps[i] > kClean) CHECK_EQ(again.counts[i], lot.counts[i]);  // the very code
  }
}

TEST(a_snapshot_keeps_what_rows_were_before_they_came_down) {
  for (size_t dram : {size_t{0}, kDram}) {
    testing::TempFolder folder;
    auto table = over_log(dram, folder / "rows");
    auto plain = testing::make_table(kDim, RuleKind::kAdagrad);  // beside it, without a log
    testing::Random random(4);
    Plan plan;
    Lot lot = lift(plan, {plain, table}, {keys_from(0, 300), keys_from(0, 3000)}, {}, 1);
    plan.hold();
    plan.commit();
    const size_t stride = lot.widest();
    lot.lower(0, 0, lot.size(), lot.change(random, stride, 1), stride);
    std::string previous;
    for (uint32_t save = 0; save < 3; ++save) {
      const Rows expected = testing::rows_of(*table);
      CHECK_EQ(expected.size(), 3000u);
      table->begin_snapshot();
      const auto rows = lot.change(random, stride, 2 + save);
      const size_t before = save == 0 ? lot.size() : 300 + 500 * size_t{save};  // others stay as they are
      for (size_t i = before; i < lot.size(); ++i) lot.steps[i] = 1;
      lot.lower(1, 0, 450, rows, stride);  // a piece that ends within the second table
      const std::string to = folder / ("snapshot" + std::to_string(save));
      Table::SnapshotStats stats{};
      std::thread saver([&] { stats = table->finish_snapshot(to, previous); });
      for (size_t at = 450; at < lot.size(); at += 400) lot.lower(1, at, std::min(lot.size(), at + 400), rows, stride);
      saver.join();
      CHECK_EQ(stats.rows, expected.size());
      // The last save's rows that came down during it are what this one has to write.
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

TEST(only_what_came_down_is_written_by_the_next_snapshot) {
  testing::TempFolder folder;
  auto table = over_log(0, folder / "rows");
  testing::Random random(8);
  Plan plan;
  Lot lot = lift(plan, {table}, {keys_from(0, 1000)}, {}, 1);
  plan.commit();
  table->begin_snapshot();
  CHECK_EQ(table->finish_snapshot(folder / "a", "").rows_written, 1000u);
  const size_t stride = lot.widest();
  lot.lower(1, 100, 150, lot.change(random, stride, 2), stride);
  lot.lower(2, 0, 1000, lot.change(random, stride, 2), stride);  // none is newer
  table->begin_snapshot();
  CHECK_EQ(table->finish_snapshot(folder / "b", folder / "a").rows_written, 50u);
}

TEST(places_are_those_of_every_position) {
  testing::TempFolder folder;
  testing::Random random(5);
  const Tables tables = {testing::make_table(3), over_log(kDram, folder / "a"), over_log(0, folder / "b")};
  Plan plan;
  CHECK_THROWS(std::invalid_argument, plan.places(nullptr, nullptr, nullptr));
  CHECK_THROWS(std::invalid_argument, plan.hold());
  for (uint32_t step = 1; step <= 3; ++step) {
    Lot lot = lift(plan, tables, {random.keys(3000, 900), {}, random.keys(10, 5)}, {}, step);
    const Lot placed = lot;
    CHECK_EQ(lot.seek(), 0u);
    CHECK(placed.slots == lot.slots && placed.steps == lot.steps && placed.counts == lot.counts);
    plan.hold();
    plan.commit();
    lot = lift(plan, tables, {{}, random.keys(2000, 900), {}}, {}, step);
    const size_t stride = lot.widest();
    Lot unique;
    const std::set<int64_t> keys(lot.keys.begin(), lot.keys.end());
    unique.add(*tables[1], {keys.begin(), keys.end()});
    unique.seek();
    unique.lower(0, 0, unique.size(), unique.change(random, stride, step), stride);
    plan.places(lot.slots.data(), lot.steps.data(), lot.counts.data());
    for (size_t i = 0; i < lot.size(); ++i) {
      const size_t at = std::find(unique.keys.begin(), unique.keys.end(), lot.keys[i]) - unique.keys.begin();
      CHECK_EQ(lot.slots[i], unique.slots[at]);
      CHECK_EQ(lot.steps[i], step);
      CHECK_EQ(lot.counts[i], unique.counts[at]);
    }
  }
}

TEST(held_rows_do_not_leave_until_they_are_let_go) {
  testing::TempFolder folder;
  auto table = over_log(kDram, folder / "rows");
  testing::Random random(6);
  const auto keys = keys_from(0, 1000);
  Plan plan;
  Lot lot = lift(plan, {table}, {keys}, {}, 1);
  plan.hold();
  plan.commit();
  press(*table, 100000, 20000);
  CHECK(evict_all(*table) > 1000);
  CHECK_EQ(testing::rows_of(*table).size(), keys.size());
  CHECK(find(*table, keys) == lot.slots);

  const size_t stride = lot.widest() + 1;
  const auto rows = lot.change(random, stride, 7);
  lot.lower(6, 0, lot.size(), rows, stride);
  auto some = lot.slots;
  for (size_t i = 0; i < some.size(); ++i)
    if (i % 2) some[i] = kNoSlot;
  table->unhold(some.data(), some.size());
  CHECK_EQ(evict_all(*table), keys.size() / 2);
  const auto left = find(*table, keys);
  for (size_t i = 0; i < keys.size(); ++i) CHECK_EQ(left[i], i % 2 ? lot.slots[i] : kNoSlot);

  const Lot back = lift(plan, {table}, {keys}, {}, 8);  // half from DRAM, half from SSD
  for (size_t i = 0; i < keys.size(); ++i) {
    CHECK(row_at(*table, back.slots[i]) == lot.row(i, rows, stride));
    CHECK_EQ(back.counts[i], lot.counts[i]);
  }
  CHECK_EQ(evict_all(*table), 0u);  // the plan still has them
  plan.release();
  for (size_t i = 0; i < some.size(); ++i) some[i] = i % 2 ? lot.slots[i] : kNoSlot;
  table->unhold(some.data(), some.size());
  CHECK_EQ(evict_all(*table), keys.size());
}

TEST(rows_held_twice_stay_for_the_second_holder) {
  testing::TempFolder folder;
  auto table = over_log(kDram, folder / "rows");
  const auto keys = keys_from(0, 100);
  Plan first, second;
  const Lot lot = lift(first, {table}, {keys}, {}, 1);
  first.hold();
  CHECK(lift(second, {table}, {keys}, {}, 1).slots == lot.slots);
  second.hold();
  first.commit();
  second.commit();
  table->unhold(lot.slots.data(), lot.size());
  CHECK_EQ(evict_all(*table), 0u);
  table->unhold(lot.slots.data(), lot.size());
  CHECK_EQ(evict_all(*table), keys.size());
}

TEST(refused_keys_are_lent_a_slot_and_noted_only_by_a_commit) {
  testing::TempFolder folder;
  for (size_t dram : {size_t{0}, kDram}) {
    auto table = dram ? over_log(dram, folder / "rows") : testing::make_table(kDim, RuleKind::kAdagrad);
    table->set_admission({3, 1.0, size_t{1} << 18});
    const auto keys = keys_from(0, 200);
    const std::vector<uint32_t> none(keys.size(), kNoSlot);
    Plan plan;
    auto refused = [&](uint32_t seen) {
      Lot lot = lift(plan, {table}, {keys}, std::vector<uint32_t>(keys.size(), seen), 1);
      CHECK(std::all_of(lot.steps.begin(), lot.steps.end(), [](uint32_t step) { return step == ~0u; }));
      CHECK_EQ(std::set<uint32_t>(lot.slots.begin(), lot.slots.end()).size(), keys.size());
      CHECK(find(*table, keys) == none);
      std::vector<float> rows(keys.size() * table->width());
      lot.copy(0, keys.size(), rows.data(), table->width());
      for (size_t i = 0; i < keys.size(); ++i) {
        const auto* row = rows.data() + i * table->width();
        CHECK(std::equal(row, row + table->width(), testing::initial_row(*table, keys[i]).values.begin()));
      }
      plan.hold();
      return lot;
    };
    refused(1);
    plan.release();  // the batch came to nothing: that sighting does not count
    const Lot lent = refused(2);
    plan.commit();
    CHECK_EQ(table->size(), 0u);
    if (dram)
      for (uint32_t slot : lent.slots) CHECK_EQ(int{table->tier()->marks().pins(slot)}, 0);
    const Lot lot = lift(plan, {table}, {keys}, std::vector<uint32_t>(keys.size(), 1), 2);  // the third
    plan.hold();
    plan.commit();
    CHECK_EQ(table->size(), keys.size());
    CHECK(find(*table, keys) == lot.slots);
    CHECK(std::all_of(lot.steps.begin(), lot.steps.end(), [](uint32_t step) { return step == 0; }));
    if (!dram) continue;
    CHECK_EQ(evict_all(*table), 0u);
    table->unhold(lot.slots.data(), lot.size());
    CHECK_EQ(evict_all(*table), keys.size());
  }
}

TEST(a_swept_row_is_not_alive_and_its_slot_waits_for_who_holds_it) {
  testing::TempFolder folder;
  for (size_t dram : {size_t{0}, kDram}) {
    auto table = dram ? over_log(dram, folder / "rows") : testing::make_table(kDim, RuleKind::kAdagrad);
    const auto keys = keys_from(0, 100);
    std::vector<uint32_t> steps(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) steps[i] = i % 2 ? 3 : 7;
    const std::vector<float> rows(keys.size() * table->width(), 1.0f);
    table->assign(keys.data(), keys.size(), rows.data(), table->width(), nullptr, steps.data());
    Plan plan;
    const Lot lot = lift(plan, {table}, {keys}, {}, 8);
    CHECK(lot.steps == steps);
    plan.hold();
    plan.commit();
    SweepRules rules;
    rules.cutoff = 5;
    CHECK_EQ(table->sweep(rules), 50u);
    std::vector<char> alive(keys.size());
    table->alive(lot.slots.data(), lot.size(), reinterpret_cast<bool*>(alive.data()));
    std::vector<uint32_t> dead;
    for (size_t i = 0; i < keys.size(); ++i) {
      CHECK_EQ(static_cast<bool>(alive[i]), i % 2 == 0);
      if (!alive[i]) dead.push_back(lot.slots[i]);
    }
    if (!dram) continue;  // nothing is held there, and nothing needs to be
    auto taken = [&](int64_t first) {
      std::vector<uint32_t> slots(dead.size());
      table->find_or_create(keys_from(first, dead.size()).data(), dead.size(), slots.data());
      return std::count_if(slots.begin(), slots.end(),
                           [&](uint32_t slot) { return std::find(dead.begin(), dead.end(), slot) != dead.end(); });
    };
    CHECK_EQ(taken(1000), 0);
    table->unhold(dead.data(), dead.size());
    CHECK_EQ(taken(2000), static_cast<ptrdiff_t>(dead.size()));
  }
}

// Plans lock tables by address; whoever brings rows down to several must not hold a higher one while it waits.
TEST(rows_come_down_to_several_tables_in_the_order_of_their_locks) {
  testing::TempFolder folder;
  Tables tables{over_log(0, folder / "a"), over_log(0, folder / "b")};
  if (&tables[0]->writer() < &tables[1]->writer()) std::swap(tables[0], tables[1]);
  Plan plan;
  Lot lot = lift(plan, tables, {keys_from(0, 10), keys_from(50, 10)}, {}, 1);
  plan.hold();
  plan.commit();
  testing::Random random(3);
  const auto rows = lot.change(random, lot.widest(), 2);
  tables[1]->writer().lock();
  std::thread behind([&] { lot.lower(1, 0, lot.size(), rows, lot.widest()); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const bool free = tables[0]->writer().try_lock();
  if (free) tables[0]->writer().unlock();
  tables[1]->writer().unlock();
  behind.join();
  CHECK(free);
}

TEST(rows_come_down_beside_others_that_press_for_room) {
  testing::TempFolder folder;
  auto table = over_log(kDram, folder / "rows");
  testing::Random random(7);
  Plan plan;
  Lot lot = lift(plan, {table}, {keys_from(0, 1000)}, {}, 1);
  plan.hold();
  plan.commit();
  const size_t stride = lot.widest();
  std::vector<float> rows;
  std::thread behind([&] {
    for (uint32_t step = 1; step <= 30; ++step) {
      rows = lot.change(random, stride, step);
      for (size_t at = 0; at < lot.size(); at += 300)
        lot.lower(step - 1, at, std::min(lot.size(), at + 300), rows, stride);
    }
  });
  press(*table, 100000, 20000);
  behind.join();
  CHECK(table->tier()->report().evicted > 1000);
  CHECK(find(*table, lot.keys) == lot.slots);
  for (size_t i = 0; i < lot.size(); ++i) CHECK(row_at(*table, lot.slots[i]) == lot.row(i, rows, stride));
  table->unhold(lot.slots.data(), lot.size());
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
