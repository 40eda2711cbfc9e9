#include "rowserver/row_server.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <utility>

namespace hotrow {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kHeader = sizeof(FrameHeader), kChallengeBytes = 32;
constexpr size_t kFirstBuffer = 16 << 10, kTurn = 1 << 20;  // bytes of a connection before another one's turn
constexpr size_t kKeptBuffers = 16, kKeptBytes = 16 << 20;
constexpr int kTick = 500;  // milliseconds between two looks at timeouts

// Memory for one frame, reused without being cleared.
struct Bytes {
  std::unique_ptr<char[]> data;
  size_t capacity = 0;
};

class FreeBytes {
 public:
  Bytes take(size_t bytes) {
    for (auto& kept : kept_)
      if (kept.capacity >= bytes && kept.capacity <= 4 * bytes + 4096) {
        Bytes found = std::move(kept);
        kept = std::move(kept_.back());
        kept_.pop_back();
        return found;
      }
    return {std::unique_ptr<char[]>(new char[bytes + 8]), bytes};
  }
  void put(Bytes bytes) {
    if (kept_.size() < kKeptBuffers && bytes.capacity <= kKeptBytes && bytes.data) kept_.push_back(std::move(bytes));
  }

 private:
  std::vector<Bytes> kept_;
};

int seconds_to_ms(double seconds) { return static_cast<int>(std::min(seconds, 1e6) * 1000); }

// An epoll forgets a descriptor by itself only when no other process has it any more (a client has our eventfds).
void unwatch(int epoll, int descriptor) { epoll_ctl(epoll, EPOLL_CTL_DEL, descriptor, nullptr); }

void watch(int epoll, int operation, int descriptor, uint32_t events, uint64_t serial) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = serial;
  if (epoll_ctl(epoll, operation, descriptor, &event) != 0)
    throw std::runtime_error(std::string("row server: cannot watch a descriptor: ") + std::strerror(errno));
}

std::thread without_signals(std::function<void()> body) {  // a signal is for the program's own threads
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::move(body));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace

struct RowServer::Counts {
  std::atomic<uint64_t> connections{0}, accepted{0}, refused{0}, malformed{0}, stalled{0};
  std::atomic<uint64_t> lookups_cold{0}, errors{0}, bytes_in{0}, bytes_out{0};
};

// Threads for lookups that wait for the SSD. At the end, jobs that have not begun are dropped.
class RowServer::ColdThreads {
 public:
  explicit ColdThreads(int count) {
    for (int i = 0; i < count; ++i) threads_.push_back(without_signals([this] { run(); }));
  }
  ~ColdThreads() { close(); }
  // Ends the threads. Jobs may still be added; they are not run.
  void close() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }
  void add(std::function<void(RowService::Scratch&)> job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    wake_.notify_one();
  }

 private:
  void run() {
    RowService::Scratch scratch;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return closed_ || !jobs_.empty(); });
      if (closed_) return;
      auto job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job(scratch);
      job = nullptr;  // what it holds is freed without the lock
      lock.lock();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void(RowService::Scratch&)>> jobs_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

class RowServer::Loop {
 public:
  explicit Loop(RowServer& server) : server_(server), counts_(*server.counts_), options_(server.options_) {
    epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
    wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (epoll_.get() < 0 || wake_.get() < 0) throw std::runtime_error("row server: cannot make an epoll");
    watch(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), EPOLLIN, kWake);
    thread_ = without_signals([this] { run(); });
  }
  ~Loop() {
    post([this] { stopped_ = true; });
    thread_.join();
  }
  // Runs `task` on the loop's thread.
  void post(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    const uint64_t one = 1;
    if (::write(wake_.get(), &one, sizeof(one)) < 0) return;  // it is signalled already
  }
  void listen(std::shared_ptr<Descriptor> listener) {
    post([this, listener] {
      const uint64_t serial = next_serial_++;
      listeners_[serial] = listener;
      watch(epoll_.get(), EPOLL_CTL_ADD, listener->get(), EPOLLIN | EPOLLEXCLUSIVE, serial);
    });
  }
  void add_local(std::shared_ptr<SharedSlots> slots, std::shared_ptr<Descriptor> control,
                 std::shared_ptr<RowService> service) {
    post([this, slots, control, service] {
      const uint64_t serial = next_serial_++, control_serial = next_serial_++;
      locals_[serial] = {slots, control, service, {}, 0};
      local_of_control_[control_serial] = serial;
      service->connections().fetch_add(1);
      counts_.connections.fetch_add(1, std::memory_order_relaxed);
      try {
        watch(epoll_.get(), EPOLL_CTL_ADD, slots->request_event(), EPOLLIN, serial);
        watch(epoll_.get(), EPOLL_CTL_ADD, control->get(), EPOLLIN | EPOLLRDHUP, control_serial);
      } catch (const std::exception&) {  // the client sees its control socket close
        close_local(local_of_control_.find(control_serial));
      }
    });
  }
  void close_listeners() {
    {
      const std::lock_guard lock(mutex_);
      busy_ = true;  // until the loop has looked
    }
    post([this] {
      for (const auto& [serial, listener] : listeners_) unwatch(epoll_.get(), listener->get());
      listeners_.clear();
      closing_ = true;
    });
  }
  // Whether an answer waits for a peer to read it, or for the SSD.
  bool is_busy() {
    const std::lock_guard lock(mutex_);
    return busy_;
  }

 private:
  static constexpr uint64_t kWake = 0;

  struct Outgoing {
    FrameHeader header;
    Bytes payload;
    size_t sent = 0;
  };
  struct Connection {
    uint64_t serial = 0;
    Descriptor socket;
    std::unique_ptr<TlsStream> tls;
    bool secured = true;                  // false during the handshake of TLS
    std::shared_ptr<RowService> service;  // null until it has proven the token
    bool proven = false, reads = true, writes = false;
    char challenge[kChallengeBytes];
    Bytes in;
    size_t filled = 0;
    std::deque<Outgoing> out;
    size_t waiting = 0;                                   // bytes in `out` and of lookups with cold threads
    std::shared_ptr<int> open = std::make_shared<int>();  // cold threads skip the lookups of a closed connection
    Clock::time_point accepted, moved;                    // moved: when the peer last took a byte
  };
  struct Local {
    std::shared_ptr<SharedSlots> slots;
    std::shared_ptr<Descriptor> control;
    std::shared_ptr<RowService> service;
    std::array<bool, SharedSlots::kSlots> working;  // with a cold thread, whatever the client writes into the state
    size_t cold;
  };

  void run() {
    std::vector<epoll_event> events(256);
    auto looked = Clock::now();
    while (!stopped_) {
      const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), kTick);
      for (int i = 0; i < count; ++i) handle(events[i].data.u64, events[i].events);
      if (const auto now = Clock::now(); now - looked > std::chrono::milliseconds(kTick)) {
        looked = now;
        close_late(now);
        resume_listeners();
      }
      update_busy();
    }
    while (!connections_.empty()) close(connections_.begin()->first);
    while (!local_of_control_.empty()) close_local(local_of_control_.begin());
  }

  void handle(uint64_t serial, uint32_t events) {
    if (serial == kWake) return run_tasks();
    if (const auto found = listeners_.find(serial); found != listeners_.end()) return accept(*found);
    if (const auto found = locals_.find(serial); found != locals_.end()) return serve_local(serial, found->second);
    if (const auto found = local_of_control_.find(serial); found != local_of_control_.end()) return close_local(found);
    const auto found = connections_.find(serial);
    if (found == connections_.end()) return;  // closed earlier in this turn
    turn(*found->second, [&](Connection& connection) {
      if (events & (EPOLLERR | EPOLLHUP)) return false;  // nobody reads answers any more
      if (!connection.secured) return secure(connection);
      if (events & EPOLLOUT && !send(connection)) return false;
      if (!handle_frames(connection)) return false;  // those that waited for the peer to take answers
      const bool pending = connection.tls && connection.tls->has_pending();
      return !(pending || events & (EPOLLIN | EPOLLRDHUP)) || receive(connection);
    });
  }

  // Runs body(connection), and closes the connection if it returns false or fails (no memory for a frame, say).
  template <class Body>
  void turn(Connection& connection, Body body) {
    const uint64_t serial = connection.serial;
    bool alive = false;
    try {
      alive = body(connection);
      if (alive) update_events(connection);
    } catch (const std::exception&) {
      alive = false;
      counts_.errors.fetch_add(1, std::memory_order_relaxed);
    }
    if (!alive) close(serial);
  }

  void run_tasks() {
    uint64_t count;
    if (::read(wake_.get(), &count, sizeof(count)) < 0) return;
    std::vector<std::function<void()>> tasks;
    {
      const std::lock_guard lock(mutex_);
      tasks.swap(tasks_);
    }
    for (auto& task : tasks) try {
        task();
      } catch (const std::exception&) {  // no memory; what the task was for is lost, and its peer times out
        counts_.errors.fetch_add(1, std::memory_order_relaxed);
      }
  }

  // --- connections ---

  void accept(const std::pair<const uint64_t, std::shared_ptr<Descriptor>>& listener) {
    while (true) {
      Descriptor socket(accept4(listener.second->get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (socket.get() < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
          unwatch(epoll_.get(), listener.second->get());  // the peer waits in the backlog until resume_listeners()
          paused_.push_back(listener.first);
        }
        return;
      }
      if (counts_.connections.load(std::memory_order_relaxed) >= options_.most_connections) {
        counts_.refused.fetch_add(1, std::memory_order_relaxed);
        continue;
      }
      if (!unproven_.empty() && unproven_.size() * options_.threads >= options_.most_unproven) close(unproven_.front());
      auto made = std::make_unique<Connection>();
      Connection& connection = *made;
      const int one = 1, idle = 60;  // seconds until the kernel asks a silent peer whether it is there
      setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
      setsockopt(socket.get(), SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
      setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
      connection.socket = std::move(socket);
      connection.serial = next_serial_++;
      connection.accepted = connection.moved = Clock::now();
      if (getrandom(connection.challenge, kChallengeBytes, 0) != kChallengeBytes) continue;
      connections_[connection.serial] = std::move(made);
      unproven_.push_back(connection.serial);
      counts_.connections.fetch_add(1, std::memory_order_relaxed);
      counts_.accepted.fetch_add(1, std::memory_order_relaxed);
      turn(connection, [&](Connection&) {
        watch(epoll_.get(), EPOLL_CTL_ADD, connection.socket.get(), EPOLLIN | EPOLLRDHUP, connection.serial);
        if (!server_.tls_) return challenge(connection);
        connection.tls = std::make_unique<TlsStream>(server_.tls_, connection.socket.get(), "");
        connection.secured = false;
        return true;
      });
    }
  }

  bool challenge(Connection& connection) {
    return reply(connection, FrameKind::kChallenge, 0, connection.challenge, kChallengeBytes);
  }

  // Continues the handshake of TLS; then the peer gets its challenge.
  bool secure(Connection& connection) {
    const auto state = connection.tls->handshake();
    connection.secured = state == TlsStream::Handshake::kDone;
    if (state == TlsStream::Handshake::kFailed) counts_.refused.fetch_add(1, std::memory_order_relaxed);
    if (state != TlsStream::Handshake::kDone) return state == TlsStream::Handshake::kWaits;
    return challenge(connection) && receive(connection);
  }

  void resume_listeners() {
    for (const uint64_t serial : std::exchange(paused_, {}))
      if (const auto found = listeners_.find(serial); found != listeners_.end()) try {
          watch(epoll_.get(), EPOLL_CTL_ADD, found->second->get(), EPOLLIN | EPOLLEXCLUSIVE, serial);
        } catch (const std::exception&) {
          paused_.push_back(serial);
        }
  }

  void close(uint64_t serial) {
    const auto found = connections_.find(serial);
    if (found == connections_.end()) return;
    if (found->second->service) found->second->service->connections().fetch_sub(1);
    unwatch(epoll_.get(), found->second->socket.get());
    connections_.erase(found);
    std::erase(unproven_, serial);
    counts_.connections.fetch_sub(1, std::memory_order_relaxed);
  }

  void close_late(Clock::time_point now) {
    std::vector<uint64_t> late;
    for (const auto& [serial, connection] : connections_) {
      const std::chrono::duration<double> since = now - (connection->proven ? connection->moved : connection->accepted);
      const bool stalled = connection->proven && !connection->out.empty() && since.count() > options_.stall_seconds;
      if (stalled) counts_.stalled.fetch_add(1, std::memory_order_relaxed);
      if (stalled || (!connection->proven && since.count() > options_.hello_seconds)) late.push_back(serial);
    }
    for (const uint64_t serial : late) close(serial);
  }

  void update_busy() {
    if (!closing_) return;  // it is not asked for
    bool busy = false;
    for (const auto& [serial, connection] : connections_)
      busy = busy || (connection->proven && connection->waiting > 0);
    for (const auto& [serial, local] : locals_) busy = busy || local.cold > 0;
    const std::lock_guard lock(mutex_);
    busy_ = busy;
  }

  void update_events(Connection& connection) {
    const bool reads = connection.waiting < options_.most_waiting;
    const bool writes = connection.secured ? !connection.out.empty() : connection.tls->wants_write();
    if (reads == connection.reads && writes == connection.writes) return;
    connection.reads = reads;
    connection.writes = writes;
    const uint32_t events = (reads ? EPOLLIN | EPOLLRDHUP : 0u) | (writes ? EPOLLOUT : 0u);
    watch(epoll_.get(), EPOLL_CTL_MOD, connection.socket.get(), events, connection.serial);
  }

  // Reads and handles frames. Returns false if the connection must be closed.
  bool receive(Connection& connection) {
    for (size_t turn = 0; turn < kTurn && connection.waiting < options_.most_waiting;) {
      const size_t wanted = wanted_bytes(connection);
      if (wanted == 0) return false;
      if (connection.in.capacity < wanted) grow(connection, wanted);
      const ssize_t got =
          receive_from(connection.socket.get(), connection.tls.get(), connection.in.data.get() + connection.filled,
                       connection.in.capacity - connection.filled);
      if (got == 0) return false;
      if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
      turn += static_cast<size_t>(got);
      connection.filled += static_cast<size_t>(got);
      counts_.bytes_in.fetch_add(static_cast<uint64_t>(got), std::memory_order_relaxed);
      if (!handle_frames(connection)) return false;
    }
    // The socket does not tell of bytes that were decrypted already.
    if (connection.tls && connection.tls->has_pending() && connection.waiting < options_.most_waiting)
      post([this, serial = connection.serial] { handle(serial, EPOLLIN); });
    return true;
  }

  // The capacity that the frame at the beginning of the buffer needs; 0 for a frame that breaks the protocol.
  size_t wanted_bytes(const Connection& connection) {
    if (connection.filled < kHeader) return connection.proven ? kFirstBuffer : 1024;
    FrameHeader header;
    std::memcpy(&header, connection.in.data.get(), kHeader);
    const size_t most = connection.proven ? kMostFrame : kMostHello;
    if (header.magic != kRowsMagic || header.bytes > most) {
      counts_.malformed.fetch_add(1, std::memory_order_relaxed);
      return 0;
    }
    return std::max(kHeader + header.bytes, connection.proven ? kFirstBuffer : size_t{1024});
  }

  void grow(Connection& connection, size_t wanted) {
    Bytes larger = free_.take(wanted);
    if (connection.filled) std::memcpy(larger.data.get(), connection.in.data.get(), connection.filled);
    free_.put(std::move(connection.in));
    connection.in = std::move(larger);
  }

  // Handles the complete frames in the buffer while the answers that wait are not too many; the others stay there.
  bool handle_frames(Connection& connection) {
    char* data = connection.in.data.get();
    size_t at = 0;
    while (connection.filled - at >= kHeader && connection.waiting < options_.most_waiting) {
      FrameHeader header;
      std::memcpy(&header, data + at, kHeader);
      if (header.magic != kRowsMagic || header.bytes > (connection.proven ? kMostFrame : kMostHello)) {
        counts_.malformed.fetch_add(1, std::memory_order_relaxed);
        return false;
      }
      if (connection.filled - at < kHeader + header.bytes) break;
      if (at % 8) {  // keys are read in place
        std::memmove(data, data + at, connection.filled - at);
        connection.filled -= at;
        at = 0;
      }
      if (!handle_frame(connection, header, data + at + kHeader)) return false;
      at += kHeader + header.bytes;
    }
    if (at && at < connection.filled) std::memmove(data, data + at, connection.filled - at);
    connection.filled -= at;
    if (connection.filled == 0 && connection.in.capacity > kFirstBuffer) {
      free_.put(std::move(connection.in));  // an idle connection holds no large buffer
      connection.in = {};
    }
    return true;
  }

  bool handle_frame(Connection& connection, const FrameHeader& header, const char* payload) {
    if (connection.proven && header.kind == FrameKind::kPing)
      return reply(connection, FrameKind::kPong, header.id, nullptr, 0);
    if (header.kind == (connection.proven ? FrameKind::kLookup : FrameKind::kHello))
      return connection.proven ? look_up(connection, header, payload) : prove(connection, header, payload);
    counts_.malformed.fetch_add(1, std::memory_order_relaxed);
    return false;
  }

  bool prove(Connection& connection, const FrameHeader& header, const char* payload) {
    Proven proven;
    try {
      proven = server_.prove_({connection.challenge, kChallengeBytes}, {payload, header.bytes});
      if (!proven.service) throw std::runtime_error("there are no rows for this connection");
    } catch (const std::exception& error) {
      counts_.refused.fetch_add(1, std::memory_order_relaxed);
      fail(connection, header.id, RowError::kMalformed, error.what());
      return false;
    }
    connection.proven = true;
    connection.service = std::move(proven.service);
    connection.service->connections().fetch_add(1);
    std::erase(unproven_, connection.serial);
    return reply(connection, FrameKind::kWelcome, header.id, proven.welcome.data(), proven.welcome.size());
  }

  bool look_up(Connection& connection, const FrameHeader& header, const char* payload) {
    const RowService& service = *connection.service;
    if (closing_ || service.is_retired())
      return fail(connection, header.id, RowError::kClosing, "these rows are closed");
    try {
      parse_lookup(payload, header.bytes, service.dims(), parsed_);
    } catch (const std::invalid_argument& error) {
      counts_.malformed.fetch_add(1, std::memory_order_relaxed);
      fail(connection, header.id, RowError::kMalformed, error.what());
      return false;
    }
    if (service.is_cold(parsed_)) {
      look_up_cold(connection, header, payload);
      return true;
    }
    return answer(connection, read(service, header, parsed_, scratch_, free_));
  }

  // Reads a lookup's rows into a frame. Any thread; `bytes` gives the memory.
  template <class Source>
  Outgoing read(const RowService& service, const FrameHeader& request, const ParsedLookup& lookup,
                RowService::Scratch& scratch, Source& bytes) {
    const size_t size = answer_bytes(lookup, service.dims());
    Outgoing frame{{kRowsMagic, FrameKind::kRows, RowError::kNone, request.id, size, 0, 0}, bytes.take(size), 0};
    read_into(service, request, lookup, scratch, frame.payload.data.get(), frame.header);
    return frame;
  }

  void read_into(const RowService& service, const FrameHeader& request, const ParsedLookup& lookup,
                 RowService::Scratch& scratch, char* out, FrameHeader& header) {
    try {
      const RowService::Reply reply = service.read(lookup, request.publication, out, scratch);
      header.publication = reply.publication;
      header.oldest = reply.oldest;
      header.error = reply.error;
    } catch (const std::exception&) {  // the disk fails; the client asks a replica
      header.publication = service.publication();
      header.oldest = service.oldest();
      header.error = RowError::kFailed;
    }
    if (header.error == RowError::kNone) return;
    counts_.errors.fetch_add(1, std::memory_order_relaxed);
    header.kind = FrameKind::kError;
    header.bytes = 0;
  }

  struct NewBytes {
    Bytes take(size_t bytes) { return {std::unique_ptr<char[]>(new char[bytes + 8]), bytes}; }
  };

  void look_up_cold(Connection& connection, const FrameHeader& header, const char* payload) {
    counts_.lookups_cold.fetch_add(1, std::memory_order_relaxed);
    auto copy = std::make_shared<std::vector<int64_t>>(header.bytes / 8);  // aligned, as parse_lookup requires
    std::memcpy(copy->data(), payload, header.bytes);
    const size_t held = kHeader + header.bytes + answer_bytes(parsed_, connection.service->dims());
    connection.waiting += held;
    server_.cold_->add([this, copy, header, held, serial = connection.serial, service = connection.service,
                        open = std::weak_ptr<int>(connection.open)](RowService::Scratch& scratch) {
      if (open.expired()) return;
      auto frame = std::make_shared<Outgoing>();
      try {
        ParsedLookup lookup;
        parse_lookup(reinterpret_cast<const char*>(copy->data()), header.bytes, service->dims(), lookup);
        NewBytes bytes;
        *frame = read(*service, header, lookup, scratch, bytes);
      } catch (const std::exception&) {  // no memory
        counts_.errors.fetch_add(1, std::memory_order_relaxed);
        *frame = {
            {kRowsMagic, FrameKind::kError, RowError::kFailed, header.id, 0, service->publication(), service->oldest()},
            {},
            0};
      }
      post([this, serial, held, frame] {
        const auto found = connections_.find(serial);
        if (found == connections_.end()) return;
        turn(*found->second, [&](Connection& back) {
          back.waiting -= held;
          return answer(back, std::move(*frame)) && handle_frames(back);
        });
      });
    });
  }

  // --- answers ---

  bool reply(Connection& connection, FrameKind kind, uint64_t id, const void* data, size_t size,
             RowError error = RowError::kNone) {
    const RowService* service = connection.service.get();
    Outgoing frame{
        {kRowsMagic, kind, error, id, size, service ? service->publication() : 0, service ? service->oldest() : 0},
        free_.take(size),
        0};
    if (size) std::memcpy(frame.payload.data.get(), data, size);
    return answer(connection, std::move(frame));
  }

  bool fail(Connection& connection, uint64_t id, RowError error, const std::string& why) {
    counts_.errors.fetch_add(1, std::memory_order_relaxed);
    return reply(connection, FrameKind::kError, id, why.data(), why.size(), error);
  }

  bool answer(Connection& connection, Outgoing frame) {
    if (connection.out.empty()) connection.moved = Clock::now();
    connection.waiting += kHeader + frame.header.bytes;
    connection.out.push_back(std::move(frame));
    return connection.out.size() > 1 || send(connection);
  }

  bool send(Connection& connection) {
    while (!connection.out.empty()) {
      Outgoing& frame = connection.out.front();
      iovec parts[2];
      int count = 0;
      if (frame.sent < kHeader)
        parts[count++] = {reinterpret_cast<char*>(&frame.header) + frame.sent, kHeader - frame.sent};
      const size_t skip = frame.sent > kHeader ? frame.sent - kHeader : 0;
      if (frame.header.bytes > skip) parts[count++] = {frame.payload.data.get() + skip, frame.header.bytes - skip};
      const ssize_t sent = send_to(connection.socket.get(), connection.tls.get(), parts, count);
      if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
      frame.sent += static_cast<size_t>(sent);
      connection.waiting -= static_cast<size_t>(sent);
      connection.moved = Clock::now();
      counts_.bytes_out.fetch_add(static_cast<uint64_t>(sent), std::memory_order_relaxed);
      if (frame.sent < kHeader + frame.header.bytes) continue;
      free_.put(std::move(frame.payload));
      connection.out.pop_front();
    }
    return true;
  }

  // --- clients on this machine ---

  void serve_local(uint64_t serial, Local& local) {
    SharedSlots& slots = *local.slots;
    SharedSlots::clear(slots.request_event());
    for (size_t slot = 0; slot < SharedSlots::kSlots; ++slot) {
      uint32_t submitted = SharedSlots::kSubmitted;
      if (local.working[slot]) continue;
      if (slots.state(slot).compare_exchange_strong(submitted, SharedSlots::kWorking, std::memory_order_acquire))
        serve_slot(serial, local, slot);
    }
  }

  void serve_slot(uint64_t serial, Local& local, size_t slot) {
    SharedSlots& slots = *local.slots;
    FrameHeader request;
    std::memcpy(&request, slots.request(slot), kHeader);
    auto& header = *reinterpret_cast<FrameHeader*>(slots.answer(slot));
    FrameHeader answered{kRowsMagic, FrameKind::kRows, RowError::kNone, request.id, 0, 0, 0};
    const RowService& service = *local.service;
    answered.publication = service.publication();
    answered.oldest = service.oldest();
    const char* payload = slots.request(slot) + kHeader;
    try {
      if (request.kind == FrameKind::kPing) {
        answered.kind = FrameKind::kPong;
      } else if (closing_ || service.is_retired()) {
        answered.kind = FrameKind::kError;
        answered.error = RowError::kClosing;
      } else {
        if (request.magic != kRowsMagic || request.kind != FrameKind::kLookup ||
            request.bytes > SharedSlots::kRequestBytes - kHeader)
          throw std::invalid_argument("not a lookup");
        parse_lookup(payload, request.bytes, service.dims(), parsed_);
        const size_t size = answer_bytes(parsed_, service.dims());
        if (size > SharedSlots::kAnswerBytes - kHeader) throw std::invalid_argument("an answer larger than a slot");
        answered.bytes = size;
        if (service.is_cold(parsed_)) return serve_slot_cold(serial, local, slot, request, answered);
        read_into(service, request, parsed_, scratch_, slots.answer(slot) + kHeader, answered);
      }
    } catch (const std::exception& error) {
      const bool malformed = dynamic_cast<const std::invalid_argument*>(&error);
      (malformed ? counts_.malformed : counts_.errors).fetch_add(1, std::memory_order_relaxed);
      answered.kind = FrameKind::kError;
      answered.error = malformed ? RowError::kMalformed : RowError::kFailed;
      answered.bytes = 0;
    }
    std::memcpy(&header, &answered, kHeader);
    slots.finish(slot);
  }

  void serve_slot_cold(uint64_t serial, Local& local, size_t slot, const FrameHeader& request, FrameHeader answered) {
    counts_.lookups_cold.fetch_add(1, std::memory_order_relaxed);
    auto lookup = std::make_shared<ParsedLookup>(parsed_);
    server_.cold_->add([this, serial, slots = local.slots, service = local.service, slot, request, answered, lookup,
                        open = std::weak_ptr<Descriptor>(local.control)](RowService::Scratch& scratch) mutable {
      if (open.expired()) return;
      read_into(*service, request, *lookup, scratch, slots->answer(slot) + kHeader, answered);
      std::memcpy(slots->answer(slot), &answered, kHeader);
      slots->finish(slot);
      post([this, serial, slot] {
        const auto found = locals_.find(serial);
        if (found == locals_.end()) return;
        found->second.cold -= 1;
        found->second.working[slot] = false;
        serve_local(serial, found->second);  // the client may have submitted the slot again
      });
    });
    local.cold += 1;
    local.working[slot] = true;
  }

  void close_local(std::unordered_map<uint64_t, uint64_t>::iterator control) {
    const Local& local = locals_.at(control->second);
    local.service->connections().fetch_sub(1);
    unwatch(epoll_.get(), local.slots->request_event());
    unwatch(epoll_.get(), local.control->get());
    locals_.erase(control->second);
    local_of_control_.erase(control);
    counts_.connections.fetch_sub(1, std::memory_order_relaxed);
  }

  RowServer& server_;
  Counts& counts_;
  const RowServerOptions& options_;
  Descriptor epoll_, wake_;
  uint64_t next_serial_ = 1;
  std::unordered_map<uint64_t, std::shared_ptr<Descriptor>> listeners_;
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::unordered_map<uint64_t, Local> locals_;
  std::unordered_map<uint64_t, uint64_t> local_of_control_;
  std::vector<uint64_t> paused_;   // listeners, while the process has no descriptor left
  std::deque<uint64_t> unproven_;  // oldest first
  FreeBytes free_;
  ParsedLookup parsed_;
  RowService::Scratch scratch_;
  bool stopped_ = false, closing_ = false;

  std::mutex mutex_;  // guards what follows
  std::vector<std::function<void()>> tasks_;
  bool busy_ = false;
  std::thread thread_;
};

RowServer::RowServer(RowServerOptions options, Prove prove, std::shared_ptr<TlsContext> tls)
    : options_(options),
      prove_(std::move(prove)),
      tls_(std::move(tls)),
      counts_(std::make_unique<Counts>()),
      cold_(std::make_unique<ColdThreads>(options.cold_threads)) {
  if (options_.threads < 1 || options_.cold_threads < 1) throw std::invalid_argument("RowServer: give threads");
  if (options_.most_waiting < 1) throw std::invalid_argument("RowServer: let some bytes of answers wait");
  for (int i = 0; i < options_.threads; ++i) loops_.push_back(std::make_unique<Loop>(*this));
}

RowServer::~RowServer() { close(0); }

void RowServer::listen(int descriptor) {
  const auto listener = std::make_shared<Descriptor>(descriptor);
  if (const int flags = fcntl(descriptor, F_GETFL); flags < 0 || fcntl(descriptor, F_SETFL, flags | O_NONBLOCK) != 0)
    throw std::runtime_error(std::string("row server: cannot listen: ") + std::strerror(errno));
  for (const auto& loop : loops_) loop->listen(listener);
}

std::vector<int> RowServer::add_local(int control, std::shared_ptr<RowService> service) {
  auto owned = std::make_shared<Descriptor>(control);
  if (!service) throw std::invalid_argument("add_local: there are no rows for this client");
  if (counts_->connections.load() >= options_.most_connections) {
    counts_->refused.fetch_add(1, std::memory_order_relaxed);
    throw std::runtime_error("row server: too many connections");
  }
  auto slots = std::make_shared<SharedSlots>();
  const size_t loop = next_loop_.fetch_add(1) % loops_.size();
  std::vector<Descriptor> copies;  // the loop closes its own when the client ends, perhaps before these are sent
  for (const int descriptor : slots->descriptors()) {
    copies.emplace_back(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
    if (copies.back().get() < 0)
      throw std::runtime_error(std::string("row server: cannot copy a descriptor: ") + std::strerror(errno));
  }
  loops_[loop]->add_local(slots, std::move(owned), std::move(service));
  std::vector<int> given;
  for (Descriptor& copy : copies) given.push_back(copy.release());
  return given;
}

void RowServer::close(double seconds) {
  if (closed_.exchange(true)) return;
  for (const auto& loop : loops_) loop->close_listeners();
  const auto until = Clock::now() + std::chrono::milliseconds(seconds_to_ms(seconds));
  while (Clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (std::none_of(loops_.begin(), loops_.end(), [](const auto& loop) { return loop->is_busy(); })) break;
  }
  cold_->close();  // its jobs post to the loops
  loops_.clear();  // and they add jobs
  cold_.reset();
}

RowServerFigures RowServer::figures() const {
  const auto get = [](const std::atomic<uint64_t>& count) { return count.load(std::memory_order_relaxed); };
  return {get(counts_->connections), get(counts_->accepted), get(counts_->refused),
          get(counts_->malformed),   get(counts_->stalled),  get(counts_->lookups_cold),
          get(counts_->errors),      get(counts_->bytes_in), get(counts_->bytes_out)};
}

}  // namespace hotrow
