// Lookups through shared memory: several threads, a client that ends at any moment, and a client that writes anything
// at any time.
#include "rowserver/shared_slots.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "rowserver/row_connection.h"
#include "testing/held_reads.h"
#include "testing/random.h"
#include "testing/row_servers.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::has_rows;
using testing::Keys;
using testing::keys_from;
using testing::lookup_payload;
using testing::Peer;
using testing::Random;
using testing::ServedRows;
using testing::TableKeyLists;
using testing::TestServer;
using testing::wait_until;

const std::vector<int> kDims{8, 5};
constexpr size_t kKeys = 1000;

// A client on this machine: its end of the control socket, and the slots, mapped a second time as another process
// would.
struct LocalClient {
  explicit LocalClient(TestServer& server)
      : control(make_control(server)), slots(std::make_shared<SharedSlots>(given)) {}
  int make_control(TestServer& server) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) throw std::runtime_error("no socketpair");
    given = server.server->add_local(ends[0], server.service);
    return ends[1];
  }
  std::vector<int> given;
  Peer control;
  std::shared_ptr<SharedSlots> slots;
};

// Sends a request and waits for its answer; false: the connection is broken, or `seconds` have passed.
bool ask(RowConnection& connection, int64_t publication, const std::vector<char>& payload, testing::Frame& answer,
         double seconds = testing::kPatience, FrameKind kind = FrameKind::kLookup) {
  connection.begin({kind, publication, payload.data(), payload.size(), nullptr, 0});
  RowConnection::Progress progress;
  const bool ended = wait_until(
      [&] {
        pollfd wait{connection.descriptor(), connection.events(), 0};
        poll(&wait, 1, 10);
        return (progress = connection.advance()) != RowConnection::Progress::kWaits;
      },
      seconds);
  if (!ended) connection.abandon();
  if (!ended || progress == RowConnection::Progress::kBroken) return false;
  answer.header = connection.header();
  answer.payload.assign(connection.payload(), connection.payload() + connection.header().bytes);
  return true;
}

TEST(slots_answer_lookups_of_several_threads) {
  ServedRows rows(kDims, kKeys);
  rows.publish({{0, keys_from(0, kKeys)}, {1, keys_from(0, kKeys)}});
  TestServer server(rows.service);
  LocalClient client(server);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (size_t thread = 0; thread < 4; ++thread)
    threads.emplace_back([&, thread] {
      Random random(thread);
      std::vector<std::unique_ptr<RowConnection>> connections;
      for (size_t slot = thread; slot < SharedSlots::kSlots; slot += 4)
        connections.push_back(RowConnection::over_slot(client.slots, slot));
      testing::Frame answer;
      for (int round = 0; round < 300; ++round) {
        RowConnection& connection = *connections[random.below(connections.size())];
        const TableKeyLists lists{{1, keys_from(static_cast<int64_t>(random.below(500)), random.below(500))},
                                  {0, keys_from(static_cast<int64_t>(random.below(900)), 1 + random.below(100))}};
        const int64_t publication = 1 + static_cast<int64_t>(random.below(3));
        if (!ask(connection, publication, lookup_payload(lists), answer)) {
          ++wrong;
          break;
        }
        if (publication == 3)
          wrong += answer.header.error != RowError::kBehind || answer.header.publication != 2;
        else
          wrong += answer.header.publication != publication || !has_rows(answer, publication, lists, kDims);
        if (random.below(20) == 0) {
          wrong += !ask(connection, 0, {}, answer, testing::kPatience, FrameKind::kPing);
          wrong += answer.header.kind != FrameKind::kPong || answer.header.publication != 2;
        }
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
  const auto figures = server.server->figures();
  CHECK(figures.connections == 1 && figures.malformed == 0);
}

TEST(what_does_not_fit_a_slot_is_refused) {
  ServedRows rows({1024, 5}, 10);
  TestServer server(rows.service);
  LocalClient client(server);
  const auto connection = RowConnection::over_slot(client.slots, 3);
  testing::Frame answer;
  CHECK(ask(*connection, 1, lookup_payload({{0, Keys(2047)}}), answer));
  CHECK(answer.header.kind == FrameKind::kRows && answer.header.bytes == 2047 * 4096);
  CHECK(ask(*connection, 1, lookup_payload({{0, Keys(2048)}}), answer));  // 8 MiB and a header
  CHECK(answer.header.kind == FrameKind::kError && answer.header.error == RowError::kMalformed);
  CHECK(ask(*connection, 1, lookup_payload({{2, {1}}}), answer));  // no such table
  CHECK(answer.header.error == RowError::kMalformed);
  CHECK_EQ(server.server->figures().malformed, 2u);
  CHECK(ask(*connection, 1, lookup_payload({{0, {1}}}), answer));  // the slot still works
  CHECK(has_rows(answer, 1, {{0, {1}}}, {1024, 5}));
  CHECK(!ask(*connection, 1, std::vector<char>(SharedSlots::kRequestBytes), answer));
  CHECK(connection->is_broken());
  rows.service->retire();
  CHECK(ask(*RowConnection::over_slot(client.slots, 4), 1, lookup_payload({{0, {1}}}), answer));
  CHECK(answer.header.error == RowError::kClosing);
}

TEST(an_abandoned_answer_in_a_slot_is_skipped) {
  testing::TempFolder folder;
  testing::WithHeldReads disk;
  testing::SsdRows cold(folder / "rows", 5000);
  TestServer server(cold.rows.service);
  LocalClient client(server);
  const auto connection = RowConnection::over_slot(client.slots, 0);
  testing::Frame answer;
  for (int round = 0; round < 3; ++round) {
    disk.hold();
    const auto on_ssd = lookup_payload({{0, keys_from(100, 300)}}), warm = lookup_payload({{1, {5}}});
    CHECK(!ask(*connection, 1, on_ssd, answer, 0.02));
    CHECK(connection->owes_answers());
    CHECK(!ask(*connection, 1, warm, answer, 0.02));  // the slot is not free: this one was never written
    disk.let_go();
    CHECK(ask(*connection, 1, warm, answer));
    CHECK(has_rows(answer, 1, {{1, {5}}}, {8, 4}) && !connection->owes_answers());
  }
}

// Whatever happens between the two, a thread that waits for a slot ends when the connection is shut down.
TEST(shutting_a_slot_down_wakes_its_thread) {
  ServedRows rows(kDims, kKeys);
  TestServer server(rows.service);
  LocalClient client(server);
  for (int round = 0; round < 200; ++round) {
    const auto connection = RowConnection::over_slot(client.slots, static_cast<size_t>(round) % SharedSlots::kSlots);
    std::atomic<bool> ready{false};
    std::thread waiter([&] {
      const auto payload = lookup_payload({{0, {5}}});
      ready = true;
      while (!connection->is_broken()) {
        connection->begin({FrameKind::kLookup, 1, payload.data(), payload.size(), nullptr, 0});
        while (connection->advance() == RowConnection::Progress::kWaits) {
          pollfd wait{connection->descriptor(), connection->events(), 0};
          const int woken = poll(&wait, 1, testing::kPatience * 1000);
          CHECK_EQ(woken, 1);
          if (woken != 1) return;
        }
      }
    });
    while (!ready) std::this_thread::yield();
    if (round % 3) std::this_thread::sleep_for(std::chrono::microseconds(round * 3));
    connection->shut_down();
    waiter.join();
    CHECK(connection->is_broken());
  }
}

TEST(a_client_that_ends_leaves_nothing_behind) {
  testing::TempFolder folder;
  testing::WithHeldReads disk;
  testing::SsdRows cold(folder / "rows", 5000);
  RowServerOptions options;
  options.cold_threads = 1;
  options.threads = 2;
  TestServer server(cold.rows.service, options);
  {
    LocalClient client(server), other(server);
    CHECK(wait_until([&] { return server.server->figures().connections == 2; }));
    disk.hold();
    const auto on_ssd = lookup_payload({{0, keys_from(100, 300)}});
    std::vector<std::unique_ptr<RowConnection>> connections;
    for (size_t slot = 0; slot < SharedSlots::kSlots; ++slot) {
      connections.push_back(RowConnection::over_slot(client.slots, slot));
      connections.back()->begin({FrameKind::kLookup, 1, on_ssd.data(), on_ssd.size(), nullptr, 0});
    }
    CHECK(wait_until([&] { return server.server->figures().lookups_cold == SharedSlots::kSlots && disk.waiting(); }));
    client.control.close();  // but its memory and its eventfds stay: what does the server do with them?
    CHECK(wait_until([&] { return server.server->figures().connections == 1; }));
    disk.let_go();
    for (size_t slot = 0; slot < SharedSlots::kSlots; ++slot) client.slots->submit(slot);
    timespec before{}, after{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    CHECK(static_cast<double>(after.tv_sec - before.tv_sec) +
              static_cast<double>(after.tv_nsec - before.tv_nsec) * 1e-9 <
          0.1);  // a loop that still watched them would not sleep
    testing::Frame answer;
    CHECK(ask(*RowConnection::over_slot(other.slots, 5), 1, on_ssd, answer));
    CHECK(has_rows(answer, 1, {{0, keys_from(100, 300)}}, {8, 4}));
    CHECK(cold.rows.service->figures().lookups <= 3);  // the one that had begun, and the other client's
  }
  CHECK(wait_until([&] { return server.server->figures().connections == 0; }));
}

// The client writes into slots that the server has, and submits them again and again: one lookup for each slot is with
// the cold threads at a time, and the server lives.
TEST(a_slot_submitted_again_and_again_has_one_lookup) {
  testing::TempFolder folder;
  testing::WithHeldReads disk;
  testing::SsdRows cold(folder / "rows", 5000);
  TestServer server(cold.rows.service);
  LocalClient client(server);
  disk.hold();
  const auto lookup = testing::lookup_frame(1, 1, {{0, keys_from(100, 300)}});
  std::memcpy(client.slots->request(2), lookup.data(), lookup.size());
  for (int i = 0; i < 100; ++i) {
    client.slots->submit(2);
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  CHECK(wait_until([&] { return server.server->figures().lookups_cold > 0; }));
  CHECK_EQ(server.server->figures().lookups_cold, 1u);
  disk.let_go();
  for (uint64_t lookups = 1; lookups < 50;
       ++lookups) {  // submitted before the server has noted that the last one ended
    CHECK(wait_until([&] { return client.slots->state(2).load() == SharedSlots::kAnswered; }));
    CHECK_EQ(cold.rows.service->figures().lookups, lookups);
    client.slots->submit(2);
  }
}

TEST(random_bytes_in_slots_harm_no_other_client) {
  testing::TempFolder folder;
  testing::SsdRows cold(folder / "rows", 5000);
  const std::vector<int> dims{8, 4};
  TestServer server(cold.rows.service);
  LocalClient bad(server), good(server);
  std::atomic<bool> stop{false};
  std::thread writer([&] {  // while the server reads
    Random random(1);
    while (!stop) {
      const size_t slot = random.below(SharedSlots::kSlots);
      char* request = bad.slots->request(slot);
      if (random.below(3) == 0) {
        const auto lookup = testing::lookup_frame(
            1, 1,
            {{1, random.keys(random.below(50), 5000)}, {0, keys_from(static_cast<int64_t>(random.below(4000)), 100)}});
        std::memcpy(request, lookup.data(), lookup.size());
      }
      for (size_t i = random.below(30); i > 0; --i) {
        const size_t at = random.below(random.below(2) ? 80 : 2000);
        request[at] = static_cast<char>(random.bits());
        if (random.below(4) == 0) bad.slots->answer(slot)[at] = static_cast<char>(random.bits());
      }
      if (random.below(2)) {
        bad.slots->submit(slot);
      } else {
        bad.slots->state(slot).store(static_cast<uint32_t>(random.below(6)), std::memory_order_release);
        bad.slots->wake(slot);
      }
    }
  });
  const auto connection = RowConnection::over_slot(good.slots, 7);
  testing::Frame answer;
  for (int round = 0; round < 300; ++round) {
    const TableKeyLists lists{{0, keys_from(round, 20)}, {1, keys_from(round, 20)}};
    CHECK(ask(*connection, 1, lookup_payload(lists), answer));
    CHECK(has_rows(answer, 1, lists, dims));
  }
  CHECK(wait_until([&] { return server.server->figures().malformed > 100; }));
  stop = true;
  writer.join();
}

TEST(memory_of_another_size_is_refused) {
  CHECK_THROWS(std::invalid_argument, SharedSlots(std::vector<int>{}));
  std::vector<int> descriptors;
  for (size_t i = 0; i < 2 + SharedSlots::kSlots; ++i) descriptors.push_back(memfd_create("other", MFD_CLOEXEC));
  CHECK_THROWS(std::invalid_argument, SharedSlots(descriptors));
  CHECK(fcntl(descriptors[0], F_GETFD) < 0);  // they were taken over, and closed
  SharedSlots mine;
  CHECK(ftruncate(mine.descriptors()[0], 0) != 0);  // sealed: a client cannot take pages away
}

}  // namespace
}  // namespace hotrow
