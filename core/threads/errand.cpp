#include "threads/errand.h"

#include <cassert>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace hotrow {

class ErrandThread {
 public:
  static ErrandThread& shared() {
    static ErrandThread* const thread = new ErrandThread;  // never destroyed: it may outlive static objects
    return *thread;
  }

  void put(Errand& errand) {
    {
      std::lock_guard lock(mutex_);
      if (!running_) try {
          std::thread([this] { run(); }).detach();
          running_ = true;
        } catch (const std::system_error&) {
          // No thread to be had: owners do their errands themselves.
        }
      errand.state_ = Errand::State::kQueued;
      errand.next_ = nullptr;
      (last_ ? last_->next_ : first_) = &errand;
      last_ = &errand;
    }
    wake_.notify_one();
  }

  // True: nobody has begun it, and nobody will. False: it is over.
  bool take_back(Errand& errand) {
    std::unique_lock lock(mutex_);
    over_.wait(lock, [&] { return errand.state_ != Errand::State::kRunning; });
    if (errand.state_ != Errand::State::kQueued) return false;
    Errand* before = nullptr;
    for (Errand* at = first_; at != &errand; at = at->next_) before = at;
    (before ? before->next_ : first_) = errand.next_;
    if (last_ == &errand) last_ = before;
    errand.state_ = Errand::State::kIdle;
    return true;
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return first_ != nullptr; });
      Errand& errand = *first_;
      first_ = errand.next_;
      if (!first_) last_ = nullptr;
      errand.state_ = Errand::State::kRunning;
      lock.unlock();
      std::exception_ptr error;
      try {
        errand.work_();
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      errand.error_ = std::move(error);
      errand.state_ = Errand::State::kOver;
      over_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, over_;
  bool running_ = false;
  Errand *first_ = nullptr, *last_ = nullptr;  // those that nobody has begun
};

Errand::~Errand() {
  if (started_) ErrandThread::shared().take_back(*this);
}

void Errand::start(std::function<void()> work) {
  assert(!started_);
  work_ = std::move(work);
  started_ = true;
  ErrandThread::shared().put(*this);
}

void Errand::finish() {
  assert(started_);
  started_ = false;
  if (ErrandThread::shared().take_back(*this)) return work_();
  if (std::exception_ptr error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
}

}  // namespace hotrow
