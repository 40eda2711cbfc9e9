// The index of a table's rows on SSD: key -> record address.
//
// It is all the RAM that a row on SSD costs: an 8-byte entry {24 hash bits, address + 1}, in lines of eight entries
// that are probed linearly and kept 75 to 90% full, about 9.8 bytes a row. The key itself is in the record on the disk,
// so a match is a candidate: the caller reads the record and compares the key. A wrong candidate costs one read. The 24
// bits also pick the line, which leaves 24 - log2(lines of the shard) of them to tell entries apart (one lookup in
// 4,000 reads in vain at 10 million rows, one in 20 at a billion). Growth reads nothing from the disk.
//
// Shards and thread rules are those of the DRAM index (shard_index.h): one writer per shard; a reader's result counts
// if the DRAM shard's version was even and equal before and after.
//
// Replaceable: other files use only the calls below. docs/architecture.md says what 10^9 to 10^11 rows need.
#pragma once

#include <cstdint>
#include <vector>

#include "hash/hash.h"
#include "memory/line_arena.h"

namespace hotrow {

class SsdIndex {
 public:
  static constexpr int kMostCandidates = 32;

  explicit SsdIndex(size_t reserve) : arena_(reserve), shards_(kShards) {}

  // Addresses of rows that may be the key's. More than 32 equal patterns in one shard would be cut off: less likely
  // than 1e-40 at ten billion rows.
  struct Candidates {
    int count = 0;
    uint64_t place[kMostCandidates];
  };
  Candidates find(uint64_t hash) const;
  const void* line(uint64_t hash) const;  // the line where find and insert begin, for prefetching

  void insert(uint64_t hash, uint64_t place);
  // Both require that the entry exists.
  void erase(uint64_t hash, uint64_t place);
  void replace(uint64_t hash, uint64_t old_place, uint64_t place);
  bool contains(uint64_t hash, uint64_t place) const;

  // All addresses of a shard, in no particular order.
  void places(uint32_t shard, std::vector<uint64_t>& out) const;

  uint64_t rows() const;
  uint64_t rows(uint32_t shard) const { return shards_[shard].rows; }
  size_t bytes() const { return arena_.resident() + shards_.size() * sizeof(Shard); }

 private:
  struct Shard {
    uint64_t* entries = nullptr;
    uint32_t lines = 0;
    uint32_t rows = 0;
    uint32_t deleted = 0;
    uint32_t most = 0;  // rows and deleted entries before the shard grows
  };

  // The lines that the shard needs for `more` rows; 0: it need not grow.
  size_t growth(uint32_t shard, uint64_t more) const;
  uint64_t* locate(uint64_t hash, uint64_t place);
  void rebuild(uint32_t shard, uint32_t lines);
  static void put(Shard& shard, uint64_t entry);

  LineArena arena_;
  std::vector<Shard> shards_;
};

}  // namespace hotrow
