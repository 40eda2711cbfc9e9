// A reader-writer gate for one GPU cache. Lanes enqueue reads concurrently. The cache filler enqueues writes
// exclusively, after every earlier read; so does the thread that applies publications, on a stream of its own.
//
// The mutex is held while a caller enqueues work, not while the device executes it. On the device, CUDA events order
// the work: a read's stream waits for the last write, and a write's stream waits for the last read of every lane.
// Without a device (under Triton's interpreter) there is nothing asynchronous to order and the mutex is enough.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "device/cuda_driver.h"

namespace hotrow::device {

class ReaderWriterGate {
 public:
  explicit ReaderWriterGate(bool device) : last_write_(device ? std::make_unique<Event>() : nullptr) {}

  // Registers a lane and returns its number. Call before traffic starts.
  int add_lane() {
    std::lock_guard lock(mutex_);
    last_reads_.push_back(last_write_ ? std::make_unique<Event>() : nullptr);
    return static_cast<int>(last_reads_.size()) - 1;
  }

  // Between the two calls, work enqueued on the stream reads the cache. Both calls must come from the same thread.
  void begin_read(Handle stream) {
    std::unique_lock lock(mutex_);
    if (last_write_) last_write_->block_stream(stream);
    lock.release();
  }
  void end_read(int lane, Handle stream) {
    std::lock_guard lock(mutex_, std::adopt_lock);
    if (last_write_) last_reads_.at(lane)->record(stream);
  }

  // Makes the stream wait for all earlier writes. For a stream that will write next.
  void wait_for_writes(Handle stream) {
    std::lock_guard lock(mutex_);
    if (last_write_) last_write_->block_stream(stream);
  }

  // Between the two calls, work enqueued on the stream writes the cache. Both calls must come from the same thread.
  void begin_write(Handle stream) {
    std::unique_lock lock(mutex_);
    if (last_write_) {
      last_write_->block_stream(stream);
      for (const auto& event : last_reads_) event->block_stream(stream);
    }
    lock.release();
  }
  void end_write(Handle stream) {
    std::lock_guard lock(mutex_, std::adopt_lock);
    if (last_write_) last_write_->record(stream);
  }

 private:
  std::mutex mutex_;
  std::unique_ptr<Event> last_write_;
  std::vector<std::unique_ptr<Event>> last_reads_;  // the last read of each lane
};

}  // namespace hotrow::device
