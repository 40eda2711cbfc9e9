// Readers beside the table's writer. Meant for -fsanitize=thread.
#include <atomic>
#include <mutex>
#include <thread>

#include "testing/logs.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::Random;
using testing::ReferenceLog;
using testing::small_log;
using testing::TempFolder;

TEST(readers_see_whole_records_while_the_log_is_written_and_compacted) {
  TempFolder folder;
  Random random(1);
  ReferenceLog mirror(small_log(folder / "log"));
  constexpr int64_t kKeys = 200;
  for (int64_t key = 0; key < kKeys; ++key) mirror.put(key);

  // The current addresses, for the readers. A segment may be removed after an address was looked up; then the reader
  // repeats the lookup, as the table does.
  std::mutex mutex;
  std::map<int64_t, ReferenceLog::Row> index = mirror.rows();
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> reads{0};
  std::vector<std::thread> readers;
  for (uint64_t t = 0; t < 3; ++t)
    readers.emplace_back([&, t] {
      Random mine(10 + t);
      std::vector<char> records(60 * mirror.log().record_bytes());
      while (!stop) {
        std::vector<RecordAddress> places;
        std::vector<std::pair<int64_t, uint32_t>> expected;
        {
          std::lock_guard lock(mutex);
          for (int i = 0; i < 60; ++i) {
            const int64_t key = static_cast<int64_t>(mine.below(kKeys));
            places.push_back(index.at(key).place);
            expected.emplace_back(key, index.at(key).stamp);
          }
        }
        try {
          mirror.log().read(places.data(), places.size(), records.data());
        } catch (const std::out_of_range&) {
          continue;
        }
        for (size_t i = 0; i < places.size(); ++i)
          CHECK(testing::is_record(&records[i * mirror.log().record_bytes()], expected[i].first, expected[i].second,
                                   1000));
        ++reads;
        (void)mirror.log().report();
        (void)mirror.log().alive(places[0]);
      }
    });

  for (int step = 0; step < 4000 || reads < 100; ++step) {
    mirror.put(static_cast<int64_t>(random.below(kKeys)));
    if (step % 50 == 0)
      if (const int64_t worst = mirror.log().pick_for_compaction(); worst >= 0)
        mirror.compact(static_cast<uint64_t>(worst));
    if (step % 300 == 0) mirror.log().seal();
    if (step % 10 == 0) {
      std::lock_guard lock(mutex);
      index = mirror.rows();
    }
    if (step % 100 == 0) mirror.log().remove_dead_segments();
  }
  stop = true;
  for (auto& reader : readers) reader.join();
  mirror.check(random);
}

TEST(a_snapshot_is_published_beside_the_writer) {
  TempFolder folder;
  Random random(2);
  ReferenceLog mirror(small_log(folder / "log"));
  for (int64_t key = 0; key < 200; ++key) mirror.put(key);
  for (int round = 0; round < 5; ++round) {
    const std::string name = folder / "snapshot" + std::to_string(round);
    const testing::Stamps now = mirror.stamps();
    const LiveSet set = mirror.log().begin_snapshot();
    mirror.log().seal();
    std::thread publisher([&] { mirror.log().export_snapshot(set, name); });
    for (int i = 0; i < 300; ++i) mirror.put(static_cast<int64_t>(random.below(200)));
    publisher.join();
    mirror.log().end_snapshot();
    mirror.log().remove_dead_segments();
    CHECK(testing::rows_of(name) == now);
  }
}

}  // namespace
}  // namespace hotrow
