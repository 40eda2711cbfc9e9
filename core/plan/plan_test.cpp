// Batches through plans, against loops over examples and ids.
#include "plan/plan.h"

#include <cstring>
#include <limits>
#include <stdexcept>

#include "testing/random.h"
#include "testing/reference_batch.h"
#include "testing/tables.h"
#include "testing/test.h"
#include "testing/threads.h"

namespace hotrow {
namespace {

using testing::Batch;
using testing::make_table;
using testing::Rows;
using testing::rows_of;

constexpr RuleKind kRules[] = {RuleKind::kSgd,  RuleKind::kAdagrad, RuleKind::kRowWiseAdagrad,
                               RuleKind::kAdam, RuleKind::kAdamW,   RuleKind::kFtrl};

// Three features of one table: single ids, weighted bags, a sequence; `pooling` is that of the bags.
Batch some_batch(testing::Random& random, size_t size, uint64_t variety, Pooling pooling, int dim) {
  Batch batch;
  batch.add_single(random, size, variety, Pooling::kSum);
  batch.add_bags(random, size, variety, pooling, /*weighted=*/false);
  batch.add_bags(random, size, variety, pooling, /*weighted=*/true);
  batch.add_bags(random, size, variety, Pooling::kNone, /*weighted=*/random.below(2));
  batch.fill_gradients(random, dim);
  return batch;
}

UpdateOptions options_for(const Table& table, uint32_t step) {
  return {{{testing::some_coefficients(table.options().rule), 0, 0}}, step, 1};
}

void train(Plan& plan, std::shared_ptr<Table> table, const Batch& batch, const UpdateOptions& options) {
  plan.route({{table, batch.inputs()}});
  plan.fetch();
  plan.update(batch.gradients(), batch.gradients(), options);
}

TEST(gathered_vectors_match_a_loop_over_the_ids) {
  testing::Random random(1);
  for (int dim : {1, 3, 8, 16, 17, 64})
    for (Pooling pooling : {Pooling::kSum, Pooling::kMean, Pooling::kNone}) {
      auto table = make_table(dim);
      Plan plan;
      for (size_t size : {0, 1, 2500, 7}) {
        const Batch batch = some_batch(random, size, 300, pooling, dim);
        plan.route({{table, batch.inputs()}});
        const auto before = batch.naive_gather(*table, rows_of(*table));
        plan.read();
        CHECK(batch.gather(plan, dim) == before);  // rows that are missing read their first values
        plan.fetch();
        CHECK(batch.gather(plan, dim) == batch.naive_gather(*table, rows_of(*table)));
      }
    }
}

TEST(updated_rows_match_a_loop_over_the_ids_bit_for_bit) {
  testing::Random random(2);
  for (RuleKind rule : kRules)
    for (int dim : {1, 3, 8, 16, 17, 64}) {
      auto table = make_table(dim, rule);
      Plan plan;
      Rows oracle;
      for (uint32_t step = 1; step <= 3; ++step) {
        const Pooling pooling = step == 2 ? Pooling::kMean : Pooling::kSum;
        const Batch batch = some_batch(random, 120, 200, pooling, dim);
        const UpdateOptions options = options_for(*table, step);
        train(plan, table, batch, options);
        batch.naive_update(*table, oracle, options);
        CHECK(testing::same_bits(rows_of(*table), oracle));
      }
    }
}

TEST(rows_of_16_bits_match_a_loop_that_rounds_by_chance) {
  testing::Random random(12);
  for (RowType type : {RowType::kHalf, RowType::kBFloat})
    for (RuleKind rule : kRules)
      for (int dim : {1, 3, 8, 16, 17, 40, 64}) {
        auto table = testing::make_typed_table(type, dim, rule);
        CHECK_EQ(table->width(), (dim + 1) / 2 + table->floats() - dim);
        Plan plan;
        Rows oracle;
        for (uint32_t step = 1; step <= 3; ++step) {
          const Pooling pooling = step == 2 ? Pooling::kMean : Pooling::kSum;
          const Batch batch = some_batch(random, 60, 100, pooling, dim);
          const UpdateOptions options = options_for(*table, step);
          train(plan, table, batch, options);
          batch.naive_update(*table, oracle, options);
          CHECK(testing::same_bits(rows_of(*table), oracle));
          CHECK(batch.gather(plan, dim) == batch.naive_gather(*table, oracle));
          plan.read();
          CHECK(batch.gather(plan, dim) == batch.naive_gather(*table, oracle));
        }
      }
}

TEST(scaled_and_clipped_gradients_match_the_loop) {
  testing::Random random(3);
  struct Clip {
    float scale, value, norm;
  };
  for (int dim : {3, 16, 17})
    for (const Clip& clip : {Clip{0.5f, 0, 0}, {1, 0.25f, 0}, {1, 0, 0.75f}, {3, 0.5f, 0.6f}}) {
      auto table = make_table(dim, RuleKind::kAdagrad);
      Plan plan;
      Rows oracle;
      UpdateOptions options = options_for(*table, 1);
      options.grad_scale = clip.scale;
      options.jobs[0].clip_value = clip.value;
      options.jobs[0].clip_norm = clip.norm;
      const Batch batch = some_batch(random, 100, 80, Pooling::kSum, dim);
      train(plan, table, batch, options);
      batch.naive_update(*table, oracle, options);
      CHECK(testing::same_bits(rows_of(*table), oracle));
    }
}

TEST(a_large_batch_matches_the_loop_for_any_number_of_threads) {
  for (int dim : {3, 16}) {
    testing::Random random(4);
    const Batch batch = some_batch(random, 12000, 9000, Pooling::kMean, dim);
    for (int count : {1, 3}) {
      testing::WithThreads threads(count);
      auto table = make_table(dim, RuleKind::kAdam);
      Plan plan;
      Rows oracle;
      for (uint32_t step = 1; step <= 2; ++step) {
        train(plan, table, batch, options_for(*table, step));
        batch.naive_update(*table, oracle, options_for(*table, step));
      }
      CHECK(testing::same_bits(rows_of(*table), oracle));
      CHECK(batch.gather(plan, dim) == batch.naive_gather(*table, oracle));
    }
  }
}

TEST(a_feature_without_gradient_is_counted_and_not_changed) {
  testing::Random random(5);
  auto table = make_table(4, RuleKind::kAdamW);
  Batch batch = some_batch(random, 50, 40, Pooling::kSum, 4);
  Plan plan;
  Rows oracle;
  for (size_t without : {0u, 1u, 2u, 3u}) {
    Batch part = batch;
    part.features[without].has_gradient = false;
    const UpdateOptions options = options_for(*table, static_cast<uint32_t>(without) + 1);
    train(plan, table, part, options);
    part.naive_update(*table, oracle, options);
    CHECK(testing::same_bits(rows_of(*table), oracle));
  }
}

TEST(counts_beyond_4095_are_drawn_from_the_row_and_the_step) {
  auto table = make_table(2);
  Batch batch;
  testing::Random random(6);
  batch.add_single(random, 9000, 3, Pooling::kSum);
  batch.fill_gradients(random, 2);
  Plan plan;
  Rows oracle;
  for (uint32_t step = 1; step <= 5; ++step) {
    train(plan, table, batch, options_for(*table, step));
    batch.naive_update(*table, oracle, options_for(*table, step));
  }
  CHECK(testing::same_bits(rows_of(*table), oracle));
}

TEST(tables_of_one_plan_do_not_disturb_each_other) {
  testing::Random random(7);
  auto a = make_table(8, RuleKind::kSgd), b = make_table(5, RuleKind::kFtrl);
  Rows rows_a, rows_b;
  Plan plan;
  for (uint32_t step = 1; step <= 3; ++step) {
    const Batch of_a = some_batch(random, 60, 50, Pooling::kSum, 8),
                of_b = some_batch(random, 90, 50, Pooling::kMean, 5);
    UpdateOptions options = options_for(*a, step);
    options.jobs.push_back(options_for(*b, step).jobs[0]);
    auto gradients = of_a.gradients();
    for (const Matrix& m : of_b.gradients()) gradients.push_back(m);
    plan.route({{a, of_a.inputs()}, {b, of_b.inputs()}});
    plan.fetch();
    plan.update(gradients, gradients, options);
    of_a.naive_update(*a, rows_a, options_for(*a, step));
    of_b.naive_update(*b, rows_b, options_for(*b, step));
    CHECK(testing::same_bits(rows_of(*a), rows_a));
    CHECK(testing::same_bits(rows_of(*b), rows_b));
  }
}

TEST(a_gradient_that_is_not_finite_changes_nothing) {
  testing::Random random(8);
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                    -std::numeric_limits<float>::infinity()})
    for (size_t feature : {0u, 1u, 2u, 3u}) {
      auto table = make_table(7, RuleKind::kAdagrad);
      Batch batch = some_batch(random, 300, 100, Pooling::kSum, 7);
      Plan plan;
      train(plan, table, batch, options_for(*table, 1));
      const Rows before = rows_of(*table);
      auto& f = batch.features[feature];
      f.gradient[random.below(f.outputs()) * f.stride + random.below(7)] = bad;
      plan.route({{table, batch.inputs()}});
      plan.fetch();
      CHECK_THROWS(GradientNotFinite, plan.update(batch.gradients(), batch.gradients(), options_for(*table, 2)));
      CHECK(testing::same_bits(rows_of(*table), before));
    }
}

TEST(rows_erased_since_fetch_start_anew) {
  testing::Random random(9);
  auto table = make_table(3, RuleKind::kAdagrad);
  const Batch batch = some_batch(random, 50, 60, Pooling::kSum, 3),
              other = some_batch(random, 50, 1000, Pooling::kSum, 3);
  Plan plan, meanwhile;
  Rows oracle;
  train(plan, table, batch, options_for(*table, 1));
  plan.route({{table, batch.inputs()}});
  plan.fetch();
  const auto keys = batch.features[0].keys;
  table->erase(keys.data(), keys.size());
  train(meanwhile, table, other, options_for(*table, 2));  // takes the free slots
  oracle = rows_of(*table);
  CHECK(batch.gather(plan, 3) == batch.naive_gather(*table, oracle));
  plan.update(batch.gradients(), batch.gradients(), options_for(*table, 3));
  batch.naive_update(*table, oracle, options_for(*table, 3));
  CHECK(testing::same_bits(rows_of(*table), oracle));
}

TEST(offsets_that_do_not_fit_are_refused_and_leave_the_plan_empty) {
  auto table = make_table(2);
  const std::vector<int64_t> keys = {1, 2, 3};
  Plan plan;
  for (const std::vector<int64_t>& offsets : std::vector<std::vector<int64_t>>{
           {1, 3}, {0, 2}, {0, 4}, {0, 2, 1, 3}, {0, -1, 3}, {0, 5, 3}, {0, int64_t{1} << 32, 3}})
    CHECK_THROWS(std::invalid_argument,
                 plan.route({{table, {{keys.data(), 3, offsets.data(), offsets.size() - 1, nullptr, Pooling::kSum}}}}));
  CHECK_THROWS(std::invalid_argument, plan.route({{table, {{keys.data(), 3, nullptr, 2, nullptr, Pooling::kSum}}}}));
  CHECK_THROWS(std::invalid_argument, plan.fetch());
  CHECK_EQ(table->size(), 0u);
}

TEST(stages_out_of_order_and_wrong_shapes_are_refused) {
  testing::Random random(10);
  auto table = make_table(2);
  const Batch batch = some_batch(random, 5, 10, Pooling::kSum, 2);
  Plan plan;
  CHECK_THROWS(std::invalid_argument, plan.fetch());
  CHECK_THROWS(std::invalid_argument, plan.read());
  CHECK_THROWS(std::invalid_argument, plan.gather({}));
  plan.route({{table, batch.inputs()}});
  CHECK_THROWS(std::invalid_argument, plan.update(batch.gradients(), {}, options_for(*table, 1)));
  plan.read();
  CHECK_THROWS(std::invalid_argument, plan.update(batch.gradients(), {}, options_for(*table, 1)));
  plan.fetch();
  CHECK_THROWS(std::invalid_argument, plan.gather({}));
  auto gradients = batch.gradients();
  gradients[0].columns = 1;
  CHECK_THROWS(std::invalid_argument, plan.update(gradients, {}, options_for(*table, 1)));
  CHECK_THROWS(std::invalid_argument, plan.update(batch.gradients(), {}, {}));
}

TEST(a_plan_keeps_no_pointer_to_the_callers_batch) {
  testing::Random random(11);
  auto table = make_table(4, RuleKind::kSgd);
  Rows oracle;
  Plan plan;
  const Batch batch = some_batch(random, 200, 100, Pooling::kMean, 4);
  {
    auto copy = std::make_unique<Batch>(batch);
    plan.route({{table, copy->inputs()}});
    for (auto& feature : copy->features) {
      std::fill(feature.keys.begin(), feature.keys.end(), 0);
      std::fill(feature.offsets.begin(), feature.offsets.end(), -1);
      std::fill(feature.weights.begin(), feature.weights.end(), 1e9f);
    }
  }
  plan.fetch();
  plan.update(batch.gradients(), batch.gradients(), options_for(*table, 1));
  batch.naive_update(*table, oracle, options_for(*table, 1));
  CHECK(testing::same_bits(rows_of(*table), oracle));
}

}  // namespace
}  // namespace hotrow
