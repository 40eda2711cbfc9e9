// Vectors of floats of the widest kind that this instruction set has, and the functions on them.
//
// Included by attention_kernels.cpp alone, once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace hotrow {
namespace {

#define HOTROW_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr size_t kLanes = 16;
#elif defined(__AVX2__)
constexpr size_t kLanes = 8;
#else
constexpr size_t kLanes = 4;
#endif
#if defined(__AVX512F__)
constexpr int kBlockRows = 8;  // rows x two vectors of sums stay in registers
#else
constexpr int kBlockRows = 4;
#endif

using Vec = float __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
using IntVec = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4), may_alias));

HOTROW_INLINE Vec load(const float* from) { return *reinterpret_cast<const Vec*>(from); }
HOTROW_INLINE IntVec load(const int32_t* from) { return *reinterpret_cast<const IntVec*>(from); }
HOTROW_INLINE void store(float* to, Vec value) { *reinterpret_cast<Vec*>(to) = value; }
HOTROW_INLINE Vec all(float value) { return Vec{} + value; }
HOTROW_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }
HOTROW_INLINE Vec smaller(Vec a, Vec b) { return a < b ? a : b; }

// 2^x with a relative error below 3e-7; exactly 0 for x < -126. Requires: x <= 127.
HOTROW_INLINE Vec exp2_of(Vec x) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Vec clamped = larger(x, all(-126.f));
  const Vec shifted = clamped + kRound;
  const Vec f = clamped - (shifted - kRound);
  // Minimax for the relative error over [-0.5, 0.5], with the constant term 1.
  Vec p = all(1.5353359470827652e-4f);
  p = p * f + 1.3398879858851215e-3f;
  p = p * f + 9.618437411860543e-3f;
  p = p * f + 5.5503324548288824e-2f;
  p = p * f + 0.24022647912612982f;
  p = p * f + 0.693147202864838f;
  p = p * f + 1.f;
  const IntVec bits = reinterpret_cast<IntVec&>(p) + (reinterpret_cast<const IntVec&>(shifted) << 23);
  return x < -126.f ? Vec{} : reinterpret_cast<const Vec&>(bits);
}

constexpr float kLog2e = 1.4426950408889634f;

// 1 / (1 + e^-x)
HOTROW_INLINE Vec sigmoid(Vec x) {
  return 1.f / (1.f + exp2_of(smaller(larger(x * -kLog2e, all(-126.f)), all(126.f))));
}

}  // namespace
}  // namespace hotrow
