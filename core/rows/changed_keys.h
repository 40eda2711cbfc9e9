// Which keys of a table changed since somebody last asked: what a publication is made of.
//
// The paths that change rows note them here: an update, a row that comes down from a GPU, creation, assign, erase, a
// sweep. A bit per slot keeps a row that changes at every step from being noted more than once; a row that moves into a
// slot clears its bit, so one that went to SSD and came back may be noted again, and take() drops the double. Keys that
// were asked for and refused by admission are never noted. What a key's row is now, or that it has none, is for the
// reader of the keys to find out: only the newest counts.
//
// Off until begin(): a table that nobody publishes pays one test a batch. Memory: 8 bytes for each changed row, a bit
// for each slot. Tried and dropped: comparing each row's last step with the step of the last cut (no memory at all,
// but a row that was set with a step of its own would be passed over, and rows on SSD would have to be read).
//
// Threads: every call requires the table's writer lock.
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
    drop();
  }
  void end() {
    on_ = false;
    drop();
  }
  void drop() {
    std::vector<int64_t>().swap(keys_);  // assigning {} would keep the memory
    std::vector<uint64_t>().swap(bits_);
    tidy_at_ = kTidyAt;
  }

  void note(uint32_t slot, int64_t key) {
    const size_t word = slot / 64;
    if (word >= bits_.size()) bits_.resize(std::max(word + 1, bits_.size() * 3 / 2));
    const uint64_t bit = uint64_t{1} << (slot % 64);
    if (bits_[word] & bit) return;
    bits_[word] |= bit;
    add(key);
  }
  // The key of a row that is nowhere now, or about to be.
  void note_gone(int64_t key) { add(key); }
  // Another row has moved into this slot.
  void moved_in(uint32_t slot) {
    if (slot / 64 < bits_.size()) bits_[slot / 64] &= ~(uint64_t{1} << (slot % 64));
  }

  // The keys noted since the last time, rising, each once.
  std::vector<int64_t> take() {
    tidy();
    std::fill(bits_.begin(), bits_.end(), 0);
    tidy_at_ = kTidyAt;
    std::vector<int64_t> taken;
    taken.swap(keys_);
    return taken;
  }

  size_t bytes() const { return keys_.capacity() * sizeof(int64_t) + bits_.capacity() * sizeof(uint64_t); }

 private:
  static constexpr size_t kTidyAt = 65536;

  void add(int64_t key) {
    keys_.push_back(key);
    if (keys_.size() < tidy_at_) return;
    tidy();
    tidy_at_ = std::max(kTidyAt, 2 * keys_.size());
  }
  void tidy() {
    std::sort(keys_.begin(), keys_.end());
    keys_.erase(std::unique(keys_.begin(), keys_.end()), keys_.end());
  }

  bool on_ = false;
  std::vector<int64_t> keys_;
  std::vector<uint64_t> bits_;
  size_t tidy_at_ = kTidyAt;
};

}  // namespace hotrow
