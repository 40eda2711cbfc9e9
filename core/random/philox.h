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

// philox at kBlocks counters that differ in their last word alone (first_block, first_block + 1, ...), word by word:
// out[w][b] is word w of block b. One loop over blocks inside each round, so that the compiler computes them side by
// side.
template <int kBlocks>
inline void philox_blocks(std::array<uint32_t, 3> counter, uint32_t first_block, uint64_t key,
                          uint32_t (&out)[4][kBlocks]) {
  auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int b = 0; b < kBlocks; ++b) {
    for (int w = 0; w < 3; ++w) out[w][b] = counter[w];
    out[3][b] = first_block + static_cast<uint32_t>(b);
  }
  for (int round = 0; round < 10; ++round) {
    for (int b = 0; b < kBlocks; ++b) {
      uint64_t x = uint64_t{0xD2511F53} * out[0][b], y = uint64_t{0xCD9E8D57} * out[2][b];
      out[0][b] = static_cast<uint32_t>(y >> 32) ^ out[1][b] ^ k0;
      out[2][b] = static_cast<uint32_t>(x >> 32) ^ out[3][b] ^ k1;
      out[1][b] = static_cast<uint32_t>(y);
      out[3][b] = static_cast<uint32_t>(x);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
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
