// A plan's gradients: summed per row in batch order, then applied in place or returned for the row's owner.
#include <algorithm>
#include <atomic>

#include "plan/plan.h"
#include "threads/thread_pool.h"

namespace hotrow {
namespace {

constexpr size_t kCheckFloats = 64 << 10;

}  // namespace

// For update: each position's bag, and the factor of its gradient (weights, and 1 / length for a mean).
void Plan::expand_bags(Feature& feature) {
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
  ThreadPool::shared().run(static_cast<int>(tasks.size()), [&](int t) {
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
  ThreadPool::shared().run(static_cast<int>(job_count_), [&](int j) {
    size_t g = 0;
    for (int before = 0; before < j; ++before) g += jobs_[before].feature_count;
    for (size_t f = 0; f < jobs_[j].feature_count; ++f, ++g) {
      Feature& feature = jobs_[j].features[f];
      expand_bags(feature);
      const bool pooled = feature.has_offsets && feature.pooling != Pooling::kNone;
      sources[j].push_back({gradients[g].data, gradients[g].stride, static_cast<uint32_t>(feature.begin),
                            static_cast<uint32_t>(feature.begin + feature.count), pooled ? feature.bag.data() : nullptr,
                            feature.has_scale ? feature.scale.data() : nullptr,
                            present.empty() ? nullptr : present[g]});
    }
  });
  return sources;
}

// Calls fn(job number, arguments) for every partition of every table. The arguments describe the gradients to sum.
template <class Fn>
void Plan::run_over_partitions(Fn fn) {
  struct Task {
    size_t job, begin, end;
  };
  std::vector<Task> tasks;
  for (size_t j = 0; j < job_count_; ++j) {
    const auto& cuts = jobs_[j].unique_keys.cuts();
    for (size_t range = 0; range + 1 < cuts.size(); ++range)
      if (cuts[range] < cuts[range + 1]) tasks.push_back({j, cuts[range], cuts[range + 1]});
  }
  ThreadPool::shared().run(static_cast<int>(tasks.size()), [&](int t) {
    Job& job = jobs_[tasks[t].job];
    static thread_local std::vector<float> scratch;
    scratch.resize(2 * job.table->dim() + job.table->width());
    UpdateArgs args{};
    args.dim = job.table->dim();
    args.hashes = job.unique_keys.hashes();
    args.begin = tasks[t].begin;
    args.end = tasks[t].end;
    args.run_begin = job.unique_keys.run_begin();
    args.run = job.unique_keys.run();
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
  ThreadPool::shared().run(static_cast<int>(job_count_), [&](int j) {
    Job& job = jobs_[j];
    if (job.feature_count == 0 || !job.features[0].has_occurrences) return;
    count_occurrences(job, job.occurrences.resize(job.unique_keys.size()));
  });

  auto locks = lock_tables();
  if (slots_reassigned() || slots_released()) find_and_create();
  ThreadPool::shared().run(static_cast<int>(job_count_), [&](int j) {
    if (SsdTier* tier = jobs_[j].table->tier()) tier->mark_dirty(jobs_[j].slots.data(), jobs_[j].unique_keys.size());
    track_changed(jobs_[j]);
  });
  run_over_partitions([&](size_t j, UpdateArgs& args) {
    Job& job = jobs_[j];
    const Table& table = *job.table;
    args.view = table.view();
    args.slots = job.slots.data();
    args.occurrences = job.feature_count && job.features[0].has_occurrences ? job.occurrences.data() : nullptr;
    args.sources = sources[j].data();
    args.coefficients = options.jobs[j].coefficients.data();
    args.grad_scale = options.grad_scale;
    args.clip_value = options.jobs[j].clip_value;
    args.clip_norm = options.jobs[j].clip_norm;
    args.step = options.step;
    args.count_stream = table.count_stream();
    args.type = table.options().type;
    args.rounding_stream = table.rounding_stream();
    kernels().update[static_cast<int>(table.options().rule)](args);
  });
  for (size_t j = 0; j < job_count_; ++j) {
    Job& job = jobs_[j];
    count_rejected(job);
    unpin_slots(job);
    if (job.table->tracks_changes()) job.table->recharge_budget();  // charges the recorded keys
  }
  for (size_t j = 0; j < job_count_; ++j)
    if (SsdTier* tier = jobs_[j].table->tier(); tier && tier->evicts()) tier->restore_free_reserve();
}

// Records the rows that an update will change; rejected keys have none.
void Plan::track_changed(Job& job) {
  if (!job.table->tracks_changes()) return;
  if (job.rejected.empty()) return job.table->track_changed(job.slots.data(), job.unique_keys.size());
  std::vector<uint32_t> slots(job.slots.data(), job.slots.data() + job.unique_keys.size());
  for (uint32_t u : job.rejected) slots[u] = kNoSlot;
  job.table->track_changed(slots.data(), slots.size());
}

Plan::SumResult Plan::sum_gradients(const std::vector<Matrix>& gradients, const std::vector<Matrix>& checked,
                                    float* out, uint8_t* present) {
  require(partitioned_, "sum_gradients: call partition_by_owner first");
  if (!all_finite(checked)) return {false, true};
  const Sources sources = sources_of(gradients, {});
  std::atomic<bool> all_present{true};
  run_over_partitions([&](size_t j, UpdateArgs& args) {
    args.sources = sources[j].data();
    const SumArgs sums{args, out, jobs_[j].offsets.data(), jobs_[j].partition_positions.data(), present};
    if (!kernels().sum_gradients(sums)) all_present.store(false, std::memory_order_relaxed);
  });
  return {true, all_present};
}

}  // namespace hotrow
