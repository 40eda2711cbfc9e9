// The keys of a table that changed since the last take(): the input of a publication.
//
// Every path that changes a row records its key here: update, GPU write-back, creation, assign, erase, sweep. A bit per
// slot prevents recording a row twice. The bit is cleared when another row takes the slot, so a row that was evicted
// and read back may be recorded twice; take() removes duplicates. Keys that admission rejected are not recorded. take()
// returns keys only; the caller looks up the current row, or finds that there is none.
//
// Off until begin(): a table that is not published pays one branch a batch. Memory: 8 bytes per changed row and one bit
// per slot. Tried and dropped: comparing each row's last step with the step of the last publication. It needs no
// memory, but it misses rows assigned with a step of their own, and it has to read rows on SSD.
//
// Threads: every call needs the table's write mutex.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hotrow {

class ChangedKeys {
 public:
  bool on() const { return on_; }
  void begin() {
    on_ = true;
    clear();
  }
  void end() {
    on_ = false;
    clear();
  }
  void clear() {
    std::vector<int64_t>().swap(keys_);  // assigning {} would keep the memory
    std::vector<uint64_t>().swap(bits_);
    compact_threshold_ = kCompactThreshold;
  }

  void mark_changed(uint32_t slot, int64_t key) {
    const size_t word = slot / 64;
    if (word >= bits_.size()) bits_.resize(std::max(word + 1, bits_.size() * 3 / 2));
    const uint64_t bit = uint64_t{1} << (slot % 64);
    if (bits_[word] & bit) return;
    bits_[word] |= bit;
    add(key);
  }
  // Records the key of a row that was removed or is about to be.
  void mark_removed(int64_t key) { add(key); }
  // Another row took this slot.
  void slot_reused(uint32_t slot) {
    if (slot / 64 < bits_.size()) bits_[slot / 64] &= ~(uint64_t{1} << (slot % 64));
  }

  // The keys recorded since the last call, ascending and unique.
  std::vector<int64_t> take() {
    sort_and_deduplicate();
    std::fill(bits_.begin(), bits_.end(), 0);
    compact_threshold_ = kCompactThreshold;
    std::vector<int64_t> taken;
    taken.swap(keys_);
    return taken;
  }

  size_t bytes() const { return keys_.capacity() * sizeof(int64_t) + bits_.capacity() * sizeof(uint64_t); }

 private:
  static constexpr size_t kCompactThreshold = 65536;

  void add(int64_t key) {
    keys_.push_back(key);
    if (keys_.size() < compact_threshold_) return;
    sort_and_deduplicate();
    compact_threshold_ = std::max(kCompactThreshold, 2 * keys_.size());
  }
  void sort_and_deduplicate() {
    std::sort(keys_.begin(), keys_.end());
    keys_.erase(std::unique(keys_.begin(), keys_.end()), keys_.end());
  }

  bool on_ = false;
  std::vector<int64_t> keys_;
  std::vector<uint64_t> bits_;
  size_t compact_threshold_ = kCompactThreshold;
};

}  // namespace hotrow
