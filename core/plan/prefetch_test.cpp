// Prefetched rows: fetch gives the same rows whatever happens between prefetch and fetch. Run it under the sanitizers
// too.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <thread>

#include "plan/plan.h"
#include "testing/random.h"
#include "testing/tables.h"
#include "testing/temp_folder.h"
#include "testing/test.h"
#include "tiering/compaction_thread.h"

namespace hotrow {
namespace {

using testing::Rows;

constexpr int kDim = 64;
constexpr size_t kDram = size_t{12} << 20;
using Tables = std::vector<std::shared_ptr<Table>>;
using Keys = std::vector<int64_t>;

struct Store {
  std::shared_ptr<Budget> budget;
  Tables tables;
};

// Two tables that share a budget, over SSD; or all in DRAM.
Store make(size_t dram, const std::string& folder) {
  Store store{std::make_shared<Budget>(dram), {}};
  for (const char* name : {"a", "b"}) {
    auto table = std::make_shared<Table>(TableOptions{name,
                                                      kDim,
                                                      RuleKind::kAdagrad,
                                                      testing::state_of(RuleKind::kAdagrad, kDim),
                                                      {InitialKind::kUniform, -1, 1},
                                                      42},
                                         store.budget);
    if (dram) {
      LogOptions options{folder + "/" + name, name, 2 * kDim * sizeof(float)};
      options.segment_bytes = size_t{1} << 18;
      options.buffer_bytes = size_t{1} << 15;
      table->attach(std::make_unique<Log>(options), true);
    }
    store.tables.push_back(std::move(table));
  }
  return store;
}

std::vector<Rows> all_rows(const Store& store) {
  std::vector<Rows> result;
  for (const auto& table : store.tables) {
    std::lock_guard lock(table->write_mutex());
    Rows rows = testing::rows_of(*table);
    std::vector<RecordHead> heads;
    std::vector<float> values;
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      table->scan_cold(shard, heads, values);
      for (size_t i = 0; i < heads.size(); ++i) {
        const float* row = values.data() + i * table->floats();
        rows[heads[i].key] = {{row, row + table->floats()}, decode_count(heads[i].count), step_of(heads[i].stamp)};
      }
    }
    result.push_back(std::move(rows));
  }
  return result;
}

bool same(const Store& a, const Store& b) {
  const auto x = all_rows(a), y = all_rows(b);
  return testing::same_bits(x[0], y[0]) && testing::same_bits(x[1], y[1]);
}

void route(Plan& plan, const Store& store, const Keys& keys) {
  const FeatureInput input{keys.data(), keys.size(), nullptr, keys.size(), nullptr, Pooling::kSum};
  plan.route({{store.tables[0], {input}}, {store.tables[1], {input}}});
}

// The rest of a training step: gradients depend on the rows and the step.
void finish(Plan& plan, size_t keys, uint32_t step) {
  plan.fetch(step);
  std::vector<float> out(2 * keys * kDim), gradient(out.size());
  auto matrix = [&](std::vector<float>& of, size_t n) { return Matrix{of.data() + n * keys * kDim, keys, kDim, kDim}; };
  plan.gather({matrix(out, 0), matrix(out, 1)});
  for (size_t i = 0; i < out.size(); ++i)
    gradient[i] = out[i] * 0.25f + static_cast<float>((step * 31 + i) % 17) * 0.01f;
  const JobUpdate rule{{0.1f, 1e-8f, 0, 0}, 0, 0};
  plan.update({matrix(gradient, 0), matrix(gradient, 1)}, {matrix(gradient, 0), matrix(gradient, 1)},
              {{rule, rule}, step, 1.0f});
}

void sweep(const Store& store, uint32_t step) {
  SweepRules rules;
  rules.cutoff = step > 40 ? step - 40 : 0;
  rules.count_cutoff = step > 15 ? step - 15 : 0;
  rules.min_count = 2;
  for (const auto& table : store.tables) table->sweep(rules);
}

uint64_t prefetched(const Store& store) {
  return store.tables[0]->tier()->report().prefetched + store.tables[1]->tier()->report().prefetched;
}

// A call may exceed the budget for its index and readers, and evicts rows for that before it returns. So another thread
// may see an exceeded budget for a short time.
bool within_budget(const Store& store) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (store.budget->used() > store.budget->limit()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::yield();
  }
  return true;
}

// Batches 1, 2, ... of `keys`, some of them routed and prefetched ahead on another thread, with sweeps in between.
void train_ahead(const Store& store, const std::vector<Keys>& keys, size_t ahead, bool sweeps) {
  std::deque<Plan> plans(keys.size());
  std::atomic<size_t> ready{0}, allowed{ahead + 1};
  std::jthread fetcher([&] {
    for (size_t i = 0; i < keys.size(); ++i) {
      while (allowed.load() <= i) std::this_thread::yield();
      route(plans[i], store, keys[i]);
      plans[i].prefetch();
      ready = i + 1;
    }
  });
  try {
    for (size_t i = 0; i < keys.size(); ++i) {
      while (ready.load() <= i) std::this_thread::yield();
      allowed = i + ahead + 1;
      finish(plans[i], keys[i].size(), static_cast<uint32_t>(i + 1));
      if (sweeps && i % 10 == 9) sweep(store, static_cast<uint32_t>(i + 1));
      CHECK(within_budget(store));
    }
  } catch (...) {
    allowed = keys.size();
    throw;
  }
}

std::vector<Keys> batches(size_t count, size_t size, uint64_t keys) {
  testing::Random random(count + size);
  std::vector<Keys> result;
  for (size_t i = 0; i < count; ++i) result.push_back(random.keys(size, keys));
  return result;
}

TEST(batches_fetched_ahead_give_the_same_rows) {
  for (const bool sweeps : {false, true})
    for (size_t ahead : {1, 3}) {
      testing::TempFolder folder;
      Store small = make(kDram, folder.path()), large = make(0, "");
      for (const Store* store : {&small, &large})
        for (const auto& table : store->tables) table->set_admission({2, 1.0, size_t{1} << 16});
      const auto keys = batches(80, 900, 40000);
      train_ahead(small, keys, ahead, sweeps);
      Plan plan;
      for (size_t i = 0; i < keys.size(); ++i) {
        route(plan, large, keys[i]);
        finish(plan, keys[i].size(), static_cast<uint32_t>(i + 1));
        if (sweeps && i % 10 == 9) sweep(large, static_cast<uint32_t>(i + 1));
      }
      CHECK(same(small, large));
      CHECK(sweeps || prefetched(small) > 100);
    }
}

// If compaction moves a row while prefetch reads it, fetch reads it again.
struct NoCompaction {
  NoCompaction() { CompactionThread::shared().set_rate(0); }
  ~NoCompaction() { CompactionThread::shared().set_rate(rate); }
  uint64_t rate = CompactionThread::shared().rate();
};

TEST(a_row_that_was_fetched_ahead_stays_until_its_batch_has_it) {
  NoCompaction no_compaction;
  testing::TempFolder folder;
  Store store = make(kDram, folder.path());
  const auto keys = batches(20, 1000, 12000);
  Plan plan;
  for (size_t i = 0; i < 19; ++i) {
    route(plan, store, keys[i]);
    finish(plan, keys[i].size(), static_cast<uint32_t>(i + 1));
  }
  for (const auto& table : store.tables) {
    std::lock_guard lock(table->write_mutex());
    table->tier()->evict(100000);
  }
  route(plan, store, keys[19]);
  CHECK(plan.prefetch().rows > 1000);
  for (const auto& table : store.tables) {
    std::lock_guard lock(table->write_mutex());
    table->tier()->evict(100000);
  }
  const uint64_t before = store.tables[0]->tier()->report().arrivals;
  finish(plan, keys[19].size(), 20);
  // Reading without the lock may leave a few to fetch.
  CHECK(store.tables[0]->tier()->report().arrivals - before < 100);
  for (const auto& table : store.tables) {
    std::lock_guard lock(table->write_mutex());
    CHECK(table->tier()->evict(100000) >= 1);  // no row is protected any more
    CHECK_EQ(testing::rows_of(*table).size(), 0u);
  }
}

TEST(prefetch_creates_admits_and_counts_nothing) {
  testing::TempFolder folder;
  Store store = make(kDram, folder.path());
  const auto keys = batches(2, 1000, 5000);
  Plan plan;
  route(plan, store, keys[0]);
  finish(plan, keys[0].size(), 1);
  for (const auto& table : store.tables) {
    std::lock_guard lock(table->write_mutex());
    table->tier()->evict(300);
  }
  const auto before = all_rows(store);
  const uint64_t hits = store.tables[0]->tier()->report().hits, size = store.tables[0]->size();
  route(plan, store, keys[1]);
  plan.prefetch();
  plan.prefetch();  // again: it first releases the rows that are protected
  plan.release();
  const auto after = all_rows(store);
  CHECK(testing::same_bits(before[0], after[0]) && testing::same_bits(before[1], after[1]));
  CHECK_EQ(store.tables[0]->tier()->report().hits, hits);
  CHECK_EQ(store.tables[0]->size(), size);
  for (const auto& table : store.tables) {
    std::lock_guard lock(table->write_mutex());
    table->tier()->evict(100000);
    CHECK_EQ(testing::rows_of(*table).size(), 0u);
  }
}

TEST(a_row_that_expires_between_prefetch_and_fetch_reads_as_new) {
  testing::TempFolder folder;
  Store store = make(kDram, folder.path());
  const auto keys = batches(1, 500, 2000);
  Plan plan;
  route(plan, store, keys[0]);
  finish(plan, keys[0].size(), 1);
  for (const bool below : {false, true}) {  // in DRAM when it is prefetched, and on SSD
    if (below)
      for (const auto& table : store.tables) {
        std::lock_guard lock(table->write_mutex());
        table->tier()->evict(100000);
      }
    route(plan, store, keys[0]);
    plan.prefetch();
    SweepRules rules;
    rules.cutoff = 100 + below * 100;
    for (const auto& table : store.tables) table->sweep(rules);
    plan.fetch(2);
    std::vector<float> out(2 * keys[0].size() * kDim), inserts(2 * kDim);
    Matrix a{out.data(), keys[0].size(), kDim, kDim}, b = a;
    b.data += keys[0].size() * kDim;
    plan.gather({a, b});
    for (size_t i = 0; i < keys[0].size(); ++i) {
      store.tables[0]->write_initial_row(keys[0][i], inserts.data());
      CHECK(std::equal(inserts.begin(), inserts.begin() + kDim, a.data + i * kDim));
    }
    plan.release();
  }
}

// The row is read before the sweep and put into its slot after it: Table::promote must check expiry again.
TEST(a_row_that_expires_while_it_is_being_fetched_reads_as_new) {
  for (int round = 0; round < 20; ++round) {
    testing::TempFolder folder;
    Store store = make(kDram, folder.path());
    const auto keys = batches(1, 2000, 20000);
    Plan plan;
    route(plan, store, keys[0]);
    finish(plan, keys[0].size(), 1);
    for (const auto& table : store.tables) {
      std::lock_guard lock(table->write_mutex());
      table->tier()->evict(100000);
    }
    route(plan, store, keys[0]);
    std::thread sweeper([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
      SweepRules rules;
      rules.cutoff = 100;
      for (const auto& table : store.tables) table->sweep(rules);
    });
    plan.prefetch();
    sweeper.join();
    plan.fetch(2);
    const HeaderGroup* headers = store.tables[0]->view().headers;
    std::vector<uint32_t> slots(2 * keys[0].size()), steps(slots.size()), counts(slots.size());
    plan.slot_metadata(slots.data(), steps.data(), counts.data());
    CHECK(headers != nullptr);
    CHECK_EQ(std::count(counts.begin(), counts.end(), 0u), static_cast<std::ptrdiff_t>(counts.size()));
    plan.release();
  }
}

TEST(a_snapshot_taken_beside_prefetches_is_the_step_at_which_it_began) {
  testing::TempFolder folder;
  Store store = make(kDram, folder.path());
  const auto keys = batches(60, 1000, 20000);
  Plan plan;
  uint32_t step = 0;
  for (int save = 0; save < 3; ++save) {
    for (int i = 0; i < 10; ++i) {
      route(plan, store, keys[step]);
      finish(plan, keys[step].size(), step + 1);
      ++step;
    }
    std::atomic<bool> stop{false};
    std::thread fetcher([&] {
      Plan ahead;
      for (size_t i = step; !stop; i = (i + 1) % keys.size()) {
        route(ahead, store, keys[i]);
        ahead.prefetch();
      }
    });
    const auto expected = all_rows(store);
    for (const auto& table : store.tables) table->begin_snapshot();
    for (int i = 0; i < 5; ++i) {
      route(plan, store, keys[step]);
      finish(plan, keys[step].size(), step + 1);
      ++step;
    }
    for (size_t t = 0; t < 2; ++t) {
      const std::string to = folder.path() + "/saved-" + std::to_string(save) + std::to_string(t);
      store.tables[t]->finish_snapshot(to, "");
      Store loaded = make(0, "");
      LogOptions options{to + "-log", t ? "b" : "a", 2 * kDim * sizeof(float)};
      loaded.tables[t]->attach(std::make_unique<Log>(options), false);
      loaded.tables[t]->load_snapshot(to);
      CHECK(testing::same_bits(all_rows(loaded)[t], expected[t]));
    }
    stop = true;
    fetcher.join();
  }
}

TEST(rows_without_a_free_slot_are_read_by_fetch) {
  testing::TempFolder folder;
  Store store = make(size_t{10} << 20, folder.path()), large = make(0, "");
  const auto keys = batches(40, 2000, 20000);
  Plan plan;
  for (size_t i = 0; i < 34; ++i)
    for (const Store* s : {&store, &large}) {
      route(plan, *s, keys[i]);
      finish(plan, keys[i].size(), static_cast<uint32_t>(i + 1));
    }
  std::deque<Plan> ahead(6);
  bool out_of_slots = false;
  for (size_t i = 0; i < 6; ++i) {
    route(ahead[i], store, keys[34 + i]);
    out_of_slots |= ahead[i].prefetch().out_of_slots;
  }
  CHECK(out_of_slots);
  size_t late = 0;
  for (size_t i = 0; i < 6; ++i) {
    finish(ahead[i], keys[34 + i].size(), static_cast<uint32_t>(35 + i));
    late += ahead[i].prefetch_misses();
    route(plan, large, keys[34 + i]);
    finish(plan, keys[34 + i].size(), static_cast<uint32_t>(35 + i));
    CHECK(store.budget->used() <= store.budget->limit());
  }
  CHECK(late > 100);
  CHECK(same(store, large));
}

}  // namespace
}  // namespace hotrow
