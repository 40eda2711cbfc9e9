// A simulated CUDA driver for tests that runs enqueued work as late as possible: only when a thread waits for it. Code
// that changes memory which a copy or a launch still reads, or that lacks an event, gets wrong bytes. Device memory is
// host memory.
//
// A captured graph is a std::function<void()>, by its address.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "device/cuda_driver.h"

namespace hotrow::testing {

class SlowDevice {
 public:
  using Handle = device::Handle;

  // If several streams can continue, the last one does, or the first one.
  explicit SlowDevice(bool last_first = true) : last_first_(last_first) {
    here() = this;
    static const device::Driver driver = {
        [](Handle* context) { return *context = nullptr, 0; },
        [](Handle) { return 0; },
        [](Handle* event, unsigned) { return *event = new Mark(std::make_shared<Counts>()), 0; },
        [](Handle event, Handle stream) { return here()->record(*static_cast<Mark*>(event), stream), 0; },
        [](Handle event) { return here()->wait(*static_cast<Mark*>(event)); },
        [](Handle event) { return here()->query(*static_cast<Mark*>(event)); },
        [](Handle event) { return delete static_cast<Mark*>(event), 0; },
        [](Handle stream, Handle event, unsigned) {
          return here()->block_stream(stream, *static_cast<Mark*>(event)), 0;
        },
        [](device::DeviceAddress to, const void* from, size_t bytes, Handle stream) {
          if (here()->copies_taken_-- == 0) return 1;
          return here()->enqueue(stream, [=] { return std::memcpy(reinterpret_cast<void*>(to), from, bytes), true; }),
                 0;
        },
        [](void* to, device::DeviceAddress from, size_t bytes, Handle stream) {
          return here()->enqueue(stream, [=] { return std::memcpy(to, reinterpret_cast<void*>(from), bytes), true; }),
                 0;
        },
        [](Handle* ready, Handle graph, unsigned long long) { return *ready = graph, 0; },
        [](Handle graph, Handle stream) {
          return here()->enqueue(stream, [=] { return (*static_cast<std::function<void()>*>(graph))(), true; }), 0;
        },
        [](Handle) { return 0; },
        [](int, const char** name) { return *name = "nothing goes on", 0; },
    };
    device::set_driver_for_testing(&driver);
  }
  ~SlowDevice() { device::set_driver_for_testing(nullptr); }
  SlowDevice(const SlowDevice&) = delete;
  SlowDevice& operator=(const SlowDevice&) = delete;

  using Work = std::function<bool()>;  // false: not yet
  void enqueue(Handle stream, Work work) {
    std::lock_guard lock(mutex_);
    streams_[stream].push_back(std::move(work));
  }

  // The copy to the device after the next `count` copies fails.
  void take_copies(int count) { copies_taken_ = count; }

  // Runs all enqueued work.
  void finish() {
    std::lock_guard lock(mutex_);
    while (step()) {
    }
  }
  int busy() {
    std::lock_guard lock(mutex_);
    int enqueued = 0;
    for (const auto& [_, stream] : streams_) enqueued += static_cast<int>(stream.size());
    return enqueued;
  }

 private:
  struct Counts {
    int recorded = 0, passed = 0;
  };
  using Mark = std::shared_ptr<Counts>;  // a stream may wait for a destroyed event, as in CUDA
  static SlowDevice*& here() {
    static SlowDevice* device = nullptr;
    return device;
  }

  void record(const Mark& mark, Handle stream) {
    std::lock_guard lock(mutex_);
    streams_[stream].push_back([mark, now = ++mark->recorded] { return mark->passed = now, true; });
  }
  void block_stream(Handle stream, const Mark& mark) {
    std::lock_guard lock(mutex_);
    streams_[stream].push_back([mark, now = mark->recorded] { return mark->passed >= now; });
  }
  int query(const Mark& mark) {
    std::lock_guard lock(mutex_);
    return mark->passed < mark->recorded ? 600 : 0;
  }
  int wait(const Mark& mark) {
    std::lock_guard lock(mutex_);
    while (mark->passed < mark->recorded)
      if (!step()) return 1;  // would block permanently
    return 0;
  }
  // Runs one item of a stream that can continue.
  bool step() {
    auto go_on = [](auto& stream) {
      if (stream.second.empty() || !stream.second.front()()) return false;
      stream.second.pop_front();
      return true;
    };
    return last_first_ ? std::any_of(streams_.rbegin(), streams_.rend(), go_on)
                       : std::any_of(streams_.begin(), streams_.end(), go_on);
  }

  const bool last_first_;
  std::atomic<int> copies_taken_ = -1;
  std::mutex mutex_;
  std::map<Handle, std::deque<Work>> streams_;
};

}  // namespace hotrow::testing
