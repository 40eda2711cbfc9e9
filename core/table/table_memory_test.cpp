// What tables hold is what the budget is charged, and never more than the limit.
#include <sys/resource.h>

#include <fstream>
#include <new>
#include <string>

#include "plan/plan.h"
#include "table/table.h"
#include "testing/random.h"
#include "testing/tables.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::rows_of;

std::shared_ptr<Table> table_on(std::shared_ptr<Budget> budget, const std::string& name, int dim) {
  return std::make_shared<Table>(TableOptions{name, dim, RuleKind::kSgd, {}, {InitialKind::kUniform, -1, 1}, 42},
                                 std::move(budget));
}

void create(Table& table, const std::vector<int64_t>& keys) {
  std::vector<uint32_t> slots(keys.size());
  table.find_or_create(keys.data(), keys.size(), slots.data());
}

// What the budget is charged for: the report less the fixed array of shards.
size_t held(const Table& table) { return table.memory().total_bytes - kShards * sizeof(ShardIndex); }

TEST(the_budget_is_charged_what_the_tables_hold) {
  testing::Random random(1);
  auto budget = std::make_shared<Budget>(0);
  auto a = table_on(budget, "a", 8), b = table_on(budget, "b", 3);
  for (int round = 0; round < 30; ++round) {
    create(*a, random.keys(random.below(3000), uint64_t{1} << 40));
    create(*b, random.keys(random.below(500), 1000));
    const auto gone = random.keys(200, 1000);
    b->erase(gone.data(), gone.size());
    CHECK_EQ(budget->used(), held(*a) + held(*b));
  }
  a.reset();
  CHECK_EQ(budget->used(), held(*b));
  b.reset();
  CHECK_EQ(budget->used(), 0u);
}

TEST(a_row_costs_less_than_20_bytes_over_its_values) {
  testing::Random random(2);
  auto table = testing::make_table(1);
  for (int round = 0; round < 60; ++round) create(*table, random.keys(50000, uint64_t{1} << 60));
  const MemoryReport report = table->memory();
  CHECK_EQ(report.payload_bytes, report.rows * sizeof(float));
  CHECK((report.header_bytes + report.index_bytes) / static_cast<double>(report.rows) < 20);
}

// Grows until the budget refuses a call; the table is then as it was before that call, and small calls still work.
TEST(a_refused_growth_leaves_everything_as_it_was) {
  testing::Random random(3);
  auto budget = std::make_shared<Budget>(size_t{12} << 20);
  auto table = table_on(budget, "t", 32);
  testing::Rows before;
  size_t used = 0;
  bool refused = false;
  for (int round = 0; round < 200 && !refused; ++round) {
    before = rows_of(*table);
    used = budget->used();
    try {
      create(*table, random.keys(2000, uint64_t{1} << 40));
    } catch (const BudgetExceeded&) {
      refused = true;
    }
    CHECK(budget->used() <= budget->limit());
  }
  CHECK(refused);
  CHECK(rows_of(*table) == before);
  CHECK_EQ(budget->used(), used);
  CHECK_EQ(table->size(), before.size());
  const std::vector<int64_t> known = {before.begin()->first, before.rbegin()->first};
  create(*table, known);
  CHECK_EQ(table->erase(known.data(), 2), 2u);
  create(*table, {known[0]});  // into a free slot
  CHECK_EQ(table->size(), before.size() - 1);
}

TEST(a_batch_that_exceeds_one_tables_budget_changes_no_table_and_no_budget) {
  testing::Random random(4);
  auto budget = std::make_shared<Budget>(size_t{16} << 20);
  auto small = table_on(budget, "small", 1), large = table_on(budget, "large", 256);
  create(*small, random.keys(100, 1000));
  create(*large, random.keys(100, 1000));
  const auto rows_small = rows_of(*small), rows_large = rows_of(*large);
  const size_t used = budget->used(), held_small = held(*small), held_large = held(*large);
  const auto many = random.keys(60000, uint64_t{1} << 40);
  Plan plan;
  plan.route({{small, {{many.data(), 20000, nullptr, 20000, nullptr, Pooling::kSum}}},
              {large, {{many.data(), many.size(), nullptr, many.size(), nullptr, Pooling::kSum}}}});
  CHECK_THROWS(BudgetExceeded, plan.fetch());
  CHECK(rows_of(*small) == rows_small);
  CHECK(rows_of(*large) == rows_large);
  CHECK_EQ(held(*small), held_small);
  CHECK_EQ(held(*large), held_large);
  CHECK_EQ(budget->used(), used);
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // their shadows take most of the address space

// Private writable memory of this process.
size_t data_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("VmData:", 0) == 0) return std::stoull(line.substr(7)) * 1024;
  return 0;
}

// As long as it lives, the process gets at most `more` bytes of new memory.
class MemoryLimit {
 public:
  explicit MemoryLimit(size_t more) {
    getrlimit(RLIMIT_DATA, &before_);
    rlimit tight = before_;
    tight.rlim_cur = data_bytes() + more;
    setrlimit(RLIMIT_DATA, &tight);
  }
  ~MemoryLimit() { setrlimit(RLIMIT_DATA, &before_); }

 private:
  rlimit before_;
};

TEST(running_out_of_memory_at_any_point_of_a_growth_leaves_everything_as_it_was) {
  testing::Random random(5);
  const auto old = random.keys(20000, uint64_t{1} << 40), inserts = random.keys(20000, uint64_t{1} << 40);
  bool grown = false;
  for (size_t more = 0; more < (size_t{32} << 20) && !grown; more += size_t{128} << 10) {
    auto budget = std::make_shared<Budget>(0);
    auto table = table_on(budget, "t", 1);
    create(*table, old);
    const auto before = rows_of(*table);
    try {
      MemoryLimit limit(more);
      create(*table, inserts);
      grown = true;
    } catch (const std::bad_alloc&) {
      CHECK_EQ(table->size(), before.size());
      CHECK(rows_of(*table) == before);
      CHECK_EQ(budget->used(), held(*table));
    }
  }
  CHECK(grown);
}

TEST(two_thousand_tables_fit_in_one_process) {
  auto budget = std::make_shared<Budget>(0);
  std::vector<std::shared_ptr<Table>> tables;
  try {
    for (int i = 0; i < 2000; ++i) {
      tables.push_back(table_on(budget, std::to_string(i), 8));
      create(*tables.back(), {i});
    }
    std::unique_ptr<char[]> other(new char[64 << 20]);  // and the rest of the program still gets memory
    CHECK(other != nullptr);
  } catch (const std::bad_alloc&) {
    const size_t made = tables.size();
    tables.clear();
    CHECK_EQ(made, 2000u);
  }
}
#endif

}  // namespace
}  // namespace hotrow
