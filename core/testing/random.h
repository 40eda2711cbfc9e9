// Random inputs that are the same on every machine and in every run (the standard library's distributions are not).
#pragma once

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace hotrow::testing {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  uint64_t bits() { return engine_(); }
  uint64_t below(uint64_t limit) { return engine_() % limit; }
  // In [-1, 1), on a grid of 2^-20.
  float real() { return static_cast<float>(static_cast<int64_t>(below(1 << 21)) - (1 << 20)) * 0x1p-20f; }
  // One of `variety` keys that are spread over all 64 bits; the extremes and small numbers of both signs among them.
  int64_t key(uint64_t variety) {
    constexpr int64_t kSpecial[] = {0, -1, 1, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()};
    uint64_t which = below(variety);
    return which < std::size(kSpecial) ? kSpecial[which] : static_cast<int64_t>(which * 0xD6E8FEB86659FD93ull);
  }
  std::vector<int64_t> keys(size_t count, uint64_t variety) {
    std::vector<int64_t> result(count);
    for (int64_t& each : result) each = key(variety);
    return result;
  }
  std::vector<float> reals(size_t count) {
    std::vector<float> result(count);
    for (float& each : result) each = real();
    return result;
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace hotrow::testing
