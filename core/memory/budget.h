// How many bytes rows may take, shared by all tables of one collection.
//
// Memory is asked for before anything is changed, so that a refusal leaves every table as it was. What is counted is
// what the process really holds: committed pages of rows, headers and indexes.
#pragma once

#include <atomic>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace hotrow {

class BudgetExceeded : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Budget {
 public:
  // A limit of 0 means no limit.
  explicit Budget(size_t limit = 0) : limit_(limit) {}

  size_t limit() const { return limit_; }
  size_t used() const { return used_.load(std::memory_order_relaxed); }

  bool try_take(size_t bytes) {
    size_t before = used_.fetch_add(bytes, std::memory_order_relaxed);
    if (limit_ == 0 || before + bytes <= limit_) return true;
    used_.fetch_sub(bytes, std::memory_order_relaxed);
    return false;
  }
  void give_back(size_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }

 private:
  const size_t limit_;
  std::atomic<size_t> used_{0};
};

}  // namespace hotrow
