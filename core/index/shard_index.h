// key -> slot, for the keys of one shard.
//
// Lines of sixteen 4-byte entries, probed linearly from the line that the hash picks; one cache miss per lookup. An
// entry is {tag, slot + 2}. The tag (a few hash bits) filters candidates; the whole key in the row's header decides. 0
// is an empty entry (a probe stops at the first line that has one), 1 a deleted one.
//
// Growth is per shard and by steps of 18%: a table of n rows never stops for more than n / 1024 of them, and it keeps
// 78 to 93% of its entries filled, about 4.7 bytes a row. Shards start their steps at different sizes, so that they do
// not all grow in the same batch.
//
// Threads: one writer per shard at a time. Readers take no lock: they read between two equal, even values of `version`
// and try again otherwise; dead lines stay readable (line_arena.h).
//
// Tried and dropped: a 5-byte entry with a whole tag byte (6.1 bytes a row; with the header that exceeds the limit of
// 20 bytes), and keys inside the index (14 bytes a row at this load).
#pragma once

#include <cstddef>
#include <cstdint>

#include "hash/hash.h"
#include "memory/line_arena.h"
#include "rows/row_header.h"

namespace hotrow {

inline constexpr uint32_t kEntriesPerLine = 16;
inline constexpr uint32_t kEmptyEntry = 0;
inline constexpr uint32_t kDeletedEntry = 1;
inline constexpr uint32_t kFirstSlotCode = 2;
inline constexpr int kMinSlotBits = 20;  // so tags have at most 12 bits, the hash bits below those that pick a line

struct alignas(32) ShardIndex {
  uint32_t version = 0;  // odd while a writer is inside the shard (its entries, headers or values)
  uint32_t lines = 0;
  uint32_t* entries = nullptr;
  uint32_t rows = 0;
  uint32_t deleted = 0;
  uint32_t slot_bits = kMinSlotBits;

  // Always inlined, and free of library templates: these are compiled once per instruction set.
  static inline __attribute__((always_inline)) uint32_t line_of(uint64_t hash, uint32_t lines) {
    return static_cast<uint32_t>((((hash >> 12) & 0xffffffffull) * lines) >> 32);
  }
  static inline __attribute__((always_inline)) uint32_t tag_of(uint64_t hash, uint32_t slot_bits) {
    return slot_bits >= 32 ? 0 : static_cast<uint32_t>(hash) << slot_bits;
  }
  static inline __attribute__((always_inline)) uint32_t tag_mask(uint32_t slot_bits) {
    return slot_bits >= 32 ? 0 : ~0u << slot_bits;
  }
};
static_assert(sizeof(ShardIndex) == 32);

// The lines a shard of this many rows should have. The shard number only shifts the sizes at which it grows.
uint32_t lines_for(uint32_t shard, uint64_t rows);
// Enough bits for the slots of a table of `slots`, with room for the growth until this shard's next step.
uint32_t slot_bits_for(uint64_t slots);

// The writer's side. Every call requires that the shard's version is odd, or that no reader exists.
class ShardWriter {
 public:
  ShardWriter(ShardIndex& index, const HeaderGroup* headers, LineArena& arena)
      : index_(index), headers_(headers), arena_(arena) {}

  // Whether one more row, in a slot below `slots`, needs a rebuild first.
  static bool full(const ShardIndex& index, uint64_t more_rows, uint64_t slots);
  void rebuild(uint32_t lines, uint32_t slot_bits);
  // Requires: the key is absent and the shard is not full.
  void insert(uint64_t hash, uint32_t slot);
  // Requires: the key is present in `slot`.
  void erase(uint64_t hash, uint32_t slot);

 private:
  ShardIndex& index_;
  const HeaderGroup* headers_;
  LineArena& arena_;
};

// Marks a shard as being written for as long as it lives. One writer per shard at a time.
class ShardWriteScope {
 public:
  explicit ShardWriteScope(ShardIndex& index) : index_(index) {
    __atomic_store_n(&index_.version, index_.version + 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
  }
  ~ShardWriteScope() { __atomic_store_n(&index_.version, index_.version + 1, __ATOMIC_RELEASE); }
  ShardWriteScope(const ShardWriteScope&) = delete;
  ShardWriteScope& operator=(const ShardWriteScope&) = delete;

 private:
  ShardIndex& index_;
};

}  // namespace hotrow
