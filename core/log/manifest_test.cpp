#include "log/manifest.h"

#include "testing/random.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::Random;
using testing::TempFolder;

Manifest some_manifest(Random& random, size_t segments) {
  Manifest manifest{std::string(1 + random.below(20), 'n'), static_cast<uint32_t>(1 + random.below(1000)), {}, {}};
  for (size_t i = 0; i < segments; ++i) {
    const uint64_t segment = random.below(kMostSegments);
    for (int r = 0; r < 50; ++r) manifest.set.set(segment << kRecordBits | random.below(1000));
    manifest.origin[segment] = random.bits();
  }
  return manifest;
}

bool same(const Manifest& a, const Manifest& b) {
  const auto same_part = [](const auto& x, const auto& y) {
    return x.first == y.first && x.second.records == y.second.records && x.second.live == y.second.live &&
           x.second.bits == y.second.bits;
  };
  return a.table == b.table && a.row_bytes == b.row_bytes && a.origin == b.origin &&
         std::equal(a.set.segments.begin(), a.set.segments.end(), b.set.segments.begin(), b.set.segments.end(),
                    same_part);
}

std::string words_of(const std::vector<char>& bytes) {
  try {
    decode(bytes, "/some/MANIFEST");
  } catch (const CorruptFile& error) {
    return error.what();
  }
  return "";
}

TEST(a_set_counts_each_place_once) {
  LiveSet set;
  CHECK_EQ(set.live(), 0u);
  const RecordAddress place = RecordAddress{5} << kRecordBits | 130;
  for (int i = 0; i < 3; ++i) set.set(place);
  set.set(RecordAddress{5} << kRecordBits | 2);
  set.set(RecordAddress{9} << kRecordBits | (kMostRecords - 1));
  CHECK_EQ(set.live(), 3u);
  CHECK_EQ(set.segments.at(5).records, 131u);
  CHECK_EQ(set.segments.at(5).live, 2u);
  CHECK_EQ(set.segments.at(9).records, kMostRecords);
}

TEST(a_manifest_comes_back_as_it_was_written) {
  Random random(1);
  for (size_t segments = 0; segments < 20; ++segments) {
    TempFolder folder;
    const Manifest manifest = some_manifest(random, segments);
    write_manifest(folder.path(), manifest);
    CHECK(same(read_manifest(folder.path()), manifest));
    CHECK_EQ(files().list(folder.path()).size(), 1u);
  }
}

TEST(every_flipped_bit_of_a_manifest_is_noticed_and_the_file_named) {
  Random random(2);
  std::vector<char> bytes = encode(some_manifest(random, 3));
  CHECK_EQ(words_of(bytes), "");
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<char>(1 << (bit % 8));
    CHECK(words_of(bytes).find("/some/MANIFEST") != std::string::npos);
    bytes[bit / 8] ^= static_cast<char>(1 << (bit % 8));
  }
}

TEST(a_manifest_cut_anywhere_or_grown_is_noticed) {
  Random random(3);
  const std::vector<char> bytes = encode(some_manifest(random, 3));
  for (size_t size = 0; size < bytes.size(); ++size)
    CHECK(words_of({bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size)}) != "");
  std::vector<char> longer = bytes;
  longer.resize(bytes.size() + 8);
  CHECK(words_of(longer) != "");
}

TEST(a_folder_without_manifest_is_no_snapshot) {
  TempFolder folder;
  CHECK_THROWS(CorruptFile, read_manifest(folder.path()));
  CHECK_THROWS(CorruptFile, SnapshotReader(folder / "missing"));
}

}  // namespace
}  // namespace hotrow
