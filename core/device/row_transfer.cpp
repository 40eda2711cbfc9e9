#include "device/row_transfer.h"

#include <algorithm>
#include <stdexcept>

namespace hotrow::device {

void WriteBack::store_rows(const std::vector<TableRange>& parts, const uint32_t* slots, const uint32_t* steps,
                           const uint32_t* counts, uint32_t last_clean_step) {
  check(driver().context_set(context_), "set the context of this thread");
  for (size_t p = 0; p < chunks_.size();) {
    const size_t begin = chunks_[p].begin;
    chunks_[p].arrived->wait();
    do {  // waking the pool takes time, so store all chunks that have arrived
      ++p;
    } while (p < chunks_.size() && chunks_[p].arrived->is_complete());
    write_back_rows(parts, slots, steps, counts, last_clean_step, begin, chunks_[p - 1].end, staged_ + begin * width_,
                    width_);
  }
}

WriteBack::~WriteBack() {
  try {
    check(driver().context_set(context_), "set the context of this thread");
    if (!chunks_.empty()) chunks_.back().arrived->wait();  // complete already if they were stored
  } catch (const std::runtime_error&) {                    // the device failed; other calls report it
  }
}

RowTransfer::RowTransfer(Handle up, Handle copies, Handle down, size_t width, size_t capacity, size_t chunk_rows,
                         const std::vector<std::pair<Handle, ZeroCopyArgs*>>& zero_copy_launches,
                         const std::vector<std::pair<Handle, ScatterArgs*>>& scatter_launches)
    : up_(up), copies_(copies), down_(down), width_(width), capacity_(capacity), chunk_rows_(chunk_rows) {
  if (!width || !capacity || !chunk_rows || zero_copy_launches.empty() || scatter_launches.empty())
    throw std::invalid_argument(
        "RowTransfer: width, capacity, chunk_rows and both lists of launches must not be zero or empty");
  check(driver().context_get(&context_), "get the current context");
  for (const auto& [captured, cell] : zero_copy_launches) zero_copy_.emplace_back(captured, cell);
  for (const auto& [captured, cell] : scatter_launches) scatter_.emplace_back(captured, cell);
}

size_t RowTransfer::upload(const Upload& upload, size_t parts) {
  check(driver().context_set(context_), "set the context of this thread");
  const RowLookup lookup{upload.parts, upload.keys,   upload.slots,
                         upload.steps, upload.counts, upload.stop_at_first_miss};
  const size_t part = std::min(capacity_, upload.zero_copy_count / std::max<size_t>(1, parts) + 1);
  size_t absent = 0, at = 0;
  std::vector<RowRange> ranges;
  // Also after an error: once stream `up` has passed this point, the caller reuses the staging memory that the copies
  // read.
  struct Copies {
    RowTransfer& transfer;
    bool held = false;
    void hold() {
      held = true;
      transfer.copied_.record(transfer.copies_);
      transfer.copied_.block_stream(transfer.up_);
    }
    ~Copies() {
      if (held) return;
      try {
        hold();
      } catch (const std::runtime_error&) {  // the first error is the one to report
      }
    }
  } copies{*this};
  while (at < upload.count && !(absent && upload.stop_at_first_miss)) {
    ranges.clear();
    const size_t first_cell = next_;
    for (; at < upload.zero_copy_count && ranges.size() < zero_copy_.size(); at = ranges.back().end) {
      ranges.push_back({at, std::min(upload.zero_copy_count, at + part)});
      zero_copy_[next_++ % zero_copy_.size()].read.wait();  // its arguments have been read
    }
    const size_t zero_copy_ranges = ranges.size();
    for (; at >= upload.zero_copy_count && at < upload.count; at = ranges.back().end)
      ranges.push_back(
          {at, std::min(upload.count, at + chunk_rows_), upload.staged + (at - upload.zero_copy_count) * width_});
    absent += lookup_ranges(lookup, ranges, width_, [&](size_t s) {
      check(driver().context_set(context_), "set the context of this thread");
      const auto& [begin, end, staged] = ranges[s];
      if (s < zero_copy_ranges)
        launch_zero_copy(upload, begin, end, zero_copy_[(first_cell + s) % zero_copy_.size()]);
      else
        enqueue_copy(upload, begin, end);
    });
  }
  copies.hold();
  if (upload.scatter && !(absent && upload.stop_at_first_miss)) {
    Launch<ScatterArgs>& scatter = scatter_[next_scatter_++ % scatter_.size()];
    scatter.read.wait();
    scatter.run(up_, {upload.device_slots, reinterpret_cast<int64_t>(upload.slots), static_cast<int64_t>(upload.count),
                      static_cast<int64_t>(upload.zero_copy_count), static_cast<int64_t>(upload.device_staging)});
  }
  return absent;
}

void RowTransfer::launch_zero_copy(const Upload& upload, size_t begin, size_t end, Launch<ZeroCopyArgs>& launch) {
  const int64_t words = static_cast<int64_t>(begin * sizeof(int32_t));
  launch.run(up_, {upload.device_slots + words, upload.device_tables + words,
                   reinterpret_cast<int64_t>(upload.slots + begin), static_cast<int64_t>(end - begin)});
}

void RowTransfer::enqueue_copy(const Upload& upload, size_t begin, size_t end) {
  const size_t row = begin - upload.zero_copy_count, bytes = width_ * sizeof(float);
  const float* staged = upload.staged + row * width_;
  check(driver().copy_to_device(upload.device_staging + row * bytes, staged, (end - begin) * bytes, copies_),
        "copy rows to the device");
}

std::unique_ptr<WriteBack> RowTransfer::begin_write_back(Handle stream, DeviceAddress device_rows, size_t rows,
                                                         float* staged) {
  check(driver().context_set(context_), "set the context of this thread");
  auto sent = std::make_unique<WriteBack>(context_, staged, width_);
  Event gathered;
  gathered.record(stream);
  gathered.block_stream(down_);
  for (size_t begin = 0; begin < rows; begin += chunk_rows_) {
    const size_t end = std::min(rows, begin + chunk_rows_), bytes = width_ * sizeof(float);
    check(driver().copy_to_host(staged + begin * width_, device_rows + begin * bytes, (end - begin) * bytes, down_),
          "copy rows from the device");
    sent->chunks_.push_back({begin, end, std::make_unique<Event>()});
    sent->chunks_.back().arrived->record(down_);
  }
  return sent;
}

}  // namespace hotrow::device
