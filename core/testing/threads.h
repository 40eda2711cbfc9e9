// Runs a test's body with a given number of pool threads, and restores the number.
#pragma once

#include "threads/thread_pool.h"

namespace hotrow::testing {

class WithThreads {
 public:
  explicit WithThreads(int threads) : before_(ThreadPool::shared().threads()) {
    ThreadPool::shared().set_threads(threads);
  }
  ~WithThreads() { ThreadPool::shared().set_threads(before_); }
  WithThreads(const WithThreads&) = delete;
  WithThreads& operator=(const WithThreads&) = delete;

 private:
  int before_;
};

}  // namespace hotrow::testing
