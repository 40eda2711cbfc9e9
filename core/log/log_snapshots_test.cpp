#include <sys/stat.h>

#include <cerrno>
#include <stdexcept>

#include "io/system_files.h"
#include "log/manifest.h"
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

// Folders whose names begin with different letters are on different disks.
class TwoDisks : public FaultyFiles {
 public:
  explicit TwoDisks(const TempFolder& folder) : FaultyFiles(system_files()), at_(folder.path().size() + 1) {}
  bool link(const std::string& from, const std::string& to) override {
    return from[at_] == to[at_] && FaultyFiles::link(from, to);
  }

 private:
  size_t at_;
};
struct WithTwoDisks {
  explicit WithTwoDisks(const TempFolder& folder) { set_files(std::make_shared<TwoDisks>(folder)); }
  ~WithTwoDisks() { set_files(nullptr); }
};

uint64_t inode(const std::string& path) {
  struct stat info{};
  CHECK_EQ(::stat(path.c_str(), &info), 0);
  return info.st_ino;
}

// Exports a snapshot of the live records.
uint64_t export_snapshot(Log& log, const std::string& folder, const std::string& previous = "") {
  const LiveSet set = log.begin_snapshot();
  log.seal();
  const uint64_t copied = log.export_snapshot(set, folder, previous);
  log.end_snapshot();
  return copied;
}

TEST(a_snapshot_keeps_what_was_alive_and_survives_its_log) {
  TempFolder folder;
  Stamps expected;
  {
    ReferenceLog mirror(small_log(folder / "log"));
    for (int64_t key = 0; key < 300; ++key) mirror.put(key % 100);
    mirror.erase(7);
    expected = mirror.stamps();
    export_snapshot(mirror.log(), folder / "a/b/snapshot");
    for (int64_t key = 0; key < 300; ++key) mirror.put(key);
    mirror.log().seal();
    CHECK(mirror.log().remove_dead_segments() > 0);
  }
  Log other(small_log(folder / "log"));  // removes the segment files
  CHECK(rows_of(folder / "a/b/snapshot") == expected);
  CHECK(rows_of(folder / "a/b/snapshot", 1) == expected);
  CHECK(rows_of(folder / "a/b/snapshot", size_t{1} << 40) == expected);
}

TEST(an_empty_log_has_an_empty_snapshot) {
  TempFolder folder;
  Log log(small_log(folder / "log"));
  export_snapshot(log, folder / "snapshot");
  CHECK_EQ(rows_of(folder / "snapshot").size(), 0u);
  Log other(small_log(folder / "other"));
  other.import_snapshot(folder / "snapshot");
  CHECK_EQ(append(other, 1, 1), 0u);
}

TEST(a_snapshot_needs_a_seal_and_a_folder_of_its_own) {
  TempFolder folder;
  Log log(small_log(folder / "log"));
  append(log, 1, 1);
  const LiveSet set = log.begin_snapshot();
  CHECK_THROWS(std::logic_error, log.export_snapshot(set, folder / "snapshot"));
  log.seal();
  files().make_folder(folder / "snapshot");
  files().replace(folder / "snapshot/mine", "x", 1);
  CHECK_THROWS(IoError, log.export_snapshot(set, folder / "snapshot"));
  CHECK(files().exists(folder / "snapshot/mine"));
  log.export_snapshot(set, folder / "snapshot2");
  log.end_snapshot();
  CHECK_THROWS(std::logic_error, log.end_snapshot());
}

TEST(no_segment_goes_away_while_a_snapshot_is_taken) {
  TempFolder folder;
  Log log(small_log(folder / "log"));
  const RecordAddress place = append(log, 1, 5);
  const LiveSet set = log.begin_snapshot();
  log.seal();
  log.mark_dead(place);
  CHECK_EQ(log.remove_dead_segments(), 0);
  log.export_snapshot(set, folder / "snapshot");
  log.end_snapshot();
  CHECK_EQ(log.remove_dead_segments(), 1);
  CHECK((rows_of(folder / "snapshot") == Stamps{{1, 5}}));
}

TEST(a_segment_without_a_live_record_is_not_in_the_snapshot) {
  TempFolder folder;
  Log log(small_log(folder / "log"));
  std::vector<RecordAddress> places;
  for (int64_t key = 0; key < 120; ++key) places.push_back(append(log, key, 1));
  for (size_t i = 0; i < 60; ++i) log.mark_dead(places[i]);
  export_snapshot(log, folder / "snapshot");
  CHECK((files().list(folder / "snapshot") == std::vector<std::string>{"MANIFEST", "segment-0000000001.hrs"}));
}

TEST(segments_are_shared_on_one_disk_and_copied_once_to_another) {
  TempFolder folder;
  const WithTwoDisks disks(folder);
  ReferenceLog mirror(small_log(folder / "ssd"));
  for (int64_t key = 0; key < 150; ++key) mirror.put(key);
  CHECK_EQ(export_snapshot(mirror.log(), folder / "s1"), 0u);
  const std::string name = "/" + segment_name(0);
  CHECK_EQ(inode(folder / "s1" + name), inode(folder / "ssd" + name));

  const uint64_t all = mirror.log().report().disk_bytes;
  CHECK_EQ(export_snapshot(mirror.log(), folder / "other1"), all);
  mirror.put(5);
  const uint64_t added = export_snapshot(mirror.log(), folder / "other2", folder / "other1");
  CHECK_EQ(added, mirror.log().report().disk_bytes - all);
  CHECK_EQ(inode(folder / "other1" + name), inode(folder / "other2" + name));
  CHECK(rows_of(folder / "other2") == mirror.stamps());

  Log adopted(small_log(folder / "ssd2"));
  adopted.import_snapshot(folder / "other2");
  CHECK(inode(folder / "ssd2" + name) != inode(folder / "other2" + name));
  CHECK_EQ(adopted.report().live, 150u);
}

// After a resume from an older checkpoint a new segment has the number of one in the newer checkpoint.
TEST(a_segment_of_another_life_is_not_taken_for_this_one) {
  TempFolder folder;
  const WithTwoDisks disks(folder);
  for (int life = 0; life < 2; ++life) {
    const std::string number = std::to_string(life);
    Log log(small_log(folder / "ssd" + number));
    for (int64_t key = 0; key < 20; ++key) append(log, key, static_cast<uint32_t>(life + 1));
    CHECK(export_snapshot(log, folder / "other" + number, life == 0 ? "" : folder / "other0") > 0);
  }
  for (const auto& [key, stamp] : rows_of(folder / "other1")) CHECK_EQ(stamp, 2u);
}

TEST(adopting_asks_for_the_same_table_and_an_empty_log) {
  TempFolder folder;
  Log log(small_log(folder / "log"));
  append(log, 1, 1);
  export_snapshot(log, folder / "snapshot");
  CHECK_THROWS(std::logic_error, log.import_snapshot(folder / "snapshot"));
  LogOptions item = small_log(folder / "item");
  item.table = "item";
  Log other(item);
  CHECK_THROWS(std::invalid_argument, other.import_snapshot(folder / "snapshot"));
  Log wide(small_log(folder / "wide", 2000));
  try {
    wide.import_snapshot(folder / "snapshot");
    CHECK(false);
  } catch (const std::invalid_argument& error) {
    const std::string words = error.what();
    CHECK(words.find("2000") != std::string::npos && words.find("1000") != std::string::npos);
  }
}

TEST(records_behind_those_that_count_stay_out_of_an_adopted_log) {
  TempFolder folder;
  Log log(small_log(folder / "log"));
  for (int64_t key = 0; key < 10; ++key) append(log, key, 1);
  const LiveSet set = log.begin_snapshot();
  for (int64_t key = 10; key < 30; ++key) append(log, key, 1);
  log.seal();
  log.export_snapshot(set, folder / "snapshot");
  Log other(small_log(folder / "other"));
  other.import_snapshot(folder / "snapshot");
  CHECK_EQ(other.report().records, 10u);
  CHECK(!other.alive(10));
  std::vector<char> record(other.record_bytes());
  const RecordAddress behind = 10;
  CHECK_THROWS(std::out_of_range, other.read(&behind, 1, record.data()));
  CHECK_EQ(append(other, 1, 2), RecordAddress{1} << kRecordBits);
}

}  // namespace
}  // namespace hotrow
