#include "rowserver/publication_history.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "hash/hash.h"

namespace hotrow {
namespace {
constexpr uint32_t kEmpty = 0xffffffffu;
}

ChangedRows::ChangedRows(uint32_t table, int dim, const std::vector<int64_t>& keys, std::vector<float> values,
                         std::vector<uint8_t> found)
    : table_(table), dim_(dim), values_(std::move(values)), found_(std::move(found)) {
  const size_t places = std::bit_ceil(std::max<size_t>(2 * keys.size(), 8));
  mask_ = places - 1;
  keys_.resize(places);
  rows_.assign(places, kEmpty);
  for (size_t i = 0; i < keys.size(); ++i) {
    uint64_t at = hash_key(keys[i]) & mask_;
    while (rows_[at] != kEmpty) at = (at + 1) & mask_;
    keys_[at] = keys[i];
    rows_[at] = static_cast<uint32_t>(i);
  }
}

size_t ChangedRows::bytes() const {
  return keys_.size() * sizeof(int64_t) + rows_.size() * sizeof(uint32_t) + values_.size() * sizeof(float) +
         found_.size();
}

void ChangedRows::restore(const int64_t* keys, size_t count, float* rows, bool* found) const {
  for (size_t i = 0; i < count; ++i) {
    for (uint64_t at = hash_key(keys[i]) & mask_; rows_[at] != kEmpty; at = (at + 1) & mask_) {
      if (keys_[at] != keys[i]) continue;
      std::memcpy(rows + i * dim_, values_.data() + size_t{rows_[at]} * dim_, dim_ * sizeof(float));
      if (found) found[i] = found_[rows_[at]];
      break;
    }
  }
}

void PublicationHistory::add(int64_t number, int64_t previous, std::vector<ChangedRows> tables) {
  size_t bytes = sizeof(Entry);
  for (const ChangedRows& table : tables) bytes += table.bytes();
  entries_.push_back({number, previous, std::move(tables), bytes});
  bytes_ += bytes;
  while (entries_.size() > 1 && (entries_.size() > most_entries_ || bytes_ > most_bytes_)) {
    bytes_ -= entries_.front().bytes;
    entries_.pop_front();
  }
}

void PublicationHistory::clear() {
  entries_.clear();
  bytes_ = 0;
}

bool PublicationHistory::reaches(int64_t publication, int64_t current) const {
  if (publication == current) return true;
  const auto entry = std::lower_bound(entries_.begin(), entries_.end(), publication,
                                      [](const Entry& one, int64_t number) { return one.previous < number; });
  return entry != entries_.end() && entry->previous == publication;
}

void PublicationHistory::restore(int64_t publication, uint32_t table, const int64_t* keys, size_t count, float* rows,
                                 bool* found) const {
  for (auto entry = entries_.rbegin(); entry != entries_.rend() && entry->number > publication; ++entry)
    for (const ChangedRows& changed : entry->tables)
      if (changed.table() == table) changed.restore(keys, count, rows, found);
}

}  // namespace hotrow
