// Reads copies of rows for evaluation and serving, and pools rows into the features' outputs.
#include <algorithm>
#include <atomic>

#include "plan/plan.h"
#include "threads/thread_pool.h"

namespace hotrow {
namespace {

constexpr size_t kBagsPerTask = 256;
constexpr size_t kLargeOutput = size_t{16} << 20;  // bytes; half of a common last-level cache

}  // namespace

size_t Plan::read(ColdReadPolicy policy) {
  require(state_ != State::kEmpty, "read: route first");
  std::atomic<size_t> ids{0};
  ThreadPool::shared().run(static_cast<int>(job_count_), [&](int j) {
    Job& job = jobs_[j];
    const UniqueKeys& g = job.unique_keys;
    float* copies = job.copies.resize(g.size() * job.table->dim());
    job.any_late = false;
    if (policy == ColdReadPolicy::kWait) return job.table->read(g.keys(), g.hashes(), g.size(), copies, nullptr);
    uint8_t* late = job.late_keys.resize(g.size());
    std::fill_n(late, g.size(), uint8_t{0});
    if (job.table->read_without_io(g.keys(), g.hashes(), g.size(), policy, copies, late) == 0) return;
    job.any_late = true;
    size_t of_job = 0;
    for (size_t u = 0; u < g.size(); ++u)
      if (late[u]) of_job += g.run_begin()[u + 1] - g.run_begin()[u];
    ids.fetch_add(of_job, std::memory_order_relaxed);
  });
  received_rows_ = nullptr;
  state_ = State::kRead;
  return ids;
}

void Plan::count_late(uint32_t* counts, size_t examples) const {
  require(state_ == State::kRead, "count_late: read first");
  std::fill_n(counts, examples, 0u);
  for (size_t j = 0; j < job_count_; ++j) {
    const Job& job = jobs_[j];
    if (!job.any_late) continue;
    for (size_t f = 0; f < job.feature_count; ++f) {
      const Feature& feature = job.features[f];
      require(feature.bags == examples, "count_late: give one count per example");
      const uint32_t* inverse = job.unique_keys.inverse() + feature.begin;
      for (size_t bag = 0; bag < feature.bags; ++bag) {
        const size_t begin = feature.has_offsets ? feature.offsets[bag] : bag;
        const size_t end = feature.has_offsets ? feature.offsets[bag + 1] : bag + 1;
        for (size_t p = begin; p < end; ++p) counts[bag] += job.late_keys[inverse[p]];
      }
    }
  }
}

void Plan::gather(const std::vector<Matrix>& outputs) {
  require(state_ == State::kFetched || state_ == State::kRead, "gather: fetch or read first");
  require(outputs.size() == feature_count_, "gather: give one output per feature");
  if (state_ == State::kFetched && (slots_reassigned() || slots_released())) fetch(step_);
  size_t bytes = 0;
  for (const Matrix& out : outputs) bytes += out.rows * out.columns * sizeof(float);
  std::vector<PoolArgs> features;
  size_t output = 0, most_bags = 0;
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
      if (!copies) args.type = job.table->options().type;
      if (received_rows_) {
        args.rows = reinterpret_cast<const char*>(received_rows_);
        args.row_bytes = sizeof(float);
        args.index = job.offsets.data();
      }
      args.inverse = job.unique_keys.inverse() + feature.begin;
      args.dim = job.table->dim();
      args.pooling = feature.pooling;
      args.offsets = feature.has_offsets ? feature.offsets.data() : nullptr;
      args.weights = feature.has_weights ? feature.weights.data() : nullptr;
      args.out = out.data;
      args.out_stride = out.stride;
      args.bypass_cache = bytes > kLargeOutput;
      args.bag_end = bags;
      features.push_back(args);
      most_bags = std::max(most_bags, bags);
    }
  }
  // All features of some bags, then of the next: outputs lie side by side in one matrix, so this writes each of its
  // pages once.
  std::vector<PoolArgs> tasks;
  for (size_t bag = 0; bag < most_bags; bag += kBagsPerTask)
    for (PoolArgs args : features) {
      if (bag >= args.bag_end) continue;
      args.bag_begin = bag;
      args.bag_end = std::min(args.bag_end, bag + kBagsPerTask);
      tasks.push_back(args);
    }
  ThreadPool::shared().run(static_cast<int>(tasks.size()), [&](int t) { kernels().pool(tasks[t]); });
}

}  // namespace hotrow
