#include "rows/housekeeper.h"

#include <algorithm>
#include <chrono>

#include "rows/cold_tier.h"

namespace hotrow {
namespace {

constexpr auto kIdle = std::chrono::milliseconds(200);
constexpr size_t kRecords = 4096;  // of one turn

}  // namespace

Housekeeper& Housekeeper::shared() {
  static Housekeeper* housekeeper = new Housekeeper();  // never destroyed: its thread may outlive static objects
  return *housekeeper;
}

void Housekeeper::join(ColdTier* tier) {
  std::lock_guard lock(mutex_);
  tiers_.push_back(tier);
  if (started_) return;
  started_ = true;
  std::thread([this] { run(); }).detach();
}

void Housekeeper::leave(ColdTier* tier) {
  std::lock_guard lock(mutex_);
  std::erase(tiers_, tier);
}

void Housekeeper::run() {
  std::unique_lock lock(mutex_);
  for (size_t turn = 0;; ++turn) {
    size_t moved = 0;
    // A whole round without work before it sleeps. An error stays in the tier's report: the log is as it was.
    for (size_t tried = 0; tried < tiers_.size() && moved == 0 && rate_.load(); ++tried)
      moved = tiers_[(turn + tried) % tiers_.size()]->compact_quietly(kRecords);
    const uint64_t rate = rate_.load();
    const auto pause = moved && rate ? std::chrono::microseconds(moved * 1000000 / rate)
                                     : std::chrono::duration_cast<std::chrono::microseconds>(kIdle);
    wake_.wait_for(lock, pause);
  }
}

}  // namespace hotrow
