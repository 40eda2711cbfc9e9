#include "tiering/ssd_tier.h"

#include <map>
#include <thread>

#include "plan/plan.h"
#include "testing/random.h"
#include "testing/tables.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::Rows;

constexpr int kDim = 64;  // rows of 512 bytes: tens of thousands of them are more than kDram
constexpr size_t kDram = size_t{8} << 20;

struct Store {
  std::shared_ptr<Budget> budget;
  std::shared_ptr<Table> table;
};

// A table over SSD in a folder, or without one (dram = 0: all rows in DRAM).
Store make(int dim, size_t dram, const std::string& folder, const std::string& name = "t",
           RowType type = RowType::kFloat) {
  Store store;
  store.budget = std::make_shared<Budget>(dram);
  store.table = std::make_shared<Table>(TableOptions{name,
                                                     dim,
                                                     RuleKind::kAdagrad,
                                                     testing::state_of(RuleKind::kAdagrad, dim),
                                                     {InitialKind::kUniform, -1, 1},
                                                     42,
                                                     false,
                                                     type,
                                                     type},
                                        store.budget);
  if (!folder.empty()) {
    LogOptions options{folder, name, static_cast<uint32_t>(store.table->width() * sizeof(float))};
    options.row_type = static_cast<uint32_t>(type);
    options.segment_bytes = size_t{1} << 18;
    options.buffer_bytes = size_t{1} << 15;
    store.table->attach(std::make_unique<Log>(options), dram != 0);
  }
  return store;
}

// Every row, wherever it is.
Rows all_rows(const Table& table) {
  std::lock_guard lock(table.write_mutex());  // against compaction
  Rows rows = testing::rows_of(table);
  std::vector<RecordHead> heads;
  std::vector<float> values;
  for (uint32_t shard = 0; shard < kShards; ++shard) {
    table.scan_cold(shard, heads, values);
    for (size_t i = 0; i < heads.size(); ++i) {
      const float* row = values.data() + i * table.floats();
      rows[heads[i].key] = {{row, row + table.floats()}, decode_count(heads[i].count), step_of(heads[i].stamp)};
    }
  }
  return rows;
}

// One training step on some keys with gradients that depend on the step.
void train(Plan& plan, const std::shared_ptr<Table>& table, const std::vector<int64_t>& keys, uint32_t step) {
  plan.route({{table, {{keys.data(), keys.size(), nullptr, keys.size(), nullptr, Pooling::kSum}}}});
  plan.fetch(step);
  std::vector<float> out(keys.size() * table->dim()), gradient(out.size());
  plan.gather({{out.data(), keys.size(), static_cast<size_t>(table->dim()), static_cast<size_t>(table->dim())}});
  for (size_t i = 0; i < out.size(); ++i)
    gradient[i] = out[i] * 0.25f + static_cast<float>((step * 31 + i) % 17) * 0.01f;
  Matrix m{gradient.data(), keys.size(), static_cast<size_t>(table->dim()), static_cast<size_t>(table->dim())};
  plan.update({m}, {m}, {{{{0.1f, 1e-8f, 0, 0}, 0, 0}}, step, 1.0f});
}

TEST(a_small_dram_gives_the_same_rows_as_a_large_one) {
  testing::TempFolder folder;
  Store small = make(kDim, kDram, folder.path() + "/rows");
  Store large = make(kDim, 0, "");
  Plan a, b;
  testing::Random random(1);
  for (uint32_t step = 1; step <= 150; ++step) {
    const auto keys = random.keys(1500, 40000);
    train(a, small.table, keys, step);
    train(b, large.table, keys, step);
    CHECK(small.budget->used() <= small.budget->limit());
    if (step % 25) continue;
    CHECK(small.table->size() == large.table->size());
    CHECK(testing::same_bits(all_rows(*small.table), all_rows(*large.table)));
  }
  const TierReport report = small.table->tier()->report();
  CHECK(report.evicted > 1000 && report.arrivals > 1000 && report.cold_rows > 1000);
}

TEST(the_hand_may_go_round_within_one_group_of_victims) {
  testing::TempFolder folder;
  Store store = make(kDim, kDram, folder.path() + "/rows");
  const auto keys = testing::Random(13).keys(50, uint64_t{1} << 40);
  std::vector<uint32_t> slots(keys.size());
  store.table->find_or_create(keys.data(), keys.size(), slots.data());
  const Rows before = all_rows(*store.table);
  {
    std::lock_guard lock(store.table->write_mutex());
    CHECK_EQ(store.table->tier()->evict(1000), keys.size());
    CHECK_EQ(store.table->tier()->evict(1000), 0u);
  }
  CHECK(testing::same_bits(all_rows(*store.table), before));
}

TEST(evaluation_reads_cold_rows_and_moves_nothing) {
  testing::TempFolder folder;
  Store small = make(kDim, kDram, folder.path() + "/rows");
  Store large = make(kDim, 0, "");
  Plan plan;
  testing::Random random(2);
  for (uint32_t step = 1; step <= 60; ++step) {
    const auto keys = random.keys(1500, 40000);
    train(plan, small.table, keys, step);
    train(plan, large.table, keys, step);
  }
  const auto before = small.table->tier()->report();
  const auto keys = random.keys(5000, 60000);
  std::vector<float> x(keys.size() * kDim), y(x.size());
  std::vector<char> found_x(keys.size()), found_y(keys.size());
  small.table->read(keys.data(), nullptr, keys.size(), x.data(), reinterpret_cast<bool*>(found_x.data()));
  large.table->read(keys.data(), nullptr, keys.size(), y.data(), reinterpret_cast<bool*>(found_y.data()));
  CHECK(x == y);
  CHECK(found_x == found_y);
  CHECK_EQ(small.table->tier()->report().cold_rows, before.cold_rows);
}

TEST(erasing_and_assigning_reach_cold_rows) {
  testing::TempFolder folder;
  Store small = make(kDim, kDram, folder.path() + "/rows");
  Store large = make(kDim, 0, "");
  testing::Random random(3);
  for (int round = 0; round < 40; ++round) {
    auto keys = random.keys(1000, 30000);
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    std::vector<float> rows(keys.size() * 2 * kDim);
    for (float& v : rows) v = static_cast<float>(random.below(1000));
    for (const Store* s : {&small, &large})
      s->table->assign(keys.data(), keys.size(), rows.data(), 2 * kDim, nullptr, nullptr);
    const auto gone = random.keys(300, 30000);
    CHECK_EQ(small.table->erase(gone.data(), gone.size()), large.table->erase(gone.data(), gone.size()));
    CHECK_EQ(small.table->size(), large.table->size());
  }
  CHECK(small.table->tier()->report().cold_rows > 100);
  CHECK(testing::same_bits(all_rows(*small.table), all_rows(*large.table)));
}

TEST(a_snapshot_is_the_step_at_which_it_began_whatever_training_does_meanwhile) {
  for (size_t dram : {size_t{0}, kDram}) {
    testing::TempFolder folder;
    Store store = make(kDim, dram, folder.path() + "/rows");
    Plan plan;
    testing::Random random(4);
    std::string previous;
    uint32_t step = 0;
    for (int save = 0; save < 4; ++save) {
      for (int i = 0; i < 20; ++i) train(plan, store.table, random.keys(1500, 30000), ++step);
      const Rows expected = all_rows(*store.table);
      store.table->begin_snapshot();
      const std::string to = folder.path() + "/snapshot" + std::to_string(save);
      Table::SnapshotStats stats{};
      std::thread writer([&] { stats = store.table->finish_snapshot(to, previous); });
      for (int i = 0; i < 20; ++i) train(plan, store.table, random.keys(1500, 30000), ++step);
      writer.join();
      CHECK_EQ(stats.rows, expected.size());
      for (size_t load_dram : {size_t{0}, kDram}) {
        Store loaded =
            make(kDim, load_dram, folder.path() + "/loaded" + std::to_string(save) + std::to_string(load_dram));
        loaded.table->load_snapshot(to);
        CHECK(testing::same_bits(all_rows(*loaded.table), expected));
      }
      previous = to;
    }
  }
}

TEST(a_second_snapshot_writes_only_what_changed) {
  testing::TempFolder folder;
  Store store = make(kDim, 0, folder.path() + "/rows");
  Plan plan;
  testing::Random random(5);
  train(plan, store.table, random.keys(20000, uint64_t{1} << 40), 1);
  store.table->begin_snapshot();
  CHECK(store.table->finish_snapshot(folder.path() + "/a", "").rows_written > 19000);
  train(plan, store.table, random.keys(10, uint64_t{1} << 40), 2);
  store.table->begin_snapshot();
  const auto stats = store.table->finish_snapshot(folder.path() + "/b", folder.path() + "/a");
  CHECK_EQ(stats.rows_written, 10u);
  CHECK(stats.rows > 19000);
  CHECK_EQ(stats.bytes_copied, 0u);
}

TEST(an_abandoned_snapshot_loses_nothing) {
  testing::TempFolder folder;
  Store store = make(kDim, kDram, folder.path() + "/rows");
  Plan plan;
  testing::Random random(6);
  for (uint32_t step = 1; step <= 40; ++step) train(plan, store.table, random.keys(1500, 30000), step);
  store.table->begin_snapshot();
  for (uint32_t step = 41; step <= 50; ++step) train(plan, store.table, random.keys(1500, 30000), step);
  store.table->abandon_snapshot();
  const Rows expected = all_rows(*store.table);
  store.table->begin_snapshot();
  store.table->finish_snapshot(folder.path() + "/a", "");
  Store loaded = make(kDim, 0, folder.path() + "/loaded");
  loaded.table->load_snapshot(folder.path() + "/a");
  CHECK(testing::same_bits(all_rows(*loaded.table), expected));
}

TEST(compaction_bounds_the_space_and_changes_no_row) {
  testing::TempFolder folder;
  Store store = make(kDim, kDram, folder.path() + "/rows");
  Store large = make(kDim, 0, "");
  Plan plan;
  testing::Random random(7);
  for (uint32_t step = 1; step <= 200; ++step) {
    const auto keys = random.keys(1500, 40000);
    train(plan, store.table, keys, step);
    train(plan, large.table, keys, step);
    while (store.table->tier()->compact(4096)) {
    }
  }
  CHECK(testing::same_bits(all_rows(*store.table), all_rows(*large.table)));
  const LogReport log = store.table->tier()->report().log;
  CHECK(log.compacted_bytes > 0 || log.segments < 20);
  CHECK(log.disk_bytes < 4 * log.live_bytes + (size_t{1} << 20));
}

TEST(two_tables_share_a_budget_and_one_can_outgrow_the_other) {
  testing::TempFolder folder;
  auto budget = std::make_shared<Budget>(2 * kDram);
  std::vector<std::shared_ptr<Table>> tables;
  for (const char* name : {"a", "b"}) {
    tables.push_back(std::make_shared<Table>(TableOptions{name,
                                                          kDim,
                                                          RuleKind::kAdagrad,
                                                          testing::state_of(RuleKind::kAdagrad, kDim),
                                                          {InitialKind::kUniform, -1, 1},
                                                          42},
                                             budget));
    LogOptions options{folder.path() + "/" + name, name, 2 * kDim * sizeof(float)};
    tables.back()->attach(std::make_unique<Log>(options), true);
  }
  testing::Random random(8);
  Plan plan;
  for (uint32_t step = 1; step <= 60; ++step) train(plan, tables[0], random.keys(3000, 100000), step);
  for (uint32_t step = 61; step <= 120; ++step) {
    train(plan, tables[1], random.keys(3000, 100000), step);
    CHECK(budget->used() <= budget->limit());
  }
  CHECK(tables[1]->tier()->active_slabs() >= 1);
}

TEST(a_batch_that_cannot_fit_is_refused_and_nothing_changes) {
  testing::TempFolder folder;
  Store store = make(kDim, kDram, folder.path() + "/rows");
  Plan plan;
  testing::Random random(9);
  train(plan, store.table, random.keys(500, 10000), 1);
  const Rows before = all_rows(*store.table);
  const auto keys = random.keys(50000, uint64_t{1} << 40);
  plan.route({{store.table, {{keys.data(), keys.size(), nullptr, keys.size(), nullptr, Pooling::kSum}}}});
  CHECK_THROWS(BudgetExceeded, plan.fetch(2));
  CHECK(testing::same_bits(all_rows(*store.table), before));
  train(plan, store.table, random.keys(500, 10000), 2);
}

TEST(a_key_is_admitted_when_it_was_seen_often_enough_on_every_tier) {
  testing::TempFolder folder;
  Store small = make(kDim, kDram, folder.path() + "/rows");
  Store large = make(kDim, 0, "");
  for (const Store* s : {&small, &large}) s->table->set_admission({3, 1.0, size_t{1} << 18});
  Plan a, b;
  testing::Random random(10);
  std::map<int64_t, int> seen;
  for (uint32_t step = 1; step <= 80; ++step) {
    const auto keys = random.keys(1500, 60000);
    train(a, small.table, keys, step);
    train(b, large.table, keys, step);
    for (int64_t key : keys) ++seen[key];
  }
  const Rows rows = all_rows(*large.table);
  CHECK(testing::same_bits(all_rows(*small.table), rows));
  size_t early = 0;
  for (const auto& [key, times] : seen) {
    if (times >= 3) CHECK(rows.count(key));  // never late
    early += times < 3 && rows.count(key);
  }
  CHECK(early < seen.size() / 20);
  CHECK(rows.size() < seen.size());
}

TEST(expired_rows_read_as_new_on_every_tier) {
  testing::TempFolder folder;
  Store small = make(kDim, kDram, folder.path() + "/rows");
  Store large = make(kDim, 0, "");
  Plan a, b;
  testing::Random random(11);
  for (uint32_t step = 1; step <= 200; ++step) {
    const auto keys = random.keys(1200, 50000);
    train(a, small.table, keys, step);
    train(b, large.table, keys, step);
    if (step % 20 == 0) {
      SweepRules rules;
      rules.cutoff = step > 60 ? step - 60 : 0;
      rules.count_cutoff = step > 30 ? step - 30 : 0;
      rules.min_count = 2;
      rules.max_rows = step > 100 ? 16384 : 0;
      small.table->sweep(rules);
      large.table->sweep(rules);
    }
  }
  const Rows expected = all_rows(*large.table);
  CHECK(testing::same_bits(all_rows(*small.table), expected));
  CHECK(expected.size() < 20000);
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < 50000; key += 7) keys.push_back(key);
  std::vector<float> x(keys.size() * kDim), y(x.size());
  small.table->read(keys.data(), nullptr, keys.size(), x.data(), nullptr);
  large.table->read(keys.data(), nullptr, keys.size(), y.data(), nullptr);
  CHECK(x == y);
}

// Values, state, draws, the norm that expiry asks for and what unseen keys read: from DRAM and SSD alike.
TEST(rows_of_every_type_are_the_same_on_every_tier_and_in_snapshots) {
  for (RowType type : {RowType::kFloat, RowType::kHalf, RowType::kBFloat}) {
    testing::TempFolder folder;
    Store small = make(kDim, kDram, folder.path() + "/rows", "t", type), large = make(kDim, 0, "", "t", type);
    Plan a, b;
    testing::Random random(14);
    for (uint32_t step = 1; step <= 120; ++step) {
      const auto keys = random.keys(1500, 50000);
      train(a, small.table, keys, step);
      train(b, large.table, keys, step);
      if (step % 30) continue;
      SweepRules rules;
      rules.norm_cutoff = step - 20;
      rules.min_norm = 5.2f;  // about half of the rows are shorter
      rules.max_rows = step > 60 ? 32768 : 0;
      const uint64_t before = large.table->size();
      small.table->sweep(rules);
      large.table->sweep(rules);
      CHECK(large.table->size() < before && large.table->size() > 1024);
    }
    CHECK(small.table->tier()->report().arrivals > 1000);
    const Rows expected = all_rows(*large.table);
    CHECK(testing::same_bits(all_rows(*small.table), expected));
    std::vector<int64_t> keys;
    for (int64_t key = 0; key < 50000; key += 7) keys.push_back(key);
    std::vector<float> x(keys.size() * kDim), y(x.size());
    small.table->read(keys.data(), nullptr, keys.size(), x.data(), nullptr);
    large.table->read(keys.data(), nullptr, keys.size(), y.data(), nullptr);
    CHECK(x == y);
    small.table->begin_snapshot();
    small.table->finish_snapshot(folder.path() + "/snapshot", "");
    for (size_t dram : {size_t{0}, kDram}) {
      Store loaded = make(kDim, dram, folder.path() + "/loaded" + std::to_string(dram), "t", type);
      loaded.table->load_snapshot(folder.path() + "/snapshot");
      CHECK(testing::same_bits(all_rows(*loaded.table), expected));
      if (type == RowType::kFloat) continue;
      Store other = make(kDim, dram, folder.path() + "/other" + std::to_string(dram));
      CHECK_THROWS(std::invalid_argument, other.table->load_snapshot(folder.path() + "/snapshot"));
    }
  }
}

TEST(readers_beside_training_and_eviction_see_whole_rows) {
  testing::TempFolder folder;
  Store store = make(kDim, kDram, folder.path() + "/rows");
  // Every row's values are all the same number, in every version.
  std::vector<int64_t> keys(20000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i) * 7919;
  auto assign = [&](size_t from, size_t count, float value) {
    std::vector<float> rows(count * 2 * kDim, value);
    store.table->assign(keys.data() + from, count, rows.data(), 2 * kDim, nullptr, nullptr);
  };
  for (size_t at = 0; at < keys.size(); at += 1000) assign(at, 1000, 1);
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int r = 0; r < 2; ++r)
    readers.emplace_back([&, r] {
      testing::Random random(100 + r);
      std::vector<float> out(200 * kDim);
      std::vector<char> found(200);
      while (!stop) {
        std::vector<int64_t> some(200);
        for (auto& key : some) key = keys[random.below(keys.size())];
        store.table->read(some.data(), nullptr, some.size(), out.data(), reinterpret_cast<bool*>(found.data()));
        for (size_t i = 0; i < some.size(); ++i) {
          CHECK(found[i]);
          for (int d = 1; d < kDim; ++d) CHECK_EQ(out[i * kDim + d], out[i * kDim]);
        }
      }
    });
  testing::Random random(12);
  for (int round = 0; round < 60; ++round) {
    assign(random.below(20) * 1000, 1000, static_cast<float>(round + 2));
    store.table->tier()->compact(4096);
  }
  stop = true;
  for (auto& reader : readers) reader.join();
}

}  // namespace
}  // namespace hotrow
