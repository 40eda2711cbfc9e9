// One thread that compacts the logs of all tables, within a budget of bytes a second, so that it never takes the disk
// away from training for long.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace hotrow {

class ColdTier;

class Housekeeper {
 public:
  static Housekeeper& shared();

  void join(ColdTier* tier);
  void leave(ColdTier* tier);  // returns when the thread is not inside it

  // Keeps compaction out of a tier (or of none) for as long as it lives, or for ever after stay().
  class Away {
   public:
    explicit Away(ColdTier* tier) : tier_(tier) {
      if (tier_) shared().leave(tier_);
    }
    ~Away() {
      if (tier_) shared().join(tier_);
    }
    Away(const Away&) = delete;
    Away& operator=(const Away&) = delete;
    void stay() { tier_ = nullptr; }

   private:
    ColdTier* tier_;
  };

  // Bytes a second that compaction may move; 0: none.
  void set_rate(uint64_t bytes_per_second) { rate_.store(bytes_per_second); }
  uint64_t rate() const { return rate_.load(); }

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<ColdTier*> tiers_;
  bool started_ = false;
  std::atomic<uint64_t> rate_{uint64_t{64} << 20};
};

}  // namespace hotrow
