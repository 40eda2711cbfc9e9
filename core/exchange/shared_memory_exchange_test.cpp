// Exchanges between threads and between processes: received bytes are the sent ones, in any order of waiting.
#include "exchange/shared_memory_exchange.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "testing/random.h"
#include "testing/test.h"

namespace hotrow {
namespace {

std::vector<std::unique_ptr<SharedMemoryExchange>> connected(size_t world, double timeout = 20) {
  std::vector<std::unique_ptr<SharedMemoryExchange>> boxes;
  std::vector<SegmentAddress> addresses;
  for (size_t r = 0; r < world; ++r) {
    boxes.push_back(std::make_unique<SharedMemoryExchange>(r, world, timeout));
    addresses.push_back(boxes.back()->address());
  }
  for (auto& box : boxes) box->connect(addresses);
  return boxes;
}

// Bytes that rank `from` sends rank `to` in an exchange: a few, none, or more than any area has had.
size_t size_of(uint32_t exchange, size_t from, size_t to) {
  testing::Random random(exchange * 1000 + from * 10 + to);
  const uint64_t kind = random.below(4);
  return kind == 0 ? 0 : kind == 1 ? random.below(70000) + exchange * 97 : random.below(300);
}

char byte_of(uint32_t exchange, size_t from, size_t to, size_t at) {
  return static_cast<char>(exchange * 31 + from * 7 + to * 3 + at);
}

struct Exchange {
  uint32_t number;
  std::vector<char> out;
};

// Every third exchange is one message for all.
Exchange begin(SharedMemoryExchange& box, size_t rank, size_t world, uint32_t e) {
  const bool same = e % 3 == 0;
  std::vector<size_t> to, from;
  std::vector<char> send;
  for (size_t r = 0; r < (same ? 1 : world); ++r) {
    to.push_back(same ? size_of(e, rank, 99) : size_of(e, rank, r));
    for (size_t i = 0; i < to.back(); ++i) send.push_back(byte_of(e, rank, same ? 99 : r, i));
  }
  for (size_t r = 0; r < world; ++r) from.push_back(same ? size_of(e, r, 99) : size_of(e, r, rank));
  std::vector<char> out(std::accumulate(from.begin(), from.end(), size_t{0}) + 1, 'x');
  Exchange exchange{box.begin(send.data(), to, same, out.data(), from), {}};
  exchange.out = std::move(out);  // moving keeps the memory's address
  return exchange;
}

bool right(const Exchange& exchange, size_t rank, size_t world, uint32_t e) {
  size_t at = 0;
  for (size_t r = 0; r < world; ++r) {
    const size_t to = e % 3 == 0 ? 99 : rank, size = size_of(e, r, to);
    for (size_t i = 0; i < size; ++i)
      if (exchange.out[at++] != byte_of(e, r, to, i)) return false;
  }
  return exchange.out[at] == 'x' && at + 1 == exchange.out.size();
}

// Several exchanges are in flight at once, and some are waited for at the end.
int exchange_many(SharedMemoryExchange& box, size_t rank, size_t world) {
  testing::Random random(rank);
  std::vector<Exchange> open;
  std::vector<uint32_t> names;
  int wrong = 0;
  for (uint32_t e = 1; e <= 400; ++e) {
    open.push_back(begin(box, rank, world, e));
    names.push_back(e);
    while (!open.empty() && random.below(3)) {
      const size_t one = random.below(open.size());
      box.wait(open[one].number);
      wrong += !right(open[one], rank, world, names[one]);
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(one));
      names.erase(names.begin() + static_cast<std::ptrdiff_t>(one));
    }
  }
  for (size_t one = 0; one < open.size(); ++one) {
    box.wait(open[one].number);
    wrong += !right(open[one], rank, world, names[one]);
  }
  return wrong;
}

TEST(threads_exchange_what_they_sent_in_any_order_of_waiting) {
  for (size_t world : {1, 2, 3, 5}) {
    auto boxes = connected(world);
    std::vector<int> wrong(world, -1);
    std::vector<std::thread> threads;
    for (size_t r = 0; r < world; ++r) threads.emplace_back([&, r] { wrong[r] = exchange_many(*boxes[r], r, world); });
    for (auto& thread : threads) thread.join();
    CHECK(wrong == std::vector<int>(world, 0));
  }
}

TEST(what_a_process_sends_itself_stays_where_it_is_if_it_may) {
  auto boxes = connected(2);
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
}

// Runs `work` in a child that has an exchange of its own; the parent has rank 0 of two.
template <class Work, class Check>
void with_child(Work work, Check check, double timeout = 20) {
  int up[2], down[2];
  CHECK(pipe(up) == 0 && pipe(down) == 0);
  const pid_t child = fork();
  if (child == 0) {
    SharedMemoryExchange box(1, 2, timeout);
    SegmentAddress mine = box.address(), theirs;
    bool ok = write(up[1], &mine, sizeof(mine)) == sizeof(mine) && read(down[0], &theirs, sizeof(theirs)) > 0;
    if (ok) box.connect({theirs, mine});
    _exit(ok ? work(box) : 9);
  }
  SharedMemoryExchange box(0, 2, timeout);
  SegmentAddress mine = box.address(), theirs;
  CHECK(write(down[1], &mine, sizeof(mine)) == sizeof(mine) && read(up[0], &theirs, sizeof(theirs)) > 0);
  box.connect({mine, theirs});
  check(box, child);
  kill(child, SIGKILL);
  int status;
  waitpid(child, &status, 0);
  for (int end : {up[0], up[1], down[0], down[1]}) close(end);
}

TEST(processes_exchange_what_they_sent) {
  with_child(
      [](SharedMemoryExchange& box) {
        return exchange_many(box, 1, 2) ? 1 : (box.begin(nullptr, {0}, true, nullptr, {0, 0}), 0);
      },
      [](SharedMemoryExchange& box, pid_t) { CHECK_EQ(exchange_many(box, 0, 2), 0); });
}

std::string why(SharedMemoryExchange& box) {
  try {
    char byte = 1, out[2];
    box.wait(box.begin(&byte, {1}, true, out, {1, 1}));
    return "it came";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

TEST(waiting_for_a_dead_closed_or_late_peer_throws) {
  auto sleeps = [](SharedMemoryExchange&) { return pause(); };
  with_child(sleeps, [](SharedMemoryExchange& box, pid_t child) {
    kill(child, SIGKILL);
    CHECK(why(box).find("is gone") != std::string::npos);  // although the parent has not reaped it: it is a zombie
  });
  with_child([](SharedMemoryExchange& box) { return box.close(), pause(); },
             [](SharedMemoryExchange& box, pid_t) { CHECK(why(box).find("rank 1 has left") != std::string::npos); });
  with_child(
      sleeps,
      [](SharedMemoryExchange& box, pid_t) { CHECK(why(box).find("timed out after 0 s") != std::string::npos); }, 0.2);
}

TEST(messages_of_another_size_and_other_segments_are_refused) {
  auto boxes = connected(2);
  char byte[3] = {1, 2, 3}, out[8];
  boxes[1]->begin(byte, {2, 1}, false, out + 4, {0, 1});
  boxes[0]->begin(byte, {1, 0}, false, out, {1, 3});
  CHECK_THROWS(std::runtime_error, boxes[0]->wait(1));
  CHECK_THROWS(std::invalid_argument, boxes[0]->wait(7));
  SharedMemoryExchange lone(0, 2, 1);
  SegmentAddress wrong = boxes[1]->address();
  wrong.token += 1;
  CHECK_THROWS(std::runtime_error, lone.connect({lone.address(), wrong}));
  wrong.descriptor = 100000;
  CHECK_THROWS(std::runtime_error, lone.connect({lone.address(), wrong}));
}

}  // namespace
}  // namespace hotrow
