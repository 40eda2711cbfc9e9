// The kernel of every call against a plain loop over pairs in double, and its gradients against differences.
#include "attention/jagged_attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "attention/attention_plan.h"
#include "testing/test.h"
#include "threads/thread_pool.h"

namespace hotrow {
namespace {

constexpr size_t kHeads = 2, kPadding = 3;

struct Problem {
  std::vector<int64_t> q_lengths, k_lengths, visible, q_times, k_times;
  std::vector<float> q, k, v, own_k, own_v, position_bias, time_bias;
  size_t queries = kPadding, keys = kPadding, dim, width;
  bool softmax, causal;

  Problem(std::vector<int64_t> queries_of, std::vector<int64_t> keys_of, size_t d, size_t w, bool soft, bool is_causal)
      : q_lengths(std::move(queries_of)),
        k_lengths(std::move(keys_of)),
        dim(d),
        width(w),
        softmax(soft),
        causal(is_causal) {
    for (int64_t length : q_lengths) queries += static_cast<size_t>(length);
    for (int64_t length : k_lengths) keys += static_cast<size_t>(length);
    q = values(queries * kHeads * dim, 1);
    k = values(keys * kHeads * dim, 2);
    v = values(keys * kHeads * width, 3);
  }

  static std::vector<float> values(size_t count, uint32_t seed) {
    std::vector<float> result;
    uint32_t state = seed * 2654435761u + 12345;
    for (size_t i = 0; i < count; ++i) {
      state = state * 1664525u + 1013904223u;
      result.push_back(static_cast<float>(state >> 8) / static_cast<float>(1 << 23) - 1.f);
    }
    return result;
  }

  void add_biases() {
    position_bias = values(kHeads * 5, 4);
    time_bias = values(kHeads * 6, 5);
    for (size_t i = 0; i < queries; ++i) q_times.push_back(static_cast<int64_t>(i * 1700));
    for (size_t i = 0; i < keys; ++i) k_times.push_back(static_cast<int64_t>(i * 900));
  }

  void add_own() {
    own_k = values(queries * kHeads * dim, 6);
    own_v = values(queries * kHeads * width, 7);
    for (size_t i = 0; i < queries; ++i) visible.push_back(static_cast<int64_t>(i * 7 % 23) - 1);
  }

  AttentionInputs inputs() const {
    AttentionInputs in;
    in.users = q_lengths.size(), in.queries = queries, in.keys = keys, in.heads = kHeads, in.dim = dim,
    in.width = width;
    in.q = rows(q, dim), in.k = rows(k, dim), in.v = rows(v, width);
    in.own_k = rows(own_k, dim), in.own_v = rows(own_v, width);
    in.q_lengths = q_lengths.data(), in.k_lengths = k_lengths.data();
    in.visible = visible.empty() ? nullptr : visible.data();
    in.q_times = q_times.data(), in.k_times = k_times.data();
    in.position_bias = position_bias.empty() ? nullptr : position_bias.data(),
    in.positions = position_bias.size() / kHeads;
    in.time_bias = time_bias.empty() ? nullptr : time_bias.data(), in.times = time_bias.size() / kHeads;
    in.softmax = softmax, in.causal = causal, in.scale = 0.4f, in.divisor = 3;
    return in;
  }

  static HeadRows rows(const std::vector<float>& data, size_t floats) {
    return data.empty() ? HeadRows{} : HeadRows{data.data(), kHeads * floats, floats};
  }

  // The output by a plain loop, in double.
  std::vector<double> plainly() const {
    std::vector<double> out(queries * kHeads * width);
    size_t q_first = 0, k_first = 0;
    const bool candidates = !visible.empty() || !own_k.empty();
    for (size_t user = 0; user < q_lengths.size(); ++user) {
      const auto nq = static_cast<size_t>(q_lengths[user]), nk = static_cast<size_t>(k_lengths[user]);
      for (size_t i = 0; i < nq; ++i)
        for (size_t h = 0; h < kHeads; ++h) {
          const size_t row = q_first + i;
          size_t seen = causal ? i + 1 : nk;
          if (!visible.empty()) seen = std::min(nk, static_cast<size_t>(std::max<int64_t>(0, visible[row])));
          const auto place = static_cast<int64_t>(!causal && candidates ? seen : i);
          std::vector<double> scores;
          std::vector<const float*> seen_values;
          for (size_t j = 0; j < seen; ++j) {
            int64_t apart = place - static_cast<int64_t>(j);
            int64_t elapsed = time_bias.empty() ? 0 : q_times[row] - k_times[k_first + j];
            const bool bidirectional = !causal && !candidates;
            apart = bidirectional ? std::abs(apart) : std::max<int64_t>(0, apart);
            elapsed = bidirectional ? std::abs(elapsed) : std::max<int64_t>(0, elapsed);
            scores.push_back(score(row, h, &k[((k_first + j) * kHeads + h) * dim], apart, elapsed));
            seen_values.push_back(&v[((k_first + j) * kHeads + h) * width]);
          }
          if (!own_k.empty()) {
            scores.push_back(score(row, h, &own_k[(row * kHeads + h) * dim], 0, 0));
            seen_values.push_back(&own_v[(row * kHeads + h) * width]);
          }
          double total = softmax ? 0 : 3;
          for (double& s : scores) {
            s = softmax ? std::exp(s) : s / (1 + std::exp(-s));
            if (softmax) total += s;
          }
          for (size_t j = 0; j < scores.size(); ++j)
            for (size_t d = 0; d < width; ++d)
              out[(row * kHeads + h) * width + d] += scores[j] / total * seen_values[j][d];
        }
      q_first += nq;
      k_first += nk;
    }
    return out;
  }

  double score(size_t row, size_t h, const float* key, int64_t apart, int64_t elapsed) const {
    double sum = 0;
    for (size_t d = 0; d < dim; ++d) sum += static_cast<double>(q[(row * kHeads + h) * dim + d]) * key[d] * 0.4;
    if (!position_bias.empty()) sum += position_bias[h * 5 + std::min<size_t>(4, static_cast<size_t>(apart))];
    if (!time_bias.empty()) {
      size_t bucket = 0;
      for (int64_t seconds = elapsed / 1000 + 1; seconds > 1; seconds /= 2) ++bucket;
      sum += time_bias[h * 6 + std::min<size_t>(5, bucket)];
    }
    return sum;
  }
};

struct Solution {
  std::vector<float> out, q, k, v, own_k, own_v, position_bias, time_bias;
};

Solution solve(const Problem& problem, const std::vector<float>& gradient) {
  const AttentionInputs in = problem.inputs();
  Solution s;
  std::vector<float> log_sums(problem.queries * kHeads, 7.f);
  s.out.assign(problem.queries * kHeads * problem.width, 7.f);
  attention_forward(in, s.out.data(), log_sums.data());
  s.q.assign(problem.q.size(), 7.f), s.k.assign(problem.k.size(), 7.f), s.v.assign(problem.v.size(), 7.f);
  s.own_k.assign(problem.own_k.size(), 7.f), s.own_v.assign(problem.own_v.size(), 7.f);
  s.position_bias.assign(problem.position_bias.size(), 7.f), s.time_bias.assign(problem.time_bias.size(), 7.f);
  const auto to = [](std::vector<float>& values) { return values.empty() ? nullptr : values.data(); };
  attention_backward(in, Problem::rows(gradient, problem.width), Problem::rows(s.out, problem.width), log_sums.data(),
                     {to(s.q), to(s.k), to(s.v), to(s.own_k), to(s.own_v), to(s.position_bias), to(s.time_bias)});
  return s;
}

double product(const std::vector<double>& out, const std::vector<float>& gradient) {
  double sum = 0;
  for (size_t i = 0; i < out.size(); ++i) sum += out[i] * gradient[i];
  return sum;
}

// A few elements of a gradient against central differences of the plain loop.
void check_gradient(Problem& problem, std::vector<float>& values, const std::vector<float>& found,
                    const std::vector<float>& gradient) {
  for (size_t i = 0; i < values.size(); i += 1 + values.size() / 6) {
    const float kept = values[i], step = 1.f / 64;
    values[i] = kept + step;
    const double above = product(problem.plainly(), gradient);
    values[i] = kept - step;
    const double below = product(problem.plainly(), gradient);
    values[i] = kept;
    CHECK(std::abs((above - below) / (2 * step) - found[i]) < 2e-3 * (1 + std::abs(found[i])));
  }
}

void check(Problem problem) {
  const std::vector<float> gradient = Problem::values(problem.queries * kHeads * problem.width, 9);
  const Solution found = solve(problem, gradient);
  const std::vector<double> expected = problem.plainly();
  for (size_t i = 0; i < expected.size(); ++i) CHECK(std::abs(expected[i] - found.out[i]) < 1e-5);
  check_gradient(problem, problem.q, found.q, gradient);
  check_gradient(problem, problem.k, found.k, gradient);
  check_gradient(problem, problem.v, found.v, gradient);
  check_gradient(problem, problem.own_k, found.own_k, gradient);
  check_gradient(problem, problem.own_v, found.own_v, gradient);
  check_gradient(problem, problem.position_bias, found.position_bias, gradient);
  check_gradient(problem, problem.time_bias, found.time_bias, gradient);
  for (size_t i = found.out.size() - kPadding * kHeads * problem.width; i < found.out.size(); ++i)
    CHECK_EQ(found.out[i], 0.f);
  for (size_t i = found.k.size() - kPadding * kHeads * problem.dim; i < found.k.size(); ++i) CHECK_EQ(found.k[i], 0.f);
}

TEST(attention_is_a_plain_loop_over_pairs) {
  for (const bool softmax : {true, false})
    for (const size_t dim : {size_t{3}, size_t{16}}) {
      Problem causal({0, 1, 17, 70}, {0, 1, 17, 70}, dim, dim + 1, softmax, true);
      check(causal);
      causal.add_biases();
      check(causal);
      Problem bidirectional({33, 2}, {33, 2}, dim, 5, softmax, false);
      bidirectional.add_biases();
      check(bidirectional);
      Problem candidates({5, 0, 40}, {20, 4, 66}, dim, dim, softmax, false);
      candidates.add_own();
      check(candidates);
      candidates.add_biases();
      check(candidates);
    }
}

TEST(attention_gives_the_same_bits_for_any_number_of_threads) {
  Problem problem({300, 1, 0, 90, 280}, {300, 1, 0, 90, 280}, 8, 8, true, true);
  problem.add_biases();
  const std::vector<float> gradient = Problem::values(problem.queries * kHeads * problem.width, 9);
  const int before = ThreadPool::shared().threads();
  std::vector<Solution> found;
  for (const int threads : {1, 4}) {
    ThreadPool::shared().set_threads(threads);
    found.push_back(solve(problem, gradient));
  }
  ThreadPool::shared().set_threads(before);
  CHECK(found[0].out == found[1].out && found[0].q == found[1].q && found[0].k == found[1].k &&
        found[0].v == found[1].v);
  CHECK(found[0].position_bias == found[1].position_bias && found[0].time_bias == found[1].time_bias);
}

TEST(attention_plan_covers_every_query_once_and_splits_long_users) {
  const Problem problem({5, 0, 1000, 3}, {5, 2, 1000, 3}, 1, 1, true, false);
  const AttentionPlan plan = plan_attention(problem.inputs(), 100'000, 32);
  std::vector<int> covered(problem.queries - kPadding);
  for (const PlannedPart& planned : plan.parts)
    for (size_t i = planned.part.query_begin; i < planned.part.query_end; ++i) ++covered[planned.part.q_row + i];
  CHECK(std::all_of(covered.begin(), covered.end(), [](int times) { return times == 1; }));
  CHECK(plan.partials.size() >= 4);  // besides the first part
  CHECK_EQ(plan.queries, problem.queries - kPadding);
  CHECK_EQ(plan.longest_keys, 1000u);
  for (size_t i = 1; i < plan.tasks.size(); ++i) CHECK(plan.tasks[i - 1].cost >= plan.tasks[i].cost);
}

TEST(attention_refuses_lengths_that_do_not_fit) {
  const std::vector<float> none;
  std::vector<float> out(1000);
  Problem problem({3, 2}, {3, 2}, 2, 2, true, true);
  problem.q_lengths[1] = 6;
  problem.k_lengths[1] = 6;
  CHECK_THROWS(std::invalid_argument, attention_forward(problem.inputs(), out.data(), nullptr));
  problem.q_lengths[1] = -1;
  CHECK_THROWS(std::invalid_argument, attention_forward(problem.inputs(), out.data(), nullptr));
  problem.q_lengths = {3, 1}, problem.k_lengths = {3, 2};
  CHECK_THROWS(std::invalid_argument, attention_forward(problem.inputs(), out.data(), nullptr));
}

}  // namespace
}  // namespace hotrow
