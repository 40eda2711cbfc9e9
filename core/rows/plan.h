// One batch's way through the rows of several tables, in the order of the training stages:
//
//   route    deduplicate the keys of each table (all its features together)
//   prefetch (may be left out) bring those on SSD up and keep them there; creates, admits and counts nothing
//   fetch    find their slots, creating rows for unseen keys
//   gather   pool rows into the features' outputs
//   update   sum each row's gradients in batch order and apply the optimizer's rule in place; count the sightings
//
// or, for evaluation and serving, route, read (copies of the rows, taken without a lock; nothing is created or
// counted; rows on SSD may be answered by a policy instead of waited for), gather. A plan keeps its memory, so use one
// again and again. It copies what it needs of the batch, never the keys' owner: after route the caller's arrays may go.
// One thread at a time per plan; the work inside is spread over the pool, first over tables, then over the partitions
// of a large one.
//
// Batches may be fetched ahead: route and prefetch of a later one run on another thread while an earlier one is
// gathered and updated. Nothing of that can be observed, because prefetch moves rows from SSD to DRAM as they are and
// asks for them to be kept; whoever reads, changes, expires or saves rows does so as if it had not happened. What it
// missed (no room, or none left for another batch whose turn came first) fetch reads itself.
//
// Where rows are spread over processes, two plans serve a batch. One has the batch: route, deal (its unique keys by
// owner), take_rows (what the owners sent), gather, sum (its gradients, by unique key). One has the keys that others
// asked for, a feature for each process with `seen`: route, fetch or read, gather, update.
#pragma once

#include <deque>
#include <vector>

#include "memory/buffer.h"
#include "rows/grouping.h"
#include "rows/kernels.h"
#include "rows/table.h"

namespace hotrow {

struct FeatureInput {
  const int64_t* keys;
  size_t count;
  const int64_t* offsets;  // null: one id per bag
  size_t bags;
  const float* weights;  // null: all one
  Pooling pooling;
  const uint32_t* seen = nullptr;  // how often each key was seen, where the caller has taken duplicates out; null: once
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

// What one table's optimizer does at this step.
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

class Plan {
 public:
  Plan() = default;
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Throws std::invalid_argument for offsets that do not fit; the plan is then empty.
  void route(const std::vector<JobInput>& jobs);
  // Rows of the batch's keys: found in DRAM, read from SSD, or new. Until release (or the update, or the next route)
  // none of them leaves its slot. A key that admission refuses gets a slot with its initial row for this batch alone.
  // `step` is the update this batch will be part of.
  void fetch(uint32_t step = 0);
  // Rows of the batch's keys come up from SSD and are kept until fetch or release, as far as DRAM has room for them.
  // Beside any other thread that uses the tables; reads without a lock.
  struct Prefetched {
    size_t rows = 0, bytes = 0;  // that came up
    bool short_of_room = false;  // some stayed below: what batches hold and wait for leaves no slot for them
  };
  Prefetched prefetch();
  // Rows that prefetch was to have brought and fetch had to read after all.
  size_t late() const;
  void release();
  // Copies of the rows as they are. Those on SSD alone are waited for, or answered by a policy without touching the
  // disk (Table::read_warm); returns how many ids were so answered.
  size_t read(Cold policy = Cold::kWait);
  // After read: how many such ids each example (bag) has, over all features. All features have so many bags.
  void count_late(uint32_t* counts, size_t examples) const;
  // One matrix per feature, in the order given to route; one without data is passed over. For Pooling::kNone, one row
  // per id.
  void gather(const std::vector<Matrix>& outputs);
  // One matrix per feature; a null one had no gradient. `checked` are the matrices to test for NaN and infinity first
  // (usually one that holds all gradients). Nothing is changed if it throws.
  // Where `present` has an array for a feature, ids with a 0 there had no gradient.
  void update(const std::vector<Matrix>& gradients, const std::vector<Matrix>& checked, const UpdateOptions& options,
              const std::vector<const uint8_t*>& present = {});

  // --- for rows that other processes own ---
  // Deals the unique keys out by owner: owner_of has a number below `world` for each of the 1,024 shards. counts[r *
  // jobs + j] is how many of table j go to process r. What is sent lies in that order, process by process, table by
  // table, unique keys in order.
  void deal(const uint32_t* owner_of, size_t world, int64_t* counts);
  // The keys so dealt, and how often the batch has each.
  void dealt(int64_t* keys, uint32_t* seen) const;
  // Rows of all dealt keys, dim floats each, without gaps; gather() takes them from there, so they must stay.
  void take_rows(const float* rows);
  struct Summed {
    bool finite, whole;
  };
  // The sum of each dealt key's gradients in batch order, laid out as for take_rows. present[i] is 0 where dealt key i
  // had none (then it is not `whole`). Where a gradient is NaN or infinite it is not `finite`, and sums mean nothing.
  Summed sum(const std::vector<Matrix>& gradients, const std::vector<Matrix>& checked, float* out, uint8_t* present);

  // --- for rows that go on to a GPU (device_rows.h): one position per key, in the order given to route ---
  // Slot, step and count code of every position, all tables' one after another. Where admission refused, the slot is
  // lent until release and the step is 2^32 - 1.
  void places(uint32_t* slots, uint32_t* steps, uint32_t* counts) const;
  // Rows stay in their slots beyond release, until Table::unhold. Tables whose rows never leave DRAM need none.
  void hold();
  // The batch's update has landed elsewhere: note what admission refused, and let go.
  void commit();

  size_t ids() const;
  size_t unique() const;
  size_t bytes() const;
  // Unique keys of a job with the number of times each occurs; for tests and tools.
  const Grouping& grouping(size_t job) const { return jobs_[job].grouping; }
  size_t jobs() const { return job_count_; }

 private:
  struct Feature {
    size_t begin, count, bags;  // its positions in the job
    Pooling pooling;
    bool has_offsets, has_weights, has_seen;
    Buffer<uint32_t> offsets;
    Buffer<float> weights;
    Buffer<uint32_t> bag;  // of each position; for update
    Buffer<float> scale;   // of each position's gradient; for update
    Buffer<uint32_t> seen;
    bool has_scale = false;
  };
  struct Job {
    std::shared_ptr<Table> table;
    std::deque<Feature> features;
    size_t feature_count = 0;
    Grouping grouping;
    Buffer<uint32_t> slots;
    Buffer<float> copies;       // [unique, dim], by read()
    Buffer<uint8_t> late_keys;  // by unique key, whether a policy answered; by read()
    bool any_late = false;
    uint64_t epoch = 0, generation = 0;
    Arrivals arrivals;
    std::vector<Admission::Verdict> verdicts;  // empty: all admitted
    std::vector<uint32_t> refused;             // unique keys; the update notes their sightings
    std::vector<uint32_t> lent;                // slots of refused keys, of a table without a tier
    uint8_t tag = 0;                           // prefetch keeps rows for this batch; 0: none
    uint64_t tag_generation = 0;
    size_t late = 0;
    bool held = false;                 // slots are pinned
    bool current = false;              // slots were found and not let go since
    Buffer<uint32_t> places, offsets;  // of each unique key: among the dealt keys, and its row in floats
    Buffer<uint32_t> seen;             // of each unique key; for update
  };
  enum class State { kEmpty, kRouted, kFetched, kRead };
  using Sources = std::vector<std::vector<GradSource>>;

  static void take(Feature& feature, const FeatureInput& input);
  static void spread_bags(Feature& feature);
  Sources sources_of(const std::vector<Matrix>& gradients, const std::vector<const uint8_t*>& present);
  template <class Fn>
  void run_over_partitions(Fn fn);
  std::vector<std::unique_lock<Writer>> lock_tables();
  void find_and_create();
  void judge(Job& job);
  static uint32_t sightings(const Job& job, size_t unique);
  void note_refused(Job& job);
  static void note_changed(Job& job);
  void let_go(Job& job);
  void end_waiting(Job& job);
  bool lost() const;
  bool stale() const;
  void require(bool condition, const char* what) const;

  std::deque<Job> jobs_;
  size_t job_count_ = 0;
  size_t feature_count_ = 0;
  State state_ = State::kEmpty;
  uint32_t step_ = 0;
  const float* taken_ = nullptr;  // rows that other processes sent, in the state kRead
  bool dealt_ = false;
};

}  // namespace hotrow
