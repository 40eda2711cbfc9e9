// Copying rows that nobody reads again soon: whole lines go to memory without being read first and without pushing
// others out of the cache. A plain copy moves three bytes for each (read, read for ownership, write), this one two.
//
// The stores are not ordered with others: call finish_stream_copies before another thread is told that they are there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hotrow {

inline void stream_copy(void* to, const void* from, size_t bytes) {
#if defined(__SSE2__)
  constexpr size_t kLine = 64;
  auto* out = static_cast<char*>(to);
  auto* in = static_cast<const char*>(from);
  const size_t head = -reinterpret_cast<uintptr_t>(out) % kLine;
  if (bytes >= head + kLine) {
    std::memcpy(out, in, head);
    size_t at = head;
    for (; at + kLine <= bytes; at += kLine) {
      auto* line = reinterpret_cast<__m128i*>(out + at);
      auto* source = reinterpret_cast<const __m128i*>(in + at);
      const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1), c = _mm_loadu_si128(source + 2),
                    d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(line, a);
      _mm_stream_si128(line + 1, b);
      _mm_stream_si128(line + 2, c);
      _mm_stream_si128(line + 3, d);
    }
    std::memcpy(out + at, in + at, bytes - at);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

inline void finish_stream_copies() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace hotrow
