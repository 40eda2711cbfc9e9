// Every change of a row is recorded once, in whatever tier the row is; keys that admission rejects are not.
#include "table/changed_keys.h"

#include <set>

#include "device/row_staging.h"
#include "plan/plan.h"
#include "testing/random.h"
#include "testing/tables.h"
#include "testing/temp_folder.h"
#include "testing/test.h"
#include "tiering/ssd_tier.h"

namespace hotrow {
namespace {

using Keys = std::vector<int64_t>;

void train(const std::shared_ptr<Table>& table, const Keys& keys, uint32_t step) {
  Plan plan;
  plan.route({{table, {{keys.data(), keys.size(), nullptr, keys.size(), nullptr, Pooling::kSum}}}});
  plan.fetch(step);
  std::vector<float> gradient(keys.size() * table->dim(), 0.5f);
  const Matrix matrix{gradient.data(), keys.size(), static_cast<size_t>(table->dim()),
                      static_cast<size_t>(table->dim())};
  plan.update({matrix}, {matrix}, {{{{0.1f}, 0, 0}}, step, 1});
}

std::shared_ptr<Table> over_ssd(const std::string& folder) {
  auto table = testing::make_table(4, RuleKind::kSgd, size_t{8} << 20);
  LogOptions options{folder, "t", static_cast<uint32_t>(table->width() * sizeof(float))};
  options.segment_bytes = size_t{1} << 14;
  options.buffer_bytes = size_t{1} << 12;
  table->attach(std::make_unique<Log>(options), true);
  return table;
}

void evict_all(Table& table) {
  std::lock_guard lock(table.write_mutex());
  table.tier()->evict(table.size());
}

TEST(nothing_is_noted_before_it_is_asked_for) {
  const auto table = testing::make_table(4);
  train(table, {1, 2}, 1);
  CHECK(table->take_changes().empty());
  table->start_tracking_changes(false);
  CHECK(table->take_changes().empty());
  table->start_tracking_changes(true);
  CHECK(table->take_changes() == (Keys{1, 2}));
}

TEST(changed_keys_are_ascending_and_unique) {
  const auto table = testing::make_table(4);
  table->start_tracking_changes(false);
  testing::Random random(3);
  for (int round = 0; round < 5; ++round) {
    std::set<int64_t> expected;
    for (uint32_t step = 1; step <= 6; ++step) {
      const Keys keys = random.keys(300, 200);
      expected.insert(keys.begin(), keys.end());
      train(table, keys, round * 6 + step);
    }
    CHECK(table->take_changes() == Keys(expected.begin(), expected.end()));
    CHECK(table->take_changes().empty());
  }
}

TEST(set_and_erased_rows_are_noted) {
  const auto table = testing::make_table(4);
  train(table, {1, 2, 3}, 1);
  table->start_tracking_changes(false);
  const Keys set{3, 9}, gone{2, 77};
  const std::vector<float> rows(8, 1.0f);
  table->assign(set.data(), 2, rows.data(), 4, nullptr, nullptr);
  table->erase(gone.data(), 2);
  CHECK(table->take_changes() == (Keys{2, 3, 9}));
  train(table, {5}, 2);  // into the slot of 2
  CHECK(table->take_changes() == (Keys{5}));
}

TEST(keys_that_admission_rejects_are_not_recorded) {
  const auto table = testing::make_table(4);
  table->set_admission({2, 1, size_t{1} << 16});
  table->start_tracking_changes(false);
  train(table, {1, 1, 2}, 1);
  CHECK(table->take_changes() == (Keys{1}));
  train(table, {2}, 2);
  CHECK(table->take_changes() == (Keys{2}));
}

TEST(rows_that_went_to_ssd_and_came_back_are_noted) {
  testing::TempFolder folder;
  const auto table = over_ssd(folder / "rows");
  table->start_tracking_changes(false);
  train(table, {1, 2, 3}, 1);
  evict_all(*table);
  train(table, {2, 40}, 2);
  evict_all(*table);
  train(table, {2}, 3);
  CHECK(table->take_changes() == (Keys{1, 2, 3, 40}));
  const Keys gone{3, 4};
  CHECK_EQ(table->erase(gone.data(), 2), 1u);
  train(table, {1}, 4);
  CHECK(table->take_changes() == (Keys{1, 3}));
  table->start_tracking_changes(true);
  CHECK(table->take_changes() == (Keys{1, 2, 40}));
}

TEST(what_a_sweep_removes_is_noted_at_once_on_ssd_too) {
  testing::TempFolder folder;
  const auto cold = over_ssd(folder / "rows"), warm = testing::make_table(4);
  for (const auto& table : {cold, warm}) {
    table->start_tracking_changes(false);
    train(table, {1, 2, 3}, 1);
    train(table, {4}, 5);
    table->take_changes();
  }
  evict_all(*cold);
  train(cold, {3, 4}, 6);
  train(warm, {3, 4}, 6);
  SweepRules rules;
  rules.cutoff = 5;
  for (const auto& table : {cold, warm}) {
    CHECK_EQ(table->sweep(rules), 2u);
    CHECK_EQ(table->size(), 2u);
    CHECK(table->take_changes() == (Keys{1, 2, 3, 4}));
  }
}

TEST(rows_written_back_from_a_gpu_are_recorded_if_they_are_newer) {
  const auto table = testing::make_table(4);
  train(table, {10, 11, 12}, 1);
  table->start_tracking_changes(false);
  const Keys keys{10, 11, 12};
  std::vector<uint32_t> slots(3), steps{3, 2, 4}, counts{1, 1, 1};
  table->find(keys.data(), 3, slots.data());
  const std::vector<float> rows(12, 2.0f);
  write_back_rows({{table.get(), 0, 3}}, slots.data(), steps.data(), counts.data(), 2, 0, 3, rows.data(), 4);
  CHECK(table->take_changes() == (Keys{10, 12}));
}

TEST(what_is_noted_counts_against_the_budget) {
  const auto budget = std::make_shared<Budget>(size_t{64} << 20);
  const auto table = std::make_shared<Table>(
      TableOptions{"t", 4, RuleKind::kSgd, testing::state_of(RuleKind::kSgd, 4), {InitialKind::kUniform, -1, 1}, 42},
      budget);
  Keys keys(20000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  train(table, keys, 1);
  const size_t before = budget->used();
  table->start_tracking_changes(true);
  CHECK(budget->used() >= before + keys.size() * sizeof(int64_t));
  table->stop_tracking_changes();
  CHECK_EQ(budget->used(), before);
}

}  // namespace
}  // namespace hotrow
