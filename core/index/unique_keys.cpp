#include "index/unique_keys.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "hash/hash.h"
#include "threads/thread_pool.h"

namespace hotrow {
namespace {

constexpr size_t kPartitionKeys = 8192;
constexpr size_t kChunk = 16384;

int partitions_for(size_t positions) {
  size_t wanted = std::bit_ceil((positions + kPartitionKeys - 1) / kPartitionKeys);
  return static_cast<int>(std::clamp<size_t>(wanted, 1, kShards));
}

}  // namespace

size_t UniqueKeys::bytes() const {
  return flat_.bytes() + keys_.bytes() + part_keys_.bytes() + hashes_.bytes() + part_hashes_.bytes() +
         inverse_.bytes() + run_begin_.bytes() + run_.bytes() + order_.bytes() + lengths_.bytes();
}

const int64_t* UniqueKeys::flatten(const std::vector<KeySpan>& spans) {
  positions_ = 0;
  for (const KeySpan& span : spans) positions_ += span.count;
  if (positions_ >= std::numeric_limits<uint32_t>::max())
    throw std::invalid_argument("more than 4 billion ids for one table in one batch; use smaller batches");
  if (spans.size() == 1) return spans[0].keys;
  int64_t* flat = flat_.resize(positions_);
  for (const KeySpan& span : spans) {
    if (span.count) std::memcpy(flat, span.keys, span.count * sizeof(int64_t));
    flat += span.count;
  }
  return flat_.data();
}

void UniqueKeys::build(const std::vector<KeySpan>& spans) {
  const int64_t* keys = flatten(spans);
  keys_.resize(positions_);
  hashes_.resize(positions_);
  inverse_.resize(positions_);
  run_.resize(positions_);
  lengths_.resize(positions_);
  run_begin_.resize(positions_ + 1)[0] = 0;
  const int partitions = partitions_for(positions_);
  cuts_.assign(partitions + 1, 0);
  if (partitions == 1) {
    Part all{nullptr, 0, positions_};
    cuts_[1] = deduplicate(keys, all, keys_.data(), hashes_.data(), lengths_.data());
    build_runs(all, 0, cuts_[1], 0, lengths_.data());
    return;
  }
  partition(keys, partitions);
  part_keys_.resize(positions_);
  part_hashes_.resize(positions_);
  auto part = [&](int p) { return Part{order_.data(), starts_[p], starts_[p + 1]}; };
  ThreadPool::shared().run(partitions, [&](int p) {
    size_t start = starts_[p];
    cuts_[p + 1] =
        deduplicate(keys, part(p), part_keys_.data() + start, part_hashes_.data() + start, lengths_.data() + start);
  });
  for (int p = 0; p < partitions; ++p) cuts_[p + 1] += cuts_[p];
  ThreadPool::shared().run(partitions, [&](int p) {
    size_t start = starts_[p], base = cuts_[p], unique = cuts_[p + 1] - base;
    std::copy_n(part_keys_.data() + start, unique, keys_.data() + base);
    std::copy_n(part_hashes_.data() + start, unique, hashes_.data() + base);
    build_runs(part(p), base, unique, start, lengths_.data() + start);
  });
}

// Counting sort of the positions by partition, stable, over fixed chunks.
void UniqueKeys::partition(const int64_t* keys, int partitions) {
  const int shift = 64 - std::countr_zero(static_cast<unsigned>(partitions));
  const int chunks = static_cast<int>((positions_ + kChunk - 1) / kChunk);
  uint32_t* order = order_.resize(positions_);
  std::vector<size_t> cursor(static_cast<size_t>(chunks) * partitions, 0);
  auto each = [&](int chunk, auto fn) {
    size_t end = std::min(positions_, (chunk + size_t{1}) * kChunk);
    for (size_t i = chunk * kChunk; i < end; ++i)
      fn(i, cursor[static_cast<size_t>(chunk) * partitions + (hash_key(keys[i]) >> shift)]);
  };
  ThreadPool::shared().run(chunks, [&](int chunk) { each(chunk, [](size_t, size_t& count) { ++count; }); });
  starts_.assign(partitions + 1, 0);
  size_t total = 0;
  for (int p = 0; p < partitions; ++p) {
    starts_[p] = total;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      size_t& slot = cursor[static_cast<size_t>(chunk) * partitions + p];
      size_t count = slot;
      slot = total;
      total += count;
    }
  }
  starts_[partitions] = total;
  ThreadPool::shared().run(chunks, [&](int chunk) {
    each(chunk, [&](size_t i, size_t& next) { order[next++] = static_cast<uint32_t>(i); });
  });
}

// Writes the part's unique keys in order of appearance, and for each position the number of its key within the part.
// Tried and dropped: no branch on whether a key is new. The extra stores cost more than the mispredictions.
size_t UniqueKeys::deduplicate(const int64_t* keys, const Part& part, int64_t* unique_keys, uint64_t* hashes,
                               uint32_t* lengths) {
  const size_t capacity = std::bit_ceil(std::max<size_t>(2 * (part.end - part.begin), 16));
  static thread_local std::vector<uint32_t> places;  // number of the unique key + 1, 0 where free
  places.assign(capacity, 0);
  uint32_t* place = places.data();
  const size_t mask = capacity - 1;
  uint32_t unique = 0;
  for (size_t i = part.begin; i < part.end; ++i) {
    const uint32_t position = part.at(i);
    const int64_t key = keys[position];
    const uint64_t hash = hash_key(key);
    size_t at = hash & mask;
    while (place[at] != 0 && unique_keys[place[at] - 1] != key) at = (at + 1) & mask;
    uint32_t number = place[at] - 1;
    if (place[at] == 0) {
      number = unique++;
      place[at] = unique;
      unique_keys[number] = key;
      hashes[number] = hash;
      lengths[number] = 0;
    }
    ++lengths[number];
    inverse_[position] = number;
  }
  return unique;
}

void UniqueKeys::build_runs(const Part& part, size_t base, size_t unique, size_t run_base, const uint32_t* lengths) {
  // The cursor of run u is stored at run_begin_[u + 1]. After filling it has advanced to the end of run u, which is the
  // begin of run u + 1.
  uint32_t* cursor = run_begin_.data() + base + 1;
  uint32_t next = static_cast<uint32_t>(run_base);
  for (size_t u = 0; u < unique; ++u) {
    cursor[u] = next;
    next += lengths[u];
  }
  uint32_t* run = run_.data();
  for (size_t i = part.begin; i < part.end; ++i) {
    const uint32_t position = part.at(i);
    const uint32_t number = inverse_[position];
    run[cursor[number]++] = position;
    inverse_[position] = static_cast<uint32_t>(base + number);
  }
}

}  // namespace hotrow
