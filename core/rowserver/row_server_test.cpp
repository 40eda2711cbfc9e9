// A row server over loopback: who may read, frames in any pieces and any number, answers out of order, and bounds on
// what a peer can make it hold.
#include "rowserver/row_server.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <atomic>
#include <map>
#include <set>
#include <thread>

#include "testing/faulty_files.h"
#include "testing/held_reads.h"
#include "testing/random.h"
#include "testing/row_servers.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::Frame;
using testing::frame;
using testing::has_rows;
using testing::Keys;
using testing::keys_from;
using testing::lookup_frame;
using testing::Peer;
using testing::Random;
using testing::ServedRows;
using testing::TableKeyLists;
using testing::TestServer;
using testing::wait_until;

const std::vector<int> kDims{8, 5};
constexpr size_t kKeys = 1000;

TableKeyLists random_lists(Random& random, size_t most) {
  const auto some = [&] {
    Keys keys(random.below(most + 1));
    for (int64_t& key : keys) key = static_cast<int64_t>(random.below(kKeys));
    return keys;
  };
  return {{1, some()}, {0, some()}};
}

// --- who may read ---

TEST(a_hello_without_the_token_is_refused_with_the_reason) {
  ServedRows rows(kDims, kKeys);
  TestServer server(rows.service);
  Peer stranger = server.connect();
  CHECK(stranger.send(frame(FrameKind::kHello, 7, 0, {'n', 'o'})));
  const auto answer = stranger.receive();
  CHECK(answer && answer->header.kind == FrameKind::kError && answer->header.id == 7);
  CHECK(answer && answer->text() == "another token");
  CHECK(stranger.is_closed());
  CHECK_EQ(server.server->figures().refused, 1u);

  Peer friendly = server.open();
  CHECK(friendly.send(lookup_frame(2, 1, {{0, {5}}})));
  const auto found = friendly.receive();
  CHECK(found && found->header.id == 2 && has_rows(*found, 1, {{0, {5}}}, kDims));
  CHECK_EQ(server.server->figures().connections, 1u);
}

TEST(nothing_is_read_before_the_hello) {
  ServedRows rows(kDims, kKeys);
  TestServer server(rows.service);
  for (const auto& first :
       {lookup_frame(1, 1, {{0, {5}}}), frame(FrameKind::kPing, 1, 0), frame(FrameKind::kWelcome, 1, 0),
        frame(FrameKind::kHello, 1, 0, std::vector<char>(kMostHello + 1)), std::vector<char>(100, 'x')}) {
    Peer peer = server.connect();
    peer.send(first);
    CHECK(!peer.receive());
    CHECK(peer.is_closed());
  }
  CHECK_EQ(server.server->figures().malformed, 5u);
  CHECK_EQ(rows.service->figures().lookups, 0u);
  Peer peer = server.open();
  CHECK(peer.send(frame(FrameKind::kHello, 2, 0, {'o', 'p', 'e', 'n'})));  // a second hello
  CHECK(peer.is_closed());
}

TEST(a_server_without_rows_for_a_peer_refuses_it) {
  TestServer server(nullptr);
  Peer peer = server.connect();
  CHECK(peer.send(frame(FrameKind::kHello, 1, 0, {'o', 'p', 'e', 'n'})));
  const auto answer = peer.receive();
  CHECK(answer && answer->header.kind == FrameKind::kError);
  CHECK(peer.is_closed());
}

TEST(unproven_connections_are_bounded) {
  ServedRows rows(kDims, kKeys);
  RowServerOptions options;
  options.most_unproven = 3;
  TestServer server(rows.service, options);
  Peer proven = server.open();
  std::vector<Peer> silent;
  for (int i = 0; i < 3; ++i) silent.push_back(server.connect());
  Peer late = server.connect();
  CHECK(silent[0].is_closed());  // the oldest made room
  CHECK(late.send(frame(FrameKind::kHello, 1, 0, {'o', 'p', 'e', 'n'})));
  const auto welcome = late.receive();
  CHECK(welcome && welcome->header.kind == FrameKind::kWelcome);
  Peer later = server.connect();  // the proven ones do not count
  for (int i = 1; i < 3; ++i) CHECK(silent[i].send(frame(FrameKind::kHello, 1, 0, {'o', 'p', 'e', 'n'})));
  for (int i = 1; i < 3; ++i) CHECK(silent[i].receive().has_value());
  CHECK(proven.send(lookup_frame(1, 1, {{0, {5}}})) && proven.receive());
  CHECK_EQ(server.server->figures().connections, 5u);
}

TEST(unproven_connections_time_out) {
  ServedRows rows(kDims, kKeys);
  RowServerOptions options;
  options.hello_seconds = 0.2;
  TestServer server(rows.service, options);
  Peer silent = server.connect(), half = server.connect();
  half.send({'H', 'R', 'R'});  // a part of a frame changes nothing
  CHECK(silent.is_closed() && half.is_closed());
  CHECK_EQ(server.server->figures().connections, 0u);
}

TEST(connections_beyond_the_bound_are_closed_at_once) {
  ServedRows rows(kDims, kKeys);
  RowServerOptions options;
  options.most_connections = 2;
  TestServer server(rows.service, options);
  Peer first = server.open(), second = server.open();
  Peer third(testing::connect_to(server.port));
  CHECK(third.is_closed());
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  Peer control(ends[1]);
  CHECK_THROWS(std::runtime_error, server.server->add_local(ends[0], rows.service));
  CHECK(control.is_closed());
  CHECK_EQ(server.server->figures().refused, 2u);
  second.close();
  CHECK(wait_until([&] { return server.server->figures().connections == 1; }));
  Peer fourth = server.open();
}

// A process without a descriptor left serves those it has, without spinning, and accepts again later.
TEST(a_server_without_descriptors_serves_on_and_accepts_later) {
  ServedRows rows(kDims, kKeys);
  TestServer server(rows.service);
  Peer peer = server.open();
  std::vector<int> waiting;  // made before: they need descriptors too
  for (int i = 0; i < 3; ++i) waiting.push_back(socket(AF_INET, SOCK_STREAM, 0));
  rlimit before{};
  CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const int next = open("/dev/null", O_RDONLY);  // the smallest free number
  ::close(next);
  const rlimit none{static_cast<rlim_t>(next), before.rlim_max};
  CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(server.port);
  for (const int each : waiting) CHECK(connect(each, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  CHECK(peer.send(lookup_frame(1, 1, {{0, {5}}})) && peer.receive());
  timespec cpu_before{}, cpu_after{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu_before);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu_after);
  const double spent = static_cast<double>(cpu_after.tv_sec - cpu_before.tv_sec) +
                       static_cast<double>(cpu_after.tv_nsec - cpu_before.tv_nsec) * 1e-9;
  CHECK(spent < 0.15);
  CHECK(peer.send(lookup_frame(2, 1, {{0, {5}}})) && peer.receive());
  CHECK_EQ(server.server->figures().accepted, 1u);
  CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
  for (const int each : waiting) {
    Peer later(each);
    const auto challenge = later.receive();
    CHECK(challenge && challenge->header.kind == FrameKind::kChallenge);
  }
}

// --- frames ---

TEST(frames_may_arrive_in_single_bytes) {
  ServedRows rows(kDims, kKeys);
  TestServer server(rows.service);
  Peer peer = server.connect();
  auto bytes = frame(FrameKind::kHello, 1, 0, {'o', 'p', 'e', 'n'});  // 44 bytes, so that what follows is not aligned
  const TableKeyLists lists{{1, {3, 1, 4}}, {0, {1, 5}}};
  for (const auto& more : {lookup_frame(2, 1, lists), frame(FrameKind::kPing, 3, 0), lookup_frame(4, 1, {{0, {9}}})})
    bytes.insert(bytes.end(), more.begin(), more.end());
  for (const char byte : bytes) CHECK(peer.send({byte}));
  CHECK(peer.receive()->header.kind == FrameKind::kWelcome);
  const auto rows_answer = peer.receive();
  CHECK(rows_answer && rows_answer->header.id == 2 && has_rows(*rows_answer, 1, lists, kDims));
  const auto pong = peer.receive();
  CHECK(pong && pong->header.kind == FrameKind::kPong && pong->header.id == 3 && pong->header.publication == 1);
  const auto last = peer.receive();
  CHECK(last && last->header.id == 4 && has_rows(*last, 1, {{0, {9}}}, kDims));
  CHECK_EQ(server.server->figures().bytes_in, bytes.size());

  Peer at_once = server.connect();
  CHECK(at_once.send(bytes));  // the same in one piece
  CHECK(at_once.receive()->header.kind == FrameKind::kWelcome);
  for (const uint64_t id : {2, 3, 4}) CHECK(at_once.receive()->header.id == id);
}

TEST(many_requests_in_flight_are_answered_each_once) {
  ServedRows rows(kDims, kKeys);
  rows.publish({{0, keys_from(0, kKeys)}, {1, keys_from(0, kKeys)}});
  for (const int threads : {1, 2}) {
    RowServerOptions options;
    options.threads = threads;
    TestServer server(rows.service, options);
    std::atomic<int> wrong{0};
    std::vector<std::thread> peers;
    for (uint64_t seed = 1; seed <= 4; ++seed)
      peers.emplace_back([&, seed] {
        Random random(seed);
        Peer peer = server.open();
        struct Asked {
          TableKeyLists lists;
          int64_t publication;
        };
        std::map<uint64_t, Asked> asked;
        std::vector<char> bytes;
        for (uint64_t id = 1; id <= 500; ++id) {
          const Asked one{random_lists(random, id % 50 ? 20 : 3000), 1 + static_cast<int64_t>(random.below(2))};
          const auto more = lookup_frame(id, one.publication, one.lists);
          bytes.insert(bytes.end(), more.begin(), more.end());
          asked[id] = one;
        }
        std::thread sender([&] { wrong += !peer.send(bytes); });
        while (!asked.empty()) {
          const auto answer = peer.receive();
          if (!answer) break;
          const auto found = asked.find(answer->header.id);
          if (found == asked.end()) {
            ++wrong;
            continue;
          }
          wrong += answer->header.publication != found->second.publication;
          wrong += !has_rows(*answer, found->second.publication, found->second.lists, kDims);
          asked.erase(found);
        }
        wrong += static_cast<int>(asked.size());
        sender.join();
      });
    for (auto& peer : peers) peer.join();
    CHECK_EQ(wrong.load(), 0);
    CHECK_EQ(server.server->figures().malformed, 0u);
    CHECK_EQ(server.server->figures().accepted, 4u);
  }
}

TEST(malformed_frames_close_their_connection_and_no_other) {
  ServedRows rows(kDims, kKeys);
  TestServer server(rows.service);
  Peer good = server.open();
  auto lookup = lookup_frame(1, 1, {{0, {5, 6}}});
  std::vector<std::vector<char>> bad;
  bad.push_back(std::vector<char>(64, 'x'));               // no frame
  bad.push_back(frame(FrameKind::kRows, 1, 0));            // a server's frame
  bad.push_back(frame(FrameKind::kLookup, 1, 1));          // no head
  bad.push_back(frame(static_cast<FrameKind>(99), 1, 0));  // an unknown kind
  bad.push_back(lookup_frame(1, 1, {{2, {5}}}));           // no such table
  lookup[sizeof(FrameHeader) + 8 + 4] = 1;                 // fewer keys than there are
  bad.push_back(lookup);
  FrameHeader huge{kRowsMagic, FrameKind::kLookup, RowError::kNone, 1, kMostFrame + 1, 1, 0};
  bad.emplace_back(reinterpret_cast<char*>(&huge), reinterpret_cast<char*>(&huge) + sizeof(huge));
  for (const auto& bytes : bad) {
    Peer peer = server.open();
    CHECK(peer.send(bytes));
    CHECK(peer.is_closed());
    CHECK(good.send(lookup_frame(1, 1, {{0, {5}}})));
    const auto answer = good.receive();
    CHECK(answer && has_rows(*answer, 1, {{0, {5}}}, kDims));
  }
  CHECK_EQ(server.server->figures().malformed, bad.size());
  Random random(1);
  for (int round = 0; round < 300; ++round) {
    Peer peer = random.below(2) ? server.open() : server.connect();
    auto bytes = random.below(2) ? lookup_frame(1, 1, random_lists(random, 20))
                                 : frame(FrameKind::kHello, 1, 0, {'o', 'p', 'e', 'n'});
    for (size_t i = 1 + random.below(5); i > 0; --i)
      bytes[random.below(bytes.size())] = static_cast<char>(random.bits());
    peer.send(bytes);
    if (random.below(2)) shutdown(peer.get(), SHUT_WR);  // and some close in the middle of a frame
  }
  CHECK(good.send(lookup_frame(1, 1, {{0, {5}}})));
  CHECK(good.receive().has_value());
  CHECK(wait_until([&] { return server.server->figures().connections == 1; }));
}

TEST(errors_leave_the_connection_open) {
  ServedRows rows(kDims, kKeys, 1);
  TestServer server(rows.service);
  Peer peer = server.open();
  const auto error_at = [&](int64_t publication) {
    CHECK(peer.send(lookup_frame(1, publication, {{0, {5}}})));
    const auto answer = peer.receive();
    CHECK(answer.has_value());
    if (!answer) return RowError::kNone;
    CHECK((answer->header.kind == FrameKind::kError) == (answer->header.error != RowError::kNone));
    if (answer->header.error != RowError::kNone) CHECK_EQ(answer->header.publication, rows.service->publication());
    return answer->header.error;
  };
  CHECK(error_at(2) == RowError::kBehind);
  rows.publish({{0, {5}}});
  CHECK(error_at(2) == RowError::kNone && error_at(1) == RowError::kNone);
  rows.publish({{0, {5}}});
  CHECK(error_at(1) == RowError::kTooNew && error_at(3) == RowError::kNone);
  rows.service->retire();
  CHECK(error_at(3) == RowError::kClosing);
  CHECK(peer.send(frame(FrameKind::kPing, 9, 0)));
  const auto pong = peer.receive();
  CHECK(pong && pong->header.kind == FrameKind::kPong && pong->header.publication == 3 && pong->header.oldest == 2);
}

// --- rows on SSD ---

TEST(rows_on_ssd_delay_no_other_lookup) {
  testing::TempFolder folder;
  testing::WithHeldReads disk;
  testing::SsdRows cold(folder / "rows", 5000);
  const std::vector<int> dims{8, 4};
  TestServer server(cold.rows.service);
  Peer peer = server.open(), other = server.open();
  disk.hold();
  const TableKeyLists on_ssd{{0, keys_from(100, 300)}}, warm{{1, keys_from(100, 300)}};
  CHECK(peer.send(lookup_frame(1, 1, on_ssd)));
  CHECK(wait_until([&] { return disk.waiting() > 0; }));
  for (uint64_t id = 2; id < 50; ++id) {
    for (Peer* one : {&peer, &other}) {
      CHECK(one->send(lookup_frame(id, 1, warm)));
      const auto answer = one->receive();
      CHECK(answer && answer->header.id == id && has_rows(*answer, 1, warm, dims));
    }
  }
  disk.let_go();
  const auto answer = peer.receive();
  CHECK(answer && answer->header.id == 1 && has_rows(*answer, 1, on_ssd, dims));
  CHECK_EQ(server.server->figures().lookups_cold, 1u);
}

TEST(a_disk_that_fails_is_an_error_of_that_lookup) {
  testing::TempFolder folder;
  WithFaults disk;
  testing::SsdRows cold(folder / "rows", 5000);
  TestServer server(cold.rows.service);
  Peer peer = server.open();
  const TableKeyLists on_ssd{{0, keys_from(100, 300)}};
  disk->fail(1, EIO);
  CHECK(peer.send(lookup_frame(1, 1, on_ssd)));
  const auto failed = peer.receive();
  CHECK(failed && failed->header.kind == FrameKind::kError && failed->header.error == RowError::kFailed);
  CHECK(failed && failed->header.id == 1 && failed->header.publication == 1 && failed->header.oldest == 1);
  disk->heal();
  CHECK(peer.send(lookup_frame(2, 1, on_ssd)));
  const auto answer = peer.receive();
  CHECK(answer && has_rows(*answer, 1, on_ssd, {8, 4}));
}

TEST(a_connection_that_closes_drops_its_lookups_on_ssd) {
  testing::TempFolder folder;
  testing::WithHeldReads disk;
  testing::SsdRows cold(folder / "rows", 5000);
  RowServerOptions options;
  options.cold_threads = 1;
  TestServer server(cold.rows.service, options);
  Peer peer = server.open(), other = server.open();
  disk.hold();
  const TableKeyLists on_ssd{{0, keys_from(100, 300)}};
  for (uint64_t id = 1; id <= 20; ++id) CHECK(peer.send(lookup_frame(id, 1, on_ssd)));
  CHECK(wait_until([&] { return disk.waiting() > 0 && server.server->figures().lookups_cold == 20; }));
  peer.close();
  CHECK(wait_until([&] { return server.server->figures().connections == 1; }));
  disk.let_go();
  CHECK(other.send(lookup_frame(1, 1, on_ssd)));
  const auto answer = other.receive();
  CHECK(answer && has_rows(*answer, 1, on_ssd, {8, 4}));
  CHECK(cold.rows.service->figures().lookups <= 2);  // the one that had begun, and the other connection's
}

// --- bounds ---

TEST(a_peer_that_reads_nothing_is_bounded_and_closed) {
  ServedRows rows({256}, kKeys);
  RowServerOptions options;
  options.most_waiting = size_t{1} << 20;
  options.stall_seconds = 0.3;
  TestServer server(rows.service, options);
  Peer good = server.open(), bad = server.open(4096);
  const int flags = fcntl(bad.get(), F_GETFL);
  fcntl(bad.get(), F_SETFL, flags | O_NONBLOCK);
  const auto request = lookup_frame(1, 1, {{0, keys_from(0, 100)}});  // 100 KiB of answer for 0.9 KiB
  std::vector<char> bytes;
  for (int i = 0; i < 200; ++i) bytes.insert(bytes.end(), request.begin(), request.end());
  // It sends on as long as the server takes bytes, so those do not count as progress.
  const bool closed = wait_until([&] {
    ssize_t sent;
    while ((sent = ::send(bad.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL)) > 0) continue;
    return errno == ECONNRESET || errno == EPIPE;
  });
  CHECK(closed);
  CHECK_EQ(server.server->figures().stalled, 1u);
  // The bound, one answer more, and what the kernel's buffers took.
  CHECK(rows.service->figures().lookups * size_t{100 << 10} < (size_t{1} << 20) + (size_t{100} << 10) + (8 << 20));
  CHECK(good.send(lookup_frame(1, 1, {{0, {5}}})) && good.receive());
  CHECK(wait_until([&] { return server.server->figures().connections == 1; }));
}

TEST(a_peer_that_reads_late_gets_every_answer) {
  ServedRows rows({256}, kKeys);
  RowServerOptions options;
  options.most_waiting = 1;  // the next frame is handled when all answers are sent
  TestServer server(rows.service, options);
  Peer peer = server.open(4096);
  const TableKeyLists lists{{0, keys_from(0, 100)}};
  constexpr uint64_t kRequests = 100;
  std::vector<char> bytes;
  for (uint64_t id = 1; id <= kRequests; ++id) {
    const auto more = lookup_frame(id, 1, lists);
    bytes.insert(bytes.end(), more.begin(), more.end());
  }
  std::thread sender([&] { CHECK(peer.send(bytes)); });
  for (uint64_t id = 1; id <= kRequests; ++id) {
    const auto answer = peer.receive();
    CHECK(answer && answer->header.id == id && has_rows(*answer, 1, lists, {256}));
    if (!answer) break;
  }
  sender.join();
}

// --- the end ---

TEST(close_sends_the_answers_that_are_in_flight) {
  testing::TempFolder folder;
  testing::WithHeldReads disk;
  testing::SsdRows cold(folder / "rows", 5000);
  TestServer server(cold.rows.service);
  Peer peer = server.open();
  disk.hold();
  const TableKeyLists on_ssd{{0, keys_from(100, 300)}};
  CHECK(peer.send(lookup_frame(1, 1, on_ssd)));
  CHECK(wait_until([&] { return disk.waiting() > 0; }));
  std::thread closer([&] { server.server->close(testing::kPatience); });
  const bool refused = wait_until([&] {  // from now on lookups are answered with "closing"
    CHECK(peer.send(lookup_frame(2, 1, {{1, {5}}})));
    const auto answer = peer.receive();
    CHECK(answer && answer->header.id == 2);
    return !answer || answer->header.error == RowError::kClosing;
  });
  CHECK(refused);
  CHECK_THROWS(std::runtime_error, testing::connect_to(server.port));
  disk.let_go();
  const auto answer = peer.receive();
  CHECK(answer && answer->header.id == 1 && has_rows(*answer, 1, on_ssd, {8, 4}));
  closer.join();
  CHECK(peer.is_closed());
  CHECK_EQ(server.server->figures().connections, 0u);
  server.server->close(1);  // once more does nothing
}

// Nobody lets the disk go before the time is up: only the lookup in progress is waited for.
TEST(close_drops_lookups_on_ssd_after_its_time) {
  testing::TempFolder folder;
  testing::WithHeldReads disk;
  testing::SsdRows cold(folder / "rows", 5000);
  RowServerOptions options;
  options.cold_threads = 1;
  TestServer server(cold.rows.service, options);
  Peer peer = server.open();
  disk.hold();
  for (uint64_t id = 1; id <= 30; ++id) CHECK(peer.send(lookup_frame(id, 1, {{0, keys_from(100, 300)}})));
  CHECK(wait_until([&] { return server.server->figures().lookups_cold == 30 && disk.waiting() > 0; }));
  std::atomic<bool> closed{false};
  std::thread closer([&] {
    server.server->close(0.05);
    closed = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  disk.let_go();
  closer.join();
  CHECK(closed);
  CHECK(cold.rows.service->figures().lookups < 30);
  CHECK(peer.is_closed());
}

TEST(servers_end_at_any_moment) {
  ServedRows rows(kDims, kKeys);
  for (int round = 0; round < 20; ++round) {
    RowServerOptions options;
    options.threads = 2;
    TestServer server(rows.service, options);
    std::vector<std::thread> peers;
    std::atomic<int> open{0};
    for (int i = 0; i < 3; ++i)
      peers.emplace_back([&] {
        Peer peer = server.open();
        ++open;
        while (peer.send(lookup_frame(1, 1, {{0, {5}}})) && peer.receive()) continue;
      });
    CHECK(wait_until([&] { return open == 3; }));
    if (round % 2)
      server.server->close(1);
    else
      server.server->close(0);
    for (auto& peer : peers) peer.join();
  }
  CHECK_THROWS(std::invalid_argument, TestServer(rows.service, {0, 1}));
  CHECK_THROWS(std::invalid_argument, TestServer(rows.service, {1, 0}));
}

}  // namespace
}  // namespace hotrow
