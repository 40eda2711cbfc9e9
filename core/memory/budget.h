// How many bytes rows may take, shared by all tables of one collection.
//
// Memory is asked for before anything is changed, so that a refusal leaves every table as it was. What is counted is
// what the process really holds: committed pages of rows, headers and indexes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace hotrow {

// Whoever can give memory back: a table that has an SSD tier.
class BudgetMember {
 public:
  virtual ~BudgetMember() = default;
  virtual size_t reclaimable() const = 0;  // bytes, roughly; from any thread
  virtual bool give_back_some() = 0;       // false: nothing could go, or it is busy
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

  // What tables with an SSD tier leave free for the growth of their indexes while rows move.
  size_t reserve() const { return limit_ / 50; }

  bool try_take(size_t bytes, size_t keep_free = 0) {
    size_t before = used_.fetch_add(bytes, std::memory_order_relaxed);
    if (limit_ == 0 || before + bytes + keep_free <= limit_) return true;
    used_.fetch_sub(bytes, std::memory_order_relaxed);
    return false;
  }
  void take(size_t bytes) { used_.fetch_add(bytes, std::memory_order_relaxed); }  // whatever the limit says
  void give_back(size_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }

  void join(BudgetMember* member) {
    std::lock_guard lock(mutex_);
    members_.push_back(member);
  }
  void leave(BudgetMember* member) {
    std::lock_guard lock(mutex_);
    std::erase(members_, member);
  }
  // Makes the member that can spare most give some memory back.
  bool reclaim(const BudgetMember& wanted_by) {
    std::lock_guard lock(mutex_);
    std::vector<BudgetMember*> others;
    for (BudgetMember* member : members_)
      if (member != &wanted_by) others.push_back(member);
    std::sort(others.begin(), others.end(),
              [](const BudgetMember* a, const BudgetMember* b) { return a->reclaimable() > b->reclaimable(); });
    return std::any_of(others.begin(), others.end(), [](BudgetMember* member) { return member->give_back_some(); });
  }

 private:
  std::mutex mutex_;
  std::vector<BudgetMember*> members_;
  const size_t limit_;
  std::atomic<size_t> used_{0};
};

}  // namespace hotrow
