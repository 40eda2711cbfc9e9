// A table that caches a remote store: evicted rows are discarded, the budget holds, and concurrent readers see a row
// whole or not at all.
#include <atomic>
#include <thread>

#include "table/table.h"
#include "testing/tables.h"
#include "testing/temp_folder.h"
#include "testing/test.h"
#include "tiering/ssd_tier.h"

namespace hotrow {
namespace {

constexpr int kDim = 64;
constexpr size_t kDram = size_t{8} << 20, kRows = 100'000, kPart = 1000;

std::shared_ptr<Table> make(std::shared_ptr<Budget> budget, const std::string& folder) {
  auto table = std::make_shared<Table>(TableOptions{"t", kDim, RuleKind::kSgd, {}, {InitialKind::kConstant, -1, 0}, 42},
                                       std::move(budget));
  LogOptions options{folder, "t", kDim * sizeof(float)};
  options.buffer_bytes = size_t{1} << 15;
  table->attach(std::make_unique<Log>(options), true, true);
  return table;
}

void put(Table& table, int64_t first, size_t count) {
  std::vector<int64_t> keys(count);
  std::vector<float> rows(count * kDim);
  for (size_t i = 0; i < count; ++i) {
    keys[i] = first + static_cast<int64_t>(i);
    std::fill_n(rows.begin() + i * kDim, kDim, static_cast<float>(keys[i]));
  }
  table.assign(keys.data(), count, rows.data(), kDim, nullptr, nullptr);
}

TEST(a_dropped_row_is_forgotten_and_the_budget_holds) {
  testing::TempFolder folder;
  auto budget = std::make_shared<Budget>(kDram);
  auto table = make(budget, folder.path());
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::thread reader([&] {
    std::vector<int64_t> keys(500);
    std::vector<float> out(keys.size() * kDim);
    std::vector<char> found(keys.size());
    for (int64_t from = 0; !stop; from = (from + 777) % static_cast<int64_t>(kRows)) {
      for (size_t i = 0; i < keys.size(); ++i) keys[i] = from + static_cast<int64_t>(i);
      table->read(keys.data(), nullptr, keys.size(), out.data(), reinterpret_cast<bool*>(found.data()));
      for (size_t i = 0; i < keys.size(); ++i)
        for (int d = 0; d < kDim; ++d) wrong += out[i * kDim + d] != (found[i] ? static_cast<float>(keys[i]) : -1.0f);
    }
  });
  for (size_t at = 0; at < kRows; at += kPart) {
    put(*table, static_cast<int64_t>(at), kPart);
    CHECK(budget->used() <= kDram);
  }
  stop = true;
  reader.join();
  CHECK_EQ(wrong.load(), 0);
  const TierReport report = table->tier()->report();
  CHECK_EQ(table->size() + report.evicted, kRows);
  CHECK(table->size() > kDram / (kDim * sizeof(float)) / 3);
  CHECK_EQ(report.log.bytes_written, 0u);
  CHECK_EQ(report.log.records, 0u);
  CHECK_EQ(report.cold_rows, 0u);
  table->clear();
  CHECK_EQ(table->size(), 0u);
  put(*table, 0, kPart);
  CHECK_EQ(table->size(), kPart);
  CHECK(table->tier()->cache_only());
}

TEST(rows_that_are_used_stay_longer) {
  testing::TempFolder folder;
  auto table = make(std::make_shared<Budget>(kDram), folder.path());
  put(*table, 0, kPart);
  std::vector<int64_t> hot(kPart / 2);
  for (size_t i = 0; i < hot.size(); ++i) hot[i] = static_cast<int64_t>(2 * i);
  for (size_t at = kPart; at < kRows / 2; at += kPart) {
    table->mark_used(hot.data(), hot.size());
    put(*table, static_cast<int64_t>(at), kPart);
  }
  std::vector<uint32_t> slots(hot.size());
  table->find(hot.data(), hot.size(), slots.data());
  CHECK_EQ(std::count(slots.begin(), slots.end(), kNoSlot), 0);
}

}  // namespace
}  // namespace hotrow
