#include "log/log.h"

#include <set>
#include <stdexcept>

#include "segment/segment.h"
#include "testing/logs.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::append;
using testing::is_record;
using testing::Random;
using testing::ReferenceLog;
using testing::small_log;
using testing::TempFolder;

TEST(a_record_is_read_back_from_buffer_block_and_file_alike) {
  TempFolder folder;
  Log log(small_log(folder / "log"));
  std::vector<RecordAddress> places;
  for (int64_t key = 0; key < 200; ++key) {
    places.push_back(append(log, key, 1));
    std::vector<char> records(places.size() * log.record_bytes());
    log.read(places.data(), places.size(), records.data());
    for (int64_t k = 0; k <= key; ++k)
      CHECK(is_record(records.data() + static_cast<size_t>(k) * log.record_bytes(), k, 1, 1000));
  }
  CHECK_EQ(std::set<RecordAddress>(places.begin(), places.end()).size(), 200u);
  CHECK_EQ(log.report().segments, 4u);
  log.read(nullptr, 0, nullptr);
}

TEST(rows_of_any_size_are_stored) {
  for (uint32_t row_bytes : {1u, 4u, 63u, 256u, 4096u, 5000u, 40000u, 300000u, 2000000u}) {
    TempFolder folder;
    Random random(row_bytes);
    ReferenceLog mirror(small_log(folder / "log", row_bytes));
    const uint64_t rows = std::clamp<uint64_t>(2000000 / row_bytes, 5, 1500);
    for (uint64_t i = 0; i < rows; ++i) mirror.put(static_cast<int64_t>(random.below(rows)));
    mirror.check(random);
    mirror.log().seal();
    mirror.check(random);
  }
}

TEST(a_place_may_be_read_many_times_in_one_call) {
  TempFolder folder;
  Log log(small_log(folder / "log"));
  std::vector<RecordAddress> written, places;
  for (int64_t key = 0; key < 100; ++key) written.push_back(append(log, key, 1));
  Random random(1);
  std::vector<int64_t> keys;
  for (int i = 0; i < 1000; ++i) {
    keys.push_back(static_cast<int64_t>(random.below(100)));
    places.push_back(written[static_cast<size_t>(keys.back())]);
  }
  std::vector<char> records(places.size() * log.record_bytes());
  log.read(places.data(), places.size(), records.data());
  for (size_t i = 0; i < places.size(); ++i) CHECK(is_record(&records[i * log.record_bytes()], keys[i], 1, 1000));
  CHECK(log.report().blocks_read <= 25);
  CHECK_EQ(log.report().rows_read, 1000u);
}

TEST(a_place_that_never_was_is_an_error) {
  TempFolder folder;
  Log log(small_log(folder / "log"));
  std::vector<char> record(log.record_bytes());
  const RecordAddress place = append(log, 1, 1);
  for (RecordAddress wrong : {place + 1, place + (RecordAddress{1} << kRecordBits), kNoAddress, kMaxAddresses}) {
    CHECK_THROWS(std::out_of_range, log.read(&wrong, 1, record.data()));
    CHECK_THROWS(std::out_of_range, log.mark_dead(wrong));
    CHECK(!log.alive(wrong));
  }
  log.mark_dead(place);
  log.mark_dead(place);
  CHECK_EQ(log.report().live, 0u);
  log.read(&place, 1, record.data());  // dead, but still there
}

TEST(a_new_log_removes_old_segments_and_nothing_else) {
  TempFolder folder;
  const std::string path = folder / "log";
  files().make_folder(path);
  for (const char* name : {"LOCK", "MANIFEST", "segment-0000000005.hrs", "segment-5.hrs", "notes"})
    files().replace(path + "/" + name, "x", 1);
  Log log(small_log(path));
  CHECK((files().list(path) == std::vector<std::string>{"LOCK", "notes", "segment-5.hrs"}));
  CHECK_EQ(append(log, 1, 1) >> kRecordBits, 6u);  // numbers are not used again
}

TEST(sealing_ends_a_segment_and_an_empty_one_leaves_no_file) {
  TempFolder folder;
  Log log(small_log(folder / "log"));
  log.seal();
  CHECK_EQ(files().list(folder / "log").size(), 0u);
  CHECK_EQ(append(log, 1, 1), 0u);
  CHECK_EQ(files().list(folder / "log").size(), 0u);
  log.seal();
  log.seal();
  CHECK_EQ(files().list(folder / "log").size(), 1u);
  CHECK_EQ(append(log, 2, 1), RecordAddress{1} << kRecordBits);
}

TEST(a_segment_never_grows_beyond_its_bytes) {
  TempFolder folder;
  Log log(small_log(folder / "log"));
  for (int64_t key = 0; key < 500; ++key) append(log, key, 1);
  log.seal();
  uint64_t bytes = 0;
  for (const std::string& name : files().list(folder / "log")) {
    const uint64_t size = files().open(folder / "log" + "/" + name, OpenMode::kRead)->size();
    CHECK(size <= log.options().segment_bytes);
    bytes += size;
  }
  CHECK_EQ(log.report().disk_bytes, bytes);
  CHECK_EQ(log.report().bytes_written, bytes);
}

TEST(the_segment_with_the_least_alive_is_the_worst) {
  TempFolder folder;
  Log log(small_log(folder / "log"));
  std::vector<RecordAddress> places;
  for (int64_t key = 0; key < 240; ++key) places.push_back(append(log, key, 1));
  log.seal();
  CHECK_EQ(log.pick_for_compaction(), -1);
  for (size_t i = 0; i < 31; ++i) log.mark_dead(places[i]);
  for (size_t i = 120; i < 155; ++i) log.mark_dead(places[i]);
  for (size_t i = 180; i < 210; ++i) log.mark_dead(places[i]);  // just half
  CHECK_EQ(log.pick_for_compaction(), 2);
  CHECK_EQ(log.live_places(2).size(), 25u);
  for (RecordAddress place : log.live_places(2)) log.mark_dead(place);
  CHECK_EQ(log.pick_for_compaction(), 0);  // a dead one is for remove_dead_segments
  CHECK_EQ(log.remove_dead_segments(), 1);
  CHECK_EQ(log.remove_dead_segments(), 0);
  CHECK_EQ(files().list(folder / "log").size(), 3u);
  CHECK_THROWS(std::out_of_range, log.live_places(2));
}

TEST(many_small_segments_are_worth_joining) {
  TempFolder folder;
  Log log(small_log(folder / "log"));
  for (int64_t key = 0; key < 17; ++key) {
    CHECK_EQ(log.pick_for_compaction(), -1);
    append(log, key, 1);
    if (key != 5)
      for (int i = 0; i < 4; ++i) append(log, 100 + key, 1);
    log.seal();
  }
  CHECK_EQ(log.pick_for_compaction(), 5);
}

TEST(a_random_life_of_a_log_agrees_with_a_map) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    TempFolder folder;
    Random random(seed);
    const LogOptions options = small_log(folder / "log", seed % 2 ? 1000 : 200);
    ReferenceLog mirror(options);
    std::vector<std::pair<std::string, testing::Stamps>> snapshots;
    for (int step = 0; step < 3000; ++step) {
      const uint64_t what = random.below(1000);
      if (what < 700) mirror.put(random.key(150));
      if (what >= 700 && what < 960) mirror.erase(random.key(150));
      if (what >= 960 && what < 975) mirror.check(random);
      if (what >= 975 && what < 980) mirror.log().seal();
      if (what >= 980 && what < 990) mirror.log().remove_dead_segments();
      if (what >= 990 && what < 995)
        if (const int64_t worst = mirror.log().pick_for_compaction(); worst >= 0)
          mirror.compact(static_cast<uint64_t>(worst));
      if (what < 995) continue;

      // A snapshot begun now and exported after further changes.
      const std::string name = folder / "snapshot-" + std::to_string(step);
      const testing::Stamps now = mirror.stamps();
      LiveSet set = mirror.log().begin_snapshot();
      for (int i = 0; i < 30; ++i) random.below(2) ? mirror.put(random.key(150)) : mirror.erase(random.key(150));
      set.set(append(mirror.log(), 12345678, 9, /*alive=*/false));
      mirror.log().seal();
      CHECK_EQ(mirror.log().remove_dead_segments(), 0);
      CHECK_EQ(mirror.log().export_snapshot(set, name), 0u);
      mirror.log().end_snapshot();
      snapshots.push_back({name, now});
      snapshots.back().second[12345678] = 9;
      if (random.below(2) == 0) {
        mirror.reopen(options, name);
        CHECK(mirror.stamps() == snapshots.back().second);
        mirror.erase(12345678);
      }
    }
    mirror.check(random);
    for (const auto& [name, stamps] : snapshots) CHECK(testing::rows_of(name) == stamps);
    CHECK(mirror.log().report().ram_bytes < (16 << 20));
  }
}

}  // namespace
}  // namespace hotrow
