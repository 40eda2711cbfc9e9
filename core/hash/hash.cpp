#include "hash/hash.h"

#include <bit>
#include <cstring>

namespace hotrow {
namespace {

// XXH64's five primes, from its specification.
constexpr uint64_t kP1 = 0x9E3779B185EBCA87ull;
constexpr uint64_t kP2 = 0xC2B2AE3D27D4EB4Full;
constexpr uint64_t kP3 = 0x165667B19E3779F9ull;
constexpr uint64_t kP4 = 0x85EBCA77C2B2AE63ull;
constexpr uint64_t kP5 = 0x27D4EB2F165667C5ull;

static_assert(std::endian::native == std::endian::little, "the hash reads little-endian words");

template <class Word>
uint64_t read(const unsigned char* p) {
  Word word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

uint64_t round64(uint64_t lane, uint64_t input) { return rotl64(lane + input * kP2, 31) * kP1; }
uint64_t merge(uint64_t hash, uint64_t lane) { return (hash ^ round64(0, lane)) * kP1 + kP4; }

}  // namespace

uint64_t hash_bytes(const void* data, size_t size, uint64_t seed) {
  auto p = static_cast<const unsigned char*>(data);
  size_t left = size;
  uint64_t hash = seed + kP5;
  if (left >= 32) {
    uint64_t lanes[4] = {seed + kP1 + kP2, seed + kP2, seed, seed - kP1};
    for (; left >= 32; left -= 32)
      for (auto& lane : lanes) {
        lane = round64(lane, read<uint64_t>(p));
        p += 8;
      }
    hash = rotl64(lanes[0], 1) + rotl64(lanes[1], 7) + rotl64(lanes[2], 12) + rotl64(lanes[3], 18);
    for (auto lane : lanes) hash = merge(hash, lane);
  }
  hash += size;
  for (; left >= 8; left -= 8, p += 8) hash = rotl64(hash ^ round64(0, read<uint64_t>(p)), 27) * kP1 + kP4;
  for (; left >= 4; left -= 4, p += 4) hash = rotl64(hash ^ (read<uint32_t>(p) * kP1), 23) * kP2 + kP3;
  for (; left > 0; --left, ++p) hash = rotl64(hash ^ (*p * kP5), 11) * kP1;
  hash ^= hash >> 33;
  hash *= kP2;
  hash ^= hash >> 29;
  hash *= kP3;
  return hash ^ (hash >> 32);
}

}  // namespace hotrow
