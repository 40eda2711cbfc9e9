// The memory budget for rows, shared by all tables of one collection.
//
// A call charges the budget before it changes anything, so a call that exceeds the budget leaves every table as it was.
// What is charged is what the process really holds: committed pages of rows, headers and indexes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace hotrow {

// A member that can release memory: a table with an SSD tier.
class BudgetMember {
 public:
  virtual ~BudgetMember() = default;
  virtual size_t reclaimable() const = 0;  // approximate bytes; any thread
  virtual bool release_some_memory() = 0;  // false: nothing could be released, or it is busy
};

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

  // What tables with an SSD tier keep free, for index growth while rows move.
  size_t free_reserve() const { return limit_ / 50; }

  bool try_charge(size_t bytes, size_t keep_free = 0) {
    size_t before = used_.fetch_add(bytes, std::memory_order_relaxed);
    if (limit_ == 0 || before + bytes + keep_free <= limit_) return true;
    used_.fetch_sub(bytes, std::memory_order_relaxed);
    return false;
  }
  void charge(size_t bytes) { used_.fetch_add(bytes, std::memory_order_relaxed); }  // even beyond the limit
  void uncharge(size_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }

  void add(BudgetMember* member) {
    std::lock_guard lock(mutex_);
    members_.push_back(member);
  }
  void remove(BudgetMember* member) {
    std::lock_guard lock(mutex_);
    std::erase(members_, member);
  }
  // Makes one member release memory, the largest first.
  bool reclaim(const BudgetMember& wanted_by) {
    std::lock_guard lock(mutex_);
    std::vector<BudgetMember*> others;
    for (BudgetMember* member : members_)
      if (member != &wanted_by) others.push_back(member);
    std::sort(others.begin(), others.end(),
              [](const BudgetMember* a, const BudgetMember* b) { return a->reclaimable() > b->reclaimable(); });
    return std::any_of(others.begin(), others.end(),
                       [](BudgetMember* member) { return member->release_some_memory(); });
  }

 private:
  std::mutex mutex_;
  std::vector<BudgetMember*> members_;
  const size_t limit_;
  std::atomic<size_t> used_{0};
};

}  // namespace hotrow
