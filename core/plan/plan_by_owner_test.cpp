// Rows that several processes own: two plans per batch, compared with one plan over one table.
#include <cstring>

#include "hash/hash.h"
#include "plan/plan.h"
#include "testing/random.h"
#include "testing/reference_batch.h"
#include "testing/tables.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::Batch;
using testing::make_table;
using testing::rows_of;

Batch some_batch(testing::Random& random, size_t size, int dim) {
  Batch batch;
  batch.add_single(random, size, 300, Pooling::kSum);
  batch.add_bags(random, size, 300, Pooling::kMean, /*weighted=*/false);
  batch.add_bags(random, size, 300, Pooling::kNone, /*weighted=*/true);
  batch.fill_gradients(random, dim);
  return batch;
}

std::vector<uint32_t> owners(size_t world) {
  std::vector<uint32_t> owner(kShards);
  for (size_t shard = 0; shard < kShards; ++shard) owner[shard] = static_cast<uint32_t>(shard * world / kShards);
  return owner;
}

struct Partitioned {
  std::vector<int64_t> counts, keys;
  std::vector<uint32_t> seen;
};

Partitioned partition_by_owner(Plan& plan, size_t world) {
  Partitioned partitioned{std::vector<int64_t>(world * plan.jobs()), {}, {}};
  plan.partition_by_owner(owners(world).data(), world, partitioned.counts.data());
  partitioned.keys.resize(plan.unique());
  partitioned.seen.resize(plan.unique());
  plan.partitioned_keys(partitioned.keys.data(), partitioned.seen.data());
  return partitioned;
}

TEST(partitioned_keys_are_the_unique_keys_by_owner_with_their_occurrences) {
  testing::Random random(1);
  for (size_t size : {0, 1, 40, 20000}) {
    auto table = make_table(8);
    const Batch batch = some_batch(random, size, 8);
    Plan plan;
    plan.route({{table, batch.inputs()}});
    const Partitioned partitioned = partition_by_owner(plan, 3);
    uint64_t total = 0;
    size_t i = 0;
    for (size_t owner = 0; owner < 3; ++owner)
      for (int64_t n = 0; n < partitioned.counts[owner]; ++n, ++i) {
        CHECK(owners(3)[shard_of(hash_key(partitioned.keys[i]))] == owner);
        total += partitioned.seen[i];
      }
    CHECK(i == plan.unique());
    CHECK(total == plan.ids());
  }
}

TEST(a_batch_through_an_owner_gives_the_rows_that_one_plan_gives_bit_for_bit) {
  testing::Random random(2);
  for (int dim : {3, 8, 16}) {
    auto owned = make_table(dim, RuleKind::kAdam), whole = make_table(dim, RuleKind::kAdam);
    Plan requesting, owning, one;
    for (uint32_t step = 1; step <= 3; ++step) {
      Batch batch = some_batch(random, 200, dim);
      batch.features[1].has_gradient = step != 2;  // keys of this feature alone are counted and not changed
      const UpdateOptions options{{{testing::some_coefficients(RuleKind::kAdam), 0, 0}}, step, 1};
      requesting.route({{owned, batch.inputs()}});
      Partitioned partitioned = partition_by_owner(requesting, 1);
      const size_t n = partitioned.keys.size();
      owning.route(
          {{owned, {{partitioned.keys.data(), n, nullptr, n, nullptr, Pooling::kNone, partitioned.seen.data()}}}});
      owning.fetch();
      std::vector<float> rows(n * dim), sums(n * dim);
      owning.gather({{rows.data(), n, static_cast<size_t>(dim), static_cast<size_t>(dim)}});
      requesting.set_received_rows(rows.data());
      one.route({{whole, batch.inputs()}});
      one.fetch();
      CHECK(batch.gather(requesting, dim) == batch.gather(one, dim));
      std::vector<uint8_t> present(n);
      const auto summed = requesting.sum_gradients(batch.gradients(), batch.gradients(), sums.data(), present.data());
      CHECK(summed.finite);
      CHECK(summed.all_present == (step != 2));
      owning.update({{sums.data(), n, static_cast<size_t>(dim), static_cast<size_t>(dim)}}, {}, options,
                    {present.data()});
      one.update(batch.gradients(), batch.gradients(), options);
      CHECK(testing::same_bits(rows_of(*owned), rows_of(*whole)));
    }
  }
}

TEST(a_gradient_that_is_not_finite_is_said_and_not_thrown) {
  testing::Random random(3);
  auto table = make_table(8);
  Batch batch = some_batch(random, 20, 8);
  batch.features[0].gradient[5] = std::numeric_limits<float>::infinity();
  Plan plan;
  plan.route({{table, batch.inputs()}});
  const Partitioned partitioned = partition_by_owner(plan, 2);
  std::vector<float> sums(partitioned.keys.size() * 8);
  std::vector<uint8_t> present(partitioned.keys.size());
  CHECK(!plan.sum_gradients(batch.gradients(), batch.gradients(), sums.data(), present.data()).finite);
}

}  // namespace
}  // namespace hotrow
