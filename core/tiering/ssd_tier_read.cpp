// Reads rows that are only on SSD, for a batch that needs them in DRAM and for readers.
#include <algorithm>
#include <cstring>

#include "table/table.h"
#include "tiering/ssd_tier.h"

namespace hotrow {

void SsdTier::fetch(const UniqueKeys& unique_keys, const uint32_t* slots, FetchedRows& fetched) {
  find_records(unique_keys, slots, fetched, true);
}

void SsdTier::fetch_unlocked(const UniqueKeys& unique_keys, const uint32_t* slots, FetchedRows& fetched) const {
  while (true) try {
      return const_cast<SsdTier*>(this)->find_records(unique_keys, slots, fetched, false);
    } catch (const std::out_of_range&) {
      // A segment was removed between the lookup and the read: try again.
    }
}

SsdIndex::Candidates SsdTier::candidates(uint64_t hash) const {
  const ShardIndex& shard = table_.shards_[shard_of(hash)];
  while (true) {
    const uint32_t before = __atomic_load_n(&shard.version, __ATOMIC_ACQUIRE);
    if (before & 1) continue;  // a row is moving
    SsdIndex::Candidates found = index_.find(hash);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (__atomic_load_n(&shard.version, __ATOMIC_RELAXED) == before) return found;
  }
}

void SsdTier::find_records(const UniqueKeys& unique_keys, const uint32_t* slots, FetchedRows& fetched, bool locked) {
  fetched.unique.clear();
  fetched.places.clear();
  std::vector<uint32_t> asked;       // unique keys with candidates left
  std::vector<RecordAddress> first;  // their first candidates, nearly always the only ones
  for (uint32_t u = 0; u < unique_keys.size(); ++u) {
    if (slots[u] != kNoSlot) continue;
    if (auto found = candidates(unique_keys.hashes()[u]); found.count) {
      asked.push_back(u);
      first.push_back(found.place[0]);
    }
  }
  const uint32_t record_bytes = log_->record_bytes();
  std::vector<char> records;
  std::vector<RecordAddress> places;
  fetched.records.clear();
  for (int round = 0; !asked.empty(); ++round) {
    places.clear();
    if (round == 0)
      places.swap(first);
    else if (!locked)
      break;  // candidates may have changed since; prefetching tries again later
    else
      for (uint32_t u : asked) places.push_back(candidates(unique_keys.hashes()[u]).place[round]);
    records.resize(places.size() * record_bytes);
    log_->read(places.data(), places.size(), records.data());
    size_t left = 0;
    for (size_t i = 0; i < asked.size(); ++i) {
      RecordHead head;
      const char* record = records.data() + i * record_bytes;
      std::memcpy(&head, record, sizeof(head));
      if (head.key == unique_keys.keys()[asked[i]]) {
        const uint64_t hash = unique_keys.hashes()[asked[i]];
        if (locked && table_.expired(hash, head, record + sizeof(head))) {
          drop_cold(hash, places[i]);
          __atomic_store_n(&table_.live_, table_.live_ - 1, __ATOMIC_RELAXED);
          continue;
        }
        fetched.unique.push_back(asked[i]);
        fetched.places.push_back(places[i]);
        fetched.records.insert(fetched.records.end(), record, record + record_bytes);
      } else if (round + 1 < candidates(unique_keys.hashes()[asked[i]]).count) {
        asked[left++] = asked[i];
      }
    }
    asked.resize(left);
  }
}

// A row may be moving between the tiers, so both indexes are read at one version of the shard.
bool SsdTier::read_dram_or_candidates(int64_t key, uint64_t hash, float* out, SsdIndex::Candidates& candidates) const {
  const ShardIndex& shard = table_.shards_[shard_of(hash)];
  while (true) {
    const uint32_t version = __atomic_load_n(&shard.version, __ATOMIC_ACQUIRE);
    if (version & 1) continue;
    uint32_t slot;
    kernels().read({{table_.view_, &key, &hash, 1, &slot}, table_.dim(), out, table_.options_.type});
    if (slot != kNoSlot) return true;
    candidates = index_.find(hash);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (__atomic_load_n(&shard.version, __ATOMIC_RELAXED) == version) break;
  }
  table_.write_initial_values(key, out);
  return false;
}

void SsdTier::read(const int64_t* keys, const uint64_t* hashes, const std::vector<uint32_t>& absent, float* out,
                   bool* found) const {
  const int dim = table_.dim();
  const uint32_t record_bytes = log_->record_bytes();
  std::vector<uint32_t> left = absent;
  SsdIndex::Candidates candidates;
  while (!left.empty()) {
    std::vector<RecordAddress> places;
    std::vector<uint32_t> asked, of;  // keys that may be on SSD; the key of each address
    for (uint32_t i : left) {
      const bool here = read_dram_or_candidates(keys[i], hashes[i], out + size_t{i} * dim, candidates);
      if (here) {
        if (found) found[i] = true;
      } else if (candidates.count) {
        asked.push_back(i);
        places.insert(places.end(), candidates.place, candidates.place + candidates.count);
        of.insert(of.end(), candidates.count, i);
      }
    }
    std::vector<char> records(places.size() * record_bytes);
    try {
      log_->read(places.data(), places.size(), records.data());
    } catch (const std::out_of_range&) {
      left = std::move(asked);  // a segment was removed in the meantime: its live records have moved
      continue;
    }
    for (size_t p = 0; p < places.size(); ++p) {
      RecordHead head;
      const char* record = records.data() + p * record_bytes;
      std::memcpy(&head, record, sizeof(head));
      const char* values = record + sizeof(head);
      if (head.key != keys[of[p]]) continue;
      if (table_.expired(hashes[of[p]], head, values)) continue;
      kernels().decode(table_.options_.type, values, dim, out + size_t{of[p]} * dim);
      if (found) found[of[p]] = true;
    }
    return;
  }
}

size_t SsdTier::read_without_io(const int64_t* keys, const uint64_t* hashes, const std::vector<uint32_t>& absent,
                                ColdReadPolicy policy, float* out, uint8_t* late) const {
  const int dim = table_.dim();
  size_t answered = 0;
  SsdIndex::Candidates candidates;
  for (uint32_t i : absent) {
    if (read_dram_or_candidates(keys[i], hashes[i], out + size_t{i} * dim, candidates) || !candidates.count) continue;
    late[i] = 1;
    ++answered;
    if (policy == ColdReadPolicy::kDefault) std::copy_n(table_.default_row().data(), dim, out + size_t{i} * dim);
  }
  return answered;
}

}  // namespace hotrow
