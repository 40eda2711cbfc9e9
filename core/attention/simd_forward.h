// The forward pass of a part: for each tile of queries, one pass over its keys with a running maximum (softmax), as in
// flash attention.
//
// Included by attention_kernels.cpp alone, once per instruction set.
#pragma once

#include "attention/simd_tile.h"

namespace hotrow {
namespace {

template <int Vectors>
void forward_tile(const ForwardArgs& args, const AttentionPart& part, const QueryTile& tile, size_t head,
                  float* scratch) {
  const AttentionCall& call = *args.call;
  const AttentionInputs& in = call.in;
  alignas(64) float scores[kTileKeys * kTileQueries];
  alignas(64) float inverse[kTileQueries] = {};
  float* turned_q = scratch;
  float* out = turned_q + in.dim * kTileQueries;  // [width][lanes]
  float* own = out + in.width * kTileQueries;
  const size_t row = part.q_row + tile.first;
  transpose(in.q.data + row * in.q.row + head * in.q.head, in.q.row, tile.count, in.dim, in.scale * call.unit,
            turned_q);
  Vec highest[Vectors], sum[Vectors], own_score[Vectors] = {};
  for (int v = 0; v < Vectors; ++v) highest[v] = all(kLowest), sum[v] = Vec{};
  for (size_t i = 0; i < in.width * kTileQueries; ++i) out[i] = 0;
  if (in.own_k.data) {
    transpose(in.own_k.data + row * in.own_k.row + head * in.own_k.head, in.own_k.row, tile.count, in.dim, 1, own);
    for (int v = 0; v < Vectors; ++v) {
      own_score[v] = column_dots(turned_q + v * kLanes, own + v * kLanes, in.dim) + own_bias(call, head);
      highest[v] = own_score[v];
    }
  }
  for (size_t begin = 0; begin < tile.most_seen; begin += kTileKeys) {
    const size_t keys = least(kTileKeys, tile.most_seen - begin);
    score_keys<Vectors>(call, part, tile, head, begin, keys, turned_q, scores);
    if (in.softmax) {
      for (int v = 0; v < Vectors; ++v) {
        Vec top = highest[v];
        for (size_t j = 0; j < keys; ++j) top = larger(load(scores + j * kTileQueries + v * kLanes), top);
        const Vec shrink = exp2_of(highest[v] - top);
        Vec total = sum[v] * shrink;
        for (size_t j = 0; j < keys; ++j) {
          float* at = scores + j * kTileQueries + v * kLanes;
          const Vec weight = exp2_of(load(at) - top);
          store(at, weight);
          total += weight;
        }
        if (begin)
          for (size_t d = 0; d < in.width; ++d) {
            float* at = out + d * kTileQueries + v * kLanes;
            store(at, load(at) * shrink);
          }
        highest[v] = top;
        sum[v] = total;
      }
    } else {
      for (size_t j = 0; j < keys; ++j)
        for (int v = 0; v < Vectors; ++v) {
          float* at = scores + j * kTileQueries + v * kLanes;
          const Vec score = load(at);
          store(at, score > kLowest ? score * sigmoid(score) : Vec{});
        }
    }
    const float* values = in.v.data + (part.k_row + begin) * in.v.row + head * in.v.head;
    multiply<Vectors, true>(in.width, keys, {values, 1, in.v.row}, scores, kTileQueries, out, kTileQueries);
  }
  if (in.own_k.data) {
    transpose(in.own_v.data + row * in.own_v.row + head * in.own_v.head, in.own_v.row, tile.count, in.width, 1, own);
    for (int v = 0; v < Vectors; ++v) {
      const Vec weight = in.softmax ? exp2_of(own_score[v] - highest[v]) : own_score[v] * sigmoid(own_score[v]);
      sum[v] += weight;
      for (size_t d = 0; d < in.width; ++d) {
        float* at = out + d * kTileQueries + v * kLanes;
        store(at, load(at) + weight * load(own + d * kTileQueries + v * kLanes));
      }
    }
  }
  alignas(64) float sums[kTileQueries] = {}, tops[kTileQueries] = {};
  for (int v = 0; v < Vectors; ++v) {
    store(sums + v * kLanes, sum[v]);
    store(tops + v * kLanes, highest[v]);
    const Vec over = sum[v] > 0.f ? 1.f / sum[v] : Vec{};
    store(inverse + v * kLanes, in.softmax ? over : all(1.f / in.divisor));
  }
  transpose_back(out, inverse, tile.count, in.width, args.out + (row * in.heads + head) * in.width,
                 in.heads * in.width);
  if (args.log_sums)
    for (size_t lane = 0; lane < tile.count; ++lane)
      args.log_sums[(row + lane) * in.heads + head] =
          in.softmax ? (tops[lane] + __builtin_log2f(sums[lane])) / kLog2e : 0.f;
}

void forward_part(const ForwardArgs& args, const AttentionPart& part, float* scratch) {
  const AttentionCall& call = *args.call;
  QueryTile tile = {};
  for (size_t first = part.query_begin; first < part.query_end; first += kTileQueries) {
    describe_queries(call, part, first, tile);
    float* after = scratch;
    if (call.time_bias) {
      find_buckets(call, part, tile, reinterpret_cast<uint8_t*>(scratch));
      after += (part.keys * kTileQueries + sizeof(float) - 1) / sizeof(float);
    }
    for (size_t head = part.head_begin; head < part.head_end; ++head)
      tile.count > kLanes ? forward_tile<2>(args, part, tile, head, after)
                          : forward_tile<1>(args, part, tile, head, after);
  }
}

}  // namespace
}  // namespace hotrow
