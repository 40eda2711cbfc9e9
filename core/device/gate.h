// Lanes ask the device for reads of a cache together; the filler asks for its writes alone, after all reads before it,
// and so does who brings rows up to date, on another stream.
//
// The lock is held while somebody asks, not while the device does it: there, events order the two. Without a device
// (the interpreter, which stands in for one) it is the lock alone.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "device/driver.h"

namespace hotrow::device {

class Gate {
 public:
  explicit Gate(bool device) : written_(device ? std::make_unique<Event>() : nullptr) {}

  // A lane; returns its number. Before traffic comes.
  int add_lane() {
    std::lock_guard lock(mutex_);
    read_.push_back(written_ ? std::make_unique<Event>() : nullptr);
    return static_cast<int>(read_.size()) - 1;
  }

  // Between the two, what is asked of the stream reads the cache. Who began must end, on the same thread.
  void begin_read(Handle stream) {
    std::unique_lock lock(mutex_);
    if (written_) written_->hold(stream);
    lock.release();
  }
  void end_read(int lane, Handle stream) {
    std::lock_guard lock(mutex_, std::adopt_lock);
    if (written_) read_.at(lane)->record(stream);
  }

  // What is asked of the stream from now on comes after all writes before, for who is the next to write.
  void follow_writes(Handle stream) {
    std::lock_guard lock(mutex_);
    if (written_) written_->hold(stream);
  }

  // Between the two, what is asked of the stream changes the cache.
  void begin_write(Handle stream) {
    std::unique_lock lock(mutex_);
    if (written_) {
      written_->hold(stream);
      for (const auto& event : read_) event->hold(stream);
    }
    lock.release();
  }
  void end_write(Handle stream) {
    std::lock_guard lock(mutex_, std::adopt_lock);
    if (written_) written_->record(stream);
  }

 private:
  std::mutex mutex_;
  std::unique_ptr<Event> written_;
  std::vector<std::unique_ptr<Event>> read_;  // the last read of each lane
};

}  // namespace hotrow::device
