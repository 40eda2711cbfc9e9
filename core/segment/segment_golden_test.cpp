// The golden snapshot in tests/golden/segments: the reader reads it, and the writer writes the same bytes.
// HOTROW_WRITE_GOLDEN=1 in the environment writes it anew, only for a new version of the format.
#include <cstdlib>

#include "log/manifest.h"
#include "segment/segment_writer.h"
#include "testing/logs.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::TempFolder;

const std::string kGolden = std::string(HOTROW_GOLDEN) + "/segments";
constexpr uint64_t kSegment = 41, kOrigin = 0x0123456789ABCDEF;
constexpr uint32_t kRowBytes = 256;
constexpr int64_t kRecords = 20;  // a full and a partial block; every third is dead, the last is not in the snapshot

bool counts(int64_t key) { return key % 3 != 0 && key < kRecords - 1; }

void write_golden(const std::string& folder) {
  const SegmentId id{"user", kSegment, kOrigin};
  std::mutex mutex;
  SegmentWriter writer(geometry_of(kRowBytes), 1 << 20, mutex);
  writer.begin(id, folder + "/" + segment_name(kSegment));
  Manifest manifest{"user", kRowBytes, {}, {{kSegment, kOrigin}}};
  for (int64_t key = 0; key < kRecords; ++key) {
    const uint32_t stamp = static_cast<uint32_t>(1000 + key);
    writer.append(testing::head_of(key, stamp), testing::values_of(key, stamp, kRowBytes).data());
    if (counts(key)) manifest.set.set(kSegment << kRecordBits | static_cast<RecordAddress>(key));
  }
  writer.write();
  write_manifest(folder, manifest);
}

TEST(todays_writer_writes_the_golden_bytes) {
  if (std::getenv("HOTROW_WRITE_GOLDEN")) {
    files().remove_folder(kGolden);
    files().make_folder(kGolden);
    write_golden(kGolden);
  }
  TempFolder folder;
  write_golden(folder.path());
  CHECK(files().list(kGolden) == files().list(folder.path()));
  for (const std::string& name : files().list(folder.path()))
    CHECK(files().read_all(kGolden + "/" + name) == files().read_all(folder / name));
}

TEST(todays_reader_reads_the_golden_bytes) {
  testing::Stamps expected;
  for (int64_t key = 0; key < kRecords; ++key)
    if (counts(key)) expected[key] = static_cast<uint32_t>(1000 + key);
  CHECK(testing::rows_of(kGolden) == expected);
}

TEST(a_log_goes_on_from_the_golden_snapshot_above_its_number) {
  TempFolder folder;
  auto options = testing::small_log(folder / "log", kRowBytes);
  Log log(options);
  log.import_snapshot(kGolden);
  const RecordAddress place = testing::append(log, 5, 6);
  CHECK_EQ(place, (kSegment + 1) << kRecordBits);
  CHECK_EQ(log.report().live, 13u);
}

}  // namespace
}  // namespace hotrow
