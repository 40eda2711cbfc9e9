#include "threads/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

namespace hotrow {
namespace {

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

ThreadPool& ThreadPool::shared() {
  // Never destroyed: a worker may still be running when static objects are torn down.
  static ThreadPool* pool = new ThreadPool(usable_cores());
  return *pool;
}

ThreadPool& ThreadPool::io_pool() {
  constexpr int kThreads = 4;
  static ThreadPool* pool = new ThreadPool(kThreads);
  return *pool;
}

ThreadPool::ThreadPool(int threads) { set_threads(threads); }
ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::set_threads(int threads, int nice) {
  stop();
  threads_.store(std::max(1, threads), std::memory_order_relaxed);
  start(this->threads() - 1, nice);
}

void ThreadPool::start(int workers, int nice) {
  stopping_ = false;
  for (int i = 0; i < workers; ++i)
    workers_.emplace_back([this, nice] {
      if (nice > 0) {  // on Linux, of this thread
        const auto self = static_cast<id_t>(gettid());
        setpriority(PRIO_PROCESS, self, getpriority(PRIO_PROCESS, self) + nice);
      }
      worker_loop();
    });
}

void ThreadPool::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
  workers_.clear();
}

void ThreadPool::Job::run_tasks() {
  for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
    try {
      call(context, i);
    } catch (...) {
      std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
    done.fetch_add(1, std::memory_order_acq_rel);
  }
}

// Requires: mutex_ is held.
ThreadPool::Job* ThreadPool::find_work() {
  for (Job* job : jobs_)
    if (job->next.load(std::memory_order_relaxed) < job->tasks) return job;
  return nullptr;
}

void ThreadPool::worker_loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    Job* job = nullptr;
    wake_.wait(lock, [&] { return stopping_ || (job = find_work()); });
    if (stopping_) return;
    ++job->helpers;
    lock.unlock();
    job->run_tasks();
    lock.lock();
    if (--job->helpers == 0) idle_.notify_all();
  }
}

void ThreadPool::run_job(int tasks, Call call, void* context) {
  Job job;
  job.call = call;
  job.context = context;
  job.tasks = tasks;
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back(&job);
  }
  wake_.notify_all();
  job.run_tasks();
  {
    // The job is on this stack: wait until no worker uses it. No worker can join after it is removed from the list.
    std::unique_lock lock(mutex_);
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
    idle_.wait(lock, [&] { return job.helpers == 0; });
  }
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace hotrow
