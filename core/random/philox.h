// Philox4x32-10, the counter-based generator of Salmon et al. (2011): random bits that are a pure function of a counter
// and a key, so that a draw never depends on order, thread, tier or rank.
//
// Every random decision in HotRow about a row is keyed the same way:
//   philox key  = mix64(seed ^ mix64(table id ^ stream)), where the stream separates uses (initial rows, counts, ...)
//   counter     = (key low, key high, step, block of four elements)
// Triton's tl.philox computes the same function, so the GPU draws the same bits.
#pragma once

#include <array>
#include <cstdint>

#include "hash/hash.h"

namespace hotrow {

using Draws = std::array<uint32_t, 4>;

inline Draws philox(std::array<uint32_t, 4> counter, uint64_t key) {
  auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    uint64_t a = uint64_t{0xD2511F53} * counter[0], b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ k0, static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ k1, static_cast<uint32_t>(a)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

enum class Stream : uint64_t { kInitial = 1, kCount = 2, kRounding = 3, kAdmission = 4 };

inline uint64_t stream_key(uint64_t seed, uint64_t table_id, Stream stream) {
  return mix64(seed ^ mix64(table_id ^ static_cast<uint64_t>(stream)));
}

inline Draws draw(uint64_t stream_key, int64_t key, uint32_t step, uint32_t block) {
  auto bits = static_cast<uint64_t>(key);
  return philox({static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32), step, block}, stream_key);
}

}  // namespace hotrow
