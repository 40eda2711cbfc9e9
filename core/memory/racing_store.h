// Stores of whole words that a lock-free reader may load at the same time. The reader notices and retries
// (shard_index.h), so plain stores are enough; the thread sanitizer sees atomic ones, so that it can check the rest.
//
// Always inlined: the SIMD kernels compile it once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace hotrow {

// Requires: `bytes` is a multiple of 4.
inline __attribute__((always_inline)) void store_words(char* to, const void* from, size_t bytes) {
#if defined(__SANITIZE_THREAD__)
  for (size_t at = 0; at < bytes; at += sizeof(uint32_t)) {
    uint32_t word;
    std::memcpy(&word, static_cast<const char*>(from) + at, sizeof(word));
    __atomic_store_n(reinterpret_cast<uint32_t*>(to + at), word, __ATOMIC_RELAXED);
  }
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace hotrow
