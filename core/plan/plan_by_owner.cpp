// Partitions a plan's unique keys by owning process, and takes the rows that the owners sent.
#include <algorithm>

#include "plan/plan.h"
#include "threads/thread_pool.h"

namespace hotrow {

void Plan::partition_by_owner(const uint32_t* owner_of, size_t world, int64_t* counts) {
  require(state_ != State::kEmpty, "partition_by_owner: route first");
  for (size_t shard = 0; shard < kShards; ++shard)
    require(owner_of[shard] < world, "partition_by_owner: an owner is out of range");
  std::fill_n(counts, world * job_count_, int64_t{0});
  ThreadPool::shared().run(static_cast<int>(job_count_), [&](int j) {
    const UniqueKeys& g = jobs_[j].unique_keys;
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
  require(floats <= kNoSlot, "partition_by_owner: rows of more than 16 GiB in one batch; use smaller batches");
  ThreadPool::shared().run(static_cast<int>(job_count_), [&](int j) {
    Job& job = jobs_[j];
    const UniqueKeys& g = job.unique_keys;
    uint32_t *places = job.partition_positions.resize(g.size()), *offsets = job.offsets.resize(g.size());
    for (size_t u = 0; u < g.size(); ++u) {
      const size_t to = owner_of[shard_of(g.hashes()[u])] * job_count_ + j;
      places[u] = static_cast<uint32_t>(place[to]++);
      offsets[u] = static_cast<uint32_t>(offset[to]);
      offset[to] += job.table->dim();
    }
  });
  partitioned_ = true;
}

void Plan::partitioned_keys(int64_t* keys, uint32_t* occurrences) const {
  require(partitioned_, "partitioned_keys: call partition_by_owner first");
  ThreadPool::shared().run(static_cast<int>(job_count_), [&](int j) {
    const Job& job = jobs_[j];
    std::vector<uint32_t> counts(job.unique_keys.size());
    count_occurrences(job, counts.data());
    for (size_t u = 0; u < job.unique_keys.size(); ++u) {
      keys[job.partition_positions[u]] = job.unique_keys.keys()[u];
      occurrences[job.partition_positions[u]] = counts[u];
    }
  });
}

void Plan::set_received_rows(const float* rows) {
  require(partitioned_, "set_received_rows: call partition_by_owner first");
  received_rows_ = rows;
  state_ = State::kRead;
}

}  // namespace hotrow
