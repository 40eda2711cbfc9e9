// Files changed by another program, a bad disk or a crash give an error that names the file, or the right rows.
#include "log/manifest.h"
#include "testing/logs.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::append;
using testing::Random;
using testing::rows_of;
using testing::small_log;
using testing::Stamps;
using testing::TempFolder;

// A snapshot of three segments; about half of the blocks have live records.
struct Sample {
  Sample() {
    Log log(small_log(folder / "log", 400));
    std::vector<RecordAddress> places;
    for (int64_t key = 0; key < 300; ++key) places.push_back(append(log, key, 1));
    for (size_t i = 0; i < places.size(); ++i) {
      const bool dead = i % 3 == 0 || (i / 20) % 2 == 0;
      dead ? log.mark_dead(places[i]) : void(expected[static_cast<int64_t>(i)] = 1);
    }
    const LiveSet set = log.begin_snapshot();
    for (int64_t key = 300; key < 330; ++key) append(log, key, 1);
    log.seal();
    log.export_snapshot(set, path);
    for (const std::string& name : files().list(path)) content[path + "/" + name] = files().read_all(path + "/" + name);
  }
  void put(const std::string& file, const std::vector<char>& bytes) const {
    if (files().exists(file)) files().remove(file);
    files().open(file, OpenMode::kCreate)->write(0, bytes.data(), bytes.size());
  }

  TempFolder folder;
  std::string path = folder / "snapshot";
  std::map<std::string, std::vector<char>> content;  // by file
  Stamps expected;
};

// The text of the CorruptFile, or empty if all rows were read correctly.
std::string load(const Sample& sample) {
  try {
    CHECK(rows_of(sample.path, 1000) == sample.expected);
  } catch (const CorruptFile& error) {
    return error.what();
  }
  return "";
}

// The same through a log.
std::string adopt_and_read(const Sample& sample) {
  try {
    TempFolder folder;
    Log log(small_log(folder / "log", 400));
    log.import_snapshot(sample.path);
    std::vector<RecordAddress> places;
    for (const auto& [number, part] : read_manifest(sample.path).set.segments)
      for (RecordAddress place : log.live_places(number)) places.push_back(place);
    std::vector<char> records(places.size() * log.record_bytes());
    log.read(places.data(), places.size(), records.data());
    CHECK_EQ(places.size(), sample.expected.size());
    for (size_t i = 0; i < places.size(); ++i) {
      RecordHead head;
      std::memcpy(&head, &records[i * log.record_bytes()], sizeof(head));
      CHECK(testing::is_record(&records[i * log.record_bytes()], head.key, 1, 400) &&
            sample.expected.contains(head.key));
    }
  } catch (const CorruptFile& error) {
    return error.what();
  }
  return "";
}

std::string base(const std::string& path) { return path.substr(path.rfind('/') + 1); }

TEST(a_flipped_bit_anywhere_is_an_error_that_names_the_file_or_changes_nothing) {
  const Sample sample;
  CHECK_EQ(load(sample), "");
  CHECK_EQ(adopt_and_read(sample), "");
  Random random(1);
  int noticed = 0, harmless = 0;
  for (const auto& [file, good] : sample.content)
    for (int round = 0; round < 60; ++round) {
      std::vector<char> bytes = good;
      bytes[random.below(bytes.size())] ^= static_cast<char>(1 << random.below(8));
      sample.put(file, bytes);
      for (const std::string& words : {load(sample), adopt_and_read(sample)}) {
        CHECK(words.empty() || words.find(base(file)) != std::string::npos);
        ++(words.empty() ? harmless : noticed);
      }
      sample.put(file, good);
    }
  CHECK(noticed > 100 && harmless > 20);
}

TEST(a_file_cut_anywhere_is_an_error_that_names_it_or_changes_nothing) {
  const Sample sample;
  Random random(2);
  for (const auto& [file, good] : sample.content)
    for (int round = 0; round < 20; ++round) {
      std::vector<char> bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(random.below(good.size())));
      sample.put(file, bytes);
      for (const std::string& words : {load(sample), adopt_and_read(sample)})
        CHECK(words.find(base(file)) != std::string::npos || (words.empty() && bytes.size() + 4096 * 4 > good.size()));
      sample.put(file, good);
    }
}

TEST(a_missing_segment_is_named) {
  const Sample sample;
  for (const auto& [file, good] : sample.content) {
    files().remove(file);
    CHECK(load(sample).find(base(file)) != std::string::npos);
    CHECK(adopt_and_read(sample).find(base(file)) != std::string::npos);
    sample.put(file, good);
  }
}

TEST(a_longer_file_is_read_as_far_as_it_counts) {
  const Sample sample;
  for (const auto& [file, good] : sample.content) {
    if (base(file) == "MANIFEST") continue;
    std::vector<char> bytes = good;
    bytes.resize(bytes.size() + 5000, 7);
    sample.put(file, bytes);
  }
  CHECK_EQ(load(sample), "");
  CHECK_EQ(adopt_and_read(sample), "");
}

TEST(exchanged_blocks_and_segments_are_noticed) {
  const Sample sample;
  const std::string first = sample.path + "/" + segment_name(0), second = sample.path + "/" + segment_name(1);
  const std::vector<char>&a = sample.content.at(first), &b = sample.content.at(second);
  sample.put(first, b);
  CHECK(load(sample).find(base(first)) != std::string::npos);
  std::vector<char> mixed = a;
  for (size_t block = 1; block < 8; ++block) {  // some of them have live records
    std::copy_n(b.begin() + static_cast<std::ptrdiff_t>(block * 4096), 4096,
                mixed.begin() + static_cast<std::ptrdiff_t>(block * 4096));
  }
  sample.put(first, mixed);
  CHECK(load(sample).find("block") != std::string::npos);
  mixed = a;
  for (size_t block = 1; block < 8; ++block)
    std::copy_n(a.begin() + static_cast<std::ptrdiff_t>((block + 1) * 4096), 4096,
                mixed.begin() + static_cast<std::ptrdiff_t>(block * 4096));
  sample.put(first, mixed);
  CHECK(load(sample).find("in the place of block") != std::string::npos);
}

TEST(a_file_cut_while_the_log_has_it_open_is_noticed) {
  TempFolder folder;
  Log log(small_log(folder / "log"));
  std::vector<RecordAddress> places;
  for (int64_t key = 0; key < 60; ++key) places.push_back(append(log, key, 1));
  log.seal();
  std::filesystem::resize_file(folder / "log/segment-0000000000.hrs", 20000);
  std::vector<char> records(places.size() * log.record_bytes());
  CHECK_THROWS(CorruptFile, log.read(places.data(), places.size(), records.data()));
  log.read(places.data(), 12, records.data());
  CHECK(testing::is_record(records.data(), 0, 1, 1000));
}

}  // namespace
}  // namespace hotrow
