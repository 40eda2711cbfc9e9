// The inner loops of attention, compiled once per instruction set and chosen at program start.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/jagged_attention.h"

namespace hotrow {

// A number of consecutive queries of one user, and heads.
struct AttentionPart {
  size_t q_row, k_row;            // the user's first rows
  size_t query_begin, query_end;  // places in the user
  size_t keys;
  size_t head_begin, head_end;
};

// What a query's place is, and which distances to a key occur (attention.py has the table).
enum class Places { kCausal, kBidirectional, kCandidates };

// Bias tables, multiplied by `unit`: scores are in units of ln 2 for softmax, so that weights are powers of two.
struct AttentionCall {
  AttentionInputs in;
  Places places;
  float unit;
  const float* by_distance =
      nullptr;  // row h: the bias of distance 0; negative distances before it (not for candidates)
  size_t by_distance_stride = 0;
  const float* position_bias = nullptr;
  const float* time_bias = nullptr;
};

struct ForwardArgs {
  const AttentionCall* call;
  float* out;
  float* log_sums;
};

struct BackwardArgs {
  const AttentionCall* call;
  HeadRows gradient, out;
  const float* log_sums;
  AttentionGradients to;  // k and v: added to. The bias tables: of this task alone, added to
  float* k_of_user;       // where the gradient of the user's first key goes, and its value's; strides as in `to`
  float* v_of_user;
  float* by_distance;  // as AttentionCall::by_distance; gradients, added to
};

struct AttentionKernels {
  const char* name;
  size_t lanes;                                                    // queries that one step handles
  size_t (*scratch)(const AttentionInputs&, size_t longest_keys);  // floats that a call needs
  void (*forward)(const ForwardArgs&, const AttentionPart&, float* scratch);
  void (*backward)(const BackwardArgs&, const AttentionPart&, float* scratch);
};

const AttentionKernels& attention_kernels();

}  // namespace hotrow
