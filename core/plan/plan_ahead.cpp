// Rows that their owner sends ahead of a batch's turn, and those that it sends on the turn.
//
// Ahead (copy_ahead) go the rows that are in DRAM and that no earlier batch in flight has. On the turn (copy_changed)
// go all others, and those that have changed since. So the requester gets the rows that one batch after another would
// have seen, and almost every row is sent once.
//
// A row has not changed since it was copied if
//   - its last update is not later than `step`, the last update that was complete before the copy began: an update
//     stamps every row that it changes with its own step;
//   - its count is above 0: a row that was created since, because its key was unseen or its row had expired, has none;
//   - nothing was assigned to the table since (Table::assign_epoch): that changes values and no stamp.
// A key that admission rejects has a temporary slot, whose stamp is 0: it is sent on the turn.
#include <cstring>

#include "plan/in_flight_keys.h"
#include "plan/plan.h"
#include "threads/thread_pool.h"

namespace hotrow {
namespace {

constexpr size_t kRowsPerTask = 1024;
constexpr size_t kAhead = 16;  // headers that are prefetched

bool bit(const uint8_t* mask, size_t i) { return mask[i / 8] >> (i % 8) & 1; }

}  // namespace

void Plan::note_in_flight(InFlightKeys& keys, uint64_t batch, uint64_t done) {
  require(state_ == State::kRouted, "note_in_flight: route first");
  keys.begin(batch, done, job_count_);
  ThreadPool::shared().run(static_cast<int>(job_count_), [&](int j) {
    const UniqueKeys& g = jobs_[j].unique_keys;
    keys.note(j, g, jobs_[j].previous_batch.resize(g.size()));
  });
  noted_ = true;
}

// Writes the rows of the selected unique keys, requester by requester and for each table by table, and one bit for each
// of a requester's positions. `rows_of` gives where a job's rows are.
template <class RowsOf>
std::vector<size_t> Plan::pack_rows(const std::vector<std::vector<uint8_t>>& selected, RowsOf rows_of, float* rows,
                                    uint8_t* masks) {
  const size_t requesters = job_count_ ? jobs_[0].feature_count : 0;
  std::vector<size_t> floats(requesters);
  std::vector<PoolArgs> tasks;
  for (size_t r = 0; r < requesters; ++r) {
    size_t at = 0;  // of the requester's positions
    const float* begin = rows;
    for (size_t j = 0; j < job_count_; ++j) at += jobs_[j].features[r].count;
    std::memset(masks, 0, (at + 7) / 8);
    at = 0;
    for (size_t j = 0; j < job_count_; ++j) {
      Job& job = jobs_[j];
      const Feature& feature = job.features[r];
      const uint32_t* inverse = job.unique_keys.inverse() + feature.begin;
      uint32_t* list = job.packed.data() + feature.begin;
      size_t count = 0;
      for (size_t p = 0; p < feature.count; ++p, ++at)
        if (selected[j][inverse[p]]) {
          masks[at / 8] |= static_cast<uint8_t>(1 << at % 8);
          list[count++] = inverse[p];
        }
      PoolArgs args = rows_of(job);
      args.inverse = list;
      args.dim = job.table->dim();
      args.pooling = Pooling::kNone;
      args.out = rows;
      args.out_stride = args.dim;
      for (args.bag_begin = 0; args.bag_begin < count; args.bag_begin += kRowsPerTask) {
        args.bag_end = std::min(count, args.bag_begin + kRowsPerTask);
        tasks.push_back(args);
      }
      rows += count * args.dim;
    }
    masks += (at + 7) / 8;
    floats[r] = rows - begin;
  }
  ThreadPool::shared().run(static_cast<int>(tasks.size()), [&](int t) { kernels().pool(tasks[t]); });
  return floats;
}

std::vector<size_t> Plan::copy_ahead(uint64_t done, uint32_t step, float* rows, uint8_t* masks) {
  require(state_ == State::kRouted && noted_, "copy_ahead: note_in_flight first, and before fetch");
  std::vector<std::vector<uint8_t>> selected(job_count_);
  ahead_step_ = step;
  ThreadPool::shared().run(static_cast<int>(job_count_), [&](int j) {
    Job& job = jobs_[j];
    const UniqueKeys& g = job.unique_keys;
    job.assign_epoch = job.table->assign_epoch();
    job.known_epoch = job.table->erase_epoch();  // before the search, so an erasure beside it is noticed
    uint32_t* ahead = job.ahead_rows.resize(g.size());
    job.packed.resize(g.positions());
    std::vector<int64_t> keys;
    std::vector<uint64_t> hashes;
    keys.reserve(g.size());
    hashes.reserve(g.size());
    for (size_t u = 0; u < g.size(); ++u) {
      ahead[u] = job.previous_batch[u] > done ? kNoSlot : static_cast<uint32_t>(keys.size());
      if (ahead[u] == kNoSlot) continue;
      keys.push_back(g.keys()[u]);
      hashes.push_back(g.hashes()[u]);
    }
    std::vector<uint32_t> slots(keys.size());
    job.table->read_from_dram(keys.data(), hashes.data(), keys.size(),
                              job.copies.resize(keys.size() * job.table->dim()), slots.data());
    uint32_t* known = job.known_slots.resize(g.size());
    selected[j].resize(g.size());
    for (size_t u = 0; u < g.size(); ++u) {
      known[u] = ahead[u] != kNoSlot ? slots[ahead[u]] : kNoSlot;
      if (known[u] == kNoSlot) ahead[u] = kNoSlot;
      selected[j][u] = ahead[u] != kNoSlot;
    }
  });
  const auto copies_of = [](const Job& job) {
    PoolArgs args{};
    args.rows = reinterpret_cast<const char*>(job.copies.data());
    args.row_bytes = job.table->dim() * sizeof(float);
    args.index = job.ahead_rows.data();
    return args;
  };
  auto floats = pack_rows(selected, copies_of, rows, masks);
  copied_ahead_ = true;
  return floats;
}

std::vector<size_t> Plan::copy_changed(float* rows, uint8_t* masks) {
  require(state_ == State::kFetched && copied_ahead_, "copy_changed: copy_ahead and fetch first");
  if (slots_reassigned() || slots_released()) fetch(step_);
  std::vector<std::vector<uint8_t>> selected(job_count_);
  ThreadPool::shared().run(static_cast<int>(job_count_), [&](int j) {
    const Job& job = jobs_[j];
    const HeaderGroup* headers = job.table->view().headers;
    const bool assigned = job.assign_epoch != job.table->assign_epoch();
    selected[j].resize(job.unique_keys.size());
    for (size_t u = 0; u < job.unique_keys.size(); ++u) {
      if (u + kAhead < job.unique_keys.size()) __builtin_prefetch(&headers[job.slots[u + kAhead] / 4].stamp);
      const HeaderGroup& group = headers[job.slots[u] / 4];
      const size_t lane = job.slots[u] % 4;
      const bool unchanged = job.ahead_rows[u] != kNoSlot && step_of(group.stamp[lane]) <= ahead_step_ &&
                             group.count[lane] != 0 && !assigned;
      selected[j][u] = !unchanged;
    }
  });
  const auto slots_of = [](const Job& job) {
    PoolArgs args{};
    args.rows = job.table->view().rows;
    args.row_bytes = job.table->view().row_bytes;
    args.index = job.slots.data();
    args.type = job.table->options().type;
    return args;
  };
  return pack_rows(selected, slots_of, rows, masks);
}

size_t masked_floats(const uint8_t* mask, const std::vector<RowBlock>& blocks) {
  size_t at = 0, floats = 0;
  for (const RowBlock& block : blocks)
    for (size_t i = 0; i < block.rows; ++i, ++at)
      if (bit(mask, at)) floats += block.dim;
  return floats;
}

void expand_rows(const uint8_t* mask, const float* rows, const std::vector<RowBlock>& blocks, float* out) {
  size_t at = 0;
  for (const RowBlock& block : blocks)
    for (size_t i = 0; i < block.rows; ++i, ++at, out += block.dim) {
      if (!bit(mask, at)) continue;
      std::memcpy(out, rows, block.dim * sizeof(float));
      rows += block.dim;
    }
}

}  // namespace hotrow
