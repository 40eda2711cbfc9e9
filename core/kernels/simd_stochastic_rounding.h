// Stochastic rounding of fp32 to fp16 and bf16: a value is rounded up with the probability of the part that is cut off,
// so that small updates count on average.
//
// Element e of a row uses word e % 4 of philox block e / 4 (philox.h, the table's rounding stream), so the bits depend
// only on (seed, table, key, step, element). The low 16 random bits decide for bf16, the low 13 for fp16; they are
// added below the last bit that stays. Below fp16's smallest normal number the step is 2^-24. A finite value stays
// finite: above the largest it becomes the largest. src/hotrow/kernels/rows/stochastic_rounding.py gives the same bits
// on a GPU; stochastic_round in tests/kernels/reference.py is the reference of both.
//
// Included by simd_kernels.cpp alone, once per instruction set; its rules hold here too.
#pragma once

#include <cstring>

#include "random/philox.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hotrow {
namespace {

struct RoundingDraws {
  uint64_t stream;
  int64_t key;
  uint32_t step;
};

// Eight values at once. Without AVX2 the compiler uses two SSE registers for one vector.
typedef uint32_t Words __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef float Floats __attribute__((vector_size(32)));
typedef uint16_t Halfs __attribute__((vector_size(16)));

constexpr int kValuesPerDraw = 16;  // values at once: four blocks of draws

// bits[e] for elements e of four blocks from `block` on.
inline __attribute__((always_inline)) void draw_rounding(const uint32_t (&counter)[3], uint32_t block, uint64_t stream,
                                                         uint32_t (&bits)[kValuesPerDraw]) {
#if defined(__AVX2__)
  // As philox_blocks, with all four blocks in one register. With this and vectorised rounding, updates of 16-bit rows
  // run at 0.85 of the speed of fp32 rows instead of 0.70 (dim 64, one thread, rows in the cache, EPYC).
  __m256i c[4] = {_mm256_set1_epi64x(counter[0]), _mm256_set1_epi64x(counter[1]), _mm256_set1_epi64x(counter[2]),
                  _mm256_set_epi64x(block + 3, block + 2, block + 1, block)};
  const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
  uint32_t key0 = static_cast<uint32_t>(stream), key1 = static_cast<uint32_t>(stream >> 32);
  for (int round = 0; round < 10; ++round) {
    const __m256i x = _mm256_mul_epu32(c[0], m0), y = _mm256_mul_epu32(c[2], m1);
    c[0] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(y, 32), c[1]), _mm256_set1_epi64x(key0));
    c[2] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(x, 32), c[3]), _mm256_set1_epi64x(key1));
    c[1] = y;
    c[3] = x;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  // 64-bit lane b has word w of block b in its low half: pairs of words, then pairs of pairs, then blocks in order.
  const __m256i low = _mm256_blend_epi32(c[0], _mm256_slli_epi64(c[1], 32), 0xAA);
  const __m256i high = _mm256_blend_epi32(c[2], _mm256_slli_epi64(c[3], 32), 0xAA);
  const __m256i even = _mm256_unpacklo_epi64(low, high), odd = _mm256_unpackhi_epi64(low, high);
  auto* out = reinterpret_cast<__m256i*>(bits);
  _mm256_storeu_si256(out, _mm256_permute2x128_si256(even, odd, 0x20));
  _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(even, odd, 0x31));
#else
  uint32_t words[4][4];
  philox_blocks(counter, block, stream, words);
  for (int e = 0; e < kValuesPerDraw; ++e) bits[e] = words[e % 4][e / 4];
#endif
}

// The 16-bit patterns of floats `x` whose magnitudes were rounded. Finite values stay finite; infinities and NaN are
// kept.
inline __attribute__((always_inline)) Halfs finish_rounding(Words x, Ints rounded, int32_t infinite) {
  const Ints size = reinterpret_cast<Ints>(x & 0x7fffffff);
  rounded = rounded < infinite ? rounded : Ints{} + (infinite - 1);
  const Ints special = size == 0x7f800000 ? Ints{} + infinite : Ints{} + (infinite | infinite >> 1);
  rounded = size < 0x7f800000 ? rounded : special;
  return __builtin_convertvector(reinterpret_cast<Words>(rounded) | (x >> 16 & 0x8000), Halfs);
}

inline __attribute__((always_inline)) Halfs round_bf16_stochastically(Words x, Words bits) {
  const Words rounded = ((x & 0x7fffffff) + (bits & 0xffff)) >> 16;
  return finish_rounding(x, reinterpret_cast<Ints>(rounded), 0x7f80);
}

inline __attribute__((always_inline)) Halfs round_fp16_stochastically(Words x, Words bits) {
  const Words size = x & 0x7fffffff;
  const Words small = reinterpret_cast<Words>(reinterpret_cast<Ints>(size) < 0x38800000);  // 2^-14
  const Words below = size & small;
  const Words steps = reinterpret_cast<Words>(
      __builtin_convertvector(reinterpret_cast<Floats>(below) * 137438953472.0f, Ints));  // of 2^-37; below 2^23
  const Words cut = bits & 0x1fff;
  const Words rounded = ((steps + cut) >> 13 & small) | ((((size + cut) >> 13) - 0x1c000) & ~small);
  return finish_rounding(x, reinterpret_cast<Ints>(rounded), 0x7c00);
}

// Values in place: `dim` floats become as many 16-bit ones, at the front, and zeros up to a multiple of 4 bytes.
template <class Round>
inline __attribute__((always_inline)) void round_values(const RoundingDraws& draws, float* values, int dim,
                                                        Round round) {
  const auto key = static_cast<uint64_t>(draws.key);
  const uint32_t counter[3] = {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), draws.step};
  auto* out = reinterpret_cast<char*>(values);
  for (int begin = 0; begin < dim; begin += kValuesPerDraw) {
    uint32_t bits[kValuesPerDraw], some[kValuesPerDraw] = {};
    draw_rounding(counter, static_cast<uint32_t>(begin / 4), draws.stream, bits);
    const int count = dim - begin < kValuesPerDraw ? dim - begin : kValuesPerDraw;
    std::memcpy(some, values + begin, static_cast<size_t>(count) * sizeof(float));
    uint16_t rounded[kValuesPerDraw];
    for (int part = 0; part < kValuesPerDraw; part += 8) {
      Words x, r;
      std::memcpy(&x, some + part, sizeof(x));
      std::memcpy(&r, bits + part, sizeof(r));
      const Halfs halfs = round(x, r);
      std::memcpy(rounded + part, &halfs, sizeof(halfs));
    }
    std::memcpy(out + begin * sizeof(uint16_t), rounded, static_cast<size_t>(count + (count & 1)) * sizeof(uint16_t));
  }
}

}  // namespace
}  // namespace hotrow
