// Scanning a single segment, whole and damaged; and what import_snapshot() leaves in the folder for such a scan.
#include "segment/segment_scan.h"

#include <numeric>

#include "log/manifest.h"
#include "testing/logs.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::append;
using testing::small_log;
using testing::TempFolder;

constexpr uint32_t kRowBytes = 1000;  // 4 records a block

// One segment with keys 0 to 29 in 8 blocks, the last with two records.
struct Sample {
  Sample() {
    Log log(small_log(folder / "log", kRowBytes));
    for (int64_t key = 0; key < 30; ++key) append(log, key, 5);
    log.seal();
    bytes = files().read_all(path);
  }
  void put() const {
    if (files().exists(path)) files().remove(path);
    files().open(path, OpenMode::kCreate)->write(0, bytes.data(), bytes.size());
  }
  size_t block_offset(uint32_t block) const { return geometry_of(kRowBytes).block_offset(block); }

  TempFolder folder;
  std::string path = folder / "log/" + segment_name(0);
  std::vector<char> bytes;
};

// The numbers of the returned records; checks each record.
std::vector<uint32_t> scan(SegmentScan& scan) {
  std::vector<uint32_t> all, numbers;
  std::vector<RecordHead> heads;
  std::vector<char> values;
  while (const size_t count = scan.next(heads, values, numbers)) {
    CHECK(heads.size() == count && numbers.size() == count && values.size() == count * kRowBytes);
    for (size_t i = 0; i < count; ++i) {
      const auto expected = testing::values_of(numbers[i], 5, kRowBytes);
      CHECK_EQ(heads[i].key, int64_t{numbers[i]});
      CHECK(std::memcmp(values.data() + i * kRowBytes, expected.data(), kRowBytes) == 0);
    }
    all.insert(all.end(), numbers.begin(), numbers.end());
  }
  CHECK_EQ(scan.position(), scan.blocks());
  return all;
}

std::vector<uint32_t> numbers_up_to(uint32_t end) {
  std::vector<uint32_t> numbers(end);
  std::iota(numbers.begin(), numbers.end(), 0u);
  return numbers;
}

TEST(a_segment_alone_gives_all_its_records) {
  const Sample sample;
  SegmentScan whole(sample.path);
  CHECK_EQ(whole.id().table, "user");
  CHECK_EQ(whole.geometry().row_bytes, kRowBytes);
  CHECK_EQ(whole.blocks(), 8u);
  CHECK_EQ(whole.bytes(), sample.bytes.size());
  CHECK(scan(whole) == numbers_up_to(30));
  CHECK(whole.bad().empty());
}

TEST(a_damaged_block_is_passed_over_and_remembered) {
  Sample sample;
  sample.bytes[sample.block_offset(2) + 100] ^= 1;
  sample.put();
  SegmentScan damaged(sample.path);
  std::vector<uint32_t> expected = numbers_up_to(30);
  expected.erase(expected.begin() + 8, expected.begin() + 12);
  CHECK(scan(damaged) == expected);
  CHECK(damaged.bad() == std::vector<uint32_t>{2});
}

TEST(a_cut_segment_gives_the_records_of_its_whole_blocks) {
  Sample sample;
  for (const size_t lost : {size_t{1}, size_t{4096}, size_t{5000}}) {
    std::vector<char> whole = sample.bytes;
    sample.bytes.resize(whole.size() - lost);
    sample.put();
    SegmentScan cut(sample.path);
    CHECK(scan(cut) == numbers_up_to(lost > 4096 ? 24 : 28));
    CHECK(cut.bad().empty());
    sample.bytes = whole;
  }
}

TEST(a_segment_without_a_good_header_is_named) {
  Sample sample;
  const auto words = [&] {
    sample.put();
    return testing::words_of<CorruptFile>([&] { SegmentScan scan(sample.path); });
  };
  CHECK(words().empty());
  sample.bytes[21] ^= 1;  // row_bytes
  CHECK(words().find(segment_name(0) + "' has a damaged header") != std::string::npos);
  sample.bytes.resize(100);
  CHECK(words().find("less than a header") != std::string::npos);
}

TEST(a_log_that_began_with_a_snapshot_says_which_records_counted) {
  TempFolder folder;
  {
    Log log(small_log(folder / "log", kRowBytes));
    for (int64_t key = 0; key < 10; ++key) append(log, key, 5);
    log.mark_dead(3);
    const LiveSet set = log.begin_snapshot();
    append(log, 4, 6);  // a record that a resumed run does not have
    log.seal();
    log.export_snapshot(set, folder / "snapshot");
  }
  Log again(small_log(folder / "log", kRowBytes));
  CHECK(!files().exists(adopted_path(folder / "log")));
  again.import_snapshot(folder / "snapshot");
  CHECK(files().read_all(adopted_path(folder / "log")) == files().read_all(manifest_path(folder / "snapshot")));
  CHECK(!files().exists(manifest_path(folder / "log")));
  Log anew(small_log(folder / "log", kRowBytes));
  CHECK(!files().exists(adopted_path(folder / "log")));
}

}  // namespace
}  // namespace hotrow
