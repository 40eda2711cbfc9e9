// The inner loops, once per instruction set (see kernels.h). Nothing here may emit a shared inline function: the linker
// could then pick the AVX2 copy for the plain code. So helpers are in the unnamed namespace or always inlined.
//
// All loops over random rows work in small groups: ask for the next group's memory, then use this one's. One miss to
// DRAM takes about 100 ns here; eight to sixteen in flight hide it.
#include <cstring>

#include "optim/rules.h"
#include "rows/kernels.h"
#include "rows/simd_pairs.h"
#include "rows/simd_rounding.h"

#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
#include <immintrin.h>
#endif

#define HOTROW_CONCAT(a, b) a##b
#define HOTROW_NAME(a, b) HOTROW_CONCAT(a, b)
#define HOTROW_TEXT(x) #x
#define HOTROW_STRING(x) HOTROW_TEXT(x)

namespace hotrow {
namespace {

#define HOTROW_INLINE inline __attribute__((always_inline))

constexpr size_t kGroup = 16;
constexpr size_t kUpdateAhead = 8;  // rows, each of several lines: more of them would not fit the fill buffers
constexpr size_t kCacheLine = 64;
constexpr size_t kMaxPrefetch = 512;

HOTROW_INLINE void prefetch_row(const char* row, size_t bytes) {
  if (bytes > kMaxPrefetch) bytes = kMaxPrefetch;
  const auto first = reinterpret_cast<uintptr_t>(row) / kCacheLine;
  const auto last = (reinterpret_cast<uintptr_t>(row) + bytes - 1) / kCacheLine;
  for (uintptr_t line = first; line <= last; ++line)
    __builtin_prefetch(reinterpret_cast<const char*>(line * kCacheLine));
}

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

// Where a key's search begins: its shard's fields as they were together at an even `version`. A writer may change the
// shard afterwards; then the entries read through a Place are stale, but they are readable and name existing slots.
struct Place {
  const uint32_t* entries;
  uint32_t version, lines, slot_bits, line, tag, mask;
};

HOTROW_INLINE bool unchanged(const ShardIndex& index, uint32_t version) {
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return __atomic_load_n(&index.version, __ATOMIC_RELAXED) == version;
}

HOTROW_INLINE Place place_of(const ShardIndex& index, uint64_t hash) {
  Place place;
  while (true) {
    place.version = __atomic_load_n(&index.version, __ATOMIC_ACQUIRE);
    place.entries = __atomic_load_n(&index.entries, __ATOMIC_RELAXED);
    place.lines = __atomic_load_n(&index.lines, __ATOMIC_RELAXED);
    place.slot_bits = __atomic_load_n(&index.slot_bits, __ATOMIC_RELAXED);
    if (!(place.version & 1) && unchanged(index, place.version)) break;
    pause_briefly();
  }
  place.line = ShardIndex::line_of(hash, place.lines);
  place.tag = ShardIndex::tag_of(hash, place.slot_bits);
  place.mask = ShardIndex::tag_mask(place.slot_bits);
  return place;
}

HOTROW_INLINE const uint32_t* line_at(const Place& place, uint32_t line) {
  return place.entries + size_t{line} * kEntriesPerLine;
}

HOTROW_INLINE uint32_t slot_in(const Place& place, uint32_t entry) { return (entry & ~place.mask) - kFirstSlotCode; }

// Candidates of a line: entries with the tag that are neither empty nor deleted.
HOTROW_INLINE uint32_t candidates(const Place& place, const uint32_t* entries) {
  uint32_t bits = match_line(entries, place.mask, place.tag);
  if (place.tag == 0) bits &= ~(match_line(entries, ~0u, kEmptyEntry) | match_line(entries, ~0u, kDeletedEntry));
  return bits;
}

// Every lookup ends here. Bounded by the number of lines, so that a reader of stale entries cannot loop for ever.
HOTROW_INLINE uint32_t find_slot(const Place& place, const HeaderGroup* headers, int64_t key) {
  uint32_t line = place.line;
  for (uint32_t tried = 0; tried < place.lines; ++tried) {
    const uint32_t* entries = line_at(place, line);
    for (uint32_t bits = candidates(place, entries); bits; bits &= bits - 1) {
      uint32_t entry = __atomic_load_n(&entries[__builtin_ctz(bits)], __ATOMIC_RELAXED);
      // A writer that we race with may have erased it, or given the line to another shard; then it is no slot of ours.
      if ((entry & ~place.mask) < kFirstSlotCode) continue;
      uint32_t slot = slot_in(place, entry);
      if (key_at(headers, slot) == key) return slot;
    }
    if (match_line(entries, ~0u, kEmptyEntry)) return kNoSlot;
    if (++line == place.lines) line = 0;
  }
  return kNoSlot;
}

// A search in steps, each a cache miss behind the other: shard, index line, header (and row), compare. `use(i, place)`
// gets key i with its memory asked for long before: the steps run 3, 2 and 1 times kGroup keys ahead of it.
template <class Use>
HOTROW_INLINE void search(const FindArgs& args, size_t row_bytes, Use use) {
  constexpr size_t kRing = 2 * kGroup;
  Place ring[kRing];
  const RowView& view = args.view;
  for (size_t i = 0; i < args.count + kRing; ++i) {
    if (i >= kRing) use(i - kRing, ring[i % kRing]);
    if (i + kGroup < args.count) __builtin_prefetch(&view.shards[shard_of(args.hashes[i + kGroup])]);
    if (i < args.count) {
      Place& place = ring[i % kRing];
      place = place_of(view.shards[shard_of(args.hashes[i])], args.hashes[i]);
      if (place.lines) __builtin_prefetch(line_at(place, place.line));
    }
    if (i >= kGroup && i - kGroup < args.count) {
      const Place& place = ring[(i - kGroup) % kRing];
      if (!place.lines) continue;
      const uint32_t* entries = line_at(place, place.line);
      if (uint32_t bits = candidates(place, entries)) {
        uint32_t slot = slot_in(place, __atomic_load_n(&entries[__builtin_ctz(bits)], __ATOMIC_RELAXED));
        __builtin_prefetch(&view.headers[slot / 4].key[slot % 4]);
        if (row_bytes) prefetch_row(view.rows + size_t{slot} * view.row_bytes, row_bytes);
      }
    }
  }
}

size_t find(const FindArgs& args) {
  size_t missing = 0;
  search(args, 0, [&](size_t i, const Place& place) __attribute__((always_inline)) {
    const ShardIndex& index = args.view.shards[shard_of(args.hashes[i])];
    uint32_t slot = find_slot(place, args.view.headers, args.keys[i]);
    for (uint32_t version = place.version; !unchanged(index, version);) {
      Place again = place_of(index, args.hashes[i]);
      slot = find_slot(again, args.view.headers, args.keys[i]);
      version = again.version;
    }
    args.slots[i] = slot;
    missing += slot == kNoSlot;
  });
  return missing;
}

HOTROW_INLINE void copy_racing(float* to, const char* from, int dim) {
#if defined(__SANITIZE_THREAD__)
  auto source = reinterpret_cast<const uint32_t*>(from);
  for (int i = 0; i < dim; ++i) {
    uint32_t word = __atomic_load_n(&source[i], __ATOMIC_RELAXED);
    std::memcpy(to + i, &word, sizeof(word));
  }
#else
  std::memcpy(to, from, static_cast<size_t>(dim) * sizeof(float));
#endif
}

// Parts of a row that a writer may be changing; the sanitizer is to see atomic loads.
HOTROW_INLINE uint32_t word_at(const char* row, int word) {
#if defined(__SANITIZE_THREAD__)
  return __atomic_load_n(reinterpret_cast<const uint32_t*>(row) + word, __ATOMIC_RELAXED);
#else
  uint32_t bits;
  std::memcpy(&bits, row + word * sizeof(bits), sizeof(bits));
  return bits;
#endif
}

HOTROW_INLINE float float_at(const char* row, int word) {
  const uint32_t bits = word_at(row, word);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

HOTROW_INLINE uint32_t half_at(const char* row, int i) {
#if defined(__SANITIZE_THREAD__)
  return word_at(row, i / 2) >> (i % 2 * 16) & 0xffff;
#else
  uint16_t half;
  std::memcpy(&half, row + i * sizeof(half), sizeof(half));
  return half;
#endif
}

HOTROW_INLINE uint32_t byte_at(const char* row, int i) {
#if defined(__SANITIZE_THREAD__)
  return word_at(row, i / 4) >> (i % 4 * 8) & 0xff;
#else
  return static_cast<unsigned char>(row[i]);
#endif
}

// Without a branch, so that it becomes vectors, and without subnormal floats, so that no mode of the FPU changes it: a
// half below 2^-14 gets the exponent of 2^-14 and then 2^-14 taken off.
HOTROW_INLINE float float_of_half(uint32_t half) {
  const uint32_t size = half & 0x7fff, exponent = size & 0x7c00;
  const uint32_t low = exponent == 0 ? ~0u : 0, high = exponent == 0x7c00 ? ~0u : 0;
  const uint32_t bits = (size << 13) + (112u << 23) + (high & (112u << 23)) + (low & (1u << 23));
  const uint32_t taken_bits = low & 0x38800000u;
  float value, taken;
  std::memcpy(&value, &bits, sizeof(value));
  std::memcpy(&taken, &taken_bits, sizeof(taken));
  value -= taken;
  uint32_t result;
  std::memcpy(&result, &value, sizeof(result));
  result |= (half & 0x8000) << 16;
  std::memcpy(&value, &result, sizeof(value));
  return value;
}

HOTROW_INLINE float float_of_bfloat(uint32_t bfloat) {
  const uint32_t bits = bfloat << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Value i of a row, where values stand for themselves.
template <RowType kType>
HOTROW_INLINE float value_at(const char* row, int i) {
  if constexpr (kType == RowType::kHalf) return float_of_half(half_at(row, i));
  if constexpr (kType == RowType::kBFloat) return float_of_bfloat(half_at(row, i));
  return float_at(row, i);
}

HOTROW_INLINE void read_values(RowType type, float* __restrict to, const char* from, int dim) {
  if (type == RowType::kHalf) {
    for (int i = 0; i < dim; ++i) to[i] = value_at<RowType::kHalf>(from, i);
  } else if (type == RowType::kBFloat) {
    for (int i = 0; i < dim; ++i) to[i] = value_at<RowType::kBFloat>(from, i);
  } else if (type == RowType::kByte) {
    const float scale = float_at(from, (dim + 3) / 4), bias = float_at(from, (dim + 3) / 4 + 1);
    for (int i = 0; i < dim; ++i) to[i] = static_cast<float>(static_cast<int32_t>(byte_at(from, i))) * scale + bias;
  } else {
    copy_racing(to, from, dim);
  }
}

void decode(RowType type, const char* row, int dim, float* out) { read_values(type, out, row, dim); }

// Seqlock: what was found and copied counts if the shard's version is still the one that the place was taken at.
template <RowType kType>
HOTROW_INLINE uint32_t read_row(const RowView& view, Place place, uint64_t hash, int64_t key, int dim, float* out) {
  const ShardIndex& index = view.shards[shard_of(hash)];
  while (true) {
    uint32_t slot = find_slot(place, view.headers, key);
    if (slot != kNoSlot) read_values(kType, out, view.rows + size_t{slot} * view.row_bytes, dim);
    if (unchanged(index, place.version)) return slot;
    place = place_of(index, hash);
  }
}

template <RowType kType>
void read_as(const ReadArgs& args) {
  const FindArgs& find = args.find;
  search(find, static_cast<size_t>(words_of(kType, args.dim)) * sizeof(float),
         [&](size_t i, const Place& place) __attribute__((always_inline)) {
           find.slots[i] =
               read_row<kType>(find.view, place, find.hashes[i], find.keys[i], args.dim, args.out + i * args.dim);
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

// Calls fn with the dim as a constant where it is a common one, so that its loops unroll.
template <class Fn>
HOTROW_INLINE void with_dim(int dim, Fn fn) {
  switch (dim) {
    case 8:
      return fn.template operator()<8>();
    case 16:
      return fn.template operator()<16>();
    case 32:
      return fn.template operator()<32>();
    case 64:
      return fn.template operator()<64>();
    case 128:
      return fn.template operator()<128>();
    default:
      return fn.template operator()<0>();
  }
}

struct RowAt {
  const char* rows;
  size_t row_bytes;
  const uint32_t* index;
  const uint32_t* inverse;

  HOTROW_INLINE const char* operator()(size_t position) const {
    uint32_t unique = inverse[position];
    return rows + size_t{index ? index[unique] : unique} * row_bytes;
  }
};

template <int kDim, RowType kType = RowType::kFloat>
HOTROW_INLINE void add_row(float* __restrict out, const char* row, float weight, bool weighted, bool first, int dim) {
  if constexpr (kDim) dim = kDim;
  auto value = [row](int i) __attribute__((always_inline)) { return value_at<kType>(row, i); };
  if (first && !weighted)
    for (int i = 0; i < dim; ++i) out[i] = value(i);
  else if (first)
    for (int i = 0; i < dim; ++i) out[i] = weight * value(i);
  else if (!weighted)
    for (int i = 0; i < dim; ++i) out[i] += value(i);
  else
    for (int i = 0; i < dim; ++i) out[i] += weight * value(i);
}

// One row per bag into memory that nobody reads soon: stores that go past the cache spare reading the lines first (dim
// 64, 26 features, batch 4,096: 27 MB).
template <int kDim>
bool copy_past_cache([[maybe_unused]] const PoolArgs& args) {
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
  constexpr size_t kAlign = sizeof(__m128);
  if (!kDim || !args.large || args.offsets || args.weights || args.out_stride % 4 ||
      reinterpret_cast<uintptr_t>(args.out) % kAlign)
    return false;
  const RowAt row_at{args.rows, args.row_bytes, args.index, args.inverse};
  for (size_t bag = args.bag_begin; bag < args.bag_end; ++bag) {
    if (bag + kGroup < args.bag_end) prefetch_row(row_at(bag + kGroup), kDim * sizeof(float));
    auto row = reinterpret_cast<const float*>(row_at(bag));
    float* out = args.out + bag * args.out_stride;
    for (int i = 0; i < kDim; i += 4) _mm_stream_ps(out + i, _mm_loadu_ps(row + i));
  }
  _mm_sfence();
  return true;
#else
  return false;
#endif
}

template <int kDim, RowType kType>
void pool_rows(const PoolArgs& args) {
  if (kType == RowType::kFloat && copy_past_cache<kDim>(args)) return;
  const int dim = kDim ? kDim : args.dim;
  const RowAt row_at{args.rows, args.row_bytes, args.index, args.inverse};
  const size_t value_bytes = static_cast<size_t>(words_of(kType, dim)) * sizeof(float);
  const bool single = !args.offsets || args.pooling == Pooling::kNone;
  size_t position = single ? args.bag_begin : args.offsets[args.bag_begin];
  const size_t end = single ? args.bag_end : args.offsets[args.bag_end];
  for (size_t ahead = position; ahead < end && ahead < position + kGroup; ++ahead)
    prefetch_row(row_at(ahead), value_bytes);
  for (size_t bag = args.bag_begin; bag < args.bag_end; ++bag) {
    float* out = args.out + bag * args.out_stride;
    const size_t bag_end = single ? bag + 1 : args.offsets[bag + 1];
    const size_t length = bag_end - position;
    if (length == 0) std::memset(out, 0, static_cast<size_t>(dim) * sizeof(float));
    for (bool first = true; position < bag_end; ++position, first = false) {
      if (position + kGroup < end) prefetch_row(row_at(position + kGroup), value_bytes);
      add_row<kDim, kType>(out, row_at(position), args.weights ? args.weights[position] : 1.0f, args.weights != nullptr,
                           first, dim);
    }
    if (args.pooling == Pooling::kMean && length > 1)
      for (int i = 0; i < dim; ++i) out[i] /= static_cast<float>(length);
  }
}

template <RowType kType>
void pool_as(const PoolArgs& args) {
  with_dim(args.dim, [&]<int kDim>() { pool_rows<kDim, kType>(args); });
}

// Requires: not kByte.
void pool(const PoolArgs& args) {
  switch (args.type) {
    case RowType::kHalf:
      return pool_as<RowType::kHalf>(args);
    case RowType::kBFloat:
      return pool_as<RowType::kBFloat>(args);
    default:
      return pool_as<RowType::kFloat>(args);
  }
}

bool all_finite(const float* values, size_t count) {
  // A float is not finite when all its exponent bits are set.
  size_t i = 0;
  for (; i + 256 <= count; i += 256) {
    uint32_t lanes[16] = {};
    for (size_t j = 0; j < 256; j += 16)
      for (size_t k = 0; k < 16; ++k) {
        uint32_t bits;
        std::memcpy(&bits, values + i + j + k, sizeof(bits));
        lanes[k] |= (bits & 0x7f800000u) == 0x7f800000u;
      }
    uint32_t any = 0;
    for (uint32_t lane : lanes) any |= lane;
    if (any) return false;
  }
  for (; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    if ((bits & 0x7f800000u) == 0x7f800000u) return false;
  }
  return true;
}

struct Gradient {
  const float* row;
  float scale;
  bool scaled;
};

HOTROW_INLINE Gradient gradient_at(const UpdateArgs& args, uint32_t position) {
  const GradSource* source = args.sources;
  while (position >= source->end) ++source;
  if (!source->data) return {nullptr, 1.0f, false};
  uint32_t local = position - source->begin;
  if (source->present && !source->present[local]) return {nullptr, 1.0f, false};
  uint32_t bag = source->bag ? source->bag[local] : local;
  return {source->data + size_t{bag} * source->stride, source->scale ? source->scale[local] : 1.0f,
          source->scale != nullptr};
}

// How a run's gradients are added up: in registers where the dim is a constant, in memory otherwise.
template <int kDim>
struct RunSum {
  Lanes sum[kDim / 8];

  HOTROW_INLINE explicit RunSum(float*) {}
  HOTROW_INLINE void add(const Gradient& g, bool first, int) {
    for (int i = 0; i < kDim / 8; ++i) {
      Lanes value = lanes(g.row + 8 * i);
      if (g.scaled) value *= g.scale;
      sum[i] = first ? value : sum[i] + value;
    }
  }
  HOTROW_INLINE void store(float* out) const {
    for (int i = 0; i < kDim / 8; ++i) lanes(out + 8 * i) = sum[i];
  }
};

template <>
struct RunSum<0> {
  float* sum;

  HOTROW_INLINE explicit RunSum(float* scratch) : sum(scratch) {}
  HOTROW_INLINE void add(const Gradient& g, bool first, int dim) {
    add_row<0>(sum, reinterpret_cast<const char*>(g.row), g.scale, g.scaled, first, dim);
  }
  HOTROW_INLINE void store(float*) const {}
};

template <int kDim>
HOTROW_INLINE void scale_and_clip(const UpdateArgs& args, float* __restrict sum, int dim) {
  if constexpr (kDim) dim = kDim;
  if (args.grad_scale != 1.0f)
    for (int i = 0; i < dim; ++i) sum[i] *= args.grad_scale;
  if (const float limit = args.clip_value; limit > 0.0f)
    for (int i = 0; i < dim; ++i) sum[i] = sum[i] < -limit ? -limit : sum[i] > limit ? limit : sum[i];
  if (args.clip_norm > 0.0f) {
    float norm = std::sqrt(sum_of_squares<kDim>(sum, dim));
    if (norm > args.clip_norm) {
      float shrink = args.clip_norm / norm;
      for (int i = 0; i < dim; ++i) sum[i] *= shrink;
    }
  }
}

// The gradient of one unique row: its run summed in batch order, then scaled and clipped. Null where there is none.
template <int kDim>
HOTROW_INLINE const float* sum_run(const UpdateArgs& args, size_t unique, int dim, bool plain) {
  const uint32_t begin = args.run_begin[unique], end = args.run_begin[unique + 1];
  // The runs of this task lie one behind the other, so looking ahead in them reaches the next rows' gradients too.
  const uint32_t last = args.run_begin[args.end];
  RunSum<kDim> sum(args.scratch);
  bool any = false;
  for (uint32_t at = begin; at < end; ++at) {
    if (at + kGroup < last)
      if (Gradient ahead = gradient_at(args, args.run[at + kGroup]); ahead.row)
        prefetch_row(reinterpret_cast<const char*>(ahead.row), static_cast<size_t>(dim) * sizeof(float));
    Gradient g = gradient_at(args, args.run[at]);
    if (!g.row) continue;
    if (plain && end - begin == 1 && !g.scaled) return g.row;
    sum.add(g, !any, dim);
    any = true;
  }
  if (!any) return nullptr;
  sum.store(args.scratch);
  if (!plain) scale_and_clip<kDim>(args, args.scratch, dim);
  return args.scratch;
}

// Stores of whole words that a racing reader may load; the sanitizer is to see atomic ones.
HOTROW_INLINE void store_words(char* to, const void* from, size_t bytes) {
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

// The rule on a row of 16-bit values: on floats in the scratch, which are then rounded by chance.
template <class Rule, int kDim>
__attribute__((noinline)) void apply_packed(const UpdateArgs& args, char* row, int64_t key, const float* gradient,
                                            int dim) {
  if constexpr (kDim) dim = kDim;
  const size_t value_bytes = static_cast<size_t>(words_of(args.type, dim)) * sizeof(float);
  const size_t state_bytes = args.view.row_bytes - value_bytes;
  float* copy = args.scratch + dim;
  read_values(args.type, copy, row, dim);
  std::memcpy(copy + dim, row + value_bytes, state_bytes);
  Rule::template apply<kDim>(copy, gradient, dim, args.coefficients);
  store_words(row + value_bytes, copy + dim, state_bytes);
  const RoundingDraws draws{args.rounding_stream, key, args.step};
  if (args.type == RowType::kBFloat)
    round_values(draws, copy, dim, bfloats_by_chance);
  else
    round_values(draws, copy, dim, halfs_by_chance);
  store_words(row, copy, value_bytes);
}

template <class Rule, int kDim>
HOTROW_INLINE void apply_rule(const UpdateArgs& args, char* row, int64_t key, const float* gradient, int dim) {
  if (args.type != RowType::kFloat) return apply_packed<Rule, kDim>(args, row, key, gradient, dim);
#if defined(__SANITIZE_THREAD__)
  // Readers race with us on purpose; make every store of a value atomic so that the sanitizer can check the rest.
  float* copy = args.scratch + dim;
  std::memcpy(copy, row, args.view.row_bytes);
  Rule::template apply<kDim>(copy, gradient, dim, args.coefficients);
  store_words(row, copy, args.view.row_bytes);
#else
  Rule::template apply<kDim>(reinterpret_cast<float*>(row), gradient, dim, args.coefficients);
#endif
}

HOTROW_INLINE void touch_header(const UpdateArgs& args, size_t unique, uint32_t slot) {
  HeaderGroup& group = args.view.headers[slot / 4];
  const uint32_t lane = slot % 4;
  const uint64_t seen = args.seen ? args.seen[unique] : args.run_begin[unique + 1] - args.run_begin[unique];
  group.stamp[lane] = stamp_of(args.step);
  if (uint64_t total = group.count[lane] + seen; total <= kCountMantissa)
    group.count[lane] = static_cast<uint16_t>(total);
  else
    group.count[lane] = add_count_slow(group.count[lane], seen, args.count_stream, group.key[lane], args.step);
}

template <class Rule, int kDim>
void update_rows(const UpdateArgs& args) {
  const int dim = kDim ? kDim : args.dim;
  const RowView& view = args.view;
  const bool plain = args.grad_scale == 1.0f && args.clip_value == 0.0f && args.clip_norm == 0.0f;
  // Always inlined: GCC takes a function of prefetches alone for one without effects and drops the call.
  auto prefetch = [&](size_t unique) __attribute__((always_inline)) {
    if (unique >= args.end) return;
    const HeaderGroup* group = &view.headers[args.slots[unique] / 4];
    __builtin_prefetch(group, 1);
    __builtin_prefetch(reinterpret_cast<const char*>(group + 1) - 1, 1);  // groups straddle lines
    __builtin_prefetch(&view.shards[shard_of(args.hashes[unique])], 1);
    prefetch_row(view.rows + size_t{args.slots[unique]} * view.row_bytes, view.row_bytes);
  };
  for (size_t ahead = args.begin; ahead < args.begin + kUpdateAhead; ++ahead) prefetch(ahead);
  for (size_t unique = args.begin; unique < args.end; ++unique) {
    prefetch(unique + kUpdateAhead);
    const uint32_t slot = args.slots[unique];
    if (view.headers[slot / 4].stamp[slot % 4] == 0) continue;  // a key that was not admitted learns nothing
    const float* gradient = sum_run<kDim>(args, unique, dim, plain);
    ShardIndex& shard = view.shards[shard_of(args.hashes[unique])];
    __atomic_store_n(&shard.version, shard.version + 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    if (gradient)
      apply_rule<Rule, kDim>(args, view.rows + size_t{slot} * view.row_bytes, key_at(view.headers, slot), gradient,
                             dim);
    __atomic_store_n(&shard.version, shard.version + 1, __ATOMIC_RELEASE);
    touch_header(args, unique, slot);
  }
}

template <class Rule>
void update(const UpdateArgs& args) {
  with_dim(args.dim, [&]<int kDim>() { update_rows<Rule, kDim>(args); });
}

template <int kDim>
bool sum_rows(const SumArgs& args) {
  const int dim = kDim ? kDim : args.update.dim;
  const size_t bytes = static_cast<size_t>(dim) * sizeof(float);
  bool all = true;
  for (size_t unique = args.update.begin; unique < args.update.end; ++unique) {
    float* out = args.out + args.offsets[unique];
    const float* gradient = sum_run<kDim>(args.update, unique, dim, true);
    if (gradient)
      std::memcpy(out, gradient, bytes);
    else
      std::memset(out, 0, bytes);
    args.present[args.places[unique]] = gradient != nullptr;
    all &= gradient != nullptr;
  }
  return all;
}

bool sum(const SumArgs& args) {
  bool all = true;
  with_dim(args.update.dim, [&]<int kDim>() { all = sum_rows<kDim>(args); });
  return all;
}

}  // namespace

extern const Kernels HOTROW_NAME(kKernels_, HOTROW_SIMD_LEVEL);
const Kernels HOTROW_NAME(kKernels_, HOTROW_SIMD_LEVEL) = {
    HOTROW_STRING(HOTROW_SIMD_LEVEL),
    find,
    read,
    decode,
    pool,
    all_finite,
    {update<Sgd>, update<Adagrad>, update<RowWiseAdagrad>, update<Adam>, update<AdamW>, update<Ftrl>},
    sum,
    pair_dots,
};

}  // namespace hotrow
