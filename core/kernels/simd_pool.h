// Pooling: rows of one feature summed or averaged into its output matrix.
//
// Included by simd_kernels.cpp alone, once per instruction set; its rules hold here too.
#pragma once

#include <cstring>

#include "kernels/row_kernels.h"
#include "kernels/simd_values.h"

namespace hotrow {
namespace {

struct RowAddresser {
  const char* rows;
  size_t row_bytes;
  const uint32_t* index;
  const uint32_t* inverse;

  HOTROW_INLINE const char* operator()(size_t position) const {
    uint32_t unique = inverse[position];
    return rows + size_t{index ? index[unique] : unique} * row_bytes;
  }
};

// One row per bag into an output that is not read soon: streaming stores save reading the lines first (dim 64, 26
// features, batch 4,096: 27 MB).
template <int kDim>
bool stream_rows([[maybe_unused]] const PoolArgs& args) {
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
  constexpr size_t kAlign = sizeof(__m128);
  if (!kDim || !args.bypass_cache || args.offsets || args.weights || args.out_stride % 4 ||
      reinterpret_cast<uintptr_t>(args.out) % kAlign)
    return false;
  const RowAddresser row_at{args.rows, args.row_bytes, args.index, args.inverse};
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
  if (kType == RowType::kFloat && stream_rows<kDim>(args)) return;
  const int dim = kDim ? kDim : args.dim;
  const RowAddresser row_at{args.rows, args.row_bytes, args.index, args.inverse};
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

}  // namespace
}  // namespace hotrow
