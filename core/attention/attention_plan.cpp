#include "attention/attention_plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace hotrow {
namespace {

constexpr size_t kPairsPerTask = 64 << 10;  // about 0.2 ms forward at dim 16
constexpr size_t kMostParts = 16;           // of a user whose parts have buffers of their own

size_t pairs_of(const AttentionInputs& in, size_t begin, size_t end, size_t keys) {
  return in.causal ? (begin + end + 1) * (end - begin) / 2 : (end - begin) * (keys + 1);
}

void split_user(const AttentionInputs& in, AttentionPart user, size_t queries, size_t most_pairs, size_t tile,
                AttentionPlan& plan) {
  const size_t all = pairs_of(in, 0, queries, user.keys);
  const size_t number = std::min(kMostParts, all / most_pairs + 1), share = all / number + 1;
  bool first = true;
  for (size_t begin = 0; begin < queries || first;) {
    size_t end = begin;
    while (end < queries && pairs_of(in, begin, end, user.keys) < share) end = std::min(queries, end + tile);
    user.query_begin = begin;
    user.query_end = end;
    plan.parts.push_back({user, 0});
    if (!first) {
      plan.partials.push_back(plan.parts.size() - 1);
      plan.parts.back().partial = plan.partials.size();
    }
    first = false;
    begin = end;
  }
}

size_t checked_length(int64_t length) {
  if (length < 0 || length > std::numeric_limits<int32_t>::max())
    throw std::invalid_argument("attention: a length is negative or too large");
  return static_cast<size_t>(length);
}

}  // namespace

AttentionPlan plan_attention(const AttentionInputs& in, size_t most_pairs, size_t tile) {
  AttentionPlan plan;
  size_t all = 0;
  for (size_t user = 0; user < in.users; ++user)
    all += pairs_of(in, 0, checked_length(in.q_lengths[user]), checked_length(in.k_lengths[user]));
  most_pairs = std::max(most_pairs, all / kMostParts);  // so few users of a batch are split
  for (size_t user = 0; user < in.users; ++user) {
    const size_t queries = checked_length(in.q_lengths[user]), keys = checked_length(in.k_lengths[user]);
    if (in.causal && queries != keys) throw std::invalid_argument("attention: causal needs a key for each query");
    if (queries > in.queries - plan.queries || keys > in.keys - plan.keys)
      throw std::invalid_argument("attention: lengths sum to more than the rows");
    if (queries || keys)
      split_user(in, {plan.queries, plan.keys, 0, 0, keys, 0, in.heads}, queries, most_pairs, tile, plan);
    plan.queries += queries;
    plan.keys += keys;
    plan.longest_queries = std::max(plan.longest_queries, queries);
    plan.longest_keys = std::max(plan.longest_keys, keys);
  }
  // The buckets of times are found once for all heads. Otherwise heads are tasks of their own.
  const size_t heads_per_task = in.time_bias ? in.heads : 1;
  for (size_t first = 0; first < plan.parts.size(); ++plan.groups) {
    AttentionTask task{first, first, 0, 0, 0, 0, plan.groups};
    while (task.last < plan.parts.size() && task.cost < kPairsPerTask) {
      const AttentionPart& part = plan.parts[task.last++].part;
      task.cost += pairs_of(in, part.query_begin, part.query_end, part.keys) + part.keys;
      task.longest = std::max({task.longest, part.keys, part.query_end});
    }
    first = task.last;
    for (size_t head = 0; head < in.heads; head += heads_per_task) {
      task.head_begin = head;
      task.head_end = head + heads_per_task;
      plan.tasks.push_back(task);
    }
  }
  std::stable_sort(plan.tasks.begin(), plan.tasks.end(),
                   [](const AttentionTask& a, const AttentionTask& b) { return a.cost > b.cost; });
  return plan;
}

}  // namespace hotrow
