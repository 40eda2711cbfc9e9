// All-to-all messages between processes over connected stream sockets, one per peer: the sibling of
// shared_memory_exchange.h for ranks on several machines. The caller connects and authenticates the sockets.
//
// Exchanges are numbered from 1. All processes must begin the same exchanges in the same order, as with any collective.
// They complete in that order. On a socket, message n is a 16-byte header (magic, exchange number, payload bytes;
// little endian) and its payload; a message without payload is a header. So a peer that begins another exchange, or one
// of another size, is an error and never a silent misread.
//
// A payload is received straight into `out`, except its first bytes: they arrive together with the header in the peer's
// receive buffer (kReceiveBuffer bytes), so a small message takes one system call. A socket is read only while an
// exchange expects bytes from it. What a peer sends before that fills the two socket buffers and then stops the peer.
//
// One thread at a time drives the sockets (`driving_`); the peers' queues and buffers belong to it. begin() drives once
// without blocking, so a small message leaves from the calling thread. wait() drives until the exchange is complete, so
// what arrives wakes the thread that needs it. Otherwise the progress thread drives. All three find ready sockets with
// one edge-triggered epoll (`sockets_`). The progress thread sleeps in a second epoll (`turns_`) that contains the
// first one and reports it once each time it is armed: that takes it out of wait()'s way with one system call, however
// many peers there are. It never wakes while nothing is in flight.
//
// After a failure no call touches a buffer of a caller, and all later calls throw the same error.
//
// Threads: one caller at a time, except close().
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace hotrow {

class SocketExchange {
 public:
  // `timeout`: seconds that wait() waits for a peer without a byte moving; 0 or less: without limit.
  SocketExchange(size_t rank, size_t world, double timeout);
  ~SocketExchange();
  SocketExchange(const SocketExchange&) = delete;
  SocketExchange& operator=(const SocketExchange&) = delete;

  // Connected stream sockets by rank, -1 for this process. Takes ownership of them, even if it throws.
  void connect(const std::vector<int>& descriptors);

  // Sends to[r] bytes to each process r, contiguous in `send`; with `broadcast`, the same to[0] bytes to all. Puts
  // from[r] bytes of each process r into `out`, in rank order. The own part is copied too (unless it is already in
  // place); without `own` it is not. Returns the exchange's number. `send` and `out` must stay valid until wait() has
  // returned or thrown, or close() has returned.
  uint32_t begin(const char* send, const std::vector<size_t>& to, bool broadcast, char* out,
                 const std::vector<size_t>& from, bool own = true);
  // Whether exchange `number` and all before it are complete. Throws if an exchange has failed.
  bool is_complete(uint32_t number);
  // Waits until exchange `number` and all before it are complete.
  void wait(uint32_t number);
  // Makes peers that wait for this process stop with an error, and this process's own calls too. Any thread.
  void close();

  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }  // with headers

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer;
  struct Begun {
    uint32_t number;
    const char* send;
    std::vector<size_t> to;
    bool broadcast;
    char* out;
    std::vector<size_t> from;
  };

  // With the mutex held:
  void throw_failure(std::unique_lock<std::mutex>& lock);
  void check_number(uint32_t number) const;
  bool is_done(uint32_t number) const;
  void drive_once(std::unique_lock<std::mutex>& lock, size_t limit, int milliseconds);
  void stop_driving();
  void arm(bool on);
  // By the driving thread:
  void queue_begun();
  void find_ready(int milliseconds);
  void send_to(Peer& peer, size_t limit);
  void receive_from(Peer& peer, size_t limit);
  void unpack(Peer& peer);
  void fail(const Peer& peer, const std::string& what);
  bool can_move() const;
  int milliseconds_left(uint32_t number, Clock::time_point start);

  void run();

  const size_t rank_, world_;
  const double timeout_;
  std::vector<std::unique_ptr<Peer>> peers_;  // in the order of their turns; without this process
  int sockets_ = -1, turns_ = -1;             // epolls
  int wake_ = -1, stop_ = -1;                 // eventfds, in `sockets_` and in `turns_`
  std::string error_;                         // found by the driving thread, which then makes it failure_

  std::mutex mutex_;  // guards what follows
  std::condition_variable stopped_driving_;
  bool driving_ = false, waiting_ = false, armed_ = false, closed_ = false, connected_ = false;
  std::string failure_;
  std::vector<Begun> begun_;                                  // not yet in the peers' queues
  uint32_t started_exchanges_ = 0, completed_exchanges_ = 0;  // wrap around after 2^32
  std::atomic<uint64_t> bytes_sent_{0};
  std::thread progress_;
};

}  // namespace hotrow
