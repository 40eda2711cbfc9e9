// Uploads and write-backs over a device that runs work as late as possible, compared with the tables.
#include "device/row_transfer.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "testing/random.h"
#include "testing/slow_device.h"
#include "testing/tables.h"
#include "testing/test.h"
#include "testing/threads.h"

namespace hotrow::device {
namespace {

constexpr int kDim = 8;
constexpr size_t kWidth = kDim + 1, kCapacity = 300, kChunkRows = 170, kCells = 3;
constexpr uint32_t kAbsent = ~0u;

Handle stream(intptr_t number) { return reinterpret_cast<Handle>(number); }

// Two tables with rows, and a GPU cache above them. Its launches do what the kernels of kernels/rows/transfer.py do.
struct Bench {
  testing::SlowDevice slow;
  testing::Random random{11};
  std::vector<std::shared_ptr<Table>> tables;
  std::vector<float> rows;  // of the cache
  std::vector<int32_t> hosts, steps, counts;
  std::vector<ZeroCopyArgs> zero_copy_cells{kCells};
  std::vector<ScatterArgs> land_cells{2};
  std::deque<std::function<void()>> launches;
  std::unique_ptr<RowTransfer> transfer;

  explicit Bench(size_t keys, bool last_first = true)
      : slow(last_first), rows(keys * 4 * kWidth, -1.0f), hosts(keys * 4, -9), steps(hosts), counts(hosts) {
    for (int t = 0; t < 2; ++t) {
      tables.push_back(testing::make_table(kDim, RuleKind::kRowWiseAdagrad));
      std::vector<int64_t> some(keys);
      std::iota(some.begin(), some.end(), int64_t{1});
      std::vector<uint64_t> seen(keys, 3);
      std::vector<uint32_t> last(keys, 7);
      const auto values = random.reals(keys * kWidth);
      tables[t]->assign(some.data(), keys, values.data(), kWidth, seen.data(), last.data());
    }
    std::vector<std::pair<Handle, ZeroCopyArgs*>> zero_copy_launches;
    for (ZeroCopyArgs& cell : zero_copy_cells)
      zero_copy_launches.emplace_back(&launches.emplace_back([&] { zero_copy(cell); }), &cell);
    std::vector<std::pair<Handle, ScatterArgs*>> scatter_launches;
    for (ScatterArgs& cell : land_cells)
      scatter_launches.emplace_back(&launches.emplace_back([&] { scatter(cell); }), &cell);
    transfer = std::make_unique<RowTransfer>(stream(1), stream(2), stream(3), kWidth, kCapacity, kChunkRows,
                                             zero_copy_launches, scatter_launches);
  }
  ~Bench() { slow.finish(); }

  float* row(int32_t slot) { return rows.data() + static_cast<size_t>(slot) * kWidth; }

  void zero_copy(const ZeroCopyArgs& cell) {
    const auto *slots = at(cell.slots), *of = at(cell.tables), *below = at(cell.hosts);
    for (int64_t i = 0; i < cell.count; ++i) {
      if (slots[i] < 0 || below[i] < 0) continue;
      const auto memory = tables[of[i]]->row_memory();
      std::memcpy(row(slots[i]), memory.data + static_cast<size_t>(below[i]) * memory.row_bytes, memory.row_bytes);
    }
  }
  void scatter(const ScatterArgs& cell) {
    const auto *slots = at(cell.slots), *places = at(cell.places);
    for (int64_t i = 0; i < cell.count; ++i) {
      if (slots[i] < 0) continue;
      hosts[slots[i]] = places[i];
      steps[slots[i]] = places[cell.count + i];
      counts[slots[i]] = places[2 * cell.count + i];
      if (i >= cell.zero_copy_count)
        std::memcpy(row(slots[i]), reinterpret_cast<float*>(cell.device_staging) + (i - cell.zero_copy_count) * kWidth,
                    kWidth * sizeof(float));
    }
  }
  static const int32_t* at(int64_t address) { return reinterpret_cast<const int32_t*>(address); }
};

// Keys being uploaded, each with a slot of the cache that no other batch has.
struct Batch {
  std::vector<TableRange> parts;
  std::vector<int64_t> keys;
  std::vector<int32_t> slots, of;
  std::vector<uint32_t> places;
  std::vector<float> staged, device_staging;
  size_t zero_copy_count;

  Batch(Bench& bench, size_t each, size_t zero_copy_count, int32_t from) : zero_copy_count(zero_copy_count) {
    for (int t = 0; t < 2; ++t) {
      parts.push_back({bench.tables[t].get(), keys.size(), keys.size() + each});
      for (size_t i = 0; i < each; ++i) {
        keys.push_back(1 + static_cast<int64_t>((i * 7 + static_cast<size_t>(from)) % each));
        of.push_back(t);
        slots.push_back(from + static_cast<int32_t>(2 * each - slots.size() - 1));
      }
    }
    places.assign(3 * keys.size(), 12345);
    staged.assign((keys.size() - zero_copy_count) * kWidth, 0.0f);
    device_staging = staged;
  }
  size_t upload(RowTransfer& transfer, bool stop_at_first_miss = false, bool scatter = true) {
    const size_t n = keys.size();
    return transfer.upload(
        {parts, n, keys.data(), places.data(), places.data() + n, places.data() + 2 * n, zero_copy_count,
         reinterpret_cast<int64_t>(slots.data()), reinterpret_cast<int64_t>(of.data()), staged.data(),
         reinterpret_cast<DeviceAddress>(device_staging.data()), stop_at_first_miss, scatter},
        4);
  }
  // Whether every row is in its cache slot, with its DRAM slot.
  bool there(Bench& bench) const {
    bool all = true;
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto row = testing::rows_of(*bench.tables[of[i]]).at(keys[i]);
      const int32_t slot = slots[i];
      all &= std::equal(row.values.begin(), row.values.end(), bench.row(slot));
      all &= bench.hosts[slot] == static_cast<int32_t>(places[i]) && bench.steps[slot] == 7;
      all &= decode_count(static_cast<uint16_t>(bench.counts[slot])) == row.count;
      if (!all) return false;
    }
    return true;
  }
};

TEST(rows_are_uploaded_by_zero_copy_or_gathered) {
  for (int threads : {1, 4})
    for (size_t zero_copy_count : {size_t{0}, size_t{1}, size_t{500}, size_t{799}, size_t{800}}) {
      testing::WithThreads with(threads);
      Bench bench(400, threads == 1);
      Batch batch(bench, 400, zero_copy_count, 0);
      CHECK_EQ(batch.upload(*bench.transfer), 0u);
      bench.slow.finish();
      CHECK(batch.there(bench));
    }
}

TEST(more_launches_than_argument_structs_reuse_them) {
  testing::WithThreads with(4);
  Bench bench(2000);  // 4,000 rows, 300 a launch, and three cells
  Batch batch(bench, 2000, 3900, 0);
  CHECK_EQ(batch.upload(*bench.transfer), 0u);
  bench.slow.finish();
  CHECK(batch.there(bench));
}

TEST(batches_do_not_wait_for_the_device_and_do_not_mix) {
  testing::WithThreads with(4);
  Bench bench(600);
  std::deque<Batch> batches;
  for (int32_t b = 0; b < 6; ++b)  // by zero-copy, and gathered only
    CHECK_EQ(batches.emplace_back(bench, 40, b < 3 ? 50 : 0, b * 80).upload(*bench.transfer), 0u);
  CHECK(bench.slow.busy() > 0);
  bench.slow.finish();
  for (const Batch& batch : batches) CHECK(batch.there(bench));
}

TEST(unseen_keys_stop_an_upload_or_are_skipped) {
  for (size_t at : {size_t{3}, size_t{650}})
    for (bool all : {true, false}) {
      Bench bench(400);
      Batch batch(bench, 400, 500, 0);
      batch.keys[at] = -5;
      CHECK_EQ(batch.upload(*bench.transfer, all), 1u);
      bench.slow.finish();
      CHECK_EQ(bench.hosts[batch.slots[0]] == -9, all);  // nothing was scattered
      if (!all) {
        CHECK_EQ(bench.hosts[batch.slots[at]], static_cast<int32_t>(kAbsent));
        batch.keys[at] = batch.keys[at + 1], batch.slots[at] = batch.slots[at + 1];
        batch.places[at] = batch.places[at + 1];
        CHECK(batch.there(bench));
      }
    }
}

TEST(copies_before_a_failed_copy_are_complete_when_stream_up_has_passed) {
  testing::WithThreads with(1);
  Bench bench(400, false);
  Batch batch(bench, 400, 0, 0);
  bench.slow.take_copies(2);
  CHECK_THROWS(std::runtime_error, batch.upload(*bench.transfer));
  Event passed;  // after it, the memory that copies read is reused
  passed.record(stream(1));
  passed.wait();
  const auto end = static_cast<ptrdiff_t>(2 * kChunkRows * kWidth);
  CHECK(std::equal(batch.staged.begin(), batch.staged.begin() + end, batch.device_staging.begin()));
  CHECK(!std::equal(batch.staged.begin(), batch.staged.begin() + end,
                    std::vector<float>(2 * kChunkRows * kWidth).begin()));
  bench.slow.finish();
}

TEST(rows_whose_slots_are_known_are_gathered) {
  Bench bench(400);
  Batch batch(bench, 400, 0, 0);
  const size_t n = batch.keys.size();
  RowLookup lookup{batch.parts, batch.keys.data(), batch.places.data(), batch.places.data() + n,
                   batch.places.data() + 2 * n};
  CHECK_EQ(lookup_rows(lookup, {0, n}), 0u);
  CHECK_EQ(bench.transfer->upload(
               {batch.parts, n, nullptr, batch.places.data(), nullptr, nullptr, 0, 0, 0, batch.staged.data(),
                reinterpret_cast<DeviceAddress>(batch.device_staging.data()), false, false},
               4),
           0u);
  CHECK(batch.device_staging != batch.staged);
  bench.slow.finish();
  CHECK(batch.device_staging == batch.staged);
  for (size_t i = 0; i < n; i += 37) {
    const auto row = testing::rows_of(*bench.tables[batch.of[i]]).at(batch.keys[i]);
    CHECK(std::equal(row.values.begin(), row.values.end(),
                     batch.device_staging.begin() + static_cast<ptrdiff_t>(i * kWidth)));
  }
}

TEST(rows_are_stored_when_their_copies_have_arrived) {
  for (int threads : {1, 4}) {
    testing::WithThreads with(threads);
    Bench bench(400, false);
    Batch batch(bench, 400, 0, 0);
    const size_t n = batch.keys.size();
    RowLookup lookup{batch.parts, batch.keys.data(), batch.places.data(), batch.places.data() + n,
                     batch.places.data() + 2 * n};
    CHECK_EQ(lookup_rows(lookup, {0, n}), 0u);
    auto expected = std::vector{testing::rows_of(*bench.tables[0]), testing::rows_of(*bench.tables[1])};
    const auto device_rows = bench.random.reals(n * kWidth);
    for (size_t i = 0; i < n; ++i) {
      batch.places[n + i] = i % 3 ? 9 : 2;  // those are clean
      if (i % 5 == 0) batch.places[i] = kNoSlot;
      if (i % 3 == 0 || i % 5 == 0) continue;
      auto& row = expected[batch.of[i]][batch.keys[i]];
      row.values.assign(device_rows.begin() + static_cast<ptrdiff_t>(i * kWidth),
                        device_rows.begin() + static_cast<ptrdiff_t>((i + 1) * kWidth));
      row.last_step = 9;
    }
    std::vector<float> staged(n * kWidth, -3.0f), gathered(n * kWidth, -4.0f);
    bench.slow.enqueue(stream(4), [&] { return gathered = device_rows, true; });
    auto sent =
        bench.transfer->begin_write_back(stream(4), reinterpret_cast<DeviceAddress>(gathered.data()), n, staged.data());
    sent->store_rows(batch.parts, batch.places.data(), batch.places.data() + n, batch.places.data() + 2 * n, 5);
    for (size_t t = 0; t < 2; ++t) CHECK(testing::same_bits(testing::rows_of(*bench.tables[t]), expected[t]));
  }
}

TEST(a_write_back_that_is_not_stored_waits_for_its_copies) {
  Bench bench(400);
  const auto device_rows = bench.random.reals(400 * kWidth);
  std::vector<float> staged(device_rows.size(), -3.0f);
  bench.transfer->begin_write_back(stream(4), reinterpret_cast<DeviceAddress>(device_rows.data()), 400, staged.data())
      .reset();
  CHECK(staged == device_rows);
}

}  // namespace
}  // namespace hotrow::device
