// Deduplicates a batch's keys: the unique keys, the unique key of each position, and the positions of each unique key.
//
// Keys are first partitioned by the top bits of their hash (one partition for up to 8,192 keys). Each partition is then
// deduplicated with a small hash table that fits into the L2 cache. The number of partitions depends only on the number
// of keys, and unique keys of a partition are in order of first appearance, so the result does not depend on the number
// of threads. A partition holds whole shards, so two partitions never write to the same shard.
//
// A run (all positions of one unique key) is in batch order: gradients are summed in that order.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/buffer.h"

namespace hotrow {

struct KeySpan {
  const int64_t* keys;
  size_t count;
};

class UniqueKeys {
 public:
  void build(const std::vector<KeySpan>& spans);

  size_t positions() const { return positions_; }
  size_t size() const { return cuts_.back(); }  // unique keys
  const int64_t* keys() const { return keys_.data(); }
  const uint64_t* hashes() const { return hashes_.data(); }
  const uint32_t* inverse() const { return inverse_.data(); }
  const uint32_t* run_begin() const { return run_begin_.data(); }
  const uint32_t* run() const { return run_.data(); }
  // Unique keys [cuts[i], cuts[i + 1]) make partition i.
  const std::vector<size_t>& cuts() const { return cuts_; }
  size_t bytes() const;

 private:
  // Positions of one partition: order[begin..end), or the positions begin..end themselves without an order.
  struct Part {
    const uint32_t* order;
    size_t begin, end;
    uint32_t at(size_t i) const { return order ? order[i] : static_cast<uint32_t>(i); }
  };

  const int64_t* flatten(const std::vector<KeySpan>& spans);
  void partition(const int64_t* keys, int partitions);
  size_t deduplicate(const int64_t* keys, const Part& part, int64_t* unique_keys, uint64_t* hashes, uint32_t* lengths);
  void build_runs(const Part& part, size_t base, size_t unique, size_t run_base, const uint32_t* lengths);

  size_t positions_ = 0;
  Buffer<int64_t> flat_, keys_, part_keys_;
  Buffer<uint64_t> hashes_, part_hashes_;
  Buffer<uint32_t> inverse_, run_begin_, run_, order_, lengths_;
  std::vector<size_t> cuts_{0, 0}, starts_;
};

}  // namespace hotrow
