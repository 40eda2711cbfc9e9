// Against std::multimap: keys that share all hash bits of an entry, growth, reuse of erased entries.
#include "index/ssd_index.h"

#include <algorithm>
#include <map>

#include "testing/random.h"
#include "testing/test.h"

namespace hotrow {
namespace {

constexpr size_t kReserve = size_t{1} << 34;
constexpr uint64_t kMostPlace = (uint64_t{1} << 40) - 2;

// hash -> places, as find must see them: by the 34 upper bits of the hash (10 pick the shard, 24 are in the entry).
class Oracle {
 public:
  void insert(uint64_t hash, uint64_t place) { places_.emplace(hash >> 30, place); }
  void erase(uint64_t hash, uint64_t place) {
    auto [at, end] = places_.equal_range(hash >> 30);
    places_.erase(std::find_if(at, end, [&](const auto& entry) { return entry.second == place; }));
  }
  std::vector<uint64_t> find(uint64_t hash) const {
    std::vector<uint64_t> found;
    for (auto [at, end] = places_.equal_range(hash >> 30); at != end; ++at) found.push_back(at->second);
    std::sort(found.begin(), found.end());
    return found;
  }
  size_t size() const { return places_.size(); }
  std::vector<uint64_t> of_shard(uint32_t shard) const {
    std::vector<uint64_t> found;
    for (const auto& [bits, place] : places_)
      if (bits >> 24 == shard) found.push_back(place);
    std::sort(found.begin(), found.end());
    return found;
  }

 private:
  std::multimap<uint64_t, uint64_t> places_;
};

std::vector<uint64_t> found_by(const SsdIndex& index, uint64_t hash) {
  const auto candidates = index.find(hash);
  std::vector<uint64_t> places(candidates.place, candidates.place + candidates.count);
  std::sort(places.begin(), places.end());
  return places;
}

TEST(ssd_index_holds_what_a_multimap_holds) {
  testing::Random random(1);
  SsdIndex index(kReserve);
  Oracle oracle;
  struct Entry {
    uint64_t hash, place;
  };
  std::vector<Entry> entries;
  uint64_t next = 0;
  size_t most = 0;
  for (int step = 0; step < 200000; ++step) {
    // Waves of growth and shrinkage, in three shards, a tenth of the keys with the same bits as another.
    const bool grow = entries.empty() || random.below(100) < (step / 20000 % 2 ? 35u : 65u);
    const uint64_t which = entries.empty() ? 0 : random.below(entries.size());
    const uint64_t place = random.below(50) ? next++ : kMostPlace - next++;
    if (random.below(10) == 0 && !entries.empty()) {
      index.replace(entries[which].hash, entries[which].place, place);
      oracle.erase(entries[which].hash, entries[which].place);
      oracle.insert(entries[which].hash, place);
      entries[which].place = place;
    } else if (grow) {
      uint64_t hash = random.below(3) * 511 << 54 | random.bits() >> 10;
      if (!entries.empty() && random.below(10) == 0 && found_by(index, entries[which].hash).size() < 8)
        hash = entries[which].hash ^ random.below(1 << 20);
      index.insert(hash, place);
      oracle.insert(hash, place);
      entries.push_back({hash, place});
    } else {
      index.erase(entries[which].hash, entries[which].place);
      oracle.erase(entries[which].hash, entries[which].place);
      CHECK(!index.contains(entries[which].hash, entries[which].place));
      entries[which] = entries.back();
      entries.pop_back();
    }
    most = std::max(most, entries.size());
    if (entries.empty()) continue;
    const uint64_t known = entries[random.below(entries.size())].hash, unknown = random.bits();
    CHECK(found_by(index, known) == oracle.find(known));
    CHECK(found_by(index, unknown) == oracle.find(unknown));
    CHECK_EQ(index.rows(), oracle.size());
  }
  CHECK(most > 5000);
  for (const Entry& entry : entries) {
    CHECK(index.contains(entry.hash, entry.place));
    CHECK(found_by(index, entry.hash) == oracle.find(entry.hash));
  }
  for (uint32_t shard : {0u, 1u, 511u, 1022u}) {
    std::vector<uint64_t> places;
    index.places(shard, places);
    std::sort(places.begin(), places.end());
    CHECK(places == oracle.of_shard(shard));
    CHECK_EQ(index.rows(shard), places.size());
  }
}

TEST(ssd_index_takes_less_than_twelve_bytes_a_row) {
  SsdIndex index(kReserve);
  double worst = 0;
  for (uint64_t i = 0; i < 1500000; ++i) {
    const uint64_t hash = hash_key(static_cast<int64_t>(i * 7919));
    index.insert(hash, i);
    if (i >= 1000000 && i % 10000 == 0)
      worst = std::max(worst, static_cast<double>(index.bytes()) / static_cast<double>(i + 1));
  }
  CHECK(worst < 12);
  CHECK_EQ(index.rows(), 1500000u);
}

TEST(ssd_index_does_not_grow_where_rows_come_and_go) {
  SsdIndex index(kReserve);
  testing::Random random(2);
  std::vector<uint64_t> hashes(200000);
  for (size_t i = 0; i < hashes.size(); ++i) index.insert(hashes[i] = random.bits(), i);
  const size_t before = index.bytes();
  for (int round = 0; round < 10; ++round)
    for (size_t i = 0; i < hashes.size(); ++i) {
      index.erase(hashes[i], i);
      index.insert(hashes[i] = random.bits(), i);
    }
  CHECK(index.bytes() < before * 5 / 4);
  CHECK_EQ(index.rows(), hashes.size());
}

}  // namespace
}  // namespace hotrow
