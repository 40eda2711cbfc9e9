// Lookups over ranges and replicas: rows in their places, and none late while one replica of a range answers, whatever
// the others do.
#include "rowserver/row_client.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <thread>

#include "kernels/row_kernels.h"
#include "testing/held_reads.h"
#include "testing/random.h"
#include "testing/row_servers.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::Frame;
using testing::Keys;
using testing::keys_from;
using testing::Peer;
using testing::Random;
using testing::row_of;
using testing::ServedRows;
using testing::TestServer;
using testing::wait_until;

const std::vector<int> kDims{8, 5};
constexpr int64_t kKeys = 1000;
constexpr double kLong = testing::kPatience;

double seconds_since(RowClient::Clock::time_point began) {
  return std::chrono::duration<double>(RowClient::Clock::now() - began).count();
}

int open_socket(const TestServer& server) { return server.open().release(); }

// One row server with the keys of a range: those whose remainder by the number of ranges is the range's number.
struct Member {
  Member(int64_t range, int64_t ranges, const std::vector<int>& dims = kDims) : rows(dims, 0), server(rows.service) {
    for (int64_t key = range; key < kKeys; key += ranges) keys.push_back(key);
    for (uint32_t t = 0; t < dims.size(); ++t) testing::assign_rows(*rows.tables[t], t, 1, keys);
  }
  void publish() { rows.publish({{0, keys}, {1, keys}}); }
  Keys keys;
  ServedRows rows;
  TestServer server;
};

// A peer that is no row server: reads frames and does what a test says, which returns the bytes to answer with.
class FakeServer {
 public:
  using Answer = std::function<std::vector<char>(const Frame&)>;
  explicit FakeServer(Answer answer) : answer_(std::move(answer)) {}
  ~FakeServer() {
    for (const auto& peer : peers_) shutdown(peer->get(), SHUT_RDWR);
    for (auto& thread : threads_) thread.join();
  }
  int connect() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) throw std::runtime_error("no socketpair");
    peers_.push_back(std::make_unique<Peer>(ends[1]));
    threads_.emplace_back([this, peer = peers_.back().get()] {
      const timeval forever{0, 0};
      setsockopt(peer->get(), SOL_SOCKET, SO_RCVTIMEO, &forever, sizeof(forever));
      while (const auto request = peer->receive()) {
        const auto bytes = answer_(*request);
        if (bytes == std::vector<char>{'x'}) shutdown(peer->get(), SHUT_RDWR);
        if (!peer->send(bytes)) return;
      }
    });
    return ends[0];
  }

 private:
  const Answer answer_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<std::thread> threads_;
};
std::vector<char> silent(const Frame&) { return {}; }
std::vector<char> dying(const Frame&) { return {'x'}; }

struct Answered {
  RowLookupResult result;
  std::vector<float> rows;
  std::vector<char> found;
  double seconds;
  bool late() const { return std::count(result.late.begin(), result.late.end(), 1) > 0; }
};

// Keys by range and table.
using RangeKeys = std::vector<std::vector<Keys>>;

Answered look_up(RowClient& client, const std::vector<std::vector<uint32_t>>& servers, const RangeKeys& ranges,
                 int64_t publication, double seconds = kLong, const std::vector<int>& dims = kDims) {
  std::vector<uint32_t> tables;
  for (uint32_t t = 0; t < dims.size(); ++t) tables.push_back(t);
  std::vector<std::vector<uint32_t>> counts;
  Keys keys;
  size_t floats = 0;
  for (const auto& range : ranges) {
    counts.emplace_back();
    for (size_t t = 0; t < dims.size(); ++t) {
      counts.back().push_back(static_cast<uint32_t>(range[t].size()));
      keys.insert(keys.end(), range[t].begin(), range[t].end());
      floats += range[t].size() * static_cast<size_t>(dims[t]);
    }
  }
  Answered answered{{}, std::vector<float>(floats, -7), std::vector<char>(keys.size(), 9), 0};
  const auto began = RowClient::Clock::now();
  answered.result = client.lookup({&servers, &tables, &counts, keys.data(), publication, seconds, answered.rows.data(),
                                   reinterpret_cast<bool*>(answered.found.data())});
  answered.seconds = seconds_since(began);
  return answered;
}

// The number of rows that are not those of the publication. Keys from kKeys on have no row.
size_t wrong_rows(const Answered& answered, const RangeKeys& ranges, int64_t publication,
                  const std::vector<int>& dims = kDims, RowType wire = RowType::kFloat) {
  size_t wrong = 0, at = 0, number = 0;
  for (const auto& range : ranges)
    for (uint32_t t = 0; t < dims.size(); ++t) {
      const auto table = testing::make_read_only_table(dims[t]);
      for (const int64_t key : range[t]) {
        const bool exists = key < kKeys;
        auto expected = row_of(publication, t, key, dims[t]);
        if (!exists) table->write_initial_values(key, expected.data());
        if (wire != RowType::kFloat) {
          std::vector<uint32_t> encoded(words_of(wire, dims[t]));
          encode_row(wire, expected.data(), dims[t], encoded.data());
          kernels().decode(wire, reinterpret_cast<const char*>(encoded.data()), dims[t], expected.data());
        }
        wrong += std::memcmp(answered.rows.data() + at, expected.data(), expected.size() * sizeof(float)) != 0;
        wrong += answered.found[number++] != static_cast<char>(exists);
        at += static_cast<size_t>(dims[t]);
      }
    }
  return wrong;
}

RangeKeys random_keys(Random& random, int64_t ranges, size_t most = 60) {
  RangeKeys result(static_cast<size_t>(ranges), std::vector<Keys>(2));
  for (int64_t range = 0; range < ranges; ++range)
    for (Keys& keys : result[static_cast<size_t>(range)])
      for (size_t i = random.below(most); i > 0; --i)
        keys.push_back(static_cast<int64_t>(random.below(kKeys + 100)) / ranges * ranges + range);
  return result;
}

// Two ranges with two replicas each, and a client of all four.
struct Cluster {
  explicit Cluster(RowClient::Options options = {}, int connections = 6) : client(kDims, options) {
    for (int64_t range = 0; range < 2; ++range) {
      servers.emplace_back();
      for (int replica = 0; replica < 2; ++replica) {
        members.push_back(std::make_unique<Member>(range, 2));
        servers.back().push_back(client.add_server());
        for (int i = 0; i < connections; ++i)
          client.add_connection(servers.back().back(), RowConnection::over_socket(open_socket(members.back()->server)),
                                i == 0);
      }
    }
  }
  std::vector<std::unique_ptr<Member>> members;
  std::vector<std::vector<uint32_t>> servers;
  RowClient client;
};

TEST(rows_of_all_ranges_come_to_their_places) {
  for (const RowType wire : {RowType::kFloat, RowType::kHalf, RowType::kByte}) {
    Cluster cluster({0.001, true, wire});
    for (auto& member : cluster.members) member->publish();
    Random random(1);
    for (int round = 0; round < 100; ++round) {
      const auto keys = random_keys(random, 2);
      const int64_t publication = 1 + static_cast<int64_t>(random.below(2));
      const auto answered = look_up(cluster.client, cluster.servers, keys, publication);
      CHECK(!answered.late());
      CHECK_EQ(wrong_rows(answered, keys, publication, kDims, wire), 0u);
    }
    uint64_t asked[4];
    for (size_t i = 0; i < 4; ++i) {
      asked[i] = cluster.members[i]->rows.service->figures().lookups;
      const auto state = cluster.client.server(static_cast<uint32_t>(i));
      CHECK(state.connections == 5 && state.connected && state.in_flight == 0);
    }
    CHECK(asked[0] + asked[1] >= 90 && asked[2] + asked[3] >= 90);  // a lookup may have no key in a range
    CHECK(asked[0] > 0 && asked[1] > 0 && asked[2] > 0 && asked[3] > 0);
  }
}

TEST(a_replica_killed_in_the_middle_of_lookups_costs_no_row) {
  Cluster cluster;
  std::atomic<int> late{0}, done{0};
  std::atomic<size_t> wrong{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> lanes;
  for (uint64_t seed = 1; seed <= 4; ++seed)
    lanes.emplace_back([&, seed] {
      Random random(seed);
      while (!stop) {
        const auto keys = random_keys(random, 2);
        const auto answered = look_up(cluster.client, cluster.servers, keys, 1);
        late += answered.late();
        wrong += wrong_rows(answered, keys, 1);
        ++done;
      }
    });
  wait_until([&] { return done >= 100; });
  cluster.members[1]->server.server->close(0);  // with answers in flight
  int seen = done;
  wait_until([&] { return done >= seen + 100; });
  cluster.client.disconnect(cluster.servers[0][1]);
  cluster.members[2]->server.server->close(1);  // this one answers "closing" first
  seen = done;
  wait_until([&] { return done >= seen + 100; });
  stop = true;
  for (auto& lane : lanes) lane.join();
  CHECK_EQ(late.load(), 0);
  CHECK_EQ(wrong.load(), 0u);
  CHECK_EQ(cluster.client.server(cluster.servers[0][1]).connections, 0u);
  CHECK(!cluster.client.server(cluster.servers[0][1]).connected);
}

// A range's servers: those added first, and one that answers.
struct Replicas {
  explicit Replicas(const std::vector<FakeServer*>& fakes, RowClient::Options options = {}, int connections = 8)
      : good(0, 1), client(kDims, options) {
    for (FakeServer* fake : fakes) {
      servers.push_back(client.add_server());
      for (int i = 0; i < connections; ++i)
        client.add_connection(servers.back(), RowConnection::over_socket(fake->connect()), i == 0);
    }
    servers.push_back(client.add_server());
    for (int i = 0; i < connections; ++i)
      client.add_connection(servers.back(), RowConnection::over_socket(open_socket(good.server)), i == 0);
  }
  Answered look_up(const RangeKeys& keys, int64_t publication, double seconds = kLong) {
    return hotrow::look_up(client, {servers}, keys, publication, seconds);
  }
  uint32_t good_number() const { return servers.back(); }
  Member good;
  std::vector<uint32_t> servers;
  RowClient client;
};

TEST(hedges_win_over_a_replica_that_never_answers) {
  FakeServer fake(silent);
  Replicas replicas({&fake});
  Random random(1);
  uint32_t hedges = 0, won = 0;
  for (int round = 0; round < 50; ++round) {
    const auto keys = random_keys(random, 1);
    const auto answered = replicas.look_up(keys, 1);
    CHECK(!answered.late());
    CHECK_EQ(wrong_rows(answered, keys, 1), 0u);
    CHECK(answered.seconds < kLong / 2);
    hedges += answered.result.hedges;
    won += answered.result.hedges_won;
  }
  CHECK(hedges > 0 && won > 0);
  CHECK(replicas.client.hedge_seconds() >= 0.001);
}

TEST(a_hedge_that_fails_is_followed_by_another) {
  FakeServer mute(silent), dead(dying);
  Replicas replicas({&mute, &dead}, {}, 40);
  const RangeKeys keys{{{1, 2}, {3}}};
  for (int round = 0; round < 30; ++round) {
    const auto answered = replicas.look_up(keys, 1);
    CHECK(!answered.late() && answered.seconds < kLong / 2);
    CHECK_EQ(wrong_rows(answered, keys, 1), 0u);
  }
}

// Answers that do not fit the request are not used: another size, another publication, an id that was not asked for,
// another magic number, an error.
TEST(answers_that_do_not_fit_are_not_used) {
  const auto rows_frame = [](const Frame& request, size_t bytes) {
    auto answer =
        testing::frame(FrameKind::kRows, request.header.id, request.header.publication, std::vector<char>(bytes));
    return answer;
  };
  const size_t right = (2 * 8 + 5) * sizeof(float) + 3;
  const std::vector<FakeServer::Answer> wrong{
      [&](const Frame& request) { return rows_frame(request, right - 1); },
      [&](const Frame& request) {
        auto other = request;
        ++other.header.publication;
        return rows_frame(other, right);
      },
      [&](const Frame& request) {
        auto other = request;
        other.header.id += 5;
        return rows_frame(other, right);
      },
      [&](const Frame& request) {
        auto bytes = rows_frame(request, right);
        bytes[0] = 'x';
        return bytes;
      },
      [&](const Frame& request) {
        return testing::frame(FrameKind::kPong, request.header.id, 1, std::vector<char>(right));
      },
      [&](const Frame& request) {
        auto bytes = testing::frame(FrameKind::kError, request.header.id, 1, {'n', 'o'});
        bytes[6] = static_cast<char>(RowError::kFailed);
        return bytes;
      },
  };
  const RangeKeys keys{{{1, 2}, {3}}};
  for (const auto& answer : wrong) {
    FakeServer fake(answer);
    Replicas replicas({&fake}, {0.001, false, RowType::kFloat});
    uint32_t retries = 0;
    for (int round = 0; round < 6; ++round) {
      const auto answered = replicas.look_up(keys, 1);
      CHECK(!answered.late());
      CHECK_EQ(wrong_rows(answered, keys, 1), 0u);
      retries += answered.result.retries;
    }
    CHECK(retries > 0);
  }
}

TEST(a_replica_that_is_behind_is_passed_over) {
  Member behind(0, 1), ahead(0, 1);
  ahead.publish();
  RowClient client(kDims, {});
  std::vector<uint32_t> servers;
  for (const Member* member : {&behind, &ahead}) {
    servers.push_back(client.add_server());
    for (int i = 0; i < 3; ++i)
      client.add_connection(servers.back(), RowConnection::over_socket(open_socket(member->server)), i == 0);
  }
  const RangeKeys keys{{{1, 2, 3}, {4, 5}}};
  for (int round = 0; round < 50; ++round) {
    const auto answered = look_up(client, {servers}, keys, 2);
    CHECK(!answered.late());
    CHECK_EQ(wrong_rows(answered, keys, 2), 0u);
  }
  CHECK(client.server(servers[0]).errors <= 1);  // then its publication is known
  CHECK(client.ping(servers[0], kLong) && client.ping(servers[1], kLong));
  CHECK(client.server(servers[0]).publication == 1 && client.server(servers[1]).publication == 2);
  CHECK(client.server(servers[0]).oldest == 1 && client.server(servers[1]).oldest == 1);
  behind.publish();
  CHECK(client.ping(servers[0], kLong) && client.server(servers[0]).publication == 2);
  uint64_t before = behind.rows.service->figures().lookups;
  for (int round = 0; round < 200; ++round) look_up(client, {servers}, keys, 2);
  CHECK(behind.rows.service->figures().lookups > before);
}

TEST(when_all_are_behind_a_range_is_late_at_the_deadline_and_not_before) {
  Cluster cluster;
  Random random(1);
  const auto keys = random_keys(random, 2, 50);
  cluster.members[2]->publish();
  const auto late = look_up(cluster.client, cluster.servers, keys, 2, 0.1);
  CHECK(late.result.late == (std::vector<uint8_t>{1, 0}));
  CHECK(late.result.errors[0] == RowError::kBehind && late.result.errors[1] == RowError::kNone);
  CHECK(late.seconds >= 0.1);
  std::thread publisher([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    cluster.members[1]->publish();
  });
  const auto answered = look_up(cluster.client, cluster.servers, keys, 2);
  publisher.join();
  CHECK(!answered.late() && answered.result.retries > 0);
  CHECK_EQ(wrong_rows(answered, keys, 2), 0u);
  CHECK(look_up(cluster.client, cluster.servers, keys, 2, 0).late());  // no time at all
}

TEST(a_range_that_no_server_can_read_any_more_is_late_at_once) {
  Cluster cluster;
  for (int i = 0; i < 10; ++i) cluster.members[0]->publish();  // its history has eight
  const RangeKeys keys{{{2, 4}, {6}}, {{1}, {3}}};
  for (int round = 0; round < 10; ++round) {  // the other replica still can
    const auto answered = look_up(cluster.client, cluster.servers, keys, 1);
    CHECK(!answered.late());
    CHECK_EQ(wrong_rows(answered, keys, 1), 0u);
  }
  for (int i = 0; i < 10; ++i) cluster.members[1]->publish();
  const auto late = look_up(cluster.client, cluster.servers, keys, 1);
  CHECK(late.result.late == (std::vector<uint8_t>{1, 0}));
  CHECK(late.result.errors[0] == RowError::kTooNew);
  CHECK(late.seconds < kLong / 2);

  // One that is not connected may have it, so the lookup waits for it.
  cluster.client.disconnect(cluster.servers[0][1]);
  const auto waited = look_up(cluster.client, cluster.servers, keys, 1, 0.1);
  CHECK(waited.late() && waited.seconds >= 0.1);
  CHECK_EQ(waited.result.retries, 1u);  // the other one was asked once

  auto servers = cluster.servers;
  servers[0].clear();
  CHECK(look_up(cluster.client, servers, keys, 1).result.late == (std::vector<uint8_t>{1, 0}));
}

TEST(large_lookups_are_split_into_frames) {
  const std::vector<int> dims{2, 256};
  constexpr size_t kMany = 200'000, kWide = 10'000;  // more than 65,536 keys; 10 MiB of rows
  ServedRows rows(dims, kMany);
  TestServer server(rows.service);
  const RangeKeys keys{{keys_from(0, kMany), keys_from(0, kWide)}};
  for (const bool local : {false, true}) {
    RowClient client(dims, {});
    const uint32_t number = client.add_server();
    std::unique_ptr<Peer> control;
    if (local) {
      int ends[2];
      CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
      control = std::make_unique<Peer>(ends[1]);
      const auto slots = std::make_shared<SharedSlots>(server.server->add_local(ends[0], rows.service));
      for (size_t slot = 0; slot < 3; ++slot)
        client.add_connection(number, RowConnection::over_slot(slots, slot), slot == 0);
      CHECK(client.ping(number, kLong));
    } else {
      for (int i = 0; i < 2; ++i) client.add_connection(number, RowConnection::over_socket(open_socket(server)), false);
    }
    const uint64_t before = rows.service->figures().lookups;
    const auto answered = look_up(client, {{number}}, keys, 1, kLong, dims);
    CHECK(!answered.late());
    size_t wrong = 0;
    const float* at = answered.rows.data();
    for (uint32_t t = 0; t < 2; ++t)
      for (const int64_t key : keys[0][t]) {
        const auto expected = row_of(1, t, key, dims[t]);
        wrong += std::memcmp(at, expected.data(), expected.size() * sizeof(float)) != 0;
        at += dims[t];
      }
    for (const char found : answered.found) wrong += found != 1;
    CHECK_EQ(wrong, 0u);
    CHECK(rows.service->figures().lookups >= before + 6);
    CHECK_EQ(client.server(number).connections, 2u);
  }
}

TEST(disconnect_sends_waiting_lookups_to_another_server) {
  FakeServer fake(silent);
  Replicas replicas({&fake}, {0.001, false, RowType::kFloat});
  const RangeKeys keys{{{1, 2}, {3}}};
  for (int round = 0; round < 5; ++round) {
    std::vector<std::thread> lanes;
    std::atomic<int> late{0};
    std::atomic<size_t> wrong{0};
    for (int lane = 0; lane < 3; ++lane)
      lanes.emplace_back([&] {
        for (int i = 0; i < 3; ++i) {
          const auto answered = replicas.look_up(keys, 1);
          late += answered.late();
          wrong += wrong_rows(answered, keys, 1);
        }
      });
    std::this_thread::sleep_for(std::chrono::milliseconds(5 * round));
    CHECK(!replicas.client.ping(replicas.servers[0], 0.005));
    replicas.client.disconnect(replicas.servers[0]);
    CHECK(!replicas.client.ping(replicas.servers[0], 0.005));
    for (auto& lane : lanes) lane.join();
    CHECK_EQ(late.load(), 0);
    CHECK_EQ(wrong.load(), 0u);
    for (int i = 0; i < 4; ++i)
      replicas.client.add_connection(replicas.servers[0], RowConnection::over_socket(fake.connect()), i == 0);
  }
}

// All connections of the server that looks fastest are in use, by a lookup that waits.
TEST(a_server_without_a_free_connection_is_passed_over) {
  testing::TempFolder folder;
  testing::WithHeldReads disk;
  testing::SsdRows cold(folder / "rows", 5000);
  TestServer slow(cold.rows.service);
  const std::vector<int> dims{8, 4};
  FakeServer fake(silent);
  RowClient client(dims, {0.001, false, RowType::kFloat});
  const uint32_t first = client.add_server(), second = client.add_server();
  client.add_connection(first, RowConnection::over_socket(fake.connect()), false);
  client.add_connection(second, RowConnection::over_socket(open_socket(slow)), false);
  disk.hold();
  std::thread letting_go([&] {
    wait_until([&] { return disk.waiting() > 0; });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    disk.let_go();
  });
  const RangeKeys on_ssd{{keys_from(100, 300), {}}}, warm{{{}, {5}}};
  CHECK(!look_up(client, {{second}}, on_ssd, 1, kLong, dims).late());
  letting_go.join();
  CHECK(client.server(second).seconds > 0.04);
  std::thread waits([&] { CHECK(look_up(client, {{first}}, warm, 1, kLong, dims).late() == false); });
  CHECK(wait_until([&] { return client.server(first).in_flight == 1; }));
  for (int round = 0; round < 3; ++round) CHECK(!look_up(client, {{first, second}}, warm, 1, kLong, dims).late());
  client.disconnect(first);
  client.add_connection(first, RowConnection::over_socket(open_socket(slow)), false);
  waits.join();
}

TEST(abandoned_answers_are_skipped_and_connections_are_used_again) {
  testing::TempFolder folder;
  testing::WithHeldReads disk;
  testing::SsdRows cold(folder / "rows", 5000);
  TestServer server(cold.rows.service);
  const std::vector<int> dims{8, 4};
  RowClient client(dims, {});
  const uint32_t number = client.add_server();
  client.add_connection(number, RowConnection::over_socket(open_socket(server)), false);
  const RangeKeys on_ssd{{keys_from(100, 300), {}}};
  for (int round = 0; round < 3; ++round) {
    disk.hold();
    for (int i = 0; i < 3; ++i) {
      const auto late = look_up(client, {{number}}, on_ssd, 1, 0.01, dims);
      CHECK(late.late() && late.result.errors[0] == RowError::kNone);
    }
    for (int64_t key = 0; key < 20; ++key) {  // warm ones overtake those on the same connection
      const auto answered = look_up(client, {{number}}, {{{}, {key}}}, 1, kLong, dims);
      CHECK(!answered.late());
      CHECK_EQ(answered.rows[0], row_of(1, 1, key, 4)[0]);
    }
    disk.let_go();
    const auto answered = look_up(client, {{number}}, on_ssd, 1, kLong, dims);
    CHECK(!answered.late());
    size_t wrong = 0;
    for (size_t i = 0; i < 300; ++i) wrong += answered.rows[i * 8] != row_of(1, 0, on_ssd[0][0][i], 8)[0];
    CHECK_EQ(wrong, 0u);
    const auto state = client.server(number);
    CHECK(state.connections == 1 && state.in_flight == 0);
  }
  CHECK(server.server->figures().accepted == 1);
}

// A request that was sent in part cannot be followed by another one on its connection.
TEST(a_connection_with_half_a_request_is_closed) {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  Peer peer(ends[1]);
  const auto connection = RowConnection::over_socket(ends[0]);
  const Keys keys(1 << 20);
  connection->begin({FrameKind::kLookup, 1, nullptr, 0, keys.data(), keys.size() * sizeof(int64_t)});
  CHECK(connection->advance() == RowConnection::Progress::kWaits);
  CHECK(!connection->is_broken());
  connection->abandon();
  CHECK(connection->is_broken() && connection->advance() == RowConnection::Progress::kBroken);
}

// An exception in the middle of a lookup leaves no connection behind that the client still knows.
TEST(a_lookup_of_an_unknown_server_returns_its_connections) {
  Cluster cluster;
  const RangeKeys keys{{{2, 4}, {6}}, {{1}, {3}}};
  for (int round = 0; round < 3; ++round)
    CHECK_THROWS(std::out_of_range, look_up(cluster.client, {cluster.servers[0], {99}}, keys, 1));
  for (uint32_t number = 0; number < 4; ++number) CHECK_EQ(cluster.client.server(number).in_flight, 0u);
  CHECK(!look_up(cluster.client, cluster.servers, keys, 1).late());
  for (uint32_t number = 0; number < 4; ++number) cluster.client.disconnect(number);
}

}  // namespace
}  // namespace hotrow
