// Stable hashing: the same bytes give the same key on every machine, in training and in serving, permanently.
//
//   hash_bytes   XXH64 (the published 64-bit algorithm) of the bytes, with a seed.
//   hash_int     mix64(x + seed * 0x9E3779B97F4A7C15), a bijection of the integers for every seed.
//   cross        mix64(a ^ rotl(b * 0x9E3779B97F4A7C15, 31)), not symmetric; folds left over more than two keys.
//   hash_key     mix64(key + 0x9E3779B97F4A7C15): the hash that both indexes use. shard_of: its top ten bits, one of
//                1,024 fixed shards.
//
// The definitions are a format: docs/formats/hashing.md has them in words and tests/features/test_hashing.py has golden
// values. Changing a definition makes every trained row unreachable.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotrow {

inline constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
inline constexpr int kShardBits = 10;
inline constexpr int kShards = 1 << kShardBits;

// The finaliser of splitmix64: a bijection, so distinct keys never collide as 64-bit hashes.
inline uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9ull;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

inline uint64_t rotl64(uint64_t x, int r) { return (x << r) | (x >> (64 - r)); }

inline uint64_t hash_int(uint64_t x, uint64_t seed) { return mix64(x + seed * kGolden); }
inline uint64_t cross(uint64_t a, uint64_t b) { return mix64(a ^ rotl64(b * kGolden, 31)); }

// mix64(0) is 0, so the index adds a constant first; shards and index share this one hash of a key.
inline uint64_t hash_key(int64_t key) { return mix64(static_cast<uint64_t>(key) + kGolden); }
inline uint32_t shard_of(uint64_t hash) { return static_cast<uint32_t>(hash >> (64 - kShardBits)); }

uint64_t hash_bytes(const void* data, size_t size, uint64_t seed);

}  // namespace hotrow
