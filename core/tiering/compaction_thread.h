// One thread that compacts the logs of all tables, limited to a number of bytes per second so that training keeps the
// disk.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace hotrow {

class SsdTier;

class CompactionThread {
 public:
  static CompactionThread& shared();

  void add(SsdTier* tier);
  void remove(SsdTier* tier);  // returns when the thread no longer uses the tier

  // Keeps compaction away from a tier (null: none) while it lives; after dismiss() permanently.
  class CompactionPause {
   public:
    explicit CompactionPause(SsdTier* tier) : tier_(tier) {
      if (tier_) shared().remove(tier_);
    }
    ~CompactionPause() {
      if (tier_) shared().add(tier_);
    }
    CompactionPause(const CompactionPause&) = delete;
    CompactionPause& operator=(const CompactionPause&) = delete;
    void dismiss() { tier_ = nullptr; }

   private:
    SsdTier* tier_;
  };

  // The bytes per second that compaction may move; 0: none.
  void set_rate(uint64_t bytes_per_second) { rate_.store(bytes_per_second); }
  uint64_t rate() const { return rate_.load(); }

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<SsdTier*> tiers_;
  bool started_ = false;
  std::atomic<uint64_t> rate_{uint64_t{64} << 20};
};

}  // namespace hotrow
