// Every instruction set gives the same bits.
#include "kernels/row_kernels.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "index/unique_keys.h"
#include "testing/random.h"
#include "testing/reference_rules.h"
#include "testing/tables.h"
#include "testing/test.h"

namespace hotrow {

extern const Kernels kKernels_baseline;
#ifdef HOTROW_HAS_AVX2
extern const Kernels kKernels_avx2;
#endif

namespace {

using testing::Random;

// The variants that this machine can run.
std::vector<const Kernels*> variants() {
  std::vector<const Kernels*> all = {&kKernels_baseline};
#ifdef HOTROW_HAS_AVX2
  if (__builtin_cpu_supports("avx2")) all.push_back(&kKernels_avx2);
#endif
  return all;
}

// A table of which every second key has a row, and all keys with their hashes.
struct Filled {
  std::shared_ptr<Table> table;
  std::vector<int64_t> keys;
  std::vector<uint64_t> hashes;
  std::vector<uint32_t> slots;

  Filled(Random& random, int dim, RuleKind rule, size_t count, RowType type = RowType::kFloat)
      : table(testing::make_typed_table(type, dim, rule)) {
    keys = random.keys(count, uint64_t{1} << 60);
    for (int64_t key : keys) hashes.push_back(hash_key(key));
    slots.resize(keys.size());
    table->find_or_create(keys.data(), keys.size() / 2, slots.data());
  }
};

TEST(all_variants_find_and_read_the_same_rows) {
  Random random(1);
  for (int dim : {1, 3, 8, 17, 64}) {
    const Filled filled(random, dim, RuleKind::kSgd, 3001);
    const size_t count = filled.keys.size();
    for (const Kernels* kernels : variants()) {
      std::vector<uint32_t> slots(count), read_slots(count);
      std::vector<float> out(count * dim, -3.0f);
      const FindArgs find{filled.table->view(), filled.keys.data(), filled.hashes.data(), count, slots.data()};
      CHECK_EQ(kernels->find(find), count - count / 2);
      FindArgs reading = find;
      reading.slots = read_slots.data();
      kernels->read({reading, dim, out.data()});
      CHECK(slots == read_slots);
      for (size_t i = 0; i < count; ++i) {
        CHECK_EQ(slots[i], i < count / 2 ? filled.slots[i] : kNoSlot);
        const auto want = testing::initial_row(*filled.table, filled.keys[i]).values;
        for (int d = 0; d < dim; ++d) CHECK_EQ(out[i * dim + d], i < count / 2 ? want[d] : -3.0f);
      }
    }
  }
}

TEST(all_variants_pool_to_the_same_bits) {
  Random random(2);
  for (int dim : {1, 3, 8, 16, 17, 32, 64, 100, 128})
    for (Pooling pooling : {Pooling::kSum, Pooling::kMean, Pooling::kNone})
      for (bool weighted : {false, true}) {
        const std::vector<float> rows = random.reals(50 * dim);
        std::vector<uint32_t> offsets = {0}, inverse;
        for (int bag = 0; bag < 40; ++bag) offsets.push_back(offsets.back() + static_cast<uint32_t>(random.below(9)));
        for (uint32_t i = 0; i < offsets.back(); ++i) inverse.push_back(static_cast<uint32_t>(random.below(50)));
        const auto weights = random.reals(inverse.size());
        const size_t bags = pooling == Pooling::kNone ? inverse.size() : 40;
        std::vector<std::vector<float>> outs;
        for (const Kernels* kernels : variants()) {
          outs.emplace_back(bags * dim, 5.0f);
          PoolArgs args{};
          args.rows = reinterpret_cast<const char*>(rows.data());
          args.row_bytes = dim * sizeof(float);
          args.inverse = inverse.data();
          args.dim = dim;
          args.pooling = pooling;
          args.offsets = offsets.data();
          args.weights = weighted ? weights.data() : nullptr;
          args.bag_end = bags;
          args.out = outs.back().data();
          args.out_stride = static_cast<size_t>(dim);
          kernels->pool(args);
        }
        for (const auto& out : outs) CHECK(!std::memcmp(out.data(), outs[0].data(), out.size() * sizeof(float)));
      }
}

TEST(writing_past_the_cache_gives_the_same_bits) {
  Random random(5);
  for (int dim : {1, 3, 8, 16, 64, 100, 128})
    for (size_t shift : {0, 1, 4}) {  // outputs at every alignment
      const std::vector<float> rows = random.reals(50 * dim);
      std::vector<uint32_t> inverse;
      for (int i = 0; i < 70; ++i) inverse.push_back(static_cast<uint32_t>(random.below(50)));
      for (const Kernels* kernels : variants()) {
        std::vector<float> plain(70 * dim + 8, 5.0f), large = plain;
        for (auto* out : {&plain, &large})
          kernels->pool({reinterpret_cast<const char*>(rows.data()), dim * sizeof(float), nullptr, inverse.data(), dim,
                         Pooling::kSum, nullptr, nullptr, 0, 70, out->data() + shift, static_cast<size_t>(dim),
                         out == &large});
        CHECK(plain == large);
      }
    }
}

// One update of every row with runs of one to three gradients, through one variant.
testing::Rows updated(const Kernels& kernels, RuleKind rule, int dim, bool clipped, RowType type) {
  Random random(3);
  Filled filled(random, dim, rule, 120, type);
  filled.table->find_or_create(filled.keys.data(), filled.keys.size(), filled.slots.data());
  std::vector<uint32_t> run_begin = {0}, run;
  for (size_t u = 0; u < filled.keys.size(); ++u) {
    for (uint64_t n = 1 + u % 3; n > 0; --n) run.push_back(static_cast<uint32_t>(run.size()));
    run_begin.push_back(static_cast<uint32_t>(run.size()));
  }
  const auto gradients = random.reals(run.size() * dim), scales = random.reals(run.size());
  const auto coefficients = testing::some_coefficients(rule);
  const GradSource source{gradients.data(), static_cast<size_t>(dim),         0, static_cast<uint32_t>(run.size()),
                          nullptr,          clipped ? scales.data() : nullptr};
  std::vector<float> scratch(2 * dim + filled.table->width());
  UpdateArgs args{};
  args.view = filled.table->view();
  args.dim = dim;
  args.slots = filled.slots.data();
  args.hashes = filled.hashes.data();
  args.end = filled.keys.size();
  args.run_begin = run_begin.data();
  args.run = run.data();
  args.sources = &source;
  args.coefficients = coefficients.data();
  args.grad_scale = clipped ? 0.75f : 1.0f;
  args.clip_value = clipped ? 0.5f : 0.0f;
  args.clip_norm = clipped ? 0.9f : 0.0f;
  args.scratch = scratch.data();
  args.count_stream = filled.table->count_stream();
  args.type = type;
  args.rounding_stream = filled.table->rounding_stream();
  for (args.step = 1; args.step <= 3; ++args.step) kernels.update[static_cast<int>(rule)](args);
  return testing::rows_of(*filled.table);
}

TEST(all_variants_update_to_the_same_bits) {
  for (int rule = 0; rule < static_cast<int>(RuleKind::kCount); ++rule)
    for (int dim : {1, 3, 8, 16, 17, 32, 64, 128})
      for (RowType type : {RowType::kFloat, RowType::kHalf, RowType::kBFloat})
        for (bool clipped : {false, true}) {
          const auto want = updated(kKernels_baseline, static_cast<RuleKind>(rule), dim, clipped, type);
          for (const Kernels* kernels : variants())
            CHECK(testing::same_bits(updated(*kernels, static_cast<RuleKind>(rule), dim, clipped, type), want));
        }
}

TEST(all_variants_notice_one_bad_float_anywhere) {
  Random random(4);
  for (const Kernels* kernels : variants())
    for (size_t size : {0, 1, 15, 255, 256, 257, 600}) {
      auto values = random.reals(size);
      CHECK(kernels->all_finite(values.data(), size));
      for (size_t i = 0; i < size; ++i)
        for (float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
          const float good = std::exchange(values[i], bad);
          CHECK(!kernels->all_finite(values.data(), size));
          values[i] = good;
        }
      if (size) values[size / 2] = std::numeric_limits<float>::max();
      CHECK(kernels->all_finite(values.data(), size));
    }
}

TEST(the_variant_in_use_is_one_that_this_machine_runs) {
  bool known = false;
  for (const Kernels* each : variants()) known |= each == &kernels();
  CHECK(known);
}

}  // namespace
}  // namespace hotrow
