// Runs a test's body with a given number of pool threads, and puts the number back.
#pragma once

#include "threads/pool.h"

namespace hotrow::testing {

class WithThreads {
 public:
  explicit WithThreads(int threads) : before_(Pool::shared().threads()) { Pool::shared().set_threads(threads); }
  ~WithThreads() { Pool::shared().set_threads(before_); }
  WithThreads(const WithThreads&) = delete;
  WithThreads& operator=(const WithThreads&) = delete;

 private:
  int before_;
};

}  // namespace hotrow::testing
