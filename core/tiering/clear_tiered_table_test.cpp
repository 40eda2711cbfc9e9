// Clearing a table over SSD, as loading does: beside compaction, with a failing disk, and while a batch has slots.
#include <cerrno>
#include <thread>

#include "plan/plan.h"
#include "testing/faulty_files.h"
#include "testing/random.h"
#include "testing/tables.h"
#include "testing/temp_folder.h"
#include "testing/test.h"
#include "tiering/compaction_thread.h"
#include "tiering/ssd_tier.h"

namespace hotrow {
namespace {

std::shared_ptr<Table> over_ssd(const std::string& folder) {
  auto table = std::make_shared<Table>(
      TableOptions{"t", 8, RuleKind::kSgd, testing::state_of(RuleKind::kSgd, 8), {InitialKind::kUniform, -1, 1}, 42},
      std::make_shared<Budget>(size_t{8} << 20));
  LogOptions options{folder, "t", static_cast<uint32_t>(table->width() * sizeof(float))};
  options.segment_bytes = size_t{1} << 14;
  options.buffer_bytes = size_t{1} << 12;
  table->attach(std::make_unique<Log>(options), true);
  return table;
}

void hold(Plan& plan, const std::shared_ptr<Table>& table, const std::vector<int64_t>& keys) {
  plan.route({{table, {{keys.data(), keys.size(), nullptr, keys.size(), nullptr, Pooling::kSum}}}});
  plan.fetch(1);
}

void evict_all(Table& table) {
  std::lock_guard lock(table.write_mutex());
  table.tier()->evict(table.size());
}

TEST(a_table_is_cleared_while_it_is_being_compacted) {
  testing::TempFolder folder;
  const auto table = over_ssd(folder / "rows");
  const uint64_t before = CompactionThread::shared().rate();
  CompactionThread::shared().set_rate(uint64_t{1} << 40);
  testing::Random random(1);
  for (int round = 0; round < 200; ++round) {
    Plan plan;
    hold(plan, table, random.keys(500, 1000));
    plan.release();
    evict_all(*table);
    table->tier()->compact(64);
    table->clear();
    CHECK_EQ(table->size(), 0u);
  }
  CompactionThread::shared().set_rate(before);
}

TEST(a_table_that_could_not_be_cleared_keeps_its_tier) {
  testing::TempFolder folder;
  WithFaults disk;
  const auto table = over_ssd(folder / "rows");
  Plan plan;
  for (int call = 1;; ++call) {
    hold(plan, table, testing::Random(call).keys(300, 1000));
    plan.release();
    evict_all(*table);
    disk->fail(call, EIO);
    bool refused = false;
    try {
      table->clear();
    } catch (const IoError&) {
      refused = true;
    }
    disk->heal();
    CHECK(table->tier() && table->tier()->evicts());
    if (!refused) break;
    table->clear();
    CHECK(table->tier() && table->tier()->evicts());
  }
}

TEST(a_batch_with_slots_of_a_cleared_table_releases_nothing) {
  testing::TempFolder folder;
  const auto table = over_ssd(folder / "rows");
  Plan old, young;
  hold(old, table, testing::Random(1).keys(3000, 100000));
  table->clear();
  hold(young, table, {1, 2, 3});
  old.release();
  young.release();
  evict_all(*table);
  CHECK_EQ(table->tier()->report().cold_rows, 3u);  // no pin keeps a row in DRAM
}

}  // namespace
}  // namespace hotrow
