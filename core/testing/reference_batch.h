// One table's batch, and the expected results of a plan, computed by loops over examples and ids, one float operation
// at a time.
#pragma once

#include <cmath>
#include <vector>

#include "plan/plan.h"
#include "testing/random.h"
#include "testing/reference_rules.h"
#include "testing/tables.h"

namespace hotrow::testing {

struct BatchFeature {
  std::vector<int64_t> keys, offsets;  // no offsets: one id per example
  std::vector<float> weights;          // none: all one
  Pooling pooling;
  size_t bags;
  bool has_gradient = true;
  std::vector<float> gradient;
  size_t stride = 0;

  size_t outputs() const { return pooling == Pooling::kNone ? keys.size() : bags; }
  bool single() const { return offsets.empty() || pooling == Pooling::kNone; }
  size_t begin(size_t bag) const { return single() ? bag : offsets[bag]; }
  size_t end(size_t bag) const { return single() ? bag + 1 : offsets[bag + 1]; }
  float weight(size_t id) const { return weights.empty() ? 1.0f : weights[id]; }
};

struct Batch {
  std::vector<BatchFeature> features;

  void add_single(Random& random, size_t size, uint64_t variety, Pooling pooling) {
    features.push_back({random.keys(size, variety), {}, {}, pooling, size, true, {}, 0});
  }
  // Bags of 0 to 5 ids, now and then a long one.
  void add_bags(Random& random, size_t size, uint64_t variety, Pooling pooling, bool weighted) {
    std::vector<int64_t> offsets = {0};
    for (size_t bag = 0; bag < size; ++bag)
      offsets.push_back(offsets.back() + static_cast<int64_t>(random.below(random.below(50) ? 6 : 60)));
    const auto ids = static_cast<size_t>(offsets.back());
    features.push_back({random.keys(ids, variety),
                        std::move(offsets),
                        weighted ? random.reals(ids) : std::vector<float>{},
                        pooling,
                        size,
                        true,
                        {},
                        0});
  }
  // Every second feature's rows have a stride, as slices of a wider matrix have.
  void fill_gradients(Random& random, int dim) {
    for (size_t f = 0; f < features.size(); ++f) {
      features[f].stride = dim + (f % 2 ? 3 : 0);
      features[f].gradient = random.reals(features[f].outputs() * features[f].stride);
    }
  }

  std::vector<FeatureInput> inputs() const {
    std::vector<FeatureInput> result;
    for (const BatchFeature& f : features)
      result.push_back({f.keys.data(), f.keys.size(), f.offsets.empty() ? nullptr : f.offsets.data(), f.bags,
                        f.weights.empty() ? nullptr : f.weights.data(), f.pooling});
    return result;
  }
  std::vector<Matrix> gradients() const {
    std::vector<Matrix> result;
    for (const BatchFeature& f : features) {
      const size_t columns = f.stride - (&f - features.data()) % 2 * 3;
      result.push_back(f.has_gradient ? Matrix{const_cast<float*>(f.gradient.data()), f.outputs(), columns, f.stride}
                                      : Matrix{});
    }
    return result;
  }

  // All features' vectors, concatenated.
  std::vector<float> gather(Plan& plan, int dim) const {
    size_t total = 0;
    for (const BatchFeature& f : features) total += f.outputs() * dim;
    std::vector<float> out(total + 1, 777.0f);
    std::vector<Matrix> matrices;
    size_t at = 0;
    for (const BatchFeature& f : features) {
      matrices.push_back({out.data() + at, f.outputs(), static_cast<size_t>(dim), static_cast<size_t>(dim)});
      at += f.outputs() * dim;
    }
    plan.gather(matrices);
    return out;
  }
  std::vector<float> naive_gather(const Table& table, const Rows& rows) const {
    std::vector<float> out;
    for (const BatchFeature& f : features)
      for (size_t bag = 0; bag < f.outputs(); ++bag) {
        std::vector<float> sum(table.dim(), 0.0f);
        for (size_t id = f.begin(bag); id < f.end(bag); ++id) {
          auto row = rows.find(f.keys[id]);
          const Row& values = row == rows.end() ? initial_row(table, f.keys[id]) : row->second;
          for (int i = 0; i < table.dim(); ++i) sum[i] += f.weight(id) * values.values[i];
        }
        if (f.pooling == Pooling::kMean && f.end(bag) > f.begin(bag))
          for (float& value : sum) value /= static_cast<float>(f.end(bag) - f.begin(bag));
        out.insert(out.end(), sum.begin(), sum.end());
      }
    out.push_back(777.0f);
    return out;
  }

  // Requires: one table, so options has one job.
  void naive_update(const Table& table, Rows& rows, const UpdateOptions& options) const {
    struct Sum {
      std::vector<float> gradient;
      uint64_t seen = 0;
    };
    std::map<int64_t, Sum> sums;
    for (const BatchFeature& f : features)
      for (size_t bag = 0; bag < f.outputs(); ++bag)
        for (size_t id = f.begin(bag); id < f.end(bag); ++id) {
          Sum& sum = sums[f.keys[id]];
          ++sum.seen;
          if (!f.has_gradient) continue;
          float scale = f.weight(id);
          if (f.pooling == Pooling::kMean) scale /= static_cast<float>(f.end(bag) - f.begin(bag));
          const bool first = sum.gradient.empty();
          sum.gradient.resize(table.dim());
          for (int i = 0; i < table.dim(); ++i) {
            const float value = f.gradient[bag * f.stride + i] * scale;
            sum.gradient[i] = first ? value : sum.gradient[i] + value;
          }
        }
    for (auto& [key, sum] : sums) {
      Row& row = rows.emplace(key, initial_row(table, key)).first->second;
      if (!sum.gradient.empty()) {
        scale_and_clip(sum.gradient, options);
        naive_rule(table.options().rule, row.values, sum.gradient, options.jobs[0].coefficients);
        for (int i = 0; i < table.dim() && table.options().type != RowType::kFloat; ++i)
          row.values[i] = naive_round(table.options().type, row.values[i],
                                      draw(table.rounding_stream(), key, options.step, i / 4)[i % 4]);
      }
      row.last_step = options.step;
      row.count = counted(table, key, row.count, sum.seen, options.step);
    }
  }

 private:
  static void scale_and_clip(std::vector<float>& g, const UpdateOptions& options) {
    const JobUpdate& job = options.jobs[0];
    for (float& value : g) {
      if (options.grad_scale != 1) value *= options.grad_scale;
      if (job.clip_value > 0)
        value = value < -job.clip_value ? -job.clip_value : value > job.clip_value ? job.clip_value : value;
    }
    const float norm = std::sqrt(naive_sum_of_squares(g));
    if (job.clip_norm > 0 && norm > job.clip_norm)
      for (float& value : g) value *= job.clip_norm / norm;
  }
  static uint64_t counted(const Table& table, int64_t key, uint64_t before, uint64_t seen, uint32_t step) {
    const uint16_t code = add_count(0, before, [] { return 0u; });  // what was stored is exact
    return decode_count(add_count(code, seen, [&] { return draw(table.count_stream(), key, step, 0)[0]; }));
  }
};

}  // namespace hotrow::testing
