#include "index/shard_index.h"

#include <bit>
#include <cmath>
#include <cstdlib>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hotrow {
namespace {

constexpr double kMaxFill = 0.93;
constexpr double kGrowth = 1.18;

uint64_t capacity(uint32_t lines) { return static_cast<uint64_t>(lines * double{kEntriesPerLine} * kMaxFill); }

void store(uint32_t* entry, uint32_t value) { __atomic_store_n(entry, value, __ATOMIC_RELAXED); }

// The first empty or deleted entry of a line, or kEntriesPerLine.
uint32_t first_free(const uint32_t* entries) {
#if defined(__SSE2__)
  uint32_t bits = 0;
  for (int quarter = 0; quarter < 4; ++quarter) {
    __m128i e = _mm_load_si128(reinterpret_cast<const __m128i*>(entries) + quarter);
    __m128i free = _mm_cmpeq_epi32(_mm_srli_epi32(e, 1), _mm_setzero_si128());  // 0 and 1
    bits |= static_cast<uint32_t>(_mm_movemask_ps(_mm_castsi128_ps(free))) << (4 * quarter);
  }
  return bits ? static_cast<uint32_t>(std::countr_zero(bits)) : kEntriesPerLine;
#else
  uint32_t i = 0;
  while (i < kEntriesPerLine && entries[i] > kDeletedEntry) ++i;
  return i;
#endif
}

// One bit for each entry of a line that is this one.
uint32_t equal(const uint32_t* entries, uint32_t entry) {
  uint32_t bits = 0;
#if defined(__SSE2__)
  for (int quarter = 0; quarter < 4; ++quarter) {
    __m128i e = _mm_load_si128(reinterpret_cast<const __m128i*>(entries) + quarter);
    __m128i same = _mm_cmpeq_epi32(e, _mm_set1_epi32(static_cast<int>(entry)));
    bits |= static_cast<uint32_t>(_mm_movemask_ps(_mm_castsi128_ps(same))) << (4 * quarter);
  }
#else
  for (uint32_t i = 0; i < kEntriesPerLine; ++i) bits |= static_cast<uint32_t>(entries[i] == entry) << i;
#endif
  return bits;
}

}  // namespace

uint32_t lines_for(uint32_t shard, uint64_t rows) {
  // Sizes are kGrowth^(k + phase) lines; the golden ratio spreads the phases evenly over the shards.
  double phase = static_cast<double>(static_cast<uint32_t>(shard * 2654435769u)) * 0x1p-32;
  double needed = static_cast<double>(rows) / (kEntriesPerLine * kMaxFill);
  double steps = std::ceil(std::log(std::max(needed, 1.0)) / std::log(kGrowth) - phase);
  auto lines = static_cast<uint32_t>(std::ceil(std::pow(kGrowth, steps + phase)));
  while (capacity(lines) < rows) ++lines;
  return lines;
}

uint32_t slot_bits_for(uint64_t slots) {
  uint64_t largest = slots + slots / 2 + kFirstSlotCode;
  return std::min(32, std::max<int>(kMinSlotBits, std::bit_width(largest)));
}

bool ShardWriter::full(const ShardIndex& index, uint64_t more_rows, uint64_t slots) {
  return uint64_t{index.rows} + index.deleted + more_rows > capacity(index.lines) ||
         slots + kFirstSlotCode > (uint64_t{1} << index.slot_bits);
}

void ShardWriter::rebuild(uint32_t lines, uint32_t slot_bits) {
  uint32_t* old = index_.entries;
  uint32_t old_lines = index_.lines;
  uint64_t old_mask = (uint64_t{1} << index_.slot_bits) - 1;
  auto fresh = reinterpret_cast<uint32_t*>(arena_.allocate(lines));
  __atomic_store_n(&index_.entries, fresh, __ATOMIC_RELAXED);
  __atomic_store_n(&index_.lines, lines, __ATOMIC_RELAXED);
  __atomic_store_n(&index_.slot_bits, slot_bits, __ATOMIC_RELAXED);
  index_.deleted = 0;
  // Entries hold only a few hash bits, so the keys are read from the headers, prefetched some lines ahead. A new line
  // has no gaps, so the next entry goes at its number of entries.
  constexpr uint32_t kAhead = 4;
  static thread_local std::vector<uint8_t> filled;
  filled.assign(lines, 0);
  auto slot_of = [&](uint32_t entry) { return static_cast<uint32_t>(entry & old_mask) - kFirstSlotCode; };
  for (uint32_t line = 0; line < old_lines; ++line) {
    const uint32_t* entries = old + size_t{line} * kEntriesPerLine;
    if (line + kAhead < old_lines)
      for (uint32_t i = kAhead * kEntriesPerLine; i < (kAhead + 1) * kEntriesPerLine; ++i)
        if (entries[i] > kDeletedEntry) {
          const uint32_t slot = slot_of(entries[i]);
          __builtin_prefetch(&headers_[slot / 4].key[slot % 4]);
        }
    for (uint32_t i = 0; i < kEntriesPerLine; ++i) {
      if (entries[i] <= kDeletedEntry) continue;
      const uint32_t slot = slot_of(entries[i]);
      const uint64_t hash = hash_key(headers_[slot / 4].key[slot % 4]);
      uint32_t to = ShardIndex::line_of(hash, lines);
      while (filled[to] == kEntriesPerLine)
        if (++to == lines) to = 0;
      store(&fresh[size_t{to} * kEntriesPerLine + filled[to]++],
            ShardIndex::tag_of(hash, slot_bits) | (slot + kFirstSlotCode));
    }
  }
  if (old) arena_.release(reinterpret_cast<char*>(old), old_lines);
}

void ShardWriter::insert(uint64_t hash, uint32_t slot) {
  uint32_t entry = ShardIndex::tag_of(hash, index_.slot_bits) | (slot + kFirstSlotCode);
  uint32_t line = ShardIndex::line_of(hash, index_.lines);
  while (true) {
    uint32_t* entries = index_.entries + size_t{line} * kEntriesPerLine;
    if (const uint32_t i = first_free(entries); i < kEntriesPerLine) {
      index_.deleted -= entries[i] == kDeletedEntry;
      ++index_.rows;
      store(&entries[i], entry);
      return;
    }
    if (++line == index_.lines) line = 0;
  }
}

void ShardWriter::erase(uint64_t hash, uint32_t slot) {
  const uint32_t entry = ShardIndex::tag_of(hash, index_.slot_bits) | (slot + kFirstSlotCode);
  uint32_t line = ShardIndex::line_of(hash, index_.lines);
  for (uint32_t probed = 0; probed < index_.lines; ++probed) {
    uint32_t* entries = index_.entries + size_t{line} * kEntriesPerLine;
    if (const uint32_t found = equal(entries, entry)) {
      // No probe continued past a line that was never full, so its entry can become empty.
      const bool has_empty = equal(entries, kEmptyEntry) != 0;
      store(&entries[std::countr_zero(found)], has_empty ? kEmptyEntry : kDeletedEntry);
      index_.deleted += !has_empty;
      --index_.rows;
      return;
    }
    if (++line == index_.lines) line = 0;
  }
  std::abort();  // the slot has no entry: the index is corrupt
}

}  // namespace hotrow
