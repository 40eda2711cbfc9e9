// Rows that are sent ahead: what copy_ahead and copy_changed bring together is what gather gives, whatever happens in
// between. Run it under the sanitizers too.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <thread>

#include "plan/in_flight_keys.h"
#include "plan/plan.h"
#include "testing/random.h"
#include "testing/reference_rules.h"
#include "testing/tables.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

constexpr size_t kRequesters = 2;
const std::vector<int> kDims = {4, 7};
using Tables = std::vector<std::shared_ptr<Table>>;

Tables make_tables(RowType type = RowType::kFloat) {
  Tables tables;
  for (int dim : kDims)
    tables.push_back(type == RowType::kFloat ? testing::make_table(dim, RuleKind::kAdam)
                                             : testing::make_typed_table(type, dim, RuleKind::kAdam));
  return tables;
}

// A batch as an owner gets it: each requester's unique keys, by table.
struct OwnedBatch {
  std::vector<std::vector<std::vector<int64_t>>> keys;  // by table and requester
  std::vector<std::vector<std::vector<uint32_t>>> seen;

  OwnedBatch(testing::Random& random, size_t size, uint64_t variety) {
    for (size_t j = 0; j < kDims.size(); ++j) {
      keys.emplace_back();
      seen.emplace_back();
      for (size_t r = 0; r < kRequesters; ++r) {
        auto some = random.keys(random.below(size + 1), variety);
        std::sort(some.begin(), some.end());
        some.erase(std::unique(some.begin(), some.end()), some.end());
        seen[j].push_back(std::vector<uint32_t>(some.size(), 1 + static_cast<uint32_t>(random.below(3))));
        keys[j].push_back(std::move(some));
      }
    }
  }

  std::vector<JobInput> jobs(const Tables& tables) const {
    std::vector<JobInput> result;
    for (size_t j = 0; j < kDims.size(); ++j) {
      result.push_back({tables[j], {}});
      for (size_t r = 0; r < kRequesters; ++r)
        result.back().features.push_back({keys[j][r].data(), keys[j][r].size(), nullptr, keys[j][r].size(), nullptr,
                                          Pooling::kNone, seen[j][r].data()});
    }
    return result;
  }

  std::vector<RowBlock> blocks(size_t requester) const {
    std::vector<RowBlock> result;
    for (size_t j = 0; j < kDims.size(); ++j) result.push_back({keys[j][requester].size(), size_t(kDims[j])});
    return result;
  }

  size_t floats() const {
    size_t total = 0;
    for (size_t r = 0; r < kRequesters; ++r)
      for (const RowBlock& block : blocks(r)) total += block.rows * block.dim;
    return total;
  }

  size_t mask_bytes(size_t requester) const {
    size_t keys_of = 0;
    for (const RowBlock& block : blocks(requester)) keys_of += block.rows;
    return (keys_of + 7) / 8;
  }

  // All rows through gather, requester by requester.
  std::vector<float> gathered(Plan& plan) const {
    std::vector<float> out(floats());
    std::vector<std::vector<Matrix>> by_table(kDims.size(), std::vector<Matrix>(kRequesters));
    float* at = out.data();
    for (size_t r = 0; r < kRequesters; ++r)
      for (size_t j = 0; j < kDims.size(); ++j) {
        const size_t rows = keys[j][r].size(), dim = kDims[j];
        by_table[j][r] = {at, rows, dim, dim};
        at += rows * dim;
      }
    std::vector<Matrix> outputs;
    for (auto& of_table : by_table)
      for (Matrix& matrix : of_table) outputs.push_back(matrix);
    plan.gather(outputs);
    return out;
  }
};

// What a requester holds after the two messages.
struct Received {
  std::vector<float> rows;
  size_t ahead = 0, on_turn = 0;  // floats
};

struct InFlight {
  OwnedBatch batch;
  std::unique_ptr<Plan> plan;
  std::vector<float> rows;
  std::vector<uint8_t> masks;
  std::vector<size_t> floats;

  InFlight(OwnedBatch made, const Tables& tables, InFlightKeys& keys, uint64_t number, uint64_t done)
      : batch(std::move(made)), plan(std::make_unique<Plan>()) {
    plan->route(batch.jobs(tables));
    plan->note_in_flight(keys, number, done);
  }

  void copy_ahead(uint64_t done, uint32_t step) {
    rows.resize(batch.floats());
    masks.assign(batch.mask_bytes(0) + batch.mask_bytes(1), 0xff);
    floats = plan->copy_ahead(done, step, rows.data(), masks.data());
  }

  // Requires: copy_ahead, fetch.
  Received receive() {
    Received received{std::vector<float>(batch.floats(), -77.0f)};
    put(received.rows, received.ahead);
    floats = plan->copy_changed(rows.data(), masks.data());
    put(received.rows, received.on_turn);
    return received;
  }

 private:
  void put(std::vector<float>& out, size_t& total) {
    const float* row = rows.data();
    const uint8_t* mask = masks.data();
    float* place = out.data();
    for (size_t r = 0; r < kRequesters; ++r) {
      CHECK(masked_floats(mask, batch.blocks(r)) == floats[r]);
      expand_rows(mask, row, batch.blocks(r), place);
      row += floats[r];
      mask += batch.mask_bytes(r);
      total += floats[r];
      for (const RowBlock& block : batch.blocks(r)) place += block.rows * block.dim;
    }
  }
};

void update(Plan& plan, const OwnedBatch& batch, testing::Random& random, uint32_t step) {
  std::vector<std::vector<float>> gradients;
  std::vector<Matrix> matrices;
  UpdateOptions options{{}, step, 1};
  for (size_t j = 0; j < kDims.size(); ++j) {
    options.jobs.push_back({testing::some_coefficients(RuleKind::kAdam), 0, 0});
    for (size_t r = 0; r < kRequesters; ++r) {
      const size_t rows = batch.keys[j][r].size(), dim = kDims[j];
      gradients.push_back(random.reals(rows * dim));
      matrices.push_back({gradients.back().data(), rows, dim, dim});
    }
  }
  plan.update(matrices, {}, options);
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(rows_sent_ahead_and_on_the_turn_are_the_rows_of_the_turn) {
  for (RowType type : {RowType::kFloat, RowType::kBFloat}) {
    testing::Random random(7);
    Tables tables = make_tables(type);
    InFlightKeys keys;
    std::deque<InFlight> in_flight;
    size_t ahead = 0, on_turn = 0, total = 0;
    uint64_t routed = 0, done = 0;
    for (uint32_t step = 1; step <= 60; ++step) {
      while (in_flight.size() < 3) {  // each is copied at a random time before its turn
        in_flight.emplace_back(OwnedBatch(random, 60, 120), tables, keys, ++routed, done);
        in_flight.back().copy_ahead(done, step - 1);
      }
      InFlight& item = in_flight.front();
      if (random.below(4) == 0) item.copy_ahead(done, step - 1);  // again, later
      if (random.below(8) == 0) {                                 // from outside: values change and no update tells
        const int64_t key = item.batch.keys[0][0].empty() ? 5 : item.batch.keys[0][0][0];
        const auto row = random.reals(tables[0]->floats());
        tables[0]->assign(&key, 1, row.data(), tables[0]->floats(), nullptr, nullptr);
      }
      if (random.below(8) == 0 && !item.batch.keys[1][1].empty()) {
        const int64_t key = item.batch.keys[1][1].back();
        tables[1]->erase(&key, 1);
      }
      item.plan->fetch(step);
      const Received received = item.receive();
      CHECK(same(received.rows, item.batch.gathered(*item.plan)));
      Plan fresh;  // finds every slot itself
      fresh.route(item.batch.jobs(tables));
      fresh.fetch(step);
      CHECK(same(received.rows, item.batch.gathered(fresh)));
      ahead += received.ahead;
      on_turn += received.on_turn;
      total += item.batch.floats();
      update(*item.plan, item.batch, random, step);
      done = routed - in_flight.size() + 1;
      in_flight.pop_front();
    }
    CHECK(ahead > total / 20 && ahead + on_turn >= total);  // keys are few: most are in several batches in flight
  }
}

TEST(a_row_that_nothing_changes_is_sent_once) {
  testing::Random random(8);
  Tables tables = make_tables();
  InFlightKeys keys;
  OwnedBatch batch(random, 200, 10000), other(random, 200, 10000);
  for (uint32_t step = 1; step <= 2; ++step) {  // creates the rows
    InFlight item(step == 1 ? batch : other, tables, keys, step, step - 1);
    item.plan->fetch(step);
    update(*item.plan, item.batch, random, step);
  }
  InFlight before(other, tables, keys, 3, 2), item(batch, tables, keys, 4, 2);
  item.copy_ahead(2, 2);
  before.plan->fetch(3);
  update(*before.plan, other, random, 3);
  item.plan->fetch(4);
  const Received received = item.receive();
  CHECK(same(received.rows, batch.gathered(*item.plan)));
  CHECK(received.ahead + received.on_turn == batch.floats());  // those that both batches have waited for their turn
  CHECK(received.ahead > batch.floats() * 9 / 10 && received.on_turn > 0);
}

TEST(rows_are_copied_ahead_beside_a_thread_that_trains) {
  testing::Random random(9);
  Tables tables = make_tables();
  InFlightKeys keys;
  constexpr uint32_t kSteps = 300;
  std::deque<InFlight> items;
  std::atomic<uint32_t> updated{0}, copied{0};
  for (uint32_t n = 1; n <= kSteps; ++n)
    items.emplace_back(OwnedBatch(random, 40, 200), tables, keys, n, n > 4 ? n - 4 : 0);
  std::thread stage([&] {
    for (uint32_t n = 0; n < kSteps; ++n) {
      while (n > updated + 3) std::this_thread::yield();
      const uint32_t now = updated;  // read before the copy begins
      items[n].copy_ahead(now, now);
      copied = n + 1;
    }
  });
  for (uint32_t n = 0; n < kSteps; ++n) {
    while (copied <= n) std::this_thread::yield();
    if (n % 5 == 0)  // rows that later batches have copied, or are copying, get other slots
      for (size_t ahead = n; ahead < std::min(n + 4, kSteps); ++ahead)
        for (int64_t key : items[ahead].batch.keys[1][0])
          if (key % 3 == 0) tables[1]->erase(&key, 1);
    items[n].plan->fetch(n + 1);
    const Received received = items[n].receive();
    CHECK(same(received.rows, items[n].batch.gathered(*items[n].plan)));
    Plan fresh;  // finds every slot itself
    fresh.route(items[n].batch.jobs(tables));
    fresh.fetch(n + 1);
    CHECK(same(received.rows, items[n].batch.gathered(fresh)));
    update(*items[n].plan, items[n].batch, random, n + 1);
    updated = n + 1;
  }
  stage.join();
}

TEST(keys_in_flight_are_those_of_batches_that_are_not_done) {
  testing::Random random(10);
  InFlightKeys keys;
  std::map<int64_t, uint64_t> last;
  for (uint64_t batch = 1; batch <= 200; ++batch) {
    const uint64_t done = batch > 3 ? batch - 3 : 0;
    const auto some = random.keys(random.below(300), 2000);
    UniqueKeys unique;
    unique.build({{some.data(), some.size()}});
    std::vector<uint64_t> previous(unique.size());
    keys.begin(batch, done, 1);
    keys.note(0, unique, previous.data());
    for (size_t u = 0; u < unique.size(); ++u) {
      const uint64_t expected = last.count(unique.keys()[u]) ? last[unique.keys()[u]] : 0;
      CHECK(previous[u] == expected || (expected <= done && previous[u] == 0));
      last[unique.keys()[u]] = batch;
    }
  }
  CHECK(keys.bytes() <= size_t{8} * 4 * 2 * 4 * 300);  // of the batches in flight, not of all keys
}

}  // namespace
}  // namespace hotrow
