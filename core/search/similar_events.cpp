#include "search/similar_events.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string_view>
#include <vector>

#include "threads/thread_pool.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HOTROW_HAS_VNNI 1
// GCC 12's own header initialises the undefined value of its intrinsics by itself, and warns of that (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#endif

namespace hotrow {

bool has_similar_events() {
#ifdef HOTROW_HAS_VNNI
  static const bool has = [] {
    const char* wish = std::getenv("HOTROW_SIMD");
    const std::string_view most = wish ? wish : "";
    return most != "baseline" && most != "avx2" && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  }();
  return has;
#else
  return false;
#endif
}

#ifdef HOTROW_HAS_VNNI
#define HOTROW_VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))

namespace {

constexpr size_t kLanes = 16;       // events of a block
constexpr size_t kTile = 8;         // candidates that are compared with two blocks at once
constexpr size_t kPackBlocks = 64;  // blocks that a task packs
constexpr size_t kSerialProducts = 1 << 22;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// The events of a user in 8 bits. Blocks of 16 events: 4 adjacent dims of each event, then the next 4 of each.
struct Packed {
  size_t blocks, groups;                 // groups of 4 dims
  std::vector<uint8_t> values;           // the integer plus 128
  std::vector<float> scale, norm, lost;  // of each event: the scale, |e|, |e - scale * integers|
};

struct Rounded {
  float scale, norm, lost;
};

HOTROW_VNNI __mmask16 mask_of(size_t left) {
  return left >= kLanes ? __mmask16(0xffff) : static_cast<__mmask16>((1u << left) - 1);
}

// `values` in 8 bits, 16 at a time, each 16 to `to(i)`: 4 bytes `stride` apart if `stride`, else adjacent.
HOTROW_VNNI Rounded round_values(const float* values, size_t dim, uint8_t* to, size_t stride, int bias) {
  __m512 most = _mm512_setzero_ps(), squares = _mm512_setzero_ps(), rest = _mm512_setzero_ps();
  for (size_t i = 0; i < dim; i += kLanes) {
    const __m512 x = _mm512_maskz_loadu_ps(mask_of(dim - i), values + i);
    most = _mm512_max_ps(most, _mm512_abs_ps(x));
    squares = _mm512_fmadd_ps(x, x, squares);
  }
  const float largest = _mm512_reduce_max_ps(most);
  const float scale = largest / 127.f, inverse = largest > 1e-30f ? 127.f / largest : 0.f;
  for (size_t i = 0; i < dim; i += kLanes) {
    const __m512 x = _mm512_maskz_loadu_ps(mask_of(dim - i), values + i);
    const __m512i integers = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse)));
    const __m512 gone = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(integers), _mm512_set1_ps(scale), x);
    rest = _mm512_fmadd_ps(gone, gone, rest);
    alignas(16) uint32_t words[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(words),
                    _mm512_cvtepi32_epi8(_mm512_add_epi32(integers, _mm512_set1_epi32(bias))));
    const size_t filled = std::min<size_t>(4, (dim - i + 3) / 4);
    for (size_t word = 0; word < filled; ++word) std::memcpy(to + (i / 4 + word) * stride, &words[word], 4);
  }
  return {scale, std::sqrt(_mm512_reduce_add_ps(squares)), std::sqrt(_mm512_reduce_add_ps(rest))};
}

HOTROW_VNNI void pack_block(const SimilarInputs& in, const float* events, size_t length, size_t block, Packed& to) {
  uint8_t* begin = to.values.data() + block * to.groups * 4 * kLanes;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const size_t event = block * kLanes + lane;
    Rounded rounded{0, 0, 0};
    if (event < length)
      rounded = round_values(events + event * in.event_stride, in.dim, begin + lane * 4, 4 * kLanes, 128);
    to.scale[event] = rounded.scale, to.norm[event] = rounded.norm, to.lost[event] = rounded.lost;
  }
}

HOTROW_VNNI float exact(const float* a, const float* b, size_t dim) {
  __m512 sum = _mm512_setzero_ps();
  size_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) sum = _mm512_fmadd_ps(_mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i), sum);
  if (i < dim) {
    const __mmask16 mask = mask_of(dim - i);
    sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, a + i), _mm512_maskz_loadu_ps(mask, b + i), sum);
  }
  return _mm512_reduce_add_ps(sum);
}

HOTROW_VNNI size_t count_from(const float* values, size_t count, float least) {
  const __m512 bound = _mm512_set1_ps(least);
  size_t found = 0;
  for (size_t i = 0; i < count; i += kLanes)
    found +=
        __builtin_popcount(_mm512_mask_cmp_ps_mask(mask_of(count - i), _mm512_loadu_ps(values + i), bound, _CMP_GE_OQ));
  return found;
}

struct Bounds {
  float low, high;
};

// low: at least `count` of the values are >= low. high: at most `count` are >= high. Both as near as 24 halvings give.
// Requires: at least `count` values are not -inf.
HOTROW_VNNI Bounds bounds_of_largest(const float* values, size_t size, size_t count) {
  __m512 least = _mm512_set1_ps(std::numeric_limits<float>::infinity()), most = _mm512_set1_ps(kNone);
  for (size_t i = 0; i < size; i += kLanes) {
    const __m512 x = _mm512_loadu_ps(values + i);
    const __mmask16 real = _mm512_mask_cmp_ps_mask(mask_of(size - i), x, _mm512_set1_ps(kNone), _CMP_GT_OQ);
    least = _mm512_mask_min_ps(least, real, least, x), most = _mm512_mask_max_ps(most, real, most, x);
  }
  Bounds found{_mm512_reduce_min_ps(least), std::numeric_limits<float>::infinity()};
  float high = _mm512_reduce_max_ps(most);
  for (int i = 0; i < 24; ++i) {
    const float middle = found.low + (high - found.low) / 2;
    if (!(middle > found.low && middle < high)) break;
    const size_t reached = count_from(values, size, middle);
    if (reached >= count) found.low = middle;
    if (reached <= count) high = found.high = middle;
    if (reached == count) break;
  }
  return found;
}

struct Candidate {
  const float* values;
  float scale, norm, lost, whole;  // whole: |scale * integers|
  int32_t start;                   // takes the 128 of the events back
};

struct Scratch {
  std::vector<float> scores, groups, lower, upper;
  std::vector<int32_t> places;
  std::vector<uint32_t> bytes;
  std::vector<std::pair<float, int32_t>> open;

  void fit(size_t padded, size_t groups_of_dims) {
    if (groups.size() < padded + 2 * kLanes) {
      scores.resize(kTile * padded + 2 * kLanes);
      for (auto* values : {&groups, &lower, &upper}) values->resize(padded + 2 * kLanes);
      places.resize(padded + 2 * kLanes);
    }
    if (scores.size() < kTile * padded) scores.resize(kTile * padded);
    bytes.resize(kTile * groups_of_dims);
  }
};

// Scores of a tile of candidates with all events, from integers.
HOTROW_VNNI void score_tile(const Packed& packed, const Candidate* tile, const uint32_t* bytes, float* scores,
                            size_t padded) {
  for (size_t block = 0; block < packed.blocks; block += 2) {
    const uint8_t* first = packed.values.data() + block * packed.groups * 4 * kLanes;
    const uint8_t* second = first + packed.groups * 4 * kLanes;
    __m512i sums[kTile][2];
#pragma GCC unroll 8
    for (size_t i = 0; i < kTile; ++i) sums[i][0] = sums[i][1] = _mm512_set1_epi32(tile[i].start);
    for (size_t group = 0; group < packed.groups; ++group) {
      const __m512i a = _mm512_loadu_si512(first + group * 4 * kLanes);
      const __m512i b = _mm512_loadu_si512(second + group * 4 * kLanes);
#pragma GCC unroll 8
      for (size_t i = 0; i < kTile; ++i) {
        const __m512i c = _mm512_set1_epi32(static_cast<int>(bytes[i * packed.groups + group]));
        sums[i][0] = _mm512_dpbusd_epi32(sums[i][0], a, c);
        sums[i][1] = _mm512_dpbusd_epi32(sums[i][1], b, c);
      }
    }
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; ++half) {
      const __m512 scale = _mm512_loadu_ps(packed.scale.data() + (block + half) * kLanes);
#pragma GCC unroll 8
      for (size_t i = 0; i < kTile; ++i) {
        const __m512 unit = _mm512_mul_ps(scale, _mm512_set1_ps(tile[i].scale));
        _mm512_storeu_ps(scores + i * padded + (block + half) * kLanes,
                         _mm512_mul_ps(_mm512_cvtepi32_ps(sums[i][half]), unit));
      }
    }
  }
}

// The places of the `keep` largest of the first `seen` events, in order. Requires: keep < seen.
HOTROW_VNNI void choose(const SimilarInputs& in, const Packed& packed, const Candidate& candidate, const float* events,
                        const float* scores, size_t seen, int64_t first_event, Scratch& scratch, int64_t* index) {
  const size_t keep = in.keep, vectors = (seen + kLanes - 1) / kLanes;
  // |c'| |e| + |s c8| |e'|, and what float32 rounds in a product of `dim` values.
  const float rounding = 1e-7f * static_cast<float>(in.dim + 8);
  const float candidate_norm = candidate.lost * 1.00001f + candidate.norm * rounding;
  const float candidate_whole = candidate.whole * 1.00001f;
  const __m512 by_norm = _mm512_set1_ps(candidate_norm), by_lost = _mm512_set1_ps(candidate_whole);
  const size_t step = std::max<size_t>(1, seen / (6 * keep));  // at least 6 keep groups, or each event is one
  size_t groups = 0;
  for (size_t begin = 0; begin < vectors; begin += step, groups += kLanes) {
    __m512 most = _mm512_set1_ps(kNone);
    for (size_t v = begin; v < std::min(begin + step, vectors); ++v) {
      const size_t at = v * kLanes;
      __m512 error = _mm512_mul_ps(by_norm, _mm512_loadu_ps(packed.norm.data() + at));
      error = _mm512_fmadd_ps(by_lost, _mm512_loadu_ps(packed.lost.data() + at), error);
      const __m512 low = _mm512_sub_ps(_mm512_loadu_ps(scores + at), error);
      most = _mm512_mask_max_ps(most, mask_of(seen - at), most, low);
    }
    _mm512_storeu_ps(scratch.groups.data() + groups, most);
  }
  const __m512 least = _mm512_set1_ps(bounds_of_largest(scratch.groups.data(), groups, keep).low);
  // Without branches: whether a vector has one of them cannot be predicted.
  size_t open = 0;
  __m512i place = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (size_t v = 0; v < vectors; ++v) {
    const size_t at = v * kLanes;
    __m512 high = _mm512_fmadd_ps(by_norm, _mm512_loadu_ps(packed.norm.data() + at), _mm512_loadu_ps(scores + at));
    high = _mm512_fmadd_ps(by_lost, _mm512_loadu_ps(packed.lost.data() + at), high);
    const __mmask16 in_reach = _mm512_mask_cmp_ps_mask(mask_of(seen - at), high, least, _CMP_GE_OQ);
    _mm512_storeu_si512(scratch.places.data() + open, _mm512_maskz_compress_epi32(in_reach, place));
    place = _mm512_add_epi32(place, _mm512_set1_epi32(kLanes));
    open += static_cast<size_t>(__builtin_popcount(in_reach));
  }
  for (size_t i = 0; i < open; ++i) {
    const size_t event = static_cast<size_t>(scratch.places[i]);
    const float error = candidate_norm * packed.norm[event] + candidate_whole * packed.lost[event];
    scratch.upper[i] = scores[event] + error, scratch.lower[i] = scores[event] - error;
  }
  const float sure = bounds_of_largest(scratch.upper.data(), open, keep).high;
  size_t chosen = 0;
  scratch.open.clear();
  for (size_t i = 0; i < open; ++i) {
    const int32_t event = scratch.places[i];
    if (scratch.lower[i] >= sure) {
      ++chosen;
      continue;
    }
    const float* values = events + static_cast<size_t>(event) * in.event_stride;
    for (size_t line = 0; line < in.dim; line += kLanes) __builtin_prefetch(values + line);
    scratch.open.emplace_back(0.f, event);
  }
  for (auto& [score, event] : scratch.open)
    score = -exact(candidate.values, events + static_cast<size_t>(event) * in.event_stride, in.dim);
  const size_t wanted = std::min(keep - chosen, scratch.open.size());
  if (wanted < scratch.open.size())
    std::nth_element(scratch.open.begin(), scratch.open.begin() + static_cast<ptrdiff_t>(wanted), scratch.open.end());
  std::sort(scratch.open.begin(), scratch.open.begin() + static_cast<ptrdiff_t>(wanted),
            [](const auto& a, const auto& b) { return a.second < b.second; });
  auto next = scratch.open.begin();
  const auto end = next + static_cast<ptrdiff_t>(wanted);
  for (size_t i = 0, to = 0; i < open && to < keep; ++i) {
    const int32_t place = scratch.places[i];
    const bool sure_one = scratch.lower[i] >= sure, open_one = !sure_one && next != end && next->second == place;
    if (open_one) ++next;
    if (sure_one || open_one) index[to++] = first_event + place;
  }
}

HOTROW_VNNI void search_tile(const SimilarInputs& in, const Packed& packed, const float* events, size_t length,
                             size_t first_row, size_t rows, int64_t first_event, int64_t* index, int64_t* counts) {
  static thread_local Scratch scratch;
  const size_t padded = packed.blocks * kLanes;
  scratch.fit(padded, packed.groups);
  Candidate tile[kTile];
  for (size_t i = 0; i < kTile; ++i) {
    const size_t row = first_row + std::min(i, rows - 1);
    uint32_t* bytes = scratch.bytes.data() + i * packed.groups;
    tile[i].values = in.candidates + row * in.candidate_stride;
    const Rounded rounded = round_values(tile[i].values, in.dim, reinterpret_cast<uint8_t*>(bytes), 4, 0);
    int32_t sum = 0;
    int64_t squares = 0;
    for (size_t byte = 0; byte < 4 * packed.groups; ++byte) {
      const int32_t value = reinterpret_cast<const int8_t*>(bytes)[byte];
      sum += value, squares += value * value;
    }
    tile[i].scale = rounded.scale, tile[i].norm = rounded.norm, tile[i].lost = rounded.lost;
    tile[i].whole = rounded.scale * std::sqrt(static_cast<float>(squares));
    tile[i].start = -128 * sum;
  }
  score_tile(packed, tile, scratch.bytes.data(), scratch.scores.data(), padded);
  for (size_t i = 0; i < rows; ++i) {
    const size_t row = first_row + i;
    const int64_t limit = in.visible ? std::max<int64_t>(0, in.visible[row]) : static_cast<int64_t>(length);
    const size_t seen = std::min(length, static_cast<size_t>(limit));
    counts[row] = static_cast<int64_t>(std::min(seen, in.keep));
    int64_t* its = index + row * in.keep;
    if (seen <= in.keep) {
      for (size_t place = 0; place < seen; ++place) its[place] = first_event + static_cast<int64_t>(place);
    } else {
      choose(in, packed, tile[i], events, scratch.scores.data() + i * padded, seen, first_event, scratch, its);
    }
  }
}

void search_user(const SimilarInputs& in, size_t first_row, size_t rows, size_t first_event, size_t length,
                 Packed& packed, int64_t* index, int64_t* counts) {
  const float* events = in.events + first_event * in.event_stride;
  packed.groups = (in.dim + 3) / 4;
  packed.blocks = ((length + kLanes - 1) / kLanes + 1) / 2 * 2;
  const size_t padded = packed.blocks * kLanes;
  packed.values.resize(padded * packed.groups * 4);
  for (auto* values : {&packed.scale, &packed.norm, &packed.lost}) values->resize(padded);
  auto pack = [&](int task) {
    const size_t begin = static_cast<size_t>(task) * kPackBlocks;
    for (size_t block = begin; block < std::min(begin + kPackBlocks, packed.blocks); ++block)
      pack_block(in, events, length, block, packed);
  };
  auto search = [&](int task) {
    const size_t begin = static_cast<size_t>(task) * kTile;
    search_tile(in, packed, events, length, first_row + begin, std::min(kTile, rows - begin),
                static_cast<int64_t>(first_event), index, counts);
  };
  const int packs = static_cast<int>((packed.blocks + kPackBlocks - 1) / kPackBlocks);
  const int tiles = static_cast<int>((rows + kTile - 1) / kTile);
  if (rows * length * in.dim < kSerialProducts) {
    for (int i = 0; i < packs; ++i) pack(i);
    for (int i = 0; i < tiles; ++i) search(i);
    return;
  }
  ThreadPool::shared().run(packs, pack);
  ThreadPool::shared().run(tiles, search);
}

}  // namespace

void similar_events(const SimilarInputs& in, int64_t* index, int64_t* counts) {
  Packed packed;
  size_t row = 0, event = 0;
  for (size_t user = 0; user < in.users; ++user) {
    const size_t rows = static_cast<size_t>(in.rows[user]), length = static_cast<size_t>(in.lengths[user]);
    if (rows && length) search_user(in, row, rows, event, length, packed, index, counts);
    row += rows, event += length;
  }
}

#else

void similar_events(const SimilarInputs&, int64_t*, int64_t*) {}

#endif

}  // namespace hotrow
