// Plan: one batch's path through the rows of several tables, in the order of the training stages.
//
//   route     deduplicates the keys of each table, over all its features
//   prefetch  (optional) reads rows from SSD into DRAM and protects them; creates, admits and counts nothing
//   fetch     finds each key's slot and creates rows for unseen keys
//   gather    pools rows into the features' output matrices
//   update    sums each row's gradients in batch order, applies the optimizer's rule in place, updates the counts
//
// Evaluation and serving call route, read, gather. read() copies rows without a lock, creates and counts nothing, and
// can answer rows on SSD by a policy instead of waiting.
//
// A plan reuses its memory, so keep it for many batches. route() copies what it needs; the caller may free its arrays
// afterwards. One thread at a time per plan. The work inside is spread over the thread pool, by table and then by
// partition of a large table.
//
// Lookahead: route and prefetch of a later batch may run on another thread while an earlier batch is gathered and
// updated. This never changes a result: prefetch moves rows unchanged and protects them, and every reader, update,
// sweep and snapshot treats them as if they were still on SSD. fetch() reads what prefetch could not bring.
//
// Rows sharded over processes need two plans per batch. The requesting process calls route, partition_by_owner,
// set_received_rows, gather, sum_gradients. The owning process gets one feature per requester, each key with its number
// of occurrences, and calls route, fetch or read, gather, update.
#pragma once

#include <deque>
#include <vector>

#include "index/unique_keys.h"
#include "kernels/row_kernels.h"
#include "memory/buffer.h"
#include "table/table.h"

namespace hotrow {

struct FeatureInput {
  const int64_t* keys;
  size_t count;
  const int64_t* offsets;  // null: one id per bag
  size_t bags;
  const float* weights;  // null: all one
  Pooling pooling;
  const uint32_t* occurrences = nullptr;  // occurrences of each key, if the caller removed duplicates; null: once
};

struct JobInput {
  std::shared_ptr<Table> table;
  std::vector<FeatureInput> features;
};

// A matrix of floats: row i at data + i * stride.
struct Matrix {
  float* data = nullptr;
  size_t rows = 0, columns = 0, stride = 0;
};

// The optimizer's arguments for one table at this step.
struct JobUpdate {
  std::vector<float> coefficients;
  float clip_value = 0, clip_norm = 0;  // 0: off
};

struct UpdateOptions {
  std::vector<JobUpdate> jobs;
  uint32_t step = 0;
  float grad_scale = 1;
};

class GradientNotFinite : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class InFlightKeys;

class Plan {
 public:
  Plan() = default;
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Throws std::invalid_argument for wrong offsets; the plan is then empty.
  void route(const std::vector<JobInput>& jobs);
  // Finds the rows of the batch's keys in DRAM, reads them from SSD or creates them. They stay in their slots until
  // release (or the update, or the next route). A key that admission rejects gets a temporary slot with its initial row
  // for this batch. `step` is the update that this batch belongs to.
  void fetch(uint32_t step = 0);
  // Reads rows of the batch's keys from SSD into DRAM and protects them until fetch or release, as far as DRAM has
  // slots. May run beside any other thread that uses the tables; reads without a lock.
  struct Prefetched {
    size_t rows = 0, bytes = 0;  // moved to DRAM
    bool out_of_slots = false;   // some rows stay on SSD: pinned and protected rows leave no slots
  };
  Prefetched prefetch();
  // Rows that fetch had to read because prefetch could not.
  size_t prefetch_misses() const;
  void release();
  // Copies the rows. Rows that are only on SSD are read, or answered by a policy without reading the disk
  // (Table::read_without_io). Returns how many ids the policy answered.
  size_t read(ColdReadPolicy policy = ColdReadPolicy::kWait);
  // After read: the number of ids of each example (bag) that the policy answered, over all features. Every feature must
  // have that many bags.
  void count_late(uint32_t* counts, size_t examples) const;
  // One matrix per feature, in the order given to route; one without data is skipped. For Pooling::kNone, one row per
  // id.
  void gather(const std::vector<Matrix>& outputs);
  // One matrix per feature; null: the feature had no gradient. `checked` are the matrices to test for NaN and infinity
  // first (usually one that holds all gradients). If it throws, nothing was changed. If `present` has an array for a
  // feature, ids with a 0 there had no gradient.
  void update(const std::vector<Matrix>& gradients, const std::vector<Matrix>& checked, const UpdateOptions& options,
              const std::vector<const uint8_t*>& present = {});

  // --- rows that other processes own ---
  // Orders the unique keys by owner. owner_of has a number below `world` for each of the 1,024 shards. counts[r * jobs
  // + j] is the number of keys of table j that process r owns. Order: by process, then by table, then as in the unique
  // keys.
  void partition_by_owner(const uint32_t* owner_of, size_t world, int64_t* counts);
  // The keys in that order, and each key's occurrences in the batch.
  void partitioned_keys(int64_t* keys, uint32_t* occurrences) const;
  // The rows of all partitioned keys, dim floats each, contiguous. gather() reads them, so the caller must keep them.
  void set_received_rows(const float* rows);
  struct SumResult {
    bool finite, all_present;
  };
  // The sum of each partitioned key's gradients in batch order, in the layout of set_received_rows. present[i] is 0
  // where key i had no gradient (then all_present is false). If a gradient is NaN or infinite, finite is false and the
  // sums are undefined.
  SumResult sum_gradients(const std::vector<Matrix>& gradients, const std::vector<Matrix>& checked, float* out,
                          uint8_t* present);

  // --- rows that go to their requesters ahead of the batch's turn (plan_ahead.cpp): one feature for each requester ---
  // After route: notes the batch's keys under number `batch`. Batches up to `done` are no longer in flight.
  void note_in_flight(InFlightKeys& keys, uint64_t batch, uint64_t done);
  // Before fetch, beside any thread that uses the tables: copies the rows in DRAM of keys that no batch after `done`
  // has. `step` is the last update that was complete before the call. The layout of `rows` is requester by requester,
  // and for each table by table; `masks` gets for each requester a bit for each of its positions, rounded up to a byte.
  // Both need room for all positions. Returns the number of floats by requester.
  std::vector<size_t> copy_ahead(uint64_t done, uint32_t step, float* rows, uint8_t* masks);
  // After fetch: copies the rows that copy_ahead did not copy, or that have changed since.
  std::vector<size_t> copy_changed(float* rows, uint8_t* masks);

  // --- rows that go on to a GPU (device/row_staging.h): one position per key, in the order given to route ---
  // Slot, step and count code of every position, tables in order. For a rejected key the slot is a temporary one, valid
  // until release(), and the step is 2^32 - 1.
  void slot_metadata(uint32_t* slots, uint32_t* steps, uint32_t* counts) const;
  // Pins the rows in their slots beyond release, until Table::unpin_from_device. Tables that never evict need no pins.
  void pin_for_device();
  // The update was applied elsewhere: counts rejected keys and releases the slots.
  void commit_device_update();

  size_t ids() const;
  size_t unique() const;
  size_t bytes() const;
  // The unique keys of a job with their positions, for tests and tools.
  const UniqueKeys& unique_keys(size_t job) const { return jobs_[job].unique_keys; }
  size_t jobs() const { return job_count_; }

 private:
  struct Feature {
    size_t begin, count, bags;  // its positions in the job
    Pooling pooling;
    bool has_offsets, has_weights, has_occurrences;
    Buffer<uint32_t> offsets;
    Buffer<float> weights;
    Buffer<uint32_t> bag;  // of each position; used by update
    Buffer<float> scale;   // of each position's gradient; used by update
    Buffer<uint32_t> occurrences;
    bool has_scale = false;
  };
  struct Job {
    std::shared_ptr<Table> table;
    std::deque<Feature> features;
    size_t feature_count = 0;
    UniqueKeys unique_keys;
    Buffer<uint32_t> slots;
    Buffer<float> copies;       // [unique, dim], filled by read()
    Buffer<uint8_t> late_keys;  // by unique key: 1 if the policy answered; filled by read()
    bool any_late = false;
    uint64_t epoch = 0, generation = 0;
    FetchedRows fetched;
    std::vector<Admission::Decision> decisions;  // empty: all admitted
    std::vector<uint32_t> rejected;              // unique keys; the update counts their occurrences
    std::vector<uint32_t> borrowed_slots;        // slots of rejected keys, in a table without a tier
    uint8_t protect_tag = 0;                     // of the rows that prefetch protected; 0: none
    uint64_t protect_tag_generation = 0;
    size_t prefetch_misses = 0;
    bool slots_pinned = false;
    bool slots_current = false;  // slots were found and not released since
    Buffer<uint32_t> partition_positions,
        offsets;  // of each unique key: its position among the partitioned keys; its row's offset in floats
    Buffer<uint32_t> occurrences;     // of each unique key; for update
    Buffer<uint64_t> previous_batch;  // of each unique key: the last batch in flight that had it
    Buffer<uint32_t> ahead_rows;      // of each unique key: its row in `copies`, or kNoSlot if it was not copied ahead
    Buffer<uint32_t> packed;          // the unique keys of the positions whose rows are sent
    Buffer<uint32_t> known_slots;     // of each unique key that was copied ahead its slot, else kNoSlot
    uint64_t assign_epoch = 0;        // of the table, when rows were copied ahead
    uint64_t known_epoch = 0;         // the table's erase epoch then: known_slots are right until it changes
  };
  enum class State { kEmpty, kRouted, kFetched, kRead };
  using Sources = std::vector<std::vector<GradSource>>;

  template <class RowsOf>
  std::vector<size_t> pack_rows(const std::vector<std::vector<uint8_t>>& selected, RowsOf rows_of, float* rows,
                                uint8_t* masks);
  static void copy_feature(Feature& feature, const FeatureInput& input);
  static void expand_bags(Feature& feature);
  Sources sources_of(const std::vector<Matrix>& gradients, const std::vector<const uint8_t*>& present);
  template <class Fn>
  void run_over_partitions(Fn fn);
  std::vector<std::unique_lock<OwnerMutex>> lock_tables();
  void find_and_create();
  size_t find_slots(Job& job);
  void decide_admission(Job& job);
  static uint32_t occurrences_of(const Job& job, size_t unique);
  static void count_occurrences(const Job& job, uint32_t* counts);
  void count_rejected(Job& job);
  static void track_changed(Job& job);
  void unpin_slots(Job& job);
  void release_protect_tag(Job& job);
  bool slots_released() const;
  bool slots_reassigned() const;
  void require(bool condition, const char* what) const;

  std::deque<Job> jobs_;
  size_t job_count_ = 0;
  size_t feature_count_ = 0;
  State state_ = State::kEmpty;
  uint32_t step_ = 0;
  const float* received_rows_ = nullptr;  // rows that other processes sent; state kRead
  bool partitioned_ = false;
  bool noted_ = false, copied_ahead_ = false;
  uint32_t ahead_step_ = 0;
};

// A requester's half of rows that are sent ahead. Rows of one table that one owner sends: `rows` of `dim` floats.
struct RowBlock {
  size_t rows, dim;
};
// How many floats the rows are whose bit is set.
size_t masked_floats(const uint8_t* mask, const std::vector<RowBlock>& blocks);
// Puts the rows whose bit is set into their places in `out`, which has all rows.
void expand_rows(const uint8_t* mask, const float* rows, const std::vector<RowBlock>& blocks, float* out);

}  // namespace hotrow
