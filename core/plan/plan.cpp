#include "plan/plan.h"

#include <algorithm>
#include <stdexcept>

#include "threads/thread_pool.h"

namespace hotrow {
namespace {

constexpr size_t kBagsPerTask = 1024;

}  // namespace

void Plan::require(bool condition, const char* what) const {
  if (!condition) throw std::invalid_argument(what);
}

// Copies a feature's shape out of the caller's arrays, checking it on the way.
void Plan::copy_feature(Feature& feature, const FeatureInput& input) {
  feature.count = input.count;
  feature.bags = input.bags;
  feature.pooling = input.pooling;
  feature.has_offsets = input.offsets != nullptr;
  feature.has_weights = input.weights != nullptr;
  feature.has_occurrences = input.occurrences != nullptr;
  feature.has_scale = false;
  if (!input.offsets && input.bags != input.count)
    throw std::invalid_argument("without offsets a feature needs exactly one id per example");
  if (input.offsets) {
    uint32_t* offsets = feature.offsets.resize(input.bags + 1);
    int64_t last = 0;
    bool fits = input.offsets[0] == 0 && input.offsets[input.bags] == static_cast<int64_t>(input.count);
    for (size_t i = 0; i <= input.bags; ++i) {
      fits &= input.offsets[i] >= last;
      last = input.offsets[i];
      offsets[i] = static_cast<uint32_t>(last);
    }
    if (!fits) throw std::invalid_argument("offsets must start at 0, never fall, and end at the number of ids");
  }
  if (input.weights) std::copy_n(input.weights, input.count, feature.weights.resize(input.count));
  if (input.occurrences) std::copy_n(input.occurrences, input.count, feature.occurrences.resize(input.count));
}

Plan::~Plan() { release(); }

void Plan::route(const std::vector<JobInput>& jobs) {
  release();
  state_ = State::kEmpty;
  received_rows_ = nullptr;
  partitioned_ = noted_ = copied_ahead_ = false;
  job_count_ = 0;
  feature_count_ = 0;
  if (jobs_.size() < jobs.size()) jobs_.resize(jobs.size());
  for (size_t j = 0; j < jobs.size(); ++j) {
    Job& job = jobs_[j];
    job.table = jobs[j].table;
    job.prefetch_misses = 0;
    job.feature_count = jobs[j].features.size();
    if (job.features.size() < job.feature_count) job.features.resize(job.feature_count);
    size_t begin = 0;
    for (size_t f = 0; f < job.feature_count; ++f) {
      job.features[f].begin = begin;
      begin += jobs[j].features[f].count;
    }
    feature_count_ += job.feature_count;
  }
  ThreadPool::shared().run(static_cast<int>(jobs.size()), [&](int j) {
    std::vector<KeySpan> spans;
    for (size_t f = 0; f < jobs[j].features.size(); ++f) {
      copy_feature(jobs_[j].features[f], jobs[j].features[f]);
      spans.push_back({jobs[j].features[f].keys, jobs[j].features[f].count});
    }
    jobs_[j].unique_keys.build(spans);
  });
  job_count_ = jobs.size();
  state_ = State::kRouted;
}

// Locks the write mutexes of all tables, always in address order, so that plans cannot deadlock.
std::vector<std::unique_lock<OwnerMutex>> Plan::lock_tables() {
  std::vector<OwnerMutex*> writers;
  for (size_t j = 0; j < job_count_; ++j) writers.push_back(&jobs_[j].table->write_mutex());
  std::sort(writers.begin(), writers.end());
  std::vector<std::unique_lock<OwnerMutex>> locks;
  for (OwnerMutex* writer : writers) locks.emplace_back(*writer);
  return locks;
}

// Requires: the table's write mutex.
void Plan::unpin_slots(Job& job) {
  const bool ours = job.generation == job.table->generation();  // otherwise clear() has released all slots
  if (job.slots_pinned && ours) job.table->tier()->unpin(job.slots.data(), job.unique_keys.size());
  if (ours) job.table->free_slots(job.borrowed_slots);
  job.slots_pinned = job.slots_current = false;
  job.borrowed_slots.clear();
}

// Requires: the table's write mutex.
void Plan::release_protect_tag(Job& job) {
  if (job.protect_tag && job.protect_tag_generation == job.table->generation())
    job.table->tier()->release_protect_tag(job.protect_tag);
  job.protect_tag = 0;
}

void Plan::release() {
  for (size_t j = 0; j < job_count_; ++j) {
    Job& job = jobs_[j];
    if (!job.slots_pinned && job.borrowed_slots.empty() && !job.protect_tag) continue;
    std::lock_guard lock(job.table->write_mutex());
    unpin_slots(job);
    release_protect_tag(job);
    // Restoring the reserve may fail when the disk does; the next fetch retries and reports it. Destructors call this.
    try {
      if (SsdTier* tier = job.table->tier(); tier && tier->evicts()) tier->restore_free_reserve();
    } catch (const std::exception&) {
      job.table->recharge_budget();
    }
  }
}

// Slots were released, so they may belong to other rows now.
bool Plan::slots_released() const {
  for (size_t j = 0; j < job_count_; ++j)
    if ((jobs_[j].table->tier() || jobs_[j].table->admission()) && !jobs_[j].slots_current) return true;
  return false;
}

// The occurrences of a unique key in the batch.
uint32_t Plan::occurrences_of(const Job& job, size_t unique) {
  const uint32_t *begin = job.unique_keys.run_begin(), *run = job.unique_keys.run();
  uint32_t total = 0;
  for (uint32_t at = begin[unique]; at < begin[unique + 1]; ++at) {
    size_t f = 0;
    while (run[at] >= job.features[f].begin + job.features[f].count) ++f;
    const Feature& feature = job.features[f];
    if (!feature.has_occurrences) return begin[unique + 1] - begin[unique];  // the same for all features
    total += feature.occurrences[run[at] - feature.begin];
  }
  return total;
}

// The same for every unique key, feature by feature.
void Plan::count_occurrences(const Job& job, uint32_t* counts) {
  const UniqueKeys& g = job.unique_keys;
  if (!job.feature_count || !job.features[0].has_occurrences) {
    for (size_t u = 0; u < g.size(); ++u) counts[u] = g.run_begin()[u + 1] - g.run_begin()[u];
    return;
  }
  std::fill_n(counts, g.size(), 0u);
  for (size_t f = 0; f < job.feature_count; ++f) {
    const Feature& feature = job.features[f];
    const uint32_t* inverse = g.inverse() + feature.begin;
    const uint32_t* occurrences = feature.occurrences.data();
    for (size_t p = 0; p < feature.count; ++p) counts[inverse[p]] += occurrences[p];
  }
}

void Plan::count_rejected(Job& job) {
  for (uint32_t u : job.rejected)
    job.table->admission()->record_rejected(job.unique_keys.hashes()[u], occurrences_of(job, u));
  job.rejected.clear();
}

// Decides which keys without a row get one.
void Plan::decide_admission(Job& job) {
  const Admission* admission = job.table->admission();
  job.decisions.clear();
  if (!admission) return;
  const UniqueKeys& g = job.unique_keys;
  job.decisions.assign(g.size(), Admission::Decision::kAdmit);
  for (size_t u = 0; u < g.size(); ++u)
    if (job.slots[u] == kNoSlot)
      job.decisions[u] = admission->decide_admission(g.keys()[u], g.hashes()[u], occurrences_of(job, u), step_);
  for (uint32_t u : job.fetched.unique) job.decisions[u] = Admission::Decision::kAdmit;
}

Plan::Prefetched Plan::prefetch() {
  require(state_ == State::kRouted, "prefetch: route first, and before fetch");
  std::vector<Prefetched> found(job_count_);
  // A separate pool: these threads mostly wait for the disk, and the shared pool has rows to compute.
  ThreadPool::io_pool().run(static_cast<int>(job_count_), [&](int j) {
    Job& job = jobs_[j];
    SsdTier* tier = job.table->tier();
    if (!tier || !tier->evicts()) return;
    {
      std::lock_guard lock(job.table->write_mutex());
      release_protect_tag(job);
      job.protect_tag = tier->acquire_protect_tag();
      job.protect_tag_generation = job.table->generation();
    }
    const Table::Promoted promoted = job.table->promote(job.unique_keys, job.protect_tag);
    found[j] = {promoted.rows, promoted.rows * tier->log().record_bytes(), promoted.out_of_slots};
  });
  Prefetched total;
  for (const Prefetched& of_table : found) {
    total.rows += of_table.rows;
    total.bytes += of_table.bytes;
    total.out_of_slots |= of_table.out_of_slots;
  }
  return total;
}

void Plan::fetch(uint32_t step) {
  require(state_ != State::kEmpty, "fetch: route first");
  for (size_t j = 0; j < job_count_; ++j) jobs_[j].table->require_trainable("its rows cannot be trained");
  step_ = step;
  auto locks = lock_tables();
  find_and_create();
  state_ = State::kFetched;
}

// Finds the slots of a job's unique keys; returns how many have none. A table without evictions and admission gives a
// row another slot only after an erasure, so the slots that copy_ahead has found are right until then.
size_t Plan::find_slots(Job& job) {
  const UniqueKeys& g = job.unique_keys;
  const Table& table = *job.table;
  uint32_t* slots = job.slots.resize(g.size());
  if (!copied_ahead_ || table.tier() || table.admission() || job.known_epoch != table.erase_epoch())
    return table.find_unique(g, slots);
  std::vector<int64_t> keys;
  std::vector<uint64_t> hashes;
  std::vector<uint32_t> rest;
  keys.reserve(g.size());
  hashes.reserve(g.size());
  rest.reserve(g.size());
  for (size_t u = 0; u < g.size(); ++u) {
    slots[u] = job.known_slots[u];
    if (slots[u] != kNoSlot) continue;
    keys.push_back(g.keys()[u]);
    hashes.push_back(g.hashes()[u]);
    rest.push_back(static_cast<uint32_t>(u));
  }
  std::vector<uint32_t> found(rest.size());
  const size_t missing = table.find(keys.data(), hashes.data(), keys.size(), found.data());
  for (size_t i = 0; i < rest.size(); ++i) slots[rest[i]] = found[i];
  return missing;
}

// Requires: the tables' write mutexes. Takes the memory for all tables before it changes any.
void Plan::find_and_create() {
  for (size_t j = 0; j < job_count_; ++j) unpin_slots(jobs_[j]);
  for (size_t j = 0; j < job_count_; ++j)
    if (SsdTier* tier = jobs_[j].table->tier(); tier && tier->evicts())
      tier->reserve_slots(jobs_[j].unique_keys.size());
  std::vector<char> missing(job_count_);
  std::vector<Table::InsertPlan> inserts(job_count_);
  std::vector<char> pinned(job_count_);
  try {
    ThreadPool::shared().run(static_cast<int>(job_count_), [&](int j) {
      Job& job = jobs_[j];
      job.epoch = job.table->erase_epoch();
      job.generation = job.table->generation();
      missing[j] = find_slots(job) > 0;
    });
    ThreadPool::shared().run(static_cast<int>(job_count_), [&](int j) {
      Job& job = jobs_[j];
      SsdTier* tier = job.table->tier();
      job.fetched.unique.clear();
      // Pin the found rows before slots are freed for the rest.
      if (tier) tier->pin_found(job.slots.data(), job.unique_keys.size());
      pinned[j] = true;
      if (tier && tier->evicts() && missing[j]) tier->fetch(job.unique_keys, job.slots.data(), job.fetched);
      if (job.protect_tag) job.prefetch_misses = job.fetched.unique.size();
      release_protect_tag(job);
      if (missing[j]) decide_admission(job);
    });
    for (size_t j = 0; j < job_count_; ++j) {
      Job& job = jobs_[j];
      if (missing[j])
        inserts[j] = job.table->plan_insert(job.unique_keys.hashes(), job.slots.data(), job.unique_keys.cuts(),
                                            &job.fetched, job.decisions.empty() ? nullptr : job.decisions.data());
    }
    for (size_t j = 0; j < job_count_; ++j) jobs_[j].table->reserve_memory(inserts[j]);
  } catch (...) {
    for (size_t j = 0; j < job_count_; ++j) {
      if (SsdTier* tier = jobs_[j].table->tier(); tier && pinned[j])
        tier->unpin_found(jobs_[j].slots.data(), jobs_[j].unique_keys.size());
      jobs_[j].table->recharge_budget();
    }
    for (size_t j = 0; j < job_count_; ++j) try {
        if (SsdTier* tier = jobs_[j].table->tier(); tier && tier->evicts()) tier->restore_free_reserve();
      } catch (...) {
        // The first error is the one to report.
      }
    throw;
  }
  ThreadPool::shared().run(static_cast<int>(job_count_), [&](int j) {
    Job& job = jobs_[j];
    const UniqueKeys& g = job.unique_keys;
    std::vector<uint32_t> at = inserts[j].at, from = inserts[j].from;
    job.rejected.clear();
    if (missing[j]) job.table->insert(std::move(inserts[j]), g.keys(), g.hashes(), job.slots.data(), &job.fetched);
    if (SsdTier* tier = job.table->tier()) {
      for (uint32_t u : at) tier->pin(&job.slots[u], 1);
      job.slots_pinned = true;
      tier->counters.hits += g.size() - at.size();
      tier->counters.misses += at.size();
      tier->counters.arrivals += job.fetched.unique.size();
    }
    for (size_t n = 0; n < from.size(); ++n) {
      if (from[n] != Table::kRejected) continue;
      job.rejected.push_back(at[n]);
      if (!job.slots_pinned) job.borrowed_slots.push_back(job.slots[at[n]]);
    }
    job.slots_current = true;
  });
  for (size_t j = 0; j < job_count_; ++j)
    if (SsdTier* tier = jobs_[j].table->tier()) tier->release_reserved_slots();
  for (size_t j = 0; j < job_count_; ++j)
    if (SsdTier* tier = jobs_[j].table->tier(); tier && tier->evicts()) tier->restore_free_reserve();
}

// Rows were erased since fetch: slots may belong to other keys now.
bool Plan::slots_reassigned() const {
  for (size_t j = 0; j < job_count_; ++j)
    if (jobs_[j].epoch != jobs_[j].table->erase_epoch()) return true;
  return false;
}

void Plan::slot_metadata(uint32_t* slots, uint32_t* steps, uint32_t* counts) const {
  require(state_ == State::kFetched, "slot_metadata: fetch first");
  size_t base = 0;
  for (size_t j = 0; j < job_count_; ++j) {
    const Job& job = jobs_[j];
    const HeaderGroup* headers = job.table->view().headers;
    const uint32_t* inverse = job.unique_keys.inverse();
    std::vector<char> rejected(job.rejected.empty() ? 0 : job.unique_keys.size());
    for (uint32_t u : job.rejected) rejected[u] = 1;
    ThreadPool::shared().run(
        static_cast<int>((job.unique_keys.positions() + kBagsPerTask - 1) / kBagsPerTask), [&](int t) {
          for (size_t p = t * kBagsPerTask, end = std::min(job.unique_keys.positions(), p + kBagsPerTask); p < end;
               ++p) {
            const uint32_t u = inverse[p], slot = job.slots[u];
            slots[base + p] = slot;
            steps[base + p] = !rejected.empty() && rejected[u] ? ~0u : step_of(headers[slot / 4].stamp[slot % 4]);
            counts[base + p] = headers[slot / 4].count[slot % 4];
          }
        });
    base += job.unique_keys.positions();
  }
}

void Plan::pin_for_device() {
  require(state_ == State::kFetched, "pin_for_device: fetch first");
  for (size_t j = 0; j < job_count_; ++j) {
    Job& job = jobs_[j];
    SsdTier* tier = job.table->tier();
    if (!tier || !tier->evicts()) continue;
    std::lock_guard lock(job.table->write_mutex());
    std::vector<char> rejected(job.unique_keys.size());
    for (uint32_t u : job.rejected) rejected[u] = 1;
    for (size_t u = 0; u < job.unique_keys.size(); ++u)
      if (!rejected[u]) tier->pin(&job.slots[u], 1);
  }
}

void Plan::commit_device_update() {
  for (size_t j = 0; j < job_count_; ++j) {
    std::lock_guard lock(jobs_[j].table->write_mutex());
    count_rejected(jobs_[j]);
  }
  release();
}

size_t Plan::ids() const {
  size_t total = 0;
  for (size_t j = 0; j < job_count_; ++j) total += jobs_[j].unique_keys.positions();
  return total;
}

size_t Plan::unique() const {
  size_t total = 0;
  for (size_t j = 0; j < job_count_; ++j) total += jobs_[j].unique_keys.size();
  return total;
}

size_t Plan::prefetch_misses() const {
  size_t total = 0;
  for (size_t j = 0; j < job_count_; ++j) total += jobs_[j].prefetch_misses;
  return total;
}

size_t Plan::bytes() const {
  size_t total = 0;
  for (const Job& job : jobs_) {
    total += job.unique_keys.bytes() + job.slots.bytes() + job.copies.bytes() + job.late_keys.bytes();
    total += job.previous_batch.bytes() + job.ahead_rows.bytes() + job.packed.bytes();
    total += job.partition_positions.bytes() + job.offsets.bytes() + job.occurrences.bytes();
    for (const Feature& f : job.features)
      total += f.offsets.bytes() + f.weights.bytes() + f.bag.bytes() + f.scale.bytes();
  }
  return total;
}

}  // namespace hotrow
