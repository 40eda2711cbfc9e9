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

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

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

// philox at four counters that differ in their last word alone (first_block to first_block + 3), word by word:
// out[w][b] is word w of block b. Side by side with SSE2, which every x86-64 has: 20 ns for 16 numbers, 80 ns one after
// another. Always inlined: it is compiled once per instruction set.
inline __attribute__((always_inline)) void philox_blocks(const uint32_t (&counter)[3], uint32_t first_block,
                                                         uint64_t key, uint32_t (&out)[4][4]) {
#if defined(__SSE2__)
  __m128i c[4][2];  // word w of blocks 0, 1 and of blocks 2, 3, in the low halves of 64-bit lanes; the rest is noise
  for (int w = 0; w < 3; ++w) c[w][0] = c[w][1] = _mm_set1_epi64x(counter[w]);
  c[3][0] = _mm_set_epi64x(first_block + 1, first_block);
  c[3][1] = _mm_set_epi64x(first_block + 3, first_block + 2);
  const __m128i m0 = _mm_set1_epi64x(0xD2511F53), m1 = _mm_set1_epi64x(0xCD9E8D57);
  const __m128i bump0 = _mm_set1_epi64x(0x9E3779B9), bump1 = _mm_set1_epi64x(0xBB67AE85);
  __m128i key0 = _mm_set1_epi64x(static_cast<uint32_t>(key)), key1 = _mm_set1_epi64x(static_cast<uint32_t>(key >> 32));
  for (int round = 0; round < 10; ++round) {
    for (int pair = 0; pair < 2; ++pair) {
      const __m128i x = _mm_mul_epu32(c[0][pair], m0), y = _mm_mul_epu32(c[2][pair], m1);
      c[0][pair] = _mm_xor_si128(_mm_xor_si128(_mm_srli_epi64(y, 32), c[1][pair]), key0);
      c[2][pair] = _mm_xor_si128(_mm_xor_si128(_mm_srli_epi64(x, 32), c[3][pair]), key1);
      c[1][pair] = y;
      c[3][pair] = x;
    }
    key0 = _mm_add_epi32(key0, bump0);
    key1 = _mm_add_epi32(key1, bump1);
  }
  for (int w = 0; w < 4; ++w) {
    const __m128 low = _mm_castsi128_ps(c[w][0]), high = _mm_castsi128_ps(c[w][1]);
    _mm_storeu_ps(reinterpret_cast<float*>(out[w]), _mm_shuffle_ps(low, high, _MM_SHUFFLE(2, 0, 2, 0)));
  }
#else
  for (uint32_t b = 0; b < 4; ++b) {
    const Draws block = philox({counter[0], counter[1], counter[2], first_block + b}, key);
    for (int w = 0; w < 4; ++w) out[w][b] = block[w];
  }
#endif
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
