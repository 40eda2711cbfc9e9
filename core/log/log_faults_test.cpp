// Each disk call fails, either once or together with all later calls; then the disk works again. An open log loses no
// record, and a snapshot exists completely or not at all.
#include <cerrno>
#include <functional>

#include "testing/faulty_files.h"
#include "testing/logs.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::append;
using testing::Random;
using testing::ReferenceLog;
using testing::rows_of;
using testing::small_log;
using testing::Stamps;
using testing::TempFolder;
using testing::words_of;

bool is_sync(const std::string& words) { return words.starts_with("cannot sync"); }

// A table's calls to its log, step by step. A failed step is repeated once the disk works again.
struct Work {
  explicit Work(const TempFolder& folder_) : folder(folder_), mirror(small_log(folder / "log")) {
    for (int64_t key = 0; key < 70; ++key) mirror.put(key);
    export_snapshot("old");
    old = mirror.stamps();
  }

  void export_snapshot(const std::string& name) {
    const LiveSet set = mirror.log().begin_snapshot();
    const std::string words = words_of<IoError>([&] {
      mirror.log().seal();
      mirror.log().export_snapshot(set, folder / name);
    });
    mirror.log().end_snapshot();
    if (!words.empty()) throw std::runtime_error(words);
  }

  std::vector<std::pair<const char*, std::function<void()>>> steps() {
    return {
        {"append",
         [&] {
           for (; next < 200; ++next) mirror.put(next % 90);
         }},
        {"seal", [&] { mirror.log().seal(); }},
        {"append",
         [&] {
           for (; next < 210; ++next) mirror.put(next % 90);
         }},
        {"publish", [&] { export_snapshot("new"); }},
        {"drop", [&] { mirror.log().remove_dead_segments(); }},
    };
  }

  const TempFolder& folder;
  ReferenceLog mirror;
  Stamps old;
  int64_t next = 0;
};

template <class Fn>
std::string any_words_of(Fn fn) {
  try {
    fn();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

void sweep_work(bool repeat) {
  Random random(1);
  bool swept = false;
  int sticky_seen = 0, again_seen = 0;
  for (uint64_t at = 1; !swept; ++at) {
    TempFolder folder;
    WithFaults disk;
    Work work(folder);
    const uint64_t before = disk->calls();
    disk->fail(at, at % 2 ? ENOSPC : EIO, repeat);
    bool sticky = false;
    for (auto& [name, step] : work.steps()) {
      const std::string words = any_words_of(step);
      if (words.empty()) continue;
      const std::string broken = folder / "log";
      disk->heal();
      work.mirror.check(random);
      CHECK(rows_of(folder / "old") == work.old);
      // If the cleanup failed too, a folder is left: without a snapshot, or with a complete one that is not synced.
      const bool left = std::string(name) == "publish" && files().exists(folder / "new");
      CHECK(!left || repeat);
      if (left && files().exists(folder / "new/MANIFEST")) CHECK(rows_of(folder / "new") == work.mirror.stamps());
      if (left) files().remove_folder(folder / "new");
      const std::string again = any_words_of(step);
      sticky = is_sync(words) && words.find(broken) != std::string::npos;
      if (sticky) {
        ++sticky_seen;
        CHECK(words.find("resume from that checkpoint") != std::string::npos);
        if (std::string(name) != "append") CHECK_EQ(again, words);
        CHECK_EQ(words_of<IoError>([&] { work.mirror.log().seal(); }), words);
        CHECK_EQ(words_of<IoError>([&] { work.mirror.log().export_snapshot({}, folder / "another"); }), words);
        break;
      }
      CHECK_EQ(again, "");
      ++again_seen;
    }
    swept = disk->calls() - before < at;
    disk->heal();
    work.mirror.check(random);
    CHECK(rows_of(folder / "old") == work.old);
    CHECK(sticky || files().exists(folder / "new/MANIFEST"));
    if (files().exists(folder / "new/MANIFEST")) CHECK(rows_of(folder / "new") == work.mirror.stamps());
  }
  CHECK(sticky_seen > 0 && again_seen > 10);
}

TEST(a_call_that_fails_once_loses_no_record_and_no_snapshot) { sweep_work(/*repeat=*/false); }
TEST(a_disk_that_fills_up_loses_no_record_and_no_snapshot) { sweep_work(/*repeat=*/true); }

TEST(an_append_that_fails_has_appended_nothing) {
  TempFolder folder;
  WithFaults disk;
  Random random(2);
  ReferenceLog mirror(small_log(folder / "log"));
  for (int64_t key = 0; key < 16; ++key)
    mirror.put(key);  // the first half of the buffer is being written, the other is full
  disk->fail(1, ENOSPC, /*repeat=*/true);
  // A background write reports no error; the append that needs its half does.
  int64_t key = 16;
  while (words_of<IoError>([&] { mirror.put(key); }).empty()) ++key;
  CHECK(key <= 24);
  for (int i = 0; i < 5; ++i) CHECK_THROWS(IoError, append(mirror.log(), 99, 1));
  CHECK_EQ(mirror.log().report().records, static_cast<uint64_t>(key));
  mirror.check(random);
  disk->heal();
  CHECK_EQ(append(mirror.log(), 99, 1), static_cast<RecordAddress>(key));
  mirror.log().mark_dead(static_cast<RecordAddress>(key));
  mirror.check(random);
  mirror.log().seal();
  mirror.check(random);
}

TEST(a_write_that_fails_in_the_background_is_made_again) {
  TempFolder folder;
  WithFaults disk;
  Random random(3);
  ReferenceLog mirror(small_log(folder / "log"));
  for (int64_t round = 0; round < 20; ++round) {
    const uint64_t before = disk->calls();
    disk->fail(2, EIO);
    for (int64_t i = 0; i < 9; ++i) mirror.put(9 * round + i);  // half of the buffer, and one more
    mirror.log().seal();
    CHECK_EQ(disk->calls() - before, 7u);  // create, write, write again, write the rest, sync both, open
    mirror.check(random);
  }
}

TEST(a_log_opens_and_adopts_when_the_disk_is_well_again) {
  for (bool repeat : {false, true}) {
    TempFolder folder;
    WithFaults disk;
    ReferenceLog mirror(small_log(folder / "first"));
    for (int64_t key = 0; key < 130; ++key) mirror.put(key);
    LiveSet set = mirror.log().begin_snapshot();
    mirror.log().seal();
    mirror.log().export_snapshot(set, folder / "snapshot");
    const auto open_and_adopt = [&] {
      Log log(small_log(folder / "log"));
      for (int i = 0;; ++i) {
        const std::string words = words_of<IoError>([&] { log.import_snapshot(folder / "snapshot"); });
        if (words.empty()) break;
        CHECK_EQ(log.report().segments, 0u);
        if (!repeat) CHECK_EQ(files().list(folder / "log").size(), 0u);
        disk->heal();
        CHECK_EQ(i, 0);
      }
      CHECK_EQ(log.report().live, 130u);
    };
    for (uint64_t at = 1;; ++at) {
      const uint64_t before = disk->calls();
      disk->fail(at, EIO, repeat);
      const std::string words = words_of<IoError>(open_and_adopt);
      const bool reached = disk->calls() - before >= at;
      disk->heal();
      if (!words.empty()) open_and_adopt();
      CHECK(rows_of(folder / "snapshot") == mirror.stamps());
      if (!reached) break;
    }
  }
}

TEST(a_read_that_fails_can_be_tried_again) {
  TempFolder folder;
  WithFaults disk;
  Random random(3);
  ReferenceLog mirror(small_log(folder / "log"));
  for (int64_t key = 0; key < 130; ++key) mirror.put(key);
  mirror.check(random);
  for (uint64_t at = 1; at < 5; ++at) {
    disk->fail(at, EIO);
    const std::string words = words_of<IoError>([&] { mirror.check(random); });
    CHECK(words.find("segment-") != std::string::npos || at > 2);
    disk->heal();
    mirror.check(random);
  }
}

TEST(a_snapshot_reader_goes_on_where_a_read_failed) {
  TempFolder folder;
  WithFaults disk;
  ReferenceLog mirror(small_log(folder / "log"));
  for (int64_t key = 0; key < 130; ++key) mirror.put(key);
  const LiveSet set = mirror.log().begin_snapshot();
  mirror.log().seal();
  mirror.log().export_snapshot(set, folder / "snapshot");
  SnapshotReader reader(folder / "snapshot");
  std::vector<RecordHead> heads;
  std::vector<char> values;
  std::vector<RecordAddress> places;
  Stamps stamps;
  for (int round = 0;; ++round) {
    if (round % 2 == 0) disk->fail(1, EIO);
    size_t count = 1;
    const std::string words = words_of<IoError>([&] { count = reader.next(9, heads, values, places); });
    if (!words.empty()) continue;
    if (count == 0) break;
    for (const RecordHead& head : heads) stamps[head.key] = head.stamp;
  }
  CHECK(stamps == mirror.stamps());
}

}  // namespace
}  // namespace hotrow
