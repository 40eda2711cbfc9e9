// Bulk calls over keys run on the thread pool in chunks of a fixed size.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "hash/hash.h"
#include "threads/thread_pool.h"

namespace hotrow {

inline constexpr size_t kChunk = 4096;  // keys of one task

// Runs fn(begin, end) over [0, count) in fixed chunks.
template <class Fn>
void for_chunks(size_t count, Fn fn) {
  ThreadPool::shared().run(static_cast<int>((count + kChunk - 1) / kChunk),
                           [&](int task) { fn(task * kChunk, std::min(count, (task + size_t{1}) * kChunk)); });
}

// Runs fn(begin, end, hashes of those keys) over [0, count) in fixed chunks. `hashes` may be null.
template <class Fn>
void for_hashed_chunks(const int64_t* keys, const uint64_t* hashes, size_t count, Fn fn) {
  ThreadPool::shared().run(static_cast<int>((count + kChunk - 1) / kChunk), [&](int task) {
    const size_t begin = task * kChunk, end = std::min(count, begin + kChunk);
    if (hashes) return fn(begin, end, hashes + begin);
    std::array<uint64_t, kChunk> own;
    for (size_t i = begin; i < end; ++i) own[i - begin] = hash_key(keys[i]);
    fn(begin, end, own.data());
  });
}

}  // namespace hotrow
