// A row's metadata: its key, how often it was seen, and the step of its last update.
//
// 14 bytes a row, in groups of four rows so that every field is naturally aligned. Headers are apart from the values,
// so that values stay aligned for SIMD and for the GPU. Verifying a key and counting an occurrence touch the same cache
// line.
//
// A count has 16 bits: 12 of mantissa, 4 of exponent. It is exact up to 4,095 and then within about 1%: what the
// mantissa cannot hold is rounded up or down by a draw keyed by (seed, table, key, step), so the count is the same in
// every run, tier and rank. It saturates at 4,095 * 2^15, about 134 million.
#pragma once

#include <cstddef>
#include <cstdint>

#include "random/philox.h"

namespace hotrow {

inline constexpr uint32_t kNoSlot = 0xffffffffu;

struct HeaderGroup {
  int64_t key[4];
  uint32_t stamp[4];  // last step + 1; 0 in a slot that holds no row, as in memory that was never used
  uint16_t count[4];
};
static_assert(sizeof(HeaderGroup) == 56);
inline constexpr size_t kHeaderBytes = sizeof(HeaderGroup) / 4;  // of one row

inline uint32_t stamp_of(uint32_t step) { return step + 1; }
inline uint32_t step_of(uint32_t stamp) { return stamp - 1; }

inline constexpr uint32_t kCountMantissa = 4095;
inline constexpr uint32_t kCountMaxExponent = 15;

inline uint64_t decode_count(uint16_t code) { return uint64_t{code & kCountMantissa} << (code >> 12); }

// The code of decode_count(code) + seen. `bits` is called for one 32-bit draw, only when rounding needs it.
template <class Bits>
uint16_t add_count(uint16_t code, uint64_t seen, Bits bits) {
  uint64_t total = decode_count(code) + seen;
  uint32_t exponent = 0;
  while (exponent < kCountMaxExponent && (total >> exponent) > kCountMantissa) ++exponent;
  uint64_t mantissa = total >> exponent;
  uint64_t rest = total & ((uint64_t{1} << exponent) - 1);
  if (rest != 0 && (bits() >> (32 - exponent)) < rest) ++mantissa;
  if (mantissa > kCountMantissa) {
    if (exponent == kCountMaxExponent) return static_cast<uint16_t>(exponent << 12 | kCountMantissa);
    mantissa >>= 1;
    ++exponent;
  }
  return static_cast<uint16_t>(exponent << 12 | mantissa);
}

// For the update kernels: the draw is keyed by (seed, table, key, step).
uint16_t add_count_slow(uint16_t code, uint64_t seen, uint64_t stream, int64_t key, uint32_t step);

}  // namespace hotrow
