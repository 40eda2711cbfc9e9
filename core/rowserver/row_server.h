// RowServer: answers lookups over TCP and over shared memory, on a few threads of its own.
//
// Each thread has an epoll, and every connection belongs to one thread. A lookup whose rows are in DRAM is answered at
// once on that thread. One that may need the SSD goes to a cold thread, and its answer is sent when it is ready, so it
// delays no other. Connections are non-blocking, and what a peer can make the server hold is bounded:
//
//   a connection that has not proven the token   one frame of kMostHello bytes, 10 s, most_unproven of them
//   answers that a peer does not read            `most_waiting` bytes, then the connection is not read; `stall_seconds`
//                                                without a byte moving, then it is closed
//   a request                                    kMostFrame bytes
//
// `prove` is called on a server thread with a connection's challenge and hello. It returns the rows that this
// connection may read and the welcome, or throws std::runtime_error, whose text the peer gets.
//
// Threads: any, for every method but close().
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "rowserver/row_service.h"
#include "rowserver/shared_slots.h"
#include "rowserver/tls.h"

namespace hotrow {

struct RowServerOptions {
  int threads = 1;
  int cold_threads = 4;
  size_t most_connections = 16384;
  size_t most_unproven = 1024;
  size_t most_waiting = size_t{64} << 20;
  double hello_seconds = 10, stall_seconds = 30;
};

struct RowServerFigures {
  uint64_t connections, accepted, refused, malformed, stalled;
  uint64_t lookups_cold, errors, bytes_in, bytes_out;
};

class RowServer {
 public:
  struct Proven {
    std::shared_ptr<RowService> service;
    std::string welcome;
  };
  using Prove = std::function<Proven(std::string_view challenge, std::string_view hello)>;

  // With `tls`, connections over TCP use it.
  RowServer(RowServerOptions options, Prove prove, std::shared_ptr<TlsContext> tls = nullptr);
  ~RowServer();
  RowServer(const RowServer&) = delete;
  RowServer& operator=(const RowServer&) = delete;

  // Accepts connections of a listening socket. Takes ownership.
  void listen(int descriptor);
  // A client on this machine, which has proven itself and may read `service`: returns the descriptors to send to it;
  // the caller closes them. `control` is a connected socket (taken over) whose end is the client's.
  std::vector<int> add_local(int control, std::shared_ptr<RowService> service);
  // Closes the listeners; answers what has arrived, then answers kClosing, for at most `seconds`; then ends the
  // threads. Requires: no other call but figures() runs, or follows.
  void close(double seconds);
  RowServerFigures figures() const;

 private:
  class Loop;
  class ColdThreads;
  struct Counts;
  const RowServerOptions options_;
  const Prove prove_;
  const std::shared_ptr<TlsContext> tls_;
  std::unique_ptr<Counts> counts_;
  std::unique_ptr<ColdThreads> cold_;
  std::vector<std::unique_ptr<Loop>> loops_;
  std::atomic<size_t> next_loop_{0};
  std::atomic<bool> closed_{false};
};

}  // namespace hotrow
