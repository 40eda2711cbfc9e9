// Exchanges between threads over Unix sockets and loopback TCP: received bytes are the sent ones, whatever is in
// flight.
#include "exchange/socket_exchange.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "testing/random.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using Boxes = std::vector<std::unique_ptr<SocketExchange>>;

void connect_pair(bool tcp, int ends[2]) {
  if (!tcp) {
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    return;
  }
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* plain = reinterpret_cast<sockaddr*>(&address);
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(bind(listener, plain, size) == 0 && listen(listener, 1) == 0 && getsockname(listener, plain, &size) == 0);
  ends[0] = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(connect(ends[0], plain, size) == 0);
  ends[1] = accept(listener, nullptr, nullptr);
  close(listener);
}

Boxes connected(size_t world, bool tcp, double timeout = 20) {
  std::vector<std::vector<int>> sockets(world, std::vector<int>(world, -1));
  for (size_t a = 0; a < world; ++a)
    for (size_t b = a + 1; b < world; ++b) {
      int ends[2];
      connect_pair(tcp, ends);
      sockets[a][b] = ends[0], sockets[b][a] = ends[1];
    }
  Boxes boxes;
  for (size_t r = 0; r < world; ++r) {
    boxes.push_back(std::make_unique<SocketExchange>(r, world, timeout));
    boxes.back()->connect(sockets[r]);
  }
  return boxes;
}

// Bytes that rank `from` sends rank `to` in an exchange: none, a few, or more than the sockets' buffers at times.
size_t size_of(uint32_t exchange, size_t from, size_t to) {
  testing::Random random(exchange * 1000 + from * 10 + to);
  const uint64_t kind = random.below(40);
  return kind == 0 ? random.below(1 << 20) : kind < 10 ? 0 : kind < 20 ? random.below(40000) : random.below(300);
}

char byte_of(uint32_t exchange, size_t from, size_t to, size_t at) {
  return static_cast<char>(exchange * 31 + from * 7 + to * 3 + at);
}

struct Exchange {
  uint32_t name, number;
  std::vector<char> send, out;
};

// Every third exchange is one message for all.
Exchange begin(SocketExchange& box, size_t rank, size_t world, uint32_t e) {
  const bool same = e % 3 == 0;
  std::vector<size_t> to, from;
  Exchange exchange{e, 0, {}, {}};
  for (size_t r = 0; r < (same ? 1 : world); ++r) {
    to.push_back(size_of(e, rank, same ? 99 : r));
    for (size_t i = 0; i < to.back(); ++i) exchange.send.push_back(byte_of(e, rank, same ? 99 : r, i));
  }
  for (size_t r = 0; r < world; ++r) from.push_back(size_of(e, r, same ? 99 : rank));
  exchange.out.assign(std::accumulate(from.begin(), from.end(), size_t{0}) + 1, 'x');
  exchange.number = box.begin(exchange.send.data(), to, same, exchange.out.data(), from);
  return exchange;  // moving a vector keeps its memory's address
}

bool right(const Exchange& exchange, size_t rank, size_t world) {
  const uint32_t e = exchange.name;
  size_t at = 0;
  for (size_t r = 0; r < world; ++r) {
    const size_t to = e % 3 == 0 ? 99 : rank, size = size_of(e, r, to);
    for (size_t i = 0; i < size; ++i)
      if (exchange.out[at++] != byte_of(e, r, to, i)) return false;
  }
  return exchange.out[at] == 'x' && at + 1 == exchange.out.size();
}

// Several exchanges are in flight at once, and they are waited for in a random order.
int exchange_many(SocketExchange& box, size_t rank, size_t world) {
  testing::Random random(rank);
  std::vector<Exchange> open;
  int wrong = 0;
  for (uint32_t e = 1; e <= 100 || !open.empty(); ++e) {
    if (e <= 100) open.push_back(begin(box, rank, world, e));
    while (!open.empty() && (e > 100 || random.below(4))) {
      const auto one = open.begin() + static_cast<std::ptrdiff_t>(random.below(open.size()));
      if (random.below(8) == 0)
        while (!box.is_complete(one->number)) std::this_thread::yield();
      else
        box.wait(one->number);
      wrong += !box.is_complete(one->number) || !right(*one, rank, world);
      open.erase(one);
    }
  }
  return wrong;
}

// Runs work(rank) of all ranks at once.
template <class Work>
void at_once(size_t world, Work work) {
  std::vector<std::thread> threads;
  for (size_t r = 0; r < world; ++r) threads.emplace_back([&work, r] { work(r); });
  for (auto& thread : threads) thread.join();
}

std::string why(SocketExchange& box, uint32_t number) {
  return testing::words_of<std::runtime_error>([&] { box.wait(number); });
}

bool says(const std::string& text, const char* words) {
  if (text.find(words) != std::string::npos) return true;
  std::printf("it says: '%s'\n", text.c_str());
  return false;
}

TEST(sockets_carry_what_was_sent_in_any_order_of_waiting) {
  for (bool tcp : {false, true})
    for (size_t world : {1, 2, 3, 4}) {
      Boxes boxes = connected(world, tcp);
      std::vector<int> wrong(world, -1);
      at_once(world, [&](size_t r) { wrong[r] = exchange_many(*boxes[r], r, world); });
      CHECK(wrong == std::vector<int>(world, 0));
    }
}

TEST(large_messages_both_ways_at_once_do_not_deadlock) {
  constexpr size_t kBytes = 64 << 20;
  Boxes boxes = connected(2, true);
  at_once(2, [&](size_t r) {
    std::vector<char> send(kBytes, static_cast<char>('a' + r)), out(kBytes);
    std::vector<size_t> sizes{kBytes, kBytes};
    sizes[r] = 0;
    boxes[r]->wait(boxes[r]->begin(send.data(), sizes, false, out.data(), sizes));
    CHECK(out == std::vector<char>(kBytes, static_cast<char>('b' - r)));
    CHECK_EQ(boxes[r]->bytes_sent(), kBytes + 16);
  });
}

TEST(bytes_move_while_nobody_waits) {
  for (bool tcp : {false, true}) {
    constexpr size_t kBytes = 16 << 20;
    Boxes boxes = connected(2, tcp);
    std::vector<char> send(2 * kBytes), out[2] = {std::vector<char>(2 * kBytes), std::vector<char>(2 * kBytes)};
    for (size_t i = 0; i < send.size(); ++i) send[i] = static_cast<char>(i * 7 + i / 1000);
    for (size_t r = 0; r < 2; ++r)
      for (size_t part = 0; part < 2; ++part) {
        std::vector<size_t> sizes(2, kBytes);
        sizes[r] = 0;
        boxes[r]->begin(send.data() + part * kBytes, sizes, false, out[r].data() + part * kBytes, sizes);
      }
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!(boxes[0]->is_complete(2) && boxes[1]->is_complete(2)) && std::chrono::steady_clock::now() < end)
      std::this_thread::yield();
    CHECK(boxes[0]->is_complete(2) && boxes[1]->is_complete(2));
    CHECK(out[0] == send && out[1] == send);
  }
}

TEST(own_part_is_left_out_or_stays_in_place_on_request) {
  Boxes boxes = connected(2, false);
  char first[2] = {'a', 'b'}, second[2] = {'c', 'd'}, out[2][2] = {{'x', 'x'}, {'x', 'x'}};
  boxes[0]->begin(first, {1, 1}, false, out[0], {1, 1}, false);
  boxes[1]->begin(second, {1, 1}, false, out[1], {1, 1}, false);
  boxes[0]->wait(1), boxes[1]->wait(1);
  CHECK(out[0][0] == 'x' && out[0][1] == 'c' && out[1][0] == 'b' && out[1][1] == 'x');
  char all[2][2] = {{'a', 'x'}, {'x', 'd'}};  // the own part is already in place
  boxes[0]->begin(all[0], {1}, true, all[0], {1, 1});
  boxes[1]->begin(all[1] + 1, {1}, true, all[1], {1, 1});
  boxes[0]->wait(2), boxes[1]->wait(2);
  CHECK(std::memcmp(all[0], "ad", 2) == 0 && std::memcmp(all[1], "ad", 2) == 0);
  CHECK_THROWS(std::invalid_argument, boxes[0]->begin(first, {1, 1}, false, out[0], {0, 1}));
  CHECK_THROWS(std::invalid_argument, boxes[0]->begin(first, {1}, false, out[0], {1, 1}));
}

TEST(exchange_without_bytes_waits_for_every_rank) {
  Boxes boxes = connected(3, true);
  for (uint32_t e = 1; e <= 3; ++e) {
    for (size_t r = 0; r < 2; ++r) CHECK_EQ(boxes[r]->begin(nullptr, {0, 0, 0}, false, nullptr, {0, 0, 0}), e);
    CHECK(!boxes[0]->is_complete(e) && !boxes[1]->is_complete(e));
    boxes[2]->begin(nullptr, {0}, true, nullptr, {0, 0, 0});
    for (auto& box : boxes) box->wait(e);
  }
}

TEST(early_messages_wait_for_their_exchange) {
  Boxes boxes = connected(2, true);
  std::vector<char> send(3 << 20, 'a'), out(3 << 20);
  boxes[0]->begin("12", {0, 2}, false, nullptr, {0, 0});
  boxes[0]->begin(send.data(), {0, send.size()}, false, nullptr, {0, 0});
  char few[2] = {0, 0};
  boxes[1]->wait(boxes[1]->begin(nullptr, {0, 0}, false, few, {2, 0}));
  CHECK(few[0] == '1' && few[1] == '2');
  boxes[1]->wait(boxes[1]->begin(nullptr, {0, 0}, false, out.data(), {out.size(), 0}));
  CHECK(out == send);
  boxes[0]->wait(2);
}

TEST(peer_that_leaves_ends_every_wait_for_it) {
  for (bool tcp : {false, true}) {
    Boxes boxes = connected(3, tcp);
    char byte = 1, out[3], other[3];
    boxes[2]->begin(&byte, {1}, true, other, {1, 1, 1});
    const uint32_t number = boxes[0]->begin(&byte, {1}, true, out, {1, 1, 1});
    std::thread leaves([&] { boxes[1]->close(); });
    CHECK(says(why(*boxes[0], number), "rank 1 has left"));
    leaves.join();
    CHECK(says(why(*boxes[0], number), "rank 1 has left"));
    CHECK_THROWS(std::runtime_error, boxes[0]->is_complete(number));
    CHECK_THROWS(std::runtime_error, boxes[0]->begin(&byte, {1}, true, out, {1, 1, 1}));
    CHECK(says(why(*boxes[1], 0), "this process has closed it"));
    boxes[1].reset();
    CHECK(says(why(*boxes[2], 1), "rank 1"));
  }
}

TEST(close_ends_a_wait_of_another_thread) {
  Boxes boxes = connected(2, true, 0);  // without a time limit
  char byte = 1, out[2];
  const uint32_t number = boxes[0]->begin(&byte, {1}, true, out, {1, 1});
  std::thread closes([&] { boxes[0]->close(); });
  CHECK(says(why(*boxes[0], number), "this process has closed it"));
  closes.join();
}

TEST(peer_that_died_in_a_message_ends_the_wait) {
  int ends[2];
  connect_pair(true, ends);
  SocketExchange box(0, 2, 20);
  box.connect({-1, ends[0]});
  const uint32_t header[4] = {0x58455248, 1, 100, 0};
  CHECK(send(ends[1], header, sizeof(header), 0) == sizeof(header) && send(ends[1], "abc", 3, 0) == 3);
  char out[100];
  const uint32_t number = box.begin("x", {0, 1}, false, out, {0, 100});
  const linger reset{1, 0};
  setsockopt(ends[1], SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
  close(ends[1]);
  CHECK(says(why(box, number), "the connection to rank 1 broke: Connection reset by peer"));
}

TEST(late_peer_ends_the_wait_after_the_timeout) {
  char byte = 1, out[4][4];
  Boxes boxes = connected(4, true, 0.05);
  for (size_t r : {0, 1, 2}) boxes[r]->begin(&byte, {1}, true, out[r], {1, 1, 1, 1});
  CHECK(says(why(*boxes[1], 1), "timed out after 0.05 s waiting for rank 3"));
  CHECK(says(why(*boxes[1], 1), "timed out after 0.05 s waiting for rank 3"));
  boxes = connected(3, true, 0.05);
  boxes[1]->begin(&byte, {1}, true, out[3], {1, 1, 1});
  CHECK(says(why(*boxes[1], 1), "timed out after 0.05 s waiting for ranks 0, 2"));
}

TEST(message_that_does_not_match_is_refused_before_it_is_written) {
  Boxes boxes = connected(2, true);
  char bytes[24] = {}, out[32];
  std::memset(out, 'x', sizeof(out));
  boxes[0]->begin(bytes, {0, 4}, false, nullptr, {0, 0});
  boxes[1]->begin(bytes, {0, 0}, false, out, {4, 0});
  boxes[1]->wait(1);
  boxes[0]->begin(bytes, {0, 24}, false, nullptr, {0, 0});
  boxes[1]->begin(bytes, {0, 0}, false, out + 4, {16, 0});
  CHECK(says(why(*boxes[1], 2), "rank 0 sent 24 bytes in exchange 2 and 16 were expected"));
  CHECK(out[3] == 0 && out[4] == 'x');
  for (uint32_t field : {0, 1}) {
    int ends[2];
    connect_pair(false, ends);
    SocketExchange box(1, 2, 20);
    box.connect({ends[0], -1});
    uint32_t header[4] = {0x58455248, 1, 0, 0};
    header[field] += 6;
    CHECK(send(ends[1], header, sizeof(header), 0) == sizeof(header));
    box.begin(nullptr, {0, 0}, false, nullptr, {0, 0});
    CHECK(says(why(box, 1), field ? "rank 0 sent exchange 7 and exchange 1 was expected"
                                  : "rank 0 sent bytes that are no message of an exchange, before exchange 1"));
    close(ends[1]);
  }
}

TEST(socket_exchange_refuses_wrong_calls) {
  Boxes boxes = connected(2, false);
  CHECK_THROWS(std::invalid_argument, boxes[0]->wait(7));
  CHECK_THROWS(std::invalid_argument, boxes[0]->is_complete(1));
  CHECK_THROWS(std::invalid_argument, boxes[0]->connect({-1, -1}));
  CHECK_THROWS(std::invalid_argument, SocketExchange(2, 2, 1));
  SocketExchange lone(0, 2, 1);
  CHECK_THROWS(std::invalid_argument, lone.connect({-1, -1}));
  CHECK_THROWS(std::invalid_argument, lone.begin(nullptr, {0}, true, nullptr, {0, 0}));
  CHECK_THROWS(std::runtime_error, lone.connect({-1, 1000000}));
}

}  // namespace
}  // namespace hotrow
