// Plans whose rows go on to a GPU: slots, pins, commits and sweeps.
#include <algorithm>
#include <set>

#include "plan/plan.h"
#include "testing/random.h"
#include "testing/staged_rows.h"
#include "testing/tables.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::evict_all;
using testing::fetch_and_pin;
using testing::find;
using testing::kDim;
using testing::kDram;
using testing::keys_from;
using testing::over_log;
using testing::press;
using testing::row_at;
using testing::StagedRows;
using testing::Tables;

TEST(slot_metadata_is_that_of_every_position) {
  testing::TempFolder folder;
  testing::Random random(5);
  const Tables tables = {testing::make_table(3), over_log(kDram, folder / "a"), over_log(0, folder / "b")};
  Plan plan;
  CHECK_THROWS(std::invalid_argument, plan.slot_metadata(nullptr, nullptr, nullptr));
  CHECK_THROWS(std::invalid_argument, plan.pin_for_device());
  for (uint32_t step = 1; step <= 3; ++step) {
    StagedRows lot = fetch_and_pin(plan, tables, {random.keys(3000, 900), {}, random.keys(10, 5)}, {}, step);
    const StagedRows placed = lot;
    CHECK_EQ(lot.seek(), 0u);
    CHECK(placed.slots == lot.slots && placed.steps == lot.steps && placed.counts == lot.counts);
    plan.pin_for_device();
    plan.commit_device_update();
    lot = fetch_and_pin(plan, tables, {{}, random.keys(2000, 900), {}}, {}, step);
    const size_t stride = lot.widest();
    StagedRows unique;
    const std::set<int64_t> keys(lot.keys.begin(), lot.keys.end());
    unique.add(*tables[1], {keys.begin(), keys.end()});
    unique.seek();
    unique.write_back(0, 0, unique.size(), unique.change(random, stride, step), stride);
    plan.slot_metadata(lot.slots.data(), lot.steps.data(), lot.counts.data());
    for (size_t i = 0; i < lot.size(); ++i) {
      const size_t at = std::find(unique.keys.begin(), unique.keys.end(), lot.keys[i]) - unique.keys.begin();
      CHECK_EQ(lot.slots[i], unique.slots[at]);
      CHECK_EQ(lot.steps[i], step);
      CHECK_EQ(lot.counts[i], unique.counts[at]);
    }
  }
}

TEST(pinned_rows_are_not_evicted_until_they_are_unpinned) {
  testing::TempFolder folder;
  auto table = over_log(kDram, folder / "rows");
  testing::Random random(6);
  const auto keys = keys_from(0, 1000);
  Plan plan;
  StagedRows lot = fetch_and_pin(plan, {table}, {keys}, {}, 1);
  plan.pin_for_device();
  plan.commit_device_update();
  press(*table, 100000, 20000);
  CHECK(evict_all(*table) > 1000);
  CHECK_EQ(testing::rows_of(*table).size(), keys.size());
  CHECK(find(*table, keys) == lot.slots);

  const size_t stride = lot.widest() + 1;
  const auto rows = lot.change(random, stride, 7);
  lot.write_back(6, 0, lot.size(), rows, stride);
  auto some = lot.slots;
  for (size_t i = 0; i < some.size(); ++i)
    if (i % 2) some[i] = kNoSlot;
  table->unpin_from_device(some.data(), some.size());
  CHECK_EQ(evict_all(*table), keys.size() / 2);
  const auto left = find(*table, keys);
  for (size_t i = 0; i < keys.size(); ++i) CHECK_EQ(left[i], i % 2 ? lot.slots[i] : kNoSlot);

  const StagedRows back = fetch_and_pin(plan, {table}, {keys}, {}, 8);  // half from DRAM, half from SSD
  for (size_t i = 0; i < keys.size(); ++i) {
    CHECK(row_at(*table, back.slots[i]) == lot.row(i, rows, stride));
    CHECK_EQ(back.counts[i], lot.counts[i]);
  }
  CHECK_EQ(evict_all(*table), 0u);  // the plan still pins them
  plan.release();
  for (size_t i = 0; i < some.size(); ++i) some[i] = i % 2 ? lot.slots[i] : kNoSlot;
  table->unpin_from_device(some.data(), some.size());
  CHECK_EQ(evict_all(*table), keys.size());
}

TEST(rows_pinned_twice_stay_for_the_second_plan) {
  testing::TempFolder folder;
  auto table = over_log(kDram, folder / "rows");
  const auto keys = keys_from(0, 100);
  Plan first, second;
  const StagedRows lot = fetch_and_pin(first, {table}, {keys}, {}, 1);
  first.pin_for_device();
  CHECK(fetch_and_pin(second, {table}, {keys}, {}, 1).slots == lot.slots);
  second.pin_for_device();
  first.commit_device_update();
  second.commit_device_update();
  table->unpin_from_device(lot.slots.data(), lot.size());
  CHECK_EQ(evict_all(*table), 0u);
  table->unpin_from_device(lot.slots.data(), lot.size());
  CHECK_EQ(evict_all(*table), keys.size());
}

TEST(rejected_keys_borrow_a_slot_and_are_counted_only_by_a_commit) {
  testing::TempFolder folder;
  for (size_t dram : {size_t{0}, kDram}) {
    auto table = dram ? over_log(dram, folder / "rows") : testing::make_table(kDim, RuleKind::kAdagrad);
    table->set_admission({3, 1.0, size_t{1} << 18});
    const auto keys = keys_from(0, 200);
    const std::vector<uint32_t> none(keys.size(), kNoSlot);
    Plan plan;
    auto refused = [&](uint32_t seen) {
      StagedRows lot = fetch_and_pin(plan, {table}, {keys}, std::vector<uint32_t>(keys.size(), seen), 1);
      CHECK(std::all_of(lot.steps.begin(), lot.steps.end(), [](uint32_t step) { return step == ~0u; }));
      CHECK_EQ(std::set<uint32_t>(lot.slots.begin(), lot.slots.end()).size(), keys.size());
      CHECK(find(*table, keys) == none);
      std::vector<float> rows(keys.size() * table->width());
      lot.copy(0, keys.size(), rows.data(), table->width());
      for (size_t i = 0; i < keys.size(); ++i) {
        const auto* row = rows.data() + i * table->width();
        CHECK(std::equal(row, row + table->width(), testing::initial_row(*table, keys[i]).values.begin()));
      }
      plan.pin_for_device();
      return lot;
    };
    refused(1);
    plan.release();  // the batch was not committed, so this occurrence does not count
    const StagedRows staged = refused(2);
    plan.commit_device_update();
    CHECK_EQ(table->size(), 0u);
    if (dram)
      for (uint32_t slot : staged.slots) CHECK_EQ(int{table->tier()->slot_state().pins(slot)}, 0);
    const StagedRows lot = fetch_and_pin(plan, {table}, {keys}, std::vector<uint32_t>(keys.size(), 1), 2);  // the third
    plan.pin_for_device();
    plan.commit_device_update();
    CHECK_EQ(table->size(), keys.size());
    CHECK(find(*table, keys) == lot.slots);
    CHECK(std::all_of(lot.steps.begin(), lot.steps.end(), [](uint32_t step) { return step == 0; }));
    if (!dram) continue;
    CHECK_EQ(evict_all(*table), 0u);
    table->unpin_from_device(lot.slots.data(), lot.size());
    CHECK_EQ(evict_all(*table), keys.size());
  }
}

TEST(the_slot_of_a_swept_row_is_freed_with_its_last_pin) {
  testing::TempFolder folder;
  for (size_t dram : {size_t{0}, kDram}) {
    auto table = dram ? over_log(dram, folder / "rows") : testing::make_table(kDim, RuleKind::kAdagrad);
    const auto keys = keys_from(0, 100);
    std::vector<uint32_t> steps(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) steps[i] = i % 2 ? 3 : 7;
    const std::vector<float> rows(keys.size() * table->width(), 1.0f);
    table->assign(keys.data(), keys.size(), rows.data(), table->width(), nullptr, steps.data());
    Plan plan;
    const StagedRows lot = fetch_and_pin(plan, {table}, {keys}, {}, 8);
    CHECK(lot.steps == steps);
    plan.pin_for_device();
    plan.commit_device_update();
    SweepRules rules;
    rules.cutoff = 5;
    CHECK_EQ(table->sweep(rules), 50u);
    std::vector<char> alive(keys.size());
    table->slots_occupied(lot.slots.data(), lot.size(), reinterpret_cast<bool*>(alive.data()));
    std::vector<uint32_t> dead;
    for (size_t i = 0; i < keys.size(); ++i) {
      CHECK_EQ(static_cast<bool>(alive[i]), i % 2 == 0);
      if (!alive[i]) dead.push_back(lot.slots[i]);
    }
    if (!dram) continue;  // without a tier no slot is pinned, and none needs to be
    auto taken = [&](int64_t first) {
      std::vector<uint32_t> slots(dead.size());
      table->find_or_create(keys_from(first, dead.size()).data(), dead.size(), slots.data());
      return std::count_if(slots.begin(), slots.end(),
                           [&](uint32_t slot) { return std::find(dead.begin(), dead.end(), slot) != dead.end(); });
    };
    CHECK_EQ(taken(1000), 0);
    table->unpin_from_device(dead.data(), dead.size());
    CHECK_EQ(taken(2000), static_cast<ptrdiff_t>(dead.size()));
  }
}

}  // namespace
}  // namespace hotrow
