#include "exchange/socket_exchange.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <climits>
#include <cmath>
#include <csignal>
#include <cstring>
#include <sstream>
#include <stdexcept>

namespace hotrow {
namespace {

struct Header {
  uint32_t magic;
  uint32_t number;
  uint64_t bytes;
};
static_assert(sizeof(Header) == 16 && std::endian::native == std::endian::little);

constexpr uint32_t kMagic = 0x58455248;  // "HREX"
constexpr size_t kReceiveBuffer = 16 << 10;
constexpr size_t kTurn = 1 << 20;         // bytes each way before the next peer has its turn
constexpr size_t kFirstTurn = 256 << 10;  // and in begin(), whose caller has other work
constexpr int kMessagesAtOnce = 8;        // in one sendmsg

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::runtime_error("socket exchange: " + what + ": " + std::strerror(errno));
}

void signal_event(int descriptor) {
  const uint64_t one = 1;
  if (write(descriptor, &one, sizeof(one)) < 0) return;  // the counter is full, so the event is already there
}

void watch(int epoll, int operation, int descriptor, uint32_t events, void* data) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = data;
  if (epoll_ctl(epoll, operation, descriptor, &event) != 0) throw_errno("cannot watch a socket");
}

}  // namespace

struct SocketExchange::Peer {
  struct Outgoing {
    Header header;
    const char* payload;
    size_t sent;  // of header and payload
  };
  struct Incoming {
    uint32_t number;
    char* out;
    size_t bytes;
  };

  size_t rank = 0;
  int descriptor = -1;
  // Set by epoll's edges and cleared when the socket has no more; `has_hung_up` stays.
  bool is_readable = true, is_writable = true, has_hung_up = false;
  std::deque<Outgoing> outgoing;
  std::deque<Incoming> incoming;  // the first one's header has been read if `in_payload`
  bool in_payload = false;
  size_t received = 0;  // payload bytes of the first of `incoming`
  uint32_t sent_exchanges = 0, received_exchanges = 0;
  Clock::time_point last_progress{};
  char buffer[kReceiveBuffer];  // received and not yet unpacked: [unpacked, filled)
  size_t unpacked = 0, filled = 0;

  ~Peer() {
    if (descriptor >= 0) ::close(descriptor);
  }
};

SocketExchange::SocketExchange(size_t rank, size_t world, double timeout)
    : rank_(rank), world_(world), timeout_(timeout) {
  if (rank >= world) throw std::invalid_argument("SocketExchange: rank must be below world");
}

SocketExchange::~SocketExchange() {
  close();
  if (progress_.joinable()) progress_.join();
  for (int descriptor : {sockets_, turns_, wake_, stop_})
    if (descriptor >= 0) ::close(descriptor);
}

void SocketExchange::connect(const std::vector<int>& descriptors) {
  std::vector<std::unique_ptr<Peer>> peers;
  for (size_t r = 0; r < descriptors.size(); ++r) {
    if (descriptors[r] < 0) continue;
    peers.push_back(std::make_unique<Peer>());
    peers.back()->rank = r;
    peers.back()->descriptor = descriptors[r];
  }
  const std::unique_lock lock(mutex_);
  if (connected_ || sockets_ >= 0) throw std::invalid_argument("SocketExchange: it is already connected");
  if (closed_) throw std::runtime_error(failure_);
  if (descriptors.size() != world_ || peers.size() != world_ - 1 || descriptors[rank_] >= 0)
    throw std::invalid_argument("SocketExchange: give one socket per process, and -1 for this one");
  if (world_ > 1) {
    sockets_ = epoll_create1(EPOLL_CLOEXEC);
    turns_ = epoll_create1(EPOLL_CLOEXEC);
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    stop_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (sockets_ < 0 || turns_ < 0 || wake_ < 0 || stop_ < 0) throw_errno("cannot make an epoll");
    watch(sockets_, EPOLL_CTL_ADD, wake_, EPOLLIN | EPOLLET, nullptr);
    watch(turns_, EPOLL_CTL_ADD, stop_, EPOLLIN, nullptr);
    watch(turns_, EPOLL_CTL_ADD, sockets_, 0, nullptr);
  }
  // Rank r sends to r + 1 first, so that not all ranks send to the same one.
  std::rotate(peers.begin(), peers.begin() + static_cast<std::ptrdiff_t>(rank_), peers.end());
  for (auto& peer : peers) {
    const int socket = peer->descriptor, flags = fcntl(socket, F_GETFL), one = 1;
    if (flags < 0 || fcntl(socket, F_SETFL, flags | O_NONBLOCK) != 0 || fcntl(socket, F_SETFD, FD_CLOEXEC) != 0)
      throw_errno("cannot use the socket of rank " + std::to_string(peer->rank));
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));  // fails on a Unix socket, which has no delay
    watch(sockets_, EPOLL_CTL_ADD, socket, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, peer.get());
  }
  peers_ = std::move(peers);
  if (world_ > 1) {
    sigset_t all, before;  // a signal is for the program's own threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    progress_ = std::thread([this] { run(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  connected_ = true;
}

uint32_t SocketExchange::begin(const char* send, const std::vector<size_t>& to, bool broadcast, char* out,
                               const std::vector<size_t>& from, bool own) {
  if (to.size() != (broadcast ? 1 : world_) || from.size() != world_)
    throw std::invalid_argument("SocketExchange: give one size per process");
  const size_t own_bytes = broadcast ? to[0] : to[rank_];
  if (own_bytes != from[rank_])
    throw std::invalid_argument("SocketExchange: a process must receive from itself what it sends itself");
  std::unique_lock lock(mutex_);
  throw_failure(lock);
  if (!connected_) throw std::invalid_argument("SocketExchange: call connect() first");
  const uint32_t number = ++started_exchanges_;
  if (world_ == 1) {
    completed_exchanges_ = number;
  } else {
    begun_.push_back({number, send, to, broadcast, out, from});
    if (!driving_) {  // else the driving thread takes it on
      driving_ = true;
      drive_once(lock, kFirstTurn, 0);
      stop_driving();
    }
  }
  lock.unlock();
  size_t send_at = 0, out_at = 0;
  for (size_t r = 0; r < rank_; ++r) {
    send_at += broadcast ? 0 : to[r];
    out_at += from[r];
  }
  if (own && own_bytes && out + out_at != send + send_at) std::memcpy(out + out_at, send + send_at, own_bytes);
  return number;
}

bool SocketExchange::is_complete(uint32_t number) {
  std::unique_lock lock(mutex_);
  throw_failure(lock);
  check_number(number);
  return is_done(number);
}

void SocketExchange::wait(uint32_t number) {
  std::unique_lock lock(mutex_);
  throw_failure(lock);
  check_number(number);
  if (is_done(number)) return;
  waiting_ = true;  // the progress thread stops driving after a turn
  while (driving_) stopped_driving_.wait(lock);
  waiting_ = false;
  driving_ = true;
  const Clock::time_point start = Clock::now();
  if (armed_ && !is_done(number)) arm(false);
  while (!is_done(number) && failure_.empty()) {
    const int left = can_move() || !begun_.empty() ? 0 : milliseconds_left(number, start);
    drive_once(lock, kTurn, left);
  }
  stop_driving();
  throw_failure(lock);
}

void SocketExchange::close() {
  std::unique_lock lock(mutex_);
  if (closed_) return;
  closed_ = true;
  if (failure_.empty()) failure_ = "socket exchange: this process has closed it";
  for (auto& peer : peers_) shutdown(peer->descriptor, SHUT_RDWR);
  if (stop_ >= 0) signal_event(stop_);
  if (wake_ >= 0) signal_event(wake_);
  while (driving_) stopped_driving_.wait(lock);
}

void SocketExchange::throw_failure(std::unique_lock<std::mutex>& lock) {
  if (failure_.empty()) return;
  while (driving_) stopped_driving_.wait(lock);  // the caller may free its buffers after this
  throw std::runtime_error(failure_);
}

void SocketExchange::check_number(uint32_t number) const {
  if (static_cast<int32_t>(number - started_exchanges_) > 0)
    throw std::invalid_argument("SocketExchange: no exchange with this number was begun");
}

bool SocketExchange::is_done(uint32_t number) const { return static_cast<int32_t>(number - completed_exchanges_) <= 0; }

// The progress thread. It is woken when a socket is ready while `turns_` is armed, and by close().
void SocketExchange::run() {
  while (true) {
    epoll_event event;
    if (epoll_wait(turns_, &event, 1, -1) < 0) continue;
    std::unique_lock lock(mutex_);
    if (closed_) return;
    armed_ = false;          // or armed again since this wake-up: arming twice does no harm
    if (driving_) continue;  // the driving thread arms when it stops
    driving_ = true;
    do drive_once(lock, kTurn, 0);
    while (!waiting_ && failure_.empty() && (can_move() || !begun_.empty()));
    stop_driving();
  }
}

// One turn for every peer, after waiting at most `milliseconds` until a socket is ready (-1: without limit). Requires:
// this thread drives. Holds the mutex at entry and exit, not while it moves bytes.
void SocketExchange::drive_once(std::unique_lock<std::mutex>& lock, size_t limit, int milliseconds) {
  if (!failure_.empty()) return;
  queue_begun();
  lock.unlock();
  for (auto& peer : peers_) send_to(*peer, limit);
  find_ready(milliseconds);
  for (auto& peer : peers_) receive_from(*peer, limit);
  lock.lock();
  if (!error_.empty() && failure_.empty()) failure_ = error_;
  uint32_t done = INT32_MAX;  // exchanges that all peers have completed after completed_exchanges_
  for (auto& peer : peers_)
    done =
        std::min({done, peer->sent_exchanges - completed_exchanges_, peer->received_exchanges - completed_exchanges_});
  completed_exchanges_ += done;
}

void SocketExchange::stop_driving() {
  driving_ = false;
  const bool in_flight = completed_exchanges_ != started_exchanges_;
  if (in_flight && failure_.empty() && !waiting_) {
    if (can_move() || !begun_.empty()) signal_event(wake_);
    if (!armed_) arm(true);
  }
  stopped_driving_.notify_all();
}

void SocketExchange::arm(bool on) {
  watch(turns_, EPOLL_CTL_MOD, sockets_, on ? EPOLLIN | EPOLLONESHOT : 0, nullptr);
  armed_ = on;
}

void SocketExchange::queue_begun() {
  for (const Begun& begun : begun_) {
    std::vector<size_t> send_at(world_), out_at(world_);
    for (size_t r = 1; r < world_; ++r) {
      send_at[r] = begun.broadcast ? 0 : send_at[r - 1] + begun.to[r - 1];
      out_at[r] = out_at[r - 1] + begun.from[r - 1];
    }
    for (auto& peer : peers_) {
      const size_t r = peer->rank;
      const uint64_t bytes = begun.to[begun.broadcast ? 0 : r];
      peer->outgoing.push_back({{kMagic, begun.number, bytes}, begun.send + send_at[r], 0});
      peer->incoming.push_back({begun.number, begun.out + out_at[r], begun.from[r]});
    }
  }
  begun_.clear();
}

void SocketExchange::find_ready(int milliseconds) {
  epoll_event events[64];
  const int count = epoll_wait(sockets_, events, static_cast<int>(std::size(events)), milliseconds);
  for (int i = 0; i < count; ++i) {
    auto* peer = static_cast<Peer*>(events[i].data.ptr);
    if (!peer) continue;  // wake_
    const uint32_t what = events[i].events;
    peer->has_hung_up |= (what & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)) != 0;
    peer->is_readable |= (what & EPOLLIN) || peer->has_hung_up;
    peer->is_writable |= (what & EPOLLOUT) || peer->has_hung_up;
  }
}

void SocketExchange::send_to(Peer& peer, size_t limit) {
  size_t moved = 0;
  while (moved < limit && peer.is_writable && !peer.outgoing.empty() && error_.empty()) {
    iovec parts[2 * kMessagesAtOnce];
    size_t count = 0, offered = 0;
    for (size_t i = 0; i < peer.outgoing.size() && i < kMessagesAtOnce && moved + offered < limit; ++i) {
      Peer::Outgoing& each = peer.outgoing[i];
      size_t payload_sent = 0;
      if (each.sent < sizeof(Header)) {
        parts[count++] = {reinterpret_cast<char*>(&each.header) + each.sent, sizeof(Header) - each.sent};
        offered += sizeof(Header) - each.sent;
      } else {
        payload_sent = each.sent - sizeof(Header);
      }
      const size_t room = limit > moved + offered ? limit - moved - offered : 0;
      const size_t bytes = std::min(each.header.bytes - payload_sent, room);
      if (bytes) parts[count++] = {const_cast<char*>(each.payload) + payload_sent, bytes};
      offered += bytes;
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(peer.descriptor, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK)
        peer.is_writable = false;
      else
        fail(peer, errno == EPIPE ? "" : std::strerror(errno));
      break;
    }
    size_t left = static_cast<size_t>(sent);
    peer.is_writable = left == offered;  // an edge follows when there is room again
    moved += left;
    while (!peer.outgoing.empty()) {
      Peer::Outgoing& first = peer.outgoing.front();
      const size_t bytes = std::min(left, sizeof(Header) + first.header.bytes - first.sent);
      first.sent += bytes;
      left -= bytes;
      if (first.sent < sizeof(Header) + first.header.bytes) break;
      peer.outgoing.pop_front();
      ++peer.sent_exchanges;
    }
  }
  if (!moved) return;
  peer.last_progress = Clock::now();
  bytes_sent_.fetch_add(moved, std::memory_order_relaxed);
}

void SocketExchange::receive_from(Peer& peer, size_t limit) {
  unpack(peer);
  size_t moved = 0;
  while (moved < limit && peer.is_readable && !peer.incoming.empty() && error_.empty()) {
    // Unpacked bytes are gone from the buffer, except a part of a header.
    std::memmove(peer.buffer, peer.buffer + peer.unpacked, peer.filled - peer.unpacked);
    peer.filled -= peer.unpacked;
    peer.unpacked = 0;
    const Peer::Incoming& first = peer.incoming.front();
    const size_t missing = peer.in_payload ? first.bytes - peer.received : 0,
                 payload = std::min(missing, limit - moved);
    iovec parts[2];
    size_t count = 0, asked = payload;
    if (payload) parts[count++] = {first.out + peer.received, payload};
    if (payload == missing) {
      parts[count++] = {peer.buffer + peer.filled, kReceiveBuffer - peer.filled};
      asked += kReceiveBuffer - peer.filled;
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t got = recvmsg(peer.descriptor, &message, MSG_DONTWAIT);
    if (got <= 0) {
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        peer.is_readable = false;
      else
        fail(peer, got == 0 ? "" : std::strerror(errno));
      break;
    }
    const size_t bytes = static_cast<size_t>(got);
    if (bytes < asked) peer.is_readable = peer.has_hung_up;  // an edge follows when there is more
    moved += bytes;
    peer.received += std::min(bytes, payload);
    peer.filled += bytes - std::min(bytes, payload);
    unpack(peer);
  }
  if (moved) peer.last_progress = Clock::now();
}

// Takes headers, and the payload bytes that came with them, out of the receive buffer. Completes the exchanges whose
// payload is there.
void SocketExchange::unpack(Peer& peer) {
  while (!peer.incoming.empty() && error_.empty()) {
    const Peer::Incoming& first = peer.incoming.front();
    if (!peer.in_payload) {
      Header header;
      if (peer.filled - peer.unpacked < sizeof(header)) return;
      std::memcpy(&header, peer.buffer + peer.unpacked, sizeof(header));
      const std::string rank = "socket exchange: rank " + std::to_string(peer.rank);
      if (header.magic != kMagic)
        error_ =
            rank + " sent bytes that are no message of an exchange, before exchange " + std::to_string(first.number);
      else if (header.number != first.number)
        error_ = rank + " sent exchange " + std::to_string(header.number) + " and exchange " +
                 std::to_string(first.number) + " was expected";
      else if (header.bytes != first.bytes)
        error_ = rank + " sent " + std::to_string(header.bytes) + " bytes in exchange " + std::to_string(first.number) +
                 " and " + std::to_string(first.bytes) + " were expected";
      if (!error_.empty()) return;
      peer.unpacked += sizeof(header);
      peer.in_payload = true;
      peer.received = 0;
    }
    const size_t bytes = std::min(first.bytes - peer.received, peer.filled - peer.unpacked);
    if (bytes) std::memcpy(first.out + peer.received, peer.buffer + peer.unpacked, bytes);
    peer.unpacked += bytes;
    peer.received += bytes;
    if (peer.received < first.bytes) return;
    peer.incoming.pop_front();
    peer.in_payload = false;
    ++peer.received_exchanges;
  }
}

void SocketExchange::fail(const Peer& peer, const std::string& what) {
  const std::string rank = "rank " + std::to_string(peer.rank);
  if (error_.empty())
    error_ =
        "socket exchange: " + (what.empty() ? rank + " has left" : "the connection to " + rank + " broke: " + what);
}

// Whether a turn now would move bytes, as far as is known.
bool SocketExchange::can_move() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) {
    return (peer->is_writable && !peer->outgoing.empty()) || (peer->is_readable && !peer->incoming.empty());
  });
}

// How long wait() may still wait for a byte of the peers that it needs (-1: without limit). Fails when that is over.
int SocketExchange::milliseconds_left(uint32_t number, Clock::time_point start) {
  if (!(timeout_ > 0)) return -1;
  std::vector<size_t> ranks;
  for (auto& peer : peers_) {
    if (static_cast<int32_t>(number - peer->sent_exchanges) <= 0 &&
        static_cast<int32_t>(number - peer->received_exchanges) <= 0)
      continue;
    ranks.push_back(peer->rank);
    start = std::max(start, peer->last_progress);
  }
  const double left = timeout_ - std::chrono::duration<double>(Clock::now() - start).count();
  if (left > 0) return static_cast<int>(std::min(std::ceil(left * 1000), double{INT_MAX}));
  std::ostringstream what;
  what << "socket exchange: timed out after " << timeout_ << " s waiting for " << (ranks.size() > 1 ? "ranks" : "rank");
  std::sort(ranks.begin(), ranks.end());
  for (size_t i = 0; i < ranks.size(); ++i) what << (i ? ", " : " ") << ranks[i];
  failure_ = what.str();
  return 0;
}

}  // namespace hotrow
