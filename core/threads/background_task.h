// A task that runs on a background thread, or on its owner's thread when the owner needs it first. The log uses it to
// write a full buffer while it fills the next one.
//
// One background thread serves all tasks of the process, in FIFO order. Nothing depends on that thread: finish() runs a
// task that has not begun on the calling thread. So an owner never waits behind other owners' tasks, and a forked
// child, which has no background thread, behaves the same.
//
// Threads: a task has one owner at a time, which calls start() and finish().
#pragma once

#include <exception>
#include <functional>

namespace hotrow {

class BackgroundTask {
 public:
  BackgroundTask() = default;
  // Cancels the task if it has not begun; otherwise waits for it.
  ~BackgroundTask();
  BackgroundTask(const BackgroundTask&) = delete;
  BackgroundTask& operator=(const BackgroundTask&) = delete;

  // Requires: not started. Everything that the work uses must stay valid until finish() or the destructor returns.
  void start(std::function<void()> work);
  bool started() const { return started_; }  // and not finished
  // Returns when the task is done; rethrows its exception. Requires: started.
  void finish();

 private:
  friend class BackgroundThread;
  enum class State { kIdle, kQueued, kRunning, kDone };

  std::function<void()> work_;
  bool started_ = false;
  State state_ = State::kIdle;  // this and the next two are guarded by the thread's mutex
  std::exception_ptr error_;
  BackgroundTask* next_ = nullptr;  // in the queue
};

}  // namespace hotrow
