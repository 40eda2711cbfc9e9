// Copies rows that will not be read again soon: whole cache lines go to memory without being read first and without
// evicting others. A plain copy moves three bytes for each byte (read, read for ownership, write), this one two.
//
// The stores are not ordered with others: call finish_stream_copies before telling another thread that they are done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace hotrow {

#if defined(__SSE2__)
// A whole line in one store where there is one: the line is never seen half written, which costs a transfer of its own.
__attribute__((target("avx512f"))) inline void stream_lines_at_once(char* out, const char* in, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out + at), _mm512_loadu_si512(in + at));
}

inline void stream_lines(char* out, const char* in, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) {
    auto* line = reinterpret_cast<__m128i*>(out + at);
    auto* source = reinterpret_cast<const __m128i*>(in + at);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1), c = _mm_loadu_si128(source + 2),
                  d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(line, a);
    _mm_stream_si128(line + 1, b);
    _mm_stream_si128(line + 2, c);
    _mm_stream_si128(line + 3, d);
  }
}

inline const bool kLinesAtOnce = (__builtin_cpu_init(), __builtin_cpu_supports("avx512f") != 0);
#endif

inline void stream_copy(void* to, const void* from, size_t bytes) {
#if defined(__SSE2__)
  constexpr size_t kLine = 64;
  auto* out = static_cast<char*>(to);
  auto* in = static_cast<const char*>(from);
  const size_t head = -reinterpret_cast<uintptr_t>(out) % kLine;
  if (bytes >= head + kLine) {
    std::memcpy(out, in, head);
    const size_t lines = (bytes - head) / kLine * kLine;
    (kLinesAtOnce ? stream_lines_at_once : stream_lines)(out + head, in + head, lines);
    std::memcpy(out + head + lines, in + head + lines, bytes - head - lines);
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
