// The SSD tier of a table: which rows leave DRAM, how they come back, and how a snapshot is taken while training goes
// on.
//
//   fetch     missing keys are looked up in the cold index, their records read together and compared; what arrives is
//             put into slots by Table::insert, clean, its place remembered
//   make_room slots come from the budget by slabs of 4,096; when it is spent, a hand sweeps the slots (each hit warms a
//             row up to 3, the hand cools it, cold and unpinned ones leave; docs/decisions/0002): clean rows are
//             dropped, dirty ones appended to the log
//   keep      a row that came up for a batch in flight is not what the hand takes; but where a batch whose turn has
//   come
//             finds no other room, it goes again, and is read once more when it is its batch's turn: running ahead
//             never makes a budget too small
//   touch     a row that is about to change loses its place; one that a snapshot still wants is appended first (its
//             pre-image goes straight to the log, so a snapshot needs no memory of its own)
//   snapshot  begin() turns the epoch over and copies the log's live bits: that is the pause. capture() then walks the
//             slots, some at a time, and appends what was dirty at that moment; a row that is evicted, changed or
//             erased before the walk reaches it is captured there and then
//   compact   live records of a segment that is mostly dead are appended again
//
// A tier may also be a log without eviction (a table with checkpoints but without ssd=): rows then have places, and
// snapshots write only what changed, but no row leaves.
//
// Or a cache over another store (`drops`): a row that leaves is forgotten, dirty or not, and nothing is written.
//
// The budget holds while rows are moved, because a fiftieth of it is kept free for the growth of the indexes.
//
// Threads: every call requires the table's writer lock, except read(), answer() and holds_any(), which take none.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "index/cold_index.h"
#include "log/log.h"
#include "rows/grouping.h"
#include "rows/slot_marks.h"

namespace hotrow {

class Table;
enum class Cold : int;

// Rows read from SSD for a batch: which of its unique keys, from which place, and their records.
struct Arrivals {
  std::vector<uint32_t> unique;
  std::vector<Place> places;
  std::vector<char> records;
};

struct TierReport {
  uint64_t hits = 0, misses = 0, arrivals = 0, prefetched = 0;  // unique keys of training batches
  uint64_t evicted = 0, evicted_dirty = 0;
  uint64_t compaction_errors = 0;
  uint64_t cold_rows = 0;
  size_t cold_index_bytes = 0, marks_bytes = 0;
  LogReport log{};
};

class ColdTier {
 public:
  static constexpr uint32_t kSlabSlots = 4096;

  ColdTier(Table& table, std::unique_ptr<Log> log, bool evicts, bool drops = false);

  bool evicts() const { return evicts_; }
  bool drops() const { return drops_; }
  Log& log() { return *log_; }
  ColdIndex& cold() { return cold_; }
  SlotMarks& marks() { return marks_; }
  uint8_t epoch() const { return epoch_; }

  // Rows of those unique keys that have no slot, as far as they are on SSD. Expired ones are dropped here.
  void fetch(const Grouping& grouping, const uint32_t* slots, Arrivals& arrivals);
  // The same without the lock and without a change, for prefetch. Expired ones are the caller's to drop.
  void look_up(const Grouping& grouping, const uint32_t* slots, Arrivals& arrivals) const;
  // The rows of keys[i] for i in `absent`, for readers: values to out + i * dim; found[i] (may be null).
  void read(const int64_t* keys, const uint64_t* hashes, const std::vector<uint32_t>& absent, float* out,
            bool* found) const;
  // The same without the disk: what is there alone is answered by the policy, and late[i] set. Returns how many.
  size_t answer(const int64_t* keys, const uint64_t* hashes, const std::vector<uint32_t>& absent, Cold policy,
                float* out, uint8_t* late) const;
  // Whether a key of this hash may have its row here.
  bool holds_any(uint64_t hash) const { return candidates(hash).count != 0; }

  // Slots for a batch of this many keys beside those that others hold, as far as the budget and other tables can spare
  // them. Before the batch's own rows are pinned: then every slab of a busy table has a pinned row and none can go.
  void claim(size_t rows);
  void unclaim() { claimed_ = 0; }
  // Free slots for this many rows, from the budget or by eviction. Throws BudgetExceeded.
  void make_room(size_t rows);
  // Evicts until the budget has its reserve again.
  void rebalance();
  // Rows that are not pinned leave DRAM, the coldest first; returns how many. Those that batches in flight wait for
  // stay, unless `all`.
  size_t evict(size_t want, bool all = false);
  // Gives back what reading the log holds between two reads; false where that is nothing.
  bool trim();
  // Gives one slab back to the budget; false where none can go.
  bool release_slab();
  // For a table that comes to have a log while it has rows.
  void mark_all_dirty();

  void touch(const uint32_t* slots, size_t count);
  void forget(uint32_t slot);  // before a row is erased
  bool erase_cold(int64_t key, uint64_t hash);
  // Reads a shard's rows and drops those that have expired; `gone` becomes their keys.
  void drop_expired(uint32_t shard, std::vector<int64_t>& gone);
  // A batch in flight begins to wait for rows: returns its tag, with which they are kept until the batch ends.
  uint8_t begin_waiting();
  void end_waiting(uint8_t tag) { --waiting_[tag]; }
  void keep(uint32_t slot, uint8_t tag) { marks_.set_wait(slot, tag); }
  bool kept(uint32_t slot) { return waiting_[marks_.wait(slot)] != 0; }
  // While true, room is made from what is free and what nobody waits for, in this table alone.
  bool modest = false;
  void pin(const uint32_t* slots, size_t count);
  void unpin(const uint32_t* slots, size_t count);
  void pin_found(const uint32_t* slots, size_t count);  // those that are slots at all
  void unpin_found(const uint32_t* slots, size_t count);

  // --- snapshots ---
  void begin_snapshot();
  bool snapshot_active() const { return snapshot_.has_value(); }
  // Captures rows of the next `slots` slots; false when all are done.
  bool capture(uint32_t slots);
  LiveSet& snapshot_set() { return snapshot_->set; }
  uint64_t snapshot_written() const { return snapshot_->written; }
  void end_snapshot(bool abandoned);

  // One chunk of compaction; returns the bytes it moved, 0 when there is nothing to do. Takes the lock itself.
  size_t compact(size_t most_records);
  size_t compact_quietly(size_t most_records) noexcept;  // an error is counted, not thrown

  // Bytes held: slabs, indexes, marks, log buffers.
  size_t holds() const;
  size_t slab_bytes() const;
  TierReport report() const;
  uint64_t active_slabs() const { return active_slabs_; }
  TierReport counters;
  bool loading = false;  // records without a row yet: not to be compacted

 private:
  struct Snapshot {
    LiveSet set;
    uint8_t old_epoch;
    uint64_t cursor = 0, end = 0, written = 0;
  };

  void find_records(const Grouping& grouping, const uint32_t* slots, Arrivals& arrivals, bool locked);
  ColdIndex::Candidates candidates(uint64_t hash) const;  // of one moment, whatever a writer does
  // A row in both indexes at one moment. Where it is in DRAM it is copied to `out` and true returned; otherwise `out`
  // has its initial values.
  bool look(int64_t key, uint64_t hash, float* out, ColdIndex::Candidates& candidates) const;
  bool grow_slab();
  void drop_cold(uint64_t hash, Place place);
  void evict_slots(const uint32_t* slots, size_t count);
  void move_down(uint32_t slot, uint64_t hash, Place place);
  void drop(uint32_t slot);
  Place append(uint32_t slot, bool alive);
  void capture_slot(uint32_t slot, bool changes);
  bool wanted(uint32_t slot) { return snapshot_ && marks_.epoch(slot) == snapshot_->old_epoch; }

  Table& table_;
  std::unique_ptr<Log> log_;
  const bool evicts_, drops_;
  ColdIndex cold_;
  SlotMarks marks_;
  std::vector<bool> active_;  // by slab
  uint64_t active_slabs_ = 0;
  uint64_t hand_ = 0;
  size_t held_ = 0;     // slots with pins
  size_t claimed_ = 0;  // slots that a batch in work needs
  static constexpr uint8_t kTags = 16;
  std::array<uint32_t, kTags> waiting_{};  // batches in flight, by tag; [0] stays 0
  uint8_t last_tag_ = 0;
  uint8_t epoch_ = 1;
  std::optional<Snapshot> snapshot_;
  std::vector<Place> compacting_;  // what is left of the segment in work
};

}  // namespace hotrow
