// One pool of worker threads for the whole process, and a small one for tasks that mostly wait for the disk.
//
// run(n, fn) calls fn(0) ... fn(n - 1), each once, on the caller and the workers, and returns when all are done.
// Callers split their work into tasks by size, never by the number of threads, so results cannot depend on that number.
// Several threads may call run() at once: each helps with its own job, and workers take tasks of the oldest job. After
// fork() the child has no workers, and run() executes everything on the caller. run() rethrows the first exception of a
// task.
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

class ThreadPool {
 public:
  static ThreadPool& shared();
  // A small pool for tasks that mostly wait for a device.
  static ThreadPool& io_pool();

  explicit ThreadPool(int threads);
  ~ThreadPool();

  int threads() const { return threads_.load(std::memory_order_relaxed); }
  // The number of threads, the caller included. `nice` lowers the workers' priority, for a process that should yield to
  // others. Requires: no run() is in progress.
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

    void run_tasks();
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
