// One batch over tables that share a small budget: slots reserved for one table are not taken by another.
#include "plan/plan.h"
#include "testing/random.h"
#include "testing/tables.h"
#include "testing/temp_folder.h"
#include "testing/test.h"
#include "tiering/ssd_tier.h"

namespace hotrow {
namespace {

std::shared_ptr<Table> over_ssd(const std::string& folder, const char* name, int dim,
                                const std::shared_ptr<Budget>& budget) {
  auto table = std::make_shared<Table>(
      TableOptions{
          name, dim, RuleKind::kSgd, testing::state_of(RuleKind::kSgd, dim), {InitialKind::kUniform, -1, 1}, 7},
      budget);
  LogOptions options{folder + "/" + name, name, static_cast<uint32_t>(table->width() * sizeof(float))};
  options.buffer_bytes = size_t{1} << 15;
  table->attach(std::make_unique<Log>(options), true);
  return table;
}

std::shared_ptr<Table> in_dram(const char* name, int dim) {
  return std::make_shared<Table>(
      TableOptions{
          name, dim, RuleKind::kSgd, testing::state_of(RuleKind::kSgd, dim), {InitialKind::kUniform, -1, 1}, 7},
      std::make_shared<Budget>());
}

struct Step {
  Plan plan;
  std::vector<std::vector<float>> outputs;
  std::vector<Matrix> matrices;

  void gather(const std::vector<std::shared_ptr<Table>>& tables, const std::vector<std::vector<int64_t>>& keys,
              uint32_t step) {
    std::vector<JobInput> jobs;
    for (size_t t = 0; t < tables.size(); ++t)
      jobs.push_back({tables[t], {{keys[t].data(), keys[t].size(), nullptr, keys[t].size(), nullptr, Pooling::kSum}}});
    plan.route(jobs);
    plan.fetch(step);
    outputs.clear();
    matrices.clear();
    for (size_t t = 0; t < tables.size(); ++t) {
      const auto dim = static_cast<size_t>(tables[t]->dim());
      outputs.emplace_back(keys[t].size() * dim);
      matrices.push_back({outputs.back().data(), keys[t].size(), dim, dim});
    }
    plan.gather(matrices);
  }
  void update(uint32_t step) {
    UpdateOptions options{{}, step, 1.0f};
    for (size_t t = 0; t < matrices.size(); ++t) options.jobs.push_back({{0.1f, 0, 0, 0}, 0, 0});
    plan.update(matrices, matrices, options);
  }
};

TEST(tables_that_grow_and_shrink_in_turn_share_a_small_budget_and_keep_their_rows) {
  testing::TempFolder folder;
  auto budget = std::make_shared<Budget>(size_t{12} << 20);
  const std::vector<std::pair<const char*, int>> shapes = {{"a", 96}, {"b", 144}, {"c", 24}};
  std::vector<std::shared_ptr<Table>> small, large;
  for (const auto& [name, dim] : shapes) {
    small.push_back(over_ssd(folder.path(), name, dim, budget));
    large.push_back(in_dram(name, dim));
  }
  testing::Random random(3);
  Step x, y;
  for (uint32_t step = 1; step <= 60; ++step) {
    // Each table in turn has more keys in a batch than a slab has slots, the others few.
    std::vector<std::vector<int64_t>> keys;
    for (size_t t = 0; t < shapes.size(); ++t) keys.push_back(random.keys(step / 5 % 3 == t ? 5000 : 300, 20000));
    x.gather(small, keys, step);
    y.gather(large, keys, step);
    CHECK(x.outputs == y.outputs);
    x.update(step);
    y.update(step);
    CHECK(budget->used() <= budget->limit());
  }
  for (size_t t = 0; t < shapes.size(); ++t) {
    CHECK_EQ(small[t]->size(), large[t]->size());
    CHECK(small[t]->tier()->report().evicted > 1000);
    CHECK(small[t]->slots() <= 20 * SsdTier::kSlabSlots);
  }
}

TEST(a_table_without_a_slot_gets_some_while_others_are_in_the_same_batch) {
  testing::TempFolder folder;
  auto budget = std::make_shared<Budget>(size_t{12} << 20);
  auto greedy = over_ssd(folder.path(), "greedy", 128, budget), late = over_ssd(folder.path(), "late", 64, budget);
  testing::Random random(4);
  Step step;
  for (uint32_t s = 1; s <= 20; ++s) {
    step.gather({greedy}, {random.keys(3000, 40000)}, s);
    step.update(s);
  }
  CHECK_EQ(late->tier()->active_slabs(), 0u);
  step.gather({greedy, late}, {random.keys(3000, 40000), random.keys(1000, 40000)}, 21);
  step.update(21);
  CHECK(late->tier()->active_slabs() >= 1);
  CHECK(budget->used() <= budget->limit());
}

}  // namespace
}  // namespace hotrow
