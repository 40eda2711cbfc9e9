// Work that one thread starts and another may do: a log hands a full buffer over and goes on filling the next.
//
// One thread serves all errands of the process, in the order in which they were started. Nobody depends on it: finish()
// does the work itself when it has not been begun. So an owner never waits behind the errands of others, and a child
// that was forked, which has no such thread, works the same.
//
// Threads: an errand has one owner at a time, who starts and finishes it.
#pragma once

#include <exception>
#include <functional>

namespace hotrow {

class Errand {
 public:
  Errand() = default;
  // Work that was not begun is forgotten; work that was is waited for.
  ~Errand();
  Errand(const Errand&) = delete;
  Errand& operator=(const Errand&) = delete;

  // Requires: not started. What the work uses lives until finish() or the destructor returns.
  void start(std::function<void()> work);
  bool started() const { return started_; }  // and not finished
  // Returns when the work is over, and rethrows what it threw. Requires: started.
  void finish();

 private:
  friend class ErrandThread;
  enum class State { kIdle, kQueued, kRunning, kOver };

  std::function<void()> work_;
  bool started_ = false;
  State state_ = State::kIdle;  // these three belong to the thread's mutex
  std::exception_ptr error_;
  Errand* next_ = nullptr;  // in the queue
};

}  // namespace hotrow
