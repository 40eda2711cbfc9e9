// One pool of worker threads for the whole process (and one for those that only wait).
//
// run(n, fn) calls fn(0) ... fn(n - 1), each once, on the caller and the workers, and returns when all are done.
// Callers cut their work into tasks by size alone, never by thread count, so results cannot depend on how many threads
// there are. Several threads may call run at once; each helps its own job, and workers take tasks from the oldest.
// After fork() the child has no workers and run simply does everything itself. The first exception of a task is
// rethrown by run.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hotrow {

class Pool {
 public:
  static Pool& shared();
  // Another, small one, for tasks that wait for a device and hardly compute.
  static Pool& waiting();

  explicit Pool(int threads);
  ~Pool();

  int threads() const { return threads_.load(std::memory_order_relaxed); }
  // Includes the calling thread. Workers step back for others by so much (nice), where others are to be waited for by
  // the whole program. Requires: no run is under way.
  void set_threads(int threads, int nice = 0);

  template <class Fn>
  void run(int tasks, Fn&& fn) {
    if (tasks <= 0) return;
    if (tasks == 1 || threads() == 1) {
      for (int i = 0; i < tasks; ++i) fn(i);
      return;
    }
    run_job(tasks, [](void* context, int i) { (*static_cast<std::remove_reference_t<Fn>*>(context))(i); }, &fn);
  }

 private:
  using Call = void (*)(void*, int);
  struct Job {
    Call call;
    void* context;
    int tasks;
    std::atomic<int> next{0};
    std::atomic<int> done{0};
    int helpers = 0;  // workers inside this job; guarded by mutex_
    std::exception_ptr error;
    std::mutex error_mutex;

    void work();
  };

  void run_job(int tasks, Call call, void* context);
  void worker_loop();
  void start(int workers, int nice);
  void stop();
  Job* find_work();

  std::atomic<int> threads_{1};
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::deque<Job*> jobs_;
  bool stopping_ = false;
};

}  // namespace hotrow
