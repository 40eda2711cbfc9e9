// The first values of a row, as a pure function of (seed, table, key).
//
// uniform:  low + (high - low) * u, where u is 24 random bits over 2^24; low where that rounds up to high.
// normal:   Box-Muller over two such draws. log and cosine are our own polynomials in plain float operations, because
//           libm's last bit differs between versions and machines; they are within 2 ulp.
#pragma once

#include <cstdint>

namespace hotrow {

enum class InitialKind : int { kZeros = 0, kConstant = 1, kUniform = 2, kNormal = 3 };

struct Initial {
  InitialKind kind = InitialKind::kZeros;
  float a = 0;  // constant's value, uniform's low, normal's mean
  float b = 0;  // uniform's high, normal's standard deviation
};

// Writes dim values. `stream` is stream_key(seed, table id, Stream::kInitial).
void write_initial(const Initial& initial, uint64_t stream, int64_t key, float* out, int dim);

}  // namespace hotrow
