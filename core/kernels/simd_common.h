// What all SIMD kernels share: constants, prefetching of rows, and dispatch on common dims.
//
// Included by simd_kernels.cpp alone, once per instruction set; its rules hold here too.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
#include <immintrin.h>
#endif

namespace hotrow {
namespace {

#define HOTROW_INLINE inline __attribute__((always_inline))

constexpr size_t kGroup = 16;
constexpr size_t kUpdateAhead = 8;  // rows, each of several lines: more of them would not fit the fill buffers
constexpr size_t kCacheLine = 64;
constexpr size_t kMaxPrefetch = 512;

HOTROW_INLINE void prefetch_row(const char* row, size_t bytes) {
  if (bytes > kMaxPrefetch) bytes = kMaxPrefetch;
  const auto first = reinterpret_cast<uintptr_t>(row) / kCacheLine;
  const auto last = (reinterpret_cast<uintptr_t>(row) + bytes - 1) / kCacheLine;
  for (uintptr_t line = first; line <= last; ++line)
    __builtin_prefetch(reinterpret_cast<const char*>(line * kCacheLine));
}

// Calls fn with the dim as a constant where it is a common one, so that its loops unroll.
template <class Fn>
HOTROW_INLINE void with_dim(int dim, Fn fn) {
  switch (dim) {
    case 8:
      return fn.template operator()<8>();
    case 16:
      return fn.template operator()<16>();
    case 32:
      return fn.template operator()<32>();
    case 64:
      return fn.template operator()<64>();
    case 128:
      return fn.template operator()<128>();
    default:
      return fn.template operator()<0>();
  }
}

}  // namespace
}  // namespace hotrow
