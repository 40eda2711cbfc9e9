// Attention of queries over the keys of their user, on jagged rows: the CPU kernel of hotrow::jagged_attention. What it
// computes is defined by src/hotrow/nn/jagged/attention.py; the reference in plain torch is beside it.
//
// Scores are computed in tiles and never stored; the backward pass recomputes them from each query's log-sum of
// exponentials. All arithmetic is float32. Results do not depend on the number of threads: work is split by sizes
// alone, and sums over splits are formed in a fixed order. Unlike rows, results differ in rounding between instruction
// sets (fused multiply-add), as those of torch's own matrix products do.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotrow {

// [rows, heads, dim] with adjacent floats; strides in floats.
struct HeadRows {
  const float* data = nullptr;
  size_t row = 0, head = 0;
};

struct AttentionInputs {
  size_t users = 0, queries = 0, keys = 0;  // rows of q and of k, padding included
  size_t heads = 0, dim = 0, width = 0;     // width: floats of a value
  HeadRows q, k, v;
  HeadRows own_k, own_v;  // no data: absent
  const int64_t* q_lengths = nullptr;
  const int64_t* k_lengths = nullptr;
  const int64_t* visible = nullptr;  // by query; null: all keys
  const int64_t* q_times = nullptr;  // milliseconds; needed with a time bias
  const int64_t* k_times = nullptr;
  const float* position_bias = nullptr;  // [heads, positions]
  size_t positions = 0;
  const float* time_bias = nullptr;  // [heads, times]
  size_t times = 0;
  bool softmax = true;  // or silu
  bool causal = false;
  float scale = 1, divisor = 1;
};

// Contiguous [rows, heads, floats]; null where the input is absent.
struct AttentionGradients {
  float* q;
  float* k;
  float* v;
  float* own_k;
  float* own_v;
  float* position_bias;
  float* time_bias;
};

// Writes out [queries, heads, width], and log_sums [queries, heads] unless it is null (silu needs none).
// Throws std::invalid_argument if the lengths do not fit; nothing is written then.
void attention_forward(const AttentionInputs& inputs, float* out, float* log_sums);

// Writes all gradients, given the gradient of `out` and the results of attention_forward.
void attention_backward(const AttentionInputs& inputs, HeadRows gradient, HeadRows out, const float* log_sums,
                        const AttentionGradients& gradients);

}  // namespace hotrow
