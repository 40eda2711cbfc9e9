// A tile of queries of one user and one head against tiles of its keys: what forward and backward share.
//
// Lanes are queries, so maxima and sums over keys need no horizontal operation. Queries are transposed to [dim][lanes]
// once per tile; keys and values are read where they are.
//
// Included by attention_kernels.cpp alone, once per instruction set.
#pragma once

#include "attention/attention_kernels.h"
#include "attention/simd_matmul.h"

namespace hotrow {
namespace {

constexpr size_t kTileQueries = 2 * kLanes;
constexpr size_t kTileKeys = 64;
constexpr float kLowest = -1e30f;  // the maximum before a key was seen
constexpr float kMasked = -2e30f;  // a score whose weight is exactly zero

HOTROW_INLINE size_t least(size_t a, size_t b) { return a < b ? a : b; }
HOTROW_INLINE size_t whole_vectors(size_t floats) { return (floats + kLanes - 1) / kLanes * kLanes; }

// Floats for the transposed tiles of queries, outputs, own keys and values and their gradients, for rows of queries and
// gradients, and for a byte for each query of a tile and key.
size_t attention_scratch(const AttentionInputs& in, size_t longest_keys) {
  const size_t floats = whole_vectors(in.dim) + whole_vectors(in.width);
  return kTileQueries * (6 * floats + longest_keys / sizeof(float) + 8) + 16;
}

struct QueryTile {
  size_t first, count;                      // places in the user
  size_t most_seen, all_see;                // no query sees a key from `most_seen` on; all see keys below `all_see`
  alignas(64) int32_t seen[kTileQueries];   // keys, by lane; 0 beyond count
  alignas(64) int32_t place[kTileQueries];  // of candidates
  bool one_place;                           // all queries have the first one's
  const uint8_t* buckets;                   // [keys][kTileQueries], of times; null without a time bias
  uint8_t own_bucket;
};

void describe_queries(const AttentionCall& call, const AttentionPart& part, size_t first, QueryTile& tile) {
  tile.first = first;
  tile.count = least(kTileQueries, part.query_end - first);
  tile.most_seen = 0;
  tile.all_see = part.keys;
  tile.one_place = true;
  for (size_t lane = 0; lane < kTileQueries; ++lane) {
    size_t seen = 0;
    if (lane < tile.count) {
      seen = part.keys;
      if (call.in.causal) seen = first + lane + 1;
      if (call.in.visible) {
        const int64_t visible = call.in.visible[part.q_row + first + lane];
        seen = visible < 0 ? 0 : least(static_cast<size_t>(visible), part.keys);
      }
      if (seen > tile.most_seen) tile.most_seen = seen;
      tile.one_place = tile.one_place && (lane == 0 || static_cast<int32_t>(seen) == tile.place[0]);
    }
    if (seen < tile.all_see) tile.all_see = seen;
    tile.seen[lane] = static_cast<int32_t>(seen);
    tile.place[lane] = static_cast<int32_t>(seen);
  }
}

// floor(log2(1 + milliseconds / 1000)). Exact below 2^50 ms: the factor is a little above 1/1000, so that a whole power
// of two is reached, and too little above it for the millisecond before.
HOTROW_INLINE uint8_t time_bucket(int64_t milliseconds, size_t times) {
  const double seconds = static_cast<double>(milliseconds + 1000) * (0.001 * (1 + 0x1p-52));
  int64_t bits;
  std::memcpy(&bits, &seconds, sizeof(bits));
  const int64_t exponent = (bits >> 52) - 1023;
  return static_cast<uint8_t>(exponent < static_cast<int64_t>(times) ? exponent : static_cast<int64_t>(times) - 1);
}

void find_buckets(const AttentionCall& call, const AttentionPart& part, QueryTile& tile, uint8_t* buckets) {
  alignas(64) int64_t times[kTileQueries];
  for (size_t lane = 0; lane < kTileQueries; ++lane)
    times[lane] = call.in.q_times[part.q_row + tile.first + (lane < tile.count ? lane : 0)];
  const bool bidirectional = call.places == Places::kBidirectional;
  for (size_t key = 0; key < tile.most_seen; ++key) {
    const int64_t time = call.in.k_times[part.k_row + key];
    for (size_t lane = 0; lane < kTileQueries; ++lane) {
      int64_t elapsed = times[lane] - time;
      if (elapsed < 0) elapsed = bidirectional ? -elapsed : 0;
      buckets[key * kTileQueries + lane] = time_bucket(elapsed, call.in.times);
    }
  }
  tile.buckets = buckets;
}

// to[d][lane] = factor * rows[lane][d], zeros beyond count.
void transpose(const float* rows, size_t stride, size_t count, size_t floats, float factor, float* to) {
  for (size_t d = 0; d < floats; ++d) {
    float* line = to + d * kTileQueries;
    for (size_t lane = 0; lane < count; ++lane) line[lane] = factor * rows[lane * stride + d];
    for (size_t lane = count; lane < kTileQueries; ++lane) line[lane] = 0;
  }
}

// rows[lane][d] = from[d][lane] * factors[lane]
void transpose_back(const float* from, const float* factors, size_t count, size_t floats, float* rows, size_t stride) {
  for (size_t lane = 0; lane < count; ++lane)
    for (size_t d = 0; d < floats; ++d) rows[lane * stride + d] = from[d * kTileQueries + lane] * factors[lane];
}

// to[lane][:padded] = factor * rows[lane][:floats], then zeros.
void copy_rows(const float* rows, size_t stride, size_t count, size_t floats, float factor, float* to) {
  const size_t padded = whole_vectors(floats);
  for (size_t lane = 0; lane < count; ++lane) {
    for (size_t d = 0; d < floats; ++d) to[lane * padded + d] = factor * rows[lane * stride + d];
    for (size_t d = floats; d < padded; ++d) to[lane * padded + d] = 0;
  }
}

HOTROW_INLINE size_t position_of(const AttentionCall& call, const QueryTile& tile, size_t lane, size_t key) {
  const int32_t distance = tile.place[lane] - static_cast<int32_t>(key);
  return distance < 0 ? 0 : least(static_cast<size_t>(distance), call.in.positions - 1);
}

// Scores of keys [begin, begin + keys) for all lanes: products, biases, and kMasked for what a query does not see.
template <int Vectors>
void score_keys(const AttentionCall& call, const AttentionPart& part, const QueryTile& tile, size_t head, size_t begin,
                size_t keys, const float* turned_q, float* scores) {
  const AttentionInputs& in = call.in;
  const float* k = in.k.data + (part.k_row + begin) * in.k.row + head * in.k.head;
  multiply<Vectors, false>(keys, in.dim, {k, in.k.row, 1}, turned_q, kTileQueries, scores, kTileQueries);
  if (call.by_distance) {
    const float* bias = call.by_distance + head * call.by_distance_stride;
    for (size_t j = 0; j < keys; ++j) {
      const float* of_key = bias + (static_cast<ptrdiff_t>(tile.first) - static_cast<ptrdiff_t>(begin + j));
      for (int v = 0; v < Vectors; ++v) {
        float* at = scores + j * kTileQueries + v * kLanes;
        store(at, load(at) + load(of_key + v * kLanes));
      }
    }
  } else if (call.position_bias) {
    const float* bias = call.position_bias + head * in.positions;
    for (size_t j = 0; j < keys; ++j) {
      float* line = scores + j * kTileQueries;
      if (tile.one_place) {
        const Vec same = all(bias[position_of(call, tile, 0, begin + j)]);
        for (int v = 0; v < Vectors; ++v) store(line + v * kLanes, load(line + v * kLanes) + same);
      } else {
        for (size_t lane = 0; lane < Vectors * kLanes; ++lane)
          line[lane] += bias[position_of(call, tile, lane, begin + j)];
      }
    }
  }
  if (call.time_bias) {
    const float* bias = call.time_bias + head * in.times;
    for (size_t j = 0; j < keys; ++j) {
      const uint8_t* bucket = tile.buckets + (begin + j) * kTileQueries;
      float* line = scores + j * kTileQueries;
      for (size_t lane = 0; lane < Vectors * kLanes; ++lane) line[lane] += bias[bucket[lane]];
    }
  }
  if (begin + keys > tile.all_see)
    for (size_t j = 0; j < keys; ++j)
      for (int v = 0; v < Vectors; ++v) {
        float* at = scores + j * kTileQueries + v * kLanes;
        store(at, load(tile.seen + v * kLanes) > static_cast<int32_t>(begin + j) ? load(at) : all(kMasked));
      }
}

// The bias of a query's own key: distance 0, no time between.
HOTROW_INLINE float own_bias(const AttentionCall& call, size_t head) {
  float bias = 0;
  if (call.position_bias) bias += call.position_bias[head * call.in.positions];
  if (call.time_bias) bias += call.time_bias[head * call.in.times];
  return bias;
}

// sum over d of a[d][lane] * b[d][lane]
HOTROW_INLINE Vec column_dots(const float* a, const float* b, size_t floats) {
  Vec sum = {};
  for (size_t d = 0; d < floats; ++d) sum += load(a + d * kTileQueries) * load(b + d * kTileQueries);
  return sum;
}

}  // namespace
}  // namespace hotrow
