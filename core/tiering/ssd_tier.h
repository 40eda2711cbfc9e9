// The SSD tier of a table: evicts rows from DRAM, reads them back, and takes snapshots while training continues.
//
//   fetch              Looks missing keys up in the SSD index, reads all candidate records in one batch, and compares
//                      the keys. Table::insert puts the rows into slots, clean, with their record addresses.
//   ensure_free_slots  Takes slots from the budget in slabs of 4,096. When the budget is spent, evicts with the CLOCK
//                      algorithm: a hit raises a row's heat (at most 3), the hand lowers it, and rows that are cold and
//                      not pinned leave (docs/decisions/0002). Clean rows are dropped; dirty rows are appended to the
//                      log.
//   protect            The clock skips rows that were prefetched for a batch in flight. If a batch that is due finds no
//                      other slots, it may take them; the other batch then reads the row again. So prefetching never
//                      makes a budget too small.
//   mark_dirty         A row that is about to change loses its record address. If a running snapshot still needs the
//                      old row, it is appended to the log first (so a snapshot needs no memory of its own).
//   snapshot           begin_snapshot() advances the epoch and copies the log's live bits; only this pauses training.
//                      capture() then visits the slots in steps and appends the rows that were dirty at that moment.
//                      A row that is evicted, changed or erased before that is captured at once.
//   compact            Rewrites the live records of a segment that is mostly dead.
//
// Modes. With `evicts`, DRAM is a cache over the log. Without it (a table with checkpoints and no ssd=), rows have
// record addresses, snapshots write only changed rows, and no row leaves DRAM. With `cache_only`, DRAM caches a remote
// store: an evicted row is discarded, dirty or not, and nothing is written.
//
// 1/50 of the budget is kept free for index growth, so the budget also holds while rows move.
//
// Threads: every call needs the table's write mutex, except read(), read_without_io() and may_hold(), which take no
// lock.
//
// Table (table/table.h) and this class are one unit in two folders: the tier is Table's friend and moves its rows.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "index/ssd_index.h"
#include "index/unique_keys.h"
#include "log/log.h"
#include "tiering/slot_state.h"

namespace hotrow {

class Table;
enum class ColdReadPolicy : int;

// Rows read from SSD for a batch: which of its unique keys, their addresses and their records.
struct FetchedRows {
  std::vector<uint32_t> unique;
  std::vector<RecordAddress> places;
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

class SsdTier {
 public:
  static constexpr uint32_t kSlabSlots = 4096;

  SsdTier(Table& table, std::unique_ptr<Log> log, bool evicts, bool cache_only = false);

  bool evicts() const { return evicts_; }
  bool cache_only() const { return cache_only_; }
  Log& log() { return *log_; }
  SsdIndex& index() { return index_; }
  SlotState& slot_state() { return slot_state_; }
  uint8_t epoch() const { return epoch_; }

  // Reads the rows of unique keys without a slot, as far as they are on SSD. Drops expired rows.
  void fetch(const UniqueKeys& unique_keys, const uint32_t* slots, FetchedRows& fetched);
  // The same without the mutex and without a change, for prefetch. The caller must drop expired rows.
  void fetch_unlocked(const UniqueKeys& unique_keys, const uint32_t* slots, FetchedRows& fetched) const;
  // For readers: reads the rows of keys[i] for i in `absent` into out + i * dim and sets found[i] (may be null).
  void read(const int64_t* keys, const uint64_t* hashes, const std::vector<uint32_t>& absent, float* out,
            bool* found) const;
  // The same without reading the disk: for a row that is only there the policy gives the values, and late[i] is set.
  // Returns how many.
  size_t read_without_io(const int64_t* keys, const uint64_t* hashes, const std::vector<uint32_t>& absent,
                         ColdReadPolicy policy, float* out, uint8_t* late) const;
  // Whether a key with this hash may have its row on SSD.
  bool may_hold(uint64_t hash) const { return candidates(hash).count != 0; }

  // Takes slabs for `rows` slots beyond those already pinned, from the budget or from other tables. Call before the
  // batch pins its own rows: afterwards every slab of a busy table has a pinned row and none can be released.
  void reserve_slots(size_t rows);
  void release_reserved_slots() { reserved_slots_ = 0; }
  // Frees slots for this many rows, from the budget or by eviction. Throws BudgetExceeded.
  void ensure_free_slots(size_t rows);
  // Evicts until the budget has its free reserve again.
  void restore_free_reserve();
  // Evicts up to `want` unpinned rows, coldest first; returns how many. Skips rows that are protected for a batch in
  // flight, unless `all`.
  size_t evict(size_t want, bool all = false);
  // Frees the memory of idle log readers; false: there was none.
  bool trim();
  // Returns one slab to the budget; false: none can be released.
  bool release_slab();
  // For a table that had rows before it got a log.
  void mark_all_dirty();

  void mark_dirty(const uint32_t* slots, size_t count);
  void detach_slot(uint32_t slot);  // before a row is erased
  bool erase_cold(int64_t key, uint64_t hash);
  // Reads the rows of a shard on SSD and drops the expired ones. `gone` receives their keys.
  void drop_expired(uint32_t shard, std::vector<int64_t>& gone);
  // A new tag for a batch in flight: rows with this tag are protected until the batch releases it.
  uint8_t acquire_protect_tag();
  void release_protect_tag(uint8_t tag) { --batches_by_tag_[tag]; }
  void protect(uint32_t slot, uint8_t tag) { slot_state_.set_protect_tag(slot, tag); }
  bool is_protected(uint32_t slot) { return batches_by_tag_[slot_state_.protect_tag(slot)] != 0; }
  // While true, slots come only from free ones and unprotected rows of this table.
  bool unprotected_only = false;
  void pin(const uint32_t* slots, size_t count);
  void unpin(const uint32_t* slots, size_t count);
  void pin_found(const uint32_t* slots, size_t count);  // skips kNoSlot
  void unpin_found(const uint32_t* slots, size_t count);

  // --- snapshots ---
  void begin_snapshot();
  bool snapshot_active() const { return snapshot_.has_value(); }
  // Captures rows of the next `slots` slots; false: all are done.
  bool capture(uint32_t slots);
  LiveSet& snapshot_set() { return snapshot_->set; }
  uint64_t snapshot_written() const { return snapshot_->written; }
  void end_snapshot(bool abandoned);

  // Moves one chunk of records; returns its bytes, 0 if there is nothing to do. Takes the write mutex.
  size_t compact(size_t most_records);
  size_t compact_quietly(size_t most_records) noexcept;  // counts an error instead of throwing it

  // Bytes held: slabs, indexes, slot state, log buffers.
  size_t memory_bytes() const;
  size_t slab_bytes() const;
  TierReport report() const;
  uint64_t active_slabs() const { return active_slabs_; }
  TierReport counters;
  bool loading = false;  // a snapshot is loading: records without a row must not be compacted

 private:
  struct Snapshot {
    LiveSet set;
    uint8_t old_epoch;
    uint64_t cursor = 0, end = 0, written = 0;
  };

  void find_records(const UniqueKeys& unique_keys, const uint32_t* slots, FetchedRows& fetched, bool locked);
  SsdIndex::Candidates candidates(uint64_t hash) const;  // consistent, whatever a writer does
  // Looks into both indexes at one version of the shard. If the row is in DRAM it is copied to `out` and true is
  // returned. Otherwise `out` gets the initial values and `candidates` the addresses on SSD.
  bool read_dram_or_candidates(int64_t key, uint64_t hash, float* out, SsdIndex::Candidates& candidates) const;
  bool grow_slab();
  void drop_cold(uint64_t hash, RecordAddress place);
  void evict_slots(const uint32_t* slots, size_t count);
  void demote(uint32_t slot, uint64_t hash, RecordAddress place);
  void discard(uint32_t slot);
  RecordAddress append(uint32_t slot, bool alive);
  void capture_slot(uint32_t slot, bool changes);
  bool needs_capture(uint32_t slot) { return snapshot_ && slot_state_.epoch(slot) == snapshot_->old_epoch; }

  Table& table_;
  std::unique_ptr<Log> log_;
  const bool evicts_, cache_only_;
  SsdIndex index_;
  SlotState slot_state_;
  std::vector<bool> active_;  // by slab
  uint64_t active_slabs_ = 0;
  uint64_t clock_hand_ = 0;
  size_t pinned_slots_ = 0;    // slots with at least one pin
  size_t reserved_slots_ = 0;  // slots that the current batch needs
  static constexpr uint8_t kTags = 16;
  std::array<uint32_t, kTags> batches_by_tag_{};  // batches in flight, by tag; [0] stays 0
  uint8_t last_tag_ = 0;
  uint8_t epoch_ = 1;
  std::optional<Snapshot> snapshot_;
  std::vector<RecordAddress> compacting_;  // the rest of the segment that is being compacted
};

}  // namespace hotrow
