// Mailbox: messages between the processes of one machine, through memory that they share.
//
// Every process has a segment (a memfd, which the others open by process and number, so that nothing is left behind)
// with a control page and kDepth areas. Exchange n of a mailbox, counted from 1, is a message of every process: it is
// written into the own area n % kDepth, `posted` becomes n, and the others copy their parts out of it; who has taken
// all messages of an exchange says so in `taken`. All processes begin the same exchanges in the same order, as they do
// with any other carrier. Exchanges are completed in that order, too: waiting for one completes those before it, which
// never waits for longer, because whoever has posted n has posted all before.
//
// An area is written again when everybody has taken exchange n - kDepth. Before a process waits for that it completes
// its own up to there, so no two wait for each other: the one that has begun the fewest finds that all others need
// nothing of it to take what it has posted.
//
// Loopback TCP copies every byte twice in the kernel and takes turns with the threads that compute: 18 ms of a core in
// a step that exchanges 11 MB each way (2 EPYC cores); this takes two plain copies by the thread that waits anyway.
//
// Who waits looks twenty times a second whether the others still live: a process that was killed says nothing.
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace hotrow {

// Where a process's segment is, and a number by which it is known.
struct MailboxAddress {
  int64_t process;
  int64_t descriptor;
  uint64_t token;
};

class Mailbox {
 public:
  static constexpr uint32_t kDepth = 4;

  // `timeout` in seconds is how long a process is waited for.
  Mailbox(size_t rank, size_t world, double timeout);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  MailboxAddress address() const;
  // Throws where a segment cannot be opened: on another machine, or another's process.
  void connect(const std::vector<MailboxAddress>& everybody);

  // Posts `to[r]` bytes for each process r, one behind the other in `send`, or with `same` the same to[0] bytes for
  // all. What comes, `from[r]` bytes of process r, will be in `out`, rank behind rank; without `own` not what a process
  // sends itself, and nothing is copied where that already is in its place. Returns the exchange's number.
  uint32_t begin(const char* send, const std::vector<size_t>& to, bool same, char* out, const std::vector<size_t>& from,
                 bool own = true);
  // Until exchange `number` is there. `out` of this one and all before must still be.
  void wait(uint32_t number);
  // Others that wait for this process stop. Any thread.
  void close();

 private:
  struct Control;
  struct Segment;
  struct Pending {
    char* out;
    std::vector<size_t> from;
  };

  char* room(uint32_t number, size_t bytes);
  void complete_next();
  void wait_until(size_t rank, const uint32_t& word, uint32_t number);

  const size_t rank_, world_;
  const double timeout_;
  std::vector<std::unique_ptr<Segment>> segments_;  // by rank
  uint32_t begun_ = 0, taken_ = 0;                  // they go round after four billion
  uint64_t posts_ = 0;
  std::deque<Pending> pending_;  // exchanges after taken_
};

}  // namespace hotrow
