#include "index/ssd_index.h"

#include <bit>
#include <cassert>
#include <cmath>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hotrow {
namespace {

constexpr uint32_t kPerLine = kLine / sizeof(uint64_t);
constexpr uint64_t kEmpty = 0, kDeleted = ~uint64_t{0};
constexpr int kPlaceBits = 40, kHashBits = 64 - kPlaceBits;
constexpr uint64_t kPlaceMask = (uint64_t{1} << kPlaceBits) - 1;
constexpr double kMaxFill = 0.9, kGrowth = 1.2;

// The bits just below those that pick the shard.
uint64_t position(uint64_t hash) { return (hash >> (54 - kHashBits)) & ((uint64_t{1} << kHashBits) - 1); }
uint64_t entry_of(uint64_t hash, uint64_t place) { return position(hash) << kPlaceBits | (place + 1); }
uint64_t place_of(uint64_t entry) { return (entry & kPlaceMask) - 1; }
uint32_t line_of(uint64_t position, uint32_t lines) { return static_cast<uint32_t>((position * lines) >> kHashBits); }

bool is_free(uint64_t entry) { return entry + 1 <= 1; }  // empty or deleted

// The first free entry of a line, or kPerLine. Without a branch per entry, which would be mispredicted.
uint32_t first_free(const uint64_t* entries) {
  uint32_t bits = 1u << kPerLine;
#if defined(__SSE2__)
  const auto* pairs = reinterpret_cast<const __m128i*>(entries);
  const __m128i one = _mm_set1_epi64x(1);
  for (int half = 0; half < 2; ++half) {
    // An entry is free if both words of (entry + 1) / 2 are zero.
    const __m128 a = _mm_castsi128_ps(_mm_srli_epi64(_mm_add_epi64(_mm_load_si128(pairs + 2 * half), one), 1));
    const __m128 b = _mm_castsi128_ps(_mm_srli_epi64(_mm_add_epi64(_mm_load_si128(pairs + 2 * half + 1), one), 1));
    const __m128 words = _mm_or_ps(_mm_shuffle_ps(a, b, 0x88), _mm_shuffle_ps(a, b, 0xdd));
    const __m128i free = _mm_cmpeq_epi32(_mm_castps_si128(words), _mm_setzero_si128());
    bits |= static_cast<uint32_t>(_mm_movemask_ps(_mm_castsi128_ps(free))) << (4 * half);
  }
#else
  for (uint32_t i = 0; i < kPerLine; ++i) bits |= static_cast<uint32_t>(is_free(entries[i])) << i;
#endif
  return static_cast<uint32_t>(std::countr_zero(bits));
}

uint64_t capacity(uint32_t lines) { return static_cast<uint64_t>(lines * double{kPerLine} * kMaxFill); }

uint32_t lines_for_rows(uint32_t shard, uint64_t rows) {
  // As in the DRAM index: sizes are powers of kGrowth, with a different phase for each shard.
  const double phase = static_cast<double>(static_cast<uint32_t>(shard * 2654435769u)) * 0x1p-32;
  const double needed = static_cast<double>(rows) / (kPerLine * kMaxFill);
  const double steps = std::ceil(std::log(std::max(needed, 1.0)) / std::log(kGrowth) - phase);
  auto lines = static_cast<uint32_t>(std::ceil(std::pow(kGrowth, steps + phase)));
  while (capacity(lines) < rows) ++lines;
  return lines;
}

uint64_t load(const uint64_t* entry) { return __atomic_load_n(entry, __ATOMIC_RELAXED); }
void store(uint64_t* entry, uint64_t value) { __atomic_store_n(entry, value, __ATOMIC_RELAXED); }

}  // namespace

SsdIndex::Candidates SsdIndex::find(uint64_t hash) const {
  Candidates found;
  const Shard& shard = shards_[shard_of(hash)];
  const uint32_t lines = __atomic_load_n(&shard.lines, __ATOMIC_RELAXED);
  const uint64_t* entries = __atomic_load_n(&shard.entries, __ATOMIC_RELAXED);
  if (lines == 0) return found;
  const uint64_t want = position(hash);
  uint32_t line = line_of(want, lines);
  for (uint32_t probed = 0; probed < lines; ++probed) {
    bool has_empty = false;
    for (uint32_t i = 0; i < kPerLine; ++i) {
      const uint64_t entry = load(&entries[size_t{line} * kPerLine + i]);
      has_empty |= entry == kEmpty;
      if (entry >> kPlaceBits == want && entry != kEmpty && entry != kDeleted && found.count < kMostCandidates)
        found.place[found.count++] = place_of(entry);
    }
    if (has_empty) break;
    if (++line == lines) line = 0;
  }
  return found;
}

const void* SsdIndex::line(uint64_t hash) const {
  const Shard& shard = shards_[shard_of(hash)];
  return shard.entries + size_t{line_of(position(hash), shard.lines)} * kPerLine;
}

size_t SsdIndex::growth(uint32_t shard, uint64_t more) const {
  const Shard& s = shards_[shard];
  if (uint64_t{s.rows} + s.deleted + more <= s.most) return 0;
  return lines_for_rows(shard, uint64_t{s.rows} + more);
}

void SsdIndex::put(Shard& shard, uint64_t entry) {
  uint32_t line = line_of(entry >> kPlaceBits, shard.lines);
  while (true) {
    uint64_t* entries = shard.entries + size_t{line} * kPerLine;
    if (const uint32_t i = first_free(entries); i < kPerLine) {
      shard.deleted -= entries[i] == kDeleted;
      ++shard.rows;
      store(&entries[i], entry);
      return;
    }
    if (++line == shard.lines) line = 0;
  }
}

void SsdIndex::rebuild(uint32_t number, uint32_t lines) {
  Shard& shard = shards_[number];
  const Shard old = shard;
  auto fresh = reinterpret_cast<uint64_t*>(arena_.allocate(lines));
  // A reader that sees only one of the two changes discards its result (the version has changed); both arrays stay
  // readable.
  if (lines < shard.lines) __atomic_store_n(&shard.lines, lines, __ATOMIC_RELAXED);
  __atomic_store_n(&shard.entries, fresh, __ATOMIC_RELAXED);
  __atomic_store_n(&shard.lines, lines, __ATOMIC_RELAXED);
  shard.deleted = 0;
  shard.most = static_cast<uint32_t>(capacity(lines));
  // A new line has no gaps, so the next entry goes at its number of entries. Old lines fill new lines nearly in order,
  // so each array is scanned about once.
  static thread_local std::vector<uint8_t> filled;
  filled.assign(lines, 0);
  for (size_t i = 0; i < size_t{old.lines} * kPerLine; ++i) {
    const uint64_t entry = old.entries[i];
    if (is_free(entry)) continue;
    uint32_t to = line_of(entry >> kPlaceBits, lines);
    while (filled[to] == kPerLine)
      if (++to == lines) to = 0;
    store(&fresh[size_t{to} * kPerLine + filled[to]++], entry);
  }
  if (old.entries) arena_.release(reinterpret_cast<char*>(old.entries), old.lines);
}

void SsdIndex::insert(uint64_t hash, uint64_t place) {
  const uint32_t number = shard_of(hash);
  if (const size_t lines = growth(number, 1)) rebuild(number, static_cast<uint32_t>(lines));
  put(shards_[number], entry_of(hash, place));
}

uint64_t* SsdIndex::locate(uint64_t hash, uint64_t place) {
  Shard& shard = shards_[shard_of(hash)];
  const uint64_t want = entry_of(hash, place);
  if (shard.lines == 0) return nullptr;
  uint32_t line = line_of(position(hash), shard.lines);
  for (uint32_t probed = 0; probed < shard.lines; ++probed) {
    uint64_t* entries = shard.entries + size_t{line} * kPerLine;
    bool has_empty = false;
    for (uint32_t i = 0; i < kPerLine; ++i) {
      if (entries[i] == want) return &entries[i];
      has_empty |= entries[i] == kEmpty;
    }
    if (has_empty) return nullptr;
    if (++line == shard.lines) line = 0;
  }
  return nullptr;
}

bool SsdIndex::contains(uint64_t hash, uint64_t place) const {
  return const_cast<SsdIndex*>(this)->locate(hash, place) != nullptr;
}

void SsdIndex::erase(uint64_t hash, uint64_t place) {
  uint64_t* entry = locate(hash, place);
  assert(entry);
  Shard& shard = shards_[shard_of(hash)];
  const uint64_t* line = shard.entries + (entry - shard.entries) / kPerLine * kPerLine;
  bool has_empty = false;
  for (uint32_t i = 0; i < kPerLine; ++i) has_empty |= line[i] == kEmpty;
  // No probe continued past a line that was never full, so its entry can become empty.
  store(entry, has_empty ? kEmpty : kDeleted);
  shard.deleted += !has_empty;
  --shard.rows;
}

void SsdIndex::replace(uint64_t hash, uint64_t old_place, uint64_t place) {
  uint64_t* entry = locate(hash, old_place);
  assert(entry);
  store(entry, entry_of(hash, place));
}

void SsdIndex::places(uint32_t number, std::vector<uint64_t>& out) const {
  const Shard& shard = shards_[number];
  for (size_t i = 0; i < size_t{shard.lines} * kPerLine; ++i)
    if (!is_free(shard.entries[i])) out.push_back(place_of(shard.entries[i]));
}

uint64_t SsdIndex::rows() const {
  uint64_t total = 0;
  for (const Shard& shard : shards_) total += shard.rows;
  return total;
}

}  // namespace hotrow
