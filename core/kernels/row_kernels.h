// The inner loops over rows, compiled once per instruction set and chosen at program start.
//
// Every variant gives the same bits: all do the same float operations in the same order and differ only in how many run
// at once. HOTROW_SIMD=baseline in the environment forces the plain variant (tests compare the two).
#pragma once

#include <cstddef>
#include <cstdint>

#include "index/shard_index.h"
#include "optim/rule_kind.h"
#include "rows/row_header.h"
#include "rows/row_type.h"

namespace hotrow {

// Where a table's rows are.
struct RowView {
  ShardIndex* shards;
  HeaderGroup* headers;
  char* rows;
  size_t row_bytes;
};

struct FindArgs {
  RowView view;
  const int64_t* keys;
  const uint64_t* hashes;
  size_t count;
  uint32_t* slots;  // out: the slot, or kNoSlot
};

struct ReadArgs {
  FindArgs find;
  int dim;
  float* out;  // [count, dim]; undefined for rows that were not found
  RowType type = RowType::kFloat;
};

enum class Pooling : int { kNone = 0, kSum = 1, kMean = 2 };

// Row of position p: rows + index[inverse[p]] * row_bytes, or rows + inverse[p] * row_bytes without an index.
struct PoolArgs {
  const char* rows;
  size_t row_bytes;
  const uint32_t* index;
  const uint32_t* inverse;  // by position of this feature
  int dim;
  Pooling pooling;
  const uint32_t* offsets;  // null: bag b is position b
  const float* weights;     // null: all one
  size_t bag_begin, bag_end;
  float* out;         // row of bag b at out + b * out_stride; for Pooling::kNone, bags are positions
  size_t out_stride;  // in floats
  bool bypass_cache;  // the whole output is larger than a cache: use streaming stores
  RowType type = RowType::kFloat;
};

// One feature's gradients, for the positions [begin, end) of a job.
struct GradSource {
  const float* data;  // null: this feature got no gradient
  size_t stride;      // in floats
  uint32_t begin, end;
  const uint32_t* bag;               // by position - begin; null: the same number
  const float* scale;                // by position - begin; null: all one
  const uint8_t* present = nullptr;  // by position - begin: 0 where it has no gradient; null: all have
};

struct UpdateArgs {
  RowView view;
  int dim;
  const uint32_t* slots;
  const uint64_t* hashes;
  size_t begin, end;          // unique rows to update
  const uint32_t* run_begin;  // positions of unique row u: run[run_begin[u]] .. run[run_begin[u + 1]], in batch order
  const uint32_t* run;
  const uint32_t* occurrences;  // by unique row; null: the length of its run
  const GradSource* sources;
  const float* coefficients;
  float grad_scale;  // 1: off
  float clip_value;  // 0: off
  float clip_norm;   // 0: off
  float* scratch;    // [2 * dim + row width], private to the task
  uint32_t step;
  uint64_t count_stream;
  RowType type = RowType::kFloat;
  uint64_t rounding_stream = 0;  // for types that are rounded
};

// Sums without an update: row u's sum goes to out + offsets[u]. `update` says what to sum; its other fields are not
// used.
struct SumArgs {
  UpdateArgs update;
  float* out;
  const uint32_t* offsets;              // by unique row, in floats
  const uint32_t* partition_positions;  // by unique row, into `present`
  uint8_t* present;                     // 0: the row had no gradient, its sum is zeros
};

// Dot products of all pairs of a row's vectors: out[i * (i - 1) / 2 + j] = <v_i, v_j> for j < i. Vector n of row r is
// at vectors[n] + r * strides[n]. Each product is summed from its first element to its last.
constexpr size_t kMaxInteractionVectors = 64;   // vectors
constexpr size_t kMaxInteractionFloats = 8192;  // of all vectors, their number rounded up to a multiple of eight
struct PairwiseDotsArgs {
  const float* const* vectors;
  const size_t* strides;
  size_t count, dim;
  size_t begin, end;  // rows
  float* out;
  size_t out_stride;
};

struct Kernels {
  const char* name;
  size_t (*find)(const FindArgs&);                                     // returns how many were not found
  void (*read)(const ReadArgs&);                                       // lock-free; safe while another thread writes
  void (*decode)(RowType type, const char* row, int dim, float* out);  // one row without a concurrent writer
  void (*pool)(const PoolArgs&);
  bool (*all_finite)(const float* values, size_t count);
  void (*update[static_cast<int>(RuleKind::kCount)])(const UpdateArgs&);
  bool (*sum_gradients)(const SumArgs&);  // returns whether every row had a gradient
  void (*pairwise_dots)(const PairwiseDotsArgs&);
};

const Kernels& kernels();

}  // namespace hotrow
