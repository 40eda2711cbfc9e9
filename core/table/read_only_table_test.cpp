// Read-only tables: rows of every type are read as converted, from DRAM and SSD, beside prefetches and evictions of
// other threads. Run it under the sanitizers too.
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "plan/plan.h"
#include "testing/random.h"
#include "testing/tables.h"
#include "testing/temp_folder.h"
#include "testing/test.h"
#include "testing/threads.h"
#include "tiering/compaction_thread.h"

namespace hotrow {
namespace {

using testing::Random;
using Keys = std::vector<int64_t>;

constexpr int kDim = 21;
constexpr RowType kTypes[] = {RowType::kFloat, RowType::kHalf, RowType::kByte};

std::shared_ptr<Table> make(RowType type, std::shared_ptr<Budget> budget = std::make_shared<Budget>(0),
                            const std::string& folder = "", bool evicts = true) {
  auto table = std::make_shared<Table>(
      TableOptions{"t", kDim, RuleKind::kSgd, {}, {InitialKind::kUniform, -1, 1}, 42, true, type}, std::move(budget));
  if (!folder.empty()) {
    LogOptions options{folder, "t", static_cast<uint32_t>(table->width() * sizeof(float))};
    options.row_type = static_cast<uint32_t>(type);
    options.segment_bytes = size_t{1} << 18;
    options.buffer_bytes = size_t{1} << 15;
    table->attach(std::make_unique<Log>(options), evicts);
  }
  return table;
}

Keys keys_up_to(int64_t count) {
  Keys keys(count);
  for (int64_t i = 0; i < count; ++i) keys[i] = i * 7919 - 1000;
  return keys;
}

std::vector<float> values_of(const Keys& keys) {
  std::vector<float> values;
  for (int64_t key : keys)
    for (int i = 0; i < kDim; ++i) values.push_back(static_cast<float>((key * 31 + i * 17) % 1009) / 911.0f);
  return values;
}

// The expected result of reading those values.
std::vector<float> converted(RowType type, const std::vector<float>& values) {
  std::vector<float> result(values.size());
  std::vector<uint32_t> row(words_of(type, kDim));
  for (size_t at = 0; at < values.size(); at += kDim) {
    encode_row(type, values.data() + at, kDim, row.data());
    kernels().decode(type, reinterpret_cast<const char*>(row.data()), kDim, result.data() + at);
  }
  return result;
}

std::vector<float> read(const Table& table, const Keys& keys) {
  std::vector<float> out(keys.size() * kDim);
  table.read(keys.data(), nullptr, keys.size(), out.data(), nullptr);
  return out;
}

void fill(Table& table, const Keys& keys) {
  const auto values = values_of(keys);
  table.assign(keys.data(), keys.size(), values.data(), kDim, nullptr, nullptr);
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::vector<float> initial_of(const Table& table, const Keys& keys) {
  std::vector<float> values(keys.size() * kDim);
  for (size_t i = 0; i < keys.size(); ++i) table.write_initial_row(keys[i], values.data() + i * kDim);
  return values;
}

size_t evict_all(Table& table) {
  std::lock_guard lock(table.write_mutex());
  const size_t gone = table.tier()->evict(table.size());
  table.recharge_budget();
  return gone;
}

TEST(rows_of_every_type_read_as_converted_through_snapshot_dram_and_ssd) {
  for (RowType type : kTypes) {
    testing::TempFolder folder;
    const Keys keys = keys_up_to(9000);
    const auto expected = converted(type, values_of(keys));
    auto writer = make(type, std::make_shared<Budget>(0), folder / "log", false);
    fill(*writer, keys);
    CHECK(same(read(*writer, keys), expected));
    writer->begin_snapshot();
    CHECK_EQ(writer->finish_snapshot(folder / "rows", "").rows, keys.size());

    auto in_dram = make(type);
    in_dram->load_snapshot(folder / "rows");
    CHECK(same(read(*in_dram, keys), expected));

    auto over_ssd = make(type, std::make_shared<Budget>(size_t{4} << 20), folder / "ssd");
    over_ssd->load_snapshot(folder / "rows");
    CHECK_EQ(over_ssd->on_ssd(keys.data(), keys.size(), nullptr), keys.size());
    CHECK(same(read(*over_ssd, keys), expected));
    CHECK(over_ssd->prefetch(keys.data(), 3000) == 3000);
    CHECK_EQ(over_ssd->on_ssd(keys.data(), keys.size(), nullptr), keys.size() - 3000);
    CHECK(same(read(*over_ssd, keys), expected));
    CHECK_EQ(over_ssd->size(), keys.size());

    const Keys unseen{5, -5, int64_t{1} << 60};
    for (const auto& table : {writer, in_dram, over_ssd}) CHECK(same(read(*table, unseen), initial_of(*table, unseen)));
  }
}

TEST(a_snapshot_of_another_type_is_refused_by_name) {
  testing::TempFolder folder;
  auto writer = make(RowType::kHalf, std::make_shared<Budget>(0), folder / "log", false);
  fill(*writer, keys_up_to(10));
  writer->begin_snapshot();
  writer->finish_snapshot(folder / "rows", "");
  auto other = std::make_shared<Table>(
      TableOptions{"t", (kDim + 1) / 2, RuleKind::kSgd, {}, {InitialKind::kUniform, -1, 1}, 42, true, RowType::kFloat},
      std::make_shared<Budget>(0));  // rows of as many bytes
  CHECK_THROWS(std::invalid_argument, other->load_snapshot(folder / "rows"));
}

TEST(what_would_create_or_train_a_row_is_refused) {
  auto table = make(RowType::kByte);
  const Keys keys{1, 2, 3};
  fill(*table, {1});
  CHECK_THROWS(std::invalid_argument, table->find_or_create(keys.data(), keys.size(), nullptr));
  CHECK_THROWS(std::invalid_argument, table->set_admission({2, 1.0, 1 << 16}));
  CHECK_THROWS(std::invalid_argument, table->sweep({}));
  Plan plan;
  plan.route({{table, {{keys.data(), keys.size(), nullptr, keys.size(), nullptr, Pooling::kSum}}}});
  CHECK_THROWS(std::invalid_argument, plan.fetch());
  CHECK_EQ(table->size(), 1u);
  const TableOptions trained{"t", 4, RuleKind::kSgd, {}, {}, 0, false, RowType::kByte};
  CHECK_THROWS(std::invalid_argument, Table(trained, std::make_shared<Budget>(0)));
}

TEST(a_read_that_does_not_wait_answers_cold_rows_by_the_policy_and_counts_them) {
  testing::TempFolder folder;
  auto table = make(RowType::kHalf, std::make_shared<Budget>(size_t{8} << 20), folder / "ssd");
  const Keys all = keys_up_to(600);
  fill(*table, all);
  evict_all(*table);
  const Keys warm(all.begin(), all.begin() + 200);
  CHECK_EQ(table->prefetch(warm.data(), warm.size()), warm.size());
  std::vector<float> standard(kDim);
  for (int i = 0; i < kDim; ++i) standard[i] = static_cast<float>(i) + 0.5f;
  table->set_default_row(standard);

  // 150 examples of four ids: two that are warm, one cold, one unseen.
  Keys ids;
  std::vector<int64_t> offsets{0};
  for (int64_t e = 0; e < 150; ++e) {
    for (int64_t key : {all[e % 200], all[(e * 3) % 200], all[200 + e], int64_t{e + (int64_t{1} << 50)}})
      ids.push_back(key);
    offsets.push_back(static_cast<int64_t>(ids.size()));
  }
  const auto stored = converted(RowType::kHalf, values_of(all));
  const auto initial = initial_of(*table, ids);
  const uint64_t reads = table->tier()->report().log.rows_read;
  for (ColdReadPolicy policy : {ColdReadPolicy::kInitial, ColdReadPolicy::kDefault}) {
    Plan plan;
    plan.route({{table, {{ids.data(), ids.size(), offsets.data(), 150, nullptr, Pooling::kNone}}}});
    CHECK_EQ(plan.read(policy), 150u);
    std::vector<float> out(ids.size() * kDim);
    plan.gather({{out.data(), ids.size(), kDim, kDim}});
    for (size_t i = 0; i < ids.size(); ++i) {
      const float* expected = initial.data() + i * kDim;
      if (i % 4 < 2) expected = stored.data() + (ids[i] + 1000) / 7919 * kDim;
      if (i % 4 == 2 && policy == ColdReadPolicy::kDefault) expected = standard.data();
      CHECK(std::memcmp(out.data() + i * kDim, expected, kDim * sizeof(float)) == 0);
    }
    std::vector<uint32_t> late(150);
    plan.count_late(late.data(), late.size());
    CHECK(late == std::vector<uint32_t>(150, 1));
  }
  CHECK_EQ(table->tier()->report().log.rows_read, reads);  // the disk was not touched
  Plan plan;
  plan.route({{table, {{ids.data(), ids.size(), offsets.data(), 150, nullptr, Pooling::kSum}}}});
  CHECK_EQ(plan.read(), 0u);
  CHECK(table->tier()->report().log.rows_read > reads);
}

TEST(a_row_that_is_read_stays_in_dram_and_others_leave) {
  testing::TempFolder folder;
  auto table = make(RowType::kFloat, std::make_shared<Budget>(size_t{64} << 20), folder / "ssd");
  const Keys all = keys_up_to(4000), asked(all.begin(), all.begin() + 500);
  fill(*table, all);
  for (int i = 0; i < 3; ++i) read(*table, asked);
  {
    std::lock_guard lock(table->write_mutex());
    table->tier()->evict(3000);
  }
  CHECK_EQ(table->on_ssd(asked.data(), asked.size(), nullptr), 0u);
  CHECK_EQ(table->on_ssd(all.data(), all.size(), nullptr), 3000u);
}

// Few rows in many slots, so that the hand goes round slowly while readers raise the heat of its victims.
TEST(rows_that_are_read_while_they_are_chosen_to_leave_leave_once) {
  testing::TempFolder folder;
  auto table = make(RowType::kHalf, std::make_shared<Budget>(size_t{64} << 20), folder / "ssd");
  const Keys all = keys_up_to(40), more = keys_up_to(60000);
  fill(*table, more);
  evict_all(*table);
  const auto expected = converted(RowType::kHalf, values_of(all));
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> readers;
  for (uint64_t seed : {1, 2})
    readers.emplace_back([&, seed] {
      Random random(seed);
      while (!stop) {
        const size_t i = random.below(200);  // each row about once while the hand goes round
        const auto row = read(*table, {i < all.size() ? all[i] : 1});
        wrong += i < all.size() && std::memcmp(row.data(), expected.data() + i * kDim, kDim * sizeof(float)) != 0;
      }
    });
  for (const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(400);
       std::chrono::steady_clock::now() < end;) {
    evict_all(*table);
    table->prefetch(all.data(), all.size());
  }
  stop = true;
  for (auto& reader : readers) reader.join();
  CHECK_EQ(wrong, 0);
  CHECK_EQ(table->size(), more.size());
}

// Lanes read while other threads prefetch, evict and assign rows. Each row that is read must be one of the two that its
// key ever had, whole, in any tier.
TEST(lanes_read_whole_rows_beside_prefetch_eviction_and_assignment) {
  for (RowType type : kTypes) {
    testing::TempFolder folder;
    testing::WithThreads threads(3);
    auto budget = std::make_shared<Budget>(size_t{10} << 20);  // each thread that reads SSD takes 1 of it
    auto table = make(type, budget, folder / "ssd");
    const Keys all = keys_up_to(40000);
    const auto values = values_of(all);
    auto doubled = values;
    for (float& value : doubled) value *= 2;
    const auto one = converted(type, values), two = converted(type, doubled);
    table->assign(all.data(), all.size(), values.data(), kDim, nullptr, nullptr);
    evict_all(*table);

    std::atomic<bool> stop{false};
    std::atomic<uint64_t> wrong{0}, late{0}, rows{0};
    auto some = [&](Random& random, size_t count) {
      Keys keys;
      for (size_t i = 0; i < count; ++i) keys.push_back(all[random.below(all.size())]);
      return keys;
    };
    auto lane = [&](uint64_t seed) {
      Random random(seed);
      Plan plan;
      while (!stop) {
        const Keys keys = some(random, 200);
        plan.route({{table, {{keys.data(), keys.size(), nullptr, keys.size(), nullptr, Pooling::kNone}}}});
        const size_t answered = plan.read(seed % 2 ? ColdReadPolicy::kDefault : ColdReadPolicy::kWait);
        std::vector<float> out(keys.size() * kDim);
        std::vector<uint32_t> counts(keys.size());
        plan.gather({{out.data(), keys.size(), kDim, kDim}});
        plan.count_late(counts.data(), counts.size());
        late += answered;
        for (size_t i = 0; i < keys.size(); ++i) {
          const size_t at = (keys[i] + 1000) / 7919 * kDim;
          const std::vector<float> zeros(kDim);
          auto is = [&](const float* row) {
            return std::memcmp(out.data() + i * kDim, row, kDim * sizeof(float)) == 0;
          };
          wrong += counts[i] ? !is(zeros.data()) : !is(one.data() + at) && !is(two.data() + at);
        }
        rows += keys.size();
      }
    };
    auto bring = [&](uint64_t seed) {
      Random random(seed);
      std::vector<char> marks(1000);
      while (!stop) {
        const Keys keys = some(random, 1000);
        table->on_ssd(keys.data(), keys.size(), reinterpret_cast<bool*>(marks.data()));
        table->prefetch(keys.data(), keys.size());
      }
    };
    std::vector<std::thread> workers;
    for (uint64_t seed : {1, 2, 3}) workers.emplace_back(lane, seed);
    for (uint64_t seed : {11, 12}) workers.emplace_back(bring, seed);
    Random random(5);
    for (const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
         std::chrono::steady_clock::now() < end;) {
      const size_t first = random.below(all.size() - 100);
      table->assign(all.data() + first, 100, (random.below(2) ? values : doubled).data() + first * kDim, kDim, nullptr,
                    nullptr);
      std::lock_guard lock(table->write_mutex());
      table->tier()->evict(500);
      table->recharge_budget();
    }
    stop = true;
    for (auto& worker : workers) worker.join();
    CHECK_EQ(wrong, 0u);
    CHECK(rows > 0 && late > 0);
    CHECK_EQ(table->size(), all.size());
    CHECK(budget->used() <= budget->limit());
  }
}

}  // namespace
}  // namespace hotrow
