// fp32 to fp16 and bf16 by chance: up with the probability of the part that is cut off, so that small updates count.
//
// Element e of a row uses word e % 4 of philox block e / 4 (philox.h; the stream is the table's for rounding): the bits
// depend on (seed, table, key, step, element) alone. The low 16 bits decide for bf16, the low 13 for fp16, added below
// the last bit that stays; below fp16's smallest normal number the same is done in steps of 2^-24. A finite value stays
// finite: beyond the largest it becomes the largest. src/hotrow/kernels/rounding.py gives the same bits on a GPU, and
// reference.round_by_chance is the oracle of both.
//
// Included by simd_kernels.cpp alone, once per instruction set.
#pragma once

#include <cstring>

#include "random/philox.h"

namespace hotrow {
namespace {

struct RoundingDraws {
  uint64_t stream;
  int64_t key;
  uint32_t step;
};

inline __attribute__((always_inline)) uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline __attribute__((always_inline)) uint16_t bfloat_by_chance(float value, uint32_t bits) {
  const uint32_t x = float_bits(value), size = x & 0x7fffffff;
  uint32_t rounded = (size + (bits & 0xffff)) >> 16;
  rounded = rounded < 0x7f7f ? rounded : 0x7f7f;
  const uint32_t special = size == 0x7f800000 ? 0x7f80 : 0x7fc0;
  return static_cast<uint16_t>((size < 0x7f800000 ? rounded : special) | (x >> 31) << 15);
}

inline __attribute__((always_inline)) uint16_t half_by_chance(float value, uint32_t bits) {
  const uint32_t x = float_bits(value), size = x & 0x7fffffff;
  const bool small = size < 0x38800000;  // 2^-14
  const uint32_t normal = ((size + (bits & 0x1fff)) >> 13) - 0x1c000;
  float below;
  const uint32_t below_bits = small ? size : 0;
  std::memcpy(&below, &below_bits, sizeof(below));
  const auto steps = static_cast<uint32_t>(static_cast<int32_t>(below * 137438953472.0f));  // of 2^-37; below 2^23
  uint32_t rounded = small ? (steps + (bits & 0x1fff)) >> 13 : normal;
  rounded = rounded < 0x7bff ? rounded : 0x7bff;
  const uint32_t special = size == 0x7f800000 ? 0x7c00 : 0x7e00;
  return static_cast<uint16_t>((size < 0x7f800000 ? rounded : special) | (x >> 31) << 15);
}

// Values in place: `dim` floats become as many 16-bit ones, at the front, and zeros up to a multiple of 4 bytes.
template <class Round>
inline __attribute__((always_inline)) void round_values(const RoundingDraws& draws, float* values, int dim,
                                                        Round round) {
  constexpr int kEach = 16;  // four blocks
  const auto key = static_cast<uint64_t>(draws.key);
  const uint32_t counter[3] = {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), draws.step};
  auto* out = reinterpret_cast<char*>(values);
  for (int begin = 0; begin < dim; begin += kEach) {
    uint32_t words[4][4], bits[kEach];
    philox_blocks(counter, static_cast<uint32_t>(begin / 4), draws.stream, words);
    for (int e = 0; e < kEach; ++e) bits[e] = words[e % 4][e / 4];
    float some[kEach] = {};
    const int count = dim - begin < kEach ? dim - begin : kEach;
    std::memcpy(some, values + begin, static_cast<size_t>(count) * sizeof(float));
    uint16_t rounded[kEach];
    for (int e = 0; e < kEach; ++e) rounded[e] = round(some[e], bits[e]);
    if (count < kEach) rounded[count] = 0;
    std::memcpy(out + begin * sizeof(uint16_t), rounded, static_cast<size_t>(count + (count & 1)) * sizeof(uint16_t));
  }
}

}  // namespace
}  // namespace hotrow
