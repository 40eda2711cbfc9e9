#include "device/graph_runner.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace hotrow::device {

GraphRunner::GraphRunner(std::shared_ptr<ReaderWriterGate> gate, int lane, Handle stream, Handle find, Handle tower,
                         const RunnerBuffers& buffers, std::vector<MissBuffers> missing)
    : gate_(std::move(gate)),
      lane_(lane),
      stream_(stream),
      buffers_(buffers),
      misses_(std::move(missing)),
      find_(find),
      tower_(tower) {
  check(driver().context_get(&context_), "get the current context");
  for (MissBuffers& part : misses_)
    for (const auto& table : part.tables) part.lists.tables.push_back(table.get());
}

void GraphRunner::enqueue_lookup(const std::vector<const int64_t*>& keys, size_t count, const float* dense) {
  if (count > buffers_.capacity || keys.size() != buffers_.features)
    throw std::invalid_argument("enqueue_lookup: more examples than the runner holds, or another number of features");
  check(driver().context_set(context_), "set the context of this thread");
  for (size_t f = 0; f < keys.size(); ++f)
    std::memcpy(buffers_.keys + f * buffers_.capacity, keys[f], count * sizeof(int64_t));
  if (dense) std::memcpy(buffers_.dense_in, dense, count * buffers_.dense * sizeof(float));
  count_ = count;
  *buffers_.examples = static_cast<int32_t>(count);
  gate_->begin_read(stream_);
  try {
    find_.launch(stream_);
  } catch (...) {
    gate_->end_read(lane_, stream_);
    throw;
  }
  gate_->end_read(lane_, stream_);
  found_.record(stream_);
}

size_t GraphRunner::fill_misses_and_enqueue_tower(ColdReadPolicy policy) {
  found_.wait();
  if (policy != ColdReadPolicy::kWait) std::fill_n(buffers_.late, count_, 0);
  size_t total = 0;
  for (MissBuffers& part : misses_) {
    const size_t width = part.width ? part.width : buffers_.width;
    const size_t some = read_misses(part.lists, policy, width, part.rows, part.places, part.keys,
                                    part.late ? part.late : buffers_.late);
    *part.count = static_cast<int32_t>(some);
    total += some;
  }
  tower_.launch(stream_);
  done_.record(stream_);
  return total;
}

void GraphRunner::copy_logits(float* out) {
  done_.wait();
  std::memcpy(out, buffers_.logits, count_ * buffers_.tasks * sizeof(float));
}

}  // namespace hotrow::device
