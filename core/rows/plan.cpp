#include "rows/plan.h"

#include <algorithm>
#include <stdexcept>

#include "threads/pool.h"

namespace hotrow {
namespace {

constexpr size_t kBagsPerTask = 1024;
constexpr size_t kCheckFloats = 64 << 10;
constexpr size_t kLargeOutput = size_t{16} << 20;  // bytes; half of a common last-level cache

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

void Plan::read() {
  require(state_ != State::kEmpty, "read: route first");
  Pool::shared().run(static_cast<int>(job_count_), [&](int j) {
    Job& job = jobs_[j];
    float* copies = job.copies.resize(job.grouping.size() * job.table->dim());
    job.table->read(job.grouping.keys(), job.grouping.hashes(), job.grouping.size(), copies, nullptr);
  });
  taken_ = nullptr;
  state_ = State::kRead;
}

// Somebody erased rows since fetch: slots may belong to other keys now.
bool Plan::stale() const {
  for (size_t j = 0; j < job_count_; ++j)
    if (jobs_[j].epoch != jobs_[j].table->erase_epoch()) return true;
  return false;
}

void Plan::gather(const std::vector<Matrix>& outputs) {
  require(state_ == State::kFetched || state_ == State::kRead, "gather: fetch or read first");
  require(outputs.size() == feature_count_, "gather: give one output per feature");
  if (state_ == State::kFetched && (stale() || lost())) fetch(step_);
  size_t bytes = 0;
  for (const Matrix& out : outputs) bytes += out.rows * out.columns * sizeof(float);
  std::vector<PoolArgs> tasks;
  size_t output = 0;
  for (size_t j = 0; j < job_count_; ++j) {
    Job& job = jobs_[j];
    const bool copies = state_ == State::kRead;
    const RowView view = job.table->view();
    for (size_t f = 0; f < job.feature_count; ++f, ++output) {
      const Feature& feature = job.features[f];
      const Matrix& out = outputs[output];
      const size_t bags = feature.pooling == Pooling::kNone ? feature.count : feature.bags;
      if (!out.data) continue;
      require(out.rows == bags && out.columns == static_cast<size_t>(job.table->dim()),
              "gather: an output has the wrong shape");
      PoolArgs args{};
      args.rows = copies ? reinterpret_cast<const char*>(job.copies.data()) : view.rows;
      args.row_bytes = copies ? job.table->dim() * sizeof(float) : view.row_bytes;
      args.index = copies ? nullptr : job.slots.data();
      if (taken_) {
        args.rows = reinterpret_cast<const char*>(taken_);
        args.row_bytes = sizeof(float);
        args.index = job.offsets.data();
      }
      args.inverse = job.grouping.inverse() + feature.begin;
      args.dim = job.table->dim();
      args.pooling = feature.pooling;
      args.offsets = feature.has_offsets ? feature.offsets.data() : nullptr;
      args.weights = feature.has_weights ? feature.weights.data() : nullptr;
      args.out = out.data;
      args.out_stride = out.stride;
      args.large = bytes > kLargeOutput;
      for (size_t bag = 0; bag < bags; bag += kBagsPerTask) {
        args.bag_begin = bag;
        args.bag_end = std::min(bags, bag + kBagsPerTask);
        tasks.push_back(args);
      }
    }
  }
  Pool::shared().run(static_cast<int>(tasks.size()), [&](int t) { kernels().pool(tasks[t]); });
}

// For update: each position's bag, and what its gradient is multiplied by (weights, and 1 / length for a mean).
void Plan::spread_bags(Feature& feature) {
  const bool mean = feature.pooling == Pooling::kMean && feature.has_offsets;
  const bool pooled = feature.has_offsets && feature.pooling != Pooling::kNone;
  feature.has_scale = feature.has_weights || mean;
  if (pooled) {
    uint32_t* bag = feature.bag.resize(feature.count);
    for (size_t b = 0; b < feature.bags; ++b)
      std::fill(bag + feature.offsets[b], bag + feature.offsets[b + 1], static_cast<uint32_t>(b));
  }
  if (!feature.has_scale) return;
  float* scale = feature.scale.resize(feature.count);
  for (size_t i = 0; i < feature.count; ++i) {
    float weight = feature.has_weights ? feature.weights[i] : 1.0f;
    if (mean) weight /= static_cast<float>(feature.offsets[feature.bag[i] + 1] - feature.offsets[feature.bag[i]]);
    scale[i] = weight;
  }
}

static bool all_finite(const std::vector<Matrix>& matrices) {
  struct Rows {
    const Matrix* matrix;
    size_t begin, end;
  };
  std::vector<Rows> tasks;
  for (const Matrix& matrix : matrices) {
    size_t step = std::max<size_t>(1, kCheckFloats / std::max<size_t>(1, matrix.columns));
    for (size_t row = 0; row < matrix.rows; row += step)
      tasks.push_back({&matrix, row, std::min(matrix.rows, row + step)});
  }
  std::atomic<bool> finite{true};
  Pool::shared().run(static_cast<int>(tasks.size()), [&](int t) {
    const Matrix& m = *tasks[t].matrix;
    bool ok = true;
    if (m.stride == m.columns)
      ok = kernels().all_finite(m.data + tasks[t].begin * m.stride, (tasks[t].end - tasks[t].begin) * m.columns);
    else
      for (size_t row = tasks[t].begin; row < tasks[t].end && ok; ++row)
        ok = kernels().all_finite(m.data + row * m.stride, m.columns);
    if (!ok) finite.store(false, std::memory_order_relaxed);
  });
  return finite;
}

static void check_finite(const std::vector<Matrix>& matrices) {
  if (!all_finite(matrices))
    throw GradientNotFinite(
        "a gradient is NaN or infinite; no row was changed. Lower the learning rate, clip gradients, or find the bad "
        "input with torch.autograd.set_detect_anomaly(True)");
}

Plan::Sources Plan::sources_of(const std::vector<Matrix>& gradients, const std::vector<const uint8_t*>& present) {
  require(gradients.size() == feature_count_, "update: give one gradient per feature");
  require(present.empty() || present.size() == feature_count_,
          "update: say for every feature which ids have gradients");
  for (size_t j = 0, g = 0; j < job_count_; ++j)
    for (size_t f = 0; f < jobs_[j].feature_count; ++f, ++g) {
      const Feature& feature = jobs_[j].features[f];
      const Matrix& m = gradients[g];
      const size_t rows = feature.pooling == Pooling::kNone ? feature.count : feature.bags;
      require(!m.data || (m.rows == rows && m.columns == static_cast<size_t>(jobs_[j].table->dim())),
              "update: a gradient has the wrong shape");
    }
  Sources sources(job_count_);
  Pool::shared().run(static_cast<int>(job_count_), [&](int j) {
    size_t g = 0;
    for (int before = 0; before < j; ++before) g += jobs_[before].feature_count;
    for (size_t f = 0; f < jobs_[j].feature_count; ++f, ++g) {
      Feature& feature = jobs_[j].features[f];
      spread_bags(feature);
      const bool pooled = feature.has_offsets && feature.pooling != Pooling::kNone;
      sources[j].push_back({gradients[g].data, gradients[g].stride, static_cast<uint32_t>(feature.begin),
                            static_cast<uint32_t>(feature.begin + feature.count), pooled ? feature.bag.data() : nullptr,
                            feature.has_scale ? feature.scale.data() : nullptr,
                            present.empty() ? nullptr : present[g]});
    }
  });
  return sources;
}

// Calls fn(job's number, arguments) for every partition of every table; the arguments say what to sum.
template <class Fn>
void Plan::run_over_partitions(Fn fn) {
  struct Task {
    size_t job, begin, end;
  };
  std::vector<Task> tasks;
  for (size_t j = 0; j < job_count_; ++j) {
    const auto& cuts = jobs_[j].grouping.cuts();
    for (size_t range = 0; range + 1 < cuts.size(); ++range)
      if (cuts[range] < cuts[range + 1]) tasks.push_back({j, cuts[range], cuts[range + 1]});
  }
  Pool::shared().run(static_cast<int>(tasks.size()), [&](int t) {
    Job& job = jobs_[tasks[t].job];
    static thread_local std::vector<float> scratch;
    scratch.resize(job.table->dim() + job.table->width());
    UpdateArgs args{};
    args.dim = job.table->dim();
    args.hashes = job.grouping.hashes();
    args.begin = tasks[t].begin;
    args.end = tasks[t].end;
    args.run_begin = job.grouping.run_begin();
    args.run = job.grouping.run();
    args.grad_scale = 1;
    args.scratch = scratch.data();
    fn(tasks[t].job, args);
  });
}

void Plan::update(const std::vector<Matrix>& gradients, const std::vector<Matrix>& checked,
                  const UpdateOptions& options, const std::vector<const uint8_t*>& present) {
  require(state_ == State::kFetched, "update: fetch first");
  require(options.jobs.size() == job_count_, "update: give one list of coefficients per table");
  check_finite(checked);
  const Sources sources = sources_of(gradients, present);
  Pool::shared().run(static_cast<int>(job_count_), [&](int j) {
    Job& job = jobs_[j];
    if (job.feature_count == 0 || !job.features[0].has_seen) return;
    uint32_t* seen = job.seen.resize(job.grouping.size());
    for (size_t u = 0; u < job.grouping.size(); ++u) seen[u] = sightings(job, u);
  });

  auto locks = lock_tables();
  if (stale() || lost()) find_and_create();
  Pool::shared().run(static_cast<int>(job_count_), [&](int j) {
    if (ColdTier* tier = jobs_[j].table->tier()) tier->touch(jobs_[j].slots.data(), jobs_[j].grouping.size());
  });
  run_over_partitions([&](size_t j, UpdateArgs& args) {
    Job& job = jobs_[j];
    const Table& table = *job.table;
    args.view = table.view();
    args.slots = job.slots.data();
    args.seen = job.feature_count && job.features[0].has_seen ? job.seen.data() : nullptr;
    args.sources = sources[j].data();
    args.coefficients = options.jobs[j].coefficients.data();
    args.grad_scale = options.grad_scale;
    args.clip_value = options.jobs[j].clip_value;
    args.clip_norm = options.jobs[j].clip_norm;
    args.step = options.step;
    args.count_stream = table.count_stream();
    kernels().update[static_cast<int>(table.options().rule)](args);
  });
  for (size_t j = 0; j < job_count_; ++j) {
    Job& job = jobs_[j];
    note_refused(job);
    let_go(job);
  }
  for (size_t j = 0; j < job_count_; ++j)
    if (ColdTier* tier = jobs_[j].table->tier(); tier && tier->evicts()) tier->rebalance();
}

void Plan::deal(const uint32_t* owner_of, size_t world, int64_t* counts) {
  require(state_ != State::kEmpty, "deal: route first");
  for (size_t shard = 0; shard < kShards; ++shard) require(owner_of[shard] < world, "deal: an owner is out of range");
  std::fill_n(counts, world * job_count_, int64_t{0});
  Pool::shared().run(static_cast<int>(job_count_), [&](int j) {
    const Grouping& g = jobs_[j].grouping;
    for (size_t u = 0; u < g.size(); ++u) ++counts[owner_of[shard_of(g.hashes()[u])] * job_count_ + j];
  });
  std::vector<size_t> place(world * job_count_), offset(world * job_count_);
  size_t keys = 0, floats = 0;
  for (size_t i = 0; i < place.size(); ++i) {
    place[i] = keys;
    offset[i] = floats;
    keys += counts[i];
    floats += counts[i] * jobs_[i % job_count_].table->dim();
  }
  require(floats <= kNoSlot, "deal: rows of more than 16 GiB in one batch; use smaller batches");
  Pool::shared().run(static_cast<int>(job_count_), [&](int j) {
    Job& job = jobs_[j];
    const Grouping& g = job.grouping;
    uint32_t *places = job.places.resize(g.size()), *offsets = job.offsets.resize(g.size());
    for (size_t u = 0; u < g.size(); ++u) {
      const size_t to = owner_of[shard_of(g.hashes()[u])] * job_count_ + j;
      places[u] = static_cast<uint32_t>(place[to]++);
      offsets[u] = static_cast<uint32_t>(offset[to]);
      offset[to] += job.table->dim();
    }
  });
  dealt_ = true;
}

void Plan::dealt(int64_t* keys, uint32_t* seen) const {
  require(dealt_, "dealt: deal first");
  Pool::shared().run(static_cast<int>(job_count_), [&](int j) {
    const Job& job = jobs_[j];
    for (size_t u = 0; u < job.grouping.size(); ++u) {
      keys[job.places[u]] = job.grouping.keys()[u];
      seen[job.places[u]] = sightings(job, u);
    }
  });
}

void Plan::take_rows(const float* rows) {
  require(dealt_, "take_rows: deal first");
  taken_ = rows;
  state_ = State::kRead;
}

Plan::Summed Plan::sum(const std::vector<Matrix>& gradients, const std::vector<Matrix>& checked, float* out,
                       uint8_t* present) {
  require(dealt_, "sum: deal first");
  if (!all_finite(checked)) return {false, true};
  const Sources sources = sources_of(gradients, {});
  std::atomic<bool> whole{true};
  run_over_partitions([&](size_t j, UpdateArgs& args) {
    args.sources = sources[j].data();
    const SumArgs sums{args, out, jobs_[j].offsets.data(), jobs_[j].places.data(), present};
    if (!kernels().sum(sums)) whole.store(false, std::memory_order_relaxed);
  });
  return {true, whole};
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
    total += job.grouping.bytes() + job.slots.bytes() + job.copies.bytes();
    total += job.places.bytes() + job.offsets.bytes() + job.seen.bytes();
    for (const Feature& f : job.features)
      total += f.offsets.bytes() + f.weights.bytes() + f.bag.bytes() + f.scale.bytes();
  }
  return total;
}

}  // namespace hotrow
