// A table's rows in DRAM: an index from key to slot, and for each slot a header and a row (embedding, then optimizer
// state).
//
// Threads: writers (create, assign, erase, Plan::update) take the table's write mutex, so there is one writer at a
// time; it parallelises its own work by shard. Readers take no lock and may run beside the writer. A reader sees a row
// either before or after an update, never a mixture (shard_index.h has the seqlock protocol).
//
// A shard allocates slots in small blocks, so that its headers are adjacent and an index rebuild touches few cache
// lines (single slots in order of arrival cost 40 ns per row and rebuild; 2-core EPYC, 10 million rows). Freed slots
// are reused first, by any shard. Slot numbers depend only on the sequence of calls, not on the number of threads. A
// call that throws changes nothing.
//
// Table and SsdTier (tiering/) are one unit in two folders: the tier is Table's friend and moves its rows.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "index/unique_keys.h"
#include "kernels/row_kernels.h"
#include "memory/budget.h"
#include "memory/line_arena.h"
#include "memory/region.h"
#include "optim/rule_kind.h"
#include "policy/admission.h"
#include "policy/expiry.h"
#include "random/initializer.h"
#include "table/changed_keys.h"
#include "threads/owner_mutex.h"
#include "tiering/ssd_tier.h"

namespace hotrow {

// One part of the optimizer state: its floats, and the value that a new row starts with.
struct StatePart {
  int width;
  float initial;
};

struct TableOptions {
  std::string name;
  int dim;
  RuleKind rule;
  std::vector<StatePart> state;
  Initial initial;
  uint64_t seed;
  // Read-only for training: rows have values only. They are read, assigned and erased, never created by a lookup or
  // changed by an update. Requires: no state.
  bool frozen = false;
  RowType type = RowType::kFloat;  // row_type.h; kByte requires frozen
  // The type that initial values are rounded to: for a read-only table, the type that it was trained in.
  RowType initial_type = RowType::kFloat;
};

// What a reader gets for a row that is only on SSD.
enum class ColdReadPolicy : int {
  kWait = 0,     // the row, read from SSD
  kInitial = 1,  // what an unseen key reads
  kDefault = 2,  // the table's default row
};

struct MemoryReport {
  uint64_t rows, slots;
  uint64_t payload_bytes;  // values and state of live rows
  uint64_t row_bytes, header_bytes, index_bytes;
  uint64_t tier_bytes;    // with a log: SSD index, slot state, buffers
  uint64_t sketch_bytes;  // with admission
  uint64_t total_bytes;
};

class Table : public BudgetMember {
 public:
  Table(TableOptions options, std::shared_ptr<Budget> budget);
  ~Table() override;

  const TableOptions& options() const { return options_; }
  int dim() const { return options_.dim; }
  int width() const { return width_; }  // words of 4 bytes in a row, state included
  // Floats of a whole row as it is read or assigned: values and state, or only values for a frozen table.
  int floats() const { return options_.dim + width_ - words_of(options_.type, options_.dim); }
  bool frozen() const { return options_.frozen; }
  uint64_t size() const { return __atomic_load_n(&live_, __ATOMIC_RELAXED); }
  uint64_t slots() const { return __atomic_load_n(&slots_, __ATOMIC_RELAXED); }
  // Increases whenever a slot may have changed its owner. Slots found before must then be looked up again.
  uint64_t erase_epoch() const { return erase_epoch_.load(std::memory_order_acquire); }
  // Increases when rows are assigned: that changes values, and no update's step tells it.
  uint64_t assign_epoch() const { return assign_epoch_.load(std::memory_order_acquire); }
  // Increases when the table is cleared. Pins and borrowed slots from before are then void.
  uint64_t generation() const { return generation_; }
  RowView view() const { return view_; }
  uint64_t count_stream() const { return count_stream_; }
  uint64_t rounding_stream() const { return rounding_stream_; }
  OwnerMutex& write_mutex() const { return write_mutex_; }

  // Attaches a log. With `evicts` the table must be empty, and DRAM becomes a cache over the log. With `cache_only`
  // too, DRAM becomes a cache over a remote store: evicted rows are discarded and the log stays empty.
  void attach(std::unique_ptr<Log> log, bool evicts, bool cache_only = false);
  SsdTier* tier() const { return tier_.get(); }

  // Keys may repeat. slots[i] is kNoSlot for a key without a row.
  void find(const int64_t* keys, size_t count, uint32_t* slots) const;
  // Finds the keys whose rows are only on SSD, without reading the disk; returns how many. A key without a row may be
  // reported too (ssd_index.h: one in thousands). flags may be null.
  size_t on_ssd(const int64_t* keys, size_t count, bool* flags) const;
  // The row that ColdReadPolicy::kDefault returns: dim floats, zeros unless set. Requires: no concurrent reader.
  const std::vector<float>& default_row() const { return default_row_; }
  void set_default_row(std::vector<float> row);
  // Reads the values (dim floats) of each key; a key without a row reads its initial values. found may be null.
  void read(const int64_t* keys, const uint64_t* hashes, size_t count, float* out, bool* found) const;
  // The same without reading the disk. For a key whose row is only on SSD (or may be, see on_ssd) the policy, which is
  // not kWait, gives the values and late[i] is set to 1. Returns how many. Requires: late is zeroed.
  size_t read_without_io(const int64_t* keys, const uint64_t* hashes, size_t count, ColdReadPolicy policy, float* out,
                         uint8_t* late) const;
  // Reads the values of the keys whose rows are in DRAM; slots[i] is where, or kNoSlot. Beside any writer.
  void read_from_dram(const int64_t* keys, const uint64_t* hashes, size_t count, float* out, uint32_t* slots) const;
  // Reads the encoded rows (width() words each) of keys in DRAM, for a GPU cache above a frozen table; found[i] tells
  // whether key i is in DRAM. Safe beside any writer. Requires: a frozen table.
  void read_encoded(const int64_t* keys, size_t count, uint32_t* out, bool* found) const;
  // Whole rows with their metadata, by slot, for export. Requires: slots are live and no writer runs.
  void read_slots(const uint32_t* slots, size_t count, float* rows, int64_t* keys, uint64_t* counts,
                  uint32_t* last_steps) const;
  void write_initial_row(int64_t key, float* row) const;     // floats() of them
  void write_initial_values(int64_t key, float* out) const;  // the first dim() floats of it

  // Looks up the slots of unique keys; returns how many have none. `find` is for some of them, on this thread.
  size_t find_unique(const UniqueKeys& unique_keys, uint32_t* slots) const;
  size_t find(const int64_t* keys, const uint64_t* hashes, size_t count, uint32_t* slots) const;

  // Creates rows in three steps, so that a batch over several tables has all its memory before it changes any table:
  // 1. plan_insert() charges the budget. 2. reserve_memory() commits the memory. 3. insert() cannot fail.
  // If step 1 or 2 throws, call recharge_budget() on every table of the batch. All three require the write mutex,
  // unique keys, and cuts that split the keys into ranges of which no two share a shard (UniqueKeys::cuts).
  struct InsertPlan {
    std::vector<uint32_t> at;     // indexes of the keys that have no slot
    std::vector<uint32_t> from;   // for each: its number in FetchedRows, kFresh or kRejected; empty: all kFresh
    std::vector<size_t> cuts;     // where each range begins in `at`
    std::vector<uint32_t> more;   // new rows by shard, so that a full shard grows only once
    std::vector<uint64_t> first;  // by range, its first new slot; empty: freed slots are enough
    uint64_t slots_after = 0;
    size_t index_lines = 0;  // for the shards that grow
  };
  static constexpr uint32_t kFresh = 0xffffffffu, kRejected = 0xfffffffeu;
  InsertPlan plan_insert(const uint64_t* hashes, const uint32_t* slots, const std::vector<size_t>& cuts,
                         const FetchedRows* fetched = nullptr, const Admission::Decision* decisions = nullptr);
  void reserve_memory(const InsertPlan& inserts);
  void insert(InsertPlan inserts, const int64_t* keys, const uint64_t* hashes, uint32_t* slots,
              const FetchedRows* fetched = nullptr);
  void recharge_budget();  // charges the budget with what is really held

  // Keys may repeat; unseen keys get their initial row. slots may be null. Takes the write mutex.
  void find_or_create(const int64_t* keys, size_t count, uint32_t* slots);
  // Throws for a frozen table. `what` completes the error text: the operation that needs training.
  void require_trainable(const char* what) const;
  // Sets rows and creates the missing ones. rows is [count, row_floats]; row_floats is dim() or floats(). counts and
  // last_steps may be null. Takes the write mutex. Requires: keys are unique.
  void assign(const int64_t* keys, size_t count, const float* rows, int row_floats, const uint64_t* counts,
              const uint32_t* last_steps);
  // Returns how many rows were erased. Takes the write mutex.
  uint64_t erase(const int64_t* keys, size_t count);

  // Admission and expiry (policy/). Set before training.
  void set_admission(const AdmissionOptions& options);
  Admission* admission() const { return admission_.get(); }
  // Whether the row has expired. An expired row reads as new in every tier.
  bool expired(uint64_t hash, const RecordHead& head, const char* row) const {
    return expiry_.is_expired(shard_of(hash), step_of(head.stamp), decode_count(head.count), values_of(row));
  }
  // Removes expired rows: those in DRAM now, those on SSD when they are next read. Returns how many were removed now.
  // `rows_on_other_ranks` is the sum of the other ranks' count_surviving(): the cap on rows covers all ranks.
  uint64_t sweep(const SweepRules& rules, uint64_t rows_on_other_ranks = 0);
  // How many rows this sweep would keep if there were no cap.
  uint64_t count_surviving(const SweepRules& rules);
  // Returns slots that were borrowed for keys without a row. Requires: the write mutex.
  void free_slots(const std::vector<uint32_t>& slots) { free_.insert(free_.end(), slots.begin(), slots.end()); }
  const Expiry& expiry() const { return expiry_; }

  // Reads rows of these keys from SSD into DRAM, without the mutex while it reads. Changes no result, only where the
  // next fetch finds the rows. Any thread. Returns how many rows it moved.
  size_t prefetch(const int64_t* keys, size_t count);
  // The same for a batch's unique keys. With a tag (SsdTier::acquire_protect_tag), every row that is in DRAM afterwards
  // is protected for the batch. A row that was changed, erased, expired or evicted in the meantime is left as it is.
  struct Promoted {
    size_t rows = 0;
    bool out_of_slots = false;
  };
  Promoted promote(const UniqueKeys& unique_keys, uint8_t tag = 0);
  // Raises the heat of these keys' rows in DRAM, so that they are evicted later. Takes the write mutex.
  void mark_used(const int64_t* keys, size_t count);
  // Removes every row, on SSD too. Requires: no reader and no plan with slots.
  void clear();

  // --- rows in HBM (device/row_staging.h): their slots are pinned (Plan::pin_for_device) and stale meanwhile ---
  void unpin_from_device(const uint32_t* slots, size_t count);  // skips kNoSlot
  // Whether each slot still has a row; a sweep may have removed it.
  void slots_occupied(const uint32_t* slots, size_t count, bool* alive) const;
  // The rows' memory: slot i is permanently at data + i * row_bytes. `bytes` are in use now.
  struct RowMemory {
    char* data;
    size_t bytes, row_bytes;
  };
  RowMemory row_memory() const { return {rows_.data(), rows_.committed(), view_.row_bytes}; }

  // --- change tracking (changed_keys.h), for publications ---
  // From now on keys of changed rows are recorded. With `all`, existing rows count as changed.
  void start_tracking_changes(bool all);
  void stop_tracking_changes();
  // Keys changed, created or removed since the last call, ascending. Requires: rows in HBM were written back.
  std::vector<int64_t> take_changes();
  // Records the rows in these slots; skips kNoSlot. Requires: the write mutex.
  bool tracks_changes() const { return changes_.on(); }
  void track_changed(const uint32_t* slots, size_t count);

  // Live slots in ascending order from `start`, at most `most`. Returns the slot to continue from, or slots() at the
  // end.
  uint64_t scan(uint64_t start, size_t most, std::vector<uint32_t>& live) const;
  // Whole rows of one shard that are only on SSD, without expired ones. Requires: no writer runs.
  void scan_cold(uint32_t shard, std::vector<RecordHead>& heads, std::vector<float>& rows) const;

  // --- snapshots: begin at a step boundary (short), then finish on any thread while training goes on ---
  void begin_snapshot();
  struct SnapshotStats {
    uint64_t rows, rows_written, bytes_written, bytes_copied;
  };
  SnapshotStats finish_snapshot(const std::string& folder, const std::string& previous);
  void abandon_snapshot();
  // A string of the caller that is saved with a snapshot.
  const std::string& user_state() const { return user_state_; }
  void set_user_state(std::string user_state) { user_state_ = std::move(user_state); }
  // Loads a snapshot. Requires: the table is empty.
  void load_snapshot(const std::string& folder);
  // Loads only the rest of a snapshot (sketch, cutoffs, user state), for a table that got the rows in another way. None
  // of it depends on the table's name. With `begin` and `end`, only those shards' part of sketch and caps.
  void load_state(const std::string& folder, uint32_t begin = 0, uint32_t end = kShards);
  MemoryReport memory() const;

  size_t reclaimable() const override;
  bool release_some_memory() override;

 private:
  friend class SsdTier;
  [[noreturn]] void throw_budget_exceeded(uint64_t rows, size_t bytes) const;
  void create(const UniqueKeys& unique_keys, uint32_t* slots);
  void plan_slots(InsertPlan& inserts, const uint64_t* hashes) const;
  void take_slots(const InsertPlan& inserts, const uint64_t* hashes, uint32_t* slots);
  size_t memory_bytes() const;
  size_t bulk_part() const;
  void clear_index();
  void create_in_parts(const int64_t* keys, size_t count, uint32_t* slots);
  void create_some(const int64_t* keys, size_t count, uint32_t* slots);
  size_t read_chunk(const int64_t* keys, const uint64_t* hashes, size_t count, ColdReadPolicy policy, float* out,
                    bool* found, uint8_t* late) const;
  void store_row(char* row, const float* values, int floats) const;
  void load_row(const char* row, float* out) const;
  RowValues values_of(const char* row) const { return {row, options_.dim, options_.type}; }
  void erase_slot(uint64_t hash, uint32_t slot);
  uint64_t erase_expired_in_dram();
  uint64_t drop_expired_cold();
  using LastStepsByShard = std::vector<std::vector<uint32_t>>;
  LastStepsByShard surviving_steps() const;
  void cap_rows(uint64_t max_rows, uint64_t rows_on_other_ranks);
  void write_state(const std::string& folder, const std::vector<char>& state) const;
  std::vector<char> save_state() const;
  void store_initial(int64_t key, char* row) const;

  const TableOptions options_;
  const int width_;
  const uint64_t initial_stream_, count_stream_, rounding_stream_;
  std::shared_ptr<Budget> budget_;
  Region rows_;
  Region headers_;
  LineArena index_memory_;
  std::vector<ShardIndex> shards_;
  RowView view_;
  // The rows that assign() sets: a new row holds them before a reader can find it. Guarded by write_mutex_.
  struct AssignedRows {
    const UniqueKeys& unique_keys;
    const float* rows;
    int floats;
    const float* of(size_t unique) const {
      return rows + size_t{unique_keys.run()[unique_keys.run_begin()[unique]]} * static_cast<size_t>(floats);
    }
  };
  const AssignedRows* assigned_ = nullptr;
  mutable OwnerMutex write_mutex_;
  struct SlotBlock {
    uint32_t next = 0, end = 0;
  };
  std::vector<SlotBlock> blocks_;  // by shard: its allocated, unused slots
  std::vector<uint32_t> free_;     // slots of erased rows, used last in first out
  uint64_t slots_ = 0, live_ = 0;
  size_t charged_ = 0;         // bytes charged to the budget
  size_t promised_slots_ = 0;  // free slots that a batch between plan_insert and insert will take
  std::atomic<uint64_t> erase_epoch_{0}, assign_epoch_{0};
  uint64_t generation_ = 0;
  std::unique_ptr<SsdTier> tier_;
  std::unique_ptr<Admission> admission_;
  Expiry expiry_;
  ChangedKeys changes_;
  std::vector<char> snapshot_state_;
  std::string user_state_;
  std::vector<float> default_row_;
};

}  // namespace hotrow
