// Gradients: summed by row in batch order, scaled and clipped, and applied by the optimizer's rule.
//
// Included by simd_kernels.cpp alone, once per instruction set; its rules hold here too.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels/row_kernels.h"
#include "kernels/simd_lookup.h"
#include "kernels/simd_stochastic_rounding.h"
#include "kernels/simd_values.h"
#include "memory/racing_store.h"
#include "optim/rules.h"

namespace hotrow {
namespace {

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

// The gradient of one unique row: its run summed in batch order, then scaled and clipped. Null: it has no gradient.
template <int kDim>
HOTROW_INLINE const float* sum_run(const UpdateArgs& args, size_t unique, int dim, bool plain) {
  const uint32_t begin = args.run_begin[unique], end = args.run_begin[unique + 1];
  // The runs of this task are contiguous, so prefetching ahead in them reaches the next rows' gradients too.
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

// Applies the rule to a row of 16-bit values: on floats in the scratch, which are then rounded stochastically.
template <class Rule, int kDim>
__attribute__((noinline)) void apply_rule_16bit(const UpdateArgs& args, char* row, int64_t key, const float* gradient,
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
    round_values(draws, copy, dim, round_bf16_stochastically);
  else
    round_values(draws, copy, dim, round_fp16_stochastically);
  store_words(row, copy, value_bytes);
}

template <class Rule, int kDim>
HOTROW_INLINE void apply_rule(const UpdateArgs& args, char* row, int64_t key, const float* gradient, int dim) {
  if (args.type != RowType::kFloat) return apply_rule_16bit<Rule, kDim>(args, row, key, gradient, dim);
#if defined(__SANITIZE_THREAD__)
  // Readers race with this store by design. The stores are atomic here, so that the sanitizer can check the rest.
  float* copy = args.scratch + dim;
  std::memcpy(copy, row, args.view.row_bytes);
  Rule::template apply<kDim>(copy, gradient, dim, args.coefficients);
  store_words(row, copy, args.view.row_bytes);
#else
  Rule::template apply<kDim>(reinterpret_cast<float*>(row), gradient, dim, args.coefficients);
#endif
}

HOTROW_INLINE void update_header(const UpdateArgs& args, size_t unique, uint32_t slot) {
  HeaderGroup& group = args.view.headers[slot / 4];
  const uint32_t lane = slot % 4;
  const uint64_t occurrences =
      args.occurrences ? args.occurrences[unique] : args.run_begin[unique + 1] - args.run_begin[unique];
  group.stamp[lane] = stamp_of(args.step);
  if (uint64_t total = group.count[lane] + occurrences; total <= kCountMantissa)
    group.count[lane] = static_cast<uint16_t>(total);
  else
    group.count[lane] = add_count_slow(group.count[lane], occurrences, args.count_stream, group.key[lane], args.step);
}

template <class Rule, int kDim>
void update_rows(const UpdateArgs& args) {
  const int dim = kDim ? kDim : args.dim;
  const RowView& view = args.view;
  const bool plain = args.grad_scale == 1.0f && args.clip_value == 0.0f && args.clip_norm == 0.0f;
  // Always inlined: GCC drops calls of functions that only prefetch.
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
    if (view.headers[slot / 4].stamp[slot % 4] == 0) continue;  // a rejected key has no row to update
    const float* gradient = sum_run<kDim>(args, unique, dim, plain);
    ShardIndex& shard = view.shards[shard_of(args.hashes[unique])];
    __atomic_store_n(&shard.version, shard.version + 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    if (gradient)
      apply_rule<Rule, kDim>(args, view.rows + size_t{slot} * view.row_bytes, key_at(view.headers, slot), gradient,
                             dim);
    __atomic_store_n(&shard.version, shard.version + 1, __ATOMIC_RELEASE);
    update_header(args, unique, slot);
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
    args.present[args.partition_positions[unique]] = gradient != nullptr;
    all &= gradient != nullptr;
  }
  return all;
}

bool sum_gradients(const SumArgs& args) {
  bool all = true;
  with_dim(args.update.dim, [&]<int kDim>() { all = sum_rows<kDim>(args); });
  return all;
}

}  // namespace
}  // namespace hotrow
