// The backward pass of a part: for each tile of queries, its weights are computed again from the log-sums, and the
// gradients of queries, keys, values and biases are formed tile by tile.
//
// Included by attention_kernels.cpp alone, once per instruction set.
#pragma once

#include "attention/simd_tile.h"

namespace hotrow {
namespace {

// Adds the gradients of scores [keys][lanes] to the bias tables' gradients.
template <int Vectors>
void add_bias_gradients(const BackwardArgs& args, const QueryTile& tile, size_t head, size_t begin, size_t keys,
                        const float* of_scores) {
  const AttentionCall& call = *args.call;
  if (args.by_distance) {
    float* to = args.by_distance + head * call.by_distance_stride;
    for (size_t j = 0; j < keys; ++j) {
      float* of_key = to + (static_cast<ptrdiff_t>(tile.first) - static_cast<ptrdiff_t>(begin + j));
      for (int v = 0; v < Vectors; ++v) {
        float* at = of_key + v * kLanes;
        store(at, load(at) + load(of_scores + j * kTileQueries + v * kLanes));
      }
    }
  } else if (args.to.position_bias) {
    float* to = args.to.position_bias + head * call.in.positions;
    for (size_t j = 0; j < keys; ++j)
      for (size_t lane = 0; lane < tile.count; ++lane)
        to[position_of(call, tile, lane, begin + j)] += of_scores[j * kTileQueries + lane];
  }
  if (args.to.time_bias) {
    float* to = args.to.time_bias + head * call.in.times * kTileQueries;  // a column for each lane: no conflicts
    for (size_t j = 0; j < keys; ++j) {
      const uint8_t* bucket = tile.buckets + (begin + j) * kTileQueries;
      for (size_t lane = 0; lane < Vectors * kLanes; ++lane)
        to[bucket[lane] * kTileQueries + lane] += of_scores[j * kTileQueries + lane];
    }
  }
}

// Scores to weights, and the gradients of weights to those of scores, both in place.
template <int Vectors, bool Softmax>
void differentiate(size_t keys, const Vec* log_sum, const Vec* mean, float* scores, float* gradients) {
  for (size_t j = 0; j < keys; ++j)
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) {
      float* score = scores + j * kTileQueries + v * kLanes;
      float* gradient = gradients + j * kTileQueries + v * kLanes;
      const Vec s = load(score);
      if constexpr (Softmax) {
        const Vec weight = exp2_of(s - log_sum[v]);
        store(score, weight);
        store(gradient, weight * (load(gradient) - mean[v]));
      } else {
        const Vec slope = sigmoid(s), weight = s * slope;
        store(score, s > kLowest ? weight : Vec{});
        store(gradient, s > kLowest ? load(gradient) * (slope + weight * (1.f - slope)) : Vec{});
      }
    }
}

template <int Vectors>
void backward_tile(const BackwardArgs& args, const AttentionPart& part, const QueryTile& tile, size_t head,
                   float* scratch) {
  const AttentionCall& call = *args.call;
  const AttentionInputs& in = call.in;
  const size_t dim = in.dim, width = in.width, padded_dim = whole_vectors(dim), padded_width = whole_vectors(width);
  alignas(64) float scores[kTileKeys * kTileQueries], gradients[kTileKeys * kTileQueries];
  float* turned_q = scratch;                               // [dim][lanes]
  float* turned_gradient = turned_q + dim * kTileQueries;  // of out
  float* q_gradient = turned_gradient + width * kTileQueries;
  float* own_k = q_gradient + dim * kTileQueries;
  float* own_v = own_k + dim * kTileQueries;
  float* q_rows = own_v + width * kTileQueries;  // [lanes][padded_dim]
  float* gradient_rows = q_rows + padded_dim * kTileQueries;
  const size_t row = part.q_row + tile.first;
  const float over = in.softmax ? 1.f : 1.f / in.divisor;
  const float* q = in.q.data + row * in.q.row + head * in.q.head;
  const float* gradient = args.gradient.data + row * args.gradient.row + head * args.gradient.head;
  transpose(q, in.q.row, tile.count, dim, in.scale * call.unit, turned_q);
  transpose(gradient, args.gradient.row, tile.count, width, over, turned_gradient);
  copy_rows(q, in.q.row, tile.count, dim, in.scale, q_rows);
  copy_rows(gradient, args.gradient.row, tile.count, width, over, gradient_rows);
  for (size_t i = 0; i < dim * kTileQueries; ++i) q_gradient[i] = 0;

  alignas(64) float log_sums[kTileQueries] = {}, means[kTileQueries] = {};
  if (in.softmax) {
    const float* out = args.out.data + row * args.out.row + head * args.out.head;
    for (size_t lane = 0; lane < tile.count; ++lane) {
      const float log_sum = args.log_sums[(row + lane) * in.heads + head];
      log_sums[lane] = log_sum > kLowest ? log_sum * kLog2e : 0.f;  // -inf: the query sees nothing
      Vec sums = {};
      size_t d = 0;
      for (; d + kLanes <= width; d += kLanes)
        sums += load(out + lane * args.out.row + d) * load(gradient_rows + lane * padded_width + d);
      float mean = 0;
      for (size_t i = 0; i < kLanes; ++i) mean += sums[i];
      for (; d < width; ++d) mean += out[lane * args.out.row + d] * gradient_rows[lane * padded_width + d];
      means[lane] = mean;
    }
  }
  Vec log_sum[Vectors], mean[Vectors];
  for (int v = 0; v < Vectors; ++v) log_sum[v] = load(log_sums + v * kLanes), mean[v] = load(means + v * kLanes);

  const size_t k_stride = in.heads * dim, v_stride = in.heads * width;
  for (size_t begin = 0; begin < tile.most_seen; begin += kTileKeys) {
    const size_t keys = least(kTileKeys, tile.most_seen - begin);
    const float* k = in.k.data + (part.k_row + begin) * in.k.row + head * in.k.head;
    const float* v = in.v.data + (part.k_row + begin) * in.v.row + head * in.v.head;
    score_keys<Vectors>(call, part, tile, head, begin, keys, turned_q, scores);
    multiply<Vectors, false>(keys, width, {v, in.v.row, 1}, turned_gradient, kTileQueries, gradients, kTileQueries);
    if (in.softmax)
      differentiate<Vectors, true>(keys, log_sum, mean, scores, gradients);
    else
      differentiate<Vectors, false>(keys, log_sum, mean, scores, gradients);
    multiply_add_columns(keys, width, tile.count, {scores, kTileQueries, 1}, gradient_rows, padded_width,
                         args.v_of_user + begin * v_stride + head * width, v_stride);
    multiply_add_columns(keys, dim, tile.count, {gradients, kTileQueries, 1}, q_rows, padded_dim,
                         args.k_of_user + begin * k_stride + head * dim, k_stride);
    multiply<Vectors, true>(dim, keys, {k, 1, in.k.row}, gradients, kTileQueries, q_gradient, kTileQueries);
    add_bias_gradients<Vectors>(args, tile, head, begin, keys, gradients);
  }
  if (in.own_k.data) {
    transpose(in.own_k.data + row * in.own_k.row + head * in.own_k.head, in.own_k.row, tile.count, dim, 1, own_k);
    transpose(in.own_v.data + row * in.own_v.row + head * in.own_v.head, in.own_v.row, tile.count, width, 1, own_v);
    for (int v = 0; v < Vectors; ++v) {
      const size_t at = v * kLanes;
      store(scores + at, column_dots(turned_q + at, own_k + at, dim) + own_bias(call, head));
      store(gradients + at, column_dots(turned_gradient + at, own_v + at, width));
    }
    if (in.softmax)
      differentiate<Vectors, true>(1, log_sum, mean, scores, gradients);
    else
      differentiate<Vectors, false>(1, log_sum, mean, scores, gradients);
    for (size_t d = 0; d < dim; ++d)
      for (size_t lane = 0; lane < tile.count; ++lane) {
        args.to.own_k[((row + lane) * in.heads + head) * dim + d] = gradients[lane] * q_rows[lane * padded_dim + d];
        q_gradient[d * kTileQueries + lane] += gradients[lane] * own_k[d * kTileQueries + lane];
      }
    for (size_t lane = 0; lane < tile.count; ++lane) {
      for (size_t d = 0; d < width; ++d)
        args.to.own_v[((row + lane) * in.heads + head) * width + d] =
            scores[lane] * gradient_rows[lane * padded_width + d];
      if (args.to.position_bias) args.to.position_bias[head * in.positions] += gradients[lane];
      if (args.to.time_bias) args.to.time_bias[head * in.times * kTileQueries + lane] += gradients[lane];
    }
  }
  alignas(64) float scale[kTileQueries];
  for (size_t lane = 0; lane < kTileQueries; ++lane) scale[lane] = in.scale;
  transpose_back(q_gradient, scale, tile.count, dim, args.to.q + (row * in.heads + head) * dim, in.heads * dim);
}

void backward_part(const BackwardArgs& args, const AttentionPart& part, float* scratch) {
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
      tile.count > kLanes ? backward_tile<2>(args, part, tile, head, after)
                          : backward_tile<1>(args, part, tile, head, after);
  }
}

}  // namespace
}  // namespace hotrow
