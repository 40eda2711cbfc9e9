// A plan's keys dealt out to the processes that own them, and the rows that come back.
#include <algorithm>

#include "rows/plan.h"
#include "threads/pool.h"

namespace hotrow {

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

}  // namespace hotrow
