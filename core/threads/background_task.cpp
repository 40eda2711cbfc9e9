#include "threads/background_task.h"

#include <cassert>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace hotrow {

class BackgroundThread {
 public:
  static BackgroundThread& shared() {
    static BackgroundThread* const thread =
        new BackgroundThread;  // never destroyed: its thread may outlive static objects
    return *thread;
  }

  void enqueue(BackgroundTask& task) {
    {
      std::lock_guard lock(mutex_);
      if (!running_) try {
          std::thread([this] { run(); }).detach();
          running_ = true;
        } catch (const std::system_error&) {
          // No thread could be started: owners run their tasks themselves.
        }
      task.state_ = BackgroundTask::State::kQueued;
      task.next_ = nullptr;
      (last_ ? last_->next_ : first_) = &task;
      last_ = &task;
    }
    wake_.notify_one();
  }

  // Removes a task that has not begun, and returns true. Otherwise waits until it is done, and returns false.
  bool cancel(BackgroundTask& task) {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return task.state_ != BackgroundTask::State::kRunning; });
    if (task.state_ != BackgroundTask::State::kQueued) return false;
    BackgroundTask* before = nullptr;
    for (BackgroundTask* at = first_; at != &task; at = at->next_) before = at;
    (before ? before->next_ : first_) = task.next_;
    if (last_ == &task) last_ = before;
    task.state_ = BackgroundTask::State::kIdle;
    return true;
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return first_ != nullptr; });
      BackgroundTask& task = *first_;
      first_ = task.next_;
      if (!first_) last_ = nullptr;
      task.state_ = BackgroundTask::State::kRunning;
      lock.unlock();
      std::exception_ptr error;
      try {
        task.work_();
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      task.error_ = std::move(error);
      task.state_ = BackgroundTask::State::kDone;
      done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  bool running_ = false;
  BackgroundTask *first_ = nullptr, *last_ = nullptr;  // tasks that have not begun
};

BackgroundTask::~BackgroundTask() {
  if (started_) BackgroundThread::shared().cancel(*this);
}

void BackgroundTask::start(std::function<void()> work) {
  assert(!started_);
  work_ = std::move(work);
  started_ = true;
  BackgroundThread::shared().enqueue(*this);
}

void BackgroundTask::finish() {
  assert(started_);
  started_ = false;
  if (BackgroundThread::shared().cancel(*this)) return work_();
  if (std::exception_ptr error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
}

}  // namespace hotrow
