// The index lookup: key to slot, and lock-free reads of rows under the seqlock of shard_index.h.
//
// Included by simd_kernels.cpp alone, once per instruction set; its rules hold here too.
#pragma once

#include "kernels/row_kernels.h"
#include "kernels/simd_values.h"

namespace hotrow {
namespace {

// Bit i: entries[i] & mask == want.
HOTROW_INLINE uint32_t match_line(const uint32_t* entries, uint32_t mask, uint32_t want) {
#if defined(__AVX2__) && !defined(__SANITIZE_THREAD__)
  __m256i m = _mm256_set1_epi32(static_cast<int>(mask)), w = _mm256_set1_epi32(static_cast<int>(want));
  auto half = [&](const uint32_t* p) {
    __m256i e = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return static_cast<uint32_t>(
        _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(e, m), w))));
  };
  return half(entries) | half(entries + 8) << 8;
#elif defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
  __m128i m = _mm_set1_epi32(static_cast<int>(mask)), w = _mm_set1_epi32(static_cast<int>(want));
  auto quarter = [&](const uint32_t* p) {
    __m128i e = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return static_cast<uint32_t>(_mm_movemask_ps(_mm_castsi128_ps(_mm_cmpeq_epi32(_mm_and_si128(e, m), w))));
  };
  return quarter(entries) | quarter(entries + 4) << 4 | quarter(entries + 8) << 8 | quarter(entries + 12) << 12;
#else
  uint32_t bits = 0;
  for (uint32_t i = 0; i < kEntriesPerLine; ++i)
    bits |= static_cast<uint32_t>((__atomic_load_n(&entries[i], __ATOMIC_RELAXED) & mask) == want) << i;
  return bits;
#endif
}

HOTROW_INLINE int64_t key_at(const HeaderGroup* headers, uint32_t slot) {
  return __atomic_load_n(&headers[slot / 4].key[slot % 4], __ATOMIC_RELAXED);
}

HOTROW_INLINE void pause_briefly() {
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
  _mm_pause();
#endif
}

// The start of a key's probe: its shard's fields, consistent at an even `version`. A writer may change the shard
// afterwards. Then the entries read through a ProbeStart are stale, but readable, and name existing slots.
struct ProbeStart {
  const uint32_t* entries;
  uint32_t version, lines, slot_bits, line, tag, mask;
};

HOTROW_INLINE bool unchanged(const ShardIndex& index, uint32_t version) {
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return __atomic_load_n(&index.version, __ATOMIC_RELAXED) == version;
}

HOTROW_INLINE ProbeStart probe_start(const ShardIndex& index, uint64_t hash) {
  ProbeStart start;
  while (true) {
    start.version = __atomic_load_n(&index.version, __ATOMIC_ACQUIRE);
    start.entries = __atomic_load_n(&index.entries, __ATOMIC_RELAXED);
    start.lines = __atomic_load_n(&index.lines, __ATOMIC_RELAXED);
    start.slot_bits = __atomic_load_n(&index.slot_bits, __ATOMIC_RELAXED);
    if (!(start.version & 1) && unchanged(index, start.version)) break;
    pause_briefly();
  }
  start.line = ShardIndex::line_of(hash, start.lines);
  start.tag = ShardIndex::tag_of(hash, start.slot_bits);
  start.mask = ShardIndex::tag_mask(start.slot_bits);
  return start;
}

HOTROW_INLINE const uint32_t* line_at(const ProbeStart& start, uint32_t line) {
  return start.entries + size_t{line} * kEntriesPerLine;
}

HOTROW_INLINE uint32_t slot_in(const ProbeStart& start, uint32_t entry) {
  return (entry & ~start.mask) - kFirstSlotCode;
}

// Candidates of a line: entries with the tag that are neither empty nor deleted.
HOTROW_INLINE uint32_t candidates(const ProbeStart& start, const uint32_t* entries) {
  uint32_t bits = match_line(entries, start.mask, start.tag);
  if (start.tag == 0) bits &= ~(match_line(entries, ~0u, kEmptyEntry) | match_line(entries, ~0u, kDeletedEntry));
  return bits;
}

// Every lookup ends here. Bounded by the number of lines, so that a reader of stale entries terminates.
HOTROW_INLINE uint32_t find_slot(const ProbeStart& start, const HeaderGroup* headers, int64_t key) {
  uint32_t line = start.line;
  for (uint32_t tried = 0; tried < start.lines; ++tried) {
    const uint32_t* entries = line_at(start, line);
    for (uint32_t bits = candidates(start, entries); bits; bits &= bits - 1) {
      uint32_t entry = __atomic_load_n(&entries[__builtin_ctz(bits)], __ATOMIC_RELAXED);
      // A racing writer may have erased it, or another shard may have reused the line: then it is not a slot of this
      // shard.
      if ((entry & ~start.mask) < kFirstSlotCode) continue;
      uint32_t slot = slot_in(start, entry);
      if (key_at(headers, slot) == key) return slot;
    }
    if (match_line(entries, ~0u, kEmptyEntry)) return kNoSlot;
    if (++line == start.lines) line = 0;
  }
  return kNoSlot;
}

// A search in steps that each cost a cache miss: shard, index line, header (and row), compare. use(i, start) gets key i
// after its memory was prefetched: the steps run 3, 2 and 1 times kGroup keys ahead.
template <class Use>
HOTROW_INLINE void search(const FindArgs& args, size_t row_bytes, Use use) {
  constexpr size_t kRing = 2 * kGroup;
  ProbeStart ring[kRing];
  const RowView& view = args.view;
  for (size_t i = 0; i < args.count + kRing; ++i) {
    if (i >= kRing) use(i - kRing, ring[i % kRing]);
    if (i + kGroup < args.count) __builtin_prefetch(&view.shards[shard_of(args.hashes[i + kGroup])]);
    if (i < args.count) {
      ProbeStart& start = ring[i % kRing];
      start = probe_start(view.shards[shard_of(args.hashes[i])], args.hashes[i]);
      if (start.lines) __builtin_prefetch(line_at(start, start.line));
    }
    if (i >= kGroup && i - kGroup < args.count) {
      const ProbeStart& start = ring[(i - kGroup) % kRing];
      if (!start.lines) continue;
      const uint32_t* entries = line_at(start, start.line);
      if (uint32_t bits = candidates(start, entries)) {
        uint32_t slot = slot_in(start, __atomic_load_n(&entries[__builtin_ctz(bits)], __ATOMIC_RELAXED));
        __builtin_prefetch(&view.headers[slot / 4].key[slot % 4]);
        if (row_bytes) prefetch_row(view.rows + size_t{slot} * view.row_bytes, row_bytes);
      }
    }
  }
}

size_t find(const FindArgs& args) {
  size_t missing = 0;
  search(args, 0, [&](size_t i, const ProbeStart& start) __attribute__((always_inline)) {
    const ShardIndex& index = args.view.shards[shard_of(args.hashes[i])];
    uint32_t slot = find_slot(start, args.view.headers, args.keys[i]);
    for (uint32_t version = start.version; !unchanged(index, version);) {
      ProbeStart again = probe_start(index, args.hashes[i]);
      slot = find_slot(again, args.view.headers, args.keys[i]);
      version = again.version;
    }
    args.slots[i] = slot;
    missing += slot == kNoSlot;
  });
  return missing;
}

// Seqlock: the result counts if the shard's version is still the one that `start` was taken at.
template <RowType kType>
HOTROW_INLINE uint32_t read_row(const RowView& view, ProbeStart start, uint64_t hash, int64_t key, int dim,
                                float* out) {
  const ShardIndex& index = view.shards[shard_of(hash)];
  while (true) {
    uint32_t slot = find_slot(start, view.headers, key);
    if (slot != kNoSlot) read_values(kType, out, view.rows + size_t{slot} * view.row_bytes, dim);
    if (unchanged(index, start.version)) return slot;
    start = probe_start(index, hash);
  }
}

template <RowType kType>
void read_as(const ReadArgs& args) {
  const FindArgs& find = args.find;
  search(find, static_cast<size_t>(words_of(kType, args.dim)) * sizeof(float),
         [&](size_t i, const ProbeStart& start) __attribute__((always_inline)) {
           find.slots[i] =
               read_row<kType>(find.view, start, find.hashes[i], find.keys[i], args.dim, args.out + i * args.dim);
         });
}

void read(const ReadArgs& args) {
  switch (args.type) {
    case RowType::kHalf:
      return read_as<RowType::kHalf>(args);
    case RowType::kByte:
      return read_as<RowType::kByte>(args);
    case RowType::kBFloat:
      return read_as<RowType::kBFloat>(args);
    default:
      return read_as<RowType::kFloat>(args);
  }
}

}  // namespace
}  // namespace hotrow
