#include "random/initializer.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "random/philox.h"

namespace hotrow {
namespace {

float unit(uint32_t bits) {
  return static_cast<float>(static_cast<int32_t>(bits >> 8)) * 0x1p-24f;
}  // in [0, 1), exact

// Natural logarithm of x in (0, 1]: x = m * 2^e with m in [sqrt(1/2), sqrt(2)), then the series of atanh.
float log_poly(float x) {
  auto bits = std::bit_cast<uint32_t>(x) + (0x3f800000u - 0x3f3504f3u);
  int exponent = static_cast<int>(bits >> 23) - 127;
  float m = std::bit_cast<float>((bits & 0x007fffffu) + 0x3f3504f3u);
  float f = m - 1.0f;
  float s = f / (2.0f + f);
  float z = s * s;
  float series = z * (0.66666667f + z * (0.40000001f + z * (0.28571429f + z * 0.22222222f)));
  return static_cast<float>(exponent) * 0.69314718f + (2.0f * s + s * series);
}

// Cosine and sine of a turn's fraction u in [0, 1): the nearest quarter turn is exact, the rest is at most an eighth.
void cos_sin_turn(float u, float* cosine, float* sine) {
  float quarters = u * 4.0f;
  auto quadrant = static_cast<int>(quarters + 0.5f);
  float x = (quarters - static_cast<float>(quadrant)) * 1.57079633f;
  float z = x * x;
  float c = 1.0f + z * (-0.5f + z * (0.041666667f + z * (-0.0013888889f + z * 2.4801587e-5f)));
  float s = x + x * (z * (-0.16666667f + z * (0.0083333333f + z * (-1.9841270e-4f + z * 2.7557319e-6f))));
  switch (quadrant & 3) {
    case 0:
      *cosine = c, *sine = s;
      break;
    case 1:
      *cosine = -s, *sine = c;
      break;
    case 2:
      *cosine = -c, *sine = -s;
      break;
    default:
      *cosine = s, *sine = -c;
      break;
  }
}

constexpr int kBlocks = 4;  // of four values each: as many as are worth computing side by side
constexpr int kValues = 4 * kBlocks;

void to_uniform(const Initial& initial, const uint32_t (&bits)[4][kBlocks], float* out) {
  const float low = initial.a, high = initial.b, span = high - low;
#if defined(__SSE2__)
  // The same operations in the same order as below, four at a time.
  __m128 words[4];
  for (int w = 0; w < 4; ++w) {
    const __m128i top = _mm_srli_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bits[w])), 8);
    const __m128 unit = _mm_mul_ps(_mm_cvtepi32_ps(top), _mm_set1_ps(0x1p-24f));
    const __m128 value = _mm_add_ps(_mm_set1_ps(low), _mm_mul_ps(_mm_set1_ps(span), unit));
    const __m128 inside = _mm_cmplt_ps(value, _mm_set1_ps(high));  // rounding may reach the upper bound
    words[w] = _mm_or_ps(_mm_and_ps(inside, value), _mm_andnot_ps(inside, _mm_set1_ps(low)));
  }
  _MM_TRANSPOSE4_PS(words[0], words[1], words[2], words[3]);
  for (int b = 0; b < kBlocks; ++b) _mm_storeu_ps(out + 4 * b, words[b]);
#else
  for (int b = 0; b < kBlocks; ++b)
    for (int w = 0; w < 4; ++w) {
      const float value = low + span * unit(bits[w][b]);
      out[4 * b + w] = value < high ? value : low;  // rounding may reach the upper bound
    }
#endif
}

void to_normal(const Initial& initial, const uint32_t (&bits)[4][kBlocks], float* out) {
  for (int b = 0; b < kBlocks; ++b)
    for (int w = 0; w < 4; w += 2) {
      float cosine, sine;
      float radius = std::sqrt(-2.0f * log_poly(1.0f - unit(bits[w][b])));
      cos_sin_turn(unit(bits[w + 1][b]), &cosine, &sine);
      out[4 * b + w] = initial.a + initial.b * (radius * cosine);
      out[4 * b + w + 1] = initial.a + initial.b * (radius * sine);
    }
}

}  // namespace

void write_initial(const Initial& initial, uint64_t stream, int64_t key, float* out, int dim) {
  switch (initial.kind) {
    case InitialKind::kZeros:
      std::fill_n(out, dim, 0.0f);
      return;
    case InitialKind::kConstant:
      std::fill_n(out, dim, initial.a);
      return;
    case InitialKind::kUniform:
    case InitialKind::kNormal:
      break;
  }
  const auto id = static_cast<uint64_t>(key);
  const uint32_t counter[3] = {static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32), 0};
  const auto convert = initial.kind == InitialKind::kUniform ? to_uniform : to_normal;
  uint32_t bits[4][kBlocks];
  int i = 0;
  for (; i + kValues <= dim; i += kValues) {
    philox_blocks(counter, static_cast<uint32_t>(i / 4), stream, bits);
    convert(initial, bits, out + i);
  }
  if (i == dim) return;
  float values[kValues];
  philox_blocks(counter, static_cast<uint32_t>(i / 4), stream, bits);
  convert(initial, bits, values);
  std::copy_n(values, dim - i, out + i);
}

}  // namespace hotrow
