#include "tiering/compaction_thread.h"

#include <algorithm>
#include <chrono>

#include "tiering/ssd_tier.h"

namespace hotrow {
namespace {

constexpr auto kIdle = std::chrono::milliseconds(200);
constexpr size_t kRecords = 4096;  // records per chunk

}  // namespace

CompactionThread& CompactionThread::shared() {
  static CompactionThread* housekeeper =
      new CompactionThread();  // never destroyed: its thread may outlive static objects
  return *housekeeper;
}

void CompactionThread::add(SsdTier* tier) {
  std::lock_guard lock(mutex_);
  tiers_.push_back(tier);
  if (started_) return;
  started_ = true;
  std::thread([this] { run(); }).detach();
}

void CompactionThread::remove(SsdTier* tier) {
  std::lock_guard lock(mutex_);
  std::erase(tiers_, tier);
}

void CompactionThread::run() {
  std::unique_lock lock(mutex_);
  for (size_t turn = 0;; ++turn) {
    size_t moved = 0;
    // Tries every tier once before sleeping. An error is counted in the tier's report; the log is unchanged.
    for (size_t tried = 0; tried < tiers_.size() && moved == 0 && rate_.load(); ++tried)
      moved = tiers_[(turn + tried) % tiers_.size()]->compact_quietly(kRecords);
    const uint64_t rate = rate_.load();
    const auto pause = moved && rate ? std::chrono::microseconds(moved * 1000000 / rate)
                                     : std::chrono::duration_cast<std::chrono::microseconds>(kIdle);
    wake_.wait_for(lock, pause);
  }
}

}  // namespace hotrow
