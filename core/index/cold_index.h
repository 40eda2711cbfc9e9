// key -> place on SSD, for a table's cold rows.
//
// A cold row costs RAM only here: an 8-byte entry {24 hash bits, place + 1}, in lines of eight that are probed
// linearly, 75 to 90% full: about 9.8 bytes a row. The key itself is in the record on the disk, so a match is a
// candidate: whoever asks reads the record and compares. A wrong candidate costs one read; the 24 bits also pick the
// line, which leaves 24 - log2(lines of the shard) of them to tell entries apart (one lookup in 4,000 reads in vain at
// 10 million rows, one in 20 at a billion). Growth needs no reads: the bits are all there.
//
// Shards are those of the hot index (shard_index.h), and so are the threads' rules: one writer per shard, readers
// between two equal, even versions of the hot shard.
//
// It is replaceable: nothing outside knows more than the calls below. docs/architecture.md says what 10^9 to 10^11 rows
// need.
#pragma once

#include <cstdint>
#include <vector>

#include "hash/hash.h"
#include "memory/line_arena.h"

namespace hotrow {

class ColdIndex {
 public:
  static constexpr int kMostCandidates = 32;

  explicit ColdIndex(size_t reserve) : arena_(reserve), shards_(kShards) {}

  // Places of rows that may be the key's. More than 32 equal patterns in one shard would be left out: less likely than
  // 1e-40 at ten billion rows.
  struct Candidates {
    int count = 0;
    uint64_t place[kMostCandidates];
  };
  Candidates find(uint64_t hash) const;
  const void* line(uint64_t hash) const;  // where find and insert begin: to prefetch

  // Lines that inserting `more` rows into a shard would take anew.
  size_t growth(uint32_t shard, uint64_t more) const;
  // Makes room for them (after the memory was reserved).
  void reserve(size_t lines) { arena_.reserve(lines); }
  void insert(uint64_t hash, uint64_t place);
  // Require: the entry is there.
  void erase(uint64_t hash, uint64_t place);
  void replace(uint64_t hash, uint64_t old_place, uint64_t place);
  bool contains(uint64_t hash, uint64_t place) const;

  // All places of a shard, in no order that means anything.
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

  uint64_t* locate(uint64_t hash, uint64_t place);
  void rebuild(uint32_t shard, uint32_t lines);
  static void put(Shard& shard, uint64_t entry);

  LineArena arena_;
  std::vector<Shard> shards_;
};

}  // namespace hotrow
