#include "rows/plan.h"

#include <algorithm>
#include <stdexcept>

#include "threads/pool.h"

namespace hotrow {
namespace {

constexpr size_t kBagsPerTask = 1024;

}  // namespace

void Plan::require(bool condition, const char* what) const {
  if (!condition) throw std::invalid_argument(what);
}

// Copies a feature's shape out of the caller's arrays, checking it on the way.
void Plan::take(Feature& feature, const FeatureInput& input) {
  feature.count = input.count;
  feature.bags = input.bags;
  feature.pooling = input.pooling;
  feature.has_offsets = input.offsets != nullptr;
  feature.has_weights = input.weights != nullptr;
  feature.has_seen = input.seen != nullptr;
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
  if (input.seen) std::copy_n(input.seen, input.count, feature.seen.resize(input.count));
}

Plan::~Plan() { release(); }

void Plan::route(const std::vector<JobInput>& jobs) {
  release();
  state_ = State::kEmpty;
  taken_ = nullptr;
  dealt_ = false;
  job_count_ = 0;
  feature_count_ = 0;
  if (jobs_.size() < jobs.size()) jobs_.resize(jobs.size());
  for (size_t j = 0; j < jobs.size(); ++j) {
    Job& job = jobs_[j];
    job.table = jobs[j].table;
    job.late = 0;
    job.feature_count = jobs[j].features.size();
    if (job.features.size() < job.feature_count) job.features.resize(job.feature_count);
    size_t begin = 0;
    for (size_t f = 0; f < job.feature_count; ++f) {
      job.features[f].begin = begin;
      begin += jobs[j].features[f].count;
    }
    feature_count_ += job.feature_count;
  }
  Pool::shared().run(static_cast<int>(jobs.size()), [&](int j) {
    std::vector<KeySpan> spans;
    for (size_t f = 0; f < jobs[j].features.size(); ++f) {
      take(jobs_[j].features[f], jobs[j].features[f]);
      spans.push_back({jobs[j].features[f].keys, jobs[j].features[f].count});
    }
    jobs_[j].grouping.build(spans);
  });
  job_count_ = jobs.size();
  state_ = State::kRouted;
}

// All tables' writer locks, in one order for everybody.
std::vector<std::unique_lock<Writer>> Plan::lock_tables() {
  std::vector<Writer*> writers;
  for (size_t j = 0; j < job_count_; ++j) writers.push_back(&jobs_[j].table->writer());
  std::sort(writers.begin(), writers.end());
  std::vector<std::unique_lock<Writer>> locks;
  for (Writer* writer : writers) locks.emplace_back(*writer);
  return locks;
}

// Requires: the table's writer lock.
void Plan::let_go(Job& job) {
  const bool ours = job.generation == job.table->generation();  // else a clear() has taken the slots from everybody
  if (job.held && ours) job.table->tier()->unpin(job.slots.data(), job.grouping.size());
  if (ours) job.table->take_back(job.lent);
  job.held = job.current = false;
  job.lent.clear();
}

// Requires: the table's writer lock.
void Plan::end_waiting(Job& job) {
  if (job.tag && job.tag_generation == job.table->generation()) job.table->tier()->end_waiting(job.tag);
  job.tag = 0;
}

void Plan::release() {
  for (size_t j = 0; j < job_count_; ++j) {
    Job& job = jobs_[j];
    if (!job.held && job.lent.empty() && !job.tag) continue;
    std::lock_guard lock(job.table->writer());
    let_go(job);
    end_waiting(job);
    // The reserve can wait: where the disk refuses, the next fetch makes room or says so. Destructors call this.
    try {
      if (ColdTier* tier = job.table->tier(); tier && tier->evicts()) tier->rebalance();
    } catch (const std::exception&) {
      job.table->settle();
    }
  }
}

// Slots were let go, so they may have other owners by now.
bool Plan::lost() const {
  for (size_t j = 0; j < job_count_; ++j)
    if ((jobs_[j].table->tier() || jobs_[j].table->admission()) && !jobs_[j].current) return true;
  return false;
}

// How often a batch has a unique key.
uint32_t Plan::sightings(const Job& job, size_t unique) {
  const uint32_t *begin = job.grouping.run_begin(), *run = job.grouping.run();
  uint32_t total = 0;
  for (uint32_t at = begin[unique]; at < begin[unique + 1]; ++at) {
    size_t f = 0;
    while (run[at] >= job.features[f].begin + job.features[f].count) ++f;
    const Feature& feature = job.features[f];
    if (!feature.has_seen) return begin[unique + 1] - begin[unique];  // the same for all features
    total += feature.seen[run[at] - feature.begin];
  }
  return total;
}

void Plan::note_refused(Job& job) {
  for (uint32_t u : job.refused) job.table->admission()->note(job.grouping.hashes()[u], sightings(job, u));
  job.refused.clear();
}

// Which of the keys without a row get one.
void Plan::judge(Job& job) {
  const Admission* admission = job.table->admission();
  job.verdicts.clear();
  if (!admission) return;
  const Grouping& g = job.grouping;
  job.verdicts.assign(g.size(), Admission::Verdict::kAdmit);
  for (size_t u = 0; u < g.size(); ++u)
    if (job.slots[u] == kNoSlot)
      job.verdicts[u] = admission->judge(g.keys()[u], g.hashes()[u], sightings(job, u), step_);
  for (uint32_t u : job.arrivals.unique) job.verdicts[u] = Admission::Verdict::kAdmit;
}

Plan::Prefetched Plan::prefetch() {
  require(state_ == State::kRouted, "prefetch: route first, and before fetch");
  std::vector<Prefetched> found(job_count_);
  // A pool of its own: these threads wait for the device most of the time, and the shared ones have rows to compute.
  Pool::waiting().run(static_cast<int>(job_count_), [&](int j) {
    Job& job = jobs_[j];
    ColdTier* tier = job.table->tier();
    if (!tier || !tier->evicts()) return;
    {
      std::lock_guard lock(job.table->writer());
      end_waiting(job);
      job.tag = tier->begin_waiting();
      job.tag_generation = job.table->generation();
    }
    const Table::Brought brought = job.table->bring(job.grouping, job.tag);
    found[j] = {brought.rows, brought.rows * tier->log().record_bytes(), brought.short_of_room};
  });
  Prefetched total;
  for (const Prefetched& of_table : found) {
    total.rows += of_table.rows;
    total.bytes += of_table.bytes;
    total.short_of_room |= of_table.short_of_room;
  }
  return total;
}

void Plan::fetch(uint32_t step) {
  require(state_ != State::kEmpty, "fetch: route first");
  for (size_t j = 0; j < job_count_; ++j) jobs_[j].table->refuse_if_frozen("its rows cannot be trained");
  step_ = step;
  auto locks = lock_tables();
  find_and_create();
  state_ = State::kFetched;
}

// Requires: the tables' writer locks. Memory for all tables is taken before any of them changes.
void Plan::find_and_create() {
  for (size_t j = 0; j < job_count_; ++j) let_go(jobs_[j]);
  for (size_t j = 0; j < job_count_; ++j)
    if (ColdTier* tier = jobs_[j].table->tier(); tier && tier->evicts()) tier->claim(jobs_[j].grouping.size());
  std::vector<char> missing(job_count_);
  std::vector<Table::Fresh> fresh(job_count_);
  std::vector<char> pinned(job_count_);
  try {
    Pool::shared().run(static_cast<int>(job_count_), [&](int j) {
      Job& job = jobs_[j];
      job.epoch = job.table->erase_epoch();
      job.generation = job.table->generation();
      missing[j] = job.table->find_unique(job.grouping, job.slots.resize(job.grouping.size())) > 0;
    });
    Pool::shared().run(static_cast<int>(job_count_), [&](int j) {
      Job& job = jobs_[j];
      ColdTier* tier = job.table->tier();
      job.arrivals.unique.clear();
      // What was found is held before room is made for the rest.
      if (tier) tier->pin_found(job.slots.data(), job.grouping.size());
      pinned[j] = true;
      if (tier && tier->evicts() && missing[j]) tier->fetch(job.grouping, job.slots.data(), job.arrivals);
      if (job.tag) job.late = job.arrivals.unique.size();
      end_waiting(job);
      if (missing[j]) judge(job);
    });
    for (size_t j = 0; j < job_count_; ++j) {
      Job& job = jobs_[j];
      if (missing[j])
        fresh[j] = job.table->prepare(job.grouping.hashes(), job.slots.data(), job.grouping.cuts(), &job.arrivals,
                                      job.verdicts.empty() ? nullptr : job.verdicts.data());
    }
    for (size_t j = 0; j < job_count_; ++j) jobs_[j].table->commit(fresh[j]);
  } catch (...) {
    for (size_t j = 0; j < job_count_; ++j) {
      if (ColdTier* tier = jobs_[j].table->tier(); tier && pinned[j])
        tier->unpin_found(jobs_[j].slots.data(), jobs_[j].grouping.size());
      jobs_[j].table->settle();
    }
    for (size_t j = 0; j < job_count_; ++j) try {
        if (ColdTier* tier = jobs_[j].table->tier(); tier && tier->evicts()) tier->rebalance();
      } catch (...) {
        // What went wrong first is what the caller has to know.
      }
    throw;
  }
  Pool::shared().run(static_cast<int>(job_count_), [&](int j) {
    Job& job = jobs_[j];
    const Grouping& g = job.grouping;
    std::vector<uint32_t> at = fresh[j].at, from = fresh[j].from;
    job.refused.clear();
    if (missing[j]) job.table->insert(std::move(fresh[j]), g.keys(), g.hashes(), job.slots.data(), &job.arrivals);
    if (ColdTier* tier = job.table->tier()) {
      for (uint32_t u : at) tier->pin(&job.slots[u], 1);
      job.held = true;
      tier->counters.hits += g.size() - at.size();
      tier->counters.misses += at.size();
      tier->counters.arrivals += job.arrivals.unique.size();
    }
    for (size_t n = 0; n < from.size(); ++n) {
      if (from[n] != Table::kRefused) continue;
      job.refused.push_back(at[n]);
      if (!job.held) job.lent.push_back(job.slots[at[n]]);
    }
    job.current = true;
  });
  for (size_t j = 0; j < job_count_; ++j)
    if (ColdTier* tier = jobs_[j].table->tier()) tier->unclaim();
  for (size_t j = 0; j < job_count_; ++j)
    if (ColdTier* tier = jobs_[j].table->tier(); tier && tier->evicts()) tier->rebalance();
}

// Somebody erased rows since fetch: slots may belong to other keys now.
bool Plan::stale() const {
  for (size_t j = 0; j < job_count_; ++j)
    if (jobs_[j].epoch != jobs_[j].table->erase_epoch()) return true;
  return false;
}

void Plan::places(uint32_t* slots, uint32_t* steps, uint32_t* counts) const {
  require(state_ == State::kFetched, "places: fetch first");
  size_t base = 0;
  for (size_t j = 0; j < job_count_; ++j) {
    const Job& job = jobs_[j];
    const HeaderGroup* headers = job.table->view().headers;
    const uint32_t* inverse = job.grouping.inverse();
    std::vector<char> refused(job.refused.empty() ? 0 : job.grouping.size());
    for (uint32_t u : job.refused) refused[u] = 1;
    Pool::shared().run(static_cast<int>((job.grouping.positions() + kBagsPerTask - 1) / kBagsPerTask), [&](int t) {
      for (size_t p = t * kBagsPerTask, end = std::min(job.grouping.positions(), p + kBagsPerTask); p < end; ++p) {
        const uint32_t u = inverse[p], slot = job.slots[u];
        slots[base + p] = slot;
        steps[base + p] = !refused.empty() && refused[u] ? ~0u : step_of(headers[slot / 4].stamp[slot % 4]);
        counts[base + p] = headers[slot / 4].count[slot % 4];
      }
    });
    base += job.grouping.positions();
  }
}

void Plan::hold() {
  require(state_ == State::kFetched, "hold: fetch first");
  for (size_t j = 0; j < job_count_; ++j) {
    Job& job = jobs_[j];
    ColdTier* tier = job.table->tier();
    if (!tier || !tier->evicts()) continue;
    std::lock_guard lock(job.table->writer());
    std::vector<char> refused(job.grouping.size());
    for (uint32_t u : job.refused) refused[u] = 1;
    for (size_t u = 0; u < job.grouping.size(); ++u)
      if (!refused[u]) tier->pin(&job.slots[u], 1);
  }
}

void Plan::commit() {
  for (size_t j = 0; j < job_count_; ++j) {
    std::lock_guard lock(jobs_[j].table->writer());
    note_refused(jobs_[j]);
  }
  release();
}

size_t Plan::ids() const {
  size_t total = 0;
  for (size_t j = 0; j < job_count_; ++j) total += jobs_[j].grouping.positions();
  return total;
}

size_t Plan::unique() const {
  size_t total = 0;
  for (size_t j = 0; j < job_count_; ++j) total += jobs_[j].grouping.size();
  return total;
}

size_t Plan::late() const {
  size_t total = 0;
  for (size_t j = 0; j < job_count_; ++j) total += jobs_[j].late;
  return total;
}

size_t Plan::bytes() const {
  size_t total = 0;
  for (const Job& job : jobs_) {
    total += job.grouping.bytes() + job.slots.bytes() + job.copies.bytes() + job.late_keys.bytes();
    total += job.places.bytes() + job.offsets.bytes() + job.seen.bytes();
    for (const Feature& f : job.features)
      total += f.offsets.bytes() + f.weights.bytes() + f.bag.bytes() + f.scale.bytes();
  }
  return total;
}

}  // namespace hotrow
