#include "segment/segment.h"

#include <set>

#include "segment/segment_writer.h"
#include "testing/logs.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::Random;
using testing::TempFolder;
using testing::words_of;

TEST(a_block_of_256_byte_rows_is_one_page_without_waste) {
  const Geometry geometry = geometry_of(256);
  CHECK_EQ(geometry.record_bytes, 272u);
  CHECK_EQ(geometry.block_bytes, 4096u);
  CHECK_EQ(geometry.records_per_block, 15u);
}

TEST(a_block_is_the_smallest_that_wastes_at_most_a_quarter) {
  const auto waste = [](uint32_t block, uint32_t record) { return (block - 16) % record; };
  for (uint32_t row = 1; row < 100000; row += row < 5000 ? 1 : 97) {
    const Geometry g = geometry_of(row);
    CHECK_EQ(g.record_bytes, row + 16);
    CHECK(g.block_bytes % 4096 == 0 && g.records_per_block > 0);
    CHECK_EQ(g.records_per_block, (g.block_bytes - 16) / g.record_bytes);
    if (g.block_bytes <= 65536) {
      CHECK(waste(g.block_bytes, g.record_bytes) <= g.block_bytes / 4);
      for (uint32_t smaller = 4096; smaller < g.block_bytes; smaller += 4096)
        CHECK(smaller - 16 < g.record_bytes || waste(smaller, g.record_bytes) > smaller / 4);
    } else {
      CHECK(g.block_bytes - 4096 < g.record_bytes + 16);
    }
  }
  CHECK_THROWS(std::invalid_argument, geometry_of(0));
  CHECK_THROWS(std::invalid_argument, geometry_of(kMostRowBytes + 1));
}

TEST(only_a_segments_own_name_is_its_name) {
  CHECK_EQ(segment_name(7), "segment-0000000007.hrs");
  for (uint64_t number : {uint64_t{0}, uint64_t{7}, uint64_t{1048575}, uint64_t{9999999999}})
    CHECK_EQ(segment_number(segment_name(number)).value_or(~uint64_t{0}), number);
  for (const char* name : {"", "segment-", "segment-7.hrs", "segment-0000000007.hr", "segment-0000000007.hrs.tmp",
                           "segment-000000000a.hrs", "segment--000000007.hrs", "LOCK", "MANIFEST"})
    CHECK(!segment_number(name));
}

// A sealed file with `count` records, key i and stamp 1.
std::string write_segment(const TempFolder& folder, const SegmentId& id, uint32_t row_bytes, int count) {
  const std::string path = folder / segment_name(id.number);
  std::mutex mutex;
  SegmentWriter writer(geometry_of(row_bytes), 1 << 20, mutex);
  writer.begin(id, path);
  for (int64_t i = 0; i < count; ++i) writer.append(testing::head_of(i, 1), testing::values_of(i, 1, row_bytes).data());
  writer.write();
  return path;
}

TEST(a_flipped_bit_in_the_header_is_noticed_and_the_file_named) {
  TempFolder folder;
  const SegmentId id{"user", 3, 99};
  const Geometry geometry = geometry_of(256);
  const std::string path = write_segment(folder, id, 256, 20);
  const std::vector<char> good = files().read_all(path);
  CHECK_EQ(good.size(), geometry.file_bytes(20));
  open_segment(path, geometry, id, 20);
  Random random(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<char> bytes = good;
    const uint64_t bit = round < 100 ? static_cast<uint64_t>(round) : random.below(4096 * 8);
    bytes[bit / 8] ^= static_cast<char>(1 << (bit % 8));
    files().remove(path);
    files().open(path, OpenMode::kCreate)->write(0, bytes.data(), bytes.size());
    CHECK(words_of<CorruptFile>([&] { open_segment(path, geometry, id, 20); }).find(path) != std::string::npos);
  }
}

TEST(a_file_of_another_table_number_origin_or_size_is_not_taken) {
  TempFolder folder;
  const SegmentId id{"user", 3, 99};
  const Geometry geometry = geometry_of(256);
  const std::string path = write_segment(folder, id, 256, 20);
  open_segment(path, geometry, id, 20);
  CHECK_THROWS(CorruptFile, open_segment(path, geometry, {"item", 3, 99}, 20));
  CHECK_THROWS(CorruptFile, open_segment(path, geometry, {"user", 4, 99}, 20));
  CHECK_THROWS(CorruptFile, open_segment(path, geometry, {"user", 3, 98}, 20));
  CHECK_THROWS(CorruptFile, open_segment(path, geometry, id, 31));  // a third block
  open_segment(path, geometry, id, 30);
  CHECK_THROWS(CorruptFile, open_segment(folder / "segment-0000000009.hrs", geometry, id, 20));
  const std::string words = words_of<CorruptFile>([&] { open_segment(path, geometry_of(512), id, 20); });
  CHECK(words.find("256") != std::string::npos && words.find("512") != std::string::npos);
}

TEST(a_block_is_taken_only_where_it_belongs_and_unchanged) {
  const Geometry geometry = geometry_of(1000);
  std::vector<char> block(geometry.block_bytes, 5);
  const uint64_t seed = SegmentId{"user", 3, 99}.seed();
  finish_block(geometry, seed, 8, 3, block.data());
  const auto check = [&](uint64_t s, uint32_t number, uint32_t records) {
    return words_of<CorruptFile>([&] { check_block(geometry, s, number, records, block.data(), "file"); });
  };
  CHECK_EQ(check(seed, 8, 3), "");
  CHECK_EQ(check(seed, 8, 1), "");
  CHECK(check(seed, 8, 4) != "");
  CHECK(check(seed, 7, 3).find("block 8 in the place of block 7") != std::string::npos);
  for (const SegmentId& other : {SegmentId{"item", 3, 99}, SegmentId{"user", 2, 99}, SegmentId{"user", 3, 98}})
    CHECK(check(other.seed(), 8, 3) != "");
  for (size_t bit = 0; bit < block.size() * 8; bit += 11) {
    block[bit / 8] ^= static_cast<char>(1 << (bit % 8));
    CHECK(check(seed, 8, 3).find("block 8") != std::string::npos);
    block[bit / 8] ^= static_cast<char>(1 << (bit % 8));
  }
}

TEST(a_segment_is_the_same_bytes_however_often_it_was_written) {
  TempFolder folder;
  const SegmentId id{"user", 3, 99};
  const std::vector<char> expected = files().read_all(write_segment(folder, id, 1000, 50));
  Random random(2);
  for (int round = 0; round < 10; ++round) {
    TempFolder other;
    std::mutex mutex;
    SegmentWriter writer(geometry_of(1000), 24 << 10, mutex);
    const std::string path = other / "file";
    writer.begin(id, path);
    for (int64_t i = 0; i < 50; ++i) {
      if (!writer.room()) writer.flush_full_half();
      writer.append(testing::head_of(i, 1), testing::values_of(i, 1, 1000).data());
      if (random.below(4) == 0) writer.write();  // as after an error
    }
    writer.write();
    CHECK(files().read_all(path) == expected);
  }
}

}  // namespace
}  // namespace hotrow
