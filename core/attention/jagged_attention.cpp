#include "attention/jagged_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention/attention_kernels.h"
#include "attention/attention_plan.h"
#include "threads/thread_pool.h"

namespace hotrow {
namespace {

constexpr size_t kForwardPairs = 128 << 10;
constexpr size_t kBackwardPairs = 256 << 10;  // more, because parts need buffers for their sums
constexpr float kLog2e = 1.4426950408889634f;

float* scratch(size_t floats) {
  thread_local std::vector<float> memory;
  if (memory.size() < floats) memory.resize(floats);
  return memory.data();
}

// The bias tables in the kernels' units and forms.
struct Biases {
  std::vector<float> position, time, by_distance;

  Biases(AttentionCall& call, const AttentionPlan& plan, size_t tile) {
    const AttentionInputs& in = call.in;
    position.assign(in.position_bias, in.position_bias + (in.position_bias ? in.heads * in.positions : 0));
    time.assign(in.time_bias, in.time_bias + (in.time_bias ? in.heads * in.times : 0));
    for (auto* table : {&position, &time})
      for (float& value : *table) value *= call.unit;
    if (in.time_bias) call.time_bias = time.data();
    if (!in.position_bias) return;
    call.position_bias = position.data();
    if (call.places == Places::kCandidates) return;
    const size_t before = plan.longest_keys, after = plan.longest_queries + tile;
    call.by_distance_stride = before + after;
    by_distance.resize(in.heads * call.by_distance_stride);
    for (size_t head = 0; head < in.heads; ++head)
      for (size_t i = 0; i < call.by_distance_stride; ++i)
        by_distance[head * call.by_distance_stride + i] =
            position[head * in.positions + place_of(call, static_cast<ptrdiff_t>(i) - static_cast<ptrdiff_t>(before))];
    call.by_distance = by_distance.data() + before;
  }

  static size_t place_of(const AttentionCall& call, ptrdiff_t distance) {
    if (distance < 0) distance = call.places == Places::kBidirectional ? -distance : 0;
    return std::min(static_cast<size_t>(distance), call.in.positions - 1);
  }
};

AttentionCall call_of(const AttentionInputs& in) {
  AttentionCall call;
  call.in = in;
  call.places = in.causal                     ? Places::kCausal
                : in.visible || in.own_k.data ? Places::kCandidates
                                              : Places::kBidirectional;
  call.unit = in.softmax ? kLog2e : 1.f;
  return call;
}

void clear_rows(float* rows, size_t begin, size_t end, size_t floats) {
  if (rows && end > begin) std::memset(rows + begin * floats, 0, (end - begin) * floats * sizeof(float));
}

// Adds what a task collected per distance and per lane to its group's tables.
struct BiasGradients {
  std::vector<float> position, time;  // [groups, heads, buckets]

  BiasGradients(const AttentionInputs& in, size_t groups) {
    if (in.position_bias) position.resize(groups * in.heads * in.positions);
    if (in.time_bias) time.resize(groups * in.heads * in.times);
  }

  static void sum_groups(const std::vector<float>& from, size_t table, size_t groups, float* to) {
    if (!to) return;
    std::memset(to, 0, table * sizeof(float));
    for (size_t group = 0; group < groups; ++group)
      for (size_t i = 0; i < table; ++i) to[i] += from[group * table + i];
  }
};

class Backward {
 public:
  Backward(const AttentionInputs& in, HeadRows gradient, HeadRows out, const float* log_sums,
           const AttentionGradients& gradients)
      : call_(call_of(in)),
        kernels_(attention_kernels()),
        plan_(plan_attention(in, kBackwardPairs, kernels_.lanes)),
        tables_(call_, plan_, kernels_.lanes),
        biases_(in, plan_.groups),
        args_{&call_, gradient, out, log_sums, gradients, nullptr, nullptr, nullptr} {
    for (size_t part : plan_.partials) {
      const size_t keys = plan_.parts[part].part.keys;
      partial_k_.emplace_back(keys * in.heads * in.dim);
      partial_v_.emplace_back(keys * in.heads * in.width);
    }
  }

  void run() {
    const AttentionInputs& in = call_.in;
    const AttentionGradients& to = args_.to;
    clear_rows(to.q, plan_.queries, in.queries, in.heads * in.dim);
    clear_rows(to.own_k, plan_.queries, in.queries, in.heads * in.dim);
    clear_rows(to.own_v, plan_.queries, in.queries, in.heads * in.width);
    clear_rows(to.k, plan_.keys, in.keys, in.heads * in.dim);
    clear_rows(to.v, plan_.keys, in.keys, in.heads * in.width);
    ThreadPool::shared().run(static_cast<int>(plan_.tasks.size()),
                             [&](int task) { run_task(plan_.tasks[static_cast<size_t>(task)]); });
    add_partials();
    BiasGradients::sum_groups(biases_.position, in.heads * in.positions, plan_.groups, to.position_bias);
    BiasGradients::sum_groups(biases_.time, in.heads * in.times, plan_.groups, to.time_bias);
  }

 private:
  void run_task(const AttentionTask& task) {
    const AttentionInputs& in = call_.in;
    const size_t tile = kernels_.lanes, before = plan_.longest_keys;
    const size_t by_distance = args_.to.position_bias && call_.by_distance ? in.heads * call_.by_distance_stride : 0;
    const size_t by_lane = args_.to.time_bias ? in.heads * in.times * tile : 0;
    float* memory = scratch(kernels_.scratch(in, plan_.longest_keys) + by_distance + by_lane);
    BackwardArgs args = args_;
    args.by_distance = by_distance ? memory + before : nullptr;
    args.to.time_bias = by_lane ? memory + by_distance : nullptr;
    if (args.to.position_bias) args.to.position_bias = &biases_.position[task.group * in.heads * in.positions];
    const size_t low = std::min(before, task.longest),
                 high = std::min(call_.by_distance_stride - before, task.longest + tile);
    for (size_t head = task.head_begin; head < task.head_end && by_distance; ++head) {
      float* zero = args.by_distance + head * call_.by_distance_stride;
      std::fill(zero - low, zero + high, 0.f);
    }
    if (by_lane) std::fill_n(args.to.time_bias, by_lane, 0.f);

    for (size_t number = task.first; number < task.last; ++number) {
      AttentionPart part = plan_.parts[number].part;
      part.head_begin = task.head_begin;
      part.head_end = task.head_end;
      if (const size_t partial = plan_.parts[number].partial) {
        args.k_of_user = partial_k_[partial - 1].data();
        args.v_of_user = partial_v_[partial - 1].data();
      } else {
        args.k_of_user = args.to.k + part.k_row * in.heads * in.dim;
        args.v_of_user = args.to.v + part.k_row * in.heads * in.width;
        clear_heads(args.k_of_user, part, in.dim);
        clear_heads(args.v_of_user, part, in.width);
      }
      kernels_.backward(args, part, memory + by_distance + by_lane);
    }
    for (size_t head = task.head_begin; head < task.head_end; ++head) {
      for (ptrdiff_t x = -static_cast<ptrdiff_t>(low); by_distance && x < static_cast<ptrdiff_t>(high); ++x)
        args.to.position_bias[head * in.positions + Biases::place_of(call_, x)] +=
            args.by_distance[static_cast<ptrdiff_t>(head * call_.by_distance_stride) + x];
      for (size_t i = 0; by_lane && i < in.times; ++i) {
        const float* lanes = args.to.time_bias + (head * in.times + i) * tile;
        float sum = 0;
        for (size_t lane = 0; lane < tile; ++lane) sum += lanes[lane];
        biases_.time[(task.group * in.heads + head) * in.times + i] = sum;
      }
    }
  }

  void clear_heads(float* rows, const AttentionPart& part, size_t floats) const {
    for (size_t key = 0; key < part.keys; ++key)
      std::memset(rows + (key * call_.in.heads + part.head_begin) * floats, 0,
                  (part.head_end - part.head_begin) * floats * sizeof(float));
  }

  void add_partials() {
    const AttentionInputs& in = call_.in;
    for (size_t partial = 0; partial < plan_.partials.size(); ++partial) {
      const AttentionPart& part = plan_.parts[plan_.partials[partial]].part;
      add(partial_k_[partial], args_.to.k + part.k_row * in.heads * in.dim);
      add(partial_v_[partial], args_.to.v + part.k_row * in.heads * in.width);
    }
  }

  static void add(const std::vector<float>& from, float* to) {
    for (size_t i = 0; i < from.size(); ++i) to[i] += from[i];
  }

  AttentionCall call_;
  const AttentionKernels& kernels_;
  AttentionPlan plan_;
  Biases tables_;
  BiasGradients biases_;
  BackwardArgs args_;
  std::vector<std::vector<float>> partial_k_, partial_v_;
};

}  // namespace

void attention_forward(const AttentionInputs& in, float* out, float* log_sums) {
  AttentionCall call = call_of(in);
  const AttentionKernels& kernels = attention_kernels();
  const AttentionPlan plan = plan_attention(in, kForwardPairs, kernels.lanes);
  const Biases tables(call, plan, kernels.lanes);
  clear_rows(out, plan.queries, in.queries, in.heads * in.width);
  clear_rows(log_sums, plan.queries, in.queries, in.heads);
  const ForwardArgs args{&call, out, log_sums};
  ThreadPool::shared().run(static_cast<int>(plan.tasks.size()), [&](int number) {
    const AttentionTask& task = plan.tasks[static_cast<size_t>(number)];
    float* memory = scratch(kernels.scratch(in, plan.longest_keys));
    for (size_t i = task.first; i < task.last; ++i) {
      AttentionPart part = plan.parts[i].part;
      part.head_begin = task.head_begin;
      part.head_end = task.head_end;
      kernels.forward(args, part, memory);
    }
  });
}

void attention_backward(const AttentionInputs& in, HeadRows gradient, HeadRows out, const float* log_sums,
                        const AttentionGradients& gradients) {
  Backward(in, gradient, out, log_sums, gradients).run();
}

}  // namespace hotrow
