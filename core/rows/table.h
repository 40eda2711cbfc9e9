// A table's rows in DRAM: key -> slot, a slot's header, a slot's values (embedding first, optimizer state behind it).
//
// Threads: calls that write (create, assign, erase, and a Plan's update) take the table's writer lock, so there is one
// writer at a time, which spreads its own work over the pool by shard. Reads take no lock and may run beside it: a
// reader sees each row whole, as it was before or after an update, never a mixture (shard_index.h has the protocol).
//
// A shard takes its slots in small blocks, so that its headers lie together and its index is rebuilt from few cache
// lines (single slots in order of arrival: 40 ns a row and rebuild, on a 2-core EPYC at 10 million rows). Slots that
// were freed go to whoever comes first. Who gets which slot follows from the calls alone, for any thread count. Nothing
// is changed by a call that throws.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "memory/budget.h"
#include "memory/line_arena.h"
#include "memory/region.h"
#include "optim/rules_kind.h"
#include "random/initial.h"
#include "rows/changed_keys.h"
#include "rows/cold_tier.h"
#include "rows/expiry.h"
#include "rows/grouping.h"
#include "rows/kernels.h"
#include "threads/writer.h"

namespace hotrow {

// One part of a row's optimizer state: how many floats, and what a new row starts with.
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
  // Rows are values alone: they are read, assigned and erased, never created by being asked for or updated. Requires:
  // no state.
  bool frozen = false;
  RowType type = RowType::kFloat;  // row_type.h; kByte only where frozen
  // What a new row's values are rounded to: where rows are only read, the type they were trained in.
  RowType drawn = RowType::kFloat;
};

// What a reader gets of a row that is on SSD alone.
enum class Cold : int {
  kWait = 0,     // the row, read from SSD
  kInitial = 1,  // what an unseen key reads
  kDefault = 2,  // the table's default row
};

struct MemoryReport {
  uint64_t rows, slots;
  uint64_t payload_bytes;  // values of live rows: what the user asked to keep
  uint64_t row_bytes, header_bytes, index_bytes;
  uint64_t tier_bytes;    // with a log: the cold index, marks, buffers
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
  // Floats of a whole row that is read or assigned: values and state, or the values alone of a frozen table.
  int floats() const { return options_.dim + width_ - words_of(options_.type, options_.dim); }
  bool frozen() const { return options_.frozen; }
  uint64_t size() const { return __atomic_load_n(&live_, __ATOMIC_RELAXED); }
  uint64_t slots() const { return __atomic_load_n(&slots_, __ATOMIC_RELAXED); }
  // Rises whenever a slot may have changed its owner; slots found before are then to be found again.
  uint64_t erase_epoch() const { return erase_epoch_.load(std::memory_order_acquire); }
  // Rises when the table is cleared; pins and lent slots of before are then nobody's.
  uint64_t generation() const { return generation_; }
  RowView view() const { return view_; }
  uint64_t count_stream() const { return count_stream_; }
  uint64_t rounding_stream() const { return rounding_stream_; }
  Writer& writer() const { return writer_; }

  // Puts a log below the rows. With `evicts` the table must be empty, and DRAM becomes a cache over the log; with
  // `drops` too, a cache over something elsewhere: rows that leave are forgotten, and the log stays empty.
  void attach(std::unique_ptr<Log> log, bool evicts, bool drops = false);
  ColdTier* tier() const { return tier_.get(); }

  // Any keys, duplicates too. slots[i] is kNoSlot for a key that has no row.
  void find(const int64_t* keys, size_t count, uint32_t* slots) const;
  // Which keys have their rows on SSD alone, without touching the disk; returns how many. A key without a row may be
  // taken for one of them (cold_index.h: one in thousands). cold may be null.
  size_t cold(const int64_t* keys, size_t count, bool* cold) const;
  // What Cold::kDefault reads: dim floats, zeros unless set. Requires: no reader.
  const std::vector<float>& default_row() const { return default_row_; }
  void set_default_row(std::vector<float> row);
  // Values (dim floats) of each key; a key without a row reads its initial values. found may be null.
  void read(const int64_t* keys, const uint64_t* hashes, size_t count, float* out, bool* found) const;
  // The same without waiting for the disk: a key whose row is on SSD alone (or may be, as for `cold`) is answered by
  // the policy, which is not kWait, and has late[i] set, which was 0. Returns how many.
  size_t read_warm(const int64_t* keys, const uint64_t* hashes, size_t count, Cold policy, float* out,
                   uint8_t* late) const;
  // Rows as they are, width() words each, of keys that are in DRAM (found[i]); for a GPU above a frozen table. Beside
  // any writer. Requires: a frozen table.
  void read_raw(const int64_t* keys, size_t count, uint32_t* out, bool* found) const;
  // Whole rows with their metadata, by slot; for export. Requires: slots are live and no writer runs.
  void read_slots(const uint32_t* slots, size_t count, float* rows, int64_t* keys, uint64_t* counts,
                  uint32_t* last_steps) const;
  void write_initial_row(int64_t key, float* row) const;     // floats() of it
  void write_initial_values(int64_t key, float* out) const;  // the first dim() of them

  // Slots of a grouping's keys; returns how many have none.
  size_t find_unique(const Grouping& grouping, uint32_t* slots) const;

  // Creation in three steps, so that a batch over several tables has all its memory before it changes anything: prepare
  // takes it from the budget, commit from the system, insert cannot fail. If one throws, call settle on every table.
  // All require the writer lock, unique keys, and cuts that split them into ranges of which no two share a shard
  // (Grouping's).
  struct Fresh {
    std::vector<uint32_t> at;     // places of the keys that have no slot
    std::vector<uint32_t> from;   // of each: its number among the arrivals, kFresh, or kRefused; empty: all kFresh
    std::vector<size_t> cuts;     // of `at`, by the ranges given
    std::vector<uint32_t> more;   // new rows by shard, so that a full shard grows once for all of them
    std::vector<uint64_t> first;  // by range, where its new slots begin; empty: freed ones are enough
    uint64_t slots_after = 0;
    size_t index_lines = 0;  // for the shards that grow
  };
  static constexpr uint32_t kFresh = 0xffffffffu, kRefused = 0xfffffffeu;
  Fresh prepare(const uint64_t* hashes, const uint32_t* slots, const std::vector<size_t>& cuts,
                const Arrivals* arrivals = nullptr, const Admission::Verdict* verdicts = nullptr);
  void commit(const Fresh& fresh);
  void insert(Fresh fresh, const int64_t* keys, const uint64_t* hashes, uint32_t* slots,
              const Arrivals* arrivals = nullptr);
  void settle();  // bring what is charged to the budget to what is really held

  // Any keys, duplicates too; unseen ones get their initial row. slots may be null. Takes the writer lock.
  void find_or_create(const int64_t* keys, size_t count, uint32_t* slots);
  // Throws for a frozen table. `what` is what was to be done to it.
  void refuse_if_frozen(const char* what) const;
  // Sets rows, creating those that are missing. rows is [count, row_floats] with row_floats either dim() or floats().
  // counts and last_steps may be null. Takes the writer lock. Requires: keys unique.
  void assign(const int64_t* keys, size_t count, const float* rows, int row_floats, const uint64_t* counts,
              const uint32_t* last_steps);
  // Returns how many rows there were to erase. Takes the writer lock.
  uint64_t erase(const int64_t* keys, size_t count);

  // Admission and expiry (expiry.h). Set before training.
  void set_admission(const AdmissionOptions& options);
  Admission* admission() const { return admission_.get(); }
  // Whether the last sweep would have removed this row. A row of which this is true reads as new wherever it is.
  bool expired(uint64_t hash, const RecordHead& head, const char* row) const {
    return expiry_.removes(shard_of(hash), step_of(head.stamp), decode_count(head.count), values_of(row));
  }
  // Removes what the rules say, now and, on SSD, when it is met. Returns how many rows left at once.
  // `elsewhere` is how many rows that stay (`staying`) other processes have of this table: the cap is for all.
  uint64_t sweep(const SweepRules& rules, uint64_t elsewhere = 0);
  // How many rows no rule but the cap would remove at this sweep.
  uint64_t staying(const SweepRules& rules);
  // Slots that were lent to keys without a row. Requires: the writer lock.
  void take_back(const std::vector<uint32_t>& slots) { free_.insert(free_.end(), slots.begin(), slots.end()); }
  const Expiry& expiry() const { return expiry_; }

  // Brings rows of these keys up from SSD, as far as they are there: reads without the lock, then puts them into slots.
  // Changes no result, only what the next fetch finds in DRAM. Any thread. Returns how many came.
  size_t prefetch(const int64_t* keys, size_t count);
  // The same for a batch's unique keys. With a tag (ColdTier::begin_waiting), every row that is in DRAM afterwards is
  // kept for the batch. A row that was changed, erased, expired or evicted meanwhile is as it would be without this
  // call.
  struct Brought {
    size_t rows = 0;
    bool short_of_room = false;
  };
  Brought bring(const Grouping& grouping, uint8_t tag = 0);
  // Rows of these keys were used: as far as they are in DRAM, they leave it later. Takes the writer lock.
  void warm(const int64_t* keys, size_t count);
  // Removes every row, on SSD too. Requires: no reader, no plan that holds slots.
  void clear();

  // --- rows that are on a GPU (device_rows.h): their slots here are held (Plan::hold) and out of date meanwhile ---
  void unhold(const uint32_t* slots, size_t count);  // kNoSlot is passed over
  // Whether each slot holds a row: a sweep may have removed it.
  void alive(const uint32_t* slots, size_t count, bool* alive) const;
  // Where rows lie: slot i at data + i * row_bytes, for ever; `bytes` of it are in use now.
  struct RowMemory {
    char* data;
    size_t bytes, row_bytes;
  };
  RowMemory row_memory() const { return {rows_.data(), rows_.committed(), view_.row_bytes}; }

  // --- what changed (changed_keys.h): for publications ---
  // From now on the keys of changed rows are noted. With `all`, rows that are there now count as changed.
  void begin_changes(bool all);
  void end_changes();
  // Keys that were changed, created or removed since the last call, rising. Requires: rows on a GPU were brought down.
  std::vector<int64_t> take_changes();
  // Notes the rows in these slots. Requires: the writer lock. Slots of kNoSlot are passed over.
  bool notes_changes() const { return changes_.on(); }
  void note_changed(const uint32_t* slots, size_t count);

  // Live slots in rising order from `start`, at most `most`; returns the slot to go on from, or slots() at the end.
  uint64_t scan(uint64_t start, size_t most, std::vector<uint32_t>& live) const;
  // Whole rows of one shard that are on SSD alone, expired ones left out. Requires: no writer runs.
  void scan_cold(uint32_t shard, std::vector<RecordHead>& heads, std::vector<float>& rows) const;

  // --- snapshots: begin at a step boundary (short), then finish from any thread while training goes on ---
  void begin_snapshot();
  struct SnapshotStats {
    uint64_t rows, rows_written, bytes_written, bytes_copied;
  };
  SnapshotStats finish_snapshot(const std::string& folder, const std::string& previous);
  void abandon_snapshot();
  // A few words of the caller's that are part of a snapshot.
  const std::string& notes() const { return notes_; }
  void set_notes(std::string notes) { notes_ = std::move(notes); }
  // The table's rows become the snapshot's. Requires: the table is empty.
  void load_snapshot(const std::string& folder);
  // The rest of it alone (sketch, cutoffs, notes), for a table that has got the rows in another way. None of it depends
  // on the table's name. With `begin` and `end` only those shards' part of sketch and caps.
  void load_state(const std::string& folder, uint32_t begin = 0, uint32_t end = kShards);
  MemoryReport memory() const;

  size_t reclaimable() const override;
  bool give_back_some() override;

 private:
  friend class ColdTier;
  [[noreturn]] void refuse(uint64_t rows, size_t bytes) const;
  void create(const Grouping& grouping, uint32_t* slots);
  void plan_slots(Fresh& fresh, const uint64_t* hashes) const;
  void take_slots(const Fresh& fresh, const uint64_t* hashes, uint32_t* slots);
  size_t holds() const;
  size_t bulk_part() const;
  void clear_index();
  void create_in_parts(const int64_t* keys, size_t count, uint32_t* slots);
  void create_some(const int64_t* keys, size_t count, uint32_t* slots);
  size_t read_chunk(const int64_t* keys, const uint64_t* hashes, size_t count, Cold policy, float* out, bool* found,
                    uint8_t* late) const;
  void store_row(char* row, const float* values, int floats) const;
  void load_row(const char* row, float* out) const;
  RowValues values_of(const char* row) const { return {row, options_.dim, options_.type}; }
  void erase_slot(uint64_t hash, uint32_t slot);
  uint64_t erase_expired();
  uint64_t drop_expired_cold();
  using StepsByShard = std::vector<std::vector<uint32_t>>;
  StepsByShard steps_staying() const;
  void cap_rows(uint64_t max_rows, uint64_t elsewhere);
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
  // What new rows are to hold from the first moment that a reader can find them; set by assign, under writer_.
  struct Given {
    const Grouping& grouping;
    const float* rows;
    int floats;
    const float* of(size_t unique) const {
      return rows + size_t{grouping.run()[grouping.run_begin()[unique]]} * static_cast<size_t>(floats);
    }
  };
  const Given* given_ = nullptr;
  mutable Writer writer_;
  struct SlotBlock {
    uint32_t next = 0, end = 0;
  };
  std::vector<SlotBlock> blocks_;  // by shard: slots that are its own and still unused
  std::vector<uint32_t> free_;     // slots of erased rows, last freed first used
  uint64_t slots_ = 0, live_ = 0;
  size_t charged_ = 0;   // bytes taken from the budget
  size_t promised_ = 0;  // free slots that a batch between prepare and insert will take
  std::atomic<uint64_t> erase_epoch_{0};
  uint64_t generation_ = 0;
  std::unique_ptr<ColdTier> tier_;
  std::unique_ptr<Admission> admission_;
  Expiry expiry_;
  ChangedKeys changes_;
  std::vector<char> snapshot_state_;
  std::string notes_;
  std::vector<float> default_row_;
};

}  // namespace hotrow
